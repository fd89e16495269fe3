"""leak-gc at any moment of a program that allocates without end: what is missing is named, chunk by chunk."""
import json
import random
import subprocess

import pytest

from tests import luajit_target
from tests.luajit_target import FIXTURES
from tests.targets import TIMEOUT, items_of, run_gdb

CASES = [("debian-debug", "churn", 15), ("openresty", "grow", 15)]
SLOW = [(name, mode, 250) for name in ("debian", "openresty-debug", "debian-gc32", "openresty-gc32")
        for mode in ("churn", "grow", "buffers")]


def checks_at(pid, stops, directory):
    """(self-check, text of the report) at as many moments of a process, a few milliseconds apart."""
    moments, commands = random.Random(stops), []
    for number in range(stops):
        commands += [f"shell sleep {moments.random() / 100:.4f}", f"attach {pid}", "echo \\n<<<",
                     f"leak-gc --json {directory / str(number)}", "detach"]
    texts = run_gdb(commands, timeout=10 * TIMEOUT).stdout.split("\n<<<")
    assert len(texts) == stops + 1, texts[-1]
    for number, text in enumerate(texts[1:]):
        assert (directory / str(number)).exists() and "Traceback" not in text, text
        yield items_of(json.loads((directory / str(number)).read_text()), "check")[0], text


@pytest.mark.parametrize("name, mode, stops",
                         [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_any_moment(tmp_path, name, mode, stops):
    """Each gap is what the stop caught under way; at most what a table is made of, and what the parser works in."""
    command = [luajit_target.build(name).path, FIXTURES / "busy.lua", mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout.readline() == b"busy\n"
            gaps = [(check, text) for check, text in checks_at(busy.pid, stops, tmp_path) if check["gap"]]
        finally:
            busy.kill()
    for check, text in gaps:
        assert check["explained"] and len(check["in_flight"]) <= 7, text
    assert gaps or stops < 100
