"""The command ``tilewise explain``: how launches are written, exit codes, bad input in a line."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from tests.explain.ladder import path_of
from tilewise import cli
from tilewise.errors import TilewiseError
from tilewise.explain.command import explain_command
from tilewise.explain.report import SCHEMA

_KERNELS = """
import numpy as np
from numba import cuda, float32

@cuda.jit
def scale(x, a, n):
    i = cuda.grid(1)
    if i < n:
        x[i] = x[i] * a

@cuda.jit
def reverse(x, y):
    s = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    s[t] = x[t]
    y[t] = s[63 - t]

@cuda.jit
def gather(x, at, y):
    i = cuda.grid(1)
    y[i] = x[at[i]]

@cuda.jit
def whatever(x):
    x[cuda.grid(1)] = [1 for i in x]

@cuda.jit
def for_ever(x, n):
    while n < 1:
        x[0] = 2

def helper(*values):
    return 1

LIMIT = 12
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with kernels.py."""
    (tmp_path / "kernels.py").write_text(_KERNELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def line_of(text: str) -> int:
    """The line of kernels.py with this text."""
    lines = _KERNELS.splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def run(*argv: str) -> int:
    """Run the command as the command line does, and return its exit code."""
    app = typer.Typer(add_completion=False)
    app.command()(explain_command)
    code: int = app(list(argv), standalone_mode=False)
    return code


def refusal(*argv: str) -> str:
    with pytest.raises(TilewiseError) as caught:
        run(*argv)
    said = str(caught.value)
    assert "\n" not in said
    return said


Printed = Callable[..., tuple[int, str]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Run the command; its exit code and what it prints."""

    def call(*argv: str) -> tuple[int, str]:
        capsys.readouterr()
        code = run(*argv)
        return code, capsys.readouterr().out

    return call


def test_the_guides_kernel_is_proven(printed: Printed) -> None:
    code, said = printed("guide")
    assert code == 0
    assert said.startswith("Muld   grid 4×4, block 16×16, sm_90\n")
    assert "A is read wB / block_size times" in said
    assert max(map(len, said.splitlines())) <= 100
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("argv", "grid", "arguments"),
    [
        (["guide:naive"], [4, 4, 1], ["A: float32 64×64", "wA = 64"]),
        (["guide", "--size", "32"], [2, 2, 1], ["A: float32 32×32", "B: float32 32×32"]),
        (["guide:Muld_any", "--size", "17x33x50"], [4, 2, 1], ["A: float32 17×33", "wB = 50"]),
        (["guide:naive", "--size", "16", "--grid", "2,1"], [2, 1, 1], ["wA = 16"]),
    ],
)
def test_the_guides_kernels_take_sizes(
    printed: Printed, argv: list[str], grid: list[int], arguments: list[str]
) -> None:
    _, said = printed(*argv, "--json")
    report = json.loads(said)
    assert report["grid"] == grid
    assert set(arguments) <= set(report["arguments"])


def test_a_users_file_needs_no_numba(kernels: Path, printed: Printed) -> None:
    code, said = printed(
        "kernels.py:scale", "--grid", "4", "--block", "128", "--args", "float32[512] 2.0 512"
    )
    assert code == 0
    assert "x: float32 512, a = 2.0, n = 512" in said


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        ("float32[512] 2.0 512", ["x: float32 512", "a = 2.0", "n = 512"]),
        ("float32[512], 2.0, 512", ["x: float32 512", "a = 2.0", "n = 512"]),
        ("n=512 x=float32[512] a=-1e-3", ["x: float32 512", "a = -0.001", "n = 512"]),
        ("float32[512] n=512 float32(2.5)", ["x: float32 512", "a = 2.5", "n = 512"]),
        ("float64[ 512 ] 2 int32(512)", ["x: float64 512", "a = 2", "n = 512"]),
        ("data.npy 2.0 512", ["x: float32 512", "a = 2.0", "n = 512"]),
    ],
)
def test_arguments_can_be_written_so(
    kernels: Path, printed: Printed, args: str, shown: list[str]
) -> None:
    np.save("data.npy", np.ones(512, np.float32))
    launch = ("--grid", "4x1", "--block", "128,1")
    code, said = printed("kernels.py:scale", *launch, "--args", args, "--json")
    assert code == 0
    assert json.loads(said)["arguments"] == shown


def test_an_array_from_a_file_decides_where_the_kernel_goes(
    kernels: Path, printed: Printed
) -> None:
    """Its values are addresses: in range in one file, beyond the end in the other."""
    launch = ("kernels.py:gather", "--grid", "1", "--block", "32")
    np.save("near.npy", np.arange(32))
    np.save("far.npy", np.arange(32) * 32)
    code, said = printed(*launch, "--args", "float32[32] near.npy float32[32]")
    assert code == 0
    assert "on these data" in " ".join(said.split())
    code, said = printed(*launch, "--args", "float32[32] far.npy float32[32]")
    assert code == 1
    assert "x[32]" in said


def test_a_hazard_gives_exit_code_1_and_its_lines(kernels: Path, printed: Printed) -> None:
    launch = ("--grid", "1", "--block", "64", "--args", "float32[64] float32[64]")
    code, said = printed("kernels.py:reverse", *launch)
    assert code == 1
    assert "✘ WRONG  threads race on s (read-after-write)" in said
    store, load = line_of("s[t] ="), line_of("y[t] =")
    assert f"Put cuda.syncthreads() between line {store} and line {load}." in said


@pytest.mark.parametrize(
    ("claims", "code", "outcome"),
    [
        ("conflict_free('As')", 0, "PROVED"),
        ("conflict_free(array='As', op='load'); race_free", 0, "PROVED"),
        ("reads('A', 4)", 0, "PROVED"),
        ("reads('A', 5)", 1, "REFUTED"),
        ("default", 0, "PROVED"),
    ],
)
def test_claims_decide_the_exit_code(
    printed: Printed, claims: str, code: int, outcome: str
) -> None:
    got, said = printed("guide", "--claims", claims)
    assert got == code
    assert outcome in said


def test_several_claims_add_up(printed: Printed) -> None:
    _, said = printed("guide", "--claims", "race_free", "--claims", "in_bounds()", "--json")
    assert len(json.loads(said)["verdicts"]) == 2


def test_another_target_can_be_named_as_a_compute_capability(printed: Printed) -> None:
    for target in ("sm_13", "cc13", "cc1.3"):
        _, said = printed("guide", "--target", target)
        assert "sm_13" in said.splitlines()[0]
        assert "transactions" in said


def test_registers_enter_the_occupancy(printed: Printed) -> None:
    _, said = printed("guide", "--registers", "200", "--json")
    assert json.loads(said)["occupancy"]["limited_by"] == ["registers"]


def test_json_is_the_reports_schema(printed: Printed) -> None:
    code, said = printed("guide", "--json")
    report = json.loads(said)
    assert report["schema"] == SCHEMA
    assert report["exit_code"] == code == 0
    _, said = printed("guide:naive", "guide", "--compare", "--json")
    assert [each["kernel"] for each in json.loads(said)["reports"]] == ["naive", "Muld"]


def test_a_page_that_cannot_be_written_whole_leaves_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("what was there")
    limited = (
        "import resource, sys, tilewise.cli as cli;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000));"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, "explain", "guide", "--html", str(page)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{page} cannot be written: File too large" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert page.read_text() == "what was there"


def test_html_is_written_and_the_text_still_printed(
    kernels: Path, printed: Printed, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = printed("guide", "--html", "report.html")
    assert code == 0
    assert "CLEAN" in said
    page = Path("report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "<h1>Muld</h1>" in page
    printed("guide:naive", "guide", "--compare", "--html", "both.html")
    assert "<h1>Side by side</h1>" in Path("both.html").read_text(encoding="utf-8")


def test_compare_lays_kernels_side_by_side(printed: Printed) -> None:
    steps = [str(path_of(step)) for step in ("s00_naive", "s05_pitch_17")]
    code, said = printed("guide", *steps, "--size", "64", "--compare")
    assert code == 0
    head = next(line for line in said.splitlines() if "Muld" in line)
    assert head.split() == ["Muld", "naive", "padded"]
    code, said = printed("guide", "--compare")
    assert "naive" in said
    assert "Muld_any" in said


def test_the_worst_of_several_decides(printed: Printed) -> None:
    wrong = str(path_of("s02_first_barrier_dropped"))
    code, said = printed("guide", wrong, "--size", "64")
    assert code == 1
    assert said.count("What limits it") == 2


def test_one_thread_can_be_followed(printed: Printed) -> None:
    _, said = printed("guide", "--thread", "2,3:5,1")
    assert "C row 49, column 37" in said


def test_what_ncu_measured_is_laid_beside(kernels: Path, printed: Printed) -> None:
    name = "smsp__inst_executed_op_shared_ld.sum"
    Path("report.csv").write_text(
        f'"ID","Kernel Name","Block Size","Grid Size","{name}"\n'
        '"","","","","inst"\n'
        '"0","Muld(float*)","(16, 16, 1)","(4, 4, 1)","10,240"\n'
    )
    code, said = printed("guide", "--ncu", "report.csv")
    assert code == 0
    assert re.search(rf"{name} +10,240 +10,240 +equal", said)
    _, said = printed("guide", "--ncu", "report.csv", "--json")
    assert json.loads(said)["ncu"]["level"] == "compiled"


@pytest.mark.parametrize("kernel", ["scale", "gather", "add", "count", "fill", "chained"])
def test_the_launch_that_is_suggested_is_one(kernels: Path, printed: Printed, kernel: str) -> None:
    (kernels / "more.py").write_text(
        _KERNELS
        + """
@cuda.jit
def add(a, b, c, m, n):
    i, j = cuda.grid(2)
    if i < m and j < n:
        c[i, j] = a[i, j] + b[j]

@cuda.jit
def count(x, found):
    i = cuda.threadIdx.x + cuda.blockIdx.x * cuda.blockDim.x
    if i < x.size:
        cuda.atomic.add(found, 0, x[i])

@cuda.jit
def fill(x, value):
    i, j, k = cuda.threadIdx.x, cuda.threadIdx.y, cuda.threadIdx.z
    x[k, j, i] = value

@cuda.jit
def chained(x):
    x[cuda.blockIdx.x][cuda.threadIdx.x] = 1
"""
    )
    said = refusal(f"more.py:{kernel}")
    options = shlex.split(said.partition("for example ")[2])
    code, text = printed(f"more.py:{kernel}", *options)
    assert "grid" in text
    assert code in (0, 1)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nothing.py:f"], "nothing.py cannot be read: No such file"),
        (["nothing"], "'nothing' names no kernel; give guide, module:function or file.py:function"),
        (["no_such_module:f"], "there is no module 'no_such_module' to import"),
        (["guide:Mul"], "the guide has no kernel 'Mul'; it has Muld, Muld_any, naive"),
        (["kernels.py"], "which function? its kernels are scale, reverse, gather, whatever"),
        (["kernels.py:nothing"], "has no function 'nothing'; its kernels are scale, reverse"),
        (["kernels.py:LIMIT"], "kernels.py:LIMIT is a int, and not a kernel"),
        (["kernels.py:helper", "--grid", "1", "--block", "1", "--args", ""], "plain positional"),
        (["kernels.py:scale"], "--grid, --block and --args must be given to launch"),
        (["kernels.py:scale"], '--args "x=float32[512] a=512 n=512"'),
        (["kernels.py:scale", "--size", "64"], "--size is for kernels with the guide's parameters"),
        (["guide", "--size", "64x64"], "must be hAxwAxwB"),
        (["guide", "--size", "large"], "--size 'large' must be one to three numbers"),
        (["guide", "--size", "64", "--args", "1"], "--size and --args both say"),
        (["guide", "--size", "0"], "a matrix has a row and a column at least"),
        (["guide", "--target", "sm_99"], "target 'sm_99' is not known; known are sm_10"),
        (["guide", "--claims", "conflict_free('Zs')"], "no array 'Zs'; its arrays are A, B, C"),
        (["guide", "--claims", "shiny()"], "there is no claim 'shiny'; there are barrier_needed"),
        (["guide", "--claims", "conflict_free()"], "missing 1 required positional argument"),
        (["guide", "--claims", "1 +"], "'1 +' is not a claim"),
        (["guide", "--claims", "reads('A', open('x'))"], "malformed node"),
        (["guide", "--compare", "--grid"], "requires an argument"),
        (["guide:naive", "--compare"], "--compare takes two kernels or more"),
        (["guide", "--thread", "1"], "must be BLOCK:THREAD"),
        (["guide", "--thread", "9,9:0,0"], "is not in this launch"),
        (["guide", "--ncu", "kernels.py"], "kernels.py is not a table of ncu's"),
        (["guide", "--html", "no/such/folder.html"], "cannot be written: No such file"),
    ],
)
def test_bad_input_is_one_line(kernels: Path, argv: list[str], said: str) -> None:
    if argv[-1] == "--grid":
        with pytest.raises(Exception, match=said):
            run(*argv)
        return
    assert said in refusal(*argv)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("float32[512] 2.0", "takes 3 arguments, got 2"),
        ("float32[512] 2.0 512 7", "takes 3 arguments, got 4"),
        ("float32[512] b=2.0 512", "has no parameter 'b'; it has x, a, n"),
        ("float32[512] a=2.0", "got 1 by place and 1 by name"),
        ("float32[512] two 512", "'two' is not an argument; give float32[64,64]"),
        ("flot32[512] 2.0 512", "there is no type 'flot32'"),
        ("float32[512] float32(x) 512", "'float32(x)' is not an argument"),
        ("nothing.npy 2.0 512", "nothing.npy cannot be read as an array"),
        ("kernels.npy 2.0 512", "kernels.npy cannot be read as an array"),
        ("complex64[512] 2.0 512", "complex64"),
        ("'text' 2.0 512", "is not an argument"),
    ],
)
def test_bad_arguments_are_one_line(kernels: Path, args: str, said: str) -> None:
    Path("kernels.npy").write_text("not an array")
    launch = ("--grid", "4", "--block", "128", "--args", args)
    assert said in refusal("kernels.py:scale", *launch)


def test_what_is_outside_the_dialect_is_named_with_its_line(kernels: Path) -> None:
    launch = ("--grid", "1", "--block", "32", "--args", "float32[32]")
    said = refusal("kernels.py:whatever", *launch)
    assert said.startswith(f"{kernels / 'kernels.py'}:{line_of('[1 for')}: in whatever")


def test_a_kernel_that_does_not_end_is_stopped(kernels: Path) -> None:
    launch = ("--grid", "1", "--block", "32", "--args", "float32[32] 0", "--max-steps", "50")
    said = refusal("kernels.py:for_ever", *launch)
    assert said.startswith(f"{kernels / 'kernels.py'}:{line_of('while n')}: ")
    assert "50 iterations" in said


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["guide:naive"], 0),
        ([str(path_of("s02_first_barrier_dropped")), "--size", "64"], 1),
        (["guide", "--size", "40", "--claims", "coalesced('D')"], 2),
        (["guide:Mul"], 2),
        (["guide", "--no-such-option"], 2),
    ],
)
def test_the_command_line_has_the_verb(
    argv: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *argv]) == code
    said = capsys.readouterr()
    assert bool(said.out) == (code != 2)
    assert said.err.count("\n") == (code == 2)


def test_importing_the_command_is_cheap() -> None:
    """The command line imports it at every start, whatever verb is called."""
    code = (
        "import sys, typer, tilewise.errors; before = set(sys.modules);"
        "import tilewise.explain.command; new = set(sys.modules) - before;"
        "print(sorted(m for m in new if not m.startswith('tilewise')))"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy: Any = [m for m in ("numba", "rich.table", "triton", "cuda") if m in got.stdout]
    assert not heavy
