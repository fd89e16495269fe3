"""The graph on cores with very many, overlapping and missing pieces, and where memory is short: partial, and said so."""
import struct

import pytest

from gdbleak.graph import native
from tests.targets import Capture, ask, build, capture, items_of, totals

HEADER = struct.Struct("<IIQQQQQQ")          # type, flags, offset, address, physical, size in file, in memory, alignment


class Segments:
    """A core file's program headers, to be written anew behind the file's end."""

    def __init__(self, path):
        self.data = bytearray(path.read_bytes())
        at, = struct.unpack_from("<Q", self.data, 32)
        count, = struct.unpack_from("<H", self.data, 56)
        self.rows = [list(HEADER.unpack_from(self.data, at + HEADER.size * k)) for k in range(count)]

    def holding(self, address):
        """The number of the segment that holds an address."""
        return next(k for k, row in enumerate(self.rows) if row[0] == 1 and row[3] <= address < row[3] + row[6])

    def add_bytes(self, data):
        """Append bytes to the file; their offset, at a page."""
        self.data += bytes(-len(self.data) % 4096)
        self.data += data
        return len(self.data) - len(data)

    def write(self, path):
        table = b"".join(HEADER.pack(*row) for row in self.rows)
        at = self.add_bytes(table)
        struct.pack_into("<Q", self.data, 32, at)
        struct.pack_into("<H", self.data, 56, len(self.rows))
        path.write_bytes(self.data)
        return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return capture(build("paths", "-O1"), tmp_path_factory.mktemp("paths"))


def answers(core, path, *commands):
    (replies,) = ask([(Capture(path, core.exe, core.truth, []), commands)])
    for reply in replies:
        assert "Traceback" not in reply.text, reply.text
    return replies


def test_twenty_thousand_mappings(tmp_path):
    core = capture(build("mappings"), tmp_path, "20000")
    unreachable, sizes = answers(core, core.core, "leak-unreachable", "leak-sizes --size 112 --state reached")
    assert totals(unreachable.items)["blocks"] == 0
    assert totals(sizes.items)["in_use_blocks"] >= core.truth["held"] == 20000
    assert "in mapped memory" in unreachable.text


def test_overlapping_segments(paths, tmp_path):
    """A second copy of the heap, and a page in its middle, that say something else: what comes first counts."""
    segments = Segments(paths.core)
    heap = segments.rows[segments.holding(paths.truth["a_text"])]
    other = segments.add_bytes(b"\x5a" * heap[5])
    segments.rows.append([*heap[:2], other, *heap[3:]])
    segments.rows.append([*heap[:2], other, heap[3] + 8192, heap[4], 4096, 4096, heap[7]])
    path = segments.write(tmp_path / "core")
    whole, changed = answers(paths, paths.core, "leak-retained"), answers(paths, path, "leak-retained")
    assert totals(changed[0].items) == totals(whole[0].items)


def test_missing_pages(paths, tmp_path):
    """The page with the beginning of the list is not in the core: what is lost is counted, and its followers are not called
    leaks without a word."""
    segments = Segments(paths.core)
    number = segments.holding(paths.truth["a_payload"])
    kind, flags, offset, start, physical, size, memory, align = segments.rows[number]
    hole = paths.truth["a_payload"] & ~4095
    behind = hole + 4096
    segments.rows[number:number + 1] = [
        [kind, flags, offset, start, physical, hole - start, hole - start, align],
        [kind, flags, 0, hole, physical, 0, 4096, align],
        [kind, flags, offset + behind - start, behind, physical, size - (behind - start), memory - (behind - start), align]]
    path = segments.write(tmp_path / "core")
    (reply,) = answers(paths, path, "leak-unreachable")
    said = totals(reply.items)
    lost = [item for item in items_of(reply.items, "finding") if item["kind"] == "lost-edges"]
    damage = [item for item in items_of(reply.items, "finding") if item["kind"] == "heap-damage"]
    assert said["lost_words"] or damage, "the hole cuts blocks, or chunk headers"
    assert bool(lost) == bool(said["lost_words"])
    assert "partial" in reply.text


@pytest.mark.parametrize("mode", ["unaligned", "heap", "region"])
def test_stacks_where_one_does_not_expect_them(tmp_path, mode):
    """A thread's stack in the middle of other data, or in a malloc block; data that looks like a thread descriptor."""
    core = capture(build("stacks", "-O1"), tmp_path, mode)
    unreachable, reached = answers(core, core.core, "leak-blocks --state unreachable --size 3008 --top 100",
                                   "leak-blocks --state reached --size 3008")
    assert totals(unreachable.items)["blocks"] == core.truth["lost"]
    assert totals(reached.items)["blocks"] == core.truth["held"] - (mode == "heap")      # the stack has another size


def test_hub_of_a_long_list(tmp_path):
    """Thousands refer to one block, each by a path of its own length: a few of them are told, and at once."""
    core = capture(build("stacks", "-O1"), tmp_path, "hub")
    (reply,) = answers(core, core.core, f"leak-path {core.truth['hub']}")
    assert totals(reply.items)["reached"]
    assert max(len(line) for line in reply.text.splitlines()) < 1000


def test_memory_that_the_core_leaves_out(tmp_path):
    """Shared memory is not dumped, as the kernel's filter can say: what only it holds is not called a leak without a word."""
    core = capture(build("leaks", "-O1"), tmp_path, "shared_memory", core_filter=0x31)
    (reply,) = answers(core, core.core, "leak-unreachable")
    said = totals(reply.items)
    assert said["lost_root_bytes"] > 0 and "bytes that can hold pointers are not in the core" in reply.text
    finding, = [item for item in items_of(reply.items, "finding") if item["kind"] == "unreachable"]
    assert finding["confidence"] == "inferred"


@pytest.mark.parametrize("command", ["leak-unreachable", "leak-retained", "leak-path --size 48", "leak-types"])
@pytest.mark.parametrize("kind", ["size_zero", "size_huge", "size_thread", "bin_wild", "tcache_wild", "top_size"])
def test_damaged_heaps(captured, kind, command):
    core = captured("damage", kind)
    (reply,) = answers(core, core.core, command)
    assert reply.items, reply.text
    if kind.startswith("size_") and command == "leak-unreachable":
        assert "are damaged; their words count as roots" in reply.text


def test_too_little_memory(monkeypatch, tmp_path):
    """Said before anything is begun."""
    with pytest.raises(MemoryError, match=r"blocks: the pointers between them need about .* MB of memory"):
        native.check_room(1 << 40, native.BYTES_A_BLOCK, "the pointers between them")
