"""Sizes as people write them, and ranges of sizes."""
from __future__ import annotations

import re

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_NUMBER = re.compile(r"(0x[0-9a-f]+|\d+(?:\.\d+)?)\s*(?:([kmgt])i?b?|b)?$", re.IGNORECASE)


def size(text: str, evaluate=None) -> int:
    """A size in bytes: decimal, hex, `64k`, `2M`, `1.5G`; anything else is left to `evaluate` (GDB's expressions, as
    unsigned 64-bit numbers). Raises ValueError, of a negative one too."""
    value = _number(text, evaluate)
    if value >= 1 << 63:
        raise ValueError(f"{text!r} is no size: it is negative, or too large")
    return value


def address(text: str, evaluate=None) -> int:
    """An address, written like a size. Raises ValueError."""
    return _number(text, evaluate)


def _number(text, evaluate):
    match = _NUMBER.match(text.strip())
    if match:
        value = int(match[1], 16) if match[1].lower().startswith("0x") else \
            float(match[1]) if "." in match[1] else int(match[1])
        value *= _UNITS[(match[2] or "").lower()]
        if value >= 1 << 64:
            raise ValueError(f"{text!r} is too large: it does not fit into 64 bits")
        return int(value)
    if evaluate is None:
        raise ValueError(f"{text!r} is no size: give a number, with k, M or G if you like")
    return evaluate(text)


def size_range(text: str, evaluate=None) -> tuple[int, int]:
    """`256k-512k` as [256k, 512k); `64k-` without an upper end; a single size means just that size."""
    low, dash, high = text.partition("-")
    if dash:
        first = size(low, evaluate) if low.strip() else 0
        last = min(size(high, evaluate), 1 << 63) if high.strip() else 1 << 63
        if last <= first:
            raise ValueError(f"the size range {text!r} is empty: give LOW-HIGH")
        return first, last
    exact = size(text, evaluate)
    return exact, min(exact + 1, (1 << 64) - 1)
