"""Walking glibc chunks: from header to header, along free lists, and back into step after damage.

`words`, `starts`, `ends`, `offsets`: the buffer and table of an AddressSpace. `address`, `size`, `state`: the block
arrays (user address, chunk size in bytes, state), filled from row `n` on and sorted by address. Every function stops
at what cannot be a chunk and says where and why; none reads outside of the table.
"""
from __future__ import annotations

import bisect

import numpy as np

from . import I64, U64, U8s, I64s, U64s, helper, kernel
from .pieces import piece

IN_USE, FREE, FASTBIN, TCACHED, TOP = 1, 2, 3, 4, 5
END, BUDGET, BAD_SIZE, ABSENT, FENCE, LOOP, STRAY = 0, 1, 2, 3, 4, 5, 6

_U3, _U7, _U8, _U15, _U16, _U32 = (np.uint64(k) for k in (3, 7, 8, 15, 16, 32))
_ZERO, _ONE, _TWO, _THREE, _FOUR, _TWELVE = (np.uint64(k) for k in (0, 1, 2, 3, 4, 12))
ANCHORED = 255                 # of a chain of chunks: it leads to the end
FRESH_SLOTS = 1 << 16
_NOT7 = np.uint64(0xfffffffffffffff8)


@helper
def _row(address, first, last, user):
    """Row of the block with exactly this user address among rows [first, last), or -1."""
    low, high = first, last
    while low < high:
        middle = (low + high) >> 1
        if address[middle] < user:
            low = middle + 1
        else:
            high = middle
    if low < last and address[low] == user:
        return low
    return -1


def _walk_array(words, starts, ends, offsets, p, stop, address, size, state, n, first, budget, notes):
    """Python goes from header to header, NumPy does the rest for all chunks of one piece of memory at once."""
    memory = memoryview(words)
    starts, ends, offsets = starts.tolist(), ends.tolist(), offsets.tolist()
    p, stop, n, first = int(p), int(stop), int(n), int(first)
    goal = n + int(budget)
    while p < stop and n < goal:
        k = bisect.bisect_right(starts, p) - 1
        if k < 0 or p + 16 > ends[k]:
            return n, p, ABSENT
        i, last = (offsets[k] + p - starts[k]) >> 3, min(stop, ends[k] - 15)
        chunks = []
        append = chunks.append
        for _ in range(goal - n):
            length = memory[i + 1] & -8
            if length < 32 or length & 15 or length > stop - p:
                break
            append(p)
            p += length
            if p >= last:
                break
            i += length >> 3
        bad = p < last and len(chunks) < goal - n
        seen = np.array(chunks + [p] * bad, np.uint64)     # also what cannot be a chunk says whether the one before is in use
        at = ((seen - np.uint64(starts[k]) + np.uint64(offsets[k])) >> _U3).astype(np.int64)
        heads = words[at + 1]
        sizes = heads & _NOT7
        count = len(chunks)
        address[n:n + count], size[n:n + count], state[n:n + count] = seen[:count] + _U16, sizes[:count], IN_USE
        behind = n + np.flatnonzero(heads & _ONE == 0)      # rows whose predecessor is free
        behind = behind[behind > first]
        behind = behind[state[behind - 1] == IN_USE]
        state[behind - 1] = FREE
        wrong = behind[words[at[behind - n]] != size[behind - 1]]
        if len(wrong):
            if not notes[0]:
                notes[1] = seen[wrong[0] - n]
            notes[0] += np.uint64(len(wrong))
        n += count
        if bad:
            return n, p, FENCE if memory[i + 1] & -8 == 16 else BAD_SIZE
    return n, p, END if p >= stop else BUDGET


@kernel(_walk_array)
def walk(words: U64s, starts: U64s, ends: U64s, offsets: U64s, p: U64, stop: U64, address: U64s, size: U64s, state: U8s,
         n: I64, first: I64, budget: I64, notes: U64s):
    """Walk chunks from chunk address `p` to `stop`, at most `budget` of them; (n, p, why it stopped).

    A chunk whose successor says "previous not in use" is FREE, all others IN_USE. `first`: the row the region began
    at. `notes` (uint64[2]): how many free chunks' prev_size disagreed with their size, and the address of the first.
    """
    low = high = delta = _ZERO
    goal = n + budget
    while p < stop:
        if n >= goal:
            return n, p, BUDGET
        if p < low or p + _U16 > high:
            k = piece(starts, ends, p)
            if k < 0 or p + _U16 > ends[k]:
                return n, p, ABSENT
            low, high, delta = starts[k], ends[k], offsets[k] - starts[k]
        i = (p + delta) >> _U3
        head = words[i + _ONE]
        length = head & _NOT7
        if (head & _ONE) == _ZERO and n > first and state[n - 1] == IN_USE:
            state[n - 1] = FREE
            if words[i] != size[n - 1]:
                if notes[0] == _ZERO:
                    notes[1] = p
                notes[0] += _ONE
        if length == _U16:
            return n, p, FENCE
        if length < _U32 or (length & _U15) != _ZERO or length > stop - p:
            return n, p, BAD_SIZE
        address[n] = p + _U16
        size[n] = length
        state[n] = IN_USE
        n += 1
        p += length
    return n, p, END


def _follow_array(words, starts, ends, offsets, user, protect, address, size, state, first, last, only, mark, limit):
    memory = memoryview(words)
    starts, ends, offsets = starts.tolist(), ends.tolist(), offsets.tolist()
    user, holder, count, total = int(user), 0, 0, 0
    while user:
        if count >= limit:
            return count, total, LOOP, user, holder
        row = int(np.searchsorted(address[first:last], np.uint64(user))) + first
        if row >= last or int(address[row]) != user:
            return count, total, STRAY, user, holder
        if state[row] == mark:
            return count, total, LOOP, user, holder
        if state[row] != IN_USE or (only and int(size[row]) != only):
            return count, total, STRAY, user, holder
        k = bisect.bisect_right(starts, user) - 1
        if k < 0 or user + 8 > ends[k]:
            return count, total, ABSENT, user, holder
        state[row] = mark
        count += 1
        total += int(size[row])
        following = memory[(offsets[k] + user - starts[k]) >> 3]
        if protect:
            following ^= user >> 12
        holder, user = user, following + (16 if following and protect & 2 else 0)
    return count, total, END, 0, 0


@kernel(_follow_array)
def follow(words: U64s, starts: U64s, ends: U64s, offsets: U64s, user: U64, protect: I64, address: U64s, size: U64s,
           state: U8s, first: I64, last: I64, only: U64, mark: I64, limit: I64):
    """Mark a singly linked free list (tcache or fastbin) from user address `user`; (count, bytes, why, where it
    led, the block whose link led there).

    `protect` bit 0: links are safe-linked; bit 1: they point to the chunk, not to the user address. `only`: the chunk
    size all of them must have (0: any). Only blocks that a walk found IN_USE among rows [first, last) are marked with
    `mark`.
    """
    count, total, holder = 0, 0, _ZERO
    while user != _ZERO:
        if count >= limit:
            return count, total, LOOP, user, holder
        row = _row(address, first, last, user)
        if row < 0:
            return count, total, STRAY, user, holder
        if state[row] == mark:
            return count, total, LOOP, user, holder
        if state[row] != IN_USE or (only != _ZERO and size[row] != only):
            return count, total, STRAY, user, holder
        k = piece(starts, ends, user)
        if k < 0 or user + _U8 > ends[k]:
            return count, total, ABSENT, user, holder
        state[row] = mark
        count += 1
        total += np.int64(size[row])
        following = words[(offsets[k] + user - starts[k]) >> _U3]
        if protect & 1:
            following ^= user >> _TWELVE
        if following != _ZERO and protect & 2:
            following += _U16
        holder, user = user, following
    return count, total, END, _ZERO, _ZERO


def _bin_array(words, starts, ends, offsets, head, limit):
    memory = memoryview(words)
    starts, ends, offsets = starts.tolist(), ends.tolist(), offsets.tolist()

    def place(chunk):
        k = bisect.bisect_right(starts, chunk) - 1
        return (offsets[k] + chunk - starts[k]) >> 3 if k >= 0 and chunk + 32 <= ends[k] and not chunk & 15 else -1

    head, previous, count, total = int(head), int(head), 0, 0
    at = place(head)
    if at < 0:
        return 0, 0, ABSENT, head, head
    chunk = memory[at + 2]
    while chunk != head:
        if count >= limit:
            return count, total, LOOP, chunk, previous
        at = place(chunk)
        if at < 0:
            return count, total, STRAY, chunk, previous
        length = memory[at + 1] & ~7
        if memory[at + 3] != previous or length < 32 or length & 15:
            return count, total, LOOP, chunk, previous
        count += 1
        total += length
        previous, chunk = chunk, memory[at + 2]
    return count, total, END, 0, 0


@kernel(_bin_array)
def follow_bin(words: U64s, starts: U64s, ends: U64s, offsets: U64s, head: U64, limit: I64):
    """Follow a doubly linked bin whose head poses as chunk `head`; (count, bytes, why, where it went wrong, the chunk
    before).

    Every member must be readable, of a possible size, and its `bk` must name the one before: else STRAY or LOOP.
    """
    previous = head
    count, total = 0, 0
    k = piece(starts, ends, head)
    if k < 0 or head + _U32 > ends[k]:
        return count, total, ABSENT, head, head
    chunk = words[((offsets[k] + head - starts[k]) >> _U3) + _TWO]
    while chunk != head:
        if count >= limit:
            return count, total, LOOP, chunk, previous
        k = piece(starts, ends, chunk)
        if k < 0 or chunk > ends[k] - _U32 or (chunk & _U15) != _ZERO:
            return count, total, STRAY, chunk, previous
        at = (offsets[k] + chunk - starts[k]) >> _U3
        length = words[at + _ONE] & _NOT7
        if words[at + _THREE] != previous or length < _U32 or (length & _U15) != _ZERO:
            return count, total, LOOP, chunk, previous
        count += 1
        total += np.int64(length)
        previous = chunk
        chunk = words[at + _TWO]
    return count, total, END, _ZERO, _ZERO


def _reach_array(words, starts, ends, offsets, start, stop, last, budget, behind, fences, steps):
    memory = memoryview(words)
    starts, ends, offsets, steps = starts.tolist(), ends.tolist(), offsets.tolist(), memoryview(steps)
    start, stop, behind, k = int(start), int(stop), int(behind), len(starts) - 1
    first = max(int(last) - int(budget), 0)
    for j in range(int(last) - 1, first - 1, -1):
        at = start + 16 * j
        while k >= 0 and starts[k] > at:
            k -= 1
        if k < 0:
            return 0, 32
        if at + 16 > ends[k]:
            behind = 32
            continue
        head = memory[((offsets[k] + at - starts[k]) >> 3) + 1]
        length = head & ~7
        if 32 <= length <= stop - at and not length & 15:
            chain = steps[j + (length >> 4)]
            steps[j] = chain if chain >= ANCHORED - 1 else chain + 1
        elif fences and length == 16 and behind & ~7 in (0, 16) and behind & 1:
            steps[j] = ANCHORED
        behind = head
    return first, behind


@kernel(_reach_array)
def reach(words: U64s, starts: U64s, ends: U64s, offsets: U64s, start: U64, stop: U64, last: I64, budget: I64,
          behind: U64, fences: I64, steps: U8s):
    """Tell of each 16-byte slot of [start, stop), from slot `last` - 1 down, how many chunks in a row begin there.

    steps[slot] (uint8, zeroed, one more than there are slots, the one at `stop` ANCHORED) becomes the length of the
    chain of sizes from there, 254 at most, or ANCHORED when it leads to `stop` or, with `fences`, to a pair of
    fenceposts. At most `budget` slots a call; (the slot reached, the head found in it: pass both on, at first the
    number of slots and 32).
    """
    first = last - budget
    if first < 0:
        first = 0
    k = np.int64(len(starts)) - 1
    j = last - 1
    while j >= first:
        at = start + (np.uint64(j) << _FOUR)
        while k >= 0 and starts[k] > at:
            k -= 1
        if k < 0:
            return 0, _U32
        if at + _U16 <= ends[k]:
            head = words[((offsets[k] + at - starts[k]) >> _U3) + _ONE]
            length = head & _NOT7
            if length >= _U32 and (length & _U15) == _ZERO and length <= stop - at:
                chain = np.int64(steps[j + np.int64(length >> _FOUR)])
                steps[j] = chain if chain >= ANCHORED - 1 else chain + 1
            elif (fences != 0 and length == _U16 and behind < _U32 and (behind & _U8) == _ZERO
                  and (behind & _ONE) != _ZERO):
                steps[j] = ANCHORED
            behind = head
        else:
            behind = _U32
        j -= 1
    return first, behind


def _resume_array(words, starts, ends, offsets, start, slot, slots, least, fresh, steps):
    memory = memoryview(words)
    starts, ends, offsets = starts.tolist(), ends.tolist(), offsets.tolist()
    candidates = np.flatnonzero(steps[slot:slots] >= least) + int(slot)
    lowest = -1
    for j in candidates.tolist():
        at = int(start) + 16 * j
        k = bisect.bisect_right(starts, at) - 1
        i = (offsets[k] + at - starts[k]) >> 3
        head = memory[i + 1]
        if not head & 1 or head & ~7 < 32:
            continue
        lowest = j if lowest < 0 else lowest
        if not fresh or not memory[i]:
            return j
        if j - lowest > FRESH_SLOTS:
            break
    return lowest


@kernel(_resume_array)
def resume(words: U64s, starts: U64s, ends: U64s, offsets: U64s, start: U64, slot: I64, slots: I64, least: I64,
           fresh: I64, steps: U8s):
    """The first slot from `slot` on where chunks go on after a gap: at least `least` in a row; -1 when there is none.

    The chunk after a gap always has its "previous in use" bit set (there is no chunk before it). `fresh`: rather one
    whose word before its size is zero, as it is in memory that has just come from brk, if there is one within 1 MiB.
    """
    lowest = -1
    for j in range(slot, slots):
        if steps[j] < least:
            continue
        at = start + (np.uint64(j) << _FOUR)
        k = piece(starts, ends, at)
        if k < 0 or at + _U16 > ends[k]:
            continue
        i = (offsets[k] + at - starts[k]) >> _U3
        head = words[i + _ONE]
        if (head & _ONE) == _ZERO or (head & _NOT7) < _U32:
            continue
        if lowest < 0:
            lowest = j
        if fresh == 0 or words[i] == _ZERO:
            return j
        if j - lowest > FRESH_SLOTS:
            break
    return lowest


def _histogram_array(size, state, counts, totals):
    for k in range(0, len(size), 1 << 18):
        part = size[k:k + (1 << 18)]
        key = (np.frexp(part.astype(np.float64))[1] - 1) * 8 + state[k:k + (1 << 18)]
        counts += np.bincount(key, minlength=512)
        totals += np.bincount(key, weights=part, minlength=512).astype(np.int64)


@kernel(_histogram_array)
def histogram(size: U64s, state: U8s, counts: I64s, totals: I64s):
    """Add blocks to counts[8 * k + state] and totals[8 * k + state] (int64[512]), where 2^k <= size < 2^(k + 1)."""
    for row in range(len(size)):
        s = size[row]
        bucket = 0
        while s > _ONE:
            s >>= _ONE
            bucket += 1
        key = 8 * bucket + np.int64(state[row])
        counts[key] += 1
        totals[key] += np.int64(size[row])
