"""Where the chunks of a glibc malloc lie: the brk heap, the heaps of other arenas, what was mmapped."""
from __future__ import annotations

import numpy as np

from ..kernels import chunks as kernel
from ..target.address_space import Absent
from ..target.target import Target
from . import glibc_layouts as layouts
from .blocks import Damage, Region, reserve
from .glibc_heap import Arena, GlibcHeap

PAGE = 4096                     # the smallest there is; larger ones are multiples of it
_IS_MMAPPED = 2


def clip(target: Target, heap: GlibcHeap, region: Region) -> bool:
    """Cut off what no mapping holds, which a damaged start or size may claim; whether anything is left."""
    start, end = region.start, region.end
    extent = target.extent(end - 1) or target.extent(start) or (start, start)
    region.start, region.end = max(start, (extent[0] + 15) & ~15), min(end, extent[1])
    if (region.start, region.end) != (start, end):
        heap.damage.append(Damage(start, f"a region of arena {region.arena} cannot be {start:#x}-{end:#x}: "
                                         "not all of it is mapped"))
    return region.end - region.start >= 32


def main_regions(target: Target, heap: GlibcHeap) -> list[Region]:
    """The main arena's brk heap, and its mmapped regions when brk failed it."""
    main = heap.arenas[0]
    top, end = int(main.fields["top"]), _top_end(target, heap)
    base = int(heap.parameters["sbrk_base"]) if heap.parameters is not None else 0
    if not base and main.contiguous and end:
        base = end - main.system_mem
    start = (base + 15) & ~15   # brk need not be aligned: the first bytes are then lost
    regions = []
    if base and main.contiguous:
        regions.append(Region(start, end or base + main.system_mem, "brk", 0, overhead=start - base))
    elif base:
        extent = target.extent(base)
        stop = _fence_after(target, start, extent[1]) or extent[1] if extent else base
        regions.append(Region(start, end if end and base <= top < stop else stop, "brk", 0, overhead=start - base))
    if not main.contiguous and end:
        regions += _morecore_regions(target, heap, regions, top, end)
    return regions


def _top_end(target: Target, heap: GlibcHeap) -> int:
    """Where the main arena's top chunk ends; 0, and the damage recorded, when that cannot be."""
    main = heap.arenas[0]
    top = int(main.fields["top"])
    word, extent = target.word(top + 8), target.extent(top)
    if extent is None or top & 15:
        heap.damage.append(Damage(main.address + heap.state.fields["top"][1],
                                  f"the top of arena 0, {top:#x}, is no chunk"))
        return 0
    if word is None:
        heap.damage.append(Damage(top, "the top chunk is not in the core"))
        return 0
    size = word & ~7
    if size < 16 or size & 15 or top + size > extent[1]:
        heap.damage.append(Damage(top, f"the size {size:#x} of the top chunk of arena 0 cannot be"))
        return extent[1]
    return top + size


def _morecore_regions(target: Target, heap: GlibcHeap, known: list[Region], top: int, end: int) -> list[Region]:
    """Regions that a main arena got by mmap when brk failed it: pages where chunks lead to a fencepost or to top.

    Nothing lists them. They are taken from low to high where the chain of sizes is whole, as long as the arena's
    system_mem leaves room.
    """
    found = []
    if not any(region.start <= top < region.end for region in known):
        found.append(Region(_morecore_start(target, heap, top, end), end, "mmap", 0))
    room = heap.arenas[0].system_mem - sum(region.end - region.start + region.overhead for region in known + found)
    for extent in target.anonymous():
        for at, high in _chunk_pages(target, *extent):
            if room < PAGE:
                return found
            inside = any(region.start <= at < region.end for region in known + found)
            stop = 0 if inside else _fence_after(target, at, high)
            if stop and stop - at <= room:
                found.append(Region(at, stop, "mmap", 0))
                room -= stop - at
    return found


def _chunk_pages(target: Target, start: int, end: int) -> list[tuple[int, int]]:
    """(address, end of what is present) of the pages in [start, end) that begin like a main arena's first chunk."""
    pages = []
    for low, high in target.space.present(start, end):
        first = (low + PAGE - 1) & ~(PAGE - 1)
        if high - first < PAGE:
            continue
        words = target.space.words_of(first, high & ~7)
        before, heads = words[::PAGE // 8], words[1::PAGE // 8]
        good = (before[:len(heads)] == 0) & (heads & np.uint64(15) == 1) & (heads >= 32) & (heads < high - first)
        pages += [(first + PAGE * int(k), high) for k in np.flatnonzero(good)]
    return pages


def _fence_after(target: Target, at: int, high: int) -> int:
    """Where the region of chunks that begins at page `at` ends (behind its fencepost, at a page),
    or 0 when it is none."""
    there = target.space.present(at, high)
    high = there[0][1] if there and there[0][0] == at else at
    room = (high - at) // 32 + 2
    scratch = reserve(room, np.uint64), reserve(room, np.uint64), reserve(room, np.uint8)
    buffer = buffer_of(target, target.space.table([(at, high)]))
    _, at, why = kernel.walk(*buffer, at, high, *scratch, 0, 0, room, np.zeros(2, np.uint64))
    behind = target.word(at + 24)
    if why != kernel.FENCE or behind is None or behind & ~7 not in (0, 16):
        return 0
    return at + 32 if not (at + 32) & (PAGE - 1) else 0


def _morecore_start(target: Target, heap: GlibcHeap, top: int, end: int) -> int:
    """The page at which the region of an mmapped top begins: the lowest from which sizes lead to top."""
    extent = target.extent(top)
    if extent is None:
        return top
    low = max(extent[0], end - heap.arenas[0].system_mem)
    table = target.space.table([(low, top + 16)])
    at = (low + PAGE - 1) & ~(PAGE - 1)
    reach = Reach(buffer_of(target, table), at, top, fences=False)
    while at < top:
        start = reach.resume(at, least=kernel.ANCHORED)
        if not start:
            break
        if not start & (PAGE - 1):
            return start
        at = (start + PAGE - 1) & ~(PAGE - 1)
    return top


def heap_regions(target: Target, heap: GlibcHeap, arena: Arena) -> list[Region]:
    """The heaps of a non-main arena, from the one its top lies in back to its first."""
    top = int(arena.fields["top"])
    span = heap.heap_max
    info_type = layouts.latest(layouts.HEAP_INFO, heap.release)
    at, regions = top & ~(span - 1), []
    while at and len(regions) < 65536:
        try:
            info = target.space.struct(at, info_type)
        except Absent:
            heap.damage.append(Damage(at, f"the head of a heap of arena {arena.index} is not in the core"))
            break
        size, previous = int(info["size"]), int(info["prev"])
        if int(info["ar_ptr"]) != arena.address or not 0 < size <= span or any(r.start <= at < r.end for r in regions):
            heap.damage.append(Damage(at, f"the head of a heap of arena {arena.index} should be here, and is not"))
            if regions or not at < top:
                break
            size, previous = top + ((target.word(top + 8) or 0) & ~7) - at, 0   # the last heap ends with top
            if not 0 < size <= span:
                break
        start = at + info_type.itemsize
        if start <= arena.address < at + size:
            start = arena.address + heap.state.itemsize
        start = (start + 15) & ~15
        regions.append(Region(start, at + size, "heap", arena.index, overhead=start - at))
        at = previous
    return regions


def mmapped_regions(target: Target, heap: GlibcHeap, taken: list[Region]) -> list[Region]:
    """Chunks with a mapping of their own: no list names them, their headers at page boundaries do.

    Candidates are taken from low to high, what lies inside an accepted one is its contents. mp_ counts them: when ours
    are not as many, the report says so.
    """
    if heap.parameters is not None and not int(heap.parameters["n_mmaps"]):
        return []
    extra = 16 if heap.release >= layouts.MMAPPED_WITHOUT_HEADER else 0
    stacks = {thread.stack for thread in target.threads if thread.stack}
    spans = sorted([(region.start, region.end) for region in taken] + list(stacks))
    found: list[tuple[int, int, int]] = []
    k = 0
    for low, high in target.anonymous():
        while k < len(spans) and spans[k][1] <= low:
            k += 1
        at = k
        while low < high:
            start, end = spans[at] if at < len(spans) and spans[at][0] < high else (high, high)
            if low < start:
                found += _mmapped_candidates(target.space, low, start, extra)
            low, at = max(low, end), at + 1
    regions: list[Region] = []
    last = 0
    for base, negative_lead, end in sorted(set(found)):
        if base < last:
            continue
        regions.append(Region(base, end, "mmapped", 0, first=-negative_lead))
        last = end
    return regions


def _mmapped_candidates(space, start: int, end: int, extra: int) -> list[tuple[int, int, int]]:
    """(base, -bytes before the header, end) of what can be mmapped chunks in [start, end),
    sorted as they are to be taken.

    The header of a memalign'd one lies 16 bytes before an aligned address; its prev_size says how far from the base.
    """
    found = []
    for low, high in space.present(start, end):
        first = (low + PAGE - 1) & ~(PAGE - 1)
        if high - first < PAGE:
            continue
        words = space.words_of(first, high & ~7)
        for lead in (0, 16, 48, 112, 240, 496, 1008, 2032, PAGE - 16):
            previous = words[lead // 8::PAGE // 8]
            heads = words[lead // 8 + 1::PAGE // 8]
            n = min(len(previous), len(heads))
            previous, heads = previous[:n] & np.uint64(0xfffffffffffffff8), heads[:n]
            size = heads & np.uint64(0xfffffffffffffff8)
            header = np.arange(n, dtype=np.uint64) * np.uint64(PAGE) + np.uint64(first + lead)
            base = header - previous
            tail = header + size + np.uint64(extra)
            good = (heads & np.uint64(7) == _IS_MMAPPED) & (size >= 32) & (size <= np.uint64(end - start))
            good &= (previous <= header - np.uint64(start)) & (base & np.uint64(PAGE - 1) == 0)
            good &= (tail & np.uint64(PAGE - 1) == 0) & (tail <= np.uint64(end))
            for k in np.flatnonzero(good):
                found.append((int(base[k]), -int(previous[k]), int(tail[k])))
    return found


def buffer_of(target: Target, table):
    return target.space.words, table.starts, table.ends, table.offsets


class Reach:
    """Where chunks can go on in [start, stop), asked as often as the walk breaks;
    worked out once, from the end backwards."""

    CHAIN = 64                  # so many plausible chunks in a row are taken for chunks

    def __init__(self, buffer, start: int, stop: int, fences: bool = True):
        self.buffer, self.start, self.slots = buffer, start, (stop - start) // 16
        self.steps = reserve(self.slots + 1, np.uint8)
        self.steps[self.slots] = kernel.ANCHORED
        slot, behind = self.slots, 32
        while slot > 0:
            slot, behind = kernel.reach(*buffer, start, stop, slot, 1 << 22, behind, fences, self.steps)

    def resume(self, at: int, fresh: bool = False, least: int = CHAIN) -> int:
        """The address from `at` on where chunks go on, or 0."""
        slot = kernel.resume(*self.buffer, self.start, max((at - self.start + 15) // 16, 0), self.slots, least, fresh,
                             self.steps)
        return self.start + 16 * slot if slot >= 0 else 0
