"""`Types`: what each malloc block is: by its vtable, its part in a container, its pool, its first words, else its size.

Measured is what the program itself wrote down: the class that a vtable names, a pool found by its structure, a Lua
object. Everything else is inferred: it looks like that.
"""
from __future__ import annotations

import re
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .. import channel
from ..heaps.glibc_heap import GlibcHeap
from ..heaps.nginx_pool import KINDS, Nginx
from ..kernels import chunks, containers, luajit, pools, types as kernel
from ..kernels.pointers import NO_NODE
from ..target.layout import struct
from ..target.target import Target
from . import openssl
from .classes import Classes, are_arrays
from .containers import buffer_of, parts, signed
from .holders import take_objects_out
from .nodes import Nodes

TILE = 100_000                  # rows a kernel call
MOST_WORDS = 1 << 15            # different first words that are told apart
MEASURED, INFERRED = "measured", "inferred"
# Kinds of types.
CLASS, CONTAINER, LIST, POOL, OPENSSL = "C++ classes", "std containers", "linked lists", "nginx pools", "OpenSSL"
LUA, GLIBC, POINTER, CONTENTS, SIZE = "Lua", "glibc", "by first word", "by contents", "by size"
_PARTS = {containers.LINK: "list node (doubly linked)", containers.VECTOR: "std::vector buffer",
          containers.STRING: "std::string buffer", containers.BUCKETS: "std::unordered_map/set buckets",
          containers.HASH_NODE: "std::unordered_map/set node", containers.DEQUE_MAP: "std::deque map",
          containers.DEQUE_CHUNK: "std::deque chunk", containers.LIST_NODE: "std::list node",
          containers.LIST_HEADER: "std::list header",
          containers.TREE_NODE: "std::map/set node"}
# Of Lua objects that are malloc blocks: 2 * kind, and one more for the block in which the object itself begins.
_LUA_PARTS = {2 * luajit.THREAD + 1: "Lua thread (lua_State)", 2 * luajit.THREAD: "stack of a Lua thread",
              2 * luajit.TAB: "array or hash part of a Lua table"}
_BY_SIZE = -2                   # no number yet: the size will name it
_HEAD = struct(16, one=(0, "u8"), two=(8, "u8"))


class TypeName(NamedTuple):
    """One type: its name, whether that is "measured" or "inferred", and which kind of type it is."""

    name: str
    known: str
    kind: str


def of(target: Target, heaps: list[GlibcHeap], nginx: Nginx | None, vms: list = ()) -> "Types":
    """The types of the blocks of `heaps`; nothing is looked at before it is asked for. `vms`: the Lua VMs."""
    return Types(target, heaps, nginx, list(vms))


class Types:
    """Types as numbers (int32) into `names`, -1 for blocks that are not in use.

    `of_rows` looks at the given blocks alone, and knows no containers, nor Lua's objects. `numbers` looks at all
    memory; then `of_rows` knows what it found.
    """

    def __init__(self, target: Target, heaps: list[GlibcHeap], nginx: Nginx | None, vms: list):
        self.target, self.heaps, self.nginx, self.vms = target, heaps, nginx, vms
        self.names: list[TypeName] = []
        self._number_of: dict[TypeName, int] = {}
        self._by_word: dict[int, int] = {}               # first word -> number, or _BY_SIZE
        self._classes = Classes(target)

    def of_rows(self, heap: int, rows: np.ndarray) -> np.ndarray:
        """The types of these block rows of heap number `heap`."""
        if "numbers" in vars(self):
            return self.numbers[heap][rows]
        blocks = self.heaps[heap].blocks
        seen = np.where(blocks.state[rows] == chunks.IN_USE, np.uint8(0), np.uint8(NO_NODE))
        address, size = blocks.address[rows], blocks.size[rows]
        near = np.minimum(size, np.uint64(8 * kernel.ZERO_WORDS))
        self.target.space.table(zip(address.tolist(), (address + near).tolist()))
        return self._owned(heap, rows, self._by_words(address, size, seen))

    @cached_property
    def numbers(self) -> list[np.ndarray]:
        """The type of each block, for each heap."""
        nodes = Nodes(self.target, self.heaps)
        lua = [(vm, take_objects_out(vm, nodes)) for vm in self.vms]
        part = parts(nodes, self.vms)
        numbers = self._by_words(nodes.address, nodes.size, nodes.seen)
        known = [self._number(name, INFERRED, LIST if part == containers.LINK else CONTAINER)
                 for part, name in sorted(_PARTS.items())]
        rows = np.flatnonzero(part)
        numbers[rows] = np.array(known, np.int32)[part[rows] - 1]
        for vm, pairs in lua:
            row, one = pairs.T
            begins = nodes.address[row] == vm.objects.address[one].view(np.uint64)
            form = 2 * vm.objects.kind[one].astype(np.int64) + begins
            for each in np.unique(form).tolist():
                name = _LUA_PARTS.get(each, f"Lua {luajit.KINDS.get(each >> 1, 'object')}")
                numbers[row[form == each]] = self._number(name, MEASURED, LUA)
        every = [np.arange(len(heap.blocks)) for heap in self.heaps]
        return [self._owned(k, rows, numbers[nodes.of_heap(k, rows)]) for k, rows in enumerate(every)]

    def _number(self, name: str, known: str, kind: str) -> int:
        """The number of a type."""
        one = TypeName(name, known, kind)
        if one not in self._number_of:
            self._number_of[one] = len(self.names)
            self.names.append(one)
        return self._number_of[one]

    # -- whose a block is ----------------------------------------------------------------------------------------------
    def _owned(self, heap: int, rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """`numbers` of these rows of a heap, with those of pools, of Lua's states and of glibc itself put in."""
        blocks = self.heaps[heap].blocks
        address = blocks.address[rows]
        own = self.heaps[heap].metadata(), "thread cache (tcache_perthread_struct)", GLIBC
        states = [vm.main for vm in self.vms], "GG_State (lua_State, global_State)", LUA
        for places, name, kind in (own, states):
            mine = np.isin(address, np.array(places, np.uint64)) & (blocks.state[rows] == chunks.IN_USE)
            if mine.any():
                numbers[mine] = self._number(name, MEASURED, kind)
        if self.nginx and len(self.nginx.addresses):
            first, owner = self.nginx.owners[heap]
            mine = np.flatnonzero(owner[rows])
            pool = first + owner[rows[mine]] - 1
            ends, _ = self.target.space.gather(address[mine] + np.uint64(8), np.uint64)
            large = ends != address[mine] + self.nginx.table[pool, pools.SIZE].astype(np.uint64)
            form = 2 * self._pool_kinds[pool].astype(np.int64) + large
            for each in np.unique(form).tolist():
                name = f"nginx pool {'large allocation' if each & 1 else 'block'} ({KINDS[each >> 1]})"
                numbers[mine[form == each]] = self._number(name, MEASURED, POOL)
        return numbers

    @cached_property
    def _pool_kinds(self) -> np.ndarray:
        return self.nginx.kinds()

    # -- by words ------------------------------------------------------------------------------------------------------
    def _by_words(self, address: np.ndarray, size: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """The types of blocks by their first words, their contents or their size."""
        buffer, modules = buffer_of(self.target.space), signed((self._classes.starts, self._classes.ends))
        columns = (*signed((address, size)), seen)
        code, n, room = np.empty(len(address), np.int32), 0, min(MOST_WORDS, len(address) + 1)
        found, slots = np.zeros(room, np.int64), np.full(2 << room.bit_length(), -1, np.int32)
        for first in range(0, len(address), TILE):
            tile = slice(first, first + TILE)
            n = int(kernel.heads(*buffer, *modules, *(column[tile] for column in columns), code[tile], slots, found, n))
            channel.progress(f"first words of {min(first + TILE, len(address)):,} blocks read")
        known = {kernel.NOT_IN_USE: -1, kernel.TEXT: self._number("text", INFERRED, CONTENTS),
                 kernel.ZEROS: self._number("zeros", INFERRED, CONTENTS)}
        plain = [known.get(value, _BY_SIZE) for value in range(kernel.NOT_IN_USE, kernel.FOUND)]
        named = self._of_words(found[:n].view(np.uint64))
        numbers = np.array(plain + named, np.int32)[code - kernel.NOT_IN_USE]
        for value, look in ((kernel.SECOND, self._by_second_word), (kernel.INTEGER, self._certificates)):
            rows = np.flatnonzero(code == value)
            if len(rows):
                numbers[rows] = look(address[rows], size[rows])
        rows = np.flatnonzero(numbers == _BY_SIZE)
        if len(rows):
            values, number = _distinct(size[rows])
            known = [self._number(f"size {value}", INFERRED, SIZE) for value in values.tolist()]
            numbers[rows] = np.array(known, np.int32)[number]
        return numbers

    def _of_words(self, words: np.ndarray) -> list[int]:
        """The types that first words which point into modules tell, or _BY_SIZE."""
        new = np.array([word for word in words.tolist() if word not in self._by_word], np.uint64)
        for word, name in zip(new.tolist(), self._classes.names(new)):
            self._by_word[word] = self._number(name, MEASURED, CLASS) if name else self._of_word(word)
        return [self._by_word[word] for word in words.tolist()]

    def _of_word(self, word: int) -> int:
        """The type that a first word tells which has no RTTI."""
        if any(heap.main <= word < heap.main + heap.state.itemsize for heap in self.heaps):
            return _BY_SIZE                              # a link of a bin, from when the block was free
        symbol = self.target.name_of(word)
        name = self._classes.of_symbol(symbol)
        if name:
            return self._number(name, MEASURED, CLASS)
        if "!" not in symbol and not self._leads_to_code(word):
            symbol = f"data of {symbol.rpartition('+')[0]}"              # there may be thousands of strings
        symbol = re.sub(r"(?<=[^!])\+0x[0-9a-f]+\Z", "", symbol) if "!" in symbol else symbol     # one variable, one type
        return self._number(f"first word: {symbol}", INFERRED, POINTER)

    def _leads_to_code(self, word: int) -> bool:
        """Whether an address is code's, or what lies there is, as in a table of functions."""
        places = [self.target.mapping_at(value or 0) for value in (word, self.target.word(word))]
        return any(place and "x" in place.perms for place in places)

    # -- by the second word --------------------------------------------------------------------------------------------
    def _by_second_word(self, address: np.ndarray, size: np.ndarray) -> np.ndarray:
        """The types of blocks whose second word points into a module: SSL and SSL_CTX, where it is an SSL_METHOD, and
        arrays of objects behind their number. Else _BY_SIZE."""
        heads, _ = self.target.space.gather(address, _HEAD)
        words, word = np.unique(heads["two"], return_inverse=True)
        numbers = np.full(len(address), _BY_SIZE, np.int32)
        large = openssl.are_methods(self.target, words)[word] & (size >= np.uint64(openssl.LEAST_SIZE))
        ssl = large & np.isin(heads["one"], np.array(openssl.VERSIONS, np.uint64))
        for mine, name in ((ssl, "OpenSSL SSL"), (large & ~ssl, "OpenSSL SSL_CTX")):
            if mine.any():
                numbers[mine] = self._number(name, INFERRED, OPENSSL)
        arrays = np.flatnonzero(are_arrays(self.target, address, size, heads))
        vtables = np.unique(word[arrays])
        for vtable, name in zip(vtables.tolist(), self._classes.names(words[vtables])):
            name = name or self._classes.of_symbol(self.target.name_of(int(words[vtable])))
            if name:
                numbers[arrays[word[arrays] == vtable]] = self._number(f"{name}[]", INFERRED, CLASS)
        return numbers

    def _certificates(self, address: np.ndarray, size: np.ndarray) -> np.ndarray:
        """The types of blocks whose second word is the length and type of an ASN1_INTEGER: X509, else _BY_SIZE."""
        good = openssl.are_certificates(self.target, address, size)
        return np.where(good, self._number("OpenSSL X509", INFERRED, OPENSSL), _BY_SIZE)


def _distinct(size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`np.unique(size, return_inverse=True)` of chunk sizes; those below a megabyte are counted rather than sorted."""
    unit = (size >> np.uint64(4)).astype(np.int64)
    large = np.flatnonzero(unit >= 1 << 16)
    values, number = np.unique(size[large], return_inverse=True)
    unit[large] = 0
    there = np.bincount(unit) > 0
    there[0] = False                                     # no chunk has no size
    numbers = (np.cumsum(there) - 1)[unit]
    numbers[large] = np.count_nonzero(there) + number
    return np.concatenate([np.flatnonzero(there).astype(np.uint64) << np.uint64(4), values]), numbers
