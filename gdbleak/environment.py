"""Where the packages and the compiled kernels are, for the Python that GDB embeds (or any other).

Nothing here needs gdb: it looks at sys.path, at files and at environment variables.
"""
import importlib.machinery
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import List, Optional

NEEDED = ("numpy", "tabulate", "elftools")
WANTED = NEEDED + ("numba",)
VERSION = "{}.{}".format(*sys.version_info)
PACKAGE = Path(__file__).resolve().parent
# The shell command names here the packages of the Python that it runs with.
PACKAGES_VARIABLE = "GDBLEAK_PACKAGES"


def prepare() -> Optional[str]:
    """Make the packages importable and choose Numba's cache; a line for the user when one is missing."""
    problem = find_packages()
    if "NUMBA_CACHE_DIR" not in os.environ and "numba" not in sys.modules:
        os.environ["NUMBA_CACHE_DIR"] = cache_directory()
    return problem


def find_packages() -> Optional[str]:
    """Extend sys.path by the first place that has all packages; a line for the user when there is none.

    Looked at in turn: sys.path as it is, then each of `places()`. A place that lacks only Numba serves when
    no other has it. One place gives all packages, as NumPy and Numba have to fit each other.
    """
    candidates = [sys.path] + [[place] + sys.path for place in places()]
    for names in (WANTED, NEEDED):
        for path in candidates:
            if not missing(names, path):
                sys.path[:] = path
                return None
    lacking = ", ".join(missing(NEEDED, candidates[-1]))
    return f"GDB's Python {VERSION} has no {lacking}; this mends it: {remedy()}"


def description() -> str:
    """What this Python has: a few lines for the user."""
    from importlib.metadata import PackageNotFoundError, version

    def found(name: str) -> str:
        try:
            return version("pyelftools" if name == "elftools" else name)
        except PackageNotFoundError:
            return "missing" if missing([name], sys.path) else "present"

    packages = ", ".join(f"{name} {found(name)}" for name in WANTED)
    lines = ["its Python " + sys.version.split()[0], "packages   " + packages]
    if missing(NEEDED, sys.path):
        lines.append("to mend    " + remedy())
    elif missing(WANTED, sys.path):
        lines.append("kernels    array forms, as there is no Numba: about 4 times slower")
    else:
        lines.append("kernels    compiled by Numba, kept in " + os.environ["NUMBA_CACHE_DIR"])
    return "\n".join(lines)


def missing(names, path: List[str]) -> List[str]:
    """Those of the packages `names` that are neither imported nor found on `path`."""
    return [name for name in names
            if name not in sys.modules and importlib.machinery.PathFinder.find_spec(name, path) is None]


def places() -> List[str]:
    """Directories with packages made for this version of Python, the best first."""
    version = "python" + VERSION
    found = [PACKAGE.parent / ".venv" / "lib" / version / "site-packages", PACKAGE.parent]
    if os.environ.get(PACKAGES_VARIABLE):
        found.append(Path(os.environ[PACKAGES_VARIABLE]))
    return [str(place) for place in found
            if version in place.parts and place.name.endswith("-packages") and place.is_dir()]


def remedy() -> str:
    """The command that brings the packages to this Python."""
    setup = PACKAGE.parent / "scripts" / "setup"
    if setup.is_file():
        return str(setup)
    if shutil.which("apt-get"):
        return "apt-get install python3-numpy python3-tabulate python3-pyelftools"
    return f"python{VERSION} -m pip install numpy tabulate pyelftools"


def cache_directory() -> str:
    """A directory for compiled code that only this user can write to, made if need be.

    What lies there is run, so a directory that belongs to somebody else (HOME kept by sudo) is not used.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    directory = os.path.join(base, "gdbleak")
    ours = os.path.isabs(directory) and _owner(_nearest_existing(directory)) == os.getuid()
    if ours and _make_private(directory):
        return directory

    import tempfile

    directory = os.path.join(tempfile.gettempdir(), f"gdbleak-{os.getuid()}")
    return directory if _make_private(directory) else tempfile.mkdtemp(prefix="gdbleak-")


def _nearest_existing(path: str) -> str:
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _owner(path: str) -> int:
    return os.lstat(path).st_uid


def _make_private(directory: str) -> bool:
    """Make `directory`; whether it is now a directory that this user, and nobody else, can write to."""
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        mode = os.lstat(directory).st_mode
    except OSError:
        return False
    shared = mode & (stat.S_IWGRP | stat.S_IWOTH)
    return (stat.S_ISDIR(mode) and not shared and _owner(directory) == os.getuid()
            and os.access(directory, os.W_OK))
