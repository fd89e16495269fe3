"""LeakSanitizer as the oracle: what gdbleak finds unreachable in a core is what it finds in the same program.

Each pattern of fixtures/programs/leaks.c and leaks.cc runs twice: built with LeakSanitizer, which judges at the moment
at which the other build dumps core. A core knows no allocation sites, so each site of a pattern has a size of its own;
the program tells which, and counts itself what it leaks.
"""
import json
import os
import re
import subprocess
from collections import Counter
from typing import NamedTuple

import pytest

from tests.targets import TIMEOUT, ask, build, capture, table, totals

PATTERNS = {
    "leaks": """
        plain list long_list trees cycle cycle_tail self shared_below through_leaked holds_reachable hash_table
        ring_buffer interior last_byte past_end intrusive low_tags high_tags xored shifted offset halves unaligned
        globals protected tls thread_tls plugin_globals plugin_tls plugin_thread_tls unloaded specific thread_specific
        arguments local on_the_stack recursion returned thread_stack in_register in_vector_register
        coroutine in_coroutine alternate_stack own_stack
        allocators leaked_allocators shrunk mapped_memory shared_memory private_file unmapped_memory
        stale_tcache stale_bins stale_fastbin stale_top before_free before_cached before_top thread_before_top
        thread_arenas ended_threads ended_thread_held ended_thread_argument ended_thread_result ended_detached_argument
        ended_plugin_tls across_arenas environment at_exit open_stream open_directory lines libc_tables
        timer kernel_only""".split(),
    "leaks.cc": """
        vectors grown_vector lists list_iterator maps map_iterator hashed deques strings ends second_base virtual_base
        member_pointer arrays over_aligned in_static_storage unique shared shared_cycle aliased captured sums
        custom_allocator memory_resource thread_arguments thread_locals promised handled_exception stored_exception
        coroutines""".split(),
}
ALL = [(source, name) for source, names in PATTERNS.items() for name in names]
#: Bound at the start: else the dynamic linker saves the vector registers on the stack at the first call of a function.
FLAGS = {"leaks": ["-O2", "-Wl,-z,now"], "leaks.cc": ["-O2", "-std=c++20", "-Wl,-z,now"]}
#: Direct leaks where there are cycles, of which LeakSanitizer calls every block indirect: one for each cycle that hangs
#: on nothing else.
CYCLES = {"cycle": 1, "cycle_tail": 2, "lists": 1, "maps": 1, "hashed": 1, "shared_cycle": 1, "custom_allocator": 1}
QUESTIONS = ["leak-unreachable --top 1000", "leak-blocks --state unreachable --top 1000000"]

pattern = pytest.mark.parametrize("source, name", ALL, ids=[name for _, name in ALL])


class Judgement(NamedTuple):
    """What the program built with LeakSanitizer counted (site -> bytes of a block, blocks lost), and what LeakSanitizer
    reports: bytes of a block -> blocks; blocks it calls direct."""

    sites: dict
    sizes: Counter
    direct: int


class Answer(NamedTuple):
    """What the program counted that dumped core (as Judgement.sites), and what gdbleak says: the totals of
    leak-unreachable, rows of leak-blocks as (chunk size, usable size)."""

    sites: dict
    totals: dict
    blocks: list


def sites_of(truth):
    """site -> (usable bytes of its blocks, how many of them are lost)."""
    return {site["site"]: (site["usable"], site["lost"]) for site in truth["sites"]}


def lost_sizes(sites):
    """Usable bytes -> blocks lost."""
    return Counter({usable: lost for usable, lost in sites.values() if lost})


def ask_lsan(program, name, plugin, directory):
    """Let LeakSanitizer judge the pattern."""
    options = f"report_objects=1:max_leaks=0:symbolize=0:exitcode=23:log_path={directory / 'lsan'}"
    done = subprocess.run([program.path, name, plugin], cwd=directory, env={**os.environ, "LSAN_OPTIONS": options},
                          capture_output=True, text=True, timeout=TIMEOUT)
    log = "".join(path.read_text() for path in directory.glob("lsan.*"))
    assert done.returncode == (23 if log else 0) and ("SUMMARY: LeakSanitizer" in log or not log), log + done.stderr
    sizes = Counter(int(size) for size in re.findall(r"^0x[0-9a-f]+ \((\d+) bytes\)$", log, re.MULTILINE))
    direct = re.findall(r"^Direct leak of \d+ byte\(s\) in (\d+) object", log, re.MULTILINE)
    return Judgement(sites_of(json.loads(done.stdout)), sizes, sum(map(int, direct)))


@pytest.fixture(scope="module")
def plugin():
    """The path of plugin.c as a library."""
    return str(build("plugin", "-shared", "-fPIC").path)


@pytest.fixture(scope="module")
def judge(plugin, tmp_path_factory):
    """Function of a pattern: the Judgement."""
    made = {}

    def get(source, name):
        if (source, name) not in made:
            program = build(source, *FLAGS[source], "-DLSAN", "-fsanitize=leak")
            made[source, name] = ask_lsan(program, name, plugin, tmp_path_factory.mktemp(name))
        return made[source, name]
    return get


@pytest.fixture(scope="module")
def replies(request, plugin, tmp_path_factory):
    """(source, name) -> (Capture, Replies to QUESTIONS), of all patterns that this run tests. One GDB answers."""
    wanted = {(item.callspec.params["source"], item.callspec.params["name"]) for item in request.session.items
              if item.path == request.path and "name" in getattr(item, "fixturenames", ())}
    cores = [capture(build(source, *FLAGS[source]), tmp_path_factory.mktemp(name), name, plugin)
             for source, name in wanted]
    return dict(zip(wanted, zip(cores, ask([(core, QUESTIONS) for core in cores]))))


@pytest.fixture
def answer(replies):
    """Function of a pattern: the Answer."""
    def get(source, name):
        core, (unreachable, blocks) = replies[source, name]
        assert unreachable.items, unreachable.text
        assert blocks.items, blocks.text
        header, *rows = table(blocks.items, "blocks")
        size, usable = header.index("Size"), header.index("Usable")
        listed = [(int(row[size]), int(row[usable])) for row in rows]
        return Answer(sites_of(core.truth), totals(unreachable.items), listed)
    return get


@pytest.mark.parametrize("source", PATTERNS)
def test_all_patterns_are_tested(source):
    listed = subprocess.run([build(source, *FLAGS[source]).path], capture_output=True, text=True, check=True).stdout
    assert listed.split() == PATTERNS[source]


@pattern
def test_leak_sanitizer_and_the_program_agree(source, name, judge):
    """Else the pattern is not one to hold gdbleak against."""
    judged = judge(source, name)
    assert judged.sizes == lost_sizes(judged.sites)


@pattern
def test_blocks(source, name, judge, answer):
    """The same number of blocks per allocation site, and no others."""
    judged, ours = judge(source, name), answer(source, name)
    assert {site: lost for site, (_, lost) in judged.sites.items()} == \
           {site: lost for site, (_, lost) in ours.sites.items()}
    at = {size: site for site, (size, _) in judged.sites.items()}
    leaked = Counter({ours.sites[at[size]][0]: number for size, number in judged.sizes.items()})
    assert Counter(usable for _, usable in ours.blocks) == leaked


@pattern
def test_totals(source, name, judge, answer):
    judged, ours = judge(source, name), answer(source, name)
    said, leaked = ours.totals, lost_sizes(ours.sites)
    direct = CYCLES.get(name, judged.direct)
    assert said["blocks"] == sum(judged.sizes.values())
    assert said["usable_bytes"] == sum(usable * lost for usable, lost in leaked.items())
    assert said["bytes"] == sum(size for size, _ in ours.blocks)
    assert (said["direct_blocks"], said["indirect_blocks"]) == (direct, said["blocks"] - direct)
    assert said["direct_bytes"] + said["indirect_bytes"] == said["bytes"]
    assert said["pending_blocks"] == said["pending_bytes"] == 0
