"""leak-what: everything that is known about one address, from the mapping down to the block and its bytes."""
from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import numpy as np

from ..quantities import address as address_of
from ..heaps import glibc_layouts as layouts
from ..heaps.blocks import STATES, Region
from ..heaps.glibc_heap import GlibcHeap
from ..kernels import chunks as kernel
from ..runtimes.luajit_names import Names
from ..target.stacks import stack_of, tls_of
from ..target.target import Mapping, Target
from .analysis import Analysis
from .blocks import LINE, hexdump
from .document import Data, Report, printable
from .selection import arena_name

AROUND = 64                  # bytes of the hexdump
SHOWN_REGISTERS = 12         # lines about registers at most
BIN_STEPS = 100_000          # how far a free list is followed to learn which one it is
CACHE_STEPS = 100_000
_NO_POINTERS = ("orig_rax", "cs", "eflags", "ss", "ds", "es", "fs", "gs", "pstate")
_KEYS = ("mapping_start", "mapping_end", "perms", "path", "module", "symbol", "stack_of", "arena", "region",
         "block_address", "block_size", "block_usable", "block_state", "block_offset", "pool", "lua_object")
# Blocks whose last 8 usable bytes are the first word of the next chunk's header.
_TAKEN = (kernel.IN_USE, kernel.TCACHED, kernel.FASTBIN)
_REGIONS = {"brk": "brk heap", "heap": "heap", "mmap": "mmapped part", "mmapped": "mmapped chunk"}


@dataclass
class Facts:
    """What was found: lines for the person, fields for the program (None: does not apply)."""

    lines: list[str] = field(default_factory=list)
    fields: dict = field(default_factory=lambda: dict.fromkeys(_KEYS))

    def add(self, line: str, **fields) -> None:
        self.lines.append(line)
        self.fields.update(fields)


@dataclass
class Block:
    """One block: its row in its heap, and its region."""

    heap: GlibcHeap
    region: Region
    row: int

    @property
    def address(self) -> int:
        return int(self.heap.blocks.address[self.row])

    @property
    def size(self) -> int:
        return int(self.heap.blocks.size[self.row])

    @property
    def state(self) -> int:
        return int(self.heap.blocks.state[self.row])

    @property
    def usable(self) -> int:
        return self.heap.usable(self.row, self.region)

    def __str__(self) -> str:
        return f"block {self.address:#x}: {STATES[self.state]}, chunk of {self.size:,} bytes"


def run(analysis: Analysis, arguments) -> Report:
    """All facts about `address`, the general ones first, the bytes around it last."""
    address = address_of(arguments.address, arguments.evaluate)
    if not 0 <= address < 1 << 64:
        raise ValueError(f"{arguments.address} is no address: it does not fit into 64 bits")
    target, facts = analysis.target, Facts()
    report = analysis.open_report("leak-what")
    mapping = target.mapping_at(address)
    block = find_block(analysis.glibc, address) if mapping else None
    if mapping is None:
        _not_mapped(target, address, facts)
    else:
        _mapping(target, mapping, address, facts)
        _symbol(target, address, facts)
        _threads(target, address, facts)
        _allocators(analysis, address, facts)
    if block:
        _block(target, block, address, facts)
        _pool(analysis, block, facts)
    if mapping:
        _lua(analysis, address, facts)
    _registers(target, address, block, facts)
    report.say("\n  ".join([f"{address:#x}", *facts.lines]))
    if mapping:
        start = max(mapping.start, (address & -LINE) - AROUND // 2)
        report.say()
        lines = hexdump(target.space, start, min(AROUND, mapping.end - start))
        report.say("\n".join("  " + line for line in lines))
    report.add(Data({"type": "what", "address": f"{address:#x}", "facts": facts.lines}))
    report.totals(address=address, mapped=mapping is not None, **facts.fields)
    return report


def find_block(heaps: list[GlibcHeap], address: int) -> Block | None:
    """The block whose usable bytes, or else whose header, hold `address`; None when there is none."""
    for heap in heaps:
        region = heap.region_at(address)
        if region is None:
            continue
        row = heap.blocks.row_of(address)
        before = row - 1 if row >= 0 else heap.blocks.row_of(address - 8)
        if region.first <= before < region.last:
            block = Block(heap, region, before)
            if block.state in _TAKEN and block.address <= address < block.address + block.usable:
                return block
        return Block(heap, region, row) if region.first <= row < region.last else None
    return None


# -- mapping, module, threads --------------------------------------------------------------------------------
def _not_mapped(target: Target, address: int, facts: Facts) -> None:
    facts.add("not mapped" if address >= 4096 else "not mapped: a null pointer, or a small number")
    k = bisect.bisect_right([mapping.start for mapping in target.mappings], address)
    for mapping in target.mappings[max(k - 1, 0):k]:
        facts.add(f"nearest mapping below: {_describe(mapping)}, {address - mapping.end + 1:,} bytes away")
    for mapping in target.mappings[k:k + 1]:
        facts.add(f"nearest mapping above: {_describe(mapping)}, {mapping.start - address:,} bytes away")


def _describe(mapping: Mapping) -> str:
    return f"{mapping.start:#x}-{mapping.end:#x} {mapping.perms} {printable(mapping.path) or 'anonymous'}"


def _mapping(target: Target, mapping: Mapping, address: int, facts: Facts) -> None:
    offset = address - mapping.start
    in_file = f", file offset {mapping.file_offset + offset:#x}" if mapping.path.startswith("/") else ""
    absent = "" if target.space.present(address, address + 1) else "; this byte is not in the core"
    where = f"{mapping.size:,} bytes, offset {offset:#x} into it{in_file}{absent}"
    facts.add(f"mapping: {_describe(mapping)}, {where}", mapping_start=mapping.start, mapping_end=mapping.end,
              perms=mapping.perms, path=mapping.path)


def _symbol(target: Target, address: int, facts: Facts) -> None:
    module = target.module_at(address)
    if module is None:
        return
    build = f", build-id {module.build_id}" if module.build_id else ""
    facts.add(f"module: {printable(module.path)} at {module.start:#x}{build}", module=module.path)
    name = target.name_of(address)
    facts.add(f"symbol: {printable(name)}", symbol=name)


def _threads(target: Target, address: int, facts: Facts) -> None:
    """The stack, the static TLS and the descriptor that the address lies in."""
    for thread in target.threads:
        stack = stack_of(target, thread)
        if stack and stack[0] <= address < stack[1]:
            below = thread.sp - address
            state = "live" if below <= 0 else "live (red zone)" if below <= thread.arch.red_zone else "unused"
            side = "below" if below > 0 else "above"
            facts.add(f"stack of thread {thread.lwp}, {abs(below):,} bytes {side} its stack pointer: {state}",
                      stack_of=thread.lwp)
        storage = tls_of(target, thread)
        if storage and storage[0] <= address < storage[1]:
            after = address - thread.tp
            kind = "static TLS" if (after < 0) == thread.arch.tls_below else "descriptor (struct pthread)"
            sign = "-" if after < 0 else "+"
            facts.add(f"{kind} of thread {thread.lwp}, thread pointer {thread.tp:#x} {sign} {abs(after):#x}")


def _registers(target: Target, address: int, block: Block | None, facts: Facts) -> None:
    """Registers that hold the address, or point into the same block."""
    found = []
    for thread in target.threads:
        for name, value in thread.registers.items():
            if name in _NO_POINTERS or not value:
                continue
            if value == address:
                found.append(f"register {name} of thread {thread.lwp} holds this address")
            elif block and block.address <= value < block.address + block.usable:
                found.append(f"register {name} of thread {thread.lwp} points into the same block, at offset "
                             f"{value - block.address:,}")
    for line in found[:SHOWN_REGISTERS]:
        facts.add(line)
    if len(found) > SHOWN_REGISTERS:
        facts.add(f"and {len(found) - SHOWN_REGISTERS:,} more registers")


# -- glibc ---------------------------------------------------------------------------------------------------
def _allocators(analysis: Analysis, address: int, facts: Facts) -> None:
    """glibc's own structures, and the region of an arena, that hold the address."""
    for heap in analysis.glibc:
        for name, dtype, start in _structures(heap, address):
            facts.add(f"{heap.name}: {_field(name, dtype, address - start)}")
        for region in heap.regions:
            if heap.base_of(region) <= address < region.end:
                _region(heap, region, address, facts)


def _structures(heap: GlibcHeap, address: int):
    """(name, layout, start) of the allocator's structures that hold the address."""
    known = [(f"malloc_state of arena {arena.index}", heap.state, arena.address) for arena in heap.arenas]
    known[0] = ("main_arena", heap.state, heap.main)
    if heap.parameters is not None:
        known.append(("mp_", heap.parameters.dtype, heap.parameters_at))
    info = layouts.latest(layouts.HEAP_INFO, heap.release)
    known += [(f"heap_info of arena {region.arena}", info, heap.base_of(region))
              for region in heap.regions if region.kind == "heap"]
    return [row for row in known if row[2] <= address < row[2] + row[1].itemsize]


def _field(name: str, dtype: np.dtype, offset: int) -> str:
    """`name.field[index]`, or `name+offset` in a gap between the known fields."""
    for key in dtype.names:
        form, at = dtype.fields[key][:2]
        if at <= offset < at + form.itemsize:
            return f"{name}.{key}" + (f"[{(offset - at) // form.base.itemsize}]" if form.shape else "")
    return f"{name}+{offset:#x}"


def _region(heap: GlibcHeap, region: Region, address: int, facts: Facts) -> None:
    name = arena_name(region)
    of = "" if region.kind == "mmapped" else f" of {name}"
    facts.add(f"{heap.name} ({printable(heap.module.name)}): {_REGIONS[region.kind]}{of}, "
              f"{heap.base_of(region):#x}-{region.end:#x}", arena=name, region=region.kind)
    for ranges, text in ((region.foreign, "foreign sbrk: somebody else took this memory from the break"),
                         (region.damaged, "damaged: the chunks here cannot be walked")):
        for start, end in ranges:
            if start <= address < end:
                facts.add(f"{text}, {start:#x}-{end:#x}")
                return
    if not region.first <= heap.blocks.row_of(address) < region.last:
        facts.add("no chunk: a header or fencepost of the allocator")


def _block(target: Target, block: Block, address: int, facts: Facts) -> None:
    offset = address - block.address
    where = f"offset {offset:,} of {block.usable:,} usable bytes" if offset >= 0 else "in its header"
    facts.add(f"{block} ({block.size:#x}), {where}", block_address=block.address, block_size=block.size,
              block_usable=block.usable, block_state=STATES[block.state], block_offset=offset)
    if offset == block.size - 16:
        facts.add("also the chunk address of the next block, whose header begins with this block's last word")
    for cache in block.heap.tcaches:
        if cache.address == block.address:
            whose = f" of thread {cache.lwp}" if cache.lwp else ""
            facts.add(f"the block is a thread cache (tcache_perthread_struct){whose}, which holds "
                      f"{cache.blocks:,} blocks, {cache.bytes:,} bytes")
    held = _list_of(target, block)
    if held:
        facts.add(f"held by {held}")
    for row, side in ((block.row - 1, "previous"), (block.row + 1, "next")):
        if block.region.first <= row < block.region.last:
            facts.add(f"{side} {Block(block.heap, block.region, row)}")


def _list_of(target: Target, block: Block) -> str:
    """The free list that a block is on, in words; "" for a block that is on none."""
    if block.state == kernel.TCACHED:
        return _cache_of(target, block)
    if block.state == kernel.FASTBIN:
        return f"fastbin {block.size // 16 - 2} (chunks of {block.size} bytes) of arena {block.region.arena}"
    return _bin_of(target, block) if block.state == kernel.FREE else ""


def _bin_of(target: Target, block: Block) -> str:
    """The bin whose head the `fd` links of a free chunk lead to."""
    arena = block.heap.arenas[block.region.arena]
    bins = arena.address + block.heap.state.fields["bins"][1] - 16
    at: int | None = block.address - 16
    for _ in range(BIN_STEPS):
        at = target.word(at + 16)
        if at is None:
            return ""
        if bins <= at < bins + 8 * layouts.NBINS:
            number = (at - bins) // 16 + 1
            kind = "unsorted" if number == 1 else "small" if number < 64 else "large"
            return f"bin {number} ({kind}) of arena {arena.index}"
    return ""


def _cache_of(target: Target, block: Block) -> str:
    """The thread cache, and which bin of it, that a block waits in."""
    heap, steps = block.heap, CACHE_STEPS
    _, bins, entries_at, _ = layouts.latest(layouts.TCACHE, heap.release)
    for cache in heap.tcaches:
        for k in range(bins):
            at = target.word(cache.address + entries_at + 8 * k)
            while at and steps:
                if at == block.address:
                    whose = f"thread {cache.lwp}" if cache.lwp else f"the thread cache at {cache.address:#x}"
                    return f"tcache bin {k} of {whose}"
                link, steps = target.word(at), steps - 1
                at = link ^ (at >> 12) if link is not None and heap.release >= layouts.SAFE_LINKING else link
    return ""


def _lua(analysis: Analysis, address: int, facts: Facts) -> None:
    """The Lua object that has the address among its bytes."""
    for vm in analysis.luajit:
        row = vm.row_holding(address)
        if row >= 0:
            start = int(vm.objects.address[row])
            facts.add(f"Lua: {printable(Names(vm).object(row), 200)} at {start:#x}, {int(vm.objects.size[row]):,} bytes"
                      f"{'' if vm.graph.tree.seen[row] else ', dead'} (leak-path {start:#x})", lua_object=start)


def _pool(analysis: Analysis, block: Block, facts: Facts) -> None:
    pool = analysis.nginx.pool_of(block.address) if analysis.nginx else None
    if pool:
        facts.add(f"in {printable(pool.describe(), 400)}", pool=pool.address)
