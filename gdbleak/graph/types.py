"""`Types`: what each malloc block is, by its vtable, its part in a container, its pool, its first words, or else its size.

Measured is what the program itself wrote down: the class that a vtable names, a pool found by its structure, a Lua object.
Everything else is inferred: it looks like that.
"""
from __future__ import annotations

import re
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .. import channel
from ..heaps.blocks import reserve
from ..heaps.glibc_heap import GlibcHeap
from ..kernels import chunks, luajit, pools, types as kernel
from ..kernels.pointers import NO_NODE
from ..heaps.nginx_pool import KINDS, Nginx
from ..target.address_space import Absent
from ..target.layout import struct
from ..target.target import Target
from . import roots
from .holders import take_objects_out
from .nodes import Nodes

TILE = 100_000                  # rows a kernel call
VISITS = 2_000_000              # blocks of containers a kernel call
SPAN = 64 << 20                 # bytes of other memory that are looked at as one structure
MOST_WORDS = 1 << 15            # different first words that are told apart
MEASURED, INFERRED = "measured", "inferred"
CLASS, CONTAINER, LIST, POOL, OPENSSL, LUA, GLIBC, POINTER, CONTENTS, SIZE = (
    "C++ classes", "std containers", "linked lists", "nginx pools", "OpenSSL", "Lua", "glibc", "by first word", "by contents",
    "by size")
_PARTS = {kernel.LINK: "list node (doubly linked)", kernel.VECTOR: "std::vector buffer", kernel.STRING: "std::string buffer",
          kernel.BUCKETS: "std::unordered_map/set buckets", kernel.HASH_NODE: "std::unordered_map/set node",
          kernel.DEQUE_MAP: "std::deque map", kernel.DEQUE_CHUNK: "std::deque chunk", kernel.LIST_NODE: "std::list node",
          kernel.TREE_NODE: "std::map/set node"}
# Of Lua objects that are malloc blocks: 2 * kind, and one more for the block in which the object itself begins.
_LUA_PARTS = {2 * luajit.THREAD + 1: "Lua thread (lua_State)", 2 * luajit.THREAD: "stack of a Lua thread",
              2 * luajit.TAB: "array or hash part of a Lua table"}
_BY_SIZE = -2                   # no number yet: the size will name it
_MANGLED = re.compile(rb"\*?((?:\d|[NSZ])[A-Za-z0-9_.$]*)\Z")      # a type's name as the Itanium C++ ABI begins it
_METACLASSES = re.compile(rb"N10__cxxabiv1\d+__(class|si_class|vmi_class)_type_infoE\Z")
_VTABLE = re.compile(r"[^!]*!(?:vtable for (.+)|(_ZTV.+))\+0x[0-9a-f]+\Z")
_TYPEINFO = struct(16, vtable=(0, "u8"), name=(8, "u8"))
# SSL_METHOD, measured on OpenSSL 3.0.19: the version (with two words for any TLS, any DTLS), then flags, then functions.
_METHOD = struct(64, version=(0, "u4"), functions=(16, "(6,)u8"))
_VERSIONS = (0x10000, 0x1ffff, 0x300, 0x301, 0x302, 0x303, 0x304, 0xfeff, 0xfefd, 0x100)
_LEAST_SSL = 1024               # bytes: SSL_CTX has 1624 and SSL 7608 of them
# X509, measured on OpenSSL 3.0.19: version, serial number, algorithm, issuer, times, subject and key; then the signature.
_X509 = struct(160, serial_type=(12, "u4"), algorithm=(32, "u8"), issuer=(48, "u8"), before=(56, "u8"), after=(64, "u8"),
               subject=(72, "u8"), key=(80, "u8"), signature_type=(156, "u4"))
_TIMES, _BIT_STRING = (23, 24), 3          # V_ASN1_UTCTIME, V_ASN1_GENERALIZEDTIME; V_ASN1_BIT_STRING


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

    `of_rows` looks at the given blocks alone, and knows no containers; `numbers` looks at all memory, and then `of_rows` knows
    what it found.
    """

    def __init__(self, target: Target, heaps: list[GlibcHeap], nginx: Nginx | None, vms: list):
        self.target, self.heaps, self.nginx, self.vms = target, heaps, nginx, vms
        self.names: list[TypeName] = []
        self._number_of: dict[TypeName, int] = {}
        self._by_word: dict[int, int] = {}                 # first word -> number, or _BY_SIZE
        self._classes: dict[int, str] = {}                 # typeinfo -> class, "" for what is none
        modules = sorted((module.start, module.end) for module in target.modules) or [(1 << 62, 1 << 62)]
        self._starts, self._ends = (np.array([pair[k] for pair in modules], np.int64) for k in (0, 1))
        self._ends[:-1] = np.minimum(self._ends[:-1], self._starts[1:])

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
        parts = self._parts(nodes)
        numbers = self._by_words(nodes.address, nodes.size, nodes.seen)
        known = np.array([-1] + [self._number(_PARTS[part], INFERRED, LIST if part == kernel.LINK else CONTAINER)
                                 for part in sorted(_PARTS)], np.int32)
        rows = np.flatnonzero(parts)
        numbers[rows] = known[parts[rows]]
        for vm, pairs in lua:
            row, one = pairs.T
            kinds = vm.objects.kind[one].astype(np.int64)
            inside = nodes.address[row] == vm.objects.address[one].view(np.uint64)
            for form in np.unique(2 * kinds + inside).tolist():
                name = _LUA_PARTS.get(form, f"Lua {luajit.KINDS.get(form >> 1, 'object')}")
                numbers[row[2 * kinds + inside == form]] = self._number(name, MEASURED, LUA)
        return [self._owned(number, rows, numbers[nodes.of_heap(number, rows)])
                for number, rows in enumerate(np.arange(len(heap.blocks)) for heap in self.heaps)]

    def _number(self, name: str, known: str, kind: str) -> int:
        """The number of a type."""
        one = TypeName(name, known, kind)
        if one not in self._number_of:
            self._number_of[one] = len(self.names)
            self.names.append(one)
        return self._number_of[one]

    # -- by whom a block belongs to ------------------------------------------------------------------------------------
    def _owned(self, number: int, rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """`numbers` of these rows of a heap, with those of pools, of Lua's state and of glibc itself."""
        heap = self.heaps[number]
        blocks = heap.blocks
        address = blocks.address[rows]
        for places, what, kind in ((heap.metadata(), "thread cache (tcache_perthread_struct)", GLIBC),
                                   ([vm.main for vm in self.vms], "GG_State (lua_State, global_State)", LUA)):
            mine = np.isin(address, np.array(places, np.uint64)) & (blocks.state[rows] == chunks.IN_USE)
            if mine.any():
                numbers[mine] = self._number(what, MEASURED, kind)
        if self.nginx and len(self.nginx.addresses):
            first, owner = self.nginx.owners[number]
            mine = np.flatnonzero(owner[rows])
            pool = first + owner[rows[mine]] - 1
            ends, _ = self.target.space.gather(address[mine] + np.uint64(8), np.uint64)
            large = ends != address[mine] + self.nginx.table[pool, pools.SIZE].astype(np.uint64)
            form = 2 * self.nginx.kinds()[pool].astype(np.int64) + large
            for one in np.unique(form).tolist():
                name = f"nginx pool {'large allocation' if one & 1 else 'block'} ({KINDS[one >> 1]})"
                numbers[mine[form == one]] = self._number(name, MEASURED, POOL)
        return numbers

    # -- by words ------------------------------------------------------------------------------------------------------
    def _by_words(self, address: np.ndarray, size: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """The types of blocks by their first words, their contents or their size."""
        buffer = _buffer(self.target.space)
        signed = _signed((address, size))
        code, n = np.empty(len(address), np.int32), 0
        room = min(MOST_WORDS, len(address) + 1)
        found, slots = np.zeros(room, np.int64), np.full(2 << room.bit_length(), -1, np.int32)
        for first in range(0, len(address), TILE):
            tile = slice(first, first + TILE)
            n = int(kernel.heads(*buffer, self._starts, self._ends, *(column[tile] for column in signed), seen[tile], code[tile],
                                 slots, found, n))
            channel.progress(f"first words of {min(first + TILE, len(address)):,} blocks read")
        contents = [-1, _BY_SIZE, _BY_SIZE, self._number("text", INFERRED, CONTENTS), self._number("zeros", INFERRED, CONTENTS),
                    _BY_SIZE, _BY_SIZE]
        numbers = np.array(contents + self._of_words(found[:n].view(np.uint64)), np.int32)[code + 1]
        for value, what in ((kernel.SECOND, self._by_second_word), (kernel.INTEGER, self._certificates)):
            rows = np.flatnonzero(code == value)
            if len(rows):
                numbers[rows] = what(address[rows], size[rows])
        rows = np.flatnonzero(numbers == _BY_SIZE)
        numbers[rows] = self._of_sizes(size[rows])
        return numbers

    def _of_sizes(self, size: np.ndarray) -> np.ndarray:
        """The types of blocks of which nothing but the size is known."""
        values, number = _distinct(size)
        return np.array([self._number(f"size {value}", INFERRED, SIZE) for value in values.tolist()] or [0], np.int32)[number]

    def _of_words(self, words: np.ndarray) -> list[int]:
        """The types that first words which point into modules tell."""
        new = np.array([word for word in words.tolist() if word not in self._by_word], np.uint64)
        own = [(heap.main, heap.main + heap.state.itemsize) for heap in self.heaps]
        for word, name in zip(new.tolist(), self._class_names(new)):
            if any(start <= word < end for start, end in own):
                self._by_word[word] = _BY_SIZE             # a link of a bin, from when the block was free
                continue
            symbol = "" if name else self.target.name_of(word)
            name = name or self._of_vtable(symbol)
            self._by_word[word] = self._number(name, MEASURED, CLASS) if name else \
                self._number(f"first word: {symbol if self._tells(symbol, word) else self._module(word)}", INFERRED, POINTER)
        return [self._by_word[word] for word in words.tolist()]

    def _tells(self, symbol: str, word: int) -> bool:
        """Whether a place in a module is worth a type of its own: it has a name, or is code, or leads to code, as a table of
        functions does. There may be thousands of strings."""
        places = [self.target.mapping_at(value or 0) for value in (word, self.target.word(word))]
        return "!" in symbol or any(place and "x" in place.perms for place in places)

    def _module(self, word: int) -> str:
        module = self.target.module_at(word)
        return f"data of {module.name}" if module else "data"

    # -- C++ classes ---------------------------------------------------------------------------------------------------
    def _class_names(self, vtables: np.ndarray) -> list[str]:
        """The class of each vtable (an address as objects have it, uint64) by its RTTI, "" for what is no vtable.

        Two words in front of a primary vtable is the offset to the whole object, zero; one word, the class's typeinfo.
        """
        heads, present = self.target.space.gather(vtables - np.uint64(16), struct(16, top=(0, "u8"), info=(8, "u8")))
        maybe = np.flatnonzero(present & (heads["top"] == 0) & self._in_modules(heads["info"]))
        infos = np.unique(heads["info"][maybe])
        rows, present = self.target.space.gather(infos, _TYPEINFO)
        sound = present & self._in_modules(rows["vtable"]) & self._in_modules(rows["name"])
        for info, vtable, name in zip(infos[sound].tolist(), rows["vtable"][sound].tolist(), rows["name"][sound].tolist()):
            if info not in self._classes:
                self._classes[info] = self._class_name(vtable, name)
        names = [""] * len(vtables)
        for k in maybe.tolist():
            names[k] = self._classes.get(int(heads["info"][k]), "")
        return names

    def _of_vtable(self, symbol: str) -> str:
        """The class whose vtable a symbol says to be (there may be no RTTI), or ""."""
        found = _VTABLE.match(symbol)
        return found[1] or self._demangled(found[2], "vtable for ") if found else ""

    def _class_name(self, vtable: int, name: int) -> str:
        """The class of a typeinfo, given its own vtable and its name's address; "" when it is none."""
        mangled = _MANGLED.match(self._text(name))
        if not mangled:
            return ""
        metaclass = self.target.word((self.target.word(vtable - 8) or 0) + 8)
        title = self._text(metaclass) if metaclass else b""
        if title and not _METACLASSES.match(title):        # absent on a stripped core of a file that is not here
            return ""
        return self._demangled("_ZTI" + mangled[1].decode(), "typeinfo for ")

    def _demangled(self, symbol: str, prefix: str) -> str:
        """What a C++ symbol is of; without a debugger, its mangled name."""
        plain = self.target.debugger.demangle(symbol) if self.target.debugger else None
        return plain[len(prefix):] if plain and plain.startswith(prefix) else symbol[4:]

    def _text(self, address: int) -> bytes:
        try:
            return self.target.space.cstring(address)
        except Absent:
            return b""

    def _in_modules(self, values: np.ndarray) -> np.ndarray:
        k = np.searchsorted(self._starts.view(np.uint64), values, "right") - 1
        return (k >= 0) & (values < self._ends.view(np.uint64)[np.maximum(k, 0)])

    # -- by the second word --------------------------------------------------------------------------------------------
    def _by_second_word(self, address: np.ndarray, size: np.ndarray) -> np.ndarray:
        """The types of blocks whose second word points into a module: arrays of objects behind their length, and
        OpenSSL's SSL and SSL_CTX, whose second word is an SSL_METHOD."""
        heads, _ = self.target.space.gather(address, struct(16, one=(0, "u8"), two=(8, "u8")))
        words, word = np.unique(heads["two"], return_inverse=True)
        numbers = np.full(len(address), _BY_SIZE, np.int32)
        large = self._are_methods(words)[word] & (size >= np.uint64(_LEAST_SSL))
        ssl = large & np.isin(heads["one"], np.array(_VERSIONS, np.uint64))
        for mine, name in ((ssl, "OpenSSL SSL"), (large & ~ssl, "OpenSSL SSL_CTX")):
            if mine.any():
                numbers[mine] = self._number(name, INFERRED, OPENSSL)
        maybe = np.flatnonzero((heads["one"] >= 2) & (heads["one"] < size >> np.uint64(3)))
        arrays = maybe[self._are_arrays(address[maybe], size[maybe], heads[maybe])]
        kinds = np.unique(word[arrays])
        for kind, name in zip(kinds.tolist(), self._class_names(words[kinds])):
            name = name or self._of_vtable(self.target.name_of(int(words[kind])))
            if name:
                numbers[arrays[word[arrays] == kind]] = self._number(f"{name}[]", INFERRED, CLASS)
        return numbers

    def _are_arrays(self, address: np.ndarray, size: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """Which blocks hold a length and so many objects: the second of them has the same vtable as the first."""
        found = np.zeros(len(address), bool)
        largest = (size - np.uint64(16)) // heads["one"] // np.uint64(8)
        for less in range(4):                              # malloc gives up to 39 bytes more than were asked for
            width = np.maximum(largest, np.uint64(less + 1)) - np.uint64(less)
            words, present = self.target.space.gather(address + np.uint64(8) + np.uint64(8) * width, np.uint64)
            found |= present & (words == heads["two"])
        return found

    def _are_methods(self, words: np.ndarray) -> np.ndarray:
        """Which addresses are those of an SSL_METHOD."""
        methods, present = self.target.space.gather(words, _METHOD)
        good = present & np.isin(methods["version"], _VERSIONS)
        for k in np.flatnonzero(good).tolist():
            module = self.target.module_at(int(words[k]))
            places = [self.target.mapping_at(int(function)) for function in methods["functions"][k]]
            good[k] = module is not None and all(place and "x" in place.perms and module.start <= place.start < module.end
                                                 for place in places)
        return good

    def _certificates(self, address: np.ndarray, size: np.ndarray) -> np.ndarray:
        """The types of blocks whose second word is the length and type of an ASN1_INTEGER: X509 where the rest fits."""
        rows, present = self.target.space.gather(address, _X509)
        good = present & (size > np.uint64(_X509.itemsize)) & (rows["signature_type"] == _BIT_STRING)
        for name in ("algorithm", "issuer", "subject", "key"):
            _, there = self.target.space.gather(rows[name], np.uint64)
            good &= there
        for name in ("before", "after"):
            times, there = self.target.space.gather(rows[name], struct(8, length=(0, "u4"), type=(4, "u4")))
            good &= there & (np.isin(times["type"], _TIMES) | (times["length"] == 0))
        numbers = np.full(len(address), _BY_SIZE, np.int32)
        if good.any():
            numbers[good] = self._number("OpenSSL X509", INFERRED, OPENSSL)
        return numbers

    # -- containers ----------------------------------------------------------------------------------------------------
    def _parts(self, nodes: Nodes) -> np.ndarray:
        """Which part of a container or list each row of `nodes` is (uint8, as the kernels say)."""
        kind = np.zeros(len(nodes), np.uint8)
        if not len(nodes):
            return kind
        nodes.buffer                                       # loads the heaps
        if self._is_cplusplus:
            self._containers(nodes, kind)
        columns = *_buffer(self.target.space), *_signed((nodes.address, nodes.size)), nodes.seen, kind
        for ends_too in (0, 1):
            for first in range(0, len(nodes), TILE):
                kernel.links(*columns, first, min(first + TILE, len(nodes)), ends_too)
            if not (kind == kernel.LINK).any():
                break
        return kind

    def _containers(self, nodes: Nodes, kind: np.ndarray) -> None:
        """Mark the parts of libstdc++'s containers in `kind`."""
        areas = [(low, min(low + SPAN, area.end)) for area in roots.find_areas(self.target, self.heaps, self.vms)
                 for low in range(area.start + 7 & -8, area.end, SPAN)]
        self.target.space.table(areas)
        index = [_signed((column,))[0] if column.dtype == np.uint64 else column for column in nodes.index]
        fixed = (*_buffer(self.target.space), *index, nodes.seen)
        page, n = self.target.auxv.get(6, 4096), 0
        room = (int(nodes.size.sum()) + sum(high - low for low, high in areas)) // 8
        places, what = reserve(room, np.int64), reserve(room, np.uint8)
        used = np.flatnonzero(nodes.seen != NO_NODE)
        for first in range(0, len(used), TILE):
            rows = used[first:first + TILE]
            starts = nodes.address[rows].view(np.int64)
            ends = starts + nodes.size[rows].view(np.int64) - 8
            n = int(kernel.headers(*fixed, starts, ends, page, kind, places, what, n))
            channel.progress(f"{min(first + TILE, len(used)):,} blocks searched for containers")
        for low, high in areas:
            n = int(kernel.headers(*fixed, np.array([low]), np.array([high & -8]), page, kind, places, what, n))
        scratch, tried = reserve(len(nodes), np.int32), np.zeros(len(nodes), np.uint8)
        for follow, extra in ((kernel.containers, (page, kind, scratch)), (kernel.rings, (kind, tried, scratch))):
            done = 0
            while done < n:
                done = int(follow(*fixed, places, what, done, n, VISITS, *extra))
                channel.progress(f"{done:,} of {n:,} headers of containers followed")

    @cached_property
    def _is_cplusplus(self) -> bool:
        """Whether C++ runs here: its library is loaded, or the program contains it."""
        if any(module.name.startswith("libstdc++") for module in self.target.modules):
            return True
        main = self.target.executable()
        parts = self.target.space.present(main.start, main.end) if main else []
        return any(b"__class_type_infoE\0" in self.target.space.read(low, high - low) for low, high in parts)


def _signed(arrays) -> tuple:
    """The arrays as int64, as these kernels take them."""
    return tuple(array.view(np.int64) for array in arrays)


def _buffer(space) -> tuple:
    """(words, starts, ends, offsets) of what is there of a process's own half of the address space, as int64."""
    starts, ends, offsets = space.table()
    own = ends < np.uint64(1 << 63)                        # not vsyscall, which lies behind all else
    return _signed((space.words, starts[own], ends[own], offsets[own]))


def _distinct(size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`np.unique(size, return_inverse=True)` of chunk sizes; those below a megabyte are counted rather than sorted."""
    unit = (size >> np.uint64(4)).astype(np.int64)
    large = np.flatnonzero(unit >= 1 << 16)
    values, number = np.unique(size[large], return_inverse=True)
    unit[large] = 1 << 16
    there = np.bincount(unit, minlength=1)[:1 << 16] > 0
    numbers = (np.cumsum(there) - 1)[np.minimum(unit, len(there) - 1)]
    numbers[large] = np.count_nonzero(there) + number
    return np.concatenate([np.flatnonzero(there).astype(np.uint64) << np.uint64(4), values]), numbers
