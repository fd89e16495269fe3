"""What has been found out about one target, each part when it is first asked for and then kept."""
from __future__ import annotations

from functools import cached_property

from ..heaps import glibc, glibc_layouts
from ..target import link_map
from ..target.target import Target, TargetError
from .document import Data, Report, printable, share


class Analysis:
    """The heaps of a target. One is kept with each Target."""

    def __init__(self, target: Target):
        self.target = target

    @classmethod
    def of(cls, target: Target) -> "Analysis":
        """The analysis of this target, the same each time."""
        if target.analysis is None:
            target.analysis = cls(target)
        return target.analysis

    @cached_property
    def glibc(self) -> list[glibc.GlibcHeap]:
        """Every glibc malloc in use, walked."""
        return glibc.find(self.target)

    @cached_property
    def nginx(self):
        """The nginx pools of the target (`heaps.nginx_pool.Nginx`), or None when it is no nginx."""
        from ..heaps import nginx_pool
        return nginx_pool.find(self.target, self.glibc)

    @cached_property
    def luajit(self) -> list:
        """Every LuaJIT VM of the target (`runtimes.luajit.VM`)."""
        from ..runtimes import luajit
        vms = luajit.find(self.target, self.glibc)
        states = self.nginx.lua_states() if vms and self.target.symbol("ngx_cycle") and self.nginx else {}
        for vm in vms:
            vm.owner = next((name for state, name in states.items() if vm.row(state) >= 0 or state == vm.main), "")
        return vms

    @cached_property
    def native(self):
        """The pointers between malloc blocks and the state of each block (`graph.native.Native`)."""
        from ..graph.native import Native
        return Native(self.target, self.glibc if self.luajit else self.need_glibc(), self.luajit)

    @cached_property
    def types(self):
        """The types of malloc blocks (`graph.types.Types`)."""
        from ..graph import types
        return types.of(self.target, self.glibc, self.nginx, self.luajit)

    @cached_property
    def process(self):
        """Blocks, Lua objects and roots as one graph (`graph.process.Process`)."""
        from ..graph.process import Process
        native, pooled = self.native, None
        if self.nginx and len(native.nodes):
            pooled = native.nodes.over_heaps([owner > 0 for _, owner in self.nginx.owners])
        return Process(native, pooled, self.types)

    @cached_property
    def malloc_owner(self) -> str:
        """The module whose malloc the program calls, by the dynamic linker's order; "" when that cannot be told."""
        owner = link_map.definer(self.target, "malloc")
        return owner.name if owner else ""

    def need_glibc(self) -> list[glibc.GlibcHeap]:
        """`glibc`, or TargetError with who owns malloc instead."""
        used = any(arena.system_mem for heap in self.glibc for arena in heap.arenas)
        owner = self.malloc_owner
        if not used and owner and not owner.startswith(("libc.", "libc-")):
            raise TargetError(f"no glibc heap here: malloc belongs to {printable(owner)}, which is not supported yet")
        if not self.glibc:
            if not self.target.modules:
                raise TargetError("no glibc heap was found: the core names no loaded files "
                                  "(its notes are missing or cut)")
            missing = [m.name for m in self.target.modules
                       if "libc" in m.name and not self.target.space.present(*_data(m))]
            if missing:
                raise TargetError(f"no glibc heap was found: the data of {printable(missing[0])} is not in the core")
            raise TargetError("no glibc heap was found: nothing has the shape of a main_arena (malloc was never "
                              "called, or the program brings an allocator of its own)")
        return self.glibc

    # -- how each report opens and closes ------------------------------------------------------------------------------
    def open_report(self, command: str) -> Report:
        """A report that says what was read and how much of it was there."""
        target = self.target
        source = target.source
        report = Report(command)
        name = printable(target.command_name(), 60)
        what = f"core file {printable(source.path)}" if source.kind == "core" else f"process {source.pid}, stopped"
        there = f"{share(round(1e6 * source.coverage), 1_000_000)} of its readable memory is there"
        report.say(f"{name} (pid {source.pid}), {what}: {there}")
        item = {"type": "source", "coverage": round(source.coverage, 6), "partial": list(source.partial)}
        item.update({"path": source.path} if source.kind == "core" else {"pid": source.pid})
        report.add(Data(item))
        for reason in source.partial:
            report.say(f"partial: {printable(reason, 400)}")
        return report

    def say_glibc(self, report: Report) -> None:
        """Say which allocator was found and how, whether its sums close, and what is damaged."""
        for heap in self.glibc:
            where = f" in {printable(heap.module.name)}" if len(self.glibc) > 1 else ""
            report.say(f"{heap.name}{where} (release from {heap.release_from}, layout from {heap.layout_from}), "
                       f"{len(heap.arenas)} arena{'s' * (len(heap.arenas) != 1)}, {len(heap.blocks):,} blocks")
            if heap.layout_from == "tables" and heap.release not in glibc_layouts.TESTED:
                report.say(f"  layout from tables, untested: no test has run glibc {heap.release[0]}.{heap.release[1]}")
            checks = heap.checks()
            for check in checks:
                report.add(Data({"type": "check", "name": check.name, "ours": check.ours, "truth": check.truth,
                                 "gap": check.gap}))
            wrong = [check for check in checks if check.gap]
            if wrong:
                for check in wrong:
                    report.say(f"  self-check FAILED: {check.name}: ours {check.ours:,}, its own counter "
                               f"{check.truth:,}, gap {check.gap:+,} bytes{_own_miscount(heap, check)}")
            else:
                report.say(f"  self-check: {len(checks)} sums equal glibc's own counters to the byte")
            for note in heap.notes:
                report.say(f"  note: {note}")
            for damage in heap.damage[:8]:
                good = f"; last good chunk {damage.last_good:#x}" if damage.last_good else ""
                report.say(f"  damage at {damage.address:#x}: {damage.what}{good}")
            if len(heap.damage) > 8:
                report.say(f"  and {len(heap.damage) - 8:,} more such places")
            if heap.damage:
                report.add(Data({"type": "finding", "kind": "heap-damage", "severity": "high", "confidence": "measured",
                                 "impact": sum(e - s for r in heap.regions for s, e in r.damaged),
                                 "facts": [f"{d.address:#x}: {d.what}" for d in heap.damage[:100]],
                                 "hypothesis": "something wrote outside of its block, or memory is missing "
                                               "from the core",
                                 "next": [f"leak-what {heap.damage[0].address:#x}"]}))
        if self.target.arch.name != "x86-64" and self.glibc:
            report.say(f"note: {self.target.arch.name} is read by the same tables, untested: no test has run on it")
        owner = self.malloc_owner
        if owner and not any(heap.module.name == owner for heap in self.glibc):
            report.say(f"note: the program's malloc belongs to {printable(owner)}; what follows is only glibc's part")


def _own_miscount(heap, check) -> str:
    """glibc 2.43's mremap adds 16 bytes too many to mmapped_mem each time."""
    known = heap.release >= glibc_layouts.MMAPPED_WITHOUT_HEADER and "mmapped" in check.name and \
        check.gap < 0 and not check.gap % 16
    return " (glibc 2.43 itself counts 16 bytes too many for each mremap of such a chunk)" if known else ""


def _data(module) -> tuple[int, int]:
    ranges = module.writable()
    return (min(r[0] for r in ranges), max(r[1] for r in ranges)) if ranges else (module.start, module.end)
