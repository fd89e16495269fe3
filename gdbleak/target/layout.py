"""Structure layouts as NumPy dtypes: from DWARF where GDB has it, else from the measured tables of each reader.

Both come out with the same field names, so that a reader cannot tell which it was given.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np


def struct(itemsize: int, /, **fields: tuple[int, str]) -> np.dtype:
    """A structure of `itemsize` bytes; each field is (offset, NumPy format)."""
    return np.dtype({"names": list(fields), "formats": [form for _, form in fields.values()],
                     "offsets": [offset for offset, _ in fields.values()], "itemsize": itemsize})


class Structure(NamedTuple):
    """A structure by debug information: its `size`, and (offset, size) of each of its `members`, in bytes.

    Members of an inner structure are there as `outer_inner`, those of one without a name as its own.
    """

    size: int
    members: dict[str, tuple[int, int]]


class Layouts:
    """Where a layout comes from. This one knows no DWARF; `target/debugger.py` has the one that asks GDB."""

    def structure(self, type_name: str) -> Structure | None:
        """The structure of that name by debug information; None when there is none."""
        return None

    def dwarf(self, type_name: str, wanted: np.dtype) -> np.dtype | None:
        """The layout of `type_name` from debug information with the fields of `wanted`; None without all of them."""
        found, names = self.structure(type_name), list(wanted.names)
        if found is None or not set(names) <= set(found.members):
            return None   # another structure of the same name (lj_alloc has a malloc_state, too)
        formats = []
        for name in names:
            form, size = wanted.fields[name][0], found.members[name][1]
            base, shape = (form.base, form.shape) if form.shape else (form, ())
            size //= int(np.prod(shape)) if shape else 1
            formats.append((f"{base.kind}{size}", shape) if size in (1, 2, 4, 8) and base.kind in "iu" else form)
        return np.dtype({"names": names, "formats": formats, "offsets": [found.members[name][0] for name in names],
                         "itemsize": found.size})
