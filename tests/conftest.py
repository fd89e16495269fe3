"""Options of the test run, and captures that tests share."""
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests import chroots                                                   # noqa: E402
from tests.targets import (DAMAGE, SCENARIOS, STATIC, Unavailable, ask,     # noqa: E402
                           build, capture)

OPTIONS = {"slow": "run the tests that take long", "matrix": "run the tests on other releases, in chroots"}


def pytest_addoption(parser):
    for name, text in OPTIONS.items():
        parser.addoption(f"--{name}", action="store_true", help=text)


def pytest_configure(config):
    # A run in the background may have inherited that these are ignored, and all that it starts would inherit it, too.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL),
                            (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    for name, text in OPTIONS.items():
        config.addinivalue_line("markers", f"{name}: {text}")


def pytest_collection_modifyitems(config, items):
    for item in items:
        for name in OPTIONS:
            if name in item.keywords and not config.getoption(f"--{name}"):
                item.add_marker(pytest.mark.skip(reason=f"needs --{name}"))


#: Environment that a scenario needs: the tunable lets the tcache take large blocks, where the release can.
ENVIRONMENT = {"tcache_big": {"GLIBC_TUNABLES": "glibc.malloc.tcache_max=262144"}}


@pytest.fixture(scope="session")
def captured(tmp_path_factory):
    """Function of (program, scenario, where): its Capture, made once. `where`: the linking, or a release."""
    made = {}

    def get(source, scenario=None, where="dynamic"):
        key = source, scenario, where
        if key not in made:
            directory = tmp_path_factory.mktemp("-".join(filter(None, key)))
            try:
                made[key] = capture(program(source, where), directory, *filter(None, [scenario]),
                                    env=ENVIRONMENT.get(scenario))
            except Unavailable as reason:               # a release that moves on is no error
                pytest.skip(str(reason))
        return made[key]
    return get


def program(source, where):
    """fixtures/programs/`source`.c built for `where`."""
    if where in chroots.RELEASES:
        return chroots.build_in(chroots.bootstrap(where), source)
    return build(source, *([] if where == "dynamic" else [f"-{where}"]))


@pytest.fixture(scope="session")
def answers(captured):
    """Function of (program, scenario, where, no_debug): Replies about it by name. One GDB does all alike."""
    made = {}

    def get(source, scenario=None, where="dynamic", no_debug=False):
        if (source, scenario, where, no_debug) not in made:
            all_of = {"heaps": STATIC if where.startswith("static") else SCENARIOS, "damage": DAMAGE}
            group = all_of.get(source, [])
            alike = group if scenario in group else [scenario]
            cores = [captured(source, name, where) for name in alike]
            replies = ask([(core, commands_about(core)) for core in cores], no_debug=no_debug)
            for name, core, of_core in zip(alike, cores, replies):
                made[source, name, where, no_debug] = dict(zip(questions_about(core), of_core))
        found = made[source, scenario, where, no_debug]
        for reply in found.values():
            assert "Traceback" not in reply.text, reply.text
        return found
    return get


def questions_about(core):
    """Names of what is asked about a core: mallinfo, sizes, blocks, and (kind, address) of leak-what."""
    noted = dict(core.truth.get("addresses", {}))
    noted["mmapped"] = [block["address"] for block in core.truth.get("mmapped", [])]
    return ["mallinfo", "sizes", "blocks",
            *[(kind, address) for kind, addresses in noted.items() for address in addresses[:6]]]


def commands_about(core):
    """The commands that ask it."""
    lists = {"mallinfo": "leak-mallinfo --arenas", "sizes": "leak-sizes --exact --top 100000",
             "blocks": "leak-blocks --top 100000"}
    return [lists.get(question) or f"leak-what {question[1]:#x}" for question in questions_about(core)]
