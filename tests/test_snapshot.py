"""Snapshots by fork and from one file: the target unharmed whatever happens, and its cores at home in plain GDB."""
import ast
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from gdbleak import pack
from gdbleak.record import fork, inject
from gdbleak.record.fork import snapshot_by_fork
from gdbleak.target import live, ptrace, room
from gdbleak.target.core_file import open_core
from tests.live_target import (SCRIPT, Core, Subject, as_root, checksum, children, copy, gdb,       # noqa: F401
                               gdb_memory, program, run, tools, wait_until)
from tests.targets import ROOT, run_cli

pytestmark = tools


def word(core, address):
    """A 64-bit word of a core."""
    return int.from_bytes(core.read(address, 8), "little")


def script(*arguments, python=sys.executable, **options):
    """The one file, started."""
    return subprocess.Popen([python, SCRIPT, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, **options)


def finished(*arguments, **options):
    """(status, output, errors) of the one file."""
    child = script(*arguments, **options)
    said, error = child.communicate(timeout=120)
    assert "Traceback" not in error
    return child.returncode, said, error


# -- what a child does not have ----------------------------------------------------------------------------------------

def test_memory_that_a_child_lacks_is_of_the_same_moment(run, tmp_path, copy):
    subject = run("inherit")
    *addresses, heartbeat = subject.said
    for _ in range(10):
        assert subject.is_running(addresses[0])
        core = Core(copy(subject.pid, str(tmp_path / "core")).path)
        values = [word(core, address) for address in addresses]
        assert values[0] >= values[1] >= values[2] >= values[3] >= values[0] - 1 > 0
    assert subject.is_running(heartbeat) and children(subject.pid) == {}


def private_memory(pid):
    """Bytes that a process has for itself."""
    fields = Path("/proc/%d/smaps_rollup" % pid).read_text()
    return sum(int(size) << 10 for size in re.findall(r"Private_(?:Clean|Dirty): +(\d+) kB", fields))


@pytest.mark.parametrize("of", ["parent", "child"])
def test_pages_in_common_stay_so(run, tmp_path, copy, of, monkeypatch):
    """What a process has in common with its parent or child is not copied for it by being read; nor for our child. It is
    looked for where there are pages."""
    asked, look_for = [], live._PageMap.in_common
    monkeypatch.setattr(live._PageMap, "in_common", lambda pages, start, end: asked.append(end - start)
                        or look_for(pages, start, end))
    subject = run("kin", 16)
    child, block, size, total, heartbeat = subject.said
    pid = child if of == "child" else subject.pid
    before, ours = private_memory(pid), []
    assert before < size // 8

    def look(*_):
        for one in children(pid):
            with contextlib.suppress(OSError):      # it has ended
                ours.append(private_memory(one) if one != child else 0)
    made = copy(pid, str(tmp_path / "core"), look)
    assert private_memory(pid) < before + size // 8 and size <= sum(asked) < 8 * size
    assert made.forked_ms is None or 0 < max(ours) < size // 8
    assert checksum(Core(made.path).read(block, size)) == total
    buffer = bytearray(size)
    with live.ProcessMemory(pid) as memory:
        assert memory.read_into(block, buffer) == size
    assert checksum(buffer) == total and private_memory(pid) < before + size // 8
    assert subject.is_running(heartbeat)


def test_the_core_does_not_have_the_stub(run, tmp_path):
    subject = run("signals", 1)
    vdso, = [m for m in live.mappings(subject.pid) if m.path == "[vdso]"]
    size = vdso.end - vdso.start
    before = bytearray(size)
    with live.ProcessMemory(subject.pid) as memory:
        assert memory.read_into(vdso.start, before) == size
        made = snapshot_by_fork(subject.pid, str(tmp_path / "core"))
        after = bytearray(size)
        assert memory.read_into(vdso.start, after) == size
    assert made.refused == "" and before == after == Core(made.path).read(vdso.start, size)


# -- targets that do something in the middle ---------------------------------------------------------------------------

def test_each_signal_still_ends_sigsuspend(run, tmp_path):
    """As it ends a call that nothing interrupted: by the kernel's own hand, whatever is injected meanwhile."""
    subject = run("suspended", 20)
    noticed, wrong_masks = subject.said
    made, sent = [], [0]

    def take():
        while len(made) < 40 or sent[0] < 1000:
            made.append(snapshot_by_fork(subject.pid, str(tmp_path / "core")))

    taker = threading.Thread(target=take)
    taker.start()
    try:
        while taker.is_alive():
            os.kill(subject.pid, signal.SIGUSR1)
            assert wait_until(lambda: subject.word(noticed) == sent[0] + 1)
            sent[0] += 1
    finally:
        sent[0] = 1000
        taker.join()
    assert len(made) >= 40 and all(one.refused == "" for one in made)
    assert subject.word(wrong_masks) == 0


def test_a_target_that_forks(run, tmp_path, copy):
    subject = run("forks")
    heartbeat, born, strangers = subject.said
    before = subject.word(born)
    for _ in range(20):
        copy(subject.pid, str(tmp_path / "core"))
    assert subject.is_running(heartbeat)
    assert wait_until(lambda: subject.word(born) > before + 100)
    assert subject.word(strangers) == 0


def once(action):
    """A progress callback that does `action` when it is called first."""
    done = []

    def progress(*_):
        if not done:
            done.append(True)
            action()
    return progress


def test_a_target_that_becomes_another_program(run, program, tmp_path, copy):
    subject = run("execs")
    said = []
    made = copy(subject.pid, str(tmp_path / "core"), once(lambda: said.extend(map(int, subject.ask("x")))))
    number, block, size, total = said
    assert len(made.threads) == 9 and made.exe == program
    assert "$1 = %d\n" % number in gdb(program, made.path, "print global_number")
    assert checksum(gdb_memory(program, made.path, tmp_path / "block", block, size)) == total
    assert "%s threads" % program in gdb(program, made.path, "info proc")


def test_a_target_that_ends_before_the_stop(run, tmp_path, copy):
    subject = run("signals", 20)

    def end():
        subject.process.kill()
        subject.process.wait()
    with pytest.raises(live.LiveError, match="process %d (has ended|was killed)" % subject.pid):
        copy(subject.pid, str(tmp_path / "core"), once(end))
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_ends_after_the_fork_is_in_the_core_all_the_same(run, program, tmp_path):
    subject = run("signals", 200)
    address, = subject.said
    beats = []

    def progress(done, total):
        if not beats and done > 100e6:          # more than there is to copy before the fork
            beats.append(subject.word(address))
            subject.process.kill()
            subject.process.wait()
    made = snapshot_by_fork(subject.pid, str(tmp_path / "core"), progress)
    assert made.refused == "" and beats
    assert 0 < word(Core(made.path), address) <= beats[0]
    assert "received" in gdb(program, made.path, "info address received")


@pytest.mark.parametrize("left", [100e6, 1e6])
def test_a_child_that_is_killed_is_told(run, tmp_path, left):
    """Also when it is read to the end before anybody can see that it is dead."""
    subject = run("signals", 200)

    def progress(done, total):
        if total - done < left:
            for child in children(subject.pid):
                os.kill(child, signal.SIGKILL)
    with pytest.raises(live.LiveError, match="the child of process %d was killed .* without --fork" % subject.pid):
        snapshot_by_fork(subject.pid, str(tmp_path / "core"), progress)
    assert list(tmp_path.iterdir()) == [] and subject.is_running(subject.said[0])
    assert wait_until(lambda: children(subject.pid) == {})


def test_a_tracer_in_the_middle(run, tmp_path, copy):
    subject = run("signals", 20)
    tracers = []

    def attach():
        tracers.append(subprocess.Popen(["gdb", "-nx", "-q", "-p", str(subject.pid)], stdin=subprocess.PIPE,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        assert wait_until(lambda: subject.state()[1] != "0")
    try:
        with pytest.raises(live.LiveError, match="already traced by process .*: detach that debugger first"):
            copy(subject.pid, str(tmp_path / "core"), once(attach))
    finally:
        tracers[0].communicate(b"detach\nquit\n", timeout=30)
    assert subject.is_running(subject.said[0]) and list(tmp_path.iterdir()) == []


def test_a_limit_of_the_stop(run, tmp_path):
    subject = run("signals", 300)
    with pytest.raises(live.LiveError, match="the stop would last longer than the 0.1 ms allowed"):
        snapshot_by_fork(subject.pid, str(tmp_path / "core"), max_stop=0.0001)
    assert list(tmp_path.iterdir()) == []
    assert subject.state()[1] == "0" and subject.is_running(subject.said[0])
    assert wait_until(lambda: children(subject.pid) == {})


def birth(pid):
    """When a process began, in ticks since the boot; 0 when it is there no more."""
    try:
        return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def descendants(pid):
    """A process and its children, and theirs."""
    return [pid] + [one for child in children(pid) for one in descendants(child)]


@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_leaves_the_target_unharmed(run, tmp_path, rounds):
    """Every second time its guard dies with it, which leaves a dead child behind that harms nobody."""
    subject = run("signals", 100)
    heartbeat, = subject.said
    began = time.monotonic()
    assert finished("-p", subject.pid, "-o", tmp_path / "core", "--fork")[0] == 0
    whole = time.monotonic() - began
    chance, sent, in_stop = random.Random(rounds), 0, 0
    for number in range(rounds):
        child = script("-p", subject.pid, "-o", tmp_path / ("core.%d" % number), "--fork")
        started = birth(child.pid)
        if number % 3 == 0:                     # anywhere
            until = time.monotonic() + chance.uniform(0, whole)
            while time.monotonic() < until and child.poll() is None:
                os.kill(subject.pid, signal.SIGRTMIN)
                sent += 1
                time.sleep(0.002)
        else:                                   # in the stop, and a little later
            while child.poll() is None and subject.state()[0] != "t":
                pass
            in_stop += 1
            until = time.monotonic() + chance.uniform(0, 0.01)
            while time.monotonic() < until:
                pass
        victims = [child.pid] if number % 2 else descendants(child.pid)
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        child.communicate()
        assert subject.is_running(heartbeat)
        assert wait_until(lambda: subject.state() == ("S", "0") or subject.state() == ("R", "0"))
        if number % 2:                          # the guard lives, and has those reaped that were made since it does
            assert wait_until(lambda: all(birth(one) <= started for one in children(subject.pid)))
        assert wait_until(lambda: set(children(subject.pid).values()) <= {"Z"})
        for core in tmp_path.iterdir():
            core.unlink()
    assert in_stop > rounds // 2
    assert wait_until(lambda: int(subject.ask()[0]) >= sent)
    assert int(subject.ask()[0]) == sent
    assert finished("-p", subject.pid, "-o", tmp_path / "core", "--fork")[0] == 0
    assert not list(tmp_path.glob("*.part"))


def die_at(step, pid, path):
    """In a child process: take a snapshot by fork, and be killed before request number `step` to the kernel that
    changes or moves a thread. The status: 0 when there are not so many."""
    child = os.fork()
    if child == 0:
        steps, pokes, ours = [], [0], os.getpid()

        def counted(request, *arguments):
            pokes[0] = pokes[0] + 1 if request == inject._PTRACE_POKEDATA else 0
            if pokes[0] in (0, 9):      # of those that write the stub's words, or take them out, one in the middle
                steps.append(request)
            if len(steps) == step and os.getpid() == ours:      # not its guard
                os.kill(ours, signal.SIGKILL)
            return ptrace.ptrace(request, *arguments)
        try:
            inject.ptrace = counted
            status = 0 if snapshot_by_fork(pid, path).refused == "" else 1
        except BaseException:
            status = 2
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_before_every_step_of_an_injection(run, tmp_path):
    """Of the clone and of the wait4: the thread finds back, a signal still reaches it, and no child is left."""
    suspended, threads = run("suspended", 1), run("threads")
    noticed, wrong_masks = suspended.said
    step, status = 0, -signal.SIGKILL
    while status == -signal.SIGKILL:
        step += 1
        status = die_at(step, suspended.pid, str(tmp_path / "core"))
        assert die_at(step, threads.pid, str(tmp_path / "core")) == status
        os.kill(suspended.pid, signal.SIGUSR1)
        assert wait_until(lambda: suspended.word(noticed) == step)
        assert wait_until(lambda: children(suspended.pid) == children(threads.pid) == {})
        assert wait_until(lambda: threads.state()[1] == suspended.state()[1] == "0")
        assert wait_until(lambda: not (remains(suspended) or remains(threads)))
        assert suspended.word(wrong_masks) == 0 == status_field(threads.pid, "SigBlk")
    assert status == 0 and step > 25
    *failed, slept = threads.ask()
    assert [int(number) for number in failed] == [0] * 8 and float(slept) >= 3.0


def remains(subject):
    """What an injection has left in a process."""
    return inject.remains(subject.pid, live.mappings(subject.pid))


def status_field(pid, name):
    """A hexadecimal number of /proc/PID/status."""
    return int(re.search(r"^%s:\s+(\w+)" % name, Path("/proc", str(pid), "status").read_text(), re.M).group(1), 16)


# -- where a fork would not be safe ------------------------------------------------------------------------------------

def refused(subject, path, reason):
    """A copy that was to be by fork and is a direct one, for that reason."""
    made = snapshot_by_fork(subject.pid, str(path))
    assert re.search(reason, made.refused) and made.forked_ms is None
    assert len(made.threads) == Core(made.path).count("NT_PRSTATUS")
    assert children(subject.pid) == {}
    return made


def test_under_seccomp_it_is_copied_directly(run, tmp_path):
    subject = run("filtered")
    refused(subject, tmp_path / "core", "under seccomp, which might kill it")
    assert subject.is_running(subject.said[0])


def test_within_a_restartable_sequence_it_is_copied_directly(run, tmp_path):
    subject = run("critical")
    if not subject.said[0]:
        pytest.skip("this C library has no rseq")
    # Where the kernel has just thrown it out of the sequence it stands safely for a moment: on a busy machine often.
    assert wait_until(lambda: snapshot_by_fork(subject.pid, str(tmp_path / "core")).refused
                      == "no thread of it stands at a safe place")
    assert subject.is_running(subject.said[0]) and children(subject.pid) == {}


def test_what_is_stopped_is_copied_directly_and_stays_stopped(run, tmp_path):
    subject = run("signals", 1)
    os.kill(subject.pid, signal.SIGSTOP)
    assert wait_until(lambda: subject.state()[0] == "T")
    refused(subject, tmp_path / "core", "it is stopped already")
    assert subject.state() == ("T", "0")
    os.kill(subject.pid, signal.SIGCONT)
    assert subject.is_running(subject.said[0])


@as_root
def test_where_the_kernel_refuses_a_child_it_is_copied_directly(program, tmp_path):
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        # Root may have as many processes as it likes; this user, whom nobody else is, has the program's two threads.
        subject = Subject(shutil.copy(program, place), "signals", "1", user=54321,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (2, 2)))
        try:
            refused(subject, tmp_path / "core", "the kernel refuses it a child .Resource temporarily unavailable")
            assert subject.is_running(subject.said[0]) and subject.state()[1] == "0"
        finally:
            subject.process.kill()
            subject.process.wait()


@contextlib.contextmanager
def unshared(*command):
    """A process that `unshare` makes: the one that says a line of numbers."""
    process = subprocess.Popen(["unshare", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    subject = Subject.__new__(Subject)
    subject.process, subject.said = process, [int(word) for word in process.stdout.readline().split()]
    try:
        if not subject.said:
            pytest.skip("namespaces cannot be made here")
        subject.pid = (list(children(process.pid)) or [process.pid])[0]
        yield subject
    finally:
        process.kill()
        process.communicate()


@as_root
def test_in_a_pid_namespace(program, tmp_path):
    """The child is reaped by the id that it has there; the target is the init of the namespace."""
    with unshared("--pid", "--fork", "--kill-child", program, "threads") as subject:
        made = snapshot_by_fork(subject.pid, str(tmp_path / "core"))
        assert made.refused == "" and made.forked_ms > 0 and children(subject.pid) == {}
        assert "$1 = %d\n" % subject.said[0] in gdb(program, made.path, "print global_number")
        assert subject.ask()[:8] == ["0"] * 8


@as_root
def test_the_first_child_in_a_pid_namespace_is_not_ours(program, tmp_path):
    """It would be the init, and with it the namespace would end."""
    with unshared("--pid", program, "suspended", "1") as subject:
        refused(subject, tmp_path / "core", "its first child will be the init of a PID namespace")
        os.kill(subject.pid, signal.SIGUSR1)
        assert wait_until(lambda: subject.word(subject.said[0]) == 1)


def memory_group(limit):
    """The directory of a control group with that limit of memory, or None where none can be made."""
    for base, name in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        directory = Path(base, "gdbleak-test-%d" % os.getpid())
        try:
            directory.mkdir()
            (directory / name).write_text(str(limit))
            return directory
        except OSError:
            with contextlib.suppress(OSError):
                directory.rmdir()
    return None


@pytest.fixture
def group():
    """Function of a limit: the directory of a control group; it is gone after the test."""
    made = []

    def get(limit):
        directory = memory_group(limit)
        if directory is None:
            pytest.skip("no control group of memory can be made here")
        made.append(directory)
        return directory
    yield get
    for directory in made:
        assert wait_until(lambda: not (directory / "cgroup.procs").read_text())
        directory.rmdir()


def test_a_limit_of_memory_is_seen(group, run):
    subject = run("signals", 60)
    (group(200 << 20) / "cgroup.procs").write_text(str(subject.pid))
    assert any(one.left <= 200 << 20 for one in room.memory_groups(subject.pid))
    assert room.memory_left(subject.pid) <= 200 << 20 < room.memory_left()


def test_a_child_that_memory_may_not_suffice_for_is_not_made(group, run, tmp_path):
    subject = run("signals", 60)
    (group(50 << 20) / "cgroup.procs").write_text(str(subject.pid))
    refused(subject, tmp_path / "core", r"\d+ MB of memory are left to it, and a child may need \d+ MB")
    assert subject.is_running(subject.said[0])
    subject.process.kill()
    subject.process.wait()


def test_a_copy_into_memory_that_does_not_suffice_is_not_made(group, run, tmp_path):
    if not room.is_memory("/dev/shm"):
        pytest.skip("/dev/shm is not memory")
    subject = run("signals", 100)
    procs = group(100 << 20) / "cgroup.procs"
    status, said, error = finished("-p", subject.pid, "-o", "/dev/shm/gdbleak-test.core",
                                   preexec_fn=lambda: procs.write_text(str(os.getpid())))
    assert (status, said) == (2, "") and error.count("\n") == 1
    assert re.search(r"not enough space in /dev/shm: .* MB of memory, which that directory is, .* a disk mends", error)
    assert not os.path.exists("/dev/shm/gdbleak-test.core")
    assert subject.is_running(subject.said[0]) and subject.state()[1] == "0"


# -- plain GDB opens the cores -----------------------------------------------------------------------------------------

JAVA = """
public class Marked {
    public static void main(String[] arguments) throws Exception {
        byte[][] kept = new byte[100][];
        for (int i = 0; i < kept.length; i++) kept[i] = ("marker " + i * i + " of Java").getBytes("ISO-8859-1");
        Thread.currentThread().setName("waits");
        System.out.println("1");
        System.in.read();
        System.out.println(kept.length);
    }
}
"""
PYTHON = """
import sys, threading
kept = ["marker %d of Python" % (i * i) for i in range(100)]
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(1, flush=True)
sys.stdin.read(1)
print(len(kept), flush=True)
"""


@contextlib.contextmanager
def running(*command):
    """A program that says 1 when it is ready, goes on at a line, says 100 and ends."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "1\n"
        yield process
        assert process.communicate("\n", timeout=60)[0] == "100\n" and process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def holds(core, text):
    """Whether the memory in a core has the text."""
    with open(core, "rb") as file:
        return text in np.memmap(file, np.uint8, "r").tobytes()


def test_plain_gdb_opens_a_core_of_python(tmp_path, copy):
    with running(os.path.realpath(sys.executable), "-c", PYTHON) as process:
        made = copy(process.pid, str(tmp_path / "core"))
        output = gdb(made.exe, made.path, "info threads", "bt", "info sharedlibrary")
        assert len(made.threads) == 2 and len(re.findall(r"^[* ] +\d+ +Thread ", output, re.M)) == 2
        assert "PyEval_EvalCode" in output and "libc.so.6" in output
        assert holds(made.path, b"marker 9801 of Python")


@pytest.mark.skipif(not shutil.which("javac"), reason="needs a JDK")
def test_plain_gdb_opens_a_core_of_java(tmp_path, copy):
    (tmp_path / "Marked.java").write_text(JAVA)
    subprocess.run(["javac", "Marked.java"], cwd=tmp_path, check=True)
    with running("java", "-Xmx64m", "-cp", str(tmp_path), "Marked") as process:
        made = copy(process.pid, str(tmp_path / "core"))
        lines = "info threads", "thread apply all bt 30", "info sharedlibrary"
        start = ["gdb", "-nx", "-q", "-batch", "-iex", "set debuginfod enabled off"]
        output = subprocess.run([*start, *(part for line in lines for part in ("-ex", line)), made.exe, made.path],
                                capture_output=True, text=True, timeout=120).stdout
        assert len(made.threads) > 5
        assert len(re.findall(r"^[* ] +\d+ +Thread ", output, re.M)) == len(made.threads)
        assert "libjvm.so" in output and "start_thread" in output
        assert holds(made.path, b"marker 9801 of Java")


# -- one file ----------------------------------------------------------------------------------------------------------

def test_the_one_file_is_up_to_date_and_old_pythons_understand_it():
    done = subprocess.run([ROOT / "scripts" / "build-snapshot", "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))


def pythons():
    """The paths of the oldest Python here from 3.6 on, and of the newest."""
    found = {}
    for version in range(6, 20):
        kept = Path.home().glob(".pyenv/versions/3.%d.*/bin/python3" % version)
        for path in (shutil.which("python3.%d" % version), *kept):
            if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
                found[version] = str(path)
    return [found[version] for version in sorted({min(found), max(found)})]


@pytest.mark.parametrize("python", pythons())
def test_the_one_file_needs_nothing_but_python(run, program, tmp_path, python):
    subject = run("threads")
    number, block, size, total = subject.said
    alone = shutil.copy(SCRIPT, tmp_path / "alone")
    for options in ([], ["--fork"]):
        command = [python, "-I", "-S", alone, "-p", str(subject.pid), "-o", "subject.core", "--pack", *options]
        done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert ("read from a fork of it" in done.stdout) == bool(options)
        sysroot = tmp_path / "subject.core.files"
        packed = str(sysroot) + program
        line = "\ngdb -iex 'set sysroot subject.core.files' subject.core.files%s subject.core\n" % program
        assert line in done.stdout
        assert Path(packed).read_bytes() == Path(program).read_bytes()
        output = gdb_with(sysroot, packed, tmp_path / "subject.core", "print global_number", "info sharedlibrary")
        assert "$1 = %d\n" % number in output and "%s/lib" % sysroot in output


def gdb_with(sysroot, exe, core, *commands):
    """What plain GDB prints with a sysroot."""
    arguments = [part for command in commands for part in ("-ex", command)]
    done = subprocess.run(["gdb", "-nx", "-q", "-batch", "-iex", "set debuginfod enabled off", "-iex",
                           "set sysroot %s" % sysroot, *arguments, exe, core], capture_output=True, text=True,
                          timeout=60)
    assert "warning" not in done.stderr.lower(), done.stderr
    return done.stdout


@pytest.mark.parametrize("arguments, told", [
    ([], "required"), (["-p", "x"], "invalid int"), (["-p", "1", "--max-stop", "0"], "invalid milliseconds"),
    (["-p", "1", "--exe", "/x"], "not allowed"), (["-p", "1", "--after", "1"], "--after goes with -c"), (["-p", "2147483647"], "no process 2147483647"),
    (["-p", "-2147483647"], "no process group 2147483647"), (["--exe", "/nonexistent"], "runs /nonexistent"),
    (["-c", "'"], "no closing quotation"), (["-c", " "], "an empty command"),
    (["-c", "/nonexistent/program"], "cannot start /nonexistent/program: No such file"),
    (["pack", "/nonexistent"], "No such file"), (["pack", "/bin/true"], "no core file")])
def test_a_wrong_command_line_is_one_line(arguments, told, tmp_path):
    status, said, error = finished(*arguments, cwd=tmp_path)
    assert (status, said) == (2, "") and error.count("\n") == 1 and told in error
    assert list(tmp_path.iterdir()) == []


# -- what belongs to a core --------------------------------------------------------------------------------------------

WAITS = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int answer(void);
int known;
int main(void)
{
    known = answer() * getpid();
    for (int i = 0; i < 1000; i++) *(char *)malloc(3000) = 1;
    printf("1\n");
    fflush(stdout);
    for (;;) pause();
}
"""


@pytest.fixture
def waits(tmp_path):
    """(process, path) of a program with a library of its own, in a directory of their own."""
    place = tmp_path / "place"
    place.mkdir()
    (place / "waits.c").write_text(WAITS)
    (place / "part.c").write_text("int answer(void) { return 42; }\n")
    subprocess.run(["gcc", "-g", "-shared", "-fPIC", "part.c", "-o", "libpart.so.1.2"], cwd=place, check=True)
    (place / "libpart.so.1").symlink_to("libpart.so.1.2")
    subprocess.run(["gcc", "-g", "waits.c", "-o", "waits", "-L.", "-l:libpart.so.1", "-Wl,-rpath,%s" % place],
                   cwd=place, check=True)
    process = subprocess.Popen([place / "waits"], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"1\n"
    yield process, place / "waits"
    process.kill()
    process.communicate()


def test_files_that_were_replaced_are_packed_as_they_were(waits, tmp_path):
    process, exe = waits
    original = {name: (exe.parent / name).read_bytes() for name in ("waits", "libpart.so.1.2")}
    for name in original:
        (exe.parent / name).unlink()
    shutil.copy("/bin/true", exe)
    status, said, error = finished("-p", process.pid, "-o", "x.core", "--pack", cwd=tmp_path)
    assert (status, error) == (0, "")
    files = tmp_path / "x.core.files"
    for name, data in original.items():
        assert Path(str(files) + str(exe.parent / name)).read_bytes() == data
    listed = (files / "build-ids").read_text()
    assert re.search(r"^[0-9a-f]{40} %s$" % re.escape(str(exe)), listed, re.M) and "not here" not in listed
    output = gdb_with(files, str(files) + str(exe), tmp_path / "x.core", "print known", "info sharedlibrary",
                      "info line answer")
    assert "$1 = %d\n" % (42 * process.pid) in output
    assert "%s%s/libpart.so.1\n" % (files, exe.parent) in output and 'Line 1 of "part.c"' in output


def test_the_desk_needs_only_what_was_packed(waits, tmp_path):
    process, exe = waits
    assert finished("-p", process.pid, "-o", "x.core", cwd=tmp_path)[0] == 0
    status, said, error = finished("pack", "x.core", cwd=tmp_path)
    assert (status, error) == (0, "")
    process.kill()
    shutil.rmtree(exe.parent)
    desk = tmp_path / "desk"
    desk.mkdir()
    for name in ("x.core", "x.core.files"):
        (tmp_path / name).rename(desk / name)
    done = run_cli("mallinfo", "--core", desk / "x.core", "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    # By build-id GDB finds the executable without being told.
    found = subprocess.run(["gdb", "-nx", "-q", "-batch", "-iex", "set debuginfod enabled off", "-iex",
                            "set debug-file-directory %s/usr/lib/debug" % (desk / "x.core.files"), "-ex", "print known",
                            "-c", desk / "x.core"], capture_output=True, text=True, timeout=60).stdout
    assert "$1 = %d\n" % (42 * process.pid) in found


def test_another_build_is_not_packed(waits, tmp_path):
    process, exe = waits
    assert finished("-p", process.pid, "-o", "x.core", cwd=tmp_path)[0] == 0
    exe.unlink()
    shutil.copy("/bin/true", exe)
    (exe.parent / "libpart.so.1.2").unlink()
    done = run_cli("pack", tmp_path / "x.core")
    assert done.returncode == 1
    assert "not packed: %s: the file is another build: " % exe in done.stderr
    assert "not packed: %s/libpart.so.1.2: there is no such file" % exe.parent in done.stderr
    files = tmp_path / "x.core.files"
    assert not Path(str(files) + str(exe)).exists() and list(files.glob("**/libc.so.6"))
    assert (files / "build-ids").read_text().count("not here") == 2


@as_root
def test_a_process_with_another_root_directory(run, program, tmp_path):
    root = tmp_path / "root"
    maps = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for path in [program, *re.findall(r"(/\S+)", maps)]:
        place = Path(str(root) + path)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(path), place)
    subject = subprocess.Popen(["chroot", root, program, "threads"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True)
    try:
        number = int(subject.stdout.readline().split()[0])
        status, said, error = finished("-p", subject.pid, "-o", "x.core", "--pack", cwd=tmp_path)
        assert (status, error) == (0, "")
        shutil.rmtree(root)
        files = tmp_path / "x.core.files"
        assert "$1 = %d\n" % number in gdb_with(files, str(files) + program, tmp_path / "x.core", "print global_number")
        done = run_cli("mallinfo", "-p", subject.pid, "--json", "-")
        assert done.returncode == 0 and json.loads(done.stdout)
        assert re.fullmatch(r"stopped for \d+\.\d ms \(\d+\.\d MB copied\)\n", done.stderr)
    finally:
        subject.kill()
        subject.communicate()


def test_a_core_with_hostile_names_packs_nothing_outside(tmp_path):
    for path in ("../../../etc/x", "/../../x", "/a/../../../x", "//x", "/a//b/./c/../.."):
        place = pack._place(str(tmp_path / "files"), path)
        assert os.path.normpath(place) == place and place.startswith(str(tmp_path / "files"))


DISPATCHED = r"""
#define _GNU_SOURCE
#include <link.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

static char selector;
static volatile int handled;
static unsigned long start, size;
static void handle(int number) { (void)number; handled++; selector = 0; }
static int look(struct dl_phdr_info *info, size_t length, void *data)
{
    for (int k = 0; strstr(info->dlpi_name, "libc.so") && k < info->dlpi_phnum; k++)
        if (info->dlpi_phdr[k].p_type == PT_LOAD && (info->dlpi_phdr[k].p_flags & PF_X)) {
            start = info->dlpi_addr + info->dlpi_phdr[k].p_vaddr;
            size = info->dlpi_phdr[k].p_memsz;
        }
    return 0;
}
int main(void)
{
    dl_iterate_phdr(look, 0);
    signal(SIGSYS, handle);
    if (prctl(59, 1, start, size, &selector)) { printf("0\n"); return 0; }
    selector = 1;
    printf("1\n");
    fflush(stdout);
    getchar();
    __asm__ volatile("syscall" : : "a"(39) : "rcx", "r11", "memory");
    printf("%d\n", handled);
    return 0;
}
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64")
def test_what_dispatches_its_system_calls_is_copied_directly(tmp_path):
    (tmp_path / "dispatched.c").write_text(DISPATCHED)
    exe = tmp_path / "dispatched"
    subprocess.run(["gcc", "-o", exe, tmp_path / "dispatched.c"], check=True)
    subject = Subject(exe)
    try:
        if subject.said != [1]:
            pytest.skip("this kernel has no Syscall User Dispatch")
        made = snapshot_by_fork(subject.pid, str(tmp_path / "core"))
        if not made.refused:
            pytest.skip("this kernel does not tell of Syscall User Dispatch")
        assert "Syscall User Dispatch" in made.refused and made.vain_ms > 0
        assert subject.ask("\n") == ["1"]           # as before it gets its own call
    finally:
        subject.process.kill()
        subject.process.wait()


def test_what_a_child_lacks_of_many_mappings():
    maps = [live.Mapping(k << 20, (k << 20) + (1 << 19), "rw-p", 0, "0:0", 0, "", False) for k in range(1, 5000)]
    there = [m for m in maps if m.start % (7 << 20)]
    there[10:12] = [there[10]._replace(end=there[10].start + 4096), there[11]]
    capture = fork._ForkedCapture.__new__(fork._ForkedCapture)
    capture._stopped, capture._lines = type("Nothing", (), {"check": lambda self: None})(), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork, "mappings", lambda pid, known, check: there)
        missing = capture._missing(1, maps)
    assert missing == [m for m in maps if m not in there] and len(missing) > 700


@as_root
def test_in_a_pid_namespace_threads_have_their_own_ids(program, tmp_path, copy):
    """As the kernel's cores have them, and as GDB's thread library finds them in the C library's memory."""
    with subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", program, "threads"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            pid, = children(process.pid)
            made = copy(pid, str(tmp_path / "core"))
            ids = {int(open(f"/proc/{tid}/status").read().split("NSpid:")[1].split("\n")[0].split()[-1])
                   for tid in ptrace.threads_of(pid)}
            assert {thread.lwp for thread in open_core(made.path, str(program)).threads} == ids and 1 in ids
            told = gdb(str(program), made.path, "info threads", "print (int)errno")
            assert "generic error" not in told and len(re.findall(r"Thread 0x\w+ \(LWP", told)) >= len(ids)
        finally:
            process.kill()


def test_standard_files_may_be_closed(run, tmp_path):
    subject = run("threads")
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, SCRIPT, "-p", str(subject.pid), "-o", "core",
         "--fork"], cwd=tmp_path)
    assert done.returncode == 0 and Core(tmp_path / "core").count("NT_PRSTATUS") == 9
    assert children(subject.pid) == {}


def test_a_pipe_in_the_place_of_a_library_is_not_packed(waits, tmp_path):
    process, exe = waits
    assert finished("-p", process.pid, "-o", "x.core", cwd=tmp_path)[0] == 0
    (exe.parent / "libpart.so.1.2").unlink()
    os.mkfifo(exe.parent / "libpart.so.1.2")
    status, said, error = finished("pack", "x.core", cwd=tmp_path)
    assert status == 1 and "libpart.so.1.2: it is no regular file" in error


def test_an_executable_that_is_gone_is_told(waits, tmp_path):
    process, exe = waits
    exe.unlink()
    status, said, error = finished("-p", process.pid, "-o", "x.core", cwd=tmp_path)
    assert status == 0 and "%s was deleted or replaced; --pack keeps it" % exe in error
