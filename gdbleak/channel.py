"""Pipes beside GDB's own streams, from the commands in a GDB to the shell command that drives it.

GDB's machine interface escapes output character by character (20 MB take 40 s), so reports take a pipe of
their own, and another one says how far the work has come. Without a driver GDB's own streams serve.
"""
import os
from typing import Optional, TextIO

# Environment variables with the number of an inherited file descriptor.
OUTPUT_VARIABLE = "GDBLEAK_OUTPUT"
PROGRESS_VARIABLE = "GDBLEAK_PROGRESS"


def output() -> Optional[TextIO]:
    """A text stream for the report, to be closed (or flushed) when it is complete; None without a driver."""
    number = os.environ.get(OUTPUT_VARIABLE)
    return number and open(int(number), "w", encoding="utf-8", errors="replace", closefd=False)


def progress(text: str) -> None:
    """Say in one line what is being done and how far it has come; cheap, but not for every block."""
    number = os.environ.get(PROGRESS_VARIABLE)
    if number:
        try:
            os.write(int(number), text.encode("utf-8", "replace") + b"\n")
        except OSError:
            pass  # nobody looks any more
