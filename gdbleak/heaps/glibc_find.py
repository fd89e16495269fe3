"""Finding main_arena, mp_ and the release of a glibc, with or without symbols.

main_arena is found by its shape: 127 bins in a row that point to themselves or to chunks that point back, and a `next`
ring that closes. mp_ is found near it by its own invariants.
"""
from __future__ import annotations

import re

import numpy as np

from ..target.address_space import Absent
from ..target.elf import Module
from ..target.target import Target
from . import glibc_layouts as layouts
from .glibc_heap import GlibcHeap

_BINS = 127
_LEAST_EMPTY, _LEAST_IN_USE = 8, 64      # of those; a thread may be at some of them, and some may be damaged
SHAPE = "the shape of its structures"
_BANNER = re.compile(rb"GNU C Library [^\n\0]{0,120}?release version (\d+)\.(\d+)")


def find_main_arena(target: Target, module: Module, with_empty_bins: bool):
    """(address, dtype, release it came with, where the layout is from) of a used main_arena in the module's data,
    or None. with_empty_bins: by those, which most heaps have, at once; else by all bins: one that has run for long may
    have none that is empty."""
    shape, least = (_empty, _LEAST_EMPTY) if with_empty_bins else (_in_use, _LEAST_IN_USE)
    for start, end in module.writable():
        for low, high in target.space.present((start + 7) & ~7, end & ~7):
            low, high = (low + 7) & ~7, high & ~7
            words = target.space.words_of(low, high)
            if len(words) < layouts.NBINS:
                continue
            # As a chunk, a bin begins 16 bytes before its two words.
            own = np.arange(len(words) - 1, dtype=np.uint64) * np.uint64(8) + np.uint64((low - 16) % (1 << 64))
            found = _arena_at(target, _bin_runs(shape(target, words, own), low, least))
            if found:
                return found
    return None


def _arena_at(target, places):
    """What `find_main_arena` returns, of the first place where bins may begin that is in an arena; else None."""
    for at in places:
        for since, dtype in layouts.MALLOC_STATE.items():
            address = at - dtype.fields["bins"][1]
            if _is_arena(target, address, dtype):
                dwarf = target.layouts.dwarf("malloc_state", dtype)
                if dwarf is not None and _is_arena(target, address, dwarf):
                    return address, dwarf, since, "debug information"
                return address, dtype, since, "tables"
    return None


def _empty(_target, words, own):
    """Which pairs of words are an empty bin, and point to themselves."""
    return (words[:-1] == own) & (words[1:] == own)


def _in_use(target, words, own):
    """Which pairs of words are a bin, empty or with a first or last chunk that points back."""
    found = _empty(target, words, own)
    maps = [m for m in target.mappings if m.writable and not m.path.startswith("/")]      # where chunks may lie
    if not maps:
        return found
    starts, ends = (np.array([getattr(m, name) for m in maps], np.uint64) for name in ("start", "end"))
    inside = (words & np.uint64(15) == 0) & (words >= starts[0]) & (words < ends[-1])
    pairs = np.flatnonzero(inside[:-1] & inside[1:] & ~found)
    possible = found.copy()
    first, last = (words[at] < ends[np.searchsorted(starts, words[at], "right") - 1] for at in (pairs, pairs + 1))
    possible[pairs] = first & last
    for at in _bin_runs(possible, 0, _LEAST_IN_USE):
        for k in range(at // 8, min(at // 8 + 2 * _BINS, len(found)), 2):
            if possible[k] and not found[k]:
                possible[k] = False
                first, last, bin_ = int(words[k]), int(words[k + 1]), int(own[k])
                found[k] = target.word(first + 24) == bin_ or target.word(last + 16) == bin_
    return found


def _bin_runs(is_bin: np.ndarray, start: int, least: int) -> list[int]:
    """Addresses where the bins may begin: at least so many of them are some. start: the address of the first pair."""
    if np.count_nonzero(is_bin) < least:
        return []
    found = []
    for parity in (0, 1):
        counts = np.concatenate(([0], np.cumsum(is_bin[parity::2])))
        if len(counts) <= _BINS:
            continue
        window = counts[_BINS:] - counts[:-_BINS]
        for k in np.flatnonzero(window >= least):
            found.append((int(window[k]), start + 8 * (2 * int(k) + parity)))
    return [at for _, at in sorted(found, reverse=True)]


def _is_arena(target: Target, address: int, dtype: np.dtype) -> bool:
    """Whether a malloc_state lies at `address`: the ring of arenas closes and its counters are possible."""
    at, seen = address, 0
    offset = dtype.fields["next"][1]
    while True:
        at = target.word(at + offset)
        seen += 1
        if not at or at & 7 or seen > 65536:
            return False
        if at == address:
            break
    try:
        arena = target.space.struct(address, dtype)
    except Absent:
        return False
    system, most, top = int(arena["system_mem"]), int(arena["max_system_mem"]), int(arena["top"])
    if "attached_threads" in dtype.names and int(arena["attached_threads"]) > 1 << 20:
        return False
    bins_at = address + dtype.fields["bins"][1]
    if not system:   # a main arena that gave nothing out: its top still is the first bin
        return top == bins_at - 16 and most == 0
    return 4096 <= system <= most < 1 << 47


def release_of(target: Target, module: Module, since: tuple[int, int]) -> tuple[tuple[int, int], str]:
    """The glibc release of a module and how it is known: its banner, its symbol versions, else the arena's shape."""
    def texts():
        if module.file is not None:
            with open(module.file.path, "rb") as stream:
                yield stream.read()
        for mapping in target.mappings:
            if module.start <= mapping.start < module.end and "r" in mapping.perms:
                for low, high in target.space.present(mapping.start, mapping.end):
                    yield target.space.read(low, high - low)

    versions = set()
    for text in texts():
        banner = _BANNER.search(text)
        if banner:
            return (int(banner[1]), int(banner[2])), "its version text"
        versions |= {(int(a), int(b)) for a, b in re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?=\0)", text)}
    if versions and "libc" in module.name:
        return max(versions), "its newest symbol version"
    return since, SHAPE


def find_parameters(target: Target, module: Module, heap: GlibcHeap, since: tuple[int, int]) -> None:
    """Find mp_ in the module's data: the address where most of its invariants hold, and set it in `heap`."""
    following = min((key for key in layouts.MALLOC_STATE if key > since), default=(9, 9))
    tables = {key: dtype for key, dtype in layouts.MALLOC_PAR.items()
              if key < following and key >= max(k for k in layouts.MALLOC_PAR if k <= since)}
    best = (0, 0, None)
    main = heap.arenas[0]
    top = int(main.fields["top"])
    for start, end in module.writable():
        for low, high in target.space.present((start + 7) & ~7, end & ~7):
            words = target.space.words_of((low + 7) & ~7, high & ~7)
            for dtype in tables.values():
                score, k = _parameter_score(words, dtype, top, main.system_mem if main.contiguous else 0)
                if score > best[0]:
                    best = (score, ((low + 7) & ~7) + 8 * k, dtype)
    score, address, dtype = best
    if dtype is None or score < 9:
        heap.notes.append("mp_ was not found: mmapped chunks and the start of the main heap are inferred")
        return
    dwarf = target.layouts.dwarf("malloc_par", dtype) if heap.layout_from == "debug information" else None
    if heap.release_from == SHAPE:           # mp_ has changed more often than main_arena
        heap.release = max(heap.release, next(key for key, table in tables.items() if table is dtype))
    heap.parameters_at = address
    heap.parameters = target.space.struct(address, dwarf or dtype)


def _parameter_score(words: np.ndarray, dtype: np.dtype, top: int, system: int) -> tuple[int, int]:
    """The best (score, index of the word) at which `dtype`, a malloc_par, can lie in `words`."""
    count = len(words) - dtype.itemsize // 8 + 1
    if count <= 0:
        return 0, 0
    halves = words.view(np.uint32)

    def field_of(name):
        form, offset = dtype.fields[name][:2]
        if form.itemsize == 8:
            return words[offset // 8:offset // 8 + count]
        return halves[offset // 4:offset // 4 + 2 * count:2][:count]

    n, most, limit = field_of("n_mmaps"), field_of("max_n_mmaps"), field_of("n_mmaps_max")
    mapped, high = field_of("mmapped_mem"), field_of("max_mmapped_mem")
    base = field_of("sbrk_base")
    possible = (n <= most) & (mapped <= high) & (mapped & np.uint64(15) == 0) & (high & np.uint64(15) == 0)
    possible &= (n == 0) | (mapped != 0)       # 2.43 does not come back to 0: its mremap counts 16 bytes too many
    possible &= (most == 0) == (high == 0)
    span = np.uint64(top) - base
    holds = (base != 0) & (base <= np.uint64(top)) & (span < np.uint64(max(system, 1)))
    score = 4 * (limit == 65536) + 6 * holds.astype(np.int64)
    score += 2 * (base == 0) * (system == 0)
    score += field_of("top_pad") == 0x20000
    score += (field_of("arena_test") == 8) | (field_of("arena_test") == 2)
    score += (field_of("mmap_threshold") >= 1 << 10) & (field_of("mmap_threshold") <= 1 << 36)
    score += 2 * (field_of("trim_threshold") >= 1 << 12).astype(np.int64)
    if "tcache_bins" in dtype.names:
        score += 2 * (field_of("tcache_bins") == 64) + 2 * (field_of("tcache_count") <= 0xffff)
        score -= 4 * (field_of("tcache_bins") > 128)
    score = np.where(possible, score, 0)
    k = int(np.argmax(score))
    return int(score[k]), k
