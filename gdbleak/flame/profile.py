"""Weighted stacks, kept as one tree: frames that several stacks begin with are stored once."""
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence, Tuple

ROOT = "all"
NO_NAME = "(no name)"
_NO_CHILDREN: Mapping[str, "Node"] = MappingProxyType({})  # most nodes are leaves: they share this one


class Node:
    """A frame under its callers, with the weight of every stack that goes through it."""

    __slots__ = ("bytes", "count", "children")

    def __init__(self) -> None:
        self.bytes = 0
        self.count = 0
        self.children = _NO_CHILDREN

    def child(self, name: str) -> "Node":
        """The child of that name, made if it is not there yet."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        node = self.children.get(name)
        if node is None:
            node = self.children[name] = Node()
        return node


class Profile:
    """Stacks of frame names, outermost first, each with its bytes and its count of blocks.

    `legend` says what was measured. `unit` is what weighs: "bytes", or else the noun of what is counted
    ("blocks"). Names may be any text at all: they are kept as they came, and each writer makes them harmless.
    """

    def __init__(self, title: str, legend: str = "", unit: str = "bytes") -> None:
        self.title = title
        self.legend = legend
        self.unit = unit
        self.root = Node()
        self._weight = attrgetter("bytes" if unit == "bytes" else "count")

    def add(self, frames: Sequence[str], bytes: int, count: int = 1) -> None:
        """Add one stack; equal stacks merge. A negative weight is a ValueError."""
        if isinstance(frames, str):
            raise TypeError("frames must be a sequence of names, not one name")
        bytes, count = int(bytes), int(count)  # NumPy's integers would wrap around
        if bytes < 0 or count < 0:
            raise ValueError(f"a stack cannot weigh less than nothing: {bytes} bytes, count {count}")
        node = self.root
        node.bytes += bytes
        node.count += count
        for name in frames:
            node = node.children.get(name) or node.child(name or NO_NAME)
            node.bytes += bytes
            node.count += count

    def merge(self, other: "Profile") -> None:
        """Add all stacks of another profile to this one."""
        pairs = [(self.root, other.root)]
        while pairs:
            ours, theirs = pairs.pop()
            pairs.extend((ours.child(name), child) for name, child in theirs.children.items())
            ours.bytes += theirs.bytes
            ours.count += theirs.count

    def by(self, weight: str, unit: str = "blocks") -> "Profile":
        """The same stacks weighed by "bytes", or by "count" of `unit`. The tree is shared, not copied."""
        if weight not in ("bytes", "count"):
            raise ValueError(f"cannot weigh by {weight!r}: use bytes or count")
        view = Profile(self.title, self.legend, "bytes" if weight == "bytes" else unit)
        view.root = self.root
        return view

    @property
    def total(self) -> int:
        """The weight of all stacks together, in `unit`."""
        return self.value(self.root)

    def value(self, node: Node) -> int:
        """What weighs in this profile: the node's bytes or its count."""
        return self._weight(node)

    def own_value(self, node: Node) -> int:
        """The weight of the stacks that end in this node."""
        return self._weight(node) - sum(map(self._weight, node.children.values()))

    def percent(self, value: int) -> float:
        """A weight as a percentage of the total (of nothing, everything is 0 %)."""
        return 100.0 * value / self.total if self.total else 0.0

    def walk(self, order: Optional[Callable[[Tuple[str, Node]], Any]] = None,
             ends_at: Optional[Callable[[int, Node], bool]] = None) -> Iterator[Tuple[int, str, Node]]:
        """Yield (depth, name, node), parents first, from the root `all` at depth 0, without weightless nodes.

        `order` is the sort key of a (name, node) pair among its siblings; by default the name. Where
        `ends_at(depth, node)` is true, the node is yielded and those above it are not.
        """
        pending = [(0, ROOT, self.root)]
        while pending:
            depth, name, node = pending.pop()
            yield depth, name, node
            if node.children and not (ends_at and ends_at(depth, node)):
                weighty = [pair for pair in node.children.items() if self._weight(pair[1])]
                weighty.sort(key=order, reverse=True)  # names differ: without a key, no nodes are compared
                pending.extend([(depth + 1, name, child) for name, child in weighty])

    def describe(self, name: str, node: Node) -> str:
        """How a frame is printed: `name (306,432 bytes, 97.10%)`."""
        share = "100%" if node is self.root else f"{self.percent(self.value(node)):.2f}%"
        return f"{name} ({self.amount(self.value(node))}, {share})"

    def amount(self, value: int) -> str:
        """A weight with its unit: `306,432 bytes`, `1 block`."""
        unit = self.unit[:-1] if value == 1 and self.unit.endswith("s") else self.unit
        return f"{value:,} {unit}"
