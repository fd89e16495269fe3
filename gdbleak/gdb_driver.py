"""A GDB that we start, speak to in its machine interface (MI), watch, and end."""
import importlib.util
import os
import re
import select
import signal
import subprocess
import time
from typing import BinaryIO, Callable, Dict, List, Optional, Tuple

from . import channel, environment

SCRIPT = environment.PACKAGE / "gdb_script.py"
SETTINGS = ("debuginfod enabled off", "confirm off", "pagination off", "width 0", "style enabled off",
            "auto-load gdb-scripts off", "auto-load python-scripts off")
# What GDB says of every core and nobody can use.
NOISE = re.compile(r"|".join((
    r"Unexpected size of section .\.(note|reg)", r"Section .\.reg-xstate\S* in core file too small",
    r"Unable to find libthread_db matching", r"^warning: *$",
    r"^Failed to read a valid object file image", r"^\d+\s.*No such file or",
    r"^Do you need .set solib-search-path", r"^Use the .info sharedlibrary",
    r"Can't open file (/dev/|/memfd:|/SYSV|/?\[|anon_inode:|socket:)")))
NO_SYMBOLS = re.compile(r"Could not load shared library symbols")
NOT_HERE = re.compile(r"Can't open file (.*) during file-backed mapping note processing")
SECONDS_TO_END = 2.0
TICK = 0.25


class GdbFailure(Exception):
    """GDB cannot do what it was asked; one line. Also when it ended, or had to be ended."""


class Gdb:
    """One GDB process in a process group of its own; a context manager that leaves nothing behind.

    The `terminal` takes the report as it comes (`report(bytes)`), what GDB is at (`progress(line)`, or None
    when only time has passed) and warnings (`note(line)`). A silence of `timeout` seconds counts as a hang.
    """

    def __init__(self, program: str, timeout: float, terminal):
        self._timeout, self._terminal = timeout, terminal
        self._token = 0
        self._greeted = False
        self._pipes: Dict[BinaryIO, Callable[[bytes], object]] = {}
        output_end, steps_end = self._pipe(terminal.report), self._pipe(self._take_progress)
        try:
            self._process = subprocess.Popen(
                [program, "--nx", "--quiet", "--interpreter=mi"], bufsize=0, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                pass_fds=(output_end, steps_end),
                env={**gdb_environment(), channel.OUTPUT_VARIABLE: str(output_end),
                     channel.PROGRESS_VARIABLE: str(steps_end)})
        except OSError as error:
            raise GdbFailure(f"cannot start {program}: {error.strerror}") from None
        finally:
            os.close(output_end)
            os.close(steps_end)
        # What GDB writes past MI is the dump of its own crash: read, so that it cannot block, and dropped.
        self._listen(self._process.stderr, len)
        try:
            from pygdbmi.IoManager import IoManager  # takes its time, while GDB starts

            self._mi = IoManager(self._process.stdin, self._process.stdout, None)
        except BaseException:  # an interrupt as well
            self.end()
            raise

    def __enter__(self) -> "Gdb":
        return self

    def __exit__(self, *_) -> None:
        self.end()

    def _pipe(self, take: Callable[[bytes], object]) -> int:
        """Listen to a new pipe; its writing end."""
        reading, writing = os.pipe()
        self._listen(open(reading, "rb", buffering=0), take)
        return writing

    def _listen(self, pipe: BinaryIO, take: Callable[[bytes], object]) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._pipes[pipe] = take

    def prepare(self) -> None:
        """Settings and our commands, before any file is read. Raises GdbFailure."""
        for setting in SETTINGS:  # an old GDB does not know them all
            self._request("-gdb-set " + setting)
        told = self._with_file("source", str(SCRIPT))["log"]
        if self.status() is None:
            raise GdbFailure(" ".join(told).replace("gdbleak: ", "", 1) or f"{SCRIPT} defines no commands")

    def load(self, command: str, path: str) -> None:
        """Give a file to a command of GDB, and show the warnings that say something. Raises GdbFailure."""
        for line in worth_showing(self._with_file(command, path)["log"]):
            self._terminal.note(line)

    def _with_file(self, command: str, path: str) -> Dict:
        """Commands, and versions of GDB, differ in whether they take a name as it is or quoted."""
        quoted = re.sub(r"([\s'\"\\])", r"\\\1", path)
        result = self._console(command + " " + path)
        if result["message"] == "error" and quoted != path:
            result = self._console(command + " " + quoted)
        return self._checked(result)

    def set_sysroot(self, path: str) -> None:
        """Where the target's files are."""
        self._checked(self._console("set sysroot " + path))

    def run(self, command: str) -> int:
        """Run one of our commands, showing what it writes; its status. Raises GdbFailure."""
        result = self._console(command, show=True)
        for line in result["log"]:
            self._terminal.note(line)
        self._checked(result)
        status = self.status()
        if status is None:
            raise GdbFailure(f"{command.split()[0]} left no status")
        return status

    def status(self) -> Optional[int]:
        """The status that our last command left (0 after loading); None when our commands are not there."""
        value = self._checked(self._request("-data-evaluate-expression $_gdbleak_status"))["payload"]["value"]
        return int(value) if value.lstrip("-").isdigit() else None

    def end(self) -> None:
        """End GDB and what it started: at once, as an orderly end takes half a second and helps nobody."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, *self._pipes):
            stream.close()

    def _console(self, command: str, show: bool = False) -> Dict:
        text = command.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return self._request(f'-interpreter-exec console "{text}"', show)

    @staticmethod
    def _checked(result: Dict) -> Dict:
        if result["message"] == "error":
            raise GdbFailure(" ".join(result["payload"]["msg"].split()))
        return result

    def _request(self, command: str, show: bool = False) -> Dict:
        """Send one MI command and wait for its result record, no longer; it gets `log`, the lines logged."""
        self._token += 1
        self._send(f"{self._token}{command}\n".encode("utf-8", "surrogateescape"))
        log = ""
        heard = time.monotonic()
        while True:
            records, alive = self._receive()
            heard = time.monotonic() if alive else heard
            if time.monotonic() - heard > self._timeout:
                raise GdbFailure(f"GDB was silent for {self._timeout:g} s and was ended (see --timeout)")
            for record in records:
                text = record["payload"] or ""
                if record["type"] == "console" and show:
                    self._terminal.report(text.encode("utf-8", "surrogateescape"))
                elif record["type"] == "log":
                    log += text
                elif record["type"] == "result" and record["token"] == self._token:
                    self._greeted = True
                    self._drain()
                    # GDB logs an error, too, that it reports as the result.
                    message = (record["payload"] or {}).get("msg", "").splitlines()
                    record["log"] = [line for line in log.splitlines() if line not in message]
                    return record

    def _send(self, data: bytes) -> None:
        try:
            self._process.stdin.write(data)
        except BrokenPipeError:
            raise self._ended() from None

    def _receive(self) -> Tuple[List[Dict], bool]:
        """(MI records, whether GDB gave any sign of life) of the next quarter of a second at most."""
        stdout = self._process.stdout
        ready, _, _ = select.select([stdout, *self._pipes], [], [], min(TICK, self._timeout))
        for pipe in ready:
            if pipe is not stdout:
                self._take(pipe)
        records = self._mi.get_gdb_response(0, raise_error_on_timeout=False) if stdout in ready else []
        if stdout in ready and not records:  # a part of a line, or the end
            time.sleep(0.001)
            if self._process.poll() is not None:
                self._drain()
                raise self._ended()
        self._terminal.progress(None)
        return records, bool(ready)

    def _drain(self) -> None:
        for pipe in list(self._pipes):
            self._take(pipe)

    def _take(self, pipe: BinaryIO) -> None:
        """Hand on all that there is in a pipe."""
        while True:
            data = pipe.read(1 << 16)
            if data:
                self._pipes[pipe](data)
                continue
            if data is not None:  # its end
                del self._pipes[pipe]
                pipe.close()
            return

    def _take_progress(self, data: bytes) -> None:
        lines = data.decode("utf-8", "replace").splitlines()
        self._terminal.progress("".join(c if c.isprintable() else "?" for c in lines[-1]))

    def _ended(self) -> GdbFailure:
        try:
            code = self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            code = 0
        reason = "by " + signal.Signals(-code).name if code < 0 else f"with status {code}"
        if not self._greeted:
            return GdbFailure(f"{self._process.args[0]} is no GDB that can be driven: it ended {reason}")
        return GdbFailure(f"GDB itself ended {reason}, in the middle of its work")


def gdb_environment() -> Dict[str, str]:
    """Our environment without what is meant for our Python only; English and UTF-8 in any locale."""
    dropped = ("PYTHONHOME", "PYTHONPATH", "LANGUAGE")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    numpy = importlib.util.find_spec("numpy")
    packages = os.path.dirname(os.path.dirname(numpy.origin)) if numpy else ""
    return {**kept, "LC_ALL": "C.UTF-8", environment.PACKAGES_VARIABLE: packages}


def worth_showing(lines: List[str]) -> List[str]:
    """The log lines that say something about a core, each once; those about missing files become one."""
    kept, absent = [], []
    for line in lines:
        missing = NOT_HERE.search(line)
        if NOISE.search(line) or not line.strip() or line in kept:
            continue
        if missing:
            absent.append(missing.group(1))
        else:
            kept.append(line)
    if absent:
        kept = [line for line in kept if not NO_SYMBOLS.search(line)]
        kept.append(f"warning: mapped files that are not on this machine: {len(absent)} (first: {absent[0]})")
    return kept
