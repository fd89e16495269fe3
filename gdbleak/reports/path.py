"""leak-path: who holds a block, a Lua object or a set of blocks: the paths from a root down to it."""
from __future__ import annotations

import numpy as np

from ..flame import Profile
from ..graph import native as states
from ..graph.graph import Groups
from ..quantities import address as address_of
from ..target.target import TargetError
from .analysis import Analysis
from .document import Report, Table, count, printable, share
from .groups import Folded
from .selection import describe, rows_of_set
from .words import Words, joined, shorten

_DEEP = 24                      # so far up a path other ways in are looked for
_LINES = 4                      # paths looked at for each that is shown, as some turn out to be called the same
_FAR = 1_000_000                # steps of other paths that are walked at most
_WHY = {states.UNREACHABLE: "nothing reaches it: no root leads here, it is leaked (leak-unreachable)",
        states.PENDING: "only dead Lua objects hold it: the next collection releases it"}


def run(analysis: Analysis, arguments) -> Report:
    """Of one address the shortest path and others of another shape; of a set the paths of its blocks, alike ones together."""
    if arguments.address:
        return _of_one(analysis, arguments)
    if not describe(arguments):
        raise ValueError("give an address, or a set of blocks: --size, --state, --arena (help leak-path)")
    return _of_set(analysis, arguments)


def row_at(analysis: Analysis, address: int) -> int:
    """The row of the process graph that holds an address. Raises TargetError."""
    row = analysis.process.row_at(address)
    if row < 0:
        raise TargetError(f"no block in use and no Lua object begins at or holds {address:#x}; leak-what {address:#x} says what "
                          "is there")
    return row


def describe_row(analysis: Analysis, words: Words, row: int, address: int) -> str:
    """One line about a row."""
    process = analysis.process
    start = process.address(row)
    inside = f", {address - start:,} bytes into it" if address != start else ""
    kind = "" if process.object_of(row) else "malloc block, "
    return f"{kind}{words.row(row)} at {start:#x}, {int(process.own[row]):,} bytes{inside}"


# -- one address -------------------------------------------------------------------------------------------------------
def _of_one(analysis: Analysis, arguments) -> Report:
    address = address_of(arguments.address, arguments.evaluate)
    row = row_at(analysis, address)
    process, words = analysis.process, Words(analysis)
    report = analysis.open_report("leak-path")
    report.say(describe_row(analysis, words, row, address))
    steps = process.steps(row)
    report.totals(address=process.address(row), bytes=int(process.own[row]), reached=steps is not None,
                  steps=len(steps) - 1 if steps else 0, **({"runtime": "luajit"} if process.object_of(row) else {}))
    if steps is None:
        lua = process.object_of(row)
        report.say("nothing reaches it: it is dead, and the next collection frees it" if lua else
                   _WHY.get(int(analysis.native.state[row]), "nothing reaches it"))
        return report
    said = words.path(steps)
    report.say(joined(shorten(said)))
    if row < len(process.nodes) and analysis.native.state[row] == states.ON_STACK_ONLY:
        report.say("  only a stack or a register leads to it")
    report.say()
    report.add(Table(["#", "by", "object", "address", "bytes"], _rows(process, words, steps, said),
                     "from the root down (the shortest path)", (1, 2, 3)))
    folded = Folded(process, process.tree, words)
    others = _others(process, words, folded.groups, steps, arguments.top)
    if others:
        report.say()
        report.add(Table(["steps", "path"], [[len(said), joined(shorten(said))] for said in others],
                         "other ways to it, one of each shape", (1,)))
    report.profile = lambda: _profile(analysis, np.array([row]), folded)
    return report


def _rows(process, words: Words, steps: list[tuple[int, int]], said: list[str]) -> list[list]:
    """The table of a path; of a long one the beginning and the end."""
    numbered = list(enumerate(steps))
    shown = numbered if len(steps) <= 40 else numbered[:20] + numbered[-20:]
    rows, said_of = [], dict(enumerate(said)) if len(said) == len(steps) else {}
    for k, (label, at) in shown:
        above = steps[k - 1][1] if k else -1
        rows.append([k, said_of.get(k) or (words.place(at) if not k else words.edge(above, label)), words.row(at),
                     f"{process.address(at):#x}" if process.address(at) else "", int(process.own[at])])
    return rows


def _others(process, words: Words, groups: Groups, steps: list[tuple[int, int]], most: int) -> list[list[str]]:
    """Other paths, each of a shape of its own: those that leave the shortest one at one of its last steps. Of referrers that
    are reached in the same way one is looked at."""
    seen, found, walked = {_shape(words.path(steps))}, [], 0
    for k in range(len(steps) - 1, max(len(steps) - 1 - _DEEP, 0), -1):
        row, on_path = steps[k][1], {at for _, at in steps[k:]}
        others = np.array([other for other in process.referrers(row) if other not in on_path and other != steps[k - 1][1]],
                          np.int64)
        of = groups.of_row[others]
        alike = (of >= 0) & (others != process.root) & (of != groups.of_row[steps[k - 1][1]])
        for other in others[alike][np.unique(of[alike], return_index=True)[1]].tolist():
            if len(found) >= most or walked > _FAR:
                return sorted(found, key=len)
            above = process.steps(other)
            walked += len(above)
            if any(at in on_path for _, at in above):
                continue
            said = words.path([*above, (process.label(other, row), row), *steps[k + 1:]])
            if _shape(said) not in seen:
                seen.add(_shape(said))
                found.append(said)
    return sorted(found, key=len)


def _shape(said: list[str]) -> tuple:
    """What two paths share that differ only in how often a step is repeated."""
    return tuple(word for word, before in zip(said, [None, *said]) if word != before)


# -- a set -------------------------------------------------------------------------------------------------------------
def _of_set(analysis: Analysis, arguments) -> Report:
    process, words = analysis.process, Words(analysis)
    report = analysis.open_report("leak-path")
    analysis.say_glibc(report)
    rows = rows_of_set(analysis, arguments)
    size = process.own[rows]
    report.say(f"{count(len(rows), 'block')} in use, {int(size.sum()):,} bytes: {describe(arguments)}")
    if arguments.state in ("free", "tcached", "top"):
        report.say("only blocks in use are held by anything: leak-blocks lists the others")
    folded = Folded(process, process.tree, words)
    of = folded.groups.of_row[rows]
    reached = of >= 0
    numbers, at = np.unique(of[reached], return_inverse=True)
    blocks = np.bincount(at, minlength=len(numbers))
    bytes = np.bincount(at, weights=size[reached], minlength=len(numbers)).astype(np.int64)
    merged: dict[str, list] = {}                     # the same stack word of many threads is one line
    order = np.argsort(-bytes, kind="stable")
    first = np.unique(at, return_index=True)[1]
    for k in order[:_LINES * arguments.top].tolist():
        path = joined(shorten([printable(w, 80) for w in folded.path_words(int(numbers[k]))]))
        line = merged.setdefault(path, [0, 0, "", path, f"{process.address(int(rows[reached][first[k]])):#x}"])
        line[0], line[1] = line[0] + int(blocks[k]), line[1] + int(bytes[k])
    table = sorted(merged.values(), key=lambda line: -line[1])[:arguments.top]
    for line in table:
        line[2] = share(line[1], int(size.sum()))
    state = analysis.native.state[rows[~reached]]
    for kind, name in ((states.UNREACHABLE, "nothing reaches these (leak-unreachable)"),
                       (states.PENDING, "only dead Lua objects hold these")):
        mine = rows[~reached][state == kind]
        if len(mine):
            table.append([len(mine), int(process.own[mine].sum()), share(int(process.own[mine].sum()), int(size.sum())), name,
                          f"{process.address(int(mine[0])):#x}"])
    report.totals(blocks=len(rows), bytes=int(size.sum()), reached_blocks=int(reached.sum()),
                  reached_bytes=int(size[reached].sum()), paths=len(numbers),
                  unreachable_blocks=int((state == states.UNREACHABLE).sum()),
                  pending_blocks=int((state == states.PENDING).sum()))
    left = len(numbers) - _LINES * arguments.top + len(merged) - arguments.top
    report.say()
    report.add(Table(["Blocks", "Bytes", "Share", "Path", "Sample"], table,
                     "who holds them (each block on its shortest path, paths of the same shape together)", (3, 4),
                     f"{left:,} more paths: --top N shows them" if left > 0 else ""))
    report.profile = lambda: _profile(analysis, rows, folded)
    return report


def _profile(analysis: Analysis, rows: np.ndarray, folded: Folded) -> Profile:
    target, process = analysis.target, analysis.process
    profile = Profile(f"Who holds blocks of {target.command_name()} (pid {target.source.pid})",
                      "Each block on its shortest path from a root; paths of the same shape together (measured)")
    of = folded.groups.of_row[rows]
    mine = rows[of >= 0]
    weights = np.bincount(of[of >= 0], weights=process.own[mine], minlength=len(folded.groups)).astype(np.int64)
    folded.add_to(profile, weights, np.bincount(of[of >= 0], minlength=len(folded.groups)))
    return profile
