"""`Nodes`: the blocks of all malloc heaps as one sorted table, and whose an address is."""
from __future__ import annotations

from functools import cached_property

import numpy as np

from ..heaps.blocks import reserve
from ..heaps.glibc_heap import GlibcHeap
from ..kernels import chunks, owners as kernel
from ..kernels.pointers import NO_NODE
from ..target.target import Target


class Nodes:
    """Row k is a block: `address`, `size` (chunk bytes, header included; uint64), sorted by address.

    `seen` (uint8): 0, or NO_NODE for blocks that are not in use and those that are the allocator's own.
    """

    def __init__(self, target: Target, heaps: list[GlibcHeap]):
        self.target, self.heaps = target, heaps
        self._order = None               # of rows of all heaps one after the other, when there is more than one heap
        self._firsts = np.cumsum([0] + [len(heap.blocks) for heap in heaps])
        columns = [[getattr(heap.blocks, name) for heap in heaps] for name in ("address", "size", "state")]
        empty = (np.zeros(0, np.uint64), np.zeros(0, np.uint64), np.zeros(0, np.uint8))
        joined = [parts[0] if len(parts) == 1 else np.concatenate([none, *parts]) for none, parts in zip(empty, columns)]
        if len(heaps) > 1:
            self._order = np.argsort(joined[0], kind="stable")
            joined = [column[self._order] for column in joined]
        self.address, self.size, state = joined
        self.seen = np.where(state == chunks.IN_USE, np.uint8(0), np.uint8(NO_NODE))
        own = np.array([address for heap in heaps for address in heap.metadata()], np.uint64)
        self.own = np.searchsorted(self.address, own)        # rows of the allocator's own blocks
        self.seen[self.own] = NO_NODE
        regions = sorted((region.start, region.end) for heap in heaps for region in heap.regions)
        slots = np.cumsum([0] + [(end - start + 15) >> 4 for start, end in regions])
        self.region_starts, self.region_ends = (np.array([pair[k] for pair in regions], np.uint64) for k in (0, 1))
        self.region_slots = slots[:-1].astype(np.uint64)
        self._slots = int(slots[-1])

    def __len__(self) -> int:
        return len(self.address)

    @cached_property
    def index(self) -> tuple:
        """(region_starts, region_ends, region_slots, bits, rank, address, size), as the kernels take it."""
        words = (self._slots >> 6) + 1
        bits, rank = reserve(words, np.uint64, dense=True), reserve(words, np.int32, dense=True)
        regions = self.region_starts, self.region_ends, self.region_slots
        if len(self):
            kernel.index(*regions, self.address, bits, rank)
        return (*regions, bits, rank, self.address, self.size)

    @cached_property
    def words_there(self) -> int:
        """How many words of the regions are there, at most."""
        return sum(1 + (high - low) // 8 for start, end in zip(self.region_starts.tolist(), self.region_ends.tolist())
                   for low, high in self.target.space.present(start, end))

    @cached_property
    def buffer(self) -> tuple:
        """(words, starts, ends, offsets) of the target's memory, with all regions there."""
        table = self.target.space.table(list(zip(self.region_starts.tolist(), self.region_ends.tolist())))
        return self.target.space.words, table.starts, table.ends, table.offsets

    def rows_at(self, values: np.ndarray) -> np.ndarray:
        """The row of the block that holds each address (uint64), -1 where none does (int32); blocks not in use too."""
        rows = np.full(len(values), -1, np.int32)
        if len(self) and len(values):
            kernel.owners(*self.index, np.ascontiguousarray(values, np.uint64), rows)
        return rows

    def nodes_at(self, values: np.ndarray) -> np.ndarray:
        """The same, and -1 for blocks that are no nodes."""
        rows = self.rows_at(values)
        held = np.flatnonzero(rows >= 0)
        rows[held[self.seen[rows[held]] == NO_NODE]] = -1
        return rows

    def in_heaps(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(number of the heap, row of its blocks) of each of our rows."""
        joined = rows if self._order is None else self._order[rows]
        number = np.searchsorted(self._firsts, joined, "right") - 1
        return number, joined - self._firsts[number]

    def in_heap(self, row: int) -> tuple[GlibcHeap, int]:
        """(heap, row of its blocks) of one of our rows."""
        number, rows = self.in_heaps(np.array([row]))
        return self.heaps[int(number[0])], int(rows[0])

    def of_heap(self, number: int, rows: np.ndarray) -> np.ndarray:
        """Our rows of the given block rows of heap `number`."""
        if self._order is None:
            return rows
        inverse = np.empty(len(self._order), np.int64)
        inverse[self._order] = np.arange(len(self._order))
        return inverse[rows + self._firsts[number]]

    def over_heaps(self, columns: list[np.ndarray]) -> np.ndarray:
        """One column over our rows, from one over the blocks of each heap."""
        joined = columns[0] if len(columns) == 1 else np.concatenate(columns)
        return joined if self._order is None else joined[self._order]
