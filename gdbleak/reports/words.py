"""What the rows and edges of the process graph are called: blocks by their type, Lua's objects and fields in Lua's words,
roots by their variables, and what a pointer's place in a block is called where debug information knows."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..graph.classes import is_cplusplus
from ..graph.process import MEMBER, NATIVE, PLACE, ROOT_NAME, Process
from ..graph.roots import MODULE
from ..kernels import luajit as kernel
from ..runtimes.luajit_names import Names
from .analysis import Analysis
from .document import printable


SHOWN = 24                      # steps of a path that are shown


class BlockWords:
    """Types of malloc blocks, by rows of `graph.nodes.Nodes`."""

    def __init__(self, analysis: Analysis):
        self.nodes = analysis.native.nodes
        self._types = analysis.types
        if is_cplusplus(analysis.target):
            self._types.numbers                  # containers are found by looking at all memory, not at one block

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """The type of each block, as a number for `name` (int32)."""
        found = np.empty(len(rows), np.int32)
        heaps, within = self.nodes.in_heaps(rows)
        for heap in np.flatnonzero(np.bincount(heaps)).tolist():
            found[heaps == heap] = self._types.of_rows(heap, within[heaps == heap])
        return found

    def name(self, number: int) -> tuple[str, str]:
        """(type, "measured" or "inferred") of a type's number."""
        kind = self._types.names[number]
        return kind.name, kind.known


class Words:
    """Names in one `Process`, looked up when they are asked for."""

    def __init__(self, analysis: Analysis):
        self.process: Process = analysis.process
        self._blocks = BlockWords(analysis)
        self._lua = [Names(vm) for vm in self.process.native.vms]
        self._target = analysis.target
        self._known: dict[int, str] = {}

    def place(self, row: int) -> str:
        """A place: a variable, a stack word, `GC roots`."""
        process = self.process
        if row in process.gc_places:
            return "GC roots" if len(process.gc_places) == 1 else f"GC roots of VM {process.gc_places.index(row) + 1}"
        return printable(process.places.name(row - process.first_place), 120)

    def row(self, row: int) -> str:
        """A block, an object or a place in a few words."""
        if row not in self._known:
            self._known[row] = self._row(row)
        return self._known[row]

    def _row(self, row: int) -> str:
        process = self.process
        if row == process.root:
            return "root"
        if process.kind[row] == PLACE:
            return self.place(row)
        lua = process.object_of(row)
        if lua:
            return printable(self._lua[lua[0]].object(lua[1]), 100)
        return printable(self._blocks.name(int(self._blocks.numbers(np.array([row]))[0]))[0], 100)

    def kinds(self, rows: np.ndarray) -> np.ndarray:
        """A number for each row (int64), the same for blocks of one type, Lua objects of one kind, and one place."""
        process, found = self.process, np.array(rows, np.int64)
        blocks, lua = rows < len(process.nodes), (rows >= len(process.nodes)) & (rows < process.first_place)
        found[blocks] = -1 - self._blocks.numbers(rows[blocks]).astype(np.int64)
        found[lua] = -(1 << 40) - process.kind[rows[lua]].astype(np.int64)
        return found

    def kind(self, row: int) -> str:
        """What all rows with its number in `kinds` are called."""
        lua = self.process.object_of(row)
        return f"Lua {kernel.KINDS[int(self.process.kind[row])]}" if lua else self.row(row)

    def edge(self, source: int, label: int) -> str:
        """An edge by its label: a field in Lua's words, `+0x18` of a block, `[*]`."""
        process = self.process
        if label == MEMBER:
            return "[*]"
        if label <= NATIVE:
            return f"+{8 * (NATIVE - label):#x}"
        if source in process.gc_places:
            number = process.gc_places.index(source)
            return process.root_names[number][ROOT_NAME - label]
        lua = process.object_of(source)
        return printable(self._lua[lua[0]].edge(label, lua[1]), 80) if lua else ""

    def path(self, steps: list[tuple[int, int]]) -> list[str]:
        """The words of a path, [(label, row), ...] with a place first; one for each step. Of a very long path the middle,
        which `shorten` leaves out, has none."""
        words, typed, above = [], None, -1
        for k, (label, row) in enumerate(steps):
            if SHOWN <= k < len(steps) - SHOWN:
                words.append("")
                typed, above = None, row
                continue
            word, typed = self.step(above, label, row, typed)
            if words and words[-1] == "._LOADED" and word.startswith("."):
                word = word[1:]                  # a Lua module's name
            words.append(printable(word, 80))
            above = row
        return words

    # -- C types -------------------------------------------------------------------------------------------------------
    def step(self, above: int, label: int, row: int, typed: "Typed | None") -> tuple[str, "Typed | None"]:
        """The word of a step from row `above` (-1: `row` is a place) and what is known of the type of `row`."""
        if above < 0:
            return self.place(row), None
        process = self.process
        if process.first_place <= above < process.first_place + len(process.places):
            return self._from_variable(above, row)
        offset = 8 * (NATIVE - label) if label <= NATIVE and above < len(process.nodes) else -1
        room = int(process.own[above]) - 8 - typed.shift if typed else 0
        found = typed.kind.member(offset - typed.shift, room if not typed.shift else 0) if typed and offset >= 0 else None
        if found is None:
            return self.edge(above, label), None
        return found[0], self._typed(found[1], process.address(above) + offset, row)

    def _from_variable(self, place: int, row: int) -> tuple[str, "Typed | None"]:
        """The step from a variable to what it points to."""
        process, names = self.process, self._target.debugger
        number = place - process.first_place
        rooted, word = process.native.roots, int(process.places.words[number])
        of_place = np.flatnonzero(process.places.of == number)
        word = next((int(k) for k in of_place if rooted.row[k] == row), word)
        address = int(rooted.address[word])
        variable = names.variable(address) if names and process.places.kind[number] == MODULE else None
        found = variable[2].member(address - variable[1], 0) if variable else None
        if found is None:
            return "", None
        text = found[0]
        return "." + text[2:] if text.startswith("->") else text, self._typed(found[1], address, row)

    def _typed(self, kind, pointer: int, row: int) -> "Typed | None":
        """What the pointer at an address says of the block it leads to."""
        value = self._target.word(pointer)
        if kind is None or value is None or row >= len(self.process.nodes):
            return None
        return Typed(kind, value - self.process.address(row))


def lua_path(names: Names, root: str, steps: list[tuple[int, int]]) -> list[str]:
    """The steps of a path within one VM in Lua's words, [(label, row), ...], the root's name first."""
    found, above = [root], steps[0][1]
    for label, row in steps[1:]:
        word = names.edge(label, above)
        if found[-1] == "._LOADED" and word.startswith("."):
            word = word[1:]              # a module's name
        found.append(word)
        above = row
    return found


class Typed(NamedTuple):
    """A block's C type: an object of type `kind` lies `shift` bytes into it."""

    kind: object
    shift: int


def joined(words: list[str]) -> str:
    """A path as one line: members of C structures follow without an arrow of their own, as in `ngx_cycle->pool->large`."""
    text = words[0]
    for k, word in enumerate(words[1:]):
        member = word.startswith("->") or word[:1] == "[" and word[1:2].isdigit() or (k == 0 and word[:1] in ".[")
        text += word if member or not word else f" {word}" if word[:1] == "(" and k == 0 else f" => {word}"
    return text


def shorten(words: list[str], most: int = SHOWN) -> list[str]:
    """A path that fits on a screen: its middle is left out, and counted."""
    if len(words) <= most:
        return words
    half = most // 2
    return [*words[:half], f"... {len(words) - 2 * half:,} steps ...", *words[-half:]]
