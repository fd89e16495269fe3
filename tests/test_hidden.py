"""Memory that a program itself may not read: copied, read and counted as held; listed where nobody may read it."""
import json
import mmap
import os
import re
import subprocess

import pytest

from gdbleak.target import live
from tests.live_target import Core, as_root, copy, gdb_memory, tools, wait_until        # noqa: F401
from tests.targets import build, items_of, run_cli, run_gdb, totals

pytestmark = tools
KEPT_OUT, REFUSED = "excluded by the program with MADV_DONTDUMP", "the kernel refuses to read it"


class Hidden:
    """fixtures/programs/hidden.c, running; `truth`: what it said."""

    def __init__(self):
        self.exe = build("hidden", "-O1").path
        self.process = subprocess.Popen([self.exe], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        self.truth = json.loads(self.process.stdout.readline())

    def end(self):
        """Bytes of its hidden memory that are as it filled them."""
        return [int(word) for word in self.process.communicate("\n", timeout=60)[0].split()]


@pytest.fixture
def hidden():
    started = Hidden()
    yield started
    started.process.kill()
    started.process.communicate()


def resident(pid, address):
    """Kilobytes of a mapping that are in memory."""
    with open(f"/proc/{pid}/smaps") as file:
        return int(re.search(r"^%x-.*?^Rss: +(\d+) kB" % address, file.read(), re.M | re.S)[1])


def test_a_snapshot_has_what_is_hidden(hidden, copy, tmp_path):
    truth = hidden.truth
    made = copy(hidden.pid, str(tmp_path / "core"))
    core = Core(made.path)
    for start, size in (truth["none"], truth["write"], (truth["page"], mmap.PAGESIZE)):
        data = core.read(start, size)
        assert data and data.count(0x5c) >= size - 8 * 40
        assert gdb_memory(hidden.exe, made.path, tmp_path / "dump", start, size) == data
    # A terabyte in which nothing is takes no room, and looking at it has put nothing there.
    assert core.read(truth["reserved"], 8) is None and resident(hidden.pid, truth["reserved"]) == 0
    assert os.stat(made.path).st_size < 16 << 20
    assert core.read(truth["kept_out"][0], 8) is None
    lost = {(lost.start, lost.end, lost.reason) for lost in made.unreadable}
    start, size = truth["kept_out"]
    expected = {(start, start + size, KEPT_OUT)}
    if truth["secret"]:
        expected.add((truth["secret"], truth["secret"] + 2 * mmap.PAGESIZE, REFUSED))
    assert lost == expected
    # It has kept all of it, through mprotect(2) as well.
    page, none, write, kept_out = hidden.end()
    assert min(page + 8 * 40 - mmap.PAGESIZE, none + 8 * 40 - truth["none"][1], write + 8 * 40 - truth["write"][1]) >= 0
    assert kept_out == size


def test_what_hidden_memory_holds_is_held(hidden, tmp_path):
    """From a snapshot, from a copy by fork, and from the process that GDB holds."""
    truth = hidden.truth
    answers = [run_cli("unreachable", "-p", hidden.pid, "--json", "-"),
               run_cli("unreachable", "-p", hidden.pid, "--fork", "--json", "-")]
    written = tmp_path / "held.json"
    done = run_gdb([f"attach {hidden.pid}", f"leak-unreachable --json {written}", "detach"], hidden.exe)
    assert written.exists(), done.stdout
    for items in (*(json.loads(done.stdout) for done in answers), json.loads(written.read_text())):
        table, = items_of(items, "table")
        by_size = {int(row[0].split()[1]): int(row[2]) for row in table["data"][1:] if row[0].startswith("size ")}
        assert by_size == {3008: 50, 2016: truth["leaked"]}
        assert sum(int(row[2]) for row in table["data"][1:]) == 50 + truth["leaked"]
        assert all(item["gap"] == 0 for item in items_of(items, "check"))
    mallinfo = json.loads(run_cli("mallinfo", "-p", hidden.pid, "--json", "-").stdout)
    assert totals(mallinfo)["uordblks"] == truth["in_use"]


def test_what_was_not_copied_is_told_then_and_later(hidden, tmp_path):
    start, size = hidden.truth["kept_out"]
    done = run_cli("snapshot", "-p", hidden.pid, "-o", tmp_path / "core")
    assert f": not copied: {start:#x}-{start + size:#x} ({size} bytes): {KEPT_OUT}\n" in done.stdout
    report = run_cli("memory", "--core", tmp_path / "core")
    assert f"\npartial: {size:,} bytes in 1 stretch of memory were not copied from the process: {KEPT_OUT}\n" in report.stdout
    if hidden.truth["secret"]:
        assert f"\npartial: 8,192 bytes in 1 stretch of memory were not copied from the process: {REFUSED}\n" in report.stdout
    items = json.loads(run_cli("unreachable", "--core", tmp_path / "core", "--json", "-").stdout)
    assert any(KEPT_OUT in reason for reason in items_of(items, "source")[0]["partial"])
    # What is there without access is no mere reservation.
    row, = re.findall(r"^anonymous, without access now +([\d,]+) .* ([\d,]+)$", report.stdout, re.M)
    assert row == (f"{hidden.truth['none'][1]:,}",) * 2
    row, = re.findall(r"^reserved without access +([\d,]+) ", report.stdout, re.M)
    assert int(row.replace(",", "")) >= 1 << 40


def test_a_core_without_losses_has_no_note(hidden, tmp_path):
    """And a damaged note costs nothing."""
    made = live.snapshot(hidden.pid, str(tmp_path / "core"))
    notes = [note for note in Core(made.path).notes if note["n_name"] == "gdbleak"]
    assert len(notes) == 1
    data = bytearray((tmp_path / "core").read_bytes())
    text = b"%x %x %s\n" % (*made.unreadable[0][:2], made.unreadable[0].reason.encode())
    at = bytes(data).index(text)
    data[at:at + len(text)] = b"zz \xff" + b"q" * (len(text) - 5) + b"\n"
    (tmp_path / "damaged").write_bytes(data)
    done = run_cli("mallinfo", "--core", tmp_path / "damaged")
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr
    assert made.unreadable[0].reason not in done.stdout and done.stdout.count("partial: ") == len(made.unreadable) - 1
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        assert wait_until(lambda: os.readlink(f"/proc/{sleeper.pid}/exe").endswith("sleep"))
        made = live.snapshot(sleeper.pid, str(tmp_path / "none"))
        assert made.unreadable == [] and not [n for n in Core(made.path).notes if n["n_name"] == "gdbleak"]
    finally:
        sleeper.kill()
        sleeper.wait()


def test_where_the_kernel_cannot_tell_pages_fast(hidden, tmp_path, monkeypatch):
    """Before Linux 6.7: a terabyte that is empty is not gone through page by page."""
    looked = []
    monkeypatch.setattr(live._PageMap, "_scan", lambda self, start, end: (_ for _ in ()).throw(OSError(25, "no such ioctl")))
    read = live._PageMap._read
    monkeypatch.setattr(live._PageMap, "_read", lambda self, start, end, **how: looked.append((start, end)) or read(
        self, start, end, **how))
    made = live.snapshot(hidden.pid, str(tmp_path / "core"))
    core = Core(made.path)
    assert core.read(hidden.truth["none"][0], 8) == core.read(hidden.truth["write"][0], 8) == b"\x5c" * 8
    assert len(made.unreadable) == 1 + bool(hidden.truth["secret"])
    assert looked and sum(end - start for start, end in looked) < 1 << 30
