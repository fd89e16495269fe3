"""`gdbleak snapshot` and `gdbleak pack`: a process as a core file, and what belongs to it beside it.

Standard library only, Python 3.6 or later. scripts/gdbleak-snapshot is this, with all that it needs, in one file for
a machine that has nothing else; scripts/build-snapshot makes it.
"""
import collections
import contextlib
import os
import shlex
import sys

from .arguments import Parser, add_process_options, check_process_options, is_single, prepare_process
from .core_probe import NotACore, executable, open_core
from .pack import Files, MappedFiles, pack
from .record.fork import snapshot_by_fork
from .target.follow import Command
from .target.live import Capture, destination, mappings, snapshot, take
from .target.processes import Process, choose, harmless, name_of
from .target.ptrace import Ended, LiveError, living_thread
from .target.room import check_writable

SNAPSHOT = "copy a process into a core file while it stands still for a moment"
NOTE = """A system call that waits goes on after the stop as if nothing had been; but Linux ends a few with EINTR, as it does
after SIGSTOP and SIGCONT: epoll_wait, sigtimedwait, io_getevents and others that signal(7) lists."""
PACK = "put the executable and the libraries of a core beside it, for where it is analysed"

Copy = collections.namedtuple("Copy", "process snapshot problem files ending")
Copy.__doc__ = """A process that was copied: `Process`; its `Snapshot`, or the LiveError that says why there is none;
the `MappedFiles` that it had when they are needed, else None; ending: how the command ended that was followed."""


def copies(chosen, path_of, progress, with_files=False):
    """Copy the processes that the options name, one after the other: yields a `Copy` of each.

    path_of(pid): the path for its core file; progress(pid, done, total): called with bytes; with_files: have their
    `MappedFiles` in any case. Raises LiveError when no process is meant, or the only one cannot be copied."""
    if chosen.command is not None:
        found = [_copy_command(chosen, path_of, progress, with_files)]
    else:
        found = (_copy(process, chosen, path_of, progress, with_files) for process in choose(chosen.pid, chosen.exe))
    for copy in found:
        if copy.problem and is_single(chosen):
            raise copy.problem
        with contextlib.closing(copy.files or Files()):
            yield copy


def _copy(process, chosen, path_of, progress, with_files):
    """The `Copy` of a process."""
    files = None
    try:
        files = _files(process.pid, with_files)
        return Copy(process, _snapshot(process.pid, chosen, path_of, progress), None, files, "")
    except LiveError as error:
        return Copy(process, None, error, files, "")


def _snapshot(pid, chosen, path_of, progress):
    kind = snapshot_by_fork if chosen.fork else snapshot
    return kind(pid, path_of(pid), lambda done, total: progress(pid, done, total),
                chosen.max_stop and chosen.max_stop / 1000)


def _files(pid, in_any_case):
    """The `MappedFiles` of a process, where its files may not be found by their paths: it sees other ones than we do,
    or they were replaced. None where all is as usual."""
    tid = living_thread(pid)
    try:
        if in_any_case or not os.path.samefile("/proc/%d/root" % tid, "/") or any(
                m.deleted and "x" in m.perms and m.inode for m in mappings(tid)):
            return MappedFiles(tid)
    except OSError:         # it ended; or no permission, which the copy will say better
        pass
    return None


def _copy_command(chosen, path_of, progress, with_files):
    with Command(chosen.command) as command:
        found = {}

        def at_exit(stopped):
            pid, tid = stopped.pid, stopped.threads[0]
            found["name"], found["files"] = name_of(tid), MappedFiles(tid) if with_files else None
            return take(Capture, stopped, tid, path_of(pid), lambda done, total: progress(pid, done, total))

        made = command.follow(at_exit, chosen.after)
        if made is None:
            found["name"], found["files"] = name_of(command.pid), _files(command.pid, with_files)
            made = _snapshot(command.pid, chosen, path_of, progress)
        command.end()
    return Copy(Process(command.pid, found["name"]), made, None, found["files"], command.ending)


def describe(copy):
    """What the copy did to the process: lines for a person."""
    made = copy.snapshot
    megabytes = "%.1f MB" % (made.bytes_copied / 1e6)
    if made.stop_ms is None:
        yield "copied at its end (%s)" % megabytes
    elif made.forked_ms is not None:
        yield ("stopped for %.1f ms (%s read from a fork of it), and for %.1f ms to have that reaped"
               % (made.stop_ms, megabytes, made.forked_ms))
    else:
        yield "stopped for %.1f ms (%s copied)" % (made.stop_ms, megabytes)
    if made.vain_ms:
        yield "stopped for %.1f ms before that, for what came to nothing" % made.vain_ms
    if made.refused:
        yield "not by a fork: %s" % made.refused
    if copy.ending:
        yield "the command %s" % copy.ending
    for lost in made.unreadable:
        path = harmless(lost.path) + " " if lost.path else ""
        yield ("not copied: %#x-%#x %s(%d bytes): %s"
               % (lost.start, lost.end, path, lost.end - lost.start, lost.reason))


# --------------------------------------------------------------------------------------------------------
# The two words
# --------------------------------------------------------------------------------------------------------

def snapshot_word(arguments, prog="gdbleak snapshot"):
    """`gdbleak snapshot`: exit status 0, 2 when a process that is still there was not copied. Raises LiveError."""
    parser = Parser(prog=prog, description=SNAPSHOT[0].upper() + SNAPSHOT[1:] + ".", epilog=NOTE)
    which = parser.add_mutually_exclusive_group(required=True)
    add_process_options(which, parser)
    which.add_argument("--exe", metavar="PATH", help="each process that runs this executable")
    parser.add_argument("-o", dest="output", metavar="FILE",
                        help="the core file (default: NAME.PID.core; of several processes, FILE gets their PIDs)")
    parser.add_argument("--pack", action="store_true", help="put what belongs to it beside it, as `pack` does")
    chosen = parser.parse_args(arguments)
    check_process_options(chosen, parser)
    status = 0

    def path_of(pid):
        if chosen.output is None:
            return "%s.%d.core" % (name_of(pid).split()[0].replace("/", "_"), pid)
        root, ending = os.path.splitext(chosen.output)
        return chosen.output if is_single(chosen) else "%s.%d%s" % (root, pid, ending)

    if chosen.output is None:
        check_writable("./NAME.PID.core", replaces=True)
    else:
        destination(path_of(0))
    with Progress() as progress:
        for copy in copies(chosen, path_of, progress.show, chosen.pack):
            progress.clear()
            if copy.problem:
                status = status if isinstance(copy.problem, Ended) else 2
                print("%s: %s %d: %s" % (prog.split()[0], copy.process.name, copy.process.pid, copy.problem),
                      file=sys.stderr)
                continue
            for line in describe(copy):
                print("%s %d: %s" % (copy.process.name, copy.process.pid, line), flush=True)
            made = copy.snapshot
            if chosen.pack:
                report_packed(made.path, pack(made.path, copy.files or Files()))
            else:
                exe, problem = executable(open_core(made.path))
                if problem and not os.path.isfile(made.exe) or exe is None and "another build" in problem:
                    print("%s: without its executable: %s was deleted or replaced; --pack keeps it beside the core"
                          % (prog.split()[0], harmless(made.exe)), file=sys.stderr)
                print("gdb %s %s" % (shlex.quote(made.exe), shlex.quote(made.path)), flush=True)
    return status


def pack_word(arguments, prog="gdbleak pack"):
    """`gdbleak pack`: exit status 0, 1 when a file is missing. Raises LiveError."""
    parser = Parser(prog=prog, description=PACK[0].upper() + PACK[1:] + ": into CORE.files.")
    parser.add_argument("core", metavar="CORE", help="a core file, on the machine that has its files")
    parser.add_argument("--sysroot", metavar="DIR", default="", help="where the files of the target's machine are")
    chosen = parser.parse_args(arguments)
    packed = pack(chosen.core, Files(chosen.sysroot))
    report_packed(chosen.core, packed)
    return 1 if packed.missing else 0


def report_packed(core, packed):
    """Tell what was packed, and how GDB is called with it."""
    for _, path, reason in packed.missing:
        print("not packed: %s: %s" % (harmless(path), reason), file=sys.stderr)
    print("%s: %d files, %.1f MB" % (packed.directory, len(packed.files), packed.size / 1e6))
    words = ["gdb", "-iex", "set sysroot " + packed.directory, packed.executable, core]
    print(" ".join(shlex.quote(word) for word in words if word), flush=True)


class Progress:
    """How far the work has come, on a terminal."""

    def __init__(self):
        self._on_screen = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.clear()

    def show(self, pid, done, total):
        """So many bytes of the copy of a process are done."""
        if sys.stderr.isatty():
            sys.stderr.write("\rprocess %d: %d %%\x1b[K" % (pid, 100 * done // max(total, 1)))
            sys.stderr.flush()
            self._on_screen = True

    def clear(self):
        """Take it off the screen."""
        if self._on_screen:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._on_screen = False


def main(arguments=None):
    """``gdbleak-snapshot [pack] ...``: exit status 0; 2 when it failed, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    prog = "gdbleak-snapshot"
    prepare_process()
    try:
        if arguments[:1] == ["pack"]:
            return pack_word(arguments[1:], prog + " pack")
        return snapshot_word(arguments, prog)
    except (LiveError, NotACore) as error:
        print("%s: %s" % (prog, error), file=sys.stderr)
    except OSError as error:
        print("%s: %s: %s" % (prog, error.filename or "cannot write", error.strerror), file=sys.stderr)
    except KeyboardInterrupt:
        print("%s: interrupted; the process runs on" % prog, file=sys.stderr)
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
