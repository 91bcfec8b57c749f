"""Products of dask arrays, against references that are neither dask's nor ours."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tracemalloc
from types import ModuleType
from typing import Any

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from dask.local import get_sync
from dask.task_spec import Task
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.problems import TYPES, exact
from tests.support import exact_integers, small_integers
from tilewise import distributed
from tilewise.errors import BudgetError, DTypeError, OptionError, ShapeError, TilewiseError

BF16 = np.dtype(ml_dtypes.bfloat16)
ONES = da.ones((4, 4), chunks=2)


@pytest.fixture(autouse=True)
def synchronous() -> Any:
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def cut(x: Any, *chunks: Any) -> Any:
    return da.from_array(x, chunks=chunks)


def blocks(c: Any) -> list[Any]:
    """Return the result's chunks as its tasks left them."""
    graph = dict(c.__dask_graph__())
    return [get_sync(graph, (c.name, *at)) for at in np.ndindex(c.numblocks)]


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_type_gives_what_the_whole_gives(rng: Any, dtype: Any) -> None:
    a, b = small_integers(rng, (9, 23), dtype), small_integers(rng, (23, 11), dtype)
    c = tw.matmul(cut(a, (4, 5), (10, 10, 3)), cut(b, (3, 20), (6, 5)))
    expected = exact(a, b).astype(tw.plan(a, b).dtype)
    assert c.chunks == ((4, 5), (6, 5))
    assert c.dtype == c.compute().dtype == expected.dtype
    assert np.array_equal(c.compute(), expected)


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((7,), (7,)),
        ((7,), (7, 5)),
        ((3, 7), (7,)),
        ((7,), (4, 7, 5)),
        ((4, 3, 7), (7,)),
        ((6, 3, 7), (7, 5)),
        ((3, 7), (6, 7, 5)),
        ((4, 1, 3, 7), (6, 7, 5)),
        ((4, 6, 3, 7), (1, 6, 7, 5)),
        ((1, 3, 7), (1, 7, 5)),
        ((3, 0), (0, 5)),
        ((0, 7), (7, 5)),
        ((4, 3, 7), (4, 7, 0)),
        ((0, 3, 7), (1, 7, 5)),
        ((0,), (0,)),
    ],
    ids=str,
)
def test_shapes_are_those_of_numpy(rng: Any, a_shape: Any, b_shape: Any) -> None:
    a, b = small_integers(rng, a_shape, "f8", -9, 9), small_integers(rng, b_shape, "f8", -9, 9)
    expected = np.matmul(a, b)
    for x, y in (
        (da.from_array(a, chunks=2), da.from_array(b, chunks=3)),
        (da.from_array(a, chunks=2), b),
        (a.tolist() if 0 not in a_shape else a, da.from_array(b, chunks=-1)),
    ):
        c = tw.matmul(x, y)
        found = c.compute()
        assert c.shape == found.shape == expected.shape
        assert type(c._meta) is np.ndarray
        assert c._meta.ndim == c.ndim
        assert np.array_equal(found, expected)


def parts(size: int) -> Any:
    """Chunks that add up to a size, some of them empty."""
    ends = st.lists(st.integers(0, size), max_size=4)
    return ends.map(lambda x: tuple(map(int, np.diff([0, *sorted(x), size]))))


@settings(max_examples=60)
@given(st.data())
def test_however_the_operands_are_cut(data: Any) -> None:
    batch, m, n, k = (data.draw(st.integers(0, 4)) for _ in range(4))
    own = [data.draw(st.sampled_from([(), (1,), (batch,)])) for _ in range(2)]
    shapes = (*own[0], m, k), (*own[1], k, n)
    rng = np.random.default_rng(0)
    dtype = data.draw(st.sampled_from(["f4", "i1", "?"]))
    a, b = (small_integers(rng, shape, dtype) for shape in shapes)
    x, y = (da.from_array(z, tuple(data.draw(parts(size)) for size in z.shape)) for z in (a, b))
    c = tw.matmul(x, y)
    assert np.array_equal(c.compute(), np.matmul(a, b))
    assert c.chunks[-2:] == (x.chunks[-2], y.chunks[-1])


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "uint64"])
def test_integers_wrap_as_numpys_do(rng: Any, dtype: str) -> None:
    limits = np.iinfo(dtype)
    a, b = (
        rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        for shape in ((8, 30), (30, 6))
    )
    c = tw.matmul(cut(a, 3, 7), b).compute()
    assert np.array_equal(c, exact_integers(a, b, dtype))
    wide = tw.matmul(cut(a, 3, 7), b, dtype="int64" if limits.min else "uint64").compute()
    assert np.array_equal(wide, exact_integers(a, b, wide.dtype))
    one = tw.matmul(cut(a[0], 7), b[:, 0]).compute()
    assert one == exact_integers(a[:1], b[:, :1], dtype)[0, 0]


def test_a_narrow_result_is_rounded_once() -> None:
    """In float16, 2048 + 1 is 2048: a sum rounded on the way would stay there."""
    row = np.ones(1001)
    row[0] = 2048
    for dtype in (np.float16, BF16):
        x = cut(row.astype(dtype), 10)
        c = tw.matmul(x, np.ones(1001, dtype))
        assert c.dtype == c.compute().dtype == dtype
        assert c.compute() == np.array(3048).astype(dtype)
    c = tw.matmul(cut(row, 10), np.ones(1001), dtype=np.float16)
    assert c.compute() == np.float16(3048)
    wide = tw.matmul(cut(row.astype("f2"), 10), np.ones(1001, "f2"), dtype="f8").compute()
    assert (wide, wide.dtype) == (3048, np.float64)


@pytest.mark.parametrize("piece", [1, 7, 64, 500])
@pytest.mark.parametrize("dtype", ["f4", "f2", "c8", "i8"])
def test_the_bound_for_K_holds_however_K_is_cut(rng: Any, dtype: str, piece: int) -> None:
    shapes = (20, 500), (500, 30)
    if dtype == "i8":
        a, b = (rng.integers(-(2**30), 2**30, shape) for shape in shapes)
    else:
        a, b = (rng.lognormal(0, 3, s) * rng.choice([-1, 1], s) for s in shapes)
        if dtype == "f2":
            a, b = a / 100, b / 100
        if dtype == "c8":
            a = a + 1j * a[::-1]
        a, b = a.astype(dtype), b.astype(dtype)
    result = "f4" if dtype == "i8" else None
    found = tw.matmul(cut(a, 20, piece), b, dtype=result).compute()
    bound = tw.plan(a, b, dtype=result).bound
    assert bound.factor
    for half in ("real", "imag") if dtype == "c8" else ("real",):
        x, y = (np.asarray(z, "c16" if dtype == "c8" else "f8") for z in (a, b))
        goal = getattr(x @ y, half)
        if dtype == "c8" and half == "real":
            size = abs(x.real) @ abs(y.real) + abs(x.imag) @ abs(y.imag)
        elif dtype == "c8":
            size = abs(x.real) @ abs(y.imag) + abs(x.imag) @ abs(y.real)
        else:
            size = abs(x) @ abs(y)
        assert (abs(getattr(found, half).astype("f8") - goal) <= bound.of(size, goal)).all()


def test_pieces_are_added_in_order_so_bits_are_those_of_the_graph(rng: Any) -> None:
    a, b = (rng.standard_normal(shape).astype("f4") for shape in ((64, 400), (400, 48)))
    c = tw.matmul(cut(a, 32, 100), cut(b, 100, 48))
    expected = np.empty((64, 48), "f4")
    for rows in (slice(0, 32), slice(32, 64)):
        total = a[rows, :100] @ b[:100]
        for k in (100, 200, 300):
            total = total + a[rows, k : k + 100] @ b[k : k + 100]
        expected[rows] = total
    for scheduler in ("synchronous", "threads"):
        for _ in range(2):
            assert np.array_equal(c.compute(scheduler=scheduler), expected)
    assert c.name == tw.matmul(cut(a, 32, 100), cut(b, 100, 48)).name
    assert c.name != tw.matmul(cut(a, 32, 100), cut(b, 100, 48), memory="1GiB").name


def test_products_of_different_float8_types_have_names_of_their_own() -> None:
    """NumPy writes them alike (``dtype.str``), and dask computes one of two of the same name."""
    types = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz]
    results = [tw.matmul(ONES, ONES, dtype=dtype) for dtype in types]
    assert len({c.name for c in results}) == len(types)
    for c, dtype in zip(dask.compute(*results), types, strict=True):
        assert c.dtype == dtype
        assert (c == 4).all()


@pytest.mark.parametrize("dtype", ["f2", "f8", "i1", "?"])
def test_a_task_may_run_twice_and_writes_to_nothing_it_is_given(rng: Any, dtype: str) -> None:
    a, b = small_integers(rng, (3, 20), dtype), small_integers(rng, (20, 4), dtype)
    c = tw.matmul(cut(a, 3, 6), cut(b, 6, 4))
    graph = dict(c.__dask_graph__())

    def result(key: Any) -> Any:
        task = graph[key]
        if not isinstance(task, Task):
            return task
        given = {name: result(name) for name in task.dependencies}
        for x in given.values():
            x.flags.writeable = False
        first, second = task(given), task(given)
        assert np.array_equal(first, second)
        return second

    assert np.array_equal(result((c.name, 0, 0)), exact(a, b).astype(dtype))


def test_what_a_product_holds_does_not_grow_with_K() -> None:
    side = 128

    def peak(pieces: int) -> float:
        a = da.random.random((side, side * pieces), chunks=side)
        b = da.random.random((side * pieces, side), chunks=side)
        c = tw.matmul(a, b)
        tracemalloc.start()
        c.compute()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most / (side * side * 8)

    few = peak(4)
    assert few < 8
    assert peak(40) < few + 2  # chunks; all of A and B are 80


def test_there_is_one_task_for_each_chunk_and_piece_of_three_arrays_at_most() -> None:
    a, b = da.ones((40, 60), chunks=(10, 5)), da.ones((60, 30), chunks=(4, 10))
    c = tw.matmul(a, b)
    tasks = c.dask.layers[c.name]
    assert len(tasks) == 4 * 3 * 24
    assert max(len(task.dependencies) for task in tasks.values()) == 3
    assert np.array_equal(c.compute(), np.full((40, 30), 60.0))


def test_nothing_is_computed_to_find_out_what_a_product_is() -> None:
    def load(x: Any) -> Any:
        raise AssertionError("computed")

    x = da.ones((6, 6), chunks=2).map_blocks(load, meta=np.empty((0, 0)))
    for c in (tw.matmul(x, x), tw.matmul(x, np.ones(6)), tw.matmul(x, x, dtype="f4")):
        assert type(c._meta) is np.ndarray
        assert c._meta.dtype == c.dtype


class Kind(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of a library of our own, whose operations give its own arrays."""

    __array_priority__ = 20

    def __init__(self, data: Any) -> None:
        self.data = data

    shape = property(lambda self: self.data.shape)
    dtype = property(lambda self: self.data.dtype)
    ndim = property(lambda self: self.data.ndim)

    def __getitem__(self, index: Any) -> Any:
        return type(self)(self.data[index])

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def astype(self, dtype: Any, **options: Any) -> Kind:
        return type(self)(self.data.astype(dtype, **options))

    def __array_function__(self, *call: Any) -> Any:
        return NotImplemented

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [x.data if isinstance(x, Kind) else x for x in inputs]
        out = options.pop("out", None)
        result = getattr(ufunc, method)(*plain, **options)
        if out is None:
            return Kind(result)
        out[0].data = result
        return out[0]


def kind(x: Any) -> Any:
    return Kind(x)


@pytest.fixture
def library(monkeypatch: Any) -> None:
    module = ModuleType("otherlib")
    module.from_dlpack = lambda x: Kind(np.from_dlpack(x))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "otherlib", module)
    monkeypatch.setattr(Kind, "__module__", "otherlib.arrays")


@pytest.mark.usefixtures("library")
def test_chunks_stay_of_their_kind() -> None:
    x = np.arange(24, dtype="f4").reshape(4, 6)
    empty = Kind(np.empty((0, 0), "f4"))
    a, b = (cut(z, 2, 2).map_blocks(kind, meta=empty) for z in (x, x.T))
    for p, q in ((a, b), (a, x.T), (x, b)):
        for dtype in ("f4", "f2"):
            c = tw.matmul(p, q, dtype=dtype)
            assert type(c._meta) is Kind
            assert (c._meta.dtype, c._meta.ndim) == (dtype, 2)
            found = blocks(c)
            assert {type(block) for block in found} == {Kind}
            assert {block.dtype for block in found} == {np.dtype(dtype)}
            sums = sum(block.data.astype("f8").sum() for block in found)
            assert sums == (x @ x.T).astype(dtype).astype("f8").sum()
    assert {type(block) for block in blocks(tw.matmul(cut(x, 2, 2), x.T))} == {np.ndarray}


@pytest.mark.usefixtures("library")
def test_chunks_of_two_libraries_have_no_common_kind(monkeypatch: Any) -> None:
    class Other(Kind):
        pass

    Other.__module__ = "thirdlib"
    a, b = (ONES.map_blocks(kind, meta=x(np.empty((0, 0)))) for x in (Kind, Other))
    with pytest.raises(DTypeError, match="otherlib, thirdlib"):
        tw.matmul(a, b)


def test_chunks_on_a_gpu_stay_there_unless_the_others_are_not(monkeypatch: Any) -> None:
    class Onboard(Kind):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    def on_gpu(a: Any, b: Any, *, dtype: Any, **options: Any) -> Any:
        return Onboard(np.matmul(a.data.astype(dtype), b.data.astype(dtype)))

    plain = tw.matmul
    monkeypatch.setitem(sys.modules, "onboard", ModuleType("onboard"))
    monkeypatch.setattr(Onboard, "__module__", "onboard.arrays")
    monkeypatch.setattr(distributed._api, "matmul", on_gpu)
    x = np.arange(36, dtype="f2").reshape(6, 6) / 8
    there = cut(x, 6, 2).map_blocks(lambda x: Onboard(x), meta=Onboard(np.empty((0, 0), "f2")))
    assert type(plain(there, x)._meta) is np.ndarray
    for b in (there, Onboard(x)):
        c = plain(there, b)
        found = blocks(c)
        assert {type(c._meta), *map(type, found)} == {Onboard}
        whole = np.hstack([block.data for block in found])
        assert whole.dtype == np.float16
        assert np.array_equal(whole, (x.astype("f4") @ x.astype("f4")).astype("f2"))


def test_a_product_travels(rng: Any) -> None:
    """As a pickle, and to other processes, from which errors come back as what they are."""
    a, b = rng.integers(-9, 9, (6, 8)), rng.integers(-9, 9, (8, 6))
    good = tw.matmul(cut(a, 3, 4), b, memory="10MiB", devices="cpu", verify=True)
    assert np.array_equal(pickle.loads(pickle.dumps(good)).compute(), a @ b)
    assert np.array_equal(good.compute(scheduler="processes", num_workers=1), a @ b)
    bad = cut(a, 3, 4).map_blocks(np.transpose, meta=np.empty((0, 0), int))
    with pytest.raises(ShapeError, match=r"a \(shape \(4, 3\).*do not go together") as caught:
        tw.matmul(bad, b).compute()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (ShapeError, str(caught.value))


def test_the_error_of_a_task_surfaces(rng: Any) -> None:
    bad = ONES.map_blocks(lambda x: x.astype(object), meta=np.empty((0, 0)))
    for scheduler in ("synchronous", "threads"):
        with pytest.raises(DTypeError, match="a has dtype object"):
            tw.matmul(bad, ONES).compute(scheduler=scheduler)


def test_options_are_those_of_each_task(monkeypatch: Any) -> None:
    asked = []
    plain = tw.matmul

    def watched(a: Any, b: Any, **options: Any) -> Any:
        asked.append(options)
        return plain(a, b, **options)

    monkeypatch.setattr(distributed._api, "matmul", watched)
    x = da.ones((4, 4), chunks=2, dtype="f2")
    c = plain(x, x, memory="1MiB", devices=["cpu"], verify=True, dtype="f2", precision="ieee")
    assert asked == []
    assert (c.compute() == 4).all()
    expected = {"memory": 1 << 20, "devices": ("cpu",), "verify": True, "precision": "ieee"}
    assert asked == [{**expected, "dtype": np.dtype("f4")}] * 8
    asked.clear()
    plain(da.ones((4, 4), chunks=4), np.ones(4), memory="50%").compute()
    assert [each["memory"] for each in asked] == ["50%"]


def test_mistakes_are_told_at_the_call_by_the_operands_name() -> None:
    unknown = ONES[ONES[:, 0] > 0]
    mistakes: list[tuple[Any, Any, dict[str, Any], Any, str]] = [
        (ONES, np.ones((3, 4)), {}, ShapeError, r"b \(shape \(3, 4\).*do not go together"),
        (np.ones((2, 4, 4)), da.ones((3, 4, 4)), {}, ShapeError, "do not broadcast"),
        (ONES, da.ones(()), {}, ShapeError, "b is a scalar"),
        (ONES, 3.0, {}, ShapeError, "b is a scalar"),
        (unknown, ONES, {}, ShapeError, r"a has shape \(nan.*a.compute_chunk_sizes\(\)"),
        (ONES, [[1], [1, 2]], {}, ShapeError, "b is not a rectangular array"),
        (ONES.astype(object), ONES, {}, DTypeError, "a has dtype object"),
        (ONES, ONES.astype("M8[s]"), {}, DTypeError, "b has dtype datetime64"),
        (ONES, ONES, {"dtype": "i4"}, DTypeError, "does not become int32"),
        (ONES, da.ma.masked_equal(ONES, 0), {}, DTypeError, "b has chunks .* masked"),
        (ONES, np.ma.array(np.ones((4, 4))), {}, DTypeError, "b is a masked array"),
        (ONES, dask.delayed(np.ones)((4, 4)), {}, DTypeError, "b is a dask Delayed"),
        (ONES, ONES, {"out": np.empty((4, 4))}, OptionError, "out= .*dask.array.store"),
        (np.ones((4, 4)), np.ones((4, 4)), {"out": ONES}, OptionError, "out= .*dask.array.store"),
        (ONES, ONES, {"stream": 0}, OptionError, "stream=0 was given"),
        (ONES, ONES, {"precision": "tf32"}, OptionError, "precision='tf32' is for float32"),
        (ONES, ONES, {"precision": "best"}, OptionError, "precision='best'"),
        (ONES, ONES, {"memory": "lots"}, OptionError, "memory='lots'"),
        (ONES, ONES, {"devices": "tpu"}, OptionError, "device 'tpu'"),
        (ONES, ONES, {"verify": "no"}, OptionError, "verify='no'"),
        (ONES, ONES, {"memory": 10}, BudgetError, r"chunks of \(2, 2\) and .*rechunk"),
        (ONES.astype("f2"), ONES.astype("f2"), {"memory": 5}, BudgetError, "rechunk"),
    ]
    for a, b, options, error, message in mistakes:
        with pytest.raises(error, match=message) as caught:
            tw.matmul(a, b, **options)
        assert isinstance(caught.value, TilewiseError)


def test_a_budget_counts_a_sum_and_what_it_is_rounded_to() -> None:
    x = da.ones((100, 2000), chunks=(100, 1000), dtype="f2")
    y = da.ones((2000, 100), chunks=(1000, 100), dtype="f2")
    least = tw.plan(
        np.ones((100, 1000), "f2"), np.ones((1000, 100), "f2"), dtype="f4", memory=45000
    )
    assert least.held_bytes <= 45000
    with pytest.raises(BudgetError, match="the sum and what it is rounded to take 58.60 KiB"):
        tw.matmul(x, y, memory=45000)
    assert (tw.matmul(x, y, memory=60000).compute() == 2000).all()


def test_other_calls_refuse_dask_arrays_by_name() -> None:
    ones = np.ones((4, 4))
    for call in (
        lambda: tw.plan(ONES, ones),
        lambda: tw.plan(ones, ones)(ones, ONES),
        lambda: tw.gemm(ones, ONES, np.empty((4, 4))),
        lambda: tw.gemm(ones, ones, ONES),
        lambda: tw.check(ones, ones, ONES),
        lambda: tw.matmul([ONES], [ONES]),
    ):
        with pytest.raises(DTypeError, match=r"is a dask Array; only matmul.*\.compute\(\)"):
            call()
    with pytest.raises(ShapeError, match="two lists"):
        tw.matmul(ONES, [ones])


def test_dask_is_imported_for_its_arrays_alone_and_without_query_planning() -> None:
    program = """
import sys, numpy as np, tilewise as tw
tw.matmul(np.ones((2, 2)), [[1, 2], [3, 4]], dtype="f4")
assert "dask" not in sys.modules
import dask.array as da
try:
    tw.matmul(da.ones((2, 2)), np.ones((2, 2)))
except tw.TilewiseError as error:
    assert "array.query-planning" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | {"DASK_ARRAY__QUERY_PLANNING": "True"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
