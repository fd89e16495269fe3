"""leak-gc-refs: what keeps LuaJIT's objects alive: paths from the GC roots, folded, as a tree and as a flame graph."""
from __future__ import annotations

import numpy as np

from ..flame import Profile
from ..graph.dominators import SEVERAL
from ..graph.graph import Groups
from ..kernels import luajit as kernel
from ..runtimes.luajit import VM
from ..runtimes.luajit_code import uses_of
from ..runtimes.luajit_names import Names, prototype_rows
from .analysis import Analysis
from .document import Report, Table, printable, share
from .gc import need_vms, say_vm
from .groups import add_groups
from .words import lua_path as path_words, shorten

_PLAIN = (kernel.TAB, kernel.UPVAL)      # what needs no word of its own in a frame


def run(analysis: Analysis, arguments) -> Report:
    """One tree for each VM; one flame graph for all."""
    vms = need_vms(analysis)
    report = analysis.open_report("leak-gc-refs")
    target = analysis.target
    how = "below the object that alone keeps it alive (its dominator)" if arguments.dominators else \
        "on its shortest path from the GC roots"
    profile = Profile(f"LuaJIT reference paths of {target.command_name()} (pid {target.source.pid})",
                      f"Each Lua object once, {how}; siblings of the same shape are one frame (bytes as LuaJIT accounts them, "
                      "measured)")
    for number, vm in enumerate(vms):
        say_vm(report, analysis, number)
        folded = Folded(vm, arguments.dominators)
        frames = add_groups(profile, folded.groups, folded.frame, folded.groups.bytes, folded.groups.count,
                            [*[f"VM {number + 1}"] * (len(vms) > 1), "GC roots"])
        report.say()
        _widest(report, folded, arguments.by)
        report.say()
        report.add(_tree(folded, arguments, how))
        reached = folded.vm.graph.tree.count
        report.totals(runtime="luajit", objects=len(vm.objects), bytes=int(vm.objects.size.sum()),
                      reached_objects=reached, reached_bytes=int(folded.groups.bytes.sum()),
                      groups=len(folded.groups), frames=frames)
    report.profile = profile.by(arguments.by, "objects")
    return report


class Folded:
    """A VM's objects folded by how they are reached, with names."""

    def __init__(self, vm: VM, dominators: bool = False):
        self.vm, self.names = vm, Names(vm)
        objects, graph = vm.objects, vm.graph
        self.groups: Groups = graph.fold(graph.dominator_tree(objects.size) if dominators else graph.tree, objects.size, objects.kind,
                                         prototype_rows(vm), kernel.MEMBER)
        self.roots = [*dict.fromkeys(name for name, _ in graph.roots), "(held from several roots)"]
        self._frames: dict[int, str] = {}

    def frame(self, group: int) -> str:
        """A group's frame: `registry`, `.cert_cache`, `[*] string`, `upvalue cache`,
        `.hit function dynamic_cache.lua:3`."""
        if group not in self._frames:
            self._frames[group] = self._frame(group)
        return self._frames[group]

    def _frame(self, group: int) -> str:
        groups, parent = self.groups, int(self.groups.parent[group])
        if parent < 0:
            return self.roots[group]
        row, kind = int(groups.row[group]), int(groups.kind[group])
        label = int(groups.label[group])
        text = self.names.edge(label, int(groups.row[parent])) if not 2 * SEVERAL <= label <= SEVERAL else self._way_to(group)
        if self.frame(parent) == "._LOADED" and text.startswith("."):
            text = text[1:]                      # a module's name
        if kind == kernel.FUNC:
            text += f" function {self.names.function(row)}"
        elif kind == kernel.CDATA:
            text += " cdata"
        elif kind not in _PLAIN and not (kind == kernel.PROTO and text == "(prototype)"):
            text += f" {kernel.KINDS[kind]}"
        return text + (" (repeated)" if groups.again[group] else "")

    def _way_to(self, group: int) -> str:
        """How a row that its dominator holds in several ways is reached: the shortest of them."""
        row, parent = int(self.groups.row[group]), int(self.groups.parent[group])
        above = int(self.groups.row[parent]) if self.groups.parent[parent] >= 0 else -1
        found = self.vm.graph.path(row) if self.groups.count[group] == 1 else None
        if found is None:
            return "(several ways)"
        root, steps = found
        said = path_words(self.names, root, steps)
        at = [k for k, (_, step) in enumerate(steps) if step == above]
        return "(shortest of several ways) " + " => ".join(shorten(said[at[0] + 1:] if at else said, 8))


def _weight(folded: Folded, by: str) -> np.ndarray:
    return folded.groups.below if by == "bytes" else folded.groups.count_below


def _widest(report: Report, folded: Folded, by: str) -> None:
    """Say the widest path: from the root on, always the child that holds the most,
    as long as it holds half of its parent."""
    groups, weight = folded.groups, _weight(folded, by)
    children: dict[int, list[int]] = {}
    for group in range(len(groups)):
        children.setdefault(int(groups.parent[group]), []).append(group)
    path, above = [], int(weight[groups.parent < 0].sum())
    best = max(children.get(-1, []), key=lambda g: weight[g], default=None)
    while best is not None and 2 * int(weight[best]) >= above:
        path.append(best)
        above = int(weight[best])
        best = max(children.get(best, []), key=lambda g: weight[g], default=None)
    if not path:
        report.say("no path holds half of the memory")
        return
    total = int(weight[groups.parent < 0].sum())
    held = int(weight[path[-1]])
    unit = "bytes" if by == "bytes" else "objects"
    report.say("the widest path: GC roots => " + " => ".join(printable(folded.frame(g), 80) for g in path))
    report.say(f"  {held:,} {unit}, {share(held, total)} of all that is reached, "
               f"{int(groups.count_below[path[-1]]):,} objects")
    for line in _written_by(folded, path):
        report.say(f"  {line}")


def _written_by(folded: Folded, path: list[int], most: int = 6):
    """For the last named field of a path: where Lua code names it, first where it is written."""
    groups = folded.groups
    for group in reversed(path):
        label = int(groups.label[group])
        if int(groups.parent[group]) >= 0 and label >= 0:
            uses = uses_of(folded.names, label)
            for verb, places in (("written", [use.place for use in uses if use.written]),
                                 ("named", [use.place for use in uses if not use.written])):
                if places:
                    more = f" and {len(places) - most} more" if len(places) > most else ""
                    yield (f"{printable(folded.frame(group), 60)} is {verb} at "
                           f"{', '.join(printable(p, 60) for p in places[:most])}{more}")
            if uses:
                return


def _tree(folded: Folded, arguments, how: str) -> Table:
    """The heaviest groups as an indented tree, at most `--top` lines, parents before children."""
    groups, weight = folded.groups, _weight(folded, arguments.by)
    total = int(weight[groups.parent < 0].sum())
    shown: set[int] = set()
    for group in np.argsort(-weight, kind="stable")[:arguments.top]:
        shown.add(int(group))
    children: dict[int, list[int]] = {}
    for group in shown:
        children.setdefault(int(groups.parent[group]), []).append(group)
    rows = []
    pending = [(group, 0) for group in sorted(children.get(-1, []), key=lambda g: weight[g])]
    while pending:
        group, depth = pending.pop()
        rows.append(["· " * min(depth, 30) + printable(folded.frame(group), 90), int(groups.below[group]),
                     share(int(weight[group]), total), int(groups.count_below[group])])
        pending += [(child, depth + 1) for child in sorted(children.get(group, []), key=lambda g: weight[g])]
    left = len(groups) - len(rows)
    return Table(["GC roots =>", "bytes", "share", "objects"], rows,
                 f"what holds the objects (each once, {how})", (0,),
                 f"{left:,} more groups: --top N shows them" if left else "")
