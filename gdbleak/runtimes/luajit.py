"""LuaJIT: every VM of the target, all its collectable objects with the sizes it accounts, and what refers to what.

A VM is found by its shape: the main lua_State lies in front of its global_State and the two point to each other. Which
release and which reference size it is follows from where they do; the sum over all objects must then equal the VM's own
g->gc.total.
"""
from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from .. import channel
from ..heaps import lj_alloc
from ..heaps.blocks import Check, reserve
from ..heaps.glibc_heap import GlibcHeap, asked_for
from ..graph.graph import Graph
from ..kernels import chunks
from ..kernels import luajit as kernel
from ..target.address_space import Absent
from ..target.target import Target
from . import luajit_layouts as layouts

TILE = 200_000
GC_STATES = ("pause", "propagate", "atomic", "sweep strings", "sweep", "finalize")
_FINALIZER_ROOT = 38                                 # gcroot[38], where CTState has no `finalizer`
_MM_MODE = 3                                         # MM_mode: gcroot[3] is the string "__mode"


class Part(NamedTuple):
    """A block of memory that is no object and that gc.total counts: what it is, where, how many bytes."""

    name: str
    address: int
    size: int


@dataclass
class Objects:
    """Rows of all collectable objects: `address` (int64), `size` (int64, as LuaJIT accounts), `kind`,
    `marked` (uint8)."""

    address: np.ndarray
    size: np.ndarray
    kind: np.ndarray
    marked: np.ndarray
    slots: np.ndarray                                 # hash table: address -> row

    def __len__(self) -> int:
        return len(self.address)


@dataclass
class VM:
    """One Lua state: `main` is the address of its main lua_State, `g` of its global_State."""

    target: Target
    main: int
    g: int
    layout: SimpleNamespace
    found_by: str
    heaps: list[GlibcHeap] = field(default_factory=list)        # malloc's
    owner: str = ""                                   # the nginx module whose VM it is, when one's configuration names it
    notes: list[str] = field(default_factory=list)
    string_buckets: int = 0
    string_buckets_used: int = 0

    # -- reading -------------------------------------------------------------------------------------------------------
    def u32(self, address: int) -> int:
        """Raises Absent."""
        return int.from_bytes(self.target.space.read(address, 4), "little")

    def u8(self, address: int) -> int:
        """Raises Absent."""
        return self.target.space.read(address, 1)[0]

    def ref(self, address: int) -> int:
        """The reference (GCRef, MRef) at `address`. Raises Absent."""
        return self.target.space.word(address) if self.layout.gc64 else self.u32(address)

    def object_in(self, value: int) -> tuple[int, int]:
        """(type, address) of the object that a TValue refers to; (0, 0) when it is none."""
        value = value - (1 << 64) if value >> 63 else value
        tag = ~(value >> (47 if self.layout.gc64 else 32))
        if kernel.STR <= tag <= kernel.UDATA:
            return tag, value & ((1 << 47) - 1 if self.layout.gc64 else 0xffffffff)
        return 0, 0

    def string(self, address: int, limit: int = 4096) -> bytes:
        """The text of the GCstr at `address`, cut at `limit`. Raises Absent."""
        length = self.u32(address + self.layout.GCstr_len)
        return self.target.space.read(address + self.layout.GCstr_sizeof, min(length, limit))

    def row(self, address: int) -> int:
        """The row of the object that begins at `address`, or -1."""
        return kernel.find(self.objects.address, self.objects.slots, address)

    def row_holding(self, address: int) -> int:
        """The row of the object that has `address` among its bytes, in whichever of its blocks, or -1."""
        if self.main <= address < self.main + self.layout.L_sizeof:
            return self.row(self.main)
        start, size, row = self.blocks
        before = start <= address
        if not before.any():
            return -1
        last = int(np.argmax(np.where(before, start, 0)))
        return int(row[last]) if address < int(start[last] + size[last]) else -1

    def runs(self, pc: int) -> bool:
        """Whether code address `pc` is LuaJIT's own or machine code that it made."""
        target = self.target
        interpreter = target.module_at(target.word(self.main + self.layout.GG_dispatch) or 0)
        module, mapping = target.module_at(pc), target.mapping_at(pc)
        made = module is None and mapping is not None and "x" in mapping.perms and not mapping.path
        return made or (module is not None and module is interpreter)

    # -- what every runtime answers ------------------------------------------------------------------------------------
    @cached_property
    def total(self) -> int:
        """g->gc.total, LuaJIT's own counter."""
        at = self.g + self.layout.g_gc
        return self.target.space.word(at) if self.layout.gc64 else self.u32(at)

    @cached_property
    def state(self) -> str:
        """What the collector was doing."""
        number = self.u8(self.g + self.layout.g_gc + self.layout.GCState_state)
        return GC_STATES[number] if number < len(GC_STATES) else f"unknown ({number})"

    @cached_property
    def allocator(self) -> lj_alloc.LjAlloc | None:
        """LuaJIT's own allocator, None when the objects are malloc blocks (LUAJIT_USE_SYSMALLOC)."""
        try:
            allocd = self.target.space.word(self.g + self.layout.g_allocd)
        except Absent:
            return None
        heap = lj_alloc.read(self.target, allocd) if allocd else None
        if heap is not None:
            heap.direct = _direct_mappings(self, heap)
        return heap

    @cached_property
    def objects(self) -> Objects:
        """All collectable objects, dead ones included."""
        return _List(self).run()

    @cached_property
    def parts(self) -> list[Part]:
        """What gc.total counts besides objects."""
        return _parts(self)

    @property
    def buffers(self) -> dict[str, int]:
        """The same by name, in bytes."""
        sums: dict[str, int] = {}
        for part in self.parts:
            sums[part.name] = sums.get(part.name, 0) + part.size
        return sums

    @cached_property
    def accounted(self) -> int:
        """Our sum for gc.total."""
        return int(self.objects.size.sum()) + sum(self.buffers.values())

    def check(self) -> Check:
        """Our sum against g->gc.total."""
        return Check("gc.total", self.accounted, self.total)

    @cached_property
    def blocks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Every block of memory that the VM's lists and structures name, as `blocks` gives them."""
        return blocks(self)

    @cached_property
    def graph(self):
        """The references between the objects, `graph.Graph`, with the roots."""
        return _Graph(self).run()


# -- finding -----------------------------------------------------------------------------------------------------------
def find(target: Target, heaps: list[GlibcHeap]) -> list[VM]:
    """Every VM of the target, by the shape of GG_State at the beginning of an mspace or of a malloc block."""
    found: dict[int, VM] = {}
    for candidates, how in ((_in_mappings(target, heaps), "the shape of its GG_State in an mspace"),
                            (_in_blocks(heaps), "the shape of its GG_State in a malloc block")):
        for main in _plausible(target, candidates):
            vm = None if main in found else _vm_at(target, main, how)
            if vm is not None:
                vm.heaps = heaps
                found[main] = vm
    return [found[main] for main in sorted(found)]


def _in_mappings(target: Target, heaps: list[GlibcHeap]) -> np.ndarray:
    """Where a GG_State can lie at the beginning of an mspace:
    each page of anonymous memory that is not malloc's, behind its malloc_state."""
    taken = sorted((region.start, region.end) for heap in heaps for region in heap.regions)
    pages = []
    for mapping in target.mappings:
        if not mapping.writable or (mapping.path and not mapping.path.startswith("[")):
            continue
        low = mapping.start
        for start, end in taken[bisect.bisect_right(taken, (mapping.start,)):] + [(mapping.end, mapping.end)]:
            if start >= mapping.end:
                start = end = mapping.end
            for first, last in target.space.present(low, start) if low < start else ():
                pages.append(np.arange((first + 4095) & ~4095, last - 4096 + 1, 4096, dtype=np.uint64))
            low = max(low, end)
            if low >= mapping.end:
                break
    if not pages:
        return np.zeros(0, np.uint64)
    return (np.concatenate(pages)[:, None] + np.arange(0x370, 0x3a1, 16, dtype=np.uint64)).reshape(-1)


def _in_blocks(heaps: list[GlibcHeap]) -> np.ndarray:
    found = [heap.blocks.address[(heap.blocks.size > 5300) & (heap.blocks.size < 6500)] for heap in heaps]
    return np.concatenate(found) if found else np.zeros(0, np.uint64)


def _plausible(target: Target, candidates: np.ndarray) -> list[int]:
    """Those candidates at which a lua_State names a global_State that lies right behind it."""
    found: set[int] = set()
    for k in range(0, len(candidates), 1 << 18):
        part = candidates[k:k + (1 << 18)]
        refs, _ = target.space.gather(part + np.uint64(16), np.uint64)
        distance = refs - part
        found |= set(part[(distance >= 96) & (distance <= 160)].tolist())
        low = part[part < np.uint64(1 << 32)]
        if len(low):
            refs, _ = target.space.gather(low + np.uint64(8), np.uint32)
            distance = refs.astype(np.uint64) - low
            found |= set(low[(distance >= 64) & (distance <= 112)].tolist())
    return sorted(found)


def _vm_at(target: Target, main: int, how: str) -> VM | None:
    """The VM whose main lua_State is at `main`, with the layout that fits it; None when none does."""
    tables = [layouts.from_tables(family, gc64) for gc64 in (True, False) for family in range(len(layouts.FAMILIES))]
    known = layouts.from_debug_information(target.layouts)      # it may be another VM's: the best that fits is taken
    layout = max([known, *tables] if known else tables, key=lambda layout: _fits(target, main, layout))
    if not _fits(target, main, layout):
        return None
    vm = VM(target, main, main + layout.L_sizeof, layout, how)
    head, allocd = target.word(main - 8) or 0, target.word(vm.g + layout.g_allocd) or 0
    # The number of bytecodes differs from release to release, and with it GG_State's size: its own chunk knows it.
    size = (head & ~7) - 8
    # (With lj_alloc it is the first chunk behind the malloc_state.)
    if 0 < main - allocd < 1024 and abs(size - layout.GG_sizeof) <= 512:
        layout.GG_sizeof = size            # before anything is worked out with it
    return vm


def _fits(target: Target, main: int, layout: SimpleNamespace) -> int:
    """How well a layout fits the VM at `main`; 0: not at all."""
    vm = VM(target, main, main + layout.L_sizeof, layout, "")
    try:
        if vm.ref(main + layout.L_glref) != vm.g or vm.ref(vm.g + layout.g_mainthref) != main:
            return 0
        if vm.u8(main + layout.ref + 1) != kernel.THREAD or vm.u8(vm.g + layout.g_gc + layout.GCState_state) > 5:
            return 0
        head = vm.g + layout.g_uvhead
        ring = head + (16 if layout.gc64 else 8)          # GCupval.prev, .next of the ring of open upvalues
        following = vm.ref(ring + layout.ref)
        back = vm.ref(following + (16 if layout.gc64 else 8)) if following else 0
        score = 1 + 2 * (back == head)
        running = vm.ref(vm.g + layout.g_cur_L)
        score += running != 0 and vm.u8(running + layout.ref + 1) == kernel.THREAD
        dispatch = main + layout.GG_dispatch
        score += 2 * (target.is_code(target.word(dispatch)) and not target.is_code(target.word(dispatch - 8)))
        if layout.g_str >= 0:
            mask = vm.u32(vm.g + layout.g_str + 8)
        else:
            mask = vm.u32(vm.g + layout.g_strmask)
        score += mask & (mask + 1) == 0 and mask >= 255
        return score
    except Absent:
        return 0


# -- listing -----------------------------------------------------------------------------------------------------------
class _List:
    """One pass over a VM's lists of objects."""

    def __init__(self, vm: VM):
        self.vm, self.layout = vm, vm.layout
        room = max(vm.total // 16, 1 << 16) + (1 << 16) if vm.total < 1 << 40 else 1 << 24
        self.address, self.size = reserve(room, np.int64), reserve(room, np.int64)
        self.kind, self.marked = reserve(room, np.uint8), reserve(room, np.uint8)
        self.n = 0

    def run(self) -> Objects:
        vm = self.vm
        self.buffer = buffer_of(vm)
        self._strings()
        self._list(vm.g + self.layout.g_gc + self.layout.GCState_root, "the list of objects")
        self._list(vm.g + self.layout.g_gc + self.layout.GCState_mmudata, "the ring of what waits for its finalizer",
                   ring=True)
        n = self.n
        slots = np.full(1 << max(int(2 * n).bit_length(), 8), -1, np.int32)
        twice = kernel.index(self.address, n, slots)
        if twice:
            vm.notes.append(f"{twice:,} objects are listed twice: the lists of objects are damaged")
        return Objects(self.address[:n], self.size[:n], self.kind[:n], self.marked[:n], slots)

    def _list(self, head: int, name: str, ring: bool = False) -> None:
        vm, rows = self.vm, (self.address, self.size, self.kind, self.marked)
        o, f, types = vm.ref(head), vector(vm), ctype_sizes(vm)
        newest, end, budget = o, 0, 1 if ring else TILE          # of a ring the first object by itself, then to it
        while True:
            self.n, o, why = kernel.objects(*self.buffer, f, types, o, end, vm.main, budget, *rows, self.n)
            end, budget = newest if ring else 0, TILE
            if why == kernel.BAD and o == newest:
                vm.notes.append(f"the newest object, at {o:#x}, is in the list already and has no type yet")
                newest, o = 0, vm.ref(o)
                continue
            if why != kernel.BUDGET or self.n >= len(self.address) - 1:
                break
            channel.progress(f"{self.n:,} Lua objects listed")
        if why:
            what = {kernel.BAD: "what is no object", kernel.ABSENT: "memory that is not in the core",
                    kernel.BUDGET: "more objects than can be (is it a ring?)"}[why]
            vm.notes.append(f"{name} ends early: at {o:#x} it leads to {what}")

    def _strings(self) -> None:
        vm = self.vm
        table, mask = string_table(vm)
        if mask >= 1 << 28 or mask & (mask + 1):
            vm.notes.append(f"the string table's mask {mask:#x} cannot be: no strings are listed")
            return
        rows = self.address, self.size, self.kind, self.marked
        self.n, used, bad = kernel.strings(*self.buffer, vector(vm), table, mask + 1, *rows, 0)
        vm.string_buckets, vm.string_buckets_used = mask + 1, used
        if self.n != vm.u32(vm.g + (self.layout.g_str + 12 if self.layout.g_str >= 0 else self.layout.g_strnum)):
            self._strings_on_the_move(table, mask + 1)
        if bad > (vm.state == "sweep strings"):      # which follows the one chain that it is at by itself
            vm.notes.append(f"{bad:,} chains of the string table lead to what is no string, or out of the core")

    def _strings_on_the_move(self, table: int, buckets: int) -> None:
        """List the strings of the other table too, each once, where a stop has caught LuaJIT moving all strings into
        a table of twice or half the size: it is a chunk of that size that is full of strings."""
        vm, rows = self.vm, (self.address, self.size, self.kind, self.marked)
        for count in (2 * buckets, buckets // 2):
            for other in self._blocks_of(self.layout.ref * count):
                n, _, bad = kernel.strings(*self.buffer, vector(vm), other, count, *rows, self.n)
                if other != table and n > self.n and bad <= 1:
                    _, first = np.unique(self.address[:n], return_index=True)
                    for column in rows:
                        column[:len(first)] = column[first]
                    self.n = len(first)
                    vm.notes.append(f"LuaJIT is moving its strings from the table at {table:#x}, of {buckets:,} slots, "
                                    f"to one at {other:#x}, of {count:,}: those of both are listed")
                    return


    def _blocks_of(self, size: int) -> list[int]:
        """The addresses of the blocks in use that can be of `size` bytes."""
        vm = self.vm
        heap = lj_alloc.read(vm.target, vm.target.word(vm.g + self.layout.g_allocd) or 0)
        if heap is not None:
            chunk, _, least, most = lj_alloc.chunks(vm.target, heap)
            return (chunk[(least <= size) & (size <= most)] + 16).tolist()
        found = []
        for blocks in (heap.blocks for heap in vm.heaps):
            address = blocks.address[blocks.state == chunks.IN_USE].astype(np.int64)
            least, most = asked_for(address, blocks.size[blocks.state == chunks.IN_USE].astype(np.int64))
            found += address[(least <= size) & (size <= most)].tolist()
        return found


def string_table(vm: VM) -> tuple[int, int]:
    """(address, mask) of the hash table of all strings. Raises Absent."""
    layout, g = vm.layout, vm.g
    if layout.g_str >= 0:
        return vm.ref(g + layout.g_str), vm.u32(g + layout.g_str + 8)
    return vm.ref(g + layout.g_strhash), vm.u32(g + layout.g_strmask)


def strings_of(vm: VM, bucket: int, most: int = 1000) -> list[tuple[int, int]]:
    """(address, size) of the strings of one bucket of the string table, as far as its chain can be followed."""
    address, size, (kind, marked) = np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros((2, most), np.uint8)
    n, _, _ = kernel.strings(*buffer_of(vm), vector(vm), string_table(vm)[0] + vm.layout.ref * bucket, 1, address, size,
                             kind, marked, 0)
    return list(zip(address[:n].tolist(), size[:n].tolist()))


def buffer_of(vm: VM):
    """(bytes, halves, words, starts, ends, offsets) for the kernels."""
    space = vm.target.space
    ranges = [(m.start, m.end) for m in vm.target.mappings if m.writable and (not m.path or m.path.startswith("["))]
    return space.bytes, space.words.view(np.int32), space.words.view(np.int64), *space.signed_table(ranges)


def vector(vm: VM) -> np.ndarray:
    """The layout as the kernels take it."""
    return np.array([int(getattr(vm.layout, name)) for name in kernel.FIELDS], np.int64)


def ctype_state(vm: VM) -> int:
    """Address of the CTState, 0 when the FFI was never used."""
    return vm.ref(vm.g + vm.layout.g_ctype_state)


def ctype_table(vm: VM) -> tuple[int, int]:
    """(how many C types the VM knows, the bytes of the table that has them, with room for more)."""
    state, layout = ctype_state(vm), vm.layout
    try:
        return (vm.u32(state + layout.CTState_top), layout.CType_sizeof * vm.u32(state + layout.CTState_sizetab)) \
            if state else (0, 0)
    except Absent:
        return 0, 0


def ctype_sizes(vm: VM) -> np.ndarray:
    """The size of each C type by its number (int64), attributes resolved; of what has no size that of a pointer."""
    cached = vm.__dict__.get("_ctype_sizes")
    if cached is None:
        cached = vm.__dict__["_ctype_sizes"] = _ctype_sizes(vm)
    return cached


def _ctype_sizes(vm: VM) -> np.ndarray:
    try:
        state = ctype_state(vm)
        if not state:
            return np.zeros(0, np.int64)
        table, top = vm.target.space.word(state), vm.u32(state + vm.layout.CTState_top)
        step = vm.layout.CType_sizeof
        raw = np.frombuffer(vm.target.space.read(table, min(top, 1 << 16) * step), np.uint8).reshape(-1, step)
    except Absent:
        return np.zeros(0, np.int64)
    info = np.ascontiguousarray(raw[:, 0:4]).view(np.uint32)[:, 0].astype(np.int64)
    size = np.ascontiguousarray(raw[:, 4:8]).view(np.uint32)[:, 0].astype(np.int64)
    number = np.arange(len(info))
    for _ in range(32):                                # attributes (type 8) lead to the type they qualify
        attribute = info[number] >> 28 == 8
        if not attribute.any():
            break
        number = np.where(attribute, np.minimum(info[number] & 0xffff, len(info) - 1), number)
    return np.where(info[number] >> 28 <= 5, size[number], 8)


def _parts(vm: VM) -> list[Part]:
    """Raises Absent when the VM's own structures are not there."""
    layout, g, word = vm.layout, vm.g, vm.target.space.word
    jit, state = vm.main + layout.GG_J, ctype_state(vm)
    parts = [Part("GG_State", vm.main, layout.GG_sizeof),
             Part("string table", string_table(vm)[0], layout.ref * vm.string_buckets),
             _buffer(vm, "temporary buffer", g + layout.g_tmpbuf),
             Part("trace table", vm.ref(jit + layout.J_trace), layout.ref * vm.u32(jit + layout.J_sizetrace)),
             Part("snapshot buffers", word(jit + layout.J_snapbuf),
                  layout.SnapShot_sizeof * vm.u32(jit + layout.J_sizesnap)),
             Part("snapshot buffers", word(jit + layout.J_snapmapbuf), 4 * vm.u32(jit + layout.J_sizesnapmap))]
    low, high = vm.u32(jit + layout.J_irbotlim), vm.u32(jit + layout.J_irtoplim)
    parts.append(Part("IR buffer", word(jit + layout.J_irbuf) + 8 * low, 8 * (high - low)))
    if state:
        parts += [Part("C types", state, layout.CTState_sizeof),
                  Part("C types", word(state), layout.CType_sizeof * vm.u32(state + layout.CTState_sizetab)),
                  Part("C types", word(state + layout.CTState_cb_cbid), 2 * vm.u32(state + layout.CTState_cb_sizeid))]
    if layout.GCState_lightudseg >= 0:
        segments = vm.ref(g + layout.g_gc + layout.GCState_lightudseg)
        number = vm.u8(g + layout.g_gc + layout.GCState_lightudnum)
        parts.append(Part("light userdata segments", segments, 4 << max(number.bit_length(), 1) if segments else 0))
    return parts


def _buffer(vm: VM, name: str, at: int) -> Part:
    """What an SBuf at address `at` holds."""
    begin, end = vm.ref(at + vm.layout.SBuf_b), vm.ref(at + vm.layout.SBuf_e)
    return Part(name, begin, max(0, end - begin))


def blocks(vm: VM, least: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(address, size, row) of every block of memory of at least `least` bytes that the VM's lists and structures name:
    objects; the parts of tables that lie apart, stacks, what string buffers hold; and the VM's own parts, whose row is
    -1 (all int64). The main thread's structure is in GG_State."""
    layout, objects = vm.layout, vm.objects
    rows = np.flatnonzero((objects.size >= least) & (objects.address != vm.main))
    address, size, kind = objects.address[rows], objects.size[rows], objects.kind[rows]
    found = [(address, size, rows)]

    def values(of: np.ndarray, name: str, form: str = f"<u{layout.ref}") -> np.ndarray:
        at = of.astype(np.uint64) + np.uint64(getattr(layout, name))
        return vm.target.space.gather(at, form)[0].astype(np.int64)

    def apart(of: np.ndarray, name: str, bytes_of: np.ndarray, rows: np.ndarray) -> None:
        there = bytes_of > 0
        found.append((values(of[there], name), bytes_of[there], rows[there]))

    mine = kind == kernel.TAB
    colo, asize, hmask = (values(address[mine], f"GCtab_{name}", form)
                          for name, form in (("colo", "u1"), ("asize", "<u4"), ("hmask", "<u4")))
    size[mine] = layout.GCtab_sizeof + 8 * (colo & 0x7f)
    apart(address[mine], "GCtab_array", np.where((colo == 0) | (colo > 127), 8 * asize, 0), rows[mine])
    apart(address[mine], "GCtab_node", np.where(hmask > 0, 24 * (hmask + 1), 0), rows[mine])
    mine = kind == kernel.THREAD
    size[mine] = layout.L_sizeof
    threads = np.append(address[mine], vm.main)
    apart(threads, "L_stack", 8 * values(threads, "L_stacksize", "<u4"), np.append(rows[mine], vm.row(vm.main)))
    mine = kind == kernel.UDATA
    whole, size[mine] = size[mine], layout.GCudata_sizeof + values(address[mine], "GCudata_len", "<u4")
    apart(address[mine] + layout.GCudata_sizeof, "SBuf_b", whole - size[mine], rows[mine])
    found.append((np.array([part.address for part in vm.parts], np.int64),
                  np.array([part.size for part in vm.parts], np.int64), np.full(len(vm.parts), -1)))
    address, size, rows = map(np.concatenate, zip(*found))
    large = size >= max(least, 1)
    return address[large], size[large], rows[large]


def _direct_mappings(vm: VM, heap: lj_alloc.LjAlloc) -> list[tuple[int, int]]:
    """(start, size) of the mappings of single blocks, of which no list is kept: what is in them is known."""
    address, _, _ = blocks(vm, lj_alloc.SHRUNK)
    for segment in heap.segments:
        address = address[(address < segment.start) | (address >= segment.start + segment.size)]
    found = {lj_alloc.direct_mapping(vm.target, block) for block in address.tolist()}
    return sorted(mapping for mapping in found if mapping)


# -- references --------------------------------------------------------------------------------------------------------
class _Graph:
    """One pass over a VM's objects that makes their graph."""

    def __init__(self, vm: VM):
        self.vm, self.objects, self.layout = vm, vm.objects, vm.layout

    def run(self) -> Graph:
        vm, objects = self.vm, self.objects
        n = len(objects)
        begins = np.zeros(n + 1, np.int32)
        room = int(objects.size.sum()) // self.layout.ref + (1 << 16)
        targets, labels = reserve(room, np.int32), reserve(room, np.int32)
        c, buffer, f = 0, buffer_of(vm), vector(vm)
        weak, traces = self._weak(), self._traces()
        for first in range(0, n, TILE):
            c = kernel.edges(*buffer, f, traces, weak, objects.address, objects.kind, objects.slots, first,
                             min(first + TILE, n), begins, targets, labels, c)
            if c < 0:
                vm.notes.append(f"the references of the object at {int(objects.address[-1 - c]):#x} are more than "
                                "there can be: the graph ends there")
                begins[-1 - c:] = begins[-1 - c]
                c = int(begins[-1])
                break
            channel.progress(f"references of {min(first + TILE, n):,} Lua objects read")
        return Graph(begins, targets[:c], labels[:c], self._roots())

    def _traces(self) -> np.ndarray:
        """Address of each trace by its number (int64)."""
        jit = self.vm.main + self.layout.GG_J
        try:
            table, count = self.vm.ref(jit + self.layout.J_trace), self.vm.u32(jit + self.layout.J_sizetrace)
            raw = self.vm.target.space.read(table, min(count, 1 << 16) * self.layout.ref) if table else b""
        except Absent:
            raw = b""
        return np.frombuffer(raw, f"<u{self.layout.ref}").astype(np.int64)

    def _weak(self) -> np.ndarray:
        """Of each row: bit 0 weak keys, bit 1 weak values;
        from the `__mode` of the tables' metatables, and of the table of finalizers."""
        vm, objects = self.vm, self.objects
        weak = np.zeros(len(objects), np.uint8)
        rows = np.flatnonzero(objects.kind == kernel.TAB)
        field = np.uint64(self.layout.GCtab_metatable)
        metatables, _ = vm.target.space.gather(objects.address[rows].astype(np.uint64) + field, f"<u{self.layout.ref}")
        for metatable in np.unique(metatables[metatables != 0]):
            mode = table_get(vm, int(metatable), b"__mode")
            kind, address = vm.object_in(mode) if mode is not None else (0, 0)
            if kind == kernel.STR:
                text = vm.string(address, 16)
                weak[rows[metatables == metatable]] = (b"k" in text) | (b"v" in text) << 1
        self._unreadable(rows)
        finalizers = finalizer_table(vm)
        weak[objects.address == finalizers] = 1
        return weak

    def _unreadable(self, rows: np.ndarray) -> None:
        """Say how many of these tables have an array or hash part where nothing can be read."""
        vm, layout = self.vm, self.layout
        at = self.objects.address[rows].astype(np.uint64)
        for part, where, size in (("array", layout.GCtab_array, layout.GCtab_asize),
                                  ("hash", layout.GCtab_node, layout.GCtab_hmask)):
            sizes, _ = vm.target.space.gather(at + np.uint64(size), np.uint32)
            places, _ = vm.target.space.gather(at[sizes > 0] + np.uint64(where), f"<u{layout.ref}")
            _, there = vm.target.space.gather(places.astype(np.uint64), np.uint64)
            if not there.all():
                first = int(at[sizes > 0][~there][0])
                vm.notes.append(f"the {part} parts of {int((~there).sum()):,} tables (the first at {first:#x}) lie where nothing "
                                "can be read: damaged, or not in the core")

    def _roots(self) -> list[tuple[str, int]]:
        """The roots of the collector, those first whose paths read best."""
        vm, layout, objects = self.vm, self.layout, self.objects
        roots: list[tuple[str, int]] = []

        def root(name: str, address: int) -> None:
            row = vm.row(address) if address else -1
            if row >= 0:
                roots.append((name, row))

        try:
            root("registry", vm.object_in(vm.target.space.word(vm.g + layout.g_registrytv))[1])
            root("globals", vm.ref(vm.main + layout.L_env))
            root("main thread", vm.main)
            root("running thread", vm.ref(vm.g + layout.g_cur_L))
            if layout.g_vmthref >= 0:
                root("VM thread", vm.ref(vm.g + layout.g_vmthref))
            for k in range(_FINALIZER_ROOT + (layout.CTState_finalizer < 0)):
                address = vm.ref(vm.g + layout.g_gcroot + k * layout.ref)
                row = vm.row(address) if address else -1
                if row >= 0:
                    name = {kernel.STR: "metamethod names", kernel.TAB: "metatables of basic types",
                            kernel.UDATA: "io files"}
                    roots.append((name.get(int(objects.kind[row]), "other roots"), row))
            root("cdata finalizers", finalizer_table(vm))
            first = o = vm.ref(vm.g + layout.g_gc + layout.GCState_mmudata)
            while o:
                root("waiting for their finalizer", o)
                o = vm.ref(o)
                if o == first or len(roots) > len(objects):
                    break
        except Absent as absent:
            vm.notes.append(f"some roots cannot be read: {absent}")
        roots += [("fixed strings", int(row))
                  for row in np.flatnonzero((objects.kind == kernel.STR) & (objects.marked & 0x60 != 0))]
        return roots


def finalizer_table(vm: VM) -> int:
    """Address of the table that maps cdata to finalizers (its keys are weak), 0 when there is none."""
    state, field = ctype_state(vm), vm.layout.CTState_finalizer
    try:
        if field < 0:
            return vm.ref(vm.g + vm.layout.g_gcroot + _FINALIZER_ROOT * vm.layout.ref)
        return vm.target.space.word(state + field) if state else 0
    except Absent:
        return 0


def table_nodes(vm: VM, table: int) -> np.ndarray:
    """The nodes of a table's hash part, rows of (value, key) (uint64). Raises Absent."""
    layout = vm.layout
    mask = vm.u32(table + layout.GCtab_hmask)
    if not mask or mask >= 1 << 28:
        return np.zeros((0, 2), np.uint64)
    raw = vm.target.space.read(vm.ref(table + layout.GCtab_node), 24 * (mask + 1))
    return np.frombuffer(raw, np.uint64).reshape(-1, 3)[:, :2]


def table_get(vm: VM, table: int, name: bytes) -> int | None:
    """The TValue of a field with a string key, None when the table has no such field (or it is nil, or absent)."""
    try:
        for value, key in table_nodes(vm, table).tolist():
            kind, address = vm.object_in(key)
            if kind == kernel.STR and vm.u32(address + vm.layout.GCstr_len) == len(name) and vm.string(address) == name:
                return value
    except Absent:
        pass
    return None
