"""leak-path, leak-refs and leak-retained on a program that knows what each of its variables holds."""
import json

import pytest

from .targets import ask, build, capture, leak_json, run_cli, table, totals


@pytest.fixture(scope="module", params=["debug", "stripped"])
def held(request, tmp_path_factory):
    """(whether it has debug information, its Capture)."""
    flags = ["-O1"] + ["-s"] * (request.param == "stripped")
    return request.param == "debug", capture(build("paths", *flags), tmp_path_factory.mktemp(request.param))


def rows(items, word=""):
    """The rows of a table as dicts."""
    header, *found = table(items, word)
    return [dict(zip(header, row)) for row in found]


def retained(held_by, options=""):
    return rows(leak_json(f"leak-retained --top 1000 {options}", held_by), "dominators")


@pytest.mark.parametrize("variable", ["cache", "list", "session"])
def test_a_variable_retains_what_only_it_holds(held, variable):
    debug, core = held
    wanted = {"cache": "paths-", "list": "paths-", "session": "thread-local"}[variable]
    found = [row for row in retained(core) if row["What"].startswith(wanted) and
             int(row["Retained"]) == core.truth[variable] == int(row["malloc"]) and row["Own"] == "0"]
    assert len(found) == 1
    if debug:
        assert found[0]["What"].endswith(f"!the_{variable}")


def test_what_two_hold_is_retained_by_neither(held):
    _, core = held
    shared = [row for row in retained(core) if row["Address"] == hex(core.truth["the_shared"])]
    assert [int(row["Retained"]) for row in shared] == [core.truth["shared"]]
    tree = [row for row in retained(core) if int(row["Retained"]) == core.truth["tree"]]
    assert tree, "the tree's root retains all of the tree, without what the cache holds too"


def test_retained_adds_up_to_all_that_is_reached(held):
    _, core = held
    said = totals(leak_json("leak-retained", core))
    assert said["root_children_bytes"] == said["reachable_bytes"] == said["malloc_bytes"]
    assert said["reachable_bytes"] + totals(leak_json("leak-unreachable", core))["bytes"] == \
        totals(leak_json("leak-sizes", core))["in_use_bytes"] - THREAD_CACHE


#: The chunk of the main thread's cache, which is glibc's own and no part of the graph.
THREAD_CACHE = 0x290


def test_path_in_the_words_of_the_program(held):
    debug, core = held
    (text, payload, shared, local), = ask([(core, [f"leak-path {core.truth[name]}" for name in
                                                   ("a_text", "a_payload", "the_shared", "the_local")])])
    steps = {"a_text": text, "a_payload": payload}
    assert [totals(reply.items)["steps"] for reply in steps.values()] == [4, 3]
    if debug:
        assert "!the_cache.buckets[3]->next->value.text\n" in text.text
        assert "!the_list.next->next->payload\n" in payload.text
        assert "!the_tree->leaf\n" in shared.text
    else:
        assert " => +0x18\n" in payload.text or "+0x20" in payload.text
        assert "!.bss+0x" in text.text, "a variable without a name is named by its place"
    other = rows(shared.items, "other ways")
    assert any("the_cache" in row["path"] for row in other) or not debug
    assert "only a stack or a register leads to it" in local.text
    if debug:
        assert "in main()" in local.text


def test_paths_of_a_set(held):
    debug, core = held
    items = leak_json("leak-path --size 1008 --state in-use", core)
    found = rows(items, "who holds them")
    assert sum(int(row["Blocks"]) for row in found) == totals(items)["blocks"] == 500
    assert sum(int(row["Bytes"]) for row in found) == 500 * 1008
    assert len(found) == 2, "entries of a chain and those at its beginning"
    if debug:
        assert all(row["Path"].split(" ")[0].endswith("!the_cache.buckets") for row in found)


def test_long_list_is_one_line(held):
    _, core = held
    found = rows(leak_json("leak-path --size 48 --top 1000", core), "who holds them")
    assert sum(int(row["Blocks"]) for row in found) >= 6000     # 3,000 members and a payload each
    assert len(found) < 20
    assert all(len(row["Path"]) < 400 for row in found)


def test_refs(held):
    _, core = held
    (reply,), = ask([(core, [f"leak-refs {core.truth['the_shared']}"])])
    said = totals(reply.items)
    assert said["referrers"] - said["roots"] == 2 and said["references"] == 0
    assert len(rows(reply.items, "what refers to it")) == said["referrers"]


def test_refs_of_a_set(held):
    """Each of the 500 texts is held by one entry, and holds nothing."""
    _, core = held
    items = leak_json("leak-refs --size 1008 --state in-use", core)
    said = totals(items)
    assert (said["blocks"], said["referrers"], said["pointers_in"], said["pointers_out"]) == (500, 500, 500, 0)
    found = rows(items, "what refers to them")
    assert sum(int(row["Pointers"]) for row in found) == 500 and sum(int(row["Blocks of the set"]) for row in found) == 500


def test_flames(held, tmp_path):
    _, core = held
    for command, key in (("retained", "reachable_bytes"), ("path --size 1008", "bytes"), ("unreachable", "bytes"),
                         ("refs --size 1008", "bytes")):
        flame = tmp_path / "flame.folded"
        word, *rest = command.split()
        done = run_cli(word, *rest, "--core", core.core, "--exe", core.exe, "--flame", flame, "--json", tmp_path / "said.json")
        assert done.returncode == 0, done.stderr
        weights = [int(line.rsplit(" ", 1)[1]) for line in flame.read_text().splitlines()]
        assert sum(weights) == totals(json.loads((tmp_path / "said.json").read_text()))[key]
        assert " 0x" not in flame.read_text(), "a frame is never an address"


@pytest.mark.parametrize("command, problem", [
    ("leak-path", "give an address, or a set of blocks"),
    ("leak-path 0", "no block in use and no Lua object begins at or holds 0x0"),
    ("leak-path --size 5-4", "empty"),
    ("leak-refs", "give an address, or a set of blocks"),
    ("leak-retained --size x", "no address or number"),
    ("leak-unreachable --state free", "unrecognized arguments"),
])
def test_mistakes_are_one_line(held, command, problem):
    _, core = held
    (reply,), = ask([(core, [command])])
    assert not reply.items and problem in reply.text and "Traceback" not in reply.text
