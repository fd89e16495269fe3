"""Where the roots of native memory lie, each word of them that points into a block, and their names."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import channel
from ..heaps.blocks import reserve
from ..heaps.glibc_heap import GlibcHeap
from ..kernels import pointers as kernel
from ..target.elf import PT_LOAD, PT_TLS, PF_W, Module
from ..target.stacks import calls_the_kernel, ended_threads, live_part, own_stack, tls_of
from ..target.target import Target
from ..target.threads import Thread
from .nodes import Nodes

TILE = 16 << 20                 # bytes a kernel call
MODULE, STORAGE, MEMORY, SHARED, DAMAGED, ENDED, LUA, STACK, REGISTER = range(9)
#: What may be a leftover: what nothing but these reaches is told apart.
ON_STACKS = (STACK, REGISTER)
_NO_POINTERS = ("orig_rax", "cs", "eflags", "ss", "ds", "es", "fs", "gs", "pstate", "rip", "pc", "fs_base", "gs_base")
_LAST = (1 << 64) - 1
_SHARED = ("/dev/zero", "/dev/shm/", "/SYSV", "/memfd:", "/[aio]")


@dataclass
class Area:
    """Memory whose words are roots. `owner`: its Module, Thread or Mapping."""

    start: int
    end: int
    kind: int
    owner: object = None


@dataclass
class Roots:
    """Root words that point into blocks, those on stacks and in registers last: `address` of the word (uint64; 0: a
    register), `row` of the block (int32), `area` (int32, into `areas`; registers have one each)."""

    target: Target
    areas: list[Area]
    address: np.ndarray
    row: np.ndarray
    area: np.ndarray
    registers: dict[int, str]                # by area
    absent: dict[str, int]                   # bytes of areas that are not there, by what they are

    @property
    def kind(self) -> np.ndarray:
        """The kind of each root word's area (uint8)."""
        kinds = np.array([area.kind for area in self.areas], np.uint8)
        return kinds[self.area] if len(self.area) else np.zeros(0, np.uint8)


def find(nodes: Nodes, vms: list) -> Roots:
    """All root words. `vms`: the Lua VMs, whose own memory is theirs to judge."""
    target = nodes.target
    areas = find_areas(target, nodes.heaps, vms)
    there = [sum(high - low for low, high in target.space.present(area.start, area.end)) for area in areas]
    room = sum(there) // 8 + len(areas)
    address, row, area_of = reserve(room, np.uint64), reserve(room, np.int32), reserve(room, np.int32)
    n, absent = 0, {}
    for number, area in enumerate(areas):
        missing = area.end - area.start - there[number]
        if missing and area.kind != MODULE:              # of a module's data only what was never written is left out
            absent[area_name(area)] = absent.get(area_name(area), 0) + missing
        table = target.space.table([(area.start, area.end)])
        buffer = target.space.words, table.starts, table.ends, table.offsets
        parts = target.space.present(area.start, area.end) if len(nodes) else []     # a damaged mapping can claim exabytes
        for at, end in ((at, min(at + TILE, high)) for low, high in parts for at in range(low, high, TILE)):
            before = n
            n = int(kernel.pointers(*buffer, *nodes.index, nodes.seen, at, end, address, row, n))
            area_of[before:n] = number
            channel.progress(f"{n:,} pointers into the heap found in other memory")
    registers, names = [], {}
    for thread in target.threads:
        for name, value in thread.registers.items():
            if name not in _NO_POINTERS:
                registers.append((thread, name, value))
        if not calls_the_kernel(target, thread):
            words = np.frombuffer(thread.vectors[:len(thread.vectors) & ~7], np.uint64)
            registers += [(thread, "(vector)", value) for value in sorted(set(words.tolist()))]
    held = nodes.nodes_at(np.array([value for *_, value in registers], np.uint64))
    found = np.flatnonzero(held >= 0)
    for k in found.tolist():
        thread, name, _ = registers[k]
        names[len(areas)] = name
        areas.append(Area(0, 0, REGISTER, thread))
    last = len(areas)
    return Roots(target, areas, np.concatenate([address[:n], np.zeros(len(found), np.uint64)]),
                 np.concatenate([row[:n], held[found]]),
                 np.concatenate([area_of[:n], np.arange(last - len(found), last, dtype=np.int32)]), names, absent)


# -- where they lie ----------------------------------------------------------------------------------------------------
def find_areas(target: Target, heaps: list[GlibcHeap], vms: list) -> list[Area]:
    """The root areas, none overlapping another, stacks last.

    All memory that a program can have written, less what belongs to an allocator, to Lua and to stacks; of
    stacks what is alive; of the stacks that glibc keeps from ended threads only the descriptor, which leads to the dtv.
    """
    taken = _Taken()
    for heap in heaps:
        taken.add(heap.main, heap.main + heap.state.itemsize)
        if heap.parameters is not None:
            taken.add(heap.parameters_at, heap.parameters_at + heap.parameters.dtype.itemsize)
        for region in heap.regions:
            end = (region.start | heap.heap_max - 1) + 1 if region.kind == "heap" else region.end
            taken.add(heap.base_of(region), end)
    damaged = [Area(start, end, DAMAGED) for heap in heaps for region in heap.regions for start, end in region.damaged]
    foreign = [stretch for heap in heaps for region in heap.regions for stretch in region.foreign]
    lua = [area for vm in vms for area in _of_vm(taken, vm)]
    live, storage, heap = [], [], _Taken(taken)       # a stack in a malloc block is that block's words
    for thread in target.threads:
        stack, own = own_stack(target, thread), tls_of(target, thread)
        if stack and own and stack[0] <= thread.tp < stack[1]:      # both lie in one mapping, the frames below
            stack, own = (stack[0], max(own[0], stack[0])), (max(own[0], stack[0]), stack[1])
        if own:
            storage += [Area(start, end, STORAGE, thread) for start, end in heap.rest([own])]
        part = live_part(target, thread, stack or thread.stack) if stack or thread.stack else None
        if part:                       # where only the mapping is known, what lies below may be other data
            live += [Area(start, end, STACK, thread) for start, end in heap.rest([part])]
        for stretch in filter(None, (own, stack or part)):
            taken.add(*stretch)
    ended = []
    for thread in ended_threads(target, taken.rest(target.anonymous())):
        taken.add(*thread.stack)
        ended += [Area(start, end, ENDED) for start, end in thread.alive]
    rest = [*damaged, *lua, *storage, *ended]
    for module in target.modules:
        for start, end in taken.rest(module.writable()):
            rest.append(Area(start, end, MODULE, module))
            taken.add(start, end)
    for mapping in target.mappings:
        if (mapping.writable or not mapping.path) and not mapping.path.startswith("[v"):
            kind = SHARED if mapping.path.startswith(_SHARED) else MEMORY
            # What the program may not read now is a root where there is something, which it may read again.
            whole = [(mapping.start, mapping.end)]
            parts = whole if mapping.readable else target.space.present(*whole[0])
            rest += [Area(start, end, kind, mapping) for start, end in taken.rest(parts)]
    rest += [Area(start, end, MEMORY, target.mapping_at(start)) for start, end in foreign]
    order = {kind: k for k, kind in enumerate((MODULE, STORAGE, LUA, SHARED, MEMORY, DAMAGED, ENDED))}
    return sorted(rest, key=lambda area: (order[area.kind], area.start)) + live


def _of_vm(taken: "_Taken", vm) -> list[Area]:
    """Take a VM's own memory out, and return what of it is outside of its objects and holds what the program put there:
    the lua_State and global_State (their extra data)."""
    if vm.allocator is not None:
        for segment in vm.allocator.segments:
            taken.add(segment.start, segment.start + segment.size)
        for start, size in vm.allocator.direct:
            taken.add(start, start + size)
    return [Area(vm.main, vm.main + vm.layout.GG_sizeof, LUA, vm)]


class _Taken:
    """Stretches of addresses that are no plain roots."""

    def __init__(self, other: "_Taken | None" = None):
        self._stretches: list[tuple[int, int]] = list(other._stretches) if other else []
        self._sorted = False

    def add(self, start: int, end: int) -> None:
        end = min(end, _LAST)               # a damaged image can claim more
        if start < end:
            self._stretches.append((start, end))
            self._sorted = False

    def rest(self, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The parts of ranges that are not taken."""
        if not self._sorted:
            joined: list[list[int]] = []
            for start, end in sorted(self._stretches):
                if joined and start <= joined[-1][1]:
                    joined[-1][1] = max(joined[-1][1], end)
                else:
                    joined.append([start, end])
            self._stretches, self._sorted = [(start, end) for start, end in joined], True
        ends = np.array([end for _, end in self._stretches], np.uint64)
        found = []
        for low, high in ((low, min(high, _LAST)) for low, high in ranges):
            for k in range(int(np.searchsorted(ends, np.uint64(low), "right")), len(ends)):
                start, end = self._stretches[k]
                if start >= high:
                    break
                if low < start:
                    found.append((low, start))
                low = max(low, end)
            if low < high:
                found.append((low, high))
        return found


# -- what they are called ----------------------------------------------------------------------------------------------
class Places:
    """Root words put together under one name: a variable, a stack word, a register, a mapping.

    `of`: the place of each root word (int32); `names`: looked up when asked for; `words`: the first word of each.
    """

    def __init__(self, roots: Roots):
        self.roots = roots
        key = np.zeros(len(roots.row), np.uint64)      # what makes words of one area one place
        kinds = roots.kind
        for number in np.flatnonzero(np.bincount(roots.area)).tolist():
            area, at = roots.areas[number], np.flatnonzero(roots.area == number)
            words = roots.address[at]
            if area.kind == MODULE:
                key[at] = _variables(roots.target, area.owner, words)
            elif area.kind in (STACK, STORAGE, LUA, ENDED):
                key[at] = words
        order = np.lexsort((key, roots.area))
        new = np.ones(len(order), bool)
        new[1:] = (key[order][1:] != key[order][:-1]) | (roots.area[order][1:] != roots.area[order][:-1])
        number = np.cumsum(new) - 1
        self.of = np.empty(len(order), np.int32)
        self.of[order] = number
        self.words = order[new]                        # the first root word of each place
        self.kind = kinds[self.words] if len(order) else np.zeros(0, np.uint8)
        self._key = key
        self._names: dict[int, str] = {}
        self._frames: dict[int, list[tuple[int, str, int]]] = {}

    def __len__(self) -> int:
        return len(self.words)

    def name(self, place: int) -> str:
        """What a person calls the place; never an address."""
        if place not in self._names:
            self._names[place] = self._name(int(self.words[place]))
        return self._names[place]

    def _name(self, word: int) -> str:
        roots = self.roots
        area, address = roots.areas[int(roots.area[word])], int(self._key[word])
        if area.kind == MODULE:
            return data_name(roots.target, area.owner, address)
        if area.kind == STORAGE:
            return _storage_name(roots.target, area.owner, address)
        if area.kind == STACK:
            return self._stack_name(area.owner, address)
        if area.kind == REGISTER:
            return f"register {roots.registers[int(roots.area[word])]}"
        return area_name(area)

    def _stack_name(self, thread: Thread, address: int) -> str:
        storage = tls_of(self.roots.target, thread)
        if storage and storage[0] <= address < storage[1]:
            return _storage_name(self.roots.target, thread, address)
        if thread.lwp not in self._frames:
            names = self.roots.target.debugger
            self._frames[thread.lwp] = names.frames(thread.lwp) if names else []
        mapping = self.roots.target.mapping_at(address)         # a signal handler's frames can be on another stack
        below = [frame for frame in self._frames[thread.lwp]
                 if frame[0] <= address and mapping and mapping.start <= frame[0]]
        if not below:
            side = f"+{address - thread.sp:#x}" if address >= thread.sp else f"-{thread.sp - address:#x} (red zone)"
            return f"stack word {side} from the stack pointer" if abs(address - thread.sp) < 1 << 20 else "stack word"
        frame = max(below)
        function = f"{frame[1]}()" if frame[1] else self.roots.target.name_of(frame[2]) or "unknown code"
        return f"stack word +{address - frame[0]:#x} in {function}"


def area_name(area: Area) -> str:
    """What all words of an area that is no module's or stack's are called."""
    names = {LUA: "lua_State", ENDED: "descriptor of an ended thread", DAMAGED: "a damaged part of the heap", STACK: "stack",
             STORAGE: "thread-local storage"}
    if area.kind in names:
        return names[area.kind]
    path = getattr(area.owner, "path", "")
    kind = "shared memory" if area.kind == SHARED else "mapped file" if path.startswith("/") else "mapped memory"
    return f"{kind} {path.rsplit('/', 1)[-1]}".rstrip() + (f" of {area.owner.size:,} bytes" if area.owner else "")


def _variables(target: Target, module: Module, words: np.ndarray) -> np.ndarray:
    """For each word of a module's data the address of the variable it is in; without symbols that of the first of
    consecutive words."""
    table = target.symbols_of(module)
    begins = table.begins(words) if table is not None else np.zeros(len(words), np.uint64)
    unnamed = begins == 0
    run = np.ones(len(words), bool)
    run[1:] = (words[1:] - words[:-1] != 8) | (unnamed[1:] != unnamed[:-1])
    first = words[np.maximum.accumulate(np.where(run, np.arange(len(words)), 0))] if len(words) else words
    return np.where(unnamed, first, begins)


def data_name(target: Target, module: Module, address: int) -> str:
    """`nginx!ngx_cycle`, `nginx!ngx_http_module+0x20`, else `nginx!.bss+0x1a0`."""
    name = target.name_of(address)
    if "!" in name:
        return name
    for row in module.phdrs[(module.phdrs["type"] == PT_LOAD) & (module.phdrs["flags"] & PF_W != 0)]:
        start = module.bias + int(row["vaddr"])
        bss = start + int(row["filesz"])
        if start <= address < start + int(row["memsz"]):
            return f"{module.name}!.bss+{address - bss:#x}" if address >= bss else f"{module.name}!.data+{address - start:#x}"
    return f"{module.name}+{address - module.bias:#x}"


def _storage_name(target: Target, thread: Thread, address: int) -> str:
    """`thread-local nginx!counter`, or where it lies in the thread's static TLS or descriptor."""
    main = target.executable()
    if main is not None and thread.arch.tls_below and address < thread.tp:
        for row in main.phdrs[main.phdrs["type"] == PT_TLS]:
            align = max(int(row["align"]), 1)
            start = thread.tp - ((int(row["memsz"]) + align - 1) & -align)
            table = target.symbols_of(main)
            name = table.thread_local(address - start) if table is not None and address >= start else ""
            if name:
                return f"thread-local {main.name}!{name}"
    after = address - thread.tp
    if after >= 0:
        return f"descriptor of a thread, +{after:#x}"
    return f"thread-local storage -{-after:#x}"
