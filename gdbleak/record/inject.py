"""One system call, made by a stopped thread of another process, which then goes on as if nothing had been.

Standard library only, x86-64 Linux, Python 3.6 or later. Nothing is mapped and no stack is touched: a stub of some
200 bytes is written into the slack behind the text of the vdso or of a library, where nothing is ever executed, and
taken out again.

It is safe to be killed between any two steps. The stub itself can bring the thread back: after the system call it
restores the signal mask and the registers that it used, and makes an interrupted call of the thread again. While we
live that is not used: the registers are restored at a stop in the kernel's signal code, so that a system call that
was interrupted is restarted, or ended with EINTR by a signal, by the kernel itself. The thread is never
single-stepped (the trap would outlive us and kill it), and its signals are blocked meanwhile, so that none is lost.
"""
import ctypes
import signal
import struct
import time

from ..target.core_writer import PAGE
from ..target.live import ProcessMemory
from ..target.ptrace import (NT_PRSTATUS, PTRACE_CONT, PTRACE_EVENT_CLONE, PTRACE_EVENT_STOP, PTRACE_INTERRUPT,
                             PTRACE_O_TRACECLONE, PTRACE_SETOPTIONS, IoVec, LiveError, event_message, next_stop, ptrace,
                             register_set, status_of)

_PTRACE_POKEDATA, _PTRACE_SYSCALL, _PTRACE_SETREGSET = 5, 24, 0x4205
_PTRACE_GETSIGMASK, _PTRACE_SETSIGMASK, _PTRACE_GET_RSEQ_CONFIGURATION = 0x420A, 0x420B, 0x420F
_PTRACE_GET_SYSCALL_USER_DISPATCH = 0x4211
_PTRACE_O_TRACESYSGOOD = 1
_SYSCALL_STOP = (0, signal.SIGTRAP | 0x80)
# Where struct user_regs_struct has them, as a list of 27 words.
_R11, _R10, _R9, _R8, _RAX, _RCX, _RDX, _RSI, _RDI = 6, 7, 8, 9, 10, 11, 12, 13, 14
_ORIG_RAX, _RIP, _CS, _RSP = 15, 16, 17, 19
_USED = {_RAX: "488b05", _RCX: "488b0d", _RDX: "488b15", _RSI: "488b35", _RDI: "488b3d",    # mov REGISTER, [rip + ...]
         _R8: "4c8b05", _R9: "4c8b0d", _R10: "4c8b15", _R11: "4c8b1d"}
_ARGUMENTS = (_RDI, _RSI, _RDX, _R10, _R8, _R9)
_64_BIT_CODE = 0x33
_NOTHING = (1 << 64) - 1        # as orig_rax: in no system call, so that the kernel restarts none
# What the kernel leaves in rax of a call that it will make again, and of one that goes on by restart_syscall.
_ERESTART, _ERESTART_RESTARTBLOCK, _RESTART_SYSCALL = (-512, -513, -514), -516, 219
_RT_SIGPROCMASK, _EXIT_GROUP = 14, 231
_PATIENCE = 60.0                # seconds; a fork of a terabyte takes some
SLACK = 256                     # bytes that the stub needs at most
_MARK = int.from_bytes(b"gdbleak", "little")    # its first word
_DEEPEST = 1 << 18              # bytes of a stack that are looked at


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
    """Take out the stubs that were left in a `Stopped` process, unless a thread is within one, or comes back to it
    from a signal handler."""
    places = remains(stopped.threads[0], maps)
    for tid in stopped.threads if places else ():
        rip, rsp = (_registers(tid)[index] for index in (_RIP, _RSP))
        end = next((m.end for m in maps if m.start <= rsp < m.end), rsp)
        stack = bytearray(min(end - rsp, _DEEPEST) & -8)
        with ProcessMemory(tid) as memory:
            memory.read_into(rsp, stack)
        words = {rip, *struct.unpack("<%dQ" % (len(stack) // 8), stack)}
        places = [place for place in places if not any(place <= word < place + SLACK for word in words)]
    for place in places:
        _poke(stopped.threads[0], place, bytes(SLACK))


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


def safe_thread(stopped):
    """A thread of a `Stopped` process that a system call can be made by. Raises Unsafe.

    It is not under seccomp, which might kill the process for a call that it does not expect, hands no system calls to
    its program (Syscall User Dispatch), which as surely kills it, and is not within a restartable sequence, which must
    not be left and entered again: blocked in a system call, if there is one."""
    filtered, dispatched, running = False, False, []
    if not stopped.interrupted:
        stopped.deliver_signals()
    for tid in stopped.interrupted:
        registers = _registers(tid)
        if registers[_CS] != _64_BIT_CODE:
            continue
        if is_filtered(tid):
            filtered = True
        elif _is_dispatched(tid):
            dispatched = True
        elif registers[_ORIG_RAX] < 1 << 32:
            return tid
        else:
            running.append(tid)
    for tid in running:
        if not _in_critical_section(tid):
            return tid
    raise Unsafe("its threads are under seccomp" if filtered else
                 "its threads hand their system calls to the program (Syscall User Dispatch)" if dispatched else
                 "no thread of it stands at a safe place")


def is_filtered(tid):
    """Whether a thread is under seccomp."""
    return (status_of(tid) or {}).get("Seccomp", "0") != "0"


def _is_dispatched(tid):
    """Whether a stopped thread's system calls may go to its program, as Wine has it. Before Linux 6.4 none can tell."""
    configuration = (ctypes.c_uint64 * 4)()         # mode, selector, offset, length
    try:
        ptrace(_PTRACE_GET_SYSCALL_USER_DISPATCH, tid, 32, ctypes.addressof(configuration))
    except OSError:
        return False
    return configuration[0] != 0


def _in_critical_section(tid):
    """Whether a thread may be within a restartable sequence (rseq)."""
    configuration = (ctypes.c_uint64 * 3)()
    try:
        ptrace(_PTRACE_GET_RSEQ_CONFIGURATION, tid, 24, ctypes.addressof(configuration))
    except OSError:                 # a kernel before 5.13 cannot tell
        return True
    field = bytearray(8)
    with ProcessMemory(tid) as memory:
        known = not configuration[0] or memory.read_into(configuration[0] + 8, field) == 8
    return not known or any(field)


class Call:
    """A system call by thread `tid` of a `Stopped` process, with the stub at `address`; see `make`."""

    def __init__(self, stopped, tid, address, number, arguments, forks=False):
        """forks: the call is a clone or fork, and a child that nobody holds must end at once."""
        self._stopped, self._tid, self._address, self._forks = stopped, tid, address, forks
        self._registers = _registers(tid)
        self._mask = _signal_mask(tid)
        self._stub, self._entry, self._resume = _machine_code(address, self._registers, self._mask, forks)
        self._called = dict(zip(_ARGUMENTS, arguments))
        self._called.update({_RAX: number, _RIP: self._entry, _ORIG_RAX: _NOTHING})
        self.child = None

    def make(self):
        """What the system call returns; `child` is then the id of the process that it made, if any.

        Raises LiveError when the process was killed, or when the time is over: the thread then ends the call by itself
        as soon as we are no longer its tracer, which is to be at once."""
        tid = self._tid
        try:
            _poke(tid, self._address, self._stub)
            self._set_registers(self._called)
            _set_signal_mask(tid, _NOTHING)
            ptrace(PTRACE_SETOPTIONS, tid, 0, PTRACE_O_TRACECLONE | _PTRACE_O_TRACESYSGOOD)
            self._run_to_call()
            ended = self._run_to_call()
            if ended[0] == PTRACE_EVENT_CLONE:
                self.child = event_message(tid)
                self._run_to_call()
            result = struct.unpack("<q", struct.pack("<Q", _registers(tid)[_RAX]))[0]
            # The next stop is where the kernel handles signals, and restarts system calls.
            ptrace(PTRACE_INTERRUPT, tid)
            self._run(PTRACE_CONT, lambda stop: stop[0] == PTRACE_EVENT_STOP)
            self._set_registers({_RIP: self._resume, _ORIG_RAX: _NOTHING})
            _set_signal_mask(tid, self._mask)
            self._set_registers({})
            _poke(tid, self._address, bytes(len(self._stub)))
        except ProcessLookupError:
            raise self._stopped.killed()
        return result

    def _run_to_call(self):
        """Run to the next beginning or end of a system call, or to the event of a clone; that stop."""
        return self._run(_PTRACE_SYSCALL, lambda stop: stop == _SYSCALL_STOP or stop[0] == PTRACE_EVENT_CLONE)

    def _run(self, request, is_wanted):
        """Let the thread run until a stop that is wanted; that stop. A group stop (SIGSTOP) waits until we are done."""
        while True:
            ptrace(request, self._tid)
            stop = self._wait()
            if is_wanted(stop):
                return stop

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

    def _set_registers(self, changes):
        """The thread's own registers, with changes."""
        words = list(self._registers)
        for index, value in changes.items():
            words[index] = value
        data = ctypes.create_string_buffer(struct.pack("<27Q", *words), 216)
        vector = IoVec(ctypes.addressof(data), 216)
        ptrace(_PTRACE_SETREGSET, self._tid, NT_PRSTATUS, ctypes.addressof(vector))


def _poke(tid, address, data):
    """Write whole words into the memory of a stopped thread, its text as well."""
    for at in range(0, len(data), 8):
        ptrace(_PTRACE_POKEDATA, tid, address + at, struct.unpack_from("<Q", data, at)[0])


def _registers(tid):
    return struct.unpack("<27Q", register_set(tid, NT_PRSTATUS)[:216])


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
    words.update((index, registers[index]) for index in _USED)
    words.update({_RAX: rax, _RIP: rip, "mask": mask})
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
    code.extend(struct.pack("<BIBI", 0xB8, _RT_SIGPROCMASK, 0xBF, 2))
    at("mask", "488d35")
    code.extend(bytes.fromhex("ba00000000 41ba08000000 0f05"))
    for register, load in _USED.items():
        at(register, load)
    at(_RIP, "ff25")                    # jmp [rip]
    if forks:
        code[5] = len(code) - 6         # child: mov edi, 0; mov eax, exit_group; syscall
        code.extend(struct.pack("<BIBI", 0xBF, 0, 0xB8, _EXIT_GROUP) + b"\x0f\x05")
    stub = struct.pack("<%dQ" % len(words), *words.values()) + bytes(code)
    return stub + bytes(-len(stub) % 8), entry, resume


def _after_restart(registers):
    """(rip, rax) with which the thread goes on, as the kernel would have it: an interrupted call is made again."""
    rip, rax = registers[_RIP], registers[_RAX]
    if registers[_ORIG_RAX] < 1 << 32:
        result = rax - (1 << 64)
        if result in _ERESTART:
            return rip - 2, registers[_ORIG_RAX]
        if result == _ERESTART_RESTARTBLOCK:
            return rip - 2, _RESTART_SYSCALL
    return rip, rax
