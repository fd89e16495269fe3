"""The compiled form of the LuaJIT and graph kernels against their array form, on the Lua core that ships, whole and damaged."""
import lzma

import numpy as np
import pytest

from gdbleak.heaps import glibc
from gdbleak.kernels import graph, lj_alloc
from gdbleak.kernels import luajit as kernel
from gdbleak.runtimes import luajit
from gdbleak.target.core_file import open_core

from .targets import ROOT
from .test_kernels import same


@pytest.fixture(scope="module")
def vm(tmp_path_factory):
    core = tmp_path_factory.mktemp("lua") / "core"
    core.write_bytes(lzma.decompress((ROOT / "fixtures" / "cores" / "luajit-cache.core.xz").read_bytes()))
    target = open_core(str(core))
    return luajit.find(target, glibc.find(target))[0]


def rows(count):
    return np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.uint8), np.zeros(count, np.uint8)


def test_listing(vm):
    buffer, f, types = luajit.buffer_of(vm), luajit.vector(vm), luajit.ctype_sizes(vm)
    count = len(vm.objects) + 10
    first = vm.ref(vm.g + vm.layout.g_gc + vm.layout.GCState_root)
    for budget in (count, 50):
        assert same(kernel.objects, lambda: (*buffer, f, types, first, 0, vm.main, budget, *rows(count), 0),
                    (12, 13, 14, 15))[0]
    table = vm.ref(vm.g + vm.layout.g_str)
    found = same(kernel.strings, lambda: (*buffer, f, table, vm.string_buckets, *rows(count), 0), (9, 10, 11, 12))
    assert found[0] == int((vm.objects.kind == kernel.STR).sum()) > 0


def test_index_and_find(vm):
    address, count = vm.objects.address, len(vm.objects)
    same(kernel.index, lambda: (address, count, np.full(1 << 17, -1, np.int32)), (2,))
    wanted = np.concatenate([address[:500], address[:500] + 8])
    found = same(kernel.find_all, lambda: (address, vm.objects.slots, wanted, np.zeros(len(wanted), np.int32)), (3,))
    assert found == 500
    assert same(kernel.find, lambda: (address, vm.objects.slots, int(address[7]))) == 7


def edge_arguments(vm, words=None):
    buffer, objects, n = luajit.buffer_of(vm), vm.objects, len(vm.objects)
    if words is not None:
        buffer = (words.view(np.uint8), words.view(np.int32), words, *buffer[3:])
    maker = luajit._Graph(vm)
    room = int(objects.size.sum()) // 8 + (1 << 16)
    return (*buffer, luajit.vector(vm), maker._traces(), maker._weak(), objects.address, objects.kind, objects.slots, 0, n,
            np.zeros(n + 1, np.int32), np.zeros(room, np.int32), np.zeros(room, np.int32), 0)


def test_edges(vm):
    assert same(kernel.edges, lambda: edge_arguments(vm), (14, 15, 16)) == len(vm.graph.targets)


def test_edges_of_damaged_objects(vm):
    """One word after the other of real objects is overwritten: both forms still agree, and return."""
    random = np.random.default_rng(4)
    size = vm.target.space.find(vm.main)[0] // 8 + (1 << 20)
    original = np.array(luajit.buffer_of(vm)[2][:min(size, len(vm.target.space.words))])
    for _ in range(25):
        words = original.copy()
        for row in random.integers(0, len(vm.objects), 3):
            place = vm.target.space.find(int(vm.objects.address[row]))[0] // 8 + int(random.integers(1, 7))
            if place < len(words):
                words[place] = random.choice(np.array([0, -1, 1 << 46, words[place] + 8, 0x7fffffffffff]))
        same(kernel.edges, lambda: edge_arguments(vm, words), (14, 15, 16))


def test_tree_and_fold(vm):
    whole, n = vm.graph, len(vm.graph)
    roots = [row for _, row in whole.roots]

    def start():
        seen, parent, order = np.zeros(n, np.uint8), np.full(n, -1, np.int32), np.zeros(n, np.int32)
        first = list(dict.fromkeys(roots))
        order[:len(first)] = first
        seen[first], parent[first] = 1, -1 - np.arange(len(first))
        return whole.begins, whole.targets, 0, len(first), 10**9, seen, parent, order

    assert same(graph.bfs, start, (5, 6, 7))[0] == whole.tree.count
    tree = whole.tree
    same(graph.edges_used, lambda: (whole.begins, whole.targets, whole.labels, tree.order, tree.count, tree.parent,
                                    np.zeros(n, np.int32), np.zeros(n, np.uint8)), (6, 7))
    below = vm.objects.size.copy()
    same(graph.sum_tree, lambda: (tree.order, tree.count, tree.parent, vm.objects.size.copy()), (3,))
    graph.sum_tree(tree.order, tree.count, tree.parent, below)
    same(graph.count_named, lambda: (tree.order, tree.count, tree.parent, tree.via, np.zeros(n, np.uint8)), (4,))
    groups = whole.fold(tree, vm.objects.size, vm.objects.kind, np.full(n, -1, np.int32), kernel.MEMBER)
    assert int(groups.bytes.sum()) == int(vm.objects.size[tree.seen != 0].sum())
    assert int(groups.count.sum()) == tree.count


def test_allocator(vm):
    space, heap = vm.target.space, vm.allocator
    table = space.table()
    for segment in heap.segments:
        for top in (0, segment.start + segment.size - segment.top_bytes - segment.overhead):
            for room in (0, 100, segment.in_use_chunks):
                same(lj_alloc.walk, lambda: (space.words, table.starts, table.ends, table.offsets, segment.start,
                                             segment.start + segment.size, top, np.zeros(room, np.uint64),
                                             np.zeros(room, np.uint64)), (7, 8))
