"""What one libc's malloc is: its arenas, regions, blocks and thread caches, and the questions it answers."""
from __future__ import annotations

import bisect
import mmap
from dataclasses import dataclass, field

import numpy as np

from ..target.elf import Module
from . import glibc_layouts as layouts
from .blocks import Blocks, Check, Damage, Region

NONCONTIGUOUS = 2               # malloc_state.flags
_MIN_SIZE = 32                  # MINSIZE: no chunk is smaller


@dataclass
class Arena:
    """One malloc_state: `index` 0 is main. `fields`: the structure as it lies in memory."""

    index: int
    address: int
    fields: np.void
    fast_blocks: int = 0
    fast_bytes: int = 0
    bin_blocks: int = 0
    bin_bytes: int = 0
    top_bytes: int = 0
    tcached_blocks: int = 0
    tcached_bytes: int = 0

    @property
    def system_mem(self) -> int:
        return int(self.fields["system_mem"])

    @property
    def locked(self) -> bool:
        return int(self.fields["mutex"]) != 0

    @property
    def contiguous(self) -> bool:
        return not int(self.fields["flags"]) & NONCONTIGUOUS


@dataclass
class Tcache:
    """One thread's cache: the address of its struct, the thread that owns it when one does, what it holds."""

    address: int
    lwp: int = 0
    blocks: int = 0
    bytes: int = 0


@dataclass
class MallInfo:
    """The fields of mallinfo2(3), as this moment's call in the process would return them."""

    arena: int = 0
    ordblks: int = 0
    smblks: int = 0
    hblks: int = 0
    hblkhd: int = 0
    usmblks: int = 0
    fsmblks: int = 0
    uordblks: int = 0
    fordblks: int = 0
    keepcost: int = 0


@dataclass
class GlibcHeap:
    """The malloc of one libc: arenas, regions, blocks, thread caches, and what is wrong with them."""

    module: Module
    release: tuple[int, int]
    release_from: str                       # how the release is known
    layout_from: str                        # "debug information" or "tables"
    state: np.dtype
    main: int                               # address of main_arena
    parameters: np.void | None = None       # mp_
    parameters_at: int = 0
    arenas: list[Arena] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)     # sorted
    region_starts: list[int] = field(default_factory=list)
    blocks: Blocks = field(default_factory=lambda: Blocks(*(np.zeros(0, t) for t in (np.uint64, np.uint64, np.uint8))))
    tcaches: list[Tcache] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    # -- what every heap answers --------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        return f"glibc {self.release[0]}.{self.release[1]} malloc"

    @property
    def heap_max(self) -> int:
        """Bytes of address space that a heap of a non-main arena is given, and aligned to."""
        named = self.parameters is not None and "hp_pagesize" in self.parameters.dtype.names
        huge = int(self.parameters["hp_pagesize"]) if named else 0
        return 4 * huge if 4096 <= huge <= 1 << 30 and not huge & (huge - 1) else layouts.HEAP_MAX

    def region_at(self, address: int) -> Region | None:
        """The region that holds `address`, or None."""
        k = bisect.bisect_right(self.region_starts, address) - 1
        return self.regions[k] if k >= 0 and address < self.regions[k].end else None

    def base_of(self, region: Region) -> int:
        """Where a region begins with what precedes its first chunk: a heap_info, or what aligns the break."""
        if region.kind == "heap":
            return region.start & ~(mmap.PAGESIZE - 1)
        lowest = int(self.parameters["sbrk_base"]) if region.kind == "brk" and self.parameters is not None else 0
        return lowest if region.start - 16 < lowest <= region.start else region.start

    def usable(self, row: int, region: Region | None = None) -> int:
        """Bytes of the block that are the program's: what malloc_usable_size() says.
        `region`: the block's, when known."""
        region = region or self.region_at(int(self.blocks.address[row]) - 16)
        if region is None or region.kind != "mmapped":
            return int(self.blocks.size[row]) - 8
        return int(self.blocks.size[row]) - (24 if self.release >= layouts.MMAPPED_WITHOUT_HEADER else 16)

    def metadata(self) -> list[int]:
        """User addresses of the blocks that are the allocator's own: the thread caches' structs."""
        return [tcache.address for tcache in self.tcaches]

    def mallinfo(self, arena: Arena | None = None) -> MallInfo:
        """mallinfo2() of the process, or of one arena (then without what is not part of an arena)."""
        info = MallInfo()
        for one in self.arenas if arena is None else [arena]:
            free = one.top_bytes + one.bin_bytes + one.fast_bytes
            info.arena += one.system_mem
            info.ordblks += one.bin_blocks + 1
            info.smblks += one.fast_blocks
            info.fsmblks += one.fast_bytes
            info.fordblks += free
            info.uordblks += one.system_mem - free
            if one.index == 0:
                info.keepcost = one.top_bytes
        if self.parameters is not None and (arena is None or arena.index == 0):
            info.hblks = int(self.parameters["n_mmaps"])
            info.hblkhd = int(self.parameters["mmapped_mem"])
            if "max_total_mem" in self.parameters.dtype.names:
                info.usmblks = int(self.parameters["max_total_mem"])
        return info

    def checks(self) -> list[Check]:
        """Per arena: chunks, headers, foreign and damaged bytes against system_mem; mmapped chunks against mp_."""
        sums = {arena.index: 0 for arena in self.arenas}
        mmapped = 0
        size = self.blocks.size
        for region in self.regions:
            total = int(size[region.first:region.last].sum()) + region.overhead
            total += sum(end - start for start, end in region.foreign)
            if region.kind == "mmapped":
                mmapped += total
            else:
                sums[region.arena] += total
        checks = [Check(f"arena {arena.index}: chunks + headers = system_mem", sums[arena.index], arena.system_mem)
                  for arena in self.arenas]
        if self.parameters is not None:
            checks.append(Check("mmapped chunks = mp_.mmapped_mem", mmapped, int(self.parameters["mmapped_mem"])))
        return checks


def asked_for(address: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The fewest and the most bytes that can have been asked for, of blocks in use by address and bytes of the chunk.

    What is too small to be a chunk stays with the one that it was split off; a mapping of its own is whole pages.
    """
    whole = (address - 16 | size) & mmap.PAGESIZE - 1 == 0
    return np.where(size <= _MIN_SIZE, 0, size - np.where(whole, 16 + mmap.PAGESIZE, 8 + _MIN_SIZE) + 1), size - 8
