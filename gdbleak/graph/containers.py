"""Which blocks are part of a container of libstdc++ or of a doubly linked list, by the shape of all memory."""
from __future__ import annotations

import numpy as np

from .. import channel
from ..heaps.blocks import reserve
from ..kernels import containers as kernel
from ..kernels.pointers import NO_NODE
from . import roots
from .classes import is_cplusplus
from .nodes import Nodes

TILE = 100_000                  # blocks a kernel call
VISITS = 2_000_000              # parts of containers a kernel call
SPAN = 64 << 20                 # bytes of other memory that are searched as one structure


def parts(nodes: Nodes, vms: list) -> np.ndarray:
    """What part of a container each row of `nodes` is (uint8, a number of `kernels.containers`; 0: none)."""
    kind = np.zeros(len(nodes), np.uint8)
    if not len(nodes):
        return kind
    _ = nodes.buffer                                       # the heaps are loaded with it
    if is_cplusplus(nodes.target):
        _containers(nodes, vms, kind)
    columns = *buffer_of(nodes.target.space), *signed((nodes.address, nodes.size)), nodes.seen, kind
    for ends_too in (0, 1):
        for first in range(0, len(nodes), TILE):
            kernel.links(*columns, first, min(first + TILE, len(nodes)), ends_too)
        if not (kind == kernel.LINK).any():
            break
    return kind


def _containers(nodes: Nodes, vms: list, kind: np.ndarray) -> None:
    """Mark the parts of libstdc++'s containers in `kind`: search all memory for headers, then follow those."""
    space, page = nodes.target.space, nodes.target.auxv.get(6, 4096)
    areas = [(at, min(at + SPAN, high)) for area in roots.find_areas(nodes.target, nodes.heaps, vms)
             for low, high in space.present(area.start, area.end) for at in range(low + 7 & -8, high, SPAN)]
    space.table(areas)
    index = [column.view(np.int64) if column.dtype == np.uint64 else column for column in nodes.index]
    memory = (*buffer_of(space), *index, nodes.seen)
    room = nodes.words_there + sum(high - low for low, high in areas) // 8
    headers, n = (reserve(room, np.int64), reserve(room, np.uint8)), 0
    used = np.flatnonzero(nodes.seen != NO_NODE)
    for first in range(0, len(used), TILE):
        starts, sizes = signed((nodes.address[used[first:first + TILE]], nodes.size[used[first:first + TILE]]))
        n = int(kernel.headers(*memory, starts, starts + sizes - 8, page, kind, *headers, n))
        channel.progress(f"{min(first + TILE, len(used)):,} blocks searched for containers")
    for low, high in areas:
        n = int(kernel.headers(*memory, np.array([low]), np.array([high & -8]), page, kind, *headers, n))
    scratch, tried = reserve(len(nodes), np.int32), np.zeros(len(nodes), np.uint8)
    for follow, more in ((kernel.containers, (page, kind, scratch)), (kernel.rings, (kind, tried, scratch))):
        done = 0
        while done < n:
            done = int(follow(*memory, *headers, done, n, VISITS, *more))
            channel.progress(f"{done:,} of {n:,} headers of containers followed")


# -- as the kernels take them ------------------------------------------------------------------------------------------
def signed(arrays) -> tuple:
    """The arrays (uint64) as int64."""
    return tuple(array.view(np.int64) for array in arrays)


def buffer_of(space) -> tuple:
    """(words, starts, ends, offsets) as int64, of a process's own half of the address space."""
    return space.words.view(np.int64), *space.signed_table()
