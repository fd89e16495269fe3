"""Strongly connected components of a part of a graph: which cycles there are, and which of them nothing else leads to.

All int32. `rows` (ascending) is the part; `number`, over all rows of the graph, is k + 1 for rows[k] and 0 for what is
left out. One body serves as compiled form and, over memoryviews, as array form.
"""
from __future__ import annotations

from . import I32s, U8s, in_python, kernel


def _components(begins: I32s, targets: I32s, rows: I32s, number: I32s, component: I32s, visit: I32s, low: I32s,
                cursor: I32s, open_: I32s, way: I32s):
    """Tarjan's components; how many. component[k] is that of rows[k]; what a component leads to has lower numbers.

    `component` and `visit` come as -1; `low`, `cursor`, `open_` and `way` are scratch. All are as long as `rows`.
    """
    found = visited = waiting = 0
    for start in range(len(rows)):
        if visit[start] >= 0:
            continue
        way[0], depth = start, 1
        visit[start] = low[start] = visited
        visited += 1
        cursor[start] = begins[rows[start]]
        open_[waiting] = start
        waiting += 1
        while depth > 0:
            k = way[depth - 1]
            c, end, entered = cursor[k], begins[rows[k] + 1], -1
            while c < end:
                t = number[targets[c]] - 1
                if t >= 0 and component[t] < 0:
                    if visit[t] < 0:
                        entered = t
                        break                    # this edge is looked at once more when t is done
                    if low[t] < low[k]:
                        low[k] = low[t]
                c += 1
            cursor[k] = c
            if entered >= 0:
                way[depth] = entered
                depth += 1
                visit[entered] = low[entered] = visited
                visited += 1
                cursor[entered] = begins[rows[entered]]
                open_[waiting] = entered
                waiting += 1
                continue
            depth -= 1
            if low[k] == visit[k]:
                t = -1
                while t != k:
                    waiting -= 1
                    t = open_[waiting]
                    component[t] = found
                found += 1
    return found


def _heads(begins: I32s, targets: I32s, rows: I32s, number: I32s, component: I32s, led_to: U8s, first: I32s, head: I32s,
           waiting: I32s):
    """Whose each of `rows` is: head[k] is the number in `rows` of the leak it hangs on; how many leaks there are.

    A leak is a component that no other one leads to; its head is its lowest row. What several lead to is the first
    one's. `led_to` comes zeroed, `first` as -1, both over components; `head` as -1.
    """
    for k in range(len(rows)):
        for c in range(begins[rows[k]], begins[rows[k] + 1]):
            t = number[targets[c]] - 1
            if t >= 0 and component[t] != component[k]:
                led_to[component[t]] = 1
        if first[component[k]] < 0:
            first[component[k]] = k
    leaks = 0
    for start in range(len(rows)):
        if led_to[component[start]] != 0 or first[component[start]] != start:
            continue
        leaks += 1
        head[start], waiting[0], depth = start, start, 1
        while depth > 0:
            depth -= 1
            row = rows[waiting[depth]]
            for c in range(begins[row], begins[row + 1]):
                t = number[targets[c]] - 1
                if t >= 0 and head[t] < 0:
                    head[t] = start
                    waiting[depth] = t
                    depth += 1
    return leaks


components = kernel(in_python(_components))(_components)
heads = kernel(in_python(_heads))(_heads)
