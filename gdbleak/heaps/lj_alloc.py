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
MSPACE_PRNG = 864              # from mid-2020 on a pointer to g->prng follows


@dataclass
class LjAlloc:
    """One mspace. Bytes are chunks, headers included; `overhead`: the fenceposts at the segments' ends."""

    address: int
    segments: list[tuple[int, int]] = field(default_factory=list)    # start, size
    in_use_chunks: int = 0
    in_use_bytes: int = 0
    free_chunks: int = 0
    free_bytes: int = 0         # in bins and as the designated victim
    top_bytes: int = 0
    overhead: int = 0
    direct: list[tuple[int, int]] = field(default_factory=list)      # mappings of large blocks: start, size
    notes: list[str] = field(default_factory=list)

    @property
    def footprint(self) -> int:
        """Bytes mapped: segments and direct mappings."""
        return sum(size for _, size in self.segments) + sum(size for _, size in self.direct)


def read(target: Target, address: int) -> LjAlloc | None:
    """The mspace at `address` (g->allocd), walked; None when there is none."""
    space = target.space
    heap = LjAlloc(address)
    try:
        mspace = space.struct(address, MSPACE)
        top = int(mspace["top"])
        heap.top_bytes = int(mspace["topsize"])
        at = address + MSPACE.fields["seg_base"][1]
        seen = set()
        while at and at not in seen:
            seen.add(at)
            segment = space.struct(at, SEGMENT)
            start, size = int(segment["base"]), int(segment["size"])
            if not size or start & 15 or size > 1 << 46:
                return None
            heap.segments.append((start, size))
            at = int(segment["next"])
    except Absent:
        return None
    first = heap.segments[0]
    if not any(start <= address < start + size for start, size in heap.segments) and not first[0] <= top < first[0] + first[1]:
        return None
    table = space.table([(start, start + size) for start, size in heap.segments])
    for start, size in heap.segments:
        found = kernel.walk(space.words, table.starts, table.ends, table.offsets, start, start + size, top)
        in_use, used, free, free_bytes, end, why = (int(value) for value in found)
        heap.in_use_chunks += in_use
        heap.in_use_bytes += used
        heap.free_chunks += free
        heap.free_bytes += free_bytes
        tail = start + size - end - (heap.top_bytes if end == top else 0)
        if why:
            heap.notes.append(f"the segment at {start:#x} could be walked only up to {end:#x}; {tail:,} bytes are not accounted for")
        else:
            heap.overhead += tail
    return heap


def direct_mapping(target: Target, block: int) -> tuple[int, int] | None:
    """(start, size) of the mapping of a block that lj_alloc mapped by itself, None when the block is no such one.

    Such a block's chunk has bit 0 of prev_foot set and bit 0 of head clear; 32 bytes of the mapping are not its own.
    """
    foot, head = target.word(block - 16), target.word(block - 8)
    if foot is None or head is None or not foot & 1 or head & 1:
        return None
    offset, size = foot & ~1, head & ~3
    start = block - 16 - offset
    return (start, size + offset + 32) if not start & 4095 and size >= 128 << 10 and offset < 4096 else None
