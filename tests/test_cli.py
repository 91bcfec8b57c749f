"""The command line: what it prints, how it exits, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tilewise import __version__
from tilewise.cli import main

A = np.arange(12.0).reshape(3, 4)
B = np.arange(20.0).reshape(4, 5)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with two matrices that go together."""
    monkeypatch.chdir(tmp_path)
    np.save("A.npy", A)
    np.save("B.npy", B)
    return tmp_path


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tilewise", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_mul_writes_the_product_and_says_so(folder: Path, capsys: Any) -> None:
    assert main(["mul", "A.npy", "B.npy", "-o", "C.npy"]) == 0
    assert np.array_equal(np.load("C.npy"), A @ B)
    out, err = capsys.readouterr()
    assert re.fullmatch(r"C\.npy: \(3, 5\) float64, 120 B, in \d+\.\d s \(.* GFLOP/s\)\n", out)
    assert not err  # no progress where there is no terminal
    assert names(folder) == ["A.npy", "B.npy", "C.npy"]


def test_mul_quietly_or_as_json(folder: Path, capsys: Any) -> None:
    assert main(["mul", "A.npy", "B.npy", "-o", "C.npy", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["mul", "A.npy", "B.npy", "-o", "C.npy", "--json", "--verify"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["out"] == "C.npy"
    assert facts["verified"]
    assert facts["plan"]["result"] == {"shape": [3, 5], "dtype": "float64"}
    assert facts["plan"]["schedule"]["written_bytes"] == 120


def test_mul_of_raw_bfloat16_tells_how_to_read_the_result(folder: Path, capsys: Any) -> None:
    x = np.ones((4, 4), ml_dtypes.bfloat16)
    np.save("X.npy", x)
    assert main(["mul", "X.npy", "X.npy", "-o", "C.npy"]) == 2
    assert "as in X.npy:bfloat16" in capsys.readouterr().err
    assert main(["mul", "X.npy:bfloat16", "X.npy:bfloat16", "-o", "C.npy"]) == 0
    hint = capsys.readouterr().out.splitlines()[1]
    assert hint == ("NumPy reads it as raw bytes: np.load('C.npy').view(ml_dtypes.bfloat16)")
    assert np.array_equal(np.load("C.npy").view(ml_dtypes.bfloat16), x @ x)


def test_plan_of_files_and_of_shapes(folder: Path, capsys: Any) -> None:
    assert main(["plan", "A.npy", "B.npy"]) == 0
    out = capsys.readouterr().out
    assert "A.npy (3, 4) float64 @ B.npy (4, 5) float64 -> (3, 5) float64" in out
    assert "A.npy once, B.npy once" in out
    assert re.search(r"\ntime .* just now, and the [\d.]+ [KMG]iB/s of these files\n", out)
    assert re.search(r"\nlimit +(the disk|arithmetic): it would take", out)
    assert main(["plan", "3x4:int8", "4x5:int8", "--dtype", "int32", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["a"]["dtype"] == "int8"
    assert plan["result"] == {"shape": [3, 5], "dtype": "int32"}
    assert plan["expected"]["seconds"] > 0
    assert main(["plan", "7", "7x5", "--dtype", "complex64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"] == {"shape": [5], "dtype": "complex64"}
    assert names(folder) == ["A.npy", "B.npy"]


@pytest.mark.parametrize("shapes", [("0x5", "5x0"), ("0x5", "5x3"), ("0x4x5:int64", "5x6:int64")])
def test_a_plan_for_a_result_without_elements_has_the_lines_of_others(
    shapes: tuple[str, str], capsys: Any
) -> None:
    said = []
    for a, b in (("3x4", "4x5"), shapes):
        assert main(["plan", a, b]) == 0
        said.append([line.split()[0] for line in capsys.readouterr().out.splitlines()])
    assert main(["plan", *shapes, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert said[1] == [word for word in said[0] if word not in ("time", "limit")]
    assert plan["held_bytes"] == plan["moved_bytes"] == 0


def test_what_is_neither_a_file_nor_a_shape_is_told_how_shapes_are_written(capsys: Any) -> None:
    assert main(["plan", "64,64", "64x64"]) == 2
    assert "a (64,64) does not exist; a shape is written as 4096x4096" in capsys.readouterr().err
    assert main(["plan", "X.npy", "64x64"]) == 2
    assert capsys.readouterr().err.strip().endswith("does not exist")


@pytest.mark.parametrize(
    ("side", "is_whole"),
    [(16, True), (1000, True), (6000, False), (20_000, False), (80_000, False)],
)
def test_D12_a_plan_tells_where_everything_is(side: int, is_whole: bool, capsys: Any) -> None:
    """Five sizes, from tiny to a hundred times the budget."""
    shape = f"{side}x{side}"
    assert main(["plan", shape, shape, "--memory", "1GiB"]) == 0
    out = capsys.readouterr().out
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if line[0] != " ")
    assert lines["product"].count("file") == 2
    assert ("in memory" in lines["tiles"]) == is_whole
    assert "of 1.00 GiB" in lines["memory"]
    assert re.search(r"\d [KMGT]?i?B: a (once|\d+ times), b (once|\d+ times)", lines["reads"])
    assert re.search(r"\d [KMGT]?i?B", lines["writes"])
    assert re.search(r"about [\d.]+ (s|minutes|hours|days), at", lines["time"])
    assert re.search(r"arithmetic, if the disk moves [\d.]+ [KMG]?i?B in a second", lines["limit"])
    assert lines["error"].startswith("|C")
    assert lines["bits"]


def test_check_proves_or_finds_what_is_wrong(folder: Path, capsys: Any) -> None:
    c = A @ B
    np.save("C.npy", c)
    assert main(["check", "A.npy", "B.npy", "C.npy"]) == 0
    assert capsys.readouterr().out.startswith("right")
    c[1, 2] += 1
    np.save("C.npy", c)
    assert main(["check", "A.npy", "B.npy", "C.npy"]) == 1
    assert capsys.readouterr().out.startswith("WRONG at row 1, column 2")
    assert main(["check", "A.npy", "B.npy", "C.npy", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["where"]["rows"] == [[1, 2]]
    assert main(["check", "A.npy", "B.npy", "A.npy"]) == 2
    capsys.readouterr()
    assert main(["check", "A.npy", "B.npy", "C.npy", "--memory", "1MiB"]) == 1
    assert main(["check", "A.npy", "B.npy", "C.npy", "--memory", "1KiB"]) == 2
    assert "takes at least" in capsys.readouterr().err


def test_info_has_what_a_bug_report_needs(capsys: Any) -> None:
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for name in ("tilewise", "python", "numpy", "blas", "threads", "system", "memory", "devices"):
        assert f"\n{name} " in f"\n{out}"
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tilewise"] == __version__
    assert facts["numpy"] == np.__version__
    assert facts["devices"][0] == "cpu"


def test_help_is_there_and_quick(folder: Path) -> None:
    before = os.times().children_user
    done = run("--help")
    assert os.times().children_user - before < 1  # 0.35 s on a machine that does nothing else
    assert done.returncode == 0
    for verb in ("mul", "plan", "check", "info", "demo"):
        assert f" {verb} " in done.stdout
    assert run().stdout == done.stdout
    assert run("--version").stdout == f"tilewise {__version__}\n"
    assert "tilewise mul A.npy B.npy -o C.npy" in run("mul", "--help").stdout


def test_help_is_wrapped_at_the_width_of_the_terminal_alone(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    for verb, said in (
        ("mul", "or not at all; a run that was stopped goes on when the same command is given"),
        (
            "plan",
            "nothing is multiplied. A shape stands for a file of float32, or of the type that",
        ),
        ("explain", "or a claim asked for is refuted; 2: could not."),
    ):
        assert main([verb, "--help"]) == 0
        out = capsys.readouterr().out
        assert said in out
        assert len([line for line in out.splitlines() if line.startswith(f" tilewise {verb} ")]) > 2


def truncated(folder: Path) -> None:
    os.truncate("A.npy", 200)


def text(folder: Path) -> None:
    Path("A.npy").write_text("1 2 3")


def pickled(folder: Path) -> None:
    np.save("A.npy", np.array([[None]]), allow_pickle=True)


def missing(folder: Path) -> None:
    Path("A.npy").unlink()


def a_folder(folder: Path) -> None:
    missing(folder)
    Path("A.npy").mkdir()


def transposed(folder: Path) -> None:
    np.save("A.npy", A.T)


def words(folder: Path) -> None:
    np.save("A.npy", np.array([["a"]]))


def nothing(folder: Path) -> None:
    """Leave the operands as they are."""


def a_folder_as_part(folder: Path) -> None:
    Path("C.npy.part").mkdir()


def a_file_as_part_of_a_folder(folder: Path) -> None:
    Path("C.zarr.part").touch()
    Path("C.zarr.journal").touch()


def a_folder_as_known_part(folder: Path) -> None:
    a_folder_as_part(folder)
    Path("C.npy.journal").touch()


@pytest.mark.parametrize(
    ("spoil", "arguments", "message"),
    [
        (missing, [], r"a \(A\.npy\) does not exist"),
        (a_folder, [], r"a \(A\.npy\) is a directory, and no Zarr array"),
        (truncated, [], r"a \(A\.npy\) is truncated: \(3, 4\) float64 takes 96 bytes after a .*"),
        (text, [], r"a \(A\.npy\) is not a \.npy file \(it begins with b'1 2 3'\); write .*"),
        (pickled, [], r"a \(A\.npy\) holds pickled Python objects, which are never loaded; .*"),
        (
            transposed,
            [],
            r"A\.npy \(shape \(4, 3\), .*\) and B\.npy .*: axis 1 of A\.npy has 3 elements and .*",
        ),
        (
            a_folder_as_part,
            [],
            r"out \(C\.npy\) would be .*\.part, which is there .*; move it away",
        ),
        (
            a_file_as_part_of_a_folder,
            ["-o", "C.zarr"],
            r"out \(C\.zarr\) would be written as .*; move it away",
        ),
        (a_folder_as_known_part, [], r"out \(C\.npy\) would be written as .*; move it away"),
        (words, [], r"a \(A\.npy\) has dtype <U1, which cannot be multiplied: .*"),
        (nothing, ["--memory", "nan"], r"memory='nan' is not a budget; give bytes, or text .*"),
        (nothing, ["--memory", "3 apples"], r"memory='3 apples' is not a budget; .*"),
        (nothing, ["--memory=-1"], r"memory='-1' is less than nothing; give bytes, or text .*"),
        (nothing, ["--memory", "101%"], r"memory='101%' is more than there is: at most '100%'"),
        (nothing, ["--memory", "9e99GB"], r"memory='9e99GB' is more than any machine has; .*"),
        (nothing, ["--memory", "0"], r"the smallest tiles of .*, and memory= allows 0 B; .*"),
        (nothing, ["--dtype", "int8"], r"float64 @ float64 is float64, which does not become .*"),
        (nothing, ["--dtype", "number"], r"dtype='number' is not an element type: .*"),
        (nothing, ["--dtype", "5%"], r"dtype='5%' is not an element type: .*"),
        (nothing, ["--dtype", "f4,(2"], r"dtype='f4,\(2' is not an element type: .*"),
        (nothing, ["-o", 250 * "c" + ".npy"], r"out \(c+\.npy\) cannot be created: File name .*"),
        (nothing, ["--devices", "cuda:0"], r"device 'cuda:0' was asked for, and .*"),
        (nothing, ["--devices", "foo"], r"device 'foo' is not 'cpu', 'cuda:0', 'cuda:1' and .*"),
        (nothing, ["--precision", "half"], r"precision='half' is not one of .*"),
        (nothing, ["--verify=perhaps"], r"Option '--verify' does not take a value\. .*"),
        (nothing, ["--fast"], r"No such option: --fast \(tilewise mul --help\)"),
        (nothing, ["-o", "A.npy"], r"out \(A\.npy\) is the same file as a \(A\.npy\); inputs .*"),
        (nothing, ["-o", "none/C.npy"], r"out \(none/C\.npy\) cannot be created: .* directory"),
        (nothing, ["-o", "."], r"out \(\.\) is a directory; name a file in it, such as C\.npy"),
        (
            nothing,
            ["-o", "C.csv"],
            r"out \(C\.csv\) has no known ending; end its name in \.npy, .*",
        ),
        (nothing, ["-o", "C.npy:a"], r"out \(C\.npy:a\): 'a' is not a type that .*"),
        (nothing, ["-o", "C.npy:int32"], r"out \(C\.npy:int32\): .*int32' is not a type that .*"),
        (nothing, ["-o", "/proc/C.npy"], r"out \(/proc/C\.npy\) cannot be created: .*"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    folder: Path, capsys: Any, spoil: Any, arguments: list[str], message: str
) -> None:
    spoil(folder)
    before = {path.name: path.is_file() and path.read_bytes() for path in folder.iterdir()}
    assert main(["mul", "A.npy", "B.npy", "-o", "C.npy", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.fullmatch(f"tilewise: {message}\n", err), err
    assert {path.name: path.is_file() and path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mul"], "Missing argument 'A.npy'"),
        (["mul", "A.npy", "B.npy"], "Missing option '--out'"),
        (["multiply"], "No such command 'multiply'"),
        (["plan", "4x5", "4x5"], "do not go together"),
        (
            ["plan", "A.npy", "A.npy"],
            r"A\.npy \(shape \(3, 4\), dtype float64\) and A\.npy .* do not go together",
        ),
        (["plan", "4x5:float99", "5x4"], "float99"),
        (["plan", "4x", "5x4"], r"a \(4x\) does not exist"),
        (["plan", "A.npy:foo", "B.npy"], r"'foo' is not a type that files keep as raw bytes"),
        (["plan", "A.npy:/x", "B.npy"], r"A\.npy is not HDF5 or Zarr, and holds no /x"),
        (["check", "A.npy", "B.npy", "C.npy"], r"c \(C\.npy\) does not exist"),
        (
            ["check", "A.npy", "B.npy", "B.npy"],
            r"the shape of a @ b, \(3, 5\) \(a is A\.npy, b is B",
        ),
        (["check", "A.npy", "B.npy", "B.npy", "--rounds", "0"], "rounds"),
    ],
)
def test_other_bad_input_is_one_line_too(
    folder: Path, capsys: Any, arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.search(message, err), err
    assert err.startswith("tilewise: ")
    assert err.count("\n") == 1


def test_an_old_code_page_changes_no_exit_code(folder: Path) -> None:
    np.save("C.npy", A @ B)
    page = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    for arguments in (["check", "A.npy", "B.npy", "C.npy"], ["plan", "A.npy", "B.npy"]):
        done = run(*arguments, env=page, encoding="cp1252")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout
    for arguments in (["plan", "A.npy", "B.npy", "--json"], ["explain", "guide", "--json"]):
        done = run(*arguments, env=page, encoding="cp1252")
        assert any(mark in str(json.loads(done.stdout)) for mark in "≤×")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell's redirection")
@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_closed_stream_changes_no_exit_code(folder: Path, closed: str) -> None:
    for command in ("explain guide", "info", "mul A.npy B.npy -o C.npy"):
        line = f'exec "$0" -m tilewise {command} {closed}'
        done = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
    assert np.array_equal(np.load("C.npy"), A @ B)


def test_a_full_disk_is_one_line(folder: Path) -> None:
    np.save("X.npy", np.ones((600, 600)))
    limited = (
        "import resource, sys, tilewise.cli as cli;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, "mul", "X.npy", "X.npy", "-o", "C.npy"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert re.fullmatch(r"tilewise: out \(.*\) needs 2\.75 MiB and .* free: .*\n", done.stderr)
    assert names(folder) == ["A.npy", "B.npy", "X.npy"]


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (
            signal.SIGINT,
            130,
            r"tilewise: interrupted; \d+ finished tiles? of \d+ stay in .*C\.npy\.part; .*",
        ),
        (signal.SIGTERM, 143, ""),
    ],
)
def test_an_interrupt_keeps_what_is_finished(
    folder: Path, number: int, code: int, message: str
) -> None:
    x = np.random.default_rng(2).integers(-2, 3, (1500, 1500)).astype(float)
    np.save("X.npy", x)
    Path("C.npy").write_bytes(b"what was there")
    command = "tilewise mul X.npy X.npy -o C.npy --memory 8MiB"
    process = subprocess.Popen(
        [sys.executable, "-m", *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    journal = Path("C.npy.journal")
    while not (journal.exists() and b"done" in journal.read_bytes()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert re.fullmatch(message, err.strip()), err
    assert names(folder) == ["A.npy", "B.npy", "C.npy", "C.npy.journal", "C.npy.part", "X.npy"]
    assert Path("C.npy").read_bytes() == b"what was there"
    done = run(*command.split()[1:])
    assert done.returncode == 0
    assert re.search(r"GFLOP/s\), \d+% of it in an earlier run$", done.stdout.strip())
    assert np.array_equal(np.load("C.npy"), x @ x)
    assert names(folder) == ["A.npy", "B.npy", "C.npy", "X.npy"]


@pytest.mark.skipif(sys.platform == "win32", reason="no such pipes")
@pytest.mark.parametrize(
    "command",
    [
        "--help", "--version", "info", "plan 9x9 9x9", "plan 9x9 9x9 --json", "explain guide",
        "explain guide --json", "explain --help", "check A.npy B.npy B.npy",
        "mul A.npy B.npy -o C.npy",
    ],
)  # fmt: skip
def test_a_reader_that_has_left_ends_it_quietly(folder: Path, command: str) -> None:
    np.save("B.npy", np.eye(4))
    np.save("A.npy", np.eye(4) * 2)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "tilewise", *command.split()],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_reader_of_the_first_line_gets_it(folder: Path) -> None:
    command = f"{sys.executable} -m tilewise explain guide | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.stdout.split()[0], done.stderr) == ("Muld", "")


def test_output_that_cannot_be_written_is_one_line(folder: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tilewise", "plan", "A.npy", "B.npy"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot be written: No space left" in done.stderr
