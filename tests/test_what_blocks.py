"""leak-what and leak-blocks on places that a program named, and on free blocks by the list that has them."""
import re

import pytest

from tests.targets import ask, items_of, run_gdb, table, totals


@pytest.fixture(scope="module")
def places(captured):
    """Name -> address, or number, of the places that the program told."""
    return captured("places").truth["places"]


@pytest.fixture(scope="module")
def what(captured, places):
    """Function of an address: the Reply of leak-what. Those known beforehand are asked for in one GDB."""
    made = {}

    def get(*addresses):
        new = [address for address in addresses if address not in made]
        if new:
            replies, = ask([(captured("places"), [f"leak-what {address:#x}" for address in new])])
            made.update(zip(new, replies))
        return made[addresses[0]]
    get(*[address for name, address in places.items() if name not in ("main", "thread", "text_usable")])
    return get


def facts(reply, word):
    """The facts of a leak-what that have the word in them."""
    item, = items_of(reply.items, "what")
    return [fact for fact in item["facts"] if word in fact]


def test_block_and_offset(what, places):
    """From the first byte of its header to the last usable one, an address belongs to the block."""
    text, usable = places["text"], places["text_usable"]
    at = [text - 8, text - 1, text, text + 24, text + usable - 1]
    what(*at, text + usable)
    for address in at:
        found = totals(what(address).items)
        assert (found["block_address"], found["block_offset"]) == (text, address - text), hex(address)
        assert found["block_usable"] == usable and found["block_size"] == usable + 8
        assert found["block_state"] == "in use" and found["arena"] == "arena 0 (main)"
    assert totals(what(text + usable).items)["block_address"] == places["pointers"]


def test_symbols(what, places):
    for name, symbol in (("data", "global_number"), ("code", "named_function")):
        reply = what(places[name])
        assert totals(reply.items)["symbol"].split("!")[1] == symbol
        assert facts(reply, "build-id")
    assert totals(what(places["code"]).items)["perms"] == "r-x"


def test_stacks(what, places):
    for name, thread, word in (("stack", "main", "live"), ("thread_stack", "thread", "live"),
                               ("unused_stack", "main", "unused")):
        reply = what(places[name])
        assert totals(reply.items)["stack_of"] == places[thread], name
        assert facts(reply, "stack of thread")[0].endswith(word), name


def test_thread_local_storage(what, places):
    for name, thread in (("tls", "main"), ("thread_tls", "thread")):
        assert facts(what(places[name]), f"static TLS of thread {places[thread]}")


def test_register(what, places):
    """The crash left this address in a register; it points into the block wherever one asks in it."""
    held = facts(what(places["in_register"]), "holds this address")
    assert [fact for fact in held if str(places["main"]) in fact]
    assert facts(what(places["text"]), "points into the same block, at offset 24")


def test_absent_page(what, places):
    reply = what(places["absent"])
    assert facts(reply, "not in the core")
    assert "-- -- -- --" in reply.text
    found = totals(reply.items)
    assert (found["block_address"], found["arena"]) == (places["large"], "arena 0 (main)")


def test_not_mapped(what):
    what(0, 1 << 63, (1 << 64) - 1)
    for address in (0, 1 << 63, (1 << 64) - 1):
        reply = what(address)
        assert totals(reply.items)["mapped"] is False
        assert facts(reply, "nearest mapping")
        assert totals(reply.items)["mapping_start"] is None


def test_expressions(captured, places):
    """Registers, symbols and sums are GDB's to evaluate; what is no address is refused in one line."""
    core = captured("places")
    replies, = ask([(core, ["leak-what $sp", "leak-what &global_number", "leak-what named_function"])])
    stack, data, code = (totals(reply.items) for reply in replies)
    assert stack["stack_of"] == places["main"]
    assert (data["address"], code["address"]) == (places["data"], places["code"])
    text = run_gdb([f"leak-what (char*){places['text']:#x} + 5"], core.exe, core.core).stdout
    assert f"block {places['text']:#x}" in text and "offset 5 of" in text
    wrong = ["nothing_of_that_name", "1 +", f"{1 << 64:#x}"]
    refused = run_gdb([f"leak-what {word}" for word in wrong], core.exe, core.core).stdout
    lines = re.findall("^leak-what: .*", refused, re.M)
    assert [word in line for word, line in zip(wrong, lines)] == [True] * 3


def test_glibc_structures(captured, answers):
    """main_arena by its fields, mp_, and the thread cache: GDB knows where they are, we by their shape."""
    core = captured("heaps", "few_threads")
    questions = {"&main_arena.top": "main_arena.top", "&main_arena.bins[7]": "main_arena.bins[7]",
                 "&mp_.sbrk_base": "mp_.sbrk_base", "main_arena.next": "malloc_state of arena 1.mutex",
                 "main_arena.next->top": "chunk address of the next block"}
    replies, = ask([(core, [f"leak-what {question}" for question in questions])])
    for reply, word in zip(replies, questions.values()):
        assert facts(reply, word), reply.text
    assert facts(replies[-1], ": top, chunk of")


BINS = {"bin": "plain", "tcached": "plain", "fastbin": "fastbins"}


@pytest.mark.parametrize("kind", BINS)
def test_free_lists(kind, captured):
    """A free block's list goes by its size: tcache and fastbins by 16 bytes, small bins likewise."""
    core = captured("heaps", BINS[kind])
    addresses = core.truth["addresses"][kind]
    asked, = ask([(core, [f"leak-what {address:#x}" for address in addresses])])
    assert asked
    for reply in asked:
        size, (fact,) = totals(reply.items)["block_size"], facts(reply, "held by")
        number = int(re.search(r"(?:bin|tcache bin|fastbin) (\d+)", fact)[1])
        if kind == "bin":
            assert number == size // 16 if "small" in fact else number == 1 or number >= 64, fact
            assert ("large" in fact) == (number >= 64) and ("unsorted" in fact) == (number == 1)
        else:
            assert number == size // 16 - 2, fact
    if kind == "bin":
        assert any("unsorted" in facts(reply, "held by")[0] for reply in asked)


def test_foreign_memory(captured, answers):
    """What somebody else took from the break is named as that, and holds no block."""
    core = captured("heaps", "foreign_sbrk")
    for address in core.truth["addresses"]["decoy"]:
        reply = answers("heaps", "foreign_sbrk")["decoy", address]
        assert facts(reply, "foreign sbrk"), reply.text
        assert totals(reply.items)["block_address"] is None


# -- leak-blocks ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def listed(captured):
    """Replies of leak-blocks about the places: plain, as text, and with a hexdump."""
    names = {"plain": "", "text": "--text", "dump": "--dump 40", "large": "--size 64k-68k --dump 16k"}
    commands = [f"leak-blocks --top 100000 {options}" for options in names.values()]
    replies, = ask([(captured("places"), commands)])
    return dict(zip(names, replies))


def contents(reply, address):
    header, *rows = table(reply.items, "block")
    found, = [row for row in rows if int(row[0], 16) == address]
    return found[header.index("Contents")]


def test_contents(listed, places):
    """Text as text, pointers into a module by name, the rest in hex."""
    assert contents(listed["plain"], places["text"]).startswith('"a text that a person can read')
    words = contents(listed["plain"], places["pointers"]).split()
    assert words[0].endswith("!named_function") and words[1].endswith("!global_number")
    assert words[2] == "0x1122334455667788"
    assert "more than one line" in contents(listed["text"], places["text"])
    assert contents(listed["plain"], places["large"]).startswith('"xxxx')


def test_contents_are_harmless(listed, places):
    """Terminal codes and marks of writing direction in a block never reach the terminal."""
    for reply in listed.values():
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f\x9b\u202e]", reply.text)
    assert "owned" in contents(listed["text"], places["hostile"])


def test_dump(listed, places):
    text = listed["dump"].text
    part = text[text.index(f"{places['text']:#x}: "):].splitlines()[1:4]
    assert [re.sub(r"\s+", " ", line.strip()) for line in part] == [
        f"{places['text']:#018x} 61 20 74 65 78 74 20 74 68 61 74 20 61 20 70 65 |a text that a pe|",
        f"{places['text'] + 16:#018x} 72 73 6f 6e 20 63 61 6e 20 72 65 61 64 2c 20 61 |rson can read, a|",
        f"{places['text'] + 32:#018x} 6e 64 20 6c 6f 6e 67 20 |nd long |"]


def test_absent_bytes(listed, places):
    """Just the page that is not in the core is shown as absent, not as zeros."""
    dumps = {int(item["address"], 16): item for item in items_of(listed["large"].items, "dump")}
    dump = dumps[places["large"]]
    pairs = [dump["hex"][k:k + 2] for k in range(0, len(dump["hex"]), 2)]
    assert len(pairs) == 16384
    absent = places["absent"] - places["large"]
    assert pairs == ["78"] * absent + ["--"] * 4096 + ["78"] * (16384 - absent - 4096)


def test_sets(captured):
    """Each set's totals are those of the whole list's rows in it, also when only a few are listed."""
    core = captured("heaps", "few_threads")
    sets = {"--state in-use": lambda row: row["State"] == "in use",
            "--state tcached": lambda row: row["State"] == "tcached",
            "--state free": lambda row: row["State"].startswith("free") or row["State"] == "top",
            "--arena 1": lambda row: row["Arena"] == "arena 1",
            "--arena mmapped": lambda row: row["Arena"] == "mmapped",
            "--size 1k-4k": lambda row: 1024 <= int(row["Size"]) < 4096,
            "--min-bytes 3000": lambda row: int(row["Size"]) >= 3000}
    options = ["--top 100000", *[f"--top 3 {one}" for one in sets], "--sort size --top 25", "--top 0"]
    replies, = ask([(core, [f"leak-blocks {one}" for one in options])])
    header, *rows = table(replies[0].items, "block")
    rows = [dict(zip(header, row)) for row in rows]
    assert [int(row["Address"], 16) for row in rows] == sorted(int(row["Address"], 16) for row in rows)
    assert totals(replies[0].items)["blocks"] == len(rows)
    for (one, inside), reply in zip(sets.items(), replies[1:]):
        chosen = [row for row in rows if inside(row)]
        ours = totals(reply.items)
        assert ours["blocks"] == len(chosen), one
        assert ours["bytes"] == sum(int(row["Size"]) for row in chosen), one
        assert chosen and table(reply.items, "block")[1:] == [list(row.values()) for row in chosen[:3]]
        assert (f"{len(chosen) - 3:,} more blocks" in reply.text) == (len(chosen) > 3)
    largest = sorted(rows, key=lambda row: (-int(row["Size"]), int(row["Address"], 16)))[:25]
    assert table(replies[-2].items, "block")[1:] == [list(row.values()) for row in largest]
    assert table(replies[-1].items, "block")[1:] == []


def test_usable(captured, answers):
    """The bytes that malloc_usable_size() told of the mmapped blocks."""
    header, *rows = table(answers("heaps", "mapped")["blocks"].items, "block")
    usable = {int(row[0], 16): int(row[header.index("Usable")]) for row in rows}
    for block in captured("heaps", "mapped").truth["mmapped"]:
        assert usable[block["address"]] == block["usable"]
