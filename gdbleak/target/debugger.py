"""What GDB knows: which target is selected, its symbols, and layouts from debug information.

GDB names things; the bytes are read by an AddressSpace. A Target is kept until GDB's view of it can have changed.
"""
from __future__ import annotations

import contextlib
import os
import re

import gdb

from . import live, threads as threads_
from .address_space import DemandSpace
from .core_file import open_core
from .layout import Layouts, Structure
from .target import ANONYMOUS, Mapping, Source, Target, TargetError

_MOST_FRAMES = 50_000
_SLACK = 24                     # bytes that malloc can give beyond what was asked for
_kept: tuple[tuple, Target] | None = None
_stops = 0


def _forget(_event) -> None:
    global _stops
    _stops += 1


for _events in (gdb.events.cont, gdb.events.exited, gdb.events.new_objfile, gdb.events.clear_objfiles,
                gdb.events.memory_changed):
    _events.connect(_forget)


@contextlib.contextmanager
def without_questions():
    """Keep GDB from asking whether it may download debug information while a report looks symbols up."""
    try:
        asks = gdb.parameter("debuginfod enabled") == "ask"
    except RuntimeError:
        asks = False   # a GDB that knows no debuginfod
    if asks:
        gdb.execute("set debuginfod enabled off", to_string=True)
    try:
        yield
    finally:
        if asks:
            gdb.execute("set debuginfod enabled ask", to_string=True)


def current_target() -> Target:
    """The Target of GDB's selected inferior. Raises TargetError when there is none that can be read."""
    global _kept
    inferior = gdb.selected_inferior()
    core = _core_path()
    if not core and not inferior.pid:
        raise TargetError("there is no core file and no process: open one with `core-file FILE` or `attach PID`")
    sysroot, exe = _sysroot(), gdb.current_progspace().filename or ""
    stamp = os.stat(core) if core and os.path.exists(core) else None
    key = (core, stamp and (stamp.st_mtime_ns, stamp.st_size), inferior.num, inferior.pid, sysroot, exe, _stops)
    if _kept is None or _kept[0] != key:
        if _kept:
            _kept[1].analysis = None            # it holds the target, and all of the memory that was read
        _kept = None
        target = open_core(core, exe, sysroot) if core else _stopped_process(inferior, exe, sysroot)
        target.debugger = Names()
        target.layouts = Dwarf()
        _kept = key, target
    return _kept[1]


def _sysroot() -> str:
    root = gdb.parameter("sysroot") or ""
    return "" if root in ("/", "target:") else root


def _core_path() -> str:
    """The file name of the core that is open in the selected inferior, or ""."""
    connection = getattr(gdb.selected_inferior(), "connection", None)
    if connection is not None and connection.type != "core":
        return ""
    found = re.search(r"Local core dump file:\s+`(.*?)', file type", gdb.execute("info target", to_string=True))
    return found[1] if found else ""


# -- a process that GDB holds ------------------------------------------------------------------------------------------
def _stopped_process(inferior, exe: str, sysroot: str) -> Target:
    """The process that GDB stopped: read from the kernel when it is on this machine, else through GDB."""
    arch = _architecture(inferior)
    if any(thread.is_running() for thread in inferior.threads()):
        raise TargetError(f"process {inferior.pid} is running: stop all of its threads first "
                          "(`interrupt`, in non-stop mode `interrupt -a`)")
    native = inferior.connection is not None and inferior.connection.type == "native"
    try:
        mappings = [Mapping(m.start, m.end, m.perms[:3], _file_of(m), m.offset)
                    for m in live.mappings(inferior.pid)] if native else []
    except (OSError, live.LiveError):
        native, mappings = False, []
    if not mappings:
        mappings = _mappings_through_gdb()
    readable = [(m.start, m.end) for m in mappings
                if "r" in m.perms and m.path not in ("[vvar]", "[vsyscall]", "[vvar_vclock]")]
    if native:
        with contextlib.suppress(OSError):
            readable += live.hidden_pages(inferior.pid)
    reader = _reader_of(inferior.pid) if native else _read_through_gdb
    source = Source("pid", pid=inferior.pid)
    if not native:
        source.partial.append("read through GDB in blocks of 1 MiB: slower, and only what is asked for")
    target = Target(source, DemandSpace(readable, reader), arch, sorted(mappings, key=lambda m: m.start),
                    _threads_of(inferior, arch), _auxv())
    target.find_modules()
    target.match_files(exe, sysroot or (f"/proc/{inferior.pid}/root" if native else ""))
    target.find_stacks()
    return target


def _file_of(mapping: live.Mapping) -> str:
    """The path of a mapped file, "" for memory without one ([heap], [stack] and the like)."""
    anonymous = mapping.inode == 0 and not mapping.path.startswith("[v") or mapping.path.startswith(ANONYMOUS)
    return "" if anonymous else mapping.path


def _architecture(inferior) -> threads_.Architecture:
    name = inferior.architecture().name()
    if name == "i386:x86-64":
        return threads_.X86_64
    if name.startswith("aarch64") and "ilp32" not in name:
        return threads_.AARCH64
    if name.startswith("i386"):
        raise TargetError("this is a 32-bit process: not supported yet")
    raise TargetError(f"the architecture {name} is not supported: only x86-64 and aarch64 are")


def _reader_of(pid: int):
    """What reads the memory of a process on this machine: the kernel, and GDB where the kernel refuses."""
    try:
        memory = live.ProcessMemory(pid)
    except OSError:
        return _read_through_gdb
    return lambda address, view: memory.read_into(address, view) or _read_through_gdb(address, view)


def _read_through_gdb(address: int, view: memoryview) -> int:
    inferior = gdb.selected_inferior()
    try:
        view[:] = bytes(inferior.read_memory(address, len(view)))   # GDB's buffer has no format of its own
        return len(view)
    except gdb.MemoryError:
        done = 0
        while done < len(view):   # as far as it goes, page by page
            step = min(4096 - (address + done) % 4096, len(view) - done)
            try:
                view[done:done + step] = bytes(inferior.read_memory(address + done, step))
            except gdb.MemoryError:
                break
            done += step
        return done


def _mappings_through_gdb() -> list[Mapping]:
    try:
        text = gdb.execute("info proc mappings", to_string=True)
    except gdb.error as error:
        raise TargetError(f"GDB cannot list the target's mappings: {' '.join(str(error).split())}") from None
    found = []
    for line in text.splitlines():
        row = re.match(r"\s*(0x[0-9a-f]+)\s+(0x[0-9a-f]+)\s+0x[0-9a-f]+\s+(0x[0-9a-f]+)\s+([rwxps-]{3,5})?\s*(.*)$",
                       line)
        if row:
            path = row[5].strip()
            found.append(Mapping(int(row[1], 16), int(row[2], 16), (row[4] or "rw-")[:3],
                                 "" if path.startswith("[") and not path.startswith("[v") else path, int(row[3], 16)))
    if not found:
        raise TargetError("GDB lists no mappings of the target: is it stopped?")
    return found


def _threads_of(inferior, arch: threads_.Architecture) -> list[threads_.Thread]:
    before, found = gdb.selected_thread(), []
    try:
        for thread in sorted(inferior.threads(), key=lambda t: t.num):
            if not thread.is_valid() or not thread.is_stopped():
                continue
            thread.switch()
            frame, values = gdb.newest_frame(), {}
            for name in arch.registers + ((arch.thread_pointer,) if arch.thread_pointer not in arch.registers else ()):
                try:
                    value = frame.read_register(name)
                    values[name] = int(value.cast(gdb.lookup_type("unsigned long"))) & (1 << 64) - 1
                except (gdb.error, ValueError):
                    continue
            found.append(threads_.Thread(thread.ptid[1] or thread.ptid[0], values, arch, vectors=_vectors_of(frame)))
    finally:
        if before is not None and before.is_valid():
            before.switch()
    return found


def _vectors_of(frame: gdb.Frame) -> bytes:
    """What the widest vector registers hold that this machine has."""
    for name, count, view in (("zmm", 32, "v8_int64"), ("ymm", 16, "v4_int64"), ("xmm", 16, "v2_int64"), ("v", 32, "d")):
        try:
            words = []
            for number in range(count):
                value = frame.read_register(f"{name}{number}")[view]
                value = value["u"] if view == "d" else value
                words += [int(value[k]) & (1 << 64) - 1 for k in range(value.type.range()[1] + 1)]
            return b"".join(word.to_bytes(8, "little") for word in words)
        except (gdb.error, ValueError):
            continue
    return b""


def _auxv() -> dict[int, int]:
    try:
        text = gdb.execute("info auxv", to_string=True)
    except gdb.error:
        return {}
    rows = re.findall(r"^(\d+)\s+.*?\s(0x[0-9a-f]+|\d+)(?:\s+\".*\")?$", text, re.M)
    return {int(tag): int(value, 0) for tag, value in rows}


# -- types -------------------------------------------------------------------------------------------------------------
class CType:
    """A C type from debug information, asked for what lies at an offset of it."""

    def __init__(self, kind: gdb.Type):
        self._type = kind.strip_typedefs()

    def member(self, offset: int, room: int) -> tuple[str, CType | None] | None:
        """(`->field.inner`, `[3].field`, the type pointed to or None) of the pointer at a byte offset of an object of this
        type; None when no pointer is there. `room`: bytes of the block that begins with it, 0 when it begins elsewhere: what
        fills its block again and again is an array."""
        size = self._type.sizeof
        if size <= 0 or offset < 0 or self._type.code == gdb.TYPE_CODE_VOID:
            return None
        index = 0
        if offset >= size and not _is_flexible(self._type):
            if not room or room % size > _SLACK:
                return None
            index, offset = divmod(offset, size)
        found = _pointer_at(self._type, offset, 0)
        if found is None:
            return None
        text, pointee = found
        text = f"[{index}]{text}" if index else "->" + text[1:] if text.startswith(".") else text
        return text, CType(pointee) if pointee.code != gdb.TYPE_CODE_VOID else None


def _pointer_at(kind: gdb.Type, offset: int, depth: int) -> tuple[str, gdb.Type] | None:
    """(path with dots, pointee) of the pointer at an offset of a type."""
    kind = kind.strip_typedefs()
    if kind.code == gdb.TYPE_CODE_PTR or kind.code == gdb.TYPE_CODE_REF:
        return ("", kind.target().strip_typedefs()) if offset == 0 else None
    if depth > 16:
        return None
    if kind.code == gdb.TYPE_CODE_ARRAY:
        element = kind.target().strip_typedefs()
        if not element.sizeof:
            return None
        index, rest = divmod(offset, element.sizeof)
        found = _pointer_at(element, rest, depth + 1)
        return found and (f"[{index}]{found[0]}", found[1])
    if kind.code in (gdb.TYPE_CODE_STRUCT, gdb.TYPE_CODE_UNION):
        for field in kind.fields():
            if not hasattr(field, "bitpos") or field.bitsize:
                continue
            start = field.bitpos // 8
            end = start + field.type.sizeof
            if start <= offset and (offset < end or start == end and _is_flexible(kind)):
                found = _pointer_at(field.type, offset - start, depth + 1)
                if found:
                    return (f".{field.name}" if field.name and not field.is_base_class else "") + found[0], found[1]
    return None


def _is_flexible(kind: gdb.Type) -> bool:
    """Whether a structure ends in an array of no stated length."""
    if kind.code != gdb.TYPE_CODE_STRUCT or not kind.fields():
        return False
    last = kind.fields()[-1].type.strip_typedefs()
    return last.code == gdb.TYPE_CODE_ARRAY and not last.sizeof


# -- symbols and layouts -----------------------------------------------------------------------------------------------
class Names:
    """GDB's symbols: minimal symbols and those of separate debug files too."""

    def __init__(self):
        self._threads: dict[int, gdb.InferiorThread] = {}        # by lwp, as long as the target stands still

    def address(self, name: str) -> int | None:
        """The address of a variable or function, or None."""
        try:
            gdb.execute(f"info address {name}", to_string=True)      # an expression takes 50 ms to find that there is none
        except gdb.error:
            return None
        for expression in (f"(unsigned long) &'{name}'", f"(unsigned long) &{name}"):
            try:
                return int(gdb.parse_and_eval(expression))
            except gdb.error:
                continue
        return None

    def name(self, address: int) -> tuple[str, int] | None:
        """(symbol, offset into it) of the symbol that holds `address`, or None."""
        try:
            text = gdb.execute(f"info symbol {address:#x}", to_string=True)
        except gdb.error:
            return None
        found = re.match(r"(.+?)(?: \+ (\d+))? in section ", text)
        return (found[1], int(found[2] or 0)) if found else None

    def demangle(self, name: str) -> str | None:
        """What a C++ symbol stands for, or None when it is no mangled name."""
        if not re.fullmatch(r"_Z[A-Za-z0-9_.$]+", name):
            return None
        try:
            return gdb.execute(f"demangle -l c++ -- {name}", to_string=True).strip()
        except gdb.error:
            return None

    def variable(self, address: int) -> tuple[str, int, CType] | None:
        """(name, where it begins, type) of the variable that holds an address; None without debug information."""
        found = self.name(address)
        if found is None:
            return None
        name, start = found[0], address - found[1]
        for look_up in (gdb.lookup_global_symbol, gdb.lookup_static_symbol):
            try:
                symbol = look_up(name)
                if symbol is not None and int(symbol.value().address) == start:
                    return name, start, CType(symbol.type)
            except (gdb.error, TypeError, AttributeError):
                continue
        return None

    def frames(self, lwp: int) -> list[tuple[int, str, int]]:
        """(stack pointer, function or "", program counter) of each frame of a thread, the newest first; empty when GDB
        cannot unwind it."""
        before, found = gdb.selected_thread(), []
        try:
            if not self._threads:
                self._threads = {t.ptid[1] or t.ptid[0]: t for t in gdb.selected_inferior().threads()}
            thread = self._threads.get(lwp)
            if thread is None or not thread.is_valid() or not thread.is_stopped():
                return []
            thread.switch()
            frame = gdb.newest_frame()
            while frame is not None and len(found) < _MOST_FRAMES:
                sp = int(frame.read_register("sp").cast(gdb.lookup_type("unsigned long")))
                found.append((sp & (1 << 64) - 1, frame.name() or "", frame.pc()))
                frame = frame.older()
        except gdb.error:
            pass                # as far as it goes
        finally:
            if before is not None and before.is_valid():
                before.switch()
        return found


class Dwarf(Layouts):
    """Layouts from the debug information that GDB has read."""

    def __init__(self):
        self._known: dict[str, Structure | None] = {}

    def structure(self, type_name: str) -> Structure | None:
        if type_name not in self._known:
            self._known[type_name] = self._look_up(type_name)
        return self._known[type_name]

    @staticmethod
    def _look_up(type_name: str) -> Structure | None:
        for spelling in (f"struct {type_name}", type_name):
            try:
                kind = gdb.lookup_type(spelling).strip_typedefs()
            except gdb.error:
                continue
            whole = kind.code in (gdb.TYPE_CODE_STRUCT, gdb.TYPE_CODE_UNION) and kind.sizeof   # 0: only declared
            return Structure(kind.sizeof, _flatten(kind, "")) if whole else None
        return None


def _flatten(kind, prefix: str, base: int = 0) -> dict[str, tuple[int, int]]:
    """Field name -> (byte offset, size); members of an inner structure appear as `outer_inner` too."""
    found = {}
    for field in kind.fields():
        if not hasattr(field, "bitpos") or field.bitsize:
            continue
        inner = field.type.strip_typedefs()
        name = prefix + (field.name or "")
        found[name] = (base + field.bitpos // 8, inner.sizeof)
        if inner.code in (gdb.TYPE_CODE_STRUCT, gdb.TYPE_CODE_UNION) and len(prefix) < 40:
            found.update({key: value for key, value in
                          _flatten(inner, name + "_" if field.name else prefix, base + field.bitpos // 8).items()
                          if key not in found})
    return found
