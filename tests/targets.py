"""Real targets for the tests: compile a program, let it crash, and ask gdbleak about the core."""
import hashlib
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
import warnings
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
PROGRAMS = ROOT / "fixtures" / "programs"
#: The scenarios of fixtures/programs/heaps.c, all but the one that stops anywhere, and the kinds of damage.c.
SCENARIOS = ["empty", "plain", "aligned", "fastbins", "tcache", "tcache_big", "mapped", "decoys", "trimmed",
             "foreign_sbrk", "brk_fails", "brk_recovers", "low_threshold", "no_mmap", "full_bins", "threads",
             "split", "many_foreign", "few_threads", "one_arena", "two_arenas", "many_heaps", "shrunk", "locked"]
DAMAGE = ["size_zero", "size_odd", "size_huge", "size_short", "size_thread", "bin_self", "bin_ring",
          "bin_wild", "bin_back", "tcache_wild", "tcache_self", "fastbin_wild", "top_size", "top_pointer",
          "heap_info"]
STATIC = ["plain", "threads", "mapped", "full_bins", "brk_fails", "foreign_sbrk"]
#: What a kernel core holds beyond the default: ELF headers, and private and shared memory of all kinds.
CORE_FILTER = 0x37
TIMEOUT = 120
WAIT = 60       # seconds: anything that is waited for takes moments, a loaded machine may need more


class Unavailable(Exception):
    """A target cannot be had on this machine; the message is one line and says why."""


class Program(NamedTuple):
    """An executable, and the chroot it runs in (None: the host itself)."""

    path: Path
    root: Optional[Path] = None


class Capture(NamedTuple):
    """A core file, the executable it is of, and what the program said before it crashed."""

    core: Path
    exe: Path
    truth: dict
    arenas: list
    sysroot: Optional[Path] = None


def built_name(source, flags, compiler):
    """File name for what `compiler` makes of `source` with `flags`: another one when any of them changes."""
    digest = hashlib.sha256(repr((flags, compiler)).encode())
    for file in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(file.read_bytes())
    return f"{source.stem}-{digest.hexdigest()[:16]}"


def build(source, *flags):
    """Compile fixtures/programs/`source`, named without its .c or with its .cc, on the host. Cached by content, flags
    and compiler."""
    name, source = ("g++", PROGRAMS / source) if str(source).endswith(".cc") else ("gcc", PROGRAMS / f"{source}.c")
    compiler = subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout
    made = CACHE / "programs" / built_name(source, flags, compiler)
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        unfinished = made.with_name(f"{made.name}.{os.getpid()}")
        subprocess.run([name, "-g", source, "-o", unfinished, "-pthread", *flags, "-ldl"], check=True)
        unfinished.rename(made)
    return Program(made)


def parse_arenas(xml):
    """Per arena, in the ring's order, what malloc_info() told: mallinfo's fields that one arena has."""
    arenas = []
    for heap in ElementTree.fromstring(xml).iter("heap"):
        def number(tag, kind, name):
            found = heap.find(f"{tag}[@type='{kind}']")
            return int(found.get(name)) if found is not None else 0         # 2.43 has no fastbins to tell of

        chunks, fast = number("total", "rest", "count"), number("total", "fast", "size")
        # It adds up size fields as they are, with PREV_INUSE set in all but the top's, which it masks.
        free = fast + number("total", "rest", "size") - (chunks - 1)
        size = number("system", "current", "size")
        arenas.append({
            "arena": size, "ordblks": chunks, "smblks": number("total", "fast", "count"), "fsmblks": fast,
            "uordblks": size - free, "fordblks": free})
    return arenas


def capture(program, directory, *args, core_filter=CORE_FILTER, env=None):
    """Run `program` with `args` in the fresh `directory` until it dumps core there; returns the Capture."""
    inside = directory
    if program.root:
        (program.root / "tmp").mkdir(exist_ok=True)
        inside = Path(tempfile.mkdtemp(dir=program.root / "tmp"))

    def prepare():
        resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        Path("/proc/self/coredump_filter").write_text(hex(core_filter))
        if program.root:
            os.chroot(program.root)
            os.chdir(f"/tmp/{inside.name}")

    path = f"/{program.path.relative_to(program.root)}" if program.root else program.path
    names = "told", "arenas"
    if kernel_writes_cores():
        command, files = [path, *args], names
    elif program.root:
        raise Unavailable("core_pattern does not write to the working directory: no cores from a chroot")
    else:
        warnings.warn("core_pattern does not write to the working directory: GDB writes the cores")
        command, files = through_gdb(path, args, names), ("gdb-out", "gdb-err")
    with open(directory / files[0], "w") as out, open(directory / files[1], "w") as err:
        status = subprocess.run(command, stdout=out, stderr=err, cwd=inside, preexec_fn=prepare,
                                env={**os.environ, **(env or {})}, timeout=TIMEOUT).returncode
    cores = sorted(inside.glob("core*"))
    if len(cores) != 1:
        raise RuntimeError(f"{path} {' '.join(args)} ended with {status} and left {len(cores)} cores")
    core = directory / "core"
    if inside != directory:
        shutil.move(cores[0], core)
        inside.rmdir()
    else:
        cores[0].rename(core)
    told, xml = ((directory / name).read_text() for name in names)
    return Capture(core, program.path, json.loads(told), parse_arenas(xml) if xml else [], program.root)


def through_gdb(path, args, outputs):
    """The command by which GDB runs the program until its signal and writes the core itself."""
    run = f"run {' '.join(args)} >{outputs[0]} 2>{outputs[1]}"
    return ["gdb", "-nx", "-q", "-batch", "-iex", "set debuginfod enabled off",
            "-ex", "set disable-randomization off", "-ex", run, "-ex", "generate-core-file core", path]


def kernel_writes_cores():
    """Whether a crash leaves a core in the working directory (nothing is piped, nor sent elsewhere)."""
    return not Path("/proc/sys/kernel/core_pattern").read_text().startswith(("|", "/"))


def run_gdb(commands, exe=None, core=None, *, iex=(), no_debug=False, sysroot=None, timeout=TIMEOUT):
    """Run commands in a batch GDB with gdbleak; stdout has all it says. `no_debug` hides debug files."""
    early = ["set debuginfod enabled off", *iex]
    if sysroot:
        early += [f"set sysroot {sysroot}", f"set debug-file-directory {sysroot}/usr/lib/debug"]
    if no_debug:
        early.append("set debug-file-directory /nonexistent")
    line = ["gdb", "-nx", "-q", "-batch"]
    for command in early:
        line += ["-iex", command]
    line += ["-x", ROOT / "scripts" / "gdbleak.py"]
    for command in commands:
        line += ["-ex", command]
    files = [file for file in (exe, core) if file is not None]
    # With this set, a fault of gdbleak's own shows where it is.
    environment = {**os.environ, "GDBLEAK_DEBUG": "1"}
    return subprocess.run([*line, *files], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", timeout=timeout, stdin=subprocess.DEVNULL, env=environment)


class Reply(NamedTuple):
    """What one command answered: the items of its --json (none: it failed), and all the text."""

    items: list
    text: str


def ask(questions, *, no_debug=False, iex=()):
    """Ask one GDB about several captures, one after the other. `questions`: a list of (Capture, commands).

    Returns a list of Replies for each capture. All captures must have the same sysroot.
    """
    with tempfile.TemporaryDirectory() as directory:
        lines, files = [], []
        for captured, commands in questions:
            lines += ["core-file", f"file {captured.exe}", f"core-file {captured.core}"]
            for command in commands:
                files.append(Path(directory) / f"{len(files)}.json")
                name, _, rest = command.partition(" ")
                lines += [f"echo \\n<<<{files[-1].name}>>>\\n", f"{name} --json {files[-1]} {rest}"]
        done = run_gdb(lines, no_debug=no_debug, iex=iex, sysroot=questions[0][0].sysroot,
                       timeout=5 * TIMEOUT)
        texts = dict(part.split(">>>\n", 1) for part in done.stdout.split("\n<<<")[1:])
        replies = iter([Reply(json.loads(file.read_text()) if file.exists() else [], texts.get(file.name, ""))
                        for file in files])
        return [[next(replies) for _ in commands] for _, commands in questions]


def leak_json(command, captured, **options):
    """The items that `command --json` writes about the capture."""
    (reply,), = ask([(captured, [command])], **options)
    assert reply.items, f"{command}: {reply.text}"
    return reply.items


def items_of(items, kind):
    """Those of the items whose type is `kind`."""
    return [item for item in items if item["type"] == kind]


def totals(items):
    """The one totals item."""
    found = items_of(items, "totals")
    assert len(found) == 1, items
    return found[0]


def table(items, word=""):
    """Header and rows of the one table whose title has `word` in it."""
    found = [item["data"] for item in items_of(items, "table") if word in item["title"]]
    assert len(found) == 1, [item["title"] for item in items_of(items, "table")]
    return found[0]


def block_states(reply):
    """Address -> (chunk size, state) as leak-blocks lists them."""
    header, *rows = table(reply.items, "blocks")
    at, size, state = (header.index(name) for name in ("Address", "Size", "State"))
    return {int(row[at], 16): (int(row[size]), row[state]) for row in rows}


def run_cli(*args, **options):
    """Run the shell command of the project's environment."""
    return subprocess.run([ROOT / ".venv" / "bin" / "gdbleak", *map(str, args)], capture_output=True,
                          text=True, timeout=TIMEOUT, **options)


def wait_for(question, what):
    """Ask until the answer is true; returns the answer."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        answer = question()
        if answer:
            return answer
        time.sleep(0.01)
    raise TimeoutError(f"waited {WAIT} s for {what}")
