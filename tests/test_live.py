"""Snapshots of live processes: real programs, whose core plain GDB reads, compared with what they print."""
import contextlib
import ctypes
import errno
import os
import platform
import pwd
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request

import numpy as np
import pytest

from gdbleak.target import live, ptrace
from tests.live_target import (Core, Subject, as_root, by_hand, checksum, copy, gdb, gdb_memory, program, run,   # noqa: F401
                               tools, wait_until)
from tests.targets import build

pytestmark = tools
PAGE = live.PAGE
BLOCKED_IN = {"in_mutex", "in_cond", "in_semaphore", "in_barrier", "in_read", "in_poll", "in_epoll",
              "in_sleep"}


def test_gdb_reads_what_the_program_printed(run, program, tmp_path, copy):
    subject = run("threads")
    number, block, size, total = subject.said
    made = copy(subject.pid, str(tmp_path / "core"))
    assert (made.pid, made.exe, made.path) == (subject.pid, program, str(tmp_path / "core"))
    assert len(made.threads) == 9 and made.threads[0] == subject.pid
    assert made.stop_ms > 0 and made.bytes_copied > size and made.unreadable == []
    assert os.stat(made.path).st_mode & 0o777 == 0o600

    output = gdb(program, made.path, "info threads", "thread apply all bt", "print global_number",
                 "print block", "info proc", "info auxv")
    assert len(re.findall(r"^[* ] +\d+ +Thread .*LWP", output, re.M)) == 9
    stacks = re.split(r"^Thread \d+ \(Thread .*\):$", output, flags=re.M)[1:]
    assert len(stacks) == 9
    blocked = [BLOCKED_IN.intersection(re.findall(r" (in_\w+) \(", stack)) for stack in stacks]
    assert sorted(name for names in blocked for name in names) == sorted(BLOCKED_IN)
    assert sum(" main (argc=" in stack for stack in stacks) == 1
    assert "$1 = %d\n" % number in output
    assert "$2 = (unsigned char *) 0x%x" % block in output
    assert "%s threads" % program in output and "AT_SYSINFO_EHDR" in output
    assert checksum(gdb_memory(program, made.path, tmp_path / "block", block, size)) == total


def test_blocked_calls_go_on_as_if_nothing_had_been(run, tmp_path, copy):
    subject = run("threads")
    for _ in range(3):
        copy(subject.pid, str(tmp_path / "core"))
    *failed, slept = subject.ask()
    assert [int(number) for number in failed] == [0] * 8
    assert 3.0 <= float(slept) < 6.0
    assert subject.state()[1] == "0"


def test_every_snapshot_is_one_moment_while_threads_come_and_go(run, program, tmp_path, copy):
    subject = run("churn", 16)
    array, length, births, heartbeat = subject.said
    seen, born = set(), subject.word(births)
    for _ in range(20):
        made = copy(subject.pid, str(tmp_path / "core"))
        core = Core(made.path)
        assert core.count("NT_PRSTATUS") == core.count("NT_FPREGSET") == len(made.threads) >= 4
        assert made.unreadable == []
        # The program raises the elements in turn: at one moment the first so many are one ahead of the rest.
        values = np.frombuffer(core.read(array, length * 8), np.uint64)
        steps = np.flatnonzero(np.diff(values))
        assert len(steps) <= 1 and values[0] - values[-1] <= 1
        seen.add((int(values[0]), len(steps) and int(steps[0])))
    assert len(seen) == 20
    assert subject.word(births) > born and subject.is_running(heartbeat)
    output = gdb(program, made.path, "info threads")
    # A thread that is being born or dying is an LWP that the thread library does not list.
    assert len(re.findall(r"^[* ] +\d+ +(?:Thread .*)?\(?LWP \d+\)?", output, re.M)) == len(made.threads)


def test_notes_are_the_kernels(run, program, tmp_path, copy):
    subject = run("threads")
    core = Core(copy(subject.pid, str(tmp_path / "core")).path)
    status = [note["n_desc"] for note in core.notes if note["n_type"] == "NT_PRSTATUS"]
    assert sorted(struct.unpack_from("<i", note, 32)[0] for note in status) == sorted(
        int(tid) for tid in os.listdir("/proc/%d/task" % subject.pid))
    process, = [note["n_desc"] for note in core.notes if note["n_type"] == "NT_PRPSINFO"]
    assert process["pr_fname"].rstrip(b"\0") == b"subject" and process["pr_pid"] == subject.pid
    assert process["pr_psargs"].rstrip(b"\0").decode() == (program + " threads")[:79]
    auxv, = [note["n_desc"] for note in core.notes if note["n_type"] == "NT_AUXV"]
    with open("/proc/%d/auxv" % subject.pid, "rb") as file:
        assert auxv == file.read()
    files, = [note["n_desc"] for note in core.notes if note["n_type"] == "NT_FILE"]
    mapped = [m for m in live.mappings(subject.pid) if m.inode]
    assert [(e.vm_start, e.vm_end, e.page_offset * PAGE) for e in files["Elf_Nt_File_Entry"]] == [
        (m.start, m.end, m.offset) for m in mapped]
    assert files["filename"] == [m.path.encode() for m in mapped]
    assert all(load.p_offset % PAGE == 0 for load in core.loads)


def test_text_and_symbols_are_in_the_core(run, program, tmp_path, copy):
    subject = run("threads")
    core = Core(copy(subject.pid, str(tmp_path / "core")).path)
    checked = 0
    for mapping in live.mappings(subject.pid):
        if mapping.inode and mapping.perms in ("r--p", "r-xp") and mapping.path == program:
            data = core.read(mapping.start, mapping.end - mapping.start)
            if "x" in mapping.perms:
                with open(program, "rb") as file:
                    file.seek(mapping.offset)
                    text = file.read(mapping.end - mapping.start)
                assert data[:len(text)] == text
            checked += 1
            assert data is not None
    assert checked >= 2


def test_main_thread_that_has_ended(run, program, tmp_path, copy):
    subject = run("orphan")
    assert wait_until(lambda: subject.state()[0] == "Z")
    made = copy(subject.pid, str(tmp_path / "core"))
    assert len(made.threads) == 1 and made.threads[0] != subject.pid
    output = gdb(program, made.path, "thread apply all bt", "print global_number")
    assert " beat (" in output and "$1 = 4711\n" in output


def test_signals_are_neither_lost_nor_doubled(run, tmp_path):
    subject = run("signals", 30)
    sent = 0
    for _ in range(15):
        child = by_hand(subject.pid, tmp_path / "core")
        while child.poll() is None:
            os.kill(subject.pid, signal.SIGRTMIN)
            sent += 1
            time.sleep(0.0003)
        assert child.returncode == 0
    assert sent > 500
    assert int(subject.ask()[0]) == sent


def test_death_of_the_snapshot_in_the_stop_leaves_the_target_running(run, tmp_path):
    subject = run("signals", 300)
    killed_in_stop = sent = 0
    for _ in range(30):
        child = by_hand(subject.pid, tmp_path / "core")
        while child.poll() is None and subject.state()[0] != "t":
            os.kill(subject.pid, signal.SIGRTMIN)
            sent += 1
        child.kill()
        killed_in_stop += child.wait() == -signal.SIGKILL
        assert wait_until(lambda: subject.state()[1] == "0")
        assert subject.state()[0] not in "tT"
        assert subject.is_running(subject.said[0])
        for leftover in tmp_path.iterdir():
            leftover.unlink()
        if killed_in_stop == 5:
            break
    assert killed_in_stop == 5
    assert wait_until(lambda: int(subject.ask()[0]) >= sent)    # on a busy machine the last are still under way
    assert int(subject.ask()[0]) == sent


def test_stopped_process_stays_stopped(run, program, tmp_path):
    subject = run("churn", 1)
    heartbeat = subject.said[3]
    os.kill(subject.pid, signal.SIGSTOP)
    assert wait_until(lambda: subject.state()[0] == "T")
    count = subject.word(heartbeat)
    made = live.snapshot(subject.pid, str(tmp_path / "core"))
    assert wait_until(lambda: subject.state() == ("T", "0"))
    time.sleep(0.1)
    assert subject.state() == ("T", "0") and subject.word(heartbeat) == count
    assert "= %d\n" % count in gdb(program, made.path, "print heartbeat")
    os.kill(subject.pid, signal.SIGCONT)
    assert subject.is_running(heartbeat)


def test_mappings_of_all_kinds(run, program, tmp_path, copy):
    subject = run("memory", tmp_path)
    none, huge, shared, secret, file, closed, heartbeat = subject.said

    def shared_pages():
        with open("/proc/%d/smaps" % subject.pid) as smaps:
            return re.search(r"^%x-.*?Rss: +(\d+) kB" % shared, smaps.read(), re.M | re.S).group(1)
    before = shared_pages()
    made = copy(subject.pid, str(tmp_path / "core"))
    if os.geteuid() == 0:       # memory that nobody has touched was not created by reading it
        assert shared_pages() == before == "0" or int(shared_pages()) <= 8
        assert os.stat(made.path).st_blocks * 512 < 40e6
    core = Core(made.path)
    # Reserved memory: what was touched is there, all else reads as zeros and takes no space.
    for i in range(50):
        assert core.read(huge + (i << 30) + 12345, 4) == b"\x11\x22\x33\x44"
    assert core.read(huge + (55 << 30), PAGE) == bytes(PAGE)
    assert core.read(huge + (64 << 30) - 8, 8) == bytes(8)
    assert core.read(none, 8) is None and any(
        load.p_vaddr <= none < load.p_vaddr + load.p_memsz for load in core.loads)
    # Shared memory that another process has written.
    assert core.read(shared + (100 << 20), 8192) == b"\x5a" * 8192
    assert core.read(shared, 8192) == bytes(8192)
    # What the program keeps out of core files stays out of this one.
    lost, = made.unreadable
    assert (lost.start, lost.end) == (secret, secret + 8192) and "MADV_DONTDUMP" in lost.reason
    assert core.read(secret, 8) is None
    assert subject.word(secret) == int.from_bytes(b"key-0\0ke", "little")
    # Of a file the touched pages, the others not.
    assert core.read(file + (1 << 20), 4096) == b"\x77" * 4096
    assert core.read(file + (3 << 20), 4096) is None
    assert core.read(closed, 8192) == b"\x99" * 8192
    output = gdb(program, made.path, "x/1xw %d" % (huge + 12345), "x/1xw %d" % (huge + (60 << 30)))
    assert "0x44332211" in output and "0x00000000" in output
    assert subject.is_running(heartbeat)


def test_mappings_and_process_memory(run, tmp_path):
    subject = run("memory", tmp_path)
    none, huge, shared, secret, file, closed, heartbeat = subject.said
    by_start = {m.start: m for m in live.mappings(subject.pid)}
    mapped = by_start[file]
    assert mapped.path == "%s/a file\nof two lines" % tmp_path and mapped.deleted and mapped.inode
    assert (mapped.perms, mapped.offset, mapped.end - mapped.start) == ("rw-s", 0, 4 << 20)
    assert by_start[closed].perms == "rw-p" and by_start[closed + 4096].perms == "---p"
    assert not by_start[closed].inode and by_start[closed].path == "" and not by_start[closed].deleted
    with live.ProcessMemory(subject.pid) as memory:
        buffer = bytearray(5000)
        assert memory.read_into(huge + 12345, buffer) == 5000 and buffer[:5] == b"\x11\x22\x33\x44\0"
        # The page after it is one without access.
        assert memory.read_into(closed + 100, buffer) == 5000 and bytes(buffer) == b"\x99" * 5000
        last = max(m.end for m in by_start.values() if m.path == "[stack]")
        assert memory.read_into(last - 96, memoryview(buffer)[:200]) == 96
        assert memory.read_into(0, buffer) == 0
        assert memory.read_into(2 ** 64 - PAGE, buffer) == 0
        assert memory.read_into(closed, bytearray()) == 0


def test_both_ways_to_find_pages_agree(run, tmp_path):
    subject = run("memory", tmp_path)
    huge = subject.said[1]
    os.kill(subject.pid, signal.SIGSTOP)
    assert wait_until(lambda: subject.state()[0] == "T")
    pages = live._PageMap(subject.pid)
    try:
        if pages.existing == pages._read:
            pytest.skip("this kernel has one way only")
        mapped = [m for m in live.mappings(subject.pid) if "r" in m.perms and not live.is_skipped(m)]
        zeros = (huge + (55 << 30), huge + (55 << 30) + PAGE)       # the page that was only read
        for mapping in mapped:
            scanned, read = pages._scan(*mapping[:2]), pages._read(*mapping[:2])
            assert scanned == live.without(read, [zeros])
            assert (mapping.start == huge) == (read != scanned)
        assert len(pages._scan(huge, huge + (64 << 30))) == 50
    finally:
        pages.close()


def test_more_segments_than_16_bits_count(run, program, tmp_path, copy):
    subject = run("pieces", tmp_path)
    address, count, step = subject.said
    made = copy(subject.pid, str(tmp_path / "core"))
    core = Core(made.path)
    assert len(core.loads) > 65535
    last = count - 1
    output = gdb(program, made.path, "x/1dg %d" % (address + last * step), "bt",
                 "x/1dg %d" % (address + 5000 * step))
    assert re.search(r":\t%d\n" % (last * last), output) and re.search(r":\t25000000\n", output)
    assert "in main (" in output


def test_limit_of_the_stop(run, tmp_path):
    subject = run("signals", 300)
    with pytest.raises(live.LiveError, match="let go: the stop would last longer than the 1 ms allowed"):
        live.snapshot(subject.pid, str(tmp_path / "core"), max_stop=0.001)
    assert list(tmp_path.iterdir()) == []
    assert subject.state()[1] == "0" and subject.is_running(subject.said[0])


class Work:
    """In the place of a module's `time`: a millisecond passes with each read(2), and with nothing else."""

    def __init__(self, monkeypatch):
        self.now, real = 1000.0, os.read
        self.sleep, self.reads = time.sleep, 0

        def read(*arguments):
            self.now += 0.001
            self.reads += 1
            return real(*arguments)
        monkeypatch.setattr(live.os, "read", read)
        monkeypatch.setattr(ptrace, "time", self)

    def monotonic(self):
        return self.now


def test_limit_of_the_stop_of_very_many_mappings(tmp_path, monkeypatch):
    """To list them takes long; the limit is looked at in the midst of it."""
    exe = build("live_stop", "-O2").path
    subject = Subject(exe, "32", "1", "split", greeting=False)
    try:
        assert subject.process.stdout.readline() == "ready %d\n" % subject.pid
        stopped = live.Stopped(subject.pid, 0.01)
        work = Work(monkeypatch)
        known = {}
        assert len(live.mappings(subject.pid, known)) > 8000
        reads = work.reads
        assert reads > 40
        with pytest.raises(live.LiveError, match="would last longer than the 10 ms allowed"):
            live.take(live.Capture, stopped, subject.pid, str(tmp_path / "core"))
        assert 10 < stopped.milliseconds < 15
        # And what goes over the list ends as soon as it is told to.
        asked = []

        def ends():
            asked.append(1)
            raise live.LiveError("over")
        work.reads = 0
        with pytest.raises(live.LiveError, match="over"):
            live.mappings(subject.pid, known, ends)
        assert work.reads < 10 and list(tmp_path.iterdir()) == []
        seen = []
        with pytest.raises(live.LiveError, match="over"):
            for number in live.checked(range(100000), ends):
                seen.append(number)
        assert len(seen) <= 256
    finally:
        subject.process.kill()
        subject.process.wait()


def waits_for_its_second_child(subject):
    """The first one does something else at once."""
    return wait_until(lambda: all(subject.state()[0] == "D" and not time.sleep(0.02) for _ in range(5)))


def test_thread_that_cannot_be_stopped(run, tmp_path):
    subject = run("vfork")
    assert waits_for_its_second_child(subject)
    with pytest.raises(live.LiveError, match=r"was not stopped: its thread %d, in state D " % subject.pid):
        live.snapshot(subject.pid, str(tmp_path / "core"), wait=0.1)
    assert subject.state()[1] == "0" and subject.is_running(subject.said[0])
    # What it waits for ends by itself.
    assert live.snapshot(subject.pid, str(tmp_path / "core"), wait=60).vain_ms == 0


def test_one_that_waits_in_the_kernel_does_not_keep_the_others(run):
    """It began to wait just before the interrupt."""
    subject = run("vfork")
    assert waits_for_its_second_child(subject)
    stopped = ptrace.Stopped(subject.pid)
    stopped._await_interruptible = lambda: None
    with pytest.raises(live.LiveError, match=r"let go after \d+ ms: its thread %d, in state D" % subject.pid):
        stopped.run(stopped.__enter__)
    assert stopped.total > 0 and subject.state()[1] == "0" and subject.is_running(subject.said[0])


def test_progress(run, tmp_path):
    subject = run("signals", 200)
    calls = []
    made = live.snapshot(subject.pid, str(tmp_path / "core"), progress=lambda *now: calls.append(now))
    assert len(calls) > 3 and calls == sorted(calls)
    done, total = calls[-1]
    assert done == total and abs(total - made.bytes_copied) < 1 << 20


@pytest.fixture
def nginx(tmp_path):
    exe = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")
    if not exe:
        pytest.skip("needs nginx")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    user = "user root;" if os.geteuid() == 0 else ""
    (tmp_path / "nginx.conf").write_text("""
        daemon off; worker_processes 1; pid %s/pid; error_log %s/error.log; %s
        events { }
        http { access_log off; limit_req_zone $arg_key zone=keys:64m rate=1000r/s;
               server { listen 127.0.0.1:%d; limit_req zone=keys burst=1000;
                        root %s; add_header Worker $pid; } }
        """ % (tmp_path, tmp_path, user, port, tmp_path))
    (tmp_path / "index.html").write_text("hello")
    process = subprocess.Popen([exe, "-p", tmp_path, "-c", "nginx.conf", "-e", tmp_path / "error.log"])

    def ask(key="x"):
        with urllib.request.urlopen("http://127.0.0.1:%d/?key=%s" % (port, key), timeout=10) as answer:
            return int(answer.headers["Worker"])

    def answers():
        with contextlib.suppress(OSError):
            return ask()
    assert wait_until(answers)
    yield exe, ask
    process.terminate()
    process.wait()


def test_nginx_worker(nginx, tmp_path, copy):
    exe, ask = nginx
    worker = ask("a-key-that-nobody-else-has")
    made = copy(worker, str(tmp_path / "core"))
    assert made.exe == exe and made.threads == (worker,)
    output = gdb(exe, made.path, "bt", "print *(int *) &ngx_pid", "info sharedlibrary")
    assert "epoll_wait" in output and "ngx_process_events_and_timers" in output
    assert "$1 = %d\n" % worker in output and "libc.so.6" in output
    zone, = [m for m in live.mappings(worker) if m.perms == "rw-s" and m.end - m.start == 64 << 20]
    assert zone.path == "/dev/zero" and zone.deleted
    kept, now = Core(made.path).read(zone.start, 64 << 20), bytearray(64 << 20)
    with live.ProcessMemory(worker) as memory:
        assert memory.read_into(zone.start, now) == 64 << 20
    assert b"a-key-that-nobody-else-has" in kept and kept == now
    for _ in range(5):
        copy(worker, str(tmp_path / "core"))
        assert ask() == worker
    assert (tmp_path / "error.log").read_text() == ""


def as_nobody(function, *arguments):
    """What `function` returns (a string) in a child process of user nobody, which did not call exec."""
    user = pwd.getpwnam("nobody")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            os.write(writer, function(*arguments).encode())
        except BaseException as error:
            os.write(writer, ("%s: %s" % (type(error).__name__, error)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


def attempt(pid, path):
    """What a snapshot ends with: the error, or a description of the core."""
    try:
        made = live.snapshot(pid, path)
    except live.LiveError as error:
        return str(error)
    return "%s: %d threads, %d in the core" % (made.exe, len(made.threads), Core(path).count("NT_PRSTATUS"))


@pytest.fixture
def open_directory():
    """A directory of user nobody, where that user can come."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.chown(directory, "nobody")
        yield directory


@as_root
def test_no_permission(run, open_directory):
    subject = run("signals", 1)
    assert as_nobody(attempt, subject.pid, open_directory + "/core") == (
        "no permission to stop process %d: it belongs to user root and this is user nobody; run as root"
        % subject.pid)

    def stop_a_protected_process():
        """One that changed its user, like a worker of a server."""
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        try:
            return attempt(child, open_directory + "/core")
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert "so the kernel protects it; run as root" in as_nobody(stop_a_protected_process)
    assert os.listdir(open_directory) == []


@as_root
def test_without_root(open_directory):
    def stop_an_own_process():
        child = subprocess.Popen(["/bin/sleep", "60"])
        try:
            wait_until(lambda: os.readlink("/proc/%d/exe" % child.pid).endswith("sleep"))
            return attempt(child.pid, open_directory + "/core")
        finally:
            child.kill()
            child.wait()
    assert as_nobody(stop_an_own_process) == os.path.realpath("/bin/sleep") + ": 1 threads, 1 in the core"


def test_processes_that_are_not_there(tmp_path):
    path = str(tmp_path / "core")
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(live.LiveError, match="is a zombie that its parent, %d, has not" % os.getpid()):
        live.snapshot(child.pid, path)
    child.wait()
    with pytest.raises(live.LiveError, match="^no process %d: pgrep" % child.pid):
        live.snapshot(child.pid, path)
    with pytest.raises(live.LiveError, match="is this program itself"):
        live.snapshot(os.getpid(), path)
    assert list(tmp_path.iterdir()) == []


@as_root
def test_kernel_thread(tmp_path):
    with open("/proc/2/comm") as file:
        if file.read() != "kthreadd\n":
            pytest.skip("no kernel threads in this container")
    with pytest.raises(live.LiveError, match="is a kernel thread"):
        live.snapshot(2, str(tmp_path / "core"))


def test_thread_id_is_not_a_process(run, tmp_path):
    subject = run("threads")
    tid = max(int(name) for name in os.listdir("/proc/%d/task" % subject.pid))
    with pytest.raises(live.LiveError, match="is a thread of process %d: name that" % subject.pid):
        live.snapshot(tid, str(tmp_path / "core"))


def test_already_traced(run, tmp_path):
    subject = run("signals", 1)
    tracer = subprocess.Popen(["gdb", "-nx", "-q", "-p", str(subject.pid)], stdin=subprocess.PIPE,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: subject.state()[1] != "0")
        with pytest.raises(live.LiveError, match="already traced by process %d: detach" % tracer.pid):
            live.snapshot(subject.pid, str(tmp_path / "core"))
    finally:
        tracer.communicate(b"detach\nquit\n", timeout=30)
    assert wait_until(lambda: subject.state()[1] == "0")
    live.snapshot(subject.pid, str(tmp_path / "core"))


def test_process_that_is_killed_in_the_stop(run, tmp_path):
    subject = run("signals", 400)
    child = by_hand(subject.pid, tmp_path / "core")
    assert wait_until(lambda: subject.state()[0] == "t" or child.poll() is not None)
    subject.process.kill()
    said, error = child.communicate(timeout=60)
    assert subject.process.wait() == -signal.SIGKILL
    assert (child.returncode, said) == (2, "")
    assert re.fullmatch(r"gdbleak-snapshot: process %d (was killed while it was copied|has ended)\n" % subject.pid,
                        error)
    assert list(tmp_path.iterdir()) == []


def test_control_c_in_the_stop(run, tmp_path):
    subject = run("signals", 400)
    child = by_hand(subject.pid, tmp_path / "core")
    assert wait_until(lambda: subject.state()[0] == "t" or child.poll() is not None)
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60) == ("", "gdbleak-snapshot: interrupted; the process runs on\n")
    assert child.returncode == 130 and list(tmp_path.iterdir()) == []
    assert subject.state()[1] == "0" and subject.is_running(subject.said[0])


def forbid_process_vm_readv():
    """Have the kernel refuse the system call to this process, as sandboxes do."""
    number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    program = b"".join(struct.pack("<HBBI", *instruction) for instruction in [
        (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, refuse), (0x06, 0, 0, allow)])
    code = ctypes.create_string_buffer(program)
    prog = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 4, ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0                          # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(prog)), 0, 0) == 0        # PR_SET_SECCOMP


def test_sandbox_without_process_vm_readv(run, program, tmp_path):
    subject = run("threads")
    number, block, size, total = subject.said
    child = by_hand(subject.pid, tmp_path / "core", preexec_fn=forbid_process_vm_readv)
    assert child.communicate(timeout=60)[1] == "" and child.returncode == 0
    assert checksum(Core(tmp_path / "core").read(block, size)) == total
    assert "$1 = %d\n" % number in gdb(program, tmp_path / "core", "print global_number")


def test_older_kernels(run, tmp_path, monkeypatch):
    """Requests that this kernel does not know, as an older one does not know the right ones."""
    monkeypatch.setattr(live, "_MADV_POPULATE_WRITE", 9999)
    monkeypatch.setattr(live._PageMap, "_SCAN", 0xC06066FF)
    subject = run("memory", tmp_path)
    none, huge, shared, secret, file, closed, heartbeat = subject.said
    core = Core(live.snapshot(subject.pid, str(tmp_path / "core")).path)
    assert all(core.read(huge + (i << 30) + 12345, 4) == b"\x11\x22\x33\x44" for i in range(50))
    assert core.read(huge + (55 << 30), PAGE) == core.read(huge + (60 << 30), PAGE) == bytes(PAGE)
    assert core.read(shared + (100 << 20), 8192) == b"\x5a" * 8192
    assert core.read(closed, 4096) == b"\x99" * 4096
    assert os.stat(core.path).st_blocks * 512 < 300e6 and subject.is_running(heartbeat)


@as_root
def test_not_enough_space(run, tmp_path):
    subject = run("signals", 50)
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", small]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("cannot mount")
    try:
        lacking = r"not enough space in .*small: .* needs 5\d\.\d MB, 8\.\d MB are free: another directory mends it"
        with pytest.raises(live.LiveError, match=lacking):
            live.snapshot(subject.pid, str(small / "core"))
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)
    with pytest.raises(live.LiveError, match="cannot write .*/nowhere/core: there is no such directory"):
        live.snapshot(subject.pid, str(tmp_path / "nowhere" / "core"))
    assert subject.is_running(subject.said[0])


def test_by_hand(run, program, tmp_path):
    subject = run("threads")
    child = by_hand(subject.pid, tmp_path / "core")
    said, error = child.communicate(timeout=60)
    assert re.fullmatch(r"subject %d: stopped for \d+\.\d ms \(\d+\.\d MB copied\)\ngdb %s %s\n"
                        % (subject.pid, program, re.escape(str(tmp_path / "core"))), said)
    assert (child.returncode, error) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["core"]


@pytest.mark.parametrize("kind", ["device", "pipe", "directory", "loop"])
def test_what_is_no_file_is_not_replaced(run, tmp_path, kind):
    subject, path = run("threads"), tmp_path / "x"
    if kind == "device":
        path = "/dev/null"
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(path)
    before = os.lstat(path)
    with pytest.raises(live.LiveError, match="cannot write .*: it is a "):
        live.snapshot(subject.pid, str(path))
    assert (os.lstat(path).st_ino, os.lstat(path).st_mode) == (before.st_ino, before.st_mode)
    assert len(list(tmp_path.iterdir())) == (kind != "device")


def test_a_link_is_followed(run, tmp_path):
    subject = run("threads")
    (tmp_path / "link").symlink_to("there")
    live.snapshot(subject.pid, str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink() and Core(tmp_path / "there").count("NT_PRSTATUS") == 9


class Readable:
    """In the place of a `ProcessMemory`: readable but in some pages; how often it was asked."""

    def __init__(self, holes):
        self.holes, self.asked = holes, 0

    def can_read(self, address):
        self.asked += 1
        return not any(start <= address < end for start, end in self.holes)

    def close(self):
        pass


@pytest.mark.parametrize("holes", [
    [(0, 1)], [(0, 2)], [(5, 10), (12, 17)], [(100, 100 + (1 << 24))], [(0, 1 << 26)], [((1 << 26) - 1, 1 << 26)]])
def test_a_range_that_cannot_be_read_is_found_by_few_looks(tmp_path, holes):
    """Of any size, to the page."""
    base = 1 << 40
    holes = [(base + start * PAGE, base + end * PAGE) for start, end in holes]
    with open(tmp_path / "x", "w+b") as file:
        image = live._Image(file.fileno(), 0)
        image._slots = [live._Slot(base, base + (PAGE << 26), 0, 0)]
        image._index()
        copier = live._Copier(os.getpid(), image, None)
        copier._memory.close()
        copier._memory = Readable(holes)
        for start, end in holes:
            assert copier._skip(start + 8, lambda: None) == end
        assert copier.failed == holes and copier._memory.asked < 400


def test_known_lines_are_not_parsed_again(run):
    subject, known = run("threads"), {}
    first = live.mappings(subject.pid, known)
    assert first == live.mappings(subject.pid) and len(known) == len(first)
    assert all(one is other for one, other in zip(first, live.mappings(subject.pid, known)))
