"""Dominators of a graph in CSR, by Lengauer and Tarjan with path compression, and what each row retains.

Simpler algorithms (SemiNCA, Cooper-Harvey-Kennedy) are quadratic on what every LRU cache is: a list and a table that
both reach the same payloads. All is done in preorder numbers, int32: the root is 0, `vertex[number]` the row.
The array forms work over lists, whose items Python reads twice as fast as an array's.
"""
from __future__ import annotations

import numpy as np

from . import I32s, I64, I64s, helper, kernel


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


def _preorder_array(begins, targets, cursor, number, vertex, parent, row, count, budget):
    """All at once: Python can be interrupted anywhere."""
    return _over_lists(_preorder, (2, 3, 4, 5))(begins, targets, cursor, number, vertex, parent, row, count, 1 << 62)


def _predecessors_array(begins, targets, number, vertex, count, into, sources):
    rows = vertex[:count]
    sizes = begins[rows + 1].astype(np.int64) - begins[rows]
    total = int(sizes.sum())
    at = np.repeat(begins[rows] - np.cumsum(sizes) + sizes, sizes) + np.arange(total)
    to = number[targets[at]]
    into[1:] = np.cumsum(np.bincount(to, minlength=count))
    sources[:total] = np.repeat(np.arange(count, dtype=np.int32), sizes)[np.argsort(to, kind="stable")]
    return total


def _tree_array(vertex, dominator, count, nearest, via, several, parent, labels):
    rows, above = vertex[1:count], vertex[dominator[1:count]]
    parent[rows] = above
    labels[rows] = np.where(nearest[rows] == above, via[rows], several)
    return count


def _preorder(begins: I32s, targets: I32s, cursor: I32s, number: I32s, vertex: I32s, parent: I32s, row: I64, count: I64,
              budget: I64):
    """Number rows depth first from the root on; (row to go on from, how many are numbered), row -1 when done.

    At first `row` is the root with number[row] = 0, vertex[0] = row, parent[0] = 0, count 1; `number` is -1 elsewhere and
    `cursor` a copy of begins[:-1]. `parent`: by number, the number of the row it was reached from.
    """
    while budget > 0:
        c, end, reached = cursor[row], begins[row + 1], -1
        budget -= 1
        while c < end:
            target = targets[c]
            c += 1
            budget -= 1
            if number[target] < 0:
                reached = target
                break
        cursor[row] = c
        if reached >= 0:
            number[reached] = count
            vertex[count] = reached
            parent[count] = number[row]
            count += 1
            row = reached
        elif number[row] == 0:
            return -1, count
        else:
            row = vertex[parent[number[row]]]
    return row, count


def _predecessors(begins: I32s, targets: I32s, number: I32s, vertex: I32s, count: I64, into: I32s, sources: I32s):
    """The edges between numbered rows turned round: `into` (count + 1, zeroed), `sources` (room for all edges); how many.

    sources[into[k]:into[k + 1]] are the numbers of the rows with an edge to number k.
    """
    for k in range(count):
        row = vertex[k]
        for c in range(begins[row], begins[row + 1]):
            into[number[targets[c]] + 1] += 1
    for k in range(count):
        into[k + 1] += into[k]
    total = into[count]
    k = count - 1
    while k >= 0:
        row = vertex[k]
        for c in range(begins[row], begins[row + 1]):
            to = number[targets[c]] + 1
            into[to] -= 1               # the end of each becomes its beginning
            sources[into[to]] = k
        k -= 1
    for k in range(count):
        into[k] = into[k + 1]
    into[count] = total
    return total


@helper
def _best(v, semi, label, above, path):
    """The number with the least semidominator on the way up from `v`, which becomes shorter."""
    depth, x = 0, v
    while above[above[x]] >= 0:
        path[depth] = x
        depth += 1
        x = above[x]
    top, best = above[x], label[x]
    while depth > 0:
        depth -= 1
        y = path[depth]
        if semi[best] < semi[label[y]]:
            label[y] = best
        else:
            best = label[y]
        above[y] = top
    return best


def _immediate(parent: I32s, into: I32s, sources: I32s, count: I64, semi: I32s, label: I32s, above: I32s, path: I32s,
               head: I32s, following: I32s, dominator: I32s):
    """The immediate dominator of each number into `dominator`, all by number.

    `semi`, `label` come as 0, 1, 2, ...; `above`, `head`, `following` as -1; `path` is scratch. All have `count` items.
    """
    w = count - 1
    while w > 0:
        for c in range(into[w], into[w + 1]):
            v = sources[c]
            if above[v] >= 0:
                v = _best(v, semi, label, above, path)
            if semi[v] < semi[w]:
                semi[w] = semi[v]
        following[w] = head[semi[w]]
        head[semi[w]] = w
        p = parent[w]
        above[w] = p
        v = head[p]
        while v >= 0:
            u = _best(v, semi, label, above, path)
            dominator[v] = u if semi[u] < semi[v] else p
            v = following[v]
        head[p] = -1
        w -= 1
    dominator[0] = 0
    for w in range(1, count):
        if dominator[w] != semi[w]:
            dominator[w] = dominator[dominator[w]]
    return count


def _retain(dominator: I32s, count: I64, total: I64s):
    """Add each number's `total` to its dominator's, from the last up; `total` comes with each one's own value."""
    w = count - 1
    while w > 0:
        total[dominator[w]] += total[w]
        w -= 1
    return count


def _tree(vertex: I32s, dominator: I32s, count: I64, nearest: I32s, via: I32s, several: I64, parent: I32s, labels: I32s):
    """The dominator tree by row: parent[row], and its label, which is via[row] where nearest[row] (the row it is reached from
    first) is the dominator, else `several`. The root's children get the root as their parent."""
    for k in range(1, count):
        row, above = vertex[k], vertex[dominator[k]]
        parent[row] = above
        labels[row] = via[row] if nearest[row] == above else several
    return count


preorder = kernel(_preorder_array)(_preorder)
predecessors = kernel(_predecessors_array)(_predecessors)
immediate = kernel(_over_lists(_immediate, (10,)))(_immediate)
retain = kernel(_over_lists(_retain, (2,)))(_retain)
tree = kernel(_tree_array)(_tree)
