"""Folded stacks, one a line: `main;parse;malloc 1234`, as the flame graph tools read them.

A `;` within a name, a backslash, and what is not printable are written as Python escapes (`\\x3b`), which are
plain letters to other tools; read_folded() takes them back. Such a file has one number a stack, so the other
weight (count or bytes) is lost.
"""
import os
import re
from typing import Iterator, Union

from .names import escape, printable
from .profile import Profile

_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U(00(?:0[0-9a-f]|10)[0-9a-f]{4}))")


def lines(profile: Profile) -> Iterator[str]:
    """Yield a line for each stack that something ends in, sorted by name."""
    path = []
    for depth, name, node in profile.walk():
        if depth:
            path[depth - 1:] = [_encode(name)]
        own = profile.own_value(node)
        if own:
            yield f"{';'.join(path)} {own}\n"


def read_folded(path: Union[str, os.PathLike], title: str = "", legend: str = "",
                unit: str = "bytes") -> Profile:
    """Read a file of folded stacks. A line that is none is a ValueError naming file and line."""
    profile = Profile(title or os.path.basename(os.fspath(path)), legend, unit)
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        for number, line in enumerate(file, 1):
            line = line.rstrip("\r\n")
            if line:
                _add_line(profile, line, f"{os.fspath(path)}:{number}")
    return profile


def _add_line(profile: Profile, line: str, where: str) -> None:
    stack, space, weight = line.rpartition(" ")
    if not (space and weight.isascii() and weight.isdigit()):
        raise ValueError(f"{where}: not a folded stack, expected `frame;frame;frame NUMBER`")
    frames = [_decode(name) for name in stack.split(";")] if stack else []
    if profile.unit == "bytes":
        profile.add(frames, int(weight), 0)
    else:
        profile.add(frames, 0, int(weight))


def _encode(name: str) -> str:
    return printable(name.replace("\\", escape("\\")).replace(";", escape(";")), limit=None)


def _decode(name: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[match.lastindex], 16)), name)
