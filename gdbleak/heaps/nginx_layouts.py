"""nginx structures as NumPy dtypes (LP64), measured on builds from 1.13.6 to 2026, with and without --with-compat.

What differs between releases and build options is found by fingerprint in `nginx.py`; here is what stands still, and
for ngx_cycle_t the three forms there are.
"""
from __future__ import annotations

from ..target.layout import struct

POOL = struct(80, d_last=(0, "u8"), d_end=(8, "u8"), d_next=(16, "u8"), d_failed=(24, "u8"), max=(32, "u8"),
              current=(40, "u8"), chain=(48, "u8"), large=(56, "u8"), cleanup=(64, "u8"), log=(72, "u8"))
POOL_LOG, CONNECTION_LOG = 72, 80
DEBUG_POOL_HEADER = 96        # Tengine's debug pool: `size` at 80, `stat` at 88; stat->func (at 0) names the creator
BLOCK_HEADER = 32             # the later blocks of a pool have only `d`

CONNECTION = struct(120, data=(0, "u8"), read=(8, "u8"), write=(16, "u8"), fd=(24, "i4"), listening=(64, "u8"),
                    log=(80, "u8"), pool=(88, "u8"), sockaddr=(104, "u8"), socklen=(112, "u4"))
LISTENING = struct(184, sockaddr=(8, "u8"), socklen=(16, "u4"), addr_text_len=(32, "u8"), addr_text_data=(40, "u8"))
REQUEST = struct(96, signature=(0, "u4"), connection=(8, "u8"), main_conf=(24, "u8"), upstream=(72, "u8"),
                 pool=(88, "u8"))
REQUEST_SIGNATURE = 0x50545448  # "HTTP"
# What a request or session begins with, which is also the type of its modules -> the offset of its array of
# their contexts
CONTEXTS = {REQUEST_SIGNATURE: 16, 0x4D525453: 48, 0x4C49414D: 40}   # "HTTP", "STRM", "MAIL"
EVENT_SIZE = 96
EVENT_TIMER = 40                # ngx_event_t.timer, a node of the tree of timers
TREE_NODE = struct(24, left=(8, "u8"), right=(16, "u8"))
QUIC = 144                      # ngx_connection_t.quic, where there is such: a ngx_quic_stream_t
QUIC_STREAM = struct(72, connection=(64, "u8"))
ARRAY_POOL = 32                 # ngx_array_t.pool
KEEPALIVE_CONNECTION = 24       # ngx_http_upstream_keepalive_cache_t.connection
HTTP2_STREAM_SIZE = 160
HTTP2_CONNECTION_SIZE = 640     # at least what any release needs; pools in it are recognised, not taken by offset


def _cycle(connections: int, without_reuse_time: bool):
    early = connections - (376 if without_reuse_time else 384)
    return struct(connections + 32, conf_ctx=(0, "u8"), pool=(8, "u8"), free_connections=(early, "u8"),
                  free_connection_n=(early + 8, "u8"), modules=(early + 16, "u8"), listening=(connections - 312, "u8"),
                  shared_memory=(connections - 72, "u8"), connection_n=(connections - 16, "u8"),
                  connections=(connections, "u8"), read_events=(connections + 8, "u8"),
                  write_events=(connections + 16, "u8"), old_cycle=(connections + 24, "u8"))


# ngx_cycle_t: up to 1.15, from 1.19 on, and of 2026
CYCLES = (_cycle(504, False), _cycle(496, True), _cycle(544, False))

SHM_ZONE = struct(88, data=(0, "u8"), addr=(8, "u8"), size=(16, "u8"), name_len=(24, "u8"), name_data=(32, "u8"),
                  tag=(64, "u8"))
LIST = struct(56, part_elts=(8, "u8"), part_nelts=(16, "u8"), part_next=(24, "u8"), size=(32, "u8"))
LIST_PART = struct(24, part_elts=(0, "u8"), part_nelts=(8, "u8"), part_next=(16, "u8"))
SLAB_POOL = struct(200, min_size=(16, "u8"), min_shift=(24, "u8"), pages=(32, "u8"), last=(40, "u8"),
                   free_next=(56, "u8"), stats=(72, "u8"), pfree=(80, "u8"), start=(88, "u8"), end=(96, "u8"))
SLAB_FREE = 48                  # ngx_slab_pool_t.free, the head of the ring of free runs
SLAB_PAGE = struct(24, slab=(0, "u8"), next=(8, "u8"), prev=(16, "u8"))
SLAB_STAT = struct(32, total=(0, "u8"), used=(8, "u8"), reqs=(16, "u8"), fails=(24, "u8"))
MODULE = struct(200, ctx_index=(0, "u8"), index=(8, "u8"), name=(16, "u8"), type=(72, "u8"))
