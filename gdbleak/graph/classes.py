"""C++ classes by their vtables: through the RTTI that lies beside them, also in stripped programs, else by a symbol."""
from __future__ import annotations

import re

import numpy as np

from ..target.address_space import Absent
from ..target.layout import struct
from ..target.target import Target

_HEAD = struct(16, top=(0, "u8"), info=(8, "u8"))                   # what lies in front of where a vptr points to
_TYPEINFO = struct(16, vtable=(0, "u8"), name=(8, "u8"))
_MANGLED = re.compile(rb"\*?((?:\d|[NSZ])[A-Za-z0-9_.$]*)\Z")       # a type's name as the Itanium C++ ABI begins it
_METACLASSES = re.compile(rb"N10__cxxabiv1\d+__(class|si_class|vmi_class)_type_infoE\Z")
_VTABLE = re.compile(r"[^!]*!(?:vtable for (.+)|(_ZTV.+))\+0x[0-9a-f]+\Z")


class Classes:
    """The classes of a target; each name is looked up once."""

    def __init__(self, target: Target):
        self._target = target
        self._named: dict[int, str] = {}                 # address of a typeinfo -> class, "" for what is none
        modules = sorted((module.start, module.end) for module in target.modules if module.end < 1 << 63)
        modules = modules or [(1 << 62, 1 << 62)]        # (vsyscall is none of the process's own)
        self.starts, self.ends = (np.array([pair[k] for pair in modules], np.uint64) for k in (0, 1))
        self.ends[:-1] = np.minimum(self.ends[:-1], self.starts[1:])

    def names(self, vtables: np.ndarray) -> list[str]:
        """The class of each vtable (uint64, the address that an object's vptr has) by its RTTI, "" for what is none.

        The word in front is the class's typeinfo; that before it the offset to the whole object, zero in the vtable
        that an object begins with.
        """
        gather = self._target.space.gather
        heads, present = gather(vtables - np.uint64(16), _HEAD)
        maybe = np.flatnonzero(present & (heads["top"] == 0) & self.in_modules(heads["info"]))
        infos = np.array(sorted(set(heads["info"][maybe].tolist())), np.uint64)
        rows, present = gather(infos, _TYPEINFO)
        sound = present & self.in_modules(rows["vtable"]) & self.in_modules(rows["name"])
        for info, row in zip(infos[sound].tolist(), rows[sound]):
            if info not in self._named:
                self._named[info] = self._of_typeinfo(int(row["vtable"]), int(row["name"]))
        names = [""] * len(vtables)
        for k in maybe.tolist():
            names[k] = self._named.get(int(heads["info"][k]), "")
        return names

    def _of_typeinfo(self, vtable: int, name: int) -> str:
        """The class of a typeinfo, given the addresses of its own vtable and of its name; "" when it is none."""
        mangled = _MANGLED.match(self._text(name))
        if not mangled:
            return ""
        metaclass = self._target.word((self._target.word(vtable - 8) or 0) + 8)
        title = self._text(metaclass) if metaclass else b""
        if title and not _METACLASSES.match(title):      # absent when the core leaves libstdc++'s constants out
            return ""
        return self._demangled("_ZTI" + mangled[1].decode(), "typeinfo for ")

    def of_symbol(self, symbol: str) -> str:
        """The class whose vtable a symbol (as `Target.name_of` has it) names, or "". There may be no RTTI."""
        found = _VTABLE.match(symbol)
        return found[1] or self._demangled(found[2], "vtable for ") if found else ""

    def _demangled(self, symbol: str, prefix: str) -> str:
        """What a C++ symbol is of; its mangled name without a debugger."""
        plain = self._target.debugger.demangle(symbol) if self._target.debugger else None
        return plain[len(prefix):] if plain and plain.startswith(prefix) else symbol[4:]

    def _text(self, address: int) -> bytes:
        try:
            return self._target.space.cstring(address)
        except Absent:
            return b""

    def in_modules(self, values: np.ndarray) -> np.ndarray:
        """Which addresses (uint64) lie in a module."""
        k = np.searchsorted(self.starts, values, "right") - 1
        return (k >= 0) & (values < self.ends[np.maximum(k, 0)])


def are_arrays(target: Target, address: np.ndarray, size: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """Which blocks hold a number (heads["one"]), and so many objects behind it: the second of those begins with the
    same vptr (heads["two"]) as the first."""
    found = np.zeros(len(address), bool)
    largest = (size - np.uint64(16)) // np.maximum(heads["one"], np.uint64(1)) // np.uint64(8)
    for less in range(4):                                # malloc gives up to 39 bytes more than it was asked for
        width = np.maximum(largest, np.uint64(less + 1)) - np.uint64(less)
        words, present = target.space.gather(address + np.uint64(8) + np.uint64(8) * width, np.uint64)
        found |= present & (words == heads["two"])
    return found & (heads["one"] >= 2) & (heads["one"] < size >> np.uint64(3))


def is_cplusplus(target: Target) -> bool:
    """Whether C++ runs here: libstdc++ is loaded, or the program contains it."""
    if any(module.name.startswith("libstdc++") for module in target.modules):
        return True
    main = target.executable()
    parts = target.space.present(main.start, main.end) if main else []
    return any(b"__class_type_infoE\0" in target.space.read(low, high - low) for low, high in parts)
