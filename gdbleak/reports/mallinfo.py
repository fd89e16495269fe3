"""leak-mallinfo: the fields of mallinfo2(3) as the process would see them now."""
from __future__ import annotations

from dataclasses import asdict

from .analysis import Analysis
from .document import Report, Table
from .selection import Slice
from .sizes import profile_of

# The rows of mallinfo(3) in the order of the structure, without `usmblks`' obsolete meaning lost.
ROWS = [
    ("arena", "The total amount of memory allocated by means other than mmap.<br>This figure includes both in-use "
              "blocks and blocks on the free list."),
    ("ordblks", "The number of ordinary (i.e., non-fastbin) free blocks."),
    ("smblks", "The number of fastbin free blocks."),
    ("hblks", "The number of blocks currently allocated using mmap."),
    ("hblkhd", "The number of bytes in blocks currently allocated using mmap."),
    ("usmblks", "The \"highwater mark\" for allocated space that is the maximum amount of space that was ever "
                "allocated. <br> This field is maintained only in nonthreading environments."),
    ("fsmblks", "The total number of bytes in fastbin free blocks."),
    ("uordblks", "The total number of bytes used by in-use allocations."),
    ("fordblks", "The total number of bytes in free blocks."),
    ("keepcost", "The total amount of releasable free space at the top of the heap.<br>This is the maximum number of "
                 "bytes that could ideally be released by malloc_trim."),
]
TCACHED = "Of the bytes used by in-use allocations: bytes that wait in thread caches (tcache), freed by the program."
TCACHED_BLOCKS = "The number of those blocks in thread caches."


def run(analysis: Analysis, arguments) -> Report:
    """The mallinfo table of the process (one for each libc in it) and, with `--arenas`, of each arena."""
    heaps = analysis.need_glibc()
    report = analysis.open_report("leak-mallinfo")
    analysis.say_glibc(report)
    pid = analysis.target.source.pid
    for number, heap in enumerate(heaps):
        info = asdict(heap.mallinfo())
        blocks, total = sum(t.blocks for t in heap.tcaches), sum(t.bytes for t in heap.tcaches)
        where = f" ({heap.module.path}, libc {number + 1} of {len(heaps)})" if len(heaps) > 1 else ""
        rows = [[label, info[key]] for key, label in ROWS] + [[TCACHED, total], [TCACHED_BLOCKS, blocks]]
        report.say()
        report.add(_Wrapped(["Entry", "Size"], rows,
                            f"mallinfo for pid {pid}, use 'man mallinfo' for more details{where}"))
        report.totals(**info, tcached_blocks=blocks, tcached_bytes=total)
        if arguments.arenas:
            report.say()
            report.add(_by_arena(heap, pid))
    report.profile = profile_of(analysis, [Slice(heap, region, None) for heap in heaps for region in heap.regions])
    return report


class _Wrapped(Table):
    """The table with its long labels cut into lines of a readable width, on screen only."""

    def text(self) -> str:
        import textwrap
        rows = []
        for label, value in self.rows:
            lines = [line for part in label.split("<br>") for line in textwrap.wrap(part.strip(), 72)]
            rows.append(["\n".join(lines), value])
        return Table(self.header, rows, self.title).text()


def _by_arena(heap, pid: int) -> Table:
    header = ["arena", "address", "system_mem", "in use (uordblks)", "tcached", "free (fordblks)", "bins", "bin blocks",
              "fastbins", "fastbin blocks", "top", "regions"]
    rows = []
    for arena in heap.arenas:
        info = heap.mallinfo(arena)
        rows.append([("main" if arena.index == 0 else str(arena.index)) + (" (locked)" if arena.locked else ""),
                     f"{arena.address:#x}", arena.system_mem, info.uordblks, arena.tcached_bytes, info.fordblks,
                     arena.bin_bytes, arena.bin_blocks, arena.fast_bytes, arena.fast_blocks, arena.top_bytes,
                     sum(1 for r in heap.regions if r.arena == arena.index and r.kind != "mmapped")])
    return Table(header, rows, f"arenas of pid {pid} (tcached blocks are counted in the arena they came from)")
