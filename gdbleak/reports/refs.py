"""leak-refs: what refers to a block, a Lua object or the blocks of a set, and what those refer to."""
from __future__ import annotations

import numpy as np

from ..flame import Profile
from ..quantities import address as address_of
from .analysis import Analysis
from .document import Report, Table, printable
from .path import describe_row, row_at
from .selection import describe, rows_of_set
from .words import Words


def run(analysis: Analysis, arguments) -> Report:
    """Both sides of the references of what begins at, or holds, the address; of a set by what is on the other side."""
    if arguments.address:
        return _of_one(analysis, arguments)
    if not describe(arguments):
        raise ValueError("give an address, or a set of blocks: --size, --state, --arena (help leak-refs)")
    return _of_set(analysis, arguments)


def _of_one(analysis: Analysis, arguments) -> Report:
    address = address_of(arguments.address, arguments.evaluate)
    row = row_at(analysis, address)
    process, words = analysis.process, Words(analysis)
    report = analysis.open_report("leak-refs")
    report.say(describe_row(analysis, words, row, address))
    incoming = [other for other in process.referrers(row) if other != process.root]
    places = [other for other in incoming if other >= process.first_place]
    outgoing = list(dict.fromkeys(process.targets[process.begins[row]:process.begins[row + 1]].tolist()))
    report.totals(address=process.address(row), referrers=len(incoming), references=len(outgoing), roots=len(places),
                  **({"runtime": "luajit"} if process.object_of(row) else {}))
    if places:
        names = dict.fromkeys(words.place(place) for place in places[:10])
        report.say("roots lead to it: " + ", ".join(names) + (f" and {len(places) - 10:,} more" if len(places) > 10 else ""))
    top = arguments.top
    for title, others, outward in (("what refers to it", incoming, False), ("what it refers to", outgoing, True)):
        rows = [[words.edge(row, process.label(row, other)) if outward else words.edge(other, process.label(other, row)),
                 words.row(other), f"{process.address(other):#x}" if process.address(other) else "", int(process.own[other])]
                for other in others[:top]]
        report.say()
        report.add(Table(["by", "object", "address", "bytes"], rows, f"{title} ({len(others):,})", (0, 1, 2),
                         f"{len(others) - top:,} more: --top N shows them" if len(others) > top else ""))
    report.profile = lambda: _profile(analysis, words, np.array([row]))
    return report


def _of_set(analysis: Analysis, arguments) -> Report:
    process, words = analysis.process, Words(analysis)
    report = analysis.open_report("leak-refs")
    analysis.say_glibc(report)
    rows = rows_of_set(analysis, arguments)
    report.say(f"{len(rows):,} blocks in use, {int(process.own[rows].sum()):,} bytes: {describe(arguments)}")
    sources, targets = process.edges_into(rows)
    counts = (process.begins[rows + 1] - process.begins[rows]).astype(np.int64)
    outward = np.repeat(rows, counts)
    reached = process.targets[np.repeat(process.begins[rows] - np.cumsum(counts) + counts, counts) + np.arange(len(outward))]
    report.totals(blocks=len(rows), bytes=int(process.own[rows].sum()), referrers=len(np.unique(sources)),
                  references=len(np.unique(reached)), pointers_in=len(sources), pointers_out=len(reached))
    for title, others, mine in (("what refers to them", sources, targets), ("what they refer to", reached, outward)):
        report.say()
        report.add(_by_kind(words, title, others, mine, arguments.top))
    report.profile = lambda: _profile(analysis, words, rows)
    return report


def _by_kind(words: Words, title: str, others: np.ndarray, mine: np.ndarray, top: int) -> Table:
    """The other sides of edges by what they are; `mine`: the row of the set at each edge."""
    process, rows = words.process, []
    kinds, first, at = np.unique(words.kinds(others), return_index=True, return_inverse=True)
    pointers = np.bincount(at, minlength=len(kinds))
    for k in np.argsort(-pointers, kind="stable")[:top].tolist():
        of_kind, sample = at == k, int(others[first[k]])
        distinct = np.unique(others[of_kind])
        rows.append([words.kind(sample), int(pointers[k]), len(distinct), int(process.own[distinct].sum()),
                     len(np.unique(mine[of_kind])), f"{process.address(sample):#x}" if process.address(sample) else ""])
    return Table(["What", "Pointers", "Objects", "Bytes", "Blocks of the set", "Sample"], rows, title, (0, 5),
                 f"{len(kinds) - top:,} more kinds: --top N shows them" if len(kinds) > top else "")


def _profile(analysis: Analysis, words: Words, rows: np.ndarray) -> Profile:
    """What refers to the blocks, by what refers to that in turn."""
    target, process = analysis.target, analysis.process
    profile = Profile(f"What refers to blocks of {target.command_name()} (pid {target.source.pid})",
                      "Pointers to the blocks by what they are in; a block that several refer to is split among them (bytes, "
                      "measured)", "bytes")
    sources, targets = process.edges_into(rows)
    kinds, first, at = np.unique(words.kinds(sources), return_index=True, return_inverse=True)
    held = np.bincount(np.searchsorted(rows, targets), minlength=len(rows))
    share = process.own[targets] / np.maximum(held[np.searchsorted(rows, targets)], 1)
    weights = np.bincount(at, weights=share, minlength=len(kinds))
    for k in range(len(kinds)):
        profile.add([printable(words.kind(int(sources[first[k]])))], int(round(weights[k])), int((at == k).sum()))
    lonely = rows[held == 0]
    if len(lonely):
        profile.add(["(nothing refers to these)"], int(process.own[lonely].sum()), len(lonely))
    return profile
