"""Frame names come from the memory of a stranger: here they become text that can be shown anywhere."""
from typing import Optional

SHOWN = 500  # characters of a name that the writers for people show


def escape(character: str) -> str:
    """The character as Python would write it: `\\x1b`, `\\u202e`, `\\U000e0001`."""
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def printable(text: str, limit: Optional[int] = SHOWN) -> str:
    """The text with all that is not printable escaped, cut to `limit` characters of it.

    Not printable are control characters, lone surrogates, line separators, marks that turn the writing
    direction, and what is not assigned. The result is one line, harmless to a terminal, legal in XML 1.0.
    """
    if limit is not None and len(text) > limit:
        text = text[:limit - 1] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else escape(c) for c in text)
