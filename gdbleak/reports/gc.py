"""leak-gc: the objects of each LuaJIT VM by type, what is dead, the self-check, and LuaJIT's own allocator."""
from __future__ import annotations

from collections import Counter

import numpy as np

from ..graph.native import PENDING
from ..kernels import luajit as kernel
from ..runtimes import luajit_layouts, luajit_makers
from ..runtimes.luajit import VM, ctype_table, finalizer_table, table_nodes
from ..runtimes.luajit_flight import Chunks, Flight, in_flight
from ..runtimes.luajit_makers import Makers
from ..runtimes.luajit_names import Names
from ..target.address_space import Absent
from ..target.target import TargetError
from .analysis import Analysis
from .document import Data, Report, Table, printable, share, size_name

_SHAPES = 2000                  # groups of tables that are compared with the code


def run(analysis: Analysis, arguments) -> Report:
    """One part for each VM of the target."""
    vms = need_vms(analysis)
    report = analysis.open_report("leak-gc")
    for number, vm in enumerate(vms):
        say_vm(report, analysis, number)
        _totals(report, vm)
        report.say()
        report.add(_types(vm))
        report.say()
        report.add(_strings(vm))
        report.say()
        report.add(_parts(vm))
        _allocator(report, vm)
        if arguments.types:
            for table in _refined(vm, arguments.top):
                report.say()
                report.add(table)
    if arguments.types and analysis.glibc:
        report.say()
        _native(report, analysis)
    return report


def _native(report: Report, analysis: Analysis) -> None:
    """What live and dead objects hold of malloc's memory."""
    native = analysis.native
    sizes, rows = native.nodes.size, native.rows_of(PENDING)
    held = [np.unique(np.concatenate([held.rows(live) for held in native.holders])) for live in (True, False)]
    table = [[f"{name} objects point to", len(blocks), int(sizes[blocks].sum())] for name, blocks in zip(("live", "dead"), held)]
    table.append(["pending: only dead objects hold it", len(rows), int(sizes[rows].sum())])
    report.add(Table(["native memory (malloc)", "blocks", "bytes"], table,
                     "what Lua holds of malloc's memory; pending is neither live nor leaked, the next collection releases it", (0,),
                     "leak-retained --pins: which objects pin how much"))


def need_vms(analysis: Analysis) -> list[VM]:
    """The VMs of the target, or TargetError that says what is there instead."""
    vms = analysis.luajit
    if not vms:
        for module in analysis.target.modules:
            if module.name.startswith(("liblua5", "liblua.", "lua5")):
                raise TargetError(f"no LuaJIT here: {printable(module.name)} is PUC Lua, which is not supported yet")
        raise TargetError("no LuaJIT VM was found: nothing in the target has the shape of a GG_State")
    return vms


def say_vm(report: Report, analysis: Analysis, number: int) -> None:
    """Say which VM number `number` is, how its layout is known, and whether its sum closes."""
    vm, count = analysis.luajit[number], len(analysis.luajit)
    which = f" {number + 1} of {count}" if count > 1 else ""
    owner = f" of {vm.owner}" if vm.owner else ""
    references = "GC64" if vm.layout.gc64 else "32-bit references"
    layout = f"layout from debug information, {references}" if vm.layout.source == "debug information" else \
        f"layout of {luajit_layouts.FAMILIES[vm.layout.family]}, {references} (from tables, by fingerprint)"
    report.say(f"LuaJIT VM{which}{owner} at {vm.main:#x}, found by {vm.found_by}: {layout}; collector: {vm.state}")
    vm.graph   # for the notes it makes
    check = vm.check()
    item = {"type": "check", "name": f"gc.total of the VM at {vm.main:#x}", "ours": check.ours, "truth": check.truth,
            "gap": check.gap}
    report.add(Data(item))
    if check.gap:
        chunks = _chunks(analysis, number)
        flight = in_flight(vm, check.gap, chunks) if chunks else None
        item["explained"] = _is_explained(vm, flight)
        item["in_flight"] = [{"address": address, "bytes": size} for address, size in flight.chunks] if flight else []
        report.say(f"  self-check {'does not close, and why is known' if item['explained'] else 'FAILED'}: gc.total: "
                   f"ours {check.ours:,}, its own counter {check.truth:,}, gap {check.gap:+,} bytes")
        report.say(f"  {_explain(vm, check.gap, flight)}")
    else:
        report.say(f"  self-check: gc.total {check.truth:,} bytes equals our sum, gap 0")
    for note in vm.notes:
        report.say(f"  note: {note}")


def _chunks(analysis: Analysis, number: int) -> Chunks | None:
    """The chunks that can be those of VM `number`; None where no allocator can be asked."""
    if analysis.luajit[number].allocator:
        return Chunks.of_lj_alloc(analysis.luajit[number])
    try:
        return analysis.native.chunks_of(number)
    except MemoryError:                  # what a graph of all blocks takes is too much: the gap is explained in words
        return None


def _inside(vm: VM) -> list:
    """The threads that stood in LuaJIT's own code, or in code that it made."""
    return [thread for thread in vm.target.threads if vm.runs(thread.pc)]


def _is_explained(vm: VM, flight: Flight | None) -> bool:
    """Whether something that a stop can catch under way makes up the gap. (What names more than there is room for is
    caught for a few instructions only: else it is damaged.)"""
    return flight is not None and flight.counted is not None and not (flight.full and not _inside(vm))


def _explain(vm: VM, gap: int, flight: Flight | None) -> str:
    """What explains a gap, from the allocator's chunks, from where the threads stood and what the collector did."""
    inside = _inside(vm)
    where = ", ".join(f"thread {t.lwp} at {printable(vm.target.name_of(t.pc) or hex(t.pc), 60)}" for t in inside[:3])
    stood = f"stopped inside LuaJIT ({where})" if inside else "no thread stood in LuaJIT's own code"
    if flight is not None and flight.counted is not None:
        verb = "explained by" if _is_explained(vm, flight) else "damaged, it seems:"
        return f"{verb} {'; '.join(_under_way(flight))}; {stood}, collector: {vm.state}"
    if gap < 0:
        return (f"{stood}: an object that LuaJIT has counted and not linked yet, as while a string is copied in, would "
                f"explain {-gap:,} bytes")
    if vm.state.startswith("sweep"):
        return f"{stood}: objects that the sweep has freed and not unlinked yet would explain {gap:,} bytes"
    return f"{stood}: nothing known explains {gap:,} bytes too many; the layout may not fit this build"


def _under_way(flight: Flight):
    """What a stop has caught under way, in words."""
    if flight.chunks:
        count = f"{len(flight.chunks)} allocations" if len(flight.chunks) > 1 else "one allocation"
        where = ", ".join(f"{address:#x} (a chunk of {size:,})" for address, size in flight.chunks)
        state = f"being resized (the VM names {flight.named:,} bytes there)" if flight.named else \
            "in none of the VM's lists yet, or no more"
        yield f"{count} in flight, {flight.counted:,} bytes that gc.total counts: {where}, {state}"
    if flight.gone:
        yield "what is freed or moved, and named still: " + _listed(flight.gone)
    if flight.swept:
        yield "what is counted out, and named still: " + _listed(flight.swept)
    if flight.unfinished:
        yield "a function whose upvalues are not set yet: " + _listed(flight.unfinished)


def _listed(blocks: list[tuple[int, int]]) -> str:
    return ", ".join(f"{size:,} bytes at {address:#x}" for address, size in blocks)


def _totals(report: Report, vm: VM) -> None:
    """The plain numbers of a VM; those of LuaJIT's own allocator, where it is in charge, as well."""
    dead, heap = dead_rows(vm), vm.allocator
    allocator = {} if heap is None else {
        "allocator_mapped_bytes": heap.footprint, "allocator_segments": len(heap.segments),
        "allocator_direct_bytes": sum(size for _, size in heap.direct), "allocator_free_bytes": heap.free_pool,
        "allocator_in_use_bytes": heap.total("in_use_bytes"), "allocator_in_use_chunks": heap.total("in_use_chunks"),
        "allocator_overhead_bytes": heap.total("overhead")}
    known, size = ctype_table(vm)
    report.totals(runtime="luajit", objects=len(vm.objects), bytes=vm.total, dead_objects=int(dead.sum()),
                  dead_bytes=int(vm.objects.size[dead].sum()), c_types=known, c_type_table_bytes=size, **allocator)


def dead_rows(vm: VM) -> np.ndarray:
    """Mask of the objects that nothing reaches: the next collection frees them."""
    return vm.graph.tree.seen == 0


def _types(vm: VM) -> Table:
    objects, dead = vm.objects, dead_rows(vm)
    rows = []
    for kind, name in kernel.KINDS.items():
        mine = objects.kind == kind
        count = int(mine.sum())
        if count:
            sizes = objects.size[mine]
            gone = mine & dead
            rows.append([name, count, int(sizes.sum()), share(int(sizes.sum()), vm.total), f"{sizes.mean():,.1f}",
                         int(sizes.max()), int(gone.sum()), int(objects.size[gone].sum())])
    rows.sort(key=lambda row: -row[2])
    header = ["type", "count", "bytes", "of gc.total", "mean", "max", "dead: count", "bytes"]
    return Table(header, rows, "objects by type (dead: not reached, the next collection frees them)")


def _strings(vm: VM) -> Table:
    """Strings and tables split by size."""
    objects, rows = vm.objects, []
    for kind in (kernel.STR, kernel.TAB):
        sizes = objects.size[objects.kind == kind]
        classes = np.frexp(sizes.astype(np.float64))[1] - 1
        for power in np.unique(classes):
            mine = sizes[classes == power]
            rows.append([kernel.KINDS[kind], f"{size_name(1 << int(power))}-{size_name(2 << int(power))}", len(mine),
                         int(mine.sum())])
    return Table(["type", "size", "count", "bytes"], rows, "strings and tables by size", (0, 1))


def _parts(vm: VM) -> Table:
    rows = [["objects", int(vm.objects.size.sum())]] + [[name, size] for name, size in vm.buffers.items() if size]
    rows.append(["sum", vm.accounted])
    used = (f"string table: {vm.string_buckets_used:,} of {vm.string_buckets:,} slots used; "
            f"machine code (not in gc.total): {_machine_code(vm):,} bytes")
    return Table(["part of gc.total", "bytes"], rows, "what gc.total is made of", (0,), used)


def _machine_code(vm: VM) -> int:
    return vm.target.word(vm.main + vm.layout.GG_J + vm.layout.J_szallmcarea) or 0


def _allocator(report: Report, vm: VM) -> None:
    heap = vm.allocator
    report.say()
    if heap is None:
        report.say("allocator: the system's malloc (or one of the program's own), "
                   "so its objects are blocks of that heap")
        return
    numbers = {name: heap.total(name) for name in ("in_use_bytes", "in_use_chunks", "overhead")}
    report.say(f"allocator lj_alloc: {heap.footprint:,} bytes mapped in {len(heap.segments)} segments and "
               f"{len(heap.direct)} mappings of single blocks; in use {numbers['in_use_bytes']:,} "
               f"({numbers['in_use_chunks']:,} chunks), free pool {heap.free_pool:,} ({heap.total('free_chunks'):,} "
               f"chunks, {heap.total('top_bytes'):,} in top), overhead {numbers['overhead']:,}")
    report.say("  the free pool is kept for the next objects and goes back to the system only by whole segments: "
               "it is no leak")
    for note in heap.notes:
        report.say(f"  note: {note}")


def _refined(vm: VM, top: int) -> list[Table]:
    """cdata by C type, their finalizers, userdata by metatable, functions by where they are written,
    tables by their path and by the code that can have made them."""
    names, tables = Names(vm), []
    known, size = ctype_table(vm)
    for kind, title, name_of in ((kernel.CDATA, f"cdata by C type (names from the VM's table of {known:,} C types, "
                                                f"{size:,} bytes)", names.ctype_of),
                                 (kernel.UDATA, "userdata by metatable",
                                  lambda row: names.userdata(row) or "(no name)"),
                                 (kernel.FUNC, "functions by where they begin", names.function)):
        rows = [(name_of(int(row)), int(vm.objects.size[row])) for row in np.flatnonzero(vm.objects.kind == kind)]
        tables.append(_counted(kernel.KINDS[kind], title, rows, top))
    tables.append(_counted("finalizer", "cdata by finalizer (bytes: of the cdata objects alone)",
                           list(_finalizers(names)), top))
    tables += [_table_paths(vm, top), _table_makers(names, top)]
    return [table for table in tables if table.rows]


def _counted(noun: str, title: str, rows: list[tuple[str, int]], top: int) -> Table:
    """(name, bytes) pairs summed up by name, the most bytes first."""
    counts: Counter = Counter(name for name, _ in rows)
    sums: Counter = Counter()
    for name, size in rows:
        sums[name] += size
    shown = [[printable(name, 80), counts[name], size] for name, size in sums.most_common(max(top, 0))]
    left = len(sums) - len(shown)
    return Table([noun, "count", "bytes"], shown, title, (0,), f"{left:,} more: --top N shows them" if left else "")


def _finalizers(names: Names):
    """(what finalizes it, bytes) of each cdata object that has a finalizer."""
    vm = names.vm
    table = finalizer_table(vm)
    try:
        nodes = table_nodes(vm, table).tolist() if table else []
    except Absent:
        nodes = []
    for value, key in nodes:
        kind, held = vm.object_in(value)
        cdata, address = vm.object_in(key)
        row = vm.row(address) if cdata == kernel.CDATA else -1
        if kind and row >= 0:
            yield names.finalizer(held), int(vm.objects.size[row])


def _table_paths(vm: VM, top: int) -> Table:
    """Groups of tables by the path that leads to them, the most bytes of their own first."""
    from .gc_refs import Folded
    folded = Folded(vm)
    groups = folded.groups
    tables = np.flatnonzero((groups.kind == kernel.TAB) & (groups.count > 0))
    rows = []
    for group in tables[np.argsort(-groups.bytes[tables], kind="stable")][:max(top, 0)]:
        path = " => ".join(printable(folded.frame(step), 60) for step in folded.groups.path(int(group)))
        rows.append([path if len(path) < 120 else "... " + path[-116:], int(groups.count[group]),
                     int(groups.bytes[group])])
    left = len(tables) - len(rows)
    return Table(["table", "count", "bytes"], rows, "tables by path (their own bytes)", (0,),
                 f"{left:,} more: --top N shows them" if left else "")


def _table_makers(names: Names, top: int) -> Table:
    """Tables by the code that they can be from, the most bytes first; where none is known, by their names."""
    vm, makers, found = names.vm, Makers(names), {}
    shapes = luajit_makers.shapes(vm)
    for row, count, colo, number, size in zip(shapes.row[:_SHAPES].tolist(), shapes.names.tolist(),
                                              shapes.colo.tolist(), shapes.count.tolist(), shapes.bytes.tolist()):
        fields = luajit_makers.names_of(vm, row) if count > 0 else frozenset()
        places = makers.places(fields, colo) if count >= 0 else []
        text = _fields_text(names, fields, count, colo)
        entry = found.setdefault(tuple(places) or text, [_places_text(places), text, 0, 0])
        entry[2] += number
        entry[3] += size
    rows = sorted(found.values(), key=lambda entry: -entry[3])
    shown = rows[:max(top, 0)]
    notes = [f"{len(rows) - len(shown):,} more: --top N shows them"] if len(rows) > len(shown) else []
    if len(shapes) > _SHAPES:
        notes.append(f"not looked at: {int(shapes.count[_SHAPES:].sum()):,} tables, "
                     f"{int(shapes.bytes[_SHAPES:].sum()):,} bytes, of the {len(shapes) - _SHAPES:,} smallest groups")
    title = "tables by the code that makes such (inferred: from their names and array parts; their own bytes)"
    return Table(["made at", "names", "count", "bytes"], shown, title, (0, 1), "; ".join(notes))


def _places_text(places: list[str], most: int = 3) -> str:
    more = f" or {len(places) - most} more" if len(places) > most else ""
    return " or ".join(printable(place, 50) for place in places[:most]) + more if places else "not known"


def _fields_text(names: Names, fields: frozenset[int], count: int, colo: int, most: int = 6) -> str:
    """`{1..3, name, size}`: array slots that were allocated with the table, and names."""
    if count < 0:
        return f"(more than {luajit_makers.MOST_NAMES} names)"
    shown = [f"1..{colo - 1}"] if colo > 1 else []
    shown += [printable(text, 24) for text in sorted(names.text(field, 24) for field in fields)[:most]]
    return "{" + ", ".join(shown) + (f", {count - most} more" if count > most else "") + "}"
