"""`Graph`: references in CSR with labels, the roots, and the breadth-first tree from them."""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .. import channel
from ..heaps.blocks import reserve
from ..kernels import graph as kernel

TILE = 2_000_000        # edges a kernel call


@dataclass
class Tree:
    """The breadth-first tree: `order[:count]` are the rows reached, nearest first; `parent` (-1 - root number for a
    root itself), `via` (edge label); all int32."""

    order: np.ndarray
    count: int
    parent: np.ndarray
    via: np.ndarray
    seen: np.ndarray
    root: int = -1                 # a row in it that stands for all roots
    below: np.ndarray | None = None          # bytes of each row with all below it (int64), where that is known already

    def sums(self, size: np.ndarray) -> np.ndarray:
        """By row: the sum of `size` (int64) over the row and all below it."""
        below = size.astype(np.int64)
        kernel.sum_tree(self.order, self.count, self.parent, below)
        return below


@dataclass
class Groups:
    """Rows folded by how they are reached. Arrays over groups: parent group (-1: a root), label, kind, detail, own
    bytes and count, one row as an example, `again` (the step repeats, as in a linked list); `below`: bytes of the group
    and all under it."""

    parent: np.ndarray
    label: np.ndarray
    kind: np.ndarray
    detail: np.ndarray
    bytes: np.ndarray
    count: np.ndarray
    row: np.ndarray
    again: np.ndarray
    below: np.ndarray
    count_below: np.ndarray
    of_row: np.ndarray              # the group of each row, -1 where the roots do not reach

    def __len__(self) -> int:
        return len(self.parent)

    def summed(self, weights: np.ndarray) -> np.ndarray:
        """For each group the weights (int64) of the group and of all below it."""
        total = weights.astype(np.int64)
        kernel.sum_groups(self.parent, total)
        return total

    def path(self, group: int) -> list[int]:
        """The groups from the root down to this one."""
        found = []
        while group >= 0:
            found.append(group)
            group = int(self.parent[group])
        return found[::-1]


@dataclass
class Graph:
    """`begins` (rows + 1), `targets`, `labels` (int32);
    `roots`: name and row of each, in the order in which they are to be tried."""

    begins: np.ndarray
    targets: np.ndarray
    labels: np.ndarray
    roots: list[tuple[str, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.begins) - 1

    @cached_property
    def tree(self) -> Tree:
        """What the roots reach, each row by its shortest path
        (the first of them in the order of the roots and edges)."""
        rows = len(self)
        seen, order = np.zeros(rows, np.uint8), np.zeros(rows, np.int32)
        parent, via = np.full(rows, -1, np.int32), np.zeros(rows, np.int32)
        tail = 0
        for number, (_, row) in enumerate(self.roots):
            if not seen[row]:
                seen[row], parent[row], order[tail] = 1, -1 - number, row
                tail += 1
        head = 0
        while head < tail:
            head, tail = kernel.bfs(self.begins, self.targets, head, tail, TILE, seen, parent, order)
            channel.progress(f"{tail:,} objects reached")
        kernel.edges_used(self.begins, self.targets, self.labels, order, tail, parent, via, np.zeros(rows, np.uint8))
        return Tree(order, tail, parent, via, seen)

    def path(self, row: int) -> tuple[str, list[tuple[int, int]]] | None:
        """(name of the root, [(label, row), ...] from the root on) of the shortest path to a row;
        None when nothing reaches it."""
        tree = self.tree
        if not tree.seen[row]:
            return None
        steps = []
        while tree.parent[row] >= 0:
            steps.append((int(tree.via[row]), int(row)))
            row = tree.parent[row]
        steps.append((0, int(row)))
        return self.roots[-1 - int(tree.parent[row])][0], steps[::-1]

    def referrers(self, row: int) -> list[tuple[int, int]]:
        """(row, label) of everything that refers to a row."""
        at = np.flatnonzero(self.targets == row)
        sources = np.searchsorted(self.begins, at, "right") - 1
        return [(int(source), int(self.labels[k])) for source, k in zip(sources, at)]

    def dominator_tree(self, own: np.ndarray) -> Tree:
        """Each row below the one without which the roots would not reach it. Roots as in `tree`; one row more, the last, is
        above what several roots lead to. `own`: bytes of each row (int64)."""
        from .dominators import Dominators
        tree, names = self.tree, len(self.roots)
        number = dict(reversed([(row, k) for k, (_, row) in enumerate(self.roots)]))     # by row, of its first name
        rows = np.array(list(number), np.int32)
        begins = np.append(self.begins, self.begins[-1] + np.int32(len(rows)))
        dominators = Dominators(begins, np.concatenate([self.targets, rows]), len(self))
        via, nearest = np.append(tree.via, np.int32(0)), np.append(tree.parent, np.int32(-1))
        found = dominators.tree(via, nearest, rows, np.append(own, 0))
        top = found.parent[rows] < 0
        found.parent[rows[top]] = -1 - np.array(list(number.values()))[top]
        found.parent[found.root] = -1 - names
        return found

    def fold(self, tree: Tree, size: np.ndarray, kind: np.ndarray, detail: np.ndarray, member: int, few: int = 48) -> Groups:
        """`tree` or `dominator_tree` with rows of the same shape as one group; the first groups are those of the names of
        the roots, then one of what several roots lead to.
        `size`: int64, `kind`: uint8, `detail`: int32, each over rows."""
        names = list(dict.fromkeys(name for name, _ in self.roots))
        number_of = {name: k for k, name in enumerate(names)}
        root_groups = np.array([number_of[name] for name, _ in self.roots] + [len(names)], np.int32)
        rows = np.zeros(len(names) + 1, np.int32)
        for name, row in reversed(self.roots):
            rows[number_of[name]] = row
        if tree.root >= 0:
            size, kind, detail = (np.append(column, column.dtype.type(0)) for column in (size, kind, detail))
        return fold(tree, size, kind, detail, member, root_groups, rows, few)


def fold(tree: Tree, size: np.ndarray, kind: np.ndarray, detail: np.ndarray, member: int, root_groups: np.ndarray,
         root_rows: np.ndarray, few: int = 48) -> Groups:
    """A tree with rows of the same shape as one group. `root_groups`: the group of each root (a root's row has -1 - its number
    as `parent`); `root_rows`: a row for each of these groups. `few`: how many names are kept below a row, 254 at most."""
    rows = len(tree.parent)
    named = np.zeros(rows, np.uint8)
    many = kernel.count_named(tree.order, tree.count, tree.parent, tree.via, named) > few
    below, tree.below = tree.below, None                 # it is large, and asked for once
    if below is None:
        below = tree.sums(size) if many else size        # it is not looked at where few are named
    room = max(tree.count + len(root_rows) + 1, 1024)
    arrays = [reserve(room, t) for t in (np.int32, np.int32, np.uint8, np.int32, np.int64, np.int64, np.int32, np.uint8)]
    g_parent, _, _, _, _, _, g_row, _ = arrays
    g_parent[:len(root_rows)] = -1
    g_row[:len(root_rows)] = root_rows
    group = np.full(rows, -1, np.int32)
    slots = reserve(1 << (2 * room).bit_length(), np.int32)
    n = kernel.fold(tree.order, tree.count, tree.parent, tree.via, kind, detail, size, below, named, few, member,
                    root_groups, group, slots, reserve(room, np.int32), *arrays, len(root_rows))
    own = [array[:n].copy() for array in arrays]
    if tree.root >= 0:
        own[5][group[tree.root]] -= 1
    groups = Groups(*own, own[4], own[5], group)
    groups.below, groups.count_below = groups.summed(groups.bytes), groups.summed(groups.count)
    return groups
