"""nginx under real load, for the tests and for the capture of the shipped core. Standard library only.

A stock or a debug nginx is started with a configuration of its own; the load is made of connections whose
number and state the caller chooses; the truth is what nginx's own counters and the leaky module
(fixtures/nginx/leaky) say.
"""
import http.client
import json
import os
import pwd
import resource
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from pathlib import Path

from tests.targets import CACHE, CORE_FILTER, ROOT, WAIT, Capture, Reply, kernel_writes_cores, run_gdb, wait_for

BUILD = ROOT / "fixtures" / "nginx" / "build"
STOCK = Path("/usr/sbin/nginx")
BUILT = CACHE / "nginx"
MODULE = BUILT / "ngx_http_leaky_module.so"
DEBUG = BUILT / "nginx-debug"
STRIPPED = BUILT / "nginx-stripped"
LUA_MODULES = [Path("/usr/lib/nginx/modules", f"{name}_module.so") for name in ("ndk_http", "ngx_http_lua")]

LUA_HTTP = "lua_shared_dict counters 1m;"
LUA_SERVER = """location /dict {
            content_by_lua_block {
                ngx.shared.counters:set(ngx.var.arg_key, string.rep("x", 100))
                ngx.say("kept")
            }
        }"""

CONFIGURATION = """\
{modules}
{user}
worker_processes 1;
working_directory {prefix}/cores;
pid {prefix}/nginx.pid;
error_log {prefix}/error.log warn;
events {{ worker_connections 1024; }}
http {{
    access_log {prefix}/access.log;
    client_body_temp_path {prefix}/body;
    proxy_temp_path {prefix}/proxy;
    fastcgi_temp_path {prefix}/fastcgi;
    uwsgi_temp_path {prefix}/uwsgi;
    scgi_temp_path {prefix}/scgi;
    keepalive_timeout 3600;
    keepalive_requests 1000000;
    client_header_timeout 3600;
    client_body_timeout 3600;
    proxy_read_timeout 3600;
    leaky_truth_file {prefix}/truth.json;
    leaky_zone leaky_slabs 1m;
    limit_req_zone $arg_key zone=limited:2m rate=1000r/s;
    proxy_cache_path {prefix}/cache levels=1:2 keys_zone=cached:3m inactive=1h;
    ssl_session_cache shared:sessions:1m;
    {lua_http}
    upstream slow {{ server 127.0.0.1:{slow}; }}
    upstream quick {{ server 127.0.0.1:{quick}; keepalive {keepalive}; }}
    server {{
        listen 127.0.0.1:{port};
        listen 127.0.0.1:{http2} http2;
        root {prefix}/html;
        location /slow {{ proxy_pass http://slow; }}
        location /quick {{ proxy_pass http://quick; proxy_http_version 1.1; proxy_set_header Connection ""; }}
        location /cached {{
            proxy_pass http://quick; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_cache cached; proxy_cache_valid 1h;
        }}
        location /limited {{ limit_req zone=limited burst=100000000 nodelay; leaky nothing; }}
        location /leak/pool {{ leaky pool {pool}; }}
        location /leak/long {{ leaky pool 144 40000 0 0; }}
        location /leak/destroyed {{ leaky destroyed {pool}; }}
        location /leak/block {{ leaky block {block}; }}
        location /leak/timer {{ leaky timer 256; }}
        location /leak/held {{ leaky held 256; }}
        location /leak/nothing {{ leaky nothing; }}
        location /slab {{ leaky slab 20000; }}
        location /unslab {{ leaky unslab; }}
        location /leak_stats {{ leaky_stats; }}
        {lua_server}
    }}
    server {{ listen 127.0.0.1:{port}; server_name other.example; location / {{ return 204; }} }}
}}
"""


def build(what):
    """Make the `module` or the `debug` nginx in the cache, unless it is there already."""
    subprocess.run([BUILD, what, BUILT], check=True, stdout=subprocess.DEVNULL)


def build_in(root):
    """Make the module in the chroot `root`, for its nginx; returns its path."""
    inside = Path("/nginx")
    shutil.copytree(BUILD.parent, root / inside.relative_to("/"), dirs_exist_ok=True)
    subprocess.run(["chroot", root, inside / BUILD.name, "module", inside / "built"], check=True,
                   stdout=subprocess.DEVNULL)
    return root / "nginx" / "built" / MODULE.name


def ask(commands, captured, no_debug=False):
    """Ask one GDB about a Capture, whose exe may be None: a Reply for each command."""
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / f"{number}.json" for number in range(len(commands))]
        lines = [f"core-file {captured.core}"]
        for command, file in zip(commands, files):
            lines += [f"echo \\n<<<{file.name}>>>\\n", f"{command} --json {file}"]
        done = run_gdb(lines, captured.exe, no_debug=no_debug, sysroot=captured.sysroot)
        texts = dict(part.split(">>>\n", 1) for part in done.stdout.split("\n<<<")[1:])
        for command, file in zip(commands, files):
            assert file.exists(), f"{command}: {texts.get(file.name, done.stdout)}"
        return [Reply(json.loads(file.read_text()), texts[file.name]) for file in files]


def leak_json(command, captured, **options):
    """The items that `command --json` writes about the Capture."""
    return ask([command], captured, **options)[0].items


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Upstream:
    """A small HTTP server behind nginx, one thread a connection.

    Quick: answers at once and keeps the connection. Slow: /slow/wait is never answered, /slow/trickle gets
    its head and 50,000 bytes of a body of 1,000,000.
    """

    def __init__(self, quick):
        self.quick = quick
        self.requests = 0
        self.connections = set()
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection = self.listener.accept()[0]
            except OSError:
                return
            with self.lock:
                self.connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        pending = b""
        try:
            while True:
                data = connection.recv(65536)
                if not data:
                    break
                pending += data
                while b"\r\n\r\n" in pending:
                    head, pending = pending.split(b"\r\n\r\n", 1)
                    self._answer(connection, head)
        except OSError:
            pass
        with self.lock:
            self.connections.discard(connection)
        connection.close()

    def _answer(self, connection, head):
        if self.quick:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n" + b"q" * 200)
        elif b"/slow/trickle" in head.split(b"\r\n", 1)[0]:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + b"t" * 50000)
        with self.lock:
            self.requests += 1

    def close(self):
        self.listener.close()
        with self.lock:
            for connection in self.connections:
                connection.close()


def http2_frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def http2_get(path):
    """The bytes of an HTTP/2 connection (prior knowledge) with one GET: preface, SETTINGS, HEADERS."""
    headers = b"\x82\x86"  # :method GET, :scheme http, from the static table
    for index, text in ((4, path), (1, "localhost")):  # :path, :authority, literal, not indexed
        headers += bytes([index, len(text)]) + text.encode()
    return (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2_frame(4, 0, 0, b"")
            + http2_frame(1, 0x5, 1, headers))  # END_STREAM, END_HEADERS


class Nginx:
    """One running nginx: a master and one worker, in the directory `prefix`.

    All is asked over one connection, which stays open and counts as idle: so nothing is about to be closed
    when the worker is looked at.

    `module`: the leaky module to load, None when it is built in. `pool`, `block`: what a request forgets (see
    the module). `keepalive`: connections to the quick upstream that are kept. `lua`: load the Lua module,
    with a lua_shared_dict. `environment`: nginx's own. `core_filter`: the process's coredump_filter. `root`:
    the chroot to run in, with `prefix`, `exe` and `module` inside it.
    """

    def __init__(self, prefix, exe=STOCK, module=MODULE, pool="1024 40 2 5k", block="300k", keepalive=8,
                 lua=False, environment=None, core_filter=CORE_FILTER, root=None):
        self.prefix, self.exe, self.core_filter, self.root = Path(prefix), Path(exe), core_filter, root
        self.slow, self.quick = Upstream(quick=False), Upstream(quick=True)
        self.port, self.http2_port = free_port(), free_port()
        self.clients = []
        self.control = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        self.load = {"idle": 1, "half_sent": 0, "waiting": 0, "trickle": 0, "http2": 0, "http2_idle": 0,
                     "held": 0}
        self.timers = 0
        for name in ("cores", "html", "cache"):
            (self.prefix / name).mkdir(parents=True)
        (self.prefix / "html" / "index.html").write_text("page\n" * 1000)
        modules = ([self._inside(module)] if module else []) + (LUA_MODULES if lua else [])
        user = pwd.getpwuid(os.getuid()).pw_name
        (self.prefix / "nginx.conf").write_text(CONFIGURATION.format(
            modules="\n".join(f"load_module {path};" for path in modules), prefix=self._inside(self.prefix),
            user=f"user {user};" if os.getuid() == 0 else "", pool=pool, block=block, keepalive=keepalive,
            lua_http=LUA_HTTP if lua else "", lua_server=LUA_SERVER if lua else "",
            port=self.port, http2=self.http2_port, slow=self.slow.port, quick=self.quick.port))
        self.master = self._start(environment)
        self.worker = self.stats()["pid"]

    def _inside(self, path):
        """The path as nginx sees it."""
        return Path("/") / path.relative_to(self.root) if self.root else path

    def _start(self, environment):
        def prepare():
            Path("/proc/self/coredump_filter").write_text(hex(self.core_filter))
            hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
            resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
            if self.root:
                os.chroot(self.root)

        prefix = self._inside(self.prefix)
        command = [self._inside(self.exe), "-p", prefix, "-c", prefix / "nginx.conf", "-g", "daemon off;"]
        master = subprocess.Popen(command, preexec_fn=prepare, env=environment, cwd=self.prefix,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

        def up():
            if master.poll() is not None:
                raise RuntimeError(master.stderr.read().decode())
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return True
            except OSError:
                return False

        wait_for(up, "nginx to listen")
        return master

    def get(self, path):
        """One request; returns the body. Any status but 200 is an error."""
        self.control.request("GET", path)
        answer = self.control.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: status {answer.status}")
        return body

    def get_many(self, paths):
        """Requests in turn."""
        for path in paths:
            self.get(path)

    def stats(self):
        """The module's counters, and nginx's own of its shared zones."""
        return json.loads(self.get("/leak_stats"))

    def _connect(self, port, data):
        client = socket.create_connection(("127.0.0.1", port), WAIT)
        client.sendall(data)
        self.clients.append(client)
        return client

    def idle(self, number):
        """Connections that made one request, got the whole answer, and stay open."""
        for _ in range(number):
            client = self._connect(self.port, b"GET /leak/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"done\n"):
                answer += client.recv(65536)
        self.load["idle"] += number

    def half_sent(self, number):
        """Connections that sent a request line and some headers, and no end."""
        for index in range(number):
            head = f"GET /half/{index} HTTP/1.1\r\nHost: localhost\r\nX-Half: sent\r\n"
            self._connect(self.port, head.encode())
        self.load["half_sent"] += number

    def held(self, number):
        """Requests that the module never answers, each with a pool that only the request's context leads to."""
        for _ in range(number):
            self._connect(self.port, b"GET /leak/held HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.load["held"] += number

    def timer(self, number):
        """Pools that wait for a timer of the module, and belong to no connection."""
        self.get_many(["/leak/timer"] * number)
        self.timers += number

    def _at_upstream(self, number, kind, port, request):
        before = self.slow.requests
        for index in range(number):
            self._connect(port, request(index))
        wait_for(lambda: self.slow.requests == before + number, "the requests to reach the slow upstream")
        self.load[kind] += number

    def waiting(self, number):
        """Requests that nginx has passed on and that nobody answers."""
        self._at_upstream(number, "waiting", self.port, lambda index: (
            f"GET /slow/wait/{index} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()))

    def trickle(self, number):
        """Requests whose answer has begun and does not end."""
        self._at_upstream(number, "trickle", self.port, lambda index: (
            f"GET /slow/trickle/{index} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()))
        for client in self.clients[-number:]:
            client.recv(1)

    def http2(self, number):
        """HTTP/2 connections with one request each that waits for the upstream."""
        self._at_upstream(number, "http2", self.http2_port, lambda index: http2_get(f"/slow/wait/h2-{index}"))

    def http2_idle(self, number):
        """HTTP/2 connections with one request that is answered: nginx has freed what it had for HTTP/2."""
        for _ in range(number):
            client, answer = self._connect(self.http2_port, http2_get("/leak/nothing")), b""
            while b"done\n" not in answer:
                answer += client.recv(65536)
        self.load["http2_idle"] += number

    def burst(self, path="/quick/burst", connections=20, seconds=1):
        """Load that comes and goes, by wrk; raises when a request failed."""
        url = f"http://127.0.0.1:{self.port}{path}"
        out = subprocess.run(["wrk", "-t1", f"-c{connections}", f"-d{seconds}", url],
                             check=True, capture_output=True, text=True).stdout
        if "Non-2xx" in out or "Socket errors" in out:
            raise RuntimeError(out)

    def fill_zones(self, number=500):
        """Put `number` keys into limit_req's zone and the proxy cache's, and leave holes in the module's."""
        self.get_many([f"/limited?key={index}" for index in range(number)])
        self.get_many([f"/cached/{index}" for index in range(number)])
        self.get_many(["/slab"] * 50 + ["/unslab"])

    def reload(self):
        """Have the master read its configuration again; returns when the old worker is gone.

        That one closes idle connections and waits for all others: make no others before.
        """
        old = self.worker
        self.master.send_signal(signal.SIGHUP)
        wait_for(lambda: not os.path.exists(f"/proc/{old}"), "the old worker's end")
        for client in self.clients:
            client.close()
        self.clients.clear()
        self.control.close()
        self.load["idle"] = 1
        self.worker = self.stats()["pid"]

    def settle(self):
        """Wait until the worker has closed what its clients closed, and sleeps; returns the counters.

        nginx itself says how many connections it uses: ours and the one that asks, those to an upstream, in
        use and kept, the two listening sockets, the channel to the master.
        """
        def settled():
            stats = self.stats()
            upstream = len(self.slow.connections) + len(self.quick.connections)
            used = stats["connections"] - stats["free_connections"]
            return stats if used == sum(self.load.values()) + upstream + 2 + 1 else None

        def sleeps():
            return Path(f"/proc/{self.worker}/stat").read_text().rsplit(")", 1)[1].split()[0] == "S"

        stats = wait_for(settled, "closed connections to be gone")
        wait_for(sleeps, "the worker to have nothing to do")
        return stats

    def expected_kinds(self):
        """How many pools of each kind the load must have made, while the worker lives.

        An HTTP/2 connection with a request in flight has a pool of its own and the stream one more.
        """
        load = self.load
        at_upstream = load["waiting"] + load["trickle"] + load["http2"]
        return {"cycle": 1, "connection": sum(load.values()), "request": load["half_sent"] + load["held"] + at_upstream,
                "upstream": at_upstream + len(self.quick.connections), "http2": 2 * load["http2"],
                "timer": self.timers, "other": load["held"]}

    def core(self):
        """Let the load settle and abort the worker: a Capture of the core that the kernel wrote.

        Its truth is what the module wrote in the worker's last moment, with `load` and `kinds`, and each
        zone's `longest_run` of free pages from just before, as a signal handler cannot ask for it.
        """
        if not kernel_writes_cores():
            raise RuntimeError("core_pattern sends cores elsewhere: echo core >/proc/sys/kernel/core_pattern")
        runs = {zone["name"]: zone["longest_run"] for zone in self.settle()["zones"]}
        kinds = self.expected_kinds()
        os.kill(self.worker, signal.SIGABRT)
        wait_for(lambda: not os.path.exists(f"/proc/{self.worker}"), "the worker's end")
        truth = json.loads((self.prefix / "truth.json").read_text())
        for zone in truth["zones"]:
            zone["longest_run"] = runs[zone["name"]]
        core, = (self.prefix / "cores").glob("core*")
        return Capture(core, self.exe, {"load": self.load, "kinds": kinds, **truth}, [], self.root)

    def gcore(self, pid=None):
        """Write a core of the living worker, or of process `pid`, by GDB; its truth: the counters."""
        stats = self.settle()
        path = self.prefix / "cores" / "gcore"
        subprocess.run(["gdb", "-nx", "-q", "-batch", "-iex", "set debuginfod enabled off",
                        "-p", str(pid or self.worker), "-ex", f"gcore {path}"],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        truth = {"load": self.load, "kinds": self.expected_kinds(), **stats}
        return Capture(path, self.exe, truth, [], self.root)

    def close(self):
        """End it, and everything it was given."""
        for client in (*self.clients, self.control):
            client.close()
        self.slow.close()
        self.quick.close()
        if self.master.poll() is None:
            self.master.send_signal(signal.SIGTERM)
            try:
                self.master.wait(WAIT)
            except subprocess.TimeoutExpired:
                self.master.kill()
                self.master.wait()
        self.master.stderr.close()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()
