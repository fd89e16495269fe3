"""Dominators: the row without which another would not be reached, and what each row retains."""
from __future__ import annotations

import numpy as np

from .. import channel
from ..heaps.blocks import reserve
from ..kernels import dominators as kernel
from .graph import Tree

SEVERAL = -(1 << 18) - 1        # label, down to 2 * SEVERAL, of a row that its dominator holds in several ways
LARGE = 48                      # what retains 1/LARGE of everything is large
TILE = 4_000_000                # steps a kernel call


class Dominators:
    """The dominator tree of what `root` reaches in a graph in CSR (`begins`, `targets`: int32).

    By preorder number, the root's is 0: `vertex` (row), `dominator` (number; smaller than its own). `number`: by row, -1
    where the root does not reach.
    """

    def __init__(self, begins: np.ndarray, targets: np.ndarray, root: int):
        rows = len(begins) - 1
        self.number = number = np.full(rows, -1, np.int32)
        vertex, parent, cursor, first = (np.empty(rows, np.int32) for _ in range(4))
        others = reserve(2 * int(begins[-1]), np.int32, dense=True)
        number[root], vertex[0], cursor[0], first[0] = 0, root, begins[root], -1
        at, count, n = 0, 1, 0
        while at >= 0:
            at, count, n = kernel.preorder(begins, targets, number, vertex, parent, cursor, first, others, at, count, n,
                                           TILE)
            channel.progress(f"{count:,} blocks and objects numbered")
        self.vertex, self.dominator, semi = vertex[:count], first[:count], cursor[:count]
        kernel.immediate(parent[:count], self.dominator, others[:2 * (n + count)], count, n, semi,
                         *(np.empty(count, np.int32) for _ in range(2)))

    def __len__(self) -> int:
        return len(self.vertex)

    def retained(self, own: np.ndarray) -> np.ndarray:
        """By number: `own` (int64, over rows) of the row and of all it dominates."""
        total = own[self.vertex].astype(np.int64)
        kernel.retain(self.dominator, len(self), total)
        return total

    def tree(self, via: np.ndarray, nearest: np.ndarray, roots: np.ndarray, own: np.ndarray) -> Tree:
        """The dominator tree as a `Tree`: a row of `roots` that is a child of the root has -1 - its index as parent, the root
        itself, above what several of them lead to, -1 - len(roots). `nearest`, `via`: the breadth-first parents and labels,
        which are kept where they are the dominator's own, else the label is SEVERAL, or less for the large ones (by `own`,
        int64) right below the root or below one of `roots`, each of which stands for itself."""
        rows, root = len(self.number), int(self.vertex[0])
        found = Tree(self.vertex, len(self), np.full(rows, -1, np.int32), np.zeros(rows, np.int32), self.number >= 0,
                     root)
        kernel.tree(self.vertex, self.dominator, len(self), nearest, via, SEVERAL, found.parent, found.via)
        below = found.below = found.sums(own)
        high = np.zeros(len(self), np.uint8)                 # by number: the root, and the roots right below it
        top = np.flatnonzero(found.parent[roots] == root)
        high[0], high[self.number[roots[top]]] = 1, 1
        kernel.heavy(self.vertex, self.dominator, len(self), high, below, LARGE, SEVERAL, found.via)
        found.parent[roots[top]], found.via[roots[top]] = -1 - top, 0
        found.parent[root] = -1 - len(roots)
        below[root] -= below[roots[top]].sum()
        return found

    def child_of_root(self) -> np.ndarray:
        """By row: the row of the child of the root under which it is; -1 for the root and what is not reached."""
        top = np.arange(len(self), dtype=np.int32)
        below = np.flatnonzero(self.dominator)
        top[below] = self.dominator[below]
        while True:                                   # halves the way up each time
            up = top[top]
            if (up == top).all():
                break
            top = up
        found = np.full(len(self.number), -1, np.int32)
        found[self.vertex[1:]] = self.vertex[top[1:]]
        return found
