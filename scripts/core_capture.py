"""What the scripts that capture cores for fixtures/cores share."""
import ctypes
import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
CLONE_NEWUTS = 0x04000000
HOSTNAME = b"leaky"
#: All that the captured program inherits.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def hide_hostname():
    """Give this process, and the nginx it starts, a host name of their own: nginx keeps it in its memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS) or libc.sethostname(HOSTNAME, len(HOSTNAME)):
        sys.exit(f"cannot hide the host name: {os.strerror(ctypes.get_errno())}; run as root")


def build_id(path):
    """The build-id of an ELF file, as hexadecimal digits."""
    notes = subprocess.run(["readelf", "-n", path], check=True, capture_output=True, text=True).stdout
    return re.search(r"Build ID: (\w+)", notes).group(1)


def mapped_file(pid, name):
    """The path of the file, mapped by the process, whose name begins so."""
    with open(f"/proc/{pid}/maps") as maps:
        return next(line.split()[-1] for line in maps if Path(line.split()[-1]).name.startswith(name))


def write(directory, name, core, truth):
    """Write NAME.core.xz, of the bytes `core`, and NAME.truth.json into the directory."""
    if str(TOP).encode() in core:
        sys.exit(f"the core would tell about this machine: {TOP}")
    directory.mkdir(parents=True, exist_ok=True)
    packed = lzma.compress(core, filters=[{"id": lzma.FILTER_X86},
                                          {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}])
    (directory / f"{name}.core.xz").write_bytes(packed)
    (directory / f"{name}.truth.json").write_text(json.dumps(truth) + "\n")
    print(f"{directory}: {name}, core of {len(core):,} bytes, {len(packed):,} compressed")
