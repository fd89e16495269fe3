"""Choosing processes for an analysis: of a group, of an executable, a command; a report each, and one sum."""
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gdbleak import cli
from gdbleak.target import processes, room
from gdbleak.target.ptrace import LiveError
from tests.live_target import Subject, children, gdb, program, tools, wait_until        # noqa: F401
from tests.targets import items_of, run_cli

pytestmark = tools
GDBLEAK = Path(sys.executable).with_name("gdbleak")


def report(*arguments, **options):
    """(items, standard error) of an analysis that must succeed."""
    done = run_cli(*arguments, "--json", "-", **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


# -- several processes -------------------------------------------------------------------------------------------------

@pytest.fixture
def three(program, tmp_path):
    """Three processes of an executable of their own, in one process group."""
    exe = shutil.copy(program, tmp_path / "several")
    leader = Subject(exe, "ends", "wait", preexec_fn=lambda: os.setpgid(0, 0))
    others = [Subject(exe, "ends", "wait", preexec_fn=lambda: os.setpgid(0, leader.pid)) for _ in range(2)]
    yield str(exe), [leader, *others]
    for subject in (leader, *others):
        subject.process.kill()
        subject.process.wait()


def test_each_process_of_an_executable_or_a_group_is_chosen(three):
    exe, subjects = three
    pids = [subject.pid for subject in subjects]
    for number, path in ((None, exe), (-pids[0], None), (-pids[2], None)):
        chosen = processes.choose(number, path)
        assert sorted(process.pid for process in chosen) == sorted(pids)
        assert {process.name for process in chosen} == {"several"}
    assert [process.pid for process in processes.choose(pids[1])] == [pids[1]]
    # Replaced since, it is found by the path that it had, and what is there now is another one.
    os.unlink(exe)
    shutil.copy("/bin/sleep", exe)
    other = subprocess.Popen([exe, "60"])
    try:
        assert wait_until(lambda: os.readlink("/proc/%d/exe" % other.pid) == exe)
        assert sorted(process.pid for process in processes.choose(None, exe)) == sorted([*pids, other.pid])
    finally:
        other.kill()
        other.wait()
    with pytest.raises(LiveError, match="no process that can be seen runs /nonexistent"):
        processes.choose(None, "/nonexistent")
    with pytest.raises(LiveError, match="no process group 2147483647, and no process"):
        processes.choose(-2147483647)


@pytest.mark.parametrize("title, name", [
    (b"nginx: master process /usr/sbin/nginx -g daemon off;", "nginx master process"),
    (b"nginx: worker process" + bytes(60), "nginx worker process"),
    (b"nginx: worker process is shutting down", "nginx worker process is shutting down"),
    (b"nginx: cache manager process   ", "nginx cache manager process"),
    (b"php-fpm: pool www", "php-fpm pool www"), (b"/usr/bin/x\0-v\0a: b", "sleep"),
    (b"x: \x1b[2J\x07" + b"y" * 100, "x ?[2J?" + "y" * 33), (b"", "sleep")])
def test_a_process_is_named_as_it_calls_itself(title, name, tmp_path, monkeypatch):
    """Titles of servers as their command lines have them; the rest of /proc is a real process's."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert wait_until(lambda: os.readlink("/proc/%d/exe" % process.pid).endswith("sleep"))
        (tmp_path / "cmdline").write_bytes(title)
        real = open
        monkeypatch.setattr("builtins.open", lambda path, *rest: real(
            tmp_path / "cmdline" if path == "/proc/%d/cmdline" % process.pid else path, *rest))
        assert processes.name_of(process.pid) == name
    finally:
        monkeypatch.undo()
        process.kill()
        process.wait()


def test_a_report_each_and_one_sum(three, tmp_path):
    exe, subjects = three
    truth = {subject.pid: subject.said[0] for subject in subjects}
    written, flame = tmp_path / "report.json", tmp_path / "flame.folded"
    done = run_cli("mallinfo", "--exe", exe, "--json", written, "--flame", flame)
    assert done.returncode == 0
    headings = re.findall(r"^=== several (\d+) ===$", done.stdout, re.M)
    assert sorted(map(int, headings)) == sorted(truth)
    assert len(re.findall(r"^several \d+: stopped for \d+\.\d ms", done.stderr, re.M)) == 3
    items = json.loads(written.read_text())
    assert [item["pid"] for item in items_of(items, "process")] == [int(pid) for pid in headings]
    *each, total = items_of(items, "totals")
    # The program took its number before its threads and its output buffer: each has a little more than that.
    for process, numbers in zip(items_of(items, "process"), each):
        assert 0 <= numbers["uordblks"] - truth[process["pid"]] < 20000
    assert total["processes"] == 3 and total["command"] == "leak-mallinfo"
    for key in ("arena", "uordblks", "fordblks", "ordblks", "keepcost"):
        assert total[key] == sum(numbers[key] for numbers in each)
    row = next(line for line in done.stdout.splitlines() if line.startswith("sum "))
    assert f" {total['uordblks']:,} " in row
    stacks = [line.rpartition(" ") for line in flame.read_text().splitlines()]
    assert {stack.split(";")[0] for stack, _, _ in stacks} == {f"several {pid}" for pid in truth}
    in_use = sum(int(weight) for stack, _, weight in stacks if ";in use" in stack)
    assert in_use == total["uordblks"] + total["hblkhd"] - total["tcached_bytes"]
    assert not list(Path("/dev/shm").glob("gdbleak-*/core.%d" % subjects[0].pid))


def test_a_group_by_fork_as_json(three):
    exe, subjects = three
    items, errors = report("sizes", "-p", -subjects[1].pid, "--fork")
    assert len(items_of(items, "process")) == 3 and errors.count("read from a fork of it") == 3
    *each, total = items_of(items, "totals")
    assert total["processes"] == 3
    assert total["in_use_blocks"] == sum(numbers["in_use_blocks"] for numbers in each) > 3000


def test_cores_of_several_have_names_of_their_own(three, tmp_path):
    exe, subjects = three
    done = run_cli("snapshot", "--exe", exe, "-o", "a.core", "--fork", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in tmp_path.glob("*core")} == {f"a.{subject.pid}.core" for subject in subjects}
    done = run_cli("snapshot", "-p", subjects[0].pid, cwd=tmp_path)
    path = tmp_path / f"several.{subjects[0].pid}.core"
    assert (done.returncode, done.stderr) == (0, "") and path.exists()
    assert done.stdout.endswith(f"\ngdb {exe} {path.name}\n")
    assert "main (" in gdb(exe, path, "bt")


def test_the_stops_are_never_at_the_same_time(three):
    """Whoever of them stands still, the others run."""
    exe, subjects = three
    process = subprocess.Popen([GDBLEAK, "mallinfo", "--exe", exe], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    stopped = set()
    while process.poll() is None:
        traced = [subject.pid for subject in subjects if subject.state()[0] == "t"]
        assert len(traced) <= 1
        stopped.update(traced)
    assert process.returncode == 0


def test_one_that_cannot_be_copied_does_not_keep_the_others(three):
    exe, subjects = three
    tracer = subprocess.Popen(["gdb", "-nx", "-q", "-p", str(subjects[1].pid)], stdin=subprocess.PIPE,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: subjects[1].state()[1] != "0")
        done = run_cli("mallinfo", "--exe", exe, "--json", "-")
    finally:
        tracer.communicate(b"detach\nquit\n", timeout=30)
    assert done.returncode == 2
    assert f"gdbleak: several {subjects[1].pid}: process {subjects[1].pid} is already traced by" in done.stderr
    assert items_of(json.loads(done.stdout), "totals")[-1]["processes"] == 2


@pytest.fixture
def nginx(tmp_path):
    """(pid of the master, pids of the workers) of an nginx with two workers; it serves nothing."""
    exe = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")
    if not exe:
        pytest.skip("needs nginx")
    user = "user root;" if os.geteuid() == 0 else ""
    (tmp_path / "nginx.conf").write_text("""
        daemon off; worker_processes 2; pid %s/pid; error_log %s/error.log; %s
        events { }
        http { access_log off; server { listen unix:%s/socket; } }""" % (tmp_path, tmp_path, user, tmp_path))
    process = subprocess.Popen([exe, "-p", tmp_path, "-c", "nginx.conf", "-e", tmp_path / "error.log"],
                               start_new_session=True)

    def workers():
        found = children(process.pid)
        ready = [pid for pid in found if b"worker process" in Path("/proc", str(pid), "cmdline").read_bytes()]
        return ready if len(ready) == 2 else None
    assert wait_until(workers)
    yield process.pid, workers()
    assert (tmp_path / "error.log").read_text() == ""
    process.terminate()
    process.wait()


def test_nginx_master_and_workers_are_told_apart(nginx):
    master, workers = nginx
    done = run_cli("pools", "-p", -master)
    assert done.returncode == 0
    headings = re.findall(r"^=== (.*) ===$", done.stdout, re.M)
    assert headings[0] == f"nginx master process {master}"
    assert sorted(headings[1:]) == sorted(f"nginx worker process {pid}" for pid in workers)
    assert re.search(r"^nginx worker process %d +1 " % workers[0], done.stdout, re.M)
    assert re.search(r"^sum +3 ", done.stdout, re.M)


# -- a command that is started -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("how, ending", [
    ("7", "ended with status 7"), ("100", "ended with status 100"), ("crash", r"was ended by signal 11 \(SIGSEGV\)"),
    ("exec", "ended with status 7")])
def test_a_command_is_analysed_at_its_end(program, how, ending):
    """It ends by its main thread, by another one, by a crash, or after it became another program."""
    done = run_cli("mallinfo", "-c", f"{program} ends {how}", "--json", "-")
    assert done.returncode == 0
    said, copied, ended = done.stderr.splitlines()[-3:]
    assert re.fullmatch(r"copied at its end \(\d+\.\d MB\)", copied) and re.fullmatch("the command " + ending, ended)
    assert len(done.stderr.splitlines()) == (4 if how == "exec" else 3)
    found = items_of(json.loads(done.stdout), "totals")[0]["uordblks"]
    assert 0 <= found - int(said) < 20000


def test_a_command_after_a_while(program):
    done = run_cli("mallinfo", "-c", f"{program} ends wait", "--after", "1", "--json", "-")
    said, stopped, ended = done.stderr.splitlines()
    assert done.returncode == 0 and re.fullmatch(r"stopped for \d+\.\d ms \(\d+\.\d MB copied\)", stopped)
    assert ended == "the command was ended by signal 15 (SIGTERM)"
    assert 0 <= items_of(json.loads(done.stdout), "totals")[0]["uordblks"] - int(said) < 20000


def test_control_c_has_a_command_analysed_now(program):
    """As the terminal sends it: to both. The command here ignores it."""
    command = f"sh -c \"trap '' INT; exec {program} ends wait\""
    process = subprocess.Popen([GDBLEAK, "mallinfo", "-c", command, "--json", "-"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    said = process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "stopped for" in errors and "SIGTERM" in errors
    assert 0 <= items_of(json.loads(output), "totals")[0]["uordblks"] - int(said) < 20000


def test_control_c_ends_a_command_that_obeys_it(program):
    process = subprocess.Popen([GDBLEAK, "mallinfo", "-c", f"{program} ends wait", "--json", "-"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    said = process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "copied at its end" in errors
    assert "the command was ended by signal 2 (SIGINT)" in errors
    assert 0 <= items_of(json.loads(output), "totals")[0]["uordblks"] - int(said) < 20000


def test_a_command_that_stops_and_goes_on(program):
    """A stop by SIGSTOP is what it is without us."""
    process = subprocess.Popen([GDBLEAK, "mallinfo", "-c", f"{program} signals 1", "--json", "-"], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr.readline()
    pid, = children(process.pid)

    def state():
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: state() in "tT")
    time.sleep(0.1)
    assert state() in "tT"
    os.kill(pid, signal.SIGCONT)
    assert wait_until(lambda: state() == "S")
    output, errors = process.communicate("q\n", timeout=60)
    assert process.returncode == 0 and "the command ended with status 0" in errors
    assert items_of(json.loads(output), "totals")


def test_the_death_of_the_tool_leaves_a_command_running(program):
    process = subprocess.Popen([GDBLEAK, "mallinfo", "-c", f"{program} churn 1"], stdin=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    heartbeat = int(process.stderr.readline().split()[3])
    pid, = children(process.pid)
    try:
        process.kill()
        process.wait()
        subject = Subject.__new__(Subject)
        subject.pid = pid
        assert subject.is_running(heartbeat) and wait_until(lambda: subject.state()[1] == "0")
    finally:
        os.kill(pid, signal.SIGKILL)
        process.stderr.close()
        process.stdin.close()


def test_a_snapshot_of_a_command_has_all_its_threads(program, tmp_path):
    done = run_cli("snapshot", "-c", f"{program} ends 100", "-o", tmp_path / "core")
    assert done.returncode == 0
    output = gdb(program, tmp_path / "core", "info threads")
    threads = re.findall(r"^[* ] +\d+ +Thread .*LWP.*$", output, re.M)
    assert len(threads) == 3 and any("pause" in line for line in threads) and any("exit" in line for line in threads)


@pytest.mark.parametrize("arguments, told", [
    (["-c", "nonsense-program x"], "cannot start nonsense-program: No such file"), (["-c", ""], "an empty command"),
    (["-c", "'x"], "no closing quotation"), (["-c", "/etc/passwd"], "cannot start /etc/passwd: Permission denied"),
    (["-c", "true", "-p", "1"], "not allowed"), (["-p", "1", "--after", "1"], "--after goes with -c"),
    (["--core", "x", "--fork"], "--fork goes with a process"),
    (["--core", "x", "--max-stop", "5"], "--max-stop goes with"),
    (["--exe", "/nonexistent/x"], "no process that can be seen runs /nonexistent/x"),
    (["-p", "-2147483647"], "no process group 2147483647"), ([], "a target is required")])
def test_a_wrong_choice_is_one_line(arguments, told):
    done = run_cli("sizes", *arguments, stdin=subprocess.DEVNULL)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("\n") == 1 and told in done.stderr, done.stderr


@pytest.mark.parametrize("word, option, values", [
    ("sizes", "--min-bytes", ["-5", " -1"]), ("memory", "--min-bytes", ["-5"]), ("pools", "--min-bytes", ["-5"]),
    ("unreachable", "--min-bytes", ["-5"]), ("retained", "--min-bytes", ["-5"]), ("blocks", "--dump", ["-5"]),
    ("blocks", "--top", ["-1", "nan", "inf", "1.5", ""]), ("sample", "--top", ["-1"]), ("mmaps", "--top", ["-1", "x"]),
    ("sizes", "--after", ["-1", "0", "nan", "inf", "1e999"]), ("sizes", "--timeout", ["0", "-1", "nan", "inf"]),
    ("sizes", "--max-stop", ["0", "-3", "nan", "inf"]), ("snapshot", "--max-stop", ["-1", "nan"]),
    ("snapshot", "--after", ["-1", "inf"]), ("sample", "--seconds", ["0", "-1", "nan", "inf"]),
    ("mmaps", "--seconds", ["0", "-1", "nan", "inf"]), ("sample", "--grace", ["-1", "nan", "inf"]),
    ("sample", "--every", ["0", "-1", "nan", "1e3", "k", "", "99999999G"]), ("sample", "--rate", ["0", "-1", "inf"])])
def test_a_number_that_makes_no_sense_is_one_line(word, option, values, tmp_path):
    """Before anything is done, as of all that is wrong with a command line."""
    for value in values:
        done = run_cli(word, "-c", "touch started", option, value, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, ""), value
        assert done.stderr.count("\n") == 1 and f"argument {option}: invalid " in done.stderr, done.stderr
    assert not (tmp_path / "started").exists()


# -- what is left, and what cannot be written --------------------------------------------------------------------------

def test_processes_whose_main_thread_has_ended_are_chosen(program, tmp_path):
    exe = shutil.copy(program, tmp_path / "several")
    subject = Subject(exe, "orphan", preexec_fn=lambda: os.setpgid(0, 0))
    try:
        assert wait_until(lambda: subject.state()[0] == "Z")
        assert processes.choose(None, str(exe)) == processes.choose(-subject.pid) == [
            processes.Process(subject.pid, "several")]
    finally:
        subject.process.kill()
        subject.process.wait()


def test_copies_that_nobody_holds_are_swept_away(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held, left, fresh, other = [tmp_path / name for name in (
        cli.COPY + "held", cli.COPY + "left", cli.COPY + "fresh", "gdbleak-other")]
    for path in (held, left, fresh, other):
        path.mkdir()
        (path / "core.1").write_bytes(b"x")
        if path != fresh:
            os.utime(path, (1, 1))
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    cli.sweep()
    assert sorted(tmp_path.iterdir()) == sorted([held, fresh, other])
    os.close(lock)
    cli.sweep()
    assert sorted(tmp_path.iterdir()) == sorted([fresh, other])


@pytest.mark.parametrize("word, option", [
    ("sizes", "--json"), ("sizes", "--flame"), ("sample", "--json"), ("sample", "--flame"), ("mmaps", "--json"),
    ("mmaps", "--flame"), ("snapshot", "-o")])
@pytest.mark.parametrize("where, why", [
    ("nowhere/x.txt", "there is no such directory"), ("directory", "it is a directory"),
    ("nowhere/", "it is a directory"), ("/proc/x.txt", "No such file or directory"), ("y" * 300 + ".txt", "File name too long"),
    ("file/x.txt", "there is no such directory")])
def test_what_cannot_be_written_is_known_before_a_command_is_started(word, option, where, why, tmp_path):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    path = os.path.join(tmp_path, where)
    done = run_cli(word, "-c", "touch started", option, path, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"gdbleak: cannot write {path}: {why}\n")
    assert not (tmp_path / "started").exists() and not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, and setpriv to lay it down")
@pytest.mark.parametrize("word, option", [("sizes", "--json"), ("sample", "--flame"), ("snapshot", "-o")])
def test_what_one_may_not_write_is_known_before_a_command_is_started(word, option, tmp_path):
    (tmp_path / "x.txt").touch(0o444)
    tmp_path.chmod(0o555)
    done = subprocess.run(["setpriv", "--inh-caps=-dac_override", "--bounding-set=-dac_override", GDBLEAK, word, "-c",
                           "touch /tmp/gdbleak-started", option, tmp_path / "x.txt"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == f"gdbleak: cannot write {tmp_path}/x.txt: Permission denied\n"
    assert not os.path.exists("/tmp/gdbleak-started")


def test_looking_whether_it_can_be_written_changes_nothing(tmp_path):
    kept = tmp_path / "x.txt"
    kept.write_text("as it was")
    room.check_writable(str(kept))
    room.check_writable(str(tmp_path / "new"))
    room.check_writable(str(tmp_path / "new"), replaces=True)
    os.mkfifo(tmp_path / "pipe")
    room.check_writable(str(tmp_path / "pipe"))         # which nobody reads
    room.check_writable("/dev/full")
    assert kept.read_text() == "as it was" and sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "x.txt"]


def test_an_ending_that_nothing_is_written_for_is_known_before_a_command_is_started(tmp_path):
    for word in ("sizes", "sample", "mmaps"):
        done = run_cli(word, "-c", "touch started", "--flame", "x.png", cwd=tmp_path)
        assert done.returncode == 2 and re.fullmatch("gdbleak: cannot write .*must end in .*\n", done.stderr)
    assert not (tmp_path / "started").exists()


def test_an_ignored_hangup_stays_ignored():
    code = ("import signal; from gdbleak.arguments import prepare_process; prepare_process(); "
            "print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, callable(signal.getsignal(signal.SIGTERM)))")
    for ignored in (True, False):
        said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                              preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored
                                                               else signal.SIG_DFL)).stdout
        assert said == "%s True\n" % ignored
