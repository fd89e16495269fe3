"""The kernels of the process graph: both forms of each against each other, and dominators and components against networkx."""
import networkx
import numpy as np
import pytest

from gdbleak.graph.dominators import Dominators
from gdbleak.graph.native import ON_STACK_ONLY, REACHED, Native
from gdbleak.graph.process import Process
from gdbleak.heaps import glibc
from gdbleak.kernels import components, dominators, graph, owners, pointers
from gdbleak.target.core_file import open_core

from .test_kernels import same, shipped_core     # noqa: F401


def csr(nodes, edges):
    """(begins, targets) of a list of (from, to)."""
    edges = np.array(sorted(edges), np.int64).reshape(-1, 2)
    begins = np.zeros(nodes + 1, np.int32)
    begins[1:] = np.cumsum(np.bincount(edges[:, 0], minlength=nodes))
    return begins, edges[:, 1].astype(np.int32)


def random_graph(random):
    nodes = int(random.integers(2, 60))
    count = int(random.integers(0, 4 * nodes))
    return nodes, list(zip(random.integers(0, nodes, count).tolist(), random.integers(0, nodes, count).tolist()))


def dominators_by_networkx(nodes, edges, root):
    whole = networkx.DiGraph()
    whole.add_nodes_from(range(nodes))
    whole.add_edges_from(edges)
    return {node: above for node, above in networkx.immediate_dominators(whole, root).items() if node != root}


def ours(tree):
    return {int(tree.vertex[k]): int(tree.vertex[tree.dominator[k]]) for k in range(1, len(tree))}


def test_dominators_of_a_thousand_random_graphs():
    random = np.random.default_rng(11)
    for _ in range(1000):
        nodes, edges = random_graph(random)
        assert ours(Dominators(*csr(nodes, edges), 0)) == dominators_by_networkx(nodes, edges, 0), (nodes, edges)


@pytest.mark.parametrize("shape", ["chain", "star", "lru", "ladder", "cycle"])
def test_dominators_of_shapes(shape):
    n = 3000
    edges = {"chain": [(k, k + 1) for k in range(n - 1)],
             "star": [(0, k) for k in range(1, n)],
             "lru": [(0, 1), (0, 2)] + [(1, k) for k in range(3, n)] + [(2, 3)] + [(k, k + 1) for k in range(3, n - 1)],
             "ladder": [(k, j) for k in range(0, n - 2) for j in (k + 1, k + 2)],
             "cycle": [(k, (k + 1) % n) for k in range(n)] + [(n // 2, 0)]}[shape]
    assert ours(Dominators(*csr(n, edges), 0)) == dominators_by_networkx(n, edges, 0)


def test_retained_adds_up():
    random = np.random.default_rng(12)
    for _ in range(100):
        nodes, edges = random_graph(random)
        own = random.integers(0, 1000, nodes)
        tree = Dominators(*csr(nodes, edges), 0)
        retained = tree.retained(own)
        assert retained[0] == own[tree.vertex].sum()
        assert retained[1:][tree.dominator[1:] == 0].sum() == retained[0] - own[0]


def test_child_of_root():
    random = np.random.default_rng(13)
    for _ in range(100):
        nodes, edges = random_graph(random)
        tree = Dominators(*csr(nodes, edges), 0)
        above = ours(tree)
        for node, top in enumerate(tree.child_of_root().tolist()):
            if node not in above:
                assert top == -1
                continue
            while above[node]:
                node = above[node]
            assert top == node


def check_bfs(begins, targets, seeds, seen):
    """Both forms reach the same, by the same parents, in the same order; the compiled one in steps as well."""
    rows, left_out = len(seen), np.flatnonzero(seen)

    def start():
        marks, order = seen.copy(), np.zeros(rows, np.int32)
        marks[seeds], order[:len(seeds)] = 1, seeds
        return begins, targets, 0, len(seeds), 10**9, marks, np.full(rows, -1, np.int32), order

    head, tail = same(graph.bfs, start, (5, 6, 7))
    assert head == tail
    whole = networkx.DiGraph(zip(np.repeat(np.arange(rows), np.diff(begins)).tolist(), targets.tolist()))
    whole.add_nodes_from(range(rows))
    whole.remove_nodes_from(set(left_out.tolist()) - set(seeds.tolist()))
    given = start()
    graph.bfs(*given)
    expected = networkx.multi_source_dijkstra_path_length(whole, seeds.tolist()) if len(seeds) else {}
    assert set(given[7][:tail].tolist()) == set(expected)
    levels = [expected[row] for row in given[7][:tail].tolist()]
    assert levels == sorted(levels)
    for row in given[7][len(seeds):tail].tolist():
        assert expected[int(given[6][row])] == expected[row] - 1 and whole.has_edge(int(given[6][row]), row)


def test_breadth_first():
    random = np.random.default_rng(16)
    for _ in range(300):
        nodes, edges = random_graph(random)
        seen = np.where(random.random(nodes) < 0.1, np.uint8(255), np.uint8(0))
        seeds = np.flatnonzero((random.random(nodes) < 0.1) & (seen == 0)).astype(np.int32)
        check_bfs(*csr(nodes, edges), seeds, seen)


@pytest.mark.parametrize("shape", ["chain", "star", "random"])
def test_breadth_first_of_many(shape):
    """More rows, and more edges, than are looked at in one go."""
    n, random = 70_000, np.random.default_rng(17)
    edges = {"chain": zip(range(n - 1), range(1, n)), "star": zip([0] * n, range(n)),
             "random": random.integers(0, n, (2 * n, 2)).tolist()}[shape]
    check_bfs(*csr(n, list(edges)), np.zeros(1, np.int32), np.zeros(n, np.uint8))


def part_of(random):
    """A random graph, some of its rows, and their numbers."""
    nodes, edges = random_graph(random)
    rows = np.flatnonzero(random.integers(0, 3, nodes)).astype(np.int32)
    number = np.zeros(nodes, np.int32)
    number[rows] = np.arange(1, len(rows) + 1)
    return *csr(nodes, edges), rows, number, edges


def test_components_and_heads():
    random = np.random.default_rng(14)
    for _ in range(300):
        begins, targets, rows, number, edges = part_of(random)
        n = len(rows)

        def start():
            return (begins, targets, rows, number, *(np.full(n, -1, np.int32) for _ in range(2)),
                    *(np.zeros(n, np.int32) for _ in range(4)))

        found = same(components.components, start, (4,))
        arguments = start()
        components.components(*arguments)
        whole = networkx.DiGraph()
        whole.add_nodes_from(range(n))
        whole.add_edges_from((int(number[a]) - 1, int(number[b]) - 1) for a, b in edges if number[a] and number[b])
        expected = list(networkx.strongly_connected_components(whole))
        assert found == len(expected)
        assert {frozenset(np.flatnonzero(arguments[4] == k).tolist()) for k in range(found)} == set(map(frozenset, expected))

        def heads():
            return (begins, targets, rows, number, arguments[4], np.zeros(found, np.uint8), np.full(found, -1, np.int32),
                    np.full(n, -1, np.int32), np.zeros(n, np.int32))

        leaks = same(components.heads, heads, (7,))
        condensed = networkx.condensation(whole)
        tops = {min(condensed.nodes[c]["members"]) for c in condensed if not condensed.in_degree(c)}
        given = heads()
        components.heads(*given)
        assert leaks == len(tops) and {k for k in range(n) if given[7][k] == k} == tops
        for k, head in enumerate(given[7].tolist()):
            assert head in tops and networkx.has_path(whole, head, k)


# -- on a real core ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def native(shipped_core):     # noqa: F811
    target = open_core(str(shipped_core), "", "")
    return Native(target, glibc.find(target), [])


@pytest.mark.parametrize("numpy", ["of today", "1"])
def test_owners(native, numpy, monkeypatch):
    if numpy == "1":                                             # it cannot count bits
        monkeypatch.setattr(owners, "_counted", owners._ones)
    nodes = native.nodes
    index = nodes.index
    regions = index[:3]
    same(owners.index, lambda: (*regions, nodes.address, np.zeros_like(index[3]), np.zeros_like(index[4])), (4, 5))
    values = np.concatenate([nodes.address + np.uint64(k) for k in (0, 1, 17)] +
                            [nodes.address + nodes.size - np.uint64(k) for k in (9, 8, 7, 1)] +
                            [np.array([0, 1, (1 << 64) - 1, 1 << 46], np.uint64)])
    same(owners.owners, lambda: (*index, values, np.zeros(len(values), np.int32)), (8,))
    rows = nodes.rows_at(values)
    for value, row in zip(values.tolist(), rows.tolist()):     # as the definition says
        inside = np.flatnonzero((nodes.address <= np.uint64(value)) &
                                (np.uint64(value) < nodes.address + nodes.size - np.uint64(8)))
        outside = not ((nodes.region_starts <= value) & (value < nodes.region_ends)).any()
        assert row == (-1 if outside or not len(inside) else inside[0])


def test_edges(native):
    nodes, n = native.nodes, len(native.nodes)

    def start():
        return (*nodes.buffer, *nodes.index, nodes.seen, 0, n, np.zeros(n + 1, np.int32), np.zeros_like(native.targets), 0,
                np.zeros(2, np.int64))

    assert same(pointers.edges, start, (14, 15, 17)) == native.edges
    k = int(np.argmax(np.diff(native.begins)))                   # one block, by the definition
    row = nodes.address[k]
    words = native.target.space.words_of(int(row), int(row + nodes.size[k]) - 8)
    expected = [t for t in nodes.nodes_at(words).tolist() if t >= 0 and t != k]
    assert native.targets[native.begins[k]:native.begins[k + 1]].tolist() == expected


def test_edges_with_holes(native):
    """Pages are missing in the middle of blocks: both forms lose the same, and no more."""
    nodes, n = native.nodes, len(native.nodes)
    words, starts, ends, offsets = nodes.buffer
    random = np.random.default_rng(15)
    for _ in range(10):
        pieces = []
        for start, end, offset in zip(starts.tolist(), ends.tolist(), offsets.tolist()):
            at = start
            for hole in sorted(start + k for k in random.integers(0, end - start, 3).tolist()):
                hole &= ~4095
                if hole > at:
                    pieces.append((at, hole, offset + at - start))
                at = max(at, hole + 4096)
            if at < end:
                pieces.append((at, end, offset + at - start))
        table = [np.array(column, np.uint64) for column in zip(*pieces)]

        def start():
            return (words, *table, *nodes.index, nodes.seen, 0, n, np.zeros(n + 1, np.int32),
                    np.zeros_like(native.targets), 0, np.zeros(2, np.int64))

        assert same(pointers.edges, start, (14, 15)) <= native.edges
        compiled, in_arrays = start(), start()
        pointers.edges.compiled()(*compiled)
        pointers.edges.array_form(*in_arrays)
        assert compiled[17][1] == in_arrays[17][1] and (compiled[17][0] > 0) == (in_arrays[17][0] > 0)
        begins, targets = compiled[14:16]
        parent = np.full(n, -1, np.int32)
        parent[targets[:begins[-1]][::-1]] = np.repeat(np.arange(n), np.diff(begins))[::-1]      # the first that points to it
        same(pointers.used, lambda: (words, *table, *nodes.index, begins, targets, parent, np.ones(n, np.int32), 0, n,
                                     graph.NATIVE), (14,))


def test_pointers(native):
    target, nodes = native.target, native.nodes
    for area in native.roots.areas:
        if area.end > area.start:
            table = target.space.table([(area.start, area.end)])
            room = (area.end - area.start) // 8 + 1
            same(pointers.pointers, lambda: (target.space.words, table.starts, table.ends, table.offsets, *nodes.index,
                                             nodes.seen, area.start, area.end, np.zeros(room, np.uint64),
                                             np.zeros(room, np.int32), 0), (14, 15))


def test_states(native):
    nodes, roots = native.nodes, native.roots

    def start():
        return (native.begins, native.targets, roots.row, 2, 10**9, nodes.seen.copy(), np.zeros(len(nodes), np.int32), 0)

    assert same(graph.spread, start, (5,)) == 0
    sources = np.repeat(np.arange(len(nodes)), np.diff(native.begins))
    whole = networkx.DiGraph(list(zip(sources.tolist(), native.targets.tolist())))
    whole.add_nodes_from(range(len(nodes)))
    reached = set().union(*(networkx.descendants(whole, row) | {row} for row in set(roots.row.tolist())))
    assert reached == set(np.flatnonzero((native.state == REACHED) | (native.state == ON_STACK_ONLY)).tolist())
    seen, waiting, depth, seeds = nodes.seen.copy(), np.zeros(len(nodes), np.int32), 0, roots.row
    for turns in range(10**6):                            # a few edges at a time, as when many are followed
        depth = graph.spread.compiled()(native.begins, native.targets, seeds, 2, 5, seen, waiting, depth)
        seeds = seeds[:0]
        if not depth:
            break
    assert turns > 10 and set(np.flatnonzero(seen == 2).tolist()) == reached


def test_tree_of_a_process(native):
    process = Process(native, None)
    tree, nodes, n = process.tree, native.nodes, len(native.nodes)

    def start():
        return (*nodes.buffer, *nodes.index, process.begins, process.targets, tree.parent, np.ones(len(process), np.int32), 0, n,
                graph.NATIVE)

    same(pointers.used, start, (14,))
    same(graph.sizes_of_pointing, lambda: (process.begins, nodes.size, np.zeros(len(process), np.int32)), (2,))
    for row in np.flatnonzero(tree.seen[:n])[:500].tolist():     # each step is a pointer that is there
        above = int(tree.parent[row])
        if 0 <= above < n:
            offset = 8 * (graph.NATIVE - int(tree.via[row]))
            value = native.target.word(int(nodes.address[above]) + offset)
            assert nodes.rows_at(np.array([value], np.uint64))[0] == row


def test_dominators_of_a_process(native):
    process = Process(native, None)
    tree = process.dominators
    sources = np.repeat(np.arange(len(process)), np.diff(process.begins))
    whole = networkx.DiGraph(list(zip(sources.tolist(), process.targets.tolist())))
    expected = {node: above for node, above in networkx.immediate_dominators(whole, process.root).items()
                if node != process.root}
    assert ours(tree) == expected
    assert tree.retained(process.own)[0] == process.own[tree.vertex].sum()


def test_forms_of_the_dominators(native):
    process = Process(native, None)
    rows, root = len(process), process.root
    number = np.full(rows, -1, np.int32)
    number[root] = 0

    def start():
        vertex, parent, cursor, first = (np.zeros(rows, np.int32) for _ in range(4))
        vertex[0], cursor[0], first[0] = root, process.begins[root], -1
        return (process.begins, process.targets, number.copy(), vertex, parent, cursor, first,
                np.zeros(2 * len(process.targets), np.int32), 0, 1, 0, 10**9)

    _, count, n = same(dominators.preorder, start, (2, 3, 4, 5, 6, 7))
    numbered = start()
    dominators.preorder(*numbered)
    _, vertex, parent, _, first, others = numbered[2:8]
    assert count - 1 + n == np.diff(process.begins)[vertex[:count]].sum()

    def immediate():
        return parent[:count].copy(), first[:count].copy(), others.copy(), count, n, *(np.zeros(count, np.int32) for _ in range(3))

    same(dominators.immediate, immediate, (1,))
    tree, dominator = process.tree, process.dominators.dominator

    def labelled():
        return (vertex, dominator, count, tree.parent, tree.via, -5, np.full(rows, -1, np.int32), np.zeros(rows, np.int32))

    same(dominators.tree, labelled, (6, 7))
    labels = labelled()
    dominators.tree(*labels)
    below = process.own.copy()
    graph.sum_tree(vertex, count, labels[6], below)
    assert (below[vertex[:count]] == process.dominators.retained(process.own)).all()
    high = (np.arange(count) % 3 == 0).astype(np.uint8)
    for large, several in ((10, -5000), (1 << 30, -5000), (1 << 30, -5)):        # some, all, more than there is room for
        found = same(dominators.heavy, lambda: (vertex, dominator, count, high, below, large, several,
                                                np.full(rows, several, np.int32)), (7,))
        assert 0 < found <= -several and (found == 5) == (several == -5)


class Objects:
    """A process of no blocks and these objects, the first of which is known from the start."""

    def __init__(self, nodes, edges):
        self.begins, self.targets = csr(nodes, edges)
        self.labels = np.arange(len(self.targets), dtype=np.int32)
        self.nodes, self.seeds = (), np.zeros(1, np.int32)

    def __len__(self):
        return len(self.begins) - 1


def test_each_label_is_told():
    """Also those of the first rows, that Lua's strings may have."""
    parent = np.array([-1, 0, 0, 0, 0], np.int32)
    via = Process._via(Objects(5, [(0, k) for k in range(1, 5)]), np.arange(5, dtype=np.int32), 5, parent)
    assert via.tolist() == [0, 0, 1, 2, 3]
