"""leak-retained: what would be free without each object: dominators, with the path to them and the split by heap."""
from __future__ import annotations

from argparse import Namespace

import numpy as np

from ..flame import Profile
from ..graph import roots
from ..quantities import size as size_of
from .analysis import Analysis
from .document import Report, Table, printable
from .groups import Folded
from .selection import describe, rows_of_set
from .unreachable import say_roots
from .words import Words, joined, shorten

PASSES_ON = 0.9                 # a group whose one child retains so much of what it does only leads to it


def run(analysis: Analysis, arguments) -> Report:
    """The groups of alike objects that retain most, or with --pins those whose native memory is most for their own size."""
    process = analysis.process
    least = size_of(arguments.min_bytes, arguments.evaluate)
    report = analysis.open_report("leak-retained")
    analysis.say_glibc(report)
    say_roots(report, analysis.native)
    words = Words(analysis)
    dominated = Folded(process, process.dominator_tree, words)
    shortest = Folded(process, process.tree, words)
    groups, split = dominated.groups, dominated.split
    reachable = int(groups.bytes.sum())
    top = int(groups.below[groups.parent < 0].sum())
    report.say(f"{process.tree.count - len(process.seeds):,} blocks and objects, {reachable:,} bytes are reached; each is retained "
               f"by its dominators, the objects without which nothing would lead to it")
    by_heap = {name: int(values[groups.parent < 0].sum()) for name, values in split.items()}
    report.say("  " + ", ".join(f"{name}: {value:,} bytes" for name, value in by_heap.items() if value))
    report.totals(reachable_bytes=reachable, root_children_bytes=top, nodes=process.tree.count - len(process.seeds),
                  edges=process.edges, **{f"{name.lower()}_bytes": value for name, value in by_heap.items()})
    native = split["malloc"] + split["pool"]
    chosen = _chosen(analysis, dominated, arguments)
    if arguments.pins:
        least = least or reachable // 1000
        chosen &= (groups.bytes > 0) & (groups.below > groups.bytes) & (native >= least) & (groups.kind >= 4 if analysis.luajit else True)
        order = np.argsort(-(native / np.maximum(groups.bytes, 1)), kind="stable")
    else:
        order = np.argsort(-groups.below, kind="stable")
        chosen &= (groups.below >= max(least, 1)) & (_are_variables(dominated) | ~_only_lead_on(groups))
    chosen &= groups.row != process.root                # what several places hold has no holder
    listed = [int(group) for group in order if chosen[group]]
    if not listed and arguments.pins:
        report.say("nothing small retains native memory here (--min-bytes N sets what counts)")
    rows = []
    for group in listed[:arguments.top]:
        sample = int(groups.row[group])
        at = int(shortest.groups.of_row[sample])
        path = shorten([printable(word, 80) for word in shortest.path_words(at)]) if at >= 0 else []
        rows.append([printable(dominated.frame(group), 80), int(groups.count[group]), int(groups.bytes[group]),
                     int(groups.below[group]), int(split["Lua"][group]), int(split["malloc"][group]), int(split["pool"][group]),
                     f"{process.address(sample):#x}" if process.address(sample) else "", joined(path) if path else ""])
    left = len(listed) - len(rows)
    report.say()
    report.add(Table(["What", "Objects", "Own", "Retained", "Lua", "malloc", "pool", "Address", "Path"], rows,
                     "the largest dominators" + (", by native bytes for their own size" if arguments.pins else
                                                 " (those that only lead to one other are left out)"), (0, 7, 8),
                     f"{left:,} more: --top N shows them" if left > 0 else ""))
    report.profile = lambda: _profile(analysis, dominated)
    return report


def _chosen(analysis: Analysis, folded: Folded, arguments) -> np.ndarray:
    """Which groups have a row of the set (bool): all without one."""
    if not describe(arguments):
        return np.ones(len(folded.groups), bool)
    rows = rows_of_set(analysis, Namespace(**{**vars(arguments), "min_bytes": "0"}))
    found = np.zeros(len(folded.groups), bool)
    of = folded.groups.of_row[rows]
    found[of[of >= 0]] = True
    return found


def _are_variables(folded: Folded) -> np.ndarray:
    """Which groups are variables of the program (bool)."""
    process, rows = folded.process, folded.groups.row
    number = rows - process.first_place
    variable = np.zeros(len(rows), bool)
    mine = (folded.groups.parent < 0) & (number >= 0) & (number < len(process.places))
    variable[mine] = np.isin(process.places.kind[number[mine]], (roots.MODULE, roots.STORAGE))
    return variable


def _only_lead_on(groups) -> np.ndarray:
    """Which groups hand nearly all that they retain to one other (bool)."""
    most = np.zeros(len(groups), np.int64)
    inner = groups.parent >= 0
    np.maximum.at(most, groups.parent[inner], groups.below[inner])
    return most >= PASSES_ON * groups.below


def _profile(analysis: Analysis, folded: Folded) -> Profile:
    target = analysis.target
    profile = Profile(f"Retained memory of {target.command_name()} (pid {target.source.pid})",
                      "The dominator tree: each frame is as wide as what would be free without it (bytes of malloc chunks, and "
                      "of Lua objects as LuaJIT accounts them; measured)")
    folded.add_to(profile, folded.groups.bytes, folded.groups.count)
    return profile
