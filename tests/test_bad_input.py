"""Bad input on purpose: damaged cores, hostile pointers, targets that cannot be read, outputs that cannot be written.

Whatever it is: a clear line, the rest of the report, no traceback, no hang, and no crash of the process that reads it.
"""
import importlib
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gdbleak.commands import options
from gdbleak.kernels import pools as pool_kernel
from gdbleak.reports.analysis import Analysis
from gdbleak.target.core_file import open_core
from gdbleak.target.target import TargetError
from tests import nginx_target
from tests.targets import ROOT, run_cli, run_gdb, totals

COMMANDS = ["mallinfo --arenas", "sizes --exact", "blocks --dump 32", "blocks --text", "memory", "what 0x7ffff0000000",
            "pools", "pools --unreached", "shm --slots", "unreachable", "retained", "path --size 32-100k", "types"]
LONGEST = 30                # seconds that one damaged core may take
JEMALLOC = Path("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2")
RAW = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
WAITS = r"""
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void *work(void *unused)
{
    for (int i = 0; i < 500; i++) {
        void *block = malloc(100 + 3 * i);
        if (i % 3 == 0)
            free(block);
    }
    pause();
    return unused;
}

int main(void)
{
    static char buffer[4096];
    setvbuf(stdout, buffer, _IOFBF, sizeof buffer);
    pthread_t thread;
    for (int i = 0; i < 3; i++)
        pthread_create(&thread, NULL, work, NULL);
    sleep(1);
    for (int i = 0; i < 3000; i++) {
        void *block = malloc(50 + i);
        if (i % 4 == 0)
            free(block);
    }
    *(char *)malloc(1 << 20) = 1;
    struct mallinfo2 info = mallinfo2();
    printf("{\"arena\": %zu, \"ordblks\": %zu, \"smblks\": %zu, \"hblks\": %zu, \"hblkhd\": %zu, \"fsmblks\": %zu, "
           "\"uordblks\": %zu, \"fordblks\": %zu, \"keepcost\": %zu}\n", info.arena, info.ordblks, info.smblks,
           info.hblks, info.hblkhd, info.fsmblks, info.uordblks, info.fordblks, info.keepcost);
    fflush(stdout);
    for (;;)
        pause();
}
"""


# -- damaged cores, analysed in a child that may die -----------------------------------------------------------

class Core:
    """A core file whose bytes can be changed by target address, and the places worth changing."""

    def __init__(self, path, exe, directory):
        self.path, self.exe = directory / "damaged", str(exe or "")
        self.data = Path(path).read_bytes()
        target = open_core(str(path), self.exe)
        self.analysis, self.target = Analysis.of(target), target
        count, = struct.unpack_from("<H", self.data, 56)
        rows = [struct.unpack_from("<IIQQQQQQ", self.data, 64 + 56 * k) for k in range(count)]
        self.loads = [(row[3], row[3] + row[5], row[2]) for row in rows if row[0] == 1]
        self.heads = 64 + 56 * count

    def offset(self, address):
        """The offset in the file of an address, or None."""
        return next((at + address - low for low, high, at in self.loads if low <= address < high), None)

    def places(self):
        """Kind -> offsets of words that the readers trust."""
        spans = {"headers": []}
        for module in self.target.modules:
            spans.setdefault("image", []).append((module.start, 1200))
            if "libc" in module.name:
                spans["libc data"] = [(low, high - low) for low, high in module.writable()]
        for heap in self.analysis.glibc:
            spans["arenas"] = [(arena.address, heap.state.itemsize) for arena in heap.arenas]
            spans["mp_"] = [(heap.parameters_at, heap.parameters.dtype.itemsize)]
            spans["heap_info"] = [(region.start & ~4095, 64) for region in heap.regions if region.kind == "heap"]
            spans["chunks"] = [(address - 16, 32) for address in heap.blocks.address[::7][:2000].tolist()]
            spans["tcaches"] = [(cache.address, 640) for cache in heap.tcaches]
        nginx = self.analysis.nginx
        if nginx and nginx.fields is not None:
            zones = [zone for zone in self.zone_addresses() if zone]
            spans["cycle"] = [(nginx.cycle, 640)]
            spans["connections"] = [(int(nginx.fields["connections"]), 232 * 60)]
            spans["pools"] = [(address, 80) for address in nginx.addresses[:300].tolist()]
            spans["requests"] = [(address + 80, 1200) for address in nginx.addresses[:300].tolist()]
            spans["modules"] = [(int(nginx.fields["modules"]), 400)]
            spans["slabs"] = [place for zone in zones for place in ((zone, 200), (self.target.word(zone + 32), 1000))]
        found = {"headers": list(range(0, self.heads, 8))}
        for kind, ranges in spans.items():
            words = [self.offset(at) for start, size in ranges for at in range(start & ~7, start + size, 8)]
            found.setdefault(kind, []).extend(at for at in words if at is not None)
        return {kind: at for kind, at in found.items() if at}

    def zone_addresses(self):
        from gdbleak.heaps import nginx_slab
        return [zone.address for zone in nginx_slab.zones(self.analysis.nginx)]

    def write(self, changes, size=None):
        """Write the core with 8-byte words changed ({offset: int}), cut to `size`."""
        data = bytearray(self.data)
        for at, value in changes.items():
            data[at:at + 8] = (value & (1 << 64) - 1).to_bytes(8, "little")
        self.path.write_bytes(data[:size])


def hostile(chance, core, at):
    """A value for the word at file offset `at` that nobody would like."""
    here = next((low + at - start for low, high, start in core.loads if start <= at < start + high - low), 0)
    mapping = chance.choice(core.target.mappings)
    old = int.from_bytes(core.data[at:at + 8], "little")
    return chance.choice([0, -1, chance.getrandbits(64), chance.randrange(4096), here, here + 8,
                          here + chance.randrange(8), mapping.end - chance.choice([1, 8, 16, 24, 32]), mapping.start,
                          1 << chance.randrange(64), (1 << 63) - chance.choice([8, 16, 32, 80]),
                          old ^ 1 << chance.randrange(64), old + chance.choice([-16, -8, 8, 16, 4096])])


def reports(path, exe, commands=COMMANDS):
    """What goes wrong when each command is run on a core: lines; runs in a child."""
    problems = []
    try:
        target = open_core(str(path), exe)
    except TargetError as error:
        return ["two lines"] if "\n" in str(error) else []
    analysis = Analysis.of(target)
    for command in commands:
        name, *words = command.split()
        arguments = options.parser(name).parse_args(words)
        arguments.evaluate = None
        try:
            report = importlib.import_module(f"gdbleak.reports.{name}").run(analysis, arguments)
            text, items = report.text(), json.loads(report.json_text())
        except TargetError as error:
            problems += ["two lines"] if "\n" in str(error) else []
            continue
        except Exception as error:  # noqa: BLE001  that is what is looked for
            problems.append(f"{command}: {type(error).__name__}: {error}")
            continue
        if RAW.search(text):
            problems.append(f"{command}: {RAW.search(text)[0]!r} reaches the terminal")
        if name == "memory":
            sums = totals(items)
            parts = [sums[f"{key}_bytes"] for key in ("in_use", "tcached", "free", "overhead", "other", "unexplained")]
            if sum(parts) != sums["mapped_bytes"] or min(parts) < 0:
                problems.append(f"memory: {sums} do not add up")
    return problems


def in_child(path, exe, commands=COMMANDS):
    """`reports` in a child, which may crash or hang: then that is the problem."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reading)
            os.write(writing, "\n".join(reports(path, exe, commands)).encode()[:60000])
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    told, end = b"", time.monotonic() + LONGEST
    with open(reading, "rb", buffering=0) as pipe:
        while time.monotonic() < end and select.select([pipe], [], [], max(0, end - time.monotonic()))[0]:
            part = pipe.read(65536)
            if not part:
                break
            told += part
        else:
            os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return told.decode().splitlines() + ([f"the child ended with {status}"] if status else [])


@pytest.fixture(scope="module")
def nginx_core(tmp_path_factory):
    """The shipped core of a leaky worker."""
    directory = tmp_path_factory.mktemp("shipped")
    plain = directory / "core"
    with open(plain, "wb") as file:
        subprocess.run(["xz", "-dc", ROOT / "fixtures" / "cores" / "nginx-leaky.core.xz"], stdout=file, check=True)
    return Core(plain, None, directory)


@pytest.fixture(scope="module")
def heap_core(captured, tmp_path_factory):
    """Function of a scenario: a Core of fixtures/programs/heaps.c."""
    def get(scenario):
        capture = captured("heaps", scenario)
        return Core(capture.core, capture.exe, tmp_path_factory.mktemp(f"damage-{scenario}"))
    return get


def assault(core, seeds):
    """Damage the core at random, once for each seed, where it hurts: problems by seed."""
    places, found = core.places(), {}
    for seed in seeds:
        chance = random.Random(seed)
        kind = chance.choice(sorted(places))
        offsets = [chance.choice(places[kind]) for _ in range(chance.choice([1, 1, 2, 5, 20, 100]))]
        cut = chance.randrange(len(core.data)) if chance.random() < 0.1 else None
        core.write({at: hostile(chance, core, at) for at in offsets}, cut)
        problems = in_child(core.path, core.exe)
        if problems:
            found[seed, kind] = problems
    return found


def test_damaged_nginx(nginx_core):
    assert not assault(nginx_core, range(16))


@pytest.mark.parametrize("scenario", ["tcache", "brk_fails"])
def test_damaged_heap(scenario, heap_core):
    # 103: no block is found; 148: an end beyond the last address.
    assert not assault(heap_core(scenario), [*range(12), 103, 148])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["tcache", "brk_fails", "mapped", "foreign_sbrk", "threads"])
def test_many_damaged_heaps(scenario, heap_core):
    assert not assault(heap_core(scenario), range(100, 200))


@pytest.mark.slow
def test_many_damaged_nginx(nginx_core):
    assert not assault(nginx_core, range(100, 500))


def test_cut_anywhere(heap_core):
    core = heap_core("tcache")
    main, = core.analysis.glibc
    places = main.main + 200, main.parameters_at + 8, main.regions[0].start + 5000
    for size in [0, 1, 63, 64, 65, 100, 130, core.heads, core.heads + 20, core.heads + 700,
                 *map(core.offset, places), len(core.data) - 1]:
        core.write({}, size)
        assert not in_child(core.path, core.exe), size
        if size > core.heads + 700:
            assert any("cut short" in reason for reason in open_core(str(core.path), core.exe).source.partial)


def test_segments_beyond_the_last_address(heap_core):
    core = heap_core("tcache")
    third = 64 + 56 * 3
    core.write({third + 16: -4096, third + 40: 1 << 62})
    assert not in_child(core.path, core.exe)
    assert any("program header" in reason for reason in open_core(str(core.path), core.exe).source.partial)


@pytest.mark.parametrize("offset, value, told", [
    (18, b"\xf3\0", "EM_RISCV"), (18, b"\x12\xfe", "machine"), (4, b"\1", "32-bit|not a complete"),
    (5, b"\2", "not a complete"),
    (16, b"\2\0", "no core file"), (56, b"\0\0", "no memory")])
def test_cores_of_other_machines(offset, value, told, heap_core):
    core = heap_core("tcache")
    core.path.write_bytes(core.data[:offset] + value + core.data[offset + len(value):])
    with pytest.raises(TargetError, match=told) as caught:
        open_core(str(core.path), core.exe)
    assert "\n" not in str(caught.value)


# -- glibc's own numbers -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("field, value", [("sbrk_base", 0x1000), ("sbrk_base", 1 << 46), ("hp_pagesize", 1 << 40),
                                          ("hp_pagesize", 12345), ("n_mmaps", 1 << 30)])
def test_a_wild_number_in_mp(field, value, heap_core):
    core = heap_core("threads")
    heap, = core.analysis.glibc
    at = core.offset(heap.parameters_at + heap.parameters.dtype.fields[field][1])
    core.write({at: value})
    assert not in_child(core.path, core.exe)
    target = open_core(str(core.path), core.exe)
    found, = Analysis.of(target).glibc
    assert len(found.arenas) == len(heap.arenas)
    if field == "hp_pagesize":
        assert len(found.blocks) == len(heap.blocks)


# -- nginx pools ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("wild", [(1 << 63) - 16, (1 << 63) - 8, -8, -16, 1, 0x1000])
def test_a_pool_whose_list_leads_out_of_the_address_space(wild):
    """Both forms of the kernel: an address whose end overflows must not be read."""
    pool, words = 0x1100, np.zeros(0x400, np.int64)
    head = [pool + 200, pool + 992, 0, 0, 912, pool, 0, wild, 0, 0]
    words[(pool - 0x1000) // 8:][:len(head)] = head
    table = np.array([0x1000]), np.array([0x3000]), np.array([0])
    blocks = np.array([pool]), np.array([1008]), np.ones(1, np.uint8)
    for form in filter(None, (pool_kernel.measure.array_form, pool_kernel.measure.compiled())):
        owner = np.zeros(1, np.int32)
        assert form(words, *table, *blocks, np.array([0]), 80, owner, np.zeros(pool_kernel.COLUMNS, np.int64)) == 0
        assert not owner.any()


@pytest.mark.parametrize("field, value", [
    (16, None), (0, -1), (8, 1 << 62), (56, None), (56, (1 << 63) - 16), (64, None)])
def test_a_damaged_cycle_pool(field, value, nginx_core):
    """d.next, d.last, d.end, large or cleanup of the cycle's pool; None: its own address, a loop."""
    pool = int(nginx_core.analysis.nginx.fields["pool"])
    nginx_core.write({nginx_core.offset(pool + field): pool if value is None else value})
    begun = time.monotonic()
    assert not in_child(nginx_core.path, "", ["pools", "shm"])
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("field, value", [
    ("connection_n", (1 << 24) - 1), ("connection_n", 1 << 50), ("connections", 0x1000), ("free_connections", 1),
    ("modules", -8), ("pool", 3), ("shared_memory", -1)])
def test_a_damaged_cycle(field, value, nginx_core):
    nginx = nginx_core.analysis.nginx
    at = nginx_core.offset(nginx.cycle + nginx.fields.dtype.fields[field][1])
    nginx_core.write({at: value})
    assert not in_child(nginx_core.path, "", ["pools", "shm --slots"])


@pytest.mark.skipif(not JEMALLOC.exists(), reason="needs libjemalloc2")
def test_nginx_under_jemalloc_by_the_cycle_alone(tmp_path):
    nginx_target.build("module")
    with nginx_target.Nginx(tmp_path / "nginx", environment={**os.environ, "LD_PRELOAD": str(JEMALLOC)}) as nginx:
        nginx.idle(20)
        nginx.half_sent(5)
        nginx.waiting(7)
        captured = nginx.core()
    reply, = nginx_target.ask(["leak-pools"], captured)
    found = totals(reply.items)["by_kind"]
    assert {kind: found[kind] for kind in ("connection", "request", "upstream")} == {
        kind: captured.truth["kinds"][kind] for kind in ("connection", "request", "upstream")}
    assert found["unreached"] == 0 and "none can be told unreached" in reply.text
    assert "malloc belongs to libjemalloc" in reply.text
    done = run_gdb([f"core-file {captured.core}", "leak-sizes"], captured.exe)
    assert "leak-sizes: no glibc heap here: malloc belongs to libjemalloc.so.2" in done.stdout


# -- living targets ------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def waits(tmp_path_factory):
    """A program that tells its mallinfo2() and waits."""
    directory = tmp_path_factory.mktemp("waits")
    (directory / "waits.c").write_text(WAITS)
    subprocess.run(["gcc", "-g", "waits.c", "-o", "waits", "-pthread"], cwd=directory, check=True)
    return directory / "waits"


@pytest.fixture
def waiting(waits):
    """Such a process, and its truth."""
    process = subprocess.Popen([waits], stdout=subprocess.PIPE)
    yield process, json.loads(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.skipif(not shutil.which("gdbserver"), reason="needs gdbserver")
@pytest.mark.parametrize("kind", ["remote", "extended-remote"])
def test_a_remote_target_is_read_through_gdb(kind, waiting, tmp_path):
    process, truth = waiting
    port = nginx_target.free_port()
    which = ["--attach", "--once", f"127.0.0.1:{port}", str(process.pid)] if kind == "remote" else \
        ["--multi", "--once", f"127.0.0.1:{port}"]
    server = subprocess.Popen(["gdbserver", *which], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while "istening" not in server.stderr.readline():
            assert server.poll() is None
        attach = [f"attach {process.pid}"] if kind == "extended-remote" else []
        file = tmp_path / "mallinfo.json"
        done = run_gdb([f"target {kind} 127.0.0.1:{port}", *attach, f"leak-mallinfo --json {file}", "leak-memory",
                        "leak-what $sp", "leak-pools", "detach"], iex=["set sysroot /"])
        found = totals(json.loads(file.read_text()))
        assert {key: found[key] for key in truth} == truth
        assert "read through GDB" in done.stdout and "live" in done.stdout and "no nginx here" in done.stdout
        assert "Traceback" not in done.stdout
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


class Terminal:
    """A GDB with gdbleak on a terminal of its own."""

    def __init__(self, *arguments, environment=()):
        self.pid, self.fd = pty.fork()
        if not self.pid:
            os.execvpe("gdb", ["gdb", "-nx", "-q", *(f"-iex=set {setting}" for setting in (
                "debuginfod enabled off", "pagination off", "confirm off", "width 0", "style enabled off")),
                "-ex", f"source {ROOT / 'scripts' / 'gdbleak.py'}", *map(str, arguments)],
                {**os.environ, "TERM": "dumb", **dict(environment)})

    def __enter__(self):
        self.wait()
        return self

    def __exit__(self, *_):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)

    def wait(self):
        """What is shown up to the next prompt."""
        shown, end = "", time.monotonic() + LONGEST
        while not shown.endswith("(gdb) "):
            assert time.monotonic() < end, shown
            if select.select([self.fd], [], [], 0.2)[0]:
                shown += os.read(self.fd, 65536).decode("utf-8", "replace")
        return shown.replace("\r", "")

    def send(self, text):
        os.write(self.fd, text.encode())

    def begin(self, line):
        """Send a line and wait until it was taken: a Ctrl-C before that would empty the terminal's queue."""
        self.send(line + "\n")
        end = time.monotonic() + LONGEST
        while b"\n" not in os.read(self.fd, 65536):
            assert time.monotonic() < end

    def settle(self):
        """After an interrupt that came too late: GDB answers "Quit" and drops what it was typed meanwhile."""
        while select.select([self.fd], [], [], 1)[0]:
            os.read(self.fd, 65536)

    def command(self, line):
        self.send(line + "\n")
        return self.wait()


def test_a_running_process_is_not_read(waits):
    with Terminal(waits) as gdb:
        gdb.command("set non-stop on")
        gdb.command("break mallinfo2")
        gdb.command("run")
        assert "is running: stop all of its threads" in gdb.command("leak-sizes")
        gdb.command("kill")
        assert "there is no core file and no process" in gdb.command("leak-sizes")


def test_the_selected_inferior_is_the_one(captured):
    one, two = captured("heaps", "tcache"), captured("heaps", "empty")
    with Terminal() as gdb:
        gdb.command(f"file {one.exe}")
        gdb.command(f"core-file {one.core}")
        first = gdb.command("leak-sizes")
        gdb.command("add-inferior -no-connection")     # GDB 13 itself fails when two share a core
        gdb.command("inferior 2")
        assert "there is no core file and no process" in gdb.command("leak-sizes")
        gdb.command(f"file {two.exe}")
        gdb.command(f"core-file {two.core}")
        assert str(two.core) in gdb.command("leak-sizes")
        gdb.command("inferior 1")
        assert gdb.command("leak-sizes") == first


def test_a_core_that_changes_on_disk(captured, tmp_path):
    one, two, core = captured("heaps", "tcache"), captured("heaps", "empty"), tmp_path / "core"
    shutil.copy(one.core, core)
    with Terminal(one.exe) as gdb:
        gdb.command(f"core-file {core}")
        first = gdb.command("leak-sizes")
        shutil.copy(two.core, tmp_path / "new")
        os.replace(tmp_path / "new", core)
        assert "in use:" in first and first != gdb.command("leak-sizes")
        core.unlink()
        assert f"cannot open {core}: No such file" in gdb.command("leak-sizes")


def test_an_interrupt_at_any_moment_returns_to_the_prompt(captured):
    """From the first import on: a NumPy that was interrupted halfway would be broken for good."""
    core = captured("heaps", "many_heaps")
    with Terminal(core.exe, environment={"GDBLEAK_NUMBA": "0"}) as gdb:
        for moment in range(20):
            gdb.command(f"core-file {core.core}")
            gdb.begin("leak-memory")
            time.sleep(0.03 * moment)
            gdb.send("\x03")
            shown = gdb.wait()
            if "interrupted" not in shown:
                gdb.settle()
            assert "fault" not in shown and "Traceback" not in shown, shown
        assert "self-check" in gdb.command("leak-mallinfo")


# -- outputs and options -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("words, told", [
    ("--json /nonexistent/x", "/nonexistent/x: No such file"), ("--json /dev/full", "/dev/full: No space left"),
    ("--json /", "/: Is a directory"), ("--flame x.png", "must end in"),
    ("--flame /nonexistent/x.svg", "/nonexistent/x.svg: No"), ("--size 9-3", "is empty"),
    ("--size 99999999999999999999T", "64 bits"), ("--size -9999999999999999999999", "64 bits"),
    ("--min-bytes 99999999999999999999", "64 bits"), ("--top x", "invalid lines"), ("--arena 99", "no arena 99"),
    ("--min-bytes -5", "invalid size value: '-5'"), ("--min-bytes ' -0x10'", "invalid size value"),
    ("--min-bytes 3-8", "'3-8' is no size: it is negative"), ("--min-bytes nan", "'nan' is no address or number"),
    ("--size 3--8", "'-8' is no size"), ("--top -1", "invalid lines value"),
    ("--top nan", "invalid lines value"), ("--top inf", "invalid lines value"), ("--arena -1", "no arena -1"),
    ("--wrong", "unrecognized"), ("'unbalanced", "quotation")])
def test_one_line_about_what_cannot_be(words, told, captured):
    core = captured("heaps", "tcache")
    done = run_gdb([f"core-file {core.core}", f"leak-sizes {words}"], core.exe)
    lines = [line for line in done.stdout.splitlines() if line.startswith("leak-sizes: ")]
    assert len(lines) == 1 and told in lines[0], done.stdout
    assert "Traceback" not in done.stdout and "fault of gdbleak" not in done.stdout and "Errno" not in done.stdout


def test_a_flame_graph_on_a_full_disk(captured, tmp_path):
    core = captured("heaps", "tcache")
    (tmp_path / "full.svg").symlink_to("/dev/full")
    done = run_cli("sizes", "--core", core.core, "--flame", tmp_path / "full.svg")
    assert done.returncode == 2 and "in use:" in done.stdout
    assert done.stderr.splitlines()[-1].endswith("full.svg: No space left on device")


@pytest.mark.parametrize("words", [["--core"], ["--core", "--json", "-"], ["--help"]])
def test_standard_output_that_takes_nothing(words, captured):
    core = captured("heaps", "tcache")
    words = [word for given in words for word in ([given, core.core] if given == "--core" else [given])]
    command = [Path(sys.executable).with_name("gdbleak"), *(["sizes"] if "--help" not in words else []), *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LONGEST)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "gdbleak: cannot write the report: No space left on device"
    assert "Traceback" not in done.stderr
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *map(str, command)], stderr=subprocess.PIPE, text=True,
                            timeout=LONGEST)
    assert "Traceback" not in closed.stderr
