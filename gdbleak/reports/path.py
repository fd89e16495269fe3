"""leak-path: what keeps one object alive, from a root down to it."""
from __future__ import annotations

from ..quantities import size as parse_size
from ..runtimes.luajit import VM
from ..runtimes.luajit_names import Names
from ..target.target import TargetError
from .analysis import Analysis
from .document import Report, Table, printable
from .gc import need_vms


def run(analysis: Analysis, arguments) -> Report:
    """The shortest path from a GC root to the object that begins at, or holds, the address."""
    address = parse_size(arguments.address, arguments.evaluate)
    vm, row = lua_object(need_vms(analysis), address)
    names = Names(vm)
    report = analysis.open_report("leak-path")
    report.say(describe(names, row, address))
    path = vm.graph.path(row)
    report.totals(runtime="luajit", address=int(vm.objects.address[row]), bytes=int(vm.objects.size[row]),
                  reached=path is not None, steps=len(path[1]) if path else 0)
    if path is None:
        report.say("nothing reaches it: it is dead, and the next collection frees it")
        return report
    root, steps = path
    report.say("GC roots => " + " => ".join(printable(word, 80) for word in words(names, root, steps)))
    rows = []
    for k, (word, (_, at)) in enumerate(zip(words(names, root, steps), steps)):
        rows.append([k, printable(word, 80), printable(names.object(at), 90), f"{int(vm.objects.address[at]):#x}",
                     int(vm.objects.size[at])])
    report.say()
    report.add(Table(["#", "by", "object", "address", "bytes"], rows,
                     "from the root down (the shortest path; there may be others)", (1, 2, 3)))
    return report


def words(names: Names, root: str, steps: list[tuple[int, int]]) -> list[str]:
    """The steps of a path in Lua's words."""
    found, above = [root], steps[0][1]
    for label, row in steps[1:]:
        word = names.edge(label, above)
        if found[-1] == "._LOADED" and word.startswith("."):
            word = word[1:]              # a module's name
        found.append(word)
        above = row
    return found


def lua_object(vms: list[VM], address: int) -> tuple[VM, int]:
    """(VM, row) of the object that holds an address. Raises TargetError."""
    for vm in vms:
        row = vm.row_holding(address)
        if row >= 0:
            return vm, row
    raise TargetError(f"no Lua object begins at or holds {address:#x}; leak-what {address:#x} says what is there")


def describe(names: Names, row: int, address: int) -> str:
    """One line about an object."""
    vm = names.vm
    start = int(vm.objects.address[row])
    inside = f", {address - start} bytes into it" if address != start else ""
    return f"{printable(names.object(row), 100)} at {start:#x}, {int(vm.objects.size[row]):,} bytes{inside}"
