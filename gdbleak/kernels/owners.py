"""Whose an address is: the block of a sorted table that holds it.

The index is one bit for each 16 bytes of the regions, set where a block begins, and a running count of them
(`rank`, int32, one for each word of bits): 7 to 56 ns a look-up at 2.25 bytes a block. `address`, `size` (uint64): user
address and chunk size of the blocks, sorted; `region_starts`, `region_ends`, `region_slots` (uint64): where blocks lie, sorted,
and the number of each region's first bit. A block is its chunk but for the header: [address, address + size - 8).
"""
from __future__ import annotations

import numpy as np

from . import I32s, U64s, helper, kernel
from .pieces import at_most, number_of

_ZERO, _ONE, _TWO, _FOUR, _SIX, _U8, _U63 = (np.uint64(k) for k in (0, 1, 2, 4, 6, 8, 63))
_U56 = np.uint64(56)
_PAIRS, _FOURS, _EIGHTS, _SUM = (np.uint64(k) for k in (0x5555555555555555, 0x3333333333333333, 0x0f0f0f0f0f0f0f0f,
                                                       0x0101010101010101))


@helper
def _ones(x):
    """How many bits of a word are set."""
    x = x - ((x >> _ONE) & _PAIRS)
    x = (x & _FOURS) + ((x >> _TWO) & _FOURS)
    return np.int64((((x + (x >> _FOUR)) & _EIGHTS) * _SUM) >> _U56)


_counted = getattr(np, "bitwise_count", _ones)              # from NumPy 2.0 on
PART = 1 << 15                  # values at a time: what is made of them stays in the cache


@helper
def owner(region_starts, region_ends, region_slots, bits, rank, address, size, value):
    """Row of the block that holds address `value`, or -1. Test first, outside, that it lies among the regions at all."""
    region = at_most(region_starts, value) - 1
    if region < 0 or value >= region_ends[region]:
        return -1
    slot = region_slots[region] + ((value - region_starts[region]) >> _FOUR)
    word = slot >> _SIX
    row = np.int64(rank[word]) + _ones(bits[word] & ((_TWO << (slot & _U63)) - _ONE)) - 1
    if row < 0 or value - address[row] >= size[row] - _U8:
        return -1
    return row


def _index_array(region_starts, region_ends, region_slots, address, bits, rank):
    lead = (region_slots << _FOUR) - region_starts           # from an address to its place in bytes, over all regions
    for k in range(0, len(address), PART):
        part = address[k:k + PART]
        slot = (part + lead[number_of(region_starts, part)]) >> _FOUR
        word = slot >> _SIX
        new = np.flatnonzero(np.diff(word, prepend=~word[:1]))
        bits[word[new]] |= np.bitwise_or.reduceat(_ONE << (slot & _U63), new)
    for k in range(0, len(rank), PART):
        total = np.cumsum(_counted(bits[k:k + PART]), dtype=np.int32)
        rank[k + 1:k + 1 + PART] = rank[k] + total[:len(rank) - 1 - k]


@kernel(_index_array)
def index(region_starts: U64s, region_ends: U64s, region_slots: U64s, address: U64s, bits: U64s, rank: I32s):
    """Fill `bits` and `rank`, which come zeroed, for the blocks at `address`."""
    r = 0
    for row in range(len(address)):
        while address[row] >= region_ends[r]:
            r += 1
        slot = region_slots[r] + ((address[row] - region_starts[r]) >> _FOUR)
        bits[slot >> _SIX] |= _ONE << (slot & _U63)
    total = 0
    for k in range(len(rank)):
        rank[k] = total
        if bits[k] != _ZERO:
            total += _ones(bits[k])


def owners_array(region_starts, region_ends, region_slots, bits, rank, address, size, values, rows):
    """The array form of `owners`, which those of other kernels use as well."""
    rows[:] = -1
    if not len(address):
        return
    lead, behind = (region_slots << _FOUR) - region_starts, (region_slots << _FOUR) + (region_ends - region_starts)
    for k in range(0, len(values), PART):
        value = values[k:k + PART]
        region = number_of(region_starts, value)
        place = value + lead[region]
        slot = place >> _FOUR
        word = (slot >> _SIX).view(np.int64)
        below = bits.take(word, mode="clip") & ((_TWO << (slot & _U63)) - _ONE)
        row = rank.take(word, mode="clip") + _counted(below) - 1
        inside = (place < behind[region]) & (value - address[row] < size[row] - _U8)     # no row: -1, and above
        np.copyto(rows[k:k + PART], row, "same_kind", inside)


@kernel(owners_array)
def owners(region_starts: U64s, region_ends: U64s, region_slots: U64s, bits: U64s, rank: I32s, address: U64s, size: U64s,
           values: U64s, rows: I32s):
    """Put the row of the block that holds each of `values`, or -1, into `rows`."""
    for k in range(len(values)):
        rows[k] = owner(region_starts, region_ends, region_slots, bits, rank, address, size, values[k])
