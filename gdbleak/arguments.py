"""Arguments of the shell command: the parser, and the options that choose processes. Python 3.6 or later."""
import argparse
import os
import signal
import sys


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message):
        self.exit(2, "%s: %s (%s --help tells more)\n" % (self.prog, message, self.prog))


def add_process_options(which, how):
    """Options that choose processes, and say how they are copied, for two groups of an argparse parser."""
    which.add_argument("-p", dest="pid", metavar="PID", type=int,
                       help="a process: it is stopped, copied, let go; -PGID: each process of that group")
    which.add_argument("-c", dest="command", metavar="'COMMAND'",
                       help="start this command, and copy it when it ends (its output goes to standard error)")
    how.add_argument("--after", metavar="SECONDS", type=seconds,
                     help="copy the command of -c after so long, unless it ends before, and end it")
    how.add_argument("--fork", action="store_true",
                     help="copy a fork of the process: a much shorter stop of a large one")
    how.add_argument("--max-stop", metavar="MS", type=milliseconds,
                     help="let the process go, without a copy, when it would stand still for longer")


def check_process_options(chosen, parser):
    """End with one line when those options do not go together."""
    if chosen.after is not None and chosen.command is None:
        parser.error("--after goes with -c")


def seconds(text):
    """A positive number of seconds. Raises ValueError."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def milliseconds(text):
    """A positive number of milliseconds. Raises ValueError."""
    return seconds(text)


def prepare_process():
    """What the shell commands begin with: the standard files are open, if on nothing, so that no other file gets their
    numbers; SIGTERM, and SIGHUP unless it was ignored (nohup), end this program in an orderly way."""
    fd = 0
    while fd <= 2:
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def is_single(chosen):
    """Whether the options name one process, not as many as there are."""
    return chosen.command is not None or chosen.pid is not None and chosen.pid >= 0
