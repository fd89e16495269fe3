"""Recordings of programs with another library's malloc, whose C++ operators do not call it, against what they did."""
import os
from pathlib import Path

import pytest

from tests import record_target
from tests.record_target import Subject, by_site, check_as_found, record
from tests.targets import build

pytestmark = pytest.mark.skipif(bool(record_target.needs()), reason=record_target.needs() or "-")

LIBRARIES = {"glibc": "", "jemalloc": "libjemalloc.so.2", "tcmalloc": "libtcmalloc_minimal.so.4",
             "mimalloc": "libmimalloc.so.2.0"}
MODES = {"sampled": ["--every", "1"], "calls": ["--every", "1", "--by", "calls"], "exact": ["--exact"]}


@pytest.fixture(params=LIBRARIES)
def library(request):
    return request.param


@pytest.fixture
def subject(library):
    """A program that uses the library."""
    name = LIBRARIES[library]
    if name and not list(Path("/usr/lib").glob(f"*/{name}")):
        pytest.skip(f"{name} is not installed")
    program = build("record_new.cc", "-O1", "-std=c++17", "-w").path
    with Subject(program, env={**os.environ, "LD_PRELOAD": name}) as subject:
        subject.line()
        yield subject


@pytest.mark.parametrize("mode", MODES)
def test_each_operator_is_recorded(subject, library, mode):
    """What is leaked by each, nothing of what is deleted by any."""
    items, stacks, answer = record("sample", subject, "go", "--grace", "0", *MODES[mode])
    assert len(answer) == (11 if library == "jemalloc" else 9)
    found = by_site(stacks, [*answer, "churn", "churn_jemalloc"])
    # By calls, one in one is taken with a probability of 63%: estimates from some 32 of 50.
    wrong = {site: found.get(site, 0) / size - 1 for site, size in answer.items()}
    assert max(map(abs, wrong.values())) < (0.6 if mode == "calls" else 0.001), wrong
    assert not {"churn", "churn_jemalloc"} & set(found)
    check_as_found(subject.pid)


@pytest.mark.parametrize("mode", MODES)
def test_what_fails_throws_as_it_does_by_itself(subject, library, mode):
    if library == "mimalloc":
        pytest.skip("it aborts where others throw")
    _, _, answer = record("sample", subject, "throw", "--grace", "0", *MODES[mode])
    assert answer == {"caught": 12, "handled": 3}
    check_as_found(subject.pid)
    subject.say("throw")
    assert '"caught": 12' in subject.line()
