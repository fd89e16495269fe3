"""leak-shm: nginx's shared zones, how full each is and how long a run of pages it could still give."""
from __future__ import annotations

from ..flame import Profile
from ..heaps import nginx_slab
from ..target.target import TargetError
from .analysis import Analysis
from .document import Data, Report, Table, printable, share


def run(analysis: Analysis, arguments) -> Report:
    """One row a zone; with `--slots` the size classes of each."""
    nginx = analysis.nginx
    if nginx is None or nginx.fields is None:
        raise TargetError("no shared zones can be listed: the target has no ngx_cycle that can be read (is it nginx?)")
    report = analysis.open_report("leak-shm")
    zones = nginx_slab.zones(nginx)
    for zone in zones:
        if zone.problem:
            report.say(f"zone {printable(zone.name)}: {printable(zone.problem)}")
        elif zone.pages:
            check = {"name": f"zone {zone.name}: free pages = pfree", "ours": zone.free_pages, "truth": zone.pfree,
                     "gap": zone.free_pages - zone.pfree}
            report.add(Data({"type": "check", **check}))
            if check["gap"]:
                report.say(f"self-check FAILED: {printable(zone.name)}: its runs have {zone.free_pages:,} free pages, "
                           f"its own counter says {zone.pfree:,}")
    report.totals(zones=len(zones), bytes=sum(z.size for z in zones), pages=sum(z.pages for z in zones),
                  free_pages=sum(z.free_pages for z in zones), used_pages=sum(z.used_pages for z in zones))
    report.say()
    report.add(_zones(zones))
    if arguments.slots:
        for zone in zones:
            if zone.slots:
                report.say()
                report.add(_slots(zone))
    report.profile = Profile(f"Shared zones of {analysis.target.command_name()} (pid {analysis.target.source.pid})",
                             "Pages of nginx's slab pools by zone, and what the zone has besides (measured)")
    for zone in zones:
        rest = zone.size - zone.pages * zone.page_size
        for state, size, pages in (("used pages", zone.used_pages * zone.page_size, zone.used_pages),
                                   ("free pages", zone.free_pages * zone.page_size, zone.free_pages),
                                   ("the zone's own", rest, 1)):
            if size > 0:
                report.profile.add([f"zone {zone.name}", state], size, pages)
    return report


def _zones(zones) -> Table:
    rows = []
    for zone in zones:
        kind = "lua_shared_dict" if zone.is_lua_dict else printable(zone.module, 40)
        slots = sum(slot.used * slot.size for slot in zone.slots)
        rows.append([printable(zone.name, 60), kind, f"{zone.address:#x}", zone.size, zone.pages, zone.used_pages,
                     zone.free_pages, share(zone.used_pages, zone.pages), zone.longest_run,
                     sum(slot.used for slot in zone.slots), slots, sum(slot.fails for slot in zone.slots)])
    header = ["zone", "of", "address", "size", "pages", "used pages", "free pages", "full", "longest free run",
              "slot blocks in use", "their bytes", "failed requests"]
    return Table(header, rows, "shared memory zones (pages of the slab pool)", (0, 1, 2))


def _slots(zone) -> Table:
    rows = [[slot.size, slot.used, slot.total - slot.used, slot.used * slot.size, slot.requests, slot.fails]
            for slot in zone.slots]
    return Table(["slot", "used", "free", "used bytes", "requests", "fails"], rows,
                 f"slots of zone {printable(zone.name)}", ())
