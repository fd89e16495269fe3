"""LuaJIT's own allocator: its segments, what is in use in them, and what it keeps free for the next objects.

Free memory here is not returned to the system unless a whole segment is free: it is a pool, not a leak.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..kernels import lj_alloc as kernel
from ..target.address_space import Absent
from ..target.layout import struct
from ..target.stacks import words_at_hand
from ..target.target import Target

# struct malloc_state of lj_alloc.c (LP64), the same in every release
MSPACE = struct(864, dvsize=(8, "u8"), topsize=(16, "u8"), dv=(24, "u8"), top=(32, "u8"), seg_base=(840, "u8"),
                seg_size=(848, "u8"), seg_next=(856, "u8"))
SEGMENT = struct(24, base=(0, "u8"), size=(8, "u8"), next=(16, "u8"))
DIRECT = 128 << 10              # blocks from here on can get a mapping of their own
SHRUNK = 241                    # ... and keep one when they shrink, down to this
_MIN_CHUNK, _FENCE = 32, 0xb
_FOOT = 32                      # bytes of a block's own mapping that are not its chunk
_KEPT = 64 << 10                # such a mapping is kept as it is while no more than this is idle in it


@dataclass
class Segment:
    """One segment. Bytes are chunks, headers included; `free`: in bins and as the designated victim;
    `overhead`: fenceposts."""

    start: int
    size: int
    in_use_chunks: int = 0
    in_use_bytes: int = 0
    free_chunks: int = 0
    free_bytes: int = 0
    top_bytes: int = 0
    overhead: int = 0


@dataclass
class LjAlloc:
    """One mspace: its segments, and the mappings of blocks of 128 KiB and more that have one of their own
    (start, size). `records`: addresses of the allocator's own records of segments."""

    address: int
    top: int = 0
    segments: list[Segment] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    direct: list[tuple[int, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def total(self, name: str) -> int:
        """A field of all segments added up."""
        return sum(getattr(segment, name) for segment in self.segments)

    @property
    def free_pool(self) -> int:
        """Bytes kept free for the next objects."""
        return self.total("free_bytes") + self.total("top_bytes")

    @property
    def footprint(self) -> int:
        """Bytes mapped: segments and direct mappings."""
        return self.total("size") + sum(size for _, size in self.direct)


def read(target: Target, address: int) -> LjAlloc | None:
    """The mspace at `address` (g->allocd), walked; None when there is none."""
    space, heap = target.space, LjAlloc(address)
    try:
        mspace = space.struct(address, MSPACE)
        heap.top = int(mspace["top"])
        at, seen = address + MSPACE.fields["seg_base"][1], set()
        while at and at not in seen:
            seen.add(at)
            if heap.records and not space.present(at, at + SEGMENT.itemsize):
                heap.notes.append(f"the segment that had its record at {at:#x} has just been unmapped")
                at = _next_of_unmapped(target, seen)
                continue
            row = space.struct(at, SEGMENT)
            segment = Segment(int(row["base"]), int(row["size"]))
            if not segment.size or segment.start & 15 or segment.size > 1 << 46:
                return None
            heap.segments.append(segment)
            heap.records.append(at)
            at = int(row["next"])
    except Absent:
        return None
    if not any(segment.start <= address < segment.start + segment.size for segment in heap.segments):
        return None
    for segment in heap.segments:
        _measure(target, heap, segment, int(mspace["topsize"]))
    return heap


def _next_of_unmapped(target: Target, seen: set[int]) -> int:
    """The record that follows one which went with its segment: who unmaps that has it at hand until the list is
    closed. 0 when there is none."""
    for at in dict.fromkeys(words_at_hand(target).tolist()):
        if at not in seen and not at & 7 and target.space.present(at, at + SEGMENT.itemsize) == [
                (at, at + SEGMENT.itemsize)]:
            row = target.space.struct(at, SEGMENT)
            base, size = int(row["base"]), int(row["size"])
            if base & 4095 == 0 and size and size & 4095 == 0 and base <= at < base + size:
                return at
    return 0


def _walk(target: Target, heap: LjAlloc, segment: Segment, address: np.ndarray, size: np.ndarray) -> tuple[int, ...]:
    """What the kernel says of a segment's chunks; as many of those in use as there is room for in these arrays."""
    space, stop = target.space, segment.start + segment.size
    table = space.table([(segment.start, stop)])
    return tuple(int(x) for x in kernel.walk(space.words, table.starts, table.ends, table.offsets, segment.start, stop,
                                             heap.top, address, size))


def _measure(target: Target, heap: LjAlloc, segment: Segment, top_size: int) -> None:
    """Fill in what a segment holds."""
    stop, none = segment.start + segment.size, np.zeros(0, np.uint64)
    (segment.in_use_chunks, segment.in_use_bytes, segment.free_chunks, segment.free_bytes,
     end, why) = _walk(target, heap, segment, none, none)
    if end == heap.top:
        segment.top_bytes = min(top_size, stop - end)
    rest = stop - end - segment.top_bytes
    if why:
        heap.notes.append(f"the segment at {segment.start:#x} could be walked only up to {end:#x}: "
                          f"{rest:,} bytes are not accounted for")
    else:
        segment.overhead = rest


def chunks(target: Target, heap: LjAlloc) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All chunks in use, those with a mapping of their own too, by address; the allocator's own are not among them.

    (address, size, the fewest and the most bytes that can have been asked for), all int64. A block begins 16 bytes
    behind its chunk.
    """
    found = [np.zeros((2, 0), np.uint64)]
    for segment in heap.segments:
        found.append(np.zeros((2, segment.in_use_chunks), np.uint64))
        _walk(target, heap, segment, *found[-1])
    in_segments = np.concatenate(found, 1)
    address, size = np.concatenate([in_segments, _own_mappings(target, heap)], 1).astype(np.int64)
    # What is too small to be a chunk stays with the one that it was split off; a mapping is kept while it fits well.
    slack = np.where(np.arange(len(address)) < in_segments.shape[1], _MIN_CHUNK - 8, _KEPT)
    least = np.where(size - slack <= _MIN_CHUNK, 1, size - slack - 15)
    order = np.argsort(address, kind="stable")
    order = order[~np.isin(address[order] + 16, [heap.address, *heap.records])]
    return address[order], size[order], least[order], size[order] - 8


def _own_mappings(target: Target, heap: LjAlloc) -> np.ndarray:
    """Addresses and sizes of the chunks that have a mapping of their own: wherever a page outside of the segments
    begins as such a chunk does (two rows, uint64)."""
    pages = [np.arange((start + 4095) & ~4095, end, 4096, dtype=np.uint64) for start, end in target.anonymous()]
    page = np.concatenate(pages) if pages else np.zeros(0, np.uint64)
    for segment in heap.segments:
        page = page[(page < segment.start) | (page >= segment.start + segment.size)]
    feet, _ = target.space.gather(page, np.uint64)
    page = page[feet == 1]
    heads, _ = target.space.gather(page + np.uint64(8), np.uint64)
    size = heads & ~np.uint64(3)
    fences, there = target.space.gather(page + size + np.uint64(8), np.uint64)
    found = (heads & np.uint64(3) == 2) & (size + np.uint64(_FOOT) & np.uint64(4095) == 0) & there & (fences == _FENCE)
    return np.stack([page[found], size[found]])


def direct_mapping(target: Target, block: int) -> tuple[int, int] | None:
    """(start, size) of the mapping of a block that lj_alloc mapped by itself, None when the block is no such one.

    Its chunk begins the mapping: it has bit 0 of prev_foot set and bit 0 of head clear, and a fencepost behind it.
    """
    start = (block - 16) & ~4095
    foot, head = target.word(start), target.word(start + 8)
    if foot != 1 or head is None or head & 3 != 2 or target.word(start + (head & ~3) + 8) != _FENCE:
        return None
    return start, (head & ~3) + _FOOT
