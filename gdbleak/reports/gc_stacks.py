"""leak-gc-stacks: the Lua call stack of each coroutine that is alive."""
from __future__ import annotations

from collections import Counter

import numpy as np

from ..kernels import luajit as kernel
from ..runtimes.luajit import VM
from ..runtimes.luajit_code import frames
from ..runtimes.luajit_names import Names
from ..target.address_space import Absent
from .analysis import Analysis
from .document import Report, Table, printable
from .gc import need_vms, say_vm

_STATUS = {0: "ok", 1: "suspended", 2: "runtime error", 3: "syntax error", 4: "out of memory",
           5: "error in error handler"}


def run(analysis: Analysis, arguments) -> Report:
    """Coroutines with the same stack are one entry with a count."""
    report = analysis.open_report("leak-gc-stacks")
    vms = need_vms(analysis)
    for number, vm in enumerate(vms):
        say_vm(report, analysis, number)
        stacks: Counter = Counter()
        first: dict[tuple, int] = {}
        names = Names(vm)
        running = vm.ref(vm.g + vm.layout.g_cur_L)
        for row in np.flatnonzero((vm.objects.kind == kernel.THREAD) & (vm.graph.tree.seen != 0)):
            address = int(vm.objects.address[row])
            key = (_state(vm, address, running), tuple(_lines(names, address)))
            stacks[key] += 1
            first.setdefault(key, address)
        report.totals(runtime="luajit", coroutines=sum(stacks.values()), stacks=len(stacks))
        for (state, lines), count in stacks.most_common(arguments.top):
            report.say()
            title = f"{count:,} coroutines, {state}, e.g. {first[state, lines]:#x}" if count > 1 else \
                f"{'main thread' if first[state, lines] == vm.main else 'coroutine'} {first[state, lines]:#x}, {state}"
            report.add(Table(["#", "function", "at"], [[k, *line] for k, line in enumerate(lines)], title, (1, 2)))
        left = len(stacks) - arguments.top
        if left > 0:
            report.say(f"{left:,} more stacks: --top N shows them")
    return report


def _state(vm: VM, address: int, running: int) -> str:
    try:
        if address == running:
            return "running"
        return _STATUS.get(vm.u8(address + vm.layout.L_status), "unknown state")
    except Absent:
        return "unknown state"


def _lines(names: Names, thread: int) -> list[tuple[str, str]]:
    """(function, where it is) of each frame, innermost first."""
    found = []
    for frame in frames(names.vm, thread):
        place = names.function(frame.function)
        at = f"{place.rsplit(':', 1)[0]}:{frame.line}" if frame.line else ""
        found.append((printable(place, 70), printable(at, 70)))
    return found
