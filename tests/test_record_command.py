"""Commands that are started and recorded from their start to their end, against what they say they did."""
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from tests import record_target
from tests.live_target import children
from tests.record_target import (GDBLEAK, KILL_AT, ROOT, WAIT, by_site, check_as_found, guards, rates, refused,
                                 totals, wait_for)
from tests.targets import build

pytestmark = pytest.mark.skipif(bool(record_target.needs()), reason=record_target.needs() or "-")

EARLY = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void keep(size_t size) { *(volatile char *)malloc(size) = 1; }
__attribute__((constructor, noinline)) static void before_main(void) { keep(123456); }
static void in_main(void) { for (int k = 0; k < 1000; k++) keep(1000); }
static void after_main(void) { keep(6543); fputs("gone\n", stderr); }
int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "7";
    atexit(after_main);
    in_main();
    fprintf(stderr, "told\n");
    puts("said");
    fflush(stdout);
    if (!strcmp(how, "crash")) *(volatile char *)0 = 1;
    if (!strcmp(how, "exec")) execl("/proc/self/exe", argv[0], "7", NULL);
    if (!strcmp(how, "wait")) for (;;) pause();
    return atoi(how);
}
"""
TRUTH = {"before_main": 123456, "in_main": 1_000_000, "after_main": 6543}


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    """A program that allocates before main and after it."""
    directory = tmp_path_factory.mktemp("early")
    (directory / "early.c").write_text(EARLY)
    subprocess.run(["gcc", "-O1", "-fno-inline", "-w", "-o", directory / "early", directory / "early.c"], check=True)
    return directory / "early"


def start(word, command, *options, **settings):
    """The shell command that records a command, started in a session of its own."""
    return subprocess.Popen([*GDBLEAK, word, "-c", str(command), *map(str, options)], cwd=ROOT, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **settings)


def recorded(word, command, tmp_path, *options, said=""):
    """(items of the report, folded stacks, standard output, standard error) of a recording that must succeed."""
    report, folded = tmp_path / "report.json", tmp_path / "graph.folded"
    process = start(word, command, "--json", report, "--flame", folded, *options)
    output, errors = process.communicate(said, timeout=WAIT)
    assert process.returncode == 0, errors
    stacks = [line.rsplit(" ", 1) for line in folded.read_text().splitlines()]
    return json.loads(report.read_text()), [(stack.split(";"), int(weight)) for stack, weight in stacks], output, errors


def running(process, exe):
    """The child of a process that runs an executable."""
    for pid in children(process.pid):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/exe") == str(exe):
                return pid


def close(found, truth):
    """Whether the sums of samples, each of which was taken with a probability of nearly 1, are the truth."""
    assert set(found) - {""} == set(truth)
    return all(abs(found[site] - size) <= 1 for site, size in truth.items())


@pytest.mark.parametrize("flags", [("-O2",), ("-O2", "-static"), ("-O2", "-static-pie"), ("-O2", "-no-pie")])
def test_leaks_of_a_command_equal_the_truth(flags, tmp_path):
    items, stacks, output, errors = recorded("sample", rates(*flags), tmp_path, "--every", "1",
                                             said="go 4 2000 0\nquit\n")
    answer = json.loads(output.splitlines()[1])
    truth = {site: size for site, (size, _) in ((name, numbers) for name, numbers in answer.items()
                                                if name.startswith("leak_"))}
    assert close(by_site(stacks, truth), truth)
    told = totals(items)
    assert told["ending"] == "ended with status 0" and told["dropped"] == told["thinned"] == 0
    assert re.fullmatch(r"recording process \d+ until it ends\n", errors)


@pytest.mark.parametrize("flags", [("-O2",), ("-O2", "-static")])
def test_every_call_of_a_command_equals_the_truth(flags, tmp_path):
    items, stacks, output, _ = recorded("sample", rates(*flags), tmp_path, "--exact", said="go 4 300 0\nquit\n")
    answer = json.loads(output.splitlines()[1])
    truth = {site: numbers[0] for site, numbers in answer.items() if site.startswith("leak_")}
    found = by_site(stacks, truth)
    assert {site: found.get(site) for site in truth} == truth
    told = totals(items)
    assert told["mode"] == "exact" and told["interval"] == 0 and told["ending"] == "ended with status 0"
    assert told["bytes"] == sum(truth.values()) + found.get("", 0)
    assert "recorded from its start, and stopped at each call: how much slower that made it is not known\n" in output


@pytest.mark.parametrize("flags", [("-O2",), ("-O1", "-static")])
def test_mappings_of_a_command_equal_the_truth(flags, tmp_path):
    items, stacks, output, _ = recorded("mmaps", build("record_maps", *flags).path, tmp_path, said="go\nquit\n")
    truth = json.loads(output.splitlines()[1])
    found = by_site(stacks, truth)
    assert {site: found.get(site, 0) for site in truth} == truth
    assert totals(items)["dropped"] == 0 and totals(items)["ending"] == "ended with status 0"


ALL = pytest.mark.parametrize("mode", [("--every", "1"), ("--exact",)], ids=["sampled", "exact"])


@ALL
@pytest.mark.parametrize("how, ending, lacks", [
    ("7", "ended with status 7", []), ("crash", "was ended by signal 11 (SIGSEGV)", ["after_main"]),
    ("exec", "ended with status 7", [])])
def test_from_the_first_allocation_to_the_last(early, how, ending, lacks, mode, tmp_path):
    """Before main and behind it; whatever ends it; and of the program that it becomes, that alone."""
    items, stacks, output, errors = recorded("sample", f"{early} {how}", tmp_path, *mode)
    assert close(by_site(stacks, TRUTH), {site: size for site, size in TRUTH.items() if site not in lacks})
    assert totals(items)["ending"] == ending and f"\nthe command {ending}\n" in output
    assert errors.count("recording process") == (2 if how == "exec" else 1)


@ALL
@pytest.mark.parametrize("wrapper", ["env A=1 %s 7", "sh -c 'exec \"$0\" 7' %s", "nice %s 7"])
def test_what_a_command_becomes_is_recorded(early, wrapper, mode, tmp_path):
    items, stacks, _, errors = recorded("sample", wrapper % early, tmp_path, *mode)
    assert close(by_site(stacks, TRUTH), TRUTH)
    assert "runs another program now: that is recorded, from its start\n" in errors


def test_output_of_a_command_is_left_alone(early, tmp_path):
    """But where the report is for programs to read, which is then alone on standard output."""
    _, _, output, errors = recorded("sample", f"{early} 0", tmp_path)
    assert output.startswith("said\nMemory Leak Flame Graph for early") and "told\n" in errors and "said" not in errors
    process = start("sample", f"{early} 3", "--json", "-")
    output, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 0 and totals(json.loads(output))["ending"] == "ended with status 3"
    assert "said\n" in errors and "told\n" in errors


@pytest.mark.parametrize("word, options", [("sample", ["--every", "1", "--grace", "0.2"]),
                                           ("sample", ["--exact", "--grace", "0.2"]), ("mmaps", [])])
def test_a_command_is_ended_after_the_window(early, word, options, tmp_path):
    items, stacks, output, _ = recorded(word, f"{early} wait", tmp_path, "--seconds", "1", *options)
    assert totals(items)["ending"] == "was ended by signal 15 (SIGTERM)"
    assert 1 <= totals(items)["seconds"] < WAIT
    assert "the command was ended by signal 15 (SIGTERM), after the recording\n" in output
    if word == "sample":
        assert close(by_site(stacks, TRUTH), {site: TRUTH[site] for site in ("before_main", "in_main")})


@ALL
def test_control_c_ends_the_window(early, mode):
    """As the terminal sends it, to both; the command here ignores it."""
    process = start("sample", f"sh -c \"trap '' INT; exec {early} wait\"", *mode, "--json", "-")
    while process.stderr.readline() != "said\n":
        pass
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 0, errors
    told = totals(json.loads(output))
    assert told["ending"] == "was ended by signal 15 (SIGTERM)" and told["bytes"] > 1_100_000


def test_control_c_again_leaves_no_tracer_behind():
    """The tracer's thread is waited for however often it comes: what it holds is released by its end alone."""
    code = """
import os, signal, time
from gdbleak.target.ptrace import on_own_thread
done, calls = [], []
def trace():
    for k in range(3):
        os.kill(os.getpid(), signal.SIGINT)
        end = time.monotonic() + 10
        while len(calls) <= k and time.monotonic() < end:
            time.sleep(0.01)
    time.sleep(0.2)
    done.append(1)
try:
    on_own_thread(trace, lambda: calls.append(1))
except KeyboardInterrupt:
    print(len(done), len(calls))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=WAIT)
    assert done.stdout == "1 3\n", done


def test_control_c_hurries_the_end(early):
    """While it waits for a command that does not obey: no command is left behind."""
    process = start("sample", f"sh -c \"trap '' INT TERM; exec {early} wait\"", "--seconds", "0.2", "--grace", "0")
    while process.stderr.readline() != "told\n":
        pass
    pid = running(process, early)
    wait_for(lambda: not guards(pid) and
             "TracerPid:\t0\n" in open(f"/proc/{pid}/status").read(), "the recording to be over")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=WAIT)
    assert not os.path.exists(f"/proc/{pid}")
    assert process.returncode in (0, 130), errors       # the latter: it was just about to end it
    assert ("the command was ended by signal 9 (SIGKILL), after the recording\n" in output) == (process.returncode == 0)


@ALL
def test_the_death_of_the_tool_leaves_a_command_as_it_was(early, mode):
    process = start("sample", f"{early} wait", *mode)
    while process.stderr.readline() != "told\n":
        pass
    pid = running(process, early)
    try:
        process.kill()
        process.wait()
        wait_for(lambda: "TracerPid:\t0" in open(f"/proc/{pid}/status").read(), "the kernel to let it go")
        check_as_found(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        process.communicate()


def killed_at(early, who, step, mode):
    """Standard error of a recording in which the tool, or its guard, is killed at a step, when all have ended."""
    process = subprocess.Popen([*KILL_AT, who, str(step), "sample", "-c", f"{early} 0", *mode], cwd=ROOT, text=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return process.communicate(timeout=WAIT)[1]


@ALL
@pytest.mark.parametrize("who", ["tool", "guard"])
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_command_survives_the_death_of_the_tool_at_any_step(early, who, part, mode):
    """While it is held, injected, patched, followed, and at its end: it goes on, and ends as it does by itself."""
    steps = int(re.search(r"steps: (\d+)", killed_at(early, "count", 0, mode))[1])
    assert steps > 50
    for step in range(1 + part, steps + 1, max(4, steps // 250) if part else steps // 6):
        assert killed_at(early, who, step, mode).count("gone\n") == 1, step


@ALL
def test_many_threads_that_come_and_go(mode, tmp_path):
    """Each start of a thread is a stop of the tracer's, none is lost."""
    (tmp_path / "threads.c").write_text(r"""
        #include <pthread.h>
        #include <stdlib.h>
        static void *leak(void *p) { *(volatile char *)malloc(500) = 1; return p; }
        int main(void)
        {
            pthread_t threads[4];
            for (int k = 0; k < 500; k++) {
                for (int i = 0; i < 4; i++) if (pthread_create(&threads[i], NULL, leak, NULL)) return 1;
                for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
            }
            return 0;
        }""")
    subprocess.run(["gcc", "-O1", "-pthread", "-o", tmp_path / "threads", tmp_path / "threads.c"], check=True)
    items, stacks, _, _ = recorded("sample", tmp_path / "threads", tmp_path, *mode)
    assert close(by_site(stacks, {"leak": 0}), {"leak": 2000 * 500})
    assert totals(items)["ending"] == "ended with status 0"


@ALL
def test_a_thread_other_than_the_first_becomes_a_program(mode, tmp_path):
    """Again and again, while others make threads: of some of these nobody tells before all are killed."""
    (tmp_path / "becomes.c").write_text(r"""
        #include <pthread.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <unistd.h>
        static char left[20];
        static void *nothing(void *p) { return p; }
        static void *make(void *p)
        {
            for (pthread_t thread; ;) if (!pthread_create(&thread, NULL, nothing, NULL)) pthread_join(thread, NULL);
        }
        static void *become(void *p)
        {
            usleep(getpid() * atoi(left) % 3000);
            execl("/proc/thread-self/exe", "becomes", left, NULL);
            return p;
        }
        static void leak(void) { *(volatile char *)malloc(5000) = 1; }
        int main(int argc, char **argv)
        {
            pthread_t thread;
            leak();
            sprintf(left, "%d", atoi(argv[1]) - 1);
            if (left[0] == '-') return 7;
            for (int k = 0; k < 3; k++) pthread_create(&thread, NULL, make, NULL);
            pthread_create(&thread, NULL, become, NULL);
            if (atoi(left) & 1) pthread_exit(NULL);
            for (;;) pause();
        }""")
    subprocess.run(["gcc", "-O1", "-fno-inline", "-pthread", "-w", "-o", tmp_path / "becomes", tmp_path / "becomes.c"],
                   check=True)
    items, stacks, _, errors = recorded("sample", f"{tmp_path / 'becomes'} 25", tmp_path, *mode)
    assert close(by_site(stacks, {"leak": 0}), {"leak": 5000})
    assert totals(items)["ending"] == "ended with status 7" and errors.count("recording process") == 26


@pytest.mark.parametrize("words, told", [
    (["sample", "-c", "no-such-program"], "cannot start no-such-program: No such file"),
    (["mmaps", "-c", ""], "an empty command"), (["sample", "-c", "'x"], "no closing quotation"),
    (["sample", "-c", "true", "-p", "1"], "not allowed"), (["sample", "-c", "true", "--exe", "/bin/true"], "not allowed"),
    (["sample", "-c", "true", "--exact", "--lua"], "--lua is for the sampled mode"),
    (["sample", "-c", "true", "--lua"], "--lua is for a process that runs already"),
    (["sample", "-c", "true", "--pools"], "no symbol tells where nginx's pools are made"),
    (["sample", "-c", "true", "--seconds", "-1"], "--seconds"),
    (["mmaps"], "give -p PID, -p -PGID, --exe PATH, or -c 'COMMAND'")])
def test_a_wrong_command_line_is_one_line(words, told):
    assert told in refused(*words)


def test_a_program_whose_library_is_missing(early, tmp_path):
    (tmp_path / "part.c").write_text("int part(void) { return 0; }\n")
    (tmp_path / "whole.c").write_text("int part(void);\nint main(void) { return part(); }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "part.c", "-o", "libpart.so"], cwd=tmp_path, check=True)
    subprocess.run(["gcc", "whole.c", "-o", "whole", "-L.", "-lpart"], cwd=tmp_path, check=True)
    (tmp_path / "libpart.so").unlink()
    process = start("sample", tmp_path / "whole")
    output, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 2 and output == ""
    assert errors.splitlines()[-1] == ("gdbleak: nothing was recorded: the command ended with status 127 before its "
                                       "libraries were loaded")


@pytest.mark.skipif(not shutil.which("python3"), reason="needs python3")
def test_a_large_program_from_its_start(tmp_path):
    """An interpreter, which maps many libraries: what it holds at its end is what it says it made."""
    code = "import json, ctypes; libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p; " \
           "print(sum(bool(libc.malloc(ctypes.c_size_t(70000 + 16 * k))) for k in range(50)))"
    (tmp_path / "code.py").write_text(code)
    _, stacks, output, _ = recorded("sample", f"python3 {tmp_path / 'code.py'}", tmp_path, "--rate", "100000")
    assert output.startswith("50\n")
    by_ffi = sum(weight for frames, weight in stacks if any("ffi_call" in frame or "libffi" in frame for frame in frames))
    assert by_ffi >= sum(70000 + 16 * k for k in range(50)) * 0.999
