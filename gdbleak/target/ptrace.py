"""All threads of a process, stopped by ptrace and let go. Nothing is written to the process.

Standard library only, Python 3.6 or later. Attached with ``PTRACE_SEIZE`` and without ``PTRACE_O_EXITKILL``: should
this program be killed, the kernel lets the process run on.
"""
import contextlib
import ctypes
import errno
import gc
import os
import signal
import threading
import time

PTRACE_CONT, PTRACE_DETACH, PTRACE_GETEVENTMSG, PTRACE_GETREGSET = 7, 17, 0x4201, 0x4204
PTRACE_SETOPTIONS, PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_LISTEN = 0x4200, 0x4206, 0x4207, 0x4208
PTRACE_O_TRACECLONE = 8
PTRACE_EVENT_CLONE, PTRACE_EVENT_STOP = 3, 128
WALL = 0x40000000               # wait for threads, too
NT_PRSTATUS = 1

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
libc.ptrace.restype = ctypes.c_long


class LiveError(Exception):
    """The process cannot be copied: one line that says why, and what mends it."""


class Ended(LiveError):
    """The process is there no more."""


class IoVec(ctypes.Structure):
    """struct iovec."""
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def ptrace(request, tid, address=0, data=0):
    """One ptrace request. Raises OSError."""
    if libc.ptrace(request, tid, address, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def register_set(tid, kind, limit=1024):
    """Register set `kind` (an NT_ number) of a stopped thread: its bytes, b"" where the machine has none."""
    buffer = ctypes.create_string_buffer(limit)
    vector = IoVec(ctypes.addressof(buffer), limit)
    try:
        ptrace(PTRACE_GETREGSET, tid, kind, ctypes.addressof(vector))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return b""
    return buffer.raw[:vector.length]


def event_message(tid):
    """The number that goes with a thread's ptrace event: the id of its new child, or its exit status."""
    number = ctypes.c_ulong()
    ptrace(PTRACE_GETEVENTMSG, tid, 0, ctypes.addressof(number))
    return number.value


# --------------------------------------------------------------------------------------------------------
# What a process is, and why it cannot be stopped
# --------------------------------------------------------------------------------------------------------

def status_of(pid):
    """/proc/PID/status as a dict; None when there is no such process or thread."""
    try:
        with open("/proc/%d/status" % pid, "rb") as file:
            lines = file.read().decode("utf-8", "replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def threads_of(pid):
    """Thread ids of a process; none when it is gone."""
    try:
        return [int(name) for name in os.listdir("/proc/%d/task" % pid)]
    except (FileNotFoundError, ProcessLookupError):
        return []


def own_id(tid):
    """The id that a thread has in its own PID namespace, by which its C library knows it."""
    return int((status_of(tid) or {}).get("NSpid", str(tid)).split()[-1])


def state_of(tid):
    """The letter of a thread's state, as D; X when it is gone."""
    try:
        with open("/proc/%d/stat" % tid, "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def is_dead(tid):
    """Whether a thread has ended, reaped or not."""
    status = status_of(tid)
    return status is None or status["State"][0] in "ZX"


def is_ours(tid):
    """Whether this program traces a thread already."""
    return os.path.exists("/proc/self/task/" + (status_of(tid) or {}).get("TracerPid", "0"))


def living_thread(pid):
    """Refuse, with a LiveError, what cannot be copied. Returns the id of a living thread to read /proc by."""
    status = status_of(pid)
    if status is None:
        raise Ended("no process %d: pgrep -a NAME finds one by its name" % pid)
    if int(status["Tgid"]) != pid:
        raise LiveError("%d is a thread of process %s: name that" % (pid, status["Tgid"]))
    if pid == os.getpid():
        raise LiveError("process %d is this program itself, which cannot stop itself: run another one for it" % pid)
    living = [tid for tid in [pid] + sorted(threads_of(pid)) if not is_dead(tid)]
    if not living:
        raise Ended("process %d has ended: it is a zombie that its parent, %s, has not reaped; no memory is "
                    "left to copy" % (pid, status["PPid"]))
    if status["TracerPid"] != "0" and not is_ours(pid):
        raise refusal(pid, pid)
    if "VmSize" not in (status_of(living[0]) or {}):
        raise LiveError("process %d is a kernel thread: it has no memory of its own" % pid)
    try:
        with open("/proc/%d/exe" % living[0], "rb") as file:
            ident = file.read(5)
    except (FileNotFoundError, ProcessLookupError):
        raise Ended("process %d has ended" % pid)
    except PermissionError:
        raise no_permission(pid)
    if ident != b"\x7fELF\2":
        raise LiveError("process %d is a 32-bit program, which is not supported yet: gcore of GDB copies it" % pid)
    return living[0]


def no_permission(pid):
    """The LiveError for a process that may not be traced: what forbids it, what mends it."""
    status = status_of(pid)
    if status is None:
        return Ended("process %d has ended" % pid)
    owner, me = int(status["Uid"].split()[0]), os.geteuid()
    why = "no permission to stop process %d: " % pid
    if me == 0:
        return LiveError(why + "this root lacks CAP_SYS_PTRACE, or a sandbox forbids ptrace; run on the host,"
                         " or give the container that capability (docker run --cap-add=SYS_PTRACE)")
    if owner != me:
        return LiveError(why + "it belongs to user %s and this is user %s; run as root"
                         % (_user_name(owner), _user_name(me)))
    scope = _yama_scope()
    if scope == 3:
        return LiveError(why + "kernel.yama.ptrace_scope is 3, which forbids it to everybody until a reboot")
    if scope:
        return LiveError(why + "kernel.yama.ptrace_scope is %d; run as root, or set it to 0 "
                         "(sysctl kernel.yama.ptrace_scope=0)" % scope)
    return LiveError(why + "it changed its user or has capabilities, so the kernel protects it; run as root")


def refusal(pid, tid):
    """The LiveError for a thread that cannot be attached: it has a tracer, or the permission is missing."""
    tracer = (status_of(tid) or {}).get("TracerPid", "0")
    if tracer == "0":
        return no_permission(pid)
    return LiveError("process %d is already traced by process %s: detach that debugger first" % (pid, tracer))


def _user_name(uid):
    try:
        import pwd
        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return "number %d" % uid


def _yama_scope():
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            return int(file.read())
    except OSError:
        return 0


# --------------------------------------------------------------------------------------------------------
# The stop
# --------------------------------------------------------------------------------------------------------

def next_stop(tid):
    """(event, number) of a thread that has stopped: a PTRACE_EVENT_ number, 0 for a signal, and the signal's
    number; None while it runs. The stop stays with the kernel: if this program dies, the signal behind it is still
    delivered. Raises ProcessLookupError when the thread has ended (to reap it is for its parent)."""
    try:
        found = os.waitid(os.P_PID, tid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT | WALL)
    except ChildProcessError:           # never ours, because it had ended
        raise ProcessLookupError(errno.ESRCH, "thread %d has ended" % tid)
    if found is None:
        return None
    if found.si_code != os.CLD_TRAPPED:
        raise ProcessLookupError(errno.ESRCH, "thread %d has ended" % tid)
    return found.si_status >> 8, found.si_status & 0xFF


class Stopped:
    """All threads of a process, stopped. Must be entered and left on one thread, the tracer; that again if need be.

    max_stop: seconds after which `check` fails, None for ever; remedy: what mends that; wait: seconds to wait,
    before anything is stopped, for threads that nothing can stop now."""
    _PATIENCE = 5.0         # seconds for a thread to stop, on a busy machine
    _UNINTERRUPTIBLE = 0.1  # seconds when it waits in the kernel for something (state D), and the others for it

    def __init__(self, pid, max_stop=None, remedy="--fork needs less, a larger --max-stop allows more", wait=5.0):
        self.pid = pid
        self._began = None
        self.milliseconds = None    # of the last stop
        self.total = 0.0            # milliseconds of all of them, those that came to nothing as well
        self._max_stop, self._remedy, self._patience = max_stop, remedy, wait
        self._known = set()     # seized, or dead when tried
        self._stops = {}        # thread id -> (event, number) of its stop
        self._cancelled = False

    def __enter__(self):
        self._known, self._began, self.milliseconds = set(), None, None
        self._await_interruptible()
        try:
            while self._seize_new():
                pass
            self._began = time.monotonic()
            pending = set(self._known)
            self._interrupt(pending)
            while pending:
                self._collect(pending)
                if not pending:         # a thread born while we attached
                    pending = self._seize_new()
                    self._interrupt(pending)
        except BaseException:
            self.release()
            raise
        if not self.threads:
            self.release()
            raise Ended("process %d has ended" % self.pid)
        return self

    def __exit__(self, *_):
        self.release()

    @property
    def began(self):
        """When the stop began, as of time.monotonic()."""
        return self._began

    @property
    def threads(self):
        """Ids of the stopped threads, the main thread first."""
        own = set(threads_of(self.pid)).intersection(self._stops)
        return sorted(own, key=lambda tid: (tid != self.pid, tid))

    @property
    def interrupted(self):
        """Those of `threads` that nothing but our interrupt has stopped: no signal, no group stop."""
        return [tid for tid in self.threads if self._stops[tid] == (PTRACE_EVENT_STOP, signal.SIGTRAP)]

    def deliver_signals(self):
        """Have the threads that stopped at a signal get it, and stand behind it: in its handler, if there is one."""
        for tid in self.threads:
            for _ in range(10):
                event, number = self._stops.get(tid, (PTRACE_EVENT_STOP, 0))
                if event:
                    break
                ptrace(PTRACE_INTERRUPT, tid)
                ptrace(PTRACE_CONT, tid, 0, number)
                del self._stops[tid]
                pending = {tid}
                while pending:
                    self._collect(pending)
        if not self.threads:
            raise self.killed()

    def run(self, function):
        """What `function`, which enters and leaves this, returns when it is run on a thread of its own."""
        return on_own_thread(function, self.cancel)

    def cancel(self):
        """Let `check` fail; may be called from another thread."""
        self._cancelled = True

    def check(self):
        """LiveError when the copy must end: process killed, time over, or `cancel` called."""
        try:
            register_set(next(iter(self._stops)), NT_PRSTATUS)
        except OSError:
            raise self.killed()
        self.check_time()

    def killed(self):
        """The LiveError for a process that ended in the stop."""
        return Ended("process %d was killed while it was copied" % self.pid)

    def check_time(self):
        """LiveError when the time is over, or `cancel` was called."""
        self.check_cancelled()
        if self._max_stop is not None and time.monotonic() - self._began > self._max_stop:
            raise LiveError("process %d was let go: the stop would last longer than the %g ms allowed "
                            "(%s)" % (self.pid, self._max_stop * 1000, self._remedy))

    def check_cancelled(self):
        """LiveError when `cancel` was called."""
        if self._cancelled:
            raise LiveError("process %d was let go: interrupted" % self.pid)

    def _await_interruptible(self):
        """Wait while a thread is where it cannot be stopped, as the parent of a vfork: the others would stand and wait
        for it. Raises LiveError when one was there all the time."""
        began, pause, stuck = time.monotonic(), 0.0005, None
        while True:
            found = {tid for tid in threads_of(self.pid) if state_of(tid) == "D"}
            if not found:
                return
            stuck = found if stuck is None else stuck & found
            if time.monotonic() - began > self._patience:
                break
            self.check_cancelled()
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        if stuck:
            raise LiveError("process %d was not stopped: its thread %d, in state D (disk sleep, or vfork), cannot be "
                            "stopped now; try again" % (self.pid, min(stuck)))

    def _seize_new(self):
        """Attach to every thread that is not known yet; returns those."""
        new = set(threads_of(self.pid)) - self._known
        for tid in new:
            try:
                ptrace(PTRACE_SEIZE, tid, 0, PTRACE_O_TRACECLONE)
            except OSError as error:
                # The kernel attaches children of a seized thread.
                if not (error.errno == errno.ESRCH or is_ours(tid) or is_dead(tid)):
                    raise refusal(self.pid, tid)
        self._known |= new
        return new

    @staticmethod
    def _interrupt(tids):
        for tid in tids:
            with contextlib.suppress(OSError):      # it has ended, or is new and about to stop anyway
                ptrace(PTRACE_INTERRUPT, tid)

    def _collect(self, pending):
        """Take out of `pending` what has stopped or ended since."""
        idle = True
        for tid in sorted(pending):
            try:
                stop = next_stop(tid)
            except ProcessLookupError:
                pending.discard(tid)
                continue
            if stop is not None:
                idle = False
                pending.discard(tid)
                pending.update(self._note(tid, stop))
        if idle and pending:
            self._wait_more(pending)

    def _note(self, tid, stop):
        """Record one stop; returns the threads that it announces."""
        self._stops[tid] = stop
        if stop[0] != PTRACE_EVENT_CLONE:
            return ()
        child = event_message(tid)
        if child in self._stops:
            return ()
        self._known.add(child)
        return (child,)

    def _wait_more(self, pending):
        pending -= {tid for tid in pending if is_dead(tid)}     # a main thread that ended before the others
        passed = time.monotonic() - self._began
        if pending and passed > min(self._UNINTERRUPTIBLE, self._max_stop or self._UNINTERRUPTIBLE):
            waiting = [tid for tid in pending if state_of(tid) == "D"]
            if waiting or passed > self._PATIENCE:
                tid = min(waiting or pending)
                raise LiveError("process %d was let go after %.0f ms: its thread %d, in state %s, cannot be stopped now; "
                                "try again" % (self.pid, passed * 1000, tid, state_of(tid)))
        self.check_time()
        time.sleep(0.00005)

    def release(self):
        """Let all threads go; once."""
        stops, self._stops = self._stops, {}
        for tid, (event, number) in stops.items():
            # With an event it is a stop of ptrace's own, or the group stop of SIGSTOP, to which a detached thread
            # returns by itself. Without one, the signal was about to be delivered and must not get lost.
            with contextlib.suppress(OSError):      # killed meanwhile
                ptrace(PTRACE_DETACH, tid, 0, 0 if event else number)
        if self._began is not None and self.milliseconds is None:
            self.milliseconds = (time.monotonic() - self._began) * 1000
            self.total += self.milliseconds


SIGNALS = set(range(1, signal.NSIG)) - {32, 33}         # those two belong to the C library


@contextlib.contextmanager
def hurried():
    """Give this thread the highest priority, where it may: root need not wait for a turn on a busy machine. Nor is it
    held up by Python's collection of cycles."""
    before, collects = os.getpriority(os.PRIO_PROCESS, 0), gc.isenabled()
    gc.disable()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    try:
        yield
    finally:
        if collects:
            gc.enable()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, before)


def on_own_thread(function, cancel):
    """Run `function` on a thread of its own: when a tracer ends, the kernel releases what it still holds.

    cancel: called when the wait for it is interrupted (Ctrl-C), to end it early."""
    outcome, ended, interrupt = {}, threading.Event(), None

    def run():
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)       # those are for the main thread
        try:
            outcome["place"] = "/proc/" + os.readlink("/proc/thread-self")
            outcome["value"] = function()
        except BaseException as error:
            outcome["error"] = error
        finally:
            ended.set()

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=run, daemon=True).start()
    while True:     # not by join(): once that is interrupted, a thread that runs passes for ended (Python 3.11)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            ended.wait()
            while os.path.exists(outcome.get("place", "")):    # before, what it still holds is not released
                time.sleep(0.0001)
            break
        except BaseException as error:
            interrupt = error
            cancel()
    if interrupt:
        raise interrupt
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
