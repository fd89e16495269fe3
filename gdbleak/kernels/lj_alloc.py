"""Walking the chunks of one segment of LuaJIT's allocator."""
from __future__ import annotations

import bisect

import numpy as np

from . import U64, U64s, kernel
from .pieces import piece

_U3, _U4, _U8, _U16, _U32, _FENCE = (np.uint64(k) for k in (3, 4, 8, 16, 32, 0xb))
_ONE, _TWO, _ZERO = np.uint64(1), np.uint64(2), np.uint64(0)
_NOT3 = np.uint64(0xfffffffffffffffc)
DONE, BROKEN = 0, 1


def _walk_array(words, starts, ends, offsets, start, stop, top, address, size_of):
    memory = memoryview(words)
    starts, ends, offsets = starts.tolist(), ends.tolist(), offsets.tolist()
    p, top, stop = int(start), int(top), int(stop)
    used = used_bytes = free = free_bytes = 0
    while p < stop:
        if p == top:
            return used, used_bytes, free, free_bytes, p, DONE
        k = bisect.bisect_right(starts, p) - 1
        if k < 0 or p + 16 > ends[k]:
            return used, used_bytes, free, free_bytes, p, BROKEN
        head = memory[((offsets[k] + p - starts[k]) >> 3) + 1]
        if head == 0xb:
            return used, used_bytes, free, free_bytes, p, DONE
        size = head & ~3
        if size < 32 or size & 7 or size > stop - p:
            return used, used_bytes, free, free_bytes, p, BROKEN
        if head & 2:
            if used < len(address):
                address[used], size_of[used] = p, size
            used, used_bytes = used + 1, used_bytes + size
        else:
            free, free_bytes = free + 1, free_bytes + size
        p += size
    return used, used_bytes, free, free_bytes, p, DONE


@kernel(_walk_array)
def walk(words: U64s, starts: U64s, ends: U64s, offsets: U64s, start: U64, stop: U64, top: U64, address: U64s,
         size_of: U64s):
    """Walk the chunks of [start, stop) up to `top` or the fencepost;
    (in use, their bytes, free, their bytes, where it ended, why).

    As many of those in use as these have room for are put into `address` and `size_of`.
    """
    used, used_bytes, free, free_bytes = 0, 0, 0, 0
    p = start
    while p < stop:
        if p == top:
            return used, used_bytes, free, free_bytes, p, DONE
        k = piece(starts, ends, p)
        if k < 0 or p + _U16 > ends[k]:
            return used, used_bytes, free, free_bytes, p, BROKEN
        head = words[((offsets[k] + p - starts[k]) >> _U3) + _ONE]
        if head == _FENCE:
            return used, used_bytes, free, free_bytes, p, DONE
        size = head & _NOT3
        if size < _U32 or (size & (_U8 - _ONE)) != _ZERO or size > stop - p:
            return used, used_bytes, free, free_bytes, p, BROKEN
        if head & _TWO:
            if used < len(address):
                address[used] = p
                size_of[used] = size
            used += 1
            used_bytes += np.int64(size)
        else:
            free += 1
            free_bytes += np.int64(size)
        p += size
    return used, used_bytes, free, free_bytes, p, DONE
