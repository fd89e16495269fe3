"""What recording costs its target: sampled, nginx under wrk and a malloc-bound program, beside the undisturbed rate.

Undisturbed and recorded stretches alternate, so that a machine that others use too is as slow for both. The
malloc-bound program is judged by its calls per second of processor time, nginx by requests per second as wrk counts,
and by the requests in a second of its worker's processor time, which a busy machine distorts less.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import nginx_target                          # noqa: E402
from tests.record_target import Recorder, Subject       # noqa: E402
from tests.targets import build                         # noqa: E402


def processor_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bound(threads, rounds, seconds):
    """Calls per processor second while recorded, over those undisturbed: a ratio a round."""
    with Subject(build("record_bound", "-O2").path, threads) as subject:
        last = [0]

        def read():
            for line in subject.process.stdout:
                last[0] = int(line)

        threading.Thread(target=read, daemon=True).start()

        def rate(length):
            calls, used = last[0], processor_seconds(subject.pid)
            time.sleep(length)
            return (last[0] - calls) / (processor_seconds(subject.pid) - used)

        ratios = []
        for _ in range(rounds):
            before = rate(seconds)
            recorder = Recorder("sample", subject.pid, "--seconds", 3 * seconds, "--grace", "0", "--json", "-")
            recorder.wait_begin()
            time.sleep(0.2)
            during = rate(2 * seconds)
            told = next(item for item in json.loads(recorder.finish()[0]) if item["type"] == "totals")
            ratios.append(2 * during / (before + rate(seconds)))
            print(f"  {before / 1e6:.1f} M calls a processor second, {during / 1e6:.1f} recorded: "
                  f"{ratios[-1]:.3f}; {told['taken']:,} samples, stopped {told['stop_ms']:.1f} ms", flush=True)
        return statistics.median(ratios)


def nginx(rounds, seconds):
    """Requests per second while recorded, over those undisturbed: a ratio a round."""
    nginx_target.build("module")
    with tempfile.TemporaryDirectory() as directory, \
            nginx_target.Nginx(Path(directory) / "nginx", block="200") as server:
        url = f"http://127.0.0.1:{server.port}/leak/nothing"

        def rate():
            """Requests a second, and a second of the worker's processor time."""
            used = processor_seconds(server.worker)
            said = subprocess.run(["wrk", "-t1", "-c20", f"-d{seconds}", url], capture_output=True, text=True).stdout
            if "Socket errors" in said or "Non-2xx" in said:
                sys.exit(f"requests were lost:\n{said}")
            used = processor_seconds(server.worker) - used
            made = int(re.search(r"(\d+) requests", said)[1])
            return float(re.search(r"Requests/sec: *([\d.]+)", said)[1]), made / used

        ratios, efforts = [], []
        rate()
        for _ in range(rounds):
            before = rate()
            recorder = Recorder("sample", server.worker, "--seconds", seconds + 1, "--grace", "0", "--json", "-")
            recorder.wait_begin()
            during = rate()
            recorder.finish()
            after = rate()
            ratios.append(2 * during[0] / (before[0] + after[0]))
            efforts.append(2 * during[1] / (before[1] + after[1]))
            print(f"  {before[0]:,.0f} requests/s, {during[0]:,.0f} recorded: {ratios[-1]:.3f}; by processor time "
                  f"{efforts[-1]:.3f}", flush=True)
        return statistics.median(ratios), statistics.median(efforts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3, help="length of an undisturbed stretch")
    chosen = parser.parse_args()
    for threads in (1, 4):
        print(f"malloc-bound, {threads} threads: calls per processor second, recorded over undisturbed", flush=True)
        print(f"  median {bound(threads, chosen.rounds, chosen.seconds):.3f} (wanted: 0.80)")
    print("nginx under wrk: requests a second, recorded over undisturbed", flush=True)
    by_clock, by_processor = nginx(chosen.rounds, chosen.seconds)
    print(f"  median {by_clock:.3f}, by the worker's processor time {by_processor:.3f} (wanted: 0.95)")


if __name__ == "__main__":
    main()
