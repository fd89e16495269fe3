"""Live processes to record: programs that say what they did, the shell command on them, and what must be so after."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from gdbleak.record.session import Notes, Timing
from gdbleak.target.live import mappings
from tests.targets import CACHE, PROGRAMS, ROOT, WAIT, build, built_name, wait_for

GDBLEAK = [sys.executable, "-c", "import sys; from gdbleak.cli import main; sys.exit(main())"]
KILL_AT = [sys.executable, str(ROOT / "tests" / "kill_at.py")]


def build_as_cxx(source, *flags):
    """fixtures/programs/`source`.c compiled as C++: its path."""
    file = PROGRAMS / f"{source}.c"
    made = CACHE / "programs" / ("cxx-" + built_name(file, flags, "g++"))
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        unfinished = made.with_name(f"{made.name}.{os.getpid()}")
        subprocess.run(["g++", "-x", "c++", "-w", file, "-o", unfinished, "-pthread", *flags], check=True)
        unfinished.rename(made)
    return made


class Subject:
    """A running program of fixtures/programs/ that takes commands and answers in lines of JSON."""

    def __init__(self, program, *arguments, **options):
        self.process = subprocess.Popen([program, *map(str, arguments)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, **options)
        self.pid = self.process.pid

    def line(self):
        return self.process.stdout.readline()

    def say(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def is_alive(self):
        return self.process.poll() is None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def rates(*flags, cxx=False):
    """The path of record_rates, built."""
    return build_as_cxx("record_rates", *flags) if cxx else build("record_rates", *flags).path


class Recorder:
    """The shell command on a process, as a process of its own."""

    def __init__(self, word, pid, *options, through=GDBLEAK, **settings):
        self.process = subprocess.Popen([*through, word, "-p", str(pid), *map(str, options)], cwd=ROOT,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True, **settings)
        self.notes = []
        self.began = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.notes.append(line)
            if line.startswith("recording process"):
                self.began.set()
        self.began.set()

    def wait_begin(self):
        """Wait until it records; fails when it does not."""
        assert self.began.wait(WAIT) and self.process.poll() in (None, 0), "".join(self.notes)

    def finish(self, status=0):
        """(standard output, standard error) when it has ended with that status."""
        said = self.process.stdout.read()
        self._reader.join(WAIT)
        assert self.process.wait(WAIT) == status, said + "".join(self.notes)
        return said, "".join(self.notes)


def record(word, subject, command, *options):
    """Have the subject do `command` while it is recorded, and end the window when it has: (items of the report, folded
    stacks, its answer)."""
    folded = CACHE / "record" / f"{os.getpid()}-{subject.pid}.folded"
    folded.parent.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(word, subject.pid, "--seconds", 600, "--json", "-", "--flame", folded, *options)
    recorder.wait_begin()
    subject.say(command)
    answer = json.loads(subject.line())
    recorder.process.send_signal(signal.SIGINT)
    said, _ = recorder.finish()
    stacks = [line.rsplit(" ", 1) for line in folded.read_text().splitlines()]
    folded.unlink()
    return json.loads(said), [(stack.split(";"), int(weight)) for stack, weight in stacks], answer


def record_here(recorder, make, subject, command, seconds=600):
    """As `record`, in this process, for so long at most: (the Recording, the subject's answer). recorder: of session or
    exact; make: the Session."""
    answer, over = [], threading.Event()

    def end_when_done():
        answer.append(json.loads(subject.line()))
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    def begin(_):
        subject.say(command)
        threading.Thread(target=end_when_done).start()
    recording = recorder(make, subject.pid, Timing(seconds, 0.2), Notes(begin, lambda line: None))
    over.set()
    assert answer, "the time was over before it had done that"
    return recording, answer[0]


def refused(*words):
    """The one line that says why a recording cannot be made."""
    done = subprocess.run([*GDBLEAK, *map(str, words)], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=WAIT)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done
    return done.stderr


def totals(items):
    return next(item for item in items if item["type"] == "totals")


def by_site(stacks, sites):
    """Bytes by the innermost of the `sites` in each stack; "" for the others."""
    found = {}
    for frames, weight in stacks:
        names = [re.sub(r"\(.*", "", frame) for frame in frames]
        site = next((name for name in reversed(names) if name in sites), "")
        found[site] = found.get(site, 0) + weight
    return found


def changed_text(pid):
    """Places where the process's code is not what its file holds, or the kernel has given to us: (path, address)."""
    changed = []
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for mapping in mappings(pid):
            if "x" not in mapping.perms or not mapping.inode and mapping.path != "[vdso]":
                continue
            memory.seek(mapping.start)
            now = memory.read(mapping.end - mapping.start)
            then = file_text(pid, mapping) if mapping.inode else own_vdso()
            if now != then:
                changed += [(mapping.path, hex(mapping.start + k)) for k in range(len(now)) if now[k] != then[k]]
    return changed


def file_text(pid, mapping):
    """What the mapping's file holds."""
    size = mapping.end - mapping.start
    with open(f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}", "rb") as file:
        file.seek(mapping.offset)
        return file.read(size).ljust(size, b"\0")


def own_vdso():
    """The code that the kernel maps into every process."""
    mapping, = [m for m in mappings(os.getpid()) if m.path == "[vdso]"]
    with open("/proc/self/mem", "rb", 0) as memory:
        memory.seek(mapping.start)
        return memory.read(mapping.end - mapping.start)


def leftovers(pid):
    """Mappings of executable memory that are no file's, which no target here has by itself but for LuaJIT's."""
    return [m for m in mappings(pid) if "x" in m.perms and not m.inode and not m.path]


def guards(pid):
    """Process ids of the guards of a process."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                state = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if b"gdbleak.record.guard" in words and str(pid).encode() in words and state not in "ZX":
                found.append(int(name))
    return found


def check_as_found(pid):
    """When its guards are done, the process's text equals the files, and nothing of ours is mapped."""
    wait_for(lambda: not guards(pid), "the guard to end")
    assert changed_text(pid) == []
    assert leftovers(pid) == []


def needs():
    """Why these tests cannot run here, or ""."""
    if os.uname().machine != "x86_64":
        return "recording is for x86-64"
    if not shutil.which("gcc"):
        return "needs gcc"
    if os.geteuid():
        return "needs root, to compare the text of processes with their files"
    return ""


def kill(process):
    """SIGKILL, and reap."""
    process.send_signal(signal.SIGKILL)
    process.wait()
