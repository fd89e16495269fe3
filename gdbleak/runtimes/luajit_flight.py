"""What a stop has caught under way in a LuaJIT heap: blocks that are counted and in no list, or freed and named still.

Every chunk of lj_alloc that is in use belongs to something that the VM names, and is as large as that needs. Where a
stop has caught an allocation, that does not hold for its chunk; whether it makes up the gap is then a plain sum.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from ..heaps import lj_alloc
from ..kernels import luajit as kernel
from ..target.address_space import Absent
from .luajit import VM, strings_of

_FEW = 8                       # more chunks than these are not one operation under way
Blocks = list[tuple[int, int]]  # (address, bytes) of each


@dataclass
class Flight:
    """`chunks` in use that what the VM names does not fill (bytes: of the chunk, `named` bytes in all of them; `full`:
    somewhere it names more than there is, or was, room for); `gone`: what it names that lies in no such chunk;
    `swept`: strings that the sweep has counted out and not unlinked yet; `unfinished`: functions that have no upvalues
    yet (bytes: of these). `counted`: bytes that gc.total has for the chunks; None when no such number makes up the
    gap."""

    chunks: Blocks = field(default_factory=list)
    named: int = 0
    full: bool = False
    gone: Blocks = field(default_factory=list)
    swept: Blocks = field(default_factory=list)
    unfinished: Blocks = field(default_factory=list)
    counted: int | None = None


def in_flight(vm: VM, gap: int) -> Flight | None:
    """What is under way; None when the VM is not on an allocator that can be asked. `gap`: our sum less gc.total."""
    heap = vm.allocator
    if heap is None:
        return None
    chunk, size, least, most = lj_alloc.chunks(vm.target, heap)
    if not len(chunk):
        return Flight()
    flight = Flight(unfinished=_unfinished(vm))
    block, length, _ = vm.blocks
    owner = np.searchsorted(chunk, block, "right") - 1
    inside = (owner >= 0) & (block < (chunk + size)[np.maximum(owner, 0)])
    named = np.bincount(owner[inside], length[inside], len(chunk)).astype(np.int64)
    for address, more in flight.unfinished:
        named[max(np.searchsorted(chunk, address, "right") - 1, 0)] += more
    odd = np.flatnonzero((named < least) | (named > most))
    flight.chunks = list(zip((chunk[odd] + 16).tolist(), size[odd].tolist()))
    flight.gone = list(zip(block[~inside].tolist(), length[~inside].tolist()))
    flight.named = int(named[odd].sum())
    flight.full = bool((named > most).any() and (named >= least).all()) or \
        not all(_had_room(heap, *one) for one in flight.gone)
    left = _sizes(flight.gone)                      # counted still, when the allocator is about to free or move them
    counted = flight.named + sum(left) - sum(_sizes(flight.unfinished)) - gap
    if len(odd) + len(left) <= _FEW:
        for swept in ([], *([string] for string in _swept(vm))):
            if _adds_up(counted + sum(_sizes(swept)), least[odd].tolist() + left, most[odd].tolist() + left):
                flight.swept, flight.counted = swept, counted + sum(_sizes(swept))
                break
    return flight


def _had_room(heap: lj_alloc.LjAlloc, address: int, size: int) -> bool:
    """Whether a block can have been there: in a segment, or at the beginning of a mapping of its own."""
    return address & 4095 == 16 or any(segment.start <= address and address + size <= segment.start + segment.size
                                       for segment in heap.segments)


def _sizes(of: Blocks) -> list[int]:
    return [size for _, size in of]


def _adds_up(total: int, least: list[int], most: list[int]) -> bool:
    """Whether some of the blocks, each of `least` to `most` bytes, can be `total` bytes together.
    (Not all need to: what is about to be freed may be counted or not.)"""
    return any(sum(least[k] for k in some) <= total <= sum(most[k] for k in some)
               for count in range(len(least) + 1) for some in combinations(range(len(least)), count))


def _unfinished(vm: VM) -> Blocks:
    """Lua functions that have fewer upvalues than their prototype: those come one by one, and are then set at once."""
    layout, objects = vm.layout, vm.objects
    rows = objects.address[objects.kind == kernel.FUNC].astype(np.uint64)

    def values(at: np.ndarray, offset: int, form: str) -> np.ndarray:
        return vm.target.space.gather(at + np.uint64(offset), form)[0]

    rows = rows[values(rows, layout.GCfuncC_ffid, "u1") == 0]
    rows = rows[values(rows, layout.GCfuncC_nupvalues, "u1") == 0]
    code = values(rows, layout.GCfuncC_pc, f"<u{layout.ref}").astype(np.uint64)
    should = values(code - np.uint64(layout.GCproto_sizeof), layout.GCproto_sizeuv, "u1").astype(np.int64)
    return list(zip(rows[should > 0].tolist(), (layout.ref * should[should > 0]).tolist()))


def _swept(vm: VM) -> Blocks:
    """The strings of the bucket that the sweep of strings is at, as far as its chain can be followed."""
    try:
        bucket = vm.u32(vm.g + vm.layout.g_gc + vm.layout.GCState_sweepstr) - 1
    except Absent:
        return []
    return strings_of(vm, bucket) if vm.state == "sweep strings" and bucket >= 0 else []
