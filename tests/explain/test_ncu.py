"""Reading what ncu prints, and laying it beside what was predicted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.explain.ladder import report_of
from tilewise.errors import FileError, OptionError
from tilewise.explain import text
from tilewise.explain.ncu import beside, read_ncu
from tilewise.explain.report import Report

_HEAD = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream",'
_LAUNCH = '"Block Size","Grid Size","Device","CC",'
_LOADS = "smsp__inst_executed_op_shared_ld.sum"
_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
_SHARED = "launch__shared_mem_per_block_static"


@pytest.fixture(scope="module")
def report() -> Report:
    return report_of("s01_guide")


def by_metric(
    metrics: dict[str, float], *, kernel: str, number: int = 0, grid: str = "4, 4"
) -> str:
    """The default layout: a row for each metric."""
    return "".join(
        f'"{number}","77","python3","host","{kernel}","1","7","(16, 16, 1)","({grid}, 1)","0",'
        f'"9.0","Command line profiler metrics","{name}","","{value:,}"\n'
        for name, value in metrics.items()
    )


def by_launch(metrics: dict[str, tuple[str, str]], *, kernel: str) -> str:
    """The layout of --page raw: a row for each launch, below one of units."""
    names = "".join(f',"{name}"' for name in metrics)
    units = "".join(f',"{unit}"' for unit, _ in metrics.values())
    values = "".join(f',"{value}"' for _, value in metrics.values())
    return (
        f"{_HEAD}{_LAUNCH}".rstrip(",") + f"{names}\n"
        f'"","","","","","","","","","",""{units}\n'
        f'"0","77","python3","host","{kernel}","1","7","(16, 16, 1)","(4, 4, 1)","0","9.0"'
        f"{values}\n"
    )


def written(folder: Path, content: str) -> Path:
    path = folder / "report.csv"
    path.write_text(content)
    return path


@pytest.mark.parametrize("level", ["source", "compiled"])
def test_the_level_is_told_by_how_many_loads_were_executed(
    report: Report, tmp_path: Path, level: str
) -> None:
    metrics = next(dict(f.metrics) for f in report.figures if f.level == level)
    table = (
        "hello from the program\n==PROF== Connected to process 77\n"
        f'{_HEAD}{_LAUNCH}"Section Name","Metric Name","Metric Unit","Metric Value"\n'
    )
    table += by_metric(metrics, kernel=f"void {report.kernel}<16>(float *, int)")
    compared = beside(report, read_ncu(written(tmp_path, f"{table}==PROF== Disconnected\n")))
    assert compared.level == level
    assert len(compared.rows) == len(metrics)
    assert all(row.difference == "equal" for row in compared.rows)
    assert f"{len(metrics)} of {len(metrics)} metrics equal" in compared.sentence


def test_of_several_launches_the_last_that_fits_is_taken(report: Report, tmp_path: Path) -> None:
    name = report.kernel
    table = f'{_HEAD}{_LAUNCH}"Section Name","Metric Name","Metric Unit","Metric Value"\n'
    table += by_metric({_LOADS: 1}, kernel=f"{name}(float *)", number=0)
    table += by_metric({_LOADS: 2}, kernel=f"{name}(float *)", number=1)
    table += by_metric({_LOADS: 3}, kernel=f"{name}(float *)", number=2, grid="8, 8")
    table += by_metric({_LOADS: 4}, kernel=f"not_{name}(float *)", number=3)
    compared = beside(report, read_ncu(written(tmp_path, table)))
    assert compared.sentence.startswith("launch 1 of ")
    assert compared.rows[0].measured == 2


@pytest.mark.parametrize(
    "kernel",
    ["Muld(Array<float>)", "__main__::Muld[abi:v1](Array)", "_ZN8__main__4MuldB2v1E5Array"],
)
def test_numbas_names_are_recognised(report: Report, tmp_path: Path, kernel: str) -> None:
    named = written(tmp_path, by_launch({_LOADS: ("inst", "16,384")}, kernel=kernel))
    compared = beside(dataclasses.replace(report, kernel="Muld"), read_ncu(named))
    assert compared.rows[0].measured == 16384


def test_raw_pages_have_their_units_in_a_row(report: Report, tmp_path: Path) -> None:
    metrics = {_LOADS: ("inst", "16,384"), _SHARED: ("Kbyte/block", "2.05"), "x.sum": ("", "n/a")}
    (launch,) = read_ncu(written(tmp_path, by_launch(metrics, kernel=report.kernel)))
    assert launch.metrics == {_LOADS: 16384, _SHARED: 2050}
    assert (launch.grid, launch.block) == (report.grid, report.block)


def test_old_versions_do_not_print_the_grid(report: Report, tmp_path: Path) -> None:
    table = f'{_HEAD}"Section Name","Metric Name","Metric Unit","Metric Value"\n'
    table += f'"0","1","p","h","{report.kernel}","1","7","S","{_LOADS}","inst","16384"\n'
    assert beside(report, read_ncu(written(tmp_path, table))).rows[0].measured == 16384


def test_differences_are_of_the_prediction(report: Report, tmp_path: Path) -> None:
    predicted = report.figures[0].metrics
    metrics = {_LOADS: predicted[_LOADS], _WAVEFRONTS: predicted[_WAVEFRONTS] * 1.1}
    table = f'{_HEAD}{_LAUNCH}"Section Name","Metric Name","Metric Unit","Metric Value"\n'
    table += by_metric(metrics, kernel=report.kernel)
    compared = beside(report, read_ncu(written(tmp_path, table)))
    assert [row.difference for row in compared.rows] == ["equal", "+10.00 %"]
    assert "arbitration" in compared.notes[0]
    said = text.to_text(text.against_ncu(compared))
    assert "+10.00 %" in said
    assert max(map(len, said.splitlines())) <= 100


def test_what_is_no_report_of_ncus_is_refused(report: Report, tmp_path: Path) -> None:
    with pytest.raises(FileError, match='no line has a column "Kernel Name"'):
        read_ncu(written(tmp_path, "a,b\n1,2\n"))
    with pytest.raises(FileError, match="has no launch in it"):
        read_ncu(written(tmp_path, f'{_HEAD}"Metric Name","Metric Value"\n'))
    with pytest.raises(FileError, match="No such file"):
        read_ncu(tmp_path / "nothing.csv")
    stranger = read_ncu(written(tmp_path, by_launch({_LOADS: ("", "1")}, kernel="other(int)")))
    with pytest.raises(OptionError, match=r"no launch of \w+ with grid .* it has other"):
        beside(report, stranger)
    useless = read_ncu(written(tmp_path, by_launch({"x.sum": ("", "1")}, kernel=report.kernel)))
    with pytest.raises(OptionError, match="none of the metrics that are predicted; measure with"):
        beside(report, useless)
