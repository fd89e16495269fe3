"""The two forms of the kernels of leak-types, on the heap of a C++ program, on damaged ones and on random words."""
import numpy as np
import pytest

from gdbleak.graph import containers as graph
from gdbleak.graph import roots
from gdbleak.graph.classes import Classes
from gdbleak.graph.nodes import Nodes
from gdbleak.heaps import glibc
from gdbleak.kernels import containers, owners, types
from gdbleak.kernels.pointers import NO_NODE
from gdbleak.target.core_file import open_core
from tests.targets import build, capture
from tests.test_kernels import same

PAGE = 4096
BUDGET = 1 << 40


@pytest.fixture(scope="module")
def heap(tmp_path_factory):
    """What the kernels take of a C++ program's core: a Memory."""
    core = capture(build("types.cc", "-O2"), tmp_path_factory.mktemp("types"))
    target = open_core(str(core.core), str(core.exe))
    return Memory(target, Nodes(target, glibc.find(target)))


class Memory:
    """Arguments of the kernels: `buffer`, `index` (with `seen`), `modules`, `spans` (of blocks and other memory)."""

    def __init__(self, target, nodes):
        words, starts, ends, offsets = graph.buffer_of(target.space)
        used = int((offsets + ends - starts).max()) >> 3         # what is reserved behind it is far larger
        self.buffer = words[:used].copy(), starts, ends, offsets
        index = [column.view(np.int64) if column.dtype == np.uint64 else column for column in nodes.index]
        self.index = (*index, nodes.seen)
        classes = Classes(target)
        self.modules = classes.starts.view(np.int64), classes.ends.view(np.int64)
        areas = roots.find_areas(target, nodes.heaps, [])
        rows = np.flatnonzero(nodes.seen != NO_NODE)
        self.address, self.size = self.index[5], self.index[6]
        starts = [self.address[rows], np.array([area.start + 7 & -8 for area in areas])]
        ends = [self.address[rows] + self.size[rows] - 8, np.array([area.end & -8 for area in areas])]
        self.spans = np.concatenate(starts), np.concatenate(ends)
        self.room = sum(len(part) for part in self.spans) + int((self.spans[1] - self.spans[0]).sum()) // 8

    def with_words(self, words):
        """The same with other contents."""
        other = object.__new__(Memory)
        other.__dict__.update(self.__dict__, buffer=(words, *self.buffer[1:]))
        return other


def check_heads(memory, room=1 << 12):
    """How each block begins; how many words point into modules."""
    def arguments():
        return (*memory.buffer, *memory.modules, memory.address, memory.size, memory.index[7],
                np.empty(len(memory.address), np.int32), np.full(4 * room, -1, np.int32), np.zeros(room, np.int64), 0)
    return same(types.heads, arguments, (9, 11))


def check_containers(memory):
    """Headers, what follows from them, and links; the kinds at the end."""
    blocks = len(memory.address)

    def arguments():
        return (*memory.buffer, *memory.index, *memory.spans, PAGE, np.zeros(blocks, np.uint8),
                np.zeros(memory.room, np.int64), np.zeros(memory.room, np.uint8), 0)
    n = same(containers.headers, arguments, (15,))
    ours, theirs = arguments(), arguments()
    containers.headers.compiled()(*ours)
    containers.headers.array_form(*theirs)
    assert sorted(zip(ours[16][:n], ours[17][:n])) == sorted(zip(theirs[16][:n], theirs[17][:n]))
    kind, headers = ours[15], (ours[16], ours[17])

    def followed(*more):
        return lambda: (*memory.buffer, *memory.index, *headers, 0, n, BUDGET, *more, kind.copy(), *(
            () if more else (np.zeros(blocks, np.uint8),)), np.zeros(blocks, np.int32))
    for kernel, more, at in ((containers.containers, (PAGE,), 18), (containers.rings, (), 17)):
        assert same(kernel, followed(*more), (at,)) == n
        changed = followed(*more)()
        kernel(*changed)
        kind = changed[at]
    for ends_too in (0, 1):
        def linked():
            return (*memory.buffer, memory.address, memory.size, memory.index[7], kind.copy(), 0, blocks, ends_too)
        same(containers.links, linked, (7,))
        changed = linked()
        containers.links(*changed)
        kind = changed[7]
    return kind


def test_heads(heap):
    assert check_heads(heap) > 5


def test_more_words_than_there_is_room_for(heap):
    assert check_heads(heap, 4) == 4


def test_containers(heap):
    """There is something of each kind."""
    assert set(check_containers(heap).tolist()) == set(range(11))


def test_a_budget_stops_and_goes_on(heap):
    """Headers that are followed in many steps lead to the same."""
    arguments = (*heap.buffer, *heap.index, *heap.spans, PAGE, np.zeros(len(heap.address), np.uint8),
                 np.zeros(heap.room, np.int64), np.zeros(heap.room, np.uint8), 0)
    n = containers.headers(*arguments)
    found = []
    for budget in (BUDGET, 1):
        kind, tried = arguments[15].copy(), np.zeros(len(heap.address), np.uint8)
        steps = 0
        for kernel, more in ((containers.containers, (PAGE, kind)), (containers.rings, (kind, tried))):
            done = 0
            while done < n:
                done = kernel(*heap.buffer, *heap.index, *arguments[16:18], done, n, budget, *more,
                              np.zeros(len(heap.address), np.int32))
                steps += 1
        found.append((kind, steps))
    assert (found[0][0] == found[1][0]).all() and found[1][1] > found[0][1] == 2


def test_damaged_containers(heap):
    """Words of the heap and of headers are overwritten with others found there: both forms agree, and return."""
    random = np.random.default_rng(1)
    places = [(start + heap.buffer[3][k] - heap.buffer[1][k]) >> 3
              for k in range(len(heap.buffer[1])) for start in heap.address[
                  (heap.address >= heap.buffer[1][k]) & (heap.address < heap.buffer[2][k])]]
    for _ in range(4):
        words = heap.buffer[0].copy()
        for place in random.choice(places, 400):
            at = int(place) + int(random.integers(0, 4))
            words[at] = random.choice([0, 1, -1, int(random.choice(heap.address)), words[at] + 16, words[at - 1],
                                       1 << 40, -(1 << 63), (1 << 63) - 1])
        damaged = heap.with_words(words)
        check_heads(damaged)
        check_containers(damaged)


def random_memory(random):
    """A few blocks full of words that lead to one another, in three pieces with gaps between and within them."""
    count = 512
    address, size, at = [], [], 4096 + 16
    while at < 4096 + 8 * count - 64:
        length = int(random.choice([32, 32, 48, 64, 96, 528]))
        address.append(at)
        size.append(length)
        at += length
    address, size = np.array(address, np.int64), np.array(size, np.int64)
    last = np.array([4096 + 8 * count], np.int64)
    pool = [*address.tolist() * 3, *(address + 8).tolist(), *(address + size).tolist(), *range(16), 0, 0, 0, 0x3f800000,
            int.from_bytes(b"readable", "little"), int.from_bytes(b"shor\0\0\0\0", "little"), 2 << 32 | 9, 70000, 70008]
    words = random.choice(np.array(pool, np.int64), count)
    first = np.array([4096], np.int64)
    bits, rank = np.zeros(count // 64 + 2, np.uint64), np.zeros(count // 64 + 2, np.int32)
    regions = first.view(np.uint64), last.view(np.uint64), np.zeros(1, np.uint64)
    owners.index(*regions, address.view(np.uint64), bits, rank)
    seen = np.where(random.random(len(address)) < 0.1, np.uint8(NO_NODE), np.uint8(0))
    memory = object.__new__(Memory)
    memory.buffer = (words, np.array([4096, 5016, 7000]), np.array([5000, 6984, 4096 + 8 * count]),
                     np.array([0, 920, 2904]))
    memory.index = (first, last, np.zeros(1, np.int64), bits.view(np.int64), rank, address, size, seen)
    memory.modules = np.array([60000, 70000]), np.array([60008, 70004])
    memory.address, memory.size = address, size
    memory.spans = (np.concatenate([address, first]), np.concatenate([address + size - 8, last]))
    memory.room = 4 * count
    return memory


def test_random_words():
    random = np.random.default_rng(2)
    for _ in range(150):
        memory = random_memory(random)
        check_heads(memory)
        check_containers(memory)


def test_blocks_of_zeros():
    """Short and long ones, some with one word that is not zero."""
    random = np.random.default_rng(4)
    for _ in range(50):
        memory = random_memory(random)
        words = np.zeros(512, np.int64)
        words[random.integers(0, 512, 8)] = 1
        check_heads(memory.with_words(words))


def make_list(memory, nodes, header, payload):
    """Put a list of these blocks, with its header at an address, into the words."""
    words, (start, *_) = memory.buffer[0], memory.buffer[1]
    ring = [header, *nodes]

    def put(address, value):
        words[(address - start) >> 3] = value
    for k, node in enumerate(ring):
        put(node, ring[(k + 1) % len(ring)])
        put(node + 8, ring[k - 1])
        put(node + 16, len(nodes) if node == header else payload)


@pytest.mark.parametrize("payload", [0, 9, 10], ids=["no_numbers", "numbers", "the_same_number"])
def test_a_list_whose_header_begins_a_block(payload):
    """Such a header looks like the nodes; only its number tells, unless a node holds that number too."""
    memory = random_memory(np.random.default_rng(3))
    memory.buffer = (np.zeros(512, np.int64), np.array([4096]), np.array([4096 + 8 * 512]), np.array([0]))
    memory.index[7][:] = 0
    header, *nodes = memory.address[memory.size == 32][:11].tolist()
    make_list(memory, nodes, header, payload)
    kind = check_containers(memory)
    of = kind[np.searchsorted(memory.address, [header, *nodes])].tolist()
    assert len(nodes) == 10
    assert of == ([containers.LINK] * 11 if payload == 10 else [containers.LIST_HEADER] + 10 * [containers.LIST_NODE])
