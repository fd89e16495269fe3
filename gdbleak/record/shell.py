"""`gdbleak sample` and `gdbleak mmaps`: what is recorded in a live process, from the shell. No GDB takes part."""
from __future__ import annotations

import json
from functools import partial

from ..arguments import Parser, is_single, seconds
from ..cli import DONE, FAILED, INTERRUPTED, Failure, Terminal, check_outputs
from ..commands.options import RECORDINGS, lines
from ..flame import Profile, write
from ..reports.document import VERSION
from ..several import add_under, table, total
from ..target.processes import choose
from ..target.ptrace import LiveError

_SECONDS = 5.0          # of the window by default
NO_SUMS = ("mean", "interval", "seconds", "stop_ms")      # numbers that do not add up over processes


def run(word: str, arguments: list[str]) -> int:
    """One recording, or one after the other of several processes; the exit status. Raises Failure."""
    build = parser(word)
    chosen = build.parse_args(arguments)
    if chosen.pid is chosen.exe is chosen.command is None:
        build.error("give -p PID, -p -PGID, --exe PATH, or -c 'COMMAND'")
    if getattr(chosen, "lua", False):
        if chosen.exact:
            build.error("--lua is for the sampled mode; with --every 1 that takes every allocation, too")
        if chosen.command is not None:
            build.error("--lua is for a process that runs already: it goes with -p")
    if chosen.seconds is None and chosen.command is None:
        chosen.seconds = _SECONDS
    check_outputs(chosen)
    with Terminal() as terminal:
        try:
            if chosen.command is not None:
                return _command(word, chosen, terminal)
            processes = choose(chosen.pid, chosen.exe)
            return (_one if is_single(chosen) else _each)(word, chosen, processes, terminal)
        except LiveError as error:
            raise Failure(str(error)) from None
        except ImportError as error:
            raise Failure(f"the Python package {error.name} is missing; run scripts/setup, or install gdbleak again"
                          ) from None


def _one(word: str, chosen, processes: list, terminal) -> int:
    """Record the one process."""
    try:
        report = _record(word, chosen, processes[0].pid, terminal).report(chosen.top)
    except KeyboardInterrupt:
        terminal.note(f"gdbleak: interrupted; process {processes[0].pid} runs on as it was")
        return INTERRUPTED
    _show(report.text(), report.json(), report.profile, chosen, terminal)
    return DONE


def _command(word: str, chosen, terminal) -> int:
    """Start the command and record it."""
    from . import session                       # not when GDB asks for the options: this brings NumPy
    report = session.record_command(
        _maker(word, chosen), chosen.command, keeps_output="-" not in (chosen.json, chosen.flame),
        timing=_timing(chosen), notes=session.Notes(terminal.note, terminal.progress)).report(chosen.top)
    _show(report.text(), report.json(), report.profile, chosen, terminal)
    return DONE


def _each(word: str, chosen, processes: list, terminal) -> int:
    """Record one process after the other: a report each, and one sum and flame graph. What fails does not end the rest."""
    status, text, items, sums, profile = DONE, "", [], [], None
    for process in processes:
        name = f"{process.name} {process.pid}"
        try:
            report = _record(word, chosen, process.pid, terminal).report(chosen.top)
        except LiveError as error:
            terminal.note(f"gdbleak: {name}: {error}")
            status = FAILED
            continue
        except KeyboardInterrupt:
            terminal.note(f"gdbleak: interrupted; process {process.pid} runs on as it was")
            status = INTERRUPTED
            break
        found = report.json()
        items += [{"type": "process", "ver": VERSION, "pid": process.pid, "name": process.name}, *found]
        numbers = total([item for item in found if item["type"] == "totals"])
        sums.append((name, {key: value for key, value in numbers.items() if key not in NO_SUMS}))
        text += f"=== {name} ===\n{report.text()}\n"
        if profile is None:
            profile = Profile(f"{report.profile.title}, and of others", report.profile.legend, report.profile.unit)
        add_under(profile, name, report.profile)
    if sums:
        both = total([numbers for _, numbers in sums])
        items.append({"type": "totals", "ver": VERSION, "command": f"leak-{word}", "processes": len(sums), **both})
        _show(text + table(word, sums, both, "").text(), items, profile, chosen, terminal)
    return status


def _show(text: str, items: list, profile, chosen, terminal) -> None:
    """The report, and its files."""
    as_json = json.dumps(items, indent=1) + "\n"
    terminal.report((as_json if chosen.json == "-" else text).encode("utf-8", "replace"))
    if chosen.json and chosen.json != "-":
        with open(chosen.json, "w", encoding="utf-8") as stream:
            stream.write(as_json)
    if chosen.flame:
        write(profile, chosen.flame)


def _record(word, chosen, pid, terminal):
    from . import exact, session
    record = exact.record if getattr(chosen, "exact", False) else session.record
    return record(_maker(word, chosen), pid, _timing(chosen), session.Notes(terminal.note, terminal.progress))


def _maker(word, chosen):
    """What makes the `Session` of a process."""
    if word == "mmaps":
        from .mmaps import MappingCalls
        return MappingCalls
    if chosen.exact:
        from .exact import EveryCall
        return partial(EveryCall, _options(chosen))
    from .sample import Sampling
    return partial(Sampling, _options(chosen))


def _timing(chosen):
    from .session import Timing
    grace = getattr(chosen, "grace", 0.0)
    return Timing(chosen.seconds, (chosen.seconds or 0.0) / 10 if grace is None else grace)


def _options(chosen):
    from . import sample
    return sample.Options(chosen.by, chosen.every, chosen.rate, chosen.pools, chosen.lua)


def parser(word: str) -> Parser:
    """The options of one of the two words."""
    build = Parser(prog=f"gdbleak {word}", description=RECORDINGS[word])
    which = build.add_mutually_exclusive_group()
    which.add_argument("-p", dest="pid", metavar="PID", type=int,
                       help="the process to record; -PGID: each process of that group, one after the other")
    which.add_argument("--exe", metavar="PATH", help="each process that runs this executable, one after the other")
    which.add_argument("-c", dest="command", metavar="'COMMAND'",
                       help="start this command and record it from its start, and each program that it becomes; not its "
                            "children (its output goes to standard error only beside `--json -` or `--flame -`)")
    build.add_argument("--seconds", metavar="N", type=seconds,
                       help=f"how long (default {_SECONDS:g}; of a command: until it ends); a command is ended then")
    add_options(build, word)
    return build


def add_options(build, word: str) -> None:
    """Those that the GDB command has as well."""
    if word == "sample":
        _sample_options(build)
    build.add_argument("--top", metavar="N", type=lines, default=20, help="lines of the table at most (default 20)")
    build.add_argument("--flame", metavar="FILE", help="write the flame graph as .svg, .folded or .txt")
    build.add_argument("--json", metavar="FILE",
                       help="also write the report as JSON (- is standard output, in place of the text)")


def _sample_options(build):
    build.add_argument("--grace", metavar="S", type=not_negative,
                       help="watch frees for so many seconds after the window (default: a tenth of it)")
    build.add_argument("--exact", action="store_true",
                       help="record every call, through breakpoints: for slow or test processes")
    build.add_argument("--by", choices=("bytes", "calls"), default="bytes",
                       help="what a sample is one of n of (default bytes)")
    build.add_argument("--every", metavar="N", type=count, default=0,
                       help="n, e.g. 64k (default: as many samples as --rate says)")
    build.add_argument("--rate", metavar="N", type=count, default=10_000,
                       help="samples a second at most (default 10000)")
    build.add_argument("--pools", action="store_true", help="nginx's pools, created and not destroyed")
    build.add_argument("--lua", action="store_true", help="the Lua frames of the running coroutine, too")


def count(text: str) -> int:
    """A positive number, with k, M or G for powers of 1024. Raises ValueError."""
    unit = {"k": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    value = int(text if unit == 1 else text[:-1]) * unit
    if not 0 < value < 1 << 40:
        raise ValueError(text)
    return value


def not_negative(text: str) -> float:
    """A number of seconds, or none. Raises ValueError."""
    return 0.0 if float(text) == 0 else seconds(text)
