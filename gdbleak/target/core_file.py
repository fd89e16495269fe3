"""A core file as a Target: its memory mapped as it lies, its notes read, its modules found and matched with files."""
from __future__ import annotations

import os
import re

from elftools.common.exceptions import ELFError
from elftools.construct.core import ConstructError
from elftools.elf.elffile import ELFFile

from . import threads as threads_
from .address_space import PAGE, AddressSpace
from .core_writer import NOTE_NAME
from .elf import PF_W, PT_LOAD
from .target import ANONYMOUS, Mapping, Source, Target, TargetError

_ARM_TLS = 0x401
_VECTORS = ("NT_FPREGSET", 0x202)    # FXSAVE; NT_X86_XSTATE, which begins with the same and has more
_LAST = (1 << 64) - 1  # no address lies beyond
_REASONS = 10  # of a snapshot, not to copy something; there are fewer
_FILE_ROOM = 1 << 32  # address space kept for files that turn out to be the target's


def _parse(stream, path: str):
    try:
        elf = ELFFile(stream)
        segments = [(s["p_type"], s) for s in elf.iter_segments()]
    except (ELFError, ConstructError, ValueError, KeyError, IndexError, OSError, OverflowError) as error:
        raise TargetError(f"{path} is not a complete ELF core file: "
                          f"{(str(error).splitlines() or ['cut short'])[0]}") from None
    if elf.elfclass != 64:
        raise TargetError(f"{path} is a 32-bit core: not supported yet")
    if elf.header["e_type"] != "ET_CORE":
        raise TargetError(f"{path} is an ELF file but no core file")
    if not elf.little_endian:
        raise TargetError(f"{path} is big-endian: not supported")
    return elf, segments


def _notes(segments, size: int):
    """(type, raw description, description) of every note that is whole; the type of one of ours is its name."""
    for kind, segment in segments:
        if kind != "PT_NOTE" or segment["p_offset"] + 12 > size:
            continue
        try:
            for note in segment.iter_notes():
                kind = NOTE_NAME if note["n_name"] == NOTE_NAME else note["n_type"]
                yield kind, note["n_descdata"], note["n_desc"]
        except (ELFError, ConstructError, ValueError, KeyError, IndexError, OSError, OverflowError):
            continue


def open_core(path: str, exe: str = "", sysroot: str = "") -> Target:
    """Open a core file. `exe`: the program's file when known; `sysroot`: where the target's files lie on this machine.

    Raises TargetError with one line that says what is wrong.
    """
    try:
        stream = open(path, "rb")
    except OSError as error:
        raise TargetError(f"cannot open {path}: {error.strerror}") from None
    with stream:
        size = os.fstat(stream.fileno()).st_size
        elf, segments = _parse(stream, path)
        machine = elf.header["e_machine"]
        arch = {"EM_X86_64": threads_.X86_64, "EM_AARCH64": threads_.AARCH64}.get(machine)
        if arch is None:
            raise TargetError(f"{path} is of machine {machine}: only x86-64 and aarch64 are supported")
        space = AddressSpace(2 * size + _FILE_ROOM)   # twice: segments that are not aligned are copied
        base = space.map_file(stream.fileno(), 0, size)
        source = Source("core", path)
        mappings = []
        cut: list[tuple[int, int]] = []
        for kind, segment in segments:
            if kind != "PT_LOAD":
                continue
            start, filesz, offset = segment["p_vaddr"], segment["p_filesz"], segment["p_offset"]
            end = start + max(segment["p_memsz"], filesz)
            if end > _LAST:
                source.partial.append(f"a program header of the core file is damaged: it claims {start:#x}-{end:#x}")
                continue
            there = max(0, min(filesz, size - offset))
            if there < filesz:
                cut.append((start + there, start + filesz))
            space.add(start, start + there, _aligned(space, base + offset, start, there))
            flags = segment["p_flags"]
            perms = "".join(letter if flags & bit else "-" for letter, bit in (("r", 4), ("w", 2), ("x", 1)))
            mappings.append(Mapping(start, end, perms))
        mappings.sort(key=lambda mapping: mapping.start)
        if not mappings:
            raise TargetError(f"{path} holds no memory")
        if cut:
            source.partial.append(f"the core file is cut short: {sum(end - start for start, end in cut):,} bytes of "
                                  "memory are missing from it")
        auxv: dict[int, int] = {}
        found: list[threads_.Thread] = []
        files: list[Mapping] = []
        for kind, raw, parsed in _notes(segments, size):
            raw = raw.encode("latin-1") if isinstance(raw, str) else bytes(raw)
            if kind == "NT_PRSTATUS":
                thread = threads_.from_prstatus(raw, arch)
                if thread is not None:
                    found.append(thread)
                    source.pid = source.pid or thread.lwp
            elif kind == "NT_PRPSINFO" and not isinstance(parsed, (bytes, str)):
                source.pid = int(parsed["pr_pid"]) or source.pid
            elif kind == "NT_AUXV":
                words = [int.from_bytes(raw[k:k + 8], "little") for k in range(0, len(raw) // 16 * 16, 8)]
                auxv = dict(zip(words[::2], words[1::2]))
            elif kind in _VECTORS and found and len(raw) > len(found[-1].vectors) + 32:
                found[-1].vectors = raw[32:]             # before: addresses of the last x87 instruction and its data
            elif kind == _ARM_TLS and found:
                found[-1].registers["tpidr"] = int.from_bytes(raw[:8], "little")
            elif kind == NOTE_NAME:
                source.partial += _missing(raw)
            elif kind == "NT_FILE" and not isinstance(parsed, (bytes, str)):
                unit = int(parsed["page_size"])
                for entry, name in zip(parsed["Elf_Nt_File_Entry"], parsed["filename"]):
                    files.append(Mapping(entry["vm_start"], entry["vm_end"], "",
                                         name.decode("utf-8", "surrogateescape"), entry["page_offset"] * unit))
    if not found:
        source.partial.append("the core file names no thread: its notes are missing or cut")
    target = Target(source, space, arch, mappings, found, auxv)
    _name_mappings(target, files)
    target.find_modules([f for f in files if target.mapping_at(f.start) is None])
    target.match_files(exe, sysroot)
    _map_files(target, cut)
    target.find_stacks()
    _measure_coverage(target)
    return target


def _missing(note: bytes) -> list[str]:
    """What the note of a snapshot says about memory that was not copied: a line for each reason."""
    found: dict[str, list[int]] = {}
    for line in note.decode("utf-8", "replace").splitlines():
        match = re.fullmatch(r"([0-9a-f]{1,16}) ([0-9a-f]{1,16}) (.+)", line)
        size = int(match[2], 16) - int(match[1], 16) if match else 0
        if size > 0 and (match[3] in found or len(found) < _REASONS):        # else it is damaged
            found.setdefault(match[3], []).append(size)
    return [f"{sum(sizes):,} bytes in {len(sizes):,} stretch{'es' * (len(sizes) != 1)} of memory were not copied from "
            f"the process: {reason}" for reason, sizes in found.items()]


def _aligned(space: AddressSpace, offset: int, start: int, size: int) -> int:
    """The buffer offset of a segment, copied when the file has it at another place within a word than memory had."""
    if not (offset - start) & 7 or not size:
        return offset
    place = space.allocate(size + 8) + (start & 7)
    space.bytes[place:place + size] = space.bytes[offset:offset + size]
    return place


def _name_mappings(target: Target, files: list[Mapping]) -> None:
    """Give the mappings the file names of NT_FILE, cutting a mapping where a file ends inside it."""
    by_start = {f.start: f for f in files}
    for mapping in target.mappings:
        entry = by_start.get(mapping.start)
        if entry and not entry.path.startswith(ANONYMOUS):
            mapping.path, mapping.file_offset = entry.path, entry.file_offset
        elif mapping.start == target.auxv.get(33):
            mapping.path = "[vdso]"
        elif mapping.start >= 1 << 63:
            mapping.path = "[vsyscall]"


def _map_files(target: Target, cut: list[tuple[int, int]]) -> None:
    """Read-only pages that the core left out because a file has them: from that file, if it is the very same build.

    Only the gaps: what the core has is what memory had. Writable segments are left alone, as the file does not have
    what the program wrote there; so is what was in the core and is cut off from it.
    """
    for module in target.modules:
        if module.file is None or not module.file.is_image:
            continue
        with open(module.file.path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            for row in module.phdrs[(module.phdrs["type"] == PT_LOAD) & (module.phdrs["flags"] & PF_W == 0)]:
                start = module.bias + (int(row["vaddr"]) & ~(PAGE - 1))
                offset = int(row["offset"]) & ~(PAGE - 1)
                end = min(module.bias + int(row["vaddr"]) + int(row["filesz"]), start + size - offset)
                if not 0 <= start < end <= _LAST:
                    continue
                known = target.space.present(start, end) + [gap for gap in cut if gap[0] < end and start < gap[1]]
                if known == [(start, end)]:
                    continue
                try:
                    place = target.space.map_file(stream.fileno(), offset, end - start)
                except (MemoryError, OSError) as error:
                    target.source.partial.append(f"{module.file.path} could not be mapped: {error}")
                    continue
                at = start
                for low, high in sorted(known) + [(end, end)]:
                    target.space.add(at, min(low, end), place + at - start)
                    at = max(at, high)


def _measure_coverage(target: Target) -> None:
    """Set `coverage`: the share of the readable mappings' bytes that is there; name the files of another build."""
    readable = [m for m in target.mappings if "r" in m.perms and m.path not in ("[vsyscall]", "[vvar]")]
    total = sum(m.size for m in readable)
    there = sum(high - low for m in readable for low, high in target.space.present(m.start, m.end))
    target.source.coverage = there / total if total else 0.0
    for module in target.modules:
        if module.mismatch:
            target.source.partial.append(f"{module.mismatch}: not used; --sysroot DIR names where "
                                         "the target's files lie")
