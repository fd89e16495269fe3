"""What a Lua VM's objects hold of native memory: pointers in cdata and userdata, light userdata, and, where its objects are
malloc blocks (LUAJIT_USE_SYSMALLOC), those blocks."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import channel
from ..heaps.blocks import reserve
from ..heaps.glibc_heap import asked_for
from ..kernels import chunks as chunk_kernel
from ..kernels import luajit as kernel
from ..kernels.pointers import NO_NODE
from ..runtimes.luajit import VM, buffer_of, vector
from ..runtimes.luajit_flight import Chunks
from ..target.address_space import Absent
from .nodes import Nodes

TILE = 200_000                  # objects a kernel call


@dataclass
class Holders:
    """Pairs: object `source` (row of the VM, ascending) points to block `block` (row of Nodes) by `label`; int32."""

    vm: VM
    source: np.ndarray
    block: np.ndarray
    label: np.ndarray

    @classmethod
    def of(cls, vm: VM, nodes: Nodes) -> "Holders":
        """Those of a VM."""
        objects, n = vm.objects, 0
        none = np.zeros(0, np.int32)
        if not len(nodes) or not len(objects):
            return cls(vm, none, none, none)
        room = int(objects.size.sum()) // 8 + 32 * int((objects.kind == kernel.THREAD).sum()) + 1024
        source, label, value = reserve(room, np.int32), reserve(room, np.int32), reserve(room, np.int64)
        buffer, f, segments = buffer_of(vm), vector(vm), _segments(vm)
        low, high = int(nodes.region_starts[0]), int(nodes.region_ends[-1])
        for first in range(0, len(objects), TILE):
            last = min(first + TILE, len(objects))
            n = int(kernel.natives(*buffer, f, segments, low, high, objects.address, objects.size, objects.kind,
                                   objects.marked, objects.slots, first, last, source, value, label, n))
            channel.progress(f"native pointers of {last:,} Lua objects read")
        block = nodes.nodes_at(value[:n].view(np.uint64))
        held = block >= 0
        return cls(vm, source[:n][held].copy(), block[held], label[:n][held].copy())

    def rows(self, live: bool) -> np.ndarray:
        """The blocks that live objects, or dead ones, point to."""
        return self.block[(self.vm.graph.tree.seen[self.source] != 0) == live]


def _segments(vm: VM) -> np.ndarray:
    """The upper halves of light userdata by segment, shifted (int64); empty for a VM that keeps pointers whole."""
    layout = vm.layout
    if layout.GCState_lightudseg < 0:
        return np.zeros(0, np.int64)
    at = vm.g + layout.g_gc
    try:
        table, last = vm.ref(at + layout.GCState_lightudseg), vm.u8(at + layout.GCState_lightudnum)
        raw = vm.target.space.read(table, 4 * (last + 1)) if table else bytes(4)
    except Absent:
        raw = bytes(4)
    return np.frombuffer(raw, np.uint32).astype(np.int64) << 32


def take_objects_out(vm: VM, nodes: Nodes) -> np.ndarray:
    """Where a VM's objects are malloc blocks, say that those are no nodes: Lua alone judges what lives. Their rows, of
    live and of dead objects, as (row, object's row) pairs (int32, 2 columns)."""
    if vm.allocator is not None or not len(nodes):
        return np.zeros((0, 2), np.int32)
    places, _, of = vm.blocks
    rows = nodes.nodes_at(places.view(np.uint64))
    mine = (rows >= 0) & (of >= 0)                  # the VM's own parts, GG_State before all, are plain blocks
    nodes.seen[rows[mine]] = NO_NODE
    return np.stack([rows[mine], of[mine]], axis=1).astype(np.int32)


def malloc_chunks(vm: VM, nodes: Nodes, others: np.ndarray) -> Chunks | None:
    """The chunks in use that hold something that a VM on malloc names, and those of the mask `others`; None when its
    GG_State is in none of them."""
    if vm.allocator is not None or not len(nodes):
        return None
    rows = nodes.rows_at(np.append(vm.blocks[0], vm.main).view(np.uint64))
    if rows[-1] < 0:
        return None
    wanted = np.zeros(len(nodes), bool)
    wanted[rows[rows >= 0]] = True
    wanted &= nodes.over_heaps([heap.blocks.state for heap in nodes.heaps]) == chunk_kernel.IN_USE
    wanted |= others
    address, size = nodes.address[wanted].astype(np.int64), nodes.size[wanted].astype(np.int64)
    ranges = list(zip(nodes.region_starts.tolist(), nodes.region_ends.tolist()))
    return Chunks(address - 16, size, *asked_for(address, size), ranges)
