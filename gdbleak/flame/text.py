"""The profile as an indented tree, for a terminal: the heaviest child first."""
from typing import Iterator

from .names import printable
from .profile import Profile

INDENTED = 60  # levels; a deeper frame states its depth: 10,000 of them would be 100 MB of blanks


def lines(profile: Profile) -> Iterator[str]:
    """Yield title and legend, then a line a frame: `name (306,432 bytes, 97.10%)`."""
    for heading in filter(None, (profile.title, profile.legend)):
        yield f"{printable(heading)}\n"

    def heaviest_first(pair):
        name, node = pair
        return -profile.value(node), name

    for depth, name, node in profile.walk(heaviest_first):
        deep = f"[depth {depth}] " if depth > INDENTED else ""
        yield f"{'  ' * min(depth, INDENTED)}{deep}{profile.describe(printable(name), node)}\n"
