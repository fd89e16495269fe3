"""nginx's shared memory zones and the slab allocator inside each: pages, slots and runs of free pages."""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..target.address_space import Absent
from ..target.target import Target
from . import nginx_layouts as layouts
from .nginx_pool import Nginx


@dataclass
class Slot:
    """Allocations of one size class: how many chunks there are and how many are in use."""

    size: int
    total: int
    used: int
    requests: int
    fails: int


@dataclass
class Zone:
    """One shared zone. Pages of the slab pool: `pages` = `used_pages` + `free_pages`.
    `problem`: why it could not be read."""

    name: str
    module: str                 # the nginx module whose zone it is, "" when that cannot be told
    address: int
    size: int
    pages: int = 0
    free_pages: int = 0
    pfree: int = 0              # nginx's own count of free pages
    longest_run: int = 0
    runs: int = 0
    page_size: int = 4096
    slots: list[Slot] = field(default_factory=list)
    problem: str = ""

    @property
    def used_pages(self) -> int:
        return self.pages - self.free_pages

    @property
    def is_lua_dict(self) -> bool:
        return self.module in ("ngx_http_lua_module", "ngx_stream_lua_module", "ngx_meta_lua_module")


def zones(nginx: Nginx) -> list[Zone]:
    """The zones of cycle->shared_memory in their order. Empty when the cycle is not known."""
    if nginx.fields is None:
        return []
    target = nginx.target
    names = _module_names(nginx)
    found = []
    for address in _list_elements(target, nginx.cycle + nginx.fields.dtype.fields["shared_memory"][1]):
        try:
            row = target.space.struct(address, layouts.SHM_ZONE)
            name = target.space.read(int(row["name_data"]),
                                     min(int(row["name_len"]), 1024)).decode("utf-8", "backslashreplace")
        except Absent:
            found.append(Zone("?", "", 0, 0, problem="the zone's description is not in the core"))
            continue
        zone = Zone(name, names.get(int(row["tag"]), ""), int(row["addr"]), int(row["size"]),
                    page_size=target.auxv.get(6, 4096))
        try:
            _read_slab(target, zone)
        except Absent as absent:
            zone.problem = f"{absent}: was coredump_filter without shared memory (bits 1 and 3)?"
        found.append(zone)
    return found


def _list_elements(target: Target, address: int) -> list[int]:
    """Addresses of the elements of an ngx_list_t."""
    found: list[int] = []
    try:
        head = target.space.struct(address, layouts.LIST)
        size = int(head["size"])
        part = head
        while size and len(found) < 100_000:
            elements, count, following = (int(part[name]) for name in ("part_elts", "part_nelts", "part_next"))
            if count > 100_000:
                break
            found += [elements + k * size for k in range(count)]
            if not following:
                break
            part = target.space.struct(following, layouts.LIST_PART)
    except Absent:
        pass
    return found


def _module_names(nginx: Nginx) -> dict[int, str]:
    """Address of each ngx_module_t of the cycle -> its name."""
    names = {}
    for address, module in nginx.modules():
        try:
            names[address] = nginx.target.space.cstring(int(module["name"]), 128).decode("utf-8", "replace")
        except Absent:
            names[address] = ""
    return names


def _read_slab(target: Target, zone: Zone) -> None:
    """Fill in pages, slots and free runs of a zone. Raises Absent."""
    if not zone.address:
        zone.problem = "not mapped yet"
        return
    pool = target.space.struct(zone.address, layouts.SLAB_POOL)
    low, high = zone.address, zone.address + zone.size
    first, last = int(pool["pages"]), int(pool["last"])
    if not low < first <= last <= high or int(pool["end"]) != high or (last - first) % layouts.SLAB_PAGE.itemsize:
        zone.problem = "no slab pool: the module lays this zone out itself"
        return
    zone.pages = (last - first) // layouts.SLAB_PAGE.itemsize
    zone.pfree = int(pool["pfree"])
    _free_runs(target, zone, int(pool["free_next"]), first, last)
    shift, stats = int(pool["min_shift"]), int(pool["stats"])
    count = zone.page_size.bit_length() - 1 - shift
    if low < stats < high and 0 < count < 16:
        rows = np.frombuffer(target.space.read(stats, count * layouts.SLAB_STAT.itemsize), layouts.SLAB_STAT)
        zone.slots = [Slot(1 << (shift + k), int(row["total"]), int(row["used"]), int(row["reqs"]), int(row["fails"]))
                      for k, row in enumerate(rows)]


def _free_runs(target: Target, zone: Zone, page: int, first: int, last: int) -> None:
    """Walk the ring of free runs: each begins with a page whose `slab` is the run's length."""
    head = zone.address + layouts.SLAB_FREE
    seen = set()
    while page != head:
        if not first <= page < last or page in seen:
            zone.problem = f"the list of free pages is damaged at {page:#x}"
            return
        seen.add(page)
        row = target.space.struct(page, layouts.SLAB_PAGE)
        length = int(row["slab"])
        if length > zone.pages:
            zone.problem = f"the list of free pages is damaged at {page:#x}"
            return
        zone.free_pages += length
        zone.runs += 1
        zone.longest_run = max(zone.longest_run, length)
        page = int(row["next"])
