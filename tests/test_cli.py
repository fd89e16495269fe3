"""The shell command as a person uses it: real cores, real processes, a real GDB that hangs or dies."""
import gzip
import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gdbleak import core_probe
from gdbleak.gdb_driver import Gdb, GdbFailure
from tests.targets import Program, capture

ROOT = Path(__file__).resolve().parent.parent
GDBLEAK = Path(sys.executable).with_name("gdbleak")
SOURCE = r"""
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **arguments)
{
    static char buffer[4096];
    setvbuf(stdout, buffer, _IOFBF, sizeof buffer);
    for (int i = 0; i < 1234; i++)
        *(int *)malloc(5000) = i;
    struct mallinfo2 info = mallinfo2();
    printf("{\"uordblks\": %zu, \"arena\": %zu, \"fordblks\": %zu, \"pid\": %d}\n",
           info.uordblks, info.arena, info.fordblks, getpid());
    fflush(stdout);
    if (count > 1)
        for (;;)
            pause();
    abort();
}
"""
LAST_SECONDS = 30


def compile_program(directory, *options):
    """A program that allocates, tells its truth as JSON and aborts (or waits, when given an argument)."""
    directory.mkdir(exist_ok=True)
    (directory / "program.c").write_text(SOURCE)
    subprocess.run(["gcc", "-g", "program.c", "-o", "program", *options], cwd=directory, check=True)
    return directory / "program"


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """The Capture of the program, in a directory with an awkward name."""
    directory = tmp_path_factory.mktemp("cli") / "a \"core's\" \\ place é"
    return capture(Program(compile_program(directory)), directory)


@pytest.fixture
def waiting(tmp_path):
    """A process of the program that goes on living, and its truth."""
    process = subprocess.Popen([compile_program(tmp_path / "alive"), "wait"], stdout=subprocess.PIPE)
    yield process, json.loads(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


def run(*arguments, **settings):
    """A finished gdbleak; what it wrote on its two outputs must never hold a traceback."""
    done = subprocess.run([GDBLEAK, *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=120, **settings)
    assert "Traceback" not in done.stdout + done.stderr
    return done


def fails(*arguments, **settings):
    """The one line on standard error of a gdbleak that must fail with status 2 and report nothing."""
    done = run(*arguments, **settings)
    assert done.returncode == 2 and not done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def totals(output):
    """The totals item of a report that was written as JSON to standard output."""
    return next(item for item in json.loads(output) if item["type"] == "totals")


def test_a_core_with_its_executable_and_without(crashed):
    for exe in ([], ["--exe", crashed.exe]):
        done = run("mallinfo", "--core", crashed.core, *exe, "--json", "-")
        assert done.returncode == 0 and not done.stderr
        found = totals(done.stdout)
        assert {name: found[name] for name in ("uordblks", "arena", "fordblks")} == {
            name: crashed.truth[name] for name in ("uordblks", "arena", "fordblks")}


def test_options_reach_the_command(crashed, tmp_path):
    written = tmp_path / "it's \"the\" \\ report é.json"
    done = run("sizes", "--core", crashed.core, "--size", "5000-5016", "--state", "in-use", "--json", written)
    assert done.returncode == 0 and "4k-8k" in done.stdout
    assert totals(written.read_text())["in_use_blocks"] >= 1234


def test_a_live_process_is_copied_and_let_go(waiting, tmp_path):
    process, truth = waiting
    temporary = tmp_path / "copies"
    temporary.mkdir()
    done = run("mallinfo", "-p", process.pid, "--json", "-", env={**os.environ, "TMPDIR": str(temporary)})
    assert done.returncode == 0
    assert totals(done.stdout)["uordblks"] == truth["uordblks"]
    assert done.stderr.startswith("stopped for ") and " ms" in done.stderr
    assert process.poll() is None and state(process.pid) == "S"
    assert not list(temporary.iterdir())


def test_a_live_process_whose_executable_was_replaced(waiting):
    process, truth = waiting
    program = Path(os.readlink(f"/proc/{process.pid}/exe"))
    program.unlink()
    shutil.copy("/bin/true", program)
    done = run("mallinfo", "-p", process.pid, "--json", "-")
    assert done.returncode == 0 and totals(done.stdout)["uordblks"] == truth["uordblks"]
    assert "another build" not in done.stderr and "may not match" not in done.stderr


def test_no_such_process():
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert str(ended.pid) in fails("mallinfo", "-p", ended.pid)


def state(pid):
    """The one-letter state of a process, or None when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


# -- input that cannot be analysed ----------------------------------------------------------------------

@pytest.mark.parametrize("name, told", [
    ("absent", "No such file"), (".", "directory"), ("/dev/null", "no regular file"), ("empty", "empty"),
    ("text", "no core file"), ("program", "no core file"), ("packed.gz", "gzip -dc"), ("packed.xz", "xz -dc"),
    ("short", "cut short"), ("narrow", "32-bit")])
def test_what_is_no_core_is_told_before_gdb_starts(name, told, crashed, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "program").write_bytes(crashed.exe.read_bytes())
    core = crashed.core.read_bytes()
    (tmp_path / "packed.gz").write_bytes(gzip.compress(core[:100000]))
    subprocess.run("xz -c text >packed.xz", shell=True, cwd=tmp_path, check=True)
    (tmp_path / "short").write_bytes(core[:40])
    (tmp_path / "narrow").write_bytes(core[:4] + b"\1" + core[5:1000])
    assert told in fails("sizes", "--core", tmp_path / name, "--gdb", "/bin/false")


def test_a_core_that_was_cut_short(crashed, tmp_path):
    size = crashed.core.stat().st_size
    for end in (64, 1000, 5000, size // 3, size - size // 4, size - 1):
        (tmp_path / "cut").write_bytes(crashed.core.read_bytes()[:end])
        done = run("sizes", "--core", tmp_path / "cut", "--exe", crashed.exe)
        assert done.returncode in (0, 2)
        assert done.stderr or "partial" in done.stdout, f"nothing said of a core of {end} bytes"


def test_damaged_headers_are_no_surprise(crashed, tmp_path):
    original, chance, opened = crashed.core.read_bytes()[:20000], random.Random(1), 0
    for _ in range(500):
        damaged = bytearray(original[:chance.choice((64, 500, 20000))])
        for _ in range(chance.randrange(1, 30)):
            damaged[chance.randrange(min(len(damaged), 3000))] = chance.randrange(256)
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            path, problem = core_probe.executable(core_probe.open_core(str(tmp_path / "damaged")))
            assert (path is None) != (problem is None)
            opened += 1
        except core_probe.NotACore as error:
            assert "\n" not in str(error)
    assert opened > 50


@pytest.mark.parametrize("arguments, told", [
    (["nonsense"], "--help"), (["sizes"], "required"), (["sizes", "--core", "x", "-p", "1"], "not allowed"),
    (["sizes", "--core", "x", "--wrong"], "--wrong"), (["sizes", "-p", "x"], "invalid int"),
    (["sizes", "--core", "x", "--timeout", "0"], "--timeout"), (["what", "--core", "x"], "address"),
    (["sizes", "--core", "x", "--gdb", "/nonexistent/gdb"], "not an executable GDB"),
    (["sizes", "--core", "x", "--gdb", "no-such-gdb"], "apt-get install gdb"),
    (["sizes", "--core", "x", "--exe", "/nonexistent/exe"], "no such file"),
    (["sizes", "--core", "x", "--sysroot", "/nonexistent"], "no such directory"),
    (["sizes", "--core", "x", "--size", "1\n2"], "line feed")])
def test_a_wrong_command_line_is_one_line(arguments, told):
    assert told in fails(*arguments)


def test_a_command_that_fails_is_one_line(crashed):
    assert "$nothing" in fails("what", "--core", crashed.core, "$nothing + (")


# -- the executable of a core ---------------------------------------------------------------------------

def build_id(path):
    """The build-id of an ELF file as binutils tell it."""
    noted = subprocess.run(["readelf", "-n", path], capture_output=True, text=True, check=True).stdout
    return noted.split("Build ID: ")[1].split()[0]


def test_another_build_of_the_executable_is_not_used(tmp_path):
    core = capture(Program(compile_program(tmp_path)), tmp_path).core
    opened = core_probe.open_core(str(core))
    assert core_probe.executable(opened) == (str(tmp_path / "program"), None)
    true_id = build_id(tmp_path / "program")
    assert core_probe.file_build_id(str(tmp_path / "program")) == true_id
    (tmp_path / "elsewhere" / tmp_path.relative_to("/")).mkdir(parents=True)
    shutil.copy(tmp_path / "program", tmp_path / "elsewhere" / tmp_path.relative_to("/"))
    compile_program(tmp_path, "-O1")
    path, problem = core_probe.executable(opened)
    assert path is None and true_id in problem and build_id(tmp_path / "program") in problem
    done = run("mallinfo", "--core", core)
    assert done.returncode == 0 and done.stderr.count("another build") == 1
    path, _ = core_probe.executable(opened, str(tmp_path / "elsewhere"))
    assert path == str(tmp_path / "elsewhere" / tmp_path.relative_to("/") / "program")
    (tmp_path / "program").unlink()
    assert "is not on this machine" in run("mallinfo", "--core", core).stderr


def test_a_library_that_is_not_here_is_told_in_one_line(tmp_path):
    (tmp_path / "part.c").write_text("int part(void) { return 1; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "part.c", "-o", "libpart.so"], cwd=tmp_path, check=True)
    program = compile_program(tmp_path, "-Wl,--no-as-needed,-rpath," + str(tmp_path), "-L.", "-lpart")
    captured = capture(Program(program), tmp_path)
    (tmp_path / "libpart.so").unlink()
    done = run("mallinfo", "--core", captured.core, "--json", "-")
    assert totals(done.stdout)["uordblks"] == captured.truth["uordblks"]
    assert done.stderr.count("\n") == 1 and "1 (first: " + str(tmp_path / "libpart.so") in done.stderr


def test_the_wrong_executable_is_told(crashed):
    done = run("mallinfo", "--core", crashed.core, "--exe", "/bin/ls", "--json", "-")
    assert "may not match" in done.stderr
    assert totals(done.stdout)["uordblks"] == crashed.truth["uordblks"]
    assert "format" in fails("mallinfo", "--core", crashed.core, "--exe", crashed.exe.with_name("program.c"))


# -- GDB hangs, ends, is interrupted --------------------------------------------------------------------

def start_held(arguments, **settings):
    """A gdbleak whose GDB stands still (as if it hung), and the pid of that GDB."""
    process = subprocess.Popen([GDBLEAK, *map(str, arguments)], stdin=subprocess.DEVNULL, **settings)
    deadline = time.monotonic() + LAST_SECONDS
    while time.monotonic() < deadline:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text() == "gdb\n":
                os.kill(int(child), signal.SIGSTOP)
                time.sleep(0.3)  # until gdbleak waits for it
                return process, int(child)
        time.sleep(0.001)
    raise AssertionError("gdbleak has started no GDB")


@pytest.fixture
def held(crashed):
    """A gdbleak that waits 1 s for a GDB that stands still; (process, pid of GDB)."""
    process, gdb = start_held(["sizes", "--core", crashed.core, "--timeout", "1"], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)
    yield process, gdb
    process.kill()
    process.communicate()


def test_a_gdb_that_hangs_is_ended(held):
    process, gdb = held
    output, errors = process.communicate(timeout=LAST_SECONDS)
    assert process.returncode == 2 and not output
    assert "was silent for 1 s" in errors and errors.count("\n") == 1
    assert state(gdb) is None


def test_a_gdb_that_dies(held):
    process, gdb = held
    os.kill(gdb, signal.SIGKILL)
    output, errors = process.communicate(timeout=LAST_SECONDS)
    assert process.returncode == 2 and not output
    assert "SIGKILL" in errors and errors.count("\n") == 1


def test_what_is_no_gdb(crashed):
    assert "/bin/true is no GDB" in fails("sizes", "--core", crashed.core, "--gdb", "/bin/true")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_gdb_as_well(held, number):
    process, gdb = held
    process.send_signal(number)
    output, errors = process.communicate(timeout=LAST_SECONDS)
    assert (process.returncode, output, errors) == (128 + number, "", "")
    assert state(gdb) is None


def test_an_interrupt_deletes_the_copy(waiting, tmp_path):
    copies = tmp_path / "copies"
    copies.mkdir()
    process, gdb = start_held(["sizes", "-p", waiting[0].pid], stderr=subprocess.DEVNULL,
                              env={**os.environ, "TMPDIR": str(copies)})
    assert list(copies.glob("*/core.*"))
    process.send_signal(signal.SIGINT)
    assert process.wait(LAST_SECONDS) == 130
    assert not list(copies.iterdir()) and state(gdb) is None


def test_a_reader_that_has_seen_enough(crashed):
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen([GDBLEAK, "sizes", "--core", crashed.core], stdout=writing,
                               stderr=subprocess.PIPE)
    os.close(writing)
    assert process.communicate(timeout=LAST_SECONDS)[1] == b""
    assert process.returncode == 141


def test_progress_is_shown_on_a_terminal_and_erased(crashed):
    ours, theirs = pty.openpty()
    process, gdb = start_held(["sizes", "--core", crashed.core], stderr=theirs, stdout=subprocess.PIPE)
    time.sleep(1.2)
    os.kill(gdb, signal.SIGCONT)
    assert b"4k-8k" in process.communicate(timeout=LAST_SECONDS)[0]
    os.close(theirs)
    shown = b""
    try:
        while True:
            shown += os.read(ours, 4096)
    except OSError:
        os.close(ours)
    assert b"\r1 s  " in shown and shown.endswith(b"\r\x1b[K")


# -- the driver -----------------------------------------------------------------------------------------

class Listener:
    """Keeps what a Gdb tells."""

    def __init__(self):
        self.output, self.notes, self.steps = b"", [], []

    def report(self, data):
        self.output += data

    def note(self, line):
        self.notes.append(line)

    def progress(self, step):
        self.steps += [step] * (step is not None)


@pytest.fixture
def driven():
    listener = Listener()
    with Gdb(shutil.which("gdb"), 60, listener) as gdb:
        gdb.prepare()
        yield gdb, listener
    assert gdb._process.returncode is not None


def test_the_status_of_the_command_is_told(driven):
    gdb, listener = driven
    assert gdb.status() == 0
    for status in (1, 2, 0):
        assert gdb.run(f"set $_gdbleak_status = {status}") == status
    assert not listener.notes and not listener.output


def test_both_ways_of_output_and_progress(driven):
    gdb, listener = driven
    gdb.run("python from gdbleak import channel")
    gdb.run("python channel.progress('step é'); print('from the \\x1b console é')")
    gdb.run("python s = channel.output(); s.write('0123456789abcdef' * 1000000 + 'é'); s.close()")
    long = b"0123456789abcdef" * 1000000 + "é".encode()
    gdb.run("python gdb.write('a warning\\n', gdb.STDERR)")
    assert listener.steps[-1] == "step é"
    assert listener.output == "from the \x1b console é\n".encode() + long
    assert listener.notes == ["a warning"]


def test_an_error_is_told_once(driven):
    gdb, listener = driven
    with pytest.raises(GdbFailure, match="^Undefined command: \"nonsense\""):
        gdb.run("nonsense")
    assert not listener.notes


def test_what_gdb_writes_past_its_interface_does_not_block_it(driven):
    gdb, listener = driven
    gdb.run("python import os; [os.write(2, b'x' * 1000) for _ in range(1000)]")
    assert not listener.output and not listener.notes


# -- words of the shell command alone -------------------------------------------------------------------

def test_help():
    overview = run("--help")
    assert overview.returncode == 0 and run().stdout == run("help").stdout == overview.stdout
    for word in ("pools", "sizes", "doctor", "gdb-script"):
        assert f"\n  {word} " in overview.stdout
        done = run(word, "--help")
        assert done.returncode == 0 and done.stdout.startswith(f"usage: gdbleak {word}")
        assert run("help", word).stdout == done.stdout
    assert "--core" in run("sizes", "--help").stdout and "--exact" in run("sizes", "--help").stdout


def test_gdb_script_can_be_sourced():
    path = run("gdb-script").stdout.strip()
    done = subprocess.run(["gdb", "-nx", "-batch", "-x", path, "-ex", "print $_gdbleak_status"],
                          capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("= 0\n") and not done.stderr


def test_doctor():
    done = run("doctor")
    assert done.returncode == 0 and not done.stderr
    for told in (shutil.which("gdb"), "its Python 3.", "numpy ", "kernels "):
        assert told in done.stdout


@pytest.fixture
def bare(tmp_path):
    """Function of arguments -> a finished gdbleak without an environment, whose GDB finds no packages."""
    shutil.copytree(ROOT / "gdbleak", tmp_path / "gdbleak")
    (tmp_path / "gdb").write_text(
        "#!/bin/sh\nunset GDBLEAK_PACKAGES\nexec gdb -iex 'python import sys; sys.path[:] = "
        "[p for p in sys.path if not p.endswith(\"-packages\")]' \"$@\"\n")
    (tmp_path / "gdb").chmod(0o755)
    return lambda *arguments: subprocess.run(
        [sys.executable, "-m", "gdbleak.cli", *arguments, "--gdb", tmp_path / "gdb"], capture_output=True,
        text=True, cwd=tmp_path, timeout=60)


def test_doctor_tells_what_mends_it(bare):
    done = bare("doctor")
    assert done.returncode == 2
    assert "numpy missing" in done.stdout and "to mend" in done.stdout
    assert "no numpy" in done.stderr and done.stderr.count("\n") == 1


def test_without_packages_in_gdb(bare, crashed):
    done = bare("sizes", "--core", crashed.core)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("gdbleak: GDB's Python ") and done.stderr.count("\n") == 1


def test_python_settings_for_another_python_do_no_harm(crashed, tmp_path):
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
    start = ("import os, sys; from gdbleak.cli import main; "
             f"os.environ.update(PYTHONHOME='/nonexistent', PYTHONPATH={str(tmp_path)!r}); sys.exit(main())")
    done = subprocess.run([sys.executable, "-c", start, "mallinfo", "--core", crashed.core, "--json", "-"],
                          capture_output=True, text=True, timeout=120)
    assert totals(done.stdout)["uordblks"] == crashed.truth["uordblks"]
