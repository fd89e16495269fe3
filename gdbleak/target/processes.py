"""Which processes: of a group, of an executable; and what each calls itself.

Standard library only, Python 3.6 or later.
"""
import collections
import contextlib
import os
import re

from .ptrace import LiveError, state_of, status_of, threads_of

Process = collections.namedtuple("Process", "pid name")
Process.__doc__ = """A process and its name for a person, such as `nginx worker process`; harmless on a terminal."""

_TITLE = re.compile(r"([\w.+-]+): (.+)", re.S)      # as servers write it over their arguments
_ROLE = re.compile(r"(.*?\bprocess\b)( is shutting down)?", re.S)
_LONGEST = 40


def choose(number=None, exe=None):
    """The processes that `-p NUMBER` (below zero: the group) or `--exe PATH` means, the oldest first; without this one.

    Raises LiveError when there is none."""
    if number is None:
        pids, none = running(exe), "no process that can be seen runs %s (root sees all of them)" % exe
    elif number < 0:
        pids, none = of_group(-number), "no process group %d, and no process %d that is of one" % (-number, -number)
    else:
        return [Process(number, name_of(number))]
    pids = [pid for pid in pids if pid != os.getpid() and "VmSize" in (status_of(_living(pid)) or {})]
    if not pids:
        raise LiveError(none)
    return [Process(pid, name_of(pid)) for pid in sorted(pids, key=lambda pid: (_started(pid), pid))]


def all_processes():
    """The ids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def of_group(number):
    """The processes of process group `number`, or else of the group that process `number` is of."""
    groups = {}
    for pid in all_processes():
        with contextlib.suppress(OSError):
            groups[pid] = int(statistics_of(pid)[2])
    wanted = number if number in groups.values() else groups.get(number)
    return [pid for pid, group in groups.items() if group == wanted]


def running(path):
    """The processes that run the executable `path`: this file, or one of that path, replaced since or elsewhere."""
    path, found = os.path.realpath(path), []
    for pid in all_processes():
        with contextlib.suppress(OSError):
            link = "/proc/%d/exe" % _living(pid)
            if _executable(pid) == path or os.path.exists(path) and os.path.samefile(link, path):
                found.append(pid)
    return found


def name_of(pid):
    """What a process calls itself, or else the name of its executable; "process" when that cannot be seen."""
    name = "process"
    with contextlib.suppress(OSError):
        name = os.path.basename(_executable(pid))
    with contextlib.suppress(OSError):
        with open("/proc/%d/cmdline" % _living(pid), "rb") as file:
            title = _TITLE.fullmatch(os.fsdecode(file.read(4096).rstrip(b"\0 ")).split("\0")[0])
        if title:
            role = _ROLE.match(title.group(2))
            name = title.group(1) + " " + ("".join(filter(None, role.groups())) if role else title.group(2))
    return harmless(name.strip())[:_LONGEST] or "process"


def harmless(text):
    """Text of the target without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _living(pid):
    """A thread of a process that has not ended: its main thread may have, and shows nothing then."""
    if state_of(pid) not in ("Z", "X"):
        return pid
    return next((tid for tid in sorted(threads_of(pid)) if state_of(tid) not in ("Z", "X")), pid)


def _executable(pid):
    path = os.readlink("/proc/%d/exe" % _living(pid))
    return path[:-len(" (deleted)")] if path.endswith(" (deleted)") else path


def _started(pid):
    try:
        return int(statistics_of(pid)[19])
    except OSError:
        return 0


def statistics_of(pid):
    """The fields of /proc/PID/stat from the state on: state, parent, group ... Raises OSError."""
    with open("/proc/%s/stat" % pid, "rb") as file:
        return file.read().rsplit(b")", 1)[1].split()
