"""Operands and results of which some are in device memory, on GPUs made of NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewise as tw
from tests.outofcore.fake_arrays import Onboard, late, onboard_library
from tests.outofcore.fake_device import FakeCuda
from tests.outofcore.fake_gpus import fake_gpus
from tests.support import goes_on, planned, poisoned, small_integers
from tests.test_gpu_plan import gpu
from tilewise._operand import Operand
from tilewise.errors import (
    BudgetError,
    CheckError,
    DeviceError,
    DTypeError,
    OptionError,
    ShapeError,
    TilewiseError,
)
from tilewise.outofcore.device_schedule import Launch, Load
from tilewise.runtime import memory as device_memory

PLACES = [x for x in itertools.product("HD", "HD", "-HD") if len({*x} - {"-"}) == 2]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1811)


@pytest.fixture
def cuda(monkeypatch: Any) -> Iterator[FakeCuda]:
    onboard_library(monkeypatch)
    with fake_gpus(monkeypatch) as fake:
        yield fake


def placed(x: Any, place: str) -> Any:
    return Onboard(x) if place == "D" else x


def exact(a: Any, b: Any) -> Any:
    if a.dtype == bool:
        return np.matmul(a, b)
    wide = complex if a.dtype.kind == "c" else np.int64 if a.dtype.kind in "iu" else float
    return np.matmul(a.astype(wide), b.astype(wide)).astype(a.dtype)


def multiplied(a: Any, b: Any, places: Any, out: Any = None, **options: Any) -> Any:
    """Return the product of arrays that are put there, as the array that the result is."""
    given = None if places[2] == "-" else poisoned(exact(a, b).shape, a.dtype)
    given = given if out is None or places[2] == "-" else out
    target = None if given is None else placed(given, places[2])
    got = tw.matmul(placed(a, places[0]), placed(b, places[1]), out=target, **options)
    assert got is target or target is None
    return getattr(got, "array", got)


@pytest.mark.parametrize("places", PLACES, ids="".join)
def test_D8_every_mix_of_places(cuda: FakeCuda, rng: Any, places: Any) -> None:
    a, b = rng.standard_normal((1000, 1000)), rng.standard_normal((1000, 100))
    assert tw.check(a, b, multiplied(a, b, places))


def test_D11_an_operand_on_the_device_stays_there_and_the_other_streams(
    cuda: FakeCuda, rng: Any, monkeypatch: Any
) -> None:
    """Of a budget, the array on the device is three fifths, and the one on the host is twice."""
    budget = 4 << 20
    k = 1500
    a = small_integers(rng, (budget * 3 // 5 // 4 // k, k), "float32")
    b = small_integers(rng, (k, 2 * budget // 4 // k), "float32")
    free = cuda.free_bytes[0]
    least = [free]
    real = cuda._allocate

    def allocate(pool: Any, nbytes: int) -> Any:
        made = real(pool, nbytes)
        least.append(cuda.free_bytes[0])
        return made

    monkeypatch.setattr(cuda, "_allocate", allocate)
    for memory in (budget, budget * 2 // 5):  # what tilewise takes, and what there is with a
        out = poisoned((len(a), b.shape[1]), "float32")
        plan = tw.plan(Onboard(a), b, out=out, memory=memory)
        (part,) = plan.how.parts
        assert part.schedule.read_bytes == b.nbytes
        assert part.schedule.held_bytes <= memory
        plan(Onboard(a), b, out=out)
        assert (out == a @ b).all()
        assert free - min(least) <= memory
        least[:] = [free]
        device_memory.pool(0).trim()


@pytest.mark.parametrize("places", PLACES, ids="".join)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "complex64", "bool"])
def test_every_type_in_budgets_from_one_tile_up(
    cuda: FakeCuda, rng: Any, dtype: str, places: Any
) -> None:
    a, b = small_integers(rng, (300, 210), dtype), small_integers(rng, (210, 270), dtype)
    for budget in (300 << 10, None):
        memory = None if budget is None else budget * a.itemsize
        assert (multiplied(a, b, places, memory=memory) == exact(a, b)).all()


def layouts(x: Any) -> dict[str, Any]:
    """Return the same matrix as it lies in many ways, each in NaN that is not to be read."""
    wide = np.full((2 * x.shape[0] + 3, 2 * x.shape[1] + 3), np.nan, x.dtype)
    stepped = wide[1 : 2 * x.shape[0] : 2, 2 : 2 * x.shape[1] + 1 : 2]
    stepped[...] = x
    inside = np.full((x.shape[0] + 1, x.shape[1] + 3), np.nan, x.dtype)[1:, 3:]
    inside[...] = x
    return {
        "C": x.copy(),
        "F": np.asfortranarray(x),
        "back": x[::-1, ::-1].copy()[::-1, ::-1],
        "stepped": stepped,
        "inside": inside,
    }


@pytest.mark.parametrize("places", PLACES, ids="".join)
def test_layouts_of_what_is_read_and_written_in_place(
    cuda: FakeCuda, rng: Any, places: Any
) -> None:
    m, k, n = 130, 90, 150
    a, b = small_integers(rng, (m, k), "float32"), small_integers(rng, (k, n), "float32")
    expected = a @ b
    every = list(itertools.product(layouts(a).items(), layouts(b).items()))
    for number in rng.choice(len(every), 8, replace=False):
        (how, x), (other, y) = every[number]
        budget = rng.choice(["100KiB", "200KiB", "2MiB"])
        out = layouts(np.zeros((m, n), "f4"))[rng.choice(["C", "F", "back", "stepped", "inside"])]
        base = out.base
        got = multiplied(x, y, places, out, memory=budget if places[2] != "-" else "2MiB")
        assert (got == expected).all(), (how, other, budget)
        if places[2] != "-" and base is not None and base.size > out.size:
            assert np.isnan(base).sum() == base.size - out.size


BATCHES = [
    ((20, 30, 25), (20, 25, 35)),
    ((20, 30, 25), (25, 35)),
    ((3, 1, 30, 25), (4, 25, 35)),
    ((3, 4, 30, 25), (3, 1, 25, 35)),
    ((25,), (6, 25, 35)),
    ((6, 30, 25), (25,)),
    ((30, 25), (25,)),
    ((9000,), (9000,)),
    ((500, 3, 3), (500, 3, 1)),
    ((1, 1, 30, 25), (25, 35)),
    ((4, 1, 25), (25, 35)),
]


@pytest.mark.parametrize(("a_shape", "b_shape"), BATCHES, ids=str)
def test_batches_and_vectors(cuda: FakeCuda, rng: Any, a_shape: Any, b_shape: Any) -> None:
    a, b = small_integers(rng, a_shape, "float32"), small_integers(rng, b_shape, "float32")
    expected = np.matmul(a, b)
    for places in PLACES:
        if places[2] == "-" or not expected.shape:
            if len({*places[:2]}) == 2:
                assert (multiplied(a, b, (*places[:2], "-")) == expected).all()
            continue
        for budget in (80 << 10, 600 << 10, None):
            assert (multiplied(a, b, places, memory=budget) == expected).all(), places


def test_what_repeats_on_the_device_is_read_in_place(cuda: FakeCuda, rng: Any) -> None:
    row, matrix = small_integers(rng, (1, 200), "f4"), small_integers(rng, (200, 70), "f4")
    column = small_integers(rng, (90, 1), "f4")
    stack = np.broadcast_to(small_integers(rng, (40, 200), "f4"), (5, 40, 200))
    for a in (np.broadcast_to(row, (90, 200)), np.broadcast_to(column, (90, 200)), stack):
        got = multiplied(a, matrix, "DH-", memory="200KiB")
        assert (got == a @ matrix).all()
        b = np.swapaxes(a, -1, -2)
        assert (multiplied(matrix.T, b, "HD-", memory="200KiB") == matrix.T @ b).all()


def test_elements_that_are_yet_to_come_are_waited_for(cuda: FakeCuda, rng: Any) -> None:
    for _ in range(10):
        a, b = small_integers(rng, (90, 80), "float64"), small_integers(rng, (80, 70), "float64")
        assert (tw.matmul(late(cuda, a), b, memory="200KiB") == a @ b).all()
        assert (tw.matmul(a, late(cuda, b)) == a @ b).all()
        out = np.zeros((90, 70))
        tw.matmul(late(cuda, a), late(cuda, b), out=out)
        assert (out == a @ b).all()
        target = late(cuda, np.zeros((90, 70)))  # what is written before is not written after
        tw.matmul(a, b, out=target)
        cuda.cuCtxPushCurrent(0)
        cuda.cuStreamSynchronize(1)
        cuda.cuCtxPopCurrent()
        assert (target.array == a @ b).all()


@pytest.mark.parametrize("kept", [True, False])
def test_a_result_over_an_operand(cuda: FakeCuda, rng: Any, kept: bool) -> None:
    """Within a budget the copy that it takes is counted."""
    n = 200
    memory = "900KiB" if kept else None
    a, b = small_integers(rng, (n, n), "float32"), small_integers(rng, (n, n), "float32")
    for side, places in ((0, "DHD"), (1, "HDD"), (0, "HDH"), (1, "DHH")):
        operands = [a.copy(), b.copy()]
        got = multiplied(*operands, places, operands[side], memory=memory)
        assert np.shares_memory(got, operands[side])
        assert (got == a @ b).all(), places
    shifted = np.zeros(n * n + n, "f4")
    shifted[: n * n] = a.reshape(-1)
    x, out = shifted[: n * n].reshape(n, n), shifted[n:].reshape(n, n)
    assert (multiplied(x, b, "DHD", out, memory=memory) == a @ b).all()
    room = SimpleNamespace(a=Onboard(a), b=b)
    apart = tw.plan(room.a, room.b, out=Onboard(b.copy()), memory="900KiB")
    over = tw.plan(room.a, room.b, out=room.a, memory="900KiB")
    less = apart.how.parts[0].schedule.budget_bytes - over.how.parts[0].schedule.budget_bytes
    assert less >= a.nbytes
    with pytest.raises(BudgetError, match="shares no memory with an operand"):
        apart(room.a, room.b, out=room.a)


def test_a_copy_stands_beside_nothing_that_is_kept(cuda: FakeCuda, rng: Any) -> None:
    wide, a = small_integers(rng, (700, 700), "float32"), small_integers(rng, (200, 200), "float32")
    tw.matmul(Onboard(wide), wide, memory="2MiB", out=np.zeros((700, 700), "f4"))
    assert device_memory.pool(0).kept_bytes > 900 << 10
    least = []
    real = cuda._allocate
    cuda._allocate = lambda *given: (real(*given), least.append(cuda.free_bytes[0]))[0]  # type: ignore[method-assign]
    x = Onboard(a.copy())
    assert (tw.matmul(x, a, out=x, memory="900KiB").array == a @ a).all()
    assert (1 << 30) - min(least) <= 900 << 10


def test_memory_that_the_host_and_a_gpu_both_see(cuda: FakeCuda, rng: Any) -> None:
    """Managed memory, say: an out on one side is an operand on the other."""
    n = 200
    a, b = small_integers(rng, (n, n), "float32"), small_integers(rng, (n, n), "float32")
    for memory in (None, "900KiB"):
        for places, side in (
            ("DHH", 0),
            ("HDH", 1),
            ("DDH", 0),
            ("HHD", 0),
            ("HDD", 0),
            ("DHD", 1),
        ):
            x = [a.copy(), b.copy()]
            out = x[side]
            assert places[side] != places[2]
            assert (multiplied(*x, places, out, memory=memory) == a @ b).all(), places
            apart = tw.plan(placed(a, places[0]), placed(b, places[1]), out=placed(out, places[2]))
            x = [a.copy(), b.copy()]
            x[side] = out
            expected = x[0] @ x[1]
            apart(
                *(placed(z, p) for z, p in zip(x, places, strict=False)), out=placed(out, places[2])
            )
            assert (out == expected).all(), places
    x = a.copy()
    beside = tw.plan(x, Onboard(b), out=Onboard(a.copy()), memory="900KiB")
    with pytest.raises(BudgetError, match="shares no memory with an operand"):
        beside(x, Onboard(b), out=Onboard(x))
    held = tw.plan(x, Onboard(b), out=Onboard(x), memory="900KiB").held_bytes
    assert held >= beside.held_bytes + x.nbytes


def test_a_plan_is_found_again_whatever_is_free(cuda: FakeCuda, rng: Any) -> None:
    a, b = small_integers(rng, (200, 200), "float32"), small_integers(rng, (200, 200), "float32")
    plan = tw.plan(Onboard(a), b, memory="900KiB")
    cuda.free_bytes[0] -= 12345
    assert tw.plan(Onboard(a), b, memory="900KiB") is plan
    assert tw.plan(Onboard(a), b) is tw.plan(Onboard(a), b)
    cuda.free_bytes[0] += 12345


@pytest.mark.parametrize("places", PLACES, ids="".join)
def test_verified_results(cuda: FakeCuda, rng: Any, places: Any, monkeypatch: Any) -> None:
    a, b = small_integers(rng, (60, 50), "float32"), small_integers(rng, (50, 40), "float32")
    assert (multiplied(a, b, places, verify=True) == a @ b).all()
    monkeypatch.setattr("tilewise.numerics.check.check", lambda *x, **y: False)
    out = np.full((60, 40), 7, "f4")
    with pytest.raises(CheckError):
        multiplied(a, b, places, out, verify=True)
    if places[2] == "H":
        assert (out == 7).all()


def test_a_type_that_NumPy_has_no_letter_for_is_verified(cuda: FakeCuda, rng: Any) -> None:
    e5m2 = np.dtype(ml_dtypes.float8_e5m2)
    a, b = (rng.integers(-1, 2, (20, 20)).astype(e5m2) for _ in "ab")
    expected = a.astype("f4") @ b.astype("f4")
    for places in PLACES:
        out = poisoned((20, 20), "float32")
        assert (multiplied(a, b, places, out, verify=True) == expected).all()


def test_k_in_pieces_of_what_is_in_place(cuda: FakeCuda, rng: Any) -> None:
    a, b = small_integers(rng, (40, 100_000), "int32"), small_integers(rng, (100_000, 2), "int32")
    for x, y, expected in ((a, Onboard(b), a @ b), (Onboard(a), b, a @ b)):
        out = poisoned(expected.shape, "int32")
        plan = tw.plan(x, y, out=out, memory="300KiB")
        assert plan.how.parts[0].schedule.pieces > 1
        plan(x, y, out=out)
        assert (out == expected).all()


def test_why_all_of_K_has_to_be_there_for_a_result_in_place(cuda: FakeCuda) -> None:
    a, b = np.ones((40, 100_000), "int32"), np.ones((100_000, 2), "int32")
    with pytest.raises(BudgetError, match="all of K = 100000 has to be there, as c in place"):
        tw.plan(a, b, out=Onboard(np.zeros((40, 2), "int32")), memory="300KiB")


def test_what_is_not_cut_is_aligned_whatever_its_size(cuda: FakeCuda, rng: Any) -> None:
    """Such as rows of 77 elements in a matrix of 80, as for a product that is all there."""
    a, b = (small_integers(rng, (300, 80), "f4")[:, :77] for _ in "ab")
    for x, y, side in ((Onboard(a), b.T, 0), (a, Onboard(b.T), 1)):
        plan = tw.plan(x, y, memory="500KiB")
        schedule = plan.how.parts[0].schedule
        launches = [each for each in schedule.operations() if isinstance(each, Launch)]
        assert len(launches) > 1
        assert all(schedule.layout(each, side).is_aligned for each in launches)
        assert (plan(x, y) == a @ b.T).all()


def test_what_is_in_place_is_split_once(cuda: FakeCuda, rng: Any) -> None:
    a, b = small_integers(rng, (700, 300), "f4"), small_integers(rng, (300, 650), "f4")
    stack = small_integers(rng, (3, 100, 300), "f4")
    out = poisoned((700, 650), "float32")
    plan = tw.plan(Onboard(a), b, out=out, memory="2MiB", precision="tf32")
    assert goes_on(plan) > 3 / 4
    plan(Onboard(a), b, out=out)
    assert (out == a @ b).all()
    # The next matrix of a stack is another, though it is multiplied by the same panel.
    got = tw.matmul(Onboard(stack), b, memory="1200KiB", precision="tf32")
    assert (got == stack @ b).all()


def test_a_plan_says_what_stays_and_counts_what_moves(cuda: FakeCuda, rng: Any) -> None:
    a, b = (small_integers(rng, (300, 300), "float32") for _ in "ab")
    for places in PLACES:
        given = [placed(x, place) for x, place in zip((a, b), places, strict=False)]
        c = None if places[2] == "-" else placed(np.zeros((300, 300), "f4"), places[2])
        for memory in (None, "700KiB"):
            plan = tw.plan(*given, out=c, memory=memory)
            assert plan.device == "cuda:0"
            (part,) = plan.how.parts
            loads = [x for x in part.schedule.operations() if isinstance(x, Load)]
            assert {x.side for x in loads} == {i for i in (0, 1) if places[i] == "H"}
            text = str(plan)
            stays = [name for name, place in zip("ab", places, strict=False) if place == "D"]
            assert ("read in place" in text) == bool(stays)
            assert f"{' and '.join(stays)} read in place" in text or not stays
            assert ("c written in place" in text) == (places[2] == "D")
            assert plan.to_dict()["streams"]["devices"][0]["written_bytes"] == (
                0 if places[2] == "D" else 4 * 300 * 300
            )
            assert "cuda:0" in text.splitlines()[0] or places[:2] == ("H", "H")
    described = SimpleNamespace(shape=(300, 40_000), dtype=np.dtype("float32"))
    assert "read in place" in str(tw.plan(Onboard(a), described))
    with pytest.raises(DTypeError, match="out"):
        tw.plan(Onboard(a), b, out=np.zeros((300, 300)))
    with pytest.raises(ShapeError, match="out"):
        tw.plan(a, b, out=Onboard(np.zeros((3, 3), "f4")))


def test_the_kind_of_a_result_is_that_of_the_host_operand(cuda: FakeCuda, rng: Any) -> None:
    a, b = small_integers(rng, (30, 20), "float64"), small_integers(rng, (20, 10), "float64")
    assert type(tw.matmul(Onboard(a), b)) is np.ndarray
    assert type(tw.matmul(Onboard(a), b.tolist())) is np.ndarray
    assert type(tw.matmul(Onboard(a[0]), b[:, 0])) is np.float64


def test_groups_of_mixed_pairs(cuda: FakeCuda, rng: Any) -> None:
    a, b = (
        [small_integers(rng, (40, 30), "f4").reshape(s) for _ in "abc"]
        for s in ((40, 30), (30, 40))
    )
    left = [Onboard(a[0]), a[1], Onboard(a[2])]
    right = [b[0], Onboard(b[1]), b[2]]
    for got, x, y in zip(tw.matmul(left, right), a, b, strict=True):
        assert (got == x @ y).all()
    for got, x, y in zip(tw.matmul(left, right, memory="3MiB"), a, b, strict=True):
        assert (got == x @ y).all()
    outs = [np.zeros((40, 40), "f4"), Onboard(np.zeros((40, 40), "f4")), np.zeros((40, 40), "f4")]
    got = tw.matmul(left, right, out=outs)
    assert all(x is y for x, y in zip(got, outs, strict=True))
    assert (outs[1].array == a[1] @ b[1]).all()
    with pytest.raises(BudgetError, match="pair 0 of the group: the results of all others take"):
        tw.matmul(left, right, memory="10KiB")


REFUSED = {
    "the CPU": ({"devices": "cpu"}, DeviceError, "operands are on cuda:0; copy them"),
    "another GPU": ({"devices": "cuda:1"}, DeviceError, "operands are on cuda:0; copy them"),
    "two GPUs": ({"devices": ["cuda:0", "cuda:1"]}, OptionError, "multiplied where they are"),
    "no room": ({"memory": "4KiB"}, BudgetError, "raise the budget|raise memory="),
    "no stream": ({"stream": 5}, OptionError, "is not a stream"),
    "a read-only place": (
        {"out": Onboard(np.zeros((30, 30), "f4"), is_readonly=True)},
        DTypeError,
        "read-only",
    ),
    "a place elsewhere": (
        {"out": Onboard(np.zeros((30, 30), "f4"), index=1)},
        DeviceError,
        "different GPUs",
    ),
    "a constant": ({"out": np.broadcast_to(np.float32(0), (30, 30))}, DTypeError, "read-only"),
    "another shape": ({"out": Onboard(np.zeros((30, 31), "f4"))}, ShapeError, r"\(30, 30\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(cuda: FakeCuda, rng: Any, what: str) -> None:
    options, error, message = REFUSED[what]
    a, b = small_integers(rng, (30, 30), "float32"), small_integers(rng, (30, 30), "float32")
    for call in (tw.matmul, tw.plan):
        if call is tw.plan and getattr(options.get("out"), "is_readonly", False):
            continue  # described, and not looked at
        with pytest.raises(error, match=message):
            call(Onboard(a), b, **options)
    assert (tw.matmul(Onboard(a), b) == a @ b).all()


def test_D2_a_result_that_no_gpu_holds_is_refused_with_the_way_out() -> None:
    x = Operand((203_743, 58), np.dtype("f4"), (232, 4), where="cuda:0")
    y = Operand((58, 203_743), np.dtype("f4"), (4, 232), where="cuda:0")
    with pytest.raises(BudgetError, match=r"154\.6\d GiB.*cuda:0.*out= in host memory.*memmap"):
        planned(x, y, gpu=gpu())


def test_places_that_do_not_meet(cuda: FakeCuda, rng: Any) -> None:
    a, b = small_integers(rng, (30, 30), "float32"), small_integers(rng, (30, 30), "float32")
    with pytest.raises(DeviceError, match="a is on cuda:0, b is on cuda:1.*different GPUs"):
        tw.matmul(Onboard(a), Onboard(b, index=1))
    with pytest.raises(DeviceError, match="a is on cuda:0, b is in host memory.*one place"):
        tw.gemm(Onboard(a), b, np.zeros((30, 30), "f4"))
    with pytest.raises(DTypeError, match="None"):
        tw.matmul(None, Onboard(a))
    with pytest.raises(DTypeError, match="b is a masked array"):
        tw.matmul(Onboard(a), np.ma.masked_array(b))


def test_a_plan_is_for_arrays_that_begin_as_its_own(cuda: FakeCuda, rng: Any) -> None:
    a, b = small_integers(rng, (30, 30), "float32"), small_integers(rng, (30, 30), "float32")
    for places in PLACES:
        arrays = [a, b, np.zeros((30, 30), "f4")]
        given, odd = ([placed(x, p) for x, p in zip(arrays, places, strict=True)] for _ in "ab")
        for i in range(3):
            raw = np.zeros(30 * 30 + 8, "f4")
            start = -raw.ctypes.data // 4 % 4 + 1
            shifted = raw[start : start + 900].reshape(30, 30)
            shifted[...] = arrays[i]
            odd[i] = placed(shifted, places[i])
        if places[2] == "-":
            given[2] = odd[2] = None
        plan = tw.plan(*given[:2], out=given[2])
        for i in range(3):
            mixed = [*given[:i], odd[i], *given[i + 1 :]]
            if places[i] == "D":
                with pytest.raises(ShapeError, match="multiple of 16 bytes.*make a plan"):
                    plan(*mixed[:2], out=mixed[2])
            else:
                got = plan(*mixed[:2], out=mixed[2])
                assert (getattr(got, "array", got) == a @ b).all()


def test_a_plan_is_for_arrays_where_they_were(cuda: FakeCuda, rng: Any) -> None:
    a, b = small_integers(rng, (30, 30), "float32"), small_integers(rng, (30, 30), "float32")
    c = np.zeros((30, 30), "f4")
    calls = {
        places: (
            [placed(x, place) for x, place in zip((a, b), places, strict=False)],
            None if places[2] == "-" else placed(c, places[2]),
        )
        for places in PLACES
    }
    calls["H", "H", "-"] = [a, b], None
    for planned_for, (operands, out) in calls.items():
        for verify in (False, True):
            plan = tw.plan(*operands, out=out, devices="cuda:0", verify=verify)
            for places, (given, target) in calls.items():
                here, there = (
                    tuple("H" if x == "-" else x for x in y) for y in (places, planned_for)
                )
                c[...] = np.nan
                if here == there:
                    got = plan(*given, out=target)
                    assert (getattr(got, "array", got) == a @ b).all()
                    continue
                with pytest.raises(TilewiseError, match="make a plan"):
                    plan(*given, out=target)
                assert np.isnan(c).all()
            with pytest.raises(TilewiseError, match="make a plan"):
                plan(Onboard(a), Onboard(b))
            if "D" in planned_for:
                moved = [Onboard(x.array, 1) if isinstance(x, Onboard) else x for x in operands]
                beside = Onboard(out.array, 1) if isinstance(out, Onboard) else out
                with pytest.raises(TilewiseError, match="make a plan"):
                    plan(*moved, out=beside)
