"""What a core is read as: its own bytes before any file's, nothing from a file that is another build,
nothing shifted."""
import os
import shutil
import struct
import subprocess

import pytest

from gdbleak.heaps import glibc
from gdbleak.target.address_space import Absent
from gdbleak.target.core_file import open_core
from gdbleak.target.sysroot import resolve

from .targets import Program, capture

PATCHED = r"""
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
static const char pages[3 * 4096] __attribute__((aligned(4096))) = {1};
static int data[1024] = {1};
int main(void)
{
    char *page = (char *)pages + 4096;
    if (mprotect(page, 4096, PROT_READ | PROT_WRITE))
        return 1;
    page[10] = 77;
    mprotect(page, 4096, PROT_READ);
    *(volatile int *)(data + 7) = 99;
    printf("{\"patched\": %lu, \"data\": %lu, \"malloc\": %lu}", (unsigned long)(page + 10), (unsigned long)(data + 7),
           (unsigned long)malloc(100));
    fflush(stdout);
    abort();
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    directory = tmp_path_factory.mktemp("patched")
    (directory / "patched.c").write_text(PATCHED)
    subprocess.run(["gcc", "-g", "-O0", "-no-pie", "-Wl,--build-id", "-o", directory / "patched",
                    directory / "patched.c"], check=True)
    return Program(directory / "patched")


def crash(program, directory, filters):
    """(core, exe, what the program printed) with coredump_filter `filters`."""
    return capture(program, directory, core_filter=filters)


@pytest.fixture(scope="module")
def default(program, tmp_path_factory):
    """A core as the kernel writes it by default: without the pages that files have."""
    return crash(program, tmp_path_factory.mktemp("default"), 0x33)


def test_the_core_comes_before_the_file(default):
    """A page of a read-only segment that the program changed is in the core; the file has it as it was built."""
    target = open_core(str(default.core), str(default.exe))
    address = default.truth["patched"]
    assert target.space.read(address, 1)[0] == 77
    assert target.space.read(address - 10 - 4096, 1)[0] == 1      # its neighbour comes from the file


def test_the_file_serves_no_writable_memory(program, tmp_path):
    """Left out of the core, .data is absent: what the file has is not what the program wrote."""
    core = crash(program, tmp_path, 0x10)
    target = open_core(str(core.core), str(core.exe))
    with pytest.raises(Absent):
        target.space.read(core.truth["data"], 4)


def test_segments_that_are_not_aligned_in_the_file(default, tmp_path):
    """Other writers put segments at any offset: memory is read all the same."""
    raw = default.core.read_bytes()
    for shift in (1, 4):
        moved = bytearray(raw[:64])
        count, = struct.unpack_from("<H", raw, 56)
        table = struct.unpack_from("<Q", raw, 32)[0]
        rows = bytearray(raw[table:table + 56 * count])
        for k in range(count):
            offset, = struct.unpack_from("<Q", rows, 56 * k + 8)
            struct.pack_into("<Q", rows, 56 * k + 8, offset + shift)
        core = tmp_path / f"core.{shift}"
        core.write_bytes(bytes(moved) + rows + bytes(shift) + raw[table + 56 * count:])
        target, straight = open_core(str(core), str(default.exe)), open_core(str(default.core), str(default.exe))
        assert target.space.read(default.truth["patched"], 1)[0] == 77
        ours, theirs = glibc.find(target)[0], glibc.find(straight)[0]
        assert ours.mallinfo() == theirs.mallinfo() and len(ours.blocks) == len(theirs.blocks) > 0


@pytest.mark.parametrize("tool", [["objcopy", "--only-keep-debug"], ["eu-strip", "-f"]])
def test_a_separate_debug_file_is_no_image(default, tool, tmp_path):
    """It has the build-id, symbols and program headers, but not the bytes."""
    if not shutil.which(tool[0]):
        pytest.skip(f"{tool[0]} is not installed")
    debug = tmp_path / "patched.debug"
    copy = shutil.copy(default.exe, tmp_path / "copy")
    subprocess.run([*tool, debug, copy] if tool[0] == "eu-strip" else [*tool, copy, debug], check=True)
    truth = open_core(str(default.core), str(default.exe))
    target = open_core(str(default.core), str(debug))
    main = target.executable()
    text = target.symbol("main")
    assert text == truth.symbol("main")
    assert target.space.read(text, 16) == truth.space.read(text, 16)    # from the file that the core names
    assert not any("another build" in reason for reason in target.source.partial), main.mismatch


def test_sysroot_links(tmp_path):
    (tmp_path / "usr" / "lib.real").mkdir(parents=True)
    (tmp_path / "usr" / "lib.real" / "x.so").write_text("x")
    os.symlink("/usr/lib.real", tmp_path / "usr" / "lib")
    os.symlink("usr/lib", tmp_path / "lib")
    os.symlink("../../../../../usr/lib/x.so", tmp_path / "usr" / "out")
    os.symlink("loop", tmp_path / "loop")
    root = str(tmp_path)
    assert resolve(root, "/lib/x.so") == root + "/usr/lib.real/x.so"
    assert resolve(root, "/usr/out") == root + "/usr/lib.real/x.so"
    assert resolve(root, "/loop").startswith(root)
    assert resolve("", "/usr/lib/x.so") == "/usr/lib/x.so"
