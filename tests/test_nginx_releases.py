"""Debian's own nginx of several releases, the others' in chroots: the same load and the same truths for each."""
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests import chroots, nginx_target
from tests.nginx_target import Nginx, ask
from tests.targets import Unavailable, kernel_writes_cores
from tests.test_pools import check_memory, check_pools
from tests.test_slab import check_zones

#: Release name -> its nginx, and what else is needed to build the module there.
RELEASES = {
    "bullseye": ("1.18", ["make", "dpkg-dev", "libpcre3-dev", "zlib1g-dev", "libssl-dev"]),
    "trixie": ("1.26", ["nginx-dev"]),
    "sid": ("1.30", ["nginx-dev"]),
}
OTHERS = [pytest.param(release, marks=pytest.mark.matrix) for release in RELEASES]


@pytest.fixture(scope="module", params=["host", *OTHERS])
def captured(request, tmp_path_factory):
    """A core of the release's worker under load. A release that moves on is no error: the reason is told."""
    if request.param == "host":
        nginx_target.build("module")
        with Nginx(tmp_path_factory.mktemp("host") / "nginx") as nginx:
            put_under_load(nginx)
            return nginx.core()
    return in_chroot(request.param, tmp_path_factory.mktemp(request.param))


def in_chroot(release, directory):
    """The same of another release, the core moved to `directory`."""
    version, packages = RELEASES[release]
    if not kernel_writes_cores():
        pytest.skip("core_pattern does not write to the working directory: no cores from a chroot")
    try:
        root = chroots.bootstrap(release)
        chroots.install(root, "nginx", *packages)
    except Unavailable as reason:
        pytest.skip(str(reason))
    found = nginx_version(root), chroots.glibc_version(root)
    if found != (version, chroots.RELEASES[release]):
        pytest.skip(f"{release} has nginx {found[0]} and glibc {found[1]} now, not {version} and "
                    f"{chroots.RELEASES[release]}")
    inside = Path(tempfile.mkdtemp(dir=root / "tmp"))
    try:
        with Nginx(inside / "nginx", exe=root / "usr/sbin/nginx", module=nginx_target.build_in(root),
                   root=root) as nginx:
            put_under_load(nginx)
            core = nginx.core()
        return core._replace(core=shutil.move(core.core, directory / "core"))
    finally:
        shutil.rmtree(inside)


def nginx_version(root):
    """Major and minor version of the nginx in the chroot, such as "1.18"."""
    told = subprocess.run(["chroot", root, "nginx", "-v"], capture_output=True, text=True, check=True).stderr
    return re.search(r"nginx/(\d+\.\d+)", told).group(1)


def put_under_load(nginx):
    """Connections of every kind, forgotten memory, and zones with something in them."""
    nginx.burst("/quick/burst")
    nginx.fill_zones()
    nginx.http2_idle(8)
    nginx.idle(19)
    nginx.half_sent(13)
    nginx.waiting(9)
    nginx.trickle(5)
    nginx.http2(7)
    nginx.held(3)
    nginx.timer(6)
    nginx.get_many(["/leak/pool"] * 41 + ["/leak/destroyed"] * 23 + ["/leak/block"] * 11)


def test_pools(captured):
    """With the debug information of the release's libc, and without."""
    for no_debug in (False, True):
        reply, = ask(["leak-pools"], captured, no_debug=no_debug)
        assert "Traceback" not in reply.text
        check_pools(reply.items, captured.truth)


def test_zones(captured):
    reply, = ask(["leak-shm"], captured)
    check_zones(reply.items, captured.truth)


def test_memory(captured):
    check_memory(captured)


def test_requests_are_named(captured):
    """Found without debug information of nginx: the request lines that the clients sent."""
    reply, = ask(["leak-pools --top 1000"], captured)
    for path, number in {"half/": 13, "slow/wait/": 9, "slow/trickle/": 5, "slow/wait/h2-": 7}.items():
        assert all(f"/{path}{index}" in reply.text for index in range(number)), path
