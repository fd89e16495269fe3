"""LuaJIT's layout by debug information: it is what GDB says, what the tables say, and only taken where it fits."""
import json

import pytest

from tests import luajit_target
from tests.luajit_target import FIXTURES, PACKAGED, offsets
from tests.targets import ask, items_of, run_gdb

WITH_DWARF = [f"{name}-{variant}" for name in PACKAGED for variant in ("debug", "gc32")]
#: What a layout has besides offsets and sizes.
OTHERS = {"gc64", "ref", "family", "source"}
TYPES = {"g": "global_State", "L": "lua_State", "J": "jit_State", "GG": "GG_State"}
INNER = {"cb_sizeid": "cb.sizeid", "cb_cbid": "cb.cbid"}


def type_and_member(name):
    """"GCtab_asize" -> "GCtab.asize", "g_sizeof" -> "global_State"."""
    kind, _, member = name.partition("_")
    kind = TYPES.get(kind, kind)
    return kind if member == "sizeof" else f"{kind}.{INNER.get(member, member)}"


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """Function of a build: the Capture of a program that it ran."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = luajit_target.run(name, "mixed", tmp_path_factory.mktemp(name), 12)
        return made[name]
    return get


def closes(captured, reply):
    assert "Traceback" not in reply.text
    check, = items_of(reply.items, "check")
    assert (check["truth"], check["gap"]) == (captured.truth["count"], 0), reply.text
    return True


@pytest.mark.parametrize("name", WITH_DWARF)
def test_layout_is_gdb_s_and_the_tables(core, tmp_path, monkeypatch, name):
    monkeypatch.setenv("LAYOUTS_FILE", str(tmp_path / "layouts.json"))
    done = run_gdb([f"source {FIXTURES / 'layouts_in_gdb.py'}"], core(name).exe, core(name).core)
    assert (tmp_path / "layouts.json").exists(), done.stdout
    layout, table = json.loads((tmp_path / "layouts.json").read_text()).values()
    assert (layout.pop("source"), table.pop("source")) == ("debug information", "tables")
    assert layout == table and layout["gc64"] == (not name.endswith("gc32"))
    there = {name: value for name, value in layout.items() if name not in OTHERS and value >= 0}
    assert len(there) > 100
    assert there == dict(zip(there, offsets(name, *map(type_and_member, there))))


@pytest.mark.parametrize("name", WITH_DWARF)
def test_self_check_closes(core, name):
    (reply,), = ask([(core(name), ["leak-gc"])])
    assert closes(core(name), reply)
    assert "layout from debug information" in reply.text


@pytest.mark.parametrize("base", PACKAGED)
def test_tables_tell_the_same(core, base):
    """The very same core with the stripped executable: every number is the same."""
    known, stripped = core(f"{base}-debug"), luajit_target.build(f"{base}-stripped").path
    (reply,), (other,) = ask([(known, ["leak-gc"]), (known._replace(exe=stripped), ["leak-gc"])], no_debug=True)
    assert closes(known, reply) and closes(known, other)
    assert "layout from debug information" in reply.text
    assert "from tables, by fingerprint" in other.text and "debug information" not in other.text
    assert other.items == reply.items


@pytest.mark.parametrize("base, strange", [PACKAGED, PACKAGED[::-1]])
def test_debug_information_of_another_vm(core, tmp_path, base, strange):
    """GDB knows the structures of another LuaJIT alone, which do not fit this one: the tables serve."""
    captured = core(base)
    done = run_gdb([f"add-symbol-file {luajit_target.build(f'{strange}-debug').path} -o 0x100000000",
                    "print sizeof(struct GG_State)", f"leak-gc --json {tmp_path / 'gc.json'}"],
                   captured.exe, captured.core)
    assert f"= {offsets(f'{strange}-debug', 'GG_State')[0]}\n" in done.stdout
    check, = items_of(json.loads((tmp_path / "gc.json").read_text()), "check")
    assert (check["truth"], check["gap"]) == (captured.truth["count"], 0), done.stdout
    assert "from tables, by fingerprint" in done.stdout
