"""leak-mallinfo against mallinfo2() and malloc_info() in the process itself, which told them and crashed."""
import re

import pytest

from tests.targets import DAMAGE, SCENARIOS, STATIC, block_states, items_of, table, totals

#: Those whose numbers must all close.
SOUND = [name for name in SCENARIOS if name not in ("empty", "decoys")]
#: The rows of the table, in their order.
FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
          "keepcost"]

no_debug = pytest.mark.parametrize("no_debug", [False, True], ids=["debug", "stripped"])


def check_mallinfo(reply, core):
    """Every field of the process and of each arena, the table that shows them, and the self-check."""
    ours = totals(reply.items)
    assert {name: ours[name] for name in FIELDS} == core.truth["mallinfo"]
    check_table(reply, core.truth["mallinfo"])
    check_arenas(reply, core.arenas)
    check_closes(reply, core.truth)


def check_layout(reply, no_debug):
    """Debug information is used where GDB finds it, and only there."""
    assert f"layout from {'tables' if no_debug else 'debug information'}" in reply.text, reply.text


def check_table(reply, truth):
    header, *rows = table(reply.items, "mallinfo")
    assert header[:2] == ["Entry", "Size"]
    assert [int(row[1]) for row in rows[:len(FIELDS)]] == [truth[name] for name in FIELDS]


#: Columns of the table by arena, by the field of mallinfo they must equal.
ARENA_COLUMNS = {"arena": "system_mem", "uordblks": "in use (uordblks)", "fordblks": "free (fordblks)",
                 "smblks": "fastbin blocks", "fsmblks": "fastbins"}


def check_arenas(reply, truth):
    """The table by arena, in the order of the ring."""
    header, *rows = table(reply.items, "arenas")
    ours = [dict(zip(header, row)) for row in rows]
    assert [{field: int(row[column]) for field, column in ARENA_COLUMNS.items()} for row in ours] == \
        [{field: arena[field] for field in ARENA_COLUMNS} for arena in truth]
    assert [int(row["bin blocks"]) + 1 for row in ours] == [arena["ordblks"] for arena in truth]


def check_closes(reply, truth):
    checks = items_of(reply.items, "check")
    assert checks
    # 2.43 adds 16 bytes too many to mp_.mmapped_mem each time that it grows an mmapped block, for good.
    drift = -16 * truth["mremaps"] if truth["glibc"] >= "2.43" else 0
    assert [check for check in checks if check["gap"] != ("mmapped" in check["name"] and drift)] == []
    assert items_of(reply.items, "finding") == []


@no_debug
@pytest.mark.parametrize("scenario", SOUND)
def test_equals_mallinfo2(scenario, no_debug, captured, answers):
    reply = answers("heaps", scenario, no_debug=no_debug)["mallinfo"]
    check_layout(reply, no_debug)
    check_mallinfo(reply, captured("heaps", scenario))


@pytest.mark.parametrize("where", ["static", "static-pie"])
@pytest.mark.parametrize("scenario", STATIC)
def test_static_libc(scenario, where, captured, answers):
    check_mallinfo(answers("heaps", scenario, where)["mallinfo"], captured("heaps", scenario, where))


def test_malloc_never_called(captured, answers):
    reply, core = answers("heaps", "empty")["mallinfo"], captured("heaps", "empty")
    check_table(reply, core.truth["mallinfo"])


def test_mappings_that_look_like_chunks(captured, answers):
    """What cannot be told from an mmapped chunk is at least known to be too much: mp_ counts them."""
    reply, core = answers("heaps", "decoys")["mallinfo"], captured("heaps", "decoys")
    check_table(reply, core.truth["mallinfo"])
    gaps = [check["gap"] for check in items_of(reply.items, "check")]
    listed = block_states(answers("heaps", "decoys")["blocks"])
    taken = [address for address in core.truth["addresses"]["decoy"] if address in listed]
    assert any(gaps) == bool(taken)


def test_rows_are_named_as_in_the_man_page(answers):
    names = [row[0] for row in table(answers("heaps", "plain")["mallinfo"].items, "mallinfo")[1:]]
    words = ["other than mmap", "ordinary", "number of fastbin",
             "number of blocks currently allocated using mmap",
             "bytes in blocks currently allocated using mmap", "highwater", "bytes in fastbin",
             "in-use allocations", "bytes in free blocks", "releasable"]
    assert [word in name for word, name in zip(words, names)] == [True] * len(words)


def check_tcached(reply, core):
    """Two rows of their own under mallinfo's, and the same numbers in the totals."""
    count = sum(core.truth["tcached"].values())
    size = sum(int(size) * count for size, count in core.truth["tcached"].items())
    ours = totals(reply.items)
    assert (ours["tcached_blocks"], ours["tcached_bytes"]) == (count, size)
    rows = table(reply.items, "mallinfo")[1 + len(FIELDS):]
    assert [(int(value), "tcache" in label or "thread caches" in label) for label, value in rows] == \
        [(size, True), (count, True)]


@pytest.mark.parametrize("scenario", ["plain", "fastbins", "tcache", "tcache_big"])
def test_tcached_row(scenario, captured, answers):
    check_tcached(answers("heaps", scenario)["mallinfo"], captured("heaps", scenario))


@no_debug
def test_two_libcs(no_debug, captured, answers):
    reply, core = answers("two_libcs", no_debug=no_debug)["mallinfo"], captured("two_libcs")
    check_two_libcs(reply, core)


def check_two_libcs(reply, core):
    """Both heaps are told, each with its own numbers."""
    found = [{name: item[name] for name in FIELDS} for item in items_of(reply.items, "totals")]
    assert core.truth["mallinfo"] in found
    assert core.truth["other"]["mallinfo"] in found
    assert len(found) == 2
    check_closes(reply, core.truth)


def test_stopped_inside_malloc(answers):
    text = answers("heaps", "locked")["mallinfo"].text
    assert re.search(r"arena.*locked.*malloc", text), text


@pytest.mark.slow
def test_busy_threads(answers):
    """Threads stopped anywhere in malloc and free: a report, whatever the state."""
    assert totals(answers("heaps", "busy")["mallinfo"].items)["arena"] > 0


def near(text, address, distance=32):
    """Lines of the text that name an address within `distance` of the given one."""
    return [line for line in text.splitlines()
            if any(abs(int(number, 16) - address) <= distance for number in re.findall(r"0x[0-9a-f]+", line))]


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind, captured, answers):
    check_damage(answers("damage", kind, no_debug=True)["mallinfo"], captured("damage", kind))


#: Damage that mallinfo2() never looks at: it follows bk links and reads the sizes of free chunks only.
UNSEEN = ["size_zero", "size_odd", "size_huge", "size_short", "size_thread", "bin_self", "bin_ring",
          "bin_wild", "tcache_wild", "tcache_self", "heap_info"]


@pytest.mark.parametrize("kind", UNSEEN)
def test_damage_that_mallinfo2_does_not_see(kind, captured, answers):
    """Called after the damage, mallinfo2() would return what it did before."""
    reply, core = answers("damage", kind, no_debug=True)["mallinfo"], captured("damage", kind)
    assert {name: totals(reply.items)[name] for name in FIELDS} == core.truth["mallinfo"]


def check_damage(reply, core):
    """A line names the place, a finding says it to programs, and the table is there all the same."""
    word, = core.truth["addresses"]["damage"]
    assert near(reply.text, word), f"{word:#x} is not named:\n{reply.text}"
    assert "heap-damage" in [finding["kind"] for finding in items_of(reply.items, "finding")]
    assert totals(reply.items)["arena"] == core.truth["mallinfo"]["arena"]
    assert len(table(reply.items, "mallinfo")) > len(FIELDS)
