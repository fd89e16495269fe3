"""The LuaJIT heap: listing its objects with the sizes LuaJIT accounts, and the references between them.

Everything is int64; `words`, `halves` and `bytes` are views of one buffer. `f` is the layout as a vector, in the order
of FIELDS. One body serves as compiled form and, over memoryviews and lists, as array form.
"""
from __future__ import annotations

from . import I64, U8s, I32s, I64s, helper, in_python, kernel
from .graph import NATIVE
from .pieces import at_most

STR, UPVAL, THREAD, PROTO, FUNC, TRACE, CDATA, TAB, UDATA = range(4, 13)   # the object types, as in ~LJ_T*
KINDS = {STR: "string", UPVAL: "upvalue", THREAD: "thread", PROTO: "prototype", FUNC: "function", TRACE: "trace",
         CDATA: "cdata", TAB: "table", UDATA: "userdata"}
END, BAD, ABSENT, LOOP, BUDGET = range(5)

# What an edge is. From 0 on: the row of the string that is the key.
(ARRAY, METATABLE, ENVIRONMENT, PROTOTYPE, VALUE, CONSTANT, STACK, TRACE_LINK, CHUNK_NAME, KEY, OTHER_KEY,
 MEMBER, CONTENT, COPY_ON_WRITE, DICT, METATABLE_DICT) = range(-1, -17, -1)
UPVALUE = -1000                # UPVALUE - k: upvalue k of a function

FIELDS = ("gc64", "ref", "GCstr_sizeof", "GCstr_len", "GCudata_sizeof", "GCudata_env", "GCudata_len",
          "GCudata_metatable", "GCudata_udtype", "SBuf_b", "SBuf_e", "SBuf_L", "SBufExt_cowref", "SBufExt_dict_str",
          "SBufExt_dict_mt",
          "GCcdata_sizeof", "GCcdata_ctypeid", "GCproto_sizeof", "GCproto_k", "GCproto_sizekgc", "GCproto_sizept",
          "GCproto_trace", "GCproto_chunkname", "GCupval_sizeof", "GCupval_v", "GCfuncC_ffid", "GCfuncC_nupvalues",
          "GCfuncC_env", "GCfuncC_pc", "GCfuncC_upvalue", "GCfuncL_uvptr", "GCtab_sizeof", "GCtab_colo", "GCtab_array",
          "GCtab_metatable", "GCtab_node", "GCtab_asize", "GCtab_hmask", "L_sizeof", "L_top", "L_stack", "L_openupval",
          "L_env", "L_stacksize", "L_base", "GCtrace_sizeof", "GCtrace_nins", "GCtrace_ir", "GCtrace_nk", "GCtrace_nsnap",
          "GCtrace_nsnapmap", "GCtrace_startpt", "GCtrace_link", "GCtrace_nextroot", "GCtrace_nextside",
          "SnapShot_sizeof", "family")
(F_GC64, F_REF, F_STR_SIZEOF, F_STR_LEN, F_UD_SIZEOF, F_UD_ENV, F_UD_LEN, F_UD_META, F_UD_TYPE, F_SB_B, F_SB_E, F_SB_L,
 F_SB_COWREF, F_SB_DICT, F_SB_DICT_MT, F_CD_SIZEOF, F_CD_CTYPE, F_PT_SIZEOF, F_PT_K, F_PT_SIZEKGC, F_PT_SIZEPT,
 F_PT_TRACE, F_PT_CHUNK, F_UV_SIZEOF, F_UV_V, F_FN_FFID, F_FN_NUPV,
 F_FN_ENV, F_FN_PC, F_FN_UPVALUE, F_FN_UVPTR, F_TAB_SIZEOF, F_TAB_COLO, F_TAB_ARRAY, F_TAB_META, F_TAB_NODE,
 F_TAB_ASIZE, F_TAB_HMASK, F_L_SIZEOF, F_L_TOP, F_L_STACK, F_L_OPENUPVAL, F_L_ENV, F_L_STACKSIZE, F_L_BASE, F_TR_SIZEOF,
 F_TR_NINS, F_TR_IR, F_TR_NK, F_TR_NSNAP, F_TR_NSNAPMAP, F_TR_STARTPT, F_TR_LINK, F_TR_NEXTROOT, F_TR_NEXTSIDE,
 F_SNAP_SIZEOF, F_FAMILY) = range(len(FIELDS))

_MASK47 = (1 << 47) - 1
_VARIABLE = 0x80               # a cdata of variable length
# GCudata.udtype: of a namespace of the FFI, whose environment is the table of what it has resolved; of what
# string.buffer makes, whose payload is an SBufExt.
C_LIBRARY, BUFFER = 2, 3
_COW, _BORROW = 2, 4           # of SBuf.L: what the buffer shows is another object's, or another buffer's
_MOST_BUFFER = 0x7fffff00      # LJ_MAX_BUF
_IR_KGC, _IR_KNULL, _REF_BIAS = 24, 27, 0x8000        # lj_ir.h
_WIDE, _WIDE_GC64 = 0x604208, 0x605fd9                  # IRT_IS64: the types whose constants take two slots


@helper
def _at(starts, ends, offsets, address, size):
    """Byte offset in the buffer of `address` when `size` bytes are there, else -1."""
    low = at_most(starts, address)
    if low == 0 or size < 0 or size > ends[low - 1] - address or address & 3:
        return -1
    return offsets[low - 1] + address - starts[low - 1]


@helper
def _ref(f, words, halves, at):
    """The reference at byte offset `at`."""
    if f[F_GC64]:
        return words[at >> 3]
    return halves[at >> 2] & 0xffffffff


@helper
def _u32(halves, at):
    return halves[at >> 2] & 0xffffffff


@helper
def _u16(bytes, at):
    return int(bytes[at]) | int(bytes[at + 1]) << 8


@helper
def _string_buffer(f, bytes, halves, starts, ends, offsets, o, at):
    """Byte offset of the SBufExt in the userdata at address `o`; -1 when it has none, or one that is not all there."""
    size = f[F_SB_DICT_MT] + f[F_REF]
    if bytes[at + f[F_UD_TYPE]] != BUFFER or f[F_SB_COWREF] < 0 or _u32(halves, at + f[F_UD_LEN]) < size:
        return -1
    return _at(starts, ends, offsets, o + f[F_UD_SIZEOF], size)


@helper
def _buffer_size(f, words, halves, place):
    """The bytes of memory of its own that the SBufExt at byte offset `place` has."""
    if _ref(f, words, halves, place + f[F_SB_L]) & (_COW | _BORROW):
        return 0
    size = _ref(f, words, halves, place + f[F_SB_E]) - _ref(f, words, halves, place + f[F_SB_B])
    return size if 0 < size <= _MOST_BUFFER else 0


@helper
def _size_of(f, bytes, halves, words, starts, ends, offsets, at, o, kind, marked, ctypes):
    """The bytes LuaJIT accounts for the object at byte offset `at`; -1 when it cannot be."""
    if kind == UPVAL:
        return f[F_UV_SIZEOF]
    if kind == THREAD:
        return f[F_L_SIZEOF] + 8 * _u32(halves, at + f[F_L_STACKSIZE])
    if kind == PROTO:
        return _u32(halves, at + f[F_PT_SIZEPT])
    if kind == FUNC:
        count = int(bytes[at + f[F_FN_NUPV]])
        if bytes[at + f[F_FN_FFID]] == 0:
            return f[F_FN_UVPTR] + f[F_REF] * count
        return f[F_FN_UPVALUE] + 8 * count
    if kind == TRACE:
        nins, nk = _u32(halves, at + f[F_TR_NINS]), _u32(halves, at + f[F_TR_NK])
        snaps = _u16(bytes, at + f[F_TR_NSNAPMAP]) if f[F_FAMILY] == 0 else _u32(halves, at + f[F_TR_NSNAPMAP])
        if nins < nk:
            return -1
        return ((f[F_TR_SIZEOF] + 7) & ~7) + 8 * (nins - nk) + \
            f[F_SNAP_SIZEOF] * _u16(bytes, at + f[F_TR_NSNAP]) + 4 * snaps
    if kind == CDATA:
        if marked & _VARIABLE:
            before = _at(starts, ends, offsets, o - 8, 8)
            if before < 0:
                return -1
            return _u32(halves, before + 4) + _u16(bytes, before + 2)
        number = _u16(bytes, at + f[F_CD_CTYPE])
        if number >= len(ctypes):
            return -1
        return f[F_CD_SIZEOF] + ctypes[number]
    if kind == TAB:
        colo = int(bytes[at + f[F_TAB_COLO]])
        asize, hmask = _u32(halves, at + f[F_TAB_ASIZE]), _u32(halves, at + f[F_TAB_HMASK])
        total = f[F_TAB_SIZEOF] + 8 * (colo & 0x7f)
        if asize and (colo == 0 or colo > 127):
            total += 8 * asize
        if hmask:
            total += 24 * (hmask + 1)
        return total
    if kind == UDATA:
        place = _string_buffer(f, bytes, halves, starts, ends, offsets, o, at)
        return f[F_UD_SIZEOF] + _u32(halves, at + f[F_UD_LEN]) + \
            (_buffer_size(f, words, halves, place) if place >= 0 else 0)
    return -1


def _objects(bytes: U8s, halves: I32s, words: I64s, starts: I64s, ends: I64s, offsets: I64s, f: I64s, ctypes: I64s,
             o: I64, end: I64, main: I64, budget: I64, address: I64s, size: I64s, kind: U8s, marked: U8s, n: I64):
    """Follow the list of collectable objects from `o` to `end` (0, or where a ring began); (n, next object, why it
    stopped).

    Fills rows from `n` on. Open upvalues, which only their thread lists, come after it. Of the `main` thread only the
    stack counts: its structure is part of GG_State. `ctypes`: size of each C type, int64.
    """
    goal = min(n + budget, len(address) - 1)
    header = 2 + f[F_REF]
    while o != end:
        if n >= goal:
            return n, o, BUDGET
        at = _at(starts, ends, offsets, o, 48 if f[F_GC64] else 24)
        if at < 0:
            at = _at(starts, ends, offsets, o, header + 6)   # a small object at the very end of what is there
            if at < 0:
                return n, o, ABSENT
        mark, gct = int(bytes[at + f[F_REF]]), int(bytes[at + f[F_REF] + 1])
        if gct < UPVAL or gct > UDATA:
            return n, o, BAD
        need = f[F_L_SIZEOF] if gct == THREAD else f[F_TR_SIZEOF] if gct == TRACE else \
            f[F_PT_SIZEOF] if gct == PROTO else f[F_TAB_SIZEOF] if gct == TAB else \
            f[F_UD_SIZEOF] if gct == UDATA else header
        if _at(starts, ends, offsets, o, need) < 0:
            return n, o, ABSENT
        total = _size_of(f, bytes, halves, words, starts, ends, offsets, at, o, gct, mark, ctypes)
        if total < 0:
            return n, o, BAD
        address[n], size[n], kind[n], marked[n] = o, total, gct, mark
        if o == main:
            size[n] = total - f[F_L_SIZEOF]
        n += 1
        if gct == THREAD:
            uv = _ref(f, words, halves, at + f[F_L_OPENUPVAL])
            while uv != 0:
                place = _at(starts, ends, offsets, uv, f[F_UV_SIZEOF])
                if place < 0 or n >= len(address) - 1 or bytes[place + f[F_REF] + 1] != UPVAL:
                    return n, uv, BAD
                address[n], size[n], kind[n], marked[n] = uv, f[F_UV_SIZEOF], UPVAL, bytes[place + f[F_REF]]
                n += 1
                uv = _ref(f, words, halves, place)
        o = _ref(f, words, halves, at)
    return n, 0, END


def _strings(bytes: U8s, halves: I32s, words: I64s, starts: I64s, ends: I64s, offsets: I64s, f: I64s, table: I64,
             count: I64, address: I64s, size: I64s, kind: U8s, marked: U8s, n: I64):
    """List the strings of `count` buckets of the string table at `table`; (n, buckets in use, bad chains)."""
    used = bad = 0
    for bucket in range(count):
        place = _at(starts, ends, offsets, table + bucket * f[F_REF], f[F_REF])
        if place < 0:
            bad += 1
            continue
        o = _ref(f, words, halves, place) & ~1     # bit 0 says how the bucket's strings were hashed
        if o != 0:
            used += 1
        while o != 0:
            at = _at(starts, ends, offsets, o, f[F_STR_SIZEOF])
            if at < 0 or bytes[at + f[F_REF] + 1] != STR or n >= len(address) - 1:
                bad += 1
                break
            length = _u32(halves, at + f[F_STR_LEN])
            address[n], kind[n], marked[n] = o, STR, bytes[at + f[F_REF]]
            if f[F_FAMILY] < 3:
                size[n] = f[F_STR_SIZEOF] + length + 1
            else:
                size[n] = f[F_STR_SIZEOF] + ((length + 4) & ~3)
            n += 1
            o = _ref(f, words, halves, at)
    return n, used, bad


@helper
def _slot(address, mask):
    """Where a hash table of `mask` + 1 slots looks for an address first."""
    x = address >> 3
    x ^= x >> 15
    x = (x & 0xffffffff) * 0x9e3779b1
    return (x >> 12) & mask


def _index(address: I64s, n: I64, slots: I32s):
    """Fill the hash table `slots` (a power of two of them, all -1) with rows; how many addresses came twice."""
    mask = len(slots) - 1
    twice = 0
    for row in range(n):
        k = _slot(address[row], mask)
        while slots[k] >= 0:
            if address[slots[k]] == address[row]:
                twice += 1
                break
            k = (k + 1) & mask
        if slots[k] < 0:
            slots[k] = row
    return twice


@helper
def _row(address, slots, o):
    """The row of the object at `o`, or -1."""
    mask = len(slots) - 1
    k = _slot(o, mask)
    while slots[k] >= 0:
        if address[slots[k]] == o:
            return int(slots[k])
        k = (k + 1) & mask
    return -1


@helper
def _object_in(f, value):
    """The address a TValue refers to, 0 when it is no collectable object."""
    if f[F_GC64]:
        tag = ~(value >> 47)
        return value & _MASK47 if STR <= tag <= UDATA else 0
    tag = ~(value >> 32)
    return value & 0xffffffff if STR <= tag <= UDATA else 0


@helper
def _put(address, slots, o, label, targets, labels, c):
    """Append an edge to the object at `o`; the number of edges then."""
    if o != 0:
        row = _row(address, slots, o)
        if row >= 0:
            targets[c] = row
            labels[c] = label
            return c + 1
    return c


@helper
def _put_values(f, words, starts, ends, offsets, start, count, label, step, address, slots, targets, labels, c):
    """Append edges to what `count` TValues from address `start` refer to;
    labels go down by `step` from one to the next."""
    for k in range(count):
        at = _at(starts, ends, offsets, start + 8 * k, 8)
        if at < 0:
            break
        c = _put(address, slots, _object_in(f, words[at >> 3]), label - step * k, targets, labels, c)
    return c


@helper
def _put_strings(f, words, starts, ends, offsets, start, count, kind, address, slots, targets, labels, c):
    """The same for the strings alone, which weak tables hold all the same."""
    for k in range(count):
        at = _at(starts, ends, offsets, start + 8 * k, 8)
        if at < 0:
            break
        c = _put_string(f, words[at >> 3], ARRAY, kind, address, slots, targets, labels, c)
    return c


@helper
def _put_string(f, value, label, kind, address, slots, targets, labels, c):
    """Append an edge to what a TValue refers to if that is a string."""
    held = _object_in(f, value)
    if held != 0:
        row = _row(address, slots, held)
        if row >= 0 and kind[row] == STR:
            targets[c] = row
            labels[c] = label
            return c + 1
    return c


@helper
def _table_edges(f, words, halves, starts, ends, offsets, at, weak, kind, address, slots, targets, labels, c):
    c = _put(address, slots, _ref(f, words, halves, at + f[F_TAB_META]), METATABLE, targets, labels, c)
    array, asize = _ref(f, words, halves, at + f[F_TAB_ARRAY]), _u32(halves, at + f[F_TAB_ASIZE])
    if weak & 2:
        c = _put_strings(f, words, starts, ends, offsets, array, asize, kind, address, slots, targets, labels, c)
    else:
        c = _put_values(f, words, starts, ends, offsets, array, asize, ARRAY, 0, address, slots, targets, labels, c)
    hmask = _u32(halves, at + f[F_TAB_HMASK])
    if hmask == 0:
        return c
    node = _ref(f, words, halves, at + f[F_TAB_NODE])
    for k in range(hmask + 1):
        place = _at(starts, ends, offsets, node + 24 * k, 24)
        if place < 0:
            break
        value, key = words[place >> 3], words[(place >> 3) + 1]
        if value == -1 or (not f[F_GC64] and value >> 32 == -1):
            continue                              # nil: the key may be dead
        held = _object_in(f, key)
        name = OTHER_KEY
        if held != 0:
            row = _row(address, slots, held)
            if row >= 0 and (not weak & 1 or kind[row] == STR):
                targets[c] = row
                labels[c] = KEY
                c += 1
            if row >= 0 and kind[row] == STR:
                name = row
        if weak & 2:
            c = _put_string(f, value, name, kind, address, slots, targets, labels, c)
        else:
            c = _put(address, slots, _object_in(f, value), name, targets, labels, c)
    return c


@helper
def _frame_functions(f, halves, starts, ends, offsets, base, stack, address, slots, targets, labels, c):
    """Without GC64 a frame's function hides in a slot whose other half is the frame's link: append an edge to each."""
    frame = base - 8
    while frame > stack and c < len(targets):
        at = _at(starts, ends, offsets, frame, 8)
        if at < 0:
            break
        link = _u32(halves, at + 4)
        c = _put(address, slots, _u32(halves, at), STACK, targets, labels, c)
        step = link & 0xfffffff8
        if link & 3 == 0:                         # called from Lua: the calling instruction says how far down
            call = _at(starts, ends, offsets, link - 4, 4)
            if call < 0:
                break
            step = 8 * (1 + (_u32(halves, call) >> 8 & 0xff))
        if step == 0:
            break
        frame -= step
    return c


@helper
def _function_edges(f, bytes, words, halves, starts, ends, offsets, at, o, address, slots, targets, labels, c):
    c = _put(address, slots, _ref(f, words, halves, at + f[F_FN_ENV]), ENVIRONMENT, targets, labels, c)
    count = int(bytes[at + f[F_FN_NUPV]])
    if bytes[at + f[F_FN_FFID]] != 0:
        return _put_values(f, words, starts, ends, offsets, o + f[F_FN_UPVALUE], count, UPVALUE, 1, address, slots,
                           targets, labels, c)
    c = _put(address, slots, _ref(f, words, halves, at + f[F_FN_PC]) - f[F_PT_SIZEOF], PROTOTYPE, targets, labels, c)
    for k in range(count):
        place = _at(starts, ends, offsets, o + f[F_FN_UVPTR] + f[F_REF] * k, f[F_REF])
        if place < 0:
            break
        c = _put(address, slots, _ref(f, words, halves, place), UPVALUE - k, targets, labels, c)
    return c


@helper
def _trace_edges(f, bytes, words, halves, starts, ends, offsets, at, traces, address, slots, targets, labels, c):
    ir, nk = _ref(f, words, halves, at + f[F_TR_IR]) if f[F_GC64] else words[(at + f[F_TR_IR]) >> 3], \
        _u32(halves, at + f[F_TR_NK])
    ref = nk
    while ref < _REF_BIAS - 3:
        place = _at(starts, ends, offsets, ir + 8 * ref, 16)
        if place < 0:
            break
        kind, op = int(bytes[place + 4]) & 31, int(bytes[place + 5])
        if op == _IR_KGC:
            held = words[(place >> 3) + 1] if f[F_GC64] else _u32(halves, place)
            c = _put(address, slots, held, CONSTANT, targets, labels, c)
        wide = (_WIDE_GC64 if f[F_GC64] else _WIDE) >> kind & 1
        ref += 2 if wide and op != _IR_KNULL else 1
    for k in range(3):
        number = _u16(bytes, at + (f[F_TR_LINK] if k == 0 else f[F_TR_NEXTROOT] if k == 1 else f[F_TR_NEXTSIDE]))
        if 0 < number < len(traces):
            c = _put(address, slots, traces[number], TRACE_LINK, targets, labels, c)
    return _put(address, slots, _ref(f, words, halves, at + f[F_TR_STARTPT]), PROTOTYPE, targets, labels, c)


@helper
def _prototype_edges(f, bytes, words, halves, starts, ends, offsets, at, traces, address, slots, targets, labels, c):
    c = _put(address, slots, _ref(f, words, halves, at + f[F_PT_CHUNK]), CHUNK_NAME, targets, labels, c)
    constants = _ref(f, words, halves, at + f[F_PT_K])
    for k in range(_u32(halves, at + f[F_PT_SIZEKGC])):
        place = _at(starts, ends, offsets, constants - f[F_REF] * (k + 1), f[F_REF])
        if place < 0:
            break
        c = _put(address, slots, _ref(f, words, halves, place), CONSTANT, targets, labels, c)
    number = _u16(bytes, at + f[F_PT_TRACE])
    if 0 < number < len(traces):
        c = _put(address, slots, traces[number], TRACE_LINK, targets, labels, c)
    return c


@helper
def _userdata_edges(f, bytes, words, halves, starts, ends, offsets, at, o, address, slots, targets, labels, c):
    c = _put(address, slots, _ref(f, words, halves, at + f[F_UD_META]), METATABLE, targets, labels, c)
    c = _put(address, slots, _ref(f, words, halves, at + f[F_UD_ENV]), ENVIRONMENT, targets, labels, c)
    place = _string_buffer(f, bytes, halves, starts, ends, offsets, o, at)
    if place >= 0:
        if _ref(f, words, halves, place + f[F_SB_L]) & _COW:      # else it is a borrowed buffer's address
            c = _put(address, slots, _ref(f, words, halves, place + f[F_SB_COWREF]), COPY_ON_WRITE, targets, labels, c)
        c = _put(address, slots, _ref(f, words, halves, place + f[F_SB_DICT]), DICT, targets, labels, c)
        c = _put(address, slots, _ref(f, words, halves, place + f[F_SB_DICT_MT]), METATABLE_DICT, targets, labels, c)
    return c


def _edges(bytes: U8s, halves: I32s, words: I64s, starts: I64s, ends: I64s, offsets: I64s, f: I64s, traces: I64s,
           weak: U8s, address: I64s, kind: U8s, slots: I32s, first: I64, last: I64, begins: I32s, targets: I32s,
           labels: I32s, c: I64):
    """The references of rows [first, last), in CSR: row r's are targets[begins[r]:begins[r + 1]], with their labels;
    the number of edges then, or -1 - the row when `targets` is too short for it.

    `weak`: of each row bit 0 weak keys, bit 1 weak values. `traces`: address of each trace by its number.
    """
    for row in range(first, last):
        o, what = address[row], int(kind[row])
        begins[row] = c
        at = _at(starts, ends, offsets, o, 16)
        if at >= 0 and what != STR and what != CDATA:
            if c + 4096 > len(targets):
                return -1 - row
            if what == TAB:
                if c + _u32(halves, at + f[F_TAB_ASIZE]) + 2 * _u32(halves, at + f[F_TAB_HMASK]) + 64 > len(targets):
                    return -1 - row
                c = _table_edges(f, words, halves, starts, ends, offsets, at, int(weak[row]), kind, address, slots,
                                 targets, labels, c)
            elif what == FUNC:
                c = _function_edges(f, bytes, words, halves, starts, ends, offsets, at, o, address, slots, targets,
                                    labels, c)
            elif what == UPVAL:
                c = _put_values(f, words, starts, ends, offsets, _ref(f, words, halves, at + f[F_UV_V]), 1, VALUE, 0,
                                address, slots, targets, labels, c)
            elif what == UDATA:
                c = _userdata_edges(f, bytes, words, halves, starts, ends, offsets, at, o, address, slots, targets,
                                    labels, c)
            elif what == PROTO:
                if c + _u32(halves, at + f[F_PT_SIZEKGC]) + 64 > len(targets):
                    return -1 - row
                c = _prototype_edges(f, bytes, words, halves, starts, ends, offsets, at, traces, address, slots,
                                     targets, labels, c)
            elif what == TRACE:
                c = _trace_edges(f, bytes, words, halves, starts, ends, offsets, at, traces, address, slots, targets,
                                 labels, c)
            elif what == THREAD:
                stack, top = _ref(f, words, halves, at + f[F_L_STACK]), \
                    words[(at + f[F_L_TOP]) >> 3] if f[F_GC64] else _u32(halves, at + f[F_L_TOP])
                c = _put(address, slots, _ref(f, words, halves, at + f[F_L_ENV]), ENVIRONMENT, targets, labels, c)
                count = min((top - stack) >> 3, _u32(halves, at + f[F_L_STACKSIZE]))
                if count > 0:
                    if c + 2 * count + 64 > len(targets):
                        return -1 - row
                    c = _put_values(f, words, starts, ends, offsets, stack, count, STACK, 0, address, slots, targets,
                                    labels, c)
                    if not f[F_GC64]:
                        c = _frame_functions(f, halves, starts, ends, offsets, _u32(halves, at + f[F_L_BASE]), stack,
                                             address, slots, targets, labels, c)
        begins[row + 1] = c
    return c


@helper
def _light(f, segments, value):
    """The pointer of a light userdata TValue, 0 when it is none. `segments`: upper halves by segment; empty without."""
    tag = ~(value >> 47)
    if tag != (3 if f[F_GC64] else 1):
        return 0
    if len(segments) == 0:
        return value & _MASK47
    segment = (value >> 39) & 0xff
    if segment >= len(segments):
        return 0
    return segments[segment] | (value & ((1 << 39) - 1))


@helper
def _put_native(value, low, high, row, label, sources, values, labels, n):
    """Append a pointer that is in [low, high); the number of pointers then."""
    if low <= value < high:
        sources[n], values[n], labels[n] = row, value, label
        return n + 1
    return n


@helper
def _put_lights(f, segments, words, starts, ends, offsets, start, count, label, step, low, high, row, sources, values, labels,
                n):
    """Append the light userdata among `count` TValues from `start` on; labels go down by `step` from one to the next."""
    for k in range(count):
        at = _at(starts, ends, offsets, start + 8 * k, 8)
        if at < 0:
            break
        n = _put_native(_light(f, segments, words[at >> 3]), low, high, row, label - step * k, sources, values, labels, n)
    return n


@helper
def _put_payload(words, starts, ends, offsets, start, size, label, step, low, high, row, sources, values, labels, n):
    """Append each aligned word of a payload that can be a pointer; labels go down by `step` from one to the next."""
    for k in range(size >> 3):
        at = _at(starts, ends, offsets, start + 8 * k, 8)
        if at < 0 or at & 7:
            break
        n = _put_native(words[at >> 3], low, high, row, label - step * k, sources, values, labels, n)
    return n


def _natives(bytes: U8s, halves: I32s, words: I64s, starts: I64s, ends: I64s, offsets: I64s, f: I64s, segments: I64s,
             low: I64, high: I64, address: I64s, size: I64s, kind: U8s, marked: U8s, slots: I32s, first: I64, last: I64,
             sources: I32s, values: I64s, labels: I32s, n: I64):
    """List what objects [first, last) hold that can point into [low, high): words of cdata, userdata and string
    buffers, the extra data of threads, light userdata wherever values are. (row, value, label) from `n` on; how many
    there are then. All three must have room for all words of the objects."""
    for row in range(first, last):
        o, what = address[row], int(kind[row])
        if what == STR or what == PROTO or what == TRACE:
            continue
        at = _at(starts, ends, offsets, o, 16)
        if at < 0:
            continue
        if what == CDATA:
            length = size[row] - f[F_CD_SIZEOF]
            if marked[row] & _VARIABLE:
                before = _at(starts, ends, offsets, o - 8, 8)
                length = _u32(halves, before + 4) if before >= 0 else 0
            n = _put_payload(words, starts, ends, offsets, o + f[F_CD_SIZEOF], min(length, size[row]), NATIVE, 1, low,
                             high, row, sources, values, labels, n)
        elif what == UDATA:
            length = _u32(halves, at + f[F_UD_LEN])
            n = _put_payload(words, starts, ends, offsets, o + f[F_UD_SIZEOF], min(length, size[row]), NATIVE, 1, low,
                             high, row, sources, values, labels, n)
            place = _string_buffer(f, bytes, halves, starts, ends, offsets, o, at)
            if place >= 0:
                length = _buffer_size(f, words, halves, place)
                n = _put_payload(words, starts, ends, offsets, _ref(f, words, halves, place + f[F_SB_B]),
                                 min(length, size[row]), CONTENT, 0, low, high, row, sources, values, labels, n)
        elif what == TAB:
            asize, hmask = _u32(halves, at + f[F_TAB_ASIZE]), _u32(halves, at + f[F_TAB_HMASK])
            if 8 * asize <= size[row]:
                n = _put_lights(f, segments, words, starts, ends, offsets, _ref(f, words, halves, at + f[F_TAB_ARRAY]), asize,
                                ARRAY, 0, low, high, row, sources, values, labels, n)
            node = _ref(f, words, halves, at + f[F_TAB_NODE])
            for k in range(hmask + 1 if 0 < hmask and 24 * hmask <= size[row] else 0):
                place = _at(starts, ends, offsets, node + 24 * k, 24)
                if place < 0:
                    break
                value, key = words[place >> 3], words[(place >> 3) + 1]
                pointer = _light(f, segments, value)
                if low <= pointer < high:
                    named = _object_in(f, key)
                    name = _row(address, slots, named) if named != 0 else -1
                    if name < 0 or kind[name] != STR:
                        name = OTHER_KEY
                    n = _put_native(pointer, low, high, row, name, sources, values, labels, n)
                n = _put_native(_light(f, segments, key), low, high, row, KEY, sources, values, labels, n)
        elif what == FUNC:
            if bytes[at + f[F_FN_FFID]] != 0:
                n = _put_lights(f, segments, words, starts, ends, offsets, o + f[F_FN_UPVALUE],
                                int(bytes[at + f[F_FN_NUPV]]), UPVALUE, 1, low, high, row, sources, values, labels, n)
        elif what == UPVAL:
            n = _put_lights(f, segments, words, starts, ends, offsets, _ref(f, words, halves, at + f[F_UV_V]), 1, VALUE, 0,
                            low, high, row, sources, values, labels, n)
        elif what == THREAD:
            n = _put_payload(words, starts, ends, offsets, o, f[F_L_SIZEOF], NATIVE, 1, low, high, row, sources, values,
                             labels, n)
            stack = _ref(f, words, halves, at + f[F_L_STACK])
            top = words[(at + f[F_L_TOP]) >> 3] if f[F_GC64] else _u32(halves, at + f[F_L_TOP])
            count = min((top - stack) >> 3, _u32(halves, at + f[F_L_STACKSIZE]))
            if 0 < 8 * count <= size[row]:
                n = _put_lights(f, segments, words, starts, ends, offsets, stack, count, STACK, 0, low, high, row, sources,
                                values, labels, n)
    return n


def _find_all(address: I64s, slots: I32s, wanted: I64s, rows: I32s):
    """Put the row of the object at each wanted address, or -1, into `rows`; how many there are."""
    found = 0
    for k in range(len(wanted)):
        rows[k] = _row(address, slots, wanted[k])
        if rows[k] >= 0:
            found += 1
    return found


def _find(address: I64s, slots: I32s, o: I64):
    """The row of the object at `o`, or -1."""
    return _row(address, slots, o)


objects = kernel(in_python(_objects))(_objects)
strings = kernel(in_python(_strings))(_strings)
index = kernel(in_python(_index))(_index)
edges = kernel(in_python(_edges))(_edges)
find = kernel(in_python(_find))(_find)
natives = kernel(in_python(_natives))(_natives)
find_all = kernel(in_python(_find_all))(_find_all)
