"""Can a file be written, and is there memory, or disk, for the copy of a process? Standard library only, Python 3.6 or
later.

A file in /dev/shm is memory. A copy into it on a host that is about to run out invites the kernel's OOM killer, so
some has to stay free: of the host, and of each control group that the writer is in.
"""
import collections
import os
import stat
import tempfile

from .ptrace import LiveError

_KEPT = 10                  # a tenth of what is available stays free

Group = collections.namedtuple("Group", "left kills_all")
Group.__doc__ = """What a control group may still take, in bytes, and whether the OOM killer ends all of it at once."""


def check_writable(path, replaces=False):
    """LiveError when no file can be written at `path`: so that it is known before a process is stopped for it.

    replaces: what is there already is not written to, but a new file takes its name."""
    real = os.path.realpath(path)
    directory = os.path.dirname(real)
    if path.endswith("/") or os.path.isdir(real):
        raise LiveError("cannot write %s: it is a directory" % path)
    if not os.path.isdir(directory):
        raise LiveError("cannot write %s: there is no such directory" % path)
    try:
        try:
            mode = os.lstat(real).st_mode
        except FileNotFoundError:
            mode = None
        if replaces or mode is None:
            tempfile.TemporaryFile(dir=directory).close()
        elif stat.S_ISREG(mode):        # to open a pipe or a device may mean something
            os.close(os.open(real, os.O_WRONLY))
    except OSError as error:
        raise LiveError("cannot write %s: %s" % (path, error.strerror))


def lack(directory, needed):
    """Why a file of `needed` bytes should not be written into `directory`, in a few words; None when there is room."""
    free = free_space(directory)
    if needed > free:
        return "needs %.1f MB, %.1f MB are free: another directory mends it" % (needed / 1e6, free / 1e6)
    if is_memory(directory):
        left = memory_left()
        if needed > left - left // _KEPT:
            return ("needs %.1f MB of memory, which that directory is, and %.1f MB are available: a directory on a "
                    "disk mends it" % (needed / 1e6, left / 1e6))
    return None


def roomy_directory(needed):
    """Where `needed` bytes fit: in memory, if there is plenty, for a shorter stop; else on disk; $TMPDIR goes first."""
    temporary = tempfile.gettempdir()
    places = ["/dev/shm"] * (memory_left() > 3 * needed) + [temporary, "/var/tmp"]
    if os.environ.get("TMPDIR"):
        places.insert(0, temporary)
    usable = [place for place in places if os.access(place, os.W_OK)]
    fitting = [place for place in usable if lack(place, needed) is None]
    return (fitting or sorted(usable, key=free_space)[-1:] or [temporary])[0]


def free_space(directory):
    """Bytes that can be written there. Raises OSError."""
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def is_memory(directory):
    """Whether files in a directory lie in memory (tmpfs, ramfs)."""
    device = os.stat(directory).st_dev
    number = b"%d:%d" % (os.major(device), os.minor(device))
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            kinds = [line.split(b" - ", 1)[1].split()[0] for line in file if line.split()[2] == number]
    except (OSError, IndexError):
        return False
    return any(kind in (b"tmpfs", b"ramfs") for kind in kinds)


def memory_left(pid="self"):
    """Bytes of memory that a process can still make the host give: what is available, or less in a control group."""
    return min([field("/proc/meminfo", "MemAvailable")] + [group.left for group in memory_groups(pid)])


def field(path, name):
    """Bytes that a `name:  NUMBER kB` line of a file in /proc tells; 0 when there is none."""
    try:
        with open(path) as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith(name + ":")), 0)
    except OSError:
        return 0


def memory_groups(pid="self"):
    """A `Group` for each control group that limits the memory of process `pid`."""
    found = []
    for directory, limit, usage in _group_directories(pid):
        try:
            most, used = _number(directory, limit), _number(directory, usage)
        except (OSError, ValueError):       # no limit, or "max"
            continue
        cached = _statistic(directory, "inactive_file")     # the kernel takes that back by itself
        with_it = os.path.exists(directory + "/memory.oom.group") and _number(directory, "memory.oom.group")
        found.append(Group(max(most - used + cached, 0), bool(with_it)))
    return found


def _group_directories(pid):
    """(directory, name of the limit's file, of the usage's) of each memory group of a process, innermost first."""
    try:
        with open("/proc/%s/cgroup" % pid) as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            base, names = "/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif not controllers:
            base, names = "/sys/fs/cgroup", ("memory.max", "memory.current")
        else:
            continue
        while path.startswith("/") and not path.startswith("/.."):
            yield (base + path.rstrip("/"),) + names
            if path == "/":
                break
            path = os.path.dirname(path)


def _number(directory, name):
    with open(os.path.join(directory, name)) as file:
        return int(file.read())


def _statistic(directory, name):
    try:
        with open(directory + "/memory.stat") as file:
            return next((int(line.split()[1]) for line in file if line.split()[0] in (name, "total_" + name)), 0)
    except OSError:
        return 0
