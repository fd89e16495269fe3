"""leak-memory: every byte once, and in the heaps just what the program says of them."""
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from tests.targets import DAMAGE, ask, build, capture, run_gdb, table, totals
from tests.test_mallinfo import SOUND, no_debug
from tests.test_sizes import in_use, tcached

COLUMNS = ["in use", "tcached", "free", "overhead", "other", "not explained"]
KEYS = ["in_use_bytes", "tcached_bytes", "free_bytes", "overhead_bytes", "other_bytes", "unexplained_bytes"]
#: Damage after which chunks cannot be walked to the end.
UNWALKED = ("size_zero", "size_odd", "size_huge", "size_short", "size_thread")
#: Damage of free lists, which the walk over the chunks does not need.
LISTS = ("bin", "tcache", "fastbin")


def segments(core):
    """(start, end) -> bytes in the file, of each piece of memory that the core file names."""
    with open(core.core, "rb") as stream:
        return {(segment["p_vaddr"], segment["p_vaddr"] + segment["p_memsz"]): segment["p_filesz"]
                for segment in ELFFile(stream).iter_segments("PT_LOAD")}


def rows_of(items, title):
    """The rows of a table as dictionaries, its sums and its row of what was left out apart: (rows, total)."""
    header, *rows = table(items, title)
    numbers = COLUMNS + ["size", "present"]
    rows = [{name: int(cell) if name in numbers else cell for name, cell in zip(header, row)} for row in rows]
    first = header[0]
    assert rows[-1][first] == "total"
    return rows[:-1], rows[-1]


def check_sums(items, core):
    """Rows add up to their sizes, the tables to one total; the mappings are those of the core, each once."""
    pieces, ours = segments(core), totals(items)
    for title in ("owner", "mappings"):
        rows, total = rows_of(items, title)
        for row in rows + [total]:
            assert row["size"] == sum(row[column] for column in COLUMNS), row
            assert all(row[column] >= 0 for column in COLUMNS), row
        for column in COLUMNS + ["size", "present"]:
            assert sum(row[column] for row in rows) == total[column], (title, column)
        assert total["size"] == ours["mapped_bytes"] == sum(end - start for start, end in pieces)
        assert total["present"] == ours["present_bytes"]
        assert [total[column] for column in COLUMNS] == [ours[key] for key in KEYS]
    rows, _ = rows_of(items, "mappings")
    ranges = [tuple(int(end, 16) for end in row["address range"].split("-")) for row in rows]
    assert sorted(ranges) == sorted(pieces)
    for row, piece in zip(rows, ranges):
        assert row["size"] == piece[1] - piece[0]
        assert row["present"] >= pieces[piece]
        if not row["what"].startswith("/"):                           # else the rest may come from the file
            assert row["present"] == pieces[piece], row


def arena_rows(items):
    header, *rows = table(items, "arenas")
    return [{name: int(cell) for name, cell in zip(header[2:], row[2:])} for row in rows]


def check_heaps(items, core):
    """What the program, mallinfo2() and malloc_info() say of the heaps; in the arenas all is explained."""
    ours, truth = totals(items), core.truth
    arenas = arena_rows(items)
    assert sorted(row["system_mem"] for row in arenas) == sorted(arena["arena"] for arena in core.arenas)
    assert sum(row["free"] for row in arenas) == ours["free_bytes"] == truth["mallinfo"]["fordblks"]
    for row in arenas:
        assert row["sum"] == row["system_mem"], row
        assert row["sum"] == sum(row[name] for name in COLUMNS[:4] + ["foreign sbrk"]), row
        assert row["damaged"] == 0
    foreign = sum(row["foreign sbrk"] for row in arenas)
    held = ours["in_use_bytes"] + ours["tcached_bytes"] + ours["overhead_bytes"] + foreign
    assert held == truth["mallinfo"]["uordblks"] + truth["mallinfo"]["hblkhd"]
    if truth["alone"]:
        # Of libc's own, what is no multiple of 16 is overhead: a break that was not aligned at the start.
        assert ours["in_use_bytes"] == in_use(truth)[1] + truth["base"] // 16 * 16
    if truth["sole_cacher"]:
        assert ours["tcached_bytes"] == tcached(truth)[1]


@pytest.fixture(scope="session")
def memory(captured):
    """Function of (program, scenario, no_debug): the items of leak-memory. One GDB is asked all alike."""
    made = {}

    def get(source, scenario, no_debug=False):
        if (source, scenario, no_debug) not in made:
            alike = {"heaps": SOUND, "damage": DAMAGE}[source]
            questions = [(captured(source, name), ["leak-memory --top 100000"]) for name in alike]
            replies = ask(questions, no_debug=no_debug)
            made.update({(source, name, no_debug): reply for name, (reply,) in zip(alike, replies)})
        reply = made[source, scenario, no_debug]
        assert reply.items, reply.text
        return reply.items
    return get


@no_debug
@pytest.mark.parametrize("scenario", SOUND)
def test_every_byte(scenario, no_debug, captured, memory):
    core, items = captured("heaps", scenario), memory("heaps", scenario, no_debug)
    check_sums(items, core)
    check_heaps(items, core)
    parts = [part for row in rows_of(items, "mappings")[0] for part in row["what"].split(", ")]
    assert sum("stack of thread" in part for part in parts) == core.truth["threads"]
    if scenario == "foreign_sbrk":
        assert arena_rows(items)[0]["foreign sbrk"] > 0


@pytest.mark.parametrize("where", ["static", "static-pie"])
def test_static(where, captured):
    """Without a dynamic linker the thread's own memory lies at the break too; it is no chunk, and named."""
    cores = [captured("heaps", scenario, where) for scenario in ("foreign_sbrk", "threads")]
    for core, (reply,) in zip(cores, ask([(core, ["leak-memory --top 100000"]) for core in cores])):
        check_sums(reply.items, core)
        check_heaps(reply.items, core)
        heap, = [row["what"] for row in rows_of(reply.items, "mappings")[0] if "[heap]" in row["what"]]
        assert "TLS of thread" in heap


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage(kind, captured, memory):
    """In a damaged heap the sums still close, and what could not be walked is said not to be explained."""
    core, items = captured("damage", kind), memory("damage", kind)
    check_sums(items, core)
    damaged = sum(row["damaged"] for row in arena_rows(items))
    assert damaged > 0 if kind in UNWALKED else True
    assert damaged == 0 if kind.startswith(LISTS) else True
    assert totals(items)["unexplained_bytes"] >= damaged


@pytest.mark.parametrize("options", ["--top 3", "--top 0", "--min-bytes 100k", "--top 2 --min-bytes 1G"])
def test_left_out(options, captured, memory):
    """What is not listed is one row, so that the columns still add up; the totals are of everything."""
    core, whole = captured("heaps", "few_threads"), memory("heaps", "few_threads")
    (reply,), = ask([(core, [f"leak-memory {options}"])])
    assert totals(reply.items) == totals(whole)
    for title in ("owner", "mappings"):
        rows, total = rows_of(reply.items, title)
        assert total == rows_of(whole, title)[1]
        assert sum(row["size"] for row in rows) == total["size"]
    *shown, rest = rows_of(reply.items, "mappings")[0]
    assert rest["address range"].endswith(" more mappings")
    if "--min-bytes" in options:
        least = {"100k": 100 << 10, "1G": 1 << 30}[options.split()[-1]]
        assert shown == [row for row in rows_of(whole, "mappings")[0] if row["size"] >= least][:40]
    else:
        assert len(shown) == int(options.split()[1])


def test_stacks(captured):
    """A stack is cut at its stack pointer less the red zone: GDB tells the one, the core the mapping."""
    core = captured("heaps", "few_threads")
    told = run_gdb(["thread apply all -q print/d $sp"], core.exe, core.core).stdout
    pointers = [int(line.split("=")[1]) for line in told.splitlines() if line.startswith("$")]
    mappings = [next(end for start, end in segments(core) if start <= sp < end) for sp in pointers]
    (reply,), = ask([(core, ["leak-memory --top 100000"])])
    rows = {row["owner"]: row for row in rows_of(reply.items, "owner")[0]}
    assert len(pointers) == core.truth["threads"]
    assert rows["thread stacks, live"]["size"] == sum(end - sp + 128 for end, sp in zip(mappings, pointers))


def test_two_libcs(captured):
    """The heaps of both are accounted for, each under its own name."""
    core = captured("two_libcs")
    (reply,), = ask([(core, ["leak-memory --top 100000"])])
    check_sums(reply.items, core)
    infos = core.truth["mallinfo"], core.truth["other"]["mallinfo"]
    assert totals(reply.items)["free_bytes"] == sum(info["fordblks"] for info in infos)
    assert sum(row["sum"] for row in arena_rows(reply.items)) == sum(info["arena"] for info in infos)
    owners = [row["owner"] for row in rows_of(reply.items, "owner")[0]]
    assert len([owner for owner in owners if owner.startswith("glibc malloc: main arena of")]) == 2


def test_flame(captured, memory, tmp_path):
    """The graph is of the same bytes: its stacks by state add up to the columns."""
    core, ours = captured("heaps", "few_threads"), totals(memory("heaps", "few_threads"))
    folded = tmp_path / "memory.folded"
    run_gdb([f"leak-memory --flame {folded}"], core.exe, core.core)
    sums = {}
    for line in folded.read_text().splitlines():
        frames, _, weight = line.rpartition(" ")
        state = frames.split(";")[-1]
        sums[state] = sums.get(state, 0) + int(weight)
    assert sum(sums.values()) == ours["mapped_bytes"]
    assert (sums["in use"], sums["tcached"]) == (ours["in_use_bytes"], ours["tcached_bytes"])
    assert sums["overhead"] == ours["overhead_bytes"] and sums["not explained"] == ours["unexplained_bytes"]


JEMALLOC = Path("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2")


@pytest.mark.skipif(not JEMALLOC.exists(), reason="needs libjemalloc2")
def test_other_allocator(tmp_path):
    """Another allocator's memory is not explained, who has it is said; the table is there all the same."""
    core = capture(build("heaps"), tmp_path, "empty", env={"LD_PRELOAD": str(JEMALLOC)})
    (reply,), = ask([(core, ["leak-memory --top 100000"])])
    check_sums(reply.items, core)
    assert "malloc belongs to libjemalloc.so.2" in reply.text
    assert totals(reply.items)["in_use_bytes"] == 0 < totals(reply.items)["unexplained_bytes"]
