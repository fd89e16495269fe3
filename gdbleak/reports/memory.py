"""leak-memory: every byte of the target by owner and by mapping: in use, free, overhead, or not explained."""
from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Iterator, NamedTuple

import numpy as np

from ..quantities import size as size_of
from ..flame import Profile
from ..heaps.blocks import FREE_STATES, STATES, Region
from ..heaps.glibc_heap import GlibcHeap
from ..kernels import chunks as kernel
from ..target.address_space import PAGE
from ..target.stacks import stack_of, tls_of
from ..target.target import Mapping, Target, TargetError
from .analysis import Analysis
from .document import Report, Table, printable, share
from .selection import arena_name

# What a mapping's size is split into. The first four are a heap's; OTHER is explained, and no part of a heap.
COLUMNS = ("in use", "tcached", "free", "overhead", "other", "not explained")
IN_USE, TCACHED, FREE, OVERHEAD, OTHER, UNEXPLAINED = COLUMNS
_KEYS = ("in_use_bytes", "tcached_bytes", "free_bytes", "overhead_bytes", "other_bytes", "unexplained_bytes")
_COLUMN_OF = {kernel.IN_USE: IN_USE, kernel.TCACHED: TCACHED, **dict.fromkeys(FREE_STATES, FREE)}
_LEGEND = "other: explained, and no part of a heap (code, data, stacks, files, shared memory, reservations)"
_SHARED = ("/dev/zero", "/dev/shm/", "/SYSV", "/memfd:", "/[aio]", "anon_inode:")
FOREIGN, DAMAGED, NO_ACCESS = "foreign sbrk", "damaged", "no access"


class Amount(NamedTuple):
    """So many bytes in so many blocks of one state; `column` is where they count."""

    state: str
    column: str
    bytes: int
    count: int = 1


@dataclass
class Part:
    """A stretch of one mapping with one owner; `amounts` add up to its size. `heap`, `region`: of chunks."""

    start: int
    end: int
    owner: str
    label: str
    amounts: list[Amount] = field(default_factory=list)
    heap: GlibcHeap | None = None
    region: Region | None = None

    @property
    def size(self) -> int:
        return self.end - self.start


def _whole(start: int, end: int, owner: str, label: str, state: str, column: str = OTHER) -> Part:
    """A part all of which is in one state."""
    return Part(start, end, owner, label, [Amount(state, column, end - start)])


class Claim(NamedTuple):
    """A stretch that a heap owns, not yet cut by mappings. `state`: "" for chunks, else what all of it is."""

    start: int
    end: int
    heap: GlibcHeap
    region: Region
    state: str = ""


def run(analysis: Analysis, arguments) -> Report:
    """Owners, then mappings, then arenas, the largest first, each table with a row that sums it up."""
    least = size_of(arguments.min_bytes, arguments.evaluate)
    report = analysis.open_report("leak-memory")
    analysis.say_glibc(report)
    _say_whose(analysis, report)
    accounts = account(analysis)
    parts = [part for _, inside in accounts for part in inside]
    total = _Sums.of(parts, analysis.target)
    _totals(report, total, analysis.target)
    report.say()
    report.add(_owners(parts, analysis.target, total, arguments.top))
    report.say()
    report.add(_mappings(accounts, analysis.target, total, arguments.top, least))
    if analysis.glibc:
        report.say()
        report.add(_arenas(analysis.glibc, parts, arguments.top))
    report.profile = _profile(analysis.target, accounts)
    return report


def _say_whose(analysis: Analysis, report: Report) -> None:
    """Say why no heap was found, when none was: the table is there all the same."""
    try:
        analysis.need_glibc()
    except TargetError as reason:
        report.say(f"{reason}; what an allocator holds is not explained here")


# -- who owns what -------------------------------------------------------------------------------------------
def account(analysis: Analysis) -> list[tuple[Mapping, list[Part]]]:
    """Each mapping with the parts it consists of, in order; their sizes add up to the mapping's."""
    target = analysis.target
    claims = _claims(analysis.glibc)
    starts = [claim.start for claim in claims]
    threads, lua = _threads_own(target), _lua_own(analysis)
    ends = [part.end for part in threads]
    accounts = []
    for mapping in target.mappings:
        first = max(bisect.bisect_right(starts, mapping.start) - 1, 0)
        last = bisect.bisect_left(starts, mapping.end)
        inside = [claim for claim in claims[first:last] if claim.end > mapping.start]
        near = threads[bisect.bisect_right(ends, mapping.start):]   # sorted, and none overlaps another
        rest = _Rest(analysis, mapping, near, lua, any(claim.region.kind == "brk" for claim in inside))
        parts, at = [], mapping.start
        for claim in inside:
            low, high = max(claim.start, at), min(claim.end, mapping.end)
            parts += rest.parts(at, low)
            parts.append(_claimed(claim, low, high, len(analysis.glibc) > 1))
            at = high
        accounts.append((mapping, parts + rest.parts(at, mapping.end)))
    return accounts


def _claims(heaps: list[GlibcHeap]) -> list[Claim]:
    """What the heaps own, sorted; no two overlap."""
    wanted = [claim for heap in heaps for region in heap.regions for claim in _claims_of(heap, region)]
    claims: list[Claim] = []
    for claim in sorted(wanted, key=lambda claim: (claim.start, claim.end)):
        start = max(claim.start, claims[-1].end) if claims else claim.start
        if start < claim.end:
            claims.append(claim._replace(start=start))
    return claims


def _claims_of(heap: GlibcHeap, region: Region) -> Iterator[Claim]:
    """A region cut at its foreign and damaged stretches, and the address space a heap keeps in reserve."""
    at = heap.base_of(region)
    for start, end, state in sorted([(*stretch, FOREIGN) for stretch in region.foreign] +
                                    [(*stretch, DAMAGED) for stretch in region.damaged]):
        if at < start:
            yield Claim(at, start, heap, region)
        yield Claim(start, end, heap, region, state)
        at = max(at, end)
    if at < region.end:
        yield Claim(at, region.end, heap, region)
    if region.kind == "heap":
        yield Claim(region.end, (region.start | heap.heap_max - 1) + 1, heap, region, "reserve")


def _claimed(claim: Claim, low: int, high: int, several: bool) -> Part:
    """The part of a mapping that a claim covers between `low` and `high`. `several`: name the heap's libc."""
    heap, region = claim.heap, claim.region
    whose = f" of {printable(heap.module.name)} at {heap.module.start:#x}" if several else ""
    name = "mmapped chunk" if region.kind == "mmapped" else arena_name(region)
    kind = {"mmapped": "mmapped chunks"}.get(region.kind, "other arenas" if region.arena else "main arena")
    owner = f"glibc malloc: {kind}{whose}"
    if claim.state == "reserve":
        owner = f"glibc malloc: reserve of other arenas, not in use{whose}"
        return _whole(low, high, owner, f"reserve of {name}", "reserve")
    if claim.state == FOREIGN:
        part = _whole(low, high, FOREIGN, FOREIGN, FOREIGN, UNEXPLAINED)
    elif claim.state == DAMAGED:
        part = _whole(low, high, owner, f"{name}, damaged", DAMAGED, UNEXPLAINED)
    else:
        amounts = _chunks(heap, region, low, high)
        rest = high - low - sum(amount.bytes for amount in amounts)
        part = Part(low, high, owner, name, amounts + [Amount(OVERHEAD, OVERHEAD, rest, 0)])
    part.heap, part.region = heap, region
    return part


def _chunks(heap: GlibcHeap, region: Region, low: int, high: int) -> list[Amount]:
    """Bytes by state of the region's chunks inside [low, high); a block is counted where it begins."""
    blocks = heap.blocks
    rows = slice(region.first, region.last)
    address, size, state = blocks.address[rows], blocks.size[rows], blocks.state[rows]
    first, last = (int(k) for k in np.searchsorted(address, np.array([low + 16, high + 16], np.uint64)))
    counts, totals = np.zeros(512, np.int64), np.zeros(512, np.int64)
    kernel.histogram(size[first:last], state[first:last], counts, totals)
    counts, sums = (array.reshape(64, 8).sum(axis=0) for array in (counts, totals))

    def end_of(row):
        return int(address[row]) - 16 + int(size[row])

    if last > first:
        sums[state[last - 1]] -= max(0, end_of(last - 1) - high)
    if first:   # a block that began before `low`
        sums[state[first - 1]] += max(0, min(end_of(first - 1), high) - low)
    found = np.flatnonzero(sums).tolist()
    return [Amount(STATES[k], _COLUMN_OF[k], int(sums[k]), int(counts[k])) for k in found]


# -- what threads own ----------------------------------------------------------------------------------------
def _threads_own(target: Target) -> list[Part]:
    """Unused and live stacks, and thread-local storage outside of them, sorted; no two overlap."""
    wanted = []
    for thread in target.threads:
        stack, storage = stack_of(target, thread), tls_of(target, thread)
        if stack:
            live = min(max(thread.sp - thread.arch.red_zone, stack[0]), stack[1])
            label = f"stack of thread {thread.lwp}"
            wanted.append(_whole(stack[0], live, "thread stacks, unused", label, "unused"))
            wanted.append(_whole(live, stack[1], "thread stacks, live", label, "live"))
        if storage and not (stack and stack[0] <= thread.tp < stack[1]):
            wanted.append(_whole(*storage, "thread-local storage", f"TLS of thread {thread.lwp}", "TLS"))
    parts: list[Part] = []
    for part in sorted(wanted, key=lambda part: (part.start, part.end)):
        cut = _clipped(part, parts[-1].end if parts else 0, part.end)
        parts += [cut] if cut.size > 0 else []
    return parts


def _lua_own(analysis: Analysis) -> list[Part]:
    """The segments of LuaJIT's allocators and the mappings of their single blocks, sorted; no two overlap."""
    wanted = []
    for number, vm in enumerate(analysis.luajit):
        heap = vm.allocator
        name = f"LuaJIT allocator of VM {number + 1}" if len(analysis.luajit) > 1 else "LuaJIT allocator"
        for segment in heap.segments if heap else ():
            amounts = [Amount("in use", IN_USE, segment.in_use_bytes, segment.in_use_chunks),
                       Amount("free pool", FREE, segment.free_bytes + segment.top_bytes, segment.free_chunks + 1),
                       Amount(OVERHEAD, OVERHEAD, segment.overhead, 0)]
            rest = segment.size - sum(amount.bytes for amount in amounts)
            wanted.append(Part(segment.start, segment.start + segment.size, name, "segment",
                               amounts + [Amount(DAMAGED, UNEXPLAINED, rest)] * (rest > 0)))
        for start, size in heap.direct if heap else ():
            wanted.append(_whole(start, start + size, name, "single block", "in use", IN_USE))
    parts: list[Part] = []
    for part in sorted(wanted, key=lambda part: part.start):
        if not parts or part.start >= parts[-1].end:
            parts.append(part)
    return parts


def _clipped(part: Part, low: int, high: int) -> Part:
    """The part inside [low, high) of one that is in one state."""
    return _whole(max(part.start, low), min(part.end, high), part.owner, part.label, part.amounts[0].state)


# -- what no heap owns ---------------------------------------------------------------------------------------
@dataclass
class _Rest:
    """Names what no heap owns in one mapping. `brk`: a heap in this mapping grows by brk."""

    analysis: Analysis
    mapping: Mapping
    threads: list[Part]
    lua: list[Part]
    brk: bool

    def parts(self, low: int, high: int) -> list[Part]:
        """[low, high) by the threads and modules in it, and what is neither's."""
        parts, at = [], low
        for owned in self.threads:
            if owned.start >= high:
                break
            if owned.end > at:
                inside = _clipped(owned, at, high)
                parts += self._by_module(at, inside.start) + [inside]
                at = inside.end
        return parts + self._by_module(at, high)

    def _by_module(self, low: int, high: int) -> list[Part]:
        """[low, high) by modules; those in a mapping without a name have their .bss in it."""
        parts, at, mapping = [], low, self.mapping
        for module in self.analysis.target.modules:
            start, end = max(module.start, at), min((module.end + PAGE - 1) & ~(PAGE - 1), high)
            if start >= end or mapping.path not in ("", module.path) or module.path.startswith("[v"):
                continue
            kind = "text" if "x" in mapping.perms else "data" if mapping.writable else "constants"
            kind = kind if "r" in mapping.perms else NO_ACCESS
            name = printable(module.name, 60)
            parts += self._neither(at, start)
            label = f"{name} {kind if mapping.path else '.bss'}"
            parts.append(_whole(start, end, f"{name}: {kind}", label, kind))
            at = end
        return parts + self._neither(at, high)

    def _neither(self, low: int, high: int) -> list[Part]:
        """[low, high) by LuaJIT's allocators, and what is nobody's."""
        parts, at = [], low
        for owned in self.lua:
            if owned.start < high and owned.end > at:
                whole = at <= owned.start and owned.end <= high
                inside = owned if whole else _clipped(owned, at, high)
                parts += self._nobodys(at, inside.start) + [inside]
                at = inside.end
        return parts + self._nobodys(at, high)

    def _nobodys(self, low: int, high: int) -> list[Part]:
        if low >= high:
            return []
        if set(self.mapping.perms) & set("rwx") or self.mapping.path:
            return [_whole(low, high, *self._nature())]
        parts, at = [], low
        for start, end in [*self.analysis.target.space.present(low, high), (high, high)]:
            if at < start:
                parts.append(_whole(at, start, "reserved without access", NO_ACCESS, NO_ACCESS))
            if start < end:
                parts.append(_whole(start, end, "anonymous, without access now", "no access now", UNEXPLAINED,
                                    UNEXPLAINED))
            at = end
        return parts

    def _nature(self) -> tuple[str, ...]:
        """(owner, label, state[, column]) of what in the mapping belongs to no heap, thread or module."""
        mapping = self.mapping
        if mapping.path.startswith("[v") or _is_vvar(self.analysis.target, mapping):
            path = mapping.path or "[vvar]"
            return "the kernel's own (vdso, vvar, vsyscall)", path, path
        if mapping.path.startswith(_SHARED):
            return f"shared memory {printable(mapping.path)}", "shared memory", "shared"
        if mapping.path:
            return "mapped files", "mapped file", "file"
        if self.brk:
            return FOREIGN, FOREIGN, FOREIGN, UNEXPLAINED
        owner, ours = self.analysis.malloc_owner, [heap.module.name for heap in self.analysis.glibc]
        other = owner and owner not in ours and not owner.startswith(("libc.", "libc-"))
        hint = f" (malloc belongs to {printable(owner)})" if other else ""
        return f"anonymous, not explained{hint}", "anonymous", UNEXPLAINED, UNEXPLAINED


def _is_vvar(target: Target, mapping: Mapping | None) -> bool:
    """Whether a mapping without a name is the kernel's data for the vdso: read-only, and right before it."""
    while mapping is not None and mapping.path == "" and mapping.perms == "r--":
        mapping = target.mapping_at(mapping.end)
    return mapping is not None and mapping.path == "[vdso]"


# -- sums and tables -----------------------------------------------------------------------------------------
class _Sums:
    """Bytes of parts added up: `size`, `present`, and by column."""

    def __init__(self):
        self.size = self.present = 0
        self.columns = dict.fromkeys(COLUMNS, 0)

    @classmethod
    def of(cls, parts: list[Part], target: Target) -> _Sums:
        sums = cls()
        for part in parts:
            sums.size += part.size
            sums.present += _present(target, part)
            for amount in part.amounts:
                sums.columns[amount.column] += amount.bytes
        return sums

    def merge(self, other: _Sums) -> None:
        self.size += other.size
        self.present += other.present
        for column in COLUMNS:
            self.columns[column] += other.columns[column]

    def cells(self, total: _Sums) -> list:
        return [self.size, share(self.size, total.size), self.present, *self.columns.values()]


def _present(target: Target, part: Part) -> int:
    """Bytes of a part that can be read. A process is not read for this: its mappings tell."""
    if target.source.kind == "pid":
        mapping = target.mapping_at(part.start)
        if mapping and mapping.readable:
            return part.size
    return sum(end - start for start, end in target.space.present(part.start, part.end))


def _totals(report: Report, total: _Sums, target: Target) -> None:
    columns = total.columns
    count = len(target.mappings)
    report.say(f"{total.size:,} bytes in {count:,} mappings, {total.present:,} of them can be read")
    report.say(f"heaps: {columns[IN_USE]:,} in use, {columns[TCACHED]:,} tcached, {columns[FREE]:,} free, "
               f"{columns[OVERHEAD]:,} overhead; not explained: {columns[UNEXPLAINED]:,}")
    report.say(_LEGEND)
    report.totals(mapped_bytes=total.size, present_bytes=total.present, mappings=count,
                  **dict(zip(_KEYS, columns.values())))


def _owners(parts: list[Part], target: Target, total: _Sums, top: int) -> Table:
    """One row an owner, the largest first."""
    owned: dict[str, list[Part]] = {}
    for part in parts:
        owned.setdefault(part.owner, []).append(part)
    rows = [([name], _Sums.of(inside, target)) for name, inside in owned.items()]
    rows.sort(key=lambda row: -row[1].size)
    return _table("memory by owner, the largest first", ["owner"], rows, total, top, "owners")


def _mappings(accounts, target: Target, total: _Sums, top: int, least: int) -> Table:
    """One row a mapping, the largest first, none of them smaller than `least` bytes."""
    rows = []
    for mapping, parts in accounts:
        cells = [f"{mapping.start:#x}-{mapping.end:#x}", mapping.perms, _what(mapping, parts)]
        rows.append((cells, _Sums.of(parts, target)))
    rows.sort(key=lambda row: -row[1].size)
    top = min(top, sum(sums.size >= least for _, sums in rows))
    names = ["address range", "perms", "what"]
    return _table("mappings, the largest first", names, rows, total, top, "mappings")


def _table(title: str, names: list[str], rows: list[tuple[list[str], _Sums]], total: _Sums, top: int,
           noun: str) -> Table:
    """At most `top` rows, then one for all that were left out, and the total, so that each column adds up."""
    top, blank = max(top, 0), [""] * (len(names) - 1)
    shown = [[*cells, *sums.cells(total)] for cells, sums in rows[:top]]
    left_out, rest = len(rows) - len(shown), _Sums()
    for _, sums in rows[top:]:
        rest.merge(sums)
    if left_out:
        shown.append([f"{left_out:,} more {noun}", *blank, *rest.cells(total)])
    shown.append(["total", *blank, *total.cells(total)])
    footer = f"{left_out:,} {noun} are not shown: --top N shows more" if left_out else ""
    header = names + ["size", "share", "present", *COLUMNS]
    return Table(header, shown, title, tuple(range(len(names))), footer)


def _what(mapping: Mapping, parts: list[Part]) -> str:
    """What a mapping is: its path, or what it consists of, the largest first."""
    if mapping.path:
        return printable(mapping.path, 80)
    sizes: dict[str, int] = {}
    for part in parts:
        sizes[part.label] = sizes.get(part.label, 0) + part.size
    labels = sorted(sizes, key=lambda label: -sizes[label])
    chunks = sum(part.label == "mmapped chunk" for part in parts)
    words = [f"{chunks:,} mmapped chunks" if label == "mmapped chunk" and chunks > 1 else label
             for label in labels[:3]]
    more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return ("[heap] " if _is_brk(parts) else "") + ", ".join(words) + more


def _is_brk(parts: list[Part]) -> bool:
    return any(part.region is not None and part.region.kind == "brk" for part in parts)


def _arenas(heaps: list[GlibcHeap], parts: list[Part], top: int) -> Table:
    """One row an arena: what its system_mem consists of."""
    columns = (IN_USE, TCACHED, FREE, OVERHEAD, FOREIGN, DAMAGED)
    sums = {(heap.main, arena.index): dict.fromkeys(columns, 0) for heap in heaps for arena in heap.arenas}
    for part in parts:
        if part.heap is not None and part.region.kind != "mmapped":
            for amount in part.amounts:
                key = amount.state if amount.column == UNEXPLAINED else amount.column
                sums[part.heap.main, part.region.arena][key] += amount.bytes
    rows = []
    for heap in heaps:
        for arena in heap.arenas:
            cells = sums[heap.main, arena.index].values()
            name = "0 (main)" if arena.index == 0 else f"{arena.index}"
            rows.append([name, f"{arena.address:#x}", *cells, sum(cells), arena.system_mem])
    rows.sort(key=lambda row: -row[-1])
    left_out = len(rows) - len(rows[:max(top, 0)])
    return Table(["arena", "address", *columns, "sum", "system_mem"], rows[:max(top, 0)],
                 "arenas: the sum of what is in each, and its own counter system_mem", (0, 1),
                 f"{left_out:,} more arenas: --top N shows them" if left_out else "")


def _profile(target: Target, accounts) -> Profile:
    profile = Profile(f"Memory of {target.command_name()} (pid {target.source.pid})",
                      "Address space by mapping, owner and state (measured; extents of stacks inferred)")
    for mapping, parts in accounts:
        name = mapping.path or ("[heap]" if _is_brk(parts) else "[anonymous]")
        for part in parts:
            for amount in part.amounts:
                profile.add([name, part.owner, amount.state], amount.bytes, amount.count)
    return profile
