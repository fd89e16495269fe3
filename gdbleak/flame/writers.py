"""Which writer a file name asks for."""
import os
import sys
from typing import Callable, Iterable, Union

from . import folded, svg, text
from .profile import Profile

ENDINGS = {".folded": folded.lines, ".svg": svg.lines, ".txt": text.lines}


def check_path(path: Union[str, os.PathLike]) -> Callable[[Profile], Iterable[str]]:
    """The writer for that file name, by its ending (`-`: the text tree); to refuse a wrong one early.

    An ending that nothing is written for is a ValueError that names those that are.
    """
    path = os.fspath(path)
    if path == "-":
        return text.lines
    ending = os.path.splitext(path)[1].lower()
    if ending not in ENDINGS:
        known = ", ".join(sorted(ENDINGS))
        raise ValueError(f"cannot write a profile to {path!r}: the name must end in {known} (or be - )")
    return ENDINGS[ending]


def write(profile: Profile, path: Union[str, os.PathLike]) -> None:
    """Write the profile in the form its file's ending asks for; `-` is the text tree on standard output.

    Raises ValueError for an unknown ending, OSError when the file cannot be written.
    """
    writer = check_path(path)
    if os.fspath(path) == "-":
        for line in writer(profile):
            _print(line)
    else:
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(writer(profile))


def _print(line: str) -> None:
    """Write to standard output, whatever its character set is."""
    try:
        sys.stdout.write(line)
    except UnicodeEncodeError:
        sys.stdout.write(line.encode("ascii", "backslashreplace").decode("ascii"))
