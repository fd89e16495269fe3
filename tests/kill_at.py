"""Runs gdbleak and kills it by SIGKILL at the N-th step that touches the target, or counts the steps.

    kill_at.py tool N WORD ...      the tool dies at step N
    kill_at.py guard N WORD ...     its guard does; both: `both`
    kill_at.py count 0 WORD ...     prints `steps: NUMBER` (the tool's) on standard error at the end

A step is a ptrace request, a write to the target's memory, or a word with the guard; it is cut before and behind it.
"""
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gdbleak.record import guard, inject, tracee        # noqa: E402
from gdbleak.target import follow, ptrace       # noqa: E402

steps = 0


def cut(function, number):
    """`function`, counted twice a call: before and behind it."""
    def called(*arguments, **named):
        step(number)
        try:
            return function(*arguments, **named)
        finally:
            step(number)
    return called


def step(number):
    global steps
    steps += 1
    if steps == number:
        os.kill(os.getpid(), signal.SIGKILL)


def die_at(number):
    """Die at that step of this process; 0: never."""
    ptrace.ptrace = follow.ptrace = inject.ptrace = cut(ptrace.ptrace, number)
    tracee.Memory.write = cut(tracee.Memory.write, number)
    guard.Guard._ask = cut(guard.Guard._ask, number)


def main():
    who, number, *arguments = sys.argv[1:]
    if who == "as-guard":
        die_at(int(number))
        return guard.main(arguments[1:])
    if who in ("guard", "both"):
        guard.Guard.COMMAND = (sys.executable, __file__, "as-guard", number, guard.__name__)
    if who in ("tool", "both", "count"):
        die_at(int(number))
    from gdbleak import cli
    try:
        return cli.main(arguments)
    finally:
        if who == "count":
            print("steps:", steps, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
