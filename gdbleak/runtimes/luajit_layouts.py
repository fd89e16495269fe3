"""LuaJIT's structures, with GC64 (64-bit references) and without: by the debug information of the target where there
is such, else by tables, release by release, read from the DWARF of builds of each.

A value that moved is a tuple over FAMILIES; -1: the field does not exist there. Names are STRUCT_field; STRUCT_sizeof
is the size. A VM's family is found by fingerprint, never by a version string.
"""
from __future__ import annotations

from types import SimpleNamespace

from ..target.layout import Layouts

# The releases whose layouts differ; one not named here has the layout of the one before it of its own line.
FAMILIES = ("2.1.0-beta3 (2017)", "OpenResty 2019-05", "OpenResty 2020-01", "OpenResty 2020-10",
            "OpenResty 2022-04 to 2024-03", "2.1 rolling, 2022 to 2023", "2.1 rolling, 2024",
            "2.1 rolling, from November 2025")

_GC64 = dict(
    CTState_sizeof=(520, 520, 520, 520, 520, 472, 464, 464), CTState_top=8, CTState_sizetab=12,
    CTState_finalizer=(32, 32, 32, 32, 32, 32, -1, -1), CTState_cb_cbid=(240, 240, 240, 240, 240, 192, 184, 184),
    CTState_cb_sizeid=(248, 248, 248, 248, 248, 200, 192, 192),
    CType_sizeof=24, CType_name=16,
    J_irbuf=(336, 336, 336, 328, 328, 328, 328, 328), J_snapbuf=(360, 360, 360, 352, 352, 352, 352, 352),
    J_snapmapbuf=(368, 368, 368, 360, 360, 360, 360, 360),
    g_vmthref=(-1, -1, -1, -1, -1, -1, -1, 280),
    GCstr_sizeof=24, GCstr_len=(16, 16, 16, 20, 20, 20, 20, 20),
    GCudata_sizeof=48, GCudata_udtype=10, GCudata_env=16, GCudata_len=24, GCudata_metatable=32,
    GCcdata_sizeof=16, GCcdata_ctypeid=10,
    GCproto_sizeof=104, GCproto_sizebc=12, GCproto_k=32, GCproto_sizekgc=48, GCproto_sizekn=52, GCproto_sizept=56,
    GCproto_sizeuv=60, GCproto_trace=62, GCproto_chunkname=64, GCproto_firstline=72, GCproto_numline=76,
    GCproto_lineinfo=80, GCproto_uvinfo=88, GCproto_varinfo=96,
    GCupval_sizeof=48, GCupval_closed=10, GCupval_v=32,
    GCfuncC_ffid=10, GCfuncC_nupvalues=11, GCfuncC_env=16, GCfuncC_pc=32, GCfuncC_f=40, GCfuncC_upvalue=48,
    GCfuncL_uvptr=40,
    GCtab_sizeof=64, GCtab_colo=11, GCtab_array=16, GCtab_metatable=32, GCtab_node=40, GCtab_asize=48, GCtab_hmask=52,
    L_sizeof=(96, 104, 104, 112, 112, 96, 96, 96), L_status=11, L_glref=16, L_base=32, L_top=40, L_maxstack=48,
    L_stack=56, L_openupval=64, L_env=72, L_stacksize=88,
    GCtrace_sizeof=120, GCtrace_nins=12, GCtrace_ir=32, GCtrace_nk=40, GCtrace_nsnap=(44, 10, 10, 10, 10, 10, 10, 10),
    GCtrace_nsnapmap=(46, 44, 44, 44, 44, 44, 44, 44), GCtrace_startpt=64, GCtrace_szmcode=84, GCtrace_traceno=104,
    GCtrace_link=106, GCtrace_nextroot=110, GCtrace_nextside=112,
    SnapShot_sizeof=(8, 12, 12, 12, 12, 12, 12, 12),
    g_strhash=(0, 0, 0, -1, -1, -1, -1, -1), g_strmask=(8, 8, 8, -1, -1, -1, -1, -1),
    g_strnum=(12, 12, 12, -1, -1, -1, -1, -1), g_str=(-1, -1, -1, 152, 152, 152, 152, 152),
    g_allocf=(16, 16, 16, 0, 0, 0, 0, 0), g_allocd=(24, 24, 24, 8, 8, 8, 8, 8), g_gc=(32, 32, 32, 16, 16, 16, 16, 16),
    g_vmstate=(128, 128, 128, 184, 184, 184, 184, 184), g_tmpbuf=(136, 136, 136, 200, 200, 200, 200, 200),
    g_mainthref=(200, 200, 200, 192, 192, 192, 192, 192), g_registrytv=(208, 208, 208, 272, 272, 272, 272, 272),
    g_uvhead=(256, 256, 256, 280, 280, 280, 280, 288), g_cur_L=(344, 344, 344, 368, 368, 368, 368, 376),
    g_jit_base=(352, 352, 352, 376, 376, 376, 376, 384), g_ctype_state=(360, 368, 368, 384, 384, 384, 384, 392),
    g_gcroot=(368, 376, 376, 424, 424, 424, 424, 432), g_prng=(-1, -1, -1, 392, 392, 392, 392, 400),
    GCState_currentwhite=16, GCState_state=17, GCState_sweepstr=20, GCState_root=24, GCState_mmudata=64,
    GCState_lightudnum=(-1, -1, -1, 19, 19, 19, 19, 19), GCState_lightudseg=(-1, -1, -1, 96, 96, 96, 96, 96),
    SBuf_e=8, SBuf_b=16, SBuf_L=24, SBufExt_cowref=(-1, -1, -1, -1, 32, 32, 32, 32),
    SBufExt_dict_str=(-1, -1, -1, -1, 48, 48, 48, 48), SBufExt_dict_mt=(-1, -1, -1, -1, 56, 56, 56, 56),
    J_irtoplim=(344, 344, 344, 336, 336, 336, 336, 336), J_irbotlim=(348, 348, 348, 340, 340, 340, 340, 340),
    J_sizesnap=(356, 356, 356, 348, 348, 348, 348, 348), J_sizesnapmap=(376, 376, 376, 368, 368, 368, 368, 368),
    J_trace=(392, 392, 392, 384, 384, 384, 384, 384), J_sizetrace=(404, 404, 404, 396, 396, 396, 396, 396),
    J_szmcarea=(3080, 3080, 3080, 3064, 3072, 3072, 3072, 3072),
    J_szallmcarea=(3088, 3088, 3088, 3072, 3080, 3080, 3080, 3080),
    GG_sizeof=(6192, 6208, 6208, 6288, 6296, 6240, 6248, 6384), GG_J=(768, 784, 784, 848, 848, 824, 832, 840),
    GG_dispatch=(4016, 4032, 4032, 4112, 4120, 4064, 4072, 4096))
_GC32 = dict(
    CTState_sizeof=(520, 520, 520, 520, 520, 472, 464, 464), CTState_top=8, CTState_sizetab=12,
    CTState_finalizer=(32, 32, 32, 32, 32, 32, -1, -1), CTState_cb_cbid=(240, 240, 240, 240, 240, 192, 184, 184),
    CTState_cb_sizeid=(248, 248, 248, 248, 248, 200, 192, 192),
    CType_sizeof=16, CType_name=12,
    J_irbuf=(312, 312, 312, 304, 304, 304, 304, 304), J_snapbuf=(336, 336, 336, 328, 328, 328, 328, 328),
    J_snapmapbuf=(344, 344, 344, 336, 336, 336, 336, 336),
    g_vmthref=(-1, -1, -1, -1, -1, -1, -1, 224),
    GCstr_sizeof=(16, 16, 16, 20, 20, 20, 20, 20), GCstr_len=(12, 12, 12, 16, 16, 16, 16, 16),
    GCudata_sizeof=24, GCudata_udtype=6, GCudata_env=8, GCudata_len=12, GCudata_metatable=16,
    GCcdata_sizeof=8, GCcdata_ctypeid=6,
    GCproto_sizeof=64, GCproto_sizebc=8, GCproto_k=16, GCproto_sizekgc=24, GCproto_sizekn=28, GCproto_sizept=32,
    GCproto_sizeuv=36, GCproto_trace=38, GCproto_chunkname=40, GCproto_firstline=44, GCproto_numline=48,
    GCproto_lineinfo=52, GCproto_uvinfo=56, GCproto_varinfo=60,
    GCupval_sizeof=24, GCupval_closed=6, GCupval_v=16,
    GCfuncC_ffid=6, GCfuncC_nupvalues=7, GCfuncC_env=8, GCfuncC_pc=16, GCfuncC_f=24, GCfuncC_upvalue=32,
    GCfuncL_uvptr=20,
    GCtab_sizeof=32, GCtab_colo=7, GCtab_array=8, GCtab_metatable=16, GCtab_node=20, GCtab_asize=24, GCtab_hmask=28,
    L_sizeof=(64, 72, 72, 80, 80, 64, 64, 64), L_status=7, L_glref=8, L_base=16, L_top=24, L_maxstack=32, L_stack=36,
    L_openupval=40, L_env=44, L_stacksize=56,
    GCtrace_sizeof=96, GCtrace_nins=8, GCtrace_ir=16, GCtrace_nk=24, GCtrace_nsnap=(28, 6, 6, 6, 6, 6, 6, 6),
    GCtrace_nsnapmap=(30, 28, 28, 28, 28, 28, 28, 28), GCtrace_startpt=48, GCtrace_szmcode=60, GCtrace_traceno=80,
    GCtrace_link=82, GCtrace_nextroot=86, GCtrace_nextside=88,
    SnapShot_sizeof=(8, 12, 12, 12, 12, 12, 12, 12),
    g_strhash=(0, 0, 0, -1, -1, -1, -1, -1), g_strmask=(8, 8, 8, -1, -1, -1, -1, -1),
    g_strnum=(12, 12, 12, -1, -1, -1, -1, -1), g_str=(-1, -1, -1, 104, 104, 104, 104, 104),
    g_allocf=(16, 16, 16, 0, 0, 0, 0, 0), g_allocd=(24, 24, 24, 8, 8, 8, 8, 8), g_gc=(32, 32, 32, 16, 16, 16, 16, 16),
    g_vmstate=(88, 88, 88, 136, 136, 136, 136, 136), g_tmpbuf=(92, 92, 92, 144, 144, 144, 144, 144),
    g_mainthref=(128, 128, 128, 140, 140, 140, 140, 140), g_registrytv=(136, 136, 136, 200, 216, 216, 216, 216),
    g_uvhead=(184, 184, 184, 208, 224, 224, 224, 232), g_cur_L=(248, 248, 248, 272, 288, 288, 288, 296),
    g_jit_base=(252, 252, 252, 276, 292, 292, 292, 300), g_ctype_state=(256, 260, 260, 280, 296, 296, 296, 304),
    g_gcroot=(260, 264, 264, 320, 336, 336, 336, 344), g_prng=(-1, -1, -1, 288, 304, 304, 304, 312),
    GCState_currentwhite=8, GCState_state=9, GCState_sweepstr=12, GCState_root=16, GCState_mmudata=36,
    GCState_lightudnum=(-1, -1, -1, 11, 11, 11, 11, 11), GCState_lightudseg=(-1, -1, -1, 56, 56, 56, 56, 56),
    SBuf_e=(4, 4, 4, 4, 8, 8, 8, 8), SBuf_b=(8, 8, 8, 8, 16, 16, 16, 16), SBuf_L=(12, 12, 12, 12, 24, 24, 24, 24),
    SBufExt_cowref=(-1, -1, -1, -1, 28, 28, 28, 28),
    SBufExt_dict_str=(-1, -1, -1, -1, 40, 40, 40, 40), SBufExt_dict_mt=(-1, -1, -1, -1, 44, 44, 44, 44),
    J_irtoplim=(320, 320, 320, 312, 312, 312, 312, 312), J_irbotlim=(324, 324, 324, 316, 316, 316, 316, 316),
    J_sizesnap=(332, 332, 332, 324, 324, 324, 324, 324), J_sizesnapmap=(352, 352, 352, 344, 344, 344, 344, 344),
    J_trace=(368, 368, 368, 360, 360, 360, 360, 360), J_sizetrace=(380, 380, 380, 372, 372, 372, 372, 372),
    J_szmcarea=(2528, 2528, 2528, 2512, 2520, 2520, 2520, 2520),
    J_szallmcarea=(2536, 2536, 2536, 2520, 2528, 2528, 2528, 2528),
    GG_sizeof=(5352, 5360, 5360, 5448, 5472, 5416, 5424, 5560), GG_J=(480, 488, 488, 560, 576, 552, 560, 568),
    GG_dispatch=(3176, 3184, 3184, 3272, 3296, 3240, 3248, 3272))


# The C type whose members a name's prefix stands for, where that is not the type's own name.
_TYPES = {"g": "global_State", "L": "lua_State", "J": "jit_State", "GG": "GG_State"}


def from_tables(family: int, gc64: bool) -> SimpleNamespace:
    """All offsets and sizes of one family (an index into FAMILIES), with `gc64`, `family`, `ref`
    (bytes of a reference) and `source`, which says where they are from."""
    return SimpleNamespace(**_values(family, gc64), gc64=gc64, family=family, ref=8 if gc64 else 4, source="tables")


def from_debug_information(layouts: Layouts) -> SimpleNamespace | None:
    """The same by debug information; None when there is none, or when it lacks what every release has.

    `family` is the one that has the most values in common with it: it stands for what no structure tells.
    """
    reference = layouts.structure("GCRef") if layouts.structure("GG_State") else None
    if reference is None:
        return None
    gc64, values = reference.size == 8, {}
    for name, known in (_GC64 if gc64 else _GC32).items():
        kind, _, member = name.partition("_")
        found = layouts.structure(_TYPES.get(kind, kind))
        if found is not None and member == "sizeof":
            values[name] = found.size
        elif found is not None and member in found.members:
            values[name] = found.members[member][0]
        elif isinstance(known, tuple) and -1 in known:
            values[name] = -1
        else:
            return None
    family = max(range(len(FAMILIES)), key=lambda k: len(values.items() & _values(k, gc64).items()))
    return SimpleNamespace(**values, gc64=gc64, family=family, ref=reference.size, source="debug information")


def _values(family: int, gc64: bool) -> dict[str, int]:
    table = _GC64 if gc64 else _GC32
    return {name: value[family] if isinstance(value, tuple) else value for name, value in table.items()}
