"""plan: pure, printable, callable, and true about what it will hold."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import small_integers
from tilewise.errors import DTypeError, ShapeError


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(9)


def shape_only(*shape: int, dtype: str = "float32") -> Any:
    return SimpleNamespace(shape=shape, dtype=np.dtype(dtype))


def test_planning_reads_no_data_and_needs_none() -> None:
    plan = tw.plan(shape_only(10**6, 10**6), shape_only(10**6, 10**6))
    assert (plan.m, plan.n, plan.k) == (10**6,) * 3
    assert plan.held_bytes == 4 * 10**12
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.m = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "int8", "bool", "complex128", "longdouble"]
)
def test_plan_prints_for_people_and_goes_to_json(dtype: str) -> None:
    plan = tw.plan(shape_only(4096, 512, dtype=dtype), shape_only(512, 33, dtype=dtype))
    text = str(plan)
    for word in ("product", "runs on", "method", "memory", "moves", "error", "bits", "why"):
        assert f"\n{word} " in f"\n{text}", word
    assert plan.method in text
    assert json.loads(json.dumps(plan.to_dict()))["method"] == plan.method
    assert plan.why


def test_a_plan_tells_of_a_rounding_where_there_is_one() -> None:
    wide, narrow = shape_only(4, 5, dtype="float64"), shape_only(5, 6)
    assert not any("rounding" in why for why in tw.plan(wide, narrow).why)
    assert "one rounding to float32" in tw.plan(wide, narrow, dtype="float32").why[-1]


def test_a_called_plan_gives_matmuls_result(rng: Any) -> None:
    for dtype in ("float32", "float16", "int32"):
        a, b = small_integers(rng, (40, 30), dtype), small_integers(rng, (30, 20), dtype)
        plan = tw.plan(a, b)
        out = np.empty((40, 20), dtype)
        assert np.array_equal(plan(a, b), tw.matmul(a, b))
        assert plan(a, b, out=out) is out
        assert np.array_equal(out, tw.matmul(a, b))


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "bool"])
def test_integers_that_are_used_seldom_are_left_to_numpys_loop(rng: Any, dtype: str) -> None:
    x = rng.integers(0, 100, (3000, 400)).astype(dtype)
    for a, b in (
        (x.reshape(-1), x.reshape(-1)),
        (x, x[0]),
        (x[::-2], x[0, ::-1]),
        (x[:, :1], x[:1]),
        (x.reshape(-1, 3, 4), x.reshape(-1, 4, 3)),
    ):
        plan = tw.plan(a, b)
        result_bytes = np.matmul(a, b).nbytes
        assert (plan.method, plan.held_bytes) == ("numpy", result_bytes)
        out = np.zeros((2, *plan.shape), dtype).T[..., 0].T
        peaks = []
        for _ in range(3):  # threads of who runs the tests take memory too, now and then
            tracemalloc.start()
            tw.matmul(a, b, out=out)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert min(peaks) < 64 << 10
        assert np.array_equal(out, np.matmul(a, b))
    for a, b in ((x[:, 0], x), (x, x[:400])):  # far apart in memory; used often
        assert tw.plan(a, b).method == ("or-and" if dtype == "bool" else "limbs")
    swapped = x.astype(x.dtype.newbyteorder())
    if x.itemsize > 1:  # what would be copied whole
        assert tw.plan(swapped, x[0]).method == "limbs"
    if dtype != "int64":
        assert tw.plan(x, x[0], dtype="int64").method == "limbs"


@pytest.mark.parametrize("dtype", ["uint8", "int64", "bool"])
def test_integers_are_not_cut_to_shreds_where_a_budget_leaves_next_to_nothing(
    rng: Any, dtype: str
) -> None:
    a = rng.integers(0, 2, (2, 60, 470)).astype(dtype)
    b = rng.integers(0, 2, (2, 470, 50)).astype(dtype)
    c = np.matmul(a, b)
    for more in (0, 150, 5000):
        plan = tw.plan(a, b, memory=c.nbytes + more)
        assert (plan.method, plan.held_bytes) == ("numpy", c.nbytes)
        assert np.array_equal(plan(a, b), c)
    assert tw.plan(a, b, memory=c.nbytes + 10**6).method != "numpy"
    with pytest.raises(tw.errors.BudgetError):  # panels are converted
        tw.plan(a, b.astype("u1" if dtype == "bool" else bool), memory=c.nbytes)


@pytest.mark.parametrize(
    ("dtype", "method"),
    [("float16", "panels"), ("int16", "limbs"), ("bool", "or-and"), ("int64", "limbs")],
)
def test_what_is_held_is_what_was_planned(rng: Any, dtype: str, method: str) -> None:
    low, high = (-(2**62), 2**62) if dtype == "int64" else (0, 2)
    a = rng.integers(low, high, (900, 1100)).astype(dtype)
    b = rng.integers(low, high, (1100, 700)).astype(dtype)
    swapped = a[:, :3].astype(a.dtype.newbyteorder())  # which NumPy's own loop would copy
    thin = [(None, swapped, b[:3])] * (dtype != "bool")
    for memory, a, b in [*((each, a, b) for each in (None, "8MiB", "20MiB")), *thin]:
        plan = tw.plan(a, b, memory=memory)
        assert plan.method == method
        plan(a, b)
        tracemalloc.start()
        plan(a, b)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= plan.held_bytes + (64 << 10)


def test_verify_is_part_of_the_plan(rng: Any, monkeypatch: Any) -> None:
    a = rng.standard_normal((50, 60)).astype(np.float32)
    plan = tw.plan(a, a.T, verify=True)
    assert "verify" in str(plan)
    out = np.full((50, 50), 7, np.float32)
    assert np.array_equal(tw.matmul(a, a.T, out=out, verify=True), np.matmul(a, a.T))
    out[...] = 7

    def wrong(*args: Any) -> Any:
        result = np.matmul(a, a.T)
        result[3, 4] += 1
        return result

    monkeypatch.setattr("tilewise._cpu.OnCpu.multiply", wrong)
    with pytest.raises(tw.TilewiseError, match=r"verify=True.*3"):
        tw.matmul(a, a.T, out=out, verify=True)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("out", "error", "said"),
    [
        (np.empty((9, 9), "f4"), ShapeError, r"out \(shape \(9, 9\).*result's shape \(4, 6\)"),
        (np.empty((4, 6), "f8"), DTypeError, "result's dtype float32"),
        (np.broadcast_to(np.float32(0), (4, 6)), DTypeError, "read-only"),
        ([[0.0] * 6] * 4, DTypeError, "cannot be written in place"),
        (shape_only(6, 4), ShapeError, r"result's shape \(4, 6\)"),
    ],
)
def test_an_out_that_matmul_refuses_has_no_plan(out: Any, error: Any, said: str) -> None:
    a, b = np.ones((4, 5), "f4"), np.ones((5, 6), "f4")
    with pytest.raises(error, match=said):
        tw.plan(a, b, out=out)
    assert tw.plan(a, b, out=shape_only(4, 6)).held_bytes == 0
    assert tw.plan(a, b, out=np.empty((4, 6), "f4")).held_bytes == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "said"),
    [
        ((3, -4), "f4", ShapeError, r"a has shape \(3, -4\); a size cannot be negative"),
        (3, "f4", DTypeError, "a .* has shape 3 .* do not describe an array"),
        ((3, float("nan")), "f4", DTypeError, "do not describe an array"),
        ((3, 4.5), "f4", DTypeError, "do not describe an array"),
        ((3, 4), "nope", DTypeError, "dtype 'nope'"),
    ],
)
def test_what_does_not_describe_an_array_has_no_plan(
    shape: Any, dtype: str, error: Any, said: str
) -> None:
    with pytest.raises(error, match=said):
        tw.plan(SimpleNamespace(shape=shape, dtype=dtype), np.ones((4, 2), "f4"))


@pytest.mark.parametrize("strides", [(8,), ("a", "b"), 8])
def test_strides_that_are_none_describe_no_array(strides: Any) -> None:
    with pytest.raises(DTypeError, match="do not describe an array"):
        tw.plan(SimpleNamespace(shape=(2, 2), dtype="f8", strides=strides), np.ones((2, 2)))


def test_what_a_description_calls_where_is_nobodys_place() -> None:
    described = SimpleNamespace(shape=(2, 2), dtype="f8", where=lambda condition: None)
    assert tw.plan(described, np.ones((2, 2))).device == "cpu"


def test_the_budget_decides_and_the_refusal_has_the_numbers() -> None:
    a = shape_only(1000, 1000, dtype="float16")
    assert tw.plan(a, a, memory="4MiB").held_bytes <= 4 << 20
    with pytest.raises(MemoryError, match=r"takes 1.91 MiB.*allows 1.00 MiB.*np.memmap"):
        tw.plan(a, a, memory="1MiB")
    assert tw.plan(a, a, memory="1MiB", out=np.empty((1000, 1000), "f2")).held_bytes <= 1 << 20


def test_a_result_that_is_checked_before_it_goes_into_out_is_held() -> None:
    a, out = shape_only(1000, 1000, dtype="float32"), np.empty((1000, 1000), np.float32)
    assert tw.plan(a, a, out=out).held_bytes == 0
    checked = tw.plan(a, a, out=out, verify=True)
    assert checked.held_bytes == 4_000_000 + checked.verify_bytes
    with pytest.raises(tw.TilewiseError, match="do without verify="):
        tw.plan(a, a, out=out, verify=True, memory="1MB")


def test_a_refused_budget_names_no_way_out_that_was_taken() -> None:
    a, out = shape_only(300, 300, dtype="float16"), np.empty((300, 300), np.float16)
    with pytest.raises(tw.TilewiseError, match="is computed with at least 24 B") as caught:
        tw.plan(a, a, out=out, memory=10)
    assert "out=" not in str(caught.value)


def test_percentages_are_of_this_machine() -> None:
    a = shape_only(4, 4)
    assert tw.plan(a, a, memory="50%").held_bytes == 64
    with pytest.raises(MemoryError):
        tw.plan(a, a, memory="0%")
