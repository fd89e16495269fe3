"""leak-unreachable on programs that know what they leak: exact blocks, bytes, direct and indirect ones."""
import json
import lzma
from collections import Counter
from typing import NamedTuple

import pytest

from gdbleak.target.core_file import open_core
from tests.targets import ROOT, Capture, Reply, ask, build, capture, items_of, run_cli, table, totals

#: Those of fixtures/programs/reached.c.
SCENARIOS = ["shapes", "thread_shapes", "knots", "main_locals", "frames", "two_locals", "stale_word", "dead_word",
             "registers", "red_zone", "descriptors", "ended_threads", "forked", "free_holders", "mixture"]
QUESTIONS = ["leak-unreachable --top 1000", "leak-blocks --state unreachable --top 1000000",
             "leak-sizes --state unreachable --exact --top 1000000"]

#: What glibc itself leaks, by usable size: in a child, the thread caches of threads that it does not have.
OF_GLIBC = {"forked": Counter({648: 3})}

scenario = pytest.mark.parametrize("scenario", SCENARIOS)
how = pytest.mark.parametrize("where, no_debug", [("dynamic", False), ("dynamic", True), ("static", False)],
                              ids=["dynamic", "no_debug", "static"])


class Answer(NamedTuple):
    """A capture, and the replies to QUESTIONS about it."""

    core: Capture
    unreachable: Reply
    blocks: Reply
    sizes: Reply
    of_glibc: Counter

    def lost(self):
        """What was lost: usable bytes of a block -> number."""
        lost = Counter({site["usable"]: site["lost"] for site in self.core.truth["sites"] if site["lost"]})
        return lost + self.of_glibc

    def direct(self):
        """How many of them nothing else leads to."""
        return self.core.truth["expected"]["direct"] + sum(self.of_glibc.values())

    def listed(self):
        """(address, chunk size, usable size) of the blocks that are listed."""
        header, *rows = table(self.blocks.items, "blocks")
        at, size, usable = (header.index(name) for name in ("Address", "Size", "Usable"))
        return [(int(row[at], 16), int(row[size]), int(row[usable])) for row in rows]


@pytest.fixture(scope="module")
def cores(tmp_path_factory):
    """Function of the linking: scenario -> Capture."""
    made = {}

    def get(where):
        if where not in made:
            program = build("reached", "-O2", *(["-static"] if where == "static" else []))
            made[where] = {name: capture(program, tmp_path_factory.mktemp(f"{name}-{where}"), name)
                           for name in SCENARIOS}
        return made[where]
    return get


@pytest.fixture(scope="module")
def answers(cores):
    """Function of (scenario, linking, no_debug): the Answer. One GDB does all that are alike."""
    made = {}

    def get(scenario, where="dynamic", no_debug=False):
        if (where, no_debug) not in made:
            of = cores(where)
            replies = ask([(core, QUESTIONS) for core in of.values()], no_debug=no_debug)
            made[where, no_debug] = {name: Answer(core, *reply, OF_GLIBC.get(name, Counter()))
                                     for (name, core), reply in zip(of.items(), replies)}
        answer = made[where, no_debug][scenario]
        for reply in (answer.unreachable, answer.blocks, answer.sizes):
            assert reply.items and "Traceback" not in reply.text, reply.text
        return answer
    return get


@scenario
def test_dead_words_are_there(scenario, cores):
    """Where a scenario is about words that count for nothing, the core has them: below the stack pointer or in free
    memory."""
    core = cores("dynamic")[scenario]
    target, dead = open_core(str(core.core), str(core.exe)), core.truth["dead"]
    for word in dead:
        assert int.from_bytes(target.space.read(word["address"], 8), "little") == word["value"]
    if scenario == "dead_word":
        assert 0 < target.threads[0].sp - dead[0]["address"] < 1 << 20
    assert bool(dead) == (scenario in ("dead_word", "ended_threads", "forked", "free_holders", "mixture"))


@how
@scenario
def test_blocks(scenario, where, no_debug, answers):
    """Exactly the blocks that the program lost, by size; those whose addresses it told are among them."""
    answer = answers(scenario, where, no_debug)
    assert Counter(usable for _, _, usable in answer.listed()) == answer.lost()
    assert {word["value"] for word in answer.core.truth["dead"]} <= {address for address, _, _ in answer.listed()}


@how
@scenario
def test_totals(scenario, where, no_debug, answers):
    answer = answers(scenario, where, no_debug)
    said, lost = totals(answer.unreachable.items), answer.lost()
    assert said["command"] == "leak-unreachable"
    assert said["blocks"] == sum(lost.values())
    assert said["usable_bytes"] == sum(usable * number for usable, number in lost.items())
    assert said["bytes"] == sum(size for _, size, _ in answer.listed())
    assert said["direct_blocks"] == answer.direct()
    assert said["indirect_blocks"] == sum(lost.values()) - answer.direct()
    assert said["direct_bytes"] + said["indirect_bytes"] == said["bytes"]
    assert said["pending_blocks"] == said["pending_bytes"] == 0
    assert said["stack_only_blocks"] == answer.core.truth["expected"]["stack_only"]


@scenario
def test_groups_add_up(scenario, answers):
    """The groups partition the leaks."""
    answer = answers(scenario)
    said, groups = totals(answer.unreachable.items), items_of(answer.unreachable.items, "group")
    for sums, key in (("direct_blocks", "count"), ("direct_bytes", "bytes"), ("indirect_blocks", "indirect_blocks"),
                      ("indirect_bytes", "indirect_bytes")):
        assert sum(group[key] for group in groups) == said[sums]
    assert {int(group["sample"], 16) for group in groups} <= {address for address, _, _ in answer.listed()}


@scenario
def test_sizes(scenario, answers):
    """The same blocks, counted by leak-sizes."""
    answer = answers(scenario)
    said, blocks = totals(answer.sizes.items), totals(answer.unreachable.items)
    assert (said["in_use_blocks"], said["in_use_bytes"]) == (blocks["blocks"], blocks["bytes"])


# -- a thousand pairs, and a core that ships ---------------------------------------------------------------------------
def test_pairs_in_five_arenas(tmp_path):
    """The benchmark's program, small: half of what it forgets is held by the other half."""
    core = capture(build("bench", "-O1"), tmp_path, "100000", "4")
    (reply,), = ask([(core, QUESTIONS[:1])])
    said, truth = totals(reply.items), core.truth
    assert truth["leaked"] > 1000
    assert (said["blocks"], said["usable_bytes"]) == (truth["leaked"], truth["leaked_bytes"])
    assert said["direct_blocks"] == said["indirect_blocks"] == truth["leaked"] // 2
    assert said["stack_only_blocks"] == 0


def test_shipped_core(tmp_path):
    """From the shell, with neither the program nor its libraries."""
    packed = ROOT / "fixtures" / "cores" / "leaks-mixture.core.xz"
    core, said = tmp_path / "leaks.core", tmp_path / "said.json"
    core.write_bytes(lzma.decompress(packed.read_bytes()))
    truth = json.loads(packed.with_name("leaks-mixture.truth.json").read_text())
    done = run_cli("unreachable", "--core", core, "--sysroot", tmp_path, "--json", said)
    assert done.returncode == 0, done.stderr
    found = totals(json.loads(said.read_text()))
    assert found["blocks"] == sum(site["lost"] for site in truth["sites"])
    assert found["usable_bytes"] == sum(site["lost"] * site["usable"] for site in truth["sites"])
    assert found["direct_blocks"] == truth["expected"]["direct"]
    assert found["stack_only_blocks"] == truth["expected"]["stack_only"]
