"""glibc's malloc structures, release by release (LP64), as offsets compiled from each release's own source.

A release that is not named has the layout of the last one before it. `TESTED` are the releases whose real processes the
test suite compares with their own mallinfo; the others come from these tables alone.
"""
from __future__ import annotations

import numpy as np

from ..target.layout import struct

TESTED = {(2, 31), (2, 36), (2, 41), (2, 43)}
NBINS = 254                    # words of malloc_state.bins: 127 pairs


def _state(size, bins, following, top, fastbins, attached, system) -> np.dtype:
    fields = dict(mutex=(0, "i4"), flags=(4, "i4"), top=(top, "u8"), bins=(bins, f"({NBINS},)u8"),
                  next=(following, "u8"), system_mem=(system, "u8"), max_system_mem=(system + 8, "u8"))
    if fastbins:
        fields["fastbinsY"] = (fastbins, "(10,)u8")
    if attached:
        fields["attached_threads"] = (attached, "u8")
    return struct(size, **fields)


# struct malloc_state, by the release it came with
MALLOC_STATE = {
    (2, 17): _state(2184, 104, 2152, 88, 8, 0, 2168),
    (2, 23): _state(2192, 104, 2152, 88, 8, 2168, 2176),
    (2, 27): _state(2200, 112, 2160, 96, 16, 2176, 2184),
    (2, 43): _state(2112, 24, 2072, 8, 0, 2088, 2096),
}


def _par(size, n_mmaps, mmapped, sbrk_base, tcache=0, total=0, hp_pagesize=0) -> np.dtype:
    fields = dict(trim_threshold=(0, "u8"), top_pad=(8, "u8"), mmap_threshold=(16, "u8"), arena_test=(24, "u8"),
                  arena_max=(32, "u8"), n_mmaps=(n_mmaps, "i4"), n_mmaps_max=(n_mmaps + 4, "i4"),
                  max_n_mmaps=(n_mmaps + 8, "i4"), mmapped_mem=(mmapped, "u8"), max_mmapped_mem=(mmapped + 8, "u8"),
                  sbrk_base=(sbrk_base, "u8"))
    if total:
        fields["max_total_mem"] = (total, "u8")
    if tcache:
        fields.update(tcache_bins=(tcache, "u8"), tcache_max_bytes=(tcache + 8, "u8"), tcache_count=(tcache + 16, "u8"))
    if hp_pagesize:
        fields["hp_pagesize"] = (hp_pagesize, "u8")
    return struct(size, **fields)


# struct malloc_par (mp_), by the release it came with
MALLOC_PAR = {
    (2, 17): _par(88, 40, 56, 80, total=72),
    (2, 24): _par(80, 40, 56, 72),
    (2, 26): _par(112, 40, 56, 72, tcache=80),
    (2, 35): _par(136, 60, 80, 96, tcache=104, hp_pagesize=48),
    (2, 43): _par(144, 68, 88, 104, tcache=112, hp_pagesize=56),
}

HEAP_INFO = {
    (2, 17): struct(32, ar_ptr=(0, "u8"), prev=(8, "u8"), size=(16, "u8"), mprotect_size=(24, "u8")),
    (2, 35): struct(48, ar_ptr=(0, "u8"), prev=(8, "u8"), size=(16, "u8"), mprotect_size=(24, "u8"),
                    pagesize=(32, "u8")),
}

# struct tcache_perthread_struct: bytes a counter, bins, offset of entries, size
TCACHE = {(2, 26): (1, 64, 64, 576), (2, 30): (2, 64, 128, 640), (2, 42): (2, 76, 152, 760)}

HEAP_MAX = 64 << 20            # HEAP_MAX_SIZE on LP64, without huge pages
SAFE_LINKING = (2, 32)
MMAPPED_WITHOUT_HEADER = (2, 43)   # from here on an mmapped chunk's size leaves out its own header


def latest(table: dict, release: tuple[int, int]):
    """The entry of the last release at or before `release`, or None."""
    best = max((key for key in table if key <= release), default=None)
    return None if best is None else table[best]


def tcache_bin_sizes(release: tuple[int, int]) -> list[int]:
    """For each tcache bin the chunk size its entries have; 0 for a bin that holds a range of sizes."""
    layout = latest(TCACHE, release)
    if layout is None:
        return []
    return [32 + 16 * k for k in range(64)] + [0] * (layout[1] - 64)
