"""The gdb commands: parse, call, print; nothing else. A report's module is imported when its command first runs."""
from __future__ import annotations


def register() -> None:
    """Define the leak-* commands in this GDB. Touches nothing of the target."""
    from . import options
    from .base import LeakCommand
    from .record import RecordCommand
    for name in options.COMMANDS:
        LeakCommand(name)
    for name in options.RECORDINGS:
        RecordCommand(name)
