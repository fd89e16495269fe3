"""What a stop has caught under way in a LuaJIT heap: blocks that are counted and in no list, or freed and named still.

Every chunk of a VM's that is in use belongs to something that the VM names, and is as large as that needs. Where a stop
has caught an allocation, that does not hold for its chunk; whether it makes up the gap is then a plain sum.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np

from ..heaps import lj_alloc
from ..kernels import luajit as kernel
from ..target.address_space import Absent
from ..target.stacks import words_at_hand
from .luajit import VM, strings_of

_FEW = 8                       # more chunks than these are not one operation under way
Blocks = list[tuple[int, int]]  # (address, bytes) of each


class Chunks(NamedTuple):
    """Chunks in use that are, or can be, a VM's, by address: `size`, and the fewest and the most bytes that can have
    been asked for (int64). A block begins 16 bytes behind its chunk. `ranges`: where blocks can have been at all."""

    address: np.ndarray
    size: np.ndarray
    least: np.ndarray
    most: np.ndarray
    ranges: list[tuple[int, int]]

    @classmethod
    def of_lj_alloc(cls, vm: VM) -> "Chunks":
        """Those of the VM's own allocator."""
        heap = vm.allocator
        return cls(*lj_alloc.chunks(vm.target, heap), [(one.start, one.start + one.size) for one in heap.segments])


@dataclass
class Flight:
    """`chunks` in use that what the VM names does not fill, those that make up the gap where some do (bytes: of the
    chunk, `named` bytes in all of them; `full`: somewhere it names more than there is, or was, room for); `gone`: what
    it names that lies in no such chunk; `swept`: what is counted out and named still, a string that the sweep is at or
    what a string buffer held; `unfinished`: functions that have no upvalues yet (bytes: of these). `counted`: bytes
    that gc.total has for the chunks; None when no such number makes up the gap."""

    chunks: Blocks = field(default_factory=list)
    named: int = 0
    full: bool = False
    gone: Blocks = field(default_factory=list)
    swept: Blocks = field(default_factory=list)
    unfinished: Blocks = field(default_factory=list)
    counted: int | None = None


def in_flight(vm: VM, gap: int, chunks: Chunks) -> Flight:
    """What is under way. `gap`: our sum less gc.total."""
    if not len(chunks.address):
        return Flight()
    flight = Flight(unfinished=_unfinished(vm))
    block, length, _ = vm.blocks
    owner = np.searchsorted(chunks.address, block, "right") - 1
    inside = (owner >= 0) & (block < (chunks.address + chunks.size)[np.maximum(owner, 0)])
    named = np.bincount(owner[inside], length[inside], len(chunks.address)).astype(np.int64)
    for address, more in flight.unfinished:
        named[max(np.searchsorted(chunks.address, address, "right") - 1, 0)] += more
    odd = np.flatnonzero((named < chunks.least) | (named > chunks.most))
    flight.gone = list(zip(block[~inside].tolist(), length[~inside].tolist()))
    flight.named = int(named[odd].sum())
    flight.full = bool((named > chunks.most).any() and (named >= chunks.least).all()) or \
        not all(_had_room(chunks, *one) for one in flight.gone)
    left = _sizes(flight.gone)                      # counted still, when the allocator is about to free or move them
    counted = flight.named + sum(left) - sum(_sizes(flight.unfinished)) - gap
    if len(odd) + len(left) <= _FEW:
        for swept in ([], *_counted_out(vm)):
            total = counted + sum(_sizes(swept))
            some = _adding_up(total, chunks.least[odd].tolist() + left, chunks.most[odd].tolist() + left)
            if some is not None:
                flight.swept, flight.counted = swept, total
                odd = odd[[k in some or named[row] > 0 for k, row in enumerate(odd.tolist())]]
                break
    flight.chunks = list(zip((chunks.address[odd] + 16).tolist(), chunks.size[odd].tolist()))
    return flight


def _had_room(chunks: Chunks, address: int, size: int) -> bool:
    """Whether a block can have been there: in a range of chunks, or at the beginning of a mapping of its own."""
    return address & 4095 == 16 or any(start <= address and address + size <= end for start, end in chunks.ranges)


def _sizes(of: Blocks) -> list[int]:
    return [size for _, size in of]


def _adding_up(total: int, least: list[int], most: list[int]) -> tuple[int, ...] | None:
    """The fewest of the blocks, each of `least` to `most` bytes, that can be `total` bytes together, by index; None
    when no such can. (Not all need to: what is about to be freed may be counted or not.)"""
    return next((some for count in range(len(least) + 1) for some in combinations(range(len(least)), count)
                 if sum(least[k] for k in some) <= total <= sum(most[k] for k in some)), None)


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


def _counted_out(vm: VM) -> list[Blocks]:
    """What a stop can have caught between that it is counted out and that it is freed, or unlinked: the strings of the
    bucket that the sweep of strings is at, as far as its chain can be followed; what string buffers hold, where a
    register or one of the newest words of a stack has the userdata, the buffer in it, the block or its chunk, as while
    it is freed."""
    objects, (block, size, row) = vm.objects, vm.blocks
    at = words_at_hand(vm.target).view(np.int64)
    held = (row >= 0) & (objects.kind[row] == kernel.UDATA) & (block != objects.address[row])
    userdata = objects.address[row]
    held &= np.isin(block, at) | np.isin(block - 16, at) | np.isin(userdata, at) | \
        np.isin(userdata + vm.layout.GCudata_sizeof, at)
    freed = [[one] for one in zip(block[held].tolist(), size[held].tolist())]
    try:
        bucket = vm.u32(vm.g + vm.layout.g_gc + vm.layout.GCState_sweepstr) - 1
    except Absent:
        return freed
    swept = strings_of(vm, bucket) if vm.state == "sweep strings" and bucket >= 0 else []
    return freed + [[string] for string in swept]
