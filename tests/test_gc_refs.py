"""leak-gc-refs on the leaking Lua of Debian's stock nginx, stripped: the widest path names the culprit, to the byte."""
import json
import lzma
import re
import subprocess
from typing import NamedTuple, Optional

import pytest

from tests import luajit_target, nginx_target
from tests.luajit_target import LuaNginx
from tests.targets import ROOT, Capture, ask, items_of, run_cli, table

HITS = 1000
LOADED = ["GC roots", "registry", "._LOADED"]


class Expected(NamedTuple):
    """Patterns of the frames down to the leak's container; objects in it: fixed ones, and per hit."""

    frames: list
    fixed: Optional[int] = None
    each: int = 0


#: What the program keeps, counted by reading it (fixtures/luajit/nginx).
EXPECTED = {
    "dynamic_cache": Expected([*LOADED, "dynamic_cert", r"\.cert_cache"], 1, 4),
    "sessions": Expected([*LOADED, "sessions", r"\.stores", r"\.by_name", r"\.main"], 6, 5),
    "handlers": Expected([*LOADED, "handlers", r"\.(hit|reset|clear) function .*handlers\.lua:\d+",
                          "upvalue subscribers", r"\(value\)"], 1, 6),
    "jobs": Expected([*LOADED, "jobs", r"\.queue", r"\.pending"], 1, 2),
    "buffers": Expected([*LOADED, "buffers", r"\.pool", r"\.blocks"], 1, 1),
    "journal": Expected([*LOADED, "journal", r"\.today", r"\.lines"], 1, 1),
    "index": Expected([*LOADED, "store", r"\.shards", r"\[(\*|1)\]", r"\.objects"], 1, 3),
    "trail": Expected(["GC roots", "registry", r"\.ngx_lua_ctx_tables", r"\[\*\]", r"\.previous.*"], 0, 2),
}


class Tree:
    """A folded flame graph: stack (a tuple of frames) -> weight of it and all below it."""

    def __init__(self, text):
        self.weight, self.children = {}, {}
        for line in text.splitlines():
            stack, _, weight = line.rpartition(" ")
            frames = tuple(stack.split(";"))
            for depth in range(len(frames)):
                path = frames[:depth + 1]
                if path not in self.weight:
                    self.children.setdefault(frames[:depth], []).append(path)
                self.weight[path] = self.weight.get(path, 0) + int(weight)

    def widest(self):
        """The stack that one gets to by taking the heaviest frame each time."""
        path = ()
        while path in self.children:
            path = max(self.children[path], key=self.weight.get)
        return path

    def find(self, patterns):
        """The weight of the stacks whose frames match the patterns, together."""
        return sum(weight for path, weight in self.weight.items()
                   if len(path) == len(patterns) and all(map(re.fullmatch, patterns, path)))


@pytest.fixture(scope="module")
def leaking(tmp_path_factory):
    """Function of the leak's name: (its Capture, the Reply of leak-gc-refs, its Tree of bytes, that of objects)."""
    made = {}

    def get(leak):
        if leak not in made:
            directory = tmp_path_factory.mktemp(leak)
            with LuaNginx(directory / "nginx", leak) as nginx:
                nginx.hit(HITS)
                nginx.burst("/nothing")
                core = nginx.core()
            bytes_file, count_file = directory / "bytes.folded", directory / "count.folded"
            (refs, _, gc),  = ask([(core, [f"leak-gc-refs --flame {bytes_file}",
                                          f"leak-gc-refs --by count --flame {count_file}", "leak-gc"])])
            for reply in (refs, gc):
                assert "Traceback" not in reply.text
            made[leak] = core, refs, gc, Tree(bytes_file.read_text()), Tree(count_file.read_text())
        return made[leak]
    return get


@pytest.mark.parametrize("leak", EXPECTED)
def test_widest_path_is_the_leak(leaking, leak):
    core, refs, gc, tree, _ = leaking(leak)
    frames = EXPECTED[leak].frames
    widest = tree.widest()
    assert len(widest) >= len(frames) and all(map(re.fullmatch, frames, widest)), widest
    line = next(line for line in refs.text.splitlines() if line.startswith("the widest path: "))
    told = line.split(": ", 1)[1].split(" => ")
    assert all(map(re.fullmatch, frames, told)), line
    assert core.truth["hits"] == HITS


@pytest.mark.parametrize("leak", EXPECTED)
def test_bytes_are_what_the_program_counted(leaking, leak):
    core, refs, gc, tree, _ = leaking(leak)
    assert tree.find(EXPECTED[leak].frames) == core.truth["bytes"]


@pytest.mark.parametrize("leak", EXPECTED)
def test_objects_are_what_the_program_made(leaking, leak):
    _, _, _, _, count = leaking(leak)
    expected = EXPECTED[leak]
    assert count.find(expected.frames) == expected.fixed + expected.each * HITS


@pytest.mark.parametrize("leak", EXPECTED)
def test_every_object_once(leaking, leak):
    """The flame graph has each object that is reached, once; nothing was dead, so that is all of them."""
    core, refs, gc, tree, count = leaking(leak)
    for reply in (refs, gc):
        for check in items_of(reply.items, "check"):
            assert (check["truth"], check["gap"]) == (core.truth["count"], 0), reply.text
    header, *rows = table(gc.items, "objects by type")
    assert tree.weight["GC roots",] == sum(int(row[header.index("bytes")]) for row in rows)
    assert count.weight["GC roots",] == sum(int(row[header.index("count")]) for row in rows)


def test_weak_table_holds_nothing(leaking):
    """The weak table refers to every object on a shorter path: only its own size is its own."""
    core, _, _, tree, _ = leaking("index")
    own = tree.find([*LOADED, "index", r"\.by_number"])
    assert core.truth["elsewhere"] <= own < core.truth["elsewhere"] + 1024


def test_finalizers(leaking):
    """The VM's own table of finalizers refers to the cdata weakly; it has grown with them."""
    core, _, _, tree, _ = leaking("buffers")
    own = tree.find(["GC roots", "cdata finalizers"])
    assert core.truth["elsewhere"] <= own < core.truth["elsewhere"] + 1024


def test_where_it_is_written(leaking):
    """The source lines whose code names the field that holds the leak."""
    _, refs, _, _, _ = leaking("dynamic_cache")
    source = (luajit_target.FIXTURES / "nginx" / "dynamic_cache.lua").read_text().splitlines()
    lines = [f"dynamic_cache.lua:{number}" for number, line in enumerate(source, 1) if ".cert_cache" in line]
    assert lines
    for line in lines:
        assert re.search(re.escape(line) + r"\b", refs.text), refs.text


def test_compiled_code(tmp_path):
    """With the JIT compiler on there are traces; the culprit is the same, and the sum still closes."""
    with LuaNginx(tmp_path / "nginx", "dynamic_cache", jit=True) as nginx:
        nginx.burst("/nothing")
        nginx.hit(HITS)
        core = nginx.core()
    (refs, gc), = ask([(core, ["leak-gc-refs", "leak-gc"])])
    for reply in (refs, gc):
        check, = items_of(reply.items, "check")
        assert (check["truth"], check["gap"]) == (core.truth["count"], 0), reply.text
    header, *rows = table(gc.items, "objects by type")
    assert any(row[0] == "trace" for row in rows)
    assert re.search(r"the widest path: .*dynamic_cert => \.cert_cache", refs.text)


def live_tree(nginx, file):
    """The Tree of the living worker."""
    done = run_cli("gc-refs", "-p", nginx.worker, "--flame", file)
    assert done.returncode == 0, done.stdout + done.stderr
    return Tree(file.read_text())


def test_timers_that_pile_up(tmp_path):
    """Live, before and after: the threads that wait hang from a table without a name in the registry."""
    with LuaNginx(tmp_path / "nginx", "reminders") as nginx:
        told = -nginx.tell()["bytes"]
        before = live_tree(nginx, tmp_path / "before.folded")
        nginx.hit(HITS)
        told += nginx.tell()["bytes"]
        after = live_tree(nginx, tmp_path / "after.folded")
    frames = ["GC roots", "registry", r"\[\*\]"]
    assert all(map(re.fullmatch, [*frames, r"\[\*\] thread"], after.widest()))
    # The function that the timers call is now nearer to the root by way of them: it has moved from the module.
    grown = sum(after.find(path) - before.find(path) for path in (frames, [*LOADED, "reminders"]))
    assert grown == told
    assert after.weight["GC roots",] - before.weight["GC roots",] == told


def test_live_and_core_agree(tmp_path):
    with LuaNginx(tmp_path / "nginx", "dynamic_cache") as nginx:
        nginx.hit(100)
        told = nginx.tell()
        tree = live_tree(nginx, tmp_path / "live.folded")
    assert tree.find(EXPECTED["dynamic_cache"].frames) == told["bytes"]


def test_coroutines_and_where_they_wait(leaking):
    """leak-gc-stacks: each job waits in jobs.lua, in the line of its yield."""
    core, *_ = leaking("jobs")
    (reply,), = ask([(core, ["leak-gc-stacks"])])
    source = (luajit_target.FIXTURES / "nginx" / "jobs.lua").read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "coroutine.yield" in text)
    jobs = [item for item in items_of(reply.items, "table")
            if item["title"].startswith(f"{HITS:,} coroutines, suspended")]
    assert len(jobs) == 1, reply.text
    assert any(f"jobs.lua:{line}" in cell for row in jobs[0]["data"][1:] for cell in row), reply.text


def test_core_that_ships(tmp_path):
    """A worker's core alone, without nginx or any library: the same, to the byte."""
    truth = json.loads((ROOT / "fixtures" / "cores" / "luajit-cache.truth.json").read_text())
    packed = ROOT / "fixtures" / "cores" / "luajit-cache.core.xz"
    (tmp_path / "core").write_bytes(lzma.decompress(packed.read_bytes()))
    elsewhere = tmp_path / "nothing"
    elsewhere.mkdir()
    core = Capture(tmp_path / "core", None, truth, [], elsewhere)
    refs, gc = nginx_target.ask([f"leak-gc-refs --flame {tmp_path / 'refs.folded'}", "leak-gc"], core)
    for reply in (refs, gc):
        check, = items_of(reply.items, "check")
        assert (check["truth"], check["gap"]) == (truth["count"], 0), reply.text
    tree, expected = Tree((tmp_path / "refs.folded").read_text()), EXPECTED[truth["leak"]]
    assert all(map(re.fullmatch, expected.frames, tree.widest()))
    assert tree.find(expected.frames) == truth["bytes"]


def test_path_and_referrers(tmp_path):
    """leak-path, leak-what and leak-refs of an object whose address the program told."""
    core = luajit_target.run("openresty", "tables_hash", tmp_path, 10)
    first, held = core.truth["first"], core.truth["held"]
    (path, what, refs), = ask([(core, [f"leak-{word} {first:#x}" for word in ("path", "what", "refs")])])
    assert re.search(r"GC roots => .*=> \[", path.text)
    assert f"{held:#x}" in path.text and f"{first:#x}" in path.text
    assert re.search(rf"Lua: table at {first:#x}\b", what.text)
    header, *rows = table(refs.items, "what refers to it")
    assert f"{held:#x}" in {row[header.index("address")] for row in rows}


@pytest.mark.slow
def test_random_stops_of_a_busy_worker(tmp_path):
    """In the JIT, in a sweep, in the allocator: close to nothing is missing, and what is, is what was under way."""
    gaps = []
    with LuaNginx(tmp_path / "nginx", "churn", jit=True) as nginx:
        url = f"http://127.0.0.1:{nginx.port}/hit"
        load = subprocess.Popen(["wrk", "-t1", "-c8", "-d3600", url], stdout=subprocess.DEVNULL)
        try:
            for _ in range(200):
                done = run_cli("gc", "-p", nginx.worker, "--json", tmp_path / "gc.json")
                assert done.returncode == 0, done.stdout + done.stderr
                check, = items_of(json.loads((tmp_path / "gc.json").read_text()), "check")
                if check["gap"]:
                    gaps.append(check)
                    assert check["explained"] and "explained by" in done.stdout, done.stdout
        finally:
            load.kill()
            load.wait()
    assert len(gaps) <= 10, gaps
    # A table that is freed is three blocks. The largest thing that churn.lua allocates at once has 300,000 bytes.
    assert all(len(check["in_flight"]) <= 3 and abs(check["gap"]) <= 300_000 for check in gaps), gaps
