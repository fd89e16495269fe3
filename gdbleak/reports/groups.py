"""Groups of rows of the process graph that are held in the same way, with names: frames, paths, the tree as a profile."""
from __future__ import annotations

from functools import cached_property
from typing import Callable, Sequence

import numpy as np

from ..flame import Profile
from ..graph.dominators import SEVERAL
from ..graph.graph import Groups
from ..graph.process import BLOCK, MEMBER, PLACE, POOL, Process
from ..kernels import luajit as kernel
from .words import Words, joined, shorten

_PLAIN = (kernel.TAB, kernel.UPVAL)      # what needs no word of its own in a frame
_LONGEST = 1000                          # steps of a path after which a frame may be named
#: The heaps that bytes are split by.
HEAPS = ("Lua", "malloc", "pool")


class Folded:
    """One tree of a `Process`, folded."""

    def __init__(self, process: Process, tree, words: Words):
        self.process, self.tree, self.words = process, tree, words
        self.groups: Groups = process.fold(tree)
        self._frames: dict[int, tuple[str, object]] = {}

    @cached_property
    def split(self) -> dict[str, np.ndarray]:
        """Bytes of each group and all below it by heap (int64 over groups)."""
        groups, found = self.groups, {}
        for name, mine in (("Lua", groups.kind >= kernel.STR), ("malloc", groups.kind == BLOCK), ("pool", groups.kind == POOL)):
            found[name] = groups.summed(np.where(mine, groups.bytes, 0))
        found["Lua"] += groups.summed(np.where(groups.kind == PLACE, groups.bytes, 0))       # the VMs' own buffers
        return found

    def frame(self, group: int) -> str:
        """A group's frame: a variable, `->next block of 64`, `.cert_cache`, `[*] cdata struct x509_st *`."""
        if group not in self._frames:
            self._frames[group] = self._frame(group)
        return self._frames[group][0]

    def _frame(self, group: int) -> tuple[str, object]:
        """(frame, what is known of the C type of its row)."""
        groups, process, words = self.groups, self.process, self.words
        row, parent = int(groups.row[group]), int(groups.parent[group])
        if parent < 0:
            return words.place(row) if row != process.root else "(held from several places)", None
        above = self.frame(parent)
        label, kind = int(groups.label[group]), int(groups.kind[group])
        text, typed = "", None
        if 2 * SEVERAL <= label <= SEVERAL:
            text = self._way_to(group)
        else:                      # what many share is named after one of them
            held_by = int(self.tree.parent[row])
            if held_by >= 0:
                text, typed = words.step(held_by, int(self.tree.via[row]), row, self._frames[parent][1])
            if label == MEMBER:
                text = "[*]"
        if above == "._LOADED" and text.startswith("."):
            text = text[1:]                      # a module's name
        if kind in (BLOCK, POOL):
            text += f" ({self._block(group)})"
        elif kind not in _PLAIN and not (kind == kernel.PROTO and text == "(prototype)"):
            text += " " + (words.row(row) if kind in (kernel.FUNC, kernel.CDATA, kernel.UDATA) else kernel.KINDS[kind])
        return text.strip() + (" (repeated)" if groups.again[group] else ""), typed

    def _way_to(self, group: int) -> str:
        """How a row that its dominator holds in several ways is reached: the shortest of them."""
        groups, process = self.groups, self.process
        row, above = int(groups.row[group]), int(groups.row[groups.parent[group]])
        steps = process.steps(row, _LONGEST) if groups.count[group] == 1 else None
        if steps is None:
            return "(several ways)"
        at = [k for k, (_, step) in enumerate(steps) if step == above]
        said = self.words.path(steps)
        return "(shortest of several ways) " + joined(shorten([""] * bool(at) + said[at[0] + 1:] if at else said, 8)).removeprefix(" => ")

    def _block(self, group: int) -> str:
        """What the blocks of a group are."""
        groups = self.groups
        row, count = int(groups.row[group]), int(groups.count[group])
        name = self.words.row(row)
        if name.startswith("size ") and int(groups.bytes[group]) != count * int(self.process.own[row]):
            return "blocks"
        return name.replace("size ", "block of ") if name.startswith("size ") else name

    def path_words(self, group: int) -> list[str]:
        """The frames of a path."""
        return [self.frame(one) for one in self.groups.path(group)]

    def add_to(self, profile: Profile, weights: np.ndarray, counts: np.ndarray) -> None:
        """Add every group with a weight (int64 over groups: bytes, counts) to a profile."""
        add_groups(profile, self.groups, self.frame, weights, counts)


def add_groups(profile: Profile, groups: Groups, frame: Callable[[int], str], weights: np.ndarray, counts: np.ndarray,
               prefix: Sequence[str] = ()) -> int:
    """Add every group with a weight (int64 over groups: bytes, counts) to a profile, by its frames from the root on behind
    `prefix`, the small ones under their parent; how many groups that were."""
    total = groups.summed(weights)
    least = int(weights.sum()) // 100_000
    stacks: dict[int, list[str]] = {}
    for group in np.flatnonzero(total).tolist():
        parent = int(groups.parent[group])
        if parent < 0:
            stacks[group] = [*prefix, frame(group)]
        elif int(total[group]) < least:
            stacks[group] = stacks[parent] + ["(small)"] if stacks[parent][-1] != "(small)" else stacks[parent]
        else:
            stacks[group] = stacks[parent] + [frame(group)]
        if counts[group]:
            profile.add(stacks[group], int(weights[group]), int(counts[group]))
    return len(stacks)
