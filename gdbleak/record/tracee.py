"""The memory of a live process that is changed: its text only while all threads stand still, by one write within a
page, so that we may be killed between any two steps. Standard library only, Linux."""
from __future__ import annotations

import contextlib
import errno
import os

from ..target import ptrace
from ..target.live import mappings


class Memory:
    """Reads and writes the memory of one process image: after an exec it fails rather than reach the new program.

    tid: a living thread, to read /proc by: the main one may have ended before the others."""

    def __init__(self, pid: int, file: int | None = None, tid: int | None = None):
        self.pid = pid
        self.tid = tid or pid
        self.file = os.open(f"/proc/{self.tid}/mem", os.O_RDWR | os.O_CLOEXEC) if file is None else file

    def read(self, address: int, size: int) -> bytes:
        """`size` bytes. OSError when they are not there."""
        data = os.pread(self.file, size, address)
        if len(data) != size:
            raise OSError(errno.EIO, "memory of the process is gone")
        return data

    def write(self, address: int, data: bytes) -> None:
        """OSError when it cannot be written."""
        if os.pwrite(self.file, data, address) != len(data):
            raise OSError(errno.EIO, "memory of the process is gone")

    def is_alive(self) -> bool:
        """Whether the image still exists: false after its end and after an exec."""
        try:
            mapped = mappings_of(self.pid)
        except OSError:
            return False
        for mapping in mapped:
            if "r" in mapping.perms and not mapping.path.startswith("[v"):
                try:
                    return len(os.pread(self.file, 1, mapping.start)) == 1
                except OSError:
                    return False
        return False

    def close(self) -> None:
        os.close(self.file)


def mappings_of(pid: int) -> list:
    """The process's mappings, also when its main thread has ended before the others. OSError when it is gone."""
    found = mappings(pid)
    for tid in ptrace.threads_of(pid) if not found else ():
        with contextlib.suppress(OSError):
            found = found or mappings(tid)
    return found
