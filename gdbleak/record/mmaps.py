"""What a process maps in some seconds and does not unmap: every mmap, munmap, mremap and brk that goes through libc."""
from __future__ import annotations

import bisect
import os
import time
from collections import defaultdict, deque
from typing import Iterator, NamedTuple

import numpy as np

from ..reports.document import Table, printable
from ..target.live import Mapping, without
from ..target.processes import statistics_of
from ..target.ptrace import LiveError, own_id
from . import agent as agents
from . import session, tracee
from .agent import word
from .install import Installation, Target
from .leaks import Recording
from .session import Course
from .unwind import Stacks

CALLS = {"mmap": agents.MMAP, "munmap": agents.MUNMAP, "mremap": agents.MREMAP, "brk": agents.BRK}
SLOTS, SLOT_BYTES = 1 << 12, 8192 + 128 + 48
_ARGUMENTS = 48         # bytes at the end of a slot
_STACK_BYTES = SLOT_BYTES - agents.SLOT.itemsize - _ARGUMENTS
_LOOK = 0.02            # seconds between two readings of the ring
OTHERWISE = "strace -k -e trace=memory shows such calls, slowly"
_PAGE, _HUGE = 4096, 2 << 20
_FIXED, _ANONYMOUS, _NORESERVE, _STACK, _HUGETLB, _DONTUNMAP = 0x10, 0x20, 0x4000, 0x20000, 0x40000, 4
_FAILED = (1 << 64) - 1
HEAP, ARENA, BLOCK, THREAD, ANONYMOUS = "malloc's heap", "malloc arena", "malloc block", "thread stack", "anonymous"
BREAK = "heap by brk"
BEFORE = -1


class Event(NamedTuple):
    """One call that succeeded: the agent's clock before and after it, its arguments and result, and which stack."""

    before: int
    after: int
    kind: int
    arguments: tuple
    result: int
    stack: int


class Piece(NamedTuple):
    """Bytes that are mapped: by which stack (or BEFORE the window), which kind of call, which protection and flags."""

    start: int
    end: int
    stack: int
    kind: int
    protection: int
    flags: int


class Pieces:
    """Disjoint pieces of the address space, by address."""

    def __init__(self):
        self._starts: list[int] = []
        self._all: list[Piece] = []

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._all)

    def add(self, piece: Piece) -> None:
        """Add a piece where none is."""
        if piece.start < piece.end:
            at = bisect.bisect(self._starts, piece.start)
            self._starts.insert(at, piece.start)
            self._all.insert(at, piece)

    def lift(self, start: int, end: int) -> list[Piece]:
        """Take what lies in [start, end) out, cut at its ends."""
        first = bisect.bisect_right(self._starts, start) - 1
        first = first if first >= 0 and self._all[first].end > start else first + 1
        last = bisect.bisect_left(self._starts, end, first)
        found = self._all[first:last]
        del self._all[first:last], self._starts[first:last]
        for piece in found:
            self.add(piece._replace(end=min(piece.end, start)))
            self.add(piece._replace(start=max(piece.start, end)))
        return [piece._replace(start=max(piece.start, start), end=min(piece.end, end)) for piece in found]


def replay(events: list[Event], break_address: int) -> Pieces:
    """What stays mapped of what the events mapped. A release counts from before its call, a mapping from after it: so
    an address that another thread got meanwhile is not mistaken."""
    pieces, moved = Pieces(), {}
    for _, is_after, event in sorted([(event.before, False, event) for event in events]
                                     + [(event.after, True, event) for event in events]):
        a, b, c, d = event.arguments[:4]
        if event.kind == agents.MMAP and is_after:
            size = _rounded(b, d)
            pieces.lift(event.result, event.result + size)
            pieces.add(Piece(event.result, event.result + size, event.stack, event.kind, c, d))
        elif event.kind == agents.MUNMAP and not is_after:
            pieces.lift(a, a + _rounded(b))
        elif event.kind == agents.MREMAP:
            if not is_after:
                moved[id(event)] = pieces.lift(a, a + _rounded(b))
            else:
                _move(pieces, event, moved.pop(id(event)))
        elif event.kind == agents.BRK and is_after:
            if a > break_address:
                pieces.add(Piece(break_address, a, event.stack, event.kind, 3, _ANONYMOUS))
            else:
                pieces.lift(a, break_address)
            break_address = a
    return pieces


def _move(pieces, event, lifted):
    """mremap: what was there keeps who mapped it; what is added is this call's."""
    old, old_size, new_size, flags = event.arguments[0], *map(_rounded, event.arguments[1:3]), event.arguments[3]
    shift, end = event.result - old, event.result + new_size
    pieces.lift(event.result, end)
    if flags & _DONTUNMAP:
        for piece in lifted:
            pieces.add(piece)
    kept = min(event.result + old_size, end)
    pieces.add(Piece(event.result, kept, BEFORE, agents.MREMAP, 3, _ANONYMOUS))     # what was mapped before the window,
    for piece in lifted:                                                            # less what was not
        pieces.lift(piece.start + shift, min(piece.end + shift, end))
        pieces.add(piece._replace(start=piece.start + shift, end=min(piece.end + shift, end)))
    like = lifted[-1] if lifted else Piece(0, 0, 0, agents.MREMAP, 3, _ANONYMOUS)
    pieces.add(like._replace(start=event.result + old_size, end=end, stack=event.stack))


def _rounded(size: int, flags: int = 0) -> int:
    page = _HUGE if flags & _HUGETLB else _PAGE
    return (size + page - 1) // page * page


class _Ring:
    """The records that the agent writes, in order: `count` calls that succeeded. Of those that still matter, by number:
    `events`, and the `rows` (agent.SLOT) and `stacks` of those that map."""

    def __init__(self, installation: Installation):
        self._installation = installation
        self._tail = self.count = 0
        self.rows: dict[int, bytes] = {}
        self.stacks: dict[int, bytes] = {}
        self.events: dict[int, Event] = {}
        self._whole: dict[int, tuple[int, int]] = {}        # start -> (end, number) of a mapping that nothing has touched
        self._over: deque[tuple[int, int]] = deque()        # numbers of a mmap and of the munmap of just that

    def drain(self) -> None:
        """Take what has been written. OSError when the process is gone."""
        installation = self._installation
        head = installation.read("taken")
        while self._tail < head:
            at = installation.room + self._tail % SLOTS * SLOT_BYTES
            data = installation.memory.read(at, SLOT_BYTES)
            row = np.frombuffer(data[:agents.SLOT.itemsize], agents.SLOT)[0]
            if int(row["ready"]) != self._tail + 1 & 0xffffffff:
                break                           # its writer is still at it
            self._take(row, data)
            self._tail += 1
        installation.write("ring_tail", self._tail)
        installation.write("waits", 0)

    def _take(self, row, data):
        kind, result = int(row["kind"]), int(row["pointer"])
        arguments = tuple(memoryview(data[-_ARGUMENTS:]).cast("Q"))
        if result == _FAILED or kind in (agents.MUNMAP, agents.BRK) and result & 0xffffffff:
            return
        if kind == agents.BRK and not arguments[0]:     # it only asks
            return
        length = min(int(row["stack_length"]), _STACK_BYTES) & ~7
        number = self.count
        self.count += 1
        event = self.events[number] = Event(int(row["before"]), int(row["after"]), kind, arguments, result, number)
        if kind != agents.MUNMAP:
            self.rows[number] = row.tobytes()
            self.stacks[number] = data[agents.SLOT.itemsize:agents.SLOT.itemsize + length]
        self._pair(event)
        self._forget()

    def _pair(self, event):
        """Note a mapping that is unmapped just as it was mapped."""
        start, size, _, flags = event.arguments[:4]
        if event.kind == agents.MMAP and not flags & _FIXED:
            self._whole[event.result] = event.result + _rounded(size, flags), event.stack
        elif event.kind == agents.MUNMAP:
            end, number = self._whole.pop(start, (0, 0))
            if end == start + _rounded(size) and self.events[number].after < event.before:
                self._over.append((number, event.stack))
            else:
                self._whole.clear()             # it may be a part of any
        elif event.kind != agents.BRK:
            self._whole.clear()

    def _forget(self):
        """Forget such pairs, which leave nothing behind, or the stacks of some seconds could take all memory; not before
        the calls that were under way meanwhile have been read, too."""
        while self._over and self._over[0][1] < self.count - SLOTS:
            mapped, unmapped = self._over.popleft()
            del self.events[mapped], self.events[unmapped], self.rows[mapped], self.stacks[mapped]


class MappingCalls(session.Session):
    """A recording of the mapping calls of process `pid`. Raises LiveError."""

    look_every = _LOOK

    def __init__(self, pid: int, kind=Installation):
        super().__init__(pid)
        target = self._target = Target(pid)
        target.check_calls(agents.MAPPING_CALLS, OTHERWISE)
        self._image = target.process.definer("mmap")
        found = (target.function(name, self._image) for name in CALLS) if self._image else ()
        self._hooks = [hook for hook in found if hook]
        self._restricting = target.restricting()
        if not any(hook.name == "mmap" for hook in self._hooks):
            raise LiveError("no symbol tells where mmap is: a static program that was stripped cannot be recorded")
        self._heaps = [(hook.address, hook.address + len(hook.body))
                       for hook in map(target.function, agents.MALLOC) if hook and hook.name not in agents.RELEASES]
        self.installation = kind(target, agents.Agent())
        self._ring = _Ring(self.installation)

    def install(self) -> None:
        installation = self.installation
        self._start_break = _break(self._target, self._image)
        installation.install(self._hooks + self._restricting, self._image, SLOTS * SLOT_BYTES, lambda: {
            "state": agents.SAMPLING.to_bytes(4, "little"), "slots": word(installation.room),
            "slot_count": word(SLOTS), "slot_bytes": word(SLOT_BYTES), "stack_bytes": word(_STACK_BYTES),
            "pid": word(own_id(self.pid))})
        self._before = _own(self._target, installation)
        super().install()

    def look(self) -> str:
        self._ring.drain()
        return super().look() + f", {self._ring.count:,} calls"

    def collect(self) -> None:
        self.look()
        self.installation.write("state", agents.PASSIVE, 4)
        self._after = _own(self._target, self.installation)        # at once: what is mapped from now on is not recorded
        time.sleep(_LOOK)
        self._ring.drain()
        self._dropped = self.installation.read("dropped")
        super().collect()

    def recording(self, course: Course) -> Recording:
        ring, after = self._ring, self._after
        recording = Recording(
            "mmaps", self.pid, f"Mmap Leak Flame Graph for {self.name} ({course.lasted:.3g} seconds sampling)",
            f"Mapped in {course.lasted:.3g} s and not unmapped {course.held}. Every call through libc.", noun="mappings")
        kept = _still_there(replay(list(ring.events.values()), self._start_break), after)
        _name(recording, kept, ring, self.unwinder, self._heaps)
        unseen = _unseen(self._before, after, kept)
        recording.facts = [f"pid {self.pid}: {ring.count:,} calls that succeeded", course.manner, course.outcome]
        if unseen:
            recording.facts.append(f"{unseen:,} bytes more were mapped otherwise: by the dynamic linker, or by system "
                                   "calls that go past libc")
        if self._dropped:
            recording.partial.append(f"{self._dropped:,} calls were lost: they came faster than they could be read")
        recording.partial += self.quiet(OTHERWISE)
        recording.numbers = {"seconds": round(course.lasted, 3), "calls": ring.count, "dropped": self._dropped,
                             "unseen": unseen, **course.facts}
        return recording


def _break(target, image) -> int:
    """The program's break now."""
    symbol = image.symbols.address("__curbrk")
    now = int.from_bytes(target.memory.read(symbol, 8), "little") if symbol else 0
    return now or next((m.end for m in target.process.maps if m.path == "[heap]"), 0) or _first_break(target)


def _first_break(target) -> int:
    """The break that the program began with."""
    return int(statistics_of(target.memory.tid)[44])


def _own(target, installation) -> list[Mapping]:
    """The process's mappings without the agent's, which the kernel may have joined with others."""
    ours = sorted(map(tuple, installation.guard.plan.regions))
    return [m._replace(start=start, end=end) for m in tracee.mappings_of(target.pid)
            for start, end in without([(m.start, m.end)], ours)]


def _still_there(pieces: Pieces, maps: list[Mapping]) -> list[tuple[Piece, Mapping]]:
    """The pieces, cut to what is mapped at the end, each with its mapping."""
    starts, found = [m.start for m in maps], []
    for piece in pieces:
        k = max(bisect.bisect_right(starts, piece.start) - 1, 0)
        while k < len(maps) and maps[k].start < piece.end:
            low, high = max(piece.start, maps[k].start), min(piece.end, _rounded(maps[k].end))
            if low < high:
                found.append((piece._replace(start=low, end=high), maps[k]))
            k += 1
    return found


def _unseen(before, after, kept) -> int:
    """Bytes that are mapped now, were not before, and that no recorded call mapped."""
    seen = Pieces()
    for mapping in after:
        seen.add(Piece(mapping.start, mapping.end, 0, 0, 0, 0))
    for mapping in before:
        seen.lift(mapping.start, mapping.end)
    for piece, _ in kept:
        seen.lift(piece.start // _PAGE * _PAGE, _rounded(piece.end))
    return sum(piece.end - piece.start for piece in seen)


def _name(recording, kept, ring, unwinder, heaps):
    """Fill the recording with the pieces' stacks, and its table with the mappings."""
    kept = [(piece, mapping) for piece, mapping in kept if piece.stack != BEFORE]
    wanted = sorted({piece.stack for piece, _ in kept})
    rows = np.frombuffer(b"".join(ring.rows[index] for index in wanted), agents.SLOT)
    words = np.zeros((len(wanted), _STACK_BYTES // 8), np.uint64)
    for k, index in enumerate(wanted):
        words[k, :len(ring.stacks[index]) // 8] = np.frombuffer(ring.stacks[index], np.uint64)
    found = dict(zip(wanted, unwinder.unwind(Stacks(rows, words)))) if wanted else {}
    lines = defaultdict(int)
    for piece, mapping in kept:
        frames = unwinder.frames(found[piece.stack])
        what = kind_of(piece, any(start <= pc < end for pc in found[piece.stack] for start, end in heaps))
        if mapping.inode and not piece.flags & _ANONYMOUS:
            what, top = f"file {os.path.basename(mapping.path)}", "file"
        else:
            top = "anonymous"
        size = piece.end - piece.start
        recording.add((top, *frames, f"[{what}]"), size)
        lines[mapping.start, mapping.end, what, piece.stack] += size
    recording.extra = lambda limit: _table(lines, found, unwinder, limit)


def kind_of(piece: Piece, from_malloc: bool) -> str:
    """What an anonymous mapping is for."""
    if piece.kind == agents.BRK:
        return HEAP if from_malloc else BREAK
    if piece.flags & _STACK:
        return THREAD
    if from_malloc:
        return ARENA if piece.flags & _NORESERVE and piece.protection == 0 else BLOCK
    return ANONYMOUS


def _table(lines, found, unwinder, limit) -> Table:
    ranked = sorted(lines.items(), key=lambda item: (-item[1], item[0]))
    rows = []
    for (start, end, what, stack), size in ranked[:limit]:
        names = [printable(name, 80) for name in unwinder.frames(found[stack])[::-1][:4]]
        rows.append([f"{start:#x}-{end:#x}", size, printable(what), " < ".join(names)])
    rest = len(ranked) - limit
    return Table(["mapping", "bytes", "what", "mapped by"], rows, left=(0, 2, 3),
                 footer=f"and {rest:,} more" if rest > 0 else "")
