"""The loader that GDB sources, the packages and the cache that it finds, in real GDBs with real files."""
import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gdbleak import environment

ROOT = Path(__file__).resolve().parent.parent
NO_PACKAGES = "python import sys; sys.path[:] = [p for p in sys.path if not p.endswith('-packages')]"


def gdb(*lines, before=(), **variables):
    """(standard output, standard error) of a batch GDB that runs the lines; an empty variable is unset."""
    command = ["gdb", "-nx", "-q", "-batch"]
    for option, several in (("-iex", ["set debuginfod enabled off", *before]), ("-ex", lines)):
        for line in several:
            command += [option, line]
    surroundings = {name: value for name, value in {**os.environ, **variables}.items() if value}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
                          env=surroundings)
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout.strip(), done.stderr.strip()


def gdb_version():
    """The version of Python that GDB embeds, as in python3.11."""
    return "python" + gdb("python print('%d.%d' % sys.version_info[:2])")[0]


@pytest.fixture
def copy(tmp_path):
    """A checkout without an environment, in a directory with an awkward name."""
    checkout = tmp_path / "a copy's \"name\" é"
    for name in ("gdbleak", "scripts"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    return checkout


@pytest.mark.parametrize("script", ["scripts/gdbleak.py", "gdbleak/gdb_script.py"])
def test_source_defines_the_commands_and_does_nothing_else(script):
    source = f"source {ROOT / script}"
    loaded = "python print([name for name in ('numba', 'numpy', 'elftools') if name in sys.modules])"
    output, errors = gdb(source, "print $_gdbleak_status", loaded, "help leak-sizes", source,
                         "print $_gdbleak_status", "help leak-mallinfo")
    assert not errors
    assert output.count(" = 0") == 2
    assert "[]" in output
    assert "Usage: leak-sizes" in output and "Usage: leak-mallinfo" in output


def test_the_script_can_be_reached_by_a_link(tmp_path):
    link = tmp_path / "leak.py"
    link.symlink_to(ROOT / "scripts" / "gdbleak.py")
    output, errors = gdb(f"source {link}", "print $_gdbleak_status")
    assert output.endswith("= 0") and not errors


def test_leaves_no_names_behind_in_gdb():
    output, _ = gdb("python import sys; before = set(dir())", f"source {ROOT / 'gdbleak' / 'gdb_script.py'}",
                    "python print(sorted(set(dir()) - before))")
    assert output == "['before']"


def test_without_packages_one_line_says_what_mends_it(copy):
    output, errors = gdb(f"source {copy / 'scripts' / 'gdbleak.py'}", "print $_gdbleak_status",
                         before=[NO_PACKAGES])
    assert output == "$1 = void"
    assert errors.count("\n") == 0
    assert "no numpy, tabulate, elftools" in errors and str(copy / "scripts" / "setup") in errors


def test_an_environment_for_another_python_is_not_used(copy):
    real = Path(sys.prefix, "lib", gdb_version(), "site-packages")
    for version, found in (("python3.1", False), (gdb_version(), True)):
        place = copy / ".venv" / "lib" / version
        place.mkdir(parents=True)
        (place / "site-packages").symlink_to(real)
        use = ["python import numpy, tabulate, elftools"] if found else []
        output, errors = gdb(f"source {copy / 'scripts' / 'gdbleak.py'}", *use, "print $_gdbleak_status",
                             before=[NO_PACKAGES])
        assert output.endswith("= 0") == found
        assert ("no numpy" in errors) != found


def test_gdbs_own_packages_come_first_when_they_are_complete(copy, tmp_path):
    real = Path(sys.prefix, "lib", gdb_version(), "site-packages")
    own = tmp_path / "own"
    own.mkdir()
    for name in environment.WANTED:
        (own / (name + ".py")).write_text("")
    place = copy / ".venv" / "lib" / gdb_version()
    place.mkdir(parents=True)
    (place / "site-packages").symlink_to(real)
    script = f"source {copy / 'scripts' / 'gdbleak.py'}"
    for names, expected in ((environment.WANTED, str(own)), (environment.NEEDED, str(place))):
        for name in set(environment.WANTED) - set(names):
            (own / (name + ".py")).unlink()
        where = "python from importlib.util import find_spec; print(find_spec('numpy').origin)"
        output, errors = gdb(script, where,
                             before=[NO_PACKAGES, f"python sys.path.insert(0, {str(own)!r})"])
        assert output.startswith(expected) and not errors


def test_the_packages_beside_an_installed_package_are_found(copy, tmp_path):
    site = tmp_path / "lib" / gdb_version() / "site-packages"
    shutil.copytree(copy / "gdbleak", site / "gdbleak")
    script = f"source {site / 'gdbleak' / 'gdb_script.py'}"
    _, errors = gdb(script, before=[NO_PACKAGES])
    assert "no numpy" in errors and "install python3-numpy" in errors
    for entry in Path(sys.prefix, "lib", gdb_version(), "site-packages").iterdir():
        if "gdbleak" not in entry.name:
            (site / entry.name).symlink_to(entry)
    output, errors = gdb(script, "python import numpy", "print $_gdbleak_status", before=[NO_PACKAGES])
    assert output.endswith("= 0") and not errors


def test_a_broken_file_is_one_line(copy):
    for text in ("def (:\n", "raise RuntimeError('two\\nlines')\n", "raise KeyboardInterrupt\n"):
        (copy / "gdbleak" / "environment.py").write_text(text)
        _, errors = gdb(f"source {copy / 'scripts' / 'gdbleak.py'}")
        assert errors.startswith("gdbleak: ") and errors.count("\n") == 0


def test_old_pythons_can_parse_the_script_and_are_told(copy):
    for script in (ROOT / "scripts" / "gdbleak.py", ROOT / "gdbleak" / "gdb_script.py"):
        ast.parse(script.read_text(), feature_version=(3, 4))
    _, errors = gdb(f"source {ROOT / 'scripts' / 'gdbleak.py'}",
                    before=["python sys.version_info = (3, 6, 8)"])
    assert errors == "gdbleak: this GDB has Python 3.6, and 3.9 or newer is needed: use a newer GDB"


def cache(tmp_path, **variables):
    """Where the loader puts Numba's cache, with a home and a temporary directory of its own."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    variables = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path / "tmp"), "XDG_CACHE_HOME": "", **variables}
    output, errors = gdb(f"source {ROOT / 'scripts' / 'gdbleak.py'}",
                         "python import os; print(os.environ['NUMBA_CACHE_DIR'])",
                         **{"NUMBA_CACHE_DIR": "", **variables})
    assert not errors
    return Path(output)


def is_private(directory):
    return directory.stat().st_mode & 0o777 == 0o700 and directory.stat().st_uid == os.getuid()


def test_the_cache_is_the_users(tmp_path):
    assert cache(tmp_path, NUMBA_CACHE_DIR="/chosen") == Path("/chosen")
    assert cache(tmp_path) == tmp_path / ".cache" / "gdbleak"
    assert is_private(tmp_path / ".cache" / "gdbleak")
    assert cache(tmp_path, XDG_CACHE_HOME=str(tmp_path / "x")) == tmp_path / "x" / "gdbleak"


def test_a_cache_that_others_can_write_to_is_not_used(tmp_path):
    (tmp_path / ".cache" / "gdbleak").mkdir(parents=True)
    (tmp_path / ".cache" / "gdbleak").chmod(0o777)
    found = cache(tmp_path)
    assert found == tmp_path / "tmp" / f"gdbleak-{os.getuid()}" and is_private(found)
    found.rmdir()
    found.symlink_to(tmp_path)
    another = cache(tmp_path)
    assert another.parent == tmp_path / "tmp" and another != found


def test_a_home_without_a_place_for_it(tmp_path):
    (tmp_path / "file").write_text("")
    found = cache(tmp_path, HOME=str(tmp_path / "file"))
    assert found == tmp_path / "tmp" / f"gdbleak-{os.getuid()}" and is_private(found)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_home_of_somebody_else_is_not_used(tmp_path):
    os.chown(tmp_path, 12345, 12345)
    assert cache(tmp_path) == tmp_path / "tmp" / "gdbleak-0"
