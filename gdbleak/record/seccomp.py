"""What the seccomp filters of a process do with a system call, whatever its arguments are: their programs are read from
the kernel, and all ways through them are followed."""
from __future__ import annotations

import contextlib
import ctypes
import errno
import struct

from ..target import ptrace
from ..target.ptrace import LiveError

SIGRETURN, NANOSLEEP, GETPID, PROCESS_VM_READV = 15, 35, 39, 310
# Made by an `inject.Injection`: filters are suspended meanwhile, but no more when we are killed.
_INJECTED = {9: "mmap", 10: "mprotect", 11: "munmap", 13: "rt_sigaction", 14: "rt_sigprocmask", 219: "restart_syscall"}
_NAMES = {**_INJECTED, SIGRETURN: "rt_sigreturn", NANOSLEEP: "nanosleep", GETPID: "getpid",
          PROCESS_VM_READV: "process_vm_readv"}
ALLOW, LOG, ERRNO, KILL_THREAD, KILL_PROCESS = 0x7fff0000, 0x7ffc0000, 0x50000, 0, 0x80000000
_TRAP, _TRACE, _NOTIFY = 0x30000, 0x7ff00000, 0x7fc00000
_WHAT = {ERRNO: "refuses", KILL_THREAD: "ends the thread for", KILL_PROCESS: "ends the process for",
         _TRAP: "sends a signal for", _TRACE: "asks a tracer about", _NOTIFY: "asks a supervisor about"}
_GET_FILTER = 0x420c
_STRICT = "1"                                           # the mode without filters: read, write, exit and sigreturn
_ARCHITECTURE, _X86_64 = 4, 0xc000003e
_DATA_SIZE = 64                                         # of struct seccomp_data: number, architecture, then unknown
_MOST_STATES = 200_000


def check(pid: int, calls: tuple[int, ...], otherwise: str) -> None:
    """Raises LiveError when a filter of one of the process's threads may not let each of the calls through, or may end
    the process for one of those that are injected. otherwise: what mends that."""
    with _standing(pid) as threads:
        programs = {program for tid in threads for program in _programs(pid, tid, otherwise)}
    for program in programs:
        for number in dict.fromkeys((*calls, *_INJECTED)):
            found = actions(program, number)
            if found is None:
                raise LiveError(f"process {pid} is under seccomp, with a filter too intricate to follow; {otherwise}")
            wrong = found - ({ALLOW, LOG} if number in calls else {ALLOW, LOG, ERRNO, _TRACE})
            if wrong:
                raise LiveError(f"process {pid} is under seccomp, whose filter {_WHAT.get(min(wrong), 'ends it for')} "
                                f"{_NAMES[number]}, which is needed; {otherwise}")


@contextlib.contextmanager
def _standing(pid):
    """The threads of a process, which stands meanwhile."""
    if ptrace.is_ours(pid):                             # a command, at its start
        yield ptrace.threads_of(pid)
    else:
        with ptrace.hurried(), ptrace.Stopped(pid) as stopped:
            yield stopped.threads


def _programs(pid, tid, otherwise) -> list[bytes]:
    """The filters of a stopped thread."""
    mode = (ptrace.status_of(tid) or {}).get("Seccomp", "0")
    if mode == "0":
        return []
    if mode == _STRICT:
        raise LiveError(f"process {pid} is in the strict mode of seccomp, which would end it for any call; nothing can "
                        "be recorded in it")
    found = []
    try:
        while True:
            number = ptrace.libc.ptrace(_GET_FILTER, tid, len(found), None)
            if number < 0:
                raise OSError(ctypes.get_errno(), "")
            buffer = ctypes.create_string_buffer(8 * number)
            ptrace.ptrace(_GET_FILTER, tid, len(found), ctypes.addressof(buffer))
            found.append(buffer.raw)
    except OSError as error:
        if error.errno != errno.ENOENT:                 # that there are no more
            raise LiveError(f"process {pid} is under seccomp, and its filter cannot be read: run as root, and not in a "
                            f"sandbox; {otherwise}") from None
    return found


def actions(program: bytes, number: int) -> set[int] | None:
    """The actions, without their data, that a filter (struct sock_filter one after the other) may have for an x86-64
    system call. None when there are too many ways through it.

    The rules are those of the kernel (kernel/seccomp.c, Documentation/networking/filter.rst). Values that depend on
    the arguments are None, and then both ways of a comparison are gone."""
    code = list(struct.iter_unpack("<HBBI", program))
    start = 0, 0, 0, (None,) * 16
    waiting, seen, found = [start], {start}, set()
    while waiting:
        if len(seen) > _MOST_STATES:
            return None
        at, a, x, memory = waiting.pop()
        operation, jump, otherwise, k = code[at]
        kind, mode = operation & 7, operation & 0xe0
        ways = [at + 1]
        if kind in (0, 1):                              # LD, LDX
            value = {0x00: k, 0x20: _data(k, number), 0x60: memory[k & 15], 0x80: _DATA_SIZE}.get(mode)
            a, x = (value, x) if kind == 0 else (a, value)
        elif kind in (2, 3):                            # ST, STX
            memory = (*memory[:k], a if kind == 2 else x, *memory[k + 1:])
        elif kind == 4:                                 # ALU
            b = x if operation & 8 else k
            if operation & 0xf0 == 0x30 and not b:      # DIV by 0 ends the filter
                found.add(KILL_THREAD)
            a = _calculated(operation & 0xf0, a, b)
        elif kind == 5:                                 # JMP
            if operation & 0xf0 == 0:
                ways = [at + 1 + k]
            else:
                held = _compared(operation & 0xf0, a, x if operation & 8 else k)
                ways = [at + 1 + (jump if way else otherwise) for way in ((True, False) if held is None else (held,))]
        elif kind == 6:                                 # RET
            ways = []
            value = a if operation & 0x18 == 0x10 else k
            found.add(KILL_PROCESS if value is None else value & 0xffff0000)
        else:                                           # MISC
            a, x = (x, x) if operation & 0x80 else (a, a)
        for way in ways:
            state = way, a, x, memory
            if state not in seen:
                seen.add(state)
                waiting.append(state)
    return found


def _data(offset, number):
    return {0: number, _ARCHITECTURE: _X86_64}.get(offset)


def _calculated(operation, a, b):
    if operation == 0x80:                               # NEG
        return None if a is None else -a & 0xffffffff
    if a is None or b is None or operation == 0x30 and not b:
        return None
    value = {0x00: a + b, 0x10: a - b, 0x20: a * b, 0x40: a | b, 0x50: a & b, 0xa0: a ^ b, 0x60: a << (b & 31),
             0x70: a >> (b & 31), 0x30: a // max(b, 1)}.get(operation)
    return None if value is None else value & 0xffffffff


def _compared(operation, a, b):
    if a is None or b is None:
        return None
    return {0x10: a == b, 0x20: a > b, 0x30: a >= b, 0x40: bool(a & b)}[operation]
