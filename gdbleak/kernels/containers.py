"""Which malloc blocks are part of a container of libstdc++, or of a doubly linked list.

A container is recognised by its header, wherever that lies: a word that points to the beginning of a block, with what a
header holds beside it. The block must be as large as the header says; or every node must lead to the next and back, the
last one to the header, and their number be the header's own count.

All integers are int64 here (addresses of a process fit). `words`, `starts`, `ends`, `offsets`: the buffer and table of
an AddressSpace, `memory` together; the regions, `bits`, `rank`, `address` and `size` as in `owners`, and `seen`
(uint8), NO_NODE for rows to leave out: `blocks` together.
"""
from __future__ import annotations

import numpy as np

from . import I32s, I64, I64s, U8s, helper, in_python, kernel
from .pieces import at_most, piece
from .pointers import NO_NODE

# What part of a container a block is; of two findings about one block the higher stands.
LINK, VECTOR, STRING, BUCKETS, HASH_NODE, DEQUE_MAP, DEQUE_CHUNK, LIST_NODE, LIST_HEADER, TREE_NODE = range(1, 11)
# What a header may be of.
LIST, TREE, HASH, DEQUE = 1, 2, 3, 4

_MOST = 1 << 46                    # bytes of a container
_LEAST_STRING = 16                 # capacity; shorter ones are kept in the object
_LEAST_MAP = 8                     # of a deque
_LOADS = (0x3d800000, 0x42800000)  # 1/16 and 64 as floats: the max_load_factor of a hash table


# -- blocks by address -------------------------------------------------------------------------------------------------
@helper
def _at(memory, address, size):
    """Index of the word at `address` when `size` bytes are there, else -1."""
    _, starts, ends, offsets = memory
    if address & 7 or address <= 0:
        return -1
    k = piece(starts, ends, address)
    if k < 0 or address + size > ends[k]:
        return -1
    return (offsets[k] + address - starts[k]) >> 3


@helper
def _row(blocks, user):
    """Row of the block in use that begins at `user`, or -1."""
    region_starts, region_ends, region_slots, bits, rank, _, _, seen = blocks
    k = piece(region_starts, region_ends, user)
    if k < 0 or user & 15:
        return -1
    slot = region_slots[k] + ((user - region_starts[k]) >> 4)
    word, below = bits[slot >> 6], slot & 63
    if not (word >> below) & 1:
        return -1
    x = word & ~(-1 << below)                        # the blocks before it in this word, counted in the classical way
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    row = rank[slot >> 6] + ((((x + (x >> 4)) & 0x0f0f0f0f0f0f0f0f) * 0x0101010101010101 >> 56) & 255)
    return -1 if seen[row] == NO_NODE else row


@helper
def _fits(memory, blocks, row, request, page):
    """Whether the block is what malloc(request) returns: as small as can be, or 16 bytes larger (which malloc does not
    cut off), or of its own mapping."""
    words, (_, _, _, _, _, address, size, _) = memory[0], blocks
    need = max((request + 23) & -16, 32)
    if size[row] == need or size[row] == need + 16:
        return True
    if size[row] & 4095 or not request + 16 <= size[row] < request + 32 + page:
        return False
    at = _at(memory, address[row] - 8, 8)
    return at >= 0 and words[at] & 2 != 0


def _at_array(starts, ends, offsets, address, size):
    k = np.maximum(np.searchsorted(starts, address, "right") - 1, 0)
    there = (address & 7 == 0) & (address >= starts[k]) & (address + size <= ends[k])
    return np.where(there, (offsets[k] + address - starts[k]) >> 3, -1)


def _rows_array(address, seen, values):
    row = np.minimum(np.searchsorted(address, values), len(address) - 1)
    return np.where((address[row] == values) & (seen[row] != NO_NODE), row, -1)


def _fits_array(words, table, address, size, row, request, page):
    need, size = np.maximum((request + 23) & -16, 32), size[row]
    fits = (size == need) | (size == need + 16)
    mapped = ~fits & (size & 4095 == 0) & (request + 16 <= size) & (size < request + 32 + page)
    at = _at_array(*table, address[row[mapped]] - 8, 8)
    fits[mapped] = (at >= 0) & (words[at] & 2 != 0)
    return fits


# -- headers -----------------------------------------------------------------------------------------------------------
@helper
def _look(memory, blocks, i, a, b, p, page, kind, places, what, n):
    """Word i, at address p, points where a block may begin: mark that block if it is the buffer of a vector or string
    whose header begins here, and note what else the header may be of. The words a to b belong together."""
    words, (region_starts, region_ends, _, _, _, address, _, _) = memory[0], blocks
    v, low, high, most = words[i], region_starts[0], region_ends[len(region_ends) - 1], len(address)
    one, two = words[i + 1], words[i + 2]
    vector = v <= one <= two and v < two < v + _MOST
    string = 0 <= one <= two and _LEAST_STRING <= two < _MOST
    node = low <= one < high and one & 15 == 0
    list_ = node and 1 <= two <= most
    tree = hash_ = deque = False
    if i + 3 < b:
        three = words[i + 3]
        tree = node and i > a and words[i - 1] & 0xffffffff == 0 and 1 <= three <= most
        if i + 5 < b:
            load = words[i + 4] & 0xffffffff
            hash_ = 2 <= one < _MOST and 0 <= three <= most and _LOADS[0] <= load <= _LOADS[1]
        if i + 9 < b:
            deque = _LEAST_MAP <= one < _MOST and v <= words[i + 5] <= words[i + 9] < v + 8 * one
    if not (vector or string or list_ or tree or hash_ or deque):
        return n
    row = _row(blocks, v)
    if row < 0:
        return n
    if vector and kind[row] < VECTOR and _fits(memory, blocks, row, two - v, page) and \
            not ((i >= a + 3 and words[i - 3] == v) or (i + 3 < b and words[i + 3] == v)):
        kind[row] = VECTOR                           # a stream's buffer, FILE's too, has such pointers in threes
    if string and kind[row] < STRING and _fits(memory, blocks, row, two + 1, page):
        at = _at(memory, (v + one) & -8, 8)
        if at >= 0 and (words[at] >> (((v + one) & 7) << 3)) & 255 == 0:
            kind[row] = STRING
    at = _at(memory, v, 16) if list_ or tree else -1
    if at >= 0 and list_ and words[at + 1] == p:
        places[n], what[n] = p, LIST
        n += 1
    if at >= 0 and tree and words[at + 1] == p - 8:
        places[n], what[n] = p, TREE
        n += 1
    if (hash_ or deque) and _fits(memory, blocks, row, 8 * one, page):
        if hash_:
            places[n], what[n] = p, HASH
            n += 1
        if deque:
            places[n], what[n] = p, DEQUE
            n += 1
    return n


def _look_array(words, table, address, size, seen, i, a, b, p, bounds, page, kind, places, what, n):
    """`_look` at many words."""
    def beside(k):
        """Word i + k, and whether it belongs there."""
        inside = (i + k >= a) & (i + k < b)
        return words[np.where(inside, i + k, i)], inside
    v, one, two, most = words[i], words[i + 1], words[i + 2], len(address)
    vector = (v <= one) & (one <= two) & (v < two) & (two < v + _MOST)
    string = (0 <= one) & (one <= two) & (_LEAST_STRING <= two) & (two < _MOST)
    node = (bounds[0] <= one) & (one < bounds[1]) & (one & 15 == 0)
    list_ = node & (1 <= two) & (two <= most)
    three, has_three = beside(3)
    before, has_before = beside(-1)
    tree = node & has_three & has_before & (before & 0xffffffff == 0) & (1 <= three) & (three <= most)
    load, (begin, has_five), (end, has_nine) = beside(4)[0] & 0xffffffff, beside(5), beside(9)
    hash_ = has_five & (2 <= one) & (one < _MOST) & (0 <= three) & (three <= most)
    hash_ &= (_LOADS[0] <= load) & (load <= _LOADS[1])
    deque = has_nine & (_LEAST_MAP <= one) & (one < _MOST)
    deque &= (v <= begin) & (begin <= end) & (end < v + 8 * np.where(deque, one, 0))
    some = np.flatnonzero(vector | string | list_ | tree | hash_ | deque)
    row = np.full(len(i), -1, np.int64)
    row[some] = _rows_array(address, seen, v[some])
    there = row >= 0
    threes = np.zeros(len(i), bool)
    for k in (-3, 3):
        word, inside = beside(k)
        threes |= inside & (word == v)
    at = np.flatnonzero(vector & there & ~threes)
    at = at[_fits_array(words, table, address, size, row[at], two[at] - v[at], page)]
    kind[row[at]] = np.maximum(kind[row[at]], VECTOR)
    at = np.flatnonzero(string & there)
    at = at[_fits_array(words, table, address, size, row[at], two[at] + 1, page)]
    last = v[at] + one[at]
    place = _at_array(*table, last & -8, 8)
    at = at[(place >= 0) & ((words[place] >> ((last & 7) << 3)) & 255 == 0)]
    kind[row[at]] = np.maximum(kind[row[at]], STRING)
    place = _at_array(*table, v, 16)
    back = np.where(place >= 0, words[place + 1], 0)
    fits = there & (hash_ | deque)
    fits[fits] = _fits_array(words, table, address, size, row[fits], 8 * one[fits], page)
    chosen = [there & list_ & (back == p), there & tree & (back == p - 8), fits & hash_, fits & deque]
    at, which = np.nonzero(np.stack(chosen, axis=1))
    places[n:n + len(at)] = p[at]
    what[n:n + len(at)] = which + 1
    return n + len(at)


def _span_words(starts, ends, offsets, span_starts, span_ends):
    """(first, behind, delta) of the words that are there of spans, in order; an address is 8 * word + delta."""
    k = np.maximum(np.searchsorted(starts, span_starts, "right") - 1, 0)
    delta = starts[k] - offsets[k]
    rows = np.stack([(span_starts - delta) >> 3, (span_ends - delta) >> 3, delta], axis=1)
    found, done = [], 0
    for s in np.flatnonzero((span_starts < starts[k]) | (span_ends > ends[k])).tolist():
        found.append(rows[done:s])
        for start, end, offset in zip(starts[k[s]:].tolist(), ends[k[s]:].tolist(), offsets[k[s]:].tolist()):
            if start >= span_ends[s]:
                break
            low, high = max(start + 7 & -8, int(span_starts[s])), min(end & -8, int(span_ends[s]))
            if low < high:
                delta = start - offset
                found.append(np.array([[(low - delta) >> 3, (high - delta) >> 3, delta]]))
        done = s + 1
    return np.concatenate([*found, rows[done:]]).T


def _headers_array(words, starts, ends, offsets, region_starts, region_ends, region_slots, bits, rank, address, size,
                   seen, span_starts, span_ends, page, kind, places, what, n):
    if not len(starts) or not len(span_starts):
        return n
    a, b, delta = (np.ascontiguousarray(part) for part in _span_words(starts, ends, offsets, span_starts, span_ends))
    counts, bounds = np.maximum(b - a, 0), (region_starts[0], region_ends[-1])
    for k in range(0, len(a), 1 << 14):
        count, begin = counts[k:k + (1 << 14)], a[k:k + (1 << 14)]
        of = np.repeat(np.arange(k, k + len(count)), count)
        i = np.arange(len(of)) + np.repeat(begin - np.cumsum(count) + count, count)
        hit = (words[i] >= bounds[0]) & (words[i] < bounds[1]) & (words[i] & 15 == 0) & (i + 2 < b[of])
        i, of = i[hit], of[hit]
        n = _look_array(words, (starts, ends, offsets), address, size, seen, i, a[of], b[of], 8 * i + delta[of], bounds,
                        page, kind, places, what, n)
    return n


@helper
def _next(starts, address):
    """Where the first word of the piece behind `address` is; far away when there is none."""
    k = at_most(starts, address)
    return (starts[k] + 7) & -8 if k < len(starts) else 1 << 62


@kernel(_headers_array)
def headers(words: I64s, starts: I64s, ends: I64s, offsets: I64s, region_starts: I64s, region_ends: I64s,
            region_slots: I64s, bits: I64s, rank: I32s, address: I64s, size: I64s, seen: U8s, span_starts: I64s,
            span_ends: I64s, page: I64, kind: U8s, places: I64s, what: U8s, n: I64):
    """Look for headers of containers in spans of memory, each a structure of its own (8-aligned; a block, a module's
    data).

    Blocks that are the buffer of a vector or string get their `kind`. What looks like another header is appended to
    `places` (its address) and `what` (LIST, TREE, HASH, DEQUE), for `containers` and `rings` to follow; how many there
    are then. Both must have room for all words.
    """
    memory = words, starts, ends, offsets
    blocks = region_starts, region_ends, region_slots, bits, rank, address, size, seen
    lowest, highest = region_starts[0], region_ends[len(region_ends) - 1]
    low = high = delta = 0
    for s in range(len(span_starts)):
        p, stop = span_starts[s], span_ends[s]
        while p < stop:
            if p < low or p + 8 > high:
                k = piece(starts, ends, p)
                if k < 0 or p + 8 > ends[k]:
                    p = _next(starts, p)
                    continue
                low, high, delta = starts[k], ends[k], offsets[k] - starts[k]
            end = min(stop, high & -8)
            a, b = (p + delta) >> 3, (end + delta) >> 3
            for i in range(a, b - 2):
                value = words[i]
                if lowest <= value < highest and value & 15 == 0:
                    n = _look(memory, blocks, i, a, b, p + ((i - a) << 3), page, kind, places, what, n)
            p = end
    return n


# -- containers --------------------------------------------------------------------------------------------------------
def _containers(words: I64s, starts: I64s, ends: I64s, offsets: I64s, region_starts: I64s, region_ends: I64s,
                region_slots: I64s, bits: I64s, rank: I32s, address: I64s, size: I64s, seen: U8s, places: I64s,
                what: U8s, first: I64, last: I64, budget: I64, page: I64, kind: U8s, rows: I32s):
    """Follow the headers [first, last) of `headers`, and give the blocks of those that close their `kind`; where it
    stopped, as it does when more than `budget` blocks were visited. `rows` (int32, as many as blocks) is scratch.

    Left to `rings` are headers of lists that begin a block: each node of a list looks like one.
    """
    memory = words, starts, ends, offsets
    blocks = region_starts, region_ends, region_slots, bits, rank, address, size, seen
    h = first
    while h < last and budget > 0:
        p, count, node, other = places[h], -1, TREE_NODE, 0
        if what[h] == LIST:
            node = LIST_NODE
            if _row(blocks, p) < 0:
                count = _list(memory, blocks, p, rows)
        elif what[h] == TREE:
            count = _tree(memory, blocks, p, rows)
        elif what[h] == HASH:
            count, node, other = _hash(memory, blocks, p, rows), HASH_NODE, BUCKETS
        elif what[h] == DEQUE:
            count, node, other = _deque(memory, blocks, p, page, rows), DEQUE_CHUNK, DEQUE_MAP
        budget -= abs(count) + 1
        h += 1
        for k in range(count):
            if kind[rows[k]] < node:
                kind[rows[k]] = node
        if count >= 0 and other != 0:
            row = _row(blocks, words[_at(memory, p, 8)])
            if kind[row] < other:
                kind[row] = other
    return h


@helper
def _alike(size, one, other):
    """Whether two blocks may be of one request: malloc does not cut 16 bytes off."""
    return abs(size[one] - size[other]) <= 16


@helper
def _list(memory, blocks, p, rows):
    """The nodes of a std::list: {next, prev, number of nodes}, a ring of {next, prev, value}. When it is none: -1, less
    the nodes visited; so below."""
    words, size = memory[0], blocks[6]
    at = _at(memory, p, 24)
    if at < 0:
        return -1
    x, last, n, before = words[at], words[at + 1], words[at + 2], p
    for k in range(n):
        row, at = _row(blocks, x), _at(memory, x, 16)
        if row < 0 or at < 0 or words[at + 1] != before or not _alike(size, row, rows[0] if k else row):
            return -1 - k
        rows[k] = row
        before, x = x, words[at]
    return n if x == p and before == last else -1 - n


@helper
def _tree(memory, blocks, p, rows):
    """The nodes of a std::map or set, in order. p is the address of {root, leftmost, rightmost, number of nodes}, which
    is behind the header's colour; a node is {colour, parent, left, right, value}."""
    words, address, size = memory[0], blocks[5], blocks[6]
    at = _at(memory, p, 32)
    if at < 0:
        return -1
    head, x, last, n, visited = p - 8, words[at + 1], words[at + 2], words[at + 3], 0
    steps = 4 * n + 256                              # a red-black tree is walked in fewer
    while x != head:
        row, at = _row(blocks, x), _at(memory, x, 32)
        if visited == n or row < 0 or at < 0 or words[at] & 0xffffffff > 1 or \
                not _alike(size, row, rows[0] if visited else row):
            return -1 - visited
        rows[visited] = row
        visited += 1
        before = x
        if words[at + 3] != 0:                       # down to the right, then all the way to the left
            back, x = x, words[at + 3]
            while x != 0 and steps > 0:
                at = _at(memory, x, 32)
                if at < 0 or words[at + 1] != back:
                    return -1 - visited
                back, x = x, words[at + 2]
                steps -= 1
            x = back
        else:                                        # up, as long as it is from the right
            x = words[at + 1]
            while x != head and steps > 0:
                at = _at(memory, x, 32)
                if at < 0:
                    return -1 - visited
                if words[at + 3] != before:
                    break
                before, x = x, words[at + 1]
                steps -= 1
        if steps <= 0:
            return -1 - visited
    return n if visited == n and address[rows[n - 1]] == last else -1 - visited


@helper
def _hash(memory, blocks, p, rows):
    """The nodes of a std::unordered_map or set: {buckets, number of buckets, first node, number of nodes, load, when to
    grow}. Each node leads to the next one; one bucket, that of the first node, to the header."""
    words, size = memory[0], blocks[6]
    at = _at(memory, p, 48)
    if at < 0:
        return -1
    buckets, number, x, n, leads = words[at], words[at + 1], words[at + 2], words[at + 3], p + 16
    for k in range(n):
        row, at = _row(blocks, x), _at(memory, x, 8)
        if row < 0 or at < 0 or not _alike(size, row, rows[0] if k else row):
            return -1 - k
        rows[k] = row
        x = words[at]
    at = _at(memory, buckets, 8 * number)
    if x != 0 or at < 0:
        return -1 - n
    for k in range(number):
        if n == 0 and words[at + k] != 0:
            return -1
        if n > 0 and words[at + k] == leads:
            return n
    return n if n == 0 else -1 - n


@helper
def _deque(memory, blocks, p, page, rows):
    """The chunks of a std::deque: {map, its length, first, last}, the latter two iterators {place, begin and end of its
    chunk, where the map has that}."""
    words = memory[0]
    at = _at(memory, p, 80)
    if at < 0:
        return -1
    begin, end, one, two = words[at + 3], words[at + 4], words[at + 5], words[at + 9]
    width = end - begin
    if width <= 0 or (two - one) & 7 or (one - words[at]) & 7 or words[at + 8] - words[at + 7] != width or \
            not begin <= words[at + 2] < end or not words[at + 7] <= words[at + 6] < words[at + 8]:
        return -1
    chunks, last, count = _at(memory, one, two - one + 8), words[at + 7], ((two - one) >> 3) + 1
    if chunks < 0 or count > len(rows) or words[chunks] != begin or words[chunks + count - 1] != last:
        return -1
    for k in range(count):
        row = _row(blocks, words[chunks + k])
        if row < 0 or not _fits(memory, blocks, row, width, page):
            return -1 - k
        rows[k] = row
    return count


def _rings(words: I64s, starts: I64s, ends: I64s, offsets: I64s, region_starts: I64s, region_ends: I64s,
           region_slots: I64s, bits: I64s, rank: I32s, address: I64s, size: I64s, seen: U8s, places: I64s, what: U8s,
           first: I64, last: I64, budget: I64, kind: U8s, tried: U8s, rows: I32s):
    """Follow those headers [first, last) of lists that begin a block, as `containers` does others.

    Of a ring of blocks the one that holds the number of the others is the header, if only one does. `tried` (uint8,
    zeroed) is set for all that were visited: where those lead is known.
    """
    memory = words, starts, ends, offsets
    blocks = region_starts, region_ends, region_slots, bits, rank, address, size, seen
    h = first
    while h < last and budget > 0:
        p, count = places[h], 0
        x, row = p, _row(blocks, p) if what[h] == LIST else -1
        h += 1
        while row >= 0 and tried[row] == 0 and kind[row] != LIST_NODE:
            tried[row] = 1
            rows[count] = row
            count += 1
            at = _at(memory, x, 16)
            following = words[at] if at >= 0 else 0
            at = _at(memory, following, 16)
            row = _row(blocks, following) if at >= 0 and words[at + 1] == x else -1
            x = following
        budget -= count + 1
        if row < 0 or x != p or count < 2:
            continue
        header, candidates = -1, 0
        for k in range(count):
            at = _at(memory, address[rows[k]], 24)
            if at >= 0 and words[at + 2] == count - 1:
                header = k
                candidates += 1
        good = candidates == 1
        node = rows[1 if header == 0 else 0]
        for k in range(count):
            good = good and (k == header or _alike(size, rows[k], node))
        for k in range(count):
            part = LIST_HEADER if k == header else LIST_NODE
            if good and kind[rows[k]] < part:
                kind[rows[k]] = part
    return h


containers = kernel(in_python(_containers))(_containers)
rings = kernel(in_python(_rings))(_rings)


# -- links -------------------------------------------------------------------------------------------------------------
def _links_array(words, starts, ends, offsets, address, size, seen, kind, first, last, ends_too):
    if not len(starts):
        return
    rows = first + np.flatnonzero((seen[first:last] != NO_NODE) & (kind[first:last] == 0))
    at = _at_array(starts, ends, offsets, address[rows], 16)
    rows, at = rows[at >= 0], at[at >= 0]
    one, two = words[at], words[at + 1]
    if ends_too:
        neighbour = np.where(one == 0, two, one)
        other = _rows_array(address, seen, neighbour)
        place = _at_array(starts, ends, offsets, neighbour, 16)
        good = ((one == 0) != (two == 0)) & (other >= 0) & (place >= 0)
        good &= (kind[other] == LINK) & (size[other] == size[rows])
        good &= np.where(one == 0, words[place], words[place + 1]) == address[rows]
    else:
        good = (one > 0) & (two > 0) & (one & 7 == 0) & (two & 7 == 0) & (one != address[rows])
        for value, k in ((one, 1), (two, 0)):
            place = _at_array(starts, ends, offsets, np.where(good, value, 0), 16)
            good &= (place >= 0) & (words[place + k] == address[rows])
    kind[rows[good]] = LINK


@helper
def _row_among(address, user):
    """Row of the block that begins at `user`, without an index; -1: none does."""
    k = at_most(address, user) - 1
    return k if k >= 0 and address[k] == user else -1


@kernel(_links_array)
def links(words: I64s, starts: I64s, ends: I64s, offsets: I64s, address: I64s, size: I64s, seen: U8s, kind: U8s,
          first: I64, last: I64, ends_too: I64):
    """Give those of the blocks [first, last) that have no kind, and begin with two links of a doubly linked list, the
    kind LINK.

    What each link leads to must lead back. `ends_too`: instead those that end a list: one link is zero, the other leads
    to a LINK of the same size, and that one back.
    """
    memory = words, starts, ends, offsets
    for row in range(first, last):
        if seen[row] == NO_NODE or kind[row] != 0:
            continue
        p = address[row]
        at = _at(memory, p, 16)
        if at < 0:
            continue
        one, two = words[at], words[at + 1]
        if ends_too != 0:
            if (one == 0) != (two == 0):
                neighbour = two if one == 0 else one
                other, there = _row_among(address, neighbour), _at(memory, neighbour, 16)
                if other >= 0 and there >= 0 and kind[other] == LINK and size[other] == size[row] and \
                        words[there if one == 0 else there + 1] == p:
                    kind[row] = LINK
        elif one > 0 and two > 0 and one != p and one & 7 == 0 and two & 7 == 0:
            there = _at(memory, one, 16)
            if there >= 0 and words[there + 1] == p:
                there = _at(memory, two, 16)
                if there >= 0 and words[there] == p:
                    kind[row] = LINK
