"""A recording, from its installation on: in a process that runs, or in a command from start to end.

The agent's needs no tracer in a process that runs. A command is traced (target/follow.py), so that it stands at its
end, while what the agent has recorded is still in its memory.
"""
from __future__ import annotations

import contextlib
import signal
import time
from typing import Callable, NamedTuple

from ..target import follow, ptrace
from ..target.ptrace import LiveError
from . import agent as agents
from . import inject, tracee
from .install import Installation
from .leaks import Recording
from .modules import Process
from .unwind import Unwinder


_FS_BASE = 21 * 8       # where it is in struct user_regs_struct


class Course(NamedTuple):
    """How a recording went. lasted: seconds of the window; held: until when blocks were held, in words; manner, outcome:
    how the process was treated, and what came of it, for a person; facts: the same for a program."""

    lasted: float
    held: str
    manner: str
    outcome: str
    facts: dict


class Session:
    """What is recorded in process `pid`. kind: an `Installation`. Its methods may raise LiveError, and OSError when the
    process is gone."""

    look_every = 0.05       # seconds between two calls of `look`
    followed = "recorded from its start, and traced for its end: short stops as threads begin and signals come"
    if_filtered = ": it put itself under a seccomp filter, not by libc, that forbids what the agent calls; try sample --exact"

    def __init__(self, pid: int):
        self.pid = pid
        self.installation: Installation
        self._began = 0.0
        self.quiet_after: float | None = None   # seconds, since when the agent is quiet, as the program restricted itself

    def install(self) -> None:
        """Put the agent in; it begins to record."""
        self._began = time.monotonic()

    def at_signal(self, _tid: int, number: int) -> int:
        """A thread of a command has stopped at a signal: the one to let it go on with, 0 for none."""
        return number

    def at_fork(self, _child: int) -> None:
        """A command's child, a copy of it, stands at its beginning, and will run untraced."""

    def look(self) -> str:
        """Called while it records; what there is to tell about its progress."""
        if self.installation.read("state", 4) != agents.QUIET:
            self.quiet_after = None             # the kernel may have refused it
        elif self.quiet_after is None:
            self.quiet_after = time.monotonic() - self._began
        return ""

    def watch_frees(self) -> None:
        """The window is over: record only what is released."""

    def collect(self) -> None:
        """Read what was recorded, and all else that needs the process, while it is there."""
        process = Process(self.installation.memory)
        self.name, self.process = process.name, process
        self.unwinder = Unwinder(process)
        for each in process.images:
            each.keep()

    def recording(self, course: Course) -> Recording:
        """What comes of it."""
        raise NotImplementedError

    def quiet(self, otherwise: str) -> list[str]:
        """What of it is missing since the program restricted itself, if it did; otherwise: what mends that."""
        return [] if self.quiet_after is None else [
            f"after {self.quiet_after:.3g} s it restricted itself (seccomp, PR_SET_TSC), and nothing was recorded any more, as "
            f"what the agent does may be forbidden now; {otherwise}"]


class Timing(NamedTuple):
    """seconds: of the window, None: until the process ends; grace: so long releases are watched after it."""

    seconds: float | None
    grace: float


Notes = NamedTuple("Notes", [("note", Callable[[str], None]), ("progress", Callable[[str], None])])
Notes.__doc__ = """note: takes a line when the recording begins; progress: what is being done."""


def record(make: Callable[..., Session], pid: int, timing: Timing, notes: Notes) -> Recording:
    """Record process `pid`. make(pid, kind of Installation): the `Session`. Raises LiveError. Ctrl-C ends the window
    early."""
    session = make(pid, Installation)
    installation = session.installation
    try:
        session.install()
        with ptrace.hurried():
            lasted = _watch(session, timing.seconds, "recording", notes.progress,
                            lambda: notes.note(f"recording process {pid} for {timing.seconds:g} s"))
            session.watch_frees()
            _watch(session, timing.grace, "watching frees", notes.progress)
        session.collect()
    except OSError:
        raise LiveError(f"process {pid} has ended, or runs another program now: what the agent recorded went with it")
    finally:
        removal = installation.remove()
    notes.progress("unwinding")
    return session.recording(Course(
        lasted, held(timing), f"stopped {installation.stops} times, {installation.stop_ms:.1f} ms at most; no tracer "
        "was attached meanwhile", removal_line(removal), {"stop_ms": round(installation.stop_ms, 3)}))


def held(timing: Timing) -> str:
    """Until when blocks were, in words."""
    return f"within {timing.grace:g} s more" if timing.grace else "by then"


def _watch(session, seconds, what, progress, begin=lambda: None) -> float:
    """Call `begin`, and wait; returns how long. Ctrl-C ends it early. OSError when the process ends."""
    began = time.monotonic()
    try:
        begin()
        while True:
            passed = time.monotonic() - began
            if passed >= seconds:
                return passed
            progress(f"{what}: {passed:.0f} of {seconds:g} s{session.look()}")
            time.sleep(min(session.look_every, seconds - passed))
    except KeyboardInterrupt:
        return time.monotonic() - began


def record_command(make: Callable[..., Session], text: str, keeps_output: bool, timing: Timing,
                   notes: Notes) -> Recording:
    """Start the command `text` and record it from its start, and each program that it becomes; until it ends, or so
    long, and end it. make: as for `record`. Raises LiveError. Ctrl-C ends the window early."""
    with follow.Command(text, keeps_output) as command:
        recorder = _Starts(command.pid, make, timing, notes)
        try:
            with ptrace.hurried():              # the thread that follows it, too
                command.follow(recorder.at_exit, None, recorder)
        except OSError:
            raise LiveError(f"process {command.pid} was killed, or became another program at that moment: what was in "
                            "its memory is gone") from None
        finally:
            recorder.remove()
        command.end()
    if recorder.lasted is None:
        raise LiveError(f"nothing was recorded: the command {command.ending} before its libraries were loaded")
    notes.progress("unwinding")
    return recorder.session.recording(Course(
        recorder.lasted, "until it ended" if recorder.ended else held(timing), recorder.session.followed,
        f"the command {command.ending}" + ("" if recorder.ended else ", after the recording")
        + (recorder.session.if_filtered if command.ending.endswith("(SIGSYS)") else ""),
        {"ending": command.ending}))


class _Starts(follow.Starts):
    """Records a command. lasted: seconds of the window, None before the end of it; ended: the process is at its end."""

    def __init__(self, pid: int, make, timing: Timing, notes: Notes):
        self._pid, self._make, self._timing, self._notes = pid, make, timing, notes
        self.session: Session | None = None
        self._began = self._looked = 0.0
        self._window: float | None = None       # seconds that it lasted, when the frees are watched
        self.lasted: float | None = None
        self.ended = False

    def at_exec(self):
        if self.session is not None:
            self._notes.note(f"process {self._pid} runs another program now: that is recorded, from its start")
        self.remove()                           # what was in the program before went with its memory
        with contextlib.closing(tracee.Memory(self._pid)) as memory:
            is_static = Process(memory).is_static
        return lambda: is_static or _has_thread_pointer(self._pid)

    def at_start(self):
        session = self._make(self._pid, _Held)
        self.session, self.pause = session, session.look_every
        session.installation.halt(session.install)
        self._began, self._window = time.monotonic(), None
        seconds = self._timing.seconds
        self._notes.note(f"recording process {self._pid} " + (f"for {seconds:g} s" if seconds else "until it ends"))

    def at_signal(self, tid, number):
        return number if self.session is None else self.session.at_signal(tid, number)

    def at_fork(self, child):
        if self.session is not None:
            self.session.at_fork(child)

    def look(self):
        now = time.monotonic()
        if self.session is None or now - self._looked < self.session.look_every:
            return True
        self._looked, passed = now, now - self._began
        of = f" of {self._timing.seconds:g}" if self._timing.seconds else ""
        with contextlib.suppress(OSError):      # its memory has just gone, which its next stop will tell
            self._notes.progress(f"recording: {passed:.0f}{of} s{self.session.look()}")
            if self._window is None and passed >= (self._timing.seconds or float("inf")):
                self.session.watch_frees()
                self._window = passed
        return self._window is None or passed < self._window + self._timing.grace

    def at_end(self):
        if self.session is not None:
            self.lasted = self._window or time.monotonic() - self._began
            self.session.collect()

    def at_exit(self, _stopped):
        """It stands at its end: its memory is there."""
        self.ended = True
        self.at_end()

    def remove(self):
        """Have what is installed taken out."""
        if self.session is not None:
            self.session.installation.remove()
            if self.lasted is None:
                self.session = None


def _has_thread_pointer(tid) -> bool:
    """Whether a stopped thread has one: the dynamic linker sets it when the libraries are mapped, before it relocates
    them, with some system calls of its own yet to come."""
    return any(ptrace.register_set(tid, ptrace.NT_PRSTATUS)[_FS_BASE:_FS_BASE + 8])


class _Held(Installation):
    """An installation into a process that this thread traces, and that stays traced, all of it in one stop."""

    def halt(self, action):
        """Do action() while the process stands."""
        with ptrace.hurried(), _HeldStop(self.memory.pid) as self._stop:
            action()

    def halted(self, action):
        """Do action(halted), in the stop that there is. Raises LiveError."""
        try:
            return action(self._stop)
        except inject.Unsafe as error:
            raise LiveError(f"process {self.target.pid} cannot be changed: {error}") from None
        except OSError as error:
            raise self.failure(error) from None


class _HeldStop(ptrace.Stopped):
    """A stop of a process that this thread traces, that stands for another reason, and that stays traced."""

    def __enter__(self):
        super().__enter__()
        pending = set(self.threads)
        self.release()                  # from that other stop, to the one that was asked for
        while pending:
            self._collect(pending)
        return self

    def release(self):
        """Let all threads go on."""
        stops, self._stops = self._stops, {}
        for tid, (event, number) in stops.items():
            is_signal = not event and number < signal.NSIG      # else an event, or a system call
            with contextlib.suppress(OSError):                  # killed meanwhile
                ptrace.ptrace(ptrace.PTRACE_SETOPTIONS, tid, 0, follow.FOLLOWING)
                ptrace.ptrace(ptrace.PTRACE_CONT, tid, 0, number if is_signal else 0)


def removal_line(removal) -> str:
    """How the agent left, for a person."""
    if removal.gone:
        return "the process has ended meanwhile"
    if not removal.restored:
        return f"the agent is passive and still there: {removal.waits}; the guard takes it out as soon as it can"
    if removal.left:
        return f"the text is as it was; {removal.left >> 10:,} KiB of the agent stay mapped: {removal.waits}"
    return "the agent was taken out again, and the text is as it was"
