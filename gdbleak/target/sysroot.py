"""Paths of the target on this machine. Standard library only."""
from __future__ import annotations

import os


def resolve(sysroot: str, path: str, links: int = 40) -> str:
    """Where the target's absolute `path` lies on this machine when its root is `sysroot` ("": this machine's own).

    Symbolic links are followed as the target would: an absolute one begins at the sysroot again,
    and `..` does not lead out of it.
    """
    root = sysroot.rstrip("/")
    if not root:
        return path
    pending, found = [part for part in path.split("/") if part], []
    while pending:
        part = pending.pop(0)
        if part == "..":
            found = found[:-1]
            continue
        if part == ".":
            continue
        here = "/".join([root, *found, part])
        if os.path.islink(here) and links:
            links -= 1
            to = os.readlink(here)
            found = [] if to.startswith("/") else found
            pending = [piece for piece in to.split("/") if piece] + pending
        else:
            found.append(part)
    return "/".join([root, *found])
