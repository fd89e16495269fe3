"""What only the collector sees, as a string buffer's references: reached, named, and as large as LuaJIT counts."""
import re

import pytest

from tests import luajit_target
from tests.luajit_target import FIXTURES, counted
from tests.targets import Unavailable, ask, capture, items_of, table, totals

#: Both forks, with debug information and without, GC64 and not, lj_alloc and malloc; a newer LuaJIT, of lupa's.
QUICK = ["debian", "openresty-debug", "debian-gc32", "openresty-sysmalloc", "lupa"]
SLOW = ["openresty", "openresty-gc32", "debian-sysmalloc"]
BUILDS = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
#: Way of behind.lua -> the steps behind the holder, the nearest first.
STEPS = {"string": ["(copy-on-write)"], "cdata": ["(copy-on-write)"], "dict": ["(dict)", "[*]"],
         "metatable": ["(metatable dict)", "[*]", ".__name"], "memory": [], "clib": ["(environment)", ".cos"]}
BUFFER, LIBRARY = "userdata string.buffer", "userdata ffi.load libm.so.6"


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Function of a build: (Capture, its Replies: to leak-gc, to leak-unreachable, and to leak-path by address)."""
    made = {}

    def get(name):
        if name not in made:
            core = run(name, tmp_path_factory.mktemp(name))
            addresses = [address for told in core.truth.values() if isinstance(told, dict)
                         for address in (told["holder"], *told["behind"], told["memory"]) if address]
            (gc, unreachable, *paths), = ask([(core, ["leak-gc", "leak-unreachable",
                                                      *(f"leak-path {address:#x}" for address in addresses)])])
            made[name] = core, gc, unreachable, dict(zip(addresses, paths))
        return made[name]
    return get


def run(name, directory):
    if name != "lupa":
        return luajit_target.run_program(name, "behind.lua", directory, "counts")
    try:
        core = capture(luajit_target.python(), directory, FIXTURES / "run_in_python.py", luajit_target.lupa(),
                       FIXTURES / "behind.lua", "counts")
    except Unavailable as reason:
        pytest.skip(str(reason))
    return core._replace(truth={**core.truth, "count": counted(directory / "counts")})


@pytest.mark.parametrize("name", BUILDS)
def test_nothing_is_dead(answers, name):
    core, gc, _, _ = answers(name)
    check, = items_of(gc.items, "check")
    assert (check["truth"], check["gap"]) == (core.truth["count"], 0), gc.text
    found = totals(gc.items)
    assert (found["dead_objects"], found["dead_bytes"]) == (0, 0), gc.text


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("way", STEPS)
def test_way_is_named(answers, name, way):
    core, _, _, paths = answers(name)
    told = core.truth[way]
    assert len(told["behind"]) == len(STEPS[way])
    rows = []
    for depth, address in enumerate([told["holder"], *told["behind"]]):
        rows = table(paths[address].items, "from the root down")[1:]
        assert [row[1] for row in rows[len(rows) - depth - 2:]] == [".held", f".{way}", *STEPS[way][:depth]]
    assert rows[len(rows) - len(STEPS[way]) - 1][2] == (LIBRARY if way == "clib" else BUFFER)
    # LuaJIT's own count fell by this when the twin went.
    assert sum(int(row[4]) for row in rows[-len(STEPS[way]) - 1:]) == told["bytes"]


@pytest.mark.parametrize("name", BUILDS)
def test_memory_of_a_buffer(answers, name):
    """An address in it leads to the buffer; on malloc its block is Lua's, not an unreachable one."""
    core, _, unreachable, paths = answers(name)
    told = core.truth["memory"]
    text = paths[told["memory"]].text
    assert re.search(rf"{BUFFER} at 0x\w+, {told['bytes']:,} bytes, \S+ bytes into it", text), text
    assert "=> .held => .memory\n" in text
    if name != "lupa":
        assert totals(unreachable.items)["blocks"] == 0, unreachable.text
