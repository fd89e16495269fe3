"""Dominators of a graph in CSR, by Lengauer and Tarjan with path compression, and what each row retains.

Simpler algorithms (SemiNCA, Cooper-Harvey-Kennedy) are quadratic on what every LRU cache is: a list and a table that
both reach the same payloads. All is done in preorder numbers, int32: the root is 0, `vertex[number]` the row.
The array forms work over lists, whose items Python reads twice as fast as an array's.
"""
from __future__ import annotations

import numpy as np

from . import I32s, I64, I64s, N32s, U8s, helper, kernel


def _over_lists(body, changed):
    """The array form: the same body over lists; the arguments numbered `changed` are written back."""
    def run(*arguments):
        given = [argument.tolist() if hasattr(argument, "tolist") else argument for argument in arguments]
        result = body(*given)
        for k in changed:
            arguments[k][:] = given[k]
        return result
    run.__doc__ = body.__doc__
    return run


def _preorder_array(begins, targets, number, vertex, parent, cursor, first, others, at, count, n, budget):
    """Over lists, and all at once: Python can be interrupted anywhere."""
    starts, ends, numbers = begins.tolist(), targets.tolist(), number.tolist()
    rows, parents, cursors, firsts, pairs = vertex[:1].tolist(), [0], [starts[vertex[0]]], [-1], []
    while at >= 0:
        c, end, entered = cursors[at], starts[rows[at] + 1], -1
        while c < end:
            target = ends[c]
            c += 1
            to = numbers[target]
            if to < 0:
                numbers[target] = count
                rows.append(target)
                parents.append(at)
                cursors.append(starts[target])
                firsts.append(-1)
                count += 1
                if starts[target] < starts[target + 1]:
                    entered = count - 1
                    break
            elif to != at:
                pairs += at, firsts[to]
                firsts[to] = n
                n += 1
        cursors[at] = c
        at = entered if entered >= 0 else parents[at] if at else -1
    number[:], vertex[:count], parent[:count], cursor[:count], first[:count] = numbers, rows, parents, cursors, firsts
    others[:2 * n] = pairs
    return -1, count, n


def _tree_array(vertex, dominator, count, nearest, via, several, parent, labels):
    rows, above = vertex[1:count], vertex[dominator[1:count]]
    parent[rows] = above
    labels[rows] = np.where(nearest[rows] == above, via[rows], several)
    return count


def _heavy_array(vertex, dominator, count, high, below, large, several, labels):
    rows = vertex[1:count][high[dominator[1:count]] != 0]
    above = vertex[dominator[1:count][high[dominator[1:count]] != 0]]
    rows = rows[(labels[rows] == several) & (large * below[rows] >= below[above])][:-several]
    labels[rows] = several - 1 - np.arange(len(rows))
    return len(rows)


def _preorder(begins: N32s, targets: N32s, number: I32s, vertex: N32s, parent: N32s, cursor: N32s, first: I32s,
              others: I32s, at: I64, count: I64, n: I64, budget: I64):
    """Number rows depth first from the root on; (number to go on from, how many are numbered, how many other edges), -1 in
    the place of the first when done.

    At first all three are 0, 1, 0; number[root] is 0, vertex[0] the root, cursor[0] begins[root], first[0] -1; `number` is
    -1 elsewhere. By number: `vertex`, the row; `parent`, the number it was reached from; `first`: the other edges to it are
    a list, edge k comes from number others[2 * k], the following one is others[2 * k + 1], -1 ends it.
    """
    while budget > 0:
        c, end, entered = cursor[at], begins[vertex[at] + 1], -1
        budget -= 1
        while c < end and entered < 0:
            target = targets[c]
            c += 1
            budget -= 1
            to = number[target]
            if to < 0:
                number[target] = count
                vertex[count], parent[count], cursor[count], first[count] = target, at, begins[target], -1
                if begins[target] < begins[target + 1]:
                    entered = count
                count += 1
            elif to != at:
                others[2 * n], others[2 * n + 1] = at, first[to]
                first[to] = n
                n += 1
        cursor[at] = c
        if entered >= 0:
            at = entered
        elif at == 0:
            return -1, count, n
        else:
            at = parent[at]
    return at, count, n


@helper
def _best(v, linked, semi, label, parent, path):
    """The number with the least semidominator on the way up from `v` to below the first that is less than `linked`; the
    way becomes shorter."""
    depth, x, above = 0, v, parent[v]
    while above >= linked:
        path[depth] = x
        depth += 1
        x, above = above, parent[above]
    best = label[x]
    while depth > 0:
        depth -= 1
        y = path[depth]
        if semi[best] < semi[label[y]]:
            label[y] = best
        else:
            best = label[y]
        parent[y] = above
    return best


def _immediate(parent: N32s, first: I32s, others: I32s, count: I64, n: I64, semi: N32s, label: N32s, path: N32s):
    """Turn `first` into the immediate dominators, all by number.

    `parent`, `first`, `others` and `n` are as `preorder` left them; all are changed. `semi`, `label` and `path` are scratch.
    All but `others` have `count` items, that has room for so many more edges. From the last number down, each is linked to
    its parent once its semidominator is known, where it waits for its dominator: in the list of edges, as -1 - its number.
    """
    w = count - 1
    while w > 0:
        above = parent[w]
        least, k = above, first[w]
        while k >= 0:
            v, k = others[2 * k], others[2 * k + 1]
            if v < 0:
                v = -1 - v
                u = _best(v, w + 1, semi, label, parent, path)
                first[v] = u if semi[u] < w else w
                continue
            if v > w:
                v = semi[_best(v, w + 1, semi, label, parent, path)]
            if v < least:
                least = v
        semi[w], label[w], first[w] = least, w, least
        if least != above and least > 0:
            others[2 * n], others[2 * n + 1] = -1 - w, first[least]
            first[least] = n
            n += 1
        w -= 1
    first[0] = 0
    for w in range(1, count):
        if first[w] != semi[w]:
            first[w] = first[first[w]]
    return count


def _retain(dominator: N32s, count: I64, total: I64s):
    """Add each number's `total` to its dominator's, from the last up; `total` comes with each one's own value."""
    w = count - 1
    while w > 0:
        total[dominator[w]] += total[w]
        w -= 1
    return count


def _tree(vertex: N32s, dominator: N32s, count: I64, nearest: I32s, via: I32s, several: I64, parent: I32s, labels: I32s):
    """The dominator tree by row: parent[row], and its label, which is via[row] where nearest[row] (the row it is reached from
    first) is the dominator, else `several`. The root's children get the root as their parent."""
    for k in range(1, count):
        row, above = vertex[k], vertex[dominator[k]]
        parent[row] = above
        labels[row] = via[row] if nearest[row] == above else several
    return count


def _heavy(vertex: N32s, dominator: N32s, count: I64, high: U8s, below: I64s, large: I64, several: I64, labels: I32s):
    """Give those rows labels of their own, `several` - 1 and less, whose label is `several`, whose dominator is `high`
    (by number) and which have at least 1/`large` of what is below that (by row); how many, -`several` at most."""
    n = 0
    for k in range(1, count):
        if high[dominator[k]] != 0:
            row = vertex[k]
            if labels[row] == several and large * below[row] >= below[vertex[dominator[k]]] and n < -several:
                n += 1
                labels[row] = several - n
    return n


preorder = kernel(_preorder_array)(_preorder)
immediate = kernel(_over_lists(_immediate, (1,)))(_immediate)
retain = kernel(_over_lists(_retain, (2,)))(_retain)
tree = kernel(_tree_array)(_tree)
heavy = kernel(_heavy_array)(_heavy)
