"""Pointers into malloc blocks: from one block to another, and from any other memory into them.

Every aligned word that points into a block in use is one, to its beginning or to its middle. `words`, `starts`, `ends`,
`offsets`: the buffer and table of an AddressSpace; the regions, `bits`, `rank`, `address` and `size` as in `owners`;
`seen` (uint8): NO_NODE for rows that hold nothing and are held by nothing (free blocks, the allocator's own).
"""
from __future__ import annotations

import bisect
from itertools import chain

import numpy as np

from . import I32s, I64, I64s, N32s, U64, U64s, U8s, helper, kernel
from .owners import owner, owners_array
from .pieces import at_most, piece

NO_NODE = 255
UNKNOWN = (1 << 31) - 1         # no label: those from 0 on are rows, of the Lua strings that are keys

_ZERO, _ONE, _THREE, _U7, _U8 = (np.uint64(k) for k in (0, 1, 3, 7, 8))
_NOT7 = np.uint64(0xfffffffffffffff8)
_NOWHERE = np.uint64(0xffffffffffffffff)
_STRETCH = 1 << 17              # words at a time, so that they stay in the cache


@helper
def _next_piece(starts, address):
    """Where the first piece behind `address` begins."""
    k = at_most(starts, address)
    return starts[k] if k < len(starts) else _NOWHERE


def _pieces_in(starts, ends, offsets, low, high):
    """(start, end, offset in the buffer) of what is there of [low, high), whole words only."""
    k = max(bisect.bisect_right(starts, low) - 1, 0)
    while k < len(starts) and starts[k] < high:
        start, end = (max(starts[k], low) + 7) & ~7, min(ends[k], high) & ~7
        if start < end:
            yield start, end, offsets[k] + start - starts[k]
        k += 1


def _pointing(words, low, high, offset, least, span):
    """(their addresses, values) of the words of [low, high), at `offset` of the buffer, that are in
    [least, least + span): stretch by stretch."""
    end = (offset + high - low) >> 3
    room = min(_STRETCH, end - (offset >> 3))
    above, inside = np.empty(room, np.uint64), np.empty(room, bool)
    for k in range(offset >> 3, end, _STRETCH):
        part = words[k:min(k + _STRETCH, end)]
        np.subtract(part, least, out=above[:len(part)])
        np.less(above[:len(part)], span, out=inside[:len(part)])
        hits = inside[:len(part)].nonzero()[0]
        yield (hits << 3).view(np.uint64) + np.uint64(low + (k << 3) - offset), part[hits]


def _edges_array(words, starts, ends, offsets, region_starts, region_ends, region_slots, bits, rank, address, size, seen,
                 first, last, begins, targets, c, lost):
    starts, ends, offsets = starts.tolist(), ends.tolist(), offsets.tolist()
    index = region_starts, region_ends, region_slots, bits, rank, address, size
    low_all, span = region_starts[0], region_ends[-1] - region_starts[0]
    counts = np.zeros(last - first, np.int64)
    at = first
    while at < last:
        end = region_ends[np.searchsorted(region_ends, address[at], "right")]
        behind = at + int(np.searchsorted(address[at:last], end))
        start = address[at:behind]
        stop = np.minimum(start + size[at:behind] - _U8, end)
        stop = np.where(seen[at:behind] == NO_NODE, start, stop)
        low, high = int(start[0]), int(stop.max())
        there = list(_pieces_in(starts, ends, offsets, low, high))
        for places, values in chain.from_iterable(_pointing(words, *one, low_all, span) for one in there):
            source = np.searchsorted(start, places, "right") - 1
            kept = np.flatnonzero(places < stop[source])
            source, values = source[kept], values[kept]
            target = np.empty(len(values), np.int32)
            owners_array(*index, values, target)
            kept = np.flatnonzero((target >= 0) & (target != at + source) & (seen[target] != NO_NODE))
            targets[c:c + len(kept)] = target[kept]
            c += len(kept)
            if len(kept):
                new = np.bincount(source[kept] - source[kept[0]])
                counts[at - first + source[kept[0]]:][:len(new)] += new
        if [(low, high)] != [one[:2] for one in there]:
            absent = int((stop - start).sum()) >> 3
            for low, high, _ in there:
                begin, end = np.maximum(start, np.uint64(low)), np.minimum(stop, np.uint64(high))
                absent -= int((end - begin)[begin < end].sum()) >> 3
            lost += (absent > 0, absent)
        at = behind
    begins[first + 1:last + 1] = begins[first] + np.cumsum(counts)
    return c


@kernel(_edges_array)
def edges(words: U64s, starts: U64s, ends: U64s, offsets: U64s, region_starts: U64s, region_ends: U64s, region_slots: U64s,
          bits: U64s, rank: I32s, address: U64s, size: U64s, seen: U8s, first: I64, last: I64, begins: I32s,
          targets: I32s, c: I64, lost: I64s):
    """Append the pointers of rows [first, last) to the CSR `begins`, `targets`, which holds `c` edges; how many then.

    Pointers of a block to itself are left out. `lost` (int64[2]): how often words of blocks were absent, and how many.
    `targets` must have room for all words of the rows.
    """
    low_all, span = region_starts[0], region_ends[len(region_ends) - 1] - region_starts[0]
    low = high = delta = _ZERO
    r = 0
    for row in range(first, last):
        begins[row] = c
        if seen[row] == NO_NODE:
            continue
        p = address[row]
        while p >= region_ends[r]:
            r += 1
        stop = p + size[row] - _U8
        if stop > region_ends[r]:
            stop = region_ends[r]
        while p < stop:
            if p < low or p + _U8 > high:
                k = piece(starts, ends, p)
                if k < 0 or p + _U8 > ends[k]:
                    past = (_next_piece(starts, p) + _U7) & _NOT7
                    if past > stop or past <= p:
                        past = stop
                    lost[0] += 1
                    lost[1] += np.int64((past - p) >> _THREE)
                    p = past
                    continue
                low, high, delta = starts[k], ends[k], offsets[k] - starts[k]
            end = stop
            if end > high:
                end = high & _NOT7
            for i in range(np.int64((p + delta) >> _THREE), np.int64((end + delta) >> _THREE)):
                value = words[i]
                if value - low_all < span:
                    target = owner(region_starts, region_ends, region_slots, bits, rank, address, size, value)
                    if target >= 0 and target != row and seen[target] != NO_NODE:
                        targets[c] = target
                        c += 1
            p = end
    begins[last] = c
    return c


def _pointers_array(words, starts, ends, offsets, region_starts, region_ends, region_slots, bits, rank, address, size, seen,
                    start, stop, places, rows, n):
    low_all, span = region_starts[0], region_ends[-1] - region_starts[0]
    there = _pieces_in(starts.tolist(), ends.tolist(), offsets.tolist(), int(start), int(stop))
    for at, values in chain.from_iterable(_pointing(words, *one, low_all, span) for one in there):
        found = np.empty(len(values), np.int32)
        owners_array(region_starts, region_ends, region_slots, bits, rank, address, size, values, found)
        kept = np.flatnonzero((found >= 0) & (seen[found] != NO_NODE))
        places[n:n + len(kept)], rows[n:n + len(kept)] = at[kept], found[kept]
        n += len(kept)
    return n


@kernel(_pointers_array)
def pointers(words: U64s, starts: U64s, ends: U64s, offsets: U64s, region_starts: U64s, region_ends: U64s,
             region_slots: U64s, bits: U64s, rank: I32s, address: U64s, size: U64s, seen: U8s, start: U64, stop: U64,
             places: U64s, rows: I32s, n: I64):
    """Append each word of [start, stop) that points into a block to `places` (its address) and `rows` (the block);
    how many there are then. Absent words are stepped over. Both must have room for all words."""
    low_all, span = region_starts[0], region_ends[len(region_ends) - 1] - region_starts[0]
    p = (start + _U7) & _NOT7
    stop = stop & _NOT7
    while p < stop:
        k = piece(starts, ends, p)
        if k < 0 or p + _U8 > ends[k]:
            past = (_next_piece(starts, p) + _U7) & _NOT7
            if past <= p:
                break
            p = past
            continue
        end = stop
        if end > ends[k]:
            end = ends[k] & _NOT7
        at = np.int64((offsets[k] + p - starts[k]) >> _THREE)
        for i in range(at, at + np.int64((end - p) >> _THREE)):
            value = words[i]
            if value - low_all < span:
                target = owner(region_starts, region_ends, region_slots, bits, rank, address, size, value)
                if target >= 0 and seen[target] != NO_NODE:
                    places[n] = p + (np.uint64(i - at) << _THREE)
                    rows[n] = target
                    n += 1
        p = end
    return n


def _used_array(words, starts, ends, offsets, region_starts, region_ends, region_slots, bits, rank, address, size, begins,
                targets, parent, via, first, last, base):
    starts, ends, offsets = starts.tolist(), ends.tolist(), offsets.tolist()
    low_all, span = region_starts[0], region_ends[-1] - region_starts[0]
    pointing = first + np.flatnonzero(begins[first + 1:last + 1] > begins[first:last])
    region_at = np.searchsorted(region_ends, address[pointing], "right")
    for region in np.unique(region_at):
        rows = pointing[region_at == region]
        stop = np.minimum(address[rows] + size[rows] - _U8, region_ends[region])
        there = _pieces_in(starts, ends, offsets, int(address[rows[0]]), int(stop[-1]))
        for places, values in chain.from_iterable(_pointing(words, *one, low_all, span) for one in there):
            source = np.searchsorted(address[rows], places, "right") - 1
            inside = places < stop[source]
            source, places, values = rows[source[inside]], places[inside], values[inside]
            target = np.empty(len(values), np.int32)
            owners_array(region_starts, region_ends, region_slots, bits, rank, address, size, values, target)
            used = np.flatnonzero((target >= 0) & (parent[target] == source) & (via[target] == UNKNOWN))[::-1]
            # The first one is written last.
            via[target[used]] = base - ((places[used] - address[source[used]]) >> _THREE).astype(np.int64)
    return last


@kernel(_used_array)
def used(words: U64s, starts: U64s, ends: U64s, offsets: U64s, region_starts: U64s, region_ends: U64s, region_slots: U64s,
         bits: U64s, rank: I32s, address: U64s, size: U64s, begins: N32s, targets: N32s, parent: I32s, via: I32s, first: I64,
         last: I64, base: I64):
    """Put `base` - k into via[child] of the tree `parent`, where word k of the parent, one of rows [first, last), is the
    first that points to the child. `via` of these children comes as UNKNOWN. `begins`, `targets`: what `edges` found: the words
    of a block that point into its targets are those edges, in their order."""
    low = high = delta = _ZERO
    for row in range(first, last):
        p = address[row]
        stop = p + size[row] - _U8
        for c in range(begins[row], begins[row + 1]):
            target = targets[c]
            if parent[target] != row or via[target] != UNKNOWN:
                continue
            begin, room = address[target], size[target] - _U8
            while p < stop:
                if p < low or p + _U8 > high:
                    k = piece(starts, ends, p)
                    if k < 0 or p + _U8 > ends[k]:
                        past = (_next_piece(starts, p) + _U7) & _NOT7
                        if past > stop or past <= p:
                            past = stop
                        p = past
                        continue
                    low, high, delta = starts[k], ends[k], offsets[k] - starts[k]
                p += _U8
                if words[(p - _U8 + delta) >> _THREE] - begin < room:
                    via[target] = base - (np.int64((p - address[row]) >> _THREE) - 1)
                    break
    return last
