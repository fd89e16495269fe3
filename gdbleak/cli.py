"""The shell command: `gdbleak WORD` runs `leak-WORD` in a GDB of its own, on a core or a copy of a process.

Exit status: 0 done, 1 something was found that was asked to be absent, 2 the analysis failed.
"""
import argparse
import contextlib
import fcntl
import glob
import importlib
import os
import shlex
import shutil
import signal
import sys
import time
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from . import __version__, core_probe
from .arguments import Parser, add_process_options, check_process_options, is_single, prepare_process, seconds
from .commands import options

DONE, FAILED = 0, 2
INTERRUPTED, READER_GONE = 128 + signal.SIGINT, 128 + signal.SIGPIPE
PROGRESS_AFTER = 0.5  # seconds
COPY = "gdbleak-copy-"  # how the directories of copies begin, each locked by who made it
JUST_MADE = 60  # seconds in which a directory may not be locked yet


class Failure(Exception):
    """The analysis failed; the message is the line for the user."""


class Target(NamedTuple):
    """What is analysed: a core file, and what belongs to it."""

    core: str
    exe: Optional[str]
    sysroot: Optional[str]


def main(arguments: Optional[List[str]] = None) -> int:
    """Run one command line; the exit status."""
    prepare_process()
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
    elif word in OWN_WORDS:
        return OWN_WORDS[word].run(rest)
    else:
        return analyse(word, rest)
    return DONE


def overview() -> str:
    """The text of `gdbleak --help`."""
    words = {**options.COMMANDS, **{word: own.summary for word, own in OWN_WORDS.items()}}
    width = max(map(len, words))
    lines = [f"  {word:{width}}  {summary}" for word, summary in words.items()]
    return "\n".join([
        "usage: gdbleak WORD (--core FILE [--exe FILE] [--sysroot DIR] | -p PID | -p -PGID | --exe PATH |",
        "                     -c 'COMMAND') [options]", "",
        "Who holds the memory of a process or a core file.", "", *lines, "",
        "gdbleak WORD --help tells the options. In GDB: source what gdb-script names, then leak-WORD.",
        "Exit status: 0 done, 1 found what was asked to be absent, 2 the analysis failed."])


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """What is analysed, and by which GDB."""
    group = parser.add_argument_group("target")
    which = group.add_mutually_exclusive_group()
    which.add_argument("--core", metavar="FILE", help="a core file")
    add_process_options(which, group)
    group.add_argument("--exe", metavar="FILE",
                       help="the executable (default: the one that the core names, if it is the same build); without "
                            "--core, -p and -c: each process that runs it")
    group.add_argument("--sysroot", metavar="DIR", help="where the files of the target's machine are (default: what "
                       "`gdbleak pack` put beside the core)")
    add_gdb_options(parser.add_argument_group("GDB"))


def check_target_options(chosen: argparse.Namespace, parser: Parser) -> None:
    """End with one line when the options name no target, or do not go together."""
    if chosen.core is chosen.pid is chosen.command is chosen.exe is None:
        parser.error("a target is required: --core, -p, -c or --exe")
    for name, value in (("--fork", chosen.fork), ("--max-stop", chosen.max_stop)):
        if value and chosen.core is not None:
            parser.error(f"{name} goes with a process, not with --core")
    check_process_options(chosen, parser)


def add_gdb_options(group) -> None:
    """Which GDB, and how long it may be silent."""
    group.add_argument("--gdb", metavar="PATH", default=os.environ.get("GDB") or "gdb",
                       help="the GDB to use (default: $GDB, else gdb)")
    group.add_argument("--timeout", metavar="SECONDS", type=seconds, default=600.0,
                       help="end a GDB that shows no sign of life for so long (default: 600)")


def analyse(word: str, arguments: List[str]) -> int:
    """Run one analysis; its exit status. Raises Failure."""
    if word not in options.COMMANDS:
        raise Failure(f"there is no '{word}'; gdbleak --help lists the words")
    both = Parser(prog="gdbleak " + word, description=options.COMMANDS[word],
                  parents=[options.parser(word, shell=True)])
    add_target_options(both)
    chosen = both.parse_args(arguments)
    check_target_options(chosen, both)
    gdb = find_gdb(chosen.gdb)
    check_outputs(chosen)
    with Terminal() as terminal, live_errors():
        if chosen.core is None and not is_single(chosen):
            from .several import analyse_each

            return analyse_each(word, arguments, chosen, gdb, terminal)
        command = command_line(word, arguments)
        with the_target(chosen, terminal) as target:
            return run_in_gdb(gdb, command, target, chosen.timeout, terminal)


def check_outputs(chosen: argparse.Namespace) -> None:
    """Raises Failure when --json or --flame name what cannot be written: before anything is done to a process."""
    from .target.room import check_writable

    with live_errors():
        for path in {getattr(chosen, "json", None), getattr(chosen, "flame", None)} - {None, "-"}:
            check_writable(path)
    if getattr(chosen, "flame", None):
        from .flame import check_path

        try:
            check_path(chosen.flame)
        except ValueError as error:
            raise Failure(str(error)) from None


def command_line(word: str, arguments: List[str], *more: str, without: Tuple[str, ...] = ()) -> str:
    """The GDB command for the shell's: less the options of the target, and those of `without`. Raises Failure."""
    ours = Parser(add_help=False)
    add_target_options(ours)
    for option in without:
        ours.add_argument(option)
    words = [*ours.parse_known_args(arguments)[1], *more]
    if any("\n" in word for word in words):
        raise Failure("an argument holds a line feed, which GDB cannot take")
    return " ".join(["leak-" + word, *map(shlex.quote, words)])


@contextlib.contextmanager
def live_errors() -> Iterator[None]:
    """What says why a process cannot be copied, or a file is no core, is a Failure."""
    from .target.ptrace import LiveError

    try:
        yield
    except (LiveError, core_probe.NotACore) as error:
        raise Failure(str(error)) from None


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


class Silent(Terminal):
    """A terminal that shows no report: only notes and progress."""

    def report(self, data: bytes) -> None:
        """Nothing."""


@contextlib.contextmanager
def the_target(chosen: argparse.Namespace, terminal: Terminal) -> Iterator[Target]:
    """The core to analyse, with its files; the copy of a process ends with the context. Raises Failure, LiveError."""
    if chosen.exe is not None and not os.path.isfile(chosen.exe):
        raise Failure(f"{chosen.exe}: no such file")
    check_sysroot(chosen)
    if chosen.core is not None:
        from .pack import directory_of

        packed = directory_of(chosen.core)
        sysroot = chosen.sysroot or (packed if os.path.isdir(packed) else None)
        yield core_target(chosen.core, chosen.exe, sysroot, terminal)
        return
    with contextlib.closing(copied_targets(chosen, terminal)) as copied:
        for _, target in copied:
            yield target


def check_sysroot(chosen: argparse.Namespace) -> None:
    """Raises Failure when the sysroot is none."""
    if chosen.sysroot is not None and not os.path.isdir(chosen.sysroot):
        raise Failure(f"{chosen.sysroot}: no such directory")


def copied_targets(chosen: argparse.Namespace, terminal: Terminal) -> Iterator[Tuple]:
    """Copy the processes that are chosen, one after the other: (snapshot.Copy, Target, or None where there is no copy).

    A copy is gone when the next one is made. Raises LiveError."""
    import tempfile

    from .pack import pack
    from .snapshot import copies, describe
    from .target.room import field, roomy_directory

    def progress(pid: int, done: int, total: int) -> None:
        terminal.progress(f"copying process {pid}: {100 * done / max(total, 1):.0f} %")

    def path_of(pid: int) -> str:
        nonlocal directory, lock
        drop()
        needed = field(f"/proc/{pid}/status", "VmRSS") * 5 // 4
        directory = tempfile.mkdtemp(prefix=COPY, dir=roomy_directory(needed))
        lock = os.open(directory, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        return os.path.join(directory, f"core.{pid}")

    def drop() -> None:
        nonlocal directory, lock
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        directory = lock = None

    directory = lock = None
    single = is_single(chosen)
    sweep()
    try:
        with contextlib.closing(copies(chosen, path_of, progress)) as made:
            for copy in made:
                if copy.problem:
                    yield copy, None
                    continue
                for line in describe(copy):
                    terminal.note(line if single else f"{copy.process.name} {copy.process.pid}: {line}")
                path, exe, sysroot = copy.snapshot.path, chosen.exe if single else None, chosen.sysroot
                if copy.files and not sysroot:
                    packed = pack(path, copy.files)
                    exe, sysroot = exe or packed.executable or None, packed.directory
                yield copy, core_target(path, exe, sysroot, terminal, f"/proc/{copy.process.pid}/exe")
                drop()
    finally:
        drop()


def sweep() -> None:
    """Take away the copies of processes of this user that nobody holds any more: their owners were killed."""
    import tempfile

    for place in {"/dev/shm", "/var/tmp", tempfile.gettempdir()}:
        for path in glob.glob(os.path.join(glob.escape(place), COPY + "*")):
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                if status.st_uid != os.geteuid() or time.time() - status.st_mtime < JUST_MADE:
                    continue
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(fd)


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


def gdb_script(arguments: List[str]) -> int:
    """Print the path of the file to source in GDB."""
    from .environment import PACKAGE

    Parser(prog="gdbleak gdb-script", description=OWN_WORDS["gdb-script"].summary).parse_args(arguments)
    print(PACKAGE / "gdb_script.py")
    return DONE


def doctor(arguments: List[str]) -> int:
    """Tell what is here and what is missing; FAILED when nothing can be analysed. Raises Failure."""
    import subprocess

    from .environment import PACKAGE
    from .gdb_driver import gdb_environment

    parser = Parser(prog="gdbleak doctor", description=OWN_WORDS["doctor"].summary)
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


class Word(NamedTuple):
    """A word of the shell command alone: what it does, in a line, and what runs it (arguments -> exit status)."""

    summary: str
    run: Callable[[List[str]], int]


def elsewhere(module: str, function: str, *first: str) -> Callable[[List[str]], int]:
    """A function of a module that is imported when it is called, with `first` before the arguments. It may raise
    LiveError and NotACore."""

    def run(arguments: List[str]) -> int:
        with live_errors():
            return getattr(importlib.import_module("." + module, __package__), function)(*first, arguments)

    return run


OWN_WORDS: Dict[str, Word] = {
    **{word: Word(summary, elsewhere("record.shell", "run", word)) for word, summary in options.RECORDINGS.items()},
    "mmap-leaks": Word("another name of mmaps", elsewhere("record.shell", "run", "mmaps")),
    "snapshot": Word("copy a process into a core file while it stands still for a moment",
                     elsewhere("snapshot", "snapshot_word")),
    "pack": Word("put the executable and the libraries of a core beside it, for where it is analysed",
                 elsewhere("snapshot", "pack_word")),
    "doctor": Word("what gdbleak finds here: GDB, its Python, the packages, and what mends it", doctor),
    "gdb-script": Word("print the path of the file to source in GDB", gdb_script),
}

if __name__ == "__main__":
    from gdbleak import cli  # the module that others import, not a second one of the same text

    sys.exit(cli.main())
