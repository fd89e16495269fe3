"""The target's memory as one flat buffer of ours, and a sorted table of where each piece of it lies there.

A core file is mapped into the buffer as it is, without a copy; memory of a stopped process is read into it block by
block when it is asked for. What comes after cannot tell them apart. Memory that is not there is absent: it is never
taken for zeros.
"""
from __future__ import annotations

import bisect
import ctypes
import mmap
import os
from typing import NamedTuple

import numpy as np

PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]


class Absent(Exception):
    """A byte that was asked for is not in the core (or could not be read); `address` is the first of them."""

    def __init__(self, address: int):
        super().__init__(f"memory at {address:#x} is not available")
        self.address = address


class Table(NamedTuple):
    """Pieces of target memory, sorted: piece k is [starts[k], ends[k]) and begins at byte offsets[k] of the buffer."""

    starts: np.ndarray   # uint64
    ends: np.ndarray     # uint64
    offsets: np.ndarray  # uint64


def _round_up(value: int, unit: int = PAGE) -> int:
    return (value + unit - 1) // unit * unit


class AddressSpace:
    """Read access to target memory. `bytes` (uint8) and `words` (uint64) are two views of the whole buffer.

    Kernels take `words` together with `table(ranges)`; everything else uses `read`, `word`, `words_of`, `gather` and
    `struct`. Addresses are plain ints, arrays of them uint64.
    """

    def __init__(self, capacity: int):
        """`capacity`: bytes of buffer to reserve (address space only, no memory)."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._reserved = mmap.mmap(-1, max(_round_up(capacity), PAGE), flags=flags)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._reserved))
        self._used = 0
        self._pieces: list[tuple[int, int, int]] = []
        self._sorted: tuple[list[int], list[int], list[int]] | None = None
        self._table: Table | None = None
        self.bytes = np.frombuffer(self._reserved, np.uint8)
        self.words = self.bytes.view(np.uint64)
        self._memory = memoryview(self._reserved)
        self._word_view = self._memory.cast("Q")

    # -- building ---------------------------------------------------------------------------------------------------
    def allocate(self, size: int) -> int:
        """Set aside `size` bytes of the buffer, page-aligned; their offset. Raises MemoryError when it is full."""
        offset = self._used
        if offset + _round_up(size) > len(self._reserved):
            raise MemoryError("the reserved buffer is full")
        self._used += _round_up(size)
        return offset

    def map_file(self, fd: int, offset: int, size: int) -> int:
        """Map `size` bytes of a file from page-aligned `offset` into the buffer; the buffer offset of the first."""
        place = self.allocate(size)
        if size:
            got = _libc.mmap(self._base + place, size, mmap.PROT_READ, mmap.MAP_PRIVATE | _MAP_FIXED, fd, offset)
            if got in (None, ctypes.c_void_p(-1).value):
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))
        return place

    def add(self, start: int, end: int, offset: int) -> None:
        """Target memory [start, end) lies at `offset` of the buffer (congruent to `start` modulo 8)."""
        if end > start:
            self._sorted = self._table = None
            self._pieces.append((start, end, offset))

    def _lists(self) -> tuple[list[int], list[int], list[int]]:
        """The pieces sorted, neighbours merged, overlaps cut (the piece that was added first wins)."""
        if self._sorted is None:
            ordered = sorted(range(len(self._pieces)), key=lambda k: (self._pieces[k][0], k))
            starts: list[int] = []
            ends: list[int] = []
            offsets: list[int] = []
            for k in ordered:
                start, end, offset = self._pieces[k]
                if ends and start < ends[-1]:
                    offset += ends[-1] - start
                    start = ends[-1]
                    if start >= end:
                        continue
                if ends and start == ends[-1] and offset == offsets[-1] + start - starts[-1]:
                    ends[-1] = end
                else:
                    starts.append(start)
                    ends.append(end)
                    offsets.append(offset)
            self._sorted = starts, ends, offsets
        return self._sorted

    # -- reading ----------------------------------------------------------------------------------------------------
    def load(self, start: int, end: int) -> None:
        """Make [start, end) readable where it can be. Nothing to do for memory that is mapped as it is."""

    def table(self, ranges=()) -> Table:
        """The present pieces, for kernels that will read inside `ranges` (pairs of start, end)."""
        self._load_ranges(ranges)
        if self._table is None:
            self._table = Table(*(np.array(column, np.uint64) for column in self._lists()))
        return self._table

    def signed_table(self, ranges=()) -> Table:
        """The same as signed numbers (int64), for kernels that know no others: without the vsyscall page, the one piece in
        the upper half, which would be a negative number at the end."""
        table = self.table(ranges)
        own = int(np.searchsorted(table.ends, np.uint64(1 << 63), "right"))
        return Table(*(column[:own].view(np.int64) for column in table))

    def find(self, address: int) -> tuple[int, int] | None:
        """(buffer offset, bytes available from there on without a break) of `address`, or None when absent."""
        starts, ends, offsets = self._lists()
        k = bisect.bisect_right(starts, address) - 1
        if k < 0 or address >= ends[k]:
            return None
        return offsets[k] + address - starts[k], ends[k] - address

    def present(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of [start, end) that are there, in order."""
        self.load(start, end)
        starts, ends, _ = self._lists()
        k = max(bisect.bisect_right(starts, start) - 1, 0)
        parts = []
        while k < len(starts) and starts[k] < end:
            low, high = max(starts[k], start), min(ends[k], end)
            if low < high:
                if parts and parts[-1][1] == low:
                    parts[-1] = (parts[-1][0], high)
                else:
                    parts.append((low, high))
            k += 1
        return parts

    def read(self, address: int, size: int) -> bytes:
        """`size` bytes at `address`. Raises Absent."""
        self.load(address, address + size)
        out = b""
        while len(out) < size:
            place = self.find(address + len(out))
            if place is None:
                raise Absent(address + len(out))
            offset, available = place
            part = self._memory[offset:offset + min(available, size - len(out))]
            if len(part) == size:
                return bytes(part)
            out += part
        return out

    def word(self, address: int) -> int:
        """The 8-byte word at `address`. Raises Absent."""
        self.load(address, address + 8)
        place = self.find(address)
        if place is not None and place[1] >= 8 and not place[0] & 7:
            return self._word_view[place[0] >> 3]
        return int.from_bytes(self.read(address, 8), "little")

    def words_of(self, start: int, end: int) -> np.ndarray:
        """The words of [start, end), both multiples of 8: a view where it can be. Raises Absent."""
        self.load(start, end)
        place = self.find(start)
        if place is not None and place[1] >= end - start:
            return self.words[place[0] >> 3:(place[0] + end - start) >> 3]
        return np.frombuffer(self.read(start, end - start), np.uint64)

    def struct(self, address: int, dtype: np.dtype) -> np.void:
        """The structure at `address`; its fields by name. Raises Absent."""
        return np.frombuffer(self.read(address, dtype.itemsize), dtype)[0]

    def gather(self, addresses: np.ndarray, dtype) -> tuple[np.ndarray, np.ndarray]:
        """The values of `dtype` at many addresses and a mask of those that were there whole (the others are zero)."""
        dtype = np.dtype(dtype)
        addresses = np.asarray(addresses, np.uint64)
        values = np.zeros(len(addresses), dtype)
        self._load_blocks(addresses, dtype.itemsize)
        starts, ends, offsets = self.table()
        if not len(starts) or not len(addresses):
            return values, np.zeros(len(addresses), bool)
        piece = np.searchsorted(starts, addresses, "right").astype(np.int64) - 1
        piece[piece < 0] = 0
        inside = (addresses >= starts[piece]) & (addresses < ends[piece])
        present = inside & (ends[piece] - addresses >= np.uint64(dtype.itemsize))
        at = (offsets[piece] + (addresses - starts[piece]))[present]
        if dtype.itemsize == 8 and not (at & np.uint64(7)).any():
            values[present] = self.words[at >> np.uint64(3)].view(dtype)
        elif dtype.itemsize % 8 == 0 and not (at & np.uint64(7)).any():
            rows = self.words[(at >> np.uint64(3))[:, None] + np.arange(dtype.itemsize >> 3, dtype=np.uint64)]
            values[present] = rows.view(dtype)[:, 0]
        elif len(at):
            rows = self.bytes[at[:, None] + np.arange(dtype.itemsize, dtype=np.uint64)]
            values[present] = np.ascontiguousarray(rows).view(dtype)[:, 0]
        for k in np.flatnonzero(inside & ~present):  # across two pieces that meet in the target but not in the buffer
            try:
                values[k] = np.frombuffer(self.read(int(addresses[k]), dtype.itemsize), dtype)[0]
                present[k] = True
            except Absent:
                pass
        return values, present

    def _load_blocks(self, addresses: np.ndarray, size: int) -> None:
        """`load` for scattered addresses; a hook for memory that is read on demand."""

    def _load_ranges(self, ranges) -> None:
        """`load` for pairs of start and end, of which there may be many; a hook as well."""

    def cstring(self, address: int, limit: int = 4096) -> bytes:
        """The bytes at `address` up to a NUL, the end of what is there, or `limit`.
        Raises Absent when there are none."""
        self.load(address, address + limit)
        parts = self.present(address, address + limit)
        if not parts or parts[0][0] != address:
            raise Absent(address)
        return self.read(address, parts[0][1] - address).split(b"\0", 1)[0]


class DemandSpace(AddressSpace):
    """Memory of a process that stands still, read in blocks of 1 MiB, and only what is asked for.

    `ranges`: the readable (start, end) pairs; `reader(address, view) -> int` fills a writable view of the buffer and
    returns how many bytes came (less when the rest cannot be read).
    """

    BLOCK = 1 << 20

    def __init__(self, ranges, reader):
        super().__init__(sum(_round_up(end - start) for start, end in ranges) + PAGE)
        self._reader = reader
        self._ranges = sorted(ranges)
        self._range_starts = [start for start, _ in self._ranges]
        self._places = [self.allocate(end - start) for start, end in self._ranges]
        self._loaded = [bytearray((end - start + self.BLOCK - 1) // self.BLOCK) for start, end in self._ranges]
        self.bytes_read = 0

    def load(self, start: int, end: int) -> None:
        k = max(bisect.bisect_right(self._range_starts, start) - 1, 0)
        while k < len(self._ranges) and self._ranges[k][0] < end:
            low, high = self._ranges[k]
            loaded = self._loaded[k]
            for block in range((max(start, low) - low) // self.BLOCK, -(-(min(end, high) - low) // self.BLOCK)):
                if not loaded[block]:
                    self._fill(k, low + block * self.BLOCK, min(low + (block + 1) * self.BLOCK, high))
                    loaded[block] = 1   # not before: Ctrl-C may have cut it short
            k += 1

    def _fill(self, k: int, start: int, end: int) -> None:
        place = self._places[k] + start - self._ranges[k][0]
        while start < end:
            got = self._reader(start, self._memory[place:place + end - start])
            self.bytes_read += got
            self.add(start, start + got, place)
            skip = got + (PAGE - (start + got) % PAGE if got < end - start else 0)  # step over the page that failed
            start, place = start + skip, place + skip

    def _load_ranges(self, ranges) -> None:
        for start, end in ranges:
            self.load(start, end)

    def _load_blocks(self, addresses: np.ndarray, size: int) -> None:
        for block in np.unique(addresses // np.uint64(self.BLOCK)):
            start = int(block) * self.BLOCK
            self.load(start, start + self.BLOCK + size)
