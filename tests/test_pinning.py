"""Native memory that Lua objects pin: named by path, to what malloc counted; pending when only garbage holds it.

Debian's stock nginx keeps certificates of OpenSSL's in an lrucache, and a small LuaJIT program holds blocks of
malloc's by each kind of object that can hold a pointer.
"""
import re
from typing import NamedTuple

import pytest

from tests.luajit_target import LuaNginx, make_certificates, run_program
from tests.targets import ask, block_states, items_of, table, totals

HITS = 250
CERT_CACHE = r"registry => \._LOADED => dynamic_cert => \.cert_cache"
#: The leak -> C types of what stands for a certificate and for a key.
LEAKS = {"certificates": ("void *", "void *"), "certificates_ffi": ("struct x509_st *", "struct evp_pkey_st *")}
#: malloc counts what waits in thread caches as in use: without them its counters are those of the blocks in use.
NO_TCACHE = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
MADE = 300
BUILDS = ["openresty", "debian", "openresty-gc32"]
HELD = ["cache", "structs", "lights", "userdata", "buffers", "shared"]
STATES = ["unreachable", "pending"]
QUESTIONS = ["leak-retained --pins --top 100000", "leak-unreachable",
             *[f"leak-blocks --state {state} --top 1000000" for state in STATES]]


class Answers(NamedTuple):
    """What QUESTIONS asked: the dominators, as dicts; the totals of leak-unreachable; state -> its blocks."""

    dominators: list
    totals: dict
    blocks: dict

    def malloc_of(self, path):
        """The native bytes that the object at the end of the path retains: of the one row whose path matches."""
        found = [row for row in self.dominators if re.search(f"{path}$", row["Path"])]
        assert len(found) == 1, [row["Path"] for row in self.dominators[:50]]
        return int(found[0]["malloc"])


@pytest.fixture(scope="module")
def answers():
    """Function of a Capture: its Answers, asked for once."""
    made = {}

    def get(core):
        if core.core not in made:
            (retained, unreachable, *listed), = ask([(core, QUESTIONS)])
            for reply in (retained, unreachable, *listed):
                assert reply.items and "Traceback" not in reply.text, reply.text
            header, *rows = table(retained.items, "dominators")
            made[core.core] = Answers([dict(zip(header, row)) for row in rows], totals(unreachable.items),
                                      {state: block_states(reply) for state, reply in zip(STATES, listed)})
        return made[core.core]
    return get


def cdata(core):
    """C type -> number of cdata by leak-gc, whose self-check has to close."""
    (gc,), = ask([(core, ["leak-gc --types --top 1000"])])
    assert gc.items, gc.text
    check, = items_of(gc.items, "check")
    assert (check["truth"], check["gap"]) == (core.truth["count"], 0), gc.text
    header, *rows = table(gc.items, "cdata by C type")
    return {row[0]: int(row[header.index("count")]) for row in rows}


# -- certificates in nginx's Lua -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """Function of (leak, whether its cache was evicted at last): its Capture."""
    made = {}

    def get(leak, evict=False):
        if (leak, evict) not in made:
            prefix = tmp_path_factory.mktemp(leak) / "nginx"
            make_certificates(prefix / "certificates")
            with LuaNginx(prefix, leak, environment=NO_TCACHE) as nginx:
                nginx.hit(HITS)
                nginx.burst("/nothing")
                made[leak, evict] = nginx.core(evict)
        return made[leak, evict]
    return get


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("evict", [False, True])
def test_truth(cached, leak, evict):
    """The target itself: two certificates and two keys a hit, which take kilobytes, and cdata of their types."""
    core = cached(leak, evict)
    truth = core.truth
    assert len(set(truth["addresses"])) == len(truth["addresses"]) == 4 * truth["hits"] == 4 * HITS
    assert 8_000 < truth["native"] / HITS < 40_000
    count = cdata(core)
    for kind in set(LEAKS[leak]):                # lua-resty-core may have a few of its own
        assert 0 <= count[kind] - 2 * HITS * LEAKS[leak].count(kind) < 10, count


@pytest.mark.parametrize("leak", LEAKS)
def test_widest_path(cached, leak):
    """leak-gc-refs leads to the cache too, by what Lua's own objects weigh."""
    (refs,), = ask([(cached(leak), ["leak-gc-refs"])])
    assert re.search(f"the widest path: GC roots => {CERT_CACHE}\\b", refs.text), refs.text


@pytest.mark.parametrize("leak", LEAKS)
def test_cache_is_named_with_what_it_pins(cached, answers, leak):
    core = cached(leak)
    found = answers(core)
    assert found.malloc_of(CERT_CACHE) == pytest.approx(core.truth["native"], rel=0.02)
    largest = [row["Path"] for row in found.dominators[:10]]
    assert any(re.search(CERT_CACHE, path) for path in largest), largest


@pytest.mark.parametrize("leak", LEAKS)
def test_cached_is_neither_leaked_nor_pending(cached, answers, leak):
    core = cached(leak)
    found = answers(core)
    for blocks in found.blocks.values():
        assert not blocks.keys() & set(core.truth["addresses"])
    assert found.totals["bytes"] + found.totals["pending_bytes"] < 0.02 * core.truth["native"]


@pytest.mark.parametrize("leak", LEAKS)
def test_path_to_native_block(cached, leak):
    """leak-path of OpenSSL's objects, by address."""
    core = cached(leak)
    addresses = [core.truth["addresses"][index] for index in (HITS, 2 * HITS, 3 * HITS)]
    replies, = ask([(core, [f"leak-path {address:#x}" for address in addresses])])
    for reply in replies:
        assert re.search(rf"GC roots => {CERT_CACHE} => \.hasht\b", reply.text), reply.text


@pytest.mark.parametrize("leak", LEAKS)
def test_evicted_is_pending(cached, answers, leak):
    core = cached(leak, True)
    found, addresses = answers(core), set(core.truth["addresses"])
    assert not found.blocks["unreachable"].keys() & addresses
    # nginx does not clear its pools: old words in them, from before the addresses were used again, hold one or two.
    assert len(addresses - found.blocks["pending"].keys()) <= 0.01 * len(addresses)
    assert found.totals["pending_bytes"] == pytest.approx(core.truth["native"], rel=0.02)
    assert found.totals["bytes"] < 0.02 * core.truth["native"]


@pytest.mark.parametrize("leak", LEAKS)
def test_evicted_is_not_pinned(cached, answers, leak):
    core = cached(leak, True)
    for row in answers(core).dominators:
        if "cert_cache" in row["Path"]:
            assert int(row["malloc"]) < 0.02 * core.truth["native"], row


# -- each kind of object that can hold a pointer -------------------------------------------------------------
@pytest.fixture(scope="module")
def pinned(tmp_path_factory):
    """Function of a build's name: the Capture of pinning.lua."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = run_program(name, "pinning.lua", tmp_path_factory.mktemp(name), MADE, "counts")
        return made[name]
    return get


def addresses_of(core, name):
    """Addresses of all blocks of a class."""
    told = core.truth["classes"][name]
    assert len(told["first"]) == len(told["second"]) == MADE
    return {*told["first"], *told["second"]}


def chunk_bytes(core, name):
    """Bytes of the chunks of a class: each has a header of 8 bytes beside what is usable."""
    return core.truth["classes"][name]["usable"] + 8 * len(addresses_of(core, name))


@pytest.mark.parametrize("name", BUILDS)
def test_pinning_truth(pinned, name):
    """The target itself: the VM accounts for every object, the structs are there, no block is in two classes."""
    core = pinned(name)
    assert cdata(core)["struct holder"] == MADE
    blocks = [addresses_of(core, name) for name in core.truth["classes"]]
    assert len(set().union(*blocks)) == sum(map(len, blocks)) == 2 * MADE * len(blocks)


@pytest.mark.parametrize("name", BUILDS)
def test_leaked_is_unreachable(pinned, answers, name):
    """All that was leaked and nothing else; the first of each pair is direct, the second hangs below it."""
    core = pinned(name)
    found, usable = answers(core), core.truth["classes"]["leaked"]["usable"]
    assert found.blocks["unreachable"].keys() == addresses_of(core, "leaked")
    assert (found.totals["blocks"], found.totals["usable_bytes"]) == (2 * MADE, usable)
    assert (found.totals["direct_blocks"], found.totals["indirect_blocks"]) == (MADE, MADE)
    assert found.totals["bytes"] == chunk_bytes(core, "leaked")
    assert found.totals["direct_bytes"] + found.totals["indirect_bytes"] == chunk_bytes(core, "leaked")


@pytest.mark.parametrize("name", BUILDS)
def test_garbage_is_pending(pinned, answers, name):
    core = pinned(name)
    found = answers(core)
    assert found.blocks["pending"].keys() == addresses_of(core, "pending")
    assert found.totals["pending_blocks"] == 2 * MADE
    assert found.totals["pending_bytes"] == chunk_bytes(core, "pending")


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("name", BUILDS)
def test_table_is_named_with_what_it_pins(pinned, answers, name, held):
    core = pinned(name)
    assert answers(core).malloc_of(rf"\.holders => \.{held}") == chunk_bytes(core, held)


@pytest.mark.parametrize("name", BUILDS)
def test_all_that_is_pinned(pinned, answers, name):
    core = pinned(name)
    assert answers(core).malloc_of(r"\.holders") == sum(chunk_bytes(core, held) for held in HELD)


@pytest.mark.parametrize("name", BUILDS)
def test_shared_is_pinned_by_neither(pinned, answers, name):
    """Two tables hold it: only the one that holds both retains it."""
    for row in answers(pinned(name)).dominators:
        if re.search(r"\.shared => \.(left|right)$", row["Path"]):
            assert int(row["malloc"]) == 0, row


@pytest.mark.parametrize("name", BUILDS)
def test_paths_to_blocks(pinned, name):
    """leak-path of the second of a pair goes by way of the first, and names the table."""
    core = pinned(name)
    pairs = {held: [core.truth["classes"][held][part][MADE // 2] for part in ("first", "second")] for held in HELD}
    replies, = ask([(core, [f"leak-path {second:#x}" for _, second in pairs.values()])])
    for (held, (first, second)), reply in zip(pairs.items(), replies):
        assert re.search(rf"\.holders => \.{held}\b", reply.text), reply.text
        assert f"{first:#x}" in reply.text and f"{second:#x}" in reply.text


@pytest.mark.parametrize("name", BUILDS)
def test_pending_in_the_words_of_the_collector(pinned, name):
    """leak-gc --types tells of the native memory that only its dead objects hold."""
    core = pinned(name)
    (gc,), = ask([(core, ["leak-gc --types"])])
    rows = {row[0]: row[1:] for row in table(gc.items, "what Lua holds of malloc's memory")[1:]}
    assert rows["pending: only dead objects hold it"] == [str(2 * MADE), str(chunk_bytes(core, "pending"))]
