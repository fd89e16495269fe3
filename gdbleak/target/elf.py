"""ELF images, as files on disk and as they lie in target memory: program headers, build-id, dynamic section,
symbols."""
from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from .address_space import Absent, AddressSpace

EHDR = np.dtype({"names": ["ident", "type", "machine", "entry", "phoff", "shoff", "phentsize", "phnum", "shnum"],
                 "formats": ["V16", "u2", "u2", "u8", "u8", "u8", "u2", "u2", "u2"],
                 "offsets": [0, 16, 18, 24, 32, 40, 54, 56, 60], "itemsize": 64})
PHDR = np.dtype([("type", "u4"), ("flags", "u4"), ("offset", "u8"), ("vaddr", "u8"), ("paddr", "u8"),
                 ("filesz", "u8"), ("memsz", "u8"), ("align", "u8")])
SHDR = np.dtype([("name", "u4"), ("type", "u4"), ("flags", "u8"), ("addr", "u8"), ("offset", "u8"), ("size", "u8"),
                 ("link", "u4"), ("info", "u4"), ("addralign", "u8"), ("entsize", "u8")])
SYM = np.dtype([("name", "u4"), ("info", "u1"), ("other", "u1"), ("shndx", "u2"), ("value", "u8"), ("size", "u8")])
PT_LOAD, PT_DYNAMIC, PT_INTERP, PT_NOTE, PT_TLS = 1, 2, 3, 4, 7
PF_W = 2
SHT_SYMTAB, SHT_NOTE, SHT_NOBITS, SHT_DYNSYM, SHF_ALLOC = 2, 7, 8, 11, 2
DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SONAME, DT_DEBUG, DT_GNU_HASH = 4, 5, 6, 10, 14, 21, 0x6ffffef5
NT_GNU_BUILD_ID = 3
STT_TLS = 6
_MOST_SYMBOLS = 1 << 20   # a damaged hash table has no end


def build_id_of_notes(notes: bytes) -> str:
    """The build-id (hex) among raw ELF notes, or an empty string."""
    at = 0
    while at + 12 <= len(notes):
        name_size, desc_size, kind = (int.from_bytes(notes[at + k:at + k + 4], "little") for k in (0, 4, 8))
        name = at + 12
        desc = name + (name_size + 3) // 4 * 4
        if kind == NT_GNU_BUILD_ID and notes[name:name + 4] == b"GNU\0" and 0 < desc_size <= 64:
            return notes[desc:desc + desc_size].hex()
        at = desc + (desc_size + 3) // 4 * 4
    return ""


class SymbolTable:
    """Symbols of one image with absolute addresses, sorted by address: arrays and one string table."""

    def __init__(self, symbols: np.ndarray, strings: bytes, bias: int):
        """`symbols`: rows of SYM; `strings`: the string table they point into; `bias`: what to add to a value."""
        somewhere = (symbols["value"] != 0) | (symbols["info"] & 15 == STT_TLS)
        defined = symbols[(symbols["shndx"] != 0) & (symbols["shndx"] < 0xff00) & somewhere]
        order = np.argsort(defined["value"], kind="stable")
        self._rows = defined[order]
        self._strings = strings
        located = self._rows[(self._rows["info"] & 15) < 3]  # NOTYPE, OBJECT, FUNC
        self.bias = bias
        self._located = located
        self._addresses = located["value"] + np.uint64(bias)

    def __len__(self) -> int:
        return len(self._rows)

    def _name(self, row) -> str:
        start = int(row["name"])
        return self._strings[start:self._strings.find(b"\0", start)].decode("utf-8", "replace")

    def row(self, name: str):
        """The symbol of that name (a row of SYM), or None."""
        key = name.encode() + b"\0"
        at, places = self._strings.find(key), []
        while at >= 0:
            places.append(at)
            at = self._strings.find(key, at + 1)
        if not places:
            return None
        hits = self._rows[np.isin(self._rows["name"], np.array(places, np.uint32))]
        return hits[-1] if len(hits) else None

    def address(self, name: str) -> int | None:
        """The address of a variable or function, or None."""
        row = self.row(name)
        return None if row is None or row["info"] & 15 == STT_TLS else int(row["value"]) + self.bias

    def nearest(self, address: int) -> tuple[str, int] | None:
        """(name, offset into it) of the symbol that contains `address`; one of unknown size contains what follows."""
        k = int(np.searchsorted(self._addresses, np.uint64(address), "right")) - 1
        for k in range(k, max(k - 8, -1), -1):
            offset = address - int(self._addresses[k])
            size = int(self._located[k]["size"])
            if offset < size or (size == 0 and k == len(self._addresses) - 1) or \
                    (size == 0 and address < int(self._addresses[k + 1]) and offset < 1 << 16):
                return self._name(self._located[k]), offset
        return None


    def begins(self, addresses: np.ndarray) -> np.ndarray:
        """Where the symbol that contains each address (uint64) begins; 0 where no symbol of known size does."""
        if not len(self._addresses):
            return np.zeros(len(addresses), np.uint64)
        found = np.zeros(len(addresses), np.uint64)
        k = np.searchsorted(self._addresses, addresses, "right") - 1
        for back in range(8):                    # of several that overlap, the next one below
            at = np.maximum(k - back, 0)
            inside = (found == 0) & (k >= back) & (addresses - self._addresses[at] < self._located["size"][at])
            found[inside] = self._addresses[at[inside]]
        return found

    def thread_local(self, offset: int) -> str:
        """The name of the thread-local variable at an offset of the image's TLS block, or ""."""
        rows = self._rows[self._rows["info"] & 15 == STT_TLS]
        for row in rows[(rows["value"] <= offset)]:
            if offset < int(row["value"]) + max(int(row["size"]), 1):
                return self._name(row)
        return ""


class ElfFile:
    """A 64-bit ELF file on disk; opened by `open_elf`. `build_id`; `phdrs`, `sections` (rows of PHDR and SHDR); symbols on
    request. Raises ValueError for what is none.

    `is_image`: it has the bytes of its segments; a separate debug file has symbols alone.
    """

    def __init__(self, path: str):
        self.path = path
        with open(path, "rb") as stream:
            head = stream.read(EHDR.itemsize)
            if head[:6] != b"\x7fELF\2\1" or len(head) < EHDR.itemsize:
                raise ValueError(f"{path} is no 64-bit ELF file")
            header = np.frombuffer(head, EHDR)[0]
            self.phdrs = _rows(stream, int(header["phoff"]), int(header["phnum"]), PHDR)
            count = int(header["shnum"])
            if not count and header["shoff"]:                     # too many for the header: the first section says how many
                count = int(_rows(stream, int(header["shoff"]), 1, SHDR)["size"].sum())
            self.sections = _rows(stream, int(header["shoff"]), count, SHDR)
            # Not by program headers at first: those of a debug file lead elsewhere.
            notes = self.sections[self.sections["type"] == SHT_NOTE]
            segments = self.phdrs[self.phdrs["type"] == PT_NOTE]
            places = list(zip(notes["offset"].tolist(), notes["size"].tolist())) + \
                list(zip(segments["offset"].tolist(), segments["filesz"].tolist()))
            found = (build_id_of_notes(_bytes(stream, offset, size)) for offset, size in places if size < 1 << 16)
            self.build_id = next(filter(None, found), "")
        empty = self.sections[(self.sections["type"] == SHT_NOBITS) & (self.sections["flags"] & SHF_ALLOC != 0)]
        loads = self.phdrs[self.phdrs["type"] == PT_LOAD]
        # Whether no segment claims to have the bytes of a section that has none in the file.
        self.is_image = not any(((loads["vaddr"] <= start) & (start - loads["vaddr"] < loads["filesz"])).any()
                                for start in empty["addr"])

    def symbols(self, bias: int) -> SymbolTable | None:
        """.symtab when there is one, else .dynsym; None when there is neither."""
        for kind in (SHT_SYMTAB, SHT_DYNSYM):
            for row in self.sections[self.sections["type"] == kind]:
                with open(self.path, "rb") as stream:
                    symbols = _rows(stream, int(row["offset"]), int(row["size"]) // SYM.itemsize, SYM)
                    strings = self.sections[int(row["link"]):][:1]
                    texts = _bytes(stream, int(strings["offset"].sum()), int(strings["size"].sum()))
                return SymbolTable(symbols, texts, bias)
        return None


def _bytes(stream, offset: int, size: int) -> bytes:
    """What a file has of `size` bytes at an offset; a damaged header can claim more than there is."""
    there = max(min(size, os.fstat(stream.fileno()).st_size - offset), 0)
    stream.seek(offset if there else 0)
    return stream.read(there)


def _rows(stream, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
    """What a file has of `count` structures at an offset."""
    raw = _bytes(stream, offset, count * dtype.itemsize)
    return np.frombuffer(raw[:len(raw) // dtype.itemsize * dtype.itemsize], dtype)


def open_elf(path: str) -> ElfFile | None:
    """The ELF file at `path`, or None when there is none that can be read."""
    try:
        return ElfFile(path) if os.path.isfile(path) else None
    except (OSError, ValueError):
        return None


@dataclass
class Module:
    """A loaded ELF image: the executable, a shared library, the dynamic linker or the vdso."""

    path: str
    start: int                       # first mapped address
    end: int                         # end of the last mapping
    bias: int = 0                    # address = bias + virtual address in the file
    build_id: str = ""               # hex, as it lies in target memory; "" when that page is absent
    phdrs: np.ndarray = field(default_factory=lambda: np.zeros(0, PHDR))
    file: ElfFile | None = None      # the file on disk, only when its build-id is the target's
    mismatch: str = ""               # which file was found and is another build

    @property
    def name(self) -> str:
        return os.path.basename(self.path.replace(" (deleted)", "")) or "?"

    def writable(self) -> list[tuple[int, int]]:
        """(start, end) of its .data and .bss."""
        rows = self.phdrs[(self.phdrs["type"] == PT_LOAD) & (self.phdrs["flags"] & 2 != 0)]
        return [(self.bias + int(row["vaddr"]), self.bias + int(row["vaddr"]) + int(row["memsz"])) for row in rows]

    def dynamic(self, space: AddressSpace) -> dict[int, int]:
        """The dynamic section as it lies in memory (or in the file): tag -> value. Empty when it is absent."""
        rows = self.phdrs[self.phdrs["type"] == PT_DYNAMIC]
        if not len(rows):
            return {}
        try:
            data = space.read(self.bias + int(rows[0]["vaddr"]), int(rows[0]["memsz"]) // 16 * 16)
        except Absent:
            return {}
        return {int(tag): int(value) for tag, value in np.frombuffer(data, "<u8").reshape(-1, 2)[::-1]}

    def memory_symbols(self, space: AddressSpace) -> SymbolTable | None:
        """.dynsym as it lies in target memory; None when it is absent."""
        tags = self.dynamic(space)

        def pointer(tag):
            value = tags.get(tag, 0)
            return value + self.bias if value and value < self.bias else value  # the vdso's are not relocated

        symtab, strtab = pointer(DT_SYMTAB), pointer(DT_STRTAB)
        if not symtab or not strtab:
            return None
        try:
            count = self._symbol_count(space, pointer(DT_HASH), pointer(DT_GNU_HASH), symtab, strtab)
            return SymbolTable(np.frombuffer(space.read(symtab, count * SYM.itemsize), SYM),
                               space.read(strtab, tags.get(DT_STRSZ, 0)), self.bias)
        except Absent:
            return None

    @staticmethod
    def _symbol_count(space, hash_table, gnu_hash, symtab, strtab) -> int:
        """.dynsym does not say how long it is: the hash tables do. Raises Absent."""
        if hash_table:
            return int(np.frombuffer(space.read(hash_table, 8), "<u4")[1])
        if gnu_hash:
            buckets_n, first, bloom_n, _ = (int(x) for x in np.frombuffer(space.read(gnu_hash, 16), "<u4"))
            at = gnu_hash + 16 + 8 * bloom_n
            last = int(np.frombuffer(space.read(at, 4 * buckets_n), "<u4").max(initial=0))
            if last < first:
                return first
            chain = at + 4 * buckets_n + 4 * (last - first)
            while not int.from_bytes(space.read(chain, 4), "little") & 1:
                chain, last = chain + 4, last + 1
                if last > _MOST_SYMBOLS:
                    raise Absent(chain)
            return last + 1
        return max(0, strtab - symtab) // SYM.itemsize


def module_at(space: AddressSpace, path: str, start: int, end: int) -> Module | None:
    """The ELF image whose first page is at `start`; None when those bytes are there and are no ELF header."""
    module = Module(path, start, end)
    try:
        head = space.read(start, 64)
    except Absent:
        return module
    if head[:4] != b"\x7fELF":
        return None
    header = np.frombuffer(head, EHDR)[0]
    try:
        raw = space.read(start + int(header["phoff"]), int(header["phnum"]) * PHDR.itemsize)
    except Absent:
        return module
    set_headers(module, np.frombuffer(raw, PHDR))
    for row in module.phdrs[module.phdrs["type"] == PT_NOTE]:
        try:
            notes = space.read(module.bias + int(row["vaddr"]), min(int(row["filesz"]), 1 << 16))
        except Absent:
            continue
        module.build_id = module.build_id or build_id_of_notes(notes)
    return module


def set_headers(module: Module, phdrs: np.ndarray) -> None:
    """Give a module its program headers, and with them its bias and its end."""
    module.phdrs = phdrs
    loads = phdrs[phdrs["type"] == PT_LOAD]
    if len(loads):
        module.bias = module.start - (int(loads["vaddr"].min()) & ~4095)
        module.end = max(module.end, module.bias + int((loads["vaddr"] + loads["memsz"]).max()))
