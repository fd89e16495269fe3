"""leak-sample and leak-mmaps: let the process of this GDB go, record it by the shell command, attach again."""
from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys

import gdb

from .. import environment
from . import options
from .base import _show


class RecordCommand(gdb.Command):
    """leak-sample, leak-mmaps. While a recording is made no debugger is attached: breakpoints do not hit."""

    def __init__(self, name: str):
        self.name = name
        text = self._parser().format_help()
        self.__doc__ = options.RECORDINGS[name][0].upper() + options.RECORDINGS[name][1:] + ".\n\n" + \
            text[text.index("usage:"):].replace("usage:", "Usage:", 1) + \
            "\nGDB detaches, the process runs and is recorded, GDB attaches again."
        super().__init__(f"leak-{name}", gdb.COMMAND_DATA)
        self.dont_repeat()

    def _parser(self):
        from ..record.shell import add_options, seconds
        build = options._Parser(prog=f"leak-{self.name}", add_help=False, allow_abbrev=False)
        build.help_command = f"help leak-{self.name}"
        build.add_argument("seconds", nargs="?", type=seconds, default=5.0, help="how long (default 5)")
        add_options(build, self.name)
        return build

    def invoke(self, line, from_tty):
        from ..cli import Failure, check_outputs
        gdb.set_convenience_variable("_gdbleak_status", 2)
        try:
            words = shlex.split(line)
            if words in (["--help"], ["-h"]):
                gdb.write(self.__doc__ + "\n")
                return
            chosen = self._parser().parse_args(words)
            check_outputs(chosen)
        except (options.UsageError, ValueError) as error:
            raise gdb.GdbError(str(error)) from None
        except Failure as error:
            raise gdb.GdbError(f"leak-{self.name}: {error}") from None
        gdb.set_convenience_variable("_gdbleak_status", self._run(self._process(), self._words(chosen)))

    def _words(self, chosen) -> list[str]:
        """The chosen options, as the shell command takes them."""
        words = [f"--seconds={chosen.seconds}"]
        for action in self._parser()._actions:
            value = getattr(chosen, action.dest)
            if action.option_strings and value != action.default:
                words.append(action.option_strings[-1] + ("" if value is True else f"={value}"))
        return words

    def _process(self) -> int:
        """The process id of the live process that GDB holds. Raises GdbError."""
        inferior = gdb.selected_inferior()
        connection = getattr(inferior, "connection", None)
        if not inferior.pid or not any(thread.is_valid() for thread in inferior.threads()):
            raise gdb.GdbError(f"leak-{self.name}: this GDB holds no live process; attach to one first")
        if connection is not None and connection.type != "native":
            raise gdb.GdbError(f"leak-{self.name}: only a process of this machine can be recorded, and GDB holds a "
                               f"{connection.type} target")
        return inferior.pid

    def _run(self, pid, arguments) -> int:
        command = [_python(), "-c", "import sys; from gdbleak.cli import main; sys.exit(main())", self.name,
                   "-p", str(pid), *arguments]
        paths = [str(environment.PACKAGE.parent), *(path for path in sys.path if path)]
        selected = gdb.selected_thread()
        selected = selected and selected.ptid
        gdb.execute("detach", to_string=True)
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                                  env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
        finally:
            self._attach(pid, selected)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it was interrupted"])[-1]
            raise gdb.GdbError(f"leak-{self.name}: {last.removeprefix('gdbleak: ')}")
        _show(done.stdout)
        return done.returncode

    def _attach(self, pid, selected) -> None:
        """Hold the process again, with the same thread selected if it is still there."""
        confirm = gdb.parameter("confirm")
        gdb.execute("set confirm off")
        try:
            gdb.execute(f"attach {pid}", to_string=True)
            for thread in gdb.selected_inferior().threads():
                if thread.ptid == selected:
                    thread.switch()
        except gdb.error as error:
            gdb.write(f"leak-{self.name}: GDB cannot attach again: {error}\n", gdb.STDERR)
        finally:
            gdb.execute(f"set confirm {'on' if confirm else 'off'}")


def _python() -> str:
    """A Python of GDB's version, which can import what GDB's can. Raises GdbError."""
    candidates = [str(environment.PACKAGE.parent / ".venv" / "bin" / "python"), sys.executable or "",
                  shutil.which("python" + environment.VERSION) or ""]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK) and _version(candidate) == environment.VERSION:
            return candidate
    raise gdb.GdbError(f"there is no python{environment.VERSION} beside GDB; run scripts/setup in gdbleak's directory")


def _version(program: str) -> str:
    asked = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([program, "-c", asked], capture_output=True, text=True).stdout.strip()
