"""One gdb command: parse the line, run the report, print it, write its files, leave its status in $_gdbleak_status."""
from __future__ import annotations

import importlib
import os
import shlex

import gdb

from .. import channel, interrupts
from . import options

_NUMPY = "GDB's Python has no {}; run scripts/setup in gdbleak's directory, which makes .venv for it"


class LeakCommand(gdb.Command):
    """leak-NAME. The report is `run(analysis, arguments) -> Report` of gdbleak.reports.NAME."""

    def __init__(self, name: str):
        self.name = name
        text = options.parser(name).format_help()
        self.__doc__ = options.COMMANDS[name][0].upper() + options.COMMANDS[name][1:] + ".\n\n" + \
            text[text.index("usage:"):].replace("usage:", "Usage:", 1)
        super().__init__(f"leak-{name}", gdb.COMMAND_DATA)
        self.dont_repeat()

    def invoke(self, line, from_tty):
        gdb.set_convenience_variable("_gdbleak_status", 2)
        try:
            status = self._run(line)
        except KeyboardInterrupt:
            raise gdb.GdbError(f"leak-{self.name}: interrupted") from None
        except options.UsageError as error:
            if not str(error):
                return
            raise gdb.GdbError(str(error)) from None
        except OSError as error:
            raise gdb.GdbError(f"leak-{self.name}: {_one_line(_os_error(error))}") from None
        except (ValueError, MemoryError) as error:
            raise gdb.GdbError(f"leak-{self.name}: {_one_line(error)}") from None
        except ImportError as error:
            raise gdb.GdbError(_NUMPY.format(error.name or error)) from None
        except gdb.error as error:
            raise gdb.GdbError(f"leak-{self.name}: GDB says: {_one_line(error)}") from None
        except Exception as error:  # noqa: BLE001  the last guard: a fault of ours is one line as well
            if type(error).__name__ == "TargetError":
                raise gdb.GdbError(f"leak-{self.name}: {_one_line(error)}") from None
            if os.environ.get("GDBLEAK_DEBUG"):
                raise
            raise gdb.GdbError(f"leak-{self.name}: {type(error).__name__}: {_one_line(error)} (this is a fault of "
                               "gdbleak: GDBLEAK_DEBUG=1 in the environment shows where)") from None
        gdb.set_convenience_variable("_gdbleak_status", status)

    def _run(self, line: str) -> int:
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise options.UsageError(f"leak-{self.name}: {error}") from None
        if words in (["--help"], ["-h"]):
            gdb.write(self.__doc__ + "\n")
            return 0
        arguments = options.parser(self.name).parse_args(words)
        arguments.evaluate = _evaluate
        with interrupts.deferred():
            import tabulate  # noqa: F401  used when the report is printed
            from ..flame import check_path, write
            from ..heaps import nginx_pool  # noqa: F401
            from ..reports.analysis import Analysis
            from ..target import debugger
            module = importlib.import_module(f"gdbleak.reports.{self.name.replace('-', '_')}")
        flame = getattr(arguments, "flame", None)
        if flame:
            check_path(flame)
        with debugger.without_questions():
            analysis = Analysis.of(debugger.current_target())
            report = module.run(analysis, arguments)
        _show(report.json_text() if arguments.json == "-" else report.text())
        if arguments.json and arguments.json != "-":
            _write(arguments.json, lambda: _save(arguments.json, report.json_text()))
        if flame:
            _write(flame, lambda: write(report.profile() if callable(report.profile) else report.profile, flame))
        return report.status

    def complete(self, text, word):
        last = text.split()[-1] if text.split() and not text.endswith(" ") else ""
        if last.startswith("-") or not text.strip():
            known = [flag for action in options.parser(self.name)._actions for flag in action.option_strings]
            typed = word if last.startswith("-") else ""
            return [flag[len(last) - len(word):] for flag in known if flag.startswith(last)] if typed else known
        return gdb.COMPLETE_EXPRESSION if self.name in ("what", "pools") else gdb.COMPLETE_FILENAME


def _save(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)


def _write(path: str, writing) -> None:
    """Call what writes the file; an error that does not name the file, such as a full disk, gets its name."""
    try:
        writing()
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def _show(text: str) -> None:
    """Print a report: to the shell command when it drives this GDB, whose own console is slow,
    else to GDB's console."""
    stream = channel.output()
    if stream is None:
        gdb.write(text)
    else:
        with stream:
            stream.write(text)


def _os_error(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def _one_line(error) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _evaluate(text: str) -> int:
    """A GDB expression as a number. Raises ValueError."""
    try:
        return int(gdb.parse_and_eval(text).cast(gdb.lookup_type("unsigned long")))
    except gdb.error as error:
        try:
            return int(gdb.parse_and_eval(f"(unsigned long) ({text})"))
        except gdb.error:
            raise ValueError(f"{text!r} is no address or number: {_one_line(error)}") from None
