"""nginx memory pools, found by two roads: from ngx_cycle along what nginx itself follows,
and by structure on the malloc heap.

What the second road finds and the first does not is unreached: forgotten pools, and those that only a module's own
structures know (regexes of the lua module, caches).
"""
from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field

import numpy as np

from ..kernels import pools as kernel
from ..target.address_space import Absent
from ..target.layout import struct
from ..target.target import Target
from . import nginx_layouts as layouts
from .blocks import reserve
from .glibc_heap import GlibcHeap

KINDS = ("cycle", "conf", "connection", "request", "upstream", "http2", "quic", "timer", "temp", "log", "other",
         "unreached")
_REQUEST_LINE = re.compile(rb"[A-Z]{2,16} [^\x00-\x20]+( HTTP/\d(\.\d)?)?\s*$")

# Which function of nginx creates pools of a kind: known from nginx's source, so inferred for a pool.
CREATORS = {"cycle": "ngx_init_cycle", "connection": "ngx_event_accept", "request": "ngx_http_alloc_request",
            "upstream": "ngx_http_upstream_connect", "http2": "ngx_http_v2_*", "quic": "ngx_quic_create_stream",
            "temp": "ngx_init_cycle"}


@dataclass
class Holder:
    """Whose a pool is: its kind, and the connection, request or timer handler (addresses, 0: none) that lead to it."""

    kind: str
    connection: int = 0
    request: int = 0
    handler: int = 0


@dataclass
class Pool:
    """One pool, made for printing. `bytes`: malloc chunks, headers included; `creator_known`: read, not inferred."""

    address: int
    kind: str
    creator: str
    creator_known: bool
    size: int
    used: int
    unused: int
    blocks: int
    block_bytes: int
    large: int
    large_bytes: int
    freed_large: int
    cleanups: int
    handler: int
    holder: Holder | None

    @property
    def bytes(self) -> int:
        return self.block_bytes + self.large_bytes

    def describe(self) -> str:
        """One line about the pool."""
        how = "" if self.creator_known else ", inferred"
        return (f"nginx pool {self.address:#x} ({self.kind}; creator: {self.creator}{how}): {self.bytes:,} bytes in "
                f"{self.blocks:,} blocks and {self.large:,} large allocations")


@dataclass
class Nginx:
    """The pools of a process. Row k of `table` (columns of `kernels.pools`) is pool k at `addresses[k]`."""

    target: Target
    heaps: list[GlibcHeap]
    cycle: int = 0                                       # address of the ngx_cycle_t, 0: not found
    fields: np.void | None = None                        # the ngx_cycle_t
    layout_from: str = ""
    addresses: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    table: np.ndarray = field(default_factory=lambda: np.zeros((0, kernel.COLUMNS), np.int64))
    known: set[int] = field(default_factory=set)         # the same addresses
    loose: dict[int, np.ndarray] = field(default_factory=dict)          # reached, on no malloc heap, not yet in table
    # per heap: its first pool; block row -> pool + 1
    owners: list[tuple[int, np.ndarray]] = field(default_factory=list)
    header: int = 80                                     # bytes of ngx_pool_t; 96 in Tengine's debug pools
    holders: dict[int, Holder] = field(default_factory=dict)                   # pool address -> whose it is
    connections: int = 0                                 # in use
    notes: list[str] = field(default_factory=list)
    request_line_offsets: list[int] = field(default_factory=list)       # where request_line was found in a request
    listeners: dict[int, str] = field(default_factory=dict)             # address of an ngx_listening_t -> its text
    line_searches: int = 0                                              # in requests where it was not

    # -- questions -----------------------------------------------------------------------------------------------------
    def kinds(self) -> np.ndarray:
        """The kind of each pool, as an index into KINDS (uint8)."""
        codes = np.full(len(self.addresses), KINDS.index("unreached"), np.uint8)
        if self.holders:
            held = np.fromiter(self.holders, np.uint64, len(self.holders))
            code = np.array([KINDS.index(holder.kind) for holder in self.holders.values()], np.uint8)
            order = np.argsort(self.addresses)
            at = np.minimum(np.searchsorted(self.addresses, held, sorter=order), max(len(order) - 1, 0))
            if len(order):
                rows = order[at]
                same = self.addresses[rows] == held
                codes[rows[same]] = code[same]
        return codes

    def number_of(self, address: int) -> int:
        """The number of the pool that begins at `address`, or -1."""
        found = np.flatnonzero(self.addresses == np.uint64(address))
        return int(found[0]) if len(found) else -1

    def number_holding(self, address: int) -> int:
        """The number of the pool one of whose blocks or large allocations holds `address`, or -1."""
        for heap, (first, owner) in zip(self.heaps, self.owners):
            row = heap.blocks.row_of(address)
            if row >= 0 and owner[row]:
                return first + int(owner[row]) - 1
        return -1

    def numbers_holding(self, addresses: np.ndarray) -> np.ndarray:
        """`number_holding` for many addresses (uint64) at once."""
        found = np.full(len(addresses), -1, np.int64)
        for heap, (first, owner) in zip(self.heaps, self.owners):
            rows = heap.blocks.rows_of(addresses)
            owned = np.where(rows >= 0, owner[rows], 0) if len(owner) else np.zeros(len(rows), np.int32)
            found[owned > 0] = first + owned[owned > 0] - 1
        return found

    def modules(self) -> list[tuple[int, np.void]]:
        """(address, ngx_module_t) of each module of the cycle."""
        found: list[tuple[int, np.void]] = []
        at = int(self.fields["modules"]) if self.fields is not None else 0
        try:
            while at and len(found) < 4096:
                module = self.target.space.word(at)
                if not module:
                    break
                found.append((module, self.target.space.struct(module, layouts.MODULE)))
                at += 8
        except Absent:
            pass
        return found

    def lua_states(self) -> dict[int, str]:
        """The lua_State that each lua module runs -> the module's name: the first word of its main configuration."""
        named, found = {}, {}
        for _, module in self.modules():
            try:
                named[self.target.space.cstring(int(module["name"]), 64).decode("utf-8", "replace")] = module
            except Absent:
                continue
        for core, name in (("ngx_http_module", "ngx_http_lua_module"), ("ngx_stream_module", "ngx_stream_lua_module")):
            if core not in named or name not in named:
                continue
            contexts = self.target.word(int(self.fields["conf_ctx"]) + 8 * int(named[core]["index"]))
            main = self.target.word(contexts) if contexts else None
            conf = self.target.word(main + 8 * int(named[name]["ctx_index"])) if main else None
            state = self.target.word(conf) if conf else None
            if state:
                found[state] = name
        return found

    def pool_of(self, address: int) -> Pool | None:
        """The pool that holds `address`, or None."""
        number = self.number_holding(address)
        return None if number < 0 else self.pool(number)

    def pool(self, number: int) -> Pool:
        """Pool `number` for printing."""
        row = [int(value) for value in self.table[number]]
        address = int(self.addresses[number])
        holder = self.holders.get(address)
        kind = holder.kind if holder else "unreached"
        creator, known = self.creator(number, kind)
        return Pool(address, kind, creator, known, row[kernel.SIZE], row[kernel.USED], row[kernel.UNUSED],
                    row[kernel.BLOCKS], row[kernel.BLOCK_BYTES], row[kernel.LARGE], row[kernel.LARGE_BYTES],
                    row[kernel.FREED_LARGE], row[kernel.CLEANUPS], row[kernel.HANDLER], holder)

    def creator(self, number: int, kind: str) -> tuple[str, bool]:
        """(who created the pool, whether that is read from it). Without Tengine's debug pools it is inferred."""
        address = int(self.addresses[number])
        if self.header == layouts.DEBUG_POOL_HEADER:
            name = self._debug_creator(address)
            if name:
                return name, True
        if kind in CREATORS:
            return CREATORS[kind], False
        handler = int(self.table[number, kernel.HANDLER])
        if handler:
            return f"near its cleanup {self.target.name_of(handler) or 'in unknown code'}", False
        if self._is_request(address + self.header, address):
            return "ngx_http_alloc_request", False
        return "unknown", False

    def groups(self, kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pools with the same kind, creator and size: (one pool number a group, group of each pool)."""
        names = np.zeros(len(self.addresses), np.uint64)
        if self.header == layouts.DEBUG_POOL_HEADER:
            names, _ = self.target.space.gather(self.addresses + np.uint64(88), np.uint64)
        request = np.zeros(len(self.addresses), bool)
        request[self.requests()[0]] = True
        group = np.zeros(len(self.addresses), np.int64)
        for key in (kinds, self.table[:, kernel.HANDLER], self.table[:, kernel.SIZE], request, names):
            values, number = np.unique(key, return_inverse=True)
            _, first, group = np.unique(group * len(values) + number, return_index=True, return_inverse=True)
        return first, group

    def requests(self) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the pools that begin with an HTTP request, those requests):
        nginx allocates it first in its pool."""
        addresses = self.addresses + np.uint64(self.header)
        words, _ = self.target.space.gather(addresses, np.uint64)
        maybe = np.flatnonzero(words.astype(np.uint32) == layouts.REQUEST_SIGNATURE)
        requests, whole = self.target.space.gather(addresses[maybe], layouts.REQUEST)
        sure = whole & (requests["pool"] == self.addresses[maybe])
        return maybe[sure], requests[sure]

    def _debug_creator(self, address: int) -> str:
        try:
            stat = self.target.space.word(address + 88)
            name = self.target.space.cstring(self.target.space.word(stat), 128)
        except Absent:
            return ""
        return name.decode() if re.fullmatch(rb"[A-Za-z_]\w*", name) else ""

    def _is_request(self, address: int, pool: int) -> bool:
        try:
            request = self.target.space.struct(address, layouts.REQUEST)
        except Absent:
            return False
        return int(request["signature"]) == layouts.REQUEST_SIGNATURE and int(request["pool"]) == pool

    # -- words for people ----------------------------------------------------------------------------------------------
    def client(self, connection: int) -> str:
        """The peer's address of a connection, "" when it is absent."""
        try:
            fields = self.target.space.struct(connection, layouts.CONNECTION)
            return _address(self.target.space.read(int(fields["sockaddr"]), min(int(fields["socklen"]), 128)))
        except Absent:
            return ""

    def listener(self, connection: int) -> str:
        """The address a connection was accepted on, "" for one that nginx made itself."""
        try:
            listening = int(self.target.space.struct(connection, layouts.CONNECTION)["listening"])
        except Absent:
            return ""
        if listening not in self.listeners:
            self.listeners[listening] = self._listening(listening)
        return self.listeners[listening]

    def _listening(self, listening: int) -> str:
        if not listening:
            return ""
        try:
            fields = self.target.space.struct(listening, layouts.LISTENING)
            size = int(fields["addr_text_len"])
            if 0 < size < 128:
                return self.target.space.read(int(fields["addr_text_data"]), size).decode("utf-8", "replace")
            return _address(self.target.space.read(int(fields["sockaddr"]), min(int(fields["socklen"]), 128)))
        except Absent:
            return ""

    def request_line(self, request: int) -> str:
        """The request's first line as the client sent it, "" when it has none yet (or it is absent)."""
        for offset in self.request_line_offsets:
            line = self._line_at(request + offset)
            if line:
                return line.decode("utf-8", "backslashreplace")
        if self.request_line_offsets or self.line_searches > 100:   # there can be very many without a line
            return ""
        self.line_searches += 1
        for offset in range(600, 1200, 8):
            line = self._line_at(request + offset)
            if line and b" HTTP/" in line:
                self.request_line_offsets.append(offset)
                return line.decode("utf-8", "backslashreplace")
        return ""

    def _line_at(self, address: int) -> bytes:
        """The text of an ngx_str_t when it is a request line, else b""."""
        try:
            size, data = self.target.space.word(address), self.target.space.word(address + 8)
            if not 0 < size <= 1 << 16:
                return b""
            text = self.target.space.read(data, size)
        except Absent:
            return b""
        return text if _REQUEST_LINE.match(text) else b""


def _address(raw: bytes) -> str:
    """A struct sockaddr as text."""
    family = int.from_bytes(raw[:2], "little")
    try:
        if family == socket.AF_INET and len(raw) >= 8:
            return f"{socket.inet_ntop(family, raw[4:8])}:{int.from_bytes(raw[2:4], 'big')}"
        if family == socket.AF_INET6 and len(raw) >= 24:
            return f"[{socket.inet_ntop(family, raw[8:24])}]:{int.from_bytes(raw[2:4], 'big')}"
    except ValueError:
        return ""
    if family == socket.AF_UNIX:
        return "unix:" + raw[2:].split(b"\0")[0].decode("utf-8", "replace")
    return ""


def find(target: Target, heaps: list[GlibcHeap]) -> Nginx | None:
    """The pools of the process by both roads; None when there is neither an ngx_cycle nor a single pool."""
    nginx = Nginx(target, heaps)
    wanted = struct(16, request_line=(0, "(2,)u8"))
    dwarf = target.layouts.dwarf("ngx_http_request_s", wanted)
    if dwarf is not None:
        nginx.request_line_offsets.append(dwarf.fields["request_line"][1])
    _by_structure(nginx)
    variable = target.symbol("ngx_cycle")
    nginx.cycle = (target.word(variable) or 0) if variable else 0
    if nginx.cycle:
        _from_cycle(nginx, target)
    elif not len(nginx.addresses):
        return None
    else:
        nginx.notes.append("ngx_cycle was not found: every pool counts as unreached")
    return nginx


# -- the second road: by structure -------------------------------------------------------------------------------------
def _by_structure(nginx: Nginx) -> None:
    """Find the pools among the in-use malloc blocks, with the plain header or, if that finds fewer, the debug one."""
    best = None
    for header in (80, layouts.DEBUG_POOL_HEADER):
        found = [_pools_of(nginx.target, heap, header) for heap in nginx.heaps]
        count = sum(len(table) for table, _ in found)
        if best is None or count > best[0]:
            best = count, header, found
    _, nginx.header, found = best
    first = 0
    for table, owner in found:
        nginx.owners.append((first, owner))
        first += len(table)
    if found:
        nginx.table = np.concatenate([table for table, _ in found])
        nginx.addresses = np.concatenate([heap.blocks.address[table[:, kernel.ROW]]
                                          for heap, (table, _) in zip(nginx.heaps, found)])
        nginx.known = set(nginx.addresses.tolist())


def _pools_of(target: Target, heap: GlibcHeap, header: int) -> tuple[np.ndarray, np.ndarray]:
    """(table of the pools of one heap, owner of each block)."""
    space = target.space
    table = space.signed_table([(region.start, region.end) for region in heap.regions])
    buffer = space.words.view(np.int64), *table
    blocks = heap.blocks
    rows = (blocks.address.view(np.int64), blocks.size.view(np.int64), blocks.state)
    page = target.auxv.get(6, 4096)
    found = reserve(len(blocks), np.int64)
    found = found[:kernel.candidates(*buffer, *rows, header, page, found)]
    out = np.zeros(len(found) * kernel.COLUMNS, np.int64)
    owner = np.zeros(len(blocks), np.int32)
    count = kernel.measure(*buffer, *rows, found, header, owner, out)
    return out.reshape(-1, kernel.COLUMNS)[:count], owner


# -- the first road: from ngx_cycle ------------------------------------------------------------------------------------
def _from_cycle(nginx: Nginx, target: Target) -> None:
    """Follow what nginx follows: cycle, connections, their requests, upstreams and HTTP/2 connections."""
    _read_cycle(nginx, target)
    if nginx.fields is None:
        return
    _hold(nginx, int(nginx.fields["pool"]), Holder("cycle"))
    cycles = [nginx.fields, *_old_cycles(nginx, target)]
    sessions = [found for cycle in cycles for found in _connections(nginx, target, cycle)]
    _take_in_loose(nginx)
    _requests_by_content(nginx, target)
    _contexts(nginx, target, sessions)
    _timers(nginx, target, cycles)
    _take_in_loose(nginx)
    if not any(int(cycle["connections"]) for cycle in cycles):
        nginx.notes.append("this process has no connections of its own: it is nginx's master, or stopped before it "
                           "began to serve")


def _read_cycle(nginx: Nginx, target: Target) -> None:
    """Read the ngx_cycle_t with the layout whose connections and events fit together; find the size of a connection."""
    dwarf = target.layouts.dwarf("ngx_cycle_s", layouts.CYCLES[0])
    forms = ([(dwarf, "debug information")] if dwarf is not None else []) + \
        [(form, "tables") for form in layouts.CYCLES]
    idle = None
    for form, origin in forms:
        try:
            cycle = target.space.struct(nginx.cycle, form)
        except Absent:
            continue
        stride = _connection_size(target, cycle)
        if stride:
            nginx.fields, nginx.layout_from = cycle, origin
            return
        if idle is None and not int(cycle["connections"]) and not int(cycle["read_events"]) and \
                0 < int(cycle["connection_n"]) < 1 << 24:
            idle = cycle, origin   # a master process: it has no connections of its own
    if idle is not None:
        nginx.fields, nginx.layout_from = idle
        return
    nginx.notes.append("the layout of this nginx's ngx_cycle_t is not known: its pools are found by structure alone")


def _connection_size(target: Target, cycle: np.void) -> int:
    """sizeof(ngx_connection_t): the distance at which a connection's events are the next ones of their arrays;
    0: none."""
    base, reads, writes = (int(cycle[name]) for name in ("connections", "read_events", "write_events"))
    if not (base and reads and writes) or target.word(base + 8) != reads or target.word(base + 16) != writes:
        return 0
    for stride in range(160, 512, 8):
        if target.word(base + stride + 8) == reads + layouts.EVENT_SIZE and \
                target.word(base + stride + 16) == writes + layouts.EVENT_SIZE:
            return stride
    return 0


def _old_cycles(nginx: Nginx, target: Target) -> list[np.void]:
    """The cycles before this one that still live: nginx keeps them in an array until their last connection is closed.

    cycle->old_cycle is believed only where it is the first thing in its own pool: most often that pool is long gone.
    """
    addresses = []
    variable = target.symbol("ngx_old_cycles")
    if variable:
        elements, count = target.word(variable) or 0, target.word(variable + 8) or 0
        addresses = [target.word(elements + 8 * k) or 0 for k in range(min(count, 1024))] if elements else []
        _hold(nginx, target.word(variable + layouts.ARRAY_POOL) or 0, Holder("temp"))
    addresses.append(int(nginx.fields["old_cycle"]))
    found = []
    for address in filter(None, addresses):
        try:
            cycle = target.space.struct(address, nginx.fields.dtype)
        except Absent:
            continue
        if int(cycle["pool"]) + nginx.header == address and int(cycle["pool"]) in nginx.known:
            _hold(nginx, int(cycle["pool"]), Holder("cycle"))
            found.append(cycle)
    return found


def _hold(nginx: Nginx, pool: int, holder: Holder) -> None:
    """Say that the pool at this address is reached; who comes first keeps it."""
    if pool and pool not in nginx.holders:
        nginx.holders[pool] = holder
        if pool not in nginx.known:
            _add_unstructured(nginx, pool)


def _add_unstructured(nginx: Nginx, pool: int) -> None:
    """Count a pool that is reached but was not found on a malloc heap: its blocks by their own bounds."""
    row = np.zeros(kernel.COLUMNS, np.int64)
    row[kernel.ROW] = -1
    space, blocks, unused = nginx.target.space, set(), 0
    try:
        head = space.struct(pool, layouts.POOL)
        size = int(head["d_end"]) - pool
        if not nginx.header <= size <= 1 << 30:
            raise Absent(pool)
        block, lead = pool, nginx.header
        while block and block not in blocks:
            last, end = space.word(block), space.word(block + 8)
            if not block + lead <= last <= end == block + size:
                raise Absent(block)
            blocks.add(block)
            unused += end - last
            block, lead = space.word(block + 16), layouts.BLOCK_HEADER
    except Absent:
        nginx.notes.append(f"the pool at {pool:#x} is reached but cannot be read")
        del nginx.holders[pool]
        return
    headers = nginx.header + (len(blocks) - 1) * layouts.BLOCK_HEADER
    row[kernel.BLOCKS], row[kernel.BLOCK_BYTES], row[kernel.SIZE] = len(blocks), len(blocks) * size, size
    row[kernel.USED], row[kernel.UNUSED] = len(blocks) * size - headers - unused, unused
    row[kernel.LOG] = int(head["log"].view(np.int64))
    nginx.loose[pool] = row
    nginx.known.add(pool)


def _take_in_loose(nginx: Nginx) -> None:
    """Give the pools that are on no malloc heap numbers, after all others."""
    if nginx.loose:
        nginx.addresses = np.append(nginx.addresses, np.fromiter(nginx.loose, np.uint64, len(nginx.loose)))
        nginx.table = np.vstack([nginx.table, *nginx.loose.values()])
        nginx.loose.clear()


def _connections(nginx: Nginx, target: Target, cycle: np.void) -> list[tuple[int, int, Holder]]:
    """Every connection in use of a cycle: its own pool, and those of what its `data` is.

    Returns (signature, address, holder) of the stream and mail sessions among them.
    """
    sessions: list[tuple[int, int, Holder]] = []
    base, count = int(cycle["connections"]), int(cycle["connection_n"])
    stride = _connection_size(target, cycle)
    if not base or not stride:
        return sessions
    if not 0 < count < 1 << 24:
        nginx.notes.append(f"connection_n is {count}: the connections are not read")
        return sessions
    addresses = np.uint64(base) + np.arange(count, dtype=np.uint64) * np.uint64(stride)
    rows, present = target.space.gather(addresses, layouts.CONNECTION)
    if not present.all():
        nginx.notes.append(f"{int((~present).sum()):,} of {count:,} connections are not in the core")
    used = present.copy()
    free, seen = int(cycle["free_connections"]), 0
    while free and seen < count and (free - base) % stride == 0 and 0 <= (free - base) // stride < count:
        number = (free - base) // stride
        used[number] = False
        free, seen = int(rows["data"][number]), seen + 1
    active = np.flatnonzero(used)
    nginx.connections += int(np.count_nonzero(rows["pool"][active] * (rows["fd"][active] != -1)))
    data, whole = target.space.gather(rows["data"][active], layouts.REQUEST)
    quic = _are_quic_streams(target, addresses[active])
    for k, number in enumerate(active):
        address, pool = int(addresses[number]), int(rows["pool"][number])
        client = bool(rows["listening"][number])
        request = 0
        if whole[k] and int(data["signature"][k]) == layouts.REQUEST_SIGNATURE:
            request = int(rows["data"][number])
        if rows["fd"][number] == -1:   # the lua module's fake one, still alive if its fake request is
            if request and int(data["connection"][k]) == address and int(data["pool"][k]) == pool:
                _hold(nginx, pool, Holder("other", address, request))
            continue
        kind = "quic" if quic[k] else "connection" if client else "upstream"
        _hold(nginx, pool, Holder(kind, address, request))
        if request and int(data["connection"][k]) == address:
            _hold(nginx, int(data["pool"][k]), Holder("request", address, request))
        elif whole[k] and int(data["signature"][k]) in layouts.CONTEXTS:
            sessions.append((int(data["signature"][k]), int(rows["data"][number]), Holder("other", address)))
        elif client and whole[k] and target.word(int(rows["data"][number])) == address:
            _http2(nginx, target, int(rows["data"][number]), layouts.HTTP2_CONNECTION_SIZE, Holder("http2", address),
                   int(rows["log"][number]))
    return sessions


def _are_quic_streams(target: Target, connections: np.ndarray) -> np.ndarray:
    """Which of the connections are streams of a QUIC connection: their `quic` names them again."""
    streams, _ = target.space.gather(connections + np.uint64(layouts.QUIC), np.uint64)
    streams, whole = target.space.gather(streams, layouts.QUIC_STREAM)
    return whole & (streams["connection"] == connections)


def _http2(nginx: Nginx, target: Target, start: int, size: int, holder: Holder, log: int) -> None:
    """Hold every pool that a structure of an HTTP/2 connection points to.

    nginx makes such pools with the connection's `log`. A pool with another one only lies where one of them has been.
    """
    for low, high in target.space.present(start, start + size)[:1]:
        for word in target.space.words_of(low, high & ~7).tolist():
            if word in nginx.known and word not in nginx.holders and target.word(word + layouts.POOL_LOG) == log:
                _hold(nginx, word, holder)


def _requests_by_content(nginx: Nginx, target: Target) -> None:
    """Requests whose connection is no row of the connections array (HTTP/2 streams have one of their own in a pool).

    Each pool is asked. It is reached when the connection it names lies in a reached pool and points back to it.
    Repeated until nothing is added, as such pools lead to others.
    """
    numbers, requests = nginx.requests()
    waiting = list(zip(nginx.addresses[numbers].tolist(), requests["connection"].tolist()))
    waiting = [(pool, connection) for pool, connection in waiting if pool not in nginx.holders]
    again = True
    while again:
        again, left, waiting = False, waiting, []
        for pool, connection in left:
            request = pool + nginx.header
            number = nginx.number_holding(connection)
            if number < 0 or int(nginx.addresses[number]) not in nginx.holders or target.word(connection) != request:
                waiting.append((pool, connection))
                continue
            owner = nginx.holders[int(nginx.addresses[number])]
            _hold(nginx, pool, Holder("request", owner.connection, request))
            again = True
            stream, http2 = _stream_of(target, request)
            if stream:
                connection = nginx.holders[pool].connection
                log = target.word((target.word(http2) or 0) + layouts.CONNECTION_LOG) or 0
                _http2(nginx, target, stream, layouts.HTTP2_STREAM_SIZE, Holder("http2", connection, request), log)
                _http2(nginx, target, http2, layouts.HTTP2_CONNECTION_SIZE, Holder("http2", connection), log)


def _contexts(nginx: Nginx, target: Target, sessions: list[tuple[int, int, Holder]]) -> None:
    """Pools that hold what a module keeps for a request or session (mail's auth_http makes such)."""
    requests = {holder.request: holder for holder in nginx.holders.values() if holder.request}
    sessions = sessions + [(layouts.REQUEST_SIGNATURE, request, Holder("other", holder.connection, request))
                           for request, holder in requests.items()]
    modules = nginx.modules()
    for signature, offset in layouts.CONTEXTS.items():
        count = 1 + max((int(module["ctx_index"]) for _, module in modules if int(module["type"]) == signature),
                        default=-1)
        mine = [(address, holder) for kind, address, holder in sessions if kind == signature]
        if not mine or not 0 < count < 4096:
            continue
        addresses = np.array([address for address, _ in mine], np.uint64)
        arrays, _ = target.space.gather(addresses + np.uint64(offset), np.uint64)
        contexts, _ = target.space.gather(arrays, struct(8 * count, of=(0, f"({count},)u8")))
        owners = nginx.numbers_holding(contexts["of"].reshape(-1)).reshape(-1, count)
        for k, module in zip(*np.nonzero(owners >= 0)):
            _hold(nginx, int(nginx.addresses[owners[k, module]]), mine[k][1])


def _timers(nginx: Nginx, target: Target, cycles: list[np.void]) -> None:
    """Pools of what waits for a timer: the event, or its `data`,
    lies in one or in a malloc block that points to one."""
    variable = target.symbol("ngx_event_timer_rbtree")
    if not variable:
        return
    events = _tree(target, target.word(variable) or 0, target.word(variable + 8) or 0) - np.uint64(layouts.EVENT_TIMER)
    for cycle in cycles:   # those of connections are known
        size = int(cycle["connection_n"]) * layouts.EVENT_SIZE
        if size < 1 << 40:
            for base in (cycle["read_events"], cycle["write_events"]):
                events = events[events - base >= np.uint64(size)]
    for part in np.split(events, range(1 << 14, len(events), 1 << 14)):
        heads, whole = target.space.gather(part, struct(24, data=(0, "u8"), handler=(16, "u8")))
        for pointers in (part, heads["data"]):
            for pools in (nginx.numbers_holding(pointers), _pointed_to(nginx, pointers)):
                for k in np.flatnonzero((pools >= 0) & whole):
                    _hold(nginx, int(nginx.addresses[pools[k]]), Holder("timer", handler=int(heads["handler"][k])))


def _pointed_to(nginx: Nginx, pointers: np.ndarray) -> np.ndarray:
    """The number of the first pool whose address is in the 64 words at each pointer, within its malloc block; -1: none.

    Blocks that belong to a pool are not looked into.
    """
    found = np.full(len(pointers), -1, np.int64)
    order = np.argsort(nginx.addresses)
    for heap, (_, owner) in zip(nginx.heaps, nginx.owners):
        rows = heap.blocks.rows_of(pointers)
        mine = np.flatnonzero(rows >= 0)
        mine = mine[owner[rows[mine]] == 0]
        if not len(mine) or not len(order):
            continue
        ends = heap.blocks.address[rows[mine]] + heap.blocks.size[rows[mine]].astype(np.uint64) - np.uint64(8)
        count = np.minimum((ends - pointers[mine]).astype(np.int64) >> 3, 64)
        count[ends <= pointers[mine]] = 0
        of = np.repeat(np.arange(len(mine)), count)
        place = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
        words, _ = nginx.target.space.gather(pointers[mine][of] + place.astype(np.uint64) * np.uint64(8), np.uint64)
        at = order[np.minimum(np.searchsorted(nginx.addresses, words, sorter=order), len(order) - 1)]
        match = np.flatnonzero(nginx.addresses[at] == words)[::-1]   # backwards: the first one of each is written last
        found[mine[of[match]]] = at[match]
    return found


def _tree(target: Target, root: int, sentinel: int) -> np.ndarray:
    """The nodes (addresses, uint64) of an ngx_rbtree_t, level by level."""
    level, nodes = np.array([root], np.uint64), []
    level = level[level != np.uint64(sentinel)]
    while len(level) and len(nodes) < 128:   # a red-black tree is not deeper
        nodes.append(level)
        rows, present = target.space.gather(level, layouts.TREE_NODE)
        level = np.concatenate([rows["left"][present], rows["right"][present]])
        level = np.unique(level[(level != np.uint64(sentinel)) & (level != 0)])
    return np.concatenate(nodes) if nodes else np.zeros(0, np.uint64)


def _stream_of(target: Target, request: int) -> tuple[int, int]:
    """(HTTP/2 stream, its connection) of a request: the structure that points back to it; (0, 0) for HTTP/1."""
    for low, high in target.space.present(request + 900, request + 1800)[:1]:
        for word in target.space.words_of((low + 7) & ~7, high & ~7).tolist():
            if word and not word & 7 and target.word(word) == request:
                http2 = target.word(word + 8) or 0
                connection = target.word(http2) if http2 else 0
                if connection and target.word(connection) == http2:
                    return word, http2
    return 0, 0


