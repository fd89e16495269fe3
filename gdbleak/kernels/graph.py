"""Walking a graph in CSR: breadth first from roots, sums over the tree that gives,
and folding siblings of the same shape.

Rows are int32. `begins` (rows + 1), `targets`, `labels`: row r refers to targets[begins[r]:begins[r + 1]],
each edge with its label.
"""
from __future__ import annotations

from array import array

import numpy as np

from . import I64, U8s, I32s, I64s, N32s, U64s, in_python, kernel

_FOUR, _MOST_UNITS = np.uint64(4), np.uint64(1 << 30)
NATIVE = -(1 << 20)            # a label NATIVE - k: word k of a malloc block, or of a payload
_PART = 1 << 16                # rows, or edges, at a time


def _bfs_array(begins, targets, head, tail, budget, seen, parent, order):
    """All at once. Only rows that have edges are gone through one by one (Python can be interrupted anywhere); what they
    reach, and in which order, is then told for many rows at a time."""
    inner = begins[1:len(seen) + 1] > begins[:len(seen)]
    inner &= seen == 0
    pointing = _in_turn(begins, targets, inner, order[head:tail])
    n = tail
    for source, target in _edges_of(begins, targets, pointing):
        new = np.flatnonzero(seen[target] == 0)
        target, source = target[new], source[new]
        number = np.arange(len(target), dtype=np.int32)
        parent[target[::-1]] = number[::-1]                  # the first one is written last
        new = np.flatnonzero(parent[target] == number)
        target = target[new]
        seen[target], parent[target], order[n:n + len(new)] = 1, source[new], target
        n += len(new)
    return n, n


def _edges_of(begins, targets, rows):
    """(sources, targets) of the edges of `rows`, some rows at a time."""
    behind = np.cumsum(begins[rows + 1] - begins[rows], dtype=np.int64)
    k = 0
    while k < len(rows):
        done = behind[k - 1] if k else 0
        last = max(int(np.searchsorted(behind, done + _PART)), k + 1)
        part = rows[k:last]
        counts = begins[part + 1] - begins[part]
        ahead = np.repeat(begins[part] - (behind[k:last] - counts - done), counts)
        yield np.repeat(part, counts), targets[ahead + np.arange(len(ahead))]
        k = last


def _in_turn(begins, targets, inner, seeds):
    """The seeds, and then all rows that they reach over `inner` rows alone, breadth first."""
    starts, kept = array("i", [0]), array("i")               # the edges that lead to such rows
    for k in range(0, len(inner), _PART):
        some = begins[k:min(k + _PART, len(inner)) + 1]
        part = targets[some[0]:some[-1]]
        mine = inner[part]
        before = np.append(0, np.cumsum(mine)) + len(kept)
        starts.frombytes(before[some[1:] - some[0]].astype(np.int32).tobytes())
        kept.frombytes(part[mine].tobytes())
    waiting, marks = array("i", seeds.tobytes()), bytearray(len(inner))
    new = waiting.append
    for row in waiting:                                      # it grows
        for target in kept[starts[row]:starts[row + 1]]:
            if not marks[target]:
                marks[target] = 1
                new(target)
    return np.frombuffer(waiting, np.int32)


@kernel(_bfs_array)
def bfs(begins: N32s, targets: N32s, head: I64, tail: I64, budget: I64, seen: U8s, parent: I32s, order: N32s):
    """Go on breadth first from order[head:tail]; (head, tail) then. Stops after `budget` edges; done when head == tail.

    parent[row] is the row it was reached from first. Rows with another `seen` than 0 are not entered.
    """
    while head < tail and budget > 0:
        row = order[head]
        head += 1
        first, last = begins[row], begins[row + 1]
        budget -= 1 + last - first
        for k in range(first, last):
            target = targets[k]
            if seen[target] == 0:
                seen[target] = 1
                parent[target] = row
                order[tail] = target
                tail += 1
    return head, tail


def _spread_array(begins, targets, seeds, mark, budget, seen, waiting, depth):
    """All at once, as `_bfs_array`."""
    new = np.unique(seeds[seen[seeds] == 0])
    seen[new] = mark
    inner = begins[1:len(seen) + 1] > begins[:len(seen)]
    inner &= seen == 0
    for _, target in _edges_of(begins, targets, _in_turn(begins, targets, inner, np.append(waiting[:depth], new))):
        seen[target[seen[target] == 0]] = mark
    return 0


@kernel(_spread_array)
def spread(begins: N32s, targets: N32s, seeds: N32s, mark: I64, budget: I64, seen: U8s, waiting: N32s, depth: I64):
    """Put `mark` into `seen` of all that `seeds` and the rows of the stack waiting[:depth] reach and that is 0 there; how deep
    the stack is then. Stops after `budget` edges; done at 0. `waiting` must have room for all rows."""
    for k in range(len(seeds)):
        if seen[seeds[k]] == 0:
            seen[seeds[k]] = mark
            waiting[depth] = seeds[k]
            depth += 1
    while depth > 0 and budget > 0:
        depth -= 1
        row = waiting[depth]
        first, last = begins[row], begins[row + 1]
        budget -= 1 + last - first
        for k in range(first, last):
            target = targets[k]
            if seen[target] == 0:
                seen[target] = mark
                waiting[depth] = target
                depth += 1
    return depth


def _edges_used(begins: N32s, targets: N32s, labels: I32s, order: N32s, count: I64, parent: I32s, via: I32s, done: U8s):
    """The label of the edge by which each row was reached: the first from its parent to it. `done` comes zeroed."""
    for k in range(count):
        row = order[k]
        for c in range(begins[row], begins[row + 1]):
            target = targets[c]
            if parent[target] == row and done[target] == 0:
                done[target] = 1
                via[target] = labels[c]
    return count


def _sizes_array(begins, size, detail):
    rows = len(size)
    pointing = begins[1:rows + 1] > begins[:rows]
    detail[:rows] = np.where(pointing, np.minimum(size >> _FOUR, _MOST_UNITS), np.uint64(0)).astype(np.int32)
    detail[:rows] -= ~pointing
    return rows


@kernel(_sizes_array)
def sizes_of_pointing(begins: N32s, size: U64s, detail: I32s):
    """The size of each block (chunk bytes / 16, 2^30 at most) that refers to others into `detail`, -1 for those that do not."""
    for row in range(len(size)):
        detail[row] = -1
        if begins[row] < begins[row + 1]:
            detail[row] = min(size[row] >> _FOUR, _MOST_UNITS)
    return len(size)


def _sum_tree(order: N32s, count: I64, parent: I32s, total: I64s):
    """Add each row's `total` to its parent's, from the leaves up; `total` comes with each row's own value."""
    k = count - 1
    while k >= 0:
        row = order[k]
        k -= 1
        if parent[row] >= 0:
            total[parent[row]] += total[row]
    return count


def _count_named(order: N32s, count: I64, parent: I32s, via: I32s, named: U8s):
    """Count for each row those right below it that are reached by a label that is a name (>= 0) or a place in a block
    (<= NATIVE), up to 255; the most that any row has."""
    most = 0
    for k in range(count):
        row = order[k]
        above = parent[row]
        if above >= 0 and (via[row] >= 0 or via[row] <= NATIVE) and named[above] < 255:
            named[above] += 1
            most = max(most, named[above])
    return most


def _sum_groups(parent: I32s, total: I64s):
    """Add each group's `total` to that of the one above it, which has a lower number; -1: none."""
    k = len(parent) - 1
    while k >= 0:
        if parent[k] >= 0:
            total[parent[k]] += total[k]
        k -= 1
    return len(parent)


def _fold(order: N32s, count: I64, parent: I32s, via: I32s, kind: U8s, detail: I32s, size: I64s, below: I64s,
          named: U8s, few: I64, member: I64, root_groups: I32s, group: I32s, slots: I32s, latest: I32s, g_parent: I32s,
          g_label: I32s, g_kind: U8s, g_detail: I32s, g_bytes: I64s, g_count: I64s, g_row: I32s, g_again: U8s, n: I64):
    """Put rows that are reached in the same way into one group; the number of groups, or -1 when there is no room.

    The same way: from the same group, by the same label, of the same kind (and `detail`). A label >= 0 is a name: where
    a row has more than `few` names below it (`named` counts them), only a row that holds at least 1/few of its parent's
    bytes (`below`, not looked at elsewhere) keeps its own, the others become `member`. A row that repeats the two steps
    above it (a linked list) joins its parent's group. Groups 0..n-1, those of the roots, come filled; root_groups[k] is that
    of root k, which is parent[] = -1 - k of its row. `slots`, a hash table of groups, and `latest`, the one right below each
    that was met last, have 1 + the group and come zeroed.
    """
    mask = len(slots) - 1
    for k in range(count):
        row = order[k]
        above = parent[row]
        if above < 0:
            g = root_groups[-1 - above]
            group[row] = g
            g_bytes[g] += size[row]
            g_count[g] += 1
            continue
        label = via[row]
        if (label >= 0 or label <= NATIVE) and named[above] > few and below[row] * few < below[above]:
            label = member
        up = group[above]
        over = g_parent[up]
        if (over >= 0 and g_kind[up] == kind[row] and g_detail[up] == detail[row]
                and (g_label[up] == label or label <= NATIVE)
                and (g_again[up] or (g_kind[over] == kind[row] and g_parent[over] >= 0
                                     and (g_label[over] == label
                                          or (label <= NATIVE and g_detail[over] == detail[row]))))):
            g_again[up] = 1
            g = up
        else:
            g = latest[up] - 1
            if g < 0 or g_label[g] != label or g_kind[g] != kind[row] or g_detail[g] != detail[row]:
                h = (up * 0x9e3779b1 ^ label * 0x85ebca6b ^ detail[row] * 0xc2b2ae35 ^
                     kind[row] * 0x27d4eb2f) & 0x7fffffffffff
                h = (h ^ h >> 15) & mask
                while slots[h] > 0:
                    g = slots[h] - 1
                    if (g_parent[g] == up and g_label[g] == label and g_kind[g] == kind[row]
                            and g_detail[g] == detail[row]):
                        break
                    h = (h + 1) & mask
                if slots[h] == 0:
                    if n >= len(g_parent) or 2 * n > mask:
                        return -1
                    slots[h] = n + 1
                    g_parent[n], g_label[n], g_kind[n], g_detail[n], g_row[n] = up, label, kind[row], detail[row], row
                    n += 1
                g = slots[h] - 1
                latest[up] = g + 1
        group[row] = g
        g_bytes[g] += size[row]
        g_count[g] += 1
    return n


sum_groups = kernel(in_python(_sum_groups))(_sum_groups)
edges_used = kernel(in_python(_edges_used))(_edges_used)
count_named = kernel(in_python(_count_named))(_count_named)
sum_tree = kernel(in_python(_sum_tree))(_sum_tree)
fold = kernel(in_python(_fold))(_fold)
