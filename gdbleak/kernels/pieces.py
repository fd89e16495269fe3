"""Finding the piece of target memory that holds an address, for every kernel that reads through an AddressSpace's table."""
from __future__ import annotations

from . import helper


@helper
def piece(starts, ends, address):
    """Number of the piece that holds `address`, or -1."""
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) >> 1
        if starts[middle] <= address:
            low = middle + 1
        else:
            high = middle
    if low == 0 or address >= ends[low - 1]:
        return -1
    return low - 1
