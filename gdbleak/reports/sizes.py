"""leak-sizes: how many blocks of which size are in use, free or tcached."""
from __future__ import annotations

import numpy as np

from ..flame import Profile
from ..heaps.blocks import FREE_STATES, STATES
from ..kernels import chunks as kernel
from .analysis import Analysis
from .document import Report, Table, bar, size_name
from .selection import arena_name, describe, select


def run(analysis: Analysis, arguments) -> Report:
    """The distribution of chunk sizes by powers of two, or by exact size with `--exact`."""
    analysis.need_glibc()
    report = analysis.open_report("leak-sizes")
    analysis.say_glibc(report)
    slices = select(analysis, arguments)
    counts, totals = _histogram(slices)
    _totals(report, counts, totals)
    report.say()
    report.add(_exact(slices, arguments.top) if arguments.exact else _table(counts, totals, describe(arguments)))
    report.profile = profile_of(analysis, slices)
    return report


def _histogram(slices) -> tuple[np.ndarray, np.ndarray]:
    """Counts and bytes by (power of two, state), each int64[64, 8]."""
    counts, totals = np.zeros(512, np.int64), np.zeros(512, np.int64)
    for part in slices:
        kernel.histogram(part.size, part.state, counts, totals)
    return counts.reshape(64, 8), totals.reshape(64, 8)


def _totals(report: Report, counts: np.ndarray, totals: np.ndarray) -> None:
    free = list(FREE_STATES)
    blocks, sums = counts.sum(axis=0), totals.sum(axis=0)
    in_use, tcached = (int(blocks[s]) for s in (kernel.IN_USE, kernel.TCACHED))
    report.say(f"in use: {in_use:,} blocks, {int(sums[kernel.IN_USE]):,} bytes; tcached: {tcached:,} blocks, "
               f"{int(sums[kernel.TCACHED]):,} bytes; free: {int(blocks[free].sum()):,} blocks, "
               f"{int(sums[free].sum()):,} bytes ({int(sums[kernel.TOP]):,} of them top)")
    report.totals(in_use_blocks=in_use, in_use_bytes=int(sums[kernel.IN_USE]), tcached_blocks=tcached,
                  tcached_bytes=int(sums[kernel.TCACHED]), free_blocks=int(blocks[free].sum()),
                  free_bytes=int(sums[free].sum()))


def _table(counts: np.ndarray, totals: np.ndarray, chosen: str) -> Table:
    free = list(FREE_STATES)
    most = int(totals[:, kernel.IN_USE].max(initial=0))
    rows = []
    for k in np.flatnonzero(counts.sum(axis=1)):
        used = int(totals[k, kernel.IN_USE])
        rows.append([f"{size_name(1 << int(k))}-{size_name(2 << int(k))}", int(counts[k, kernel.IN_USE]), used,
                     bar(used, most), int(counts[k, kernel.TCACHED]), int(totals[k, kernel.TCACHED]),
                     int(counts[k, free].sum()), int(totals[k, free].sum())])
    header = ["size", "in use: blocks", "bytes", "", "tcached: blocks", "bytes", "free: blocks", "bytes"]
    return Table(header, rows, "block sizes (bytes of whole chunks, headers included)"
                 + (f": {chosen}" if chosen else ""), (0, 3))


def _exact(slices, top: int) -> Table:
    """One row a chunk size, the largest sums of in-use bytes first, at most `top`."""
    sizes: dict[int, list[int]] = {}
    for part in slices:
        for state in STATES:
            of_state = part.size[part.state == state]
            for value, count in zip(*(x.tolist() for x in np.unique(of_state, return_counts=True))):
                row = sizes.setdefault(value, [0, 0, 0])
                row[0 if state == kernel.IN_USE else 1 if state == kernel.TCACHED else 2] += count
    ordered = sorted(sizes.items(), key=lambda item: (-item[0] * item[1][0], -item[0] * sum(item[1])))
    rows = [[size, used, size * used, cached, size * cached, free, size * free]
            for size, (used, cached, free) in ordered[:max(top, 0)]]
    left_out = len(ordered) - len(rows)
    header = ["chunk size", "in use: blocks", "bytes", "tcached: blocks", "bytes", "free: blocks", "bytes"]
    return Table(header, rows, "exact chunk sizes (headers included), the most bytes in use first", (),
                 f"{left_out:,} more sizes: --top N shows them" if left_out else "")


def profile_of(analysis: Analysis, slices) -> Profile:
    profile = Profile(f"Block sizes of {analysis.target.command_name()} (pid {analysis.target.source.pid})",
                      "Malloc chunks, headers included, by arena, state and size class (measured)")
    for part in slices:
        counts, totals = _histogram([part])
        for k, state in zip(*np.nonzero(counts)):
            profile.add([arena_name(part.region), STATES[int(state)],
                         f"{size_name(1 << int(k))}-{size_name(2 << int(k))}"],
                        int(totals[k, state]), int(counts[k, state]))
    return profile
