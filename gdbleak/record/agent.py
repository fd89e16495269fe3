"""The compiled agent, as the recorder sees it: an image to map, with data at named places."""
from __future__ import annotations

import struct

import numpy as np

from ..target.elf import PT_LOAD, open_elf
from ..target.ptrace import LiveError
from .compile_agent import SOURCE, product
from .seccomp import GETPID, NANOSLEEP, PROCESS_VM_READV

PASSIVE, SAMPLING, FREES_ONLY, QUIET = 0, 1, 2, 3
MMAP, MUNMAP, MREMAP, BRK = 1, 2, 3, 4
WAYS = 8
SAMPLING_CALLS = GETPID, PROCESS_VM_READV               # system calls that it makes
MAPPING_CALLS = GETPID, PROCESS_VM_READV, NANOSLEEP

#: Hooks and the symbols of their functions: those of every malloc, and those that some libraries with a malloc bring
#: besides (jemalloc, tcmalloc, mimalloc: C++'s operators that do not call it). In others that is who calls malloc.
MALLOC = {name: name for name in (
    "malloc", "calloc", "realloc", "memalign", "aligned_alloc", "posix_memalign", "valloc", "pvalloc", "mallocx",
    "rallocx", "free", "free_sized", "free_aligned_sized", "dallocx", "sdallocx")}
NEW = {"new_nothrow": "_ZnwmRKSt9nothrow_t", "new_aligned_nothrow": "_ZnwmSt11align_val_tRKSt9nothrow_t",
       "new_array_nothrow": "_ZnamRKSt9nothrow_t", "new_array_aligned_nothrow": "_ZnamSt11align_val_tRKSt9nothrow_t",
       "new": "_Znwm", "new_aligned": "_ZnwmSt11align_val_t",
       "new_array": "_Znam", "new_array_aligned": "_ZnamSt11align_val_t"}
DELETE = {"delete": "_ZdlPv", "delete_sized": "_ZdlPvm", "delete_nothrow": "_ZdlPvRKSt9nothrow_t",
          "delete_aligned": "_ZdlPvSt11align_val_t", "delete_sized_aligned": "_ZdlPvmSt11align_val_t",
          "delete_aligned_nothrow": "_ZdlPvSt11align_val_tRKSt9nothrow_t",
          "delete_array": "_ZdaPv", "delete_array_sized": "_ZdaPvm", "delete_array_nothrow": "_ZdaPvRKSt9nothrow_t",
          "delete_array_aligned": "_ZdaPvSt11align_val_t", "delete_array_sized_aligned": "_ZdaPvmSt11align_val_t",
          "delete_array_aligned_nothrow": "_ZdaPvSt11align_val_tRKSt9nothrow_t"}
POOLS = {"create": "ngx_create_pool", "destroy": "ngx_destroy_pool"}
RESTRICTING = "prctl", "syscall"        # what puts a program under seccomp; hooked where that can be
RELEASES = {"free", "free_sized", "free_aligned_sized", "dallocx", "sdallocx", "destroy", *DELETE}
MAY_THROW = {name: f"{name}_nothrow" for name in NEW if f"{name}_nothrow" in NEW}    # and which hook does its work
ROOM = 64               # bytes for a function's displaced instructions

#: struct slot
SLOT = np.dtype([("pointer", "u8"), ("size", "u8"), ("mean", "u8"), ("distance", "u8"), ("before", "u8"),
                 ("after", "u8"), ("return_address", "u8"), ("sp", "u8"), ("rbp", "u8"), ("rbx", "u8"), ("r12", "u8"),
                 ("r13", "u8"), ("r14", "u8"), ("r15", "u8"), ("stack_length", "u4"), ("next", "u4"), ("kind", "u4"),
                 ("ready", "u4")])


class Agent:
    """The image. `code`: bytes of text and constants, from offset 0; `size`: of all, in whole pages; `data`: where its
    variables begin. Raises LiveError when it was not compiled."""

    def __init__(self, by_calls: bool = False):
        """`by_calls`: count calls down, not bytes."""
        self._by_calls = by_calls
        path = product(SOURCE.parent)
        elf = open_elf(str(path))
        if elf is None:
            raise LiveError("sampled mode is not available: the agent was not compiled when gdbleak was installed; "
                            "install a C compiler (apt-get install gcc) and gdbleak again, or use --exact")
        text, data = elf.phdrs[elf.phdrs["type"] == PT_LOAD]
        with open(path, "rb") as stream:
            self.code = stream.read(int(text["filesz"]))
            stream.seek(int(data["offset"]))
            self._initial = stream.read(int(data["filesz"]))
        self._initial_at = int(data["vaddr"])
        self.data = self._initial_at & ~4095
        self.size = (int(data["vaddr"] + data["memsz"]) + 4095) & ~4095
        self._symbols = elf.symbols(1 << 32)    # not 0: a symbol at offset 0 has an address too

    def entry(self, name: str) -> int:
        """Offset of what a hooked function is to lead to."""
        by_calls = f"hook_{name}_calls"
        return self.offset(by_calls if self._by_calls and self._symbols.address(by_calls) else f"hook_{name}")

    def room(self, name: str) -> int:
        """Offset of the room for its displaced instructions."""
        return self.offset(f"real_{name}")

    def offset(self, name: str) -> int:
        """Where a variable or function lies. KeyError when there is none."""
        address = self._symbols.address(name)
        if address is None:
            raise KeyError(name)
        return address - (1 << 32)

    def initial_data(self, values: dict[str, bytes]) -> bytes:
        """The contents of the data pages, with `values` for some variables."""
        image = bytearray(self.size - self.data)
        start = self._initial_at - self.data
        image[start:start + len(self._initial)] = self._initial
        for name, value in values.items():
            at = self.offset(name) - self.data
            image[at:at + len(value)] = value
        return bytes(image)


def word(value: int) -> bytes:
    """A 64-bit variable's bytes."""
    return struct.pack("<Q", value)
