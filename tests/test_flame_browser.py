"""The SVG flame graph in a real browser: headless Chromium opens the file and gets mouse and key events."""
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from tests.targets import wait_for
from gdbleak.flame import Profile, write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH to open the SVG in")

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"]
CONTROL = 2     # the modifier bit of the DevTools protocol
TIMEOUT = 60    # seconds for any one answer


class Browser:
    """Chromium at the other end of two pipes that carry the DevTools protocol: JSON ended by a zero byte."""

    def __init__(self, profile_directory):
        from_us, self.to_browser = os.pipe()
        self.from_browser, to_us = os.pipe()

        def place_pipes():  # the protocol wants them as descriptors 3 and 4
            reader, writer = os.dup(from_us), os.dup(to_us)
            os.dup2(reader, 3)
            os.dup2(writer, 4)

        self.process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile_directory}", "about:blank"], preexec_fn=place_pipes,
            pass_fds=(3, 4), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(from_us)
        os.close(to_us)
        self.pending = b""
        self.events = []
        self.number = 0

    def send(self, method, session=None, **params):
        """Call a method of the protocol and return its result; events that come before it are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self.events.append(answer)

    def receive(self):
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self.pending:
            ready, _, _ = select.select([self.from_browser], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self.from_browser, 1 << 20) if ready else b""
            assert data, "chromium does not answer"
            self.pending += data
        message, _, self.pending = self.pending.partition(b"\0")
        return json.loads(message)

    def wait_for(self, method, session):
        while not any(e.get("method") == method and e.get("sessionId") == session for e in self.events):
            self.events.append(self.receive())

    def close(self):
        try:
            self.send("Browser.close")
            self.process.wait(TIMEOUT)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)  # its own session, thus its own group
                self.process.wait()
            os.close(self.to_browser)
            os.close(self.from_browser)


class Page:
    """A flame graph opened from disk in a tab of its own."""

    def __init__(self, browser, path, width=1300, height=700):
        self.browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.send(f"{domain}.enable")
        self.resize(width, height)
        self.send("Page.navigate", url=path.as_uri())
        browser.wait_for("Page.loadEventFired", self.session)

    def send(self, method, **params):
        return self.browser.send(method, self.session, **params)

    def events(self, method):
        return [event["params"] for event in self.browser.events
                if event.get("method") == method and event.get("sessionId") == self.session]

    def evaluate(self, expression):
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def resize(self, width, height):
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=False)

    def frames(self):
        """What is seen of each frame, by title: place (pixels), fill, label and its width."""
        rows = self.evaluate("""Array.from(document.querySelectorAll(".frame"), (frame) => {
            const box = frame.querySelector("rect").getBoundingClientRect();
            const text = frame.querySelector("text");
            return {title: frame.querySelector("title").textContent,
                    left: box.left, width: box.width, top: box.top,
                    shown: getComputedStyle(frame).display !== "none",
                    fill: getComputedStyle(frame.querySelector("rect")).fill,
                    label: text ? text.textContent : "", labelWidth: text ? text.getComputedTextLength() : 0};
        })""")
        return {row["title"]: SimpleNamespace(**row) for row in rows}

    def frame(self, name):
        """The first frame of that name."""
        return next(frame for title, frame in self.frames().items() if title.startswith(name + " ("))

    def plot(self):
        return self.box(".frame rect")

    def box(self, selector):
        """Where the first such element is, in pixels."""
        return SimpleNamespace(**self.evaluate(
            f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()"))

    def text(self, selector):
        return self.evaluate(f"document.querySelector({selector!r}).textContent")

    def shown(self, selector):
        return self.evaluate(f"getComputedStyle(document.querySelector({selector!r})).display") != "none"

    def mouse(self, kind, x, y, **params):
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **params)

    def hover(self, frame):
        self.mouse("mouseMoved", frame.left + frame.width / 2, frame.top + 6)

    def click_at(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def click(self, frame):
        self.click_at(frame.left + frame.width / 2, frame.top + 6)

    def click_button(self, selector):
        self.click(self.box(selector))

    def press(self, key, code, modifiers=0):
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code,
                      modifiers=modifiers)

    def press_escape(self):
        self.press("Escape", 27)

    def search(self, pattern):
        self.press("f", 70, CONTROL)
        self.send("Input.insertText", text=pattern)

    def check_quiet(self):
        """Nothing but the file itself was asked for, nothing failed, and no dialog came up."""
        self.evaluate("0")
        requests = [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]
        assert len(requests) == 1 and requests[0].startswith("file:///"), requests
        assert not self.events("Runtime.exceptionThrown")
        assert not self.events("Page.javascriptDialogOpening")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def open_page(browser, tmp_path):
    pages = []

    def open_page(profile, **kwargs):
        path = tmp_path / f"{len(pages)}.svg"
        write(profile, path)
        pages.append(Page(browser, path, **kwargs))
        return pages[-1]

    yield open_page
    for page in pages:
        page.check_quiet()
        page.send("Page.close")


def leaky_worker():
    """1,000,000 bytes, so that percentages can be read off."""
    profile = Profile("Memory of a leaky worker", "Chunks in use, header included.")
    main = ["main", "ngx_process_events"]
    profile.add(main + ["ngx_event_accept"], 50_000, 10)
    profile.add(main + ["ngx_http_request", "ngx_palloc"], 400_000, 40)
    profile.add(main + ["ngx_http_request", "ngx_palloc", "ngx_alloc"], 100_000, 5)
    profile.add(main + ["ngx_http_request", "ngx_pcalloc", "ngx_palloc"], 200_000, 5)
    profile.add(main + ["ngx_lua", "lj_alloc"], 250_000, 1)
    return profile


def near(value):
    return pytest.approx(value, abs=0.05)


def geometry(page):
    return {title: (near(f.left), near(f.width), f.shown, f.label) for title, f in page.frames().items()}


def test_the_graph_as_opened(open_page):
    page = open_page(leaky_worker())
    frames, plot = page.frames(), page.plot()
    assert (plot.left, plot.width) == (10, 1280)
    assert frames["ngx_lua (250,000 bytes, 25.00%)"].width == near(0.25 * 1280)
    assert page.frame("all").title == "all (1,000,000 bytes, 100%)"
    assert page.frame("main").top < page.frame("all").top, "the root is at the bottom"
    assert page.frame("lj_alloc").label == "lj_alloc"
    assert "Width: bytes of a frame" in page.text(".legend")
    assert page.text(".title") == "Memory of a leaky worker"
    assert page.text(".info") == "all (1,000,000 bytes, 100%)"
    assert not page.shown(".reset") and not page.shown(".find") and page.shown(".search")


def test_hovering_tells_the_weight(open_page):
    page = open_page(leaky_worker())
    page.hover(page.frame("ngx_lua"))
    assert page.text(".info") == "ngx_lua (250,000 bytes, 25.00%)"
    page.mouse("mouseMoved", 600, 10)
    assert page.text(".info") == "all (1,000,000 bytes, 100%)"


@pytest.mark.parametrize("leave", ["button", "enter", "escape", "root"])
def test_zoom_and_back(open_page, leave):
    page = open_page(leaky_worker())
    before = geometry(page)
    fills = {title: frame.fill for title, frame in page.frames().items()}
    page.click(page.frame("ngx_http_request"))
    zoomed = page.frames()
    assert page.shown(".reset")
    for name, share in [("ngx_http_request (700,000", 1), ("ngx_palloc (500,000", 5 / 7),
                        ("ngx_pcalloc", 2 / 7), ("ngx_alloc", 1 / 7), ("ngx_palloc (200,000", 2 / 7)]:
        frame = next(f for title, f in zoomed.items() if title.startswith(name))
        assert frame.shown and frame.width == near(share * 1280) and frame.fill == fills[frame.title]
    for name in ("all", "main", "ngx_process_events"):
        frame = page.frame(name)
        assert frame.shown and (frame.left, frame.width) == (10, near(1280))
        red, green, blue = (int(part) for part in re.findall(r"\d+", frame.fill))
        assert max(red, green, blue) - min(red, green, blue) < 20, "what it stands on is grey"
    assert not any(page.frame(name).shown for name in ("ngx_event_accept", "ngx_lua", "lj_alloc"))

    if leave == "button":
        page.click_button(".reset")
    elif leave == "enter":
        page.evaluate("document.querySelector('.reset').focus()")
        page.press("Enter", 13)
    elif leave == "escape":
        page.press_escape()
    else:
        page.click(page.frame("all"))
    assert geometry(page) == before
    assert not page.shown(".reset")


def test_zoom_from_a_sliver_is_exact(open_page):
    profile = Profile("deep")
    profile.add(["large"], 2_000_000_000_000)
    chain = [f"level{i}" for i in range(200)]
    profile.add(["sliver", *chain, "left"], 300_000_000)
    profile.add(["sliver", *chain, "right"], 200_000_001)
    page = open_page(profile)
    assert page.frame("left").width < 0.3
    # Too narrow for the mouse: the event goes to the frame itself.
    page.evaluate("""Array.from(document.querySelectorAll('.frame'))
        .find((frame) => frame.textContent.startsWith('sliver ('))
        .querySelector('rect').dispatchEvent(new MouseEvent('click', {bubbles: true}))""")
    left, right, top = page.frame("left"), page.frame("right"), page.frame("level199")
    width = page.plot().width   # the window's, but for a scroll bar
    assert width > 1250 and top.width == near(width) and top.label == "level199"
    assert left.width == near(width * 300_000_000 / 500_000_001)
    assert right.left == near(left.left + left.width) and right.left + right.width == near(10 + width)
    page.click(right)
    assert page.frame("right").width == near(width) and not page.frame("left").shown
    page.press_escape()
    assert page.frame("large").shown


def test_search_counts_no_byte_twice(open_page):
    page = open_page(leaky_worker())
    plain = page.frame("ngx_lua").fill
    page.search("NGX_P?C?alloc$")
    assert page.shown(".find")
    # ngx_palloc 500,000 with ngx_alloc within; ngx_pcalloc 200,000 with ngx_palloc within
    assert page.text(".matched") == "Matched: 70.00% of all"
    fills = {title.split(" (")[0]: frame.fill for title, frame in page.frames().items()}
    assert fills["ngx_palloc"] == fills["ngx_pcalloc"] == fills["ngx_alloc"] != fills["ngx_http_request"]
    assert fills["ngx_lua"] == plain

    page.search("accept|lj_")     # Ctrl-F in the field is the browser's; the text goes on where it was
    assert page.evaluate("document.querySelector('.find input').value").endswith("accept|lj_")
    page.press_escape()
    assert page.text(".matched") == "" and not page.shown(".find")
    assert page.frame("ngx_palloc").fill != fills["ngx_palloc"]


def test_search_by_button_and_while_zoomed(open_page):
    page = open_page(leaky_worker())
    page.click(page.frame("ngx_lua"))
    page.click_button(".search")
    page.send("Input.insertText", text="accept|lj_")
    assert page.text(".matched") == "Matched: 30.00% of all"
    assert page.frame("ngx_lua").width == near(1280), "a search leaves the zoom as it is"
    page.press_escape()
    assert page.text(".matched") == "" and page.frame("ngx_event_accept").shown


def test_search_for_what_is_no_pattern(open_page):
    page = open_page(leaky_worker())
    page.search("ngx_(")
    assert page.text(".matched") == "Not a regular expression"
    page.send("Input.insertText", text="lua)")
    assert page.text(".matched") == "Matched: 25.00% of all"


ATTACKS = ["<script>window.attacked = 1</script>", "<img src=x onerror='window.attacked=1'>",
           "]]></script><script>window.attacked=1</script>",
           "\"><a xlink:href='javascript:window.attacked=1'>",
           "</title></g><script xmlns='http://www.w3.org/2000/svg'>window.attacked=1</script>",
           "&lt;script&gt;window.attacked=1&lt;/script&gt;",
           "</text><style>*{display:none}</style>", "\x00\ud800\ufffe"]


def test_a_hostile_heap_runs_nothing(open_page):
    profile = Profile(ATTACKS[0], ATTACKS[4])
    for attack in ATTACKS:
        profile.add([attack, attack], 1_000)
    page = open_page(profile)
    frames = page.frames()
    assert len(frames) == 1 + len(ATTACKS), "equal titles fall together"
    for attack in ATTACKS[:-1]:
        frame = frames[f"{attack} (1,000 bytes, 12.50%)"]
        page.hover(frame)
        assert page.text(".info") == frame.title
        page.click(frame)
        assert page.frame(attack).label == attack
        page.press_escape()
    page.search("<script")
    assert page.text(".matched") == "Matched: 37.50% of all"
    assert page.evaluate("typeof window.attacked") == "undefined"
    assert page.evaluate("document.querySelectorAll('script').length") == 1
    assert page.evaluate("document.querySelectorAll('img, a, style + style').length") == 0


def test_labels_stay_within_their_frames_at_any_width(open_page):
    rng = random.Random(7)
    profile = Profile("labels")
    for i in range(300):
        name = "".join(rng.choices("abcWM_iíßж日本語🔥שלום", k=rng.randrange(1, 40)))
        profile.add([f"parent{i % 10}", name], rng.randrange(1, 5_000))
    page = open_page(profile)
    for width in (1300, 700, 1900):
        page.resize(width, 700)
        wait_for(lambda: page.plot().width == near(width - 20), "the page to be told of its new size")
        frames = page.frames().values()
        assert sum(bool(frame.label) for frame in frames) > 10
        assert all(frame.labelWidth <= frame.width for frame in frames)


def test_the_info_line_stays_in_sight_of_a_tall_graph(open_page):
    profile = Profile("tall")
    profile.add([f"level{i}" for i in range(200)], 1_000)
    page = open_page(profile)
    for scroll in (0, 1_000, 100_000):
        page.evaluate(f"window.scrollTo(0, {scroll}); new Promise(requestAnimationFrame)")
        page.evaluate("window.dispatchEvent(new Event('scroll'))")
        bottom = page.evaluate("document.querySelector('.info').getBoundingClientRect().bottom")
        assert 650 < bottom <= 700


def test_many_frames(open_page):
    profile = Profile("20,000 frames")
    for i in range(4_000):
        profile.add([f"a{i % 10}", f"b{i % 100}", f"c{i}", "d", "e", "f", "g"], 64)
    page = open_page(profile)
    assert page.evaluate("document.querySelectorAll('.frame').length") == 1 + 10 + 100 + 4_000 * 5
    page.click(page.frame("b7"))
    assert page.frame("b7").width == near(1280)
    assert page.evaluate("document.querySelectorAll('.frame:not(.gone)').length") == 3 + 40 * 5


def test_blocks_instead_of_bytes(open_page):
    page = open_page(leaky_worker().by("count"))
    assert page.frame("ngx_lua").title == "ngx_lua (1 block, 1.64%)"
    assert "Width: blocks of a frame" in page.text(".legend")
    page.search("pallo")
    assert page.text(".matched") == f"Matched: {100 * 50 / 61:.2f}% of all"


def test_an_empty_profile_opens(open_page):
    page = open_page(Profile("nothing"))
    page.click(page.frame("all"))
    page.search("all")
    assert page.text(".matched") == "Matched: 0.00% of all"
    assert page.frame("all").width == near(1280)
