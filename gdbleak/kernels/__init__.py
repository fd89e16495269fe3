"""The inner loops: one self-contained file a subject, each loop compiled with Numba where that is installed.

`compiled(array_form)` decorates the compiled form and names the array form that serves in its place without Numba. The
two have the same signature and the same results; tests hold them against each other. Kernels get the buffer and the
table of an AddressSpace, never an object. There is no bounds check in compiled code: a kernel checks every address it
is about to read against the table.
"""
from __future__ import annotations

import os

try:
    if os.environ.get("GDBLEAK_NUMBA") == "0":
        raise ImportError
    from numba import njit
    HAVE_NUMBA = True
except Exception:  # noqa: BLE001  a broken Numba (no writable cache, a NumPy too new) must cost speed only
    HAVE_NUMBA = False


def compiled(array_form):
    """Compile the decorated function, or serve `array_form` in its place when there is no Numba."""
    def choose(function):
        if not HAVE_NUMBA:
            return array_form
        try:
            return njit(cache=True)(function)
        except Exception:  # noqa: BLE001  no place for the cache
            return njit(function)
    return choose


def helper(function):
    """Compile a function that only other compiled kernels call; left alone without Numba."""
    return njit(cache=True)(function) if HAVE_NUMBA else function
