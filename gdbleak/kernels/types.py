"""What malloc blocks are, as far as words tell: how each block begins, and which are part of a container of libstdc++.

All integers are int64 here (addresses of a process fit). `words`, `starts`, `ends`, `offsets`: the buffer and table of an
AddressSpace; the regions, `bits`, `rank`, `address` and `size` as in `owners`; `seen` (uint8): NO_NODE for rows to leave out.

A container is recognised by its header, wherever that lies: a word that points to the beginning of a block, with what the
header holds beside it. The block must be as large as the header says, or every node must lead to the next and back and the
last one to the header, and their number be the header's own count.
"""
from __future__ import annotations

import numpy as np

from . import I32s, I64, I64s, U8s, helper, in_python, kernel
from .pieces import piece
from .pointers import NO_NODE

# How a block begins. FOUND + k: with the k-th of the words that point into modules.
NOT_IN_USE, ABSENT, OTHER, TEXT, ZEROS, SECOND, INTEGER, FOUND = -1, 0, 1, 2, 3, 4, 5, 6
# What part of a container a block is; of two findings about one block the higher stands.
LINK, VECTOR, STRING, BUCKETS, HASH_NODE, DEQUE_MAP, DEQUE_CHUNK, LIST_NODE, TREE_NODE = range(1, 10)
# What a header may be of.
LIST, TREE, HASH, DEQUE = 1, 2, 3, 4

TEXT_WORDS = 8                     # of a block must be text for it to be text
ZERO_WORDS = 1 << 17               # of a block must be zeros for it to be zeros
_ASN1_INTEGERS = (2, 0x102)        # V_ASN1_INTEGER, V_ASN1_NEG_INTEGER
_LONGEST_INTEGER = 64
_MOST = 1 << 46                    # bytes of a container
_LEAST_STRING = 16                 # capacity; shorter ones are kept in the object
_LEAST_MAP = 8                     # of a deque
_LOADS = (0x3d800000, 0x42800000)  # 1/16 and 64 as floats: the max_load_factor of a hash table
_HASHING = -7046029254386353131    # 2^64 / golden ratio
_HIGHS, _ONES, _BLANKS = (np.uint64(byte * 0x0101010101010101) for byte in (0x80, 1, 0x20))
_NONE = np.uint64(0)


# -- how a block begins ------------------------------------------------------------------------------------------------
@helper
def _in(starts, ends, value):
    """Whether a sorted stretch holds `value`."""
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) >> 1
        if starts[middle] <= value:
            low = middle + 1
        else:
            high = middle
    return low > 0 and value < ends[low - 1]


@helper
def _is_text(words, at, count, short):
    """Whether the block is text up to a NUL or to its `count`-th word; of fewer than 8 characters only in a `short` one."""
    length = 0
    for k in range(count):
        word = words[at + k]
        x = np.uint64(word)
        if ((x | (x + _ONES) | ((x - _BLANKS) & ~x)) & _HIGHS) != _NONE:   # a byte that is none of 0x20 to 0x7e
            for shift in range(0, 64, 8):
                byte = (word >> shift) & 255
                if byte == 0:
                    return length >= 8 or (short and length >= 4)
                if (byte < 32 or byte > 126) and byte != 9 and byte != 10 and byte != 13:
                    return False
                length += 1
        else:
            length += 8
    return True


def _in_array(starts, ends, values):
    k = np.searchsorted(starts, values, "right") - 1
    return (k >= 0) & (values < ends[np.maximum(k, 0)])


def _text_array(words, at, count, short):
    """`_is_text` of many."""
    found = np.zeros(len(at), bool)
    maybe = np.flatnonzero(_printable(words[at] & 255))
    for k in range(0, len(maybe), 1 << 16):
        part = maybe[k:k + (1 << 16)]
        columns = np.minimum(np.arange(TEXT_WORDS), count[part, None] - 1)
        bytes_ = words[at[part, None] + columns].view(np.uint8).reshape(len(part), -1)
        bad = ~_printable(bytes_)
        length = np.where(bad.any(axis=1), bad.argmax(axis=1), 8 * TEXT_WORDS)
        whole = length >= 8 * count[part]
        ended = ~whole & (bytes_[np.arange(len(part)), np.minimum(length, 8 * TEXT_WORDS - 1)] == 0)
        found[part] = whole | (ended & ((length >= 8) | (short[part] & (length >= 4))))
    return found


def _printable(bytes_):
    return ((bytes_ >= 32) & (bytes_ <= 126)) | (bytes_ == 9) | (bytes_ == 10) | (bytes_ == 13)


def _heads_array(words, starts, ends, offsets, module_starts, module_ends, address, size, seen, code, slots, found, n):
    code[:] = NOT_IN_USE
    rows = np.flatnonzero(seen != NO_NODE)
    k = np.maximum(np.searchsorted(starts, address[rows], "right") - 1, 0) if len(starts) else np.zeros(len(rows), np.int64)
    present = (address[rows] >= starts[k]) & (address[rows] + 16 <= ends[k]) if len(starts) else np.zeros(len(rows), bool)
    code[rows] = np.where(present, OTHER, ABSENT)
    rows, k = rows[present], k[present]
    at = (address[rows] - starts[k] + offsets[k]) >> 3
    behind = address[rows] + size[rows] - 16
    count = (np.minimum(behind, ends[k]) - address[rows]) >> 3
    one, two = words[at], words[at + 1]
    named = _in_array(module_starts, module_ends, one)
    left = ~named
    text = left & _text_array(words, at, np.minimum(count, TEXT_WORDS), size[rows] == 32)
    left &= ~text
    zeros = left & (one == 0) & (two == 0) & (behind <= ends[k])
    for j in np.flatnonzero(zeros):
        zeros[j] = not words[at[j]:at[j] + min(count[j], ZERO_WORDS)].any()
    left &= ~zeros
    length = two & 0xffffffff
    integer = left & np.isin(two >> 32, _ASN1_INTEGERS) & (length <= _LONGEST_INTEGER)
    second = left & ~integer & _in_array(module_starts, module_ends, two)
    for mask, value in ((text, TEXT), (zeros, ZEROS), (integer, INTEGER), (second, SECOND)):
        code[rows[mask]] = value
    if named.any():
        values, first, number = np.unique(one[named], return_index=True, return_inverse=True)
        numbers = {value: k for k, value in enumerate(found[:n].tolist())}
        for value in values[np.argsort(first)].tolist():
            if value not in numbers and n < len(found):
                numbers[value] = n
                found[n] = value
                n += 1
        codes = [FOUND + numbers[value] if value in numbers else OTHER for value in values.tolist()]
        code[rows[named]] = np.array(codes, np.int32)[number]
    return n


@kernel(_heads_array)
def heads(words: I64s, starts: I64s, ends: I64s, offsets: I64s, module_starts: I64s, module_ends: I64s, address: I64s,
          size: I64s, seen: U8s, code: I32s, slots: I32s, found: I64s, n: I64):
    """Tell how each block begins, in `code`; how many words `found` holds then (at first `n`).

    FOUND + k: its first word points into a module and is found[k]; when `found` is full, others are OTHER. TEXT, ZEROS;
    INTEGER: its second word is the length and type of an ASN1_INTEGER; SECOND: its second word points into a module; ABSENT:
    the words are not there. `slots`: a hash table over `found`, a power of two, -1 at first. There must be a module.
    """
    low = high = delta = 0
    lowest, highest, mask = module_starts[0], module_ends[len(module_ends) - 1], len(slots) - 1
    for row in range(len(address)):
        if seen[row] == NO_NODE:
            code[row] = NOT_IN_USE
            continue
        p = address[row]
        if p < low or p + 16 > high:
            k = piece(starts, ends, p)
            if k < 0 or p + 16 > ends[k]:
                code[row] = ABSENT
                continue
            low, high, delta = starts[k], ends[k], offsets[k] - starts[k]
        at = (p + delta) >> 3
        behind = p + size[row] - 16
        count = (min(behind, high) - p) >> 3
        one, two = words[at], words[at + 1]
        code[row] = OTHER
        if lowest <= one < highest and _in(module_starts, module_ends, one):
            slot = ((one * _HASHING) >> 40) & mask
            while slots[slot] >= 0 and found[slots[slot]] != one:
                slot = (slot + 1) & mask
            if slots[slot] < 0 and n < len(found):
                slots[slot] = n
                found[n] = one
                n += 1
            if slots[slot] >= 0:
                code[row] = FOUND + slots[slot]
        elif _is_text(words, at, min(count, TEXT_WORDS), size[row] == 32):
            code[row] = TEXT
        elif one == 0 and two == 0 and behind <= high:
            k, end = 2, min(count, ZERO_WORDS)
            while k < end and words[at + k] == 0:
                k += 1
            if k == end:
                code[row] = ZEROS
        elif (two >> 32 == 2 or two >> 32 == 0x102) and two & 0xffffffff <= _LONGEST_INTEGER:
            code[row] = INTEGER
        elif lowest <= two < highest and _in(module_starts, module_ends, two):
            code[row] = SECOND
    return n


# -- blocks by address -------------------------------------------------------------------------------------------------
@helper
def _at(starts, ends, offsets, address, size):
    """Index of the word at `address` when `size` bytes are there, else -1."""
    if address & 7 or address <= 0:
        return -1
    k = piece(starts, ends, address)
    if k < 0 or address + size > ends[k]:
        return -1
    return (offsets[k] + address - starts[k]) >> 3


@helper
def _row(region_starts, region_ends, region_slots, bits, rank, address, seen, user):
    """Row of the block in use that begins at `user`, or -1."""
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
def _fits(words, starts, ends, offsets, address, size, row, request, page):
    """Whether the block is what malloc(request) returns: the chunk is as small as can be, or 16 bytes larger (what malloc
    does not cut off), or of its own mapping."""
    need = max((request + 23) & -16, 32)
    if size[row] == need or size[row] == need + 16:
        return True
    if size[row] & 4095 or not request + 16 <= size[row] < request + 32 + page:
        return False
    at = _at(starts, ends, offsets, address[row] - 8, 8)
    return at >= 0 and words[at] & 2 != 0


# -- headers -----------------------------------------------------------------------------------------------------------
@helper
def _byte(words, starts, ends, offsets, address):
    at = _at(starts, ends, offsets, address & -8, 8)
    return -1 if at < 0 else (words[at] >> ((address & 7) << 3)) & 255


@helper
def _look(words, starts, ends, offsets, region_starts, region_ends, region_slots, bits, rank, address, size, seen, i, a, b,
          p, page, kind, places, what, n):
    """Word i, at address p, points where a block may begin: mark that block if it is a buffer of a vector or string whose
    header begins here, and note what else the header may be of. The words a to b belong together."""
    v, low, high = words[i], region_starts[0], region_ends[len(region_ends) - 1]
    one, two = words[i + 1], words[i + 2]
    vector = v <= one <= two and v < two < v + _MOST
    string = 0 <= one <= two and _LEAST_STRING <= two < _MOST
    chain = low <= one < high and one & 15 == 0
    list_ = chain and 1 <= two <= len(address)
    tree = hash_ = deque = False
    if i + 3 < b:
        three = words[i + 3]
        tree = i > a and words[i - 1] & 0xffffffff == 0 and chain and 1 <= three <= len(address)
        if i + 5 < b:
            hash_ = 2 <= one < _MOST and 0 <= three <= len(address) and _LOADS[0] <= words[i + 4] & 0xffffffff <= _LOADS[1]
        if i + 9 < b:
            deque = _LEAST_MAP <= one < _MOST and v <= words[i + 5] <= words[i + 9] < v + 8 * one
    if not (vector or string or list_ or tree or hash_ or deque):
        return n
    row = _row(region_starts, region_ends, region_slots, bits, rank, address, seen, v)
    if row < 0:
        return n
    if vector and kind[row] < VECTOR and _fits(words, starts, ends, offsets, address, size, row, two - v, page) and \
            not ((i >= a + 3 and words[i - 3] == v) or (i + 3 < b and words[i + 3] == v)):
        kind[row] = VECTOR                           # a stream buffer, FILE too, has such pointers in threes
    if string and kind[row] < STRING and _fits(words, starts, ends, offsets, address, size, row, two + 1, page) and \
            _byte(words, starts, ends, offsets, v + one) == 0:
        kind[row] = STRING
    if list_ or tree:
        at = _at(starts, ends, offsets, v, 16)
        if at >= 0 and list_ and words[at + 1] == p:
            places[n], what[n] = p, LIST
            n += 1
        if at >= 0 and tree and words[at + 1] == p - 8:
            places[n], what[n] = p, TREE
            n += 1
    if hash_ and _fits(words, starts, ends, offsets, address, size, row, 8 * one, page):
        places[n], what[n] = p, HASH
        n += 1
    if deque and _fits(words, starts, ends, offsets, address, size, row, 8 * one, page):
        places[n], what[n] = p, DEQUE
        n += 1
    return n


def _fits_array(words, starts, ends, offsets, address, size, row, request, page):
    need, size = np.maximum((request + 23) & -16, 32), size[row]
    fits = (size == need) | (size == need + 16)
    mapped = ~fits & (size & 4095 == 0) & (request + 16 <= size) & (size < request + 32 + page)
    at = _at_array(starts, ends, offsets, address[row[mapped]] - 8, 8)
    fits[mapped] = (at >= 0) & (words[at] & 2 != 0)
    return fits


def _at_array(starts, ends, offsets, address, size):
    k = np.maximum(np.searchsorted(starts, address, "right") - 1, 0)
    there = (address & 7 == 0) & (address >= starts[k]) & (address + size <= ends[k])
    return np.where(there, (offsets[k] + address - starts[k]) >> 3, -1)


def _rows_array(address, seen, values):
    row = np.minimum(np.searchsorted(address, values), len(address) - 1)
    return np.where((address[row] == values) & (seen[row] != NO_NODE), row, -1)


def _span_words(starts, ends, offsets, span_starts, span_ends):
    """(first, behind, delta) of the words that are there of the spans, in their order; an address is 8 * word + delta."""
    found = []
    k = np.maximum(np.searchsorted(starts, span_starts, "right") - 1, 0)
    whole = (span_starts >= starts[k]) & (span_ends <= ends[k])
    broken = np.flatnonzero(~whole)
    delta = starts[k] - offsets[k]
    rows = np.stack([(span_starts - delta) >> 3, (span_ends - delta) >> 3, delta], axis=1)
    done = 0
    for s in broken.tolist():
        found.append(rows[done:s])
        for j in range(int(k[s]), len(starts)):
            low, high = max(int(starts[j]) + 7 & -8, int(span_starts[s])), min(int(ends[j]) & -8, int(span_ends[s]))
            if starts[j] >= span_ends[s]:
                break
            if low < high:
                delta = int(starts[j]) - int(offsets[j])
                found.append(np.array([[(low - delta) >> 3, (high - delta) >> 3, delta]]))
        done = s + 1
    return np.concatenate([*found, rows[done:]])


def _headers_array(words, starts, ends, offsets, region_starts, region_ends, region_slots, bits, rank, address, size, seen,
                   span_starts, span_ends, page, kind, places, what, n):
    if not len(starts) or not len(span_starts):
        return n
    a, b, delta = (np.ascontiguousarray(column) for column in _span_words(starts, ends, offsets, span_starts, span_ends).T)
    counts = np.maximum(b - a, 0)
    low, high = region_starts[0], region_ends[-1]
    for k in range(0, len(a), 1 << 14):
        part = slice(k, k + (1 << 14))
        of = np.repeat(np.arange(len(a))[part], counts[part])
        i = np.arange(len(of)) + np.repeat(a[part] - np.cumsum(counts[part]) + counts[part], counts[part])
        v = words[i]
        hit = (v >= low) & (v < high) & (v & 15 == 0) & (i + 2 < b[of])
        i, of, v = i[hit], of[hit], v[hit]
        n = _look_array(words, (starts, ends, offsets), address, size, seen, i, a[of], b[of], 8 * i + delta[of], v, low, high,
                        page, kind, places, what, n)
    return n


def _look_array(words, table, address, size, seen, i, a, b, p, v, low, high, page, kind, places, what, n):
    def beside(k):
        """Word i + k, and whether it belongs there."""
        inside = (i + k >= a) & (i + k < b)
        return words[np.where(inside, i + k, i)], inside
    one, two = words[i + 1], words[i + 2]
    vector = (v <= one) & (one <= two) & (v < two) & (two < v + _MOST)
    string = (0 <= one) & (one <= two) & (_LEAST_STRING <= two) & (two < _MOST)
    chain = (low <= one) & (one < high) & (one & 15 == 0)
    list_ = chain & (1 <= two) & (two <= len(address))
    three, inside = beside(3)
    before, has_before = beside(-1)
    tree = inside & has_before & (before & 0xffffffff == 0) & chain & (1 <= three) & (three <= len(address))
    load, _ = beside(4)
    _, inside = beside(5)
    load = load & 0xffffffff
    hash_ = inside & (2 <= one) & (one < _MOST) & (0 <= three) & (three <= len(address)) & (_LOADS[0] <= load) & \
        (load <= _LOADS[1])
    begin, _ = beside(5)
    end, inside = beside(9)
    deque = inside & (_LEAST_MAP <= one) & (one < _MOST)
    deque &= (v <= begin) & (begin <= end) & (end < v + 8 * np.where(deque, one, 0))
    row = np.full(len(i), -1, np.int64)
    any_ = vector | string | list_ | tree | hash_ | deque
    row[any_] = _rows_array(address, seen, v[any_])
    ok = row >= 0
    for mask, value in ((vector, VECTOR), (string, STRING)):
        at = np.flatnonzero(mask & ok)
        at = at[_fits_array(words, *table, address, size, row[at], two[at] - v[at] if value == VECTOR else two[at] + 1, page)]
        if value == VECTOR:
            threes = np.zeros(len(i), bool)
            for k in (-3, 3):
                word, inside = beside(k)
                threes |= inside & (word == v)
            at = at[~threes[at]]
        else:
            last = v[at] + one[at]
            place = _at_array(*table, last & -8, 8)
            at = at[(place >= 0) & ((words[place] >> ((last & 7) << 3)) & 255 == 0)]
        kind[row[at]] = np.maximum(kind[row[at]], value)
    place = _at_array(*table, v, 16)
    back = np.where(place >= 0, words[place + 1], 0)
    fits = ok & (hash_ | deque)
    fits[fits] = _fits_array(words, *table, address, size, row[fits], 8 * one[fits], page)
    chosen = np.stack([ok & list_ & (place >= 0) & (back == p), ok & tree & (place >= 0) & (back == p - 8), fits & hash_,
                       fits & deque], axis=1)
    at, which = np.nonzero(chosen)
    places[n:n + len(at)] = p[at]
    what[n:n + len(at)] = which + 1
    return n + len(at)


@kernel(_headers_array)
def headers(words: I64s, starts: I64s, ends: I64s, offsets: I64s, region_starts: I64s, region_ends: I64s,
            region_slots: I64s, bits: I64s, rank: I32s, address: I64s, size: I64s, seen: U8s, span_starts: I64s,
            span_ends: I64s, page: I64, kind: U8s, places: I64s, what: U8s, n: I64):
    """Look for headers of containers in spans of memory, each a structure of its own (8-aligned; a block, a module's data).

    Blocks that are the buffer of a vector or string get their `kind`. What looks like another header is appended to
    `places` (its address) and `what` (LIST, TREE, HASH, DEQUE), for `containers` to try; how many there are then. Both must
    have room for all words.
    """
    low_all, high_all = region_starts[0], region_ends[len(region_ends) - 1]
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
                if low_all <= value < high_all and value & 15 == 0:
                    n = _look(words, starts, ends, offsets, region_starts, region_ends, region_slots, bits, rank, address,
                              size, seen, i, a, b, p + ((i - a) << 3), page, kind, places, what, n)
            p = end
    return n


@helper
def _next(starts, address):
    """Where the first word of the piece behind `address` is; far away when there is none."""
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) >> 1
        if starts[middle] <= address:
            low = middle + 1
        else:
            high = middle
    return (starts[low] + 7) & -8 if low < len(starts) else 1 << 62


# -- containers --------------------------------------------------------------------------------------------------------
def _containers(words: I64s, starts: I64s, ends: I64s, offsets: I64s, region_starts: I64s, region_ends: I64s,
                region_slots: I64s, bits: I64s, rank: I32s, address: I64s, size: I64s, seen: U8s, places: I64s, what: U8s,
                first: I64, last: I64, budget: I64, page: I64, kind: U8s, rows: I32s):
    """Follow the headers [first, last) of `headers`, and give the blocks of those that close their `kind`; where it stopped,
    when more than `budget` blocks were visited. `rows` (int32, as many as there are blocks) is scratch.

    Left to `rings` are headers of lists that begin a block: each node of a list looks like one.
    """
    h = first
    while h < last and budget > 0:
        p, count, node, other = places[h], -1, TREE_NODE, 0
        if what[h] == LIST:
            node = LIST_NODE
            if _row(region_starts, region_ends, region_slots, bits, rank, address, seen, p) < 0:
                count = _list(words, starts, ends, offsets, region_starts, region_ends, region_slots, bits, rank, address, size,
                              seen, p, rows)
        elif what[h] == TREE:
            count = _tree(words, starts, ends, offsets, region_starts, region_ends, region_slots, bits, rank, address, size,
                          seen, p, rows)
        elif what[h] == HASH:
            count, node, other = _hash(words, starts, ends, offsets, region_starts, region_ends, region_slots, bits, rank,
                                       address, size, seen, p, rows), HASH_NODE, BUCKETS
        elif what[h] == DEQUE:
            count, node, other = _deque(words, starts, ends, offsets, region_starts, region_ends, region_slots, bits, rank,
                                        address, size, seen, p, page, rows), DEQUE_CHUNK, DEQUE_MAP
        budget -= abs(count) + 1
        h += 1
        for k in range(count):
            if kind[rows[k]] < node:
                kind[rows[k]] = node
        if count >= 0 and other != 0:
            row = _row(region_starts, region_ends, region_slots, bits, rank, address, seen,
                       words[_at(starts, ends, offsets, p, 8)])
            if kind[row] < other:
                kind[row] = other
    return h


@helper
def _list(words, starts, ends, offsets, region_starts, region_ends, region_slots, bits, rank, address, size, seen, p, rows):
    """The nodes of a std::list: {next, prev, number of nodes}, a ring of {next, prev, value}. -1 - those visited: it is
    none."""
    at = _at(starts, ends, offsets, p, 24)
    if at < 0:
        return -1
    x, last, n = words[at], words[at + 1], words[at + 2]
    before = p
    for k in range(n):
        row = _row(region_starts, region_ends, region_slots, bits, rank, address, seen, x)
        at = _at(starts, ends, offsets, x, 16)
        if row < 0 or at < 0 or words[at + 1] != before or abs(size[row] - size[rows[0] if k else row]) > 16:
            return -1 - k
        rows[k] = row
        before, x = x, words[at]
    return n if x == p and before == last else -1 - n


def _rings(words: I64s, starts: I64s, ends: I64s, offsets: I64s, region_starts: I64s, region_ends: I64s, region_slots: I64s,
           bits: I64s, rank: I32s, address: I64s, size: I64s, seen: U8s, places: I64s, what: U8s, first: I64, last: I64,
           budget: I64, kind: U8s, tried: U8s, rows: I32s):
    """Follow those headers [first, last) of lists that begin a block, as `containers` does others.

    Of a ring of blocks the one that holds the number of the others is the header, when only one does. `tried` (uint8, zeroed)
    is set for all that were visited: what leads to them has been followed.
    """
    h = first
    while h < last and budget > 0:
        p, count = places[h], 0
        row = _row(region_starts, region_ends, region_slots, bits, rank, address, seen, p) if what[h] == LIST else -1
        h += 1
        x = p
        while row >= 0 and tried[row] == 0 and kind[row] != LIST_NODE:
            tried[row] = 1
            rows[count] = row
            count += 1
            before, x = x, words[_at(starts, ends, offsets, x, 16)]
            row = _row(region_starts, region_ends, region_slots, bits, rank, address, seen, x)
            at = _at(starts, ends, offsets, x, 16)
            if at < 0 or words[at + 1] != before:
                row = -1
        budget -= count + 1
        if row < 0 or x != p or count < 2:
            continue
        header = found = -1
        for k in range(count):
            at = _at(starts, ends, offsets, address[rows[k]], 24)
            if at >= 0 and words[at + 2] == count - 1:
                found += 1
                header = k
        node = rows[1 if header == 0 else 0]
        good = found == 0
        for k in range(count):
            good = good and (k == header or abs(size[rows[k]] - size[node]) <= 16)
        for k in range(count):
            if good and k != header and kind[rows[k]] < LIST_NODE:
                kind[rows[k]] = LIST_NODE
    return h


@helper
def _tree(words, starts, ends, offsets, region_starts, region_ends, region_slots, bits, rank, address, size, seen, p, rows):
    """The nodes of a std::map or set, in order; p is the address of {root, leftmost, rightmost, number of nodes}, behind
    the header's colour; a node is {colour, parent, left, right, value}. -1 - those visited: it is
    none."""
    at = _at(starts, ends, offsets, p, 32)
    if at < 0:
        return -1
    head, x, last, n, visited = p - 8, words[at + 1], words[at + 2], words[at + 3], 0
    steps = 4 * n + 256                              # a red-black tree is walked in fewer
    while x != head:
        row = _row(region_starts, region_ends, region_slots, bits, rank, address, seen, x)
        at = _at(starts, ends, offsets, x, 32)
        if visited == n or row < 0 or at < 0 or words[at] & 0xffffffff > 1 or \
                abs(size[row] - size[rows[0] if visited else row]) > 16:
            return -1 - visited
        rows[visited] = row
        visited += 1
        before = x
        if words[at + 3] != 0:
            x = words[at + 3]
            back = before
            while x != 0 and steps > 0:
                at = _at(starts, ends, offsets, x, 32)
                if at < 0 or words[at + 1] != back:
                    return -1 - visited
                back, x = x, words[at + 2]
                steps -= 1
            x = back
        else:
            x = words[at + 1]
            while x != head and steps > 0:
                at = _at(starts, ends, offsets, x, 32)
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
def _hash(words, starts, ends, offsets, region_starts, region_ends, region_slots, bits, rank, address, size, seen, p, rows):
    """The nodes of a std::unordered_map or set: {buckets, number of buckets, first node, number of nodes, load, when to
    grow}; each node leads to the next one, and the bucket of the first to the header. -1 - those
    visited: it is none."""
    at = _at(starts, ends, offsets, p, 48)
    if at < 0:
        return -1
    buckets, number, x, n, leads = words[at], words[at + 1], words[at + 2], words[at + 3], p + 16
    for k in range(n):
        row = _row(region_starts, region_ends, region_slots, bits, rank, address, seen, x)
        at = _at(starts, ends, offsets, x, 8)
        if row < 0 or at < 0 or abs(size[row] - size[rows[0] if k else row]) > 16:
            return -1 - k
        rows[k] = row
        x = words[at]
    at = _at(starts, ends, offsets, buckets, 8 * number)
    if x != 0 or at < 0:
        return -1 - n
    for k in range(number):
        if n == 0 and words[at + k] != 0:
            return -1
        if n > 0 and words[at + k] == leads:
            return n
    return n if n == 0 else -1 - n


@helper
def _deque(words, starts, ends, offsets, region_starts, region_ends, region_slots, bits, rank, address, size, seen, p, page,
           rows):
    """The chunks of a std::deque: {map, its length, first, last}, the latter two iterators {place, begin and end of its
    chunk, its place in the map}. -1: it is none."""
    at = _at(starts, ends, offsets, p, 80)
    if at < 0:
        return -1
    begin, end, one, two = words[at + 3], words[at + 4], words[at + 5], words[at + 9]
    width = end - begin
    if width <= 0 or (two - one) & 7 or (one - words[at]) & 7 or words[at + 8] - words[at + 7] != width or \
            not begin <= words[at + 2] < end or not words[at + 7] <= words[at + 6] < words[at + 8]:
        return -1
    chunks, last, count = _at(starts, ends, offsets, one, two - one + 8), words[at + 7], ((two - one) >> 3) + 1
    if chunks < 0 or count > len(rows) or words[chunks] != begin or words[chunks + count - 1] != last:
        return -1
    for k in range(count):
        row = _row(region_starts, region_ends, region_slots, bits, rank, address, seen, words[chunks + k])
        if row < 0 or not _fits(words, starts, ends, offsets, address, size, row, width, page):
            return -1
        rows[k] = row
    return count


containers = kernel(in_python(_containers))(_containers)
rings = kernel(in_python(_rings))(_rings)


# -- links -------------------------------------------------------------------------------------------------------------
def _links_array(words, starts, ends, offsets, address, size, seen, kind, first, last, ends_too):
    rows = first + np.flatnonzero((seen[first:last] != NO_NODE) & (kind[first:last] == 0))
    at = _at_array(starts, ends, offsets, address[rows], 16) if len(starts) else np.full(len(rows), -1)
    rows, at = rows[at >= 0], at[at >= 0]
    one, two = words[at], words[at + 1]
    if ends_too:
        neighbour, leads = np.where(one == 0, two, one), (one == 0) != (two == 0)
        other = _rows_array(address, seen, neighbour)
        place = _at_array(starts, ends, offsets, neighbour, 16)
        good = leads & (other >= 0) & (place >= 0)
        good &= (kind[other] == LINK) & (size[other] == size[rows]) & \
            (np.where(one == 0, words[place], words[place + 1]) == address[rows])
    else:
        good = (one > 0) & (two > 0) & (one & 7 == 0) & (two & 7 == 0) & (one != address[rows])
        for value, k in ((one, 1), (two, 0)):
            place = _at_array(starts, ends, offsets, np.where(good, value, 0), 16)
            good &= place >= 0
            good &= words[place + k] == address[rows]
    kind[rows[good]] = LINK


@kernel(_links_array)
def links(words: I64s, starts: I64s, ends: I64s, offsets: I64s, address: I64s, size: I64s, seen: U8s, kind: U8s, first: I64,
          last: I64, ends_too: I64):
    """Give blocks [first, last) without a kind that begin with two links of a doubly linked list the kind LINK.

    What each link leads to must lead back. `ends_too`: instead those that end a list: one link is zero, the other leads to a
    LINK of the same size and back.
    """
    for row in range(first, last):
        if seen[row] == NO_NODE or kind[row] != 0:
            continue
        p = address[row]
        at = _at(starts, ends, offsets, p, 16)
        if at < 0:
            continue
        one, two = words[at], words[at + 1]
        if ends_too != 0:
            if (one == 0) == (two == 0):
                continue
            neighbour = two if one == 0 else one
            low, high = 0, len(address)
            while low < high:
                middle = (low + high) >> 1
                if address[middle] < neighbour:
                    low = middle + 1
                else:
                    high = middle
            if low == len(address) or address[low] != neighbour or kind[low] != LINK or size[low] != size[row]:
                continue
            there = _at(starts, ends, offsets, neighbour, 16)
            if there >= 0 and words[there if one == 0 else there + 1] == p:
                kind[row] = LINK
        elif one > 0 and two > 0 and one != p and one & 7 == 0 and two & 7 == 0:
            there = _at(starts, ends, offsets, one, 16)
            if there >= 0 and words[there + 1] == p:
                there = _at(starts, ends, offsets, two, 16)
                if there >= 0 and words[there] == p:
                    kind[row] = LINK
