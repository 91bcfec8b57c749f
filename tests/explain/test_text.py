"""Reports in the terminal: what stands where, in how many columns, and without any colour."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from tests.explain.ladder import report_of
from tests.explain.support import floats
from tilewise import guide
from tilewise.explain import claims, explain, text
from tilewise.explain.report import Report, Verdict

MISTAKES = (
    "s02_first_barrier_dropped",
    "s03_second_barrier_dropped",
    "s04_tile_transposed",
    "s05_pitch_17",
    "s06_and_for_or",
    "s07_x_is_the_row",
    "s08_early_return",
)


@pytest.fixture(scope="module")
def guide_report() -> Report:
    matrix = floats(64, 64)
    return explain(guide.Muld, (4, 4), (16, 16), matrix, matrix, 64, 64, matrix)


def shown(report: Report, *, width: int = text.WIDTH, verbose: bool = False) -> str:
    return text.to_text(text.render(report, verbose=verbose), width=width)


@pytest.mark.parametrize("step", MISTAKES)
@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("verbose", [False, True])
def test_a_report_fits(step: str, width: int, verbose: bool) -> None:
    lines = shown(report_of(step), width=width, verbose=verbose).splitlines()
    assert max(map(len, lines)) <= width
    assert not any(line != line.rstrip() for line in lines)


def test_a_clean_report_is_short_and_says_so(guide_report: Report) -> None:
    said = shown(guide_report)
    assert len(said.splitlines()) <= 40
    assert "✔ CLEAN" in said
    assert "WRONG" not in said


@pytest.mark.parametrize(
    ("step", "lines"),
    [("s02_first_barrier_dropped", (31, 34)), ("s03_second_barrier_dropped", (34, 30))],
)
def test_the_first_screen_of_a_wrong_kernel_has_verdict_witness_and_remedy(
    step: str, lines: tuple[int, int]
) -> None:
    report = report_of(step)
    screen = "\n".join(shown(report).splitlines()[:24])
    assert "✘ WRONG" in screen
    first, second = lines
    assert re.search(rf"{first} ▸ .*1\. thread", screen)
    assert re.search(rf"{second} ▸ .*2\. thread", screen)
    assert "cuda.syncthreads()" in screen.partition("→ fix")[2]


def test_sections_come_in_the_order_of_reading(guide_report: Report) -> None:
    said = shown(report_of("s08_early_return"), verbose=True)
    titles = ("Verdicts", "Also found", "What limits it", "Memory", "Arrays", "Under ncu's names")
    titles += ("Source", "Wasted", "Limits")
    places = [said.index(f"\n{title}\n") for title in titles]
    assert places == sorted(places)


def test_source_in_brackets_is_printed_as_it_stands(guide_report: Report) -> None:
    """Rich takes [row, col] for its markup unless it is told that this is text."""
    said = shown(guide_report, verbose=True)
    for site in guide_report.sites:
        assert f"{site.op:5} {site.text}" in said
    assert "C[row, col] = Csub" in said


def test_no_colour_where_there_is_no_terminal_and_the_same_words_where_there_is() -> None:
    rendered = text.render(report_of("s02_first_barrier_dropped"))
    plain = text.to_text(rendered)
    assert "\x1b" not in plain
    console = Console(file=io.StringIO(), width=text.WIDTH, force_terminal=True)
    console.print(rendered)
    coloured = console.file.getvalue()
    assert "\x1b" in coloured
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in bare.splitlines()] == plain.splitlines()


def test_numbers_are_those_of_the_report(guide_report: Report) -> None:
    said = shown(guide_report)
    for site in guide_report.sites:
        row = next(
            line
            for line in said.splitlines()
            if line.strip().startswith(f"{site.line}  ") and f"{site.op:5} {site.text}" in line
        )
        figures = row.partition(site.text)[2].split()
        assert figures[:3] == [f"{n:,}" for n in (site.requests, site.cost, site.ideal)]


def test_a_strip_shows_the_words_that_each_bank_is_asked_for() -> None:
    report = report_of("s04_tile_transposed")
    said = shown(report)
    (banks,) = (b for b in report.bank_maps if b.wavefronts > b.ideal)
    strip = said.partition(f"Line {banks.line}, {banks.text}")[2].splitlines()
    digits = next(line for line in strip if re.fullmatch(r"\s+[\d·+ ]{35}", line)).replace(" ", "")
    asked = [len({w.word for w in banks.words if w.bank == b}) for b in range(32)]
    assert digits == "".join(str(n) if n else "·" for n in asked)
    assert max(asked) == 8


def test_a_strip_shows_which_bytes_of_a_sector_are_wanted() -> None:
    report = report_of("s07_x_is_the_row")
    (sectors,) = (s for s in report.sector_maps if s.op == "store")
    said = shown(report).partition(f"Line {sectors.line}, {sectors.text}")[2]
    strip = next(line for line in said.splitlines() if re.fullmatch(r"\s+[█░ ]+", line)).split()
    assert len(strip) == 8  # of sixteen, each with two neighbouring floats of the 32
    assert len(sectors.sectors) == 16
    for drawn, sector in zip(strip, sectors.sectors, strict=False):
        ((first, end),) = sector.used
        assert end - first == 8
        assert drawn == "░" * (first // 4) + "██" + "░" * (8 - end // 4)


@pytest.mark.parametrize("outcome", ["PROVED", "HOLDS", "REFUTED", "NOT CHECKED"])
def test_every_outcome_is_a_word_and_a_mark(guide_report: Report, outcome: str) -> None:
    verdict = Verdict(claim="water is wet", outcome=outcome, detail="a witness", scope="here")
    said = shown(dataclasses.replace(guide_report, verdicts=(verdict,)))
    mark = {"PROVED": "✔", "HOLDS": "✔", "REFUTED": "✘", "NOT CHECKED": "?"}[outcome]
    assert f"{mark} {outcome}  water is wet" in said
    assert ("A witness." in said) == (outcome in ("REFUTED", "NOT CHECKED"))


@pytest.mark.parametrize(
    ("outcome", "word", "code"), [("REFUTED", "✘ REFUTED", 1), ("NOT CHECKED", "? NOT CHECKED", 2)]
)
def test_the_headline_agrees_with_the_exit_code(
    guide_report: Report, outcome: str, word: str, code: int
) -> None:
    decisive = Verdict(claim="water is wet", outcome=outcome)
    report = dataclasses.replace(guide_report, verdicts=(*guide_report.verdicts, decisive))
    assert report.exit_code == code
    assert f"\n{word}  1 of 5 claims" in shown(report)
    aside = dataclasses.replace(decisive, decides_exit=False)
    report = dataclasses.replace(guide_report, verdicts=(aside,))
    assert report.exit_code == 0
    assert "\n✔ CLEAN" in shown(report)


def test_what_was_not_checked_is_said_last(guide_report: Report) -> None:
    report = dataclasses.replace(guide_report, not_checked=("the moon's far side",))
    assert shown(report).rstrip().endswith("· The moon's far side.")


def test_side_by_side_marks_the_best_and_fits() -> None:
    steps = ("s00_naive", "s01_guide", "s05_pitch_17", "s04_tile_transposed")
    reports = [report_of(step) for step in steps]
    for width in (80, 100):
        said = text.to_text(text.side_by_side(reports), width=width)
        assert max(map(len, said.splitlines())) <= width
    row = next(line for line in said.splitlines() if line.startswith("shared wavefronts"))
    cells = re.split(r"\s{2,}", row.strip())[1:]
    assert cells[0] == "–"
    wavefronts = [
        sum(site.cost for site in report.sites if site.space == "shared") for report in reports[1:]
    ]
    assert [int(re.sub(r"\D", "", cell)) for cell in cells[1:]] == wavefronts
    assert [("◂" in cell) for cell in cells[1:]] == [w == min(wavefronts) for w in wavefronts]


def test_the_chapters_claims_are_all_listed(guide_report: Report) -> None:
    matrix = floats(64, 64)
    report = explain(
        guide.Muld, (4, 4), (16, 16), matrix, matrix, 64, 64, matrix, claims=claims.guide
    )
    flat = " ".join(shown(report).split())
    assert report.exit_code == 0
    for verdict in report.verdicts:
        assert f"{verdict.outcome} {verdict.claim}" in flat


def test_nothing_is_written_beside_what_is_returned(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    shown(report_of("s01_guide"))
    assert capsys.readouterr() == ("", "")
