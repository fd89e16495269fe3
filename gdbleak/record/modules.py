"""The ELF images of a live process, as names for its code addresses. Reads files and a little memory, stops nothing."""
from __future__ import annotations

import bisect
import ctypes
import os
from functools import cached_property, lru_cache

from ..target.elf import DT_DEBUG, PHDR, PT_DYNAMIC, PT_INTERP, PT_LOAD, ElfFile, SymbolTable, open_elf
from . import tracee

_AT_PHDR, _AT_PHNUM = 3, 5


class Image:
    """One mapped ELF file. `start`, `end`: of all its mappings; `path`: as the process names it."""

    def __init__(self, tid: int, maps: list):
        self.path = maps[0].path
        self.name = os.path.basename(self.path) or "?"
        self.start, self.end = maps[0].start, maps[-1].end
        self.code = [(m.start, m.end) for m in maps if "x" in m.perms]
        self._root = f"/proc/{tid}/root"
        self._file = f"/proc/{tid}/map_files/{maps[0].start:x}-{maps[0].end:x}"
        self._kept: list = []
        self.is_program = maps[0].offset == 0

    def keep(self) -> None:
        """Open the files, so that they can be read when the process has ended."""
        _ = self.elf, self._debug

    @cached_property
    def elf(self) -> ElfFile | None:
        """The file; a deleted one too, where we may."""
        return self._open(self._file) or self._open(self._root + self.path)

    @cached_property
    def _debug(self) -> ElfFile | None:
        """The separate file of its symbols."""
        build_id = self.elf.build_id if self.elf else ""
        debug = build_id and self._open(f"{self._root}/usr/lib/debug/.build-id/{build_id[:2]}/{build_id[2:]}.debug")
        return debug if debug and debug.build_id == build_id else None

    def _open(self, path) -> ElfFile | None:
        """The ELF file at a path of the process, by a descriptor that is kept: the path goes with the process."""
        try:
            kept = open(path, "rb")
        except OSError:
            return None
        elf = open_elf(f"/proc/self/fd/{kept.fileno()}")
        if elf is None:
            kept.close()
        else:
            self._kept.append(kept)
        return elf

    @cached_property
    def bias(self) -> int:
        """What to add to an address of the file."""
        if self.elf is None:
            return self.start
        loads = self.elf.phdrs[self.elf.phdrs["type"] == PT_LOAD]
        return self.start - (int(loads["vaddr"].min()) & ~4095) if len(loads) else self.start

    @cached_property
    def symbols(self) -> SymbolTable | None:
        """Its own symbols: .symtab, else .dynsym."""
        return self.elf and self.elf.symbols(self.bias)

    @cached_property
    def tables(self) -> list[SymbolTable]:
        """All that name its functions: its own, and those of a separate debug file."""
        tables = [self._debug and self._debug.symbols(self.bias), self.symbols]
        return [table for table in tables if table is not None]

    def name_of(self, pc: int, begin: int | None) -> str:
        """The function at `pc`. `begin`: where it starts, as the unwind tables say: names one without a symbol."""
        for table in self.tables:
            found = table.nearest(pc)
            if found:
                return demangled(found[0].partition("@")[0] or found[0])
        return f"{self.name}!{(pc if begin is None else begin) - self.bias:#x}"


class Process:
    """The code of a process. OSError when it is gone."""

    def __init__(self, memory: tracee.Memory):
        self.pid, self._tid = memory.pid, memory.tid
        self.memory = memory
        self.maps = tracee.mappings_of(memory.pid)
        files: dict = {}
        for mapping in self.maps:
            if mapping.inode:
                # A file that is mapped twice (a second linker namespace) begins anew at offset 0.
                parts = files.setdefault((mapping.device, mapping.inode), [])
                if not parts or mapping.offset == 0:
                    parts.append([])
                parts[-1].append(mapping)
        images = [Image(self._tid, part) for parts in files.values() for part in parts]
        self.images = sorted((image for image in images if image.code), key=lambda image: image.start)
        self._code = sorted((start, end, image) for image in self.images for start, end in image.code)
        self._starts = [start for start, _, _ in self._code]

    @property
    def name(self) -> str:
        """What the process is called."""
        try:
            with open(f"/proc/{self._tid}/exe", "rb"):
                return os.path.basename(os.readlink(f"/proc/{self._tid}/exe").replace(" (deleted)", ""))
        except OSError:
            return f"process {self.pid}"

    def image_at(self, pc: int) -> Image | None:
        """The image that has the code at `pc`."""
        k = bisect.bisect_right(self._starts, pc) - 1
        return self._code[k][2] if k >= 0 and pc < self._code[k][1] else None

    def definer(self, name: str) -> Image | None:
        """The image whose definition of a function the program uses: the first in look-up order."""
        return next((image for image in self._order()
                     if image.symbols is not None and image.symbols.address(name) is not None), None)

    def _order(self) -> list[Image]:
        """The program's own namespace in look-up order: the linker's list; for a static program, itself."""
        try:
            main, dynamic = self._program()
            found = [main]
            debug = self._dynamic(dynamic).get(DT_DEBUG, 0) if dynamic else 0
            at = self._word(debug + 8) if debug else 0
            while at and len(found) < 10_000:
                section = self._word(at + 16)
                image = next((i for i in self.images if i.start <= section < i.end), None)
                if image is not None and image not in found:
                    found.append(image)
                at = self._word(at + 24)
            return found
        except OSError:
            return self.images

    @property
    def is_static(self) -> bool:
        """Whether no dynamic linker loads the program's libraries."""
        main, _ = self._program()
        return main.elf is None or not (main.elf.phdrs["type"] == PT_INTERP).any()

    @cached_property
    def _auxiliary(self) -> dict[int, int]:
        with open(f"/proc/{self._tid}/auxv", "rb") as file:
            words = memoryview(file.read()).cast("Q").tolist()
        return dict(zip(words[::2], words[1::2]))

    def _program(self) -> tuple[Image, int]:
        """The executable, and the address of its dynamic section, 0 of a static one."""
        auxiliary = self._auxiliary
        import numpy as np
        table = np.frombuffer(self.memory.read(auxiliary[_AT_PHDR], auxiliary[_AT_PHNUM] * PHDR.itemsize), PHDR)
        main = next((i for i in self.images if i.start <= auxiliary[_AT_PHDR] < i.end), None)
        if main is None:
            raise OSError("no executable is mapped")
        rows = table[table["type"] == PT_DYNAMIC]
        return main, main.bias + int(rows[0]["vaddr"]) if len(rows) else 0

    def _dynamic(self, address: int) -> dict[int, int]:
        tags: dict[int, int] = {}
        while True:
            tag, value = self._word(address), self._word(address + 8)
            if not tag or len(tags) > 200:
                return tags
            tags.setdefault(tag, value)
            address += 16

    def _word(self, address: int) -> int:
        return int.from_bytes(self.memory.read(address, 8), "little")


@lru_cache(maxsize=None)
def _demangler():
    """The C++ library's own, where there is one."""
    for name in ("libstdc++.so.6", "libc++abi.so.1"):
        try:
            function = ctypes.CDLL(name).__cxa_demangle
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_void_p
        function.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        return function
    return None


@lru_cache(maxsize=1 << 16)
def demangled(name: str) -> str:
    """A C++ name as people write it, without its parameters; any other as it is."""
    function = _demangler() if name.startswith("_Z") else None
    if function is None:
        return name
    status = ctypes.c_int()
    text = function(name.encode(), None, None, ctypes.byref(status))
    if not text or status.value:
        return name
    made = ctypes.string_at(text).decode("utf-8", "replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(text))
    return made
