"""The set of a report: which blocks of the malloc heaps it is about."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..quantities import size, size_range
from ..graph import native
from ..heaps.blocks import FREE_STATES, Region
from ..heaps.glibc_heap import GlibcHeap
from ..kernels import chunks as kernel
from .analysis import Analysis

STATES = {"in-use": (kernel.IN_USE,), "free": FREE_STATES, "tcached": (kernel.TCACHED,), "top": (kernel.TOP,)}


#: States that the graph tells.
GRAPH_STATES = {"reached": (native.REACHED, native.ON_STACK_ONLY), "unreachable": (native.UNREACHABLE,),
                "pending": (native.PENDING,)}


class Slice(NamedTuple):
    """Blocks of one region: rows `first` to `last` of its heap; `rows`: which of them (None: all)."""

    heap: GlibcHeap
    region: Region
    rows: np.ndarray | None

    @property
    def size(self) -> np.ndarray:
        part = self.heap.blocks.size[self.region.first:self.region.last]
        return part if self.rows is None else part[self.rows]

    @property
    def state(self) -> np.ndarray:
        part = self.heap.blocks.state[self.region.first:self.region.last]
        return part if self.rows is None else part[self.rows]

    @property
    def numbers(self) -> np.ndarray:
        """Row numbers in the heap's blocks."""
        return np.arange(self.region.first, self.region.last) if self.rows is None else self.rows + self.region.first


def arena_name(region: Region) -> str:
    """How a region's arena is called: `arena 0 (main)`, `arena 3`, `mmapped`."""
    if region.kind == "mmapped":
        return "mmapped"
    return "arena 0 (main)" if region.arena == 0 else f"arena {region.arena}"


def describe(arguments) -> str:
    """The set in words, "" for all blocks."""
    parts = [f"size {arguments.size}" if arguments.size else "", arguments.state if arguments.state != "all" else "",
             f"arena {arguments.arena}" if arguments.arena else ""]
    return ", ".join(part for part in parts if part)


def select(analysis: Analysis, arguments) -> list[Slice]:
    """The blocks that `--size`, `--state` and `--arena` ask for, region by region. Raises ValueError."""
    heaps = analysis.need_glibc()
    bounds = size_range(arguments.size, arguments.evaluate) if arguments.size else None
    least = size(arguments.min_bytes, arguments.evaluate)
    if least:
        bounds = (max(bounds[0], least), bounds[1]) if bounds else (least, 1 << 63)
    states = STATES.get(arguments.state)
    graph_state = GRAPH_STATES.get(arguments.state)
    known = {str(arena.index) for heap in heaps for arena in heap.arenas} | {"mmapped"}
    if arguments.arena and arguments.arena not in known:
        highest = max(int(k) for k in known - {"mmapped"})
        raise ValueError(f"there is no arena {arguments.arena}: this target has 0 to {highest}, and `mmapped`")
    found = []
    for number, heap in enumerate(heaps):
        reached = analysis.native.state_of_heap(number) if graph_state is not None else None
        for region in heap.regions:
            name = "mmapped" if region.kind == "mmapped" else str(region.arena)
            if arguments.arena and arguments.arena != name:
                continue
            rows = None
            if bounds or states or graph_state is not None:
                part = slice(region.first, region.last)
                chosen = np.ones(region.last - region.first, bool)
                if bounds:
                    sizes = heap.blocks.size[part]
                    chosen &= (sizes >= np.uint64(bounds[0])) & (sizes < np.uint64(bounds[1]))
                if states:
                    chosen &= np.isin(heap.blocks.state[part], states)
                if reached is not None:
                    chosen &= np.isin(reached[part], graph_state)
                rows = np.flatnonzero(chosen)
                if not len(rows):
                    continue
            found.append(Slice(heap, region, rows))
    return found


def rows_of_set(analysis: Analysis, arguments) -> np.ndarray:
    """The same set as rows of the graph's blocks (ascending), without blocks that are not in use. Raises ValueError."""
    nodes, found = analysis.native.nodes, np.zeros(len(analysis.native.nodes), bool)
    for part in select(analysis, arguments):
        found[nodes.of_heap(nodes.heaps.index(part.heap), part.numbers)] = True
    return np.flatnonzero(found & (analysis.native.state != native.NO_NODE))
