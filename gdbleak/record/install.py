"""Puts the agent into a process: finds what to hook and a place nearby, maps, writes, patches.

The guard knows of each change before it is made. After the process is let go no tracer is attached.
"""
from __future__ import annotations

import errno
import os
import signal
import time
from typing import NamedTuple

from ..target import ptrace
from ..target.ptrace import LiveError
from ..target.room import field
from . import guard, inject, relocate, seccomp, tracee
from .agent import RESTRICTING, ROOM
from .guard import PAGE
from .modules import Image, Process

_REACH = (1 << 31) - (1 << 26)
_HOLE = PAGE            # kept free around what is mapped, so that the kernel does not join it with something at once
_HEAP_ROOM = 1 << 30    # kept free above the heap that grows by brk
_LOOKS = 6              # at the signals that are blocked, some milliseconds apart
_LESS = "sample --exact needs less"
_TRIES, _PAUSE = 200, 0.005      # seconds


class Hook(NamedTuple):
    """A function of the target that begins with a jump. `name`: the agent's hook; `size`: bytes displaced."""

    name: str
    address: int
    body: bytes


class Target:
    """A process that may be recorded: checked, its memory open, its images known. Raises LiveError."""

    def __init__(self, pid: int):
        tid = ptrace.living_thread(pid)
        try:
            self.memory = tracee.Memory(pid, tid=tid)
        except OSError:
            raise ptrace.no_permission(pid) from None
        self.pid = pid
        try:
            status = [ptrace.status_of(thread) or {} for thread in ptrace.threads_of(pid)]
            with open(f"/proc/{tid}/exe", "rb") as file:
                machine = file.read(20)[18:20]
            if machine != b"\x3e\0" or os.uname().machine != "x86_64":
                raise LiveError(f"process {pid} is no x86-64 program: recording is for x86-64 only")
            if any(fields.get("State", "?")[0] == "T" for fields in status):
                raise LiveError(f"process {pid} is stopped: continue it first (kill -CONT {pid})")
            self._filters = _filters(status)
            guard.clean(self.memory)
            self.process = Process(self.memory)
        except OSError:
            raise LiveError(f"process {pid} has ended") from None

    def blocks_trap(self) -> bool:
        """Whether a thread has SIGTRAP blocked, and not only for a moment, as around a fork."""
        blocking = set(ptrace.threads_of(self.pid))
        for _ in range(_LOOKS):
            blocking = {tid for tid in blocking
                        if int((ptrace.status_of(tid) or {}).get("SigBlk", "0"), 16) >> signal.SIGTRAP - 1 & 1}
            if not blocking:
                return False
            time.sleep(2 * _PAUSE)
        return True

    def check_calls(self, calls: tuple[int, ...], otherwise: str) -> None:
        """Raises LiveError when a seccomp filter forbids what we need: `calls` are made again and again by what we
        install. otherwise: what mends that."""
        if self._filters != _UNFILTERED:
            seccomp.check(self.pid, calls, otherwise)

    def check_filters(self, threads) -> None:
        """Raises LiveError when a filter was set up since the process was looked at. threads: all of them, stopped."""
        if not _filters(ptrace.status_of(thread) or {} for thread in threads) <= self._filters:
            raise LiveError(f"process {self.pid} has just restricted itself by seccomp: try again")

    def restricting(self) -> list[Hook]:
        """The functions by which the program may put itself under seccomp."""
        return [hook for hook in map(self.function, RESTRICTING) if hook]

    def function(self, name: str, image: Image | None = None) -> Hook | None:
        """The function of that name that the program uses, or that an image defines; None when there is none."""
        image = image or self.process.definer(name)
        row = image and image.symbols and image.symbols.row(name)
        if row is None or row["info"] & 15 == 10 or not row["size"]:   # an IFUNC's symbol is its resolver
            return None
        address = image.symbols.bias + int(row["value"])
        return Hook(name, address, self.memory.read(address, int(row["size"])))


_UNFILTERED = {("0", "0")}


def _filters(statuses) -> set[tuple[str, str]]:
    """(mode, number of filters) of seccomp, of each thread."""
    return {(fields.get("Seccomp", "0"), fields.get("Seccomp_filters", "0")) for fields in statuses}


def free_place(process: Process, size: int, near: Image | None) -> int:
    """Where `size` bytes fit into the address space, every byte within reach of the image when one is named.

    Raises LiveError.
    """
    low, high = 1 << 20, (1 << 47) - (1 << 21)
    if near is not None:
        low, high = max(low, near.end - _REACH), min(high, near.start + _REACH)
    places, end, below = [], 1 << 16, None
    for mapping in [*tracee.mappings_of(process.pid), None]:
        start = mapping.start if mapping else high
        if not (mapping and mapping.path.startswith("[stack")):
            first = max(end + (_HEAP_ROOM if below and below.path == "[heap]" else _HOLE), low)
            last = (min(start - _HOLE, high) - size) & ~(PAGE - 1)
            if last >= first:
                places.append(last)
        if mapping:
            end, below = max(end, mapping.end), mapping
    if not places:
        raise LiveError("there is no room in the target's address space" + (f" near {near.name}" if near else ""))
    centre = near.start if near else 1 << 47
    return min(places, key=lambda place: abs(place - centre))


def _refusal(pid: int, error: int) -> str:
    """Why the kernel does not map the agent into a process, and what mends it."""
    if error == errno.ENOMEM:
        return f"process {pid} gets no memory for the agent: a limit is reached (its own, or of locked memory); {_LESS}"
    if error in (errno.EPERM, errno.EACCES):
        return (f"a security policy keeps process {pid} from memory that was written and is then executed (MDWE, SELinux): "
                "nothing can be recorded in it, but `gdbleak snapshot` works")
    return f"the kernel does not map the agent into process {pid}: {os.strerror(error) if error > 0 else 'elsewhere'}"


class Installation:
    """An agent (agent.Agent, or exact.Breakpoints) in a target, between `install` and `remove`."""

    def __init__(self, target: Target, agent):
        self.target = target
        self.memory = target.memory
        self.agent = agent
        self.guard = guard.Guard(target.memory)
        self.base = self.room = 0
        self.stop_ms = 0.0
        self.stops = 0

    def install(self, hooks: list[Hook], near: Image, room: int, settings) -> None:
        """Map the agent near an image, with `room` more bytes elsewhere, and have the hooks lead to it.

        `settings`: called when the places are known, returns initial values of the agent's variables. Raises LiveError;
        then `remove` is still to be called.
        """
        self.prepare(hooks, near, room, settings)
        self.halted(self.patch)

    def prepare(self, hooks: list[Hook], near: Image, room: int, settings) -> None:
        """All of `install` but the last step, `halted(patch)`. Raises LiveError."""
        try:
            self._map(near, room)
            self._patches = self._fill(hooks, settings)
            self.announce(patches=[(at, before.hex(), after.hex()) for at, before, after, _ in self._patches])
        except OSError as error:
            raise self.failure(error) from None
        except relocate.Immovable as error:
            raise LiveError(str(error)) from None

    def announce(self, **changes) -> None:
        """Tell the guard, and leave it written in the target. OSError."""
        self.guard.announce(**changes)
        self.memory.write(self.base - PAGE, self.guard.plan.page())

    def failure(self, error: OSError) -> LiveError:
        """What an error in reading or writing the target means."""
        if not self.memory.is_alive():
            return LiveError(f"process {self.target.pid} has ended, or runs another program now")
        return LiveError(f"process {self.target.pid}: {error.strerror or error}")

    def halted(self, action):
        """Do `action(halted)` in a stop of the whole process, again while it is Unsafe."""
        for attempt in range(_TRIES):
            halted = ptrace.Stopped(self.memory.pid)
            try:
                with ptrace.hurried(), halted:
                    if not self.memory.is_alive():      # an exec was faster; from now on there can be none
                        raise ProcessLookupError
                    return action(halted)
            except inject.Unsafe as error:
                problem = error
                time.sleep(_PAUSE)
            except OSError as error:
                raise self.failure(error) from None
            finally:
                self.stops += 1
                self.stop_ms = max(self.stop_ms, halted.milliseconds or 0.0)
        raise LiveError(f"process {self.target.pid} cannot be changed: {problem}; try again")

    def _map(self, near, room):
        def action(halted):
            size = PAGE + self.agent.size       # the first page is for the plan
            start = free_place(self.target.process, size, near)
            self.base = start + PAGE
            regions = [(start, start + size)]
            calls = [(inject.MMAP, start, size, 3, 0x100022, -1, 0),
                     (inject.MPROTECT, self.base, self.agent.data, 5)]
            results = [start, 0]
            if room:
                elsewhere = self._elsewhere(*regions[0], PAGE + room)
                self.room = elsewhere + PAGE
                regions.append((elsewhere, self.room + room))
                calls.append((inject.MMAP, elsewhere, PAGE + room, 3, 0x104022, -1, 0))
                results.append(elsewhere)
            self._check_limits(sum(end - first for first, end in regions))
            self.guard.announce(nonce=os.urandom(16).hex(), regions=regions,
                                code=[self.base, self.base + self.agent.data], state=self.at("state"))
            made = inject.make_calls(halted, calls)
            if made != results:
                raise LiveError(_refusal(self.target.pid, -made[-1]))
            for (start, _), content in zip(regions, [self.guard.plan.page(), self.guard.plan.mark]):
                self.memory.write(start, content)

        self.halted(action)

    def _check_limits(self, size):
        """Raises LiveError when the process would have less left of a limit on its memory than it has to give us."""
        with open(f"/proc/{self.memory.tid}/limits", encoding="ascii") as file:
            limits = {line[:26].strip(): line[26:].split()[0] for line in file}
        for limit, used, option in (("Max address space", "VmSize", "as"), ("Max data size", "VmData", "data")):
            if limits.get(limit, "unlimited") != "unlimited":
                left = int(limits[limit]) - field(f"/proc/{self.memory.tid}/status", used)
                if left < 2 * size:
                    raise LiveError(f"process {self.target.pid} may map {max(left, 0) / 1e6:.0f} MB more, and "
                                    f"{2 * size / 1e6:.0f} MB should be left to it and us: {_LESS}, or raise its limit "
                                    f"(prlimit --pid {self.target.pid} --{option}=unlimited)")

    def _elsewhere(self, start, end, size):
        """A place for `size` bytes that touches not [start, end), which is not mapped yet."""
        place = free_place(self.target.process, size + end - start + 4 * _HOLE, None)
        if place < end + _HOLE and start < place + size + _HOLE:
            place = start - size - 2 * _HOLE
        return place

    def _fill(self, hooks, settings):
        """Write the agent's code and data; returns the patches (address, before, after, displaced size). A function
        with several names leads to the hook of the first."""
        code, patches = bytearray(self.agent.code), {}
        for hook in hooks:
            at = self.agent.room(hook.name)
            try:
                displaced = relocate.displace(hook.body, hook.address, self.base + at)
                after = relocate.jump(hook.address, self.base + self.agent.entry(hook.name))
                if len(displaced.code) > ROOM:
                    raise relocate.Immovable(f"the first instructions of {hook.name} take too much room")
            except relocate.Immovable:
                if hook.name in RESTRICTING:
                    continue
                raise
            code[at:at + len(displaced.code)] = displaced.code
            patches.setdefault(hook.address, (hook.address, hook.body[:len(after)], after, displaced.size))
        self.memory.write(self.base + self.agent.data, self.agent.initial_data(settings()))
        self.memory.write(self.base, bytes(code))
        return list(patches.values())

    def patch(self, halted: ptrace.Stopped) -> None:
        """Have the hooked functions lead to the agent. Raises Unsafe, LiveError, OSError."""
        self.target.check_filters(halted.threads)
        for address, before, _, _ in self._patches:
            if self.memory.read(address, len(before)) != before:
                raise LiveError(f"the text at {address:#x} is being changed by something else")
        inside = [(address + 1, address + size) for address, _, _, size in self._patches]
        if inject.refer_to(halted, tracee.mappings_of(halted.pid), inside):
            raise inject.Unsafe("a thread stays within the first instructions of a function to hook")
        for address, _, after, _ in self._patches:
            self.memory.write(address, after)

    def at(self, name: str) -> int:
        """The address of a variable of the agent."""
        return self.base + self.agent.offset(name)

    def read(self, name: str, size: int = 8) -> int:
        """A variable of the agent."""
        return int.from_bytes(self.memory.read(self.at(name), size), "little")

    def write(self, name: str, value: int, size: int = 8) -> None:
        """Set a variable of the agent."""
        self.memory.write(self.at(name), value.to_bytes(size, "little"))

    def remove(self):
        """Have the guard take all out: a guard.Removal."""
        result = self.guard.remove()
        self.stop_ms = max(self.stop_ms, result.stop_ms)
        self.memory.close()
        return result
