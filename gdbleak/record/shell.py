"""`gdbleak sample` and `gdbleak mmaps`: what is recorded in a live process, from the shell. No GDB takes part."""
from __future__ import annotations


from ..arguments import Parser, seconds
from ..cli import DONE, INTERRUPTED, Failure, Terminal
from ..commands.options import RECORDINGS
from ..target.ptrace import LiveError


def run(word: str, arguments: list[str]) -> int:
    """One recording; the exit status. Raises Failure."""
    chosen = parser(word).parse_args(arguments)
    from ..flame import check_path
    try:
        if chosen.flame:
            check_path(chosen.flame)
    except ValueError as error:
        raise Failure(str(error)) from None
    with Terminal() as terminal:
        try:
            recording = _record(word, chosen, terminal)
        except LiveError as error:
            raise Failure(str(error)) from None
        except KeyboardInterrupt:
            terminal.note(f"gdbleak: interrupted; process {chosen.pid} runs on as it was")
            return INTERRUPTED
        except ImportError as error:
            raise Failure(f"the Python package {error.name} is missing; run scripts/setup, or install gdbleak again"
                          ) from None
        _show(recording.report(chosen.top), chosen, terminal)
    return DONE


def _show(report, chosen, terminal):
    from ..flame import write
    text = report.json_text() if chosen.json == "-" else report.text()
    terminal.report(text.encode("utf-8", "replace"))
    if chosen.json and chosen.json != "-":
        with open(chosen.json, "w", encoding="utf-8") as stream:
            stream.write(report.json_text())
    if chosen.flame:
        write(report.profile, chosen.flame)


def _record(word, chosen, terminal):
    from . import sample
    if word == "mmaps":
        from . import mmaps
        return mmaps.record(chosen.pid, chosen.seconds, terminal.note, terminal.progress)
    grace = chosen.seconds / 10 if chosen.grace is None else chosen.grace
    options = sample.Options(seconds=chosen.seconds, grace=grace, by=chosen.by, every=chosen.every, rate=chosen.rate,
                             pools=chosen.pools, lua=chosen.lua)
    if chosen.exact:
        from . import exact
        return exact.record(chosen.pid, options, terminal.note, terminal.progress)
    return sample.record(chosen.pid, options, terminal.note, terminal.progress)


def parser(word: str) -> Parser:
    """The options of one of the two words."""
    build = Parser(prog=f"gdbleak {word}", description=RECORDINGS[word])
    build.add_argument("-p", dest="pid", metavar="PID", type=int, required=True, help="the process to record")
    build.add_argument("--seconds", metavar="N", type=seconds, default=5.0, help="how long (default 5)")
    add_options(build, word)
    return build


def add_options(build, word: str) -> None:
    """Those that the GDB command has as well."""
    if word == "sample":
        _sample_options(build)
    build.add_argument("--top", metavar="N", type=int, default=20, help="lines of the table at most (default 20)")
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
