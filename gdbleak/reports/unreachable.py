"""leak-unreachable: the blocks that no root reaches, grouped by the leak they hang on, and what is nearly so: what only dead
Lua objects hold (pending), and what hangs on one stack word alone."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..flame import Profile
from ..graph import native as states
from ..graph.native import Native
from ..quantities import size as size_of
from .analysis import Analysis
from .blocks import Names, preview
from .document import Data, Report, Table, count, printable, share
from .selection import describe, rows_of_set
from .words import BlockWords

_SHOWN_WORDS = 8                # stack words that are named


@dataclass
class Group:
    """Leaks of one kind: heads (rows of Nodes) and what hangs on them."""

    what: str
    known: str
    rows: np.ndarray
    bytes: int
    usable: int
    indirect_blocks: int
    indirect_bytes: int
    cycles: int

    @property
    def total(self) -> int:
        return self.bytes + self.indirect_bytes


def run(analysis: Analysis, arguments) -> Report:
    """Groups of direct leaks, the most bytes with all that hangs on them first."""
    native = analysis.native
    least = size_of(arguments.min_bytes, arguments.evaluate)
    report = analysis.open_report("leak-unreachable")
    analysis.say_glibc(report)
    say_roots(report, native)
    wanted = np.ones(len(native.leaks.rows), bool)
    chosen = describe(arguments)
    if chosen:
        of_set = np.zeros(len(native.nodes), bool)
        of_set[rows_of_set(analysis, arguments)] = True
        wanted = of_set[native.leaks.rows][native.leaks.head]     # a leak by its head, with all that hangs on it
    words = BlockWords(analysis)
    groups = [group for group in _groups(native, words, wanted) if group.total >= least]
    _totals(report, native, wanted, chosen)
    _nearly(report, native)
    report.say()
    _table(report, analysis, groups, max(arguments.top, 0))
    _finding(report, native, groups)
    report.profile = _profile(analysis, groups)
    return report


def say_roots(report: Report, native: Native) -> None:
    """Say from where reachability was followed, and what could not be."""
    rooted = native.roots
    names = {states.roots.MODULE: "variables", states.roots.STORAGE: "thread-local storage", states.roots.STACK: "stacks",
             states.roots.REGISTER: "registers", states.roots.SHARED: "shared memory", states.roots.MEMORY: "mapped memory",
             states.roots.DAMAGED: "damaged parts of the heap", states.roots.ENDED: "descriptors of ended threads",
             states.roots.LUA: "Lua states"}
    counts = np.bincount(rooted.kind, minlength=len(names)) if len(rooted.row) else np.zeros(len(names), int)
    parts = [f"{int(counts[kind]):,} in {name}" for kind, name in names.items() if counts[kind]]
    live = sum(len(held.rows(live=True)) for held in native.holders)
    parts += [f"{live:,} in live Lua objects"] * bool(native.vms)
    report.say(f"roots: {', '.join(parts) or 'none'}; {native.edges:,} pointers between blocks")
    if native.lost[0]:
        report.say(f"partial: {int(native.lost[1]):,} words of blocks are not in the core; what they pointed to can be counted "
                   "as unreachable")
        report.add(Data({"type": "finding", "kind": "lost-edges", "severity": "medium", "confidence": "measured",
                         "impact": 8 * int(native.lost[1]), "facts": [f"{int(native.lost[1]):,} words of blocks are absent"],
                         "hypothesis": "memory is missing from the core", "next": ["leak-memory"]}))
    damaged = sum(end - start for heap in native.nodes.heaps for region in heap.regions for start, end in region.damaged)
    if damaged:
        report.say(f"partial: {damaged:,} bytes of the heap are damaged; their words count as roots, and leaks among them are "
                   "not found")


def _groups(native: Native, words: BlockWords, wanted: np.ndarray) -> list[Group]:
    """The leaks of a set (bool over the unreachable rows, by the head they hang on), alike ones together."""
    leaks, nodes = native.leaks, native.nodes
    heads = np.flatnonzero(leaks.direct & wanted)
    sizes = nodes.size[leaks.rows].astype(np.int64)
    below = np.bincount(leaks.head, weights=sizes, minlength=len(leaks.rows)).astype(np.int64)
    members = np.bincount(leaks.head, minlength=len(leaks.rows))
    numbers = words.numbers(leaks.rows[heads])
    groups = []
    for number in np.unique(numbers).tolist():
        at = heads[numbers == number]
        rows, own = leaks.rows[at], sizes[at]
        groups.append(Group(*words.name(number), rows, int(own.sum()), _usable(native, rows), int(members[at].sum()) - len(at),
                            int(below[at].sum()) - int(own.sum()), int(leaks.cyclic[at].sum())))
    return sorted(groups, key=lambda group: (-group.total, group.what))


def _usable(native: Native, rows: np.ndarray) -> int:
    """What malloc_usable_size() says of the blocks, added up."""
    nodes = native.nodes
    total = int(nodes.size[rows].sum()) - 8 * len(rows)
    for row in rows[nodes.size[rows] >= 1 << 12].tolist():         # mmapped chunks have another header
        heap, at = nodes.in_heap(row)
        total += heap.usable(at) - int(nodes.size[row]) + 8
    return total


def _totals(report: Report, native: Native, wanted: np.ndarray, chosen: str) -> None:
    leaks, nodes = native.leaks, native.nodes
    rows, direct = leaks.rows[wanted], leaks.rows[wanted & leaks.direct]
    size = nodes.size
    in_use = int(np.sum(size, where=native.state != states.NO_NODE))
    total, own = int(size[rows].sum()), int(size[direct].sum())
    pending, stacked = native.rows_of(states.PENDING), native.on_stack
    alone = stacked.rows[stacked.word >= 0]
    report.say(f"{count(len(rows), 'block')}, {total:,} bytes ({share(total, in_use)} of what is in use) {'is' if len(rows) == 1 else 'are'} unreachable"
               f"{': ' + chosen if chosen else ''}: {len(direct):,} directly ({own:,} bytes), {len(rows) - len(direct):,} only "
               f"from those ({total - own:,} bytes)")
    report.totals(blocks=len(rows), bytes=total, usable_bytes=_usable(native, rows), direct_blocks=len(direct),
                  direct_bytes=own, indirect_blocks=len(rows) - len(direct), indirect_bytes=total - own,
                  pending_blocks=len(pending), pending_bytes=int(size[pending].sum()), stack_only_blocks=len(alone),
                  stack_only_bytes=int(size[alone].sum()), in_use_bytes=in_use, edges=native.edges,
                  lost_words=int(native.lost[1]))


def _nearly(report: Report, native: Native) -> None:
    """What is neither a leak nor plainly alive."""
    size, pending, stacked = native.nodes.size, native.rows_of(states.PENDING), native.on_stack
    if len(pending):
        report.say(f"pending: {count(len(pending), 'block')}, {int(size[pending].sum()):,} bytes, held by dead Lua objects alone: the "
                   "next collection releases them; no leak, and not counted above")
    alone = stacked.word >= 0
    if not alone.any():
        return
    rows, words = stacked.rows[alone], stacked.word[alone]
    report.say(f"suspicious: {count(len(rows), 'block')}, {int(size[rows].sum()):,} bytes, held by one stack word or register alone, "
               "not counted above: a local variable that is alive, or a leftover that hides a leak")
    numbers, at = np.unique(words, return_inverse=True)
    bytes, blocks = np.bincount(at, weights=size[rows]).astype(np.int64), np.bincount(at)
    places = states.roots.Places(native.roots)
    table = [[printable(places.name(int(places.of[numbers[k]])), 120), int(blocks[k]), int(bytes[k]),
              f"{int(native.nodes.address[native.roots.row[numbers[k]]]):#x}"]
             for k in np.argsort(-bytes, kind="stable")[:_SHOWN_WORDS].tolist()]
    report.say()
    report.add(Table(["held only by", "Blocks", "Bytes", "It points to"], table, "held by one stack word alone", (0, 3),
                     f"{len(numbers) - _SHOWN_WORDS:,} more such words" if len(numbers) > _SHOWN_WORDS else ""))


def _table(report: Report, analysis: Analysis, groups: list[Group], top: int) -> None:
    nodes, names, rows = analysis.native.nodes, Names(analysis.target), []
    for group in groups[:top]:
        sample = int(group.rows[0])
        address, size = int(nodes.address[sample]), int(nodes.size[sample])
        text = preview(analysis.target.space, address, size - 8, names)
        sizes = nodes.size[group.rows]
        alike = int(sizes[0]) if (sizes == sizes[0]).all() else 0
        rows.append([printable(group.what, 60) + (" (in a cycle)" if group.cycles else ""), group.known, len(group.rows),
                     group.bytes, group.indirect_blocks, group.indirect_bytes, f"{address:#x}", printable(text, 80)])
        report.add(Data({"type": "group", "what": printable(group.what), "known": group.known, "count": len(group.rows),
                         "bytes": group.bytes, "usable_bytes": group.usable, "size": alike,
                         "indirect_blocks": group.indirect_blocks, "indirect_bytes": group.indirect_bytes,
                         "in_cycles": group.cycles, "sample": f"{address:#x}", "preview": text}))
    left = len(groups) - len(rows)
    report.add(Table(["What", "Known", "Direct", "Bytes", "Indirect", "Bytes", "Sample", "Contents"], rows,
                     "unreachable blocks: what nothing leads to, and what hangs on it", (0, 1, 6, 7),
                     f"{left:,} more groups: --top N shows them" if left > 0 else ""))


def _finding(report: Report, native: Native, groups: list[Group]) -> None:
    if groups:
        first = groups[0]
        address = int(native.nodes.address[first.rows[0]])
        report.add(Data({"type": "finding", "kind": "unreachable", "severity": "high" if first.total >> 20 else "medium",
                         "confidence": "inferred" if native.lost[0] else "measured", "impact": sum(g.total for g in groups),
                         "facts": [f"{printable(g.what)}: {len(g.rows):,} direct, {g.indirect_blocks:,} indirect, {g.total:,} bytes"
                                   for g in groups[:10]],
                         "hypothesis": "nothing in the process leads to these blocks any more: they can never be freed",
                         "next": [f"leak-what {address:#x}"]}))


def _profile(analysis: Analysis, groups: list[Group]) -> Profile:
    profile = Profile(f"Unreachable blocks of {analysis.target.command_name()} (pid {analysis.target.source.pid})",
                      "Malloc blocks that no root leads to, by what they are (chunk bytes, measured; types as far as known)")
    for group in groups:
        profile.add([printable(group.what)], group.bytes, len(group.rows))
        if group.indirect_blocks:
            profile.add([printable(group.what), "(what hangs on it)"], group.indirect_bytes, group.indirect_blocks)
    return profile
