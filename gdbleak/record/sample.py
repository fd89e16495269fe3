"""The memory leak flame graph, sampled: by the agent."""
from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from ..target.ptrace import LiveError
from . import agent as agents
from . import session
from .agent import word
from .install import Installation, Target
from .leaks import Recording
from .lua import ROOM, LuaStacks
from .session import Course
from .unwind import Stacks

SLOTS, STACK_BYTES = 1 << 14, 8192
TICKS_A_QUANTUM = 1 << 24


class Options(NamedTuple):
    """by: "bytes" or "calls"; every: the mean distance of samples, 0: so many that there are `rate` a second; pools:
    nginx's pools in place of malloc's blocks; lua: with the Lua frames."""

    by: str = "bytes"
    every: int = 0
    rate: int = 10_000
    pools: bool = False
    lua: bool = False


def hooks_of(target: Target, pools: bool):
    """(hooks, the image they are in). Raises LiveError."""
    names = agents.POOLS if pools else {**agents.MALLOC, **agents.NEW, **agents.DELETE}
    needed = ("create", "destroy") if pools else ("malloc", "free")
    image = target.process.definer(names[needed[0]])
    if image is None:
        raise LiveError("no symbol tells where " + ("nginx's pools are made (is this nginx?)" if pools else
                        "malloc is: the program has none (as those in Go), or it is static and was stripped"))
    found = {name: target.function(symbol, image) for name, symbol in names.items()}
    missing = [name for name in needed if found[name] is None]
    if missing:
        raise LiveError(f"{image.name} does not tell where {' and '.join(sorted(missing))} is")
    return [hook._replace(name=name) for name, hook in found.items()
            if hook and found.get(agents.MAY_THROW.get(name, name))], image


class Sampling(session.Session):
    """A sampled recording of process `pid`. Raises LiveError."""

    def __init__(self, options: Options, pid: int, kind=Installation):
        super().__init__(pid)
        self._options = options
        target = Target(pid)
        target.check_calls(agents.SAMPLING_CALLS, "use --exact")
        self._hooks, self._image = hooks_of(target, options.pools)
        self._restricting = target.restricting()
        self._lua = LuaStacks(pid) if options.lua else None
        self.installation = kind(target, agents.Agent(options.by == "calls"))

    def install(self) -> None:
        self.installation.install(self._hooks + self._restricting, self._image, room_bytes(), lambda: {
            **settings(self.installation, self._hooks, self._options), **(self._lua.settings if self._lua else {})})
        super().install()

    def watch_frees(self) -> None:
        if self.installation.read("state", 4) != agents.QUIET:
            self.installation.write("state", agents.FREES_ONLY, 4)

    def collect(self) -> None:
        installation = self.installation
        self.look()
        installation.write("state", agents.PASSIVE, 4)
        self._samples = _read(installation)
        names = "taken", "released", "thinned", "missed", "dropped", "mean"
        self._counters = {name: installation.read(name) for name in names}
        super().collect()
        if self._lua:
            self._lua.look_again()

    def recording(self, course: Course) -> Recording:
        rows, memory, areas = self._samples
        unwinder, lua = self.unwinder, self._lua
        found = unwinder.unwind(Stacks(rows, memory))
        stacks = [tuple(unwinder.frames(addresses)) for addresses in found]
        if lua:
            stacks = [lua.insert(*each, self.process, area) for *each, area in zip(stacks, found, areas)]
        cut = sum(1 for addresses in found if addresses and addresses[-1] == 0)
        return _recording(self, course, self._options, rows, stacks, cut, self._counters)


def room_bytes() -> int:
    """What the slots and the table need."""
    return SLOTS * (agents.SLOT.itemsize + STACK_BYTES) + _table_bytes()


def _table_bytes() -> int:
    return 4 * SLOTS * 8


def settings(installation: Installation, hooks, options: Options) -> dict[str, bytes]:
    """The agent's variables at the start."""
    ticks = _ticks_a_second()
    target = max(1, round(options.rate * TICKS_A_QUANTUM / ticks)) if not options.every else 0
    internal = [installation.base, installation.base + installation.agent.data]
    for hook in hooks:
        if hook.name not in agents.RELEASES:
            internal += [hook.address, hook.address + len(hook.body)]
    by_bytes = options.by == "bytes"
    return {"state": agents.SAMPLING.to_bytes(4, "little"), "mean": word(options.every or 1),
            "least_mean": word(options.every or 1), "quantum_target": word(target),
            "size_mask": word((1 << 64) - 1 if by_bytes else 0), "unit": word(16 if by_bytes else 1),
            "slots": word(installation.room + _table_bytes()), "table": word(installation.room),
            "table_mask": word(_table_bytes() // 8 // agents.WAYS - 1), "slot_count": word(SLOTS),
            "slot_bytes": word(agents.SLOT.itemsize + STACK_BYTES),
            "stack_bytes": word(STACK_BYTES - (ROOM if options.lua else 0)),
            "internal": b"".join(map(word, internal[:62]))}


def _ticks_a_second() -> float:
    """Of the processor's time stamp counter; a guess suffices."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(float(line.split(":")[1]) for line in file if line.startswith("cpu MHz")) * 1e6
    except (OSError, StopIteration, ValueError):
        return 2e9


def _read(installation) -> tuple[np.ndarray, np.ndarray, list[bytes]]:
    """(rows of the live samples, their stacks as words, what was copied of Lua's)."""
    for _ in range(100):
        if not installation.read("in_flight"):
            break
        time.sleep(0.001)
    memory, size = installation.memory, agents.SLOT.itemsize
    table = np.frombuffer(memory.read(installation.room, _table_bytes()), np.uint64)
    indexes = np.sort((table[table != 0] & np.uint64(0xfffff)).astype(np.int64) - 1)
    slots = installation.room + _table_bytes()
    rows = np.zeros(len(indexes), agents.SLOT)
    stacks = np.zeros((len(indexes), STACK_BYTES // 8), np.uint64)
    areas, room = [], installation.read("lua_room")
    for k, index in enumerate(indexes.tolist()):
        at = slots + index * (size + STACK_BYTES)
        rows[k] = np.frombuffer(memory.read(at, size), agents.SLOT)[0]
        length = min(int(rows[k]["stack_length"]), STACK_BYTES) & ~7
        stacks[k, :length // 8] = np.frombuffer(memory.read(at + size, length), np.uint64)
        areas.append(memory.read(at + size + STACK_BYTES - room, room) if room else b"")
    return rows, stacks, areas


def probabilities(rows: np.ndarray, by_bytes: bool) -> np.ndarray:
    """With which each sample was taken."""
    amount = rows["size"].astype(float) + 16 if by_bytes else np.ones(len(rows))
    return -np.expm1(-amount / rows["mean"])


def _recording(sampling, course, options, rows, stacks, cut, counters) -> Recording:
    chance = probabilities(rows, options.by == "bytes")
    what = "Nginx Pool" if options.pools else "Memory"
    recording = Recording(
        "sample", sampling.pid, f"{what} Leak Flame Graph for {sampling.name} ({course.lasted:.3g} seconds sampling)",
        f"Allocated in {course.lasted:.3g} s and not released {course.held}. Estimated from samples.",
        noun="pools" if options.pools else "blocks")
    for k, frames in enumerate(stacks):
        size, weight = int(rows[k]["size"]), 1 / chance[k]
        recording.add(frames, weight * size, weight, (1 - chance[k]) * (weight * size) ** 2)
    recording.facts = [
        f"pid {sampling.pid}, sampled: {counters['taken']:,} of its allocations were taken, one in "
        f"{counters['mean']:,} {options.by} at the end; {counters['released']:,} were released, {len(rows):,} are the "
        "picture", course.manner, course.outcome]
    if counters["thinned"]:
        recording.facts.append(f"{counters['thinned']:,} samples made room for others: the estimate stays unbiased")
    if counters["dropped"]:
        recording.partial.append(f"{counters['dropped']:,} samples were lost, for want of room")
    recording.partial += sampling.quiet("--exact goes on")
    if cut:
        recording.partial.append(f"{cut:,} stacks are deeper than the {STACK_BYTES:,} bytes that were copied")
    recording.numbers = {"mode": "sampled", "seconds": round(course.lasted, 3), "held": len(rows), "cut": cut,
                         **counters, **course.facts}
    return recording
