"""Finding a place in sorted arrays, and the piece of target memory that holds an address, for all kernels that read
through an AddressSpace's table."""
from __future__ import annotations

import numpy as np

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


def number_of(starts, values):
    """For array forms: the number of the last of the sorted `starts` that is not above each of `values`, 0 when all
    are; a single one when it is the same for all values."""
    least, most = np.searchsorted(starts[1:], np.array([values.min(), values.max()]), "right")
    return least if least == most else np.searchsorted(starts[1:], values, "right")


@helper
def piece(starts, ends, address):
    """Number of the piece that holds `address`, or -1."""
    k = at_most(starts, address) - 1
    if k < 0 or address >= ends[k]:
        return -1
    return k
