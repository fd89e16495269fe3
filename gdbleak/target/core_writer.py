"""Writes the notes and headers of an ELF core file. Standard library only, Python 3.6 or later."""
import os
import platform
import struct

from .ptrace import NT_PRSTATUS, LiveError, register_set, status_of

PAGE = os.sysconf("SC_PAGE_SIZE")
_NT_FPREGSET, _NT_PRPSINFO, _NT_AUXV, _NT_FILE = 2, 3, 6, 0x46494C45
NOTE_NAME, NOTE_MISSING = "gdbleak", 0x6D697373    # a note of ours; other readers pass over it
_NT_ARM_TLS = 0x401             # the thread pointer; on x86-64 it is one of the general registers
MACHINES = {"x86_64": (62, 216), "aarch64": (183, 272)}    # e_machine, bytes of the general registers
_PT_LOAD, _PT_NOTE, _PN_XNUM = 1, 4, 0xFFFF


def thread_notes(tid, named, parents, register_size):
    """Notes of one stopped thread. named: its id in the core; parents: parent process, process group and session."""
    general = register_set(tid, NT_PRSTATUS)
    if len(general) != register_size:
        raise LiveError("thread %d runs 32-bit code, which is not supported yet: gcore of GDB copies it" % tid)
    floating = register_set(tid, _NT_FPREGSET)
    # struct elf_prstatus: no signal (it did not die of one), identity, times left at 0, registers.
    status = struct.pack("<32x4i64x", named, *parents) + general + struct.pack("<i4x", bool(floating))
    notes = _note(b"CORE", NT_PRSTATUS, status)
    if floating:
        notes += _note(b"CORE", _NT_FPREGSET, floating)
    pointer = register_set(tid, _NT_ARM_TLS) if platform.machine() == "aarch64" else b""
    return notes + (_note(b"LINUX", _NT_ARM_TLS, pointer) if pointer else b"")


def process_note(pid, tid, parents):
    """NT_PRPSINFO: name and arguments. pid: its id in the core; tid: a living thread."""
    with open("/proc/%d/comm" % tid, "rb") as file:
        name = file.read().rstrip(b"\n")[:15]
    with open("/proc/%d/cmdline" % tid, "rb") as file:
        arguments = file.read(79).rstrip(b"\0").replace(b"\0", b" ")
    status = status_of(tid)
    uid, gid = int(status["Uid"].split()[0]), int(status["Gid"].split()[0])
    state = status["State"][:1].encode()
    return _note(b"CORE", _NT_PRPSINFO, struct.pack("<xc14x2I4i16s80s", state, uid, gid, pid, *(
        parents + (name, arguments))))


def file_note(maps):
    """NT_FILE: which file is mapped where."""
    files = [m for m in maps if m.inode and not m.path.startswith("[")]
    names = [os.fsencode(m.path) + (b" (deleted)" if m.deleted else b"") + b"\0" for m in files]
    table = [struct.pack("<3Q", m.start, m.end, m.offset // PAGE) for m in files]
    return _note(b"CORE", _NT_FILE, struct.pack("<2Q", len(files), PAGE) + b"".join(table + names))


def auxv_note(tid):
    """NT_AUXV: the auxiliary vector."""
    with open("/proc/%d/auxv" % tid, "rb") as file:
        return _note(b"CORE", _NT_AUXV, file.read())


def missing_note(unreadable):
    """A note of our own: memory that was not copied, as lines `start end reason`, the first two hexadecimal; b"" when
    there is none."""
    lines = ["%x %x %s\n" % (lost.start, lost.end, lost.reason) for lost in unreadable]
    return _note(NOTE_NAME.encode(), NOTE_MISSING, "".join(lines).encode()) if lines else b""


def _note(name, kind, data):
    def padded(text):
        return text + bytes(-len(text) % 4)
    return struct.pack("<3I", len(name) + 1, len(data), kind) + padded(name + b"\0") + padded(data)


def _program_header(start, end, perms, offset):
    flags = 4 * (perms[0] == "r") | 2 * (perms[1] == "w") | (perms[2] == "x")
    size = end - start
    return struct.pack("<2I6Q", _PT_LOAD, flags, offset or 0, start, 0, size if offset else 0, size, PAGE)


def write_headers(fd, room, end, segments, notes):
    """Write all but the memory: at the front when `room` bytes are enough, else the tables at `end`.

    segments: (start, end, perms, file offset or None when the core does not hold these bytes)."""
    headers = [_program_header(*segment) for segment in segments]
    count = len(headers) + 1
    table_size = 56 * count + 64        # with one section header
    table = 64 if 64 + table_size + len(notes) <= room else end
    note = struct.pack("<2I6Q", _PT_NOTE, 0, table + table_size, 0, 0, len(notes), 0, 4)
    # A count that does not fit in 16 bits stands in the first section header.
    large = count >= _PN_XNUM
    section = struct.pack("<2I4Q2I2Q", 0, 0, 0, 0, 0, int(large), 0, count if large else 0, 0, 0)
    file_header = b"\x7fELF\2\1\1" + bytes(9) + struct.pack(
        "<2HI3QI6H", 4, MACHINES[platform.machine()][0], 1, 0, table, table + 56 * count if large else 0, 0,
        64, 56, min(count, _PN_XNUM), 64 if large else 0, int(large), 0)
    _write_all(fd, b"".join([note] + headers) + section + notes, table)
    _write_all(fd, file_header, 0)


def _write_all(fd, data, offset):
    view = memoryview(data)
    while len(view):
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
