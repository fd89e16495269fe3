"""Where threads keep their stacks, their thread-local storage and their descriptors (struct pthread), ended ones too."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .address_space import PAGE
from .elf import PT_TLS
from .target import Target
from .threads import Thread

DESCRIPTOR = 2304              # bytes of a struct pthread that are looked at; releases differ little in it
_AT_RANDOM = 25                # auxv: points into the main thread's stack
_NEWEST = 64                            # words of a stack: some frames
_TOP, _LEAST_STACK = 16384, 16384      # bytes from a descriptor to the end of its stack at most; PTHREAD_STACK_MIN
_TILE = 1 << 15                # words compared at once: as many as the processor's cache holds
_TID = 0x2d0                   # of struct pthread


def stack_of(target: Target, thread: Thread) -> tuple[int, int] | None:
    """A thread's stack as its descriptor states it, else the whole mapping that its stack pointer lies in."""
    if thread.stack is None:
        return None
    start, end = thread.stack
    parts = target.space.present(thread.tp, thread.tp + DESCRIPTOR) if thread.tp & 7 == 0 else []
    if parts and parts[0][0] == thread.tp:   # stackblock and stackblock_size: two words that enclose sp
        words = target.space.words_of(thread.tp, parts[0][1] & ~7)
        base, length, sp = words[:-1], words[1:], np.uint64(thread.sp)
        fits = ((base | length) & np.uint64(PAGE - 1) == 0) & (base <= sp) & (sp - base < length)
        for k in np.flatnonzero(fits & (length <= np.uint64(1 << 40))).tolist():
            return max(start, int(base[k])), min(end, int(base[k]) + int(length[k]))
    return start, end


def tls_of(target: Target, thread: Thread) -> tuple[int, int] | None:
    """A thread's static TLS, which its modules' PT_TLS measure, and its descriptor."""
    mapping = target.mapping_at(thread.tp) if thread.tp else None
    if mapping is None:
        return None
    size = sum(int(row["memsz"]) + int(row["align"]) for module in target.modules
               for row in module.phdrs[module.phdrs["type"] == PT_TLS])
    below, above = (size, DESCRIPTOR) if thread.arch.tls_below else (DESCRIPTOR, size)
    return max(thread.tp - below, mapping.start), min(thread.tp + above, mapping.end)


def own_stack(target: Target, thread: Thread) -> tuple[int, int] | None:
    """The stack a thread was started on, even when its stack pointer is elsewhere: its descriptor names it; the main
    thread's is where the kernel put its arguments. None when neither tells."""
    described = _described_stack(target, thread.tp)
    if described:
        return described
    mapping = target.mapping_at(target.auxv.get(_AT_RANDOM, 0))
    if mapping and (mapping.start <= thread.sp < mapping.end or thread.lwp == target.source.pid):
        return mapping.start, mapping.end
    return None


def live_part(target: Target, thread: Thread, stack: tuple[int, int]) -> tuple[int, int]:
    """What of a thread's own stack is alive: from the red zone below its stack pointer up, with what lies above the
    frames. All of it where the stack pointer is not on it (but on a signal handler's or a coroutine's)."""
    if stack[0] <= thread.sp < stack[1]:
        red_zone = 0 if calls_the_kernel(target, thread) else thread.arch.red_zone
        return max(thread.sp - red_zone, stack[0]), stack[1]
    return stack


def calls_the_kernel(target: Target, thread: Thread) -> bool:
    """Whether a thread is in a system call by a function of libc. On x86-64 that has nothing in its red zone, and no
    function keeps vector registers for its caller: there lies what the last copy of memory, say, has left."""
    module = target.module_at(thread.pc)
    return thread.registers.get("orig_rax", 1 << 32) < 1 << 32 and module is not None and \
        module.name.startswith(("libc.", "libc-", "libpthread"))


def words_at_hand(target: Target) -> np.ndarray:
    """What the threads are at, as far as their registers and the newest words of their stacks tell (uint64)."""
    newest = 8 * np.arange(_NEWEST, dtype=np.uint64)
    tops = np.array([thread.sp for thread in target.threads], np.uint64)[:, None] + newest
    held = [value for thread in target.threads for value in thread.registers.values()]
    return np.concatenate([np.array(held, np.uint64), target.space.gather(tops.reshape(-1), np.uint64)[0]])


def _described_stack(target: Target, descriptor: int) -> tuple[int, int] | None:
    """The stack at whose top a thread descriptor lies, as it says itself (stackblock, stackblock_size); None otherwise."""
    if not descriptor or descriptor & 7:
        return None
    parts = target.space.present(descriptor, descriptor + DESCRIPTOR)
    if not parts or parts[0][0] != descriptor:
        return None
    words = target.space.words_of(descriptor, parts[0][1] & ~7)
    base, length, inside = words[:-1], words[1:], np.uint64(descriptor)
    rest = base + length - inside                          # a caller's own stack need not be aligned
    fits = (base <= inside) & (inside - base < length) & (rest <= np.uint64(_TOP)) & (length >= np.uint64(_LEAST_STACK))
    for k in np.flatnonzero(fits).tolist():
        if target.mapping_at(int(base[k])):
            return int(base[k]), int(base[k]) + int(length[k])
    return None


class Ended(NamedTuple):
    """A thread that has ended: its descriptor's address, its stack, and what of the descriptor still holds something."""

    descriptor: int
    stack: tuple[int, int]
    alive: list[tuple[int, int]]


def ended_threads(target: Target, ranges: list[tuple[int, int]]) -> list[Ended]:
    """Threads that have ended and whose stacks glibc keeps for the next one, in `ranges`.

    A descriptor's first and third word name itself.
    """
    alive = {thread.tp for thread in target.threads}
    found, places = [], np.arange(0, 8 * _TILE, 8, dtype=np.uint64)
    for start, end in ranges:
        for low, high in target.space.present((start + 7) & ~7, end & ~7):
            words = target.space.words_of((low + 7) & ~7, high & ~7)
            if len(words) < 3:
                continue
            first = (low + 7) & ~7
            for k in range(0, len(words) - 2, len(places)):
                part = words[k:k + len(places) + 2]
                own = places[:len(part) - 2] + np.uint64(first + 8 * k)
                once = np.flatnonzero(part[:-2] == own)
                for at in own[once[part[once + 2] == own[once]]].tolist():
                    stack = _described_stack(target, at) if at not in alive else None
                    if stack and target.mapping_at(target.word(at + 8) or 0):          # the dtv
                        found.append(Ended(at, stack, _still_held(target, at, stack[1])))
    return found


def _still_held(target: Target, descriptor: int, end: int) -> list[tuple[int, int]]:
    """What an ended thread's descriptor holds: the dtv; and its result where another thread may still join it.

    tid, at 0x2d0 in every x86-64 release so far, is -1 once it was joined; a detached thread's joinid names itself.
    Its argument lies behind its start routine, and is nobody's any more.
    """
    held = [(descriptor + 8, descriptor + 16)]
    parts = target.space.present(descriptor, min(descriptor + DESCRIPTOR, end))
    if not parts or parts[0][0] != descriptor or parts[0][1] < descriptor + _TID + 16:
        return held
    words = target.space.words_of(descriptor, parts[0][1] & ~7)
    after = words[_TID // 8:]
    if int(after[0]) & 0xffffffff or np.uint64(descriptor) in after:
        return held
    code = [k for k, word in enumerate(after.tolist()) if target.is_code(word)]
    begin = descriptor + _TID
    if not code:
        return held
    routine = begin + 8 * code[0]
    return held + [(begin, routine), (routine + 16, parts[0][1] & ~7)]
