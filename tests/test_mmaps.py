"""What live processes map and do not unmap, against what the processes say."""
import numpy as np
import pytest

from gdbleak.record import agent, mmaps, session
from tests import record_target
from tests.record_target import Subject, by_site, check_as_found, record, record_here, totals
from tests.targets import build

pytestmark = pytest.mark.skipif(bool(record_target.needs()), reason=record_target.needs() or "-")


@pytest.mark.parametrize("flags", [("-O2",), ("-O1", "-static"), ("-O2", "-no-pie")])
def test_mappings_equal_the_truth(flags):
    """Partial munmap, mremap that moves, grows and shrinks, MAP_FIXED over old maps, brk, files, thread stacks, arenas,
    forks, and four threads that take each other's addresses."""
    with Subject(build("record_maps", *flags).path) as subject:
        subject.line()
        items, stacks, truth = record("mmaps", subject, "go")
        found = by_site(stacks, truth)
        assert {site: found.get(site, 0) for site in truth} == truth
        told = totals(items)
        assert told["dropped"] == 0 and told["unseen"] == 0 and told["calls"] > 28_000
        kinds = {}
        for frames, weight in stacks:
            kinds.setdefault(frames[-1], set()).add(frames[0])
        assert kinds["[thread stack]"] == kinds["[malloc arena]"] == kinds["[malloc block]"] == {"anonymous"}
        assert [tops for kind, tops in kinds.items() if kind.startswith("[file ")] == [{"file"}]
        arena = sum(weight for frames, weight in stacks if frames[-1] == "[malloc arena]")
        assert arena == 64 << 20
        assert sum(weight for frames, weight in stacks if frames[-1] == "[thread stack]" and "keep_thread" in frames) \
            == truth["keep_thread"]
        tables = [item for item in items if item["type"] == "table"]
        assert len(tables) == 2 and tables[1]["data"][0][0] == "mapping"
        check_as_found(subject.pid)
        subject.say("quit")
        assert subject.process.wait(record_target.WAIT) == 0


def test_forks_while_the_ring_is_full(monkeypatch):
    """A child has a copy of it that nobody reads, and does not wait for room in it, which would last 20 s."""
    monkeypatch.setattr(mmaps, "SLOTS", 256)
    with Subject(build("record_maps", "-O2").path) as subject:
        subject.line()
        recording, _ = record_here(session.record, mmaps.MappingCalls, subject, "go", seconds=18)
        assert recording.numbers["calls"] > 28_000 and recording.numbers["dropped"] == 0
        check_as_found(subject.pid)


def event(at, kind, *arguments, result=0, stack=0, lasts=1):
    return mmaps.Event(at, at + lasts, kind, arguments + (0,) * (6 - len(arguments)), result, stack)


def left(*events, start_break=0):
    return [(piece.start, piece.end, piece.stack) for piece in mmaps.replay(list(events), start_break)]


PAGE = 4096


def test_replay_of_overlapping_calls():
    """Another thread gets an address while the call that gives it up has not returned."""
    first = event(1, agent.MMAP, 0, 4 * PAGE, 3, 0x22, result=0x10000, stack=1)
    unmaps = event(10, agent.MUNMAP, 0x10000, 4 * PAGE, lasts=10)
    second = event(12, agent.MMAP, 0, 4 * PAGE, 3, 0x22, result=0x10000, stack=2)
    assert left(first, unmaps, second) == [(0x10000, 0x14000, 2)]
    moves = event(10, agent.MREMAP, 0x10000, 4 * PAGE, 6 * PAGE, 1, result=0x30000, stack=3, lasts=10)
    assert left(first, moves, second) == [(0x10000, 0x14000, 2), (0x30000, 0x34000, 1), (0x34000, 0x36000, 3)]


def test_replay_of_parts():
    mapped = event(1, agent.MMAP, 0, 8 * PAGE, 3, 0x22, result=0x10000, stack=1)
    hole = event(3, agent.MUNMAP, 0x12000, 2 * PAGE)
    over = event(5, agent.MMAP, 0x11000, PAGE, 3, 0x32, result=0x11000, stack=2)
    assert left(mapped, hole) == [(0x10000, 0x12000, 1), (0x14000, 0x18000, 1)]
    assert left(mapped, hole, over) == [(0x10000, 0x11000, 1), (0x11000, 0x12000, 2), (0x14000, 0x18000, 1)]
    everything = event(7, agent.MUNMAP, 0, 1 << 40)
    assert left(mapped, hole, over, everything) == []
    grows, shrinks = event(1, agent.BRK, 0x5000, stack=4), event(3, agent.BRK, 0x2000, stack=5)
    assert left(grows, start_break=0x1000) == [(0x1000, 0x5000, 4)]
    assert left(grows, shrinks, start_break=0x1000) == [(0x1000, 0x2000, 4)]
    assert left(shrinks, start_break=0x4000) == []


class Records:
    """What the agent would have written into a ring, for `mmaps._Ring`: its installation and its memory."""
    room = 0

    def __init__(self):
        self.memory = self
        self.slots, self.taken = {}, 0

    def add(self, kind, *arguments, result=0):
        row = np.zeros(1, agent.SLOT)
        row["kind"], row["pointer"], row["ready"], row["stack_length"] = kind, result, self.taken + 1, 64
        row["before"], row["after"] = 2 * self.taken, 2 * self.taken + 1
        words = np.array(arguments + (0,) * (6 - len(arguments)), np.uint64)
        data = row.tobytes() + bytes(mmaps.SLOT_BYTES - agent.SLOT.itemsize - words.nbytes) + words.tobytes()
        self.slots[self.taken % mmaps.SLOTS * mmaps.SLOT_BYTES] = data
        self.taken += 1

    def read(self, what, size=None):
        return self.taken if what == "taken" else self.slots[what]

    def write(self, *_):
        pass


def test_what_leaves_nothing_behind_is_not_kept():
    """A window of any length fits into memory, and what stays is the same."""
    records, expected = Records(), []
    ring = mmaps._Ring(records)
    for k in range(20_000):
        at = 0x10000000 + k % 7 * 16 * PAGE
        records.add(agent.MMAP, 0, 2 * PAGE, 3, 0x22, result=at)
        if k % 1000 == 500:                                 # one stays, of another only a part, one is moved
            records.add(agent.MMAP, 0, 3 * PAGE, 3, 0x22, result=0x20000000 + k * PAGE)
            records.add(agent.MUNMAP, at, PAGE)
            records.add(agent.MREMAP, at + PAGE, PAGE, PAGE, 1, result=0x30000000 + k * PAGE)
            expected += [(0x20000000 + k * PAGE, 3 * PAGE), (0x30000000 + k * PAGE, PAGE)]
        else:
            records.add(agent.MUNMAP, at, 2 * PAGE)
        if k % 100 == 0:
            ring.drain()
    ring.drain()
    assert ring.count == records.taken == 40_040
    assert len(ring.events) < 2 * mmaps.SLOTS and len(ring.stacks) < len(ring.events)
    pieces = list(mmaps.replay(list(ring.events.values()), 0))
    assert [(piece.start, piece.end - piece.start) for piece in pieces] == sorted(expected)
    assert all(piece.stack in ring.stacks for piece in pieces)
