"""What `scripts/bench --live` runs: how long a process of 1 GB and 8 threads stands still while it is copied.

By its own clock: the longest time that one of its threads, which reads the clock without pause, saw nothing. Beside it
in the same run a bare memcpy of the same bytes, and gcore.
"""
import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gdbleak.record.fork import snapshot_by_fork        # noqa: E402
from gdbleak.target import live                         # noqa: E402

MEGABYTES, THREADS = 1024, 8
CACHE = ROOT / ".cache" / "bench"


class Target:
    """The running program."""

    def __init__(self, pages):
        CACHE.mkdir(parents=True, exist_ok=True)
        exe = CACHE / "live_stop"
        source = ROOT / "fixtures" / "programs" / "live_stop.c"
        subprocess.run(["gcc", "-O2", "-pthread", "-o", exe, source], check=True)
        self._process = subprocess.Popen([exe, str(MEGABYTES), str(THREADS), pages], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)
        self.pid = int(self._process.stdout.readline().split()[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def _ask(self, question):
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline()) / 1e6

    @contextlib.contextmanager
    def runs_alone(self, other):
        """The other target, which needs processors as this one does, stands still."""
        os.kill(other.pid, signal.SIGSTOP)
        yield
        os.kill(other.pid, signal.SIGCONT)

    def bare_copy(self):
        """Milliseconds of a memcpy of its memory."""
        return self._ask("copy")

    def stood_still(self, began, ended):
        """The longest gap in that time (seconds, as of time.monotonic()), in milliseconds."""
        return self._ask("gap %d %d" % (began * 1e9, ended * 1e9))


def snapshot(target, take, directory):
    """Milliseconds that the target stood still for a snapshot; of a fork the longer of its two stops."""
    path = os.path.join(directory, "core")
    made = take(target.pid, path)
    if made.refused:
        sys.exit(f"no fork: {made.refused}")
    os.unlink(path)
    first = target.stood_still(made.stopped_at, made.stopped_at + made.stop_ms / 1000)
    return max(first, made.forked_ms or 0)


def gcore(target, directory):
    """Milliseconds that the target stood still for GDB's gcore."""
    began = time.monotonic()
    subprocess.run(["gcore", "-o", os.path.join(directory, "gcore"), str(target.pid)], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ended = time.monotonic()
    os.unlink(os.path.join(directory, f"gcore.{target.pid}"))
    return target.stood_still(began, ended)


def measure(pages, runs, directory):
    """{what: milliseconds of each run}: all of it in turn, as the machine's load changes.

    The forks are another target's: a fork leaves the kernel more to do for whoever reads those pages first."""
    found = {"bare memcpy": [], "stop by copy": [], "stop by fork": [], "by copy after a fork": [], "gcore": []}
    with Target(pages) as target, Target(pages) as forking:
        for run in range(runs):
            with target.runs_alone(forking):
                found["bare memcpy"].append(target.bare_copy())
                found["stop by copy"].append(snapshot(target, live.snapshot, directory))
                if run < 3:
                    found["gcore"].append(gcore(target, directory))
            with forking.runs_alone(target):
                found["stop by fork"].append(snapshot(forking, snapshot_by_fork, directory))
                found["by copy after a fork"].append(snapshot(forking, live.snapshot, directory))
    return found


def main():
    parser = argparse.ArgumentParser(prog="scripts/bench --live", description=__doc__)
    parser.add_argument("runs", type=int, nargs="?", default=10, help="runs of each (default 10; gcore at most 3)")
    parser.add_argument("--directory", help="where the cores are written (default: /dev/shm if it has the room)")
    chosen = parser.parse_args()
    from gdbleak.target.room import roomy_directory

    with tempfile.TemporaryDirectory(dir=chosen.directory or roomy_directory(MEGABYTES << 20)) as directory:
        print(f"{MEGABYTES} MB touched, {THREADS} threads, {len(os.sched_getaffinity(0))} processors, cores in "
              f"{os.path.dirname(directory)}; milliseconds by the target's own clock")
        for pages, limit in (("small", 40), ("huge", 8)):
            found = measure(pages, chosen.runs, directory)
            print(f"\n{'4 KiB pages' if pages == 'small' else 'huge pages':24} {'best':>8} {'median':>8} {'worst':>8}")
            for name, times in found.items():
                print(f"{name:24} {min(times):8.1f} {statistics.median(times):8.1f} {max(times):8.1f}")
            bare, copy = (statistics.median(found[name]) for name in ("bare memcpy", "stop by copy"))
            print(f"by copy {copy / bare:.2f} times the bare copy; the limits are 1.3 times and 10 ms, here "
                  f"{1.3 * bare + 10:.0f} ms, and by fork {limit} ms")


if __name__ == "__main__":
    main()
