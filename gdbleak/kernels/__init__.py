"""The inner loops: one file a subject, each loop in a compiled form and, beside it, an array form.

`@kernel(array_form)` marks the compiled form, a function whose annotations give its types (`U64s` is an array of
uint64, `U64` one of them; `N32s` is an array of int32 without negative items: as indices they need no look at whether
they count from the end). The two have the same signature and the same results; tests hold them against each other.
Kernels get the buffer and the table of an AddressSpace, never an object. Compiled code has no bounds check: a kernel
checks every address against the table before it reads. Kernels allocate nothing: what they fill is passed in.

Numba compiles (`compiler.py`), once for each machine; the machine code is kept and later runs load it without
importing Numba, which alone would take longer than most analyses. Without Numba the array forms serve.
"""
from .compiler import I64, U64, I32s, I64s, N32s, U8s, U64s, helper, in_python, kernel

__all__ = ["I64", "U64", "I32s", "I64s", "N32s", "U8s", "U64s", "helper", "in_python", "kernel"]
