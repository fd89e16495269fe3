"""The first instructions of a function, moved elsewhere to make room for a jump. x86-64, decoded by Capstone."""
from __future__ import annotations

from typing import NamedTuple

import capstone
from capstone import x86

JUMP_SIZE = 5
_REACH = 1 << 31


class Immovable(Exception):
    """The function cannot begin with a jump; the message says why."""


class Displaced(NamedTuple):
    """`code`: does what the function's first `size` bytes did, and goes on behind them."""

    code: bytes
    size: int


def jump(source: int, target: int) -> bytes:
    """`jmp target` at `source`."""
    return b"\xe9" + _near(target - (source + JUMP_SIZE))


def displace(body: bytes, address: int, new: int) -> Displaced:
    """Move the first instructions of the function that lies at `address` to `new`. `body`: the whole function.

    Raises Immovable.
    """
    if address % 4096 > 4096 - JUMP_SIZE:
        raise Immovable("its first instructions lie on two pages")
    decoder = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    decoder.detail = True
    code, size = b"", 0
    instructions = list(decoder.disasm(body, address))
    for instruction in instructions:
        if size >= JUMP_SIZE:
            break
        code += _moved(instruction, new + len(code))
        size += instruction.size
    if size < JUMP_SIZE:
        raise Immovable("it is shorter than a jump")
    for instruction in instructions:
        if _is_branch(instruction) and address < _target(instruction) < address + size:
            raise Immovable("a loop in it leads back to its first instructions")
    return Displaced(code + jump(new + len(code), address + size), size)


def _moved(instruction, new: int) -> bytes:
    """One instruction, for address `new`."""
    raw = bytes(instruction.bytes)
    if _is_branch(instruction):
        return _moved_branch(instruction, new)
    if instruction.group(capstone.CS_GRP_RET) or instruction.group(capstone.CS_GRP_INT):
        raise Immovable(f"it begins with `{instruction.mnemonic}`")
    if any(operand.type == x86.X86_OP_MEM and operand.mem.base == x86.X86_REG_RIP for operand in instruction.operands):
        at = instruction.disp_offset
        shift = instruction.address - new
        return raw[:at] + _near(instruction.disp + shift) + raw[at + 4:]
    return raw


def _moved_branch(instruction, new: int) -> bytes:
    target = _target(instruction)
    if instruction.id == x86.X86_INS_JMP:
        return jump(new, target)
    conditional = instruction.bytes[0] & 0xf0 == 0x70 or bytes(instruction.bytes[:1]) == b"\x0f"
    if instruction.group(capstone.CS_GRP_CALL) or not conditional:
        raise Immovable(f"it begins with `{instruction.mnemonic}`")
    condition = instruction.bytes[0] if instruction.size == 2 else instruction.bytes[1]
    return bytes([0x0f, 0x80 | condition & 15]) + _near(target - (new + 6))


def _is_branch(instruction) -> bool:
    """A jump or call to an address that it names."""
    return bool((instruction.group(capstone.CS_GRP_JUMP) or instruction.group(capstone.CS_GRP_CALL))
                and instruction.operands and instruction.operands[0].type == x86.X86_OP_IMM)


def _target(instruction) -> int:
    return instruction.operands[0].imm & (1 << 64) - 1


def _near(distance: int) -> bytes:
    if not -_REACH <= distance < _REACH:
        raise Immovable("there is no room within 2 GiB of it")
    return distance.to_bytes(4, "little", signed=True)
