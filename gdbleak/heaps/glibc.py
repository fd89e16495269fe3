"""glibc malloc: every arena, heap and chunk of every libc in the target, with or without debug information.

`glibc_find` finds the structures, `glibc_regions` where chunks lie, `glibc_walk` walks them;
the result is a `GlibcHeap`.
"""
from __future__ import annotations

import numpy as np

from ..target.elf import Module
from ..target.target import Target
from .glibc_find import find_main_arena, find_parameters, release_of
from .glibc_heap import Arena, GlibcHeap
from .glibc_regions import clip, heap_regions, main_regions, mmapped_regions
from .glibc_walk import Walk


def find(target: Target) -> list[GlibcHeap]:
    """Every glibc malloc in the target that has been used, walked. An empty list when there is none."""
    places = [find_main_arena(target, module, True) for module in target.modules]
    none = not any(places)
    places = [place or (find_main_arena(target, module, False) if none or "libc" in module.name else None)
              for place, module in zip(places, target.modules)]
    return [_walked(target, module, *place) for place, module in zip(places, target.modules) if place]


def _walked(target: Target, module: Module, address: int, dtype: np.dtype, since, origin: str) -> GlibcHeap:
    release, how = release_of(target, module, since)
    heap = GlibcHeap(module, release, how, origin, dtype, address)
    at = address
    while True:
        heap.arenas.append(Arena(len(heap.arenas), at, target.space.struct(at, dtype)))
        at = target.word(at + dtype.fields["next"][1])
        if at == address:
            break
    find_parameters(target, module, heap, since)
    specs = []
    for arena in heap.arenas:
        if arena.locked:
            heap.notes.append(f"arena {arena.index} is locked: a thread was stopped inside malloc or free; "
                              "the sums of that arena may be off by what it was about to do")
        if arena.system_mem:
            found = main_regions(target, heap) if arena.index == 0 else heap_regions(target, heap, arena)
            specs += [region for region in found if clip(target, heap, region)]
    specs += mmapped_regions(target, heap, specs)
    Walk(target, heap, specs).run()
    return heap
