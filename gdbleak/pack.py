"""Puts what belongs to a core file beside it: the executable and the libraries, of the very builds that ran.

`CORE.files` is laid out like the root directory of the target, for GDB's `set sysroot`: the files by the paths that
were mapped, links by the names that the dynamic linker used, debug files where there are any, links by build-id as
GDB looks for them, and the list `build-ids`. Standard library only, Python 3.6 or later.
"""
import contextlib
import errno
import os
import shutil
import stat
import struct
from typing import BinaryIO, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from .core_probe import AT_PHDR, Core, build_id, file_build_id, main_program, memory, open_core
from .target.live import mappings, program_files
from .target.sysroot import resolve

AT_PHENT, AT_PHNUM = 4, 5
PT_DYNAMIC, PT_PHDR, DT_DEBUG = 2, 6, 21
DEBUG_FILES = "/usr/lib/debug/.build-id"
MOST_LIBRARIES = 10000
LONGEST_PATH = 4096


class Packed(NamedTuple):
    """What was done: the directory, (build-id, path) of each file there, (build-id, path, reason) of others."""

    directory: str
    files: List[Tuple[str, str]]
    missing: List[Tuple[str, str, str]]
    executable: str
    size: int


class Files:
    """The files of this machine, or of the one whose root directory `sysroot` is."""

    def __init__(self, sysroot: str = ""):
        self._sysroot = sysroot

    def open(self, path: str) -> BinaryIO:
        """A file of the target. Raises OSError."""
        fd = os.open(resolve(self._sysroot, path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO keeps nobody
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is no regular file")
        return os.fdopen(fd, "rb")

    def close(self) -> None:
        """Nothing is kept open."""


class MappedFiles(Files):
    """The programs and libraries that a process has mapped, opened now: as they were mapped, deleted or replaced since,
    in a container or not. All else of its root directory by path. `tid`: a living thread of it."""

    def __init__(self, tid: int):
        super().__init__("/proc/%d/root" % tid)
        self._opened: Dict[str, int] = {}
        maps = mappings(tid)
        programs = program_files(maps)
        for mapping in maps:
            if (mapping.device, mapping.inode) in programs and mapping.path not in self._opened:
                fd = self._find(tid, mapping)
                if fd is not None:
                    self._opened[mapping.path] = fd

    @staticmethod
    def _find(tid, mapping) -> Optional[int]:
        places = ["/proc/%d/map_files/%x-%x" % (tid, mapping.start, mapping.end)]       # root's alone
        with contextlib.suppress(OSError):
            if os.readlink("/proc/%d/exe" % tid).replace(" (deleted)", "") == mapping.path:
                places.append("/proc/%d/exe" % tid)
        if not mapping.deleted:
            places.append("/proc/%d/root%s" % (tid, mapping.path))
        for place in places:
            with contextlib.suppress(OSError):
                return os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return None

    def open(self, path: str) -> BinaryIO:
        if path in self._opened:
            return open("/proc/self/fd/%d" % self._opened[path], "rb")
        return super().open(path)

    def close(self) -> None:
        """Close the files."""
        while self._opened:
            os.close(self._opened.popitem()[1])


def directory_of(core_path: str) -> str:
    """Where the files of a core are put."""
    return core_path + ".files"


def pack(core_path: str, files: Files) -> Packed:
    """Put the files of a core beside it. Raises NotACore, OSError when it cannot be written."""
    core = open_core(core_path)
    directory = directory_of(core_path)
    os.makedirs(directory, exist_ok=True)
    main = plain(main_program(core)[1])
    packed, missing, size = [], [], 0
    with open(core_path, "rb") as stream:
        names = linker_names(core, stream)
        for start, mapped in images(core, stream):
            path = plain(mapped)

            def read(address, count):
                return memory(core, stream, address, count)

            number = build_id(read, start, core.order)
            problem, count = _take(files, path, number, read(start, 4096), directory)
            if problem:
                missing.append((number, path, problem))
                continue
            packed.append((number, path))
            size += count
            for name in [mapped, *names.get(path, ())]:
                _link(directory, path, name)
            if number:
                _link(directory, path, "%s/%s/%s" % (DEBUG_FILES, number[:2], number[2:]))
                size += _take_debug_file(files, number, directory)
    with open(os.path.join(directory, "build-ids"), "w", errors="backslashreplace") as out:
        out.writelines("%s %s\n" % (number or "-", path) for number, path in packed)
        out.writelines("%s %s: not here, %s\n" % (number or "-", path, reason) for number, path, reason in missing)
    executable = _place(directory, main) if main in [path for _, path in packed] else ""
    return Packed(directory, packed, missing, executable, size)


def plain(path: str) -> str:
    """The path of a mapped file without the kernel's mark of a deleted one."""
    return path[:-len(" (deleted)")] if path.endswith(" (deleted)") else path


def images(core: Core, stream: BinaryIO) -> Iterator[Tuple[int, str]]:
    """(first address, path) of each ELF file that was mapped."""
    seen: Set[str] = set()
    for start, _, offset, path in core.mappings:
        if not offset and path.startswith("/") and path not in seen and memory(core, stream, start, 4) == b"\x7fELF":
            seen.add(path)
            yield start, path


def linker_names(core: Core, stream: BinaryIO) -> Dict[str, List[str]]:
    """{path of a mapped file: names that the dynamic linker knows it by}, from its own list; {} without one."""
    names: Dict[str, List[str]] = {}
    at, seen = _link_map(core, stream), 0
    while at and seen < MOST_LIBRARIES:
        entry = memory(core, stream, at, 32)
        if len(entry) < 32:
            break
        _, name_at, dynamic, at = struct.unpack(core.order + "4Q", entry)
        seen += 1
        name = os.fsdecode(memory(core, stream, name_at, LONGEST_PATH).partition(b"\0")[0])
        path = next((path for start, end, _, path in core.mappings if start <= dynamic < end), "")
        if name.startswith("/") and path:
            names.setdefault(plain(path), []).append(name)
    return names


def _link_map(core: Core, stream: BinaryIO) -> int:
    """The address of the dynamic linker's first entry, 0 when there is none."""
    table, size, count = (core.auxv.get(tag, 0) for tag in (AT_PHDR, AT_PHENT, AT_PHNUM))
    headers = {}
    for k in range(min(count, 1000)):
        header = memory(core, stream, table + k * size, 56)
        if len(header) == 56:
            kind, address = struct.unpack_from(core.order + "I12xQ", header)
            headers[kind] = address
    at = headers.get(PT_DYNAMIC, 0) + table - headers.get(PT_PHDR, table)
    for _ in range(1000 if PT_DYNAMIC in headers else 0):
        entry = memory(core, stream, at, 16)
        tag, value = struct.unpack(core.order + "2Q", entry) if len(entry) == 16 else (0, 0)
        if tag == DT_DEBUG:
            found = memory(core, stream, value + 8, 8)
            return struct.unpack(core.order + "Q", found)[0] if len(found) == 8 else 0
        if not tag:
            break
        at += 16
    return 0


def _take(files: Files, path: str, number: str, first_page: bytes, directory: str) -> Tuple[str, int]:
    """Copy a file of the target, if it is the right one: (why not, bytes)."""
    try:
        source = files.open(path)
    except FileNotFoundError:
        return "there is no such file", 0
    except PermissionError:
        return "no permission to read it", 0
    except OSError as error:
        return error.strerror or str(error), 0
    with source:
        theirs = file_build_id("/proc/self/fd/%d" % source.fileno())
        if number != theirs or not number and source.read(len(first_page)) != first_page:
            return "the file is another build: %s" % (theirs or "its first page differs"), 0
        source.seek(0)
        return "", _write(source, _place(directory, path))


def _take_debug_file(files: Files, number: str, directory: str) -> int:
    path = "%s/%s/%s.debug" % (DEBUG_FILES, number[:2], number[2:])
    try:
        with files.open(path) as source:
            return _write(source, _place(directory, path))
    except OSError:
        return 0


def _write(source: BinaryIO, path: str) -> int:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path):
        os.unlink(path)
    with open(path, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
        size = target.tell()
    status = os.fstat(source.fileno())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))     # GDB warns of a file that is newer than the core
    return size


def _place(directory: str, path: str) -> str:
    """Where a path of the target, which may be any text, is in the directory: never outside of it."""
    return os.path.join(directory, os.path.normpath("/" + path).lstrip("/"))


def _link(directory: str, path: str, name: str) -> None:
    """Have `name` lead to the file `path`, both of the target. A link is a help: where it cannot be, it is not."""
    target, link = _place(directory, path), _place(directory, name)
    if link != target:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(link), exist_ok=True)
            if os.path.islink(link):
                os.unlink(link)
            os.symlink(os.path.relpath(target, os.path.dirname(link)), link)
