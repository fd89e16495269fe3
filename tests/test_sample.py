"""The memory leak flame graph of live processes, against what the processes say they leaked."""
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from functools import partial

import pytest

from gdbleak.record import agent, compile_agent, exact, sample, session
from gdbleak.target.ptrace import LiveError
from tests import nginx_target, record_target
from tests.record_target import (GDBLEAK, Recorder, Subject, by_site, changed_text, check_as_found, guards, rates,
                                 record, record_here, refused, totals, wait_for)

pytestmark = pytest.mark.skipif(bool(record_target.needs()), reason=record_target.needs() or "-")

BUILDS = {
    "C": lambda: rates("-O2"),
    "C, frame pointers": lambda: rates("-O1", "-fno-omit-frame-pointer"),
    "C, static": lambda: rates("-O2", "-static"),
    "C, not PIE": lambda: rates("-O2", "-no-pie"),
    "C++": lambda: record_target.build_as_cxx("record_rates", "-O2"),
}


@pytest.fixture(params=BUILDS)
def subject(request):
    with Subject(BUILDS[request.param]()) as started:
        assert started.line() == "ready\n"
        yield started
        assert started.is_alive()
        check_as_found(started.pid)
        started.say("quit")
        assert started.process.wait(record_target.WAIT) == 0


def leaked(answer):
    return {site: tuple(numbers) for site, numbers in answer.items() if site.startswith("leak_")}


def test_exact_equals_the_truth(subject):
    items, stacks, answer = record("sample", subject, "go 4 700 200", "--exact", "--grace", "0.2")
    truth = leaked(answer)
    found = by_site(stacks, truth)
    assert {site: found.get(site) for site in truth} == {site: size for site, (size, _) in truth.items()}
    assert not any(frame.startswith("churn_") for frames, _ in stacks for frame in frames)
    told = totals(items)
    assert told["mode"] == "exact" and told["interval"] == 0
    assert told["bytes"] == sum(size for size, _ in truth.values()) + found.get("", 0)
    deep = next(frames for frames, _ in stacks if frames[-1].startswith("leak_deep"))
    assert sum(frame.startswith("leak_deep") for frame in deep) == 41
    assert any(frame.startswith("one_round") for frame in deep) and any(frame.startswith("work") for frame in deep)


def test_exact_with_more_blocks_than_stacks_are_kept_of(monkeypatch):
    """They are unwound on the way, and come out the same."""
    monkeypatch.setattr(exact, "_MOST_STACKS", 40)
    unwound = []
    original = exact._Calls.unwind
    monkeypatch.setattr(exact._Calls, "unwind", lambda *given: unwound.append(1) or original(*given))
    with Subject(rates("-O2")) as subject:
        subject.line()
        recording, answer = record_here(exact.record, partial(exact.EveryCall, sample.Options()), subject, "go 4 100 50")
        truth = leaked(answer)
        found = by_site([(site.frames, site.bytes) for site in recording.sites.values()], truth)
        assert {site: found.get(site) for site in truth} == {site: size for site, (size, _) in truth.items()}
        assert len(unwound) > 2
        check_as_found(subject.pid)


def test_sampled_shares(subject):
    """Each site's share within 2 points of the truth, and within 10% of itself above a share of 20%."""
    items, stacks, answer = record("sample", subject, "go 4 120000 1500", "--grace", "0.2", "--rate", "30000")
    truth = leaked(answer)
    told, found = totals(items), by_site(stacks, truth)
    all_true, all_found = sum(size for size, _ in truth.values()), sum(found.values())
    assert told["mode"] == "sampled" and told["taken"] > 20_000 and told["dropped"] == 0
    for site, (size, _) in truth.items():
        share, sampled = size / all_true, found.get(site, 0) / all_found
        assert abs(share - sampled) < 0.02, (site, share, sampled)
        if share > 0.2:
            assert abs(sampled / share - 1) < 0.1, (site, share, sampled)
    churned = sum(weight for frames, weight in stacks if any(frame.startswith("churn_") for frame in frames))
    assert churned < 0.01 * all_found
    assert abs(all_found - all_true) < max(2 * told["interval"], 0.01 * all_true)
    assert told["cut"] == 0


def test_threads_at_one_counter(tmp_path, monkeypatch):
    """Threads whose counters fall together take it from each other, and count all the same."""
    monkeypatch.setattr(compile_agent, "FLAGS", [*compile_agent.FLAGS, "-DCELLS=1"])
    assert compile_agent.compile_agent(tmp_path) == ""
    monkeypatch.setattr(agent, "product", lambda _: compile_agent.product(tmp_path))
    with Subject(rates("-O2")) as subject:
        subject.line()
        recording, answer = record_here(session.record, partial(sample.Sampling, sample.Options(rate=30_000)), subject,
                                        "go 4 120000 0")
        truth = leaked(answer)
        found = by_site([(site.frames, site.bytes) for site in recording.sites.values()], truth)
        error = abs(sum(found.values()) - sum(size for size, _ in truth.values()))
        assert error < 5 * sum(site.variance for site in recording.sites.values()) ** 0.5
        assert recording.numbers["taken"] > 1000
        check_as_found(subject.pid)


@pytest.mark.parametrize("options, mode", [
    (["--by", "calls"], "calls"), (["--every", "64k"], "every"), (["--every", "50"], "thinned"),
    (["--by", "calls", "--every", "3"], "thinned")])
def test_other_ways_to_sample(options, mode):
    with Subject(rates("-O2")) as subject:
        subject.line()
        items, stacks, answer = record("sample", subject, "go 2 100000 1000", "--grace", "0.1", *options)
        truth = leaked(answer)
        found, told = by_site(stacks, truth), totals(items)
        if mode == "every":
            assert told["mean"] == 65536 or told["thinned"]
        assert told["thinned"] > 5000 or mode != "thinned"
        all_true = sum(size for size, _ in truth.values())
        assert abs(sum(found.values()) - all_true) < max(3 * told["interval"], 0.02 * all_true)
        check_as_found(subject.pid)


GREEDY = r"""
#include <stdio.h>
#include <stdlib.h>
static __attribute__((noinline)) void leak(void) { *(volatile char *)malloc(1000) = 1; }
int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("ready");
    for (char line[100]; fgets(line, sizeof line, stdin) && line[0] == 'g';) {
        for (unsigned long k = 0; k < 100000; k++) {
            if (malloc((1ul << (k % 64)) | 1ul << 46) || calloc(1ul << 63, k | 1) || realloc(NULL, -1 - k % 5000))
                return 1;
            leak();
        }
        puts("{}");
    }
}
"""


@pytest.mark.parametrize("options", [[], ["--every", "10k"], ["--by", "calls"]])
def test_requests_that_fail(tmp_path, options):
    """Of sizes that there is no memory for, and that overflow: they neither count nor change the others' estimate."""
    (tmp_path / "greedy.c").write_text(GREEDY)
    subprocess.run(["gcc", "-w", "-O1", "-fno-builtin", "-o", tmp_path / "greedy", tmp_path / "greedy.c"], check=True)
    with Subject(tmp_path / "greedy") as subject:
        subject.line()
        items, stacks, _ = record("sample", subject, "go", "--grace", "0", *options)
        assert abs(by_site(stacks, ["leak"])["leak"] - 100_000_000) < 3 * totals(items)["interval"] < 50_000_000
        check_as_found(subject.pid)


def test_nginx_module_is_named(tmp_path):
    """nginx under load: the graph shows the module's function under ngx_http_core_run_phases; no request is lost."""
    nginx_target.build("debug")
    with nginx_target.Nginx(tmp_path / "nginx", exe=nginx_target.DEBUG, module=None, block="700") as nginx:
        graph = tmp_path / "graph.folded"
        recorder = Recorder("sample", nginx.worker, "--seconds", "2", "--flame", graph)
        recorder.wait_begin()
        nginx.burst("/leak/block", seconds=2)
        said, _ = recorder.finish()
        stack, weight = max((line.rsplit(" ", 1) for line in graph.read_text().splitlines()),
                            key=lambda pair: int(pair[1]))
        frames = stack.split(";")
        assert "ngx_http_leaky_handler" in frames
        assert frames.index("ngx_http_core_run_phases") < frames.index("ngx_http_leaky_handler")
        assert frames[:2] == ["_start", "__libc_start_main"] and frames[-1] == "ngx_alloc"
        assert re.match(r"Memory Leak Flame Graph for nginx-debug \(2(\.\d+)? seconds sampling\)\n", said)
        check_as_found(nginx.worker)
        assert nginx.stats()["pid"] == nginx.worker and nginx.master.poll() is None


def test_stock_nginx_pools(tmp_path):
    """Pools made and not destroyed, of Debian's stripped nginx; those that are destroyed do not count."""
    nginx_target.build("module")
    with nginx_target.Nginx(tmp_path / "nginx", pool="1024 40 2 5k") as nginx:
        graph = tmp_path / "graph.folded"
        before = nginx.stats()["pools"]["number"]
        recorder = Recorder("sample", nginx.worker, "--seconds", "600", "--grace", "0.2", "--every", "1", "--pools",
                            "--json", "-", "--flame", graph)
        recorder.wait_begin()
        nginx.get_many(["/leak/pool"] * 30 + ["/leak/destroyed"] * 40)
        recorder.process.send_signal(signal.SIGINT)
        items = json.loads(recorder.finish()[0])
        made = nginx.stats()["pools"]["number"] - before
        stacks = [line.rsplit(" ", 1) for line in graph.read_text().splitlines()]
        ours = [int(weight) for stack, weight in stacks if "ngx_http_leaky_module.so!" in stack]
        assert sum(ours) == 1024 * made and made == 30
        assert totals(items)["bytes"] >= sum(ours)
        check_as_found(nginx.worker)


LEAKY_LUA = """location /leak_lua { content_by_lua_block {
    jit.off(true, true)
    local ffi = require "ffi"
    pcall(ffi.cdef, "void *malloc(size_t n);")
    local function leak(n) local p = ffi.C.malloc(n)
        return p
    end
    local function outer(n) local p = leak(n)
        return p ~= nil
    end
    ngx.say(outer(3000))
} }"""


def test_lua_frames(tmp_path, monkeypatch):
    """The functions of the running coroutine stand between nginx's frames and malloc's caller."""
    if not all(path.exists() for path in nginx_target.LUA_MODULES):
        pytest.skip("needs nginx's Lua module")
    nginx_target.build("module")
    monkeypatch.setattr(nginx_target, "LUA_SERVER", LEAKY_LUA)
    with nginx_target.Nginx(tmp_path / "nginx", lua=True) as nginx:
        nginx.get("/leak_lua")
        graph = tmp_path / "graph.folded"
        recorder = Recorder("sample", nginx.worker, "--seconds", "600", "--grace", "0", "--every", "1", "--lua",
                            "--flame", graph)
        recorder.wait_begin()
        nginx.get_many(["/leak_lua"] * 150)
        recorder.process.send_signal(signal.SIGINT)
        recorder.finish()
        lua = {}
        for line in graph.read_text().splitlines():
            stack, weight = line.rsplit(" ", 1)
            frames = stack.split(";")
            named = tuple(frame for frame in frames if frame.endswith(" (Lua)"))
            lua[named] = lua.get(named, 0) + int(weight)
            if len(named) == 3:
                assert frames.index("ngx_http_lua_run_thread") < frames.index(named[0]) < len(frames) - 1
        full = [names for names in lua if len(names) == 3]
        assert [name.rsplit(":", 1)[1] for name in full[0]] == ["11 (Lua)", "8 (Lua)", "5 (Lua)"], lua
        assert lua[full[0]] == 150 * 3000
        wait_for(lambda: not guards(nginx.worker), "the guard to end")
        assert changed_text(nginx.worker) == []             # LuaJIT maps code of its own meanwhile


def test_refusals():
    with Subject(rates("-O2")) as subject:
        subject.line()
        assert "no process 999999999" in refused("sample", "-p", 999999999)
        assert "must end in" in refused("sample", "-p", subject.pid, "--flame", "x.png")
        assert "--seconds" in refused("sample", "-p", subject.pid, "--seconds", "0")
        assert "nginx's pools" in refused("sample", "-p", subject.pid, "--pools")
        check_as_found(subject.pid)


def test_other_tracer():
    with Subject(rates("-O2")) as subject:
        subject.line()
        tracer = subprocess.Popen(["gdb", "-nx", "-q", "-p", str(subject.pid)], stdin=subprocess.PIPE,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda: f"TracerPid:\t{tracer.pid}" in open(f"/proc/{subject.pid}/status").read(), "GDB")
            for word in ("sample", "mmaps"):
                assert f"already traced by process {tracer.pid}" in refused(word, "-p", subject.pid)
        finally:
            tracer.communicate(b"detach\nquit\n", timeout=record_target.WAIT)
        check_as_found(subject.pid)


HARDENED = r"""
#define _GNU_SOURCE
#include <linux/seccomp.h>
#include <linux/filter.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>
static void handler(int number) { write(1, "trap\n", 5); }
int main(int argc, char **argv)
{
    if (strchr(argv[1], 's')) {
        struct sock_filter allow[] = { BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW) };
        struct sock_fprog program = { 1, allow };
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
    }
    if (strchr(argv[1], 'b')) {
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGTRAP);
        sigprocmask(SIG_BLOCK, &set, NULL);
    }
    if (strchr(argv[1], 'h'))
        signal(SIGTRAP, handler);
    puts("ready");
    fflush(stdout);
    for (volatile long k = 0;; k++) {
        free(malloc(100));
        usleep(500);
    }
}
"""


@pytest.fixture
def hardened(tmp_path):
    (tmp_path / "hardened.c").write_text(HARDENED)
    subprocess.run(["gcc", "-w", "-O1", "-o", tmp_path / "hardened", tmp_path / "hardened.c"], check=True)
    return tmp_path / "hardened"


@pytest.mark.parametrize("how, word, options, why", [
    ("b", "sample", ["--exact"], "blocks SIGTRAP.*sampled mode")])
def test_targets_that_forbid_it(hardened, how, word, options, why):
    with Subject(hardened, how) as subject:
        subject.line()
        assert re.search(why, refused(word, "-p", subject.pid, *options))
        check_as_found(subject.pid)
        assert subject.is_alive()


def signals(pid):
    """What is blocked, ignored and handled."""
    return [line for line in open(f"/proc/{pid}/status") if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]


def test_own_trap_handler_is_kept(hardened):
    """The program's SIGTRAP handler works while it is recorded by breakpoints, and afterwards."""
    with Subject(hardened, "h") as subject:
        subject.line()
        before = signals(subject.pid)
        recorder = Recorder("sample", subject.pid, "--seconds", "600", "--exact", "--grace", "0.1")
        recorder.wait_begin()
        subject.process.send_signal(signal.SIGTRAP)
        assert subject.line() == "trap\n"
        recorder.process.send_signal(signal.SIGINT)
        recorder.finish()
        check_as_found(subject.pid)
        subject.process.send_signal(signal.SIGTRAP)
        assert subject.line() == "trap\n"
        wait_for(lambda: signals(subject.pid) == before, "the handler to return")


@pytest.mark.parametrize("limit, option", [(resource.RLIMIT_AS, "as"), (resource.RLIMIT_DATA, "data")])
def test_a_limit_on_memory_is_not_used_up(hardened, limit, option):
    """What the agent maps the program could not: it is refused where little would be left."""
    def limited(size):
        return lambda: resource.setrlimit(limit, (size, resource.RLIM_INFINITY))
    with Subject(hardened, "-", preexec_fn=limited(200 << 20)) as subject:
        subject.line()
        told = refused("sample", "-p", subject.pid)
        assert re.search(r"may map \d+ MB more.*--exact needs less.*prlimit --pid \d+ --%s=unlimited" % option, told)
        check_as_found(subject.pid)
        for options in (["--exact"], []):
            if not options:
                resource.prlimit(subject.pid, limit, (500 << 20, resource.RLIM_INFINITY))
            recorder = Recorder("sample", subject.pid, "--seconds", "0.3", "--grace", "0", "--json", "-", *options)
            totals(json.loads(recorder.finish()[0]))
            check_as_found(subject.pid)
        assert subject.is_alive()


TRAPS = r"""
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static volatile long held;
static void own(int number) { write(1, "trap\n", 5); }
static void *work(void *p) { for (;;) { void *at = malloc(100); held += (long)at; free(at); } return p; }
int main(void)
{
    char line[16];
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    for (int k = 0; k < 4; k++) pthread_create(&thread, NULL, work, NULL);
    puts("ready");
    for (fflush(stdout); fgets(line, sizeof line, stdin); write(1, "{}\n", 3)) {
        if (*line == 'b') pthread_sigmask(SIG_BLOCK, &all, &before);
        if (*line == 'i') signal(SIGTRAP, SIG_IGN);
        if (*line == 'd') signal(SIGTRAP, SIG_DFL);
        if (*line == 'o') signal(SIGTRAP, own);
        if (*line == 't') raise(SIGTRAP);
        free(malloc(1000));
        if (*line == 'b') pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
}
"""


@pytest.mark.parametrize("what", ["block", "ignore", "default", "own"])
def test_what_becomes_of_the_trap_handler_ends_no_process(what, tmp_path):
    """The kernel or the program may take ours away: breakpoints that are reached at the end are nobody's signal."""
    (tmp_path / "traps.c").write_text(TRAPS)
    subprocess.run(["gcc", "-w", "-O0", "-pthread", "-o", tmp_path / "traps", tmp_path / "traps.c"], check=True)
    with Subject(tmp_path / "traps") as subject:
        assert subject.line() == "ready\n"
        for _ in range(3):
            items, _, answer = record("sample", subject, what, "--exact", "--grace", "0")
            assert answer == {} and totals(items)["calls"] >= 2       # its own, at least; the threads' depend on time
            check_as_found(subject.pid)
            assert subject.is_alive()
        subject.say("trap" if what == "own" else "go on")
        assert subject.line() == ("trap\n" if what == "own" else "{}\n")


FORKS = r"""
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
static volatile long held;
static void use(int times) { while (times--) { void *at = malloc(100); held += (long)at; free(at); } }
static void *work(void *p) { for (;;) use(1), usleep(100); return p; }
static int child(int how)
{
    sigset_t all;
    sigfillset(&all);
    if (how == 1) sigprocmask(SIG_BLOCK, &all, NULL);
    if (how == 2) for (int number = 1; number < 32; number++) signal(number, SIG_DFL);
    use(20);
    return 0;
}
int main(void)
{
    char line[16];
    pthread_t thread;
    for (int k = 0; k < 2; k++) pthread_create(&thread, NULL, work, NULL);
    puts("ready");
    for (fflush(stdout); fgets(line, sizeof line, stdin) && *line != 'q'; fflush(stdout)) {
        int status, bad = 0;
        for (int k = 0; k < 60; k++) {
            int pid = fork();
            if (!pid) _exit(child(k % 3));
            bad += waitpid(pid, &status, 0) != pid || status != 0;
            bad += system("exit 3") != 3 << 8;
        }
        printf("{\"bad\": %d}\n", bad);
    }
}
"""


@pytest.fixture
def forks(tmp_path):
    (tmp_path / "forks.c").write_text(FORKS)
    subprocess.run(["gcc", "-w", "-O0", "-pthread", "-o", tmp_path / "forks", tmp_path / "forks.c"], check=True)
    return tmp_path / "forks"


def test_breakpoints_are_not_the_end_of_children(forks):
    """Which nobody traces, and which may block SIGTRAP or reset its handler; nor are they held up."""
    with Subject(forks) as subject:
        assert subject.line() == "ready\n"
        _, _, answer = record("sample", subject, "go", "--exact", "--grace", "0")
        assert answer == {"bad": 0}
        check_as_found(subject.pid)
        subject.say("go")
        assert subject.line() == '{"bad": 0}\n'
    done = subprocess.run([*GDBLEAK, "sample", "--exact", "-c", str(forks)], input="go\nquit\n", capture_output=True,
                          cwd=record_target.ROOT, text=True, timeout=record_target.WAIT)
    assert done.stdout.startswith('ready\n{"bad": 0}\n') and "the command ended with status 0\n" in done.stdout


def test_exact_under_seccomp(hardened):
    with Subject(hardened, "s") as subject:
        subject.line()
        recorder = Recorder("sample", subject.pid, "--seconds", "2", "--exact", "--json", "-")
        items = json.loads(recorder.finish()[0])
        assert totals(items)["calls"] > 10
        check_as_found(subject.pid)
        time.sleep(0.1)
        assert subject.is_alive()


def test_interrupted_window_is_reported():
    with Subject(rates("-O2")) as subject:
        subject.line()
        recorder = Recorder("sample", subject.pid, "--seconds", "500", "--json", "-", "--grace", "0")
        recorder.wait_begin()
        subject.say("go 2 2000 0")
        subject.line()
        recorder.process.send_signal(signal.SIGINT)
        told = totals(json.loads(recorder.finish()[0]))
        assert told["seconds"] < 400 and told["held"] > 0
        check_as_found(subject.pid)


def test_several_processes(tmp_path):
    """One after the other: a report each, one sum, one flame graph with each under its name."""
    program = shutil.copy(rates("-O2"), tmp_path / "several")
    flame, report = tmp_path / "flame.folded", tmp_path / "report.json"
    with Subject(program) as first, Subject(program) as second:
        for one in (first, second):
            assert one.line() == "ready\n"
            one.say("go 1 100000000 1000")
        done = subprocess.run([*GDBLEAK, "sample", "--exe", program, "--seconds", "0.5", "--flame", flame, "--json", report],
                              cwd=record_target.ROOT, capture_output=True, text=True, timeout=record_target.WAIT)
        assert done.returncode == 0, done.stderr
        for one in (first, second):
            check_as_found(one.pid)
        items = json.loads(report.read_text())
        assert {item["pid"] for item in items if item["type"] == "process"} == {first.pid, second.pid}
        *each, both = [item for item in items if item["type"] == "totals"]
        assert both["processes"] == 2 and both["bytes"] == sum(one["bytes"] for one in each) > 0
        names = {line.split(";")[0] for line in flame.read_text().splitlines()}
        assert names == {f"several {one.pid}" for one in (first, second)}


def test_agent_that_was_not_compiled(monkeypatch):
    monkeypatch.setattr(agent, "product", lambda directory: directory / "build" / "nothing.so")
    with pytest.raises(LiveError, match="the agent was not compiled when gdbleak was installed; install a C compiler"):
        agent.Agent()
