"""What an SVG flame graph carries with it: its style sheet, and the script for zoom, search, window width."""

STYLE = """
svg { font-family: system-ui, sans-serif; font-size: 13px; background: #fffdf8; }
text { fill: #1d1a16; }
.paper { fill: #fffdf8; }
.title { font-size: 17px; font-weight: 600; text-anchor: middle; }
.legend { text-anchor: middle; fill: #5b544a; }
[role=button] text { cursor: pointer; fill: #8a4a00; text-decoration: underline; }
.search, .matched { text-anchor: end; }
.reset, .find { display: none; }
.zoomed .reset, .searching .find { display: inline; }
.searching .search { display: none; }
.find input { box-sizing: border-box; width: 100%; font: 13px monospace; padding: 1px 4px; }
.find .wrong { background: #ffd9d2; }
.frame { cursor: pointer; }
.frame text, .info, .matched { font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 12px; }
.frame text { pointer-events: none; white-space: pre; }
.info, .matched { white-space: pre; }
.frame rect { stroke: #fffdf8; stroke-width: 1; }
.frame.thin rect { stroke: none; }
.frame:hover rect { stroke: #1d1a16; }
.frame.parent rect { fill: #ddd8cf; }
.frame.parent text { fill: #5b544a; }
.frame.hit rect { fill: #b48cff; }
.frame.gone { display: none; }
"""

# The names in the titles are a stranger's text: they are only ever read and set as textContent.
SCRIPT = r"""
"use strict";
(function () {
  const MARGIN = 10, INDENT = 4, SEAM = 3, BAR = 28, FIND_WIDTH = 260, FIND_HEIGHT = 24;
  const svg = document.currentScript.closest("svg");
  const find = (selector) => svg.querySelector(selector);
  const plot = find(".plot"), info = find(".info"), matched = find(".matched"), bar = find(".bar");
  const height = svg.viewBox.baseVal.height, plotTop = Number(plot.getAttribute("y"));
  const frames = Array.from(plot.children, readFrame);
  const indexOf = new Map(frames.map((frame, index) => [frame.element, index]));
  const field = makeField();
  let top = 0;                              // index of the frame that spans the width
  let hovered = 0;
  let plotWidth = 0;
  let character = 7.23;

  function readFrame(element) {
    const title = element.querySelector("title").textContent;
    const end = title.lastIndexOf(" (");
    return {
      element, title,
      name: title.slice(0, end),
      value: Number(/^[\d,]+/.exec(title.slice(end + 2))[0].replace(/,/g, "")),
      depth: Number(element.dataset.depth),
      rect: element.querySelector("rect"),
      text: element.querySelector("text"),
    };
  }

  // The frames come parents first: depth alone tells where each starts and where its subtree ends.
  function layOut() {
    const freeX = [0], open = [];
    frames.forEach((frame, index) => {
      while (open.length > frame.depth) open.pop().end = index;
      open.push(frame);
      frame.x = freeX[frame.depth];
      freeX[frame.depth] += frame.value;
      freeX[frame.depth + 1] = frame.x;
    });
    open.forEach((frame) => { frame.end = frames.length; });
  }

  // Outside of Latin, the widest character is assumed.
  function cells(character) {
    return character < "\u0250" ? 1 : 2;
  }

  function fit(name, width) {
    const room = Math.floor((width - 2 * INDENT) / character);
    if (room < 3) return "";
    const letters = Array.from(name.slice(0, 2 * room + 2));
    if (letters.reduce((sum, letter) => sum + cells(letter), 0) <= room) return name;
    let shown = 0, used = 0;
    while (used + cells(letters[shown]) <= room - 2) used += cells(letters[shown++]);
    return shown ? letters.slice(0, shown).join("") + ".." : "";
  }

  function drawLabel(frame) {
    const width = frame.share * plotWidth;
    frame.element.classList.toggle("thin", width < SEAM);
    const label = fit(frame.name, width);
    if (!label) {
      if (frame.text) frame.text.remove();
      frame.text = null;
      return;
    }
    if (!frame.text) {
      frame.text = document.createElementNS(svg.namespaceURI, "text");
      frame.text.setAttribute("dx", INDENT);
      frame.text.setAttribute("y", Number(frame.rect.getAttribute("y")) + 13);
      frame.element.append(frame.text);
    }
    frame.text.setAttribute("x", 100 * frame.left + "%");
    if (frame.text.textContent !== label) frame.text.textContent = label;
  }

  function place(frame, left, share) {
    frame.left = left;
    frame.share = share;
    frame.rect.setAttribute("x", 100 * left + "%");
    frame.rect.setAttribute("width", 100 * share + "%");
    drawLabel(frame);
  }

  function zoom(index) {
    const target = frames[index];
    top = index;
    frames.forEach((frame, i) => {
      const parent = i < index && frame.end > index;
      const inside = i >= index && i < target.end;
      frame.element.classList.toggle("parent", parent);
      frame.element.classList.toggle("gone", !parent && !inside);
      if (parent || i === index) place(frame, 0, 1);
      else if (inside) place(frame, (frame.x - target.x) / target.value, frame.value / target.value);
    });
    svg.classList.toggle("zoomed", index > 0);
  }

  function showInfo(index) {
    hovered = index;
    const taken = matched.textContent ? matched.getComputedTextLength() + 2 * MARGIN : 0;
    info.textContent = fit(frames[index].title, plotWidth - taken);
  }

  // Marks the frames whose name matches, and sums them up without counting a match within a match again.
  function search(pattern) {
    let expression = null;
    try {
      expression = pattern ? new RegExp(pattern, "i") : null;
      field.classList.remove("wrong");
    } catch (error) {
      field.classList.add("wrong");
    }
    let value = 0, countedUntil = 0;
    frames.forEach((frame, index) => {
      const hit = expression !== null && expression.test(frame.name);
      frame.element.classList.toggle("hit", hit);
      if (hit && index >= countedUntil) {
        value += frame.value;
        countedUntil = frame.end;
      }
    });
    const percent = frames[0].value ? 100 * value / frames[0].value : 0;
    matched.textContent = expression ? "Matched: " + percent.toFixed(2) + "% of all" :
      pattern ? "Not a regular expression" : "";
    showInfo(hovered);
  }

  function makeField() {
    const holder = document.createElementNS(svg.namespaceURI, "foreignObject");
    holder.setAttribute("class", "find");
    holder.setAttribute("width", FIND_WIDTH);
    holder.setAttribute("height", FIND_HEIGHT);
    const input = document.createElementNS("http://www.w3.org/1999/xhtml", "input");
    input.setAttribute("placeholder", "regular expression");
    input.setAttribute("aria-label", "Search frames");
    input.addEventListener("input", () => search(input.value));
    holder.append(input);
    svg.append(holder);
    return input;
  }

  function openSearch() {
    svg.classList.add("searching");
    followScroll();
    field.focus();
    field.select();
  }

  function reset() {
    svg.classList.remove("searching");
    field.value = "";
    search("");
    zoom(0);
  }

  // The line at the bottom and the search field stay in sight when the graph is taller than the window.
  function followScroll() {
    const y = Math.max(0, Math.min(height - BAR, window.scrollY + window.innerHeight - BAR));
    bar.setAttribute("transform", "translate(0," + y + ")");
    field.parentNode.setAttribute("x", plotWidth + MARGIN - FIND_WIDTH);
    field.parentNode.setAttribute("y", Math.max(plotTop - FIND_HEIGHT - 3, window.scrollY + 3));
  }

  function fitWindow() {
    plotWidth = Math.max(400, svg.clientWidth || window.innerWidth) - 2 * MARGIN;
    plot.setAttribute("width", plotWidth);
    frames.forEach((frame) => {
      if (!frame.element.classList.contains("gone")) drawLabel(frame);
    });
    followScroll();
    showInfo(hovered);
  }

  function frameAt(event) {
    const element = event.target.closest(".frame");
    return element ? indexOf.get(element) : -1;
  }

  plot.addEventListener("click", (event) => { if (frameAt(event) >= 0) zoom(frameAt(event)); });
  plot.addEventListener("mouseover", (event) => { if (frameAt(event) >= 0) showInfo(frameAt(event)); });
  plot.addEventListener("mouseleave", () => showInfo(top));
  for (const [selector, action] of [[".reset", () => zoom(0)], [".search", openSearch]]) {
    find(selector).addEventListener("click", action);
    find(selector).addEventListener("keydown", (event) => { if (event.key === "Enter") action(); });
  }
  window.addEventListener("keydown", (event) => {
    if (event.key === "Escape") reset();
    // A second Ctrl-F, with our field in use, is left to the browser.
    if ((event.ctrlKey || event.metaKey) && event.key === "f" && document.activeElement !== field) {
      event.preventDefault();
      openSearch();
    }
  });
  window.addEventListener("resize", fitWindow);
  window.addEventListener("scroll", followScroll);

  svg.removeAttribute("viewBox");
  svg.setAttribute("width", "100%");
  info.textContent = "0".repeat(50);
  character = info.getComputedTextLength() / 50 || character;
  layOut();
  frames.forEach((frame) => {
    frame.left = parseFloat(frame.rect.getAttribute("x")) / 100;
    frame.share = parseFloat(frame.rect.getAttribute("width")) / 100;
  });
  fitWindow();
})();
"""
