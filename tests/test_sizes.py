"""leak-sizes, leak-blocks and leak-what against what the programs counted and noted of their own blocks."""
import pytest

from tests.targets import DAMAGE, STATIC, block_states, run_gdb, table, totals
from tests.test_mallinfo import SOUND, no_debug


def in_use(truth):
    """Blocks and bytes that the program holds in the heap, the mmapped ones included."""
    sizes, mapped = truth["in_use"], truth["mmapped"]
    # An mmapped chunk takes its mapping's bytes: two words before the block, since 2.43 one behind it too.
    header = 24 if truth["glibc"] >= "2.43" else 16
    in_heap = sum(int(size) * count for size, count in sizes.items())
    return sum(sizes.values()) + len(mapped), in_heap + sum(one["usable"] + header for one in mapped)


def tcached(truth):
    sizes = truth["tcached"]
    return sum(sizes.values()), sum(int(size) * count for size, count in sizes.items())


def check_sizes(reply, core):
    """Totals: exact where only the program allocates, and free blocks as mallinfo2() counts them."""
    ours, truth = totals(reply.items), core.truth
    blocks, size = in_use(truth)
    if truth["alone"]:
        # Of libc's own, what is no multiple of 16 is not a block: a break that was not aligned at the start.
        assert ours["in_use_bytes"] == size + truth["base"] // 16 * 16
        if not truth["early"] and truth["base"]:
            assert ours["in_use_blocks"] == blocks + 1                      # the thread cache's struct
    else:
        assert ours["in_use_blocks"] > blocks and ours["in_use_bytes"] > size
    if truth["sole_cacher"]:
        assert (ours["tcached_blocks"], ours["tcached_bytes"]) == tcached(truth)
    assert ours["free_bytes"] == truth["mallinfo"]["fordblks"]
    assert ours["free_blocks"] == truth["mallinfo"]["ordblks"] + truth["mallinfo"]["smblks"]
    check_exact(reply, truth)


def check_exact(reply, truth):
    """Counts by exact size: just the program's where nobody else allocates, else at least those."""
    rows = exact_rows(reply)
    for size, count in truth["in_use"].items():
        ours = rows[int(size)][0] if count else 0
        assert ours == count if truth["alone"] and not truth["early"] else ours >= count, size
    if truth["sole_cacher"]:
        assert {str(size): row[1] for size, row in rows.items() if row[1]} == truth["tcached"]


def exact_rows(reply):
    """Chunk size -> (blocks in use, blocks tcached) of the table of exact sizes."""
    rows = table(reply.items, "exact")[1:]
    return {int(row[0]): (int(row[1]), int(row[3])) for row in rows}


@no_debug
@pytest.mark.parametrize("scenario", SOUND)
def test_sizes(scenario, no_debug, captured, answers):
    check_sizes(answers("heaps", scenario, no_debug=no_debug)["sizes"], captured("heaps", scenario))


@pytest.mark.parametrize("where", ["static", "static-pie"])
@pytest.mark.parametrize("scenario", STATIC)
def test_static_sizes(scenario, where, captured, answers):
    check_sizes(answers("heaps", scenario, where)["sizes"], captured("heaps", scenario, where))


#: What leak-blocks and leak-what call the kinds of blocks that the programs note.
STATES = {"in_use": "in use", "mmapped": "in use", "tcached": "tcached", "fastbin": "free (fastbin)",
          "bin": "free (bin)"}


def check_addresses(replies, core):
    """leak-blocks lists the noted blocks in their state, leak-what says the same; decoys are no blocks."""
    listed = block_states(replies["blocks"])
    usable = {block["address"]: block["usable"] for block in core.truth["mmapped"]}
    noted = {**core.truth["addresses"], "mmapped": list(usable)}
    wrong = [(kind, hex(address), listed.get(address)) for kind, state in STATES.items()
             for address in noted[kind] if listed.get(address, (0, ""))[1] != state]
    assert wrong == []
    assert [hex(address) for address in noted["decoy"] if address in listed] == []
    for question, reply in replies.items():
        if isinstance(question, tuple) and question[0] in STATES:
            kind, address = question
            ours = totals(reply.items)
            assert (ours["block_address"], ours["block_state"]) == (address, STATES[kind]), reply.text
            assert kind != "mmapped" or ours["block_usable"] == usable[address], reply.text


@no_debug
@pytest.mark.parametrize("scenario", SOUND)
def test_blocks_and_what(scenario, no_debug, captured, answers):
    check_addresses(answers("heaps", scenario, no_debug=no_debug), captured("heaps", scenario))


def test_second_libc(captured, answers):
    """The blocks of the other namespace's heap are found, and those of its other arena."""
    other, replies = captured("two_libcs").truth["other"], answers("two_libcs")
    listed = block_states(replies["blocks"])
    assert "in use" in listed[other["first"]][1] and "in use" in listed[other["last"]][1]
    assert "tcached" in listed[other["freed"]][1]


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_spares_the_rest(kind, captured, answers):
    """The first and the last block that the program holds are still found in a damaged heap."""
    core, replies = captured("damage", kind), answers("damage", kind, no_debug=True)
    listed = block_states(replies["blocks"])
    assert [hex(address) for address in core.truth["addresses"]["in_use"] if address not in listed] == []
    assert totals(replies["sizes"].items)["in_use_blocks"] > 0


def test_what_takes_options_on_either_side(captured, tmp_path):
    core = captured("heaps", "plain")
    address = core.truth["addresses"]["in_use"][0]
    run_gdb([f"leak-what {address:#x} --json {tmp_path / 'after'}",
             f"leak-what --json {tmp_path / 'before'} {address:#x}"], core.exe, core.core)
    assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()


def test_foreign_memory_is_named(captured, answers):
    """What the program took from the break itself belongs to no block, and leak-what says so."""
    replies = answers("heaps", "foreign_sbrk")
    for address in captured("heaps", "foreign_sbrk").truth["addresses"]["decoy"]:
        reply = replies["decoy", address]
        assert totals(reply.items)["block_address"] is None and "foreign" in reply.text, reply.text
