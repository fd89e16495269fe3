"""Finding a place in sorted arrays, and the piece of target memory that holds an address, for all kernels that read
through an AddressSpace's table."""
from __future__ import annotations

from . import helper


@helper
def at_most(ordered, value):
    """How many of the sorted items are `value` or less."""
    low, high = 0, len(ordered)
    while low < high:
        middle = (low + high) >> 1
        if ordered[middle] <= value:
            low = middle + 1
        else:
            high = middle
    return low


@helper
def piece(starts, ends, address):
    """Number of the piece that holds `address`, or -1."""
    k = at_most(starts, address) - 1
    if k < 0 or address >= ends[k]:
        return -1
    return k
