"""LuaJIT VMs that are embedded, several in one process, being made or closed; and a Lua that is no LuaJIT."""
import pytest

from tests import luajit_target
from tests.luajit_target import FIXTURES, counted
from tests.targets import Unavailable, ask, capture, items_of


@pytest.fixture(scope="module")
def vms():
    """The C program that embeds Debian's libluajit."""
    return luajit_target.embedding()


def checks(reply):
    assert "Traceback" not in reply.text
    return [(check["truth"], check["gap"]) for check in items_of(reply.items, "check") if "gc.total" in check["name"]]


def test_several(vms, tmp_path):
    """Each has its report, with lj_alloc or on malloc, and its own sum closes."""
    core = capture(vms, tmp_path, "several")
    (reply, refs), = ask([(core, ["leak-gc", "leak-gc-refs"])])
    expected = sorted((count, 0) for count in core.truth["counts"])
    assert sorted(checks(reply)) == expected, reply.text
    assert sorted(checks(refs)) == expected
    for number in range(1, 5):
        assert f"VM {number} of 4" in reply.text


def test_code_cache_off(tmp_path):
    """nginx has a VM of its own for each request then; the worker's main VM says what it counted."""
    with luajit_target.LuaNginx(tmp_path / "nginx", "dynamic_cache") as nginx:
        for _ in range(3):
            nginx.wait("/wait_alone")
        nginx.hit(100)
        core = nginx.core()
    (reply,), = ask([(core, ["leak-gc"])])
    found = checks(reply)
    assert len(found) == 4, reply.text
    assert [gap for _, gap in found] == [0] * 4
    assert core.truth["count"] in [truth for truth, _ in found]


@pytest.mark.parametrize("when", ["created 1", "created 2", "created 3", "created 40", "created 700", "closed 1",
                                  "closed 2", "closed 300", "closed 600"])
def test_being_made_or_closed(vms, tmp_path, when):
    """What there is of it is shown, or that there is none is said; nothing hangs, no fault of ours."""
    core = capture(vms, tmp_path, *when.split())
    (reply, refs), = ask([(core, ["leak-gc", "leak-gc-refs"])])
    for text in (reply.text, refs.text):
        assert "Traceback" not in text
        assert "LuaJIT" in text


def test_inside_python(tmp_path):
    """lupa's LuaJIT, newer than any that Debian has, linked into a module without symbols: two VMs of it."""
    try:
        lupa = luajit_target.lupa()
    except Unavailable as reason:
        pytest.skip(str(reason))
    core = capture(luajit_target.python(), tmp_path, FIXTURES / "in_python.py", lupa, "first", "second")
    (reply, refs), = ask([(core, ["leak-gc", "leak-gc-refs"])])
    expected = sorted((counted(tmp_path / name), 0) for name in ("first", "second"))
    assert sorted(checks(reply)) == expected, reply.text
    assert sorted(checks(refs)) == expected
    for made in core.truth["made"]:
        assert any(made < int(row[1]) < made + 200 for item in items_of(reply.items, "table")
                   for row in item["data"] if row[0] == "table" and len(row) == 8), reply.text


def test_layout_that_does_not_fit(tmp_path):
    """LuaJIT 2.0 is laid out otherwise: that is said, and no numbers are printed from a guess."""
    try:
        lupa = luajit_target.lupa()
    except Unavailable as reason:
        pytest.skip(str(reason))
    core = capture(luajit_target.python(), tmp_path, FIXTURES / "in_python.py", lupa, "first", "second", "luajit20")
    (reply,), = ask([(core, ["leak-gc"])])
    assert "Traceback" not in reply.text
    assert not [check for check in items_of(reply.items, "check") if check["gap"] == 0]
    assert not items_of(reply.items, "table"), reply.text
    assert "layout" in reply.text or "no LuaJIT VM" in reply.text, reply.text


def test_other_lua(tmp_path):
    """PUC Lua is called by its name."""
    core = capture(luajit_target.embedding(puc=True), tmp_path, "several")
    (reply,), = ask([(core, ["leak-gc"])])
    assert not reply.items
    assert "PUC Lua" in reply.text
