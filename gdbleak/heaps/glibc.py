"""glibc malloc: every arena, heap and chunk of every libc in the target, with or without debug information.

main_arena is found by its shape: 127 bins in a row that point to themselves or to chunks that point back, and a `next` ring
that closes. mp_ is found near it by its own invariants. What they say is then checked against the walk of the chunks.
"""
from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field

import numpy as np

from .. import channel
from ..kernels import chunks as kernel
from ..target.address_space import Absent
from ..target.elf import Module
from ..target.target import Target
from . import glibc_layouts as layouts
from .blocks import Blocks, Check, Damage, Region, reserve

PAGE = 4096                     # the smallest there is; larger ones are multiples of it
TILE = 200_000                  # chunks a kernel call: how long Ctrl-C may have to wait
NONCONTIGUOUS = 2               # malloc_state.flags
_IS_MMAPPED = 2
_BANNER = re.compile(rb"GNU C Library [^\n\0]{0,120}?release version (\d+)\.(\d+)")


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
        return 4 * huge if PAGE <= huge <= 1 << 30 and not huge & (huge - 1) else layouts.HEAP_MAX

    def region_at(self, address: int) -> Region | None:
        """The region that holds `address`, or None."""
        k = bisect.bisect_right(self.region_starts, address) - 1
        return self.regions[k] if k >= 0 and address < self.regions[k].end else None

    def usable(self, row: int, region: Region | None = None) -> int:
        """Bytes of the block that are the program's: what malloc_usable_size() says. `region`: the block's, when known."""
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


def find(target: Target) -> list[GlibcHeap]:
    """Every glibc malloc in the target that has been used, walked. An empty list when there is none."""
    found = []
    for module in target.modules:
        place = _find_main_arena(target, module)
        if place is not None:
            found.append(_walked(target, module, *place))
    return found


# -- finding ------------------------------------------------------------------------------------------------------------
def _find_main_arena(target: Target, module: Module):
    """(address, dtype, release it came with, where the layout is from) of a used main_arena in the module's data, or None."""
    for start, end in module.writable():
        for low, high in target.space.present((start + 7) & ~7, end & ~7):
            words = target.space.words_of((low + 7) & ~7, high & ~7)
            for at in _bin_runs(words, (low + 7) & ~7):
                for since, dtype in layouts.MALLOC_STATE.items():
                    address = at - dtype.fields["bins"][1]
                    if _is_arena(target, address, dtype):
                        dwarf = target.layouts.dwarf("malloc_state", dtype)
                        if dwarf is not None and _is_arena(target, address, dwarf):
                            return address, dwarf, since, "debug information"
                        return address, dtype, since, "tables"
    return None


def _bin_runs(words: np.ndarray, start: int) -> list[int]:
    """Addresses where 127 bins may begin: at least 8 of them point to themselves, as an empty bin does."""
    if len(words) < layouts.NBINS:
        return []
    own = np.arange(len(words) - 1, dtype=np.uint64) * np.uint64(8) + np.uint64((start - 16) % (1 << 64))
    empty = (words[:-1] == own) & (words[1:] == own)
    hits = np.flatnonzero(empty)
    if len(hits) < 8:
        return []
    found = []
    for parity in (0, 1):
        counts = np.concatenate(([0], np.cumsum(empty[parity::2])))
        if len(counts) <= 127:
            continue
        window = counts[127:] - counts[:-127]
        for k in np.flatnonzero(window >= 8):
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


def _release(target: Target, module: Module, since: tuple[int, int]) -> tuple[tuple[int, int], str]:
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
    return since, "the shape of its main_arena"


def _find_parameters(target: Target, module: Module, heap: GlibcHeap, since: tuple[int, int]) -> None:
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


# -- walking ------------------------------------------------------------------------------------------------------------
def _walked(target: Target, module: Module, address: int, dtype: np.dtype, since, origin: str) -> GlibcHeap:
    release, how = _release(target, module, since)
    heap = GlibcHeap(module, release, how, origin, dtype, address)
    at = address
    while True:
        heap.arenas.append(Arena(len(heap.arenas), at, target.space.struct(at, dtype)))
        at = target.word(at + dtype.fields["next"][1])
        if at == address:
            break
    _find_parameters(target, module, heap, since)
    specs = []
    for arena in heap.arenas:
        if arena.locked:
            heap.notes.append(f"arena {arena.index} is locked: a thread was stopped inside malloc or free; "
                              "the sums of that arena may be off by what it was about to do")
        if arena.system_mem:
            found = _main_regions(target, heap) if arena.index == 0 else _heap_regions(target, heap, arena)
            specs += [region for region in found if _clip(target, heap, region)]
    specs += _mmapped_regions(target, heap, specs)
    _Walk(target, heap, specs).run()
    return heap


def _clip(target: Target, heap: GlibcHeap, region: Region) -> bool:
    """Cut off what no mapping holds, which a damaged start or size may claim; whether anything is left."""
    start, end = region.start, region.end
    extent = target.extent(end - 1) or target.extent(start) or (start, start)
    region.start, region.end = max(start, (extent[0] + 15) & ~15), min(end, extent[1])
    if (region.start, region.end) != (start, end):
        heap.damage.append(Damage(start, f"a region of arena {region.arena} cannot be {start:#x}-{end:#x}: "
                                         "not all of it is mapped"))
    return region.end - region.start >= 32


def _main_regions(target: Target, heap: GlibcHeap) -> list[Region]:
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
        heap.damage.append(Damage(main.address + heap.state.fields["top"][1], f"the top of arena 0, {top:#x}, is no chunk"))
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
    """Where the region of chunks that begins at page `at` ends (behind its fencepost, at a page), or 0 when it is none."""
    room = (high - at) // 32 + 2
    scratch = reserve(room, np.uint64), reserve(room, np.uint64), reserve(room, np.uint8)
    buffer = _buffer(target, target.space.table([(at, high)]))
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
    reach = _Reach(_buffer(target, table), at, top)
    while at < top:
        start = reach.resume(at, least=kernel.ANCHORED)
        if not start:
            break
        if not start & (PAGE - 1):
            return start
        at = (start + PAGE - 1) & ~(PAGE - 1)
    return top


def _heap_regions(target: Target, heap: GlibcHeap, arena: Arena) -> list[Region]:
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


def _mmapped_regions(target: Target, heap: GlibcHeap, taken: list[Region]) -> list[Region]:
    """Chunks with a mapping of their own: no list names them, their headers at page boundaries do.

    Candidates are taken from low to high, what lies inside an accepted one is its contents. mp_ counts them: when ours are not as
    many, the report says so.
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
    """(base, -bytes before the header, end) of what can be mmapped chunks in [start, end), sorted as they are to be taken.

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


def _buffer(target: Target, table):
    return target.space.words, table.starts, table.ends, table.offsets


class _Reach:
    """Where chunks can go on in [start, stop), asked as often as the walk breaks; worked out once, from the end backwards."""

    CHAIN = 64                  # so many plausible chunks in a row are taken for chunks

    def __init__(self, buffer, start: int, stop: int):
        self.buffer, self.start, self.slots = buffer, start, (stop - start) // 16
        self.steps = reserve(self.slots + 1, np.uint8)
        self.steps[self.slots] = kernel.ANCHORED
        slot, behind = self.slots, 32
        while slot > 0:
            slot, behind = kernel.reach(*buffer, start, stop, slot, 1 << 22, behind, self.steps)

    def resume(self, at: int, fresh: bool = False, least: int = CHAIN) -> int:
        """The address from `at` on where chunks go on, or 0."""
        slot = kernel.resume(*self.buffer, self.start, max((at - self.start + 15) // 16, 0), self.slots, least, fresh, self.steps)
        return self.start + 16 * slot if slot >= 0 else 0


class _Walk:
    """One pass over all regions of a heap: fills its blocks, then marks what the free lists hold."""

    def __init__(self, target: Target, heap: GlibcHeap, regions: list[Region]):
        self.target, self.heap = target, heap
        self.regions = sorted(regions, key=lambda region: region.start)
        self.tops = {int(arena.fields["top"]): arena for arena in heap.arenas if arena.system_mem}
        room = sum((region.end - region.start) // 32 + 2 for region in regions)
        self.address, self.size = reserve(room, np.uint64), reserve(room, np.uint64)
        self.state = reserve(room, np.uint8)
        self.n = 0

    def run(self) -> None:
        table = self.target.space.table([(region.start, region.end) for region in self.regions])
        self.buffer = _buffer(self.target, table)
        for region in self.regions:
            lead, region.first = region.first, self.n
            if region.kind == "mmapped":
                self._append(region.start + lead, region.end - region.start - lead, kernel.IN_USE)
                region.overhead = lead
            else:
                self._region(region)
            region.last = self.n
        self.heap.regions = self.regions
        self.heap.region_starts = [region.start for region in self.regions]
        self.heap.blocks = Blocks(self.address[:self.n], self.size[:self.n], self.state[:self.n])
        regions: dict[int, list[Region]] = {}
        for region in self.regions:
            if region.kind != "mmapped":
                regions.setdefault(region.arena, []).append(region)
        for arena in self.heap.arenas:
            self._free_lists(arena, regions.get(arena.index, []))
        self._tcaches()

    def _append(self, chunk: int, size: int, state: int) -> None:
        self.address[self.n], self.size[self.n], self.state[self.n] = chunk + 16, size, state
        self.n += 1

    def _region(self, region: Region) -> None:
        """Walk one region from its start to its top or its fencepost, stepping over what cannot be walked."""
        top = int(self.heap.arenas[region.arena].fields["top"])
        top = top if region.start <= top < region.end and top in self.tops else None
        stop = region.end if top is None else top
        at, first, self.reach = region.start, self.n, None
        while at < stop:
            self.n, at, why = self._tiles(at, stop, first)
            if why == kernel.END:
                break
            if why == kernel.FENCE and top is None and at + 32 >= stop:
                region.overhead += stop - at
                break
            at, first = self._step_over(region, at, stop, why, first), self.n
        if top is not None:
            self._top(region, top, first)
        elif region.kind == "brk" and self.n > first and self.heap.arenas[0].contiguous and at == stop:
            self.state[self.n - 1] = kernel.TOP   # the arena's top is damaged: it is what the heap ends with
            self.heap.arenas[0].top_bytes = int(self.size[self.n - 1])

    def _tiles(self, at: int, stop: int, first: int):
        notes = np.zeros(2, np.uint64)
        while True:
            n, at, why = kernel.walk(*self.buffer, at, stop, self.address, self.size, self.state,
                                     self.n, first, TILE, notes)
            self.n = int(n)
            if why != kernel.BUDGET:
                break
            channel.progress(f"{self.n:,} blocks walked")
        if notes[0]:
            self.heap.damage.append(Damage(int(notes[1]), f"prev_size does not match the free chunk before it "
                                                          f"({int(notes[0])} such chunks in this region)"))
        return self.n, int(at), int(why)

    def _step_over(self, region: Region, at: int, stop: int, why: int, first: int) -> int:
        """After a break at `at`: record what it was and return where chunks go on (`stop` when nowhere)."""
        past = at + 32 if why == kernel.FENCE else at + 16
        if self.reach is None:
            self.reach = _Reach(self.buffer, at & ~15, stop)
        going_on = self.reach.resume(min(past, stop), fresh=why == kernel.FENCE) or stop
        last_good = int(self.address[self.n - 1]) - 16 if self.n > first else 0
        if why == kernel.FENCE and region.kind == "brk":
            region.overhead += 32
            region.foreign.append((past, going_on))
            return going_on
        if self.n > first and why == kernel.BAD_SIZE:   # its "previous in use" bit is damaged as well: ask the bins
            linked = self._is_linked(int(self.address[self.n - 1]))
            self.state[self.n - 1] = kernel.FREE if linked else kernel.IN_USE
        region.damaged.append((at, going_on))
        what = ("memory is missing from the core" if why == kernel.ABSENT else
                f"the size {self._word(at + 8):#x} of this chunk cannot be")
        self.heap.damage.append(Damage(at, f"{what}; {going_on - at:,} bytes up to {going_on:#x} are not walked", last_good))
        return going_on

    def _is_linked(self, user: int) -> bool:
        """Whether the chunk's first two words are the links of a bin: both neighbours point back."""
        forward, back = self._word(user), self._word(user + 8)
        return self._word(forward + 24) == user - 16 and self._word(back + 16) == user - 16

    def _word(self, address: int) -> int:
        return self.target.word(address) or 0

    def _top(self, region: Region, top: int, first: int) -> None:
        """Append the top chunk; one whose size is wrong ends where its region does."""
        arena = self.tops[top]
        head = self._word(top + 8)
        if self.n > first and not head & 1 and self.state[self.n - 1] == kernel.IN_USE:
            self.state[self.n - 1] = kernel.FREE
        if top + (head & ~7) != region.end and not any(damage.address == top for damage in self.heap.damage):
            self.heap.damage.append(Damage(top, f"the top chunk of arena {arena.index} has the size {head & ~7:#x}, its region ends "
                                                f"at {region.end:#x}"))
        arena.top_bytes = region.end - top
        self._append(top, region.end - top, kernel.TOP)

    # -- free lists ---------------------------------------------------------------------------------------------------
    def _free_of(self, region: Region) -> tuple[int, int]:
        """(number, bytes) of the chunks of a region that are free in a bin."""
        free = self.heap.blocks.state[region.first:region.last] == kernel.FREE
        return int(np.count_nonzero(free)), int(self.heap.blocks.size[region.first:region.last][free].sum())

    def _free_lists(self, arena: Arena, regions: list[Region]) -> None:
        heap, blocks = self.heap, self.heap.blocks
        last = len(blocks)
        safe = heap.release >= layouts.SAFE_LINKING
        for k, chunk in enumerate(arena.fields["fastbinsY"] if "fastbinsY" in heap.state.names else ()):
            if chunk:
                count, total, why, where, holder = kernel.follow(
                    *self.buffer, int(chunk) + 16, 2 | safe, blocks.address, blocks.size, blocks.state, 0, last,
                    32 + 16 * k, kernel.FASTBIN, last + 1)
                arena.fast_blocks += int(count)
                arena.fast_bytes += int(total)
                self._complain(why, where, holder, f"fastbin {k} of arena {arena.index}")
        bins_at, whole = arena.address + heap.state.fields["bins"][1], True
        for k in range(layouts.NBINS // 2):
            head = bins_at + 16 * k - 16
            if int(arena.fields["bins"][2 * k]) == head:
                continue
            count, total, why, where, holder = kernel.follow_bin(*self.buffer_with(head), head, arena.system_mem // 32)
            arena.bin_blocks += int(count)
            arena.bin_bytes += int(total)
            whole &= why == kernel.END
            self._complain(why, where, holder + 16 if holder != head else 0, f"bin {k + 1} of arena {arena.index}")
        free = [self._free_of(region) for region in regions]
        walked, walked_bytes = (sum(column) for column in zip(*free)) if free else (0, 0)
        if walked != arena.bin_blocks:
            heap.notes.append(f"arena {arena.index}: its bins list {arena.bin_blocks:,} free chunks, the walk finds {walked:,}"
                              + ("" if whole else ": the walk's count is used"))
            if not whole:
                arena.bin_blocks, arena.bin_bytes = walked, walked_bytes

    def buffer_with(self, head: int):
        """The buffer with the arena's own bins readable, which on a process read on demand may not be there yet."""
        return _buffer(self.target, self.target.space.table([(head, head + 32)]))

    def _complain(self, why: int, where: int, holder: int, name: str) -> None:
        """Record that a free list went wrong: at the block whose link is bad, when one is."""
        if why != kernel.END:
            what = {kernel.LOOP: "loops or is not linked back", kernel.STRAY: "leads to what is no free chunk",
                    kernel.ABSENT: "leads out of the core"}[int(why)]
            link = f"the link in the block at {holder:#x} gives {where:#x}" if holder else f"its head gives {where:#x}"
            self.heap.damage.append(Damage(int(holder or where), f"{name} {what}: {link}"))

    # -- thread caches ------------------------------------------------------------------------------------------------
    def _tcaches(self) -> None:
        """Find the thread caches among the blocks of their size, and mark what they hold.

        A cache's entries must be in-use blocks of just the bin's size. An empty one is told from other zeroed memory by the word
        in its thread's TLS that points to it.
        """
        heap, blocks = self.heap, self.heap.blocks
        layout = layouts.latest(layouts.TCACHE, heap.release)
        if layout is None or not len(blocks):
            return
        owners = self._tls_words()
        struct_size = (layout[3] + 8 + 15) & ~15
        rows = np.flatnonzero((blocks.state == kernel.IN_USE) &
                              ((blocks.size == struct_size) | (blocks.size == struct_size + 16)))
        for k in range(0, len(rows), 256):   # each takes eight times its size to gather
            for address, entries in self._cache_candidates(blocks.address[rows[k:k + 256]], layout):
                lwp = owners.get(address, 0)
                if (entries.any() or lwp) and self._plausible_entries(entries):
                    cache = Tcache(address, lwp)
                    self._empty(cache, entries)
                    heap.tcaches.append(cache)
        for region in heap.regions:
            tcached = blocks.state[region.first:region.last] == kernel.TCACHED
            if region.kind != "mmapped" and tcached.any():
                arena = heap.arenas[region.arena]
                arena.tcached_blocks += int(np.count_nonzero(tcached))
                arena.tcached_bytes += int(blocks.size[region.first:region.last][tcached].sum())

    def _cache_candidates(self, addresses: np.ndarray, layout):
        """(address, entries) of those blocks whose counters and entries fit a tcache_perthread_struct."""
        width, bins, entries_at, size = layout
        form = np.dtype({"names": ["counts", "entries"], "formats": [f"({bins},)u{width}", f"({bins},)u8"],
                         "offsets": [0, entries_at], "itemsize": size})
        values, present = self.target.space.gather(addresses, form)
        fits = present & (values["entries"] & np.uint64(15) == 0).all(axis=1)
        if self.heap.release < (2, 42):   # from 2.42 on the counters say how many more fit, not how many there are
            fits &= ((values["counts"] > 0) == (values["entries"] != 0)).all(axis=1)
        for k in np.flatnonzero(fits):
            yield int(addresses[k]), values["entries"][k].copy()

    def _tls_words(self) -> dict[int, int]:
        """Words of each thread's static TLS -> the thread's lwp: a thread's own pointers."""
        words: dict[int, int] = {}
        for thread in self.target.threads:
            mapping = self.target.mapping_at(thread.tp) if thread.tp else None
            if mapping is None:
                continue
            low, high = (max(mapping.start, thread.tp - 16384), thread.tp) if thread.arch.tls_below else \
                (thread.tp, min(mapping.end, thread.tp + 16384))
            for start, end in self.target.space.present((low + 7) & ~7, high & ~7):
                for word in np.unique(self.target.space.words_of(start, end)):
                    words.setdefault(int(word), thread.lwp)
        return words

    def _plausible_entries(self, entries: np.ndarray) -> bool:
        blocks, sizes = self.heap.blocks, layouts.tcache_bin_sizes(self.heap.release)
        for k in np.flatnonzero(entries):
            row = int(np.searchsorted(blocks.address, entries[k]))
            if row >= len(blocks) or blocks.address[row] != entries[k]:
                return False
            if blocks.state[row] != kernel.IN_USE or (sizes[k] and int(blocks.size[row]) != sizes[k]):
                return False
        return True

    def _empty(self, cache: Tcache, entries: np.ndarray) -> None:
        """Mark the blocks of a cache as tcached and count them, for it and for the arenas they came from."""
        heap, blocks = self.heap, self.heap.blocks
        safe = int(heap.release >= layouts.SAFE_LINKING)
        sizes = layouts.tcache_bin_sizes(heap.release)
        for k in np.flatnonzero(entries):
            count, total, why, where, holder = kernel.follow(
                *self.buffer, entries[k], safe, blocks.address, blocks.size, blocks.state, 0, len(blocks),
                sizes[k], kernel.TCACHED, len(blocks) + 1)
            cache.blocks += int(count)
            cache.bytes += int(total)
            self._complain(why, where, holder, f"tcache bin {k} of thread {cache.lwp or '?'}")

