"""Shared zones: what leak-shm says equals nginx's own counters, and what its allocator would give."""
import json
import lzma
import os

import pytest

from tests import nginx_target
from tests.nginx_target import DEBUG, LUA_MODULES, STRIPPED, Nginx, ask, leak_json
from tests.targets import ROOT, Capture, run_cli, table, totals

SHIPPED = ROOT / "fixtures" / "cores"


def rows_of(items, word):
    """The rows of the table whose title has the word in it, as {header cell: cell}."""
    header, *rows = table(items, word)
    return [dict(zip(header, row)) for row in rows]


def number(text):
    """A cell's number, printed with separators of thousands."""
    return int(text.replace(",", ""))


def check_zones(items, truth):
    """Totals and rows against nginx's pages and pfree, and what its allocator had to give in one piece."""
    zones = truth["zones"]
    found = totals(items)
    assert found["zones"] == len(zones)
    assert found["bytes"] == sum(zone["size"] for zone in zones)
    assert found["free_pages"] == sum(zone["free_pages"] for zone in zones)
    assert found["used_pages"] == sum(zone["pages"] - zone["free_pages"] for zone in zones)
    columns = ("size", "used pages", "free pages", "longest free run")
    rows = {row["zone"]: [number(row[column]) for column in columns] for row in rows_of(items, "zones")}
    assert rows == {zone["name"]: [zone["size"], zone["pages"] - zone["free_pages"], zone["free_pages"],
                                   zone["longest_run"]] for zone in zones}


def fill(nginx):
    nginx.burst("/limited?key=burst")
    nginx.fill_zones(3000)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    nginx_target.build("module")
    with Nginx(tmp_path_factory.mktemp("stock") / "nginx") as nginx:
        fill(nginx)
        return nginx.core()


@pytest.fixture(scope="module")
def debug(tmp_path_factory):
    nginx_target.build("debug")
    with Nginx(tmp_path_factory.mktemp("debug") / "nginx", exe=DEBUG, module=None) as nginx:
        fill(nginx)
        return nginx.core()


def test_truth_has_holes(stock):
    """The module's zone has many free pages and few in one piece; the others are in use."""
    zones = {zone["name"]: zone for zone in stock.truth["zones"]}
    assert set(zones) == {"leaky_slabs", "limited", "cached", "sessions"}
    holes = zones["leaky_slabs"]
    assert stock.truth["slabs_returned"] == 25
    assert holes["free_pages"] >= 25 * 5 and holes["longest_run"] < 10
    assert sum(slot["used"] for slot in zones["limited"]["slots"]) > 3000


def test_stock(stock):
    check_zones(leak_json("leak-shm", stock, no_debug=True), stock.truth)


def test_debug_and_stripped_agree(debug):
    with_dwarf = leak_json("leak-shm", debug)
    check_zones(with_dwarf, debug.truth)
    stripped = leak_json("leak-shm", debug._replace(exe=STRIPPED), no_debug=True)
    assert totals(stripped) == totals(with_dwarf)
    assert rows_of(stripped, "zones") == rows_of(with_dwarf, "zones")


def test_slots(stock):
    """Each slot size of each zone: how many are in use, and how many are not."""
    items = leak_json("leak-shm --slots", stock)
    for zone in stock.truth["zones"]:
        found = {number(row["slot"]): (number(row["used"]), number(row["free"]))
                 for row in rows_of(items, f"slots of zone {zone['name']}")}
        assert found == {slot["size"]: (slot["used"], slot["total"] - slot["used"]) for slot in zone["slots"]}


def test_core_without_shared_memory(tmp_path):
    """coredump_filter without its bit 1: the zones are named, and it is said that they are not there."""
    nginx_target.build("module")
    with Nginx(tmp_path / "nginx", core_filter=0x35) as nginx:
        captured = nginx.core()
    reply, = ask(["leak-shm"], captured)
    assert totals(reply.items)["zones"] == len(captured.truth["zones"])
    assert totals(reply.items)["used_pages"] == 0
    for zone in captured.truth["zones"]:
        assert f"zone {zone['name']}: " in reply.text
    assert "coredump_filter" in reply.text


def test_shipped(tmp_path):
    """The shipped core, with no file of the machine it is from."""
    core = tmp_path / "nginx-leaky.core"
    core.write_bytes(lzma.decompress((SHIPPED / "nginx-leaky.core.xz").read_bytes()))
    (tmp_path / "empty").mkdir()
    truth = json.loads((SHIPPED / "nginx-leaky.truth.json").read_text())
    check_zones(leak_json("leak-shm", Capture(core, None, truth, [], tmp_path / "empty")), truth)


@pytest.mark.skipif(not all(map(os.path.exists, LUA_MODULES)), reason="no libnginx-mod-http-lua")
def test_lua_shared_dict(tmp_path):
    """A lua_shared_dict is a zone among the others, with its keys in it."""
    nginx_target.build("module")
    with Nginx(tmp_path / "nginx", lua=True) as nginx:
        nginx.get_many([f"/dict?key={index}" for index in range(2000)])
        captured = nginx.core()
    zones = {zone["name"]: zone for zone in captured.truth["zones"]}
    assert sum(slot["used"] for slot in zones["counters"]["slots"]) >= 2000
    items = leak_json("leak-shm", captured)
    check_zones(items, captured.truth)
    assert {row["zone"] for row in rows_of(items, "zones") if row["of"] == "lua_shared_dict"} == {"counters"}


def test_flame_graph_adds_up_to_the_zones(tmp_path):
    """Each zone's frames are its size, in every report that takes --flame of this kind."""
    core = tmp_path / "core"
    core.write_bytes(lzma.decompress((ROOT / "fixtures" / "cores" / "nginx-leaky.core.xz").read_bytes()))
    sums = {}
    for word in ("shm", "mallinfo", "blocks", "sizes"):
        done = run_cli(word, "--core", core, "--flame", tmp_path / f"{word}.folded", "--json", tmp_path / f"{word}.json")
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / f"{word}.folded").read_text().splitlines()
        sums[word] = sum(int(line.rsplit(" ", 1)[1]) for line in lines)
    found = next(item for item in json.loads((tmp_path / "shm.json").read_text()) if item["type"] == "totals")
    truth = json.loads((ROOT / "fixtures" / "cores" / "nginx-leaky.truth.json").read_text())
    assert sums["shm"] == found["bytes"] == sum(zone["size"] for zone in truth["zones"])
    assert sums["mallinfo"] == sums["blocks"] == sums["sizes"] == truth["mallinfo2"]["arena"]
