"""The Lua frames of a sample: the agent copies the running coroutine's stack, and its functions are named afterwards.

Where the VM is, and what its functions are called, tell two copies of the process, one before the window, one after it.
"""
from __future__ import annotations

import os
import tempfile
from types import SimpleNamespace

import numpy as np

from ..runtimes import luajit_code
from ..runtimes.luajit_names import Names
from ..target import live
from ..target.address_space import Absent
from ..target.ptrace import LiveError
from ..target.target import TargetError
from .agent import word
from .modules import Process

ROOM = 2048             # bytes at the end of a slot: thread, base, bottom, length; then the stack below base
_HEAD = 32


class LuaStacks:
    """The LuaJIT VM of a process. Raises LiveError when it has none, or more than one."""

    def __init__(self, pid: int):
        self._pid = pid
        vm = self._vm()
        self._main, layout = vm.main, vm.layout
        self.settings = {"lua_current": word(vm.g + layout.g_cur_L), "lua_base": word(layout.L_base),
                         "lua_bottom": word(layout.L_stack), "lua_width": word(8 if layout.gc64 else 4),
                         "lua_room": word(ROOM)}
        self._interpreter = vm.target.word(vm.main + layout.GG_dispatch) or 0

    def _vm(self, main: int | None = None):
        """The VM in a copy of the process; the one whose main state is at `main`."""
        from ..reports.analysis import Analysis
        from ..target.core_file import open_core
        with tempfile.TemporaryDirectory(prefix="gdbleak-") as directory:
            made = live.snapshot(self._pid, os.path.join(directory, "core"))
            try:
                # The core is mapped: it may go when it is open.
                self._target = open_core(made.path, made.exe)
                vms = [vm for vm in Analysis.of(self._target).luajit if main in (None, vm.main)]
            except TargetError as error:
                raise LiveError(str(error)) from None
        if len(vms) != 1:
            raise LiveError(f"process {self._pid} has {len(vms) or 'no'} LuaJIT VM{'s' if len(vms) > 1 else ''}: --lua "
                            "is for one")
        return vms[0]

    def look_again(self) -> None:
        """Copy the process again, for the names. Raises LiveError."""
        self._names = Names(self._vm(self._main))

    def insert(self, frames: tuple, addresses: list[int], process: Process, area: bytes) -> tuple:
        """Put the Lua frames behind the innermost frame of the interpreter. frames: outermost first; addresses: the
        same stack, innermost first; area: what the agent copied."""
        interpreter = process.image_at(self._interpreter)
        inside = [k for k, pc in enumerate(addresses) if pc and process.image_at(pc - 1) is interpreter]
        lua = self._frames(area) if inside and interpreter is not None else []
        at = len(frames) - inside[0] if inside else 0
        return (*frames[:at], *lua, *frames[at:])

    def _frames(self, area) -> list[str]:
        """Outermost first."""
        then = _Then(self._names.vm, area)
        if not then.base:
            return []
        names = []
        for frame in luajit_code.frames(then, then.thread)[::-1]:
            place = self._names.function(frame.function)
            file, _, line = place.rpartition(":")
            names.append(f"{file}:{frame.line or line} (Lua)" if line.isdigit() else place)
        return names


class _Then:
    """A VM as luajit_code.frames sees it, with one coroutine's stack as it was when the sample was taken."""

    def __init__(self, vm, area: bytes):
        self._vm = vm
        self.thread, self.base, self._bottom, length = np.frombuffer(area[:_HEAD], np.uint64).tolist()
        self._words = area[_HEAD:_HEAD + min(length, ROOM - _HEAD)]
        self._start = self.base - len(self._words)
        self.target = SimpleNamespace(space=self)

    def __getattr__(self, name):
        return getattr(self._vm, name)

    def ref(self, address: int) -> int:
        """A reference. Raises Absent."""
        return self._bottom if address == self.thread + self._vm.layout.L_stack else self._vm.ref(address)

    def u32(self, address: int) -> int:
        """Raises Absent."""
        return self.base if address == self.thread + self._vm.layout.L_base else self._vm.u32(address)

    def read(self, address: int, size: int) -> bytes:
        """What does not change. Raises Absent."""
        return self._vm.target.space.read(address, size)

    def word(self, address: int) -> int:
        """Raises Absent."""
        if address == self.thread + self._vm.layout.L_base:
            return self.base
        if self._start <= address < self.base:
            at = address - self._start
            return int.from_bytes(self._words[at:at + 8], "little")
        if self._bottom <= address < self.base:
            raise Absent(address)
        return self._vm.target.space.word(address)
