"""Structure layouts as NumPy dtypes: from DWARF where GDB has it, else from the measured tables of each reader.

Both come out with the same field names, so that a reader cannot tell which it was given.
"""
from __future__ import annotations

import numpy as np


def struct(itemsize: int, /, **fields: tuple[int, str]) -> np.dtype:
    """A structure of `itemsize` bytes; each field is (offset, NumPy format)."""
    return np.dtype({"names": list(fields), "formats": [form for _, form in fields.values()],
                     "offsets": [offset for offset, _ in fields.values()], "itemsize": itemsize})


class Layouts:
    """Where a layout comes from. This one knows no DWARF; `target/debugger.py` has the one that asks GDB."""

    def dwarf(self, type_name: str, wanted: np.dtype) -> np.dtype | None:
        """The layout of `type_name` from debug information with the fields of `wanted`; None without all of them."""
        return None
