"""Case group E on host arrays: full precision by default, and the same bits for the same plan."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import within_bound


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_E1_float32_keeps_all_its_bits(rng: Any) -> None:
    one = np.ones((1, 1), np.float32)
    assert tw.matmul(np.array([1024.5], np.float32), one)[0] == 1024.5
    numbers = np.arange(46 * 46, dtype=np.float32).reshape(46, 46)
    assert np.array_equal(tw.matmul(np.eye(46, dtype=np.float32), numbers), numbers)
    a = (50 * rng.random((1_000_000, 4))).astype(np.float32)
    b = (50 * rng.random((4, 4))).astype(np.float32)
    assert within_bound(tw.matmul(a, b), a, b)


def test_E2_each_call_follows_its_own_precision(rng: Any, monkeypatch: Any) -> None:
    a = rng.standard_normal((200, 300)).astype(np.float32)
    expected = np.matmul(a, a.T)
    wrong = []

    def work(precision: str | None) -> None:
        for _ in range(20):
            plan = tw.plan(a, a.T, precision=precision)
            if plan.precision != precision or not within_bound(plan(a, a.T), a, a.T):
                wrong.append(precision)

    for override in ("0", "1"):
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
        for precision in (None, "ieee", "tf32", None):
            got = tw.matmul(a, a.T, precision=precision)
            assert np.array_equal(got, expected)  # the CPU never gives less
    threads = [threading.Thread(target=work, args=(p,)) for p in (None, "ieee", "tf32", None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert "full bound" in str(tw.plan(a, a.T, precision="tf32"))


def test_E3_a_product_and_its_transpose_agree_within_the_bound(rng: Any) -> None:
    a = (1e10 * rng.standard_normal((1500, 6))).astype(np.float32)
    b = (1e10 * rng.standard_normal((1500, 1500))).astype(np.float32)
    one, other = tw.matmul(a.T, b), tw.matmul(b.T, a).T
    assert within_bound(one, a.T, b)
    assert within_bound(other, a.T, b)


def test_E4_float32_error_is_float32s_own(rng: Any) -> None:
    a = rng.standard_normal((512, 512)).astype(np.float32)
    b = rng.standard_normal((512, 512)).astype(np.float32)
    exact = a.astype(float) @ b.astype(float)
    assert np.linalg.norm(tw.matmul(a, b) - exact) <= 1e-6 * np.linalg.norm(exact)


def test_E6_float16_partial_sums_do_not_overflow(rng: Any) -> None:
    ones = np.ones((3, 4096), np.float16)
    b = np.repeat(np.array([64, -64], np.float16), 2048)[:, np.newaxis]
    assert not tw.matmul(ones, b).any()
    a = rng.uniform(-4, 4, (20, 4096)).astype(np.float16)
    b = rng.uniform(-4, 4, (4096, 2048)).astype(np.float16)
    got = tw.matmul(a, b)
    assert np.isfinite(got).all()
    assert within_bound(got, a, b, out_unit=2.0**-11)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(700, 700, 700), (64, 64, 4096), pytest.param(4096, 4096, 4096, marks=pytest.mark.slow)],
)
def test_E9_one_plan_has_one_set_of_bits(rng: Any, m: int, n: int, k: int) -> None:
    for dtype in (np.float32, np.float16, np.int64):
        a = (100 * rng.standard_normal((m, k))).astype(dtype)
        b = (100 * rng.standard_normal((k, n))).astype(dtype)
        digests = {hashlib.sha256(tw.matmul(a, b).tobytes()).hexdigest() for _ in range(12)}
        assert len(digests) == 1


def test_E9_processes_agree() -> None:
    program = """
import hashlib, numpy as np, tilewise as tw
a = np.random.default_rng(5).standard_normal((300, 500)).astype(np.float32)
half = a.astype(np.float16)
print(hashlib.sha256(tw.matmul(a, a.T).tobytes() + tw.matmul(half, half.T).tobytes()).hexdigest())
"""
    run = [sys.executable, "-c", program]
    digests = {subprocess.run(run, capture_output=True, check=True).stdout for _ in range(3)}
    assert len(digests) == 1


def test_E13_float64_survives_a_wide_range(rng: Any) -> None:
    a, b = np.array([[1e200, 1e-200]]), np.array([[1e-200], [1e200]])
    assert tw.matmul(a, b)[0, 0] == 2.0
    rows = rng.standard_normal((20, 30)) * 10.0 ** rng.uniform(-150, 150, (20, 1))
    columns = rng.standard_normal((30, 10))
    got = tw.matmul(rows, columns)
    for i in range(20):
        for j in range(10):
            terms = [Fraction(x) * Fraction(y) for x, y in zip(rows[i], columns[:, j], strict=True)]
            allowed = 32 * Fraction(2) ** -53 * sum(abs(t) for t in terms)
            assert abs(Fraction(got[i, j]) - sum(terms)) <= allowed
    whole = rng.integers(-(2**21), 2**21, (40, 512)).astype(float)
    exact = np.matmul(whole.astype(np.int64), whole.T.astype(np.int64))
    assert np.array_equal(tw.matmul(whole, whole.T), exact)
    bad = np.ones((3, 4))
    bad[0, 1], bad[2, 0] = np.inf, np.nan
    got = tw.matmul(bad, np.ones((4, 2)))
    assert (got[0] == np.inf).all()
    assert (got[1] == 4).all()
    assert np.isnan(got[2]).all()


def test_E13_less_is_given_only_by_name_and_only_where_it_means_something() -> None:
    ones = np.ones((2, 2))
    assert "fp64-int8" in str(tw.plan(ones, ones, precision="fp64-int8"))
    with pytest.raises(tw.TilewiseError, match="for float64"):
        tw.plan(ones.astype("f4"), ones.astype("f4"), precision="fp64-int8")


def test_E16_complex64_is_not_reduced(rng: Any) -> None:
    a = (rng.standard_normal((256, 256)) + 1j * rng.standard_normal((256, 256))).astype("F")
    assert within_bound(tw.matmul(a, a), a, a)
    one = np.array([[1024.5 + 2049j]], "F")
    assert tw.matmul(one, np.ones((1, 1), "F"))[0, 0] == 1024.5 + 2049j


def test_E17_spellings_of_one_product_agree_within_the_bound_the_plan_states(rng: Any) -> None:
    # Equal bits for every spelling are promised on a GPU; on the CPU the plan says "this plan".
    a = rng.standard_normal((64, 8, 64)).astype(np.float16)
    b = rng.standard_normal((64, 64, 8)).astype(np.float16)
    batched = tw.matmul(a, b, dtype=np.float32)
    one_by_one = np.stack([tw.matmul(x, y, dtype=np.float32) for x, y in zip(a, b, strict=True)])
    assert tw.plan(a, b).bits.startswith("this plan")
    assert within_bound(batched, a, b)
    assert within_bound(one_by_one, a, b)
    integers = rng.integers(-(2**40), 2**40, (6, 8, 64))
    whole = tw.matmul(integers, integers.swapaxes(1, 2))
    assert tw.plan(integers, integers.swapaxes(1, 2)).bits.startswith("exact")
    for i, x in enumerate(integers):
        assert np.array_equal(tw.matmul(x, x.T), whole[i])


def test_E18_the_plan_states_the_scope_of_its_bits() -> None:
    for dtype, words in (("float32", "same BLAS and threads"), ("int8", "every device")):
        ones = np.ones((64, 64), dtype)
        assert words in tw.plan(ones, ones).bits
