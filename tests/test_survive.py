"""The target lives and is left as it was found, whatever dies and whenever: the tool, its guard, both; and targets that
exit, exec, fork, are stopped or get another tracer in the middle."""
import os
import random
import re
import signal
import subprocess
import threading
import time

import pytest

from gdbleak.record import guard, inject, tracee
from gdbleak.record.agent import Agent
from gdbleak.record.install import Installation, Target
from gdbleak.target.live import mappings, without
from gdbleak.target.ptrace import LiveError
from tests import nginx_target, record_target
from tests.record_target import (KILL_AT, WAIT, Recorder, Subject, changed_text, check_as_found, guards, kill,
                                 leftovers, wait_for)
from tests.targets import build
from tests.test_inject import make

pytestmark = pytest.mark.skipif(bool(record_target.needs()), reason=record_target.needs() or "-")

WAYS = [("sample", "--grace", "0.05"), ("sample", "--exact", "--grace", "0.05"), ("mmaps",)]
VICTIMS = ["tool", "tool", "tool late", "guard", "both"]
ROUNDS = [pytest.param(10, id="10"), pytest.param(200, id="200", marks=pytest.mark.slow)]


class Busy:
    """Threads that allocate without a pause, and say every tenth of a second how often."""

    def __init__(self):
        self.subject = Subject(build("record_bound", "-O2").path, 3)
        self.pid = self.subject.pid
        self.lines = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for _ in self.subject.process.stdout:
            self.lines += 1

    def check(self):
        """It goes on."""
        before = self.lines
        wait_for(lambda: self.lines > before + 1 or not self.subject.is_alive(), "the program to go on")
        assert self.subject.is_alive()

    def close(self):
        self.subject.process.kill()
        self.subject.process.wait()


class Served:
    """nginx under load: wrk, and a client that checks every answer."""

    def __init__(self, directory):
        nginx_target.build("module")
        self.nginx = nginx_target.Nginx(directory / "nginx", block="300")
        self.pid = self.nginx.worker
        url = f"http://127.0.0.1:{self.nginx.port}/leak/nothing"
        self.wrk = subprocess.Popen(["wrk", "-t1", "-c10", "-d100000", url], stdout=subprocess.PIPE, text=True)

    def check(self):
        """It is the same worker, and answers."""
        for _ in range(20):
            assert self.nginx.get("/leak/nothing") == b"done\n"
        assert self.nginx.stats()["pid"] == self.pid

    def close(self):
        """No request was lost."""
        self.wrk.send_signal(signal.SIGINT)
        said = self.wrk.communicate(timeout=WAIT)[0]
        self.check()
        log = (self.nginx.prefix / "error.log").read_text()
        self.nginx.close()
        assert int(re.search(r"(\d+) requests in", said)[1]) > 100
        assert "Socket errors" not in said and "Non-2xx" not in said, said
        assert "exited on signal" not in log and "alert" not in log, log


@pytest.fixture(params=["busy", "nginx"])
def target(request, tmp_path):
    made = Busy() if request.param == "busy" else Served(tmp_path)
    yield made
    made.close()


def steps_of(target, way):
    """How many steps a whole run takes."""
    recorder = Recorder(*way[:1], target.pid, *way[1:], "--seconds", "0.1",
                        through=[*KILL_AT, "count", "0"])
    return int(re.search(r"steps: (\d+)", recorder.finish()[1])[1])


def is_untouched(pid, mapping):
    """Whether nothing was written there."""
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        memory.seek(mapping.start)
        return not any(memory.read(mapping.end - mapping.start))


@pytest.mark.parametrize("rounds", ROUNDS)
def test_killed_at_any_moment(target, rounds):
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    print("seed", seed)
    steps = {way: steps_of(target, way) for way in WAYS}
    known = []
    for number in range(rounds):
        way, victim = WAYS[number % 3], VICTIMS[number % len(VICTIMS)]
        # Most steps of the exact mode are its events: half of the rounds stay with installing.
        at = chance.randint(1, min(steps[way], 400) if chance.random() < 0.5 else steps[way])
        print("round", number, way, victim, at)
        who = victim.split()[0] if victim != "tool late" else "count"
        through = [*KILL_AT, "tool" if victim == "both" else who, str(at)]
        recorder = Recorder(way[0], target.pid, *way[1:], "--seconds", "0.1", through=through)
        if victim == "tool late":                   # while it records, or leaves
            recorder.began.wait(WAIT)
            time.sleep(chance.uniform(0, 0.4))
            recorder.process.kill()
        if victim == "both":
            wait_for(lambda: recorder.process.poll() is not None, "the tool's end")
            for process in guards(target.pid):
                os.kill(process, signal.SIGKILL)
            target.check()
            Recorder("mmaps", target.pid, "--seconds", "0.05").finish()     # takes out what is left
        recorder.process.wait(WAIT)
        wait_for(lambda: not guards(target.pid), "the guard to end")
        assert changed_text(target.pid) == []
        # Killed together between the system call and the first write, they leave memory that nobody can recognize.
        left = leftovers(target.pid)
        assert left == known or victim == "both" and is_untouched(target.pid, left[-1])
        known = left
        target.check()


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_guard_is_killed_while_it_records(way):
    """Then the tool takes the agent out itself."""
    target = Busy()
    try:
        recorder = Recorder(way[0], target.pid, *way[1:], "--seconds", "0.5")
        recorder.wait_begin()
        for process in guards(target.pid):
            os.kill(process, signal.SIGKILL)
        recorder.finish()
        check_as_found(target.pid)
        target.check()
    finally:
        target.close()


def test_one_recording_at_a_time():
    target = Busy()
    try:
        recorder = Recorder("sample", target.pid, "--seconds", "600", "--grace", "0")
        recorder.wait_begin()
        second = Recorder("mmaps", target.pid, "--seconds", "0.1")
        assert "is being recorded already" in second.finish(status=2)[1]
        end(recorder)
        check_as_found(target.pid)
    finally:
        target.close()


RESTLESS = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
static void busy(void)
{
    for (int k = 0; k < 200; k++) { free(malloc(100 + k)); munmap(mmap(0, 4096, 3, 34, -1, 0), 4096); }
}
static void *thread(void *p) { for (;;) { busy(); usleep(100); } }
static void *brief(void *p) { busy(); return p; }
int main(int argc, char **argv)
{
    pthread_t id;
    pid_t child = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("ready");
    if (!strcmp(argv[1], "again")) for (;;) pause();
    pthread_create(&id, NULL, thread, NULL);
    for (char line[50]; fgets(line, 50, stdin);) {
        if (*line == 'x') exit(7);
        if (*line == 'e') execl("/proc/self/exe", argv[0], "again", NULL);
        if (*line == 'l') pthread_exit(NULL);       /* the main thread ends, the other goes on */
        if (*line == 'f') {                         /* children that live and work on */
            child = fork();
            if (!child) for (;;) { busy(); usleep(1000); }
            for (int k = 0; k < 30; k++) {
                pid_t brief = k % 2 ? fork() : vfork();
                if (!brief) { if (k % 2) busy(); _exit(3); }
                int status;
                waitpid(brief, &status, 0);
                if (!WIFEXITED(status) || WEXITSTATUS(status) != 3) printf("child died: %x\n", status);
            }
            printf("%d\n", child);
        }
        if (*line == 't')                           /* threads that come and go */
            for (int k = 0; k < 300; k++) { pthread_create(&id, NULL, brief, NULL); pthread_join(id, NULL); }
        puts("done");
    }
}
"""


@pytest.fixture
def restless(tmp_path):
    (tmp_path / "restless.c").write_text(RESTLESS)
    subprocess.run(["gcc", "-w", "-O1", "-pthread", "-o", tmp_path / "restless", tmp_path / "restless.c"], check=True)
    with Subject(tmp_path / "restless", "x") as subject:
        subject.line()
        yield subject


def begin(subject, way, seconds):
    recorder = Recorder(way[0], subject.pid, *way[1:], "--seconds", seconds)
    recorder.wait_begin()
    return recorder


def end(recorder):
    """End its window now: what it prints."""
    recorder.process.send_signal(signal.SIGINT)
    return recorder.finish()[0]


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_target_exits(restless, way):
    recorder = begin(restless, way, 30)
    restless.say("x")
    assert restless.process.wait(WAIT) == 7
    assert f"process {restless.pid} has ended" in recorder.finish(status=2)[1]
    wait_for(lambda: not guards(restless.pid), "the guard to end")


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_target_is_killed(restless, way):
    recorder = begin(restless, way, 30)
    restless.process.kill()
    assert restless.process.wait(WAIT) == -signal.SIGKILL
    assert f"process {restless.pid} has ended" in recorder.finish(status=2)[1]
    wait_for(lambda: not guards(restless.pid), "the guard to end")


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_target_runs_another_program(restless, way):
    recorder = begin(restless, way, 30)
    restless.say("e")
    assert restless.line() == "ready\n"
    assert "runs another program now" in recorder.finish(status=2)[1]
    check_as_found(restless.pid)
    assert restless.is_alive()


def test_another_program_is_not_changed(restless):
    """The one that the target runs by the time of the stop."""
    installation = Installation(Target(restless.pid), Agent())
    restless.say("e")
    assert restless.line() == "ready\n"
    place = 0x100000000
    with pytest.raises(LiveError, match="runs another program now"):
        installation.halted(lambda halted: inject.make_calls(halted, [(inject.MMAP, place, 4096, 3, 0x100022, -1, 0)]))
    installation.remove()
    check_as_found(restless.pid)
    assert place not in {m.start for m in mappings(restless.pid)} and restless.is_alive()


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_target_forks(restless, way):
    """The children live, and are left as they were, too."""
    recorder = begin(restless, way, 600)
    restless.say("f")
    child = int(restless.line())
    try:
        assert restless.line() == "done\n"
        end(recorder)
        check_as_found(restless.pid)
        assert os.path.exists(f"/proc/{child}/exe")
        assert changed_text(child) == []
        assert leftovers(child) == []
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("option, where", [
    ("--every=1", "plain"), ("--every=1", "handler"), ("--every=1", "fork"),
    ("--exact", "plain"), ("--exact", "handler"), ("--exact", "fork"), ("--exact", "trap")])
def test_thread_is_within(option, where):
    """The agent stays as long as a thread is to return into it, and no longer, whatever words are left on its stack."""
    with Subject(build("record_inside", "-O1").path) as subject:
        subject.line()
        recorder = begin(subject, ("sample", option, "--grace", "0"), 600)
        subject.say(where[0])
        child = int(subject.line().split()[1])
        pids = [subject.pid, child] if child else [subject.pid]
        try:
            assert "stay mapped: a thread is within the agent" in end(recorder)
            assert changed_text(subject.pid) == [] and leftovers(subject.pid) != []
            subject.process.send_signal(signal.SIGUSR2)
            assert [subject.line() for _ in pids] == ["done\n" for _ in pids]
            for pid in pids:
                check_as_found(pid)
            assert subject.is_alive()
        finally:
            for pid in pids[1:]:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2]], ids=" ".join)
def test_joined_with_what_the_target_maps_beside_it(way):
    """The kernel makes one mapping of two that touch: only ours is unmapped."""
    with Subject(build("record_inside", "-O1").path) as subject:
        subject.line()
        recorder = begin(subject, way, 600)
        memory = tracee.Memory(subject.pid)
        regions = [tuple(region) for region in guard.found_in(memory).regions]
        memory.close()
        pages = [at for start, end in regions for at in (start - 4096, end)]
        flags = [0x100022, 0x100022, 0x104022, 0x104022]        # as the regions have them
        calls = [(inject.MMAP, at, 4096, 3, flag, -1, 0) for at, flag in zip(pages, flags)]
        assert make(subject.pid, calls) == pages
        assert not {start for start, _ in regions} & {m.start for m in mappings(subject.pid)}
        end(recorder)
        check_as_found(subject.pid)
        now = [(m.start, m.end) for m in mappings(subject.pid)]
        assert all(without([region], now) == [region] for region in regions)
        assert without([(at, at + 4096) for at in sorted(pages)], now) == []
        assert subject.is_alive()


def test_text_is_changed_by_something_else(restless):
    """What it put there may still lead to the agent, which stays until that is gone."""
    address = Target(restless.pid).function("pvalloc").address      # which is never called
    recorder = begin(restless, WAYS[0], 600)
    with open(f"/proc/{restless.pid}/mem", "r+b", 0) as memory:
        def put(byte):
            os.pwrite(memory.fileno(), byte, address)

        assert os.pread(memory.fileno(), 1, address) == b"\xe9"
        put(b"\x90")
        kill(recorder.process)
        wait_for(lambda: {int(at, 16) - address for _, at in changed_text(restless.pid)} <= set(range(5)), "the guard")
        time.sleep(0.5)
        assert leftovers(restless.pid) != [] and guards(restless.pid) != []
        put(b"\xe9")
        check_as_found(restless.pid)
    restless.say("t")
    assert restless.line() == "done\n"


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_threads_come_and_go(restless, way):
    recorder = begin(restless, way, 600)
    restless.say("t")
    assert restless.line() == "done\n"
    end(recorder)
    check_as_found(restless.pid)
    assert restless.is_alive()


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_main_thread_has_ended(restless, way):
    restless.say("l")
    wait_for(lambda: open(f"/proc/{restless.pid}/stat").read().rsplit(")", 1)[1].split()[0] == "Z", "its end")
    begin(restless, way, 0.5).finish()
    wait_for(lambda: not guards(restless.pid), "the guard to end")
    other, = {int(name) for name in os.listdir(f"/proc/{restless.pid}/task")} - {restless.pid}
    assert changed_text(other) == [] and leftovers(other) == []


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_target_is_stopped_and_continued(restless, way):
    def state():
        return open(f"/proc/{restless.pid}/stat").read().rsplit(")", 1)[1].split()[0]

    recorder = begin(restless, way, 1)
    restless.process.send_signal(signal.SIGSTOP)
    recorder.finish()
    wait_for(lambda: state() == "T", "it to be stopped, as it was asked to")
    assert changed_text(restless.pid) == []
    restless.process.send_signal(signal.SIGCONT)        # a thread may have been within the agent
    check_as_found(restless.pid)
    restless.say("t")
    assert restless.line() == "done\n"
    restless.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: state() == "T", "it to be stopped")
    assert "is stopped: continue it first" in Recorder(way[0], restless.pid, *way[1:]).finish(status=2)[1]
    assert state() == "T"
    restless.process.send_signal(signal.SIGCONT)
    check_as_found(restless.pid)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2]], ids=" ".join)
def test_another_tracer_comes(restless, way):
    """A debugger attaches in the window and is there at its end: the text is restored when it has left."""
    recorder = begin(restless, way, 600)
    tracer = subprocess.Popen(["gdb", "-nx", "-q", "-p", str(restless.pid)], stdin=subprocess.PIPE,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: f"TracerPid:\t{tracer.pid}" in open(f"/proc/{restless.pid}/status").read(), "GDB")
    recorder.process.send_signal(signal.SIGKILL)
    recorder.process.wait()
    time.sleep(0.3)
    assert guards(restless.pid) and restless.is_alive()
    tracer.communicate(b"detach\nquit\n", timeout=WAIT)
    check_as_found(restless.pid)
    restless.say("t")
    assert restless.line() == "done\n"
