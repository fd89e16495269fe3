"""Other Debian releases, and with them other glibc versions, as cached chroots to run programs in."""
import os
import shutil
import subprocess
from pathlib import Path

from tests.targets import CACHE, PROGRAMS, Program, Unavailable, built_name

#: Release name -> the glibc it has.
RELEASES = {"bullseye": "2.31", "trixie": "2.41", "sid": "2.43"}
PACKAGES = "gcc,libc6-dev,libc6-dbg"


def mirror():
    """The URI that apt itself takes its base suite from."""
    rows = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"],
        capture_output=True, text=True, check=True).stdout.splitlines()
    for uri, release in map(str.split, rows):
        if "-" not in release:
            return uri
    raise Unavailable("apt has no package lists: run apt-get update")


def bootstrap(release):
    """Path of the chroot of `release` with a C compiler in it, made on first use. Raises Unavailable."""
    root = CACHE / "chroots" / release
    if root.exists():
        return root
    if os.geteuid() != 0:
        raise Unavailable("making a chroot needs root")
    if not shutil.which("debootstrap"):
        raise Unavailable("debootstrap is not installed: apt-get install debootstrap")
    unfinished = root.with_name(release + ".unfinished")
    subprocess.run(["umount", "-q", unfinished / "proc"], check=False)      # of one that was interrupted
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    # debootstrap takes the archive's keyring from where Debian installs it.
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", release, unfinished, mirror()],
        capture_output=True, text=True)
    if made.returncode:
        last = (made.stdout + made.stderr).strip().splitlines()[-1]
        raise Unavailable(f"debootstrap {release} failed: {last}")
    # Only a finished chroot gets the final name, so an interrupted one is never used.
    unfinished.rename(root)
    return root


def glibc_version(root):
    """The version of the C library in the chroot, such as "2.41"."""
    reply = subprocess.run(["chroot", root, "ldd", "--version"], capture_output=True, text=True, check=True)
    return reply.stdout.splitlines()[0].split()[-1]


def build_in(root, source, *flags):
    """Compile fixtures/programs/`source`.c in the chroot, where the Program will run. Cached by content."""
    source = PROGRAMS / f"{source}.c"
    inside = Path("/programs") / built_name(source, flags, root.name)
    program = Program(root / inside.relative_to("/"), root)
    if not program.path.exists():
        shutil.copytree(PROGRAMS, root / "programs", dirs_exist_ok=True)
        subprocess.run(["chroot", root, "gcc", "-g", f"/programs/{source.name}", "-o", inside, "-pthread",
                        *flags, "-ldl"], check=True)
    return program


def install(root, *packages):
    """Install Debian packages in the chroot, unless they are there. Raises Unavailable."""
    there = subprocess.run(["chroot", root, "dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n"],
                           capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = [name for name in packages if f"{name} installed" not in there]
    if not wanted:
        return
    policy = root / "usr/sbin/policy-rc.d"                      # no service is started
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    command = ["chroot", root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q"]
    # The lists are as old as the chroot: fresh ones first.
    for step in (["update"], ["install", "-y", "--no-install-recommends", *wanted]):
        done = subprocess.run([*command, *step], capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{' '.join(wanted)}: {done.stderr.strip().splitlines()[-1]}")
