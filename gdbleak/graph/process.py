"""`Process`: one graph of everything: malloc blocks, Lua objects, and the places (variables, stack words, GC roots) that lead
to them.

Rows: the blocks, as in `Nodes`; then the objects of each VM; then the places; the last row is the root, which leads to
every place. Pointers between blocks are every aligned word; Lua's references are exact; what a cdata, userdata or light
userdata points to joins the two. Lua objects are held by Lua alone: a pointer from a block into the Lua heap holds nothing.
"""
from __future__ import annotations

from functools import cached_property

import numpy as np

from .. import channel
from ..heaps.blocks import reserve
from ..kernels import graph as graph_kernel
from ..kernels import pointers as kernel
from ..kernels.graph import NATIVE
from ..runtimes.luajit_names import prototype_rows
from . import roots
from .classes import is_cplusplus
from .dominators import Dominators
from .graph import Groups, Tree, fold
from .native import EDGES, NO_NODE, TILE, Native, check_room
from .types import CLASS, Types

BLOCK, POOL, PLACE, ROOT = 1, 2, 0, 3           # kinds of rows; Lua objects have the kinds of kernels.luajit, 4 and up
BYTES_A_ROW = 90                # what trees and dominators need for each row
ROOT_NAME = -(3 << 18)                          # label ROOT_NAME - k: a GC root
MEMBER = -(1 << 18)                             # label of one of many like siblings


class Process:
    """The graph in CSR: `begins`, `targets` (int32). `own`: bytes of each row (int64), `kind` (uint8)."""

    def __init__(self, native: Native, pooled: np.ndarray | None, types: Types | None = None):
        """`pooled`: which blocks are nginx pools' (bool over Nodes), None: there is no nginx. `types`: of the blocks."""
        self.native, self.nodes, self._types = native, native.nodes, types
        blocks, c = len(native.nodes), native.edges
        self.places = roots.Places(native.roots)
        self.firsts, last = [], blocks                     # first row of each VM's objects
        for vm in native.vms:
            self.firsts.append(last)
            last += len(vm.objects)
        self.first_place = last
        # The names of each VM's GC roots: label ROOT_NAME - k is the k-th.
        self.root_names = [list(dict.fromkeys(name for name, _ in vm.graph.roots)) for vm in native.vms]
        self.gc_places = [last + len(self.places) + k for k in range(len(native.vms))]
        self.root = last + len(self.places) + len(native.vms)
        check_room(self.root, BYTES_A_ROW, "the paths and dominators")
        self.begins, self.targets = native.all_begins[:self.root + 2], native.all_targets
        self.labels = reserve(len(self.targets), np.int32)         # of blocks' pointers none are kept
        self.own = np.zeros(self.root + 1, np.int64)
        self.kind = np.zeros(self.root + 1, np.uint8)
        self.own[:blocks] = native.nodes.size
        self.kind[:blocks] = BLOCK if pooled is None else np.where(pooled, POOL, BLOCK)
        for number in range(len(native.vms)):
            c = self._lua(number, c)
        c = self._places(c)
        self.targets = self.targets[:c]
        self.edges = c

    def _lua(self, number: int, c: int) -> int:
        """Append a VM's objects: their own references, then what they hold of native memory."""
        vm, held, first = self.native.vms[number], self.native.holders[number], self.firsts[number]
        graph, n = vm.graph, len(vm.objects)
        self.own[first:first + n], self.kind[first:first + n] = vm.objects.size, vm.objects.kind
        more = np.bincount(held.source, minlength=n) if len(held.source) else np.zeros(n, np.int64)
        shift = np.zeros(n + 1, np.int64)
        shift[1:] = np.cumsum(more)
        begins = graph.begins.astype(np.int64)
        self.begins[first:first + n + 1] = c + begins + shift
        counts = np.diff(begins)
        at = c + np.arange(len(graph.targets)) + np.repeat(shift[:-1], counts)
        self.targets[at] = graph.targets + first
        self.labels[at] = graph.labels
        at = c + begins[held.source + 1] + np.arange(len(held.source))
        self.targets[at] = held.block
        self.labels[at] = held.label
        return c + len(graph.targets) + len(held.source)

    def _places(self, c: int) -> int:
        """Append the places: root words in their order, the GC roots of each VM, and the root itself."""
        rooted, count = self.native.roots, len(self.places)
        order = np.argsort(self.places.of, kind="stable")
        sizes = np.bincount(self.places.of, minlength=count) if count else np.zeros(0, np.int64)
        self.begins[self.first_place:self.first_place + count] = c + np.cumsum(sizes) - sizes
        self.targets[c:c + len(order)] = rooted.row[order]
        c += len(order)
        for number, vm in enumerate(self.native.vms):
            at = self.gc_places[number]
            self.begins[at] = c
            self.own[at] = sum(vm.buffers.values())
            label = {name: ROOT_NAME - k for k, name in enumerate(self.root_names[number])}
            for k, (name, row) in enumerate(vm.graph.roots):
                self.targets[c + k], self.labels[c + k] = self.firsts[number] + row, label[name]
            c += len(vm.graph.roots)
        self.begins[self.root] = c
        seeds = self.seeds
        self.targets[c:c + len(seeds)] = seeds
        self.begins[self.root + 1] = c + len(seeds)
        self.kind[self.root] = ROOT
        return c + len(seeds)

    @cached_property
    def seeds(self) -> np.ndarray:
        """The rows of the places in the order in which paths are looked for (int32): variables first, the GC roots, stack
        words and registers last, the oldest frames before the newest."""
        on_stack = np.isin(self.places.kind, roots.ON_STACKS)
        plain = self.first_place + np.flatnonzero(~on_stack)
        stacked = self.first_place + np.flatnonzero(on_stack)
        self.plain_seeds = len(plain) + len(self.gc_places)
        return np.concatenate([plain, np.array(self.gc_places, np.int64), stacked[::-1]]).astype(np.int32)

    def __len__(self) -> int:
        return self.root + 1

    # -- what a row is -------------------------------------------------------------------------------------------------
    def object_of(self, row: int) -> tuple[int, int] | None:
        """(number of the VM, row there) of a Lua object, None for every other row."""
        if len(self.nodes) <= row < self.first_place:
            number = max(k for k, first in enumerate(self.firsts) if first <= row)
            return number, row - self.firsts[number]
        return None

    def row_at(self, address: int) -> int:
        """The row of the block or Lua object that holds an address, -1 for none."""
        for number, vm in enumerate(self.native.vms):
            row = vm.row_holding(address)
            if row >= 0:
                return self.firsts[number] + row
        return int(self.nodes.nodes_at(np.array([address], np.uint64))[0])

    def address(self, row: int) -> int:
        """Where a block or object begins; 0 for a place."""
        lua = self.object_of(row)
        if lua:
            return int(self.native.vms[lua[0]].objects.address[lua[1]])
        return int(self.nodes.address[row]) if row < len(self.nodes) else 0

    # -- paths ---------------------------------------------------------------------------------------------------------
    @cached_property
    def tree(self) -> Tree:
        """The breadth-first tree from the places: what no stack word is needed for first, then the rest. The root of a
        tree is place seeds[k], its `parent` -1 - k."""
        rows = len(self)
        seen = np.zeros(rows, np.uint8)
        seen[:len(self.nodes)] = self.nodes.seen
        seen[self.root] = NO_NODE
        order, parent = np.empty(rows, np.int32), np.full(rows, -1, np.int32)
        seeds, tail = self.seeds, 0
        parent[seeds] = -1 - np.arange(len(seeds), dtype=np.int32)
        for part in (seeds[:self.plain_seeds], seeds[self.plain_seeds:]):
            order[tail:tail + len(part)], seen[part] = part, 1
            head, tail = tail, tail + len(part)
            while head < tail:
                head, tail = graph_kernel.bfs(self.begins, self.targets, head, tail, EDGES, seen, parent, order)
                channel.progress(f"{tail:,} blocks and objects reached")
        return Tree(order, tail, parent, self._via(order, tail, parent), seen == 1)

    def _via(self, order: np.ndarray, count: int, parent: np.ndarray) -> np.ndarray:
        """The label by which each row of the tree was reached."""
        via, blocks = np.full(len(self), kernel.UNKNOWN, np.int32), len(self.nodes)
        reached = order[:count]
        others = np.ascontiguousarray(reached[reached >= blocks])
        graph_kernel.edges_used(self.begins, self.targets, self.labels, others, len(others), parent, via,
                                np.zeros(len(self), np.uint8))
        via[self.seeds] = 0
        nodes = self.nodes
        for first in range(0, blocks, TILE):
            kernel.used(*nodes.buffer, *nodes.index, self.begins, self.targets, parent, via, first,
                        min(first + TILE, blocks), NATIVE)
        via[via == kernel.UNKNOWN] = MEMBER
        return via

    def steps(self, row: int, most: int = 1 << 31) -> list[tuple[int, int]] | None:
        """[(label, row), ...] of the shortest path to a row, the place first; None when nothing reaches it, or it has more
        than `most` steps."""
        tree, found = self.tree, []
        if not tree.seen[row]:
            return None
        while tree.parent[row] >= 0:
            found.append((int(tree.via[row]), int(row)))
            row = int(tree.parent[row])
            if len(found) > most:
                return None
        found.append((0, int(row)))
        return found[::-1]

    def referrers(self, row: int, most: int = 1 << 20) -> list[int]:
        """The rows that point to a row, each once."""
        at = np.flatnonzero(self.targets == row)[:most]
        return np.unique(np.searchsorted(self.begins, at, "right") - 1).tolist()

    def edges_into(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sources, targets) of all edges to rows, but for those of the root."""
        mine = np.zeros(len(self), bool)
        mine[rows] = True
        at = np.flatnonzero(mine[self.targets[:self.begins[self.root]]])
        return np.searchsorted(self.begins, at, "right") - 1, self.targets[at]

    def label(self, source: int, target: int) -> int:
        """The label of the first edge from one row to another."""
        if source >= len(self.nodes):
            for c in range(int(self.begins[source]), int(self.begins[source + 1])):
                if self.targets[c] == target:
                    return int(self.labels[c])
            return MEMBER
        start = int(self.nodes.address[source])
        for low, high in self.nodes.target.space.present(start, start + int(self.nodes.size[source]) - 8):
            low = low + 7 & ~7
            words = self.nodes.target.space.words_of(low, max(high & ~7, low))
            at = np.flatnonzero(self.nodes.rows_at(words) == target)
            if len(at):
                return NATIVE - (low - start >> 3) - int(at[0])
        return MEMBER

    # -- dominators ----------------------------------------------------------------------------------------------------
    @cached_property
    def dominators(self) -> Dominators:
        """The dominator tree from the root."""
        return Dominators(self.begins, self.targets, self.root)

    @cached_property
    def dominator_tree(self) -> Tree:
        """The dominator tree with labels; its top are the places (seeds) and what several of them lead to."""
        tree = self.tree
        return self.dominators.tree(tree.via, tree.parent, self.seeds, self.own)

    # -- shapes --------------------------------------------------------------------------------------------------------
    @cached_property
    def detail(self) -> np.ndarray:
        """What rows of one kind must share to be alike (int32): functions their prototype; blocks of a C++ program their class;
        other blocks with pointers (records of some type, mostly) their size."""
        detail, blocks = np.empty(len(self), np.int32), len(self.nodes)
        detail[blocks:] = -1
        graph_kernel.sizes_of_pointing(self.begins, self.nodes.size, detail)
        if self._types is not None and blocks and is_cplusplus(self.nodes.target):
            numbers = self.nodes.over_heaps([self._types.of_rows(number, np.arange(len(heap.blocks)))
                                             for number, heap in enumerate(self.nodes.heaps)])
            classes = np.array([name.kind == CLASS for name in self._types.names] + [False])[numbers]
            detail[:blocks][classes] = -2 - numbers[classes]
        for vm, first in zip(self.native.vms, self.firsts):
            detail[first:first + len(vm.objects)] = prototype_rows(vm)
        return detail

    def fold(self, tree: Tree) -> Groups:
        """A tree folded by shape. Each place is a group of its own, group k that of seeds[k]; group len(seeds) is what
        several places hold."""
        groups = np.arange(len(self.seeds) + 1, dtype=np.int32)
        return fold(tree, self.own, self.kind, self.detail, MEMBER, groups, np.append(self.seeds, np.int32(self.root)))
