"""LuaJIT programs, and nginx with Lua that leaks, for the tests and the captured cores. Standard library only.

The truth is what the Lua programs know: how many objects they made, and what collectgarbage("count") said
last, when nothing was allocated any more (fixtures/luajit/finish.lua).
"""
import functools
import http.client
import json
import os
import pwd
import struct
import subprocess
import sys
from pathlib import Path

from tests import targets
from tests.nginx_target import LUA_MODULES, STOCK, WAIT, Nginx, Upstream, free_port, wait_for
from tests.targets import (CACHE, CORE_FILTER, ROOT, Capture, Program, Unavailable, capture,
                           kernel_writes_cores)

FIXTURES = ROOT / "fixtures" / "luajit"
BUILT = CACHE / "luajit"
#: Names that fixtures/luajit/build knows.
PACKAGED = ["debian", "openresty"]
VARIANTS = ["debug", "stripped", "gc32", "sysmalloc", "lua52"]
#: GCState.state.
PHASES = {"pause": 0, "propagate": 1, "atomic": 2, "sweepstring": 3, "sweep": 4, "finalize": 5}
LUPA = "lupa==2.8"
LEAKS = ["dynamic_cache", "sessions", "handlers", "reminders", "jobs", "buffers", "journal", "index", "trail"]


@functools.lru_cache(maxsize=None)
def build(name):
    """The `luajit` named so, as a Program; built on first use."""
    subprocess.run([FIXTURES / "build", name, BUILT], check=True, stdout=subprocess.DEVNULL)
    return Program(BUILT / name / "luajit")


@functools.lru_cache(maxsize=None)
def embedding(puc=False):
    """The program vms.c, linked with the LuaJIT library that nginx's Lua module needs, or with PUC Lua's."""
    if not puc:
        return targets.build(FIXTURES / "vms", "-l:libluajit-5.1.so.2")
    subprocess.run([FIXTURES / "build", "puc", BUILT], check=True, stdout=subprocess.DEVNULL)
    return targets.build(FIXTURES / "vms", f"-L{BUILT / 'puc'}", "-l:liblua5.1.so.0", f"-Wl,-rpath,{BUILT / 'puc'}")


@functools.lru_cache(maxsize=None)
def lupa():
    """The directory of lupa, for this Python. Raises Unavailable."""
    directory = BUILT / f"lupa-{sys.version_info[0]}.{sys.version_info[1]}"
    if not directory.exists():
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", f"{directory}.unfinished",
                               LUPA], capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"no {LUPA}: {done.stderr.strip().splitlines()[-1]}")
        Path(f"{directory}.unfinished").rename(directory)
    return directory


def python():
    """This Python, as a Program: the executable itself, where a virtual environment has a link to it."""
    return Program(Path(os.path.realpath(sys.executable)))


@functools.lru_cache(maxsize=None)
def offsets(name, *fields):
    """Byte offsets (int) of `fields`, such as "global_State.gc", by the DWARF of a build that has it.

    A field may have parts: "global_State.str.mask". A type alone, "GG_State", stands for its size.
    """
    command = ["gdb", "-nx", "-q", "-batch", "-iex", "set debuginfod enabled off"]
    for field in fields:
        kind, _, member = field.partition(".")
        value = f"(unsigned long)&(('{kind}' *)0)->{member}" if member else f"sizeof('{kind}')"
        command += ["-ex", f"output {value}", "-ex", "echo \\n"]
    done = subprocess.run([*command, build(name).path], capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def debug_name(name):
    """The build with debug information whose structures are those of build `name`."""
    base, _, variant = name.partition("-")
    return name if variant in ("gc32", "sysmalloc", "lua52") else f"{base}-debug"


def counted(path):
    """The bytes that collectgarbage("count") said last. Raises when something was allocated meanwhile."""
    data = path.read_bytes()
    counts = struct.unpack("4d", data[-32:])
    if len(data) != 128 or len(set(counts[1:])) != 1:
        raise RuntimeError(f"{path}: the last counts are not all alike: {counts}")
    return round(counts[-1] * 1024)


def run_program(name, program, directory, *arguments):
    """Have build `name` run a program of fixtures/luajit in the fresh `directory`; returns the Capture.

    The truth is what it told, and `count`: bytes by collectgarbage("count"), as they are in the core.
    """
    captured = capture(build(name), directory, FIXTURES / program, *map(str, arguments))
    return captured._replace(truth={**captured.truth, "count": counted(directory / "counts")})


def run(name, scenario, directory, made, capacity=None, *arguments):
    """The same for a scenario of objects.lua; runs of one `capacity` (default: `made`) differ in what is made alone."""
    return run_program(name, "objects.lua", directory, scenario, f"made {made:08}",
                       f"capacity {made if capacity is None else capacity:08}", "counts", *arguments)


def run_in_phase(name, phase, directory, made=200):
    """The same for the scenario that stops within a collection, in the phase of PHASES."""
    where = offsets(debug_name(name), "lua_State.glref", "global_State.gc", "GCState.state", "GCRef")
    return run(name, "phase", directory, made, made, PHASES[phase], *where)


def make_certificates(directory):
    """What the certificate leaks of fixtures/luajit/nginx parse: {rsa,ec}.{crt,key} in the fresh `directory`."""
    directory.mkdir(parents=True)
    for kind, new in {"rsa": ["rsa:2048"], "ec": ["ec", "-pkeyopt", "ec_paramgen_curve:P-256"]}.items():
        subprocess.run(["openssl", "req", "-x509", "-nodes", "-days", "3650", "-subj", f"/CN={kind}.example", "-newkey",
                        *new, "-keyout", directory / f"{kind}.key", "-out", directory / f"{kind}.crt"],
                       check=True, capture_output=True)


class LuaNginx(Nginx):
    """nginx with the Lua module and one leak of fixtures/luajit/nginx, in the directory `prefix`.

    `jit`: whether the JIT compiler is on; compiled traces take memory, of which the leak knows nothing.
    `lua`: fixtures/luajit, or a copy. `environment`: nginx's own. `core_filter`: the process's coredump_filter.
    """

    def __init__(self, prefix, leak, jit=False, lua=FIXTURES, core_filter=CORE_FILTER, environment=None):
        self.prefix, self.exe, self.core_filter, self.root = Path(prefix), STOCK, core_filter, None
        self.slow, self.quick = Upstream(quick=False), Upstream(quick=True)
        self.port = free_port()
        self.clients, self.load = [], {"idle": 1}
        self.control = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        (self.prefix / "cores").mkdir(parents=True)
        user = pwd.getpwuid(os.getuid()).pw_name
        (self.prefix / "nginx.conf").write_text((FIXTURES / "nginx" / "nginx.conf").read_text().format(
            modules="\n".join(f"load_module {path};" for path in LUA_MODULES), prefix=self.prefix,
            user=f"user {user};" if os.getuid() == 0 else "", port=self.port, lua=lua,
            jit="on" if jit else "off"))
        self.master = self._start(environment)
        where = offsets("openresty-debug", "lua_State.glref", "global_State.str.mask")
        self.get(f"/start?leak={leak}&glref={where[0]}&mask={where[1]}")
        if leak == "trail":
            self.wait()
        # What is made on first use must be there before anything is counted.
        self.get_many(["/nothing", *["/begin?warm=yes", "/hit", "/tell"] * 8, "/begin"])
        self.worker = self.tell()["pid"]

    def tell(self):
        """What the leak knows: `hits`, the `bytes` that they leaked; `native`: how malloc's bytes in use have grown
        meanwhile, `addresses`: of some of its blocks that the leak holds."""
        return json.loads(self.get("/tell"))

    def hit(self, number):
        """Leak `number` entries, each by a request."""
        self.get_many(["/hit"] * number)

    def wait(self, path="/wait"):
        """A request that does not end. At /wait_alone it has a VM of its own."""
        client = self._connect(self.port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        answer = b""
        while b"waiting" not in answer:
            answer += client.recv(4096)

    def core(self, evict=False):
        """Let the worker die by itself: the Capture, with `count` in its truth. `evict`: after the leak has dropped
        what it holds, which is left to be collected."""
        if not kernel_writes_cores():
            raise RuntimeError("core_pattern sends cores elsewhere: echo core >/proc/sys/kernel/core_pattern")
        told = self.tell()
        if evict:
            self.get_many(["/evict", *["/nothing"] * 8])
        counts = self.prefix / "counts"
        try:
            self.get(f"/die?counts={counts}")
        except (http.client.HTTPException, OSError):
            pass
        wait_for(lambda: not os.path.exists(f"/proc/{self.worker}"), "the worker's end")
        core, = (self.prefix / "cores").glob("core*")
        return Capture(core, self.exe, {**told, "count": counted(counts)}, [])
