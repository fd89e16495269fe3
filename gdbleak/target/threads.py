"""Threads: registers, stack and thread pointer, from the notes of a core file or as GDB tells them."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_X86_64 = ("r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base "
           "ds es fs gs").split()
_AARCH64 = [f"x{k}" for k in range(31)] + ["sp", "pc", "pstate"]


@dataclass(frozen=True)
class Architecture:
    """What differs between machines: the registers in NT_PRSTATUS and which of them mean what."""

    name: str
    registers: tuple[str, ...]
    stack_pointer: str
    program_counter: str
    thread_pointer: str
    red_zone: int           # bytes below the stack pointer that are alive
    tls_below: bool         # static TLS lies below the thread pointer


X86_64 = Architecture("x86-64", tuple(_X86_64), "rsp", "rip", "fs_base", 128, True)
AARCH64 = Architecture("aarch64", tuple(_AARCH64), "sp", "pc", "tpidr", 0, False)
ARCHITECTURES = {62: X86_64, 183: AARCH64}   # by ELF e_machine
_PID, _REGISTERS = 32, 112                   # offsets in struct elf_prstatus, LP64
_CURSIG = 12


@dataclass
class Thread:
    """One thread: `lwp`, `registers` by name, `signal` it was stopped by (0: none), stack mapping when known."""

    lwp: int
    registers: dict[str, int]
    arch: Architecture
    signal: int = 0
    stack: tuple[int, int] | None = None
    vectors: bytes = b""            # what the vector registers hold, as far as it is known

    @property
    def sp(self) -> int:
        return self.registers.get(self.arch.stack_pointer, 0)

    @property
    def pc(self) -> int:
        return self.registers.get(self.arch.program_counter, 0)

    @property
    def tp(self) -> int:
        return self.registers.get(self.arch.thread_pointer, 0)


def from_prstatus(desc: bytes, arch: Architecture) -> Thread | None:
    """The thread of an NT_PRSTATUS note, or None when it is too short."""
    need = _REGISTERS + 8 * len(arch.registers)
    if len(desc) < need:
        return None
    values = np.frombuffer(desc, "<u8", len(arch.registers), _REGISTERS)
    return Thread(int.from_bytes(desc[_PID:_PID + 4], "little"),
                  {name: int(value) for name, value in zip(arch.registers, values)}, arch,
                  int.from_bytes(desc[_CURSIG:_CURSIG + 2], "little"))
