"""What scripts/bench runs: time and memory of gdbleak on a large heap, as ratios to what the machine needs at least."""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CACHE = ROOT / ".cache" / "bench"
GDB = [os.environ.get("GDB", "gdb"), "-nx", "-q", "-batch", "-iex", "set debuginfod enabled off"]


def heap(blocks):
    """(executable, core, truth) of the benchmark program with so many blocks, made once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    program, source = CACHE / "bench", ROOT / "fixtures" / "programs" / "bench.c"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        subprocess.run(["gcc", "-O1", "-g", "-pthread", "-o", program, source], check=True)
        for old in CACHE.glob("core-*"):
            old.unlink()
    core, said = CACHE / f"core-{blocks}", CACHE / f"truth-{blocks}.json"
    if not core.exists():
        before = set(CACHE.glob("core*"))
        run = subprocess.run([program, str(blocks)], cwd=CACHE, capture_output=True, text=True,
                             preexec_fn=unlimited_core)
        made = set(CACHE.glob("core*")) - before
        if len(made) != 1:
            sys.exit("the benchmark program left no core file: kernel.core_pattern has to be a file name")
        made.pop().rename(core)
        said.write_text(run.stdout)
    return program, core, json.loads(said.read_text())


def unlimited_core():
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)


def read_once(core):
    """Seconds to read the core file from the page cache, once."""
    buffer = bytearray(1 << 20)
    began = time.perf_counter()
    with open(core, "rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass
    return time.perf_counter() - began


def seconds(command):
    """Wall seconds of a whole process that must succeed."""
    began = time.perf_counter()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          text=True)
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}\n{done.stderr}")
    return time.perf_counter() - began


def anonymous(pid):
    """Anonymous memory of a process now, in bytes; 0 when it has ended."""
    try:
        for line in open(f"/proc/{pid}/smaps_rollup"):
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def peak_anonymous(command):
    """The most anonymous memory a process was seen with, looked at every few milliseconds."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    most = [0]

    def watch():
        while process.poll() is None:
            most[0] = max(most[0], anonymous(process.pid))
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    process.wait()
    watcher.join()
    return most[0]


def describe(name, times, floor):
    low, middle = min(times), statistics.median(times)
    print(f"{name:34} {low:8.2f} s {middle:8.2f} s {max(times):8.2f} s {low / floor:8.1f} x")


def measure(blocks, runs):
    """Print the table of one heap; (best seconds of `sizes`, number of blocks)."""
    program, core, truth = heap(blocks)
    sizes = [ROOT / ".venv" / "bin" / "gdbleak", "sizes", "--core", core, "--exe", program]
    mallinfo = [sizes[0], "mallinfo", *sizes[2:]]
    script = ["-x", ROOT / "scripts" / "gdbleak.py"]
    items = CACHE / "sizes.json"
    seconds([*sizes, "--json", items])  # the first run may compile
    found = next(item for item in json.loads(items.read_text()) if item["type"] == "totals")
    number = found["in_use_blocks"] + found["tcached_blocks"] + found["free_blocks"]
    print(f"\n{core.stat().st_size / 1e6:,.0f} MB core, {number:,} blocks ({truth['live'] + truth['leaked']:,} "
          f"allocated by the program, {found['in_use_blocks']:,} found in use)")
    floor = min(read_once(core) for _ in range(3))
    print(f"{'':34} {'best':>10} {'median':>10} {'worst':>10} {'to reading the core once':>10}")
    describe("read the core once", [floor], floor)
    describe("GDB alone on it", [seconds([*GDB, program, core]) for _ in range(runs)], floor)
    best = {}
    for name, command in (("gdbleak sizes", sizes), ("gdbleak mallinfo", mallinfo),
                          ("gdb -batch -ex leak-sizes", [*GDB, *script, "-ex", "leak-sizes", program, core])):
        times = [seconds(command) for _ in range(runs)]
        best[name] = min(times)
        describe(name, times, floor)
    libraries = str(next((ROOT / ".venv" / "lib").glob("python*/site-packages")))
    load = ["-ex", f"python import sys; sys.path.insert(0, {libraries!r}); import numpy, numba"]
    base = peak_anonymous([*GDB, *script, *load, program, core])
    ours = peak_anonymous([*GDB, *script, *load, "-ex", "leak-sizes", program, core])
    print(f"anonymous memory: {base / 1e6:,.1f} MB for GDB with NumPy and Numba, {ours / 1e6:,.1f} MB at most with "
          f"leak-sizes: {(ours - base) / number:.1f} bytes a block")
    return best["gdbleak sizes"], number


def lua_heap(objects):
    """(executable, core) of a LuaJIT program with about so many objects, made once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    built = ROOT / ".cache" / "luajit"
    subprocess.run([ROOT / "fixtures" / "luajit" / "build", "openresty", built], check=True, stdout=subprocess.DEVNULL)
    program, core = built / "openresty" / "luajit", CACHE / f"lua-{objects}"
    if not core.exists():
        before = set(CACHE.glob("core*"))
        subprocess.run([program, ROOT / "fixtures" / "luajit" / "objects.lua", "many", str(objects), str(objects), "counts"],
                       cwd=CACHE, capture_output=True, preexec_fn=unlimited_core,
                       env={**os.environ, "LUA_PATH": f"{ROOT}/fixtures/luajit/?.lua;;"})
        made = set(CACHE.glob("core*")) - before
        if len(made) != 1:
            sys.exit("the LuaJIT program left no core file")
        made.pop().rename(core)
    return program, core


def measure_lua(objects, runs):
    """Print the table of one Lua heap; (best seconds of `gc`, of `gc-refs`, number of objects)."""
    program, core = lua_heap(objects)
    tool, about, items = ROOT / ".venv" / "bin" / "gdbleak", ["--core", core, "--exe", program], CACHE / "gc.json"
    flame = ["--flame", CACHE / "gc.svg"]
    seconds([tool, "gc", *about, "--json", items])
    seconds([tool, "gc-refs", *about, *flame])
    found = json.loads(items.read_text())
    number = next(item for item in found if item["type"] == "totals")["objects"]
    gap = next(item for item in found if item["type"] == "check")["gap"]
    print(f"\n{core.stat().st_size / 1e6:,.0f} MB core, {number:,} LuaJIT objects, gc.total gap {gap}")
    floor = min(read_once(core) for _ in range(3))
    print(f"{'':34} {'best':>10} {'median':>10} {'worst':>10} {'to reading the core once':>10}")
    describe("read the core once", [floor], floor)
    best = []
    for name, command in (("gdbleak gc", [tool, "gc", *about]), ("gdbleak gc-refs --flame", [tool, "gc-refs", *about, *flame])):
        times = [seconds(command) for _ in range(runs)]
        best.append(min(times))
        describe(name, times, floor)
    libraries = str(next((ROOT / ".venv" / "lib").glob("python*/site-packages")))
    script = ["-x", ROOT / "scripts" / "gdbleak.py"]
    load = ["-ex", f"python import sys; sys.path.insert(0, {libraries!r}); import numpy, numba"]
    base = peak_anonymous([*GDB, *script, *load, program, core])
    ours = peak_anonymous([*GDB, *script, *load, "-ex", f"leak-gc-refs --flame {CACHE / 'gc.svg'}", program, core])
    print(f"anonymous memory: {base / 1e6:,.1f} MB for GDB with NumPy and Numba, {ours / 1e6:,.1f} MB at most with leak-gc-refs: "
          f"{(ours - base) / number:.1f} bytes an object")
    return *best, number


def main():
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("runs", type=int, nargs="?", default=5, help="runs of each command (default 5)")
    parser.add_argument("--scale", action="store_true", help="also ten times as much (needs 6 GB of disk)")
    arguments = parser.parse_args()
    small = measure(2_000_000, arguments.runs)
    from scripts.bench_graph import measure_graph, measure_shapes
    measure_graph(2_000_000, arguments.runs)
    measure_shapes(10_000_000)
    lua = measure_lua(1_000_000, arguments.runs)
    if arguments.scale:
        large = measure(20_000_000, max(1, arguments.runs // 2))
        print(f"\n{large[1] / small[1]:.1f} times the blocks took {large[0] / small[0]:.1f} times as long")
        large = measure_lua(10_000_000, max(1, arguments.runs // 2))
        print(f"\n{large[2] / lua[2]:.1f} times the objects took {large[0] / lua[0]:.1f} (gc) and {large[1] / lua[1]:.1f} (gc-refs) times")


if __name__ == "__main__":
    main()
