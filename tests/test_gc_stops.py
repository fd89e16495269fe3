"""leak-gc at any moment of a program that allocates without end: what is missing is named, chunk by chunk."""
import json
import lzma
import random
import re
import subprocess

import pytest

from gdbleak.heaps import lj_alloc
from gdbleak.reports.analysis import Analysis
from gdbleak.target.core_file import open_core
from tests import luajit_target
from tests.luajit_target import FIXTURES
from tests.targets import ROOT, TIMEOUT, items_of, run_gdb

CASES = [("debian-debug", "churn", 15), ("openresty", "grow", 15)]
SLOW = [(name, mode, 250) for name in ("debian", "openresty-debug", "debian-gc32", "openresty-gc32", "debian-sysmalloc")
        for mode in ("churn", "grow", "buffers")]


def checks_at(pid, stops, directory):
    """(self-check, text of the report) at as many moments of a process, a few milliseconds apart."""
    moments, commands = random.Random(stops), []
    for number in range(stops):
        commands += [f"shell sleep {moments.random() / 100:.4f}", f"attach {pid}", "echo \\n<<<",
                     f"leak-gc --json {directory / str(number)}", "detach"]
    texts = run_gdb(commands, timeout=10 * TIMEOUT).stdout.split("\n<<<")
    assert len(texts) == stops + 1, texts[-1]
    for number, text in enumerate(texts[1:]):
        assert (directory / str(number)).exists() and "Traceback" not in text, text
        yield items_of(json.loads((directory / str(number)).read_text()), "check")[0], text


@pytest.mark.parametrize("name, mode, stops",
                         [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_any_moment(tmp_path, name, mode, stops):
    """Each gap is what the stop caught under way; at most what a table is made of, and what the parser works in."""
    command = [luajit_target.build(name).path, FIXTURES / "busy.lua", mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout.readline() == b"busy\n"
            gaps = [(check, text) for check, text in checks_at(busy.pid, stops, tmp_path) if check["gap"]]
        finally:
            busy.kill()
    unproven = [text for check, text in gaps if not check["explained"]]
    # On malloc a stale word elsewhere may point to a block in flight, which could be the program's own then.
    assert len(unproven) <= (stops // 50 if name.endswith("sysmalloc") else 0), unproven
    for check, text in gaps:
        assert not check["explained"] or len(check["in_flight"]) <= 7, text
    assert gaps or stops < 100


#: What Lua does -> where GDB stops it, by breakpoints in turn, {allocator}: the function that lj_mem_realloc calls;
#: whether it then lets the function return; which register has the block, and which its size.
MOMENTS = {
    "a string is allocated": ('("x"):rep(50000)', ["*lj_mem_realloc if $rdx == 0 && $rcx > 50000"], True, "rax", "rcx"),
    "a buffer is freed": ('require("string.buffer").new(20000):put("x"):free()',
                          ["lj_cf_buffer_method_free", "*{allocator} if $rcx == 0"], False, "rsi", "rdx"),
}


@pytest.mark.parametrize("name, allocator", [("debian-debug", "lj_alloc_f"), ("openresty-sysmalloc", "mem_alloc")])
@pytest.mark.parametrize("moment", MOMENTS)
def test_one_moment(tmp_path, name, allocator, moment):
    """What the function was asked for is the gap, and its block is what explains it."""
    program, stops, returns, block, size = MOMENTS[moment]
    (tmp_path / "program.lua").write_text(f"local result = {program}\n")
    commands = [f"set args {tmp_path / 'program.lua'}"]
    for number, stop in enumerate(stops):
        commands += [f"tbreak {stop.format(allocator=allocator)}", "continue" if number else "run"]
    commands += [f"set $size = ${size}", *(["finish"] if returns else []), f'printf "told %lu %lu\\n", ${block}, $size',
                 f"leak-gc --json {tmp_path / 'gc.json'}"]
    text = run_gdb(commands, luajit_target.build(name).path).stdout
    address, asked = map(int, re.search(r"^told (\d+) (\d+)$", text, re.M).groups())
    check, = items_of(json.loads((tmp_path / "gc.json").read_text()), "check")
    assert abs(check["gap"]) == asked > 15000 and (check["gap"] < 0) == returns, text
    assert check["explained"], text
    assert [found["address"] for found in check["in_flight"]] == ([address] if returns else [])
    assert re.search(rf"explained by .*{asked:,} bytes.*{address:#x}", text), text


def test_a_segment_that_was_just_unmapped(tmp_path, monkeypatch):
    """Its record has gone with it, and the allocator's list leads to it still: who unmaps it has the next at hand."""
    core = tmp_path / "core"
    core.write_bytes(lzma.decompress((ROOT / "fixtures" / "cores" / "luajit-cache.core.xz").read_bytes()))
    target = open_core(str(core), "")
    vm, = Analysis.of(target).luajit
    before = vm.allocator
    first, gone, last = before.segments
    there = target.space.present
    monkeypatch.setattr(target.space, "present", lambda low, high: [
        one for one in there(low, high) if not gone.start <= one[0] < gone.start + gone.size])
    at = before.address
    assert lj_alloc.read(target, at) is None            # none is at hand, and the last has the allocator itself
    target.threads[0].registers["rbx"] = before.records[2]
    heap = lj_alloc.read(target, at)
    assert [(one.start, one.in_use_bytes) for one in heap.segments] == [
        (one.start, one.in_use_bytes) for one in (first, last)]
    assert any("has just been unmapped" in note for note in heap.notes)


def test_earlier_stops_are_forgotten(tmp_path):
    """What was read at each stop is as large as the process: of many stops in one GDB only the last is kept."""
    count = "sum(type(each).__name__ == 'Target' for each in gc.get_objects())"
    with subprocess.Popen([luajit_target.build("debian").path, FIXTURES / "busy.lua", "churn"],
                          stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout.readline() == b"busy\n"
            stop = [f"attach {busy.pid}", "leak-gc", "leak-retained", "leak-sizes", "detach"]
            done = run_gdb([*4 * stop, f"python import gc; print('targets', {count})"])
        finally:
            busy.kill()
    assert "targets 1\n" in done.stdout, done.stdout
