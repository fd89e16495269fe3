"""Call stacks out of copied stacks, all at once: the rules of .eh_frame, looked up once per code address.

A recorded stack is the registers at the entry of a hooked function and a copy of the memory from the stack pointer on.
All stacks take a step together, as arrays.
"""
from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np

from .modules import Image, Process

#: Columns of the register file: the callee-saved registers and the stack pointer, by their DWARF numbers.
REGISTERS = {3: 0, 6: 1, 12: 2, 13: 3, 14: 4, 15: 5, 7: 6}
RBP, SP = 1, 6
_RETURN = 16            # DWARF's number of the return address
_SAME = -(1 << 62)      # the register is as it was
_UNKNOWN = _SAME + 1
DEEPEST = 512
TRUNCATED = "[deeper than what was copied]"
_SIGNAL_FRAME = {0: 128, 1: 120, 2: 72, 3: 80, 4: 88, 5: 96, 6: 160}    # where a signal frame keeps the columns
_SIGNAL_RIP = 168


class Rule(NamedTuple):
    """How to get from a code address to its caller. `kind`: see below; `base`: column of the register that the CFA
    counts from; `offset`: the CFA's; `saved`: per column, where it was saved, relative to the CFA."""

    kind: int
    base: int = 0
    offset: int = 0
    saved: tuple = (_SAME,) * len(REGISTERS)


CFA, SIGNAL, FRAME_POINTER, OUTERMOST = range(4)
_BY_FRAME_POINTER = Rule(FRAME_POINTER)
_LAST = Rule(OUTERMOST)


class Tables:
    """The unwind tables of one image; entries are parsed when first asked for."""

    def __init__(self, image: Image):
        self.bias = image.bias
        self._begins = np.zeros(0, np.int64)
        self._rows: dict[int, list] = {}
        if image.elf is not None:
            self._open(image.elf.path)

    def _open(self, path):
        from elftools.common.exceptions import ELFError
        from elftools.dwarf.callframe import FDE, CallFrameInfo
        from elftools.dwarf.structs import DWARFStructs
        from elftools.elf.elffile import ELFFile
        try:
            with open(path, "rb") as stream:
                elf = ELFFile(stream)
                frame, header = elf.get_section_by_name(".eh_frame"), elf.get_section_by_name(".eh_frame_hdr")
                if frame is None or frame["sh_type"] == "SHT_NOBITS":
                    return
                data, address = frame.data(), frame["sh_addr"]
                index = header.data() if header is not None else b""
                self._info = CallFrameInfo(io.BytesIO(data), len(data), address, DWARFStructs(True, 32, 8),
                                           for_eh_frame=True)
            if index[:4] == b"\x01\x1b\x03\x3b" and hasattr(self._info, "_parse_entry_at"):
                count = int.from_bytes(index[8:12], "little")
                pairs = np.frombuffer(index[12:12 + 8 * count], "<i4").reshape(-1, 2).astype(np.int64)
                self._begins, self._entries = pairs[:, 0] + header["sh_addr"], pairs[:, 1] + header["sh_addr"] - address
            else:
                found = sorted((entry["initial_location"], entry.offset) for entry in self._info.get_entries()
                               if isinstance(entry, FDE))
                self._begins, self._entries = np.array(found, np.int64).reshape(-1, 2).T
        except (OSError, ELFError, AssertionError, KeyError, ValueError):
            self._begins = np.zeros(0, np.int64)

    def find(self, pc: int) -> tuple[Rule, int | None]:
        """(the rule at `pc`, where its function begins); without an entry: the frame pointer, and None."""
        at = pc - self.bias
        k = int(np.searchsorted(self._begins, at, "right")) - 1
        if k < 0:
            return _BY_FRAME_POINTER, None
        begin, end, signal, rows = self._parsed(k)
        if not begin <= at < end:
            return _BY_FRAME_POINTER, None
        if signal:
            return Rule(SIGNAL), begin + self.bias
        row = None
        for candidate in rows:
            if candidate["pc"] > at:
                break
            row = candidate
        return _rule(row) if row is not None else _BY_FRAME_POINTER, begin + self.bias

    def _parsed(self, k):
        if k not in self._rows:
            from elftools.common.exceptions import DWARFError
            from elftools.common.exceptions import ELFParseError
            try:
                entry = self._info._parse_entry_at(int(self._entries[k]))
                begin = entry.header.initial_location
                self._rows[k] = (begin, begin + entry.header.address_range,
                                 b"S" in entry.cie.header.augmentation, entry.get_decoded().table)
            except (DWARFError, ELFParseError, AssertionError, KeyError, AttributeError, ValueError):
                self._rows[k] = (0, 0, False, [])
        return self._rows[k]


def _rule(row) -> Rule:
    cfa = row["cfa"]
    if _RETURN in row and row[_RETURN].type == "UNDEFINED":
        return _LAST
    if cfa.expr is not None or cfa.reg not in REGISTERS:
        return _BY_FRAME_POINTER
    saved = [_SAME] * len(REGISTERS)
    for register, column in REGISTERS.items():
        if register in row:
            saved[column] = row[register].arg if row[register].type == "OFFSET" else \
                _SAME if row[register].type == "SAME_VALUE" else _UNKNOWN
    return Rule(CFA, REGISTERS[cfa.reg], cfa.offset, tuple(saved))


class Stacks:
    """Stacks recorded at the entry of a function.

    pc: (n,) where it returns to; registers: (n, 7) after that, in the order of REGISTERS' columns; memory: (n, words)
    a copy of the stack, whose first `length` (n,) words are there; base: (n,) the address of the first."""

    def __init__(self, rows: np.ndarray, memory: np.ndarray):
        """`rows`: with the fields of agent.SLOT."""
        self.pc = rows["return_address"].astype(np.uint64)
        self.registers = np.stack([rows[name] for name in ("rbx", "rbp", "r12", "r13", "r14", "r15", "sp")], axis=1)
        self.base = rows["sp"].astype(np.uint64)
        self.registers[:, SP] += np.uint64(8)
        self.memory = memory
        self.length = rows["stack_length"].astype(np.int64) // 8


class Unwinder:
    """Walks recorded stacks of one process, and names what it finds."""

    def __init__(self, process: Process):
        self.process = process
        self._tables: dict[int, Tables] = {}
        self._rules: dict[int, Rule] = {}
        self._names: dict[int, str] = {}

    def unwind(self, stacks: Stacks) -> list[list[int]]:
        """The code addresses of each stack, innermost first: `pc`, then what each caller will return to. A 0 at the end
        stands for a stack that goes on beyond what was copied."""
        n = len(stacks.pc)
        found: list[list[int]] = [[] for _ in range(n)]
        who = np.arange(n)
        pc, registers = stacks.pc.copy(), stacks.registers.copy()
        exact = np.zeros(n, bool)               # the pc itself, not behind a call: after a signal frame
        for _ in range(DEEPEST):
            if not len(who):
                break
            for index, address in zip(who.tolist(), pc.tolist()):
                found[index].append(address)
            inside = pc - np.where(exact, 0, 1).astype(np.uint64)
            unique, which = np.unique(inside, return_inverse=True)
            rules = [self.rule(address) for address in unique.tolist()]
            kind = np.array([rule.kind for rule in rules], np.int64)[which]
            base = np.array([rule.base for rule in rules], np.int64)[which]
            offset = np.array([rule.offset for rule in rules], np.int64)[which]
            saved = np.array([rule.saved for rule in rules], np.int64).reshape(-1, len(REGISTERS))[which]
            pc, registers, alive, cut = self._step(stacks, who, registers, kind, base, offset, saved)
            for index in who[cut].tolist():
                found[index].append(0)
            exact = (kind == SIGNAL)[alive]
            who, pc, registers = who[alive], pc[alive], registers[alive]
        return found

    def _step(self, stacks, who, registers, kind, base, offset, saved):
        """One frame up: (pc, registers, which go on, which were cut off)."""
        rows = np.arange(len(who))
        sp, rbp = registers[:, SP], registers[:, RBP]
        cfa = registers[rows, base] + offset.astype(np.uint64)
        cfa = np.where(kind == FRAME_POINTER, rbp + np.uint64(16), cfa)
        return_at = np.where(kind == SIGNAL, sp + np.uint64(_SIGNAL_RIP), cfa - np.uint64(8))
        pc, there = self._load(stacks, who, return_at)
        new = registers.copy()
        for column in range(len(REGISTERS)):
            if column == SP:
                continue
            where = saved[:, column]
            at = cfa + where.astype(np.uint64)
            at = np.where(kind == SIGNAL, sp + np.uint64(_SIGNAL_FRAME[column]), at)
            by_pointer = (kind == FRAME_POINTER) & (column == RBP)
            at = np.where(by_pointer, rbp, at)
            wanted = ((kind == CFA) & (where > _UNKNOWN)) | (kind == SIGNAL) | by_pointer
            value, has = self._load(stacks, who, at)
            new[:, column] = np.where(wanted & has, value, np.where((kind == CFA) & (where == _UNKNOWN), 0,
                                                                    registers[:, column]))
        above, has = self._load(stacks, who, sp + np.uint64(_SIGNAL_FRAME[SP]))
        new[:, SP] = np.where(kind == SIGNAL, above, cfa)
        rises = (new[:, SP] > sp) | (kind == SIGNAL) & has
        goes_on = (kind != OUTERMOST) & there & rises & (pc > 4096)
        # A frame pointer is a guess: only what lies within the copied stack and leads into code counts.
        guess = kind == FRAME_POINTER
        if guess.any():
            code = np.array([self.process.image_at(int(value)) is not None if maybe else True
                             for value, maybe in zip(pc.tolist(), (guess & goes_on).tolist())], bool)
            goes_on &= code
        beyond = (kind != OUTERMOST) & ~there & (kind != FRAME_POINTER) & (return_at >= stacks.base[who])
        return pc, new, goes_on, beyond

    @staticmethod
    def _load(stacks, who, address):
        """(the words at these addresses, whether they were copied)."""
        index = (address - stacks.base[who]).astype(np.int64)
        there = (index >= 0) & (index % 8 == 0) & (index // 8 < stacks.length[who])
        at = np.where(there, index // 8, 0)
        return stacks.memory[who, at], there

    def rule(self, address: int) -> Rule:
        """The rule for the code at an address; names it on the way."""
        rule = self._rules.get(address)
        if rule is None:
            image = self.process.image_at(address)
            if image is None:
                rule, self._names[address] = _BY_FRAME_POINTER, "[code of no file]"
            else:
                tables = self._tables.get(image.start)
                if tables is None:
                    tables = self._tables[image.start] = Tables(image)
                rule, begin = tables.find(address)
                self._names[address] = image.name_of(address, begin)
            self._rules[address] = rule
        return rule

    def frames(self, addresses: list[int]) -> list[str]:
        """The names of one unwound stack, outermost first."""
        names = []
        for address in addresses:
            if not address:
                names.append(TRUNCATED)
                continue
            for inside in (address - 1, address):
                if inside in self._names:
                    names.append(self._names[inside])
                    break
        return names[::-1]
