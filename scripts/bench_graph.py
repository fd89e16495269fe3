"""The graph's part of scripts/bench: leaks and dominators of the large heap, and shapes on which others are quadratic."""
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np                                                   # noqa: E402

from scripts.bench import CACHE, GDB, ROOT, describe, heap, peak_anonymous, read_once, seconds      # noqa: E402

SHAPES = ("chain", "star", "random", "LRU")


def measure_graph(blocks, runs):
    """Print what leak-unreachable and leak-retained take beyond GDB with its imports, with Numba and without."""
    program, core, truth = heap(blocks)
    script = [*GDB, "-x", ROOT / "scripts" / "gdbleak.py"]
    libraries = str(next((ROOT / ".venv" / "lib").glob("python*/site-packages")))
    start = f"python import sys; sys.path.insert(0, {libraries!r}); import numpy, "
    about = [program, core]
    floor = min(read_once(core) for _ in range(3))
    print(f"\nthe graph of the same heap: {truth['leaked']:,} blocks leaked by the program")
    print(f"{'':34} {'best':>10} {'median':>10} {'worst':>10} {'to reading the core once':>10}")
    base = [seconds([*script, "-ex", start + "llvmlite.binding", *about]) for _ in range(runs)]
    describe("GDB with its imports", base, floor)
    for numba, note in (("1", ""), ("0", ", without Numba")):
        os.environ["GDBLEAK_NUMBA"] = numba
        for command in ("leak-unreachable", "leak-retained"):
            whole = [*script, "-ex", start + "llvmlite.binding", "-ex", command, *about]
            seconds(whole)                                          # the first run may compile
            times = [seconds(whole) - min(base) for _ in range(runs if numba == "1" else 2)]
            describe(f"{command} beyond that{note}", times, floor)
    os.environ["GDBLEAK_NUMBA"] = "1"
    with_numba = [*script, "-ex", start + "numba"]
    least = peak_anonymous([*with_numba, *about])
    count, edges = totals(program, core)
    for command in ("leak-unreachable", "leak-retained"):
        more = peak_anonymous([*with_numba, "-ex", command, *about]) - least
        print(f"{command}: {more / 1e6:,.1f} MB of anonymous memory beyond GDB with NumPy and Numba: "
              f"{(more - 4 * edges) / count:.1f} bytes a block + 4 a pointer ({edges:,} pointers)")


def totals(program, core):
    """(blocks of the heap, pointers between them), as the tool counts them."""
    import json
    items = []
    for command in ("sizes", "unreachable"):
        seconds([ROOT / ".venv" / "bin" / "gdbleak", command, "--core", core, "--exe", program, "--json", CACHE / "graph.json"])
        items += [item for item in json.loads((CACHE / "graph.json").read_text()) if item["type"] == "totals"]
    sizes, graph = items
    return sizes["in_use_blocks"] + sizes["tcached_blocks"] + sizes["free_blocks"], graph["edges"]


def shape(name, n):
    """(begins, targets) of a graph of n rows that row 0 reaches."""
    rows = np.arange(n, dtype=np.int32)
    if name == "chain":
        return np.minimum(np.arange(n + 1, dtype=np.int32), n - 1), rows[1:]
    if name == "star":
        begins = np.full(n + 1, n - 1, np.int32)
        begins[0] = 0
        return begins, rows[1:]
    if name == "LRU":             # 0 holds a list and a table that both reach every payload
        payloads = n - 2
        targets = np.concatenate([[1, 2], 2 + np.arange(payloads), 3 + np.arange(payloads - 1)]).astype(np.int32)
        begins = np.concatenate([[0, 2], 2 + payloads + np.arange(payloads), [len(targets)]]).astype(np.int32)
        return begins, targets
    random = np.random.default_rng(1)
    counts = np.full(n, 3, np.int64)
    begins = np.zeros(n + 1, np.int32)
    begins[1:] = np.cumsum(counts)
    targets = random.integers(0, n, 3 * n, np.int32)
    targets[::3][:-1] = rows[1:]  # and a chain, so that all are reached
    return begins, targets


def measure_shapes(n):
    """Print the seconds of reachability and of dominators for n and n / 10 rows of each shape."""
    from gdbleak.graph.dominators import Dominators
    from gdbleak.graph.graph import Graph

    print(f"\nshapes of {n:,} rows and of a tenth: seconds to reach all, to find all dominators, times as long as the tenth")
    for name in SHAPES:
        taken = []
        for rows in (1000, n // 10, n):     # the first compiles
            begins, targets = shape(name, rows)
            began = time.perf_counter()
            tree = Graph(begins, targets, np.zeros(len(targets), np.int32), [("root", 0)]).tree
            middle = time.perf_counter()
            dominators = Dominators(begins, targets, 0)
            taken.append((middle - began, time.perf_counter() - middle))
            if tree.count != rows or len(dominators) != rows:
                sys.exit(f"{name}: {tree.count:,} of {rows:,} rows are reached")
            del tree, dominators
        (_, (few, few_dominators), (reach, dominate)) = taken
        print(f"{name:10} {reach:8.2f} s {dominate:8.2f} s {reach / few:8.1f} x {dominate / few_dominators:8.1f} x")
