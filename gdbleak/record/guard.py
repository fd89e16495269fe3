"""The guard: a process of its own that takes out of a target what a recording put in.

It is told what is about to be changed before that is changed. It acts when it is asked to, and also when the tool
that started it dies, at whatever moment: `remove` begins by looking at what is there. Standard library only.

The tool and the guard talk in lines of JSON over the guard's standard input and output.
"""
from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..target import ptrace
from ..target.live import without
from ..target.ptrace import LiveError
from . import inject, tracee

PAGE = 4096
_MARK = b"gdbleak recording "
_WAIT = 20.0            # seconds for an answer of the guard
_UNMAP_WAIT = 3.0       # seconds after which the tool no longer waits for the agent's pages to be unmapped
_LONG_PAUSE, _MOST_WAIT = 2.0, 3600.0   # seconds between two later tries, and after which they stay in the target
_KCMP, _KCMP_VM = 312, 1
_NOW = 0xa0             # from where an action was kept on: room for what it is now
_TEXT_WAIT = 20.0       # seconds after which the tool no longer waits for a target that something else holds


@dataclass
class Plan:
    """What a recording changes in the target.

    nonce: whose it is, in hex; regions: (start, end) of the mappings it makes, each marked by its first bytes; code:
    (start, end) of what threads run in, a page behind the beginning of the first; patches: (address, bytes before,
    bytes after) in hex; state: address in the agent; action: address in the target where SIGTRAP's action before is
    kept, its handler all ones until it was changed; guard: the guard's process id.
    """

    nonce: str = ""
    regions: list = field(default_factory=list)
    code: list = field(default_factory=list)
    patches: list = field(default_factory=list)
    state: int = 0
    action: int = 0
    guard: int = 0

    @property
    def mark(self) -> bytes:
        """What each region begins with."""
        return _MARK + self.nonce.encode() + b" "

    def page(self) -> bytes:
        """The first page of the first region, which holds the plan itself: for whoever comes after us all."""
        return (self.mark + json.dumps(asdict(self)).encode()).ljust(PAGE, b"\0")


@dataclass
class Removal:
    """How it went. gone: the process has ended or runs another program; restored: its text is as it was; left: bytes
    of mappings that stay in it, because a thread is within or may return there; waits: what is in the way; stop_ms."""

    gone: bool = False
    restored: bool = False
    left: int = 0
    waits: str = ""
    stop_ms: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether nothing of ours is in the process any more."""
        return self.gone or self.restored and not self.left


def remove(memory: tracee.Memory, plan: Plan, patience: float = float("inf"),
           unmap_wait: float = _UNMAP_WAIT) -> Removal:
    """Restore the text, then unmap. Waits for `patience` seconds for what is in the way of the text, for `unmap_wait`
    for a thread to leave the agent."""
    if not plan.regions:
        return Removal(restored=True)
    result = Removal()
    began, pause = time.monotonic(), 0.001
    while True:
        if not memory.is_alive():
            return Removal(gone=True)
        try:
            if not (result.restored and _is_stopped(memory.pid)):
                _attempt(memory, plan, result)
                return result
        except (inject.Unsafe, LiveError, OSError) as error:
            result.waits = str(error)
        waited = time.monotonic() - began
        if waited > (unmap_wait if result.restored else patience):
            return result
        pause = min(pause * 1.2, 0.05 if waited < _UNMAP_WAIT else _LONG_PAUSE)
        time.sleep(pause)


def _is_stopped(pid) -> bool:
    """Whether a process is stopped by a signal or a tracer, so that its threads stay where they are."""
    return (ptrace.status_of(pid) or {}).get("State", "?")[0] in "Tt"


def _attempt(memory, plan, result):
    """One stop. Raises Unsafe when something is still to be done."""
    halted = ptrace.Stopped(memory.pid)
    try:
        with ptrace.hurried(), halted:
            if plan.state and plan.patches:
                with contextlib.suppress(OSError):
                    memory.write(plan.state, bytes(4))
            _restore_text(memory, plan)
            maps = tracee.mappings_of(memory.pid)
            inject.remove_remains(halted, maps)
            result.restored = True
            _unmap(halted, maps, memory, plan, result)
            result.waits = ""
    finally:
        result.stop_ms = max(result.stop_ms, halted.milliseconds or 0.0)


def _restore_text(memory, plan):
    """Raises Unsafe when something is there that is not ours: it may still lead to the agent."""
    foreign = ""
    for address, before, after in plan.patches:
        before, after = bytes.fromhex(before), bytes.fromhex(after)
        now = memory.read(address, len(before))
        if now == after:
            memory.write(address, before)
        elif now != before:
            foreign = f"the text at {address:#x} was changed by something else meanwhile"
    if foreign:
        raise inject.Unsafe(foreign)


def _unmap(halted, maps, memory, plan, result):
    mapped = _mapped(maps, memory, plan)
    result.left = sum(end - start for start, end in mapped)
    calls = [(inject.MUNMAP, start, end - start) for start, end in mapped]
    if not calls:
        return
    if inject.refer_to(halted, maps, [tuple(plan.code)]):
        raise inject.Unsafe("a thread is within the agent")
    if plan.action and mapped and memory.read(plan.action, 8) != b"\xff" * 8:
        inject.make_calls(halted, [(inject.SIGACTION, signal.SIGTRAP, 0, plan.action + _NOW, 8)])
        handler = int.from_bytes(memory.read(plan.action + _NOW, 8), "little")
        if not handler or plan.code[0] <= handler < plan.code[1]:       # not another, which the program has set since
            calls.insert(0, (inject.SIGACTION, signal.SIGTRAP, plan.action, 0, 8))
    inject.make_calls(halted, calls)
    result.left = sum(end - start for start, end in _mapped(tracee.mappings_of(memory.pid), memory, plan))
    if result.left:
        raise inject.Unsafe("the target could not unmap the agent")


def _mapped(maps, memory, plan) -> list:
    """Those of the plan's regions that are mapped, and ours, the last first. Once a region is marked, the kernel may
    have joined it with its neighbours."""
    anonymous = [(m.start, m.end) for m in maps if not m.inode]
    found = []
    for start, end in reversed(plan.regions):
        inside = [(low, high) for low, high in anonymous if start <= low and high <= end]
        if not without([(start, end)], anonymous):
            head = memory.read(start, len(plan.mark))
            if head == plan.mark or not any(head) and not without([(start, end)], inside):
                found.append((start, end))
    return found


def found_in(memory: tracee.Memory) -> Plan | None:
    """The plan of a recording that is in the process, running or left there; None when there is none."""
    for code in tracee.mappings_of(memory.pid):
        if code.perms == "r-xp" and not code.inode:
            with contextlib.suppress(OSError, ValueError, TypeError):
                page = memory.read(code.start - PAGE, PAGE)
                if page.startswith(_MARK):
                    return Plan(**json.loads(page[len(_MARK):].split(b" ", 1)[1].rstrip(b"\0")))
    return None


def clean(memory: tracee.Memory) -> None:
    """Take out what a recording left in the process whose tool and guard were killed. Raises LiveError while one is
    going on; OSError."""
    plan = found_in(memory)
    if plan is not None and is_guard(plan.guard):
        raise LiveError(f"process {memory.pid} is being recorded already, under the guard of process {plan.guard}: "
                        "wait until that is over")
    if plan is not None:
        remove(memory, plan, patience=5.0)
    for _ in range(100):
        if not inject.remains(memory.tid, tracee.mappings_of(memory.pid)):
            return
        with contextlib.suppress(inject.Unsafe):
            inject.clean(ptrace.Stopped(memory.pid))
        time.sleep(0.01)


def is_guard(pid: int) -> bool:
    """Whether that process is a guard."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return __name__.encode() in file.read()
    except OSError:
        return False


def remove_from_children(plan: Plan, parent: int, unmap_wait: float) -> bool:
    """Take the agent out of processes that the target forked meanwhile; whether that is complete."""
    is_complete = True
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in (parent, os.getpid()) or share_memory(parent, int(name)):
            continue
        try:
            file = os.open(f"/proc/{name}/mem", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        memory = tracee.Memory(int(name), file)
        try:
            if memory.read(plan.regions[0][0], len(plan.mark)) == plan.mark:
                is_complete &= remove(memory, plan, 1.0, unmap_wait).is_complete
        except OSError:
            pass
        finally:
            memory.close()
    return is_complete


def share_memory(one: int, other: int) -> bool:
    """Whether two processes do, as after a vfork."""
    return ptrace.libc.syscall(_KCMP, one, other, _KCMP_VM, 0, 0) == 0


class Guard:
    """The tool's end: starts the guard of a target, tells it what will be changed, has it remove all."""

    COMMAND = (sys.executable, "-m", __name__)

    def __init__(self, memory: tracee.Memory):
        self._memory = memory
        self.plan = Plan()
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        self._process = subprocess.Popen(
            [*self.COMMAND, str(memory.pid), str(memory.file)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[memory.file], start_new_session=True,
            env=environment, cwd="/")
        self._answer()
        self.plan.guard = self._process.pid

    def announce(self, **changes) -> None:
        """Extend the plan; returns when the guard knows it. OSError when the guard is dead."""
        for name, value in changes.items():
            setattr(self.plan, name, value)
        self._ask(asdict(self.plan))

    def remove(self) -> Removal:
        """Have all taken out; by ourselves if the guard is dead."""
        try:
            return Removal(**self._ask("remove", _TEXT_WAIT + 2 * _UNMAP_WAIT + _WAIT))
        except (OSError, ValueError, TypeError):
            try:
                self._process.wait(1)
            except subprocess.TimeoutExpired:
                return Removal(waits="the guard process takes long")
            return remove(self._memory, self.plan, _TEXT_WAIT)
        finally:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.stdout.close()

    def _ask(self, what, wait=_WAIT):
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(wait)

    def _answer(self, wait=_WAIT):
        import select
        if not select.select([self._process.stdout], [], [], wait)[0]:
            raise OSError("the guard process does not answer")
        line = self._process.stdout.readline()
        if not line:
            raise OSError("the guard process has ended")
        return json.loads(line)


def main(arguments: list[str]) -> None:
    """The guard's life: PID of the target, descriptor of its memory."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)
    memory = tracee.Memory(int(arguments[0]), int(arguments[1]))
    plan = Plan()
    _say("ready")
    for line in sys.stdin.buffer:
        if not line.endswith(b"\n"):    # it died in the middle of it: what it announced, it did not do
            break
        message = json.loads(line)
        if message == "remove":
            _say(asdict(remove(memory, plan, _TEXT_WAIT)))
            break
        plan = Plan(**message)
        _say("known")
    end, unmap_wait = time.monotonic() + _MOST_WAIT, _UNMAP_WAIT
    while plan.regions:
        results = (remove(memory, plan, unmap_wait=unmap_wait).is_complete,
                   remove_from_children(plan, memory.pid, unmap_wait))
        if all(results) or time.monotonic() > end:
            break
        unmap_wait = 0.0
        time.sleep(_LONG_PAUSE)


def _say(what) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
