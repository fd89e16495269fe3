"""A live process: stopped for a moment, copied into an ELF core file, let go.

``snapshot(pid, path)`` does that; whatever comes after works on a core file. ``ProcessMemory`` reads the
memory of a process that something else (a debugger) holds still, and ``mappings`` lists its address space.

Standard library only, x86-64 and aarch64 Linux, Python 3.6 or later. By hand: ``scripts/gdbleak-snapshot``.

How the stop is kept short. Everything that can be done while the process runs is done before the stop: the
mappings are listed, the pages that exist are found, the output file is laid out, its pages are allocated and
mapped, and the read-only file mappings (program text, constants, symbols) are copied. During the stop only
registers and the memory that can change are copied, by ``process_vm_readv`` straight into the mapped file, on
several processors. Since Linux 5.19 that gives a process copies of its own of the pages that a fork has left to it and
others in common: those are read through /proc/PID/mem, which is slower, and leaves them as they are.

What the core file holds. Private anonymous memory and shared memory: whole; pages that were never touched
are holes of the file, which read as zeros, as they do in the process. Mapped files: executables and libraries
whole, of any other file the pages that the process has touched. Of memory that the program itself may not read
(``PROT_NONE``, ``PROT_WRITE``) the pages that there are, through /proc/PID/mem. Everything else (device memory,
``MADV_DONTDUMP``, what the kernel does not let us read) is a segment without bytes in the file; a note of the core,
which GDB leaves alone, lists it.

Nothing is written to the process, and no function is called in it (see ptrace.py for how it is stopped).
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
import stat
import struct
import tempfile
import threading

from .core_writer import (MACHINES, PAGE, auxv_note, file_note, missing_note, process_note, thread_notes,
                          write_headers)
from .ptrace import (Ended, IoVec, LiveError, Stopped, hurried, is_dead, libc, living_thread, no_permission, own_id,
                     status_of, threads_of)
from .room import check_writable, lack

Mapping = collections.namedtuple("Mapping", "start end perms offset device inode path deleted")
Mapping.__doc__ = """One line of /proc/PID/maps.

start, end: addresses; perms: as in ``rw-p``; offset: bytes into the file; device: ``major:minor``; inode: 0
when there is no file; path: "" when there is none, and without the kernel's `` (deleted)``, which is the flag
`deleted`."""

Snapshot = collections.namedtuple(
    "Snapshot", "path pid exe threads bytes_copied stopped_at stop_ms unreadable forked_ms refused vain_ms")
Snapshot.__doc__ = """What `snapshot` made.

path: the core file; exe: path of the executable; threads: thread ids, as ordered in the core; bytes_copied:
bytes read from the process; stopped_at: when, as of time.monotonic(), and stop_ms: for how long it stood still, in
milliseconds, both None when it was at its end; unreadable: list of `Unreadable`. Of a copy by fork (see
record/fork.py) forked_ms: how long it stood still again, to have its child reaped, else None; refused: why there was
no fork although one was asked for, else ""; vain_ms: how long it stood still before, for what came to nothing."""

Unreadable = collections.namedtuple("Unreadable", "start end path reason")
Unreadable.__doc__ = """Memory that is not in the core, and why (`reason`: a few words)."""


def mappings(pid, known=None, check=lambda: None):
    """The address space of process `pid`: a list of `Mapping`, by address. OSError if it is gone.

    known: {line: `Mapping`} of lines read before, which need not be parsed again; gets the new ones. check(): called
    now and then; a list can be long."""
    known = {} if known is None else known
    found, rest = [], b""
    fd = os.open("/proc/%d/maps" % pid, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for data in checked(iter(lambda: os.read(fd, 1 << 16), b""), check, 4):     # the kernel gives a page at most
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                mapping = known.get(line)
                if mapping is None:
                    mapping = known[line] = _parse_mapping(os.fsdecode(line))
                found.append(mapping)
    finally:
        os.close(fd)
    return found


def checked(items, check, distance=256):
    """The items, with check() called now and then."""
    for number, item in enumerate(items, 1):
        yield item
        if not number % distance:
            check()


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

libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.process_vm_readv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong,
                                  ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
libc.process_vm_readv.restype = ctypes.c_ssize_t
libc.pread64.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
libc.pread64.restype = ctypes.c_ssize_t

_MADV_POPULATE_WRITE = 23       # Linux 5.14
_IOV_MAX = 1024                 # pieces that one process_vm_readv takes


def _readv(pid, pieces):
    """One process_vm_readv for `pieces` [(address, length, local address)]: bytes read, 0 on any error."""
    count = len(pieces)
    local, remote = (IoVec * count)(), (IoVec * count)()
    for i, (address, length, here) in enumerate(pieces):
        remote[i].base, local[i].base = address, here
        remote[i].length = local[i].length = length
    return max(libc.process_vm_readv(pid, local, count, remote, count, 0), 0)


class ProcessMemory:
    """Reads the memory of process `pid`, best while it stands still. OSError if it may not be opened."""
    _MOST = 1 << 30             # bytes a system call, which cannot be interrupted

    def __init__(self, pid):
        self.pid = pid
        self._fd = os.open("/proc/%d/mem" % pid, os.O_RDONLY | os.O_CLOEXEC)

    def read_into(self, address, view):
        """Fill the writable buffer `view` from `address` on; returns how many bytes could be read."""
        view = memoryview(view).cast("B")
        if not len(view):
            return 0
        here = ctypes.addressof(ctypes.c_char.from_buffer(view))
        done = 0
        while done < len(view):
            count = self.read_to(address + done, len(view) - done, here + done)
            if not count:
                break
            done += count
        return done

    def read_to(self, address, length, here):
        """Read to the local address `here`: bytes read, at times fewer than there are, 0 on any error."""
        if not 0 <= address < 1 << 63:
            return 0
        return max(libc.pread64(self._fd, here, min(length, self._MOST), address), 0)

    def can_read(self, address):
        """Whether there is something to read at an address."""
        return bool(self.read_into(address, bytearray(1)))

    def close(self):
        os.close(self._fd)

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
    _PRESENT, _SWAPPED, _ZERO, _GUARD = 8, 16, 32, 256      # the last, of MADV_GUARD_INSTALL, since Linux 6.15
    _CAPACITY = 4096            # struct page_region a call
    # Bit 63: present, 62: swapped, 61: a file's or shared memory, 58: guard, 56: mapped here only.
    _EXISTS = bytes(1 if top & 0xC0 and not top & 4 else 0 for top in range(256))
    _IN_COMMON = bytes(1 if top & 0xA1 == 0x80 else 0 for top in range(256))

    def __init__(self, pid):
        self._fd = os.open("/proc/%d/pagemap" % pid, os.O_RDONLY | os.O_CLOEXEC)
        self._regions = (ctypes.c_uint64 * (3 * self._CAPACITY))()
        self.existing, self._unwanted = self._scan, self._ZERO | self._GUARD
        self.gap = 1 << 47          # bytes between two mappings that are as well looked at together
        try:
            self._scan(0, PAGE)
        except OSError:
            self._unwanted = self._ZERO
            try:
                self._scan(0, PAGE)
            except OSError:
                self.existing, self.gap = self._read, 0

    def close(self):
        os.close(self._fd)

    def _scan(self, start, end):
        """Ranges of pages in memory or swap, less the kernel's shared page of zeros, and guards, which hold nothing."""
        found = []
        while start < end:
            request = bytearray(struct.pack(
                "<12Q", 96, 0, start, end, 0, ctypes.addressof(self._regions), self._CAPACITY, 0,
                self._unwanted, self._unwanted, self._PRESENT | self._SWAPPED, self._PRESENT | self._SWAPPED))
            count = fcntl.ioctl(self._fd, self._SCAN, request)
            for i in range(count):
                _append(found, self._regions[3 * i], self._regions[3 * i + 1])
            start = struct.unpack_from("<Q", request, 32)[0]
        return found

    def in_common(self, start, end):
        """Ranges of pages of private memory that another process has, too, since one of them was forked."""
        return self._read(start, end, self._IN_COMMON)

    def _read(self, start, end, wanted=_EXISTS, step=1 << 27):
        """Ranges of pages by the 8-byte entries, of which only the top byte matters: those that `wanted` has for it. By
        default what `_scan` finds, for older kernels."""
        found = []
        for low in range(start, end, step):
            high = min(low + step, end)
            tops = os.pread(self._fd, (high - low) // PAGE * 8, low // PAGE * 8)[7::8]
            for run in re.finditer(b"\1+", tops.translate(wanted)):
                _append(found, low + run.start() * PAGE, low + run.end() * PAGE)
        return found


def _append(ranges, start, end, gap=0):
    """Append [start, end) to ascending ranges, joined with the last when at most `gap` bytes lie between."""
    if ranges and start - ranges[-1][1] <= gap:
        ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
    else:
        ranges.append((start, end))


def joined(ranges, gap):
    joined = []
    for start, end in ranges:
        _append(joined, start, end, gap)
    return joined


def without(ranges, holes):
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


def _within(ranges, ends, start, end):
    """The parts of ascending ranges, whose ends are `ends`, within [start, end)."""
    i, parts = bisect.bisect_right(ends, start), []
    while i < len(ranges) and ranges[i][0] < end:
        parts.append((max(ranges[i][0], start), min(ranges[i][1], end)))
        i += 1
    return parts


def _size(ranges):
    return sum(end - start for start, end in ranges)


# --------------------------------------------------------------------------------------------------------
# What of the process goes into the core
# --------------------------------------------------------------------------------------------------------

_SHARED_MEMORY = ("/dev/zero", "/memfd:", "/SYSV", "/dev/shm/", "/run/shm/", "[anon_shmem", "/anon_hugepage")
_TOGETHER, _SMALL = 256, 1 << 20
_FILE_GAP = 16 * PAGE           # file pages between touched ones that are copied, too, for fewer segments

_COMMON_GAP = 8 * PAGE          # other pages between those in common are read with them: fewer, longer reads


class _Survey:
    """Decides for each mapping of a process what is stored in the core, and which of that must be copied."""

    def __init__(self, tid):
        self._tid = tid
        smaps = look_at_smaps(tid)
        self.flags = smaps.flags
        self._pages = _PageMap(tid)
        # An older kernel takes long to tell that nothing is in a large reservation: then what it told before counts.
        self._empty = set() if self._pages.gap else smaps.empty
        self._forked = smaps.forked
        self.kept_out = {}          # mapping that the program cannot read, and is left out: its pages
        self.hidden = set()         # ranges to be copied that it cannot read
        self.in_common = []         # ascending ranges with the pages that other processes have, too, since a fork
        self._ends = []             # of those

    def close(self):
        self._pages.close()

    def reopen(self, tid):
        """Look at thread `tid` from now on: after an exec, what is open belongs to the memory that there was."""
        before, self._tid, self._pages = self._pages, tid, _PageMap(tid)
        before.close()

    def look_for_pages_in_common(self, data):
        """Fill `in_common`. data: {mapping: ranges of it to be copied}."""
        ranges = [r for mapping in sorted(data) if mapping.start in self._forked for r in joined(data[mapping], _SMALL)]
        self.set_in_common(joined((pages for start, end in ranges for pages in self._pages.in_common(start, end)),
                                  _COMMON_GAP))

    def set_in_common(self, ranges):
        """`in_common` from now on."""
        self.in_common, self._ends = ranges, [end for _, end in ranges]

    def through_file(self, start, end):
        """The parts of a range that /proc/PID/mem is to be read for: process_vm_readv cannot, or would change them."""
        return [(start, end)] if (start, end) in self.hidden else _within(self.in_common, self._ends, start, end)

    def excluded(self, mapping):
        """Why a mapping is left out, or None."""
        flags = self.flags.get(mapping.start, ())
        if "io" in flags or "pf" in flags:
            return "device memory"
        if "dd" in flags:
            return "excluded by the program with MADV_DONTDUMP"
        return None

    def ranges(self, maps, programs, check=lambda: None):
        """{mapping: (stored, data)}: ranges in the core, and those of them to be copied; the rest of `stored` is zeros.

        programs: (device, inode) of the files that are mapped executable; check(): called now and then."""
        found, asked, end = {}, [], 0           # asked: neighbours whose pages are looked at together

        def answer():
            if asked:
                existing = self._pages.existing(asked[0].start, asked[-1].end)
                ends = [end for _, end in existing]
                for mapping in asked:
                    found[mapping] = self._asked(mapping, _within(existing, ends, mapping.start, mapping.end))
                del asked[:]
            check()

        for mapping in checked(maps, check):
            decided = self._decided(mapping, programs)
            if decided is None:
                if mapping.start - end > self._pages.gap or len(asked) == _TOGETHER:
                    answer()
                asked.append(mapping)
                end = mapping.end
            else:
                found[mapping] = decided
                # It lies between those that are asked for: not worth a look unless it is small.
                if mapping.end - mapping.start > _SMALL:
                    answer()
        answer()
        return found

    def _decided(self, mapping, programs):
        """(stored, data) of a mapping without a look at its pages; None when they decide."""
        whole = [(mapping.start, mapping.end)]
        if is_hidden(mapping):
            return ([], []) if mapping.start in self._empty else None
        if self.excluded(mapping):
            return [], []
        if mapping.path == "[vdso]" or (mapping.device, mapping.inode) in programs:
            return whole, whole
        return (whole, self._shared_data(mapping)) if _is_shared_memory(mapping) else None

    def _asked(self, mapping, pages):
        """(stored, data) of a mapping whose pages are these."""
        if is_hidden(mapping):
            if self.excluded(mapping):
                self.kept_out[mapping], pages = pages, []
            self.hidden.update(pages)
            return pages, pages
        if is_anonymous(mapping):
            return [(mapping.start, mapping.end)], pages
        touched = joined(pages, _FILE_GAP)
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


def hidden_pages(pid):
    """[(start, end)] of the pages that there are of memory that a process itself may not read. OSError if it is gone."""
    survey = _Survey(pid)
    try:
        hidden = [m for m in mappings(pid) if is_hidden(m) and not is_skipped(m)]
        return [pages for _, data in survey.ranges(hidden, ()).values() for pages in data]
    finally:
        survey.close()


# Device memory, without pages behind it; left out of cores; not there in a child, or zeroed; watched by userfaultfd.
_FLAGS = {"io", "pf", "dd", "dc", "wf", "um", "uw", "ui"}


_Smaps = collections.namedtuple("_Smaps", "flags empty forked")
_Smaps.__doc__ = """What /proc/PID/smaps tells of mappings, by their starts.

flags: {start: VmFlags} where there is a flag that matters here; empty: those with no page in memory or swap; forked:
those with private pages, and with pages that other processes have, too: perhaps the same."""


def look_at_smaps(tid):
    """The `_Smaps` of a process. OSError if it is gone."""
    found, start, sizes = _Smaps({}, set(), set()), 0, {}
    with open("/proc/%d/smaps" % tid, "rb") as file:
        for line in file:
            words = line.split(None, 2)
            if words[0] == b"VmFlags:":         # the last line of a mapping
                words = line.decode().split()[1:]
                if _FLAGS.intersection(words):
                    found.flags[start] = words
                if not sizes[b"Rss:"] + sizes[b"Swap:"]:
                    found.empty.add(start)
                if (sizes[b"Anonymous:"] and sizes[b"Shared_Clean:"] + sizes[b"Shared_Dirty:"]
                        or sizes[b"Shared_Hugetlb:"]):
                    found.forked.add(start)
            elif words[0].endswith(b":"):
                sizes[words[0]] = words[1] != b"0"
            else:
                start, sizes = int(words[0].split(b"-")[0], 16), collections.Counter()
    return found


def is_hidden(mapping):
    """Whether the program itself may not read it."""
    return "r" not in mapping.perms


def _is_shared_memory(mapping):
    return mapping.perms[3] == "s" and mapping.path.startswith(_SHARED_MEMORY)


def is_anonymous(mapping):
    return mapping.perms[3] == "p" and (not mapping.inode or mapping.path in ("/dev/zero", "/anon_hugepage"))


def is_constant(mapping):
    """A file mapped read-only: it can be copied while the process runs."""
    return bool(mapping.inode) and "w" not in mapping.perms and not (
        _is_shared_memory(mapping) or is_anonymous(mapping))


def program_files(maps):
    """(device, inode) of the files that are mapped executable."""
    return {(m.device, m.inode) for m in maps if m.inode and "x" in m.perms and not is_anonymous(m)}


def is_skipped(mapping):
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
        self._places = set()        # (start, end) of each slot
        self._windows = []

    def reserve(self, ranges):
        """Give ranges (an iterable) that have no place one; the file grows sparse, and is mapped."""
        new = sorted(r for r in ranges if r not in self._places)        # in the stop few
        missing = without(new, sorted(self._places)) if new else []
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
        if not stale:
            return
        self._slots = [slot for slot in self._slots if (slot.start, slot.end) not in stale]
        self._index()

    def _index(self):
        self._slots.sort()
        self._places = {(slot.start, slot.end) for slot in self._slots}
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

    def end_of_slot(self, address):
        """The end of the slot that an address is in."""
        return self._slots[bisect.bisect_right(self._starts, address) - 1].end

    def allocate(self, ranges, report=lambda count: None):
        """Allocate and map the file's pages for `ranges` now, so that copying there takes no page fault."""
        for start, end in ranges:
            for piece in self.pieces(start, end):
                os.posix_fallocate(self._fd, piece.offset, piece.end - piece.start)
                for at in range(0, piece.end - piece.start, self._STEP):
                    count = min(self._STEP, piece.end - piece.start - at)
                    if libc.madvise(piece.local + at, count, _MADV_POPULATE_WRITE) != 0:
                        ctypes.memset(piece.local + at, 0, count)       # an older kernel: the same, slower
                    report(count)

    def close(self):
        while self._windows:
            window, anchor = self._windows.pop()
            del anchor
            window.close()


class _Copier:
    """Copies ranges of a process's memory into an `_Image`; remembers what could not be read."""
    _BATCH = 32 << 20           # bytes a system call: how often the time is looked at
    _STEP, _OFTEN = 1 << 20, 1 << 18
    _PROCESSORS = min(4, len(os.sched_getaffinity(0)))      # more of them wait for the memory

    def __init__(self, tid, image, through_file):
        """through_file(start, end): the parts of a range to be read through /proc/PID/mem."""
        self._memory = ProcessMemory(tid)
        self._image, self._through_file = image, through_file
        self._lock = threading.Lock()
        self.bytes_copied = 0
        self.failed = []            # ranges that cannot be read
        self._long = []             # those of them that are longer than one step

    def close(self):
        self._memory.close()

    def reopen(self, tid):
        """Read thread `tid` from now on, in the place of another one."""
        before, self._memory, self._long = self._memory, ProcessMemory(tid), []
        before.close()

    def copy(self, ranges, between=lambda: None, done=lambda count: None, processors=_PROCESSORS):
        """Copy `ranges`, calling `between` now and then, and done(bytes) after each step; both on this thread.

        The threads that help have this one's priority."""
        batches = list(self._batches(checked(ranges, between)))[::-1]
        ended, errors = threading.Event(), []

        def work(look, tell):
            try:
                while batches and not ended.is_set():
                    look()
                    with contextlib.suppress(IndexError):       # another one has taken the last
                        batch, copy = batches.pop()
                        copy(batch, look)
                        tell(sum(length for _, length, _ in batch))
            except BaseException as error:
                ended.set()
                errors.append(error)

        helpers = [threading.Thread(target=work, args=(lambda: None, lambda count: None), daemon=True)
                   for _ in range(min(processors, len(batches)) - 1)]
        for helper in helpers:
            helper.start()
        work(between, done)
        for helper in helpers:
            helper.join()
        if errors:
            raise errors[0]

    def _batches(self, ranges):
        """Lists of (address, length, local address), each with what copies it."""
        directly, through_file = [], []
        for start, end in ranges:
            parts = self._through_file(start, end)
            directly += without([(start, end)], parts) if parts else [(start, end)]
            through_file += parts
        for batch in self._batches_of(directly):
            yield batch, self._copy_batch
        for batch in self._batches_of(through_file):
            yield batch, self._copy_through_file

    def _batches_of(self, ranges):
        batch, size = [], 0
        for start, end in ranges:
            for piece in self._image.pieces(start, end):
                for at in range(piece.start, piece.end, self._BATCH):
                    length = min(self._BATCH, piece.end - at)
                    batch.append((at, length, piece.local + at - piece.start))
                    size += length
                    if size >= self._BATCH or len(batch) == _IOV_MAX:
                        yield batch
                        batch, size = [], 0
        if batch:
            yield batch

    def _copy_batch(self, batch, between):
        batch, size = list(batch), sum(length for _, length, _ in batch)
        while batch:
            count = _readv(self._memory.pid, batch)
            self._count(count)
            size -= count
            if not size:
                return
            while count >= batch[0][1]:
                count -= batch.pop(0)[1]
            address, length, local = batch.pop(0)
            size -= length - count
            self._copy_slowly(address + count, length - count, local + count, between)
            between()

    def _copy_through_file(self, batch, between):
        since = 0
        for address, length, local in batch:
            done = 0
            while done < length:
                count = self._memory.read_to(address + done, min(length - done, self._STEP), local + done)
                self._count(count)
                if not count:
                    self._copy_slowly(address + done, length - done, local + done, between)
                    break
                done += count
                since += count
                if since >= self._OFTEN:
                    between()
                    since = 0

    def _copy_slowly(self, address, length, local, between):
        """What the system call left: as far as it goes, without the pages that cannot be read."""
        while length:
            between()
            count = self._memory.read_to(address, length, local)
            if not count and self._memory.can_read(address):
                # There is no room for it yet; to store where a full disk (an OSError) has none would be a SIGBUS.
                count = min(length, self._STEP)
                self._image.allocate([(address, address + count)])
                count = self._memory.read_into(address, (ctypes.c_char * count).from_address(local))
            self._count(count)
            if not count:
                count = min(self._skip(address, between) - address, length)
            address, length, local = address + count, length - count, local + count

    def _skip(self, address, between):
        """The end of the range around `address` that cannot be read, which is noted."""
        for start, end in self._long:
            if start <= address < end:
                return end
        start, end = address & -PAGE, self._image.end_of_slot(address)
        # Steps that grow with the range: a page at first, later a sixteenth of what was found.
        low, high = start, start + PAGE
        while high < end and not self._memory.can_read(high):
            between()
            low, high = high, min(high + PAGE + ((high - start) // 16 & -PAGE), end)
        while high - low > PAGE:
            middle = low + ((high - low) // 2 & -PAGE)
            if self._memory.can_read(middle):
                high = middle
            else:
                low = middle
        self.failed.append((start, high))
        if high - start > self._BATCH:
            self._long.append((start, high))
        return high

    def _count(self, count):
        with self._lock:
            self.bytes_copied += count


def load_segments(maps, stored, image):
    """PT_LOAD entries (start, end, perms, file offset or None when the core does not hold these bytes)."""
    for mapping in maps:
        if is_skipped(mapping):
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


# --------------------------------------------------------------------------------------------------------
# The snapshot
# --------------------------------------------------------------------------------------------------------

def snapshot(pid, path, progress=None, max_stop=None, **options):
    """Copy process `pid` into the ELF core file `path` while it stands still; returns a `Snapshot`.

    progress(done, total), if given, is called while the file is prepared, in bytes; not during the stop.
    max_stop, in seconds: give up, and let the process go, when the stop would last longer. options: of `Stopped`.
    The file appears at `path` when it is complete. Raises LiveError when the process cannot be copied."""
    return take(Capture, Stopped(pid, max_stop, **options), living_thread(pid), path, progress)


def take(kind, stopped, tid, path, progress=None):
    """A snapshot by `kind`, a `Capture`, of the process that `stopped` stops. tid: a living thread of it."""
    if platform.machine() not in MACHINES:
        raise LiveError("processes of %s machines are not supported yet: gcore of GDB copies them" % platform.machine())
    try:
        with contextlib.ExitStack() as stack:
            fd = stack.enter_context(_new_file(destination(path)))
            inner = stack.enter_context(contextlib.ExitStack())
            return kind(stopped, tid, fd, inner).run(path, progress)
    except OSError as error:
        raise _as_live_error(error, stopped.pid, tid, path)


def destination(path):
    """Where a core file named `path` goes, links followed. LiveError when it cannot be written, or something else than a
    file would be replaced."""
    check_writable(path, replaces=True)
    real = os.path.realpath(path)
    mode = os.lstat(real).st_mode if os.path.lexists(real) else stat.S_IFREG
    if not stat.S_ISREG(mode):
        kind = {stat.S_IFLNK: "a link that leads nowhere", stat.S_IFIFO: "a pipe",
                stat.S_IFSOCK: "a socket"}.get(stat.S_IFMT(mode), "a device")
        raise LiveError("cannot write %s: it is %s; the core goes into a file of its own" % (path, kind))
    return real


@contextlib.contextmanager
def _new_file(path):
    """A file that appears at `path` when the block ends well: its file descriptor.

    Where the file system can do it, it has no name before, so that nothing is left when this program is killed."""
    directory, name = os.path.split(os.path.abspath(path))
    with contextlib.ExitStack() as stack:
        try:
            fd, temporary = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600), ""
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            fd, temporary = tempfile.mkstemp(".part", name + ".", directory)
            stack.callback(_remove, temporary)
        stack.callback(os.close, fd)
        yield fd
        if not temporary:
            with contextlib.suppress(FileExistsError):
                return _give_name(fd, path)
            temporary = os.path.join(directory, "%s.%d.part" % (name, os.getpid()))
            _remove(temporary)
            stack.callback(_remove, temporary)
            _give_name(fd, temporary)
        os.rename(temporary, path)


def _give_name(fd, path):
    # Only with a directory descriptor does Python follow the link of /proc.
    os.link("/proc/self/fd/%d" % fd, path, src_dir_fd=fd, follow_symlinks=True)


def _remove(path):
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _as_live_error(error, pid, tid, path):
    if isinstance(error, PermissionError) and str(error.filename).startswith("/proc/"):
        return no_permission(pid)
    # While it is being killed it is not dead yet, but its memory and the link to its program are gone.
    if error.errno == errno.ESRCH or is_dead(tid) or (
            error.errno == errno.ENOENT and str(error.filename).startswith("/proc/")):
        return Ended("process %d has ended" % pid)
    remedy = {errno.EFBIG: " (a limit on files, as of ulimit -f, or of the file system: raise it, or use another one)",
              errno.ENOSPC: " (another directory mends it)"}.get(error.errno, "")
    return LiveError("cannot write %s: %s%s" % (path, error.strerror or error, remedy))


_Moment = collections.namedtuple("_Moment", "threads maps exe notes")
_Moment.__doc__ = """The process in the stop: thread ids, `Mapping`s, path of the executable, all notes but NT_FILE."""


class Capture:
    """One snapshot in the making: prepared while the process runs, completed while it is stopped."""

    def __init__(self, stopped, tid, fd, stack):
        self._stopped, self._tid, self._fd = stopped, tid, fd
        self._survey = _Survey(tid)
        stack.callback(self._survey.close)
        self._lines = {}            # of /proc/PID/maps, parsed
        # In a PID namespace threads have ids of their own; those of many are not to be read in the stop.
        is_within = len((status_of(tid) or {}).get("NSpid", "").split()) > 1
        self._ids = {one: own_id(one) for one in threads_of(stopped.pid)} if is_within else None
        maps = mappings(tid, self._lines)
        self._early = self._survey.ranges([m for m in maps if not is_skipped(m)], program_files(maps))
        self._survey.look_for_pages_in_common({mapping: data for mapping, (_, data) in self._early.items()})
        # Room for the headers, twice what they need now; what is not used remains a hole of the file.
        need = sum(150 + len(os.fsencode(m.path)) for m in maps) + 2000 * len(threads_of(stopped.pid)) + (1 << 14)
        self._room = -(-2 * need // PAGE) * PAGE
        self._image = _Image(fd, self._room)
        stack.callback(self._image.close)
        self._copier = _Copier(tid, self._image, self._survey.through_file)
        stack.callback(self._copier.close)

    def run(self, path, progress):
        """Take the snapshot; a `Snapshot`. Raises LiveError, OSError."""
        stopped = self._stopped
        directory = os.path.dirname(os.path.realpath(path))
        needed = self._room + sum(_size(data) for _, data in self._early.values())
        lacking = lack(directory, needed)
        if lacking:
            raise LiveError("not enough space in %s: the copy of process %d %s" % (directory, stopped.pid, lacking))
        done = [0]

        def report(count):
            done[0] += count
            if progress:
                progress(done[0], needed - self._room)

        self._prepare(report)
        moment, stored = stopped.run(lambda: self._copy(report))
        failed = joined(sorted(self._copier.failed), 0)
        stored = {m: without(ranges, failed) for m, ranges in stored.items()}
        segments = load_segments(moment.maps, stored, self._image)
        unreadable = self._unreadable(moment.maps, failed)
        notes = b"".join(moment.notes[:3] + [file_note(moment.maps)] + moment.notes[3:] + [missing_note(unreadable)])
        write_headers(self._fd, self._room, self._image.size, segments, notes)
        exe = moment.exe[:-len(" (deleted)")] if moment.exe.endswith(" (deleted)") else moment.exe
        vain = stopped.total - stopped.milliseconds if stopped.milliseconds else 0.0
        return Snapshot(path, stopped.pid, exe, tuple(moment.threads), self._copier.bytes_copied, stopped.began,
                        stopped.milliseconds, unreadable, None, "", vain)

    def _prepare(self, report):
        """All that can be done while the process runs."""
        self._image.reserve(r for stored, _ in self._early.values() for r in stored)
        for mapping, (_, data) in self._early.items():
            if self._wants_room(mapping):
                self._image.allocate(data, report)
            if is_constant(mapping):
                self._copier.copy(data)

    def _wants_room(self, _mapping):
        """Whether the file's pages for this mapping are allocated before the stop."""
        return True

    def _copy(self, _report):
        """The stop itself: (`_Moment`, ranges that the core has of each mapping)."""
        with hurried(), self._stopped as stopped:
            moment = self._look()
            copied = self._still_constant(moment.maps)
            now = self._ranges([m for m in checked(moment.maps, stopped.check) if m not in copied],
                               program_files(checked(moment.maps, stopped.check)))
            self._copier.copy([r for _, data in checked(now.values(), stopped.check) for r in data], stopped.check)
            stopped.check()
        return moment, {m: self._early[m][0] if m in copied else now[m][0] for m in moment.maps if not is_skipped(m)}

    def _look(self):
        """The `_Moment` of the stopped process. What was opened before is opened again: an exec replaces the memory."""
        threads = self._stopped.threads
        self._tid = threads[0]
        self._survey.reopen(self._tid)
        self._copier.reopen(self._tid)
        parents = _parents(self._tid)
        size = MACHINES[platform.machine()][1]
        first, *others = [thread_notes(tid, self._id_of(tid), parents, size)
                          for tid in checked(threads, self._stopped.check)]
        process = process_note(self._id_of(self._stopped.pid), self._tid, parents)
        maps = mappings(self._tid, self._lines, self._stopped.check)
        return _Moment(threads, maps, os.readlink("/proc/%d/exe" % self._tid),
                       [first, process, auxv_note(self._tid)] + others)

    def _id_of(self, tid):
        """The id of a thread in the core: that in its own PID namespace, as the kernel has it, and as GDB's thread
        library expects it."""
        if self._ids is None:
            return tid
        return self._ids.get(tid) or own_id(tid)

    def _still_constant(self, maps):
        """The mappings that were copied while the process ran, and are still there; others of those are forgotten."""
        copied = {m for m in checked(maps, self._stopped.check) if is_constant(m) and m in self._early}
        stale = [m for m in checked(self._early, self._stopped.check) if is_constant(m) and m not in copied]
        changed = sorted(r for m in stale for r in self._early[m][0])
        self._image.forget(changed)
        self._copier.failed = without(sorted(self._copier.failed), changed)
        return copied

    def _ranges(self, maps, programs, check=None):
        """{mapping: (stored, data)} as the survey says it now, with a place in the image."""
        check = check or self._stopped.check
        now = self._survey.ranges([m for m in checked(maps, check) if not is_skipped(m)], programs, check)
        self._image.reserve(r for stored, _ in checked(now.values(), check) for r in stored)
        return now

    def _unreadable(self, maps, failed):
        found, ends = [], [end for _, end in failed]
        for mapping in maps:
            reason = not is_skipped(mapping) and self._survey.excluded(mapping)
            if reason:
                ranges = self._survey.kept_out.get(mapping, ()) if is_hidden(mapping) else [mapping[:2]]
                found += [Unreadable(start, end, mapping.path, reason) for start, end in ranges]
            for start, end in _within(failed, ends, mapping.start, mapping.end):
                found.append(Unreadable(start, end, mapping.path, "the kernel refuses to read it"))
        return found


def _parents(tid):
    """(parent process, process group, session)."""
    with open("/proc/%d/stat" % tid, "rb") as file:
        fields = file.read().rsplit(b")", 1)[1].split()
    return int(fields[1]), int(fields[2]), int(fields[3])
