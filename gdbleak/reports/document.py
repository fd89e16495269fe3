"""A report as a list of items: shown as text for a person, written as JSON for a program."""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

VERSION = 1
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\uf900-\ufffd]|[\u202a-\u202e\u2066-\u2069]")


def printable(text: str | bytes, limit: int = 200) -> str:
    """Text from the target, made harmless: no control characters, no terminal codes, at most `limit` characters."""
    if isinstance(text, bytes):
        text = text[:4 * limit].decode("utf-8", "backslashreplace")
    shown = _UNPRINTABLE.sub(lambda m: "\\x%02x" % ord(m[0]) if ord(m[0]) < 256 else "\\u%04x" % ord(m[0]), text)
    return shown if len(shown) <= limit else shown[:limit - 3] + "..."


def size_name(size: int) -> str:
    """A power of two as people write it: 256k, 2M."""
    for unit, letter in ((1 << 40, "T"), (1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if size >= unit and not size % unit:
            return f"{size // unit}{letter}"
    return str(size)


def count(number: int, what: str) -> str:
    """`1 block`, `1,234 blocks`."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def share(part: int, whole: int) -> str:
    """A percentage with one decimal, "-" of nothing."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def bar(part: int, whole: int, width: int = 24) -> str:
    """A bar for a person; anything above nothing shows at least its thinnest line."""
    if not part or not whole:
        return ""
    eighths = max(1, round(8 * width * part / whole))
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


@dataclass
class Table:
    """A table: header and rows of strings or numbers. `left`: indexes of columns that are text."""

    header: list[str]
    rows: list[list]
    title: str = ""
    left: tuple[int, ...] = (0,)
    footer: str = ""

    def text(self) -> str:
        from tabulate import tabulate
        rows = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in self.rows]
        align = ["left" if k in self.left else "right" for k in range(len(self.header))]
        shown = tabulate(rows, [heading.replace("<br>", " ") for heading in self.header], disable_numparse=True,
                         colalign=align if rows else None, tablefmt="simple")
        return (self.title + "\n" if self.title else "") + shown + "\n" + (self.footer + "\n" if self.footer else "")

    def json(self) -> dict:
        rows = [[str(cell) for cell in row] for row in self.rows]
        return {"type": "table", "ver": VERSION, "title": self.title, "data": [list(self.header)] + rows}


@dataclass
class Text:
    """Lines for the person only."""

    lines: str

    def text(self) -> str:
        return self.lines + "\n"

    def json(self) -> None:
        return None


@dataclass
class Data:
    """An item for the program only."""

    item: dict

    def text(self) -> str:
        return ""

    def json(self) -> dict:
        return {"ver": VERSION, **self.item}


@dataclass
class Report:
    """What a command prints. `profile`: what --flame writes, or a function that makes it; `status`: 0 done, 1 found what was asked to be absent."""

    command: str
    items: list = field(default_factory=list)
    profile: object = None
    status: int = 0

    def add(self, item) -> None:
        self.items.append(item)

    def say(self, text: str = "") -> None:
        """A line for the person."""
        self.items.append(Text(text))

    def totals(self, **numbers) -> None:
        """The plain numbers of the report."""
        self.items.append(Data({"type": "totals", "command": self.command, **numbers}))

    def text(self) -> str:
        return "".join(item.text() for item in self.items)

    def json(self) -> list[dict]:
        return [item for item in (item.json() for item in self.items) if item is not None]

    def json_text(self) -> str:
        """The list of items as JSON."""
        return json.dumps(self.json(), indent=1, ensure_ascii=True) + "\n"
