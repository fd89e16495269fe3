"""nginx pools: what leak-pools says of a worker under load equals the load, and what the module counted."""
import json
import lzma
import os
import subprocess

import pytest

from tests import nginx_target
from tests.nginx_target import DEBUG, STRIPPED, Nginx, ask, leak_json
from tests.targets import ROOT, Capture, run_cli, table, totals

SHIPPED = ROOT / "fixtures" / "cores"


def put_under_load(nginx):
    """The load of these tests: bursts that are over, connections of every kind, forgotten memory."""
    nginx.burst("/index.html")
    nginx.burst("/quick/burst")
    nginx.idle(23)
    nginx.half_sent(17)
    nginx.waiting(11)
    nginx.trickle(7)
    nginx.http2(5)
    nginx.get_many(["/leak/pool"] * 53 + ["/leak/destroyed"] * 31 + ["/leak/block"] * 29)
    nginx.get_many(["/leak/nothing"] * 100)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Debian's stock nginx under load: (core by the kernel, core by gcore before, answer while it lived)."""
    nginx_target.build("module")
    directory = tmp_path_factory.mktemp("stock")
    with Nginx(directory / "nginx") as nginx:
        put_under_load(nginx)
        by_gdb = nginx.gcore()
        answer = directory / "live.json"
        live = run_cli("pools", "-p", nginx.worker, "--json", answer)
        assert live.returncode == 0, live.stderr
        return nginx.core(), by_gdb, json.loads(answer.read_text())


@pytest.fixture(scope="module")
def debug(tmp_path_factory):
    """A core of the nginx with debug information, under the same load."""
    nginx_target.build("debug")
    with Nginx(tmp_path_factory.mktemp("debug") / "nginx", exe=DEBUG, module=None) as nginx:
        put_under_load(nginx)
        return nginx.core()


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The core of fixtures/cores, unpacked, with no executable, and no library to be found."""
    directory = tmp_path_factory.mktemp("shipped")
    core = directory / "nginx-leaky.core"
    core.write_bytes(lzma.decompress((SHIPPED / "nginx-leaky.core.xz").read_bytes()))
    (directory / "empty").mkdir()
    truth = json.loads((SHIPPED / "nginx-leaky.truth.json").read_text())
    return Capture(core, None, truth, [], directory / "empty")


def check_pools(items, truth):
    """The totals equal the load and the module's own count."""
    found = totals(items)
    expected = {**truth["kinds"], "unreached": truth["pools"]["number"]}
    expected = {kind: number for kind, number in expected.items() if number}
    assert {kind: number for kind, number in found["by_kind"].items() if number} == expected
    assert found["pools"] == sum(expected.values())
    assert found["unreached_pools"] == truth["pools"]["number"]
    assert found["unreached_bytes"] == truth["pools"]["chunk_bytes"]


def check_memory(captured, **options):
    """What glibc counts, and each large block that the module forgot, by its size and by its address."""
    truth = captured.truth
    forgotten = truth["blocks"]
    size = forgotten["chunk_bytes"] // forgotten["number"]
    commands = ["leak-mallinfo", "leak-sizes --exact", f"leak-blocks --size {size} --top 1000"]
    mallinfo, sizes, blocks = ask(commands, captured, **options)
    assert {name: totals(mallinfo.items)[name] for name in truth["mallinfo2"]} == truth["mallinfo2"]
    assert [row[1] for row in table(sizes.items)[1:] if row[0] == str(size)] == [str(forgotten["number"])]
    header, *rows = table(blocks.items)
    found = {int(row[header.index("Address")], 16) for row in rows}
    assert len(found) == forgotten["number"] and found.issuperset(forgotten["last"])


def test_module_forgets_what_it_says(stock):
    """The truth itself: as many of each as were asked for, and no more memory than malloc needs for them."""
    truth = stock[0].truth
    assert truth["pools"]["number"] == 53 and truth["blocks"]["number"] == 29 and truth["destroyed"] == 31
    assert truth["pool_blocks"] == 3 * 53
    assert truth["pool_large"] == truth["pool_cleanups"] == 2 * 53
    for count, chunks in (("pools", 5 * 53), ("blocks", 29)):
        overhead = truth[count]["chunk_bytes"] - truth[count]["asked_bytes"]
        assert 8 * chunks <= overhead <= 32 * chunks


def test_stock(stock):
    check_pools(leak_json("leak-pools", stock[0]), stock[0].truth)


def test_stock_without_libc_debug_information(stock):
    check_pools(leak_json("leak-pools", stock[0], no_debug=True), stock[0].truth)


def test_stock_by_gcore(stock):
    check_pools(leak_json("leak-pools", stock[1]), stock[1].truth)


def test_stock_live(stock):
    check_pools(stock[2], stock[1].truth)


def test_stock_memory(stock):
    check_memory(stock[0])


def test_debug_and_stripped_agree(debug):
    """The same core with the executable's debug information and without."""
    with_dwarf = leak_json("leak-pools", debug)
    check_pools(with_dwarf, debug.truth)
    stripped = leak_json("leak-pools", debug._replace(exe=STRIPPED), no_debug=True)
    check_pools(stripped, debug.truth)
    assert totals(stripped) == totals(with_dwarf)


def as_the_debugger_reads(captured):
    """{address: [kind, size, blocks, used, unused, large, cleanups]} of all pools but unreached ones."""
    script = ROOT / "fixtures" / "nginx" / "pools_in_gdb.py"
    done = subprocess.run(["gdb", "-nx", "-q", "-batch", "-iex", "set debuginfod enabled off", "-x", script,
                           captured.exe, captured.core], capture_output=True, text=True, check=True)
    answer, = (line for line in done.stdout.splitlines() if line.startswith("POOLS "))
    return {int(address): row for address, row in json.loads(answer[len("POOLS "):]).items()}


def test_every_pool_is_as_the_debugger_reads_it(debug):
    """Kind, size, blocks and fill of each pool, with debug information and without."""
    truth = as_the_debugger_reads(debug)
    assert len(truth) == sum(debug.truth["kinds"].values())
    for exe in (DEBUG, STRIPPED):
        header, *rows = table(leak_json("leak-pools --top 100000", debug._replace(exe=exe)), "largest")
        rows = [dict(zip(header, row)) for row in rows]
        found = {int(row["address"], 16): [row["kind"], *(
            int(row[name].replace(",", "")) for name in ("size", "blocks", "used", "unused", "large"))]
            for row in rows if row["kind"] != "unreached"}
        assert found == {address: row[:-1] for address, row in truth.items()}
        assert {int(row["address"], 16) for row in rows if row["cleanups"] and row["kind"] != "unreached"} \
            == {address for address, row in truth.items() if row[-1]}


def test_requests_are_named(debug):
    """The reports of pools say whose they are: the request lines that the clients sent, once each."""
    for exe in (DEBUG, STRIPPED):
        reply, = ask(["leak-pools --top 1000"], debug._replace(exe=exe))
        told = json.dumps([item for item in reply.items if item["type"] == "table"])
        for path, number in {"half/": 17, "slow/wait/": 11, "slow/trickle/": 7, "slow/wait/h2-": 5}.items():
            for index in range(number):
                assert f"/{path}{index}" in told and f"/{path}{index}" in reply.text


def test_flame_adds_up(stock, tmp_path):
    """The stacks of --flame add up to the totals; pools that are reached stand under what they serve."""
    folded = tmp_path / "pools.folded"
    found = totals(leak_json(f"leak-pools --flame {folded}", stock[0]))
    stacks = [line.rsplit(" ", 1) for line in folded.read_text().splitlines()]
    assert sum(int(weight) for _, weight in stacks) == found["bytes"]
    lost = sum(int(weight) for stack, weight in stacks if stack.startswith("unreached;"))
    assert lost == stock[0].truth["pools"]["chunk_bytes"]
    under = [stack for stack, _ in stacks if stack.startswith("cycle;listener 127.0.0.1:")]
    for index in range(11):
        assert any(f";connection;request GET /slow/wait/{index};" in stack for stack in under)


def test_destroyed_pools_are_not_reported(tmp_path):
    """Memory of a destroyed pool still looks like one until malloc gives it out again."""
    nginx_target.build("module")
    with Nginx(tmp_path / "nginx") as nginx:
        nginx.get_many(["/leak/destroyed"] * 200)
        captured = nginx.core()
    found = totals(leak_json("leak-pools", captured))
    assert captured.truth["destroyed"] == 200
    assert found["unreached_pools"] == 0 and found["unreached_bytes"] == 0


def test_pool_of_40000_blocks(tmp_path):
    """One pool of 40,000 blocks: in the totals, and whole by its address."""
    nginx_target.build("module")
    with Nginx(tmp_path / "nginx") as nginx:
        nginx.get("/leak/long")
        captured = nginx.core()
    truth = captured.truth
    assert truth["pool_blocks"] > 40000
    address = truth["pools"]["last"][0]
    everything, one = ask(["leak-pools", f"leak-pools {address:#x}"], captured)
    check = totals(everything.items)
    assert check["unreached_pools"] == 1 and check["unreached_bytes"] == truth["pools"]["chunk_bytes"]
    assert f"{truth['pool_blocks']:,}" in one.text
    assert f"{address:#x}" in one.text and "ngx_http_leaky_cleanup" in one.text


def test_after_a_reload(tmp_path):
    """A worker of a second configuration cycle: all its pools are reached but those forgotten."""
    nginx_target.build("module")
    with Nginx(tmp_path / "nginx") as nginx:
        nginx.idle(3)
        nginx.reload()
        nginx.idle(4)
        nginx.get_many(["/leak/pool"] * 5)
        captured = nginx.core()
    check_pools(leak_json("leak-pools", captured), captured.truth)


def test_master(tmp_path):
    """The master process, after a reload too: its cycle's pool, no connection's, and nothing unreached."""
    nginx_target.build("module")
    with Nginx(tmp_path / "nginx") as nginx:
        nginx.idle(3)
        nginx.reload()
        captured = nginx.gcore(nginx.master.pid)
    by_kind = totals(leak_json("leak-pools", captured))["by_kind"]
    assert by_kind["cycle"] == 1 and by_kind["connection"] == by_kind["request"] == by_kind["unreached"] == 0


def test_shipped(shipped):
    check_pools(leak_json("leak-pools", shipped), shipped.truth)


def test_shipped_memory(shipped):
    check_memory(shipped, no_debug=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="hiding a directory needs root")
def test_shipped_with_nginx_hidden(shipped, tmp_path):
    """On a machine that has no nginx: its directories are empty."""
    answer = tmp_path / "pools.json"
    hide = "mount -t tmpfs none /usr/sbin && mount -t tmpfs none /usr/lib/nginx && exec \"$@\""
    command = ["unshare", "--mount", "sh", "-c", hide, "sh",
               ROOT / ".venv" / "bin" / "gdbleak", "pools", "--core", shipped.core, "--json", answer]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_pools(json.loads(answer.read_text()), shipped.truth)


def test_shipped_with_another_build_of_nginx(shipped):
    """The executable at hand is another build: the core's own pages are believed, and a line says so."""
    nginx_target.build("debug")
    reply, = ask(["leak-pools"], shipped._replace(exe=STRIPPED))
    check_pools(reply.items, shipped.truth)
    sources = json.dumps([item for item in reply.items if item["type"] == "source"])
    assert "build-id" in sources or "build-id" in reply.text
