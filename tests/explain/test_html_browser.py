"""The HTML report in a real browser: no script error, by mouse and keyboard, light, dark, narrow.

Set TILEWISE_SCREENSHOTS to a folder to keep the pictures and look at them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.explain.browser import CHROMIUM, Browser, browser
from tests.explain.ladder import report_of
from tilewise.explain import html

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium to open pages in")

STEPS = ("s01_guide", "s02_first_barrier_dropped", "s04_tile_transposed", "s07_x_is_the_row")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    contents = {step: html.page(report_of(step)) for step in STEPS}
    contents["compare"] = html.page([report_of(step) for step in STEPS])
    frame = html.notebook(report_of("s01_guide"))
    contents["notebook"] = (
        f"<!doctype html><meta name=viewport content='width=device-width'>{frame}"
    )
    for name, content in contents.items():
        (folder / f"{name}.html").write_text(content, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in contents}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def tab(running: Browser) -> Iterator[Browser]:
    """The browser; at the end nothing may have gone wrong, and nothing been fetched."""
    yield running
    assert running.errors == []
    outside = [
        url for url in running.requests if not url.startswith(("file://", "about:", "data:"))
    ]
    assert outside == []


def background(tab: Browser) -> int:
    """How light the page is, from 0 to 255."""
    colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    red, green, blue = (int(n) for n in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return (red + green + blue) // 3


@pytest.mark.parametrize("name", [*STEPS, "compare", "notebook"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_a_page_opens_and_does_not_scroll_sideways(
    tab: Browser, pages: dict[str, Path], tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    tab.open(pages[name], width=width, dark=dark)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    if name != "notebook":
        assert (background(tab) < 60) == dark
        assert (background(tab) > 200) != dark
    folder = Path(os.environ.get("TILEWISE_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    shot = tab.screenshot(folder / f"{name}-{width}{'-dark' if dark else ''}.png")
    assert shot.read_bytes().startswith(b"\x89PNG")


def test_the_theme_can_be_switched(tab: Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["s01_guide"])
    assert tab.evaluate("document.getElementById('theme').textContent") == "Dark"
    tab.click("#theme")
    assert background(tab) < 60
    assert tab.evaluate("document.getElementById('theme').textContent") == "Light"
    tab.click("#theme")
    assert background(tab) > 200


def test_the_first_stop_skips_to_the_verdict(tab: Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["s02_first_barrier_dropped"])
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    box = tab.evaluate("document.activeElement.getBoundingClientRect().left")
    assert box >= 0  # to be seen once it has the focus
    tab.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "main"


def test_everything_is_reached_by_keyboard_and_seen_to_be(
    tab: Browser, pages: dict[str, Path]
) -> None:
    tab.open(pages["s04_tile_transposed"], width=390)
    seen = set()
    for _ in range(200):
        tab.press("Tab")
        what, outline = tab.evaluate(_FOCUSED)
        if what == "BODY":
            break
        assert outline not in ("none", "rgba(0, 0, 0, 0)"), what
        seen.add(what)
    assert {"A", "BUTTON", "SUMMARY", "scroll", "row"} <= seen


def test_arrow_keys_go_from_lane_to_lane_and_say_what_it_does(
    tab: Browser, pages: dict[str, Path]
) -> None:
    tab.open(pages["s04_tile_transposed"])
    tab.evaluate("document.querySelector('svg.rows .row').focus()")
    readout = "document.activeElement.closest('figure').querySelector('.readout').textContent"
    assert tab.evaluate(readout).startswith("Lane 0, thread ")
    tab.press("ArrowDown")
    assert tab.evaluate(readout).startswith("Lane 1, thread ")
    tab.press("End")
    assert tab.evaluate(readout).startswith("Lane 31, thread ")
    tab.press("ArrowDown")
    assert tab.evaluate(readout).startswith("Lane 31, thread ")
    tab.press("Home")
    tab.press("ArrowUp")
    assert tab.evaluate(readout).startswith("Lane 0, thread ")
    # One stop a picture: the next one is outside of it.
    tab.press("Tab")
    assert not tab.evaluate("document.activeElement.matches('.row')")


def test_a_lane_under_the_pointer_is_read_out(tab: Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["s04_tile_transposed"])
    tab.hover("svg.rows .row:nth-of-type(9)")
    said = tab.evaluate(
        "document.querySelector('svg.rows').closest('figure').querySelector('.readout').textContent"
    )
    assert said.startswith("Lane ")


def test_pictures_fold_by_click_and_by_key(tab: Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["s01_guide"])
    is_open = "document.querySelector('#picture-2').open"
    before = tab.evaluate(is_open)
    tab.click("#picture-2 > summary")
    assert tab.evaluate(is_open) != before
    tab.evaluate("document.querySelector('#picture-2 > summary').focus()")
    tab.press("Enter")
    assert tab.evaluate(is_open) == before


def test_a_link_to_something_folded_unfolds_it(tab: Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["compare"])
    assert not tab.evaluate("document.querySelector('#kernel-1').open")
    tab.click('header a[href="#kernel-1"]')
    assert tab.evaluate(
        "new Promise(r => setTimeout(() => r(document.querySelector('#kernel-1').open), 50))"
    )


def test_the_witness_links_to_its_line(tab: Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["s02_first_barrier_dropped"])
    tab.click(".verdict .excerpt a")
    assert tab.evaluate("document.querySelector(':target th').textContent") == "31"


def test_wide_pictures_scroll_in_a_box_of_their_own(tab: Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["s04_tile_transposed"], width=390)
    wide = tab.evaluate(
        "[...document.querySelectorAll('.scroll')]"
        ".filter(b => b.checkVisibility() && b.scrollWidth > b.clientWidth)"
        ".map(b => [b.tabIndex, b.getAttribute('role'), b.getAttribute('aria-label')])"
    )
    assert wide
    assert all(index == 0 and role == "region" and label for index, role, label in wide)


def test_on_paper_everything_but_doubles_is_open(tab: Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["s01_guide"])
    folded = "document.querySelectorAll('details:not([open], .picture details)').length"
    before = tab.evaluate(folded)
    assert before > 0
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate(folded) == 0
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.evaluate(folded) == before
    assert tab.pdf().startswith(b"%PDF")


def test_text_stands_out_from_what_is_behind_it(tab: Browser, pages: dict[str, Path]) -> None:
    """Contrast of 4.5 to 1 at least, in both themes, as WCAG AA asks of small text."""
    for dark in (False, True):
        tab.open(pages["s02_first_barrier_dropped"], dark=dark)
        poor = tab.evaluate(_CONTRAST)
        assert poor == [], f"dark={dark}"


# What has the focus, and how that is shown: by an outline, or by the border of a row.
_FOCUSED = """(() => {
  const e = document.activeElement;
  if (e.matches(".row")) return ["row", getComputedStyle(e.querySelector(".hit")).stroke];
  const what = e.matches(".scroll") ? "scroll" : e.tagName;
  return [what, getComputedStyle(e).outlineStyle];
})()"""

_CONTRAST = """(() => {
  const known = {};
  const rgba = (text) => known[text] ??= (() => {
    const c = document.createElement("canvas").getContext("2d");
    c.fillStyle = text; c.fillRect(0, 0, 1, 1);
    return [...c.getImageData(0, 0, 1, 1).data];
  })();
  const luminance = ([r, g, b]) => {
    const f = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgba(getComputedStyle(e).backgroundColor);
      if (c[3] === 255) return c;
    }
    return [255, 255, 255, 255];
  };
  const poor = [];
  for (const e of document.querySelectorAll("main p, main td, main th, main dt, main dd, main em," +
      "main small, main b, main code, main summary, main caption, .badge, header a")) {
    if (!e.textContent.trim() || !e.getClientRects().length) continue;
    const [a, b] = [luminance(rgba(getComputedStyle(e).color)), luminance(behind(e))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) poor.push([e.tagName, e.className, e.textContent.slice(0, 30), contrast]);
  }
  return poor;
})()"""
