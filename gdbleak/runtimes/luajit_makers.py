"""Which Lua code makes a table: inferred, for a table does not say, from what both have in common.

A constructor in Lua code is one instruction. It says how many array slots the table gets with it, which the table never
forgets; its template has the names of the fields that the constructor gives, and further names follow as the stores to
the same register. Where these are a table's names, the table can be from there.
"""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..kernels import luajit as kernel
from ..target.address_space import Absent
from .luajit import TILE, VM, table_nodes
from .luajit_code import TSETS, bytecode, constants, line_of
from .luajit_names import Names

MOST_NAMES = 16                # a table of more names than this is used as a map: its names tell nothing
_MAX_COLO = 16                 # LJ_MAX_COLOSIZE: array parts of up to this many slots are allocated with the table
_TNEW, _TDUP, _KNIL = 52, 53, 44
# Bytecodes that write register A, and those that write A and what is above it.
_WRITES = {12, 13, *range(18, 44), 45, *range(51, 55), *range(56, 60)}
_WRITES_ABOVE = {*range(65, 73), *range(77, 85)}


@dataclass
class Shapes:
    """Tables grouped by their names and by the array slots that were allocated with them, the most bytes first; arrays
    over groups: `row` of one of them, how many `names` (-1: more than MOST_NAMES), slots (`colo`), `count`, `bytes`."""

    row: np.ndarray
    names: np.ndarray
    colo: np.ndarray
    count: np.ndarray
    bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.row)


class Maker(NamedTuple):
    """Code that makes tables: `place`; rows of the `fields` that it can give them; numbers of array slots
    (none: it only fills what is made elsewhere)."""

    place: str
    fields: frozenset[int]
    colo: frozenset[int]


def templates(vm: VM) -> np.ndarray:
    """Mask of the tables that are constants of prototypes: what constructors copy."""
    graph, kind = vm.graph, vm.objects.kind
    found = np.zeros(len(vm.objects), bool)
    rows = np.flatnonzero(kind == kernel.PROTO)
    for low, high in zip(graph.begins[rows].tolist(), graph.begins[rows + 1].tolist()):
        found[graph.targets[low:high][graph.labels[low:high] == kernel.CONSTANT]] = True
    return found & (kind == kernel.TAB)


def shapes(vm: VM) -> Shapes:
    """All tables but the templates, grouped."""
    objects = vm.objects
    rows = np.flatnonzero((objects.kind == kernel.TAB) & ~templates(vm))
    at = objects.address[rows].astype(np.uint64) + np.uint64(vm.layout.GCtab_colo)
    colo = vm.target.space.gather(at, np.uint8)[0] & 0x7f
    count, mark = _names_of(vm, rows)
    count, mark = np.where(count > MOST_NAMES, -1, count), np.where(count > MOST_NAMES, 0, mark)
    _, first, group, members = np.unique(_scatter(mark + _scatter((count + 1) * 256 + colo)), return_index=True,
                                         return_inverse=True, return_counts=True)
    size = np.bincount(group, objects.size[rows], len(first)).astype(np.int64)
    order = np.argsort(-size, kind="stable")
    first = first[order]
    return Shapes(rows[first], count[first], colo[first], members[order], size[order])


def _scatter(numbers: np.ndarray) -> np.ndarray:
    """Numbers spread over all of uint64, so that a sum of some stands for the set of them."""
    x = numbers.astype(np.uint64) * np.uint64(0x9e3779b97f4a7c15)
    x = (x ^ x >> np.uint64(32)) * np.uint64(0xd6e8feb86659fd93)
    return x ^ x >> np.uint64(29)


def _names_of(vm: VM, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(how many names, a number that stands for the set of them) of each of these tables (int64, uint64)."""
    graph, objects = vm.graph, vm.objects
    value = np.where(objects.kind == kernel.STR, _scatter(np.arange(1, len(objects) + 1)), np.uint64(0))
    count, mark = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.uint64)
    for k in range(0, len(rows), TILE):
        part = rows[k:k + TILE]
        low, high = int(graph.begins[part[0]]), int(graph.begins[part[-1] + 1])
        values = np.where(graph.labels[low:high] == kernel.KEY, value[graph.targets[low:high]], np.uint64(0))
        for sums, of in ((count, values != 0), (mark, values)):
            until = np.concatenate((np.zeros(1, sums.dtype), np.cumsum(of, dtype=sums.dtype)))
            sums[k:k + TILE] = until[graph.begins[part + 1] - low] - until[graph.begins[part] - low]
    return count, mark


def names_of(vm: VM, row: int) -> frozenset[int]:
    """Rows of the strings that are keys of a table."""
    graph = vm.graph
    low, high = int(graph.begins[row]), int(graph.begins[row + 1])
    keys = graph.targets[low:high][graph.labels[low:high] == kernel.KEY]
    return frozenset(keys[vm.objects.kind[keys] == kernel.STR].tolist())


class Makers:
    """All constructors of a VM's Lua code, and the functions that have some or store to fields, to be asked for a
    table's."""

    def __init__(self, names: Names):
        self._names, self.vm = names, names.vm
        constructors, functions = [], []
        for row in np.flatnonzero(self.vm.objects.kind == kernel.PROTO).tolist():
            try:
                found, whole = self._of_prototype(names.address(row))
            except (Absent, IndexError):
                continue
            constructors += found
            functions.append(whole)
        self._ways = ("", _Index(constructors)), ("function ", _Index([one for one in functions if one.colo])), \
            ("filled by function ", _Index([one for one in functions if not one.colo]))

    def places(self, fields: frozenset[int], colo: int) -> list[str]:
        """Where tables of these names and slots can be from: constructors; else functions that have a constructor and
        store to all of these names; else functions that store to them. Each once, those with the fewest other names."""
        for way, index in self._ways if fields else self._ways[:1]:
            found = index.find(fields, colo)
            if found:
                return [way + place for place in found]
        return []

    def _of_prototype(self, proto: int) -> tuple[list[Maker], Maker]:
        """(its constructors, the function as a whole). Raises Absent, IndexError for what is damaged."""
        vm, code, known = self.vm, bytecode(self.vm, proto).tolist(), constants(self.vm, proto)
        place, found = self._names.place(proto), []
        for at, word in enumerate(code):
            if word & 0xff not in (_TNEW, _TDUP):
                continue
            fields = {vm.row(known[number]) for number in _stored(code, at)}
            if word & 0xff == _TDUP:
                fields |= self._template_names(known[word >> 16])
                slots = vm.u32(known[word >> 16] + vm.layout.GCtab_asize)
            else:
                slots = word >> 16 & 0x7ff
            line = f"{place.rsplit(':', 1)[0]}:{line_of(vm, proto, at)}"
            found.append(Maker(line, frozenset(fields), frozenset([slots if slots <= _MAX_COLO else 0])))
        names = {vm.row(known[number]) for number in {word >> 16 & 0xff for word in code if word & 0xff == TSETS}}
        return found, Maker(place, frozenset(names.union(*(one.fields for one in found))),
                            frozenset().union(*(one.colo for one in found)))

    def _template_names(self, template: int) -> set[int]:
        """Rows of the strings that are keys of a template; its values may be nil, for the constructor to store."""
        vm = self.vm
        keys = [vm.object_in(key) for _, key in table_nodes(vm, template).tolist()]
        rows = {vm.row(address) for kind, address in keys if kind == kernel.STR}
        return {row for row in rows if row >= 0 and int(vm.objects.kind[row]) == kernel.STR}


def _stored(code: list[int], at: int) -> set[int]:
    """Numbers of the constants under which the code stores to the table made at `at`, while its register has it."""
    register, found = code[at] >> 8 & 0xff, set()
    for number in range(at + 1, len(code)):
        word = code[number]
        op, a = word & 0xff, word >> 8 & 0xff
        if op == TSETS and word >> 24 == register:
            found.add(word >> 16 & 0xff)
        elif op in _WRITES and a == register or op in _WRITES_ABOVE and a <= register or \
                op == _KNIL and a <= register <= word >> 16:
            break
    return found


class _Index:
    """Makers by the fields that they can give."""

    def __init__(self, makers: list[Maker]):
        self._makers = makers
        self._by_field: dict[int | None, set[int]] = defaultdict(set)
        for number, maker in enumerate(makers):
            for field in maker.fields or (None,):
                self._by_field[field].add(number)

    def find(self, fields: frozenset[int], colo: int) -> list[str]:
        """The places that can give all of these fields and few others: not more than these, and the fewest that any
        gives."""
        sets = sorted((self._by_field.get(field, set()) for field in fields or (None,)), key=len)
        fit = [maker for maker in map(self._makers.__getitem__, set.intersection(*sets))
               if len(maker.fields) <= 2 * len(fields) and (not maker.colo or colo in maker.colo)]
        fewest = min((len(maker.fields) for maker in fit), default=0)
        return sorted({maker.place for maker in fit if len(maker.fields) == fewest})
