"""The same truths on other glibc releases, in chroots: cores made there, opened here with their sysroot."""
import pytest

from tests import chroots
from tests.targets import DAMAGE
from tests.test_mallinfo import SOUND, check_damage, check_layout, check_mallinfo, check_two_libcs, no_debug
from tests.test_sizes import check_addresses, check_sizes

pytestmark = [pytest.mark.matrix, pytest.mark.parametrize("release", chroots.RELEASES)]


@no_debug
@pytest.mark.parametrize("scenario", SOUND)
def test_heap(release, scenario, no_debug, captured, answers):
    core, replies = captured("heaps", scenario, release), answers("heaps", scenario, release, no_debug)
    check_layout(replies["mallinfo"], no_debug)
    check_mallinfo(replies["mallinfo"], core)
    check_sizes(replies["sizes"], core)
    check_addresses(replies, core)


def test_two_libcs(release, captured, answers):
    reply = answers("two_libcs", None, release, True)["mallinfo"]
    check_two_libcs(reply, captured("two_libcs", None, release))


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage(release, kind, captured, answers):
    check_damage(answers("damage", kind, release, True)["mallinfo"], captured("damage", kind, release))


def test_release_is_what_it_is_here_for(release, captured):
    """A chroot whose glibc has moved on tests another release than it says: seen, and no error."""
    version = captured("heaps", "empty", release).truth["glibc"]
    if version != chroots.RELEASES[release]:
        pytest.skip(f"{release} has glibc {version} now, not {chroots.RELEASES[release]}")
