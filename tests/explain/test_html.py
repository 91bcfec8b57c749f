"""The HTML report: one file that is whole, asks for nothing outside, draws what was counted."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from functools import lru_cache
from html.parser import HTMLParser

import pytest

from tests.explain.ladder import STEPS, report_of
from tests.explain.support import kernel_from
from tilewise.explain import charts, explain, html, svg
from tilewise.explain.ncu import MeasuredLaunch, beside
from tilewise.explain.report import BankMap, LaneWord, Report, SectorMap, SectorUse

# Elements of HTML and SVG that have no content, and so no end.
_VOID = {"meta", "br", "link", "img", "input", "hr"}
_BLOCK = (16, 16, 1)


class _Tree(HTMLParser):
    """Checks that every element is closed, and keeps what a test asks of them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@lru_cache
def tree_of(step: str) -> _Tree:
    return _Tree(html.page(report_of(step)))


def classes(drawn: str) -> Counter[str]:
    return Counter(re.findall(r'class="([^"]+)"', drawn))


@pytest.mark.parametrize("step", STEPS)
def test_a_page_is_whole(step: str) -> None:
    tree = tree_of(step)
    ids = [attributes["id"] for _, attributes in tree.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for attributes in tree.all("a")]
    assert links
    assert all(link[0] == "#" and link[1:] in ids for link in links)
    references = [
        reference
        for _, attributes in tree.elements
        for reference in re.findall(r"url\(#(\w+)\)", " ".join(map(str, attributes.values())))
    ]
    assert set(references) <= set(ids)


@pytest.mark.parametrize("step", STEPS)
def test_a_page_asks_the_network_for_nothing(step: str) -> None:
    page = html.page(report_of(step))
    assert not re.search(r"https?://|//[\w.]+/|@import|src\s*=", page)
    assert not tree_of(step).all("link")


@pytest.mark.parametrize("step", STEPS)
def test_every_picture_has_a_title_a_sentence_and_a_table(step: str) -> None:
    page = html.page(report_of(step))
    pictures = re.findall(r'<details class="picture.*?</details></details>', page, re.DOTALL)
    assert len(pictures) >= 4
    for picture in pictures:
        assert re.search(r"<summary><b>\S.*?</b>", picture)
        assert re.search(r"<figcaption>\S[^<]+[.!]</figcaption>", picture)
        assert re.search(r'<svg [^>]*aria-label="[^"]{10,}"', picture)
        assert re.search(r"<summary>The same as a table</summary>.*<tbody><tr>", picture, re.DOTALL)


@pytest.mark.parametrize("step", STEPS)
def test_the_verdict_is_a_word_before_anything_else(step: str) -> None:
    report = report_of(step)
    words = [text.strip() for text in tree_of(step).texts if text.strip()]
    words = words[words.index(report.kernel, words.index("Dark")) :]
    expected = "WRONG" if report.exit_code else "CLEAN"
    assert expected in words[:6]


def test_source_is_shown_as_text_and_not_as_markup() -> None:
    kernel = kernel_from(
        "from tilewise.simt import cuda\n"
        "@cuda.jit\n"
        "def a_b(x, n):\n"
        "    i = cuda.grid(1)\n"
        "    if i < n and i > -1:\n"
        "        x[i] = 1\n",
        "a_b",
    )
    report = explain(kernel, 1, 64, ((64,), "float32"), 64)
    odd = dataclasses.replace(
        report,
        arguments=("x: <script>alert(1)</script>",),
        notes=('"><img src=x onerror=alert(1)>',),
        certificate="a & b",
    )
    page = html.page(odd)
    assert "if i &lt; n and i &gt; -1:" in page
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "a &amp; b" in page.casefold()
    _Tree(page)


def _bank_map(words: list[LaneWord], **changed: object) -> BankMap:
    values = {
        "line": 7,
        "text": "As[ty, k]",
        "array": "As",
        "op": "load",
        "width": 4,
        "block": (0, 0, 0),
        "warp": 0,
        "banks": 32,
        "words": tuple(words),
        "inactive": (),
        "wavefronts": 1,
        "ideal": 1,
        "groups": ((0, 31),),
        "sentence": "so it is",
    }
    return BankMap(**(values | changed))


def test_lanes_that_share_a_word_are_drawn_as_free() -> None:
    """Half a warp on one word each: two words are fetched, thirty lanes come along."""
    words = [LaneWord(lane, lane // 16 * 16, lane // 16 * 16, 0, "As") for lane in range(32)]
    drawn = classes(svg.bank_map(_bank_map(words), _BLOCK).svg)
    assert drawn["first"] == 2 + 2  # cells, and the columns below the banks
    assert drawn["same"] == 30
    assert drawn["late"] == 0
    assert drawn["row"] == 32


def test_each_wavefront_of_a_conflict_has_its_number() -> None:
    """Thirty-two words of one bank: thirty-two wavefronts, told apart without colour."""
    words = [LaneWord(lane, 0, 32 * lane, lane, f"x[{lane}]") for lane in range(32)]
    picture = svg.bank_map(_bank_map(words, wavefronts=32), _BLOCK)
    numbers = re.findall(r'class="middle on-(first|late)">(\d+)</text>', picture.svg)
    assert [int(n) for _, n in numbers] == list(range(1, 33))
    assert [kind for kind, _ in numbers] == ["first"] + 31 * ["late"]
    assert picture.shows_a_problem
    assert picture.rows == (("0", "32 from 0 to 992", "0–31", "1–32"),)


def test_lanes_served_apart_are_no_conflict() -> None:
    """A load of 16 bytes goes out in quarters, each of which has a first wavefront of its own."""
    words = [
        LaneWord(lane, (4 * lane + i) % 32, 4 * lane + i, lane // 8, f"x[{4 * lane}]")
        for lane in range(32)
        for i in range(4)
    ]
    groups = ((0, 7), (8, 15), (16, 23), (24, 31))
    drawn = _bank_map(words, width=16, wavefronts=4, ideal=4, groups=groups)
    picture = svg.bank_map(drawn, _BLOCK)
    assert classes(picture.svg)["first"] == 128
    assert classes(picture.svg)["late"] == 0
    assert classes(picture.svg)["border"] == 3
    assert not picture.shows_a_problem


def test_a_row_of_a_bank_map_says_what_its_lane_does() -> None:
    words = [LaneWord(3, 5, 37, 1, "As[2, 5]")]
    drawn = svg.bank_map(_bank_map(words, warp=2, inactive=(4,), wavefronts=2), _BLOCK).svg
    assert (
        'aria-label="Lane 3, thread (3, 4): As[2, 5] is word 37 in bank 5, wavefront 2."' in drawn
    )
    assert 'aria-label="Lane 4, thread (4, 4): takes no part."' in drawn


def _sector_map(sectors: list[SectorUse]) -> SectorMap:
    return SectorMap(
        line=7,
        text="A[row, k]",
        array="A",
        op="load",
        width=4,
        block=(0, 0, 0),
        warp=0,
        sectors=tuple(sectors),
        elements=tuple(f"A[{lane}]" for lane in range(32)),
        sector_bytes=32,
        ideal=1,
        useful_bytes=8,
        moved_bytes=64,
        sentence="so it is",
    )


def test_bytes_moved_in_vain_are_hatched() -> None:
    uses = [SectorUse(0, 1, ((0, 4),), (0,)), SectorUse(64, 1, ((28, 32),), (1,))]
    drawn = svg.sector_map(_sector_map(uses), _BLOCK).svg
    boxes = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"[^>]*class="(\w+)"/>', drawn)
    of = {kind: [(float(x), float(w)) for x, w, k in boxes if k == kind] for _, _, kind in boxes}
    sectors = of["waste"]
    assert [w for _, w in of["first"]] == [w * 4 / 32 for _, w in sectors]
    assert of["first"][0][0] == sectors[0][0]
    assert of["first"][1][0] == sectors[1][0] + sectors[1][1] * 28 / 32
    assert len(of["absent"]) == 2  # the line's other two sectors


@pytest.mark.parametrize("misaligned", [0, 4, 36, 100])
def test_sectors_stand_where_they_are_in_their_line(misaligned: int) -> None:
    """Offsets count from an array's base, which need not begin a line."""
    base = 4096 + misaligned
    addresses = [base // 32 * 32 + 32 * i for i in range(6)]
    uses = [SectorUse(a - base, a // 128, ((0, 32),), (0,)) for a in addresses]
    drawn = svg.sector_map(_sector_map(uses), _BLOCK).svg
    xs = [float(x) for x in re.findall(r'<rect x="([\d.]+)"[^>]*class="waste"', drawn)]
    left = min(xs)
    step = 32 * 3 + 8
    assert [round((x - left) / step) for x in xs] == [a % 128 // 32 for a in addresses]


def test_a_race_is_drawn_from_the_first_access_to_the_second() -> None:
    report = report_of("s02_first_barrier_dropped")
    picture = charts.timeline(report)
    assert picture is not None
    assert picture.shows_a_problem
    assert classes(picture.svg)["race"] == 1
    hits = re.findall(r'class="code strong">(\d+) {2}(\w+) ', picture.svg)
    assert hits == [("31", "writes"), ("34", "reads")]
    assert "no barrier" in picture.svg
    clean = charts.timeline(report_of("s01_guide"))
    assert clean is not None
    assert classes(clean.svg)["race"] == 0
    assert classes(clean.svg)["barrier"] >= 3


def test_a_thread_map_is_the_figure_of_the_product() -> None:
    """B above C, A to the left of it, and the parts that one block reads and writes."""
    picture = charts.thread_map(report_of("s01_guide"))
    assert picture is not None
    number = r'"([\d.]+)"'
    arrays = re.findall(rf'<rect x={number} y={number}[^>]*class="array"', picture.svg)
    names = re.findall(r">(\w) {2}64×64<", picture.svg)
    at = {name: (float(x), float(y)) for name, (x, y) in zip(names, arrays, strict=True)}
    assert at["A"][1] == at["C"][1] > at["B"][1]
    assert at["B"][0] == at["C"][0] > at["A"][0]
    assert "A[0–15, 0–63]" in picture.sentence
    assert "B[0–63, 0–15]" in picture.sentence
    assert classes(picture.svg)["thread0"] == classes(picture.svg)["thread1"] == 128
    assert picture.rows[17] == ("(1, 1)", "0", "17", "C[1, 1]")


def test_bars_are_as_long_as_their_numbers() -> None:
    drawn = charts.bars([("a", 10, "10"), ("b", 40, "40"), ("<c>", 0, "0")], label="x", marked=1)
    lengths = re.findall(r'width="([\d.]+)%" height="14"', drawn)
    assert lengths == ["25.0", "100.0", "0.4"]  # a line even for nothing
    assert "&lt;c&gt;" in drawn
    assert classes(drawn)["bar marked"] == 1


def test_a_roofline_puts_the_kernel_below_its_roofs() -> None:
    report = report_of("s01_guide")
    picture = charts.roofline(report)
    assert picture is not None
    (dot,) = re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', picture.svg)
    flat = re.findall(r'd="M[\d.]+ ([\d.]+)H[\d.]+" class="ceiling', picture.svg)
    assert all(float(y) <= float(dot) for y in flat)  # down is slower
    assert "binds" in picture.svg
    assert charts.roofline(dataclasses.replace(report, roofs=None)) is None


def test_kernels_side_by_side_are_in_one_page() -> None:
    reports = [report_of(step) for step in ("s00_naive", "s01_guide", "s04_tile_transposed")]
    page = html.page(reports)
    tree = _Tree(page)
    ids = [attributes["id"] for _, attributes in tree.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(attributes["href"][1:] in ids for attributes in tree.all("a"))
    assert page.count('<details class="kernel"') == 3
    pair = page.partition('<div class="pair">')[2].partition("</div>\n")[0]
    assert "bank 14 of 32 is asked for 8 different words" in pair


def test_ncus_figures_stand_beside_those_predicted() -> None:
    report = report_of("s01_guide")
    metrics = dict(report.figures[0].metrics)
    launch = MeasuredLaunch("3", f"{report.kernel}(float*)", report.grid, report.block, metrics)
    page = html.page(report, ncu=beside(report, [launch]))
    assert "Measured by ncu" in page
    assert page.count("<td>equal</td>") == len(metrics)


def test_a_notebook_gets_the_page_in_a_frame() -> None:
    report = report_of("s01_guide")
    frame = _Tree(html.notebook(report))
    assert frame.all("iframe")[0]["srcdoc"] == html.page(report)


def test_every_kind_of_report_can_be_drawn() -> None:
    """One axis, no shared memory, no roof, no barrier, the guide's hardware, atomics, 8 bytes."""
    source = (
        "from tilewise.simt import cuda\n"
        "def histogram(x, bins):\n"
        "    i = cuda.grid(1)\n"
        "    if i < x.size:\n"
        "        cuda.atomic.add(bins, x[i] % bins.size, 1)\n"
        "def cube(v):\n"
        "    x, y, z = cuda.grid(3)\n"
        "    v[z, y, x] = 2.0 * v[z, y, x]\n"
    )
    histogram, cube = (kernel_from(source, name) for name in ("histogram", "cube"))
    reports: list[Report] = [
        explain(histogram, 3, 96, ((257,), "int64"), ((16,), "int64")),
        explain(cube, (2, 2, 2), (4, 4, 4), ((8, 8, 8), "float64")),
        explain(cube, (2, 2, 2), (4, 4, 4), ((8, 8, 8), "float64"), target="sm_13"),
        explain(kernel_from(source, "cube"), 1, 1, ((1, 1, 1), "float64")),
    ]
    for report in reports:
        _Tree(html.page(report))
