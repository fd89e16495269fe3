"""What seccomp filters do with a call, against what the kernel does; and processes under such, recorded or refused."""
import ctypes
import errno
import os
import random
import re
import signal
import struct
import subprocess

import pytest

from gdbleak.record import seccomp
from gdbleak.record.sample import Options, Sampling
from gdbleak.record.seccomp import ALLOW, ERRNO, KILL_PROCESS, KILL_THREAD
from gdbleak.target.ptrace import LiveError
from tests import record_target
from tests.record_target import Subject, by_site, check_as_found, record, refused

pytestmark = pytest.mark.skipif(bool(record_target.needs()), reason=record_target.needs() or "-")

LIBC = ctypes.CDLL(None, use_errno=True)
UNUSED = 5000           # system calls from here on are there for the filters
TRAP = 0x30000


def load(offset):
    return 0x20, 0, 0, offset


def give_back(action):
    return 0x06, 0, 0, action


def equals(number, then, otherwise=0):
    return 0x15, then, otherwise, number


def packed(instructions):
    return b"".join(struct.pack("<HBBI", *each) for each in instructions)


def apply(program):
    """Put this process under a filter. OSError."""
    buffer = ctypes.create_string_buffer(program)
    descriptor = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer)))
    LIBC.prctl(38, 1, 0, 0, 0)
    if LIBC.prctl(22, 2, descriptor):
        raise OSError(ctypes.get_errno(), "")


def random_filter(chance):
    """Instructions of a filter that lets the real calls pass."""
    body, length = [], chance.randrange(2, 24)
    for at in range(length):
        left = length - at                                  # instructions behind this one, the last one counted
        number = chance.choice([0, 1, 2, 7, UNUSED, UNUSED + 1, UNUSED + 2, chance.getrandbits(32)])
        comparison = (chance.choice([0x15, 0x25, 0x35, 0x45, 0x1d, 0x2d, 0x3d, 0x4d]), chance.randrange(left),
                      chance.randrange(left), number)
        value = load(chance.choice([0, 0, 0, 4, 8, 16, 16, 24, 28]))
        body.append(chance.choice([
            value, value, value, value, comparison, comparison, comparison, comparison,
            (0x80, 0, 0, 0), (0x00, 0, 0, number), (0x01, 0, 0, number),
            (0x60, 0, 0, chance.randrange(3)), (0x61, 0, 0, chance.randrange(3)), (0x81, 0, 0, 0),
            (0x02, 0, 0, chance.randrange(3)), (0x03, 0, 0, chance.randrange(3)), (0x07, 0, 0, 0), (0x87, 0, 0, 0),
            (chance.choice([0x04, 0x14, 0x24, 0x34, 0x44, 0x54, 0xa4]) | chance.choice([0, 8]), 0, 0, number),
            (chance.choice([0x64, 0x74]), 0, 0, chance.randrange(32)), (0x84, 0, 0, 0),
            (0x05, 0, 0, chance.randrange(left)),
            give_back(chance.choice([ALLOW, ERRNO | 13, TRAP]))]))
    for _ in range(chance.randrange(3)):
        body[:0] = [load(chance.choice([16, 24])),
                    (0x45, chance.randrange(len(body)), chance.randrange(len(body)), 1 << chance.randrange(3))]
    return [load(0), (0x35, 1, 0, UNUSED), give_back(ALLOW), *body,
            give_back(chance.choice([ALLOW, ERRNO | 13, TRAP]))]


def done_by_kernel(program, number, arguments):
    """The action of a filter for a call; None when it is no valid filter."""
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGSYS, signal.SIG_DFL)
            apply(program)
        except OSError:
            os._exit(3)
        LIBC.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments))
        os._exit({errno.ENOSYS: 0, 13: 1}.get(ctypes.get_errno(), 2))
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):                          # TRAP, too, without a handler
        return "ended"
    return {0: ALLOW, 1: ERRNO, 2: "another error", 3: None}[os.WEXITSTATUS(status)]


@pytest.mark.parametrize("rounds", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_filters_are_followed_as_by_the_kernel(rounds):
    """Whatever the arguments are, the kernel's action is among the foreseen; and where one is foreseen, it is that."""
    tried, certain, uncertain = 0, 0, 0
    for seed in range(rounds):
        chance = random.Random(seed)
        program, number = packed(random_filter(chance)), chance.choice([UNUSED, UNUSED + 1, UNUSED + 2])
        arguments = [chance.choice([0, 1, 7, chance.getrandbits(64)]) for _ in range(6)]
        done = done_by_kernel(program, number, arguments)
        if done is None:
            continue
        foreseen = {"ended" if action in (TRAP, KILL_PROCESS, KILL_THREAD) else action
                    for action in seccomp.actions(program, number)}
        assert done in foreseen, (seed, done, foreseen)
        tried, certain, uncertain = tried + 1, certain + (len(foreseen) == 1), uncertain + (len(foreseen) > 1)
    assert tried > rounds // 4 and certain > tried // 3 and uncertain > tried // 20


def test_values_that_depend_on_arguments():
    """Both ways of a comparison with an argument are foreseen, of one with the number or the architecture one."""
    masked = packed([load(16), (0x54, 0, 0, 4), equals(0, 1), give_back(KILL_PROCESS), give_back(ALLOW)])
    assert seccomp.actions(masked, 10) == {KILL_PROCESS, ALLOW}
    machine = packed([load(4), equals(0xc000003e, 1), give_back(KILL_PROCESS), load(0), equals(10, 1),
                      give_back(ALLOW), give_back(ERRNO | 1)])
    assert seccomp.actions(machine, 10) == {ERRNO} and seccomp.actions(machine, 11) == {ALLOW}
    many = packed([each for k in range(16) for each in (load(16), (0x45, 0, 1, 1 << k), (0x02, 0, 0, k))]
                  + [each for k in range(16) for each in (load(24), (0x45, 0, 2, 1 << k), (0x00, 0, 0, k),
                                                         (0x02, 0, 0, k))] + [give_back(ALLOW)])
    assert seccomp.actions(many, 10) is None


PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
static __attribute__((noinline)) void leak(void) { *(volatile char *)malloc(1000) = 1; }
static __attribute__((noinline)) void map(void) { *(volatile char *)mmap(0, 8192, 3, 0x22, -1, 0) = 1; }
static int restrict_by(int how, void *filter, int length)
{
    unsigned allow = 0x7fff0000;
    switch (how) {
    case 'p': return length ? prctl(PR_SET_SECCOMP, 2, filter) : prctl(PR_SET_SECCOMP, 1);
    case 'c': return syscall(SYS_prctl, PR_SET_SECCOMP, length ? 2 : 1, filter);
    case 'q': return !prctl(PR_SET_SECCOMP, 2, NULL) || syscall(SYS_seccomp, 2, 0, &allow);
    case 's': return syscall(SYS_seccomp, length != 0, 0, length ? filter : 0);
    default: {
        long result = SYS_seccomp;
        __asm__ volatile("syscall" : "+a"(result) : "D"(1), "S"(0), "d"(filter) : "rcx", "r11", "memory");
        return result;
    }
    }
}
int main(int argc, char **argv)
{
    unsigned char instructions[4096];
    struct { unsigned short length; unsigned char *at; } filter = { 0, instructions };
    for (const char *at = argv[1]; *at; at += 2) {
        unsigned byte;
        sscanf(at, "%2x", &byte);
        instructions[filter.length++] = byte;
    }
    filter.length /= 8;
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    puts("ready");
    fflush(stdout);
    char line[16] = { 0 };
    if (argc < 3 && restrict_by('p', &filter, filter.length))
        return 2;
    while (read(0, line, sizeof line) > 0) {
        if (argc > 2 && line[0] != 'g') {
            for (int k = 0; k < 100; k++) leak(), map();
            if (restrict_by(line[0], &filter, filter.length))
                return 2;
        }
        for (int k = 0; k < 100; k++) leak(), map();
        write(1, "{}\n", 3);
    }
}
"""
NEEDED = {0: "read", 1: "write", 9: "mmap", 11: "munmap", 12: "brk", 14: "rt_sigprocmask", 15: "rt_sigreturn",
          39: "getpid", 219: "restart_syscall", 310: "process_vm_readv", 35: "nanosleep", 13: "rt_sigaction"}


def only(calls, others):
    """A filter as containers have it: of this machine, these calls; others get an action."""
    listed = [each for number in calls for each in (equals(number, 0, 1), give_back(ALLOW))]
    return [load(4), equals(0xc000003e, 1), give_back(KILL_PROCESS), load(0), *listed, give_back(others)]


def but(number, action):
    return [load(0), equals(number, 0, 1), give_back(action), give_back(ALLOW)]


NO_NEW_CODE = [load(0), equals(10, 0, 3), load(32), (0x45, 0, 1, 4)]      # mprotect with PROT_EXEC, as its third argument
FILTERS = {
    "all": [give_back(ALLOW)], "a container's": only(NEEDED, ERRNO | 1),
    "a strict list": only([*NEEDED, 10], KILL_PROCESS),
    "no new code": [*NO_NEW_CODE, give_back(ERRNO | 1), give_back(ALLOW)],
    "no new code, by death": [*NO_NEW_CODE, give_back(KILL_PROCESS), give_back(ALLOW)],
    "no reading": but(310, ERRNO | 1), "death for reading": but(310, KILL_PROCESS), "no sleep": but(35, KILL_THREAD),
    "a supervisor": but(39, 0x7fc00000), "strict mode": []}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    directory = tmp_path_factory.mktemp("filtered")
    (directory / "filtered.c").write_text(PROGRAM)
    subprocess.run(["gcc", "-w", "-O1", "-o", directory / "filtered", directory / "filtered.c"], check=True)
    return directory / "filtered"


def filtered(program, name):
    subject = Subject(program, packed(FILTERS[name]).hex())
    subject.line()
    record_target.wait_for(lambda: "Seccomp:\t0" not in open(f"/proc/{subject.pid}/status").read(), "the filter")
    return subject


@pytest.mark.parametrize("name", ["all", "a container's", "a strict list", "no new code"])
@pytest.mark.parametrize("word, options, truth", [
    ("sample", ["--every", "1", "--grace", "0"], ("leak", 100_000)),
    ("sample", ["--exact", "--grace", "0"], ("leak", 100_000)), ("mmaps", [], ("map", 819_200))],
    ids=["sampled", "exact", "mmaps"])
def test_recorded_under_a_filter(program, name, word, options, truth):
    with filtered(program, name) as subject:
        items, stacks, _ = record(word, subject, "go", *options)
        assert abs(by_site(stacks, [truth[0]])[truth[0]] - truth[1]) <= 1
        check_as_found(subject.pid)
        subject.say("go")                                   # it is as alive as before
        assert subject.line() == "{}\n"


@pytest.mark.parametrize("name, word, options, why", [
    ("no new code, by death", "sample", [], "filter ends the process for mprotect.*use --exact"),
    ("no new code, by death", "sample", ["--exact"], "ends the process for mprotect.*nothing can be recorded"),
    ("no new code, by death", "mmaps", [], "ends the process for mprotect.*strace"),
    ("no reading", "sample", [], "filter refuses process_vm_readv.*use --exact"),
    ("death for reading", "sample", [], "ends the process for process_vm_readv.*use --exact"),
    ("no sleep", "mmaps", [], "ends the thread for nanosleep"),
    ("a supervisor", "sample", [], "asks a supervisor about getpid"),
    ("strict mode", "sample", [], "strict mode of seccomp"), ("strict mode", "sample", ["--exact"], "strict mode")])
def test_refused_under_a_filter(program, name, word, options, why):
    with filtered(program, name) as subject:
        assert re.search(why, refused(word, "-p", subject.pid, *options))
        check_as_found(subject.pid)
        if name == "strict mode":                           # its own calls would end it
            assert subject.is_alive()
        else:
            subject.say("go")
            assert subject.line() == "{}\n"


def test_a_filter_that_forbids_the_agent_alone(program):
    """What is not allowed to read can be recorded exactly, what is not to sleep can be sampled."""
    for name, options in ("no reading", ["--exact"]), ("no sleep", ["--every", "1"]):
        with filtered(program, name) as subject:
            items, stacks, _ = record("sample", subject, "go", "--grace", "0", *options)
            assert abs(by_site(stacks, ["leak"])["leak"] - 100_000) <= 1
            check_as_found(subject.pid)


LATE = "after [.0-9]+ s it restricted itself .*, and nothing was recorded any more"


@pytest.mark.parametrize("how", "pcs")
@pytest.mark.parametrize("word, options, truth", [
    ("sample", ["--every", "1", "--grace", "0.1"], ("leak", 100_000)), ("mmaps", [], ("map", 819_200))])
def test_a_filter_that_comes_while_it_is_recorded(program, how, word, options, truth):
    """By prctl, and by prctl and seccomp through syscall: the agent is quiet from then on, and what was before is told."""
    with Subject(program, packed(FILTERS["death for reading"]).hex(), "late") as subject:
        subject.line()
        items, stacks, _ = record(word, subject, how, *options)
        assert abs(by_site(stacks, [truth[0]])[truth[0]] - truth[1]) <= 1
        partial, = next(item for item in items if item["type"] == "source")["partial"]
        assert re.match(LATE, partial)
        check_as_found(subject.pid)
        subject.say("go")
        assert subject.line() == "{}\n"


def test_questions_are_no_filter(program):
    """What the kernel refuses, or only answers, ends no recording."""
    with Subject(program, packed(FILTERS["death for reading"]).hex(), "late") as subject:
        subject.line()
        items, stacks, _ = record("sample", subject, "q", "--every", "1", "--grace", "0")
        assert abs(by_site(stacks, ["leak"])["leak"] - 200_000) <= 1
        assert next(item for item in items if item["type"] == "source")["partial"] == []
        check_as_found(subject.pid)


def test_a_filter_that_comes_before_the_agent(program):
    """After the check, that is: it is seen in the stop in which the agent would be let in."""
    with Subject(program, packed(FILTERS["death for reading"]).hex(), "late") as subject:
        subject.line()
        sampling = Sampling(Options(), subject.pid)
        subject.say("x")
        assert subject.line() == "{}\n"
        try:
            with pytest.raises(LiveError, match="has just restricted itself by seccomp: try again"):
                sampling.install()
        finally:
            sampling.installation.remove()
        check_as_found(subject.pid)
        subject.say("go")
        assert subject.line() == "{}\n"


@pytest.mark.parametrize("how, options, ending", [
    ("p", ["--every", "1"], "ended with status 0"), ("s", ["--every", "1"], "ended with status 0"),
    ("x", ["--every", "1"], "was ended by signal 31 (SIGSYS)"), ("x", ["--exact"], "ended with status 0")])
def test_a_command_that_puts_itself_under_a_filter(program, how, options, ending):
    """No check at its start can see that. Where libc is passed by, what ends it is told, and what mends it."""
    command = f"{program} {packed(FILTERS['death for reading']).hex()} late"
    done = subprocess.run([*record_target.GDBLEAK, "sample", "-c", command, *options], input=how + "\n", text=True,
                          cwd=record_target.ROOT, capture_output=True, timeout=record_target.WAIT)
    assert f"the command {ending}" in done.stdout, done
    assert ("that forbids what the agent calls; try sample --exact\n" in done.stdout) == ("SIGSYS" in ending)
    assert bool(re.search(LATE, done.stdout)) == (how != "x")
    leaked = re.search(r"^leak < main.*? ([0-9,]+) ", done.stdout, re.M)[1]
    assert leaked == ("200,000" if "--exact" in options else "100,000")
