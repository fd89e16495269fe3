"""leak-sample and leak-mmaps in a GDB that holds a process: it is let go, recorded, and held again."""
import json
import re
import subprocess
import time

import pytest

from tests import record_target
from tests.record_target import ROOT, WAIT, Subject, by_site, changed_text, check_as_found, rates, totals, wait_for
from tests.targets import build, run_gdb

pytestmark = pytest.mark.skipif(bool(record_target.needs()), reason=record_target.needs() or "-")
END = "<<<end of {}>>>"


class Gdb:
    """A GDB that is attached to a process, with the commands of gdbleak."""

    def __init__(self, pid):
        self._process = subprocess.Popen(
            ["gdb", "-nx", "-q", "-iex", "set debuginfod enabled off", "-iex", "set pagination off", "-x",
             ROOT / "scripts" / "gdbleak.py", "-p", str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True)
        self.pid = self._process.pid
        self._number = 0

    def begin(self, command):
        """Have it run a command."""
        self._number += 1
        self._process.stdin.write(f"{command}\necho {END.format(self._number)}\\n\n")
        self._process.stdin.flush()

    def end(self):
        """What the command printed, when it is over."""
        said, end = "", END.format(self._number)
        while end not in said:
            line = self._process.stdout.readline()
            assert line, said
            said += line
        return said.partition(end)[0].replace("(gdb) ", "")

    def run(self, command):
        self.begin(command)
        return self.end()

    def functions(self):
        """Those on the stack of the selected thread, innermost first, and the thread."""
        found = re.findall(r"^#\d+ +(?:0x\w+ in )?(\w+) \(", self.run("bt"), re.M)
        lwp = re.search(r"(?:LWP|process) (\d+)", self.run("thread"))[1]
        # What is inlined into a function of the same name is a frame, or not, as GDB came to stop there.
        return [name for name, above in zip(found, [None, *found]) if name != above] + [f"Thread {lwp}"]

    def __enter__(self):
        self.run("echo")
        return self

    def __exit__(self, *_):
        try:
            self._process.communicate("detach\nquit\n", timeout=WAIT)
        finally:
            self._process.kill()
            self._process.wait()


def status_of(pid):
    with open(f"/proc/{pid}/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


def is_recorded(pid):
    """Whether the agent is in the process, and nothing traces it. While it is put in, there is a stub of ours for once."""
    return changed_text(pid) != [] and status_of(pid)["TracerPid"] == "0" and changed_text(pid) != []


@pytest.mark.parametrize("word, program, command, options", [
    ("sample", lambda: rates("-O1"), "go 2 2000 0", "6 --every 1 --grace 0.1"),
    ("sample", lambda: rates("-O1"), "go 2 300 100", "8 --exact --grace 0.1"),
    ("mmaps", lambda: build("record_maps", "-O2").path, "go", "12")])      # takes a second, on a busy machine several
def test_what_is_recorded_equals_the_truth(word, program, command, options, tmp_path):
    report, folded = tmp_path / "report.json", tmp_path / "graph.folded"
    with Subject(program()) as subject:
        assert subject.line()
        with Gdb(subject.pid) as gdb:
            before = gdb.functions()
            gdb.run("break exit")
            gdb.begin(f"leak-{word} {options} --json {report} --flame {folded}")
            if "--exact" in options:        # then the recorder traces it
                wait_for(lambda: status_of(subject.pid)["TracerPid"] not in ("0", str(gdb.pid)) and
                         changed_text(subject.pid), "the recording")
                time.sleep(0.5)
            else:
                wait_for(lambda: is_recorded(subject.pid), "the recording")
            subject.say(command)
            answer = json.loads(subject.line())
            said = gdb.end()
            assert "Leak Flame Graph for " in said and said.count("\n") > 5, said
            # It is held again, as it was.
            now = status_of(subject.pid)
            assert now["TracerPid"] == str(gdb.pid) and now["State"][0] == "t"
            assert changed_text(subject.pid) == []
            assert gdb.run("print $_gdbleak_status") == "$1 = 0\n"
            assert gdb.functions() == before and before[-2:] == ["main", f"Thread {subject.pid}"]
            # And GDB is usable: registers, memory, and the breakpoint of before.
            assert "<" in gdb.run("x/1i $pc") and gdb.run("print main == &main") == "$2 = 1\n"
            subject.say("quit")
            assert re.search(r"Breakpoint 1, .*exit \(", gdb.run("continue"))
        assert subject.process.wait(WAIT) == 0
    truth = {site: numbers[0] if isinstance(numbers, list) else numbers for site, numbers in answer.items()
             if site.startswith("leak_") or word == "mmaps"}
    stacks = [line.rsplit(" ", 1) for line in folded.read_text().splitlines()]
    found = by_site([(stack.split(";"), int(weight)) for stack, weight in stacks], truth)
    wrong = {site: (found.get(site, 0), size) for site, size in truth.items() if abs(found.get(site, 0) - size) > 1}
    assert not wrong, said
    assert totals(json.loads(report.read_text()))["pid"] == subject.pid


def test_refusals_leave_the_process_held(tmp_path):
    """One line; GDB has not let it go, or has it again."""
    with Subject(rates("-O1")) as subject:
        assert subject.line() == "ready\n"
        with Gdb(subject.pid) as gdb:
            for command, why in (
                    ("leak-sample 0", r"leak-sample: argument seconds: invalid seconds value: '0'; see help leak-sample"),
                    ("leak-sample x", "leak-sample: argument seconds: invalid seconds value: 'x'; see help leak-sample"),
                    ("leak-sample 1 --flame /nowhere/x.svg",
                     "leak-sample: cannot write /nowhere/x.svg: there is no such directory"),
                    ("leak-mmaps 1 --flame x.png", "leak-mmaps: cannot write a profile to 'x.png': .*"),
                    ("leak-mmaps 1 --json /tmp", "leak-mmaps: cannot write /tmp: it is a directory"),
                    ("leak-sample 1 --pools", "leak-sample: no symbol tells where nginx's pools are made .*"),
                    ("leak-sample '1", "No closing quotation")):
                *where, said = gdb.run(command).splitlines()
                assert re.fullmatch(why, said), said
                assert where == [] or "--pools" in command      # which is refused by who would record
                assert status_of(subject.pid)["TracerPid"] == str(gdb.pid)
                assert re.search("= 2$", gdb.run("print $_gdbleak_status"))
        check_as_found(subject.pid)
        assert subject.is_alive()


@pytest.mark.parametrize("word", ["sample", "mmaps"])
def test_without_a_live_process_it_is_one_line(word, captured):
    core = captured("heaps", "plain")
    for commands, exe, dump, why in (
            ([f"leak-{word} 1"], core.exe, core.core,
             f"leak-{word}: only a process of this machine can be recorded, and GDB holds a core target"),
            ([f"leak-{word} 1"], core.exe, None, f"leak-{word}: this GDB holds no live process; attach to one first"),
            ([f"leak-{word} --help"], None, None, None)):
        done = run_gdb(commands, exe, dump)
        last = done.stdout.splitlines()[-1]
        assert last == (why or "GDB detaches, the process runs and is recorded, GDB attaches again."), done.stdout
        assert "Traceback" not in done.stdout
