"""A command that is started, and caught when it ends: its threads then stand, and its memory is still there.

On request it is caught at its start, too, and at that of each program that it becomes: once its libraries
are mapped, before any code of theirs or its own runs.

Standard library only, Python 3.6 or later. Its threads are traced, which costs nothing but at the start of a thread
and at a signal. Should this program be killed, the command runs on.
"""
import contextlib
import errno
import os
import platform
import shlex
import signal
import struct
import time

from .ptrace import (NT_PRSTATUS, PTRACE_CONT, PTRACE_DETACH, PTRACE_EVENT_CLONE, PTRACE_EVENT_STOP, PTRACE_INTERRUPT,
                     PTRACE_LISTEN, PTRACE_O_TRACECLONE, PTRACE_SEIZE, WALL, Ended, LiveError, event_message, is_dead,
                     next_stop, on_own_thread, ptrace, register_set, status_of, threads_of)

_PTRACE_O_TRACEEXIT, _PTRACE_EVENT_EXIT = 0x40, 6
_PTRACE_O_TRACEEXEC, _PTRACE_EVENT_EXEC = 0x10, 4
PTRACE_O_TRACEFORK, PTRACE_EVENT_FORK = 2, 1
_PTRACE_O_SYSGOOD, _PTRACE_TO_CALL, _AT_CALL = 1, 24, (0, signal.SIGTRAP | 0x80)   # 24: PTRACE_SYSCALL
FOLLOWING = (PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK | _PTRACE_O_TRACEEXIT | _PTRACE_O_TRACEEXEC
             | _PTRACE_O_SYSGOOD)           # with starts
# Number of exit(2), and where a stopped thread's registers have the number of its call.
_EXIT, _CALL_NUMBER = {"x86_64": (60, 15 * 8), "aarch64": (93, 8 * 8)}.get(platform.machine(), (0, 0))
_EXECVE = {"x86_64": (59, 322), "aarch64": (221, 281)}.get(platform.machine(), ())
_GROUP_STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_GRACE = 0.5            # seconds: after Ctrl-C the command, which gets it as well, may end by itself
_TICK = 0.1
_LAST = 0.2             # seconds that the other threads have to come to their end


class AtExit:
    """The threads of a process that stand at their exit, held by the calling thread; like `ptrace.Stopped`."""

    def __init__(self, pid, threads):
        self.pid = pid
        self.threads = threads
        self.began = self.milliseconds = None       # it would not go on anyway

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, function):
        """What `function` returns."""
        return function()

    def check(self):
        """LiveError when the process is gone."""
        try:
            register_set(self.threads[0], NT_PRSTATUS)
        except OSError:
            raise Ended("process %d was killed while it was copied" % self.pid)


class Starts:
    """What `Command.follow` does besides, called on the thread that traces the command."""

    pause = 0.1                 # seconds between two calls of `look`

    def at_exec(self):
        """It became a program, and stands at the first instruction: a function that tells, then and at each of its
        system calls, whether its libraries are mapped."""
        raise NotImplementedError

    def at_start(self):
        """They are. It still stands there, traced by this thread, and has to be let go on, traced."""
        raise NotImplementedError

    def at_signal(self, _tid, number):
        """A thread has stopped at a signal: the one to let it go on with, 0 for none."""
        return number

    def at_fork(self, _child):
        """A copy of the process, which stands at its beginning, and will not be traced."""

    def look(self):
        """It runs: whether to go on following."""
        return True

    def at_end(self):
        """It will no longer be followed, and still runs."""


class Command:
    """A command (its text) that was started, and waits for `follow`. Its output goes to standard error, unless it keeps
    it, as what it says on standard error does.

    A context manager: at its end the command is ended as well. Raises LiveError when it cannot be started."""

    def __init__(self, text, keeps_output=False):
        self._words = words = _words_of(text)
        self.ending = ""                # how it ended, in words
        reader, self._release = os.pipe()
        self._failure, failed = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _start(words, keeps_output, reader, failed)
        os.close(reader)
        os.close(failed)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for fd in (self._release, self._failure):
            if fd is not None:
                os.close(fd)
        self._release = self._failure = None
        self.end()

    def follow(self, at_exit, after=None, starts=None):
        """Let the command run. at_exit(stopped) is called, on a thread of its own, when it ends, with an `AtExit`; what
        that returns is returned. None: it still runs, after so many seconds or Ctrl-C, and is no longer traced.
        starts: a `Starts`, if its starts matter."""
        follower = _Follower(self.pid, at_exit, after, starts)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        try:
            on_own_thread(lambda: follower.run(self._exec), follower.cancel)
        except KeyboardInterrupt:
            pass
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return follower.outcome

    def _exec(self):
        """Let it begin. Raises LiveError."""
        os.close(self._release)
        self._release = None
        error = os.read(self._failure, 4)
        if error:
            raise LiveError("cannot start %s: %s" % (self._words[0], os.strerror(struct.unpack("i", error)[0])))

    def end(self, patience=5.0):
        """Wait for its end when it is about to end, or else end it: politely, then not; Ctrl-C cuts each wait short.
        Sets `ending`."""
        for number in (0, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):      # if the third was cut short
            with contextlib.suppress(KeyboardInterrupt, ProcessLookupError):
                if number and not self.ending:
                    os.kill(self.pid, number)
                self._wait(patience if number else _GRACE)

    def _wait(self, patience):
        """Wait so long for its end, and reap it."""
        deadline = time.monotonic() + patience
        while not self.ending and time.monotonic() < deadline:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG)
            if found is None:
                time.sleep(0.01)
            elif found.si_code == os.CLD_EXITED:
                self.ending = "ended with status %d" % found.si_status
            else:
                self.ending = "was ended by signal %d (%s)" % (found.si_status, signal_name(found.si_status))


def signal_name(number):
    """As in SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a realtime signal"


def _words_of(text):
    """The words of a command. Raises LiveError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise LiveError("-c: %s" % str(error).lower())
    if not words:
        raise LiveError("-c: an empty command")
    return words


def _start(words, keeps_output, reader, failed):
    """The child: wait until we are traced, then become the command."""
    try:
        # What Python ignores the command must not.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if not keeps_output:
            os.dup2(2, 1)
        for fd in _open_files():
            if fd > 2 and fd not in (reader, failed):
                with contextlib.suppress(OSError):
                    os.close(fd)
        os.read(reader, 1)
        os.execvp(words[0], words)
    except OSError as error:
        os.write(failed, struct.pack("i", error.errno or errno.ENOENT))
    finally:
        os._exit(127)


def _open_files():
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _call_of(tid):
    """The number of the system call that a thread is blocked in, or None."""
    try:
        with open("/proc/%d/syscall" % tid) as file:
            number = file.read().split()[0]
    except (OSError, IndexError):
        return None
    return int(number) if number.isdigit() else None


def _make_accessible(tid):
    """After an exec by a thread that was not the first, and took its number, the kernel refuses all requests until the
    stop was waited for: have it stand at another one, for whoever asks later where it stands."""
    try:
        event_message(tid)
    except ProcessLookupError:
        os.waitid(os.P_PID, tid, os.WSTOPPED | os.WNOHANG | WALL)
        ptrace(PTRACE_INTERRUPT, tid)
        ptrace(PTRACE_CONT, tid)
        while next_stop(tid) is None:
            time.sleep(0.00005)


def let_child_go(child, at_fork):
    """Call at_fork(child) when a process that a traced one has forked stands at its beginning, and detach from it."""
    try:
        while next_stop(child) is None:
            time.sleep(0.00005)
        at_fork(child)
        ptrace(PTRACE_DETACH, child)
    except ProcessLookupError:              # killed, or let go already
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, WALL | os.WNOHANG)


class _Follower:
    """Traces a process until it ends, on the thread that calls `run`."""

    def __init__(self, pid, at_exit, after, starts):
        self._pid, self._at_exit, self._starts = pid, at_exit, starts
        self._is_loaded = None          # from an exec on until that is so: the function that tells
        self._deadline = after and time.monotonic() + after
        self._known = {pid}
        self._exiting = set()
        self.outcome = None

    def cancel(self):
        """Stop following soon; may be called from another thread."""
        self._deadline = min(self._deadline or float("inf"), time.monotonic() + _GRACE)

    def run(self, begin):
        """Follow the process. begin(): called when it is traced. Sets `outcome`."""
        ptrace(PTRACE_SEIZE, self._pid, 0, FOLLOWING if self._starts else PTRACE_O_TRACECLONE | _PTRACE_O_TRACEEXIT)
        begin()
        busy = False
        while self._deadline is None or time.monotonic() < self._deadline:
            if not busy:        # a stop raises SIGCHLD, which stays pending while it is blocked
                told = signal.sigtimedwait({signal.SIGCHLD}, self._starts.pause if self._starts else _TICK)
                if told is None:        # one whose maker was killed before it told of it may stand at its exit
                    self._known.update(threads_of(self._pid))
            busy = self._handle_each()
            if self._exiting:
                self._wait_for_others()
                threads = sorted(self._exiting, key=lambda tid: (tid != self._pid, tid))
                self.outcome = self._at_exit(AtExit(self._pid, threads))
                return
            if not self._known:
                raise LiveError("process %d was killed, and what was in its memory is gone" % self._pid)
            if self._starts and not self._starts.look():
                break
        if self._starts:
            self._starts.at_end()
            until = time.monotonic() + _LAST            # for signals that came before
            while not self._exiting and time.monotonic() < until and self._handle_each():
                pass

    def _handle_each(self):
        """Handle the threads' stops, up to that of one at which the process ends; whether there was any."""
        busy = False
        for tid in sorted(self._known):
            stop = self._stop(tid)
            if stop is None:
                continue
            busy = True
            with contextlib.suppress(ProcessLookupError):       # killed meanwhile
                self._handle(tid, *stop)
            if self._exiting:
                break
        return busy

    def _stop(self, tid):
        try:
            return next_stop(tid)
        except ProcessLookupError:
            with contextlib.suppress(ChildProcessError):
                if tid != self._pid:        # the process itself is for `Command`
                    os.waitpid(tid, WALL | os.WNOHANG)
            self._known.discard(tid)
            return None

    def _handle(self, tid, event, number):
        """Let a thread go on after a stop, but not after one at which the process ends: that is noted."""
        if event == _PTRACE_EVENT_EXIT:
            if self._is_end(tid):
                self._exiting.add(tid)
            else:
                self._go_on(tid)
        elif event == _PTRACE_EVENT_EXEC:
            self._known = {tid}
            _make_accessible(tid)
            self._is_loaded = self._starts.at_exec()
            self._go_on_to_start(tid)
        elif (event, number) == _AT_CALL:
            self._go_on_to_start(tid)
        elif event == PTRACE_EVENT_CLONE:
            self._known.add(event_message(tid))
            self._go_on(tid)
        elif event == PTRACE_EVENT_FORK:
            let_child_go(event_message(tid), self._starts.at_fork)
            self._go_on(tid)
        elif event == PTRACE_EVENT_STOP and number in _GROUP_STOPS:
            ptrace(PTRACE_LISTEN, tid)
        elif event == PTRACE_EVENT_STOP and (status_of(tid) or {}).get("Tgid") != str(self._pid):
            self._known.discard(tid)        # not a thread but a process, made by clone
            ptrace(PTRACE_DETACH, tid)
        elif event:
            self._go_on(tid)
        else:
            self._go_on(tid, self._starts.at_signal(tid, number) if self._starts else number)

    def _go_on(self, tid, number=0):
        """Let a thread go on, with a signal if there is one."""
        ptrace(_PTRACE_TO_CALL if self._is_loaded else PTRACE_CONT, tid, 0, number)

    def _go_on_to_start(self, tid):
        """Let the one thread of a new program go on: to its next system call, or from its start."""
        if self._is_loaded and self._is_loaded():
            self._is_loaded = None
            self._starts.at_start()
        else:
            self._go_on(tid)

    def _is_end(self, tid):
        """Whether all of the process ends with a thread at its exit."""
        number, = struct.unpack_from("<q", register_set(tid, NT_PRSTATUS), _CALL_NUMBER)
        deadline = time.monotonic() + _LAST
        while True:
            others = [other for other in threads_of(self._pid) if other != tid and not is_dead(other)]
            calls = [_call_of(other) for other in others]
            # It ends alone by exit(2); all but one end for an execve(2), which waits for them as soon as it has told them.
            if calls and (number == _EXIT or not set(calls).isdisjoint(_EXECVE)):
                return False
            if None not in calls or time.monotonic() > deadline:
                return True
            time.sleep(0.0005)

    def _wait_for_others(self):
        """The other threads end as well now: have them stand at their exit, too, for their registers."""
        deadline = time.monotonic() + _LAST
        while time.monotonic() < deadline:
            left = [tid for tid in threads_of(self._pid) if tid not in self._exiting and not is_dead(tid)]
            if not left:
                return
            for tid in left:
                with contextlib.suppress(ProcessLookupError):
                    stop = next_stop(tid)
                    if stop is not None and stop[0] == _PTRACE_EVENT_EXIT:
                        self._exiting.add(tid)
                    elif stop is not None:
                        self._handle(tid, *stop)
            time.sleep(0.0005)
