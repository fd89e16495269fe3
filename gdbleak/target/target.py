"""`Target`: what every heap, runtime and report is asked about."""
from __future__ import annotations

import bisect
import os
from dataclasses import dataclass, field

from .address_space import Absent, AddressSpace
from .elf import Module, SymbolTable, module_at, open_elf, set_headers
from .sysroot import resolve
from .layout import Layouts
from .threads import Architecture, Thread


ANONYMOUS = ("/anon_hugepage",)   # names that the kernel gives to memory without a file


class TargetError(Exception):
    """The target cannot be analysed; the message is one line for a person: what is wrong and what mends it."""


@dataclass
class Mapping:
    """One mapping of the target. `perms`: as in /proc/PID/maps without the last letter; `path`: "" when anonymous."""

    start: int
    end: int
    perms: str
    path: str = ""
    file_offset: int = 0

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def readable(self) -> bool:
        return "r" in self.perms

    @property
    def writable(self) -> bool:
        return "w" in self.perms


@dataclass
class Source:
    """What was read: `kind` is "core" or "pid"."""

    kind: str
    path: str = ""
    pid: int = 0
    coverage: float = 1.0
    partial: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"core file {self.path}" if self.kind == "core" else f"process {self.pid}"


class Target:
    """Memory, mappings (sorted), modules (sorted by address), threads and symbols of one process."""

    def __init__(self, source: Source, space: AddressSpace, arch: Architecture, mappings: list[Mapping],
                 threads: list[Thread], auxv: dict[int, int]):
        self.source = source
        self.space = space
        self.arch = arch
        self.mappings = mappings
        self.threads = threads
        self.auxv = auxv
        self.modules: list[Module] = []
        self.layouts = Layouts()
        self.debugger = None         # GDB's symbols, when GDB drives us: see target/debugger.py
        self.analysis = None         # what has been found out about it: see reports/analysis.py
        self._tables: dict[int, SymbolTable | None] = {}
        self._starts: list[int] = []
        self._anonymous: list[tuple[int, int]] | None = None

    # -- mappings ---------------------------------------------------------------------------------------------------
    def mapping_at(self, address: int) -> Mapping | None:
        """The mapping that holds `address`, or None."""
        if not self._starts:
            self._starts = [mapping.start for mapping in self.mappings]
        k = bisect.bisect_right(self._starts, address) - 1
        return self.mappings[k] if k >= 0 and address < self.mappings[k].end else None

    def anonymous(self) -> list[tuple[int, int]]:
        """(start, end) of stretches of memory without a file, neighbouring mappings joined; of what the program may not
        read what is there.

        What was mapped in one piece may have been split since by mprotect, mlock or madvise.
        """
        if self._anonymous is None:
            joined: list[list[int]] = []
            for mapping in self.mappings:
                if mapping.path:
                    continue
                whole = [(mapping.start, mapping.end)]
                for start, end in whole if mapping.readable else self.space.present(*whole[0]):
                    if joined and joined[-1][1] == start:
                        joined[-1][1] = end
                    else:
                        joined.append([start, end])
            self._anonymous = [(start, end) for start, end in joined]
        return self._anonymous

    def extent(self, address: int) -> tuple[int, int] | None:
        """The stretch of `anonymous` that holds `address`, else its one mapping; None when it is not mapped."""
        stretches = self.anonymous()
        k = bisect.bisect_right(stretches, (address, 1 << 64)) - 1
        if k >= 0 and address < stretches[k][1]:
            return stretches[k]
        mapping = self.mapping_at(address)
        return (mapping.start, mapping.end) if mapping else None

    def is_code(self, address: int | None) -> bool:
        """Whether `address` lies in executable memory."""
        mapping = self.mapping_at(address) if address else None
        return mapping is not None and "x" in mapping.perms

    def find_stacks(self) -> None:
        """Give each thread the mapping its stack pointer lies in."""
        for thread in self.threads:
            mapping = self.mapping_at(thread.sp)
            thread.stack = (mapping.start, mapping.end) if mapping and mapping.writable else None

    # -- modules ----------------------------------------------------------------------------------------------------
    def find_modules(self, extra: list[Mapping] = ()) -> None:
        """Modules from the mapped files: each mapping of a file's beginning that is an ELF header starts one."""
        self.modules = []
        for mapping in sorted([m for m in self.mappings if m.path] + list(extra), key=lambda m: m.start):
            last = self.modules[-1] if self.modules else None
            if mapping.file_offset == 0 and not (last and last.start <= mapping.start < last.end and len(last.phdrs)):
                module = module_at(self.space, mapping.path, mapping.start, mapping.end)
                if module is not None:
                    self.modules.append(module)
            elif last and last.path == mapping.path:
                last.end = max(last.end, mapping.end)
        runs = {mapping.path for mapping in self.mappings if "x" in mapping.perms}
        self.modules = [module for module in self.modules if len(module.phdrs) or module.path in runs]

    def match_files(self, exe: str = "", sysroot: str = "") -> None:
        """Find each module's file on disk (under `sysroot` when given); used only when its build-id is the target's."""
        main = self.executable()
        for module in self.modules:
            candidates = [exe] if module is main and exe else []
            if module.path.startswith("/"):
                candidates += [resolve(sysroot, path)
                               for path in dict.fromkeys((module.path, module.path.replace(" (deleted)", "")))]
            for path in candidates:
                elf = open_elf(path)
                if elf is None or not module.build_id or not elf.build_id:
                    continue
                if elf.build_id != module.build_id:
                    module.mismatch = (f"{path} is another build (build-id {elf.build_id[:12]}, "
                                       f"the target's is {module.build_id[:12]})")
                elif module.file is None or elf.is_image:   # a file of symbols alone serves until there is better
                    module.file = elf
                    if not len(module.phdrs) and elf.is_image:
                        set_headers(module, elf.phdrs)
                    if elf.is_image:
                        break
            if module.file is not None:
                module.mismatch = ""

    def executable(self) -> Module | None:
        """The program itself: the module that holds the program headers the kernel named (AT_PHDR), else the first."""
        at_phdr = self.auxv.get(3, 0)
        return self.module_at(at_phdr) or (self.modules[0] if self.modules else None)

    def module_at(self, address: int) -> Module | None:
        """The module whose mappings hold `address`, or None."""
        for module in self.modules:
            if module.start <= address < module.end:
                return module
        return None

    def symbols_of(self, module: Module) -> SymbolTable | None:
        """The module's own symbols: from its file when that is the right one, else from memory; None without any."""
        if module.start not in self._tables:
            table = module.file.symbols(module.bias) if module.file else None
            self._tables[module.start] = table or module.memory_symbols(self.space)
        return self._tables[module.start]

    # -- symbols ----------------------------------------------------------------------------------------------------
    def symbol(self, name: str) -> int | None:
        """The address of a variable or function by name: the executable's first, then GDB's, then any module's."""
        main = self.executable()
        order = ([main] if main else []) + [module for module in self.modules if module is not main]
        for module in order:
            table = self.symbols_of(module)
            address = table.address(name) if table is not None else None
            if address is not None:
                return address
        return self.debugger.address(name) if self.debugger else None

    def name_of(self, address: int) -> str:
        """`module!symbol+0x1a`, `module+0x2f00` when no symbol covers it, "" outside of every module."""
        module = self.module_at(address)
        if module is None:
            return ""
        found = self.debugger.name(address) if self.debugger else None
        if found is None:
            table = self.symbols_of(module)
            found = table.nearest(address) if table is not None else None
        if found is None:
            return f"{module.name}+{address - module.bias:#x}"
        name, offset = found
        return f"{module.name}!{name}" + (f"+{offset:#x}" if offset else "")

    def word(self, address: int) -> int | None:
        """The word at `address`, or None when it is absent."""
        try:
            return self.space.word(address)
        except Absent:
            return None

    def command_name(self) -> str:
        """The program's name, as a person would say it."""
        main = self.executable()
        return main.name if main else os.path.basename(self.source.path)
