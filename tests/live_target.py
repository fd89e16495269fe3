"""Live processes for the tests of snapshots, and the cores that are made of them."""
import contextlib
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile

from gdbleak.record.fork import snapshot_by_fork
from gdbleak.target import live
from tests.targets import ROOT, build

SCRIPT = ROOT / "scripts" / "gdbleak-snapshot"
tools = pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("gdb")), reason="needs gcc and gdb")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The path of fixtures/programs/live_subject.c, built, under a short name."""
    return str(shutil.copy(build("live_subject", "-O1").path, tmp_path_factory.mktemp("program") / "subject"))


@pytest.fixture(params=["directly", "by fork"])
def copy(request):
    """Both ways to take a snapshot."""
    def by_fork(*arguments, **options):
        made = snapshot_by_fork(*arguments, **options)
        assert made.refused == "" and made.forked_ms > 0
        return made
    return by_fork if request.param == "by fork" else live.snapshot


class Subject:
    """A running program; `said` holds the numbers of its first line."""

    def __init__(self, *arguments, greeting=True, **options):
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
        self.pid = self.process.pid
        self.said = [int(word) for word in self.process.stdout.readline().split()] if greeting else []

    def ask(self, letter="a"):
        self.process.stdin.write(letter)
        self.process.stdin.flush()
        return self.process.stdout.readline().split()

    def word(self, address):
        """A 64-bit word of its memory, now."""
        with open("/proc/%d/mem" % self.pid, "rb", 0) as file:
            file.seek(address)
            return struct.unpack("<Q", file.read(8))[0]

    def is_running(self, counter):
        """Whether the counter at this address goes up."""
        before = self.word(counter)
        return wait_until(lambda: self.word(counter) > before + 10)

    def state(self):
        with open("/proc/%d/status" % self.pid) as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        return status["State"][0], status["TracerPid"]


@pytest.fixture
def run(program):
    with contextlib.ExitStack() as stack:
        def start(*arguments):
            subject = Subject(program, *map(str, arguments))
            stack.callback(subject.process.wait)
            stack.callback(subject.process.kill)
            return subject
        yield start


def wait_until(condition, timeout=60):
    limit = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.002)
    return True


def children(pid):
    """The children of a process: {pid: state}."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == pid:
                    found[int(name)] = state
    return found


def gdb(exe, core, *commands):
    """What GDB prints for `commands`; nothing may go wrong in it."""
    arguments = [part for command in commands for part in ("-ex", command)]
    start = ["gdb", "-nx", "-q", "-batch", "-iex", "set debuginfod enabled off"]
    done = subprocess.run([*start, *arguments, exe, core], capture_output=True, text=True, timeout=120)
    # Of any core file GDB says so when a file that was mapped is gone.
    gone = r"warning: Can't open file [^:]* \(deleted\) during file-backed mapping note processing"
    assert "warning" not in re.sub(gone, "", done.stderr).lower(), done.stderr
    return done.stdout


def gdb_memory(exe, core, path, start, size):
    gdb(exe, core, "dump binary memory %s %d %d" % (path, start, start + size))
    return path.read_bytes()


class Core:
    """A core file by pyelftools: its segments and notes."""

    def __init__(self, path):
        self.path = str(path)
        with open(path, "rb") as file:
            elf = ELFFile(file)
            segments = list(elf.iter_segments())
            self.loads = [s.header for s in segments if s.header.p_type == "PT_LOAD"]
            self.notes = [note for s in segments if s.header.p_type == "PT_NOTE" for note in s.iter_notes()]

    def count(self, kind):
        return sum(note["n_type"] == kind for note in self.notes)

    def read(self, address, size):
        """Bytes of the core, None where it holds none."""
        found = b""
        with open(self.path, "rb") as file:
            for load in self.loads:
                start = load.p_vaddr
                if start <= address + len(found) < start + load.p_filesz and len(found) < size:
                    skip = address + len(found) - start
                    file.seek(load.p_offset + skip)
                    found += file.read(min(size - len(found), load.p_filesz - skip))
        return found if len(found) == size else None


def checksum(data):
    total = 0
    for word in np.frombuffer(data, np.uint64).tolist():
        total = (total * 31 + word) % 2 ** 64
    return total


def by_hand(pid, path, **options):
    """The one file for a machine without gdbleak, started."""
    return subprocess.Popen([sys.executable, SCRIPT, "-p", str(pid), "-o", path],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


