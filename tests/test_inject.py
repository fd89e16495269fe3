"""System calls that a stopped thread is made to make: their results, and the thread as if nothing had been."""
import contextlib
import errno
import mmap
import os
import signal

import pytest

from gdbleak.record import inject
from gdbleak.target import ptrace
from gdbleak.target.live import mappings
from tests.live_target import program, run, tools, wait_until       # noqa: F401
from tests.record_target import changed_text, needs

pytestmark = [tools, pytest.mark.skipif(bool(needs()), reason=needs() or "-")]

PLACES = [0x100000000, 0x200000000, 0x300000000]        # where no process has anything
GETPID, KILL = 39, 62
_NOT_ALONE = 0x10000     # CLONE_THREAD, which is no good without others
MAPS = [(inject.MMAP, place, mmap.PAGESIZE, 3, 0x100022, -1, 0) for place in PLACES]
UNMAPS = [(inject.MUNMAP, place, mmap.PAGESIZE) for place in PLACES]


def make(pid, calls):
    """What `make_calls` returns in a stop of the process, once it is not Unsafe."""
    stopped = ptrace.Stopped(pid)

    def act():
        with stopped:
            return inject.make_calls(stopped, calls)
    for _ in range(10_000):
        with contextlib.suppress(inject.Unsafe):
            return stopped.run(act)
    raise TimeoutError("it stays Unsafe")


def mapped(pid):
    """Which of PLACES are."""
    starts = {m.start for m in mappings(pid)}
    return [place for place in PLACES if place in starts]


def is_clean(pid):
    """Whether no stub is left, when what was left has been taken out."""
    with contextlib.suppress(inject.Unsafe, ptrace.LiveError):
        inject.clean(ptrace.Stopped(pid))
    return inject.remains(pid, mappings(pid)) == []


def test_several_calls_up_to_one_that_fails(run):
    subject = run("threads")
    assert make(subject.pid, [*MAPS, (GETPID,)]) == [*PLACES, subject.pid]
    assert mapped(subject.pid) == PLACES
    assert make(subject.pid, [UNMAPS[0], (inject.MUNMAP, 1, 0), *UNMAPS[1:]]) == [0, -errno.EINVAL]
    assert mapped(subject.pid) == PLACES[1:]
    assert make(subject.pid, UNMAPS) == [0, 0, 0] and mapped(subject.pid) == []
    *failed, slept = subject.ask()
    assert [int(number) for number in failed] == [0] * 8 and float(slept) >= 3.0
    assert changed_text(subject.pid) == []


def test_a_signal_in_the_middle_waits_for_the_end(run):
    subject = run("suspended", 1)
    noticed, wrong_masks = subject.said
    for number in range(1, 50):
        assert make(subject.pid, [(KILL, subject.pid, signal.SIGUSR1), (GETPID,)]) == [0, subject.pid]
        assert wait_until(lambda: subject.word(noticed) == number)
    assert subject.word(wrong_masks) == 0


def test_a_signal_with_a_handler_does_not_mix_with_the_calls(run):
    subject = run("signals", 1)
    for _ in range(50):
        assert make(subject.pid, [(KILL, subject.pid, signal.SIGRTMIN), (GETPID,)]) == [0, subject.pid]
    assert wait_until(lambda: subject.ask()[0] == "50")
    assert subject.is_running(subject.said[0])


def test_a_stop_in_the_middle_is_one_at_the_end(run):
    """SIGSTOP, which no mask holds back."""
    subject = run("signals", 1)
    for _ in range(10):
        assert make(subject.pid, [(KILL, subject.pid, signal.SIGSTOP), (GETPID,)]) == [0, subject.pid]
        assert wait_until(lambda: subject.state() == ("T", "0"))
        assert changed_text(subject.pid) == []
        os.kill(subject.pid, signal.SIGCONT)
        assert subject.is_running(subject.said[0])


def killed_at(step, pid, calls):
    """Whether a child process that makes the calls is killed before its request number `step` to the kernel."""
    child = os.fork()
    if not child:
        steps = []

        def counted(*arguments):
            steps.append(arguments)
            if len(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return ptrace.ptrace(*arguments)
        status = 1
        try:
            inject.ptrace = counted
            make(pid, calls)
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("kind", ["suspended", "signals"])
def test_killed_before_every_step(run, kind):
    """The calls up to one are made, the others are not; the thread finds back, and what is left can be taken out."""
    subject = run(kind, 1)
    step, made = 1, []
    while killed_at(step, subject.pid, MAPS):
        assert wait_until(lambda: is_clean(subject.pid))
        assert changed_text(subject.pid) == []
        made.append(len(mapped(subject.pid)))
        assert mapped(subject.pid) == PLACES[:made[-1]]
        make(subject.pid, UNMAPS)
        if kind == "suspended":
            os.kill(subject.pid, signal.SIGUSR1)
            assert wait_until(lambda: subject.word(subject.said[0]) == step)
            assert subject.word(subject.said[1]) == 0
        else:
            assert subject.is_running(subject.said[0])
        step += 1
    assert made == sorted(made) and set(made) == {0, 1, 2, 3} and mapped(subject.pid) == PLACES
    assert changed_text(subject.pid) == []


def test_under_seccomp(run):
    """A filter that kills for any clone is suspended for the calls, and is there again."""
    subject = run("filtered")
    assert make(subject.pid, [(GETPID,), (inject.CLONE, _NOT_ALONE, 0, 0, 0, 0)]) == [subject.pid, -errno.EINVAL]
    assert subject.is_running(subject.said[0])
    with open("/proc/%d/status" % subject.pid) as file:
        assert "Seccomp:\t2\n" in file.read()
