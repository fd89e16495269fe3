"""leak-unreachable: the blocks that no root reaches, grouped by the leak they hang on, and what is nearly so: what only dead
Lua objects hold (pending), and what hangs on one stack word alone."""
from __future__ import annotations

from argparse import Namespace
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

_SHOWN_WORDS = 8                # lines about stack words
_NAMED_WORDS = 500              # stack words whose frames are looked for


@dataclass
class Group:
    """Leaks of one kind: heads (rows of Nodes) and what hangs on them."""

    what: str
    known: str
    rows: np.ndarray
    blocks: int
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
    chosen = describe(arguments)
    of_set = np.full(len(native.nodes), not chosen)           # by row: whether it is of the set
    if chosen:
        of_set[rows_of_set(analysis, Namespace(**{**vars(arguments), "min_bytes": "0"}))] = True
    groups = [group for group in _groups(native, BlockWords(analysis), of_set[native.leaks.rows]) if group.total >= least]
    _totals(report, native, of_set, chosen)
    _nearly(report, native, of_set)
    report.say()
    _table(report, analysis, groups, arguments.top)
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
    if rooted.absent:
        largest = sorted(rooted.absent.items(), key=lambda item: -item[1])
        report.say(f"partial: {sum(rooted.absent.values()):,} bytes that can hold pointers are not in the core "
                   f"({', '.join(f'{printable(name, 60)}: {size:,}' for name, size in largest[:3])}); what only they hold is "
                   "counted as unreachable")
    damaged = sum(end - start for heap in native.nodes.heaps for region in heap.regions for start, end in region.damaged)
    if damaged:
        report.say(f"partial: {damaged:,} bytes of the heap are damaged; their words count as roots, and leaks among them are "
                   "not found")


def _groups(native: Native, words: BlockWords, wanted: np.ndarray) -> list[Group]:
    """What is of a set (bool over the unreachable rows), by the leak it hangs on, leaks of one type together. `rows` of a
    group are its heads of the set, or else one that blocks of the set hang on."""
    leaks, nodes = native.leaks, native.nodes
    sizes = np.where(wanted, nodes.size[leaks.rows].astype(np.int64), 0)
    below = np.bincount(leaks.head, weights=sizes, minlength=len(leaks.rows)).astype(np.int64)
    members = np.bincount(leaks.head, weights=wanted, minlength=len(leaks.rows)).astype(np.int64)
    heads = np.flatnonzero(leaks.direct & (members > 0))
    numbers = words.numbers(leaks.rows[heads])
    order = np.argsort(numbers, kind="stable")
    groups = []
    cuts = np.flatnonzero(np.diff(numbers[order])) + 1
    for first, at in zip([0, *cuts.tolist()], np.split(heads[order], cuts) if len(heads) else ()):
        mine = at[wanted[at]]
        rows, own = leaks.rows[mine], int(sizes[mine].sum())
        groups.append(Group(*words.name(int(numbers[order[first]])), rows if len(rows) else leaks.rows[at[:1]],
                            len(rows), own, _usable(native, rows), int(members[at].sum()) - len(rows),
                            int(below[at].sum()) - own, int(leaks.cyclic[at].sum())))
    return sorted(groups, key=lambda group: (-group.total, group.what))


def _usable(native: Native, rows: np.ndarray) -> int:
    """What malloc_usable_size() says of the blocks, added up."""
    nodes = native.nodes
    total = int(nodes.size[rows].sum()) - 8 * len(rows)
    for row in rows[nodes.size[rows] >= 1 << 12].tolist():         # mmapped chunks have another header
        heap, at = nodes.in_heap(row)
        total += heap.usable(at) - int(nodes.size[row]) + 8
    return total


def _totals(report: Report, native: Native, of_set: np.ndarray, chosen: str) -> None:
    leaks, nodes = native.leaks, native.nodes
    wanted = of_set[leaks.rows]
    rows, direct = leaks.rows[wanted], leaks.rows[wanted & leaks.direct]
    size = nodes.size
    in_use = int(size.sum()) - int(size[native.state == states.NO_NODE].sum())
    total, own = int(size[rows].sum()), int(size[direct].sum())
    pending, stacked = native.rows_of(states.PENDING), native.on_stack
    pending, alone = pending[of_set[pending]], stacked.rows[(stacked.word >= 0) & of_set[stacked.rows]]
    report.say(f"{count(len(rows), 'block')}, {total:,} bytes ({share(total, in_use)} of what is in use) {'is' if len(rows) == 1 else 'are'} unreachable"
               f"{': ' + chosen if chosen else ''}: {len(direct):,} directly ({own:,} bytes), {len(rows) - len(direct):,} only "
               f"from those ({total - own:,} bytes)")
    report.totals(blocks=len(rows), bytes=total, usable_bytes=_usable(native, rows), direct_blocks=len(direct),
                  direct_bytes=own, indirect_blocks=len(rows) - len(direct), indirect_bytes=total - own,
                  pending_blocks=len(pending), pending_bytes=int(size[pending].sum()), stack_only_blocks=len(alone),
                  stack_only_bytes=int(size[alone].sum()), in_use_bytes=in_use, edges=native.edges,
                  lost_words=int(native.lost[1]), lost_root_bytes=sum(native.roots.absent.values()))


def _nearly(report: Report, native: Native, of_set: np.ndarray) -> None:
    """What is neither a leak nor plainly alive."""
    size, pending, stacked = native.nodes.size, native.rows_of(states.PENDING), native.on_stack
    pending = pending[of_set[pending]]
    if len(pending):
        report.say(f"pending: {count(len(pending), 'block')}, {int(size[pending].sum()):,} bytes, held by dead Lua objects alone: the "
                   "next collection releases them; no leak, and not counted above")
    alone = (stacked.word >= 0) & of_set[stacked.rows]
    if not alone.any():
        return
    rows, words = stacked.rows[alone], stacked.word[alone]
    report.say(f"suspicious: {count(len(rows), 'block')}, {int(size[rows].sum()):,} bytes, held by one stack word or register alone, "
               "not counted above: a local variable that is alive, or a leftover that hides a leak")
    numbers, at = np.unique(words, return_inverse=True)
    bytes, blocks = np.bincount(at, weights=size[rows]).astype(np.int64), np.bincount(at)
    places = states.roots.Places(native.roots)
    table: dict[str, list] = {}                      # the same word of many threads is one line
    for k in np.argsort(-bytes, kind="stable")[:_NAMED_WORDS].tolist():
        name = printable(places.name(int(places.of[numbers[k]])), 120)
        line = table.setdefault(name, [name, 0, 0, 0, f"{int(native.nodes.address[native.roots.row[numbers[k]]]):#x}"])
        line[1:4] = line[1] + 1, line[2] + int(blocks[k]), line[3] + int(bytes[k])
    shown = sorted(table.values(), key=lambda line: -line[3])[:_SHOWN_WORDS]
    left = len(numbers) - sum(line[1] for line in shown)
    report.say()
    report.add(Table(["held only by", "Words", "Blocks", "Bytes", "It points to"], shown, "held by one stack word alone", (0, 4),
                     f"{left:,} more such words" if left else ""))


def _table(report: Report, analysis: Analysis, groups: list[Group], top: int) -> None:
    nodes, names, rows = analysis.native.nodes, Names(analysis.target), []
    for group in groups[:top]:
        sample = int(group.rows[0])
        address, size = int(nodes.address[sample]), int(nodes.size[sample])
        text = preview(analysis.target.space, address, size - 8, names)
        sizes = nodes.size[group.rows]
        alike = int(sizes[0]) if (sizes == sizes[0]).all() else 0
        rows.append([printable(group.what, 60) + (" (in a cycle)" if group.cycles else ""), group.known, group.blocks,
                     group.bytes, group.indirect_blocks, group.indirect_bytes, f"{address:#x}", printable(text, 80)])
        report.add(Data({"type": "group", "what": printable(group.what), "known": group.known, "count": group.blocks,
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
                         "confidence": "inferred" if native.lost[0] or native.roots.absent else "measured", "impact": sum(g.total for g in groups),
                         "facts": [f"{printable(g.what)}: {g.blocks:,} direct, {g.indirect_blocks:,} indirect, {g.total:,} bytes"
                                   for g in groups[:10]],
                         "hypothesis": "nothing in the process leads to these blocks any more: they can never be freed",
                         "next": [f"leak-what {address:#x}"]}))


def _profile(analysis: Analysis, groups: list[Group]) -> Profile:
    profile = Profile(f"Unreachable blocks of {analysis.target.command_name()} (pid {analysis.target.source.pid})",
                      "Malloc blocks that no root leads to, by what they are (chunk bytes, measured; types as far as known)")
    for group in groups:
        profile.add([printable(group.what)], group.bytes, group.blocks)
        if group.indirect_blocks:
            profile.add([printable(group.what), "(what hangs on it)"], group.indirect_bytes, group.indirect_blocks)
    return profile
