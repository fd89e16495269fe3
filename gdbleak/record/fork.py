"""A copy by fork: the process stands still while it is forked, and its child is then read at leisure and reaped.

Standard library only, x86-64 Linux, Python 3.6 or later. For large processes: a fork copies page tables, not memory.
Where it would not be safe the process is copied directly (target/live.py), and the `Snapshot` says why.

The child is made by an injected clone (inject.py). It never runs the program: it is born stopped, its first
instructions end it, and it is killed when we are. It sends no signal when it ends, shares the table of open files
with its parent, as a thread does (so that none is kept open by it), and is the first to go when memory runs out. What a
child does not have, or shares with its parent as it changes, is copied from the parent in the stop. At last the parent
is stopped once more, for an injected wait4 that reaps the child. A guard, a small process of its own, sees to that when
we are killed before.

What that costs: a parent that executes another program while the child lives gets a table of its own for it, and loses
the POSIX locks (fcntl) that it would have kept. Its working directory and root are its own (no CLONE_FS).
"""
import bisect
import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import time

from ..target.live import (Capture, Unreadable, checked, is_anonymous, is_constant, is_skipped, joined, look_at_smaps,
                           mappings, program_files, snapshot, take, without)
from ..target.processes import all_processes, statistics_of
from ..target.ptrace import (PTRACE_DETACH, PTRACE_SETOPTIONS, WALL, LiveError, Stopped, event_message, hurried,
                             living_thread, next_stop, ptrace, status_of, threads_of)
from ..target.room import field, memory_groups, memory_left
from .inject import (CLONE, SLACK, WAIT4, Injection, Unsafe, clean, is_filtered, remains, remove_remains,
                     safe_thread)

_CLONE_FILES, _CLONE_SYSVSEM = 0x400, 0x40000
_PTRACE_O_EXITKILL = 1 << 20
_WATCHED = {"um", "uw", "ui"}       # smaps' marks of memory that userfaultfd watches
_NOT_INHERITED = {"dc", "wf"}       # of MADV_DONTFORK and MADV_WIPEONFORK
_SPARE = 64 << 20
_MOST_IN_ALL = 1000.0       # milliseconds that a guard has a process stand still before it gives up


def snapshot_by_fork(pid, path, progress=None, max_stop=None):
    """`live.snapshot`, by fork where that is safe; `refused` of what comes back says why it was not."""
    tid = living_thread(pid)
    stopped = Stopped(pid, max_stop, "a larger --max-stop allows more")
    try:
        check(pid, tid)
        with _Guard(pid, max_stop) as guard:
            return take(lambda *parts: _ForkedCapture(guard, *parts), stopped, tid, path, progress)
    except Unsafe as reason:
        made = snapshot(pid, path, progress, max_stop, remedy="it was not forked: %s; a larger --max-stop allows more"
                                                              % reason)
        return made._replace(refused=str(reason), vain_ms=made.vain_ms + stopped.total)


def check(pid, tid):
    """Raises Unsafe when process `pid`, of which `tid` is a living thread, should not be forked."""
    if os.uname().machine != "x86_64":
        raise Unsafe("a fork in another process is written for x86-64 only")
    if all(is_filtered(thread) for thread in threads_of(pid)):
        raise Unsafe("it is under seccomp, which might kill it for a system call that it does not expect")
    if (status_of(tid) or {}).get("State", "")[:1] == "T":
        raise Unsafe("it is stopped already, so that a longer stop costs it nothing")
    _check_namespace(tid)
    size, left = field("/proc/%d/status" % tid, "RssAnon"), memory_left(pid)
    # A page that the parent writes while the child lives is there twice. When memory runs out the child is killed,
    # and with it, where a control group says so, the whole group.
    worst = size if any(group.kills_all for group in memory_groups(pid)) else size // 10
    if left < worst + _SPARE:
        raise Unsafe("%.0f MB of memory are left to it, and a child may need %.0f MB"
                     % (left / 1e6, (worst + _SPARE) / 1e6))


def _check_namespace(tid):
    """Raises Unsafe when a thread has made a PID namespace for its children, and has none yet: a link leads nowhere."""
    link = "/proc/%d/ns/pid_for_children" % tid
    try:
        os.readlink(link)
    except FileNotFoundError:
        if os.path.lexists(link):           # older kernels have no such file
            raise Unsafe("its first child will be the init of a PID namespace")
    except OSError:
        pass                                # no permission to stop it either, which is said elsewhere


class _ForkedCapture(Capture):
    """A snapshot of a child that the process makes while it stands still."""

    def __init__(self, guard, *parts):
        super().__init__(*parts)
        self._guard = guard
        self._slack = None          # where the stub was
        self._zeroed = []           # mappings that the child has, but not their contents
        if any(_WATCHED.intersection(words) for words in self._survey.flags.values()):
            raise Unsafe("some of its memory is under userfaultfd, whose owner a fork would wait for")

    def run(self, path, progress):
        """Take the snapshot and have the child reaped."""
        made = super().run(path, progress)
        return made._replace(forked_ms=self._guard.reap())

    def _wants_room(self, mapping):
        return is_constant(mapping) or self._is_copied_in_stop(mapping)

    def _is_copied_in_stop(self, mapping):
        """Whether a child lacks what is in the mapping, or shares it with its parent."""
        return mapping.perms[3] == "s" or bool(_NOT_INHERITED.intersection(self._survey.flags.get(mapping.start, ())))

    def _copy(self, report):
        for last in (False, False, True):
            with hurried(), self._stopped:
                try:
                    tid = safe_thread(self._stopped)
                except Unsafe:
                    if last:
                        raise
                else:
                    moment, early, now, child = self._copy_stopped(tid)
                    break
            time.sleep(0.01)
        try:
            child.hold()
            later = [m for m in moment.maps if m not in early and m not in now]
            now.update(self._read(child, later, program_files(moment.maps), report))
        finally:
            child.end()
        stored = {m: self._early[m][0] if m in early else now[m][0] for m in moment.maps if not is_skipped(m)}
        return moment, stored

    def _copy_stopped(self, tid):
        """What is done in the stop, a fork by thread `tid` at last: the moment, the mappings that were copied before,
        {mapping: (stored, data)} of those that were copied now, the `_Child`."""
        moment = self._look()
        programs = program_files(moment.maps)
        early = self._still_constant(moment.maps)
        now = self._ranges([m for m in moment.maps if m not in early and self._is_copied_in_stop(m)], programs)
        self._copy_now(now)
        child = self._fork(tid, moment.maps)
        missing = self._missing(child.pid, [m for m in moment.maps if m not in early and m not in now])
        if missing:
            lost = self._ranges(missing, programs)
            self._copy_now(lost)
            now.update(lost)
        return moment, early, now, child

    def _copy_now(self, ranges):
        self._copier.copy([r for _, data in ranges.values() for r in data], self._stopped.check)
        self._stopped.check()

    def _fork(self, tid, maps):
        """The `_Child` that a thread makes. Raises Unsafe."""
        _check_namespace(tid)
        injection = Injection(self._stopped, tid, maps, forks=True)
        self._slack = injection.address
        self._guard.watch()
        try:
            result, = injection.make([(CLONE, _CLONE_FILES | _CLONE_SYSVSEM, 0, 0, 0, 0)])
        except ProcessLookupError:
            raise self._stopped.killed()
        if result < 0:
            raise Unsafe("the kernel refuses it a child (%s)" % os.strerror(-result))
        if injection.child is None:
            raise Unsafe("the kernel makes it no child")
        self._guard.child = result
        return _Child(injection.child, self._stopped)

    def _missing(self, child, maps):
        """Those mappings that the child does not have, or not all of (MADV_DONTFORK)."""
        there = [(m.start, m.end) for m in mappings(child, self._lines, self._stopped.check)]
        self._stopped.check()
        known = set(there)
        changed = [m for m in checked(maps, self._stopped.check) if (m.start, m.end) not in known and not is_skipped(m)]
        lost = without([(m.start, m.end) for m in changed], there)
        starts = [start for start, _ in lost]
        self._stopped.check()
        return [m for m in changed if bisect.bisect_left(starts, m.start) < bisect.bisect_left(starts, m.end)]

    def _read(self, child, maps, programs, report):
        """{mapping: (stored, data)} of the child, read."""
        self._survey.reopen(child.pid)
        self._copier.reopen(child.pid)
        self._survey.set_in_common([(0, 1 << 63)])      # with its parent
        wiped = {start for start, words in look_at_smaps(child.pid).flags.items() if "wf" in words}
        self._zeroed = [m for m in maps if m.start in wiped]
        now = self._ranges([m for m in maps if m.start not in wiped], programs, child.check)
        now.update((m, ([], [])) for m in self._zeroed)
        for mapping, (stored, data) in now.items():
            if mapping.inode and not is_anonymous(mapping) and mapping in self._early:
                # A fork leaves out page tables that the file can fill again.
                known = joined(sorted(stored + self._early[mapping][0]), 0)
                self._image.reserve(known)
                now[mapping] = stored, data = known, known
            self._image.allocate(data)
            self._copier.copy(data, child.check, report, processors=1)
        child.check()
        for piece in self._image.pieces(self._slack, self._slack + SLACK):      # our own stub
            ctypes.memset(piece.local, 0, piece.end - piece.start)
        return now

    def _unreadable(self, maps, failed):
        zeroed = [Unreadable(m.start, m.end, m.path, "mapped with MADV_WIPEONFORK just before the stop")
                  for m in self._zeroed]
        return super()._unreadable(maps, failed) + zeroed


class _Child:
    """The child, which this thread traces: it stands before its first instruction, which would end it."""

    def __init__(self, pid, stopped):
        self.pid = pid
        self._stopped = stopped

    def hold(self):
        """Wait until it stands. Raises LiveError."""
        try:
            while next_stop(self.pid) is None:
                self._stopped.check_cancelled()
                time.sleep(0.0001)
        except ProcessLookupError:
            raise self._killed()
        with contextlib.suppress(OSError):
            ptrace(PTRACE_SETOPTIONS, self.pid, 0, _PTRACE_O_EXITKILL)
            with open("/proc/%d/oom_score_adj" % self.pid, "w") as file:
                file.write("1000")

    def check(self):
        """LiveError when it stands no more, or the copy was cancelled. Until then all of its memory was there: this is
        so as soon as the signal that kills it is sent, long before its parent can see that it is dead."""
        self._stopped.check_cancelled()
        try:
            event_message(self.pid)
        except OSError:
            raise self._killed()

    def _killed(self):
        return LiveError("the child of process %d was killed while it was copied, perhaps for lack of memory; "
                         "without --fork none is needed" % self._stopped.pid)

    def end(self):
        """Kill it; its parent can reap it then."""
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except PermissionError:
            with contextlib.suppress(OSError):
                ptrace(PTRACE_DETACH, self.pid)
                return
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | WALL)


# --------------------------------------------------------------------------------------------------------
# Reaping
# --------------------------------------------------------------------------------------------------------

class _Guard:
    """Has the child reaped: by us, or by a process of its own when we are killed, or fail, before."""

    def __init__(self, pid, max_stop=None):
        self._pid = pid
        self._most = min(max_stop or _MOST, _MOST)
        self.child = None           # its id as its parent knows it
        reader, self._writer = _pipe()
        self._process = os.fork()
        if not self._process:
            try:
                _wait_and_reap(pid, reader, self._most)
            finally:
                os._exit(0)
        os.close(reader)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._writer)
        os.waitpid(self._process, 0)

    def watch(self):
        """From now on there may be a child."""
        os.write(self._writer, _WATCH)

    def reap(self):
        """Have it reaped; how long its parent stood still for that, in milliseconds."""
        stopped, pause = _BriefStop(self._pid, self._most), 0.01
        for _ in range(_TRIES):
            with contextlib.suppress(LiveError, Unsafe, OSError):       # which may pass: another one stops it just now
                if _reap(stopped, self.child):
                    break
            if status_of(self._pid) is None:
                break
            if stopped.total > _MOST_IN_ALL / 4:
                return stopped.total        # the guard goes on trying, with long pauses
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        else:
            return stopped.total            # the guard goes on trying for a while
        os.write(self._writer, _DONE)
        return stopped.total


def _pipe():
    """A pipe, away from the standard files, which may be closed."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends]
    for end in ends:
        os.close(end)
    return moved


_WATCH, _DONE = b"w", b"d"
_TRIES = 50                 # 5 s, with the pauses between them
_MOST = 0.05                # seconds of one stop to reap the child; to list very many mappings takes longer


class _BriefStop(Stopped):
    """For what is done again if it takes too long, or a thread cannot be stopped now. lines: of the process's
    `mappings`, read before."""

    def __init__(self, pid, most):
        self.lines = {}
        began = time.monotonic()
        with contextlib.suppress(OSError):
            mappings(pid, self.lines)
        super().__init__(pid, most + time.monotonic() - began, wait=0)


def _reap(stopped, child):
    """Have a process, by a `_BriefStop`, reap its `child`; whether it is gone. Raises LiveError, Unsafe, OSError."""

    def act():
        with hurried(), stopped:
            tid = safe_thread(stopped)
            maps = mappings(tid, stopped.lines)
            result, = Injection(stopped, tid, maps).make([(WAIT4, child, 0, WALL | os.WNOHANG, 0)])
            with contextlib.suppress(Unsafe):
                remove_remains(stopped, maps)
            return result

    return stopped.run(act) in (child, -errno.ECHILD)


def _wait_and_reap(pid, reader, most):
    """The guard: wait for the end of who started it, and then have the children reaped that it left to `pid`."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != reader:
            with contextlib.suppress(OSError):
                os.close(int(name))
    since = int(statistics_of("self")[19])      # in ticks since the boot
    said = b""
    while True:
        data = os.read(reader, 64)
        if not data:
            break
        said += data
    if said.endswith(_DONE) or not said:
        return
    deadline, pause, stopped = time.monotonic() + 30, 0.02, _BriefStop(pid, most)
    while time.monotonic() < deadline and stopped.total < _MOST_IN_ALL and status_of(pid) is not None:
        with contextlib.suppress(LiveError, Unsafe, OSError):
            children = _children(pid, since)
            for child, is_dead in children:
                if is_dead:
                    _reap(stopped, _as_seen_by(pid, child))
            left = remains(pid, mappings(pid))      # the stub: as long as it is there, a child may still be made
            if left and not children:
                clean(stopped, stopped.lines)
            if not left and not children:
                return
        time.sleep(pause)
        pause = min(1.5 * pause, 2.0)


def _children(pid, since):
    """(process, whether it is dead) of the children of `pid` that were made since, and send no signal."""
    found = []
    for child in all_processes():
        with contextlib.suppress(OSError):
            state, parent, *rest = statistics_of(child)
            start, exit_signal = int(rest[17]), int(rest[33])
            if int(parent) == pid and exit_signal == 0 and start >= since:
                found.append((child, state == b"Z"))
    return found


def _as_seen_by(pid, child):
    """The id that `child` has in the PID namespace of process `pid`."""
    level = len(status_of(pid)["NSpid"].split()) - 1
    return int(status_of(child)["NSpid"].split()[level])
