"""LuaJIT objects in Lua's words: what an edge is called, what a function, a C type or a userdata is."""
from __future__ import annotations

import re

import numpy as np

from ..kernels import luajit as kernel
from ..target.address_space import Absent
from .luajit import VM, ctype_sizes, ctype_state, table_get, table_nodes

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*$")
_EDGES = {kernel.ARRAY: "[*]", kernel.OTHER_KEY: "[*]", kernel.MEMBER: "[*]", kernel.KEY: "[keys]",
          kernel.METATABLE: "(metatable)", kernel.ENVIRONMENT: "(environment)", kernel.PROTOTYPE: "(prototype)",
          kernel.VALUE: "(value)", kernel.CONSTANT: "(constants)", kernel.STACK: "(stack)",
          kernel.TRACE_LINK: "(traces)", kernel.CHUNK_NAME: "(chunk name)", kernel.CONTENT: "(content)",
          kernel.COPY_ON_WRITE: "(copy-on-write)", kernel.DICT: "(dict)", kernel.METATABLE_DICT: "(metatable dict)"}
_CT_NUM, _CT_STRUCT, _CT_PTR, _CT_ARRAY, _CT_VOID, _CT_ENUM, _CT_FUNC, _CT_TYPEDEF, _CT_ATTRIB = range(9)


class Names:
    """Names of one VM's objects, looked up when they are asked for and kept."""

    def __init__(self, vm: VM):
        self.vm = vm
        self._functions: dict[int, str] = {}
        self._types: dict[int, str] = {}

    # -- edges ---------------------------------------------------------------------------------------------------------
    def edge(self, label: int, source: int) -> str:
        """An edge as Lua writes it: `.field`, `["odd key"]`, `[*]`, `upvalue cache`.
        `source`: row the edge leaves from, -1: unknown."""
        if label >= 0:
            text = self.text(label, 200)
            return "." + text if _IDENTIFIER.match(text) else f'["{text}"]'
        if label <= kernel.UPVALUE:
            return "upvalue " + (self.upvalue(source, kernel.UPVALUE - label) or str(kernel.UPVALUE - label + 1))
        return _EDGES.get(label, "?")

    def text(self, row: int, limit: int = 80) -> str:
        """The text of a string object."""
        try:
            return self.vm.string(self.address(row), limit).decode("utf-8", "backslashreplace")
        except Absent:
            return "?"

    def address(self, row: int) -> int:
        return int(self.vm.objects.address[row])

    def upvalue(self, row: int, number: int) -> str:
        """The name of an upvalue of a Lua function, "" when its debug data is stripped."""
        proto = self.prototype_of(row) if row >= 0 else 0
        if not proto:
            return ""
        try:
            names = self.vm.ref(proto + self.vm.layout.GCproto_uvinfo)
            if not names:
                return ""
            for _ in range(number):
                names += len(self.vm.target.space.cstring(names, 256)) + 1
            return self.vm.target.space.cstring(names, 256).decode("utf-8", "backslashreplace")
        except Absent:
            return ""

    # -- functions -----------------------------------------------------------------------------------------------------
    def prototype_of(self, row: int) -> int:
        """Address of a Lua function's prototype, 0 for a C function."""
        vm, layout, address = self.vm, self.vm.layout, self.address(row)
        try:
            if int(vm.objects.kind[row]) != kernel.FUNC or vm.u8(address + layout.GCfuncC_ffid):
                return 0
            return vm.ref(address + layout.GCfuncC_pc) - layout.GCproto_sizeof
        except Absent:
            return 0

    def place(self, proto: int) -> str:
        """`file.lua:12`, where a prototype's function begins."""
        vm, layout = self.vm, self.vm.layout
        try:
            chunk = vm.string(vm.ref(proto + layout.GCproto_chunkname), 200).decode("utf-8", "backslashreplace")
            line = vm.u32(proto + layout.GCproto_firstline)
        except Absent:
            return "?"
        if chunk[:1] in "@=":
            return f"{chunk[1:].rsplit('/', 1)[-1]}:{line}"
        return f'"{chunk.splitlines()[0][:30] if chunk else ""}":{line}'

    def function(self, row: int) -> str:
        """`file.lua:12` of a Lua function, the symbol of a C function."""
        if row not in self._functions:
            proto = self.prototype_of(row)
            self._functions[row] = self.place(proto) if proto else self._c_function(row)
        return self._functions[row]

    def _c_function(self, row: int) -> str:
        vm, layout, address = self.vm, self.vm.layout, self.address(row)
        try:
            code = vm.target.space.word(address + layout.GCfuncC_f)
            number = vm.u8(address + layout.GCfuncC_ffid)
        except Absent:
            return "C"
        return vm.target.name_of(code) or (f"built-in {number}" if number > 1 else "C")

    # -- objects -------------------------------------------------------------------------------------------------------
    def object(self, row: int) -> str:
        """An object in a few words."""
        kind = int(self.vm.objects.kind[row])
        if kind == kernel.FUNC:
            return f"function {self.function(row)}"
        if kind == kernel.PROTO:
            return f"prototype {self.place(self.address(row))}"
        if kind == kernel.STR:
            return f'string "{self.text(row, 60)}"'
        if kind == kernel.CDATA:
            return f"cdata {self.ctype_of(row)}"
        if kind == kernel.UDATA:
            return f"userdata {self.userdata(row)}".rstrip()
        return kernel.KINDS[kind]

    def userdata(self, row: int) -> str:
        """What a userdata is: by the library that made it, else what its metatable calls itself: __name, or the
        registry's name for it."""
        vm, address = self.vm, self.address(row)
        try:
            kind = vm.u8(address + vm.layout.GCudata_udtype)
            if kind == kernel.BUFFER:
                return "string.buffer"
            if kind == kernel.C_LIBRARY:
                return self._library(vm.target.space.word(address + vm.layout.GCudata_sizeof))
            metatable = vm.ref(address + vm.layout.GCudata_metatable)
            if not metatable:
                return ""
            value = table_get(vm, metatable, b"__name")
            kind, text = vm.object_in(value) if value is not None else (0, 0)
            if kind == kernel.STR:
                return vm.string(text, 80).decode("utf-8", "backslashreplace")
            return self.registry_names.get(metatable, "")
        except Absent:
            return ""

    def _library(self, handle: int) -> str:
        """A namespace of the FFI by its handle, 0 for the default one, else a `struct link_map *`. Raises Absent."""
        if not handle:
            return "ffi.C"
        space = self.vm.target.space
        path = space.cstring(space.word(handle + 8), 256).decode("utf-8", "backslashreplace")
        return "ffi.load " + path.rsplit("/")[-1]

    @property
    def registry_names(self) -> dict[int, str]:
        """Address of a table -> the string key under which the registry holds it."""
        if "_registry" not in self.__dict__:
            vm, names = self.vm, {}
            try:
                registry = vm.object_in(vm.target.space.word(vm.g + vm.layout.g_registrytv))[1]
                for value, key in table_nodes(vm, registry).tolist():
                    kind, text = vm.object_in(key)
                    held, address = vm.object_in(value)
                    if kind == kernel.STR and held == kernel.TAB:
                        names[address] = vm.string(text, 80).decode("utf-8", "backslashreplace")
            except Absent:
                pass
            self.__dict__["_registry"] = names
        return self.__dict__["_registry"]

    def finalizer(self, address: int) -> str:
        """What the finalizer at `address`, a Lua function or a cdata that holds a C function, calls."""
        row = self.vm.row(address)
        if row < 0:
            return "?"
        if int(self.vm.objects.kind[row]) == kernel.FUNC:
            return self.function(row)
        try:
            code = self.vm.target.space.word(address + self.vm.layout.GCcdata_sizeof)
            code = code if self.vm.target.module_at(code) else self.vm.target.space.word(code)   # a reference to it
        except Absent:
            return self.ctype_of(row)
        return self.vm.target.name_of(code) or self.ctype_of(row)

    # -- C types -------------------------------------------------------------------------------------------------------
    def ctype_of(self, row: int) -> str:
        """The C type of a cdata object."""
        try:
            raw = self.vm.target.space.read(self.address(row) + self.vm.layout.GCcdata_ctypeid, 2)
        except Absent:
            return "?"
        return self.ctype(int.from_bytes(raw, "little"))

    def ctype(self, number: int, depth: int = 0) -> str:
        """The name of C type `number`, from the VM's own table."""
        if number not in self._types:
            self._types[number] = self._ctype(number, depth)
        return self._types[number]

    def _ctype_size(self, number: int) -> int:
        sizes = ctype_sizes(self.vm)
        return int(sizes[number]) if number < len(sizes) else 0

    def _ctype(self, number: int, depth: int) -> str:
        vm = self.vm
        try:
            state = ctype_state(vm)
            at = vm.target.space.word(state) + number * vm.layout.CType_sizeof
            info, size = vm.u32(at), vm.u32(at + 4)
            name = vm.ref(at + vm.layout.CType_name)
            text = vm.string(name, 80).decode("utf-8", "backslashreplace") if name else ""
        except Absent:
            return "?"
        kind, child = info >> 28, info & 0xffff
        if depth > 8:
            return "..."
        if kind in (_CT_TYPEDEF, _CT_ATTRIB):
            return text or self.ctype(child, depth + 1)
        if kind == _CT_STRUCT:
            return f"{'union' if info & 0x00800000 else 'struct'} {text or number}"
        if kind == _CT_ENUM:
            return f"enum {text or number}"
        if kind == _CT_PTR:
            return self.ctype(child, depth + 1) + (" &" if info & 0x00800000 else " *")
        if kind == _CT_ARRAY:
            one, each = self.ctype(child, depth + 1), self._ctype_size(child)
            return f"{one} [?]" if info & 0x00100000 or not each else f"{one} [{size // each}]"
        if kind == _CT_VOID:
            return "void"
        if kind == _CT_FUNC:
            return f"{self.ctype(child, depth + 1)} ()"
        if kind == _CT_NUM:
            return _number_type(info, size)
        return f"C type {number}"


def _number_type(info: int, size: int) -> str:
    """A C number type as LuaJIT prints it."""
    if info & 0x08000000:
        return "bool"
    if info & 0x04000000:
        return {4: "float", 8: "double"}.get(size, f"float{8 * size}")
    if size == 1:                     # `char` has a flag of its own when the machine's is not the plain one
        return "char" if not info & 0x00800000 else "unsigned char"
    name = {2: "short", 4: "int"}.get(size, f"int{8 * size}_t")
    return name if not info & 0x00800000 else f"unsigned {name}" if size < 8 else f"u{name}"


def prototype_rows(vm: VM) -> np.ndarray:
    """For each row that is a Lua function the row of its prototype, -1 for everything else (int32)."""
    objects, layout = vm.objects, vm.layout
    detail = np.full(len(objects), -1, np.int32)
    rows = np.flatnonzero(objects.kind == kernel.FUNC)
    if not len(rows):
        return detail
    at = objects.address[rows].astype(np.uint64)
    codes, _ = vm.target.space.gather(at + np.uint64(layout.GCfuncC_pc), f"<u{layout.ref}")
    numbers, _ = vm.target.space.gather(at + np.uint64(layout.GCfuncC_ffid), np.uint8)
    protos = codes.astype(np.int64) - layout.GCproto_sizeof
    found = np.empty(len(rows), np.int32)
    kernel.find_all(objects.address, objects.slots, protos, found)
    detail[rows] = np.where(numbers == 0, found, -1)
    return detail
