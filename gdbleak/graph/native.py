"""`Native`: the pointers between malloc blocks, and which of them are reached, from where, and which are not.

Lua objects come in only as holders: what a live one points to is reached, what only dead ones point to is pending.
The graph over both is `process.py`'s.
"""
from __future__ import annotations

from functools import cached_property

import numpy as np

from .. import channel
from ..heaps.blocks import reserve
from ..heaps.glibc_heap import GlibcHeap
from ..kernels import components as components_kernel
from ..kernels import graph as graph_kernel
from ..kernels import pointers as kernel
from ..runtimes.luajit_flight import Chunks
from ..target.target import Target
from . import roots
from .holders import Holders, malloc_chunks, take_objects_out
from .nodes import Nodes

TILE = 100_000                  # rows a kernel call
BYTES_A_BLOCK = 30              # what the pointers need for each block, beside what the heap itself takes
EDGES = 2_000_000               # edges a kernel call
#: What `state` says of a block.
UNREACHABLE, REACHED, ON_STACK_ONLY, PENDING, NO_NODE = 0, 1, 2, 3, kernel.NO_NODE


class Native:
    """The blocks as `nodes`, their pointers in CSR (`begins`, `targets`, int32), and the state of each.

    Behind `begins` and `targets` there is room for what `process.py` appends (`all_begins`, `all_targets`), at no cost.
    """

    def __init__(self, target: Target, heaps: list[GlibcHeap], vms: list):
        self.target, self.vms = target, vms
        self.nodes = nodes = Nodes(target, heaps)
        self.lua_blocks = [take_objects_out(vm, nodes) for vm in vms]
        self.lost = np.zeros(2, np.int64)              # how often words of blocks were absent, and how many
        check_room(len(nodes), BYTES_A_BLOCK, "the pointers between them")
        objects = sum(len(vm.objects) + len(vm.graph.targets) + len(vm.graph.roots) for vm in vms)
        more = objects + 2 * len(self.roots.row) + sum(len(held.block) for held in self.holders) + 2 * len(vms) + 2
        words = nodes.words_there          # not the sum of sizes: a damaged one can claim what is not there
        self.all_begins, self.all_targets = (reserve(n + more, np.int32, dense=True) for n in (len(nodes), words))
        self.begins = self.all_begins[:len(nodes) + 1]
        self.edges = 0
        for first in range(0, len(nodes), TILE):
            last = min(first + TILE, len(nodes))
            self.edges = int(kernel.edges(*nodes.buffer, *nodes.index, nodes.seen, first, last, self.begins,
                                          self.all_targets, self.edges, self.lost))
            if self.edges >= (1 << 31) - (1 << 24):
                raise MemoryError("more than 2,147,483,647 pointers between blocks: more than this graph can hold")
            channel.progress(f"pointers of {last:,} blocks read")
        self.targets = self.all_targets[:self.edges]

    @cached_property
    def roots(self) -> roots.Roots:
        """The root words."""
        return roots.find(self.nodes, self.vms)

    @cached_property
    def holders(self) -> list[Holders]:
        """For each VM, which of its objects point to blocks."""
        return [Holders.of(vm, self.nodes) for vm in self.vms]

    # -- reachability --------------------------------------------------------------------------------------------------
    @cached_property
    def state(self) -> np.ndarray:
        """What is known of each block (uint8): REACHED from roots that are no stack words, ON_STACK_ONLY, PENDING (held
        by dead Lua objects alone), UNREACHABLE, or NO_NODE."""
        seen, rooted = self.nodes.seen.copy(), self.roots
        on_stack = np.isin(rooted.kind, roots.ON_STACKS)
        self._spread(seen, REACHED, [rooted.row[~on_stack], *(held.rows(live=True) for held in self.holders)])
        self._spread(seen, ON_STACK_ONLY, [rooted.row[on_stack]])
        self._spread(seen, PENDING, [held.rows(live=False) for held in self.holders])
        for vm, pairs in zip(self.vms, self.lua_blocks):
            seen[pairs[:, 0]] = np.where(vm.graph.tree.seen[pairs[:, 1]] != 0, REACHED, PENDING)
        return seen

    def _spread(self, seen: np.ndarray, state: int, seeds: list[np.ndarray]) -> None:
        """Put `state` into `seen` of what the seeds (rows) reach and nothing before did."""
        waiting, depth, followed = reserve(len(seen), np.int32), 0, 0
        for rows in seeds:
            while len(rows) or depth:
                depth = graph_kernel.spread(self.begins, self.targets, rows, state, EDGES, seen, waiting, depth)
                rows, followed = rows[:0], min(followed + EDGES, self.edges)
                channel.progress(f"{followed:,} pointers between blocks followed")

    def chunks_of(self, number: int) -> Chunks | None:
        """What chunks can be those of VM `number` on malloc: which hold something that it names, and which only
        registers and stacks lead to. None where its objects are no malloc blocks that are known."""
        return malloc_chunks(self.vms[number], self.nodes, self.state == ON_STACK_ONLY)

    def rows_of(self, state: int) -> np.ndarray:
        """The rows in a state, ascending."""
        return np.flatnonzero(self.state == state).astype(np.int32)

    def state_of_heap(self, number: int) -> np.ndarray:
        """The state of each block of heap `number`, by its row there."""
        return self.state[self.nodes.of_heap(number, np.arange(len(self.nodes.heaps[number].blocks)))]

    @cached_property
    def leaks(self) -> "Leaks":
        """The unreachable blocks by the block they hang on."""
        return Leaks(self, self.rows_of(UNREACHABLE))

    @cached_property
    def on_stack(self) -> "OnStack":
        """What hangs on one stack word, or register, alone."""
        return OnStack(self)


def check_room(blocks: int, each: int, what: str) -> None:
    """Raise MemoryError before starting on what this machine has no memory for."""
    try:
        with open("/proc/meminfo") as stream:
            fields = dict(line.split(":") for line in stream)
        available = 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return
    if blocks * each > available:
        raise MemoryError(f"{blocks:,} blocks: {what} need about {blocks * each >> 20:,} MB of memory, and {available >> 20:,} MB "
                          "are available here; leak-sizes and leak-blocks need none of it")


class Leaks:
    """Unreachable blocks: `rows`; `head`: the index in `rows` of the leak each hangs on; `direct`: of the heads."""

    def __init__(self, native: Native, rows: np.ndarray):
        n = len(rows)
        number = np.zeros(len(native.nodes), np.int32)
        number[rows] = np.arange(1, n + 1, dtype=np.int32)
        component, visit, head = (np.full(n, -1, np.int32) for _ in range(3))
        scratch = [np.empty(n, np.int32) for _ in range(4)]
        graph = native.begins, native.targets, rows, number
        self.components = int(components_kernel.components(*graph, component, visit, *scratch))
        self.component = component
        components_kernel.heads(*graph, component, np.zeros(self.components, np.uint8),
                                np.full(self.components, -1, np.int32), head, scratch[0])
        self.rows, self.head = rows, head

    @cached_property
    def direct(self) -> np.ndarray:
        """Which of `rows` are heads: nothing else that is unreachable leads to them, but for a cycle they are in."""
        return self.head == np.arange(len(self.rows))

    @cached_property
    def cyclic(self) -> np.ndarray:
        """Which of `rows` are in a cycle with others."""
        return np.bincount(self.component, minlength=self.components)[self.component] > 1


class OnStack:
    """Blocks that only stacks and registers lead to: `rows`; `word`: the one root word (into Native.roots) that each hangs
    on, -1 for those that several lead to."""

    def __init__(self, native: Native):
        self.rows = rows = native.rows_of(ON_STACK_ONLY)
        rooted = native.roots
        number = np.zeros(len(native.nodes) + 1, np.int32)
        number[rows] = np.arange(1, len(rows) + 1, dtype=np.int32)
        words = np.flatnonzero(np.isin(rooted.kind, roots.ON_STACKS) & (number[rooted.row] > 0))
        begins, targets = _part(native.begins, native.targets, rows, number)
        # Rows, then the words that point to them, then what points to all words.
        begins = np.concatenate([begins, begins[-1] + np.arange(1, len(words) + 1, dtype=np.int32),
                                 [begins[-1] + 2 * len(words)]]).astype(np.int32)
        targets = np.concatenate([targets, number[rooted.row[words]] - 1,
                                  len(rows) + np.arange(len(words))]).astype(np.int32)
        from .dominators import Dominators
        tree = Dominators(begins, targets, len(rows) + len(words))
        self.word = np.full(len(rows), -1, np.int32)
        top = tree.child_of_root()                     # of each row, which child of the root it is under
        mine = top[:len(rows)]
        held = mine >= len(rows)
        self.word[held] = words[mine[held] - len(rows)]


def _part(begins: np.ndarray, targets: np.ndarray, rows: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(begins, targets) of the graph of `rows` alone, by their index; `number`: index + 1 over all rows, else 0."""
    counts = (begins[rows + 1] - begins[rows]).astype(np.int64)
    at = np.repeat(begins[rows].astype(np.int64) - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
    to = number[targets[at]]
    source = np.repeat(np.arange(len(rows)), counts)[to > 0]
    kept = np.zeros(len(rows) + 1, np.int32)
    kept[1:] = np.cumsum(np.bincount(source, minlength=len(rows)))
    return kept, to[to > 0] - 1
