"""One analysis of several processes: a report each, under the name of its process, and the sum of their numbers."""
import argparse
import json
import os
import tempfile
from typing import Dict, List, Tuple

from . import cli
from .flame import Profile, read_folded, write
from .reports.document import VERSION, Table
from .target.ptrace import Ended

SHARED = "memory that several of them share is counted in each"


def analyse_each(word: str, arguments: List[str], chosen: argparse.Namespace, gdb: str,
                 terminal: "cli.Terminal") -> int:
    """Copy, analyse and let go one process after the other; the worst of the exit statuses.

    Raises Failure, and LiveError when there is no such process at all."""
    cli.check_sysroot(chosen)
    flame = getattr(chosen, "flame", None)
    unit = "objects" if getattr(chosen, "by", "bytes") == "count" else "bytes"
    profile = Profile(f"leak-{word} of several processes", SHARED, unit)
    quiet = chosen.json == "-" or flame == "-"
    items, sums, status = [], [], cli.DONE
    with tempfile.TemporaryDirectory(prefix="gdbleak-") as directory:
        report, folded = os.path.join(directory, "report.json"), os.path.join(directory, "profile.folded")
        command = cli.command_line(word, arguments, "--json", report, *(["--flame", folded] if flame else []),
                                   without=("--json", "--flame"))
        for copy, target in cli.copied_targets(chosen, terminal):
            name = f"{copy.process.name} {copy.process.pid}"
            try:
                if target is None:
                    raise cli.Failure(str(copy.problem))
                terminal.report(b"" if quiet else f"\n=== {name} ===\n".encode())
                status = max(status, cli.run_in_gdb(gdb, command, target, chosen.timeout,
                                                    cli.Silent() if quiet else terminal))
            except cli.Failure as failure:
                terminal.note(f"gdbleak: {name}: {failure}")
                status = status if isinstance(copy.problem, Ended) else cli.FAILED
                continue
            with open(report) as file:
                found = json.load(file)
            items += [{"type": "process", "ver": VERSION, "pid": copy.process.pid, "name": copy.process.name}, *found]
            sums.append((name, total([item for item in found if item["type"] == "totals"])))
            if flame:
                add_under(profile, name, read_folded(folded, unit=unit))
    both = total([numbers for _, numbers in sums])
    items.append({"type": "totals", "ver": VERSION, "command": f"leak-{word}", "processes": len(sums), **both})
    if not quiet:
        terminal.report(("\n" + table(word, sums, both).text()).encode())
    if chosen.json:
        text = json.dumps(items, indent=1) + "\n"
        if chosen.json == "-":
            terminal.report(text.encode())
        else:
            with open(chosen.json, "w", encoding="utf-8") as file:
                file.write(text)
    if flame:
        write(profile, flame)
    return status


def total(items: List[Dict]) -> Dict:
    """The sums of the plain numbers of several items, and of those in dictionaries in them."""
    sums: Dict = {}
    for item in items:
        for key, value in item.items():
            if isinstance(value, dict):
                sums[key] = total([sums.get(key, {}), value])
            elif isinstance(value, (int, float)) and not isinstance(value, bool) and key not in ("ver", "pid"):
                sums[key] = sums.get(key, 0) + value
    return sums


def table(word: str, sums: List[Tuple[str, Dict]], both: Dict, footer: str = SHARED) -> Table:
    """One row a process, and the sum; columns that are zero throughout are left out."""
    keys = [key for key, value in both.items() if isinstance(value, (int, float)) and value]
    rows = [[name, *(numbers.get(key, 0) for key in keys)] for name, numbers in sums]
    rows.append(["sum", *(both[key] for key in keys)])
    return Table(["process", *keys], rows, f"leak-{word}: the sum of {len(sums)} processes", footer=footer)


def add_under(profile: Profile, name: str, other: Profile) -> None:
    """Add the stacks of `other` to `profile`, with `name` below them all."""
    branch = Profile("", unit=profile.unit)
    branch.root = profile.root.child(name)
    branch.merge(other)
    profile.root.bytes += other.root.bytes
    profile.root.count += other.root.count
