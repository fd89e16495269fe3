"""Blocks of a heap as rows of arrays, the regions they lie in, and what every heap reports besides."""
from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass, field

import numpy as np

from ..kernels import chunks as kernel

STATES = {kernel.IN_USE: "in use", kernel.FREE: "free (bin)", kernel.FASTBIN: "free (fastbin)",
          kernel.TCACHED: "tcached", kernel.TOP: "top"}
FREE_STATES = (kernel.FREE, kernel.FASTBIN, kernel.TOP)


_LARGE = 4 << 20                # bytes from which on large pages are worth it


def reserve(count: int, dtype, dense: bool = False) -> np.ndarray:
    """An array whose untouched pages cost nothing, however large: rows are appended to it until it is cut to size.
    `dense`: from its beginning on, without holes, so that large pages serve, which take a third of the time."""
    size = max(count * np.dtype(dtype).itemsize, mmap.PAGESIZE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, size, flags=flags)
    if dense and size >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):                   # a kernel that has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype)[:count]


def cut(array: np.ndarray, count: int) -> np.ndarray:
    """The first `count` items of a reserved array; what large pages took behind them is given back."""
    owner, used = array, -(-count * array.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if used < len(owner) and hasattr(mmap, "MADV_DONTNEED"):
        owner.obj.madvise(mmap.MADV_DONTNEED, used, len(owner) - used)
    return array[:count]


@dataclass
class Region:
    """A stretch of an arena: chunks from `start` to `end`, blocks[first:last]; `overhead`: headers and fenceposts.

    `kind`: "brk", "heap" (of a non-main arena), "mmap" (of a main arena whose brk failed), "mmapped" (one chunk of its
    own).
    """

    start: int
    end: int
    kind: str
    arena: int
    first: int = 0
    last: int = 0
    overhead: int = 0
    foreign: list[tuple[int, int]] = field(default_factory=list)   # somebody else's sbrk: start, end
    damaged: list[tuple[int, int]] = field(default_factory=list)   # what could not be walked: start, end


@dataclass
class Damage:
    """Something in a heap that cannot be: where, what, and the last good chunk before it (0: none)."""

    address: int
    what: str
    last_good: int = 0


@dataclass
class Check:
    """Our sum against the target's own counter."""

    name: str
    ours: int
    truth: int

    @property
    def gap(self) -> int:
        return self.ours - self.truth


class Blocks:
    """Rows sorted by address: `address` (user address, uint64), `size` (chunk bytes with header, uint64), `state`."""

    def __init__(self, address: np.ndarray, size: np.ndarray, state: np.ndarray):
        self.address, self.size, self.state = address, size, state

    def __len__(self) -> int:
        return len(self.address)

    def row_of(self, address: int, header: int = 16) -> int:
        """The row whose chunk (header included) holds `address`, or -1."""
        row = int(np.searchsorted(self.address, np.uint64(address + header), "right")) - 1
        if row >= 0 and int(self.address[row]) - header + int(self.size[row]) > address:
            return row
        return -1

    def rows_of(self, addresses: np.ndarray, header: int = 16) -> np.ndarray:
        """`row_of` for many addresses (uint64) at once: int64 rows, -1 where no chunk holds the address."""
        if not len(self):
            return np.full(len(addresses), -1, np.int64)
        header = np.uint64(header)
        rows = np.searchsorted(self.address, addresses + header, "right") - 1
        inside = (rows >= 0) & (addresses + header - self.address[rows] < self.size[rows].astype(np.uint64))
        return np.where(inside, rows, -1)
