"""leak-refs: what refers to a block or a Lua object, and what it refers to."""
from __future__ import annotations

from ..quantities import size as parse_size
from .analysis import Analysis
from .document import Report, Table
from .path import describe_row, row_at
from .words import Words


def run(analysis: Analysis, arguments) -> Report:
    """Both sides of the references of what begins at, or holds, the address."""
    address = parse_size(arguments.address, arguments.evaluate)
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
    top = max(arguments.top, 0)
    for title, others, outward in (("what refers to it", incoming, False), ("what it refers to", outgoing, True)):
        rows = [[words.edge(row, process.label(row, other)) if outward else words.edge(other, process.label(other, row)),
                 words.row(other), f"{process.address(other):#x}" if process.address(other) else "", int(process.own[other])]
                for other in others[:top]]
        report.say()
        report.add(Table(["by", "object", "address", "bytes"], rows, f"{title} ({len(others):,})", (0, 1, 2),
                         f"{len(others) - top:,} more: --top N shows them" if len(others) > top else ""))
    return report
