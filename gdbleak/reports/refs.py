"""leak-refs: what refers to one object, and what it refers to."""
from __future__ import annotations

from ..quantities import size as parse_size
from ..runtimes.luajit_names import Names
from .analysis import Analysis
from .document import Report, Table, printable
from .gc import need_vms
from .path import describe, lua_object


def run(analysis: Analysis, arguments) -> Report:
    """Both sides of the references of the object that begins at, or holds, the address."""
    address = parse_size(arguments.address, arguments.evaluate)
    vm, row = lua_object(need_vms(analysis), address)
    names, graph = Names(vm), vm.graph
    report = analysis.open_report("leak-refs")
    report.say(describe(names, row, address))
    incoming = graph.referrers(row)
    first, last = int(graph.begins[row]), int(graph.begins[row + 1])
    outgoing = list(zip(graph.targets[first:last].tolist(), graph.labels[first:last].tolist()))
    roots = [name for name, held in graph.roots if held == row]
    report.totals(runtime="luajit", address=int(vm.objects.address[row]), referrers=len(incoming),
                  references=len(outgoing), roots=len(roots))
    if roots:
        report.say("it is a root itself: " + ", ".join(dict.fromkeys(roots)))
    top = max(arguments.top, 0)
    for title, pairs, outward in (("what refers to it", incoming, False), ("what it refers to", outgoing, True)):
        rows = [[printable(names.edge(label, row if outward else other), 70), printable(names.object(other), 90),
                 f"{int(vm.objects.address[other]):#x}", int(vm.objects.size[other])] for other, label in pairs[:top]]
        report.say()
        report.add(Table(["by", "object", "address", "bytes"], rows, f"{title} ({len(pairs):,})", (0, 1, 2),
                         f"{len(pairs) - top:,} more: --top N shows them" if len(pairs) > top else ""))
    return report
