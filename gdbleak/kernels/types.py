"""How malloc blocks begin: with a pointer into a module, with text, with zeros.

All integers are int64 here (addresses of a process fit). `words`, `starts`, `ends`, `offsets`: the buffer and table of
an AddressSpace; `address`, `size`: user address and chunk size of the blocks; `seen` (uint8): NO_NODE for those to
leave out.
"""
from __future__ import annotations

import numpy as np

from . import I32s, I64, I64s, U8s, helper, kernel
from .pieces import at_most, piece
from .pointers import NO_NODE

# How a block begins. FOUND + k: with the k-th of the words that point into modules.
NOT_IN_USE, ABSENT, OTHER, TEXT, ZEROS, SECOND, INTEGER, FOUND = -1, 0, 1, 2, 3, 4, 5, 6

TEXT_WORDS = 8                     # of a block must be text for it to be text
ZERO_WORDS = 1 << 17               # of a block must be zeros for it to be zeros
_FEW_WORDS = 16                    # so many are looked at of many blocks at once
_ASN1_INTEGERS = (2, 0x102)        # V_ASN1_INTEGER, V_ASN1_NEG_INTEGER
_LONGEST_INTEGER = 64
_HASHING = -7046029254386353131    # 2^64 / golden ratio
_HIGHS, _ONES, _BLANKS = (np.uint64(byte * 0x0101010101010101) for byte in (0x80, 1, 0x20))
_NONE = np.uint64(0)


@helper
def _in(starts, ends, value):
    """Whether a sorted stretch holds `value`."""
    k = at_most(starts, value) - 1
    return k >= 0 and value < ends[k]


@helper
def _is_text(words, at, count, short):
    """Whether the block is text up to a NUL or to its `count`-th word. Fewer than 8 characters do in a `short` one."""
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
    """`_in` of many."""
    k = np.searchsorted(starts, values, "right") - 1
    return (k >= 0) & (values < ends[np.maximum(k, 0)])


def _printable(codes):
    return ((codes >= 32) & (codes <= 126)) | (codes == 9) | (codes == 10) | (codes == 13)


def _text_array(words, at, count, short):
    """`_is_text` of many."""
    found = np.zeros(len(at), bool)
    maybe = np.flatnonzero(_printable(words[at] & 255))
    for k in range(0, len(maybe), 1 << 16):
        part = maybe[k:k + (1 << 16)]
        columns = np.minimum(np.arange(TEXT_WORDS), count[part, None] - 1)
        codes = words[at[part, None] + columns].view(np.uint8).reshape(len(part), -1)
        bad = ~_printable(codes)
        length = np.where(bad.any(axis=1), bad.argmax(axis=1), 8 * TEXT_WORDS)
        whole = length >= 8 * count[part]
        ended = ~whole & (codes[np.arange(len(part)), np.minimum(length, 8 * TEXT_WORDS - 1)] == 0)
        found[part] = whole | (ended & ((length >= 8) | (short[part] & (length >= 4))))
    return found


def _zeros_array(words, at, count):
    """Which blocks are zeros up to their `count`-th word, or the last that is looked at."""
    found = np.zeros(len(at), bool)
    for k in range(0, len(at), 1 << 16):
        part = slice(k, k + (1 << 16))
        columns = np.minimum(np.arange(_FEW_WORDS), count[part, None] - 1)
        found[part] = ~words[at[part, None] + columns].any(axis=1)
    for j in np.flatnonzero(found & (count > _FEW_WORDS)).tolist():
        found[j] = not words[at[j]:at[j] + min(count[j], ZERO_WORDS)].any()
    return found


def _heads_array(words, starts, ends, offsets, module_starts, module_ends, address, size, seen, code, slots, found, n):
    code[:] = NOT_IN_USE
    rows = np.flatnonzero(seen != NO_NODE)
    if not len(starts):
        code[rows] = ABSENT
        return n
    k = np.maximum(np.searchsorted(starts, address[rows], "right") - 1, 0)
    present = (address[rows] >= starts[k]) & (address[rows] + 16 <= ends[k])
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
    zeros[zeros] = _zeros_array(words, at[zeros], count[zeros])
    left &= ~zeros & ((one != 0) | (two != 0))
    integer = left & np.isin(two >> 32, _ASN1_INTEGERS) & (two & 0xffffffff <= _LONGEST_INTEGER)
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

    FOUND + k: its first word points into a module and is found[k]; when `found` is full, others are OTHER. TEXT; ZEROS;
    INTEGER: its second word is the length and type of an ASN1_INTEGER; SECOND: that points into a module; ABSENT: the
    words are not there. `slots`: a hash table over `found`, a power of two, -1 at first. There must be a module.
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
        elif one == 0 and two == 0:
            k, end = 2, min(count, ZERO_WORDS)
            while k < end and words[at + k] == 0:
                k += 1
            if k == end and behind <= high:
                code[row] = ZEROS
        elif (two >> 32 == 2 or two >> 32 == 0x102) and two & 0xffffffff <= _LONGEST_INTEGER:
            code[row] = INTEGER
        elif lowest <= two < highest and _in(module_starts, module_ends, two):
            code[row] = SECOND
    return n
