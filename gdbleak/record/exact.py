"""The memory leak flame graph, exact: every call, through breakpoints, for slow or test processes.

The hooked functions lead to stubs in a page of ours; a stub stops at a breakpoint before the real function and at
another behind it, with the result in rax. So both breakpoints are in our page, and a handler for SIGTRAP that simply
returns lets the threads run on through them, should the tracer die. At the end the breakpoints are taken out first: by
then the program may have another handler, or none, as the kernel resets it where SIGTRAP is blocked or ignored.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import time
from typing import Callable, NamedTuple

import numpy as np

from ..target import follow, ptrace
from ..target.ptrace import LiveError
from . import agent as agents
from . import guard, inject, sample, seccomp, session, tracee
from .install import Hook, Installation, Target
from .leaks import Recording
from .modules import Process
from .session import Course, Notes, Timing, held, removal_line
from .unwind import Stacks, Unwinder

_PAGE = 4096
_MOST_STACKS = 1 << 14  # copied stacks that are kept until they are unwound: 135 MB
# On a breakpoint (si_code 0x80) of this page: return. Else do what the program has asked for: call its handler, ignore,
# or (SIG_DFL) reset the action and send the signal again.
#   cmpl $0x80, 8(%rsi); jne 3f; mov 168(%rdx), %rax; lea page(%rip), %rcx; sub %rcx, %rax; cmp $0x1000, %rax; jb 1f
#   3: mov old(%rip), %rax; cmp $1, %rax; ja 2f; je 1f; mov $13, %eax; mov $5, %edi; lea default(%rip), %rsi
#   xor %edx, %edx; mov $8, %r10d; syscall; mov $39, %eax; syscall; mov %eax, %edi; mov $5, %esi; mov $62, %eax; syscall
#   1: ret; 2: jmp *%rax
_HANDLER = bytes.fromhex(
    "817e08800000007519488b82a8000000488d0de9ffffff4829c8483d00100000723f488b05d70f00004883f801773374"
    "30b80d000000bf05000000488d35e60f000031d241ba080000000f05b8270000000f0589c7be05000000b83e0000000f"
    "05c3ffe0")
_RESTORER_AT, _STUBS_AT, _STUB_SIZE, _ROOMS_AT = 0x80, 0x100, 32, 0x700      # 36 of each
# Mark the frame as returned from, in its unused gs, so that it is not taken for one that a thread is to return by:
#   movw $1, 186(%rsp); mov $15, %eax; syscall
_RESTORER = bytes.fromhex("66c78424ba0000000100 b80f000000 0f05")
_DATA = {"old_action": 0, "default_action": 0x28, "new_action": 0x60, "state": 0x80}
_NOT_SAVED = b"\xff" * 8                            # in old_action until the kernel has written it
_FLAGS = 0x04000000 | 0x40000000 | 0x08000000 | 0x10000000 | 4   # RESTORER, NODEFER, ONSTACK, RESTART, SIGINFO

_REALLOCATES = ("realloc", "rallocx")
_SIZE_ARGUMENT = {"realloc": 1, "rallocx": 1, "memalign": 1, "aligned_alloc": 1, "posix_memalign": 2}   # else 0
_GETSIGINFO = 0x4202
_SI_KERNEL = 0x80


class Breakpoints:
    """The page of stubs, with the interface of agent.Agent."""

    data, size = _PAGE, 2 * _PAGE

    def __init__(self, hooks: list[Hook]):
        page = bytearray(b"\xf4" * _PAGE)
        page[:len(_HANDLER)] = _HANDLER
        page[_RESTORER_AT:_RESTORER_AT + len(_RESTORER)] = _RESTORER
        self._stubs = {hook.name: _STUBS_AT + number * _STUB_SIZE for number, hook in enumerate(hooks)}
        self._rooms = {hook.name: _ROOMS_AT + number * agents.ROOM for number, hook in enumerate(hooks)}
        self._behind = {}               # hook -> offset of the breakpoint behind its function
        for name, at in self._stubs.items():
            page[at:at + _STUB_SIZE] = self._stub(name, at).ljust(_STUB_SIZE, b"\xf4")
        self.code = bytes(page)

    def _stub(self, name, at):
        def near(opcode, code, to):             # an instruction behind that code, which leads to the room of a hook
            return code + opcode + struct.pack("<i", self._rooms[to] - (at + len(code) + 5))

        if name in agents.RELEASES:             # int3; jmp room
            return near(b"\xe9", b"\xcc", name)
        # int3; push %rsp; call room; push $0; add $16, %rsp; int3; ret   (see inject.refer_to)
        # An exception cannot pass the stub: as in agent.c, the operator that throws none does the work, and rsi and rdi
        # are kept for the one that may.
        quiet = agents.MAY_THROW.get(name)
        code = near(b"\xe8", b"\xcc\x56\x57\x54" if quiet else b"\xcc\x54", quiet or name)
        code += b"\x6a\0\x48\x83\xc4\x10" + (b"\x5f\x5e" if quiet else b"") + b"\xcc"
        self._behind[name] = at + len(code)
        if not quiet:
            return code + b"\xc3"
        return near(b"\xe9", code + b"\x48\x85\xc0\x74\x01\xc3", name)     # test %rax, %rax; je 1f; ret; 1: jmp room

    def offset(self, name: str) -> int:
        """Where a variable lies. KeyError when there is none."""
        return _PAGE + _DATA[name]

    def entry(self, name: str) -> int:
        """Offset of what a hooked function is to lead to."""
        return self._stubs[name]

    def room(self, name: str) -> int:
        """Offset of the room for its displaced instructions."""
        return self._rooms[name]

    def stops(self, base: int) -> dict[int, tuple[str, bool]]:
        """{pc at the stop: (hook, whether it is the one behind the function)}"""
        found = {}
        for name, at in self._stubs.items():
            found[base + at + 1] = (name, False)
        found.update((base + at, (name, True)) for name, at in self._behind.items())
        return found

    @staticmethod
    def initial_data(values: dict[str, bytes]) -> bytes:
        """The contents of the data page."""
        page = bytearray(_PAGE)
        for name, value in values.items():
            if name in _DATA:
                page[_DATA[name]:_DATA[name] + len(value)] = value
        return bytes(page)


class _Call(NamedTuple):
    """A call that has begun. `held`: the block that realloc was given, as it was recorded, or None; `counts`: whether
    what it allocates does."""

    name: str
    arguments: tuple
    row: bytes
    stack: bytes
    held: object
    counts: bool


class _Tracer(ptrace.Stopped):
    """All threads of a process, traced while they run: their stops in order, none lost. at_fork: as for `Session`."""

    def __init__(self, pid: int, at_fork: Callable[[int], None]):
        super().__init__(pid)
        self._at_fork = at_fork

    def resume(self) -> None:
        """Let all threads run, traced."""
        for tid, (event, number) in list(self._stops.items()):
            with contextlib.suppress(OSError):  # killed meanwhile
                ptrace.ptrace(ptrace.PTRACE_SETOPTIONS, tid, 0, ptrace.PTRACE_O_TRACECLONE | follow.PTRACE_O_TRACEFORK)
            self.go_on(tid, event, number)

    def go_on(self, tid: int, event: int, number: int) -> None:
        """Let one thread run on; one in a group stop stays in it."""
        self._stops.pop(tid, None)
        stopped = event == ptrace.PTRACE_EVENT_STOP and number != signal.SIGTRAP
        try:
            self._note_fork(tid, event)
            if stopped:
                ptrace.ptrace(ptrace.PTRACE_LISTEN, tid)
            else:
                ptrace.ptrace(ptrace.PTRACE_CONT, tid, 0, 0 if event else number)
        except OSError:                         # killed meanwhile
            pass

    def _note_fork(self, tid, event):
        if event == follow.PTRACE_EVENT_FORK:
            follow.let_child_go(ptrace.event_message(tid), self._at_fork)

    def next_stop(self):
        """(tid, event, number) of a thread that has stopped, None when none has. The stop stays with the kernel, so
        that a signal is delivered if we die. OSError when nothing is left to trace."""
        found = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT | ptrace.WALL)
        if found is None:
            return None
        if found.si_code != os.CLD_TRAPPED:     # it has ended
            os.waitpid(found.si_pid, ptrace.WALL | os.WNOHANG)
            self._known.discard(found.si_pid)
            if not self._known:
                raise ProcessLookupError
            return None
        if found.si_pid not in self._known and (ptrace.status_of(found.si_pid) or {}).get("Tgid") != str(self.pid):
            follow.let_child_go(found.si_pid, self._at_fork)
            return None
        self._known.add(found.si_pid)
        return found.si_pid, found.si_status >> 8, found.si_status & 0xff

    def halt(self) -> None:
        """Stop all threads again."""
        pending = set(self._known)
        self._began = time.monotonic()
        self._interrupt(pending)
        while pending:
            self._collect(pending)
        for tid, (event, _) in list(self._stops.items()):
            with contextlib.suppress(OSError):
                self._note_fork(tid, event)

    def settle(self, at_signal) -> None:
        """All stand, and there are no breakpoints any more: at_signal(tid, number) for those that were reached, as well
        as for those that had been when we stopped the threads, which are not told of yet."""
        for tid in self.threads:
            pending = {tid} if tid in self.interrupted and _has_trap(tid) else set()
            if pending:
                self.go_on(tid, *self._stops[tid])
            while pending:
                self._collect(pending)
            event, number = self._stops.get(tid, (ptrace.PTRACE_EVENT_STOP, 0))
            if not event:
                self._stops[tid] = event, at_signal(tid, number)


def _has_trap(tid) -> bool:
    """Whether a SIGTRAP waits for a thread."""
    return bool(int((ptrace.status_of(tid) or {}).get("SigPnd", "0"), 16) >> signal.SIGTRAP - 1 & 1)


def _is_breakpoint(tid) -> bool:
    """Whether the SIGTRAP that has stopped a thread is an instruction's, and nobody has sent it."""
    information = (ctypes.c_int32 * 32)()
    ptrace.ptrace(_GETSIGINFO, tid, 0, ctypes.addressof(information))
    return information[2] == _SI_KERNEL


class _Block:
    """One that is not released: its size, and `frames`, outermost first, or yet row and stack to make them of."""
    __slots__ = ("size", "row", "stack", "frames")

    def __init__(self, size: int, row: bytes, stack: bytes):
        self.size, self.row, self.stack, self.frames = size, row, stack, ()


class _Calls:
    """The calls: which blocks of the window are not released. internal: code from where a call is the allocator's."""

    def __init__(self, memory, internal: list[tuple[int, int]]):
        self._memory, self._internal = memory, internal
        self.live: dict[int, _Block] = {}           # by address
        self._known: dict[tuple, tuple] = {}        # frames, each once
        self._raw = 0                               # stacks that came in since they were unwound
        self._begun: dict[int, list[_Call]] = {}    # thread -> calls that have begun; realloc calls malloc
        self.count = 0

    def entered(self, tid: int, name: str, registers: inject.Registers, allocations: bool) -> None:
        """A call begins. Without `allocations`, only what it releases counts."""
        self.count += 1
        if name in agents.RELEASES:
            self.live.pop(registers.rdi, None)
            return
        held = self.live.pop(registers.rdi, None) if name in _REALLOCATES else None
        stack = self._stack(registers.rsp)
        return_address = int.from_bytes(stack[:8], "little")
        row = np.zeros((), agents.SLOT)
        for field in ("rbp", "rbx", "r12", "r13", "r14", "r15"):
            row[field] = getattr(registers, field)
        row["return_address"], row["sp"], row["stack_length"] = return_address, registers.rsp, len(stack)
        self._begun.setdefault(tid, []).append(_Call(
            name, (registers.rdi, registers.rsi, registers.rdx), row.tobytes(), stack, held, allocations))

    def left(self, tid: int, registers: inject.Registers) -> None:
        """It returns."""
        begun = self._begun.get(tid)
        if not begun:
            return
        call = begun.pop()
        size, pointer = self._outcome(call, registers.rax)
        if call.held is not None and not pointer and size:
            self.live[call.arguments[0]] = call.held            # realloc failed
        if pointer and call.counts and not self._is_internal(call):
            self.live[pointer] = _Block(size, call.row, call.stack)
            self._raw += 1
            if self._raw > _MOST_STACKS:
                self._raw = sum(not block.frames for block in self.live.values())
                if self._raw > _MOST_STACKS // 2:
                    self.unwind(Process(self._memory))

    def unwind(self, process: Process) -> None:
        """Have `frames` in the place of copied stacks: of many blocks these would fill the memory."""
        waiting = [block for block in self.live.values() if not block.frames]
        rows = np.frombuffer(b"".join(block.row for block in waiting), agents.SLOT)
        words = np.zeros((len(waiting), sample.STACK_BYTES // 8), np.uint64)
        for k, block in enumerate(waiting):
            words[k, :len(block.stack) // 8] = np.frombuffer(block.stack, np.uint64)
        unwinder = Unwinder(process)
        for block, addresses in zip(waiting, unwinder.unwind(Stacks(rows, words))):
            frames = tuple(unwinder.frames(addresses))
            block.frames, block.row, block.stack = self._known.setdefault(frames, frames), b"", b""
        self._raw = 0

    def _outcome(self, call, result):
        size = call.arguments[_SIZE_ARGUMENT.get(call.name, 0)] * (call.arguments[1] if call.name == "calloc" else 1)
        if call.name == "posix_memalign":
            ok = result & 0xffffffff == 0
            return size, int.from_bytes(self._memory.read(call.arguments[0], 8), "little") if ok else 0
        return size, result

    def _is_internal(self, call):
        address = int.from_bytes(call.stack[:8], "little")
        return any(start <= address < end for start, end in self._internal)

    def _stack(self, sp):
        """Up to STACK_BYTES from the stack pointer on."""
        data = b""
        want = sample.STACK_BYTES
        while want:
            try:
                part = os.pread(self._memory.file, want, sp + len(data))
            except OSError:
                part = b""
            if not part:
                break
            data += part
            want -= len(part)
        return data[:len(data) & ~7]


class EveryCall(session.Session):
    """An exact recording of process `pid`, by the thread that traces it. Raises LiveError."""

    followed = "recorded from its start, and stopped at each call: how much slower that made it is not known"
    if_filtered = ""

    def __init__(self, options: sample.Options, pid: int, kind=Installation):
        super().__init__(pid)
        self._options = options
        target = Target(pid)
        if target.blocks_trap():
            raise LiveError(f"process {pid} has a thread that blocks SIGTRAP: a breakpoint would be its end if we died; "
                            "sampled mode needs none")
        target.check_calls((seccomp.SIGRETURN,), "nothing can be recorded in it")
        self._hooks, self._image = sample.hooks_of(target, options.pools)
        self._breakpoints = Breakpoints(self._hooks)
        self.installation = kind(target, self._breakpoints)
        self._allocations = True

    def prepare(self) -> None:
        """All of `install` but the last step, `halted(patch)`."""
        installation = self.installation
        installation.prepare(self._hooks, self._image, 0, lambda: _settings(installation))
        installation.announce(action=installation.at("old_action"))
        installation.halted(lambda halted: inject.make_calls(halted, [
            (inject.SIGACTION, signal.SIGTRAP, installation.at("new_action"), installation.at("old_action"), 8)]))
        internal = [(installation.base, installation.base + _PAGE)]
        internal += [(hook.address, hook.address + len(hook.body)) for hook in self._hooks
                     if hook.name not in agents.RELEASES]
        self._stops = self._breakpoints.stops(installation.base)
        self.calls = _Calls(installation.memory, internal)

    def install(self) -> None:
        self.prepare()
        self.installation.halted(self.installation.patch)

    def at_signal(self, tid: int, number: int) -> int:
        if number != signal.SIGTRAP or not _is_breakpoint(tid):
            return number
        registers = inject.registers_of(tid)
        name, behind = self._stops.get(registers.rip, ("", False))
        if not name:
            return number
        if behind:
            self.calls.left(tid, registers)
        else:
            self.calls.entered(tid, name, registers, self._allocations)
        return 0

    def disarm(self) -> None:
        """Take the breakpoints out; the functions still lead through the page."""
        self._disarm(self.installation.memory)

    def _disarm(self, memory):
        for stop in self._stops:
            memory.write(stop - 1, b"\x90")         # nop

    def at_fork(self, child: int) -> None:
        """Nobody is there for its breakpoints, which would be its end should it block SIGTRAP or reset its handler."""
        with contextlib.suppress(OSError), contextlib.closing(tracee.Memory(child)) as memory:
            if not guard.share_memory(self.pid, child):
                self._disarm(memory)

    def collect(self) -> None:
        self.disarm()
        super().collect()

    def look(self) -> str:
        self.installation.read("state")                 # OSError after an exec
        return f", {self.calls.count:,} calls"

    def watch_frees(self) -> None:
        self._allocations = False

    def recording(self, course: Course) -> Recording:
        self.calls.unwind(self.process)
        what = "Nginx Pool" if self._options.pools else "Memory"
        recording = Recording(
            "sample", self.pid, f"{what} Leak Flame Graph for {self.name} ({course.lasted:.3g} seconds, every call)",
            f"Allocated in {course.lasted:.3g} s and not released {course.held}.",
            noun="pools" if self._options.pools else "blocks")
        for block in self.calls.live.values():
            recording.add(block.frames, block.size)
        recording.facts = [f"pid {self.pid}, exact: {self.calls.count:,} calls", course.manner, course.outcome]
        recording.numbers = {"mode": "exact", "seconds": round(course.lasted, 3), "calls": self.calls.count,
                             **course.facts}
        return recording


def record(make: Callable[..., EveryCall], pid: int, timing: Timing, notes: Notes) -> Recording:
    """Record every call of process `pid`; like `session.record`."""
    session = make(pid, Installation)
    installation = session.installation
    before = _user_seconds_a_second(pid)
    try:
        session.prepare()
        lasted, user = _trace(session, timing, notes)
        session.collect()
    except OSError as error:
        raise installation.failure(error) from None
    finally:
        removal = installation.remove()
    notes.progress("unwinding")
    return session.recording(Course(lasted, held(timing), _slowdown(before, user / lasted), removal_line(removal), {
        "user_before": round(before, 4), "user_during": round(user / lasted, 4)}))


def _settings(installation) -> dict[str, bytes]:
    handler, restorer = installation.base, installation.base + _RESTORER_AT
    return {"old_action": _NOT_SAVED, "new_action": struct.pack("<4Q", handler, _FLAGS, restorer, 0)}


def _trace(session, timing, notes):
    """Follow the process for the window and the grace: (seconds of the window, user seconds it ran in it)."""
    pid, installation = session.pid, session.installation
    for _ in range(200):
        tracer = _Tracer(pid, session.at_fork)
        try:
            with tracer:
                installation.patch(tracer)
                began, user = time.monotonic(), _user_seconds(pid)
                tracer.resume()
                end = _follow(tracer, session, "recording", began + timing.seconds, notes.progress, lambda: notes.note(
                    f"recording process {pid} for {timing.seconds:g} s, every call"))
                user = _user_seconds(pid) - user
                session.watch_frees()
                _follow(tracer, session, "watching frees", time.monotonic() + timing.grace, notes.progress)
                tracer.halt()
                session.disarm()
                tracer.settle(session.at_signal)
                return end - began, user
        except inject.Unsafe:
            continue
    raise LiveError(f"process {pid} cannot be changed: a thread stays within a function to hook; try again")


def _follow(tracer, session, what, end, progress, begin=lambda: None) -> float:
    """Call `begin`, and handle stops until `end`; returns when it was over. Ctrl-C ends it early."""
    looked = idle_since = 0.0
    try:
        begin()
        while True:
            now = time.monotonic()
            if now >= end:
                return now
            if now - looked >= session.look_every:
                progress(what + session.look())
                looked = now
            stop = tracer.next_stop()
            if stop is None:
                idle_since = idle_since or now
                if now - idle_since > 0.002:
                    time.sleep(0.0005)
                continue
            idle_since = 0.0
            tid, event, number = stop
            tracer.go_on(tid, event, number if event else session.at_signal(tid, number))
    except KeyboardInterrupt:
        return time.monotonic()


def _user_seconds(pid: int) -> float:
    """The time that a process has run in user mode."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rsplit(b")", 1)[1].split()[11]) / os.sysconf("SC_CLK_TCK")


def _user_seconds_a_second(pid: int, seconds: float = 0.5) -> float:
    try:
        before, began = _user_seconds(pid), time.monotonic()
        time.sleep(seconds)
        return (_user_seconds(pid) - before) / (time.monotonic() - began)
    except OSError:
        raise LiveError(f"process {pid} has ended") from None


def _slowdown(before, during) -> str:
    """From the seconds in user mode that a second had."""
    if before < 0.02:
        slowdown = "the process hardly ran before, so how much it was slowed down is not known"
    elif during > 0:
        slowdown = f"the process ran {max(1.0, before / during):,.1f} times slower"
    else:
        slowdown = "the process stood nearly still"
    return f"{slowdown}: {during:.3f} s in user mode a second, {before:.3f} before"
