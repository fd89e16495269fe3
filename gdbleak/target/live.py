"""A live process: stopped for a moment, copied into an ELF core file, let go.

``snapshot(pid, path)`` does that; whatever comes after works on a core file. ``ProcessMemory`` reads the
memory of a process that something else (a debugger) holds still, and ``mappings`` lists its address space.

Standard library only, x86-64 and aarch64 Linux, Python 3.6 or later. By hand: ``python3 live.py PID FILE``.

How the stop is kept short. Everything that can be done while the process runs is done before the stop: the
mappings are listed, the pages that exist are found, the output file is laid out, its pages are allocated and
mapped, and the read-only file mappings (program text, constants, symbols) are copied. During the stop only
registers and the memory that can change are copied, by ``process_vm_readv`` straight into the mapped file.

What the core file holds. Private anonymous memory and shared memory: whole; pages that were never touched
are holes of the file, which read as zeros, as they do in the process. Mapped files: executables and libraries
whole, of any other file the pages that the process has touched. Everything else (no access, device memory,
``MADV_DONTDUMP``) is a segment without bytes in the file.

Nothing is written to the process, and no function is called in it. It is attached with ``PTRACE_SEIZE`` and
without ``PTRACE_O_EXITKILL``: should this program be killed, the kernel lets the process run on.
"""
import bisect
import collections
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
import signal
import struct
import sys
import tempfile
import threading
import time

PAGE = os.sysconf("SC_PAGE_SIZE")

Mapping = collections.namedtuple("Mapping", "start end perms offset device inode path deleted")
Mapping.__doc__ = """One line of /proc/PID/maps.

start, end: addresses; perms: as in ``rw-p``; offset: bytes into the file; device: ``major:minor``; inode: 0
when there is no file; path: "" when there is none, and without the kernel's `` (deleted)``, which is the flag
`deleted`."""

Snapshot = collections.namedtuple("Snapshot", "path pid exe threads bytes_copied stop_ms unreadable")
Snapshot.__doc__ = """What `snapshot` made.

path: the core file; exe: path of the executable; threads: thread ids, as ordered in the core; bytes_copied:
bytes read from the process; stop_ms: how long it stood still, in milliseconds; unreadable: list of
`Unreadable`."""

Unreadable = collections.namedtuple("Unreadable", "start end path reason")
Unreadable.__doc__ = """Readable memory that is not in the core, and why (`reason`: a few words)."""


class LiveError(Exception):
    """The process cannot be copied: one line that says why, and what mends it."""


def mappings(pid):
    """The address space of process `pid`: a list of `Mapping`, by address. OSError if it is gone."""
    with open("/proc/%d/maps" % pid, "rb") as file:
        text = os.fsdecode(file.read())
    return [_parse_mapping(line) for line in text.split("\n") if line]


def _parse_mapping(line):
    fields = line.split(None, 5)
    start, end = fields[0].split("-")
    # The kernel writes a newline in a name as \012, and nothing else in octal.
    path = fields[5].replace("\\012", "\n") if len(fields) > 5 else ""
    deleted = path.endswith(" (deleted)")
    return Mapping(int(start, 16), int(end, 16), fields[1], int(fields[2], 16), fields[3], int(fields[4]),
                   path[:-len(" (deleted)")] if deleted else path, deleted)


# --------------------------------------------------------------------------------------------------------
# System calls
# --------------------------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.process_vm_readv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong,
                                   ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
_libc.process_vm_readv.restype = ctypes.c_ssize_t

_PTRACE_DETACH, _PTRACE_GETEVENTMSG, _PTRACE_GETREGSET = 17, 0x4201, 0x4204
_PTRACE_SEIZE, _PTRACE_INTERRUPT = 0x4206, 0x4207
_PTRACE_O_TRACECLONE = 8
_PTRACE_EVENT_CLONE = 3
_WALL = 0x40000000              # wait for threads, too
_MADV_POPULATE_WRITE = 23       # Linux 5.14
_IOV_MAX = 1024                 # pieces that one process_vm_readv takes


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _ptrace(request, tid, address=0, data=0):
    if _libc.ptrace(request, tid, address, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _register_set(tid, kind, limit=1024):
    """Register set `kind` (an NT_ number) of a stopped thread: its bytes, b"" where the machine has none."""
    buffer = ctypes.create_string_buffer(limit)
    vector = _IoVec(ctypes.addressof(buffer), limit)
    try:
        _ptrace(_PTRACE_GETREGSET, tid, kind, ctypes.addressof(vector))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return b""
    return buffer.raw[:vector.length]


def _readv(pid, pieces):
    """One process_vm_readv for `pieces` [(address, length, local address)]: bytes read, 0 on any error."""
    count = len(pieces)
    local, remote = (_IoVec * count)(), (_IoVec * count)()
    for i, (address, length, here) in enumerate(pieces):
        remote[i].base, local[i].base = address, here
        remote[i].length = local[i].length = length
    return max(_libc.process_vm_readv(pid, local, count, remote, count, 0), 0)


class ProcessMemory:
    """Reads the memory of process `pid`, best while it stands still. OSError if it may not be opened."""

    def __init__(self, pid):
        self.pid = pid
        self._file = open("/proc/%d/mem" % pid, "rb", 0)

    def read_into(self, address, view):
        """Fill the writable buffer `view` from `address` on; returns how many bytes could be read."""
        view = memoryview(view).cast("B")
        if not len(view):
            return 0
        here = ctypes.addressof(ctypes.c_char.from_buffer(view))
        done = 0
        while done < len(view):
            # process_vm_readv comes short at times for no reason, or a sandbox forbids it: then the file.
            count = _readv(self.pid, [(address + done, len(view) - done, here + done)])
            count = count or self._read_file(address + done, view[done:])
            if not count:
                break
            done += count
        return done

    def _read_file(self, address, view):
        try:
            self._file.seek(address)
            return self._file.readinto(view) or 0
        except (OSError, OverflowError, ValueError):
            return 0

    def close(self):
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# --------------------------------------------------------------------------------------------------------
# Which pages exist
# --------------------------------------------------------------------------------------------------------

class _PageMap:
    """Which pages of a process exist: /proc/PID/pagemap, by the PAGEMAP_SCAN ioctl since Linux 6.7."""
    _SCAN = 0xC0606610          # _IOWR('f', 16, struct pm_scan_arg)
    _PRESENT, _SWAPPED, _ZERO = 8, 16, 32
    _CAPACITY = 4096            # struct page_region a call
    _EXISTS = bytes(1 if top & 0xC0 else 0 for top in range(256))    # bit 63: present, bit 62: swapped

    def __init__(self, pid):
        self._fd = os.open("/proc/%d/pagemap" % pid, os.O_RDONLY | os.O_CLOEXEC)
        self._regions = (ctypes.c_uint64 * (3 * self._CAPACITY))()
        try:
            self.existing = self._scan
            self._scan(0, PAGE)
        except OSError:
            self.existing = self._read

    def close(self):
        os.close(self._fd)

    def _scan(self, start, end):
        """Ranges of pages in memory or swap, less those that are the kernel's shared page of zeros."""
        found = []
        while start < end:
            request = bytearray(struct.pack(
                "<12Q", 96, 0, start, end, 0, ctypes.addressof(self._regions), self._CAPACITY, 0,
                self._ZERO, self._ZERO, self._PRESENT | self._SWAPPED, self._PRESENT | self._SWAPPED))
            count = fcntl.ioctl(self._fd, self._SCAN, request)
            for i in range(count):
                _append(found, self._regions[3 * i], self._regions[3 * i + 1])
            start = struct.unpack_from("<Q", request, 32)[0]
        return found

    def _read(self, start, end, step=1 << 27):
        """The same for older kernels, from the 8-byte entries: only the top byte of each matters."""
        found = []
        for low in range(start, end, step):
            high = min(low + step, end)
            tops = os.pread(self._fd, (high - low) // PAGE * 8, low // PAGE * 8)[7::8]
            for run in re.finditer(b"\1+", tops.translate(self._EXISTS)):
                _append(found, low + run.start() * PAGE, low + run.end() * PAGE)
        return found


def _append(ranges, start, end, gap=0):
    """Append [start, end) to ascending ranges, joined with the last when at most `gap` bytes lie between."""
    if ranges and start - ranges[-1][1] <= gap:
        ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
    else:
        ranges.append((start, end))


def _joined(ranges, gap):
    joined = []
    for start, end in ranges:
        _append(joined, start, end, gap)
    return joined


def _without(ranges, holes):
    """Ascending `ranges` less ascending `holes`."""
    left = []
    holes = list(holes)
    ends = [end for _, end in holes]
    for start, end in ranges:
        i = bisect.bisect_right(ends, start)
        while i < len(holes) and holes[i][0] < end:
            if holes[i][0] > start:
                left.append((start, holes[i][0]))
            start = min(holes[i][1], end)
            i += 1
        if start < end:
            left.append((start, end))
    return left


def _size(ranges):
    return sum(end - start for start, end in ranges)


# --------------------------------------------------------------------------------------------------------
# The process, before and while it is stopped
# --------------------------------------------------------------------------------------------------------

def _status(pid):
    """/proc/PID/status as a dict; None when there is no such process or thread."""
    try:
        with open("/proc/%d/status" % pid, "rb") as file:
            lines = file.read().decode("utf-8", "replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def _threads(pid):
    """Thread ids of a process; none when it is gone."""
    try:
        return [int(name) for name in os.listdir("/proc/%d/task" % pid)]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _is_dead(tid):
    status = _status(tid)
    return status is None or status["State"][0] in "ZX"


def _user_name(uid):
    try:
        import pwd
        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return "number %d" % uid


def _no_permission(pid):
    """The LiveError for a process that may not be traced: what forbids it, what mends it."""
    status = _status(pid)
    if status is None:
        return LiveError("process %d has ended" % pid)
    owner, me = int(status["Uid"].split()[0]), os.geteuid()
    why = "no permission to stop process %d: " % pid
    if me == 0:
        return LiveError(why + "this root lacks CAP_SYS_PTRACE, or a sandbox forbids ptrace; run on the host,"
                         " or give the container that capability (docker run --cap-add=SYS_PTRACE)")
    if owner != me:
        return LiveError(why + "it belongs to user %s and this is user %s; run as root"
                         % (_user_name(owner), _user_name(me)))
    scope = _yama_scope()
    if scope == 3:
        return LiveError(why + "kernel.yama.ptrace_scope is 3, which forbids it to everybody until a reboot")
    if scope:
        return LiveError(why + "kernel.yama.ptrace_scope is %d; run as root, or set it to 0 "
                         "(sysctl kernel.yama.ptrace_scope=0)" % scope)
    return LiveError(why + "it changed its user or has capabilities, so the kernel protects it; run as root")


def _refusal(pid, tid):
    """The LiveError for a thread that cannot be attached: it has a tracer, or the permission is missing."""
    tracer = (_status(tid) or {}).get("TracerPid", "0")
    if tracer == "0":
        return _no_permission(pid)
    return LiveError("process %d is already traced by process %s: detach that debugger first" % (pid, tracer))


def _yama_scope():
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            return int(file.read())
    except OSError:
        return 0


def _check(pid):
    """Refuse, with a LiveError, what cannot be copied. Returns the id of a living thread to read /proc by."""
    status = _status(pid)
    if status is None:
        raise LiveError("no process %d" % pid)
    if int(status["Tgid"]) != pid:
        raise LiveError("%d is a thread of process %s: name that" % (pid, status["Tgid"]))
    if pid == os.getpid():
        raise LiveError("process %d is this program itself, which cannot stop itself" % pid)
    living = [tid for tid in [pid] + sorted(_threads(pid)) if not _is_dead(tid)]
    if not living:
        raise LiveError("process %d has ended: it is a zombie that its parent, %s, has not reaped"
                        % (pid, status["PPid"]))
    if status["TracerPid"] != "0":
        raise _refusal(pid, pid)
    if "VmSize" not in _status(living[0]):
        raise LiveError("process %d is a kernel thread: it has no memory of its own" % pid)
    try:
        with open("/proc/%d/exe" % living[0], "rb") as file:
            ident = file.read(5)
    except (FileNotFoundError, ProcessLookupError):
        raise LiveError("process %d has ended" % pid)
    except PermissionError:
        raise _no_permission(pid)
    if ident != b"\x7fELF\2":
        raise LiveError("process %d is a 32-bit program, which is not supported yet" % pid)
    return living[0]


class _Stopped:
    """All threads of a process, stopped. Must be entered and left on one thread, the tracer."""
    _PATIENCE = 5.0         # seconds; a thread that takes longer to stop waits in the kernel for something

    def __init__(self, pid, max_stop):
        self._pid = pid
        self._max_stop = max_stop
        self._known = set()     # seized, or dead when tried
        self._stops = {}        # thread id -> signal to deliver on detaching
        self._began = None
        self._cancelled = False
        self.milliseconds = None

    def __enter__(self):
        try:
            while self._seize_new():
                pass
            self._began = time.monotonic()
            pending = set(self._known)
            self._interrupt(pending)
            while pending:
                self._collect(pending)
                if not pending:         # a thread born while we attached
                    pending = self._seize_new()
                    self._interrupt(pending)
        except BaseException:
            self._let_go()
            raise
        if not self.threads:
            self._let_go()
            raise LiveError("process %d has ended" % self._pid)
        return self

    def __exit__(self, *_):
        self._let_go()

    @property
    def threads(self):
        """Ids of the stopped threads, the main thread first."""
        own = set(_threads(self._pid)).intersection(self._stops)
        return sorted(own, key=lambda tid: (tid != self._pid, tid))

    def cancel(self):
        """Let `check` fail; may be called from another thread."""
        self._cancelled = True

    def check(self):
        """LiveError when the copy must end: process killed, time over, or `cancel` called."""
        try:
            _register_set(next(iter(self._stops)), _NT_PRSTATUS)
        except OSError:
            raise LiveError("process %d was killed while it was copied" % self._pid)
        self._check_time()

    def _check_time(self):
        if self._cancelled:
            raise LiveError("process %d was let go: interrupted" % self._pid)
        if self._max_stop is not None and time.monotonic() - self._began > self._max_stop:
            raise LiveError("process %d was let go: the stop would last longer than the %g ms allowed"
                            % (self._pid, self._max_stop * 1000))

    def _seize_new(self):
        """Attach to every thread that is not known yet; returns those."""
        new = set(_threads(self._pid)) - self._known
        for tid in new:
            try:
                _ptrace(_PTRACE_SEIZE, tid, 0, _PTRACE_O_TRACECLONE)
            except OSError as error:
                if not (error.errno == errno.ESRCH or self._is_ours(tid) or _is_dead(tid)):
                    raise _refusal(self._pid, tid)
        self._known |= new
        return new

    @staticmethod
    def _is_ours(tid):
        """Whether this program traces the thread already: the kernel attaches children of a seized thread."""
        tracer = (_status(tid) or {}).get("TracerPid", "0")
        return os.path.exists("/proc/self/task/" + tracer)

    @staticmethod
    def _interrupt(tids):
        for tid in tids:
            with contextlib.suppress(OSError):      # it has ended, or is new and about to stop anyway
                _ptrace(_PTRACE_INTERRUPT, tid)

    def _collect(self, pending):
        """Take out of `pending` what has stopped or ended since."""
        idle = True
        for tid in sorted(pending):
            try:
                # WNOWAIT leaves the stop with the kernel: if we die, the signal behind it is still delivered.
                event = os.waitid(os.P_PID, tid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL)
            except ChildProcessError:               # it could not be seized because it had ended
                pending.discard(tid)
                continue
            if event is not None:
                idle = False
                pending.discard(tid)
                pending.update(self._note(tid, event))
        if idle and pending:
            self._wait_more(pending)

    def _note(self, tid, event):
        """Record one stop; returns the threads that it announces."""
        if event.si_code != os.CLD_TRAPPED:     # it has ended; to reap it is for its parent
            return ()
        kind, number = event.si_status >> 8, event.si_status & 0x7F
        # With an event number it is a stop of ptrace's own, or the group stop of SIGSTOP, to which a detached
        # thread returns by itself. Without one, the signal was about to be delivered and must not get lost.
        self._stops[tid] = 0 if kind else number
        if kind != _PTRACE_EVENT_CLONE:
            return ()
        child = ctypes.c_ulong()
        _ptrace(_PTRACE_GETEVENTMSG, tid, 0, ctypes.addressof(child))
        if child.value in self._stops:
            return ()
        self._known.add(child.value)
        return (child.value,)

    def _wait_more(self, pending):
        pending -= {tid for tid in pending if _is_dead(tid)}    # a main thread that ended before the others
        patience = self._PATIENCE if self._max_stop is None else min(self._PATIENCE, self._max_stop)
        if pending and time.monotonic() - self._began > patience:
            tid = min(pending)
            state = (_status(tid) or {}).get("State", "gone")
            if state[0] == "D" or self._max_stop is None:
                raise LiveError("process %d was let go: its thread %d, in state %s, cannot be stopped now; "
                                "try again" % (self._pid, tid, state))
        self._check_time()
        time.sleep(0.00005)

    def _let_go(self):
        for tid, number in self._stops.items():
            with contextlib.suppress(OSError):      # killed meanwhile
                _ptrace(_PTRACE_DETACH, tid, 0, number)
        if self._began is not None:
            self.milliseconds = (time.monotonic() - self._began) * 1000


_SIGNALS = set(range(1, signal.NSIG)) - {32, 33}        # those two belong to the C library


def _on_own_thread(function, cancel):
    """Run `function` on a thread of its own: when a tracer ends, the kernel releases what it still holds.

    cancel: called when the wait for it is interrupted (Ctrl-C), to end it early."""
    outcome = {}

    def run():
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)      # those are for the main thread
        with contextlib.suppress(OSError):      # root need not wait for a turn on a busy machine
            os.setpriority(os.PRIO_PROCESS, 0, -20)
        try:
            outcome["value"] = function()
        except BaseException as error:
            outcome["error"] = error

    tracer = threading.Thread(target=run, daemon=True)
    tracer.start()
    try:
        tracer.join()
    except BaseException:
        cancel()
        while tracer.is_alive():
            with contextlib.suppress(KeyboardInterrupt):
                tracer.join()
        raise
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


# --------------------------------------------------------------------------------------------------------
# What of the process goes into the core
# --------------------------------------------------------------------------------------------------------

_SHARED_MEMORY = ("/dev/zero", "/memfd:", "/SYSV", "/dev/shm/", "/run/shm/", "[anon_shmem", "/anon_hugepage")
_FILE_GAP = 16 * PAGE           # file pages between touched ones that are copied, too, for fewer segments


class _Survey:
    """Decides for each mapping of a process what is stored in the core, and which of that must be copied."""

    def __init__(self, tid):
        self._tid = tid
        self._flags = _vm_flags(tid)
        self._pages = _PageMap(tid)

    def close(self):
        self._pages.close()

    def excluded(self, mapping):
        """Why a readable mapping is left out, or None."""
        flags = self._flags.get(mapping.start, ())
        if "io" in flags or "pf" in flags:
            return "device memory"
        if "dd" in flags:
            return "excluded by the program with MADV_DONTDUMP"
        return None

    def ranges(self, mapping, programs):
        """(stored, data): ranges in the core, and those of them to be copied; the rest of `stored` is zeros.

        programs: (device, inode) of the files that are mapped executable."""
        whole = [(mapping.start, mapping.end)]
        if "r" not in mapping.perms or self.excluded(mapping):
            return [], []
        if mapping.path == "[vdso]" or (mapping.device, mapping.inode) in programs:
            return whole, whole
        if _is_shared_memory(mapping):
            return whole, self._shared_data(mapping)
        existing = self._pages.existing(mapping.start, mapping.end)
        if _is_anonymous(mapping):
            return whole, existing
        touched = _joined(existing, _FILE_GAP)
        return touched, touched

    def _shared_data(self, mapping):
        """The parts of shared memory that exist, whoever touched them. To read the others would create them.

        The file behind the mapping tells; without the right to open it (root's) all is taken."""
        try:
            file = os.open("/proc/%d/map_files/%x-%x" % (self._tid, mapping.start, mapping.end), os.O_RDONLY)
        except OSError:
            return [(mapping.start, mapping.end)]
        base, end = mapping.start - mapping.offset, mapping.offset + mapping.end - mapping.start
        found, position = [], mapping.offset
        try:
            while position < end:
                low = os.lseek(file, position, os.SEEK_DATA)
                position = os.lseek(file, low, os.SEEK_HOLE)
                if low < end:
                    _append(found, base + low, base + min(position, end))
        except OSError as error:
            if error.errno != errno.ENXIO:          # no more data
                return [(mapping.start, mapping.end)]
        finally:
            os.close(file)
        return found


def _vm_flags(tid):
    """{start of a mapping: its VmFlags} from smaps; only those with a flag that matters here."""
    flags, start = {}, 0
    with open("/proc/%d/smaps" % tid, "rb") as file:
        for line in file:
            head = line.split(None, 1)[0]
            if head == b"VmFlags:":
                words = line.decode().split()[1:]
                if {"io", "pf", "dd"}.intersection(words):
                    flags[start] = words
            elif not head.endswith(b":"):
                start = int(head.split(b"-")[0], 16)
    return flags


def _is_shared_memory(mapping):
    return mapping.perms[3] == "s" and mapping.path.startswith(_SHARED_MEMORY)


def _is_anonymous(mapping):
    return mapping.perms[3] == "p" and (not mapping.inode or mapping.path in ("/dev/zero", "/anon_hugepage"))


def _is_constant(mapping):
    """A file mapped read-only: it can be copied while the process runs."""
    return bool(mapping.inode) and "w" not in mapping.perms and not (
        _is_shared_memory(mapping) or _is_anonymous(mapping))


def _programs(maps):
    return {(m.device, m.inode) for m in maps if m.inode and "x" in m.perms and not _is_anonymous(m)}


def _is_skipped(mapping):
    """The kernel's own pages, which a core file does not have."""
    return mapping.path.startswith(("[vvar", "[vsyscall"))


# --------------------------------------------------------------------------------------------------------
# The core file
# --------------------------------------------------------------------------------------------------------

# Addresses of the target, their place in the file, and our address of that.
_Slot = collections.namedtuple("_Slot", "start end offset local")


class _Image:
    """The memory part of the core file, mapped here: ranges of target addresses, each with its place."""
    _STEP = 64 << 20            # bytes between two reports of progress

    def __init__(self, fd, offset):
        self._fd = fd
        self.size = offset
        self._slots = []
        self._starts = []
        self._windows = []

    def reserve(self, ranges):
        """Give ranges that have no place one; the file grows sparse, and is mapped."""
        places = {(slot.start, slot.end) for slot in self._slots}
        new = sorted(r for r in ranges if r not in places)      # in the stop few
        missing = _without(new, sorted(places)) if new else []
        if not missing:
            return
        window_size = _size(missing)
        os.ftruncate(self._fd, self.size + window_size)
        window = mmap.mmap(self._fd, window_size, offset=self.size)
        anchor = ctypes.c_char.from_buffer(window)
        self._windows.append((window, anchor))
        local = ctypes.addressof(anchor)
        for start, end in missing:
            self._slots.append(_Slot(start, end, self.size, local))
            self.size += end - start
            local += end - start
        self._index()

    def forget(self, ranges):
        """Take away the places of `ranges`, each reserved by itself: what they hold is out of date."""
        stale = set(ranges)
        self._slots = [slot for slot in self._slots if (slot.start, slot.end) not in stale]
        self._index()

    def _index(self):
        self._slots.sort()
        self._starts = [slot.start for slot in self._slots]

    def pieces(self, start, end):
        """The slots' parts that make up [start, end), as `_Slot`; parts without a place are left out."""
        i = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while i < len(self._slots) and self._slots[i].start < end:
            slot = self._slots[i]
            if slot.start == start and slot.end == end:
                yield slot
                return
            low, high = max(slot.start, start), min(slot.end, end)
            if low < high:
                shift = low - slot.start
                yield _Slot(low, high, slot.offset + shift, slot.local + shift)
            i += 1

    def allocate(self, ranges, report=lambda count: None):
        """Allocate and map the file's pages for `ranges` now, so that copying there takes no page fault."""
        for start, end in ranges:
            for piece in self.pieces(start, end):
                os.posix_fallocate(self._fd, piece.offset, piece.end - piece.start)
                for at in range(0, piece.end - piece.start, self._STEP):
                    count = min(self._STEP, piece.end - piece.start - at)
                    if _libc.madvise(piece.local + at, count, _MADV_POPULATE_WRITE) != 0:
                        ctypes.memset(piece.local + at, 0, count)       # an older kernel: the same, slower
                    report(count)

    def close(self):
        while self._windows:
            window, anchor = self._windows.pop()
            del anchor
            window.close()


class _Copier:
    """Copies ranges of the target's memory into an `_Image`; remembers what could not be read."""
    _BATCH = 32 << 20           # bytes a system call: how often the time is looked at

    def __init__(self, tid, image):
        self._memory = ProcessMemory(tid)
        self._image = image
        self.bytes_copied = 0
        self.failed = []

    def close(self):
        self._memory.close()

    def copy(self, ranges, between=lambda: None):
        """Copy `ranges`, calling `between` now and then."""
        batch, size = [], 0
        for start, end in ranges:
            for piece in self._image.pieces(start, end):
                for at in range(piece.start, piece.end, self._BATCH):
                    length = min(self._BATCH, piece.end - at)
                    batch.append((at, length, piece.local + at - piece.start))
                    size += length
                    if size >= self._BATCH or len(batch) == _IOV_MAX:
                        self._copy_batch(batch, size, between)
                        batch, size = [], 0
        self._copy_batch(batch, size, between)

    def _copy_batch(self, batch, size, between):
        while batch:
            between()
            count = _readv(self._memory.pid, batch)
            self.bytes_copied += count
            size -= count
            if not size:
                return
            while count >= batch[0][1]:
                count -= batch.pop(0)[1]
            address, length, local = batch.pop(0)
            size -= length - count
            self._copy_slowly(address + count, length - count, local + count, between)

    def _copy_slowly(self, address, length, local, between):
        """What the system call left: as far as it goes, then without the page that cannot be read."""
        while length:
            view = (ctypes.c_char * length).from_address(local)
            count = self._memory.read_into(address, view)
            self.bytes_copied += count
            if count < length:
                between()
                bad = address + count & -PAGE
                if self._memory.read_into(bad, bytearray(1)):
                    self._image.allocate([(bad, bad + PAGE)])   # an OSError: the disk is full
                self.failed.append((bad, bad + PAGE))
                count = min(bad + PAGE - address, length)
            address, length, local = address + count, length - count, local + count


_NT_PRSTATUS, _NT_FPREGSET, _NT_PRPSINFO, _NT_AUXV, _NT_FILE = 1, 2, 3, 6, 0x46494C45
_NT_ARM_TLS = 0x401             # the thread pointer; on x86-64 it is one of the general registers
_MACHINES = {"x86_64": (62, 216), "aarch64": (183, 272)}    # e_machine, bytes of the general registers
_PT_LOAD, _PT_NOTE, _PN_XNUM = 1, 4, 0xFFFF


def _thread_notes(tid, parents, register_size):
    """Notes of one stopped thread. parents: parent process, process group and session."""
    general = _register_set(tid, _NT_PRSTATUS)
    if len(general) != register_size:
        raise LiveError("thread %d runs 32-bit code, which is not supported yet" % tid)
    floating = _register_set(tid, _NT_FPREGSET)
    # struct elf_prstatus: no signal (it did not die of one), identity, times left at 0, registers.
    status = struct.pack("<32x4i64x", tid, *parents) + general + struct.pack("<i4x", bool(floating))
    notes = _note(b"CORE", _NT_PRSTATUS, status)
    if floating:
        notes += _note(b"CORE", _NT_FPREGSET, floating)
    pointer = _register_set(tid, _NT_ARM_TLS) if platform.machine() == "aarch64" else b""
    return notes + (_note(b"LINUX", _NT_ARM_TLS, pointer) if pointer else b"")


def _process_note(pid, tid, parents):
    """NT_PRPSINFO: name and arguments."""
    with open("/proc/%d/comm" % tid, "rb") as file:
        name = file.read().rstrip(b"\n")[:15]
    with open("/proc/%d/cmdline" % tid, "rb") as file:
        arguments = file.read(79).rstrip(b"\0").replace(b"\0", b" ")
    status = _status(tid)
    uid, gid = int(status["Uid"].split()[0]), int(status["Gid"].split()[0])
    state = status["State"][:1].encode()
    return _note(b"CORE", _NT_PRPSINFO, struct.pack("<xc14x2I4i16s80s", state, uid, gid, pid, *(
        parents + (name, arguments))))


def _file_note(maps):
    """NT_FILE: which file is mapped where."""
    files = [m for m in maps if m.inode and not m.path.startswith("[")]
    names = [os.fsencode(m.path) + (b" (deleted)" if m.deleted else b"") + b"\0" for m in files]
    table = [struct.pack("<3Q", m.start, m.end, m.offset // PAGE) for m in files]
    return _note(b"CORE", _NT_FILE, struct.pack("<2Q", len(files), PAGE) + b"".join(table + names))


def _note(name, kind, data):
    def padded(text):
        return text + bytes(-len(text) % 4)
    return struct.pack("<3I", len(name) + 1, len(data), kind) + padded(name + b"\0") + padded(data)


def _segments(maps, stored, image):
    """PT_LOAD entries (start, end, perms, file offset or None when the core does not hold these bytes)."""
    for mapping in maps:
        if _is_skipped(mapping):
            continue
        at = mapping.start
        for start, end in stored[mapping]:
            for piece in image.pieces(start, end):
                if at < piece.start:
                    yield at, piece.start, mapping.perms, None
                yield piece.start, piece.end, mapping.perms, piece.offset
                at = piece.end
        if at < mapping.end:
            yield at, mapping.end, mapping.perms, None


def _program_header(start, end, perms, offset):
    flags = 4 * (perms[0] == "r") | 2 * (perms[1] == "w") | (perms[2] == "x")
    size = end - start
    return struct.pack("<2I6Q", _PT_LOAD, flags, offset or 0, start, 0, size if offset else 0, size, PAGE)


def _write_headers(fd, room, image, segments, notes):
    """Write all but the memory: at the front when `room` bytes are enough, else the tables at the end."""
    headers = [_program_header(*segment) for segment in segments]
    count = len(headers) + 1
    table_size = 56 * count + 64        # with one section header
    table = 64 if 64 + table_size + len(notes) <= room else image.size
    note = struct.pack("<2I6Q", _PT_NOTE, 0, table + table_size, 0, 0, len(notes), 0, 4)
    # A count that does not fit in 16 bits stands in the first section header.
    large = count >= _PN_XNUM
    section = struct.pack("<2I4Q2I2Q", 0, 0, 0, 0, 0, int(large), 0, count if large else 0, 0, 0)
    file_header = b"\x7fELF\2\1\1" + bytes(9) + struct.pack(
        "<2HI3QI6H", 4, _MACHINES[platform.machine()][0], 1, 0, table, table + 56 * count if large else 0, 0,
        64, 56, min(count, _PN_XNUM), 64 if large else 0, int(large), 0)
    _write_all(fd, b"".join([note] + headers) + section + notes, table)
    _write_all(fd, file_header, 0)


def _write_all(fd, data, offset):
    view = memoryview(data)
    while len(view):
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


# --------------------------------------------------------------------------------------------------------
# The snapshot
# --------------------------------------------------------------------------------------------------------

def snapshot(pid, path, progress=None, max_stop=None):
    """Copy process `pid` into the ELF core file `path` while it stands still; returns a `Snapshot`.

    progress(done, total), if given, is called while the file is prepared, in bytes; not during the stop.
    max_stop, in seconds: give up, and let the process go, when the stop would last longer.
    The file appears at `path` when it is complete. Raises LiveError when the process cannot be copied."""
    tid = _check(pid)
    if platform.machine() not in _MACHINES:
        raise LiveError("processes of %s machines are not supported yet" % platform.machine())
    directory = os.path.dirname(os.path.abspath(path))
    try:
        with contextlib.ExitStack() as stack:
            fd, temporary = tempfile.mkstemp(".part", os.path.basename(path) + ".", directory)
            stack.callback(_remove, temporary)
            stack.callback(os.close, fd)
            result = _Capture(pid, tid, fd, stack).run(directory, path, progress, max_stop)
            os.rename(temporary, path)
            return result
    except OSError as error:
        raise _as_live_error(error, pid, tid, path)


def _remove(path):
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _as_live_error(error, pid, tid, path):
    if isinstance(error, PermissionError) and str(error.filename).startswith("/proc/"):
        return _no_permission(pid)
    if error.errno == errno.ESRCH or _is_dead(tid):
        return LiveError("process %d has ended" % pid)
    return LiveError("cannot write %s: %s" % (path, error.strerror or error))


class _Capture:
    """One snapshot in the making: prepared while the process runs, completed while it is stopped."""

    def __init__(self, pid, tid, fd, stack):
        self._pid, self._tid, self._fd = pid, tid, fd
        self._survey = _Survey(tid)
        stack.callback(self._survey.close)
        maps = mappings(tid)
        programs = _programs(maps)
        self._early = {m: self._survey.ranges(m, programs) for m in maps if not _is_skipped(m)}
        # Room for the headers, twice what they need now; what is not used remains a hole of the file.
        need = sum(150 + len(os.fsencode(m.path)) for m in maps) + 2000 * len(_threads(pid)) + (1 << 14)
        self._room = -(-2 * need // PAGE) * PAGE
        self._image = _Image(fd, self._room)
        stack.callback(self._image.close)
        self._copier = _Copier(tid, self._image)
        stack.callback(self._copier.close)

    def run(self, directory, path, progress, max_stop):
        exe = os.readlink("/proc/%d/exe" % self._tid)
        parents = _parents(self._tid)
        self._prepare(directory, progress)
        process = _process_note(self._pid, self._tid, parents)
        with open("/proc/%d/auxv" % self._tid, "rb") as file:
            auxv = _note(b"CORE", _NT_AUXV, file.read())
        stopped = _Stopped(self._pid, max_stop)
        maps, stored, threads, thread_notes = _on_own_thread(lambda: self._copy_stopped(stopped, parents),
                                                             stopped.cancel)
        notes = b"".join([thread_notes[0], process, auxv, _file_note(maps)] + thread_notes[1:])
        failed = _joined(sorted(self._copier.failed), 0)
        stored = {m: _without(ranges, failed) for m, ranges in stored.items()}
        _write_headers(self._fd, self._room, self._image, _segments(maps, stored, self._image), notes)
        exe = exe[:-len(" (deleted)")] if exe.endswith(" (deleted)") else exe
        return Snapshot(path, self._pid, exe, tuple(threads), self._copier.bytes_copied, stopped.milliseconds,
                        self._unreadable(maps, failed))

    def _prepare(self, directory, progress):
        """All that can be done while the process runs."""
        needed = sum(_size(data) for _, data in self._early.values())
        space = os.statvfs(directory)
        if needed + self._room > space.f_bavail * space.f_frsize:
            raise LiveError("not enough space in %s: the copy of process %d needs %.1f MB, %.1f MB are free"
                            % (directory, self._pid, needed / 1e6, space.f_bavail * space.f_frsize / 1e6))
        done = [0]

        def report(count):
            done[0] += count
            if progress:
                progress(done[0], needed)

        self._image.reserve(r for stored, _ in self._early.values() for r in stored)
        for mapping, (_, data) in self._early.items():
            self._image.allocate(data, report)
            if _is_constant(mapping):
                self._copier.copy(data)

    def _copy_stopped(self, stopped, parents):
        """The stop itself: registers, and all memory that can have changed since `_prepare`."""
        register_size = _MACHINES[platform.machine()][1]
        with stopped:
            threads = stopped.threads
            notes = [_thread_notes(tid, parents, register_size) for tid in threads]
            maps = mappings(self._tid)
            programs = _programs(maps)
            copied = {m for m in maps if m in self._early and _is_constant(m)}
            stale = [m for m in self._early if _is_constant(m) and m not in copied]
            changed = sorted(r for m in stale for r in self._early[m][0])
            self._image.forget(changed)
            self._copier.failed = _without(sorted(self._copier.failed), changed)
            now = {m: self._survey.ranges(m, programs)
                   for m in maps if m not in copied and not _is_skipped(m)}
            self._image.reserve(r for stored, _ in now.values() for r in stored)
            for _, data in now.values():
                self._copier.copy(data, stopped.check)
            stopped.check()
        stored = {m: self._early[m][0] if m in copied else now[m][0] for m in maps if not _is_skipped(m)}
        return maps, stored, threads, notes

    def _unreadable(self, maps, failed):
        found = []
        for mapping in maps:
            reason = "r" in mapping.perms and not _is_skipped(mapping) and self._survey.excluded(mapping)
            if reason:
                found.append(Unreadable(mapping.start, mapping.end, mapping.path, reason))
            for start, end in failed:
                if mapping.start <= start < mapping.end:
                    found.append(Unreadable(start, end, mapping.path, "the kernel refuses to read it"))
        return found


def _parents(tid):
    """(parent process, process group, session)."""
    with open("/proc/%d/stat" % tid, "rb") as file:
        fields = file.read().rsplit(b")", 1)[1].split()
    return int(fields[1]), int(fields[2]), int(fields[3])


def main(arguments):
    """``live.py PID FILE``: exit status 0; 2 when there is no copy, 130 after Ctrl-C."""
    if len(arguments) != 2 or not arguments[0].isdigit():
        print("usage: live.py PID FILE", file=sys.stderr)
        return 2
    try:
        made = snapshot(int(arguments[0]), arguments[1])
    except LiveError as error:
        print("live.py: %s" % error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("live.py: interrupted; process %s runs on" % arguments[0], file=sys.stderr)
        return 130
    print("process %d stood still for %.1f ms; %d threads, %.1f MB copied to %s"
          % (made.pid, made.stop_ms, len(made.threads), made.bytes_copied / 1e6, made.path))
    for lost in made.unreadable:
        print("not copied: %#x-%#x %s: %s" % lost)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
