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
        for mode in ("churn", "grow")]


def checks_at(pid, stops, directory):
    """The self-checks at as many moments of a process, a few milliseconds apart."""
    moments, commands = random.Random(stops), []
    for number in range(stops):
        commands += [f"shell sleep {moments.random() / 100:.4f}", f"attach {pid}",
                     f"leak-gc --json {directory / str(number)}", "detach"]
    done = run_gdb(commands, timeout=5 * TIMEOUT)
    assert "Traceback" not in done.stdout, done.stdout
    for number in range(stops):
        assert (directory / str(number)).exists(), done.stdout
        yield items_of(json.loads((directory / str(number)).read_text()), "check")[0]


@pytest.mark.parametrize("name, mode, stops", [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_any_moment(tmp_path, name, mode, stops):
    """Each gap is what the stop caught on its way; at most all that a table is made of, and what the parser works in."""
    with subprocess.Popen([luajit_target.build(name).path, FIXTURES / "busy.lua", mode], stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout.readline() == b"busy\n"
            checks = list(checks_at(busy.pid, stops, tmp_path))
        finally:
            busy.kill()
    gaps = [check for check in checks if check["gap"]]
    assert not [check for check in gaps if not check["explained"]]
    assert all(len(check["in_flight"]) <= 7 for check in gaps)
    assert gaps or stops < 100
