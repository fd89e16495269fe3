"""The folding module: profiles, and what their writers make of them."""
import os
import random
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest

from gdbleak.flame import ENDINGS, Profile, check_path, read_folded, write
from gdbleak.flame import svg

REPOSITORY = Path(__file__).resolve().parent.parent
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = [
    "a;b", "two\nlines", "\r", "tab\there", "\x00\x1b[2J\x9b31m", "<script>x()</script>", "]]></script>",
    "\"'&amp;", "\ud800 alone", "\udfff", "\ufffe\uffff", "\u202eturned", "\u2028", "\\x3b", "\\", "C:\\new;",
    " ", "", "12", "a (1 bytes, 100%)", "日本語", "\U0001f525", "\U000e0001", "x" * 5000]


def random_stacks(seed, count=300):
    """Stacks of names hostile and plain, some equal to or the start of others, with (bytes, count)."""
    rng = random.Random(seed)
    names = HOSTILE + ["main", "parse", "malloc"]
    letters = [chr(rng.randrange(0x110000)) for _ in range(50)] + list(";\\ \n<&ab")

    def name():
        return rng.choice(names) if rng.random() < 0.5 else "".join(rng.choices(letters, k=rng.randrange(6)))

    def weight():
        return rng.randrange(10 ** rng.randrange(1, 12))

    return [([name() for _ in range(rng.randrange(7))], weight(), rng.randrange(5)) for _ in range(count)]


def profile_of(stacks, **kwargs):
    profile = Profile("test", **kwargs)
    for frames, size, count in stacks:
        profile.add(frames, size, count)
    return profile


def summed(stacks, column):
    """What the stacks weigh, by a plain dictionary: {frames: weight}."""
    sums = Counter()
    for stack in stacks:
        sums[tuple(name or "(no name)" for name in stack[0])] += stack[column]
    return {frames: weight for frames, weight in sums.items() if weight}


def own_weights(profile):
    """The stacks in a profile, as summed() gives them."""
    path, sums = [], {}
    for depth, name, node in profile.walk():
        if depth:
            path[depth - 1:] = [name]
        if profile.own_value(node):
            sums[tuple(path)] = profile.own_value(node)
    return sums


def read_svg(path):
    """(depth, title, x %, width %, label) of each frame, and the text of the whole heading."""
    root = ElementTree.parse(path).getroot()
    frames = []
    for group in root.iter(SVG + "g"):
        if "data-depth" in group.attrib:
            rect, text = group.find(SVG + "rect"), group.find(SVG + "text")
            x, width = (float(rect.get(name).rstrip("%")) for name in ("x", "width"))
            label = "" if text is None else text.text
            frames.append((int(group.get("data-depth")), group.find(SVG + "title").text, x, width, label))
    heading = [text.text for text in root.findall(SVG + "text") if text.get("class") in ("title", "legend")]
    return frames, heading


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("weight, column", [("bytes", 1), ("count", 2)])
def test_stacks_are_kept_and_folded_files_bring_them_back(tmp_path, seed, weight, column):
    stacks = random_stacks(seed)
    profile = profile_of(stacks).by(weight)
    assert own_weights(profile) == summed(stacks, column)
    assert profile.total == sum(stack[column] for stack in stacks)

    write(profile, tmp_path / "a.folded")
    back = read_folded(tmp_path / "a.folded", unit=profile.unit)
    assert own_weights(back) == summed(stacks, column)
    write(back, tmp_path / "b.folded")
    assert (tmp_path / "a.folded").read_bytes() == (tmp_path / "b.folded").read_bytes()


@pytest.mark.parametrize("seed", range(5))
def test_children_weigh_no_more_than_their_parent(seed):
    profile = profile_of(random_stacks(seed))
    for _, _, node in profile.walk():
        children = node.children.values()
        assert sum(child.bytes for child in children) <= node.bytes
        assert sum(child.count for child in children) <= node.count


@pytest.mark.parametrize("seed", range(5))
def test_merging_is_adding(seed):
    first, second = random_stacks(seed), random_stacks(seed + 100)
    merged = profile_of(first)
    other = profile_of(second)
    merged.merge(other)
    assert own_weights(merged) == summed(first + second, 1)
    assert own_weights(merged.by("count")) == summed(first + second, 2)
    assert own_weights(other) == summed(second, 1), "the other profile must stay as it was"
    merged.merge(merged)
    assert own_weights(merged) == summed(2 * (first + second), 1)


def test_numpy_integers_do_not_wrap_around():
    numpy = pytest.importorskip("numpy")
    profile = Profile("test")
    for _ in range(4):
        profile.add(["a"], numpy.uint64(2**63), numpy.uint8(200))
    assert (profile.total, profile.by("count").total) == (2**65, 800)


def test_wrong_use_is_refused():
    profile = Profile("test")
    with pytest.raises(ValueError):
        profile.add(["a"], -1)
    with pytest.raises(TypeError):
        profile.add("malloc", 1)
    with pytest.raises(ValueError):
        profile.by("time")
    assert profile.total == 0


@pytest.mark.parametrize("name", ["out.html", "out", "out.svg.gz", ".svg"])
def test_an_unknown_ending_names_the_known_ones(tmp_path, name):
    with pytest.raises(ValueError) as error:
        write(Profile("test"), tmp_path / name)
    message = str(error.value)
    assert "\n" not in message
    assert all(ending in message for ending in ENDINGS)
    assert not list(tmp_path.iterdir())


def test_endings_are_taken_in_any_case():
    assert check_path("A.SVG") is check_path("a.svg")


@pytest.mark.parametrize("line", ["main;malloc", "main;malloc -3", "main;malloc 1.5", "main;malloc ٣", "7"])
def test_a_line_that_is_no_stack_is_named(tmp_path, line):
    (tmp_path / "bad.folded").write_text(f"main 1\n\n{line}\n")
    with pytest.raises(ValueError, match=r"bad\.folded:3: not a folded stack"):
        read_folded(tmp_path / "bad.folded")


def test_folded_files_of_others_are_read(tmp_path):
    (tmp_path / "other.folded").write_bytes(b"main;ns::f<a, b> (x) 7\r\nmain;\xff\xfe 5\nmain 1")
    profile = read_folded(tmp_path / "other.folded")
    assert own_weights(profile) == {("main", "ns::f<a, b> (x)"): 7, ("main", "\udcff\udcfe"): 5, ("main",): 1}
    assert profile.title == "other.folded"


def test_folded_lines_are_what_the_common_tools_split(tmp_path):
    profile = profile_of([(["main", "a;b", "c\nd"], 5, 1), (["main"], 2, 1)])
    write(profile, tmp_path / "a.folded")
    assert (tmp_path / "a.folded").read_text() == "main 2\nmain;a\\x3bb;c\\x0ad 5\n"


@pytest.fixture
def nginx_profile():
    """A leaky worker with the weights of a flame graph that its users know."""
    profile = Profile("Memory Leak Flame Graph for a leaky Nginx", "Chunks in use, header included.")
    main = ["main", "ngx_process_events_and_timers"]
    posted = main + ["ngx_event_process_posted"]
    profile.add(posted + ["ngx_http_process_request", "ngx_conf_full_name"], 306_432, 2_736)
    profile.add(posted + ["ngx_http_keepalive_handler"], 311_840 - 306_432, 7)
    profile.add(main + ["ngx_epoll_process_events"], 3_728, 1)
    return profile


def test_text_tree(nginx_profile, tmp_path):
    write(nginx_profile, tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text() == """\
Memory Leak Flame Graph for a leaky Nginx
Chunks in use, header included.
all (315,568 bytes, 100%)
  main (315,568 bytes, 100.00%)
    ngx_process_events_and_timers (315,568 bytes, 100.00%)
      ngx_event_process_posted (311,840 bytes, 98.82%)
        ngx_http_process_request (306,432 bytes, 97.10%)
          ngx_conf_full_name (306,432 bytes, 97.10%)
        ngx_http_keepalive_handler (5,408 bytes, 1.71%)
      ngx_epoll_process_events (3,728 bytes, 1.18%)
"""
    write(nginx_profile.by("count"), tmp_path / "count.txt")
    assert "ngx_epoll_process_events (1 block, 0.04%)" in (tmp_path / "count.txt").read_text()


def test_text_tree_carries_no_terminal_codes(tmp_path):
    write(profile_of(random_stacks(1), legend="\x1b[31m"), tmp_path / "out.txt")
    text = (tmp_path / "out.txt").read_text(encoding="utf-8")
    assert all(line.isprintable() for line in text.split("\n"))


def test_deep_stacks_do_not_blow_up_the_text(tmp_path):
    write(profile_of([(["f"] * 20_000, 8, 1)]), tmp_path / "out.txt")
    assert (tmp_path / "out.txt").stat().st_size < 20_000 * 200
    assert "[depth 20000] f (8 bytes, 100.00%)" in (tmp_path / "out.txt").read_text()


PRINT = ("from gdbleak.flame import Profile, write; p = Profile('caf\\u00e9'); p.add(['\\u65e5\\x1b'], 8); "
         "write(p, '-')")


@pytest.mark.parametrize("encoding, name", [("utf-8", "日\\x1b"), ("ascii", "\\u65e5\\x1b"),
                                            ("latin-1", "\\u65e5\\x1b")])
def test_standard_output_in_any_character_set(encoding, name):
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run([sys.executable, "-c", PRINT], env=environment, capture_output=True, check=True)
    assert run.stdout.decode(encoding).splitlines()[-1] == f"  {name} (8 bytes, 100.00%)"


@pytest.mark.skipif(not shutil.which("gdb"), reason="gdb is not on PATH")
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_standard_output_inside_gdb(locale):
    environment = {**os.environ, "LC_ALL": locale, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(["gdb", "-nx", "-q", "-batch", "-ex", f"python {PRINT}"], env=environment,
                         capture_output=True, check=True, encoding="utf-8")
    # Some Pythons make C a UTF-8 locale.
    names = ["日\\x1b"] if locale == "C.UTF-8" else ["日\\x1b", "\\u65e5\\x1b"]
    assert run.stdout.splitlines()[-1] in [f"  {name} (8 bytes, 100.00%)" for name in names], run.stderr


def test_svg_names_and_weights(nginx_profile, tmp_path):
    write(nginx_profile, tmp_path / "out.svg")
    frames, heading = read_svg(tmp_path / "out.svg")
    titles = {frame[1]: frame for frame in frames}
    assert "all (315,568 bytes, 100%)" == frames[0][1]
    assert titles["ngx_conf_full_name (306,432 bytes, 97.10%)"][3] == pytest.approx(100 * 306_432 / 315_568)
    assert titles["ngx_conf_full_name (306,432 bytes, 97.10%)"][4] == "ngx_conf_full_name"
    assert titles["ngx_epoll_process_events (3,728 bytes, 1.18%)"][4] == ""
    assert heading == ["Memory Leak Flame Graph for a leaky Nginx",
                       "Width: bytes of a frame and all above it. Chunks in use, header included."]
    write(nginx_profile.by("count", "pools"), tmp_path / "count.svg")
    frames, heading = read_svg(tmp_path / "count.svg")
    assert frames[0][1] == "all (2,744 pools, 100%)"
    assert heading[1].startswith("Width: pools of a frame")


@pytest.mark.parametrize("seed", range(8))
def test_svg_is_well_formed_and_every_frame_stands_on_its_parent(seed, tmp_path):
    profile = profile_of(random_stacks(seed), legend="<b>\x07")
    write(profile, tmp_path / "out.svg")
    frames, heading = read_svg(tmp_path / "out.svg")
    total = profile.total
    open_frames = []     # the frames that the next one may stand on
    taken = {}           # right edge of the last frame at each depth
    for depth, title, x, width, _ in frames:
        weight = int(re.search(r" \(([\d,]+) bytes?, [\d.]+%\)$", title)[1].replace(",", ""))
        assert width == pytest.approx(100 * weight / total, abs=1e-4)
        open_frames[depth:] = [(x, width)]
        if depth:
            left, room = open_frames[depth - 1]
            assert left - 1e-4 <= x and x + width <= left + room + 1e-4
            assert x >= taken.get(depth, 0) - 1e-4
        taken[depth] = x + width
        assert title.isprintable()
    assert all(line.isprintable() for line in heading)

    # What is left out is said, and is what is missing.
    threshold = total * 0.1 / 1180
    expected = [node for _, _, node in profile.walk() if node.bytes >= threshold]
    assert len(frames) == len(expected)
    left_out = [child for node in expected for child in node.children.values() if 0 < child.bytes < threshold]
    note = [line for line in heading if line.startswith("Not drawn")]
    assert len(note) == bool(left_out)
    if left_out:
        assert f"{len(left_out):,} frames" in note[0]


def test_svg_has_one_script_and_asks_for_nothing(tmp_path):
    stacks = [([name, "http://example.com/", "url(x)"], 10, 1) for name in HOSTILE]
    write(profile_of(stacks), tmp_path / "out.svg")
    root = ElementTree.parse(tmp_path / "out.svg").getroot()
    tags = Counter(element.tag for element in root.iter())
    assert tags[SVG + "script"] == tags[SVG + "style"] == 1
    assert set(tags) == {SVG + tag for tag in ("svg", "style", "rect", "text", "g", "title", "script")}
    attributes = {name for element in root.iter() for name in element.attrib}
    assert not [name for name in attributes if "href" in name or "src" in name or name.startswith("on")]
    assert "url(" not in root.find(SVG + "style").text and "import" not in root.find(SVG + "style").text


def test_svg_share_left_out(tmp_path):
    small = [([f"small{i:05}", "leaf"], 30, 1) for i in range(10_000)]
    profile = profile_of([(["large"], 700_000, 1)] + small)
    write(profile, tmp_path / "out.svg")
    frames, heading = read_svg(tmp_path / "out.svg")
    assert [frame[1] for frame in frames] == ["all (1,000,000 bytes, 100%)", "large (700,000 bytes, 70.00%)"]
    assert heading[-1].startswith("Not drawn: 10,000 frames")
    assert "30.00% of all, the widest 0.04 px of 1,180" in heading[-1]


@pytest.mark.parametrize("stacks, drawn", [
    ([(["f"] * 5_000, 8, 1)], svg.MAX_DEPTH),
    ([([f"{i:04}"] + ["f"] * 9, 8, 1) for i in range(8_000)], svg.MAX_FRAMES + 8_000),
])
def test_svg_of_a_huge_profile_stays_usable(tmp_path, stacks, drawn):
    write(profile_of(stacks), tmp_path / "out.svg")
    frames, heading = read_svg(tmp_path / "out.svg")
    assert drawn - 8_000 < len(frames) <= drawn
    assert heading[-1].startswith("Not drawn: ") and "100.00% of all" in heading[-1]


def test_empty_profiles_are_written(tmp_path):
    profile = Profile("nothing")
    for ending in ENDINGS:
        write(profile, tmp_path / f"out{ending}")
    assert (tmp_path / "out.folded").read_text() == ""
    assert (tmp_path / "out.txt").read_text() == "nothing\nall (0 bytes, 100%)\n"
    assert read_svg(tmp_path / "out.svg")[0] == [(0, "all (0 bytes, 100%)", 0, 100, "all")]


def test_output_depends_on_the_stacks_alone(tmp_path):
    stacks = random_stacks(3)
    for ending in ENDINGS:
        write(profile_of(stacks), tmp_path / f"a{ending}")
        write(profile_of(stacks[::-1]), tmp_path / f"b{ending}")
        assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()


def test_colors_are_of_the_name_and_warm():
    colors = [svg.color(name) for name in HOSTILE + [f"function_{i}" for i in range(200)]]
    assert len(set(colors)) > 150
    for color in colors:
        red, green, blue = bytes.fromhex(color[1:])
        assert red > 200 and red >= green >= blue
    assert svg.color("malloc") == svg.color("malloc")


@pytest.mark.parametrize("name", ["ngx_http_process_request", "日本語日本語日本語", "ab", "a日b"])
def test_labels_are_cut_to_their_width(name):
    for width in range(0, 300):
        label = svg.fit(name, width)
        cells = sum(1 if ord(c) < 0x250 else 2 for c in label)
        assert cells * svg.CHARACTER <= max(0, width - 2 * svg.TEXT_INDENT)
        cut = label.endswith("..") and label != ".." and name.startswith(label[:-2])
        assert label in ("", name) or cut
    assert label == name
