"""LuaJIT's functions from the inside: which line an instruction is on, who uses a name,
and the call stacks of coroutines."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..kernels import luajit as kernel
from ..target.address_space import Absent
from .luajit import VM
from .luajit_names import Names

# Bytecodes (the same in all of 2.1) whose operand names a string constant: C for those on a table, D for the others.
_KSTR, _GGET, _GSET, _TGETS, TSETS = 39, 54, 55, 57, 61
_FRAME_LUA, _FRAME_VARG = 0, 3


class Use(NamedTuple):
    """Where a name is used: `place` is `file.lua:12`; `written`: a value is stored under it there."""

    place: str
    written: bool


def line_of(vm: VM, proto: int, position: int) -> int:
    """The line of the instruction at `position` of a prototype; its first line when it has no line information."""
    layout = vm.layout
    first, lines, info = (vm.u32(proto + layout.GCproto_firstline), vm.u32(proto + layout.GCproto_numline),
                          vm.ref(proto + layout.GCproto_lineinfo))
    if not info or position <= 0:
        return first
    width = 1 if lines < 256 else 2 if lines < 65536 else 4
    return first + int.from_bytes(vm.target.space.read(info + width * (position - 1), width), "little")


def uses_of(names: Names, name: int, most: int = 1000) -> list[Use]:
    """The places in Lua code that name a string (its row): those that write first, each once."""
    vm = names.vm
    found: dict[Use, None] = {}
    for row, label in vm.graph.referrers(name)[:most]:
        if label == kernel.CONSTANT and int(vm.objects.kind[row]) == kernel.PROTO:
            try:
                for use in _uses_in(names, names.address(row), names.address(name)):
                    found[use] = None
            except Absent:
                continue
    return sorted(found, key=lambda use: (not use.written, use.place))


def constants(vm: VM, proto: int) -> list[int]:
    """Addresses of a prototype's collectable constants, in the order in which bytecode numbers them. Raises Absent."""
    count, width = vm.u32(proto + vm.layout.GCproto_sizekgc), vm.layout.ref
    base = vm.ref(proto + vm.layout.GCproto_k) - width * count
    return np.frombuffer(vm.target.space.read(base, width * count), f"<u{width}")[::-1].tolist()


def bytecode(vm: VM, proto: int) -> np.ndarray:
    """A prototype's instructions (uint32). Raises Absent."""
    size = vm.u32(proto + vm.layout.GCproto_sizebc)
    return np.frombuffer(vm.target.space.read(proto + vm.layout.GCproto_sizeof, 4 * size), "<u4")


def _uses_in(names: Names, proto: int, string: int):
    vm, known = names.vm, constants(names.vm, proto)
    if string not in known:
        return
    number, code = known.index(string), bytecode(vm, proto)
    op, c, d = code & 0xff, code >> 16 & 0xff, code >> 16
    on_table = ((op == _TGETS) | (op == TSETS)) & (c == number)
    plain = ((op == _KSTR) | (op == _GGET) | (op == _GSET)) & (d == number)
    file = names.place(proto).rsplit(":", 1)[0]
    for position in np.flatnonzero(on_table | plain):
        yield Use(f"{file}:{line_of(vm, proto, int(position))}", int(op[position]) in (TSETS, _GSET))


class Frame(NamedTuple):
    """One frame of a Lua stack: the row of its function and, for a Lua function, the line it is at (0: not known)."""

    function: int
    line: int


def frames(vm: VM, thread: int, most: int = 200) -> list[Frame]:
    """The call stack of the coroutine at address `thread`, innermost first; as far as it can be read."""
    layout, space, found = vm.layout, vm.target.space, []
    wide = 1 if layout.gc64 else 0            # with GC64 a frame takes two slots
    word = space.word
    try:
        base = word(thread + layout.L_base) if layout.gc64 else vm.u32(thread + layout.L_base)
        frame, bottom, back = base - 8, vm.ref(thread + layout.L_stack) + 8 * wide, 0
        while frame > bottom and len(found) < most:
            link = word(frame) if layout.gc64 else word(frame) >> 32
            held = vm.object_in(word(frame - 8))[1] if wide else word(frame) & 0xffffffff
            row = vm.row(held)
            if row >= 0 and int(vm.objects.kind[row]) == kernel.FUNC and link & 3 != _FRAME_VARG:
                found.append(Frame(row, _line_at(vm, row, back)))
            if link & 3 == _FRAME_LUA:
                back = link
                frame -= 8 * (1 + wide + (vm.u32(link - 4) >> 8 & 0xff))
            else:
                step = link & ~7
                if not step:
                    break
                back = 0 if link & 3 != _FRAME_VARG else back
                frame -= step
    except Absent:
        pass
    return found


def _line_at(vm: VM, row: int, back: int) -> int:
    """The line of a Lua function that a call will return to at code address `back`; 0: not known."""
    layout = vm.layout
    address = int(vm.objects.address[row])
    if not back or vm.u8(address + layout.GCfuncC_ffid):
        return 0
    proto = vm.ref(address + layout.GCfuncC_pc) - layout.GCproto_sizeof
    position = (back - proto - layout.GCproto_sizeof) // 4 - 1
    if not 0 <= position < vm.u32(proto + layout.GCproto_sizebc):
        return 0
    return line_of(vm, proto, position)
