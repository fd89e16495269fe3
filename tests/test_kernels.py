"""The compiled form of every kernel against its array form, on real heaps and on damaged ones."""
import lzma

import numpy as np
import pytest

from gdbleak.heaps import glibc, nginx_layouts
from gdbleak.kernels import chunks, pools
from gdbleak.target.core_file import open_core

from .targets import ROOT

def both(kernel, arguments):
    """The results of both forms of a kernel; `arguments()` makes a fresh set for each."""
    compiled = kernel.compiled()
    assert compiled is not None, "Numba is part of the test environment"
    found = []
    for form in (compiled, kernel.array_form):
        given = arguments()
        result = form(*given)
        found.append((tuple(map(int, result)) if isinstance(result, tuple) else result, given))
    return found


def same(kernel, arguments, changed=()):
    """Both forms return the same and leave the same in the arguments `changed`."""
    (first, ours), (second, theirs) = both(kernel, arguments)
    assert first == second
    for k in changed:
        assert (ours[k] == theirs[k]).all(), f"argument {k}"
    return first


class Space:
    """A buffer that is also target memory from address 4096 on, for hand-made heaps."""

    def __init__(self, words):
        self.words = np.array(words, np.uint64)

    @property
    def buffer(self):
        return (self.words, np.array([4096], np.uint64), np.array([4096 + 8 * len(self.words)], np.uint64),
                np.array([0], np.uint64))


def scratch(count):
    return np.zeros(count, np.uint64), np.zeros(count, np.uint64), np.zeros(count, np.uint8)


@pytest.fixture(scope="module")
def shipped_core(tmp_path_factory):
    """The shipped core of a leaky nginx, unpacked."""
    core = tmp_path_factory.mktemp("shipped") / "nginx-leaky.core"
    core.write_bytes(lzma.decompress((ROOT / "fixtures" / "cores" / "nginx-leaky.core.xz").read_bytes()))
    return core


@pytest.fixture(scope="module")
def heaps(captured):
    """(target, its glibc heap) of programs with fastbins, thread caches,
    several arenas and a brk that others use too."""
    found = []
    for scenario in ("plain", "fastbins", "threads", "foreign_sbrk", "mapped"):
        target = open_core(str(captured("heaps", scenario).core))
        found.append((target, glibc.find(target)[0]))
    return found


def buffer_of(target):
    table = target.space.table()
    return target.space.words, table.starts, table.ends, table.offsets


def test_walk(heaps):
    for target, heap in heaps:
        for region in heap.regions:
            count = (region.end - region.start) // 32 + 2
            for budget in (count, 7):
                same(chunks.walk, lambda: (*buffer_of(target), region.start, region.end, *scratch(count), 0, 0, budget,
                                           np.zeros(2, np.uint64)), (6, 7, 8, 12))


def test_walk_of_random_words():
    random = np.random.default_rng(1)
    for _ in range(300):
        words = random.choice(np.array([0, 1, 0x10, 0x11, 0x20, 0x21, 0x30, 0x31, 0x41, 0x101, 1 << 40, (1 << 64) - 1],
                                       np.uint64), 64)
        space = Space(words)
        same(chunks.walk, lambda: (*space.buffer, 4096, 4096 + 8 * 64, *scratch(64), 0, 0, 64, np.zeros(2, np.uint64)),
             (6, 7, 8, 12))


def long_heap(random, contents, count=20_000):
    """Words of `count` chunks in a row, one in ten of them free; `contents`: what may be in the blocks."""
    units = random.choice([2, 3, 4, 5, 9, 17, 65, 300], count, p=[.2, .3, .15, .1, .1, .1, .04, .01])
    begin = np.concatenate([[0], 2 * np.cumsum(units)])
    words = random.choice(np.array(contents, np.uint64), begin[-1] + 2)
    free = random.random(count) < 0.1
    words[begin[:-1] + 1] = 16 * units + 1
    words[begin[1:][free] + 1] &= np.uint64(0xfffffffffffffffe)
    words[begin[1:][free]] = 16 * units[free]
    words[begin[-1] + 1] = 0x11
    return words, begin


DAMAGED = [0, 0x10, 0x18, 0x28, 0x41, 0x1001, 1 << 40, (1 << 64) - 1]
PLAUSIBLE = [0, 0x20, 0x21, 0x30, 0x31, 0x51, 0x61, 0x401, 1 << 46, (1 << 64) - 1]


@pytest.mark.parametrize("contents", [[0], [0x21], [0x31], [0x21, 0x28], PLAUSIBLE], ids=str)
def test_walk_of_many_chunks(contents):
    """What is in the blocks looks like chunks, sizes are damaged, memory is missing."""
    random = np.random.default_rng(4)
    for damaged in (0, 1, 5, 200):
        words, begin = long_heap(random, contents)
        places = random.choice(begin[100:-1], damaged, replace=False)
        words[places + 1] = random.choice(np.array(DAMAGED, np.uint64), damaged)
        low, high, room = 1 << 20, (1 << 20) + 8 * len(words), len(words) // 4
        cut = int(random.choice(begin[1000:]))
        middle = low + 8 * cut
        apart = np.insert(words, cut, [7, 7])                # what is behind the cut lies elsewhere
        for given, table in ((words, ([low], [high], [0])),
                             (apart, ([low, middle], [middle, high], [0, middle + 16 - low])),
                             (words, ([low, middle + 64], [middle, high], [0, middle + 64 - low]))):
            table = [np.array(column, np.uint64) for column in table]
            for budget in (room, 7000, 300):
                for start in (0, int(begin[300])):
                    same(chunks.walk, lambda: (given, *table, low + 8 * start, high, *scratch(room + 3), 3, 2, budget,
                                               np.zeros(2, np.uint64)), (6, 7, 8, 12))


def test_walk_looks_ahead():
    """Chunks in a row are found many at a time: those of `_ahead` lead from one to the next."""
    words, begin = long_heap(np.random.default_rng(5), [0] * 8 + [0x28, 0x31, 1 << 46])
    known, breaks = chunks._ahead(words.view(np.int64), 1, len(words), 20, len(begin))
    whole = known[:breaks[0] + 1]
    assert len(whole) > len(begin) / 4 and (whole == begin[:len(whole)] + 1).all()


def test_follow_of_random_lists():
    """Links that are safe-linked or not, to the chunk or to what the user has, and some that lead nowhere."""
    random = np.random.default_rng(6)
    for protect in (0, 1, 2, 3):
        for _ in range(50):
            words, begin = long_heap(random, [0], 40)
            at = 4096 + 8 * begin[:-1] + 16
            chain = random.permutation(at[1:])[:10].tolist()
            for user, following in zip(chain, chain[1:] + [0]):
                link = following - 16 if following and protect & 2 else following
                link = random.choice([link, link, link, link, link, link, link, link + 8, 5, chain[0]])
                words[user - 4096 >> 3] = link ^ (user >> 12 if protect & 1 else 0)
            sizes = 8 * np.diff(begin).astype(np.uint64)
            for only in (0, sizes[1]):
                state = np.full(40, chunks.IN_USE, np.uint8)
                state[random.integers(0, 40)] = chunks.FREE
                same(chunks.follow, lambda: (*Space(words).buffer, chain[0], protect, at.astype(np.uint64), sizes,
                                             state.copy(), 0, 40, only, chunks.TCACHED, 1000), (8,))


def test_reach_and_resume():
    random = np.random.default_rng(2)
    for _ in range(300):
        space = Space(random.choice(np.array([0, 0, 0x10, 0x11, 0x21, 0x31, 0x20, 0x51, 0x1001], np.uint64), 128))

        def steps():
            made = np.zeros(65, np.uint8)
            made[64] = chunks.ANCHORED
            return made

        for budget in (64, 5):
            same(chunks.reach, lambda: (*space.buffer, 4096, 4096 + 8 * 128, 64, budget, 32, 1, steps()), (10,))
        reached = steps()
        chunks.reach(*space.buffer, 4096, 4096 + 8 * 128, 64, 64, 32, 1, reached)
        for least in (2, chunks.ANCHORED):
            for fresh in (0, 1):
                same(chunks.resume, lambda: (*space.buffer, 4096, 7, 64, least, fresh, reached))


def test_follow_lists(heaps):
    for target, heap in heaps:
        blocks = heap.blocks
        for tcache in heap.tcaches:
            entries = np.frombuffer(target.space.read(tcache.address, 640), np.uint64, 64, 128)
            for entry in entries[entries != 0]:
                state = blocks.state.copy()
                state[state == chunks.TCACHED] = chunks.IN_USE
                count = same(chunks.follow, lambda: (*buffer_of(target), entry, 1, blocks.address, blocks.size,
                                                     state.copy(), 0, len(blocks), 0, chunks.TCACHED, 1000), (8,))[0]
                assert count > 0
        for arena in heap.arenas:
            bins_at = arena.address + heap.state.fields["bins"][1]
            for k in range(127):
                same(chunks.follow_bin, lambda: (*buffer_of(target), bins_at + 16 * k - 16, len(blocks)))


def test_histogram(heaps):
    for _, heap in heaps:
        same(chunks.histogram, lambda: (heap.blocks.size, heap.blocks.state, np.zeros(512, np.int64),
                                        np.zeros(512, np.int64)), (2, 3))


def test_pools_on_a_heap_without_any(heaps):
    """No block of a plain C program has the shape of a pool; both forms agree on each."""
    for target, heap in heaps:
        count = same(pools.candidates, lambda: candidate_arguments(target, heap), (9,))
        rows = candidate_arguments(target, heap)
        pools.candidates(*rows)
        found = rows[9][:count]
        assert same(pools.measure, lambda: measure_arguments(target, heap, found), (9, 10)) == 0


def candidate_arguments(target, heap):
    words, starts, ends, offsets = buffer_of(target)
    signed = [array.view(np.int64) for array in (words, starts, ends, offsets, heap.blocks.address, heap.blocks.size)]
    return (*signed, heap.blocks.state, 80, 4096, np.zeros(len(heap.blocks), np.int64))


def measure_arguments(target, heap, rows):
    return (*candidate_arguments(target, heap)[:7], rows, 80, np.zeros(len(heap.blocks), np.int32),
            np.zeros(max(len(rows), 1) * pools.COLUMNS, np.int64))


def test_pools_of_the_shipped_core(shipped_core):
    target = open_core(str(shipped_core))
    heap = glibc.find(target)[0]
    count = same(pools.candidates, lambda: candidate_arguments(target, heap), (9,))
    assert count > 0
    rows = candidate_arguments(target, heap)
    pools.candidates(*rows)
    found = rows[9][:count].copy()
    assert same(pools.measure, lambda: measure_arguments(target, heap, found), (9, 10)) > 0


def test_damaged_pools(shipped_core):
    """One word after the other of real pools is overwritten: both forms still agree, and return."""
    random = np.random.default_rng(3)
    target = open_core(str(shipped_core))
    heap = glibc.find(target)[0]
    rows = candidate_arguments(target, heap)
    found = rows[9][:pools.candidates(*rows)].copy()
    original = rows[0][:shipped_core.stat().st_size // 8]   # the core itself; what is reserved behind it is far larger
    for _ in range(20):
        row = random.choice(found)
        place = target.space.find(int(heap.blocks.address[row]))[0] // 8 + \
            int(random.integers(nginx_layouts.POOL.itemsize // 8))
        words = original.copy()
        words[place] = random.choice([0, -1, int(heap.blocks.address[random.choice(found)]), 1 << 40, words[place] + 8])
        same(pools.measure, lambda: (words, *measure_arguments(target, heap, found)[1:]), (9, 10))
