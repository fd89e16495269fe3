"""leak-types: how many blocks of which type, measured (classes, pools, Lua objects) or inferred (containers, text)."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..flame import Profile
from ..graph.types import MEASURED, TypeName, Types
from .analysis import Analysis
from .document import Report, Table, printable, share
from .selection import Slice, describe, select

_FREE = TypeName("not in use", MEASURED, "free")
_LONGEST = 100                  # characters of a type's name in a table


@dataclass
class Row:
    """One type: how many blocks and bytes of chunks, and the address of the first of them."""

    type: TypeName
    blocks: int
    bytes: int
    sample: int


def run(analysis: Analysis, arguments) -> Report:
    """The types of the blocks of a set, those with the most bytes first."""
    analysis.need_glibc()
    report = analysis.open_report("leak-types")
    analysis.say_glibc(report)
    rows = _rows(analysis.types, select(analysis, arguments))
    blocks, size = sum(row.blocks for row in rows), sum(row.bytes for row in rows)
    measured = sum(row.bytes for row in rows if row.type.known == MEASURED)
    report.say(f"{blocks:,} blocks, {size:,} bytes: {describe(arguments) or 'all'}; {len(rows):,} types; measured "
               f"{measured:,} bytes ({share(measured, size)}), the others are inferred")
    report.totals(blocks=blocks, bytes=size, types=len(rows), measured_bytes=measured, inferred_bytes=size - measured)
    report.say()
    report.add(_table(rows, arguments.top))
    report.profile = _profile(analysis, rows)
    return report


def _rows(types: Types, slices: list[Slice]) -> list[Row]:
    """One row for each type among the blocks."""
    numbers = types.numbers
    blocks, sizes = np.zeros(len(types.names) + 1, np.int64), np.zeros(len(types.names) + 1, np.int64)
    sample = np.full(len(blocks), (1 << 64) - 1, np.uint64)
    for part in slices:
        rows = part.numbers
        number = numbers[types.heaps.index(part.heap)][rows] + 1
        blocks += np.bincount(number, minlength=len(blocks))
        sizes += np.bincount(number, weights=part.size, minlength=len(blocks)).astype(np.int64)
        kinds, first = np.unique(number, return_index=True)
        sample[kinds] = np.minimum(sample[kinds], part.heap.blocks.address[rows[first]])
    names = (_FREE, *types.names)
    found = [Row(names[k], int(blocks[k]), int(sizes[k]), int(sample[k])) for k in np.flatnonzero(blocks)]
    return sorted(found, key=lambda row: (-row.bytes, row.type.name))


def _table(rows: list[Row], top: int) -> Table:
    shown = [[printable(row.type.name, _LONGEST), row.type.known, row.blocks, row.bytes, row.bytes // row.blocks,
              f"{row.sample:#x}"] for row in rows[:top]]
    left_out = len(rows) - len(shown)
    return Table(["Type", "Known", "Blocks", "Bytes", "Mean", "Sample"], shown,
                 "types of malloc blocks (bytes of whole chunks, headers included)", (0, 1, 5),
                 f"{left_out:,} more types: --top N shows them" if left_out else "")


def _profile(analysis: Analysis, rows: list[Row]) -> Profile:
    profile = Profile(f"Types of blocks of {analysis.target.command_name()} (pid {analysis.target.source.pid})",
                      "Malloc chunks, headers included (measured), by kind of type and type (inferred where marked)")
    for row in rows:
        inferred = "" if row.type.known == MEASURED else " (inferred)"
        profile.add([row.type.kind, row.type.name + inferred], row.bytes, row.blocks)
    return profile
