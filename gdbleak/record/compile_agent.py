"""Compiles the agent, when the package is built. Standard library only: setup.py runs it.

The product is a shared object without relocations, named after its source's digest, so that an old one is never used.
"""
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("agent.c")
FLAGS = ("-shared -nostdlib -O2 -ffreestanding -fPIC -fvisibility=hidden -mgeneral-regs-only -fno-stack-protector "
         "-fcf-protection=none -fno-asynchronous-unwind-tables -Wall -Wextra -Wno-parentheses -Wl,-z,noseparate-code "
         "-Wl,-z,norelro -Wl,-z,noexecstack -Wl,-z,defs -Wl,--build-id=none").split()


def product(directory):
    """Where the compiled agent of this source lies under a directory of packages' sources."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    return Path(directory) / "build" / ("agent-x86_64-%s.so" % digest)


def compile_agent(directory):
    """Compile the agent into the package's directory; returns "", or what is in the way, in a few words."""
    made = product(directory)
    if made.exists():
        return ""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        return "there is no C compiler"
    made.parent.mkdir(parents=True, exist_ok=True)
    unfinished = made.with_suffix(".%d" % os.getpid())
    done = subprocess.run([compiler, *FLAGS, "-o", str(unfinished), str(SOURCE)], stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, universal_newlines=True)
    if done.returncode:
        return "the C compiler fails: %s" % (done.stderr.strip().splitlines() or ["?"])[0]
    for old in made.parent.glob("agent-*.so"):
        old.unlink()
    unfinished.rename(made)
    return ""


if __name__ == "__main__":
    problem = compile_agent(SOURCE.parent)
    raise SystemExit(problem and "compile_agent.py: " + problem)
