"""nginx pools by their structure: which in-use malloc blocks begin a pool, and what each pool holds.

All integers are int64 here (addresses of a process fit), so that one body serves as the compiled form and, over
memoryviews and lists, as the array form.
"""
from __future__ import annotations

import numpy as np

from . import I64, U8s, I32s, I64s, helper, kernel
from .chunks import IN_USE
from .pieces import at_most, number_of, piece

# columns of the result of `measure`
(ROW, BLOCKS, BLOCK_BYTES, USED, UNUSED, LARGE, LARGE_BYTES, FREED_LARGE, CLEANUPS, HANDLER, SIZE, LOG,
 COLUMNS) = range(13)


def _candidates_array(words, starts, ends, offsets, address, size, state, header, page, found):
    n, lead = 0, offsets - starts
    for k in range(0, len(address), 1 << 15):
        users, room = address[k:k + (1 << 15)], size[k:k + (1 << 15)] - 8
        last = words.take((users + lead[number_of(starts, users)]) >> 3, mode="clip")
        rows = np.flatnonzero((last - users - header).view(np.uint64) <= room.view(np.uint64))     # this leaves few
        users, room, last = users[rows], room[rows], last[rows]
        piece = np.searchsorted(starts[1:], users, "right")
        good = (users >= starts[piece]) & (users + 48 <= ends[piece])
        good &= (state[k + rows] == IN_USE) & (room >= header + 8)
        rows, users, room, last, piece = rows[good], users[good], room[good], last[good], piece[good]
        at = (users + lead[piece]) >> 3
        end, most = words[at + 1], words[at + 4]
        good = (users + header <= last) & (last <= end) & (end - users <= room)
        good &= most == np.minimum(end - users - header, page - 1)
        rows = rows[good] + k
        found[n:n + len(rows)] = rows
        n += len(rows)
    return n


@kernel(_candidates_array)
def candidates(words: I64s, starts: I64s, ends: I64s, offsets: I64s, address: I64s, size: I64s, state: U8s, header: I64,
               page: I64, found: I64s):
    """Put the rows of in-use blocks whose first words can be an ngx_pool_t of `header` bytes into `found`; how many.

    Tested here: header <= last <= end <= the block, and `max` is what ngx_create_pool makes of them.
    """
    n = 0
    low = high = delta = 0
    for row in range(len(address)):
        if state[row] != IN_USE or size[row] < header + 16:
            continue
        user = address[row]
        if user < low or user + 48 > high:
            k = piece(starts, ends, user)
            if k < 0 or user + 48 > ends[k]:
                continue
            low, high, delta = starts[k], ends[k], offsets[k] - starts[k]
        at = (user + delta) >> 3
        last, end = words[at], words[at + 1]
        if last < user + header or last > end or end - user > size[row] - 8:
            continue
        if words[at + 4] == min(end - user - header, page - 1):
            found[n] = row
            n += 1
    return n


@helper
def _at(starts, ends, offsets, address, size):
    """Index of the word at `address` when `size` bytes are there, else -1."""
    low = at_most(starts, address)
    if low == 0 or address > ends[low - 1] - size or address & 7:   # a sum could overflow, and any word be an address
        return -1
    return (offsets[low - 1] + address - starts[low - 1]) >> 3


@helper
def _row_holding(address, size, user):
    """Row of the block whose usable bytes hold `user`, or -1."""
    low = at_most(address, user)
    if low == 0 or user >= address[low - 1] + size[low - 1] - 8:
        return -1
    return low - 1


def _measure(words: I64s, starts: I64s, ends: I64s, offsets: I64s, address: I64s, size: I64s, state: U8s, rows: I64s,
             header: I64, owner: I32s, out: I64s):
    """Walk the pools that begin at `rows`; how many of them are pools.

    A pool is one when every block of its chain is an in-use block of the first one's size, `current` is among them, the
    nodes of `large` and `cleanup` lie in the pool's own blocks, and every large allocation is an in-use block. Row k of
    `out` (int64, COLUMNS a row) then describes the k-th pool, and owner[row] (int32) is k + 1 for each of its blocks;
    `owner` comes zeroed.
    """
    n = 0
    for row in rows:
        pool = address[row]
        token = n + 1
        at = _at(starts, ends, offsets, pool, header)
        if at < 0 or owner[row] != 0:
            continue
        length = words[at + 1] - pool
        current, large, cleanup, log = words[at + 5], words[at + 7], words[at + 8], words[at + 9]
        good = True
        blocks = block_bytes = used = unused = 0
        has_current = False
        block, lead = pool, header
        while block != 0:
            here = _row_holding(address, size, block)
            place = _at(starts, ends, offsets, block, 32)
            if here < 0 or address[here] != block or state[here] != IN_USE or owner[here] != 0 or place < 0:
                good = False
                break
            last, end = words[place], words[place + 1]
            if end - block != length or last < block + lead or last > end:
                good = False
                break
            owner[here] = token
            has_current = has_current or block == current
            blocks += 1
            block_bytes += size[here]
            used += last - block - lead
            unused += end - last
            block, lead = words[place + 2], 32
        larges = large_bytes = freed = 0
        node = large
        while good and node != 0:
            here = _row_holding(address, size, node)
            place = _at(starts, ends, offsets, node, 16)
            if here < 0 or place < 0 or owner[here] != token or larges + freed > used >> 4:
                good = False
                break
            allocation = words[place + 1]
            if allocation == 0:
                freed += 1
            else:
                mine = _row_holding(address, size, allocation)
                if mine < 0 or address[mine] != allocation or state[mine] != IN_USE or \
                        (owner[mine] != 0 and owner[mine] != token):
                    good = False
                    break
                owner[mine] = token
                larges += 1
                large_bytes += size[mine]
            node = words[place]
        cleanups = handler = 0
        node = cleanup
        while good and node != 0:
            here = _row_holding(address, size, node)
            place = _at(starts, ends, offsets, node, 24)
            if here < 0 or place < 0 or owner[here] != token or cleanups > (used + large_bytes) >> 4:
                good = False
                break
            if cleanups == 0:
                handler = words[place]
            cleanups += 1
            node = words[place + 2]
        if good and has_current:
            k = n * COLUMNS
            out[k + ROW], out[k + BLOCKS], out[k + BLOCK_BYTES], out[k + USED] = row, blocks, block_bytes, used
            out[k + UNUSED], out[k + LARGE], out[k + LARGE_BYTES], out[k + FREED_LARGE] = \
                unused, larges, large_bytes, freed
            out[k + CLEANUPS], out[k + HANDLER], out[k + SIZE], out[k + LOG] = cleanups, handler, length, log
            n += 1
        else:
            _forget(words, starts, ends, offsets, address, size, pool, large, (used >> 4) + 1, token, owner)
    return n


@helper
def _forget(words, starts, ends, offsets, address, size, pool, large, most, token, owner):
    """Take back the marks of what turned out to be no pool."""
    block = pool
    while block != 0:
        here = _row_holding(address, size, block)
        place = _at(starts, ends, offsets, block, 32)
        if here < 0 or place < 0 or owner[here] != token:
            break
        owner[here] = 0
        block = words[place + 2]
    node = large
    while node != 0 and most > 0:
        place = _at(starts, ends, offsets, node, 16)
        if place < 0:
            break
        mine = _row_holding(address, size, words[place + 1])
        if mine >= 0 and owner[mine] == token:
            owner[mine] = 0
        node = words[place]
        most -= 1


def _measure_array(words, starts, ends, offsets, address, size, state, rows, header, owner, out):
    return _measure(memoryview(words), starts.tolist(), ends.tolist(), offsets.tolist(), memoryview(address),
                    memoryview(size), memoryview(state), rows.tolist(), header, owner, out)


measure = kernel(_measure_array)(_measure)
