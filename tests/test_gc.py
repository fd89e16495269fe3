"""leak-gc on LuaJIT programs that know what they made, in every build, and at every phase of a collection."""
import json
import struct

import pytest
from elftools.elf.elffile import ELFFile

from tests import luajit_target
from tests.luajit_target import PACKAGED, PHASES, VARIANTS, offsets
from tests.targets import ask, capture, items_of, run_gdb, table

#: Scenario -> how many it makes; those that make big things make few.
MADE = {"strings_short": 700, "strings_long": 50, "strings_huge": 6, "tables_empty": 100, "tables_colocated": 100,
        "tables_array": 100, "tables_outgrown": 100, "tables_hash": 100, "tables_both": 100, "tables_huge": 4,
        "tables_metatable": 100, "closures": 100, "closures_plain": 100, "closures_c": 100, "upvalues_open": 50,
        "threads_new": 50, "threads_suspended": 50, "threads_dead": 50, "threads_deep": 20, "threads_wrapped": 50,
        "userdata": 100, "userdata_metatable": 100, "userdata_files": 50, "cdata_boxes": 100, "cdata_structs": 100,
        "cdata_variable": 100, "cdata_aligned": 100, "cdata_finalized": 100, "cdata_finalized_lua": 100,
        "protos": 100, "weak_keys": 50, "weak_values": 50, "weak_both": 50, "dead_keys": 50, "dead": 200,
        "buffers": 60, "buffers_behind": 60, "traces": 20, "many": 4000, "mixed": 12}
#: What is asked in any run, "mixed" being all others but these at once; --slow asks each by itself.
FEW = ["mixed", "dead", "traces"]
#: One of each kind: GC64 and not, both forks, with debug information and without, lj_alloc and malloc.
QUICK = [*PACKAGED, "openresty-debug", "openresty-sysmalloc", "debian-gc32"]
ALL_BUILDS = PACKAGED + [f"{name}-{variant}" for name in PACKAGED for variant in VARIANTS]
BUILDS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ALL_BUILDS]
CASES = [pytest.param(name, scenario, id=f"{name}-{scenario}",
                      marks=[] if scenario in FEW and name in QUICK else pytest.mark.slow)
         for name in ALL_BUILDS for scenario in MADE]
#: Where the byte counts are not those of the objects: garbage comes and goes, the JIT compiler allocates.
UNCOUNTED = ["traces", "many"]


@pytest.fixture(scope="module")
def answers(tmp_path_factory, request):
    """Function of (build, scenario): ((Capture, Reply) with nothing made, and the same with all of it)."""
    slow = request.config.getoption("--slow")
    made = {}

    def get(name, scenario):
        if (name, scenario) not in made:
            alike = MADE if slow else FEW
            cores = []
            for each in alike:
                for number in (0, MADE[each]):
                    directory = tmp_path_factory.mktemp(f"{name}-{each}-{number}")
                    cores.append(luajit_target.run(name, each, directory, number, MADE[each]))
            replies = ask([(core, ["leak-gc --types --top 1000"]) for core in cores])
            for core, (reply,) in zip(cores, replies):
                made.setdefault((name, core.truth["scenario"]), []).append((core, reply))
                core.core.unlink()
        return made[name, scenario]
    return get


def by_type(reply):
    """Type -> (count, bytes, dead count, dead bytes) of leak-gc's table."""
    header, *rows = table(reply.items, "objects by type")
    at = [header.index("count"), header.index("bytes"), header.index("dead: count"), len(header) - 1]
    return {row[0]: [int(row[column]) for column in at] for row in rows}


def difference(answers, name, scenario):
    """Truth of the full run, and type -> [count, bytes, dead count, dead bytes] that it has more than the empty one."""
    (_, empty), (core, full) = answers(name, scenario)
    before, after = by_type(empty), by_type(full)
    nothing = [0, 0, 0, 0]
    more = {kind: [new - old for new, old in zip(after.get(kind, nothing), before.get(kind, nothing))]
            for kind in {*before, *after}}
    return core.truth, more


def check_of(reply):
    """The self-check of the one VM."""
    check, = [item for item in items_of(reply.items, "check") if "gc.total" in item["name"]]
    return check


@pytest.mark.parametrize("name, scenario", CASES)
def test_total_is_what_the_program_counted(answers, name, scenario):
    for core, reply in answers(name, scenario):
        assert "Traceback" not in reply.text
        check = check_of(reply)
        assert (check["truth"], check["gap"]) == (core.truth["count"], 0), reply.text
        found = next(item for item in items_of(reply.items, "totals") if item["command"] == "leak-gc")
        assert found["runtime"] == "luajit"
        assert found["objects"] == sum(count for count, *_ in by_type(reply).values())


@pytest.mark.parametrize("name, scenario", [case for case in CASES if case.values[1] not in UNCOUNTED])
def test_objects_are_those_that_were_made(answers, name, scenario):
    truth, more = difference(answers, name, scenario)
    assert {kind: row[0] for kind, row in more.items() if row[0]} == truth["objects"]
    assert sum(row[1] for row in more.values()) == truth["bytes"]


@pytest.mark.parametrize("name", BUILDS)
def test_dead_objects(answers, name):
    """Garbage that waits for the collector is dead; where everything was collected, nothing is."""
    truth, more = difference(answers, name, "dead")
    assert {kind: row[2] for kind, row in more.items() if row[2]} == truth["objects"]
    assert sum(row[3] for row in more.values()) == truth["bytes"]
    for core, reply in answers(name, "mixed"):
        assert {kind: row[2] for kind, row in by_type(reply).items() if row[2]} == {}


@pytest.mark.parametrize("name", BUILDS)
def test_traces(answers, name):
    for core, reply in answers(name, "traces"):
        assert by_type(reply).get("trace", [0])[0] == core.truth["traces"]
    assert core.truth["traces"] >= MADE["traces"]


@pytest.mark.parametrize("name", BUILDS)
def test_allocator(answers, name):
    """All that is mapped is in use, free, or the allocator's own; what is large has a mapping of its own."""
    (_, empty), (core, full) = answers(name, "mixed")
    if name.endswith("sysmalloc"):
        assert "system's malloc" in full.text
        return
    direct = []
    for reply in (empty, full):
        found, = items_of(reply.items, "totals")
        of_segments = sum(found[f"allocator_{name}_bytes"] for name in ("in_use", "free", "overhead"))
        assert of_segments + found["allocator_direct_bytes"] == found["allocator_mapped_bytes"]
        direct.append(found["allocator_direct_bytes"])
    # No list has these: strings of 300,000 bytes, arrays of 40,000 values and hash parts of 32,768 nodes.
    made = core.truth["made"]
    least = made * (300008 + 40001 * 8 + 32768 * 24)
    assert least < direct[1] - direct[0] < least + made * 3 * 8192


@pytest.mark.parametrize("name", BUILDS)
def test_cdata_by_c_type(answers, name):
    (_, empty), (core, full) = answers(name, "mixed")
    more = []
    for reply in (empty, full):
        header, *rows = table(reply.items, "cdata by C type")
        more.append({row[0]: int(row[1]) for row in rows})
    made = core.truth["made"]
    for kind in ("struct point", "int64_t", "char [?]", "void *"):         # as tostring(ffi.typeof()) says them
        assert more[1].get(kind, 0) - more[0].get(kind, 0) == made, (kind, more)


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("phase", PHASES)
def test_within_a_collection(tmp_path, name, phase):
    core = luajit_target.run_in_phase(name, phase, tmp_path)
    if phase == "atomic" and core.truth["phase"] != PHASES[phase]:
        pytest.skip("the atomic phase is one step: no Lua code runs within it")
    assert core.truth["phase"] == PHASES[phase]
    (reply,), = ask([(core, ["leak-gc"])])
    check = check_of(reply)
    assert (check["truth"], check["gap"]) == (core.truth["count"], 0), reply.text


@pytest.mark.parametrize("name", [f"{name}-{variant}" for name in PACKAGED for variant in ("debug", "gc32")])
def test_the_count_is_the_core_s(tmp_path, name):
    """Of the target: what the program counted is what GDB reads in the core."""
    core = luajit_target.run(name, "tables_hash", tmp_path, 100)
    width = "ptr32" if name.endswith("gc32") else "ptr64"
    done = run_gdb(["frame function docall", f"set $g = (global_State *)(unsigned long)L->glref.{width}",
                    "print $g->gc.total", f"set $c = (CTState *)(unsigned long)$g->ctype_state.{width}",
                    'printf "C types: %d, %d bytes\\n", $c->top, $c->sizetab * sizeof(CType)',
                    f"leak-gc --json {tmp_path / 'gc.json'}"], core.exe, core.core)
    assert f"= {core.truth['count']}\n" in done.stdout
    found, = items_of(json.loads((tmp_path / "gc.json").read_text()), "totals")
    assert f"C types: {found['c_types']}, {found['c_type_table_bytes']} bytes\n" in done.stdout
    assert 0 < found["c_types"] * 16 <= found["c_type_table_bytes"]


def patched(core, path, address, data):
    """A copy of the core at `path` with `data` at `address` of the process."""
    image = bytearray(core.core.read_bytes())
    with open(core.core, "rb") as file:
        segment = next(s for s in ELFFile(file).iter_segments("PT_LOAD")
                       if 0 <= address - s["p_vaddr"] < s["p_filesz"])
        at = segment["p_offset"] + address - segment["p_vaddr"]
    image[at:at + len(data)] = data
    path.write_bytes(image)
    return core._replace(core=path)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return luajit_target.run("openresty", "tables_hash", tmp_path_factory.mktemp("healthy"), 100)


DAMAGE = {
    "array size": ("GCtab.asize", struct.pack("<I", 0x7ffffff0)),
    "hash size": ("GCtab.hmask", struct.pack("<I", 0x3fffffff)),
    "hash part": ("GCtab.node", struct.pack("<Q", 0x10)),
    "next object": ("GCtab.nextgc", struct.pack("<Q", 0x4141414141414141)),
    "type": ("GCtab.gct", b"\x77"),
}


@pytest.mark.parametrize("what", [*DAMAGE, "cycle"])
def test_damaged_object(healthy, tmp_path, what):
    """It costs that part of the report, which says so: never the session."""
    first = healthy.truth["first"]
    field, data = DAMAGE.get(what) or ("GCtab.nextgc", struct.pack("<Q", first))
    at, = offsets("openresty-debug", field)
    core = patched(healthy, tmp_path / "core", first + at, data)
    (reply, refs), = ask([(core, ["leak-gc --types", "leak-gc-refs"])])
    assert "Traceback" not in reply.text + refs.text
    check = check_of(reply)
    assert check["truth"] == core.truth["count"]
    # A size that is wrong shows in the sum; what only cannot be followed must be told.
    assert "self-check FAILED" in reply.text if "size" in what else "note:" in reply.text, reply.text
    assert (check["gap"] != 0) == (what != "hash part")


def test_missing_pages(tmp_path):
    """A core without private memory has no VM to show, and says so."""
    core = capture(luajit_target.build("openresty"), tmp_path, luajit_target.FIXTURES / "objects.lua",
                   "tables_hash", "100", "100", "counts",
                   core_filter=0x30)
    (reply,), = ask([(core, ["leak-gc"])])
    assert not reply.items
    assert "Traceback" not in reply.text
    assert "LuaJIT" in reply.text.splitlines()[-1]


def test_cut_core(healthy, tmp_path):
    """The last tenth of the file is gone."""
    image = healthy.core.read_bytes()
    (tmp_path / "core").write_bytes(image[:len(image) * 9 // 10])
    (reply,), = ask([(healthy._replace(core=tmp_path / "core"), ["leak-gc"])])
    assert "Traceback" not in reply.text
