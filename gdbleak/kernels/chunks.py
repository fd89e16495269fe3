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
# Of the walk's array form, in chunks: walked one by one at a time, looked ahead for, in a row of those followed side by
# side, searched for the beginning of such a row; how many more have to be plausible for one to be that; and of how many
# words chunks are too large for it to be worth while.
_BURST, _AHEAD, _LANE, _SEARCHED, _CONVINCING, _LARGE = 256, 200_000, 32, 4, 4, 128
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
    """Python goes from header to header where it must, `_ahead` in many places at once where chunks are many."""
    memory, signed = memoryview(words), words.view(np.int64)
    starts, ends, offsets = starts.tolist(), ends.tolist(), offsets.tolist()
    p, stop, n, first = int(p), int(stop), int(n), int(first)
    goal = n + int(budget)
    rows = words, address, size, state, first, notes
    while p < stop and n < goal:
        k = bisect.bisect_right(starts, p) - 1
        if k < 0 or p + 16 > ends[k]:
            return n, p, ABSENT
        i = ((offsets[k] + p - starts[k]) >> 3) + 1          # where its size is; the chunk is at (i << 3) - shift
        shift = (i << 3) - p
        last, known = (min(stop, ends[k] - 15) + shift + 7) >> 3, np.zeros(0, np.int64)
        begin, walked, looked_at, used = i, 0, 0, 0
        while i < last and n < goal:
            chunks = []
            append = chunks.append
            for _ in range(min(goal - n, _BURST)):
                length = memory[i] & -8
                if length < 32 or length & 15 or length > stop + shift - (i << 3):
                    break
                append(i)
                i += length >> 3
                if i >= last:
                    break
            bad = i < last and len(chunks) < min(goal - n, _BURST)
            _rows(*rows, n, np.array(chunks + [i] * bad, np.int64), len(chunks), shift)
            n, walked = n + len(chunks), walked + len(chunks)
            if bad:
                return n, (i << 3) - shift, FENCE if memory[i] & -8 == 16 else BAD_SIZE
            if i >= last or n >= goal:
                break
            if (not len(known) or i > known[-1]) and looked_at <= 2 * used:
                known, breaks = _ahead(signed, i, last, (i - begin) // walked, min(64 * walked, goal - n, _AHEAD))
                looked_at += len(known)
            at = np.searchsorted(known, i)
            if at < len(known) and known[at] == i:
                count = min(int(breaks[np.searchsorted(breaks, at)] - at), goal - n)
                _rows(*rows, n, known[at:at + count], count, shift)
                n, walked, used, i = n + count, walked + count, used + count, int(known[at + count])
        p = (i << 3) - shift
    return n, p, END if p >= stop else BUDGET


def _rows(words, address, size, state, first, notes, n, at, count, shift):
    """Fill rows from `n` on for `count` chunks whose sizes are words[at]. One more may be behind them, which cannot be
    a chunk: it says, too, whether the one before it is in use."""
    heads, new = words[at], slice(n, n + count)
    np.left_shift(at[:count], 3, out=address[new].view(np.int64))
    address[new] += np.uint64((16 - shift) & (1 << 64) - 1)
    np.bitwise_and(heads[:count], _NOT7, out=size[new])
    state[new] = IN_USE
    behind = n + np.flatnonzero(heads & _ONE == 0)           # rows whose predecessor is free
    behind = behind[behind > first]
    behind = behind[state[behind - 1] == IN_USE]
    state[behind - 1] = FREE
    wrong = behind[words[at[behind - n] - 1] != size[behind - 1]]
    if len(wrong):
        if not notes[0]:
            notes[1] = (int(at[wrong[0] - n]) << 3) - shift
        notes[0] += np.uint64(len(wrong))


def _ahead(words, at, last, mean, count):
    """(places where chunks may be, ascending; which of them, by number, the next one is not right behind): the places
    of their sizes in `words` (int64), from `at` on, about `count` chunks of `mean` words each.

    Where a row of plausible sizes begins at regular distances, the rows are followed side by side. Nothing is known
    of a place before the walk has come to it; then all up to the next break are chunks as well.
    """
    stride, window = _LANE * (mean + 1 & ~1), _SEARCHED * (mean + 1 & ~1)
    lanes = min(count // _LANE, (last - at) // stride - 1)
    if lanes < 8 or mean > _LARGE:
        return np.zeros(0, np.int64), None
    begin, end = at + stride, at + (lanes + 1) * stride
    grid = words[begin:end].reshape(lanes, stride)[:, :window:2].ravel()
    likely = np.flatnonzero(_small(grid, 8 * stride))
    lane, column = np.divmod(likely, window // 2)
    likely = begin + lane * stride + 2 * column
    for _ in range(_CONVINCING):                             # what is no chunk often leads to one
        heads = words.take(likely, mode="clip")
        good = np.flatnonzero(_small(heads, 8 * stride) & (heads & 8 == 0))
        lane, likely = lane[good], likely[good] + (heads[good] >> 3)
    likely = np.unique(likely[np.flatnonzero(np.diff(lane, prepend=-1))])
    likely = likely[:np.searchsorted(likely, end)]
    i, limit, found = np.append(at, likely), np.append(likely, end), []
    for _ in range(8 * _LANE):
        found.append(i)
        step = words[i] >> 3
        i = i + step
        going_on = np.flatnonzero((i < limit) & (step >= 4))
        if not len(going_on):
            break
        i, limit = i[going_on], limit[going_on]
    known = np.sort(np.concatenate(found))
    step, distance = words[known[:-1]] >> 3, np.diff(known)
    apart = np.flatnonzero((step != distance) | (distance < 4) | (distance & 1 != 0))
    return known, np.append(apart, len(known) - 1)


def _small(heads, most):
    """Which words (int64) can be sizes of chunks of less than `most` bytes, whatever their flags."""
    return (heads - 32).view(np.uint64) < most


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
    memory, address, size, state = (memoryview(array) for array in (words, address, size, state))
    starts, ends, offsets = starts.tolist(), ends.tolist(), offsets.tolist()
    user, only, holder, count, total = int(user), int(only), 0, 0, 0
    while user:
        if count >= limit:
            return count, total, LOOP, user, holder
        row = bisect.bisect_left(address, user, first, last)
        if row >= last or address[row] != user:
            return count, total, STRAY, user, holder
        if state[row] == mark:
            return count, total, LOOP, user, holder
        if state[row] != IN_USE or (only and size[row] != only):
            return count, total, STRAY, user, holder
        k = bisect.bisect_right(starts, user) - 1
        if k < 0 or user + 8 > ends[k]:
            return count, total, ABSENT, user, holder
        state[row] = mark
        count += 1
        total += size[row]
        following = memory[(offsets[k] + user - starts[k]) >> 3]
        if protect & 1:
            following ^= user >> 12
        if following and protect & 2:
            following = following + 16 & (1 << 64) - 1
        holder, user = user, following
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
    head = previous = int(head)
    count = total = 0
    k = bisect.bisect_right(starts, head) - 1
    if k < 0 or head + 32 > ends[k]:
        return 0, 0, ABSENT, head, head
    low, high, delta = starts[k], ends[k] - 32, offsets[k] - starts[k]
    chunk = memory[(head + delta >> 3) + 2]
    while chunk != head:
        if count >= limit:
            return count, total, LOOP, chunk, previous
        if not low <= chunk <= high:
            k = bisect.bisect_right(starts, chunk) - 1
            if k < 0 or chunk > ends[k] - 32:
                return count, total, STRAY, chunk, previous
            low, high, delta = starts[k], ends[k] - 32, offsets[k] - starts[k]
        if chunk & 15:
            return count, total, STRAY, chunk, previous
        at = chunk + delta >> 3
        length = memory[at + 1] & -8
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
