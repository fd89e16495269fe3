"""One pass over a glibc's regions: every chunk, then what the bins, the fastbins and the thread caches hold."""
from __future__ import annotations

import numpy as np

from .. import channel
from ..kernels import chunks as kernel
from ..target.target import Target
from . import glibc_layouts as layouts
from .blocks import Blocks, Damage, Region, cut, reserve
from .glibc_find import SHAPE
from .glibc_heap import Arena, GlibcHeap, Tcache
from .glibc_regions import Reach, buffer_of

TILE = 200_000                  # chunks a kernel call: how long Ctrl-C may have to wait


class Walk:
    """One pass over all regions of a heap: fills its blocks, then marks what the free lists hold."""

    def __init__(self, target: Target, heap: GlibcHeap, regions: list[Region]):
        self.target, self.heap = target, heap
        self.regions = sorted(regions, key=lambda region: region.start)
        self.tops = {int(arena.fields["top"]): arena for arena in heap.arenas if arena.system_mem}
        room = sum((high - low) // 32 + 2 for region in regions   # a damaged size may claim what is not there
                   for low, high in target.space.present(region.start, region.end)) + 2 * len(regions)
        self.address, self.size, self.state = (reserve(room, dtype, dense=True)
                                               for dtype in (np.uint64, np.uint64, np.uint8))
        self.n = 0

    def run(self) -> None:
        table = self.target.space.table([(region.start, region.end) for region in self.regions])
        self.buffer = buffer_of(self.target, table)
        for region in self.regions:
            lead, region.first = region.first, self.n
            if region.kind == "mmapped":
                self._append(region.start + lead, region.end - region.start - lead, kernel.IN_USE)
                region.overhead = lead
            else:
                self._region(region)
            region.last = self.n
        self.heap.regions = self.regions
        self.heap.region_starts = [region.start for region in self.regions]
        self.heap.blocks = Blocks(*(cut(column, self.n) for column in (self.address, self.size, self.state)))
        regions: dict[int, list[Region]] = {}
        for region in self.regions:
            if region.kind != "mmapped":
                regions.setdefault(region.arena, []).append(region)
        if self.heap.release_from == SHAPE:
            self._refine_release()
        for arena in self.heap.arenas:
            self._free_lists(arena, regions.get(arena.index, []))
        self._tcaches()

    def _append(self, chunk: int, size: int, state: int) -> None:
        self.address[self.n], self.size[self.n], self.state[self.n] = chunk + 16, size, state
        self.n += 1

    def _region(self, region: Region) -> None:
        """Walk one region from its start to its top or its fencepost, stepping over what cannot be walked."""
        top = int(self.heap.arenas[region.arena].fields["top"])
        top = top if region.start <= top < region.end and top in self.tops else None
        stop = region.end if top is None else top
        at, first, self.reach = region.start, self.n, None
        while at < stop:
            self.n, at, why = self._tiles(at, stop, first)
            if why == kernel.END:
                break
            if why == kernel.FENCE and top is None and at + 32 >= stop:
                region.overhead += stop - at
                break
            at, first = self._step_over(region, at, stop, why, first), self.n
        if top is not None:
            self._top(region, top, first)
        elif region.kind == "brk" and self.n > first and self.heap.arenas[0].contiguous and at == stop:
            self.state[self.n - 1] = kernel.TOP   # the arena's top is damaged: it is what the heap ends with
            self.heap.arenas[0].top_bytes = int(self.size[self.n - 1])

    def _tiles(self, at: int, stop: int, first: int):
        notes = np.zeros(2, np.uint64)
        while True:
            n, at, why = kernel.walk(*self.buffer, at, stop, self.address, self.size, self.state,
                                     self.n, first, TILE, notes)
            self.n = int(n)
            if why != kernel.BUDGET:
                break
            channel.progress(f"{self.n:,} blocks walked")
        if notes[0]:
            self.heap.damage.append(Damage(int(notes[1]), f"prev_size does not match the free chunk before it "
                                                          f"({int(notes[0])} such chunks in this region)"))
        return self.n, int(at), int(why)

    def _step_over(self, region: Region, at: int, stop: int, why: int, first: int) -> int:
        """After a break at `at`: record what it was and return where chunks go on (`stop` when nowhere)."""
        past = at + 32 if why == kernel.FENCE else at + 16
        if self.reach is None:
            there = self.target.space.present(at, stop)
            self.reach = Reach(self.buffer, at & ~15, min(there[-1][1] & ~15, stop) if there else at & ~15)
        going_on = self.reach.resume(min(past, stop), fresh=why == kernel.FENCE) or stop
        last_good = int(self.address[self.n - 1]) - 16 if self.n > first else 0
        if why == kernel.FENCE and region.kind == "brk":
            region.overhead += 32
            region.foreign.append((past, going_on))
            return going_on
        if self.n > first and why == kernel.BAD_SIZE:   # its "previous in use" bit is damaged as well: ask the bins
            linked = self._is_linked(int(self.address[self.n - 1]))
            self.state[self.n - 1] = kernel.FREE if linked else kernel.IN_USE
        region.damaged.append((at, going_on))
        what = ("memory is missing from the core" if why == kernel.ABSENT else
                f"the size {self._word(at + 8):#x} of this chunk cannot be")
        self.heap.damage.append(Damage(at, f"{what}; {going_on - at:,} bytes up to {going_on:#x} are not walked",
                                       last_good))
        return going_on

    def _is_linked(self, user: int) -> bool:
        """Whether the chunk's first two words are the links of a bin: both neighbours point back."""
        forward, back = self._word(user), self._word(user + 8)
        return self._word(forward + 24) == user - 16 and self._word(back + 16) == user - 16

    def _word(self, address: int) -> int:
        return self.target.word(address) or 0

    def _top(self, region: Region, top: int, first: int) -> None:
        """Append the top chunk; one whose size is wrong ends where its region does."""
        arena = self.tops[top]
        head = self._word(top + 8)
        if self.n > first and not head & 1 and self.state[self.n - 1] == kernel.IN_USE:
            self.state[self.n - 1] = kernel.FREE
        if top + (head & ~7) != region.end and not any(damage.address == top for damage in self.heap.damage):
            self.heap.damage.append(Damage(top, f"the top chunk of arena {arena.index} has the size {head & ~7:#x}, "
                                                f"its region ends at {region.end:#x}"))
        arena.top_bytes = region.end - top
        self._append(top, region.end - top, kernel.TOP)

    def _refine_release(self) -> None:
        """Where only shapes tell the release: a thread cache's size, and whether free blocks are safe-linked, say more."""
        heap, blocks = self.heap, self.heap.blocks
        owned = np.array(list(self._tls_words()), np.uint64)
        rows = np.searchsorted(blocks.address, owned)
        rows = rows[rows < len(blocks)]
        sizes = set(blocks.size[rows[np.isin(blocks.address[rows], owned)]].tolist())
        for release, (_, _, _, size) in layouts.TCACHE.items():
            if (size + 8 + 15) & ~15 in sizes:
                heap.release = max(heap.release, release)
        heads = [int(chunk) + 16 for arena in heap.arenas if "fastbinsY" in heap.state.names
                 for chunk in arena.fields["fastbinsY"] if chunk]
        if any((self.target.word(head) or 0) & 15 for head in heads):      # a plain link would be aligned
            heap.release = max(heap.release, layouts.SAFE_LINKING)

    # -- free lists ---------------------------------------------------------------------------------------------------
    def _free_of(self, region: Region) -> tuple[int, int]:
        """(number, bytes) of the chunks of a region that are free in a bin."""
        free = self.heap.blocks.state[region.first:region.last] == kernel.FREE
        return int(np.count_nonzero(free)), int(self.heap.blocks.size[region.first:region.last][free].sum())

    def _free_lists(self, arena: Arena, regions: list[Region]) -> None:
        heap, blocks = self.heap, self.heap.blocks
        last = len(blocks)
        safe = heap.release >= layouts.SAFE_LINKING
        for k, chunk in enumerate(arena.fields["fastbinsY"] if "fastbinsY" in heap.state.names else ()):
            if chunk:
                count, total, why, where, holder = kernel.follow(
                    *self.buffer, int(chunk) + 16, 2 | safe, blocks.address, blocks.size, blocks.state, 0, last,
                    32 + 16 * k, kernel.FASTBIN, last + 1)
                arena.fast_blocks += int(count)
                arena.fast_bytes += int(total)
                self._complain(why, where, holder, f"fastbin {k} of arena {arena.index}")
        bins_at, whole = arena.address + heap.state.fields["bins"][1], True
        for k in range(layouts.NBINS // 2):
            head = bins_at + 16 * k - 16
            if int(arena.fields["bins"][2 * k]) == head:
                continue
            count, total, why, where, holder = kernel.follow_bin(*self.buffer_with(head), head, arena.system_mem // 32)
            arena.bin_blocks += int(count)
            arena.bin_bytes += int(total)
            whole &= why == kernel.END
            self._complain(why, where, holder + 16 if holder != head else 0, f"bin {k + 1} of arena {arena.index}")
        free = [self._free_of(region) for region in regions]
        walked, walked_bytes = (sum(column) for column in zip(*free)) if free else (0, 0)
        if walked != arena.bin_blocks:
            heap.notes.append(f"arena {arena.index}: its bins list {arena.bin_blocks:,} free chunks, "
                              f"the walk finds {walked:,}"
                              + ("" if whole else ": the walk's count is used"))
            if not whole:
                arena.bin_blocks, arena.bin_bytes = walked, walked_bytes

    def buffer_with(self, head: int):
        """The buffer with the arena's own bins readable, which on a process read on demand may not be there yet."""
        return buffer_of(self.target, self.target.space.table([(head, head + 32)]))

    def _complain(self, why: int, where: int, holder: int, name: str) -> None:
        """Record that a free list went wrong: at the block whose link is bad, when one is."""
        if why != kernel.END:
            what = {kernel.LOOP: "loops or is not linked back", kernel.STRAY: "leads to what is no free chunk",
                    kernel.ABSENT: "leads out of the core"}[int(why)]
            link = f"the link in the block at {holder:#x} gives {where:#x}" if holder else f"its head gives {where:#x}"
            self.heap.damage.append(Damage(int(holder or where), f"{name} {what}: {link}"))

    # -- thread caches ------------------------------------------------------------------------------------------------
    def _tcaches(self) -> None:
        """Find the thread caches among the blocks of their size, and mark what they hold.

        A cache's entries must be in-use blocks of just the bin's size. An empty one is told from other zeroed memory by
        the word in its thread's TLS that points to it.
        """
        heap, blocks = self.heap, self.heap.blocks
        layout = layouts.latest(layouts.TCACHE, heap.release)
        if layout is None or not len(blocks):
            return
        owners = self._tls_words()
        struct_size = (layout[3] + 8 + 15) & ~15
        rows = np.flatnonzero((blocks.state == kernel.IN_USE) &
                              ((blocks.size == struct_size) | (blocks.size == struct_size + 16)))
        for k in range(0, len(rows), 256):   # each takes eight times its size to gather
            for address, entries in self._cache_candidates(blocks.address[rows[k:k + 256]], layout):
                lwp = owners.get(address, 0)
                if (entries.any() or lwp) and self._plausible_entries(entries):
                    cache = Tcache(address, lwp)
                    self._empty(cache, entries)
                    heap.tcaches.append(cache)
        for region in heap.regions:
            tcached = blocks.state[region.first:region.last] == kernel.TCACHED
            if region.kind != "mmapped" and tcached.any():
                arena = heap.arenas[region.arena]
                arena.tcached_blocks += int(np.count_nonzero(tcached))
                arena.tcached_bytes += int(blocks.size[region.first:region.last][tcached].sum())

    def _cache_candidates(self, addresses: np.ndarray, layout):
        """(address, entries) of those blocks whose counters and entries fit a tcache_perthread_struct."""
        width, bins, entries_at, size = layout
        form = np.dtype({"names": ["counts", "entries"], "formats": [f"({bins},)u{width}", f"({bins},)u8"],
                         "offsets": [0, entries_at], "itemsize": size})
        values, present = self.target.space.gather(addresses, form)
        fits = present & (values["entries"] & np.uint64(15) == 0).all(axis=1)
        if self.heap.release < (2, 42):   # from 2.42 on the counters say how many more fit, not how many there are
            fits &= ((values["counts"] > 0) == (values["entries"] != 0)).all(axis=1)
        for k in np.flatnonzero(fits):
            yield int(addresses[k]), values["entries"][k].copy()

    def _tls_words(self) -> dict[int, int]:
        """Words of each thread's static TLS -> the thread's lwp: a thread's own pointers."""
        words: dict[int, int] = {}
        for thread in self.target.threads:
            mapping = self.target.mapping_at(thread.tp) if thread.tp else None
            if mapping is None:
                continue
            low, high = (max(mapping.start, thread.tp - 16384), thread.tp) if thread.arch.tls_below else \
                (thread.tp, min(mapping.end, thread.tp + 16384))
            for start, end in self.target.space.present((low + 7) & ~7, high & ~7):
                for word in self.target.space.words_of(start, end).tolist():
                    words.setdefault(word, thread.lwp)
        return words

    def _plausible_entries(self, entries: np.ndarray) -> bool:
        blocks, sizes = self.heap.blocks, layouts.tcache_bin_sizes(self.heap.release)
        for k in np.flatnonzero(entries):
            row = int(np.searchsorted(blocks.address, entries[k]))
            if row >= len(blocks) or blocks.address[row] != entries[k]:
                return False
            if blocks.state[row] != kernel.IN_USE or (sizes[k] and int(blocks.size[row]) != sizes[k]):
                return False
        return True

    def _empty(self, cache: Tcache, entries: np.ndarray) -> None:
        """Mark the blocks of a cache as tcached and count them, for it and for the arenas they came from."""
        heap, blocks = self.heap, self.heap.blocks
        safe = int(heap.release >= layouts.SAFE_LINKING)
        sizes = layouts.tcache_bin_sizes(heap.release)
        for k in np.flatnonzero(entries):
            count, total, why, where, holder = kernel.follow(
                *self.buffer, entries[k], safe, blocks.address, blocks.size, blocks.state, 0, len(blocks),
                sizes[k], kernel.TCACHED, len(blocks) + 1)
            cache.blocks += int(count)
            cache.bytes += int(total)
            self._complain(why, where, holder, f"tcache bin {k} of thread {cache.lwp or '?'}")
