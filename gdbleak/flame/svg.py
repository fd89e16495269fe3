"""The profile as a flame graph: one SVG file that a browser opens from disk, offline.

The picture stands without its script; the script adds zoom, search and the window's width. Both lay out the
frames by the same rule: siblings side by side by name, from the parent's left edge; the room at the right is
what is not drawn, and what the parent holds itself.
"""
import colorsys
import math
import textwrap
import zlib
from typing import Iterator, List, NamedTuple, Tuple
from xml.sax.saxutils import escape

from .names import printable
from .profile import Profile
from .svg_script import SCRIPT, STYLE

WIDTH = 1200            # of the picture, in pixels, before the script fits it to the window
MARGIN = 10
PLOT = WIDTH - 2 * MARGIN
FRAME = 18              # height of a frame and the gap above it
BAR = 28                # height of the line at the bottom
LINE = 18               # height of a line of the heading
CONTROLS = 32           # height of the line with the buttons, under the heading
CHARACTER = 7.23        # width of a character of the frames' font
TEXT_INDENT = 4
SEAM = 3                # a narrower frame is drawn without a gap to its neighbour, which would hide it

MIN_WIDTH = 0.1         # pixels; a narrower frame is not drawn
MAX_DEPTH = 1_000       # levels drawn
MAX_FRAMES = 50_000     # drawn at most, or as many more as have the width of the last


class Box(NamedTuple):
    """A frame of the picture; `x` and `value` in units of the profile."""

    depth: int
    x: int
    value: int
    name: str
    title: str


class NotDrawn(NamedTuple):
    """The frames left out; those above them go with them and are not counted again."""

    frames: int
    value: int
    widest: int


def lines(profile: Profile) -> Iterator[str]:
    """Yield the SVG file."""
    boxes, not_drawn = layout(profile)
    heading = _heading(profile, not_drawn)
    top = MARGIN + LINE * len(heading) + CONTROLS
    plot_height = FRAME * (1 + max(box.depth for box in boxes))
    height = top + plot_height + MARGIN + BAR
    yield f"""<?xml version="1.0" encoding="UTF-8"?>
<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">
<style>{STYLE}</style>
<rect class="paper" width="100%" height="100%"/>
"""
    for number, (style, text) in enumerate(heading, 1):
        yield f'<text class="{style}" x="50%" y="{MARGIN + LINE * number - 4}">{_xml(text)}</text>\n'
    yield f'<svg class="plot" x="{MARGIN}" y="{top}" width="{PLOT}" height="{plot_height}">\n'
    scale = PLOT / (profile.total or 1)
    for box in boxes:
        yield _frame(box, plot_height - FRAME * (box.depth + 1), scale)
    yield f"""</svg>
<g class="bar" transform="translate(0,{height - BAR})">
<rect class="paper" width="100%" height="{BAR}"/>
<text class="info" x="{MARGIN}" y="{BAR - 10}">{_xml(boxes[0].title)}</text>
<text class="matched" x="100%" dx="-{MARGIN}" y="{BAR - 10}"></text>
</g>
<g role="button" tabindex="0" class="reset"><text x="{MARGIN}" y="{top - 10}">Reset zoom</text></g>
<g role="button" tabindex="0" class="search"><text x="100%" dx="-{MARGIN}" y="{top - 10}">Search</text></g>
<script><![CDATA[{SCRIPT}]]></script>
</svg>
"""


def layout(profile: Profile) -> Tuple[List[Box], NotDrawn]:
    """The frames to draw, parents first, and the sum of the others."""
    last = _last_rank(profile)

    def left_out(depth, node):
        return depth >= MAX_DEPTH or (-profile.value(node), depth) > last

    boxes = []
    others = []
    free_x = [0]        # at each depth, where the next frame starts
    for depth, name, node in profile.walk(ends_at=left_out):
        value = profile.value(node)
        if left_out(depth, node):
            others.append(value)
            continue
        x = free_x[depth]
        free_x[depth:] = [x + value, x]
        name = printable(name)
        boxes.append(Box(depth, x, value, name, profile.describe(name, node)))
    return boxes, NotDrawn(len(others), sum(others), max(others, default=0))


def _last_rank(profile: Profile) -> Tuple[float, float]:
    """Rank of the last frame to draw, as (-value, depth): a frame never comes before its parent."""
    least = profile.total * MIN_WIDTH / PLOT

    def too_small(depth, node):
        return depth >= MAX_DEPTH or profile.value(node) < least

    ranks = [(-profile.value(node), depth) for depth, _, node in profile.walk(ends_at=too_small)
             if not too_small(depth, node)]
    if len(ranks) <= MAX_FRAMES:
        return (-least, math.inf)
    return sorted(ranks)[MAX_FRAMES - 1]


def _heading(profile: Profile, not_drawn: NotDrawn) -> List[Tuple[str, str]]:
    """Title, what a width means, and what is not in the picture, as (style, line)."""
    legend = f"Width: {profile.unit} of a frame and all above it. {printable(profile.legend)}"
    heading = [("title", printable(profile.title, 100))]
    heading += [("legend", line) for line in textwrap.wrap(legend, 150)]
    if not_drawn.frames:
        pixels = not_drawn.widest * PLOT / profile.total
        share = _share(profile, not_drawn.value)
        heading.append(("legend", f"Not drawn: {not_drawn.frames:,} frames too narrow or too deep, and all "
                                  f"above them: {share} of all, the widest {pixels:.2f} px of {PLOT:,}."))
    return heading


def _share(profile: Profile, value: int) -> str:
    percent = profile.percent(value)
    return f"{percent:.2f}%" if percent >= 0.01 else "less than 0.01%"


def _frame(box: Box, y: int, scale: float) -> str:
    x, width = box.x * scale, box.value * scale
    if box.depth == 0:
        width = PLOT    # also when the profile is empty
    left, share = (f"{100 * part / PLOT:.7g}%" for part in (x, width))
    thin = " thin" if width < SEAM else ""
    label = fit(box.name, width)
    text = f'<text x="{left}" dx="{TEXT_INDENT}" y="{y + FRAME - 5}">{_xml(label)}</text>' if label else ""
    return (f'<g class="frame{thin}" data-depth="{box.depth}"><title>{_xml(box.title)}</title>'
            f'<rect x="{left}" y="{y}" width="{share}" height="{FRAME - 1}" fill="{color(box.name)}"/>'
            f'{text}</g>\n')


def fit(name: str, width: float) -> str:
    """As much of the name as fits into so many pixels, or nothing."""
    room = int((width - 2 * TEXT_INDENT) // CHARACTER)
    if room < 3:
        return ""
    cells = [1 if c < "\u0250" else 2 for c in name[:room + 1]]  # outside of Latin, the widest is assumed
    if sum(cells) <= room:
        return name
    shown = used = 0
    while used + cells[shown] <= room - 2:
        used += cells[shown]
        shown += 1
    return name[:shown] + ".." if shown else ""


def color(name: str) -> str:
    """A warm color, light enough for dark text, that depends on the name alone: two graphs compare."""
    digest = zlib.crc32(name.encode("utf-8", "surrogatepass"))
    hue = (digest & 0xFF) / 0xFF
    light = (digest >> 8 & 0xFF) / 0xFF
    rgb = colorsys.hls_to_rgb((12 + 40 * hue) / 360, 0.60 + 0.12 * light, 0.88)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def _xml(text: str) -> str:
    return escape(text, {'"': "&quot;"})
