"""What has to be known of a core file before GDB starts: whether it is one, and which executable it is of.

Standard library only, and a few kilobytes read: the shell command starts in no time.
"""
import mmap
import os
import stat
import struct
from typing import BinaryIO, Dict, Iterator, List, NamedTuple, Optional, Tuple

from .target.sysroot import resolve

ET_CORE = 4
PT_LOAD, PT_NOTE = 1, 4
PN_XNUM = 0xFFFF
NT_GNU_BUILD_ID, NT_AUXV, NT_FILE = 3, 6, 0x46494C45
AT_PHDR = 3
COMPRESSED = {b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"\x1f\x8b": "gzip",
              b"\x04\x22\x4d\x18": "lz4", b"BZh": "bzip2"}
LARGEST_NOTE = 64 << 20


class NotACore(Exception):
    """The file cannot be analysed; the message says why, and what mends it."""


class Segment(NamedTuple):
    """A program header: kind, file offset, address, bytes in the file."""

    kind: int
    offset: int
    address: int
    size: int


class Core(NamedTuple):
    """The segments of a core file, and the files that were mapped: (start, end, offset in bytes, path)."""

    path: str
    order: str
    segments: List[Segment]
    mappings: List[Tuple[int, int, int, str]]
    auxv: Dict[int, int]


def open_core(path: str) -> Core:
    """Read the headers and notes of a core. Raises NotACore."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            kind = "a directory" if os.path.isdir(path) else "no regular file"
            raise NotACore(f"{path} is {kind}, not a core file")
        with open(path, "rb") as file:
            order = _check_header(file, path)
            segments = _segments(file, order)
            notes = [note for segment in segments if segment.kind == PT_NOTE
                     for note in _notes(_read(file, segment.offset, min(segment.size, LARGEST_NOTE)), order)]
    except OSError as error:
        raise NotACore(f"cannot read {path!r}: {error.strerror}") from None
    kinds = dict(reversed(notes))
    return Core(path, order, segments, _file_mappings(kinds.get(NT_FILE, b""), order),
                dict(struct.iter_unpack(order + "QQ", _whole(kinds.get(NT_AUXV, b""), 16))))


def _check_header(file: BinaryIO, path: str) -> str:
    """The byte order of the core, in struct's notation. Raises NotACore."""
    head = file.read(64)
    if not head:
        raise NotACore(f"{path} is empty")
    for magic, tool in COMPRESSED.items():
        if head.startswith(magic):
            raise NotACore(f"{path} is compressed; decompress it first: {tool} -dc {path} > core")
    if head[:4] != b"\x7fELF":
        raise NotACore(f"{path} is no core file (no ELF header)")
    if len(head) < 64:
        raise NotACore(f"{path} is cut short within its first header")
    order = ">" if head[5] == 2 else "<"
    if struct.unpack_from(order + "H", head, 16)[0] != ET_CORE:
        raise NotACore(f"{path} is an ELF file, but no core file (an executable goes with --exe)")
    if head[4] != 2:
        raise NotACore(f"{path} is the core of a 32-bit process, which is not supported yet")
    return order


def _segments(file: BinaryIO, order: str) -> List[Segment]:
    head = _read(file, 0, 64)
    table, sections = struct.unpack_from(order + "QQ", head, 32)
    size, count = struct.unpack_from(order + "HH", head, 54)
    if count == PN_XNUM:  # more than fit: the number is in the first section header
        extended = _read(file, sections + 44, 4)
        count = struct.unpack(order + "I", extended)[0] if len(extended) == 4 else 0
    if size != 56:
        return []
    rows = struct.iter_unpack(order + "IIQQQQQQ", _whole(_read(file, table, count * size), size))
    return [Segment(kind, offset, address, filesz) for kind, _, offset, address, _, filesz, _, _ in rows]


def _notes(data: bytes, order: str) -> Iterator[Tuple[int, bytes]]:
    """(type, contents) of each ELF note."""
    at = 0
    while at + 12 <= len(data):
        name_size, size, kind = struct.unpack_from(order + "III", data, at)
        start = at + 12 + -(-name_size // 4) * 4
        yield kind, data[start:start + size]
        at = start + -(-size // 4) * 4


def _file_mappings(note: bytes, order: str) -> List[Tuple[int, int, int, str]]:
    if len(note) < 16:
        return []
    count, unit = struct.unpack_from(order + "QQ", note)
    rows_end = 16 + 24 * count
    names = note[rows_end:].split(b"\0")
    rows = struct.iter_unpack(order + "QQQ", _whole(note[16:rows_end], 24))
    return [(start, end, page * unit, os.fsdecode(name)) for (start, end, page), name in zip(rows, names)]


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    """What there is of `size` bytes at `offset`, which both may be nonsense."""
    available = os.fstat(file.fileno()).st_size - offset
    if available <= 0:
        return b""
    file.seek(offset)
    return file.read(min(size, available))


def _whole(data: bytes, size: int) -> bytes:
    """`data` without an incomplete last row: the core may be cut short."""
    return data[:len(data) // size * size]


def executable(core: Core, sysroot: str = "") -> Tuple[Optional[str], Optional[str]]:
    """(path, None) of the executable that the core is of, if this build is here; else (None, why not)."""
    start, name = main_program(core)
    if not name:
        return None, "the core does not name its executable; name it with --exe"
    name = name[:-len(" (deleted)")] if name.endswith(" (deleted)") else name
    path = resolve(sysroot, name)
    with open(core.path, "rb") as file:
        ours = build_id(lambda address, size: memory(core, file, address, size), start, core.order)
    if not ours:
        return None, f"the core does not hold the build-id of {name}; name the executable with --exe"
    if not os.path.isfile(path):
        return None, f"{path} is not on this machine; a copy goes with --exe or --sysroot"
    theirs = file_build_id(path)
    if theirs != ours:
        return None, (f"{path} is another build (build-id {theirs or 'none'}, the core has {ours}); "
                      "the right one goes with --exe or --sysroot")
    return path, None


def main_program(core: Core) -> Tuple[int, str]:
    """(first address, path) of the mapped file with the executable's program headers; (0, "") if unknown."""
    headers = core.auxv.get(AT_PHDR, 0)
    paths = [path for start, end, _, path in core.mappings if start <= headers < end]
    starts = [start for start, _, offset, path in core.mappings if paths and path == paths[0] and not offset]
    return (starts[0], paths[0]) if starts else (0, "")


def memory(core: Core, file: BinaryIO, address: int, size: int) -> bytes:
    """What the core, opened as `file`, has of `size` bytes at `address`."""
    for segment in core.segments:
        if segment.kind == PT_LOAD and segment.address <= address < segment.address + segment.size:
            inside = address - segment.address
            return _read(file, segment.offset + inside, min(size, segment.size - inside))
    return b""


def build_id(read, start: int, order: str) -> str:
    """The build-id (hex) of the ELF image at address `start` of what `read(address, size)` reads, or ""."""
    head = read(start, 64)
    if head[:5] != b"\x7fELF\2" or len(head) < 64:
        return ""
    table, = struct.unpack_from(order + "Q", head, 32)
    size, count = struct.unpack_from(order + "HH", head, 54)
    if size != 56:
        return ""
    # The first pages of file and image are the same, so the offset in the file serves in both.
    for kind, _, offset, _, _, length, _, _ in struct.iter_unpack(
            order + "IIQQQQQQ", _whole(read(start + table, size * count), size)):
        if kind == PT_NOTE:
            for note, contents in _notes(read(start + offset, min(length, 1 << 16)), order):
                if note == NT_GNU_BUILD_ID and contents:
                    return contents.hex()
    return ""


def file_build_id(path: str) -> str:
    """The build-id (hex) of an ELF file, or "" when it has none or cannot be read."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            order = ">" if data[5:6] == b"\2" else "<"
            return build_id(lambda offset, size: data[offset:offset + size], 0, order)
    except (OSError, ValueError):
        return ""
