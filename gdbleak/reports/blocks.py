"""leak-blocks: malloc blocks of a set, one line each, with what is in them."""
from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ..quantities import size as size_of
from ..heaps.blocks import STATES
from ..target.target import Target
from .analysis import Analysis
from .document import Report, Table, printable
from .selection import Slice, arena_name, describe, select
from .sizes import profile_of

PREVIEW, LONG_PREVIEW = 32, 160     # bytes of a block that one line shows
LINE = 16                           # bytes of a line of a hexdump
_TEXT = re.compile(rb"[\x20-\x7e\t\r\n]{4,}")


@dataclass(frozen=True)
class Row:
    """One block: user `address`, chunk `size`, bytes that are the program's, state and arena in words."""

    address: int
    size: int
    usable: int
    state: str
    arena: str


def run(analysis: Analysis, arguments) -> Report:
    """List the blocks that the set asks for, at most `--top`; the totals are of the whole set."""
    analysis.need_glibc()
    dump = size_of(arguments.dump, arguments.evaluate) if arguments.dump else 0
    report = analysis.open_report("leak-blocks")
    analysis.say_glibc(report)
    slices = select(analysis, arguments)
    blocks = sum(len(part.size) for part in slices)
    total = sum(int(part.size.sum()) for part in slices)
    rows = _listed(slices, arguments.sort, arguments.top)
    chosen = describe(arguments)
    report.say(f"{blocks:,} blocks, {total:,} bytes{': ' + chosen if chosen else ''}")
    report.totals(blocks=blocks, bytes=total)
    report.say()
    report.add(_table(analysis.target, rows, arguments.text, blocks - len(rows)))
    for row in rows if dump else ():
        heading = f"{row.address:#x}: {row.size:,} bytes, {row.state}"
        report.add(Dump(analysis.target, row.address, min(dump, row.usable), heading))
    report.profile = profile_of(analysis, slices)
    return report


def _listed(slices: list[Slice], order: str, top: int) -> list[Row]:
    """The first `top` blocks by address, or the `top` largest (the lower address first among equals)."""
    found: list[tuple[int, int, Slice, int]] = []
    for part in slices:
        for k in _first(part, top) if order == "address" else _largest(part, top):
            row = part.region.first + int(k if part.rows is None else part.rows[k])
            address, size = int(part.heap.blocks.address[row]), int(part.heap.blocks.size[row])
            found.append((-size if order == "size" else 0, address, part, row))
        if len(found) > 4 * top:
            found = sorted(found, key=lambda one: one[:2])[:top]
    found.sort(key=lambda one: one[:2])
    return [_row(part, row) for _, _, part, row in found[:top]]


def _first(part: Slice, top: int) -> range:
    return range(min(top, len(part.size)))


def _largest(part: Slice, top: int) -> np.ndarray:
    """Indexes in the slice of its `top` largest blocks; of equal ones, those with the lower addresses."""
    size = part.size
    if top >= len(size):
        return np.arange(len(size))
    if not top:
        return np.zeros(0, np.int64)
    least = np.partition(size, len(size) - top)[len(size) - top]
    larger = np.flatnonzero(size > least)
    return np.concatenate((larger, np.flatnonzero(size == least)[:top - len(larger)]))


def _row(part: Slice, row: int) -> Row:
    heap, blocks = part.heap, part.heap.blocks
    return Row(int(blocks.address[row]), int(blocks.size[row]), heap.usable(row, part.region),
               STATES[int(blocks.state[row])], arena_name(part.region))


def _table(target: Target, rows: list[Row], text: bool, left_out: int) -> Table:
    names = Names(target)
    shown = []
    for row in rows:
        place = target.space, row.address, row.usable
        contents = text_preview(*place) if text else preview(*place, names)
        shown.append([f"{row.address:#x}", row.size, row.usable, row.state, row.arena, contents])
    return Table(["Address", "Size", "Usable", "State", "Arena", "Contents"], shown,
                 "malloc blocks (Size is the chunk's, header included)", (0, 3, 4, 5),
                 f"{left_out:,} more blocks are not listed: --top N lists more" if left_out else "")


# -- what is in them -----------------------------------------------------------------------------------------
class Names:
    """Symbol names of words that point into modules; each is asked for once."""

    def __init__(self, target: Target):
        self._target = target
        self._known: dict[int, str] = {}

    def of(self, word: int) -> str:
        """The word as a name, or in hex."""
        if word not in self._known:
            self._known[word] = printable(self._target.name_of(word), 80) or f"{word:#x}"
        return self._known[word]


def bytes_at(space, address: int, size: int) -> list[int | None]:
    """`size` bytes from `address` on; None for each that is absent."""
    found: list[int | None] = [None] * size
    for low, high in space.present(address, address + size):
        found[low - address:high - address] = space.read(low, high - low)
    return found


def text_preview(space, address: int, size: int) -> str:
    """The beginning of a block as text, a dot for each byte that is none and `--` for those absent."""
    more = "..." if size > LONG_PREVIEW else ""
    return _text(bytes_at(space, address, min(size, LONG_PREVIEW)), "--") + more


def preview(space, address: int, size: int, names: Names) -> str:
    """The beginning of a block: text in quotes, else its first words, by name if they point into a module."""
    values = bytes_at(space, address, min(size, PREVIEW))
    head = bytes(value or 0 for value in values)
    if None not in values:
        text = _TEXT.match(head)
        if text and (text.end() == len(head) or not head[text.end()]):
            more = "..." if text.end() == len(head) and size > PREVIEW else ""
            return f'"{_text(list(text[0]), "")}"{more}'
    words = []
    for k in range(0, len(head), 8):
        absent = None in values[k:k + 8]
        words.append("--" if absent else names.of(int.from_bytes(head[k:k + 8], "little")))
    return " ".join(words)


def _text(values: list[int | None], absent: str) -> str:
    shown = (absent if value is None else chr(value) if 32 <= value < 127 else "." for value in values)
    return printable("".join(shown), 400)


def hexdump(space, address: int, size: int) -> list[str]:
    """Lines of 16 bytes from `address` on: address, hex, text; `--` for a byte that is absent."""
    lines = []
    values = bytes_at(space, address, size)
    for k in range(0, size, LINE):
        part = values[k:k + LINE]
        shown = ["--" if value is None else f"{value:02x}" for value in part] + ["  "] * (LINE - len(part))
        left, right = " ".join(shown[:8]), " ".join(shown[8:])
        lines.append(f"{address + k:#018x}  {left}  {right}  |{_text(part, '-')}|")
    return lines


@dataclass
class Dump:
    """A hexdump of target memory under a heading; in JSON `hex` has `--` for bytes that are absent."""

    target: Target
    address: int
    size: int
    heading: str

    def text(self) -> str:
        lines = hexdump(self.target.space, self.address, self.size)
        return "\n".join(["", self.heading, *("  " + line for line in lines)]) + "\n"

    def json(self) -> dict:
        values = bytes_at(self.target.space, self.address, self.size)
        return {"type": "dump", "ver": 1, "address": f"{self.address:#x}",
                "hex": "".join("--" if value is None else f"{value:02x}" for value in values)}
