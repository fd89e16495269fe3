"""System calls, made by a stopped thread of another process, which then goes on as if nothing had been.

Standard library only, x86-64 Linux, Python 3.6 or later. Nothing is mapped and no stack is touched: a stub of some
200 bytes is written into the slack behind the text of the vdso or of a library, where nothing is ever executed, and
taken out again.

It is safe to be killed between any two steps. The stub itself can bring the thread back: after the system call that it
is at it restores the signal mask and the registers that it used, and makes an interrupted call of the thread again; the
calls that were to follow are not made. While we live that is not used: the registers are restored at a stop in the
kernel's signal code, so that a system call that was interrupted is restarted, or ended with EINTR by a signal, by the
kernel itself. The thread is never single-stepped (the trap would outlive us and kill it), and its signals are blocked
meanwhile, so that none is lost.
"""
import ctypes
import os
import re
import signal
import struct
import time

from ..target.core_writer import PAGE
from ..target.live import ProcessMemory, mappings
from ..target.ptrace import (NT_PRSTATUS, PTRACE_CONT, PTRACE_EVENT_CLONE, PTRACE_EVENT_STOP, PTRACE_GETREGSET,
                             PTRACE_INTERRUPT, PTRACE_O_TRACECLONE, PTRACE_SETOPTIONS, IoVec, LiveError,
                             event_message, hurried, next_stop, ptrace, status_of)

MMAP, MPROTECT, MUNMAP, SIGACTION, CLONE, WAIT4 = 9, 10, 11, 13, 56, 61
_SIGPROCMASK, _RESTART_SYSCALL, _EXIT_GROUP = 14, 219, 231
_PTRACE_POKEDATA, _PTRACE_SYSCALL, _PTRACE_SETREGSET = 5, 24, 0x4205
_PTRACE_GETSIGMASK, _PTRACE_SETSIGMASK, _PTRACE_GET_RSEQ_CONFIGURATION = 0x420A, 0x420B, 0x420F
_PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG = 0x4211
_PTRACE_O_TRACESYSGOOD, _PTRACE_O_SUSPEND_SECCOMP = 1, 1 << 21
_SYSCALL_STOP = (0, signal.SIGTRAP | 0x80)
_USED = {"rax": "488b05", "rcx": "488b0d", "rdx": "488b15", "rsi": "488b35", "rdi": "488b3d",   # mov ..., [rip + ...]
         "r8": "4c8b05", "r9": "4c8b0d", "r10": "4c8b15", "r11": "4c8b1d"}
_ARGUMENTS = ("rdi", "rsi", "rdx", "r10", "r8", "r9")
_64_BIT_CODE = 0x33             # cs; in a signal frame followed by gs and fs, which are 0
_SEGMENTS_MASK = (1 << 48) - 1
_TO_RSP = 20                    # words in a signal frame from uc_flags to rsp; then come rip, eflags and cs
_MOST_UC_FLAGS = 7
_NOTHING = (1 << 64) - 1        # as orig_rax: in no system call, so that the kernel restarts none
# What the kernel leaves in rax of a call that it will make again, and of one that goes on by restart_syscall.
_ERESTART, _ERESTART_RESTARTBLOCK = (-512, -513, -514), -516
_PATIENCE = 60.0                # seconds; a fork of a terabyte takes some
SLACK = 256                     # bytes that the stub needs at most
_MARK = int.from_bytes(b"gdbleak", "little")    # its first word
_DEEPEST = 1 << 19              # bytes of a stack that are looked at


class Registers(ctypes.Structure):
    """user_regs_struct."""
    _fields_ = [(name, ctypes.c_uint64) for name in (
        "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base "
        "ds es fs gs").split()]

    @property
    def in_call(self):
        """Whether the thread is in a system call."""
        return self.orig_rax < 1 << 32


def registers_of(tid):
    """The `Registers` of a stopped thread."""
    registers = Registers()
    vector = IoVec(ctypes.addressof(registers), ctypes.sizeof(registers))
    ptrace(PTRACE_GETREGSET, tid, NT_PRSTATUS, ctypes.addressof(vector))
    return registers


class Unsafe(Exception):
    """Nothing can be called in the process at this moment without risk for it; the message says why."""


def find_slack(tid, maps):
    """The address of `SLACK` unused bytes, all zero, at the end of executable memory of a process. Raises Unsafe."""
    for address, slot in _slots(tid, maps):
        if not any(slot):
            return address
    raise Unsafe("no unused bytes behind the text of its libraries")


def remains(tid, maps):
    """The addresses of stubs that are in a process: left there by one who was killed."""
    return [address for address, slot in _slots(tid, maps) if any(slot)]


def remove_remains(stopped, maps):
    """Take out the stubs that were left in a `Stopped` process. Raises Unsafe when a thread is within one, or comes
    back to it from a signal handler."""
    reader = stopped.threads[0]
    is_used = False
    for place in remains(reader, maps):
        if refer_to(stopped, maps, [(place, place + SLACK)]):
            is_used = True
        else:
            _clear(reader, place, SLACK)
    if is_used:
        raise Unsafe("a thread is making the system calls that were put into it")


def clean(stopped, lines=None):
    """Stop a process, by a `Stopped`, to take out the stubs that were left in it. lines: of its `mappings`, read
    before. Raises Unsafe, LiveError, OSError."""

    def act():
        with hurried(), stopped:
            remove_remains(stopped, mappings(stopped.threads[0], lines))

    stopped.run(act)


def refer_to(stopped, maps, ranges):
    """Whether a thread of a `Stopped` process is within one of the ranges (start, end) of code, or will come back to
    it: once a signal handler returns, or a function that was called by `push %rsp; call ...`, see `_returns`."""
    return any(start <= place < end
               for tid in stopped.threads for place in _returns(tid, maps) for start, end in ranges)


def _returns(tid, maps):
    """Where a thread is, and where it may come back to.

    Most words on its stack that look like return addresses are stale. Two kinds count: the rip of a signal frame, with
    the handler's return address, and a return address below a word that holds the address of the word above it, as code
    of ours puts it there."""
    registers = registers_of(tid)
    found, stacks, seen = [registers.rip], [registers.rsp], []
    with ProcessMemory(tid) as memory:
        while stacks:
            start = stacks.pop()
            if any(low <= start < high for low, high in seen):
                continue
            end = next((m.end for m in maps if m.start <= start < m.end), start)
            stack = bytearray(min(end - start, _DEEPEST) & -8)
            seen.append((start, start + len(stack)))
            words = struct.unpack_from("<%dQ" % (memory.read_into(start, stack) // 8), stack)
            for k in range(len(words) - 3):
                if words[k + 1] == start + 8 * (k + 2):
                    found.append(words[k])
                if words[k + 3] & _SEGMENTS_MASK == _64_BIT_CODE and _is_signal_frame(words, k - _TO_RSP):
                    found += [words[k + 1], words[k - _TO_RSP - 1]]
                    stacks.append(words[k])             # the handler may run on a stack of its own
    return found


def _is_signal_frame(words, at):
    """Whether uc_flags and uc_link of a signal frame may be there. When `at` is 0, the handler has just returned."""
    return at >= 0 and words[at] <= _MOST_UC_FLAGS and not words[at + 1]


def _slots(tid, maps):
    """(address, contents) of the slots for a stub at the end of executable memory: zero, or a stub that was left."""
    texts = [m for m in maps if m.perms == "r-xp" and (m.path == "[vdso]" or m.inode)]
    with ProcessMemory(tid) as memory:
        for mapping in sorted(texts, key=lambda m: m.path != "[vdso]"):
            for address in range(mapping.end - SLACK, max(mapping.end - PAGE, mapping.start), -SLACK):
                slot = bytearray(SLACK)
                if memory.read_into(address, slot) != SLACK or any(slot) and _first_word(slot) != _MARK:
                    break
                yield address, slot
                if not any(slot):
                    break


def _first_word(data):
    return struct.unpack_from("<Q", data)[0]


def safe_thread(stopped, filtered=False):
    """A thread of a `Stopped` process that system calls can be made by. Raises Unsafe.

    It hands no system calls to its program (Syscall User Dispatch), which would kill the process, and is not within a
    restartable sequence, which must not be left and entered again: blocked in a system call, if there is one. It is not
    under seccomp, which might kill the process for a call that it does not expect.
    filtered: if there is none but those, one will do; its filter is suspended while it makes the calls."""
    if not stopped.interrupted:
        stopped.deliver_signals()
    if not stopped.interrupted:
        raise Unsafe("it is stopped: continue it first (kill -CONT %d)" % stopped.pid)
    running, under_seccomp, dispatched = [], [], False
    for tid in stopped.interrupted:
        registers = registers_of(tid)
        if registers.cs != _64_BIT_CODE:
            continue
        if _is_dispatched(tid):
            dispatched = True
        elif is_filtered(tid):
            under_seccomp.append(tid)
        elif registers.in_call:
            return tid
        else:
            running.append(tid)
    for tid in running + (under_seccomp if filtered else []):
        if registers_of(tid).in_call or not _in_critical_section(tid):
            return tid
    raise Unsafe("its threads are under seccomp" if under_seccomp and not filtered else
                 "its threads hand their system calls to the program (Syscall User Dispatch)" if dispatched else
                 "no thread of it stands at a safe place")


def is_filtered(tid):
    """Whether a thread is under seccomp."""
    return (status_of(tid) or {}).get("Seccomp", "0") != "0"


def _is_dispatched(tid):
    """Whether a stopped thread's system calls may go to its program, as Wine has it. Before Linux 6.4 none can tell."""
    configuration = (ctypes.c_uint64 * 4)()         # mode, selector, offset, length
    try:
        ptrace(_PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, tid, 32, ctypes.addressof(configuration))
    except OSError:
        return False
    return configuration[0] != 0


def _in_critical_section(tid):
    """Whether a thread may be within a restartable sequence (rseq)."""
    configuration = (ctypes.c_uint64 * 3)()
    try:
        ptrace(_PTRACE_GET_RSEQ_CONFIGURATION, tid, 24, ctypes.addressof(configuration))
    except OSError:                 # a kernel before 5.13 cannot tell; one before 4.18 has none
        return [int(number) for number in re.findall(r"\d+", os.uname().release)[:2]] >= [4, 18]
    field = bytearray(8)
    with ProcessMemory(tid) as memory:
        known = not configuration[0] or memory.read_into(configuration[0] + 8, field) == 8
    return not known or any(field)


def make_calls(stopped, calls):
    """The results of system calls that a thread of a `Stopped` process makes, each (number, argument, ...), up to one
    that fails. Raises Unsafe, and what `Injection.make` raises."""
    tid = safe_thread(stopped, filtered=True)
    return Injection(stopped, tid, mappings(tid)).make(calls)


class Injection:
    """System calls by thread `tid` of a `Stopped` process, see `make`, with a stub at `address`. Raises Unsafe.

    forks: the calls are a clone or fork, and a child that nobody holds must end at once; `child` is then the id of the
    process that it made, None when there is none."""

    def __init__(self, stopped, tid, maps, forks=False):
        self.address = find_slack(tid, maps)
        self.child = None
        self._stopped, self._tid = stopped, tid
        self._registers, self._mask = registers_of(tid), _signal_mask(tid)
        self._stub, self._entry, self._resume = _machine_code(self.address, self._registers, self._mask, forks)

    def make(self, calls):
        """The results of `calls`, each (number, argument, ...), up to one that fails: a negative error number.

        Raises ProcessLookupError when the process was killed, LiveError when a filter of seccomp cannot be suspended or
        the time is over: the thread then ends the call that it is at by itself as soon as we are no longer its tracer,
        which is to be at once."""
        tid, results = self._tid, []
        self._set_options()
        _poke(tid, self.address, self._stub)
        self._set_registers(rip=self._resume, orig_rax=_NOTHING)    # from here on it comes back by itself
        _set_signal_mask(tid, _NOTHING)
        for number, *arguments in calls:
            results.append(self._make_one(number, arguments))
            if -4096 < results[-1] < 0:
                break
        # The next stop is where the kernel handles signals, and restarts system calls.
        ptrace(PTRACE_INTERRUPT, tid)
        self._run(PTRACE_CONT, lambda stop: stop[0] == PTRACE_EVENT_STOP)
        self._set_registers(rip=self._resume, orig_rax=_NOTHING)
        _set_signal_mask(tid, self._mask)
        self._set_registers()
        _clear(tid, self.address, len(self._stub))
        return results

    def _set_options(self):
        suspended = _PTRACE_O_SUSPEND_SECCOMP if is_filtered(self._tid) else 0
        try:
            ptrace(PTRACE_SETOPTIONS, self._tid, 0, PTRACE_O_TRACECLONE | _PTRACE_O_TRACESYSGOOD | suspended)
        except ProcessLookupError:
            raise
        except OSError as error:
            raise LiveError("process %d is under seccomp, and its filter cannot be suspended (%s): run as root, and "
                            "not in a sandbox" % (self._stopped.pid, error.strerror))

    def _make_one(self, number, arguments):
        """What one system call returns."""
        self._set_registers(rip=self._entry, orig_rax=_NOTHING, rax=number, **dict(zip(_ARGUMENTS, arguments)))
        self._run_to_call()
        if self._run_to_call()[0] == PTRACE_EVENT_CLONE:
            self.child = event_message(self._tid)
            self._run_to_call()
        return ctypes.c_int64(registers_of(self._tid).rax).value

    def _run_to_call(self):
        """Run to the next beginning or end of a system call, or to the event of a clone; that stop."""
        return self._run(_PTRACE_SYSCALL, lambda stop: stop == _SYSCALL_STOP or stop[0] == PTRACE_EVENT_CLONE)

    def _run(self, request, is_wanted):
        """Let the thread run until a stop that is wanted; that stop. SIGSTOP alone is not blocked: the thread is given
        it, and stays stopped with the others when we are done."""
        number = 0
        while True:
            ptrace(request, self._tid, 0, number)
            stop = self._wait()
            if is_wanted(stop):
                return stop
            number = 0 if stop[0] or stop == _SYSCALL_STOP else stop[1]

    def _wait(self):
        began = time.monotonic()
        while True:
            stop = next_stop(self._tid)
            if stop is not None:
                return stop
            self._stopped.check_time()
            passed = time.monotonic() - began
            if passed > _PATIENCE:
                raise LiveError("process %d was let go: its thread %d does not come back from a system call that it "
                                "was to make" % (self._stopped.pid, self._tid))
            time.sleep(0 if passed < 0.0005 else 0.00005)

    def _set_registers(self, **changes):
        """The thread's own registers, with changes."""
        registers = Registers.from_buffer_copy(self._registers)
        for name, value in changes.items():
            setattr(registers, name, value)
        vector = IoVec(ctypes.addressof(registers), ctypes.sizeof(registers))
        ptrace(_PTRACE_SETREGSET, self._tid, NT_PRSTATUS, ctypes.addressof(vector))


def _poke(tid, address, data):
    """Write whole words into the memory of a stopped thread, its text as well."""
    for at in range(0, len(data), 8):
        ptrace(_PTRACE_POKEDATA, tid, address + at, _first_word(data[at:]))


def _clear(tid, address, size):
    """Write zeros over a stub, its mark last: as long as anything is there it can be recognized."""
    for at in reversed(range(0, size, 8)):
        ptrace(_PTRACE_POKEDATA, tid, address + at, 0)


def _signal_mask(tid):
    mask = ctypes.c_uint64()
    ptrace(_PTRACE_GETSIGMASK, tid, 8, ctypes.addressof(mask))
    return mask.value


def _set_signal_mask(tid, mask):
    words = ctypes.c_uint64(mask)
    ptrace(_PTRACE_SETSIGMASK, tid, 8, ctypes.addressof(words))


def _machine_code(address, registers, mask, forks):
    """(bytes of the stub, address where it is entered, address from which on it brings the thread back)."""
    rip, rax = _after_restart(registers)
    words = {"mark": _MARK}
    words.update((name, getattr(registers, name)) for name in _USED)
    words.update(rax=rax, rip=rip, mask=mask)
    places = {name: address + 8 * k for k, name in enumerate(words)}
    entry = address + 8 * len(words)
    code = bytearray.fromhex("0f05 4891 e300" if forks else "0f05")     # syscall; xchg rax, rcx; jrcxz child
    resume = entry + len(code)

    def at(place, opcode):
        """An instruction with the word at `place`, addressed relative to its end."""
        code.extend(bytes.fromhex(opcode))
        code.extend(struct.pack("<i", places[place] - (entry + len(code) + 4)))

    # No instruction here changes the flags: mov eax, rt_sigprocmask; mov edi, SIG_SETMASK; lea rsi, [mask];
    # mov edx, 0; mov r10d, 8; syscall
    code.extend(struct.pack("<BIBI", 0xB8, _SIGPROCMASK, 0xBF, 2))
    at("mask", "488d35")
    code.extend(bytes.fromhex("ba00000000 41ba08000000 0f05"))
    for register, load in _USED.items():
        at(register, load)
    at("rip", "ff25")               # jmp [rip]
    if forks:
        code[5] = len(code) - 6         # child: mov edi, 0; mov eax, exit_group; syscall
        code.extend(struct.pack("<BIBI", 0xBF, 0, 0xB8, _EXIT_GROUP) + b"\x0f\x05")
    stub = struct.pack("<%dQ" % len(words), *words.values()) + bytes(code)
    return stub + bytes(-len(stub) % 8), entry, resume


def _after_restart(registers):
    """(rip, rax) with which the thread goes on, as the kernel would have it: an interrupted call is made again."""
    rip, rax = registers.rip, registers.rax
    if registers.in_call:
        result = rax - (1 << 64)
        if result in _ERESTART:
            return rip - 2, registers.orig_rax
        if result == _ERESTART_RESTARTBLOCK:
            return rip - 2, _RESTART_SYSCALL
    return rip, rax
