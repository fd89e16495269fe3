"""A live process that is changed: its threads halted, system calls made in it, its text and memory written.

Standard library only, x86-64 Linux. Every step leaves the process able to go on by itself, so that we may be killed
between any two:

- text changes only while all threads stand still, by one write within a page;
- system calls are made by a stub in the slack behind a program's text. Everything it needs, and everything to put
  back, lies on the thread's own stack: once it runs it does the calls and returns to where the thread was, with or
  without us. It is written and removed while the process stands still, and never single-stepped (the trap flag would
  outlive us).
"""
from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
import time

from ..target import ptrace
from ..target.live import mappings
from ..target.ptrace import ptrace as request

GETREGS, _SETREGS, _SETOPTIONS, _GET_RSEQ = 12, 13, 0x4200, 0x420F
_O_SUSPEND_SECCOMP = 1 << 21
_REGISTERS = ("r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base "
              "ds es fs gs").split()
_RED_ZONE = 128
_ALL = (1 << 64) - 1
#: What the kernel leaves in rax when an interrupted call is to be made again: -ERESTARTSYS, NOINTR, NOHAND, and with
#: restart_syscall instead of itself, -ERESTART_RESTARTBLOCK.
_RESTARTS = {_ALL - 511, _ALL - 512, _ALL - 513}
_RESTART_BLOCK, _RESTART_SYSCALL = _ALL - 515, 219
MMAP, MPROTECT, MUNMAP, SIGACTION = 9, 10, 11, 13

# 0: pop rax, rdi, rsi, rdx, r10, r8, r9; syscall; jump to 1 on an error; dec ebx; jnz 0;
# 1: mov rsp, rbp; pop rbp, rbx, rdi, rsi, rdx, r10, r8, r9, rax, rcx, r11; popfq; ret 128
_STUB = bytes.fromhex("585f5e5a415a415841590f05483d01f0ffff7304ffcb"
                      "75e84889ec5d5b5f5e5a415a415841595859415b9dc28000")
_SEGMENTS = 0x002b000000000033      # cs, gs, fs, ss of a 64-bit program, two words behind rip in a signal frame
_LONGEST_RUN = 0.5      # seconds that a thread gets to make system calls, at last
_DEEPEST = 1 << 19      # bytes of a stack that are looked at
_CAVE = 64              # bytes that the stub may need


class Unsafe(Exception):
    """It cannot be done at this moment without risk for the process; later it may."""


class Registers(ctypes.Structure):
    """user_regs_struct."""

    _fields_ = [(name, ctypes.c_uint64) for name in _REGISTERS]


class Memory:
    """Reads and writes the memory of one process image: after an exec it fails rather than reach the new program.

    tid: a living thread, to read /proc by: the main one may have ended before the others."""

    def __init__(self, pid: int, file: int | None = None, tid: int | None = None):
        self.pid = pid
        self.tid = tid or pid
        self.file = os.open(f"/proc/{self.tid}/mem", os.O_RDWR | os.O_CLOEXEC) if file is None else file

    def read(self, address: int, size: int) -> bytes:
        """`size` bytes. OSError when they are not there."""
        data = os.pread(self.file, size, address)
        if len(data) != size:
            raise OSError(errno.EIO, "memory of the process is gone")
        return data

    def write(self, address: int, data: bytes) -> None:
        """OSError when it cannot be written."""
        if os.pwrite(self.file, data, address) != len(data):
            raise OSError(errno.EIO, "memory of the process is gone")

    def is_alive(self) -> bool:
        """Whether the image still exists: false after its end and after an exec."""
        try:
            mapped = mappings_of(self.pid)
        except OSError:
            return False
        for mapping in mapped:
            if "r" in mapping.perms and not mapping.path.startswith("[v"):
                try:
                    return len(os.pread(self.file, 1, mapping.start)) == 1
                except OSError:
                    return False
        return False

    def close(self) -> None:
        os.close(self.file)


class Halted(ptrace.Stopped):
    """All threads of a process, stopped, as a context: registers can be changed, one thread can be run alone."""

    def __init__(self, memory: Memory, patience: float | None = None):
        super().__init__(memory.pid, patience)
        self._memory = memory

    @property
    def in_group_stop(self) -> bool:
        """Whether the process was stopped before, by SIGSTOP or a terminal: then no thread can be run."""
        return any(event == ptrace.PTRACE_EVENT_STOP and number != signal.SIGTRAP
                   for event, number in self._stops.values())

    def registers(self, tid: int) -> Registers:
        """A stopped thread's registers."""
        registers = Registers()
        request(GETREGS, tid, 0, ctypes.addressof(registers))
        return registers

    def run(self, tid: int, registers: Registers, start: int, end: int) -> None:
        """Let the thread run from `registers` until it has left [start, end), in a signal handler as well."""
        request(_SETREGS, tid, 0, ctypes.addressof(registers))
        pause = 0.00005
        while pause < _LONGEST_RUN:
            event, number = self._stops.pop(tid)
            request(ptrace.PTRACE_CONT, tid, 0, 0 if event else number)
            time.sleep(pause)               # interrupted before its turn came it would get nowhere
            pause *= 1.3
            self._interrupt([tid])
            pending = {tid}
            while pending:
                self._collect(pending)
            if tid not in self._stops:          # it has ended
                return
            if not self._refers(tid, mappings_of(self.pid), [(start, end)], returns=False):
                return
        raise Unsafe(f"thread {tid} does not get on")

    def without_seccomp(self, tid: int) -> None:
        """Suspend the thread's seccomp filter while it is traced. OSError when that is not allowed."""
        request(_SETOPTIONS, tid, 0, ptrace.PTRACE_O_TRACECLONE | _O_SUSPEND_SECCOMP)

    def in_critical_section(self, tid: int) -> bool:
        """Whether the thread is within a restartable sequence, which must not be left and entered again."""
        configuration = (ctypes.c_uint64 * 3)()
        try:
            request(_GET_RSEQ, tid, 24, ctypes.addressof(configuration))
        except OSError:
            return False
        if not configuration[0]:
            return False
        try:
            with open(f"/proc/{tid}/mem", "rb", 0) as memory:
                memory.seek(configuration[0] + 8)
                return memory.read(8) != bytes(8)
        except OSError:
            return True

    def refer_to(self, ranges: list[tuple[int, int]], returns: bool = False) -> bool:
        """Whether a thread is within one of the ranges of code, now or once a signal handler returns.

        `returns`: also when a word on its stack leads there, be it a return address or a stale one.
        """
        maps = mappings_of(self.pid)
        return any(self._refers(tid, maps, ranges, returns) for tid in self.threads)

    def _refers(self, tid, maps, ranges, returns) -> bool:
        registers = self.registers(tid)
        words = []
        stack = next((m for m in maps if m.start <= registers.rsp < m.end), None)
        if stack is not None:
            size = min(stack.end - registers.rsp, _DEEPEST) & ~7
            with contextlib.suppress(OSError):
                words = memoryview(self._memory.read(registers.rsp, size)).cast("Q").tolist()
        places = [word for word, later in zip(words, words[2:] + [0, 0]) if returns or later == _SEGMENTS]
        return any(start <= word < end for word in [registers.rip, *places] for start, end in ranges)


def mappings_of(pid: int) -> list:
    """The process's mappings, also when its main thread has ended before the others. OSError when it is gone."""
    found = mappings(pid)
    for tid in ptrace.threads_of(pid) if not found else ():
        with contextlib.suppress(OSError):
            found = found or mappings(tid)
    return found


def find_cave(memory: Memory) -> tuple[int, bytes] | None:
    """(address, bytes now) of slack behind a program's text, where nothing is ever executed; None: there is none."""
    return next(((address, now) for address, now in _caves(memory) if not any(now)), None)


def remove_stubs(memory: Memory) -> None:
    """Take a stub out whose maker was killed just before it could. Raises Unsafe, LiveError, OSError."""
    for address, now in list(_caves(memory)):
        if now == _STUB.ljust(_CAVE, b"\0"):
            with Halted(memory) as halted:
                if halted.refer_to([(address, address + _CAVE)]):
                    raise Unsafe("a thread is making the system calls that were put into it")
                memory.write(address, bytes(_CAVE))


def _caves(memory):
    """(address, bytes now) of the slack behind each program's text."""
    firsts = {}
    maps = mappings_of(memory.pid)
    for mapping in maps:
        if mapping.inode and not mapping.offset:
            firsts.setdefault(mapping.path, mapping.start)
    for mapping in maps:
        if mapping.perms == "r-xp" and mapping.inode and mapping.path in firsts:
            with contextlib.suppress(OSError, struct.error):
                if _slack(memory, firsts[mapping.path], mapping) >= _CAVE + 16:
                    yield mapping.end - _CAVE, memory.read(mapping.end - _CAVE, _CAVE)


def _slack(memory, first, mapping) -> int:
    """Bytes between the end of the file's executable segment and the end of the mapping; 0 when it is not clear."""
    head = memory.read(first, 64)
    if head[:5] != b"\x7fELF\2":
        return 0
    at, = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    table = memory.read(first + at, size * count)
    loads = [struct.unpack_from("<IIQQQQQQ", table, size * k) for k in range(count)]
    loads = [load for load in loads if load[0] == 1]
    bias = first - (min(load[3] for load in loads) & ~4095)
    for _, _, _, address, _, file_size, memory_size, _ in loads:
        end = bias + address + memory_size
        if file_size == memory_size and mapping.start <= end <= mapping.end < end + 4096:
            return mapping.end - end
    return 0


def make_calls(halted: Halted, memory: Memory, cave: tuple[int, bytes], calls: list[tuple],
               seccomp: bool = False) -> None:
    """Have one of the halted threads make system calls, each (number, six arguments at most), up to one that fails.

    Raises Unsafe when no thread is fit for it now, OSError when the process is gone.
    """
    address, original = cave
    if halted.in_group_stop:
        raise Unsafe("it is stopped; continue it first (kill -CONT)")
    undisturbed = halted.interrupted
    for tid in undisturbed + [tid for tid in halted.threads if tid not in undisturbed]:
        registers = halted.registers(tid)
        in_call = registers.orig_rax < 1 << 32
        if registers.cs != 0x33 or not in_call and halted.in_critical_section(tid):
            continue
        if _make_calls(halted, memory, tid, registers, address, calls, seccomp):
            memory.write(address, original)
            return
    raise Unsafe("no thread can make a system call now")


def _make_calls(halted, memory, tid, now, address, calls, seccomp) -> bool:
    rip, rax = now.rip, now.rax
    if now.orig_rax < 1 << 32:      # in a system call: what the kernel would do to make it again
        if rax in _RESTARTS:
            rip, rax = rip - 2, now.orig_rax
        elif rax == _RESTART_BLOCK:
            rip, rax = rip - 2, _RESTART_SYSCALL
    words = []
    for number, *arguments in calls:
        words += [number, *arguments, *[0] * (6 - len(arguments))]
    count = len(words)
    words += [now.rbp, now.rbx, now.rdi, now.rsi, now.rdx, now.r10, now.r8, now.r9, rax, now.rcx, now.r11,
              now.eflags, rip]
    block = now.rsp - _RED_ZONE - 8 * len(words)
    try:
        memory.write(block, struct.pack(f"<{len(words)}Q", *[word & _ALL for word in words]))
    except OSError:                 # no room on this stack
        return False
    memory.write(address, _STUB)
    registers = Registers.from_buffer_copy(now)
    registers.rip, registers.orig_rax = address, _ALL
    registers.rsp, registers.rbp, registers.rbx = block, block + 8 * count, len(calls)
    if seccomp:
        halted.without_seccomp(tid)
    halted.run(tid, registers, address, address + _CAVE)
    return True
