"""LuaJIT's own allocator: its segments, what is in use in them, and what it keeps free for the next objects.

Free memory here is not returned to the system unless a whole segment is free: it is a pool, not a leak.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from ..kernels import lj_alloc as kernel
from ..target.address_space import Absent
from ..target.layout import struct
from ..target.target import Target

# struct malloc_state of lj_alloc.c (LP64), the same in every release
MSPACE = struct(864, dvsize=(8, "u8"), topsize=(16, "u8"), dv=(24, "u8"), top=(32, "u8"), seg_base=(840, "u8"),
                seg_size=(848, "u8"), seg_next=(856, "u8"))
SEGMENT = struct(24, base=(0, "u8"), size=(8, "u8"), next=(16, "u8"))
DIRECT = 128 << 10              # blocks from here on can have a mapping of their own


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
    (start, size)."""

    address: int
    segments: list[Segment] = field(default_factory=list)
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
        at, seen = address + MSPACE.fields["seg_base"][1], set()
        while at and at not in seen:
            seen.add(at)
            row = space.struct(at, SEGMENT)
            segment = Segment(int(row["base"]), int(row["size"]))
            if not segment.size or segment.start & 15 or segment.size > 1 << 46:
                return None
            heap.segments.append(segment)
            at = int(row["next"])
    except Absent:
        return None
    if not any(segment.start <= address < segment.start + segment.size for segment in heap.segments):
        return None
    for segment in heap.segments:
        _walk(target, heap, segment, int(mspace["top"]), int(mspace["topsize"]))
    return heap


def _walk(target: Target, heap: LjAlloc, segment: Segment, top: int, top_size: int) -> None:
    """Fill in what a segment holds."""
    stop = segment.start + segment.size
    space = target.space
    table = space.table([(segment.start, stop)])
    found = kernel.walk(space.words, table.starts, table.ends, table.offsets, segment.start, stop, top)
    (segment.in_use_chunks, segment.in_use_bytes, segment.free_chunks, segment.free_bytes,
     end, why) = (int(x) for x in found)
    if end == top:
        segment.top_bytes = min(top_size, stop - end)
    rest = stop - end - segment.top_bytes
    if why:
        heap.notes.append(f"the segment at {segment.start:#x} could be walked only up to {end:#x}: "
                          f"{rest:,} bytes are not accounted for")
    else:
        segment.overhead = rest


def direct_mapping(target: Target, block: int) -> tuple[int, int] | None:
    """(start, size) of the mapping of a block that lj_alloc mapped by itself, None when the block is no such one.

    Such a block's chunk has bit 0 of prev_foot set and bit 0 of head clear; 32 bytes of the mapping are not its own.
    """
    foot, head = target.word(block - 16), target.word(block - 8)
    if foot is None or head is None or not foot & 1 or head & 1:
        return None
    offset, size = foot & ~1, head & ~3
    start = block - 16 - offset
    return (start, size + offset + 32) if not start & 4095 and size >= DIRECT - 32 and offset < 4096 else None
