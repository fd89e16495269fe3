"""The shell command: `gdbleak WORD` runs `leak-WORD` in a GDB of its own, on a core or a copy of a process.

Exit status: 0 done, 1 something was found that was asked to be absent, 2 the analysis failed.
"""
import argparse
import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
from typing import Iterator, List, NamedTuple, Optional

from . import __version__, core_probe

DONE, FAILED = 0, 2
INTERRUPTED, READER_GONE = 128 + signal.SIGINT, 128 + signal.SIGPIPE
PROGRESS_AFTER = 0.5  # seconds
OWN_WORDS = {
    "doctor": "what gdbleak finds here: GDB, its Python, the packages, and what mends it",
    "gdb-script": "print the path of the file to source in GDB",
}


class Failure(Exception):
    """The analysis failed; the message is the line for the user."""


class Target(NamedTuple):
    """What is analysed: a core file, and what belongs to it."""

    core: str
    exe: Optional[str]
    sysroot: Optional[str]


def main(arguments: Optional[List[str]] = None) -> int:
    """Run one command line; the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if sys.stdout is None:  # closed by who started us
        sys.stdout = open(os.devnull, "w")
    try:
        status = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return status
    except Failure as failure:
        print(f"gdbleak: {failure}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return READER_GONE  # the reader (head, less) has seen enough
    except OSError as error:
        drop_output()
        print(f"gdbleak: {error.filename or 'cannot write the report'}: {error.strerror}", file=sys.stderr)
        return FAILED


def drop_output() -> None:
    """Where standard output went takes no more: Python must not flush into it at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: List[str]) -> int:
    """Dispatch on the first word. Raises Failure."""
    word, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if word in ("-h", "--help", "help"):
        if word == "help" and rest:
            return run([rest[0], "--help"])
        print(overview())
    elif word == "--version":
        print("gdbleak", __version__)
    elif word == "gdb-script":
        Parser(prog="gdbleak gdb-script", description=OWN_WORDS[word]).parse_args(rest)
        from .environment import PACKAGE

        print(PACKAGE / "gdb_script.py")
    elif word == "doctor":
        return doctor(rest)
    else:
        return analyse(word, rest)
    return DONE


def overview() -> str:
    """The text of `gdbleak --help`."""
    from .commands.options import COMMANDS

    words = {**COMMANDS, **OWN_WORDS}
    width = max(map(len, words))
    lines = [f"  {word:{width}}  {summary}" for word, summary in words.items()]
    return "\n".join([
        "usage: gdbleak WORD (--core FILE [--exe FILE] [--sysroot DIR] | -p PID) [options]", "",
        "Who holds the memory of a process or a core file.", "", *lines, "",
        "gdbleak WORD --help tells the options. In GDB: source what gdb-script names, then leak-WORD.",
        "Exit status: 0 done, 1 found what was asked to be absent, 2 the analysis failed."])


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str):
        self.exit(FAILED, f"{self.prog}: {message} ({self.prog} --help tells more)\n")


def add_target_options(parser: Parser) -> None:
    """What is analysed, and by which GDB."""
    group = parser.add_argument_group("target")
    which = group.add_mutually_exclusive_group(required=True)
    which.add_argument("--core", metavar="FILE", help="a core file")
    which.add_argument("-p", dest="pid", metavar="PID", type=int,
                       help="a process: it is stopped, copied, let go; then the copy is analysed")
    group.add_argument("--exe", metavar="FILE",
                       help="its executable (default: the one that the core names, if it is the same build)")
    group.add_argument("--sysroot", metavar="DIR", help="where the files of the target's machine are")
    add_gdb_options(parser.add_argument_group("GDB"))


def add_gdb_options(group) -> None:
    """Which GDB, and how long it may be silent."""
    group.add_argument("--gdb", metavar="PATH", default=os.environ.get("GDB") or "gdb",
                       help="the GDB to use (default: $GDB, else gdb)")
    group.add_argument("--timeout", metavar="SECONDS", type=seconds, default=600.0,
                       help="end a GDB that shows no sign of life for so long (default: 600)")


def seconds(text: str) -> float:
    """A positive number of seconds. Raises ValueError."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def analyse(word: str, arguments: List[str]) -> int:
    """Run one analysis; its exit status. Raises Failure."""
    from .commands import options

    if word not in options.COMMANDS:
        raise Failure(f"there is no '{word}'; gdbleak --help lists the words")
    ours = Parser(add_help=False)
    both = Parser(prog="gdbleak " + word, description=options.COMMANDS[word],
                  parents=[options.parser(word, shell=True)])
    for parser in (ours, both):
        add_target_options(parser)
    chosen = both.parse_args(arguments)
    command = " ".join(["leak-" + word, *map(shlex.quote, ours.parse_known_args(arguments)[1])])
    if "\n" in command:
        raise Failure("an argument holds a line feed, which GDB cannot take")
    gdb = find_gdb(chosen.gdb)
    with Terminal() as terminal, the_target(chosen, terminal) as target:
        return run_in_gdb(gdb, command, target, chosen.timeout, terminal)


def find_gdb(name: str) -> str:
    """The path of GDB. Raises Failure."""
    path = shutil.which(name)
    if path is None:
        raise Failure(f"{name} is not an executable GDB" if "/" in name
                      else f"there is no {name} here; install it: apt-get install gdb")
    return path


class Terminal:
    """Where things are shown: the report on standard output; notes and progress on standard error."""

    def __init__(self):
        self._live = sys.stderr.isatty()
        self._started = self._shown = time.monotonic()
        self._step = ""
        self._on_screen = False

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_) -> None:
        self.clear()

    def report(self, data: bytes) -> None:
        """A part of the report. Raises BrokenPipeError."""
        self.clear()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def note(self, line: str) -> None:
        """A line beside the report."""
        self.clear()
        print(line, file=sys.stderr)

    def progress(self, step: Optional[str]) -> None:
        """What is being done now; None when only time has passed."""
        self._step = self._step if step is None else step
        now = time.monotonic()
        due = now - (self._started if step else self._shown) > PROGRESS_AFTER
        if self._live and due:
            width = shutil.get_terminal_size().columns - 1
            text = f"{now - self._started:.0f} s  {self._step}"[:width]
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()
            self._shown, self._on_screen = now, True

    def clear(self) -> None:
        """Take the progress line off the screen."""
        if self._on_screen:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._on_screen = False


@contextlib.contextmanager
def the_target(chosen: argparse.Namespace, terminal: Terminal) -> Iterator[Target]:
    """The core to analyse, with its files; the copy of a process ends with the context. Raises Failure."""
    if chosen.exe is not None and not os.path.isfile(chosen.exe):
        raise Failure(f"{chosen.exe}: no such file")
    if chosen.sysroot is not None and not os.path.isdir(chosen.sysroot):
        raise Failure(f"{chosen.sysroot}: no such directory")
    if chosen.core is not None:
        yield core_target(chosen.core, chosen.exe, chosen.sysroot, terminal)
        return
    with process_copy(chosen.pid, terminal) as copy:
        sysroot = chosen.sysroot or other_root(chosen.pid)
        yield core_target(copy, chosen.exe, sysroot, terminal, f"/proc/{chosen.pid}/exe")


def core_target(path: str, exe: Optional[str], sysroot: Optional[str], terminal: Terminal,
                otherwise: Optional[str] = None) -> Target:
    """A core and its executable: the named one, the one of the same build, or `otherwise`. Raises Failure."""
    try:
        core = core_probe.open_core(path)
    except core_probe.NotACore as error:
        raise Failure(str(error)) from None
    if exe is None:
        exe, problem = core_probe.executable(core, sysroot or "")
        if exe is None and otherwise and os.path.exists(otherwise):
            exe = otherwise
        elif exe is None:
            terminal.note(f"gdbleak: without the executable: {problem}")
    return Target(os.path.abspath(path), exe and os.path.abspath(exe), sysroot and os.path.abspath(sysroot))


@contextlib.contextmanager
def process_copy(pid: int, terminal: Terminal) -> Iterator[str]:
    """Stop a process, copy it, let it go: the path of the copy, gone after the context. Raises Failure."""
    import tempfile

    from .target import live

    def progress(done: int, total: int) -> None:
        terminal.progress(f"preparing the copy of process {pid}: {100 * done / max(total, 1):.0f} %")

    with tempfile.TemporaryDirectory(prefix="gdbleak-", dir=roomy_directory(pid)) as directory:
        try:
            made = live.snapshot(pid, os.path.join(directory, f"core.{pid}"), progress)
        except live.LiveError as error:
            raise Failure(str(error)) from None
        terminal.note(f"stopped for {made.stop_ms:.0f} ms ({made.bytes_copied / 1e6:.1f} MB copied)")
        for lost in made.unreadable:
            terminal.note(f"not copied: {lost.start:#x}-{lost.end:#x} {lost.path}: {lost.reason}")
        yield made.path


def roomy_directory(pid: int) -> str:
    """Where a copy of the process fits: in memory, if there is plenty, for a shorter stop; else on disk."""
    import tempfile

    needed = 1.25 * memory_field(f"/proc/{pid}/status", "VmRSS")
    spare = memory_field("/proc/meminfo", "MemAvailable")
    places = ["/dev/shm"] * (spare > 3 * needed) + [tempfile.gettempdir(), "/var/tmp"]
    if os.environ.get("TMPDIR"):
        places.insert(0, tempfile.gettempdir())
    usable = [place for place in places if os.access(place, os.W_OK)]
    fitting = [place for place in usable if free_space(place) > needed]
    return (fitting or sorted(usable, key=free_space)[-1:] or [tempfile.gettempdir()])[0]


def free_space(directory: str) -> int:
    """Bytes that can be written there."""
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def memory_field(path: str, name: str) -> int:
    """Bytes that a `name:  NUMBER kB` line of a file in /proc tells; 0 when there is none."""
    try:
        with open(path) as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith(name + ":")), 0)
    except OSError:
        return 0


def other_root(pid: int) -> Optional[str]:
    """The root directory of a process that sees other files than we do (a container), else None."""
    root = f"/proc/{pid}/root"
    try:
        return None if os.path.samefile(root, "/") else root
    except OSError:
        return None


def run_in_gdb(program: str, command: str, target: Target, timeout: float, terminal: Terminal) -> int:
    """Run one of our GDB commands on a target; its status. Raises Failure."""
    from .gdb_driver import Gdb, GdbFailure

    try:
        with Gdb(program, timeout, terminal) as gdb:
            gdb.prepare()
            if target.sysroot:
                gdb.set_sysroot(target.sysroot)
            terminal.progress("reading symbols")
            if target.exe:
                gdb.load("file", target.exe)
            gdb.load("core-file", target.core)
            terminal.progress(command.split()[0])
            return gdb.run(command)
    except GdbFailure as failure:
        raise Failure(str(failure)) from None


def doctor(arguments: List[str]) -> int:
    """Tell what is here and what is missing; FAILED when nothing can be analysed. Raises Failure."""
    import subprocess

    from .environment import PACKAGE
    from .gdb_driver import gdb_environment

    parser = Parser(prog="gdbleak doctor", description=OWN_WORDS["doctor"])
    add_gdb_options(parser)
    chosen = parser.parse_args(arguments)
    gdb = find_gdb(chosen.gdb)
    print(f"gdbleak    {__version__}, run by Python {sys.version.split()[0]}: {PACKAGE}")
    print("GDB       ", gdb, flush=True)
    steps = ["import gdb; print('version   ', gdb.VERSION)",
             "from gdbleak import environment; print(environment.description())",
             "gdb.execute('quit %d' % (gdb.convenience_variable('_gdbleak_status') is None))"]
    line = [gdb, "-nx", "-q", "-batch", "-x", str(PACKAGE / "gdb_script.py")]
    for step in steps:
        line += ["-ex", "python " + step]
    try:
        ended = subprocess.run(line, stdin=subprocess.DEVNULL, timeout=chosen.timeout, env=gdb_environment())
    except subprocess.TimeoutExpired:
        raise Failure(f"{gdb} hangs") from None
    return FAILED if ended.returncode else DONE


if __name__ == "__main__":
    sys.exit(main())
