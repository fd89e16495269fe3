"""leak-types on programs that know what each of their blocks is: C++, OpenSSL, nginx, Lua."""
import json
import lzma
from collections import Counter

import numpy as np
import pytest

from gdbleak.graph import types
from gdbleak.heaps import glibc
from gdbleak.target.core_file import open_core
from tests import luajit_target
from tests.targets import ROOT, ask, build, capture, leak_json, run_cli, run_gdb, table, totals

#: How fixtures/programs/types.cc is built.
BUILDS = {"plain": [], "optimized": ["-O2"], "stripped": ["-s"], "no_rtti": ["-fno-rtti"],
          "no_rtti_stripped": ["-fno-rtti", "-s"], "static": ["-static", "-s"], "no_pie": ["-no-pie", "-s"]}
#: What is inferred of what types.cc makes; all else are classes.
INFERRED = {"std::vector buffer", "std::string buffer", "std::list node", "std::list header", "std::map/set node",
            "std::unordered_map/set node", "std::unordered_map/set buckets", "std::deque chunk", "std::deque map",
            "list node (doubly linked)", "geometry::square[]"}
DECOY = "decoy"
#: Its full name differs from one libstdc++ to the next.
SHARED = "std::_Sp_counted_ptr_inplace<payload"

every_build = pytest.mark.parametrize("name", BUILDS)


@pytest.fixture(scope="module")
def cores(tmp_path_factory):
    """Function of a name of BUILDS: the Capture."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = capture(build("types.cc", *BUILDS[name]), tmp_path_factory.mktemp(name))
        return made[name]
    return get


@pytest.fixture(scope="module")
def replies(cores):
    """Function of a name of BUILDS: the Reply of leak-types in a GDB without debug files."""
    made = {}

    def get(name):
        if not made:
            answers = ask([(cores(each), ["leak-types --top 100000"]) for each in BUILDS], no_debug=True)
            made.update((each, reply) for each, (reply,) in zip(BUILDS, answers))
        assert made[name].items, made[name].text
        return made[name]
    return get


def told(core):
    """Address -> what the block is, as the program noted it."""
    return {int(address): what for address, what in core.truth["blocks"].items()}


def found(core):
    """Address -> TypeName, of all blocks in use, without a debugger: classes have mangled names."""
    target = open_core(str(core.core), str(core.exe))
    heaps = glibc.find(target)
    known = types.of(target, heaps, None)
    return {int(address): known.names[number] for heap, numbers in zip(heaps, known.numbers)
            for address, number in zip(heap.blocks.address, numbers) if number >= 0}


def rows_of(items):
    """Type -> (known, blocks, bytes, sample) of the table."""
    header, *rows = table(items, "types")
    assert header == ["Type", "Known", "Blocks", "Bytes", "Mean", "Sample"]
    return {row[0]: (row[1], int(row[2]), int(row[3]), int(row[5], 16)) for row in rows}


# -- C++ -----------------------------------------------------------------------------------------------------
@every_build
def test_each_part_of_a_container(cores, name):
    """Block by block: what is inferred is just what the program made, and none else in the process."""
    ours, truth = found(cores(name)), told(cores(name))
    for what in INFERRED - {"geometry::square[]"}:
        assert {address for address, kind in ours.items() if kind.name == what} == \
            {address for address, kind in truth.items() if kind == what}, what


@every_build
def test_each_object(cores, name):
    """Blocks of a class, and only those, have one type."""
    ours, truth = found(cores(name)), told(cores(name))
    for what in set(truth.values()) - INFERRED - {DECOY}:
        kinds = {ours[address] for address, kind in truth.items() if kind == what}
        assert len(kinds) == 1, what
        assert {address for address, kind in ours.items() if kind in kinds} == \
            {address for address, kind in truth.items() if kind == what}, what


@every_build
def test_names_and_numbers(cores, replies, name):
    """The report's names are the program's, measured or inferred, and its numbers those that it made."""
    rows, truth = rows_of(replies(name).items), Counter(told(cores(name)).values())
    if name == "no_rtti_stripped":
        named = Counter(row[1] for kind, row in rows.items() if kind.startswith("first word: "))
        for what in set(truth) - INFERRED - {DECOY}:
            assert named[truth[what]] > 0, what            # nothing in the process tells what they are called
            named[truth[what]] -= 1
        truth = {what: number for what, number in truth.items() if what in INFERRED - {"geometry::square[]"}}
    for what in set(truth) - {DECOY}:
        kind, = [kind for kind in rows if kind == what or (what == SHARED and kind.startswith(SHARED))]
        known, blocks, _, sample = rows[kind]
        assert (known, blocks) == ("inferred" if what in INFERRED else "measured", truth[what]), what
        assert told(cores(name))[sample] == what


@every_build
def test_what_is_no_container(cores, name):
    """Structures that come close to a header are not taken for one."""
    ours = found(cores(name))
    decoys = [ours[address].name for address, what in told(cores(name)).items() if what == DECOY]
    assert len(decoys) == 5 and not [kind for kind in decoys if kind.startswith("std::") or "list" in kind]


@every_build
def test_sums(cores, replies, name):
    """All blocks in use have a type, and the sums are those of leak-sizes."""
    reply = replies(name)
    rows, sums = rows_of(reply.items), totals(reply.items)
    sizes = totals(leak_json("leak-sizes", cores(name)))
    assert sums["blocks"] == sum(row[1] for row in rows.values()) == sizes["in_use_blocks"]
    assert sums["bytes"] == sum(row[2] for row in rows.values()) == sizes["in_use_bytes"]
    for known in ("measured", "inferred"):
        assert sums[f"{known}_bytes"] == sum(row[2] for row in rows.values() if row[0] == known) > 0
    assert sums["types"] == len(rows)


def test_some_blocks_are_larger_than_asked_for(cores):
    """The truth itself: to some nodes of 24 bytes malloc gave 16 bytes more than it needed to."""
    heap, = glibc.find(open_core(str(cores("plain").core)))
    nodes = np.array([at for at, what in told(cores("plain")).items() if what == "std::list node"], np.uint64)
    assert {32, 48} <= set(heap.blocks.size[heap.blocks.rows_of(nodes)].tolist())


def test_sets(cores):
    """Arenas add up to the whole, sizes are kept to, and blocks that are not in use have no type."""
    core = cores("plain")
    commands = [f"leak-types --top 100000 {which}" for which in
                ("", "--arena 0", "--arena 1", "--arena mmapped", "--size 32-64", "--state free", "--state all")]
    replies = [reply for reply, in ask([(core, [command]) for command in commands])]
    whole, main, other, mapped, small, free, every = (rows_of(reply.items) for reply in replies)
    for kind, (_, blocks, size, _) in whole.items():
        parts = [rows[kind][1:3] for rows in (main, other, mapped) if kind in rows]
        assert (sum(part[0] for part in parts), sum(part[1] for part in parts)) == (blocks, size), kind
    assert "std::list node" in other and "std::vector buffer" in mapped and "geometry::circle" not in other
    assert all(32 <= size / blocks < 64 for _, blocks, size, _ in small.values())
    assert set(free) == {"not in use"}
    sizes = totals(leak_json("leak-sizes", core))
    assert free["not in use"][1] == sizes["free_blocks"]
    assert every["not in use"][1] == sizes["free_blocks"] + sizes["tcached_blocks"]


def test_flame(cores, tmp_path):
    """The stacks are kinds of types and types, and add up to the whole."""
    folded = tmp_path / "types.folded"
    done = run_cli("types", "--core", cores("plain").core, "--exe", cores("plain").exe, "--flame", folded, "--json",
                   tmp_path / "types.json")
    assert done.returncode == 0, done.stderr
    stacks = [line.rpartition(" ") for line in folded.read_text().splitlines()]
    rows, sums = rows_of(json.loads((tmp_path / "types.json").read_text())), {}
    assert sum(int(size) for *_, size in stacks) == sum(row[2] for row in rows.values())
    for stack, _, size in stacks:
        sums[stack.split(";")[0]] = sums.get(stack.split(";")[0], 0) + int(size)
    assert sums["std containers"] == sum(row[2] for kind, row in rows.items()
                                         if kind in INFERRED and kind.startswith("std::"))
    assert "C++ classes;geometry::circle" in {stack for stack, *_ in stacks}
    assert "std containers;std::list node (inferred)" in {stack for stack, *_ in stacks}


def test_of_a_process_that_gdb_holds(cores, tmp_path):
    """Memory that is read on demand gives the same."""
    core, answer = cores("plain"), tmp_path / "types.json"
    told_now = tmp_path / "told"
    done = run_gdb([f"run > {told_now}", f"leak-types --top 100000 --json {answer}", "kill"], core.exe)
    assert answer.exists(), done.stdout
    truth = Counter(json.loads(told_now.read_text())["blocks"].values())
    rows = rows_of(json.loads(answer.read_text()))
    assert {what: rows[what][1] for what in truth if what not in (DECOY, SHARED)} == \
        {what: number for what, number in truth.items() if what not in (DECOY, SHARED)}


def test_rows_alone(cores):
    """What is told of some blocks without a look at all memory is the same, but for containers."""
    core = cores("stripped")
    target = open_core(str(core.core), str(core.exe))
    heaps = glibc.find(target)
    quick, whole = types.of(target, heaps, None), types.of(target, heaps, None)
    truth, heap = told(core), heaps[0]
    rows = heap.blocks.rows_of(np.array(sorted(truth), np.uint64))
    names = [quick.names[number] for number in quick.of_rows(0, rows)]
    assert "numbers" not in vars(quick)
    for row, ours in zip(rows, names):
        what = truth[int(heap.blocks.address[row])]
        if what not in INFERRED:
            assert ours == whole.names[whole.numbers[0][row]], what
            assert (ours.known == types.MEASURED) == (what != DECOY)
        else:
            assert not ours.name.startswith("std::")
    assert (whole.of_rows(0, rows) == whole.numbers[0][rows]).all()
    free = np.flatnonzero(heap.blocks.state != 1)
    assert len(free) and (quick.of_rows(0, free) == -1).all() and (whole.of_rows(0, free) == -1).all()


# -- OpenSSL -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags", [["-g"], ["-s"]], ids=["debug", "stripped"])
def test_openssl(tmp_path, flags):
    core = capture(build("tls", *flags, "-lssl", "-lcrypto"), tmp_path)
    ours = found(core)
    for what in ("OpenSSL SSL", "OpenSSL SSL_CTX", "OpenSSL X509"):
        assert {address for address, kind in ours.items() if kind.name == what} == set(core.truth[what]), what
    rows = rows_of(leak_json("leak-types --top 100000", core, no_debug=True))
    assert {what: rows[what][:2] for what in rows if what.startswith("OpenSSL")} == \
        {what: ("inferred", len(set(core.truth[what]))) for what in core.truth if what.startswith("OpenSSL")}


# -- nginx ---------------------------------------------------------------------------------------------------
def test_nginx_pools(tmp_path):
    """The blocks of forgotten pools, of which the module that forgot them knows the number."""
    core = tmp_path / "nginx-leaky.core"
    core.write_bytes(lzma.decompress((ROOT / "fixtures" / "cores" / "nginx-leaky.core.xz").read_bytes()))
    truth = json.loads((ROOT / "fixtures" / "cores" / "nginx-leaky.truth.json").read_text())
    answer = tmp_path / "types.json"
    done = run_cli("types", "--core", core, "--top", 100000, "--json", answer)
    assert done.returncode == 0, done.stderr
    rows = rows_of(json.loads(answer.read_text()))
    block, large = (rows[f"nginx pool {what} (unreached)"] for what in ("block", "large allocation"))
    assert block[:2] == ("measured", truth["pool_blocks"]) and large[:2] == ("measured", truth["pool_large"])
    assert block[2] + large[2] == truth["pools"]["chunk_bytes"]
    for kind in ("request", "connection", "upstream", "http2", "cycle"):
        assert rows[f"nginx pool block ({kind})"][1] >= truth["kinds"][kind]
    assert not [kind for kind in rows if kind.startswith("std::")]         # it is no C++


# -- Lua -----------------------------------------------------------------------------------------------------
def test_lua_objects_that_are_blocks(tmp_path):
    """Where LuaJIT allocates with malloc, its objects are blocks: those of one run and not of the other were made."""
    made = {"threads_new": 50, "tables_empty": 100}
    runs = {(scenario, number): luajit_target.run("openresty-sysmalloc", scenario, directory, number, most)
            for scenario, most in made.items() for number in (0, most)
            for directory in [tmp_path / f"{scenario}-{number}"] if not directory.mkdir()}
    answers = ask([(core, ["leak-types --top 100000"]) for core in runs.values()])
    rows = {key: rows_of(reply.items) for key, (reply,) in zip(runs, answers)}

    def more(scenario, kind):
        full, empty = (rows[scenario, number].get(kind, ("measured", 0)) for number in (made[scenario], 0))
        assert full[0] == "measured"
        return full[1] - empty[1]
    assert more("threads_new", "Lua thread (lua_State)") == more("threads_new", "stack of a Lua thread") == 50
    assert more("tables_empty", "Lua table") == 100 and more("tables_empty", "Lua string") == 0
    assert all(each["GG_State (lua_State, global_State)"][1] == 1 for each in rows.values())
