"""leak-pools: nginx's memory pools, by kind and creator, the largest, and those that nothing known reaches."""
from __future__ import annotations

from collections import Counter

import numpy as np

from ..quantities import address as address_of, size
from ..flame import Profile
from ..heaps import nginx_layouts as layouts
from ..heaps.nginx_pool import KINDS, Nginx, Pool
from ..kernels import chunks, pools as kernel
from ..target.address_space import Absent
from ..target.target import TargetError
from .analysis import Analysis
from .document import Report, Table, printable, share, size_name

UNREACHED = KINDS.index("unreached")


def run(analysis: Analysis, arguments) -> Report:
    """All pools, or the one at `arguments.address`."""
    nginx = analysis.nginx
    if nginx is None:
        owner = analysis.malloc_owner
        raise TargetError("no nginx here: the target has no ngx_cycle, and no block on its malloc heap "
                          "has the shape of a pool"
                          + (f" (malloc belongs to {printable(owner)})"
                             if owner and not owner.startswith("libc") else ""))
    report = analysis.open_report("leak-pools")
    analysis.say_glibc(report)
    if arguments.address:
        _one(report, nginx, address_of(arguments.address, arguments.evaluate), arguments)
        return report
    kinds = nginx.kinds()
    _say_nginx(report, analysis, nginx)
    _totals(report, analysis, nginx, kinds)
    chosen = np.ones(len(kinds), bool)
    if arguments.unreached:
        chosen &= kinds == UNREACHED
    least = size(arguments.min_bytes, arguments.evaluate)
    chosen &= _bytes(nginx) >= least
    report.say()
    report.add(_summary(nginx, kinds, chosen))
    report.say()
    report.add(_largest(nginx, chosen, arguments.top))
    report.profile = _profile(nginx, kinds, chosen)
    return report


def _bytes(nginx: Nginx) -> np.ndarray:
    return nginx.table[:, kernel.BLOCK_BYTES] + nginx.table[:, kernel.LARGE_BYTES]


def _say_nginx(report: Report, analysis: Analysis, nginx: Nginx) -> None:
    how = f"ngx_cycle at {nginx.cycle:#x}, layout from {nginx.layout_from}" if nginx.layout_from else \
        "no ngx_cycle that can be read"
    debug = ", Tengine's debug pools" if nginx.header == layouts.DEBUG_POOL_HEADER else ""
    report.say(f"nginx: {how}{debug}; {nginx.connections:,} connections in use")
    for note in nginx.notes:
        report.say(f"  note: {note}")
    if not any(len(heap.blocks) for heap in analysis.glibc):
        report.say("  note: no glibc heap is in use, so pools are known only where ngx_cycle leads to them: "
                   "none can be told unreached")


def _totals(report: Report, analysis: Analysis, nginx: Nginx, kinds: np.ndarray) -> None:
    sums = _bytes(nginx)
    total, lost = int(sums.sum()), int(sums[kinds == UNREACHED].sum())
    in_use = sum(int(heap.blocks.size[heap.blocks.state == chunks.IN_USE].sum()) for heap in analysis.glibc)
    number = int((kinds == UNREACHED).sum())
    report.say(f"{len(kinds):,} pools hold {total:,} bytes, {share(total, in_use)} of the {in_use:,} bytes "
               "that are in use on glibc's heaps")
    if number:
        report.say(f"{number:,} pools ({lost:,} bytes, {share(lost, total)} of all pools) are unreached: no "
                   "connection, request, upstream, HTTP/2 stream, timer or cycle leads to them. Forgotten pools look "
                   "so; so do those that only a module's own structures know (e.g. the lua module's regexes)")
    _outside(report, analysis, nginx)
    report.totals(pools=len(kinds), bytes=total, unreached_pools=number, unreached_bytes=lost, in_use_bytes=in_use,
                  connections=nginx.connections,
                  by_kind={name: int((kinds == code).sum()) for code, name in enumerate(KINDS)})


def _outside(report: Report, analysis: Analysis, nginx: Nginx) -> None:
    """Say how much of the in-use memory is in no pool, and which size class holds most of it:
    forgotten blocks look so, too."""
    counts, totals = np.zeros(512, np.int64), np.zeros(512, np.int64)
    for heap, (_, owner) in zip(analysis.glibc, nginx.owners):
        alone = (owner == 0) & (heap.blocks.state == chunks.IN_USE)
        chunks.histogram(heap.blocks.size[alone], heap.blocks.state[alone], counts, totals)
    if counts.any():
        most = int(np.argmax(totals))
        low, high = size_name(1 << most // 8), size_name(2 << most // 8)
        report.say(f"{int(totals.sum()):,} bytes in use are in no pool ({int(counts.sum()):,} blocks); the largest "
                   f"part: {int(counts[most]):,} blocks of {low}-{high}, {int(totals[most]):,} bytes "
                   f"(leak-blocks --size {low}-{high})")


def _summary(nginx: Nginx, kinds: np.ndarray, chosen: np.ndarray) -> Table:
    """One row for each kind, creator and size, the most bytes first."""
    first, group = nginx.groups(kinds)
    columns = nginx.table[:, [kernel.BLOCK_BYTES, kernel.USED, kernel.UNUSED, kernel.LARGE, kernel.LARGE_BYTES]]
    sums = np.zeros((len(first), 6), np.int64)
    np.add.at(sums, group[chosen], np.column_stack([np.ones(int(chosen.sum()), np.int64), columns[chosen]]))
    merged: dict[tuple, np.ndarray] = {}
    for number, row in zip(first, sums):
        if row[0]:
            kind = KINDS[kinds[number]]
            creator, known = nginx.creator(int(number), kind)
            key = kind, printable(creator, 90) + ("" if known else " (inferred)"), int(nginx.table[number, kernel.SIZE])
            merged[key] = merged.get(key, 0) + row
    rows = [[*key, int(row[0]), int(row[1] + row[5]), *(int(value) for value in row[2:])]
            for key, row in merged.items()]
    rows.sort(key=lambda row: -row[4])
    header = ["kind", "creator", "size", "pools", "bytes", "used", "unused", "large", "large bytes"]
    return Table(header, rows, "pools by kind and creator (bytes: malloc chunks, headers included)", (0, 1))


def _largest(nginx: Nginx, chosen: np.ndarray, top: int) -> Table:
    numbers = np.flatnonzero(chosen)
    sums = _bytes(nginx)[numbers]
    order = numbers[np.argsort(-sums, kind="stable")][:max(top, 0)]
    rows = []
    for number in order:
        pool = nginx.pool(int(number))
        rows.append([f"{pool.address:#x}", pool.kind, whose(nginx, pool), pool.size, pool.bytes, pool.used, pool.unused,
                     pool.blocks, pool.large, pool.large_bytes, _cleanups(nginx, pool)])
    left = len(numbers) - len(order)
    header = ["address", "kind", "whose", "size", "bytes", "used", "unused", "blocks", "large", "large bytes",
              "cleanups"]
    return Table(header, rows, "the largest pools", (0, 1, 2, 10),
                 f"{left:,} more pools: --top N shows them" if left else "")


def whose(nginx: Nginx, pool: Pool, limit: int = 70) -> str:
    """The connection and request that a pool serves, in words."""
    holder = pool.holder
    if holder is None:
        return ""
    parts = []
    if holder.request:
        parts.append(printable(nginx.request_line(holder.request), limit) or "request without a first line yet")
    if holder.handler:
        parts.append(f"timer of {printable(nginx.target.name_of(holder.handler) or f'{holder.handler:#x}', limit)}")
    if holder.connection:
        client = printable(nginx.client(holder.connection), 60)
        parts.append(f"from {client}" if pool.kind != "upstream" and client else client)
    return ", ".join(part for part in parts if part)


def _cleanups(nginx: Nginx, pool: Pool) -> str:
    if not pool.cleanups:
        return ""
    name = printable(nginx.target.name_of(pool.handler) or f"{pool.handler:#x}", 60)
    return name + (f" and {pool.cleanups - 1} more" if pool.cleanups > 1 else "")


# -- one pool ----------------------------------------------------------------------------------------------------------
def _one(report: Report, nginx: Nginx, address: int, arguments) -> None:
    """Everything about the pool that begins at, or holds, `address`. Raises TargetError when there is none."""
    number = nginx.number_of(address)
    if number < 0:
        number = nginx.number_holding(address)
    if number < 0:
        raise TargetError(f"no nginx pool begins at or holds {address:#x}; leak-what {address:#x} says what is there")
    pool = nginx.pool(number)
    inside = "" if pool.address == address else f" ({address:#x} lies in it)"
    report.say(pool.describe() + inside)
    serves = whose(nginx, pool, 500)
    if serves:
        report.say(f"serves: {serves}")
    report.totals(pools=1, address=pool.address, bytes=pool.bytes, blocks=pool.blocks, block_bytes=pool.block_bytes,
                  used=pool.used, unused=pool.unused, large=pool.large, large_bytes=pool.large_bytes,
                  freed_large=pool.freed_large, cleanups=pool.cleanups, kind=pool.kind, creator=pool.creator)
    blocks, large, cleanups = _contents(nginx, pool)
    top = arguments.top
    report.say()
    report.add(Table(["block", "used", "unused", "failed"], [[f"{b[0]:#x}", *b[1:]] for b in blocks[:top]],
                     f"blocks of {pool.size:,} bytes, in order", (0,), _more(len(blocks), top)))
    if large:
        large.sort(key=lambda row: -row[1])
        report.say()
        report.add(Table(["large allocation", "bytes", "begins with"],
                         [[f"{a:#x}", size, _preview(nginx, a)] for a, size in large[:top]],
                         f"large allocations, the largest first ({pool.freed_large:,} more were freed early)", (0, 2),
                         _more(len(large), top)))
    if cleanups:
        report.say()
        names = Counter(printable(nginx.target.name_of(handler) or f"{handler:#x}", 80) for handler, _ in cleanups)
        report.add(Table(["cleanup handler", "times"], [[name, count] for name, count in names.most_common(top)],
                         "cleanup handlers", (0,), _more(len(names), top)))
    report.profile = _profile(nginx, nginx.kinds(), np.arange(len(nginx.addresses)) == number)


def _more(count: int, top: int) -> str:
    return f"{count - top:,} more: --top N shows them" if count > top else ""


def _contents(nginx: Nginx, pool: Pool):
    """(blocks, large allocations, cleanups) of a pool, each as far as it can be read."""
    space = nginx.target.space
    blocks, large, cleanups = [], [], []
    sizes = {}
    try:
        head = space.struct(pool.address, layouts.POOL)
        at, lead = pool.address, nginx.header
        while at and len(blocks) < pool.blocks:
            last, end, following, failed = (int(word) for word in space.words_of(at, at + 32))
            blocks.append((at, last - at - lead, end - last, failed))
            at, lead = following, layouts.BLOCK_HEADER
        node = int(head["large"])
        while node and len(large) + 1 <= pool.large + pool.freed_large + 1:
            allocation = space.word(node + 8)
            if allocation:
                large.append((allocation, _chunk_size(nginx, allocation, sizes)))
            node = space.word(node)
        node = int(head["cleanup"])
        while node and len(cleanups) < pool.cleanups:
            cleanups.append((space.word(node), space.word(node + 8)))
            node = space.word(node + 16)
    except Absent:
        pass
    return blocks, large, cleanups


def _chunk_size(nginx: Nginx, address: int, sizes: dict) -> int:
    if address not in sizes:
        sizes[address] = 0
        for heap in nginx.heaps:
            row = heap.blocks.row_of(address)
            if row >= 0:
                sizes[address] = int(heap.blocks.size[row])
    return sizes[address]


def _preview(nginx: Nginx, address: int) -> str:
    try:
        raw = nginx.target.space.read(address, 48)
    except Absent:
        return "(not in the core)"
    text = raw.split(b"\0")[0]
    return printable(text, 48) if len(text) >= 4 else raw[:16].hex(" ", 8)


# -- the flame graph ---------------------------------------------------------------------------------------------------
def _profile(nginx: Nginx, kinds: np.ndarray, chosen: np.ndarray) -> Profile:
    """cycle -> listener -> connection -> request -> pool -> small / large; unreached pools by who made them."""
    target = nginx.target
    profile = Profile(f"nginx pools of {target.command_name()} (pid {target.source.pid})",
                      "Malloc chunks that pools hold, each pool under what it serves; small: pool blocks, large: "
                      "allocations of their own (sizes measured, creators inferred unless the pool names them)")
    first, group = nginx.groups(kinds)
    columns = nginx.table[:, [kernel.BLOCK_BYTES, kernel.BLOCKS, kernel.LARGE_BYTES, kernel.LARGE]]
    # there can be very many of these
    alike = chosen & np.isin(kinds, [KINDS.index("unreached"), KINDS.index("timer")])
    sums = np.zeros((len(first), 4), np.int64)
    np.add.at(sums, group[alike], columns[alike])
    single = np.flatnonzero(chosen & ~alike)
    for number, row in [*zip(first, sums), *zip(single, columns[single])]:
        if row[1]:
            frames = _frames(nginx, int(number), KINDS[kinds[number]])
            profile.add(frames + ["small"], int(row[0]), int(row[1]))
            if row[3]:
                profile.add(frames + ["large"], int(row[2]), int(row[3]))
    return profile


def _frames(nginx: Nginx, number: int, kind: str) -> list[str]:
    holder = nginx.holders.get(int(nginx.addresses[number]))
    size = f"pool of {int(nginx.table[number, kernel.SIZE]):,}"
    if holder is None:
        creator, known = nginx.creator(number, kind)
        return ["unreached", creator + ("" if known else " (inferred)"), size]
    frames = ["cycle"]
    if holder.connection:
        listener = nginx.listener(holder.connection)
        frames += [f"listener {listener}", "connection"] if listener else ["upstream connections"]
    if holder.request and kind != "connection":
        line = nginx.request_line(holder.request).split(" ")
        frames.append("request " + " ".join(line[:2]).split("?")[0] if len(line) > 1 else
                      "request without a first line yet")
    return frames + [f"{kind} {size}"]
