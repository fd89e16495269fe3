"""The commands by name, their summaries and options. Imports no gdb: the shell command parses with it as well."""
from __future__ import annotations

import argparse

COMMANDS = {
    "memory": "every byte of the target: which mapping, which heap, in use or free",
    "mallinfo": "what mallinfo2() would return in the process now, and per arena",
    "sizes": "block sizes of the malloc heaps: in use, free and tcached side by side",
    "blocks": "list malloc blocks by size, state and arena, with their contents on request",
    "types": "malloc blocks by type: C++ classes, nodes of containers, pools, OpenSSL, by contents, by size",
    "pools": "nginx memory pools: by kind and creator, the largest, those that nothing reaches",
    "shm": "nginx shared memory zones and their slab pages",
    "gc": "LuaJIT objects by type, what is dead, the self-check gc.total, and LuaJIT's allocator",
    "gc-refs": "LuaJIT reference paths from the GC roots: which table holds the memory, by its name in the program",
    "gc-stacks": "the Lua call stack of each coroutine that is alive",
    "unreachable": "blocks that no root reaches: true leaks, direct and indirect; what dead Lua objects or one stack word hold",
    "retained": "the largest dominators: what would be free without them, by heap; --pins: small objects that pin much",
    "path": "who holds a block, a set of blocks or a Lua object: the paths from a root down to it",
    "refs": "what refers to a block or a Lua object, and what it refers to",
    "what": "what lies at an address: mapping, symbol, arena, block, pool, stack or register",
}
RECORDINGS = {
    "sample": "the memory leak flame graph: what a live process allocates in some seconds and does not release",
    "mmaps": "what a live process maps in some seconds and does not unmap, with backtraces",
}
STATES = ("in-use", "free", "tcached", "top", "reached", "unreachable", "pending", "all")


class UsageError(Exception):
    """The command line cannot be understood; the message is one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f"{self.prog}: {message}; see {self.help_command}")

    def exit(self, status=0, message=None):
        raise UsageError(message or "")


class _Joined(argparse.Action):
    """An expression with blanks in it is one value."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, " ".join(values))


def parser(name: str, shell: bool = False) -> argparse.ArgumentParser:
    """The parser of one command. `shell`: messages name `gdbleak NAME` instead of `leak-NAME`.

    Raises UsageError in the place of exiting.
    """
    prog = f"gdbleak {name}" if shell else f"leak-{name}"
    build = _Parser(prog=prog, add_help=False, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    build.help_command = f"{prog} --help" if shell else f"help {prog}"
    _ADD[name](build)
    build.add_argument("--json", metavar="FILE",
                       help="also write the report as JSON (- is standard output, in place of the text)")
    return build


def lines(text: str) -> int:
    """A number of lines, or none. Raises ValueError."""
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


def size(text: str) -> str:
    """A size, which is an expression for GDB; that it is not negative is as much as can be told here. Raises
    ValueError."""
    if text.lstrip().startswith("-"):
        raise ValueError(text)
    return text


def _top(build, default: int) -> None:
    build.add_argument("--top", metavar="N", type=lines, default=default,
                       help=f"lines of a list at most (default {default})")


def _min_bytes(build) -> None:
    build.add_argument("--min-bytes", metavar="N", type=size, default="0", help="leave out what is smaller")


def _flame(build, what: str) -> None:
    build.add_argument("--flame", metavar="FILE", help=f"write a flame graph ({what}) as .svg, .folded or .txt")


def _set(build, states: bool = True, state: str = "all") -> None:
    build.add_argument("--size", metavar="LOW-HIGH", help="only chunks of LOW <= size < HIGH, e.g. 256k-512k")
    if states:
        build.add_argument("--state", choices=STATES, default=state,
                           help=f"only blocks in this state (default {state})")
    else:
        build.set_defaults(state="all")
    build.add_argument("--arena", metavar="N", help="only blocks of this arena (0 is main), or `mmapped`")


def _memory(build):
    _top(build, 40)
    _min_bytes(build)
    _flame(build, "mapping -> heap -> state")


def _mallinfo(build):
    build.add_argument("--arenas", action="store_true", help="one column for each arena as well")
    _flame(build, "arena -> state -> size class")


def _sizes(build):
    _set(build)
    build.add_argument("--exact", action="store_true", help="exact chunk sizes, the largest sums first")
    _top(build, 40)
    _min_bytes(build)
    _flame(build, "arena -> state -> size class")


def _blocks(build):
    _set(build)
    build.add_argument("--sort", choices=("address", "size"), default="address",
                       help="order of the list (default address)")
    build.add_argument("--dump", metavar="N", nargs="?", const="64", type=size,
                       help="hexdump of the first N bytes of each (default 64)")
    build.add_argument("--text", action="store_true", help="preview each block's contents as text")
    _top(build, 50)
    _min_bytes(build)
    _flame(build, "arena -> state -> size class")


def _types(build):
    _set(build, state="in-use")
    _top(build, 40)
    _min_bytes(build)
    _flame(build, "kind of type -> type")


def _pools(build):
    build.add_argument("address", nargs="?", help="show this one pool whole")
    build.add_argument("--unreached", action="store_true", help="only pools that nothing known reaches")
    _top(build, 20)
    _min_bytes(build)
    _flame(build, "cycle -> listener -> connection -> request -> pool -> small / large")


def _shm(build):
    build.add_argument("--slots", action="store_true", help="the slots of each zone as well")
    _flame(build, "zone -> used and free pages")


def _gc(build):
    build.add_argument("--types", action="store_true",
                       help="cdata by C type, userdata by metatable, functions by source line")
    _top(build, 20)


def _gc_refs(build):
    build.add_argument("--by", choices=("bytes", "count"), default="bytes", help="what a width means (default bytes)")
    build.add_argument("--dominators", action="store_true",
                       help="put each object below the one that alone keeps it alive, in the place of its shortest path")
    _top(build, 40)
    _flame(build, "GC roots -> registry -> ... -> object")


def _gc_stacks(build):
    _top(build, 20)


def _unreachable(build):
    _set(build, states=False)
    _top(build, 20)
    _min_bytes(build)
    _flame(build, "leak -> what hangs on it")


def _retained(build):
    _set(build)
    build.add_argument("--pins", action="store_true", help="order by native bytes retained over own size")
    _top(build, 20)
    _min_bytes(build)
    _flame(build, "the dominator tree")


def _path(build):
    _address_or_set(build, 10)
    _flame(build, "root -> ... -> block")


def _refs(build):
    _address_or_set(build, 20)
    _flame(build, "what refers to the blocks")


def _address_or_set(build, top: int) -> None:
    build.add_argument("address", nargs="*", action=_Joined, default="",
                       help="an address, register ($rsp) or expression; without one, a set of blocks")
    _set(build)
    _top(build, top)
    _min_bytes(build)


def _address(build):
    build.add_argument("address", nargs="+", action=_Joined, help="an address, register ($rsp) or expression")


def _what(build):
    _address(build)


_ADD = {"memory": _memory, "mallinfo": _mallinfo, "sizes": _sizes, "blocks": _blocks, "types": _types,
        "pools": _pools, "shm": _shm, "gc": _gc, "gc-refs": _gc_refs, "gc-stacks": _gc_stacks, "unreachable": _unreachable,
        "retained": _retained, "path": _path, "refs": _refs, "what": _what}
