"""Products like one before, on a GPU of NumPy's: what is recognised, and what must not be."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import planned
from tests.test_gpu_plan import gpu as facts_of
from tilewise import _api, _arrays, _gpu, _libraries, _repeat
from tilewise._operand import Operand
from tilewise.errors import BudgetError, DeviceError, DTypeError, OptionError, ShapeError
from tilewise.runtime import arrays, device, driver, memory, streams

OTHER_STREAM = 77


class Dtype:
    def __init__(self, name: str) -> None:
        self.name = name
        self.is_complex = name.startswith("complex")

    def __str__(self) -> str:
        return f"torch.{self.name}"


DTYPES = {name: Dtype(name) for name in ("float32", "float64", "complex64")}


class Tensor:
    """What tilewise asks of a torch tensor, over a NumPy array."""

    layout = "torch.strided"
    is_nested = False

    def __init__(self, array: Any, index: int = 0, flag: str = "") -> None:
        self.array = array
        self.flag = flag
        self.is_cuda = flag != "host"
        self.requires_grad = flag == "grad"
        self.device = SimpleNamespace(type="cuda" if self.is_cuda else "cpu", index=index)
        self.dtype = DTYPES[array.dtype.name]

    @property
    def shape(self) -> tuple[int, ...]:
        if self.is_nested:
            raise RuntimeError("Internal error: NestedTensorImpl doesn't support sizes")
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def data_ptr(self) -> int:
        if self.flag == "traced":
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
        if self.flag == "freed":
            return 0
        return self.array.ctypes.data

    def get_device(self) -> int:
        return self.device.index

    def numel(self) -> int:
        return self.array.size

    def numpy(self) -> Any:
        assert not self.is_cuda
        return self.array

    def element_size(self) -> int:
        return self.array.itemsize

    def is_conj(self) -> bool:
        return self.flag == "conj"

    def is_neg(self) -> bool:
        return self.flag == "neg"

    def resolve_conj(self) -> Tensor:
        return Tensor(self.array.conj().copy()) if self.flag == "conj" else self

    def resolve_neg(self) -> Tensor:
        return Tensor((-self.array).copy()) if self.flag == "neg" else self

    def new_empty_strided(self, shape: Any, strides: Any, dtype: Any = None) -> Tensor:
        return Tensor(buffer(shape, (dtype or self.dtype).name))


class Parameter(Tensor):
    pass


def buffer(shape: Any, dtype: Any, skip: int = 0) -> Any:
    """Return an array of NaN that begins ``skip`` bytes after a multiple of 16."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.full(size + 64, 0xFF, np.uint8)
    start = -raw.ctypes.data % 16 + skip
    return raw[start : start + size].view(dtype).reshape(shape)


def tensor(shape: tuple[int, ...], dtype: str = "float32", skip: int = 0, **more: Any) -> Tensor:
    made = Tensor(buffer(shape, dtype, skip), **more)
    made.array[...] = np.random.default_rng().integers(-4, 5, shape)
    if made.dtype.is_complex:
        made.array[...] += 1j * np.random.default_rng().integers(-4, 5, shape)
    return made


class Machine:
    """The GPU: how its current stream is called, and what was put on which."""

    def __init__(self) -> None:
        self._multiply = _gpu.multiply
        self.plans: dict[Any, Any] = {}
        self.stream = 0
        self.streams: list[int] = []
        self.general = 0  #: products that went the general way
        self.shrunk: list[tuple[int, int]] = []  #: workspaces, by stream and most

    def multiply(self, plan: Any, a: Any, b: Any, c: Any, *rest: Any) -> Any:
        self.plans[plan.how.recipe] = plan
        return self._multiply(plan, a, b, c, *rest)

    def workspace(self, index: int) -> Any:
        return SimpleNamespace(shrink=lambda *given: self.shrunk.append(given))

    def prepared(self, recipe: Any, index: int) -> Any:
        plan = self.plans[recipe]

        def put(pointers: tuple[int, int, int], stream: int, numbers: Any = None) -> None:
            self.streams.append(stream)
            a, b, c = pointers
            out = plan.asked.out
            if out is None:
                out = Operand.of(np.empty(plan.shape, plan.dtype))
            view(c, out)[...] = view(a, plan.a) @ view(b, plan.b)

        return put


def view(address: int, like: Any) -> Any:
    nbytes = like.dtype.itemsize + sum((n - 1) * s for n, s in zip(*_layout(like), strict=True))
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.ndarray(like.shape, like.dtype, memory, 0, like.strides)


def _layout(like: Any) -> tuple[Any, Any]:
    return like.shape, like.strides


@contextmanager
def copied(x: Any, stream: int) -> Iterator[Any]:
    held = view(x.pointer, x).copy()
    assert held.strides == x.strides
    yield replace(x, pointer=held.ctypes.data)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    torch: Any = ModuleType("torch")
    torch.Tensor = Tensor
    torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda index: made.stream)
    torch.empty = lambda shape, dtype, device: Tensor(buffer(shape, dtype.name))
    for name, dtype in DTYPES.items():
        setattr(torch, name, dtype)
    for kind in (Tensor, Parameter):
        monkeypatch.setattr(kind, "__module__", "torch")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(driver, "require", lambda: SimpleNamespace())
    monkeypatch.setattr(device, "facts", lambda index: replace(facts_of(), index=index))
    monkeypatch.setattr(_gpu, "prepared", made.prepared)
    monkeypatch.setattr(_gpu, "multiply", made.multiply)
    monkeypatch.setattr(_gpu, "copied", copied)
    monkeypatch.setattr(memory, "workspace", made.workspace)
    monkeypatch.setattr(arrays, "to_host", lambda x, stream: view(x.pointer, x).copy())
    monkeypatch.setattr(_repeat, "_memories", {})
    on_device = _arrays.on_device

    def counted(*given: Any, **options: Any) -> Any:
        made.general += 1
        return on_device(*given, **options)

    monkeypatch.setattr(_arrays, "on_device", counted)
    _libraries.known_library.cache_clear()
    yield made
    _libraries.known_library.cache_clear()
    _api._cached_plan.cache_clear()


def is_product(c: Tensor, a: Tensor, b: Tensor) -> bool:
    return bool((c.array == a.array @ b.array).all())


def test_a_product_like_one_before_is_recognised(machine: Machine) -> None:
    a, b, c = tensor((3, 5)), tensor((5, 4)), tensor((3, 4))
    plan, plan_new = tw.plan(a, b, out=c), tw.plan(a, b)
    ways = (
        lambda a, b, c: plan(a, b, out=c),
        lambda a, b, c: plan_new(a, b),
        lambda a, b, c: tw.matmul(a, b, out=c),
        lambda a, b, c: tw.matmul(a, b),
        lambda a, b, c: tw.matmul(a, b, dtype="float64"),
    )
    for way in ways:
        way(a, b, c)
        before = machine.general
        for _ in range(3):
            x, y, z = tensor((3, 5)), tensor((5, 4)), tensor((3, 4))
            assert is_product(way(x, y, z), x, y)
        assert machine.general == before
    assert tw.matmul(a, b, dtype="float64").dtype is DTYPES["float64"]
    assert tw.matmul(a, b) is not tw.matmul(a, b)
    assert tw.matmul(a, b, out=c) is c
    assert is_product(c, a, b)


def odd(what: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Return a product that is unlike that of a plain 4x4, 4x4 and out, in one thing."""
    a, b, c = (tensor((4, 4)) for _ in "abc")
    options: dict[str, Any] = {}
    match what:
        case "shape":
            b, c = tensor((4, 6)), tensor((4, 6))
        case "strides of a":
            a.array = a.array.T
        case "strides of b":
            b.array = b.array.T
        case "strides of out":
            c.array = c.array.T
        case "dtype":
            a, b, c = (tensor((4, 4), "float64") for _ in "abc")
        case "address of a":
            a = tensor((4, 4), skip=4)
        case "address of b":
            b = tensor((4, 4), skip=8)
        case "address of out":
            c = tensor((4, 4), skip=12)
        case "overlap with a":
            memory = buffer((6, 4), "float32")
            memory[...] = np.arange(24).reshape(6, 4)
            a, c = Tensor(memory[:4]), Tensor(memory[2:])
        case "overlap with b":
            b.array[...] = 2
            c = b
        case "negated":
            a.flag = "neg"
        case "type of a":
            a = Parameter(a.array)
        case "type of b":
            b = Parameter(b.array)
        case "type of out":
            c = Parameter(c.array)
        case "host":
            a, b, c = (Tensor(x.array, flag="host") for x in (a, b, c))
        case "precision":
            options["precision"] = "ieee"
        case "memory":
            options["memory"] = "1MiB"
        case "devices":
            options["devices"] = ["cuda:0"]
        case "verify":
            options["verify"] = True
    return a, b, c, options


@pytest.mark.parametrize(
    "what",
    [
        *("shape", "strides of a", "strides of b", "strides of out", "dtype", "address of a"),
        *("address of b", "address of out", "overlap with a", "overlap with b", "negated"),
        *("type of a", "type of b", "type of out", "host"),
        *("precision", "memory", "devices", "verify"),
    ],
)
def test_a_product_unlike_those_before_goes_the_general_way(machine: Machine, what: str) -> None:
    plain = [tensor((4, 4)) for _ in "abc"]
    for _ in range(2):
        tw.matmul(*plain[:2], out=plain[2])
        tw.matmul(*plain[:2])
    assert machine.general == 2
    a, b, c, options = odd(what)
    x = -a.array if what == "negated" else a.array
    expected = x.copy() @ b.array.copy()
    assert tw.matmul(a, b, out=c, **options) is c
    assert machine.general == 3
    assert (c.array == expected).all()
    # And afterwards the plain product is what it was.
    tw.matmul(*plain[:2], out=plain[2])
    assert machine.general == 3
    assert is_product(plain[2], *plain[:2])


class Foreign:
    """An array of a library that says nothing of its streams."""

    def __init__(self, array: Any) -> None:
        self.array, self.device = array, "gpu"
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __array_namespace__(self) -> Any:
        def empty(shape: Any, dtype: Any, device: str) -> Foreign:
            return Foreign(buffer(shape, dtype))

        return SimpleNamespace(empty=empty, float32=np.float32)


@pytest.fixture
def waited_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Streams that were waited for."""
    streams_waited_for: list[int] = []
    layout = Operand.of
    monkeypatch.setattr(
        arrays,
        "view",
        lambda x, name, stream: arrays.DeviceArray(
            x.array.ctypes.data, x.shape, layout(x.array).strides, x.dtype, 0, False, x
        ),
    )
    monkeypatch.setattr(streams, "synchronize", lambda s, index: streams_waited_for.append(s))
    monkeypatch.setattr(streams, "handle_of", lambda stream, index: stream or streams.DEFAULT)
    monkeypatch.setattr(streams, "follow", lambda handle, other, index: None)
    return streams_waited_for


def test_F7_a_library_of_unknown_streams_is_given_what_is_done(
    machine: Machine, waited_for: list[int]
) -> None:
    """Its own stream does not wait for the one that a product is on."""
    a, b, c = (Foreign(tensor((4, 4)).array) for _ in "abc")
    plan = tw.plan(a, b, out=c)
    calls = (
        lambda **more: tw.matmul(a, b, **more),
        lambda **more: tw.matmul(a, b, out=c, **more),
        lambda **more: tw.matmul([a], [b], **more),
        lambda **more: plan(a, b, out=c, **more),
        lambda **more: tw.gemm(a, b, c, **more),
    )
    for number, call in enumerate(calls, 1):
        call()
        assert waited_for == [streams.DEFAULT] * number == machine.streams
    for call in calls:  # whoever gives a stream waits for it
        call(stream=OTHER_STREAM)
    assert waited_for == [streams.DEFAULT] * len(calls)


@pytest.mark.parametrize("foreign", [{2}, {0, 1}])
def test_F7_libraries_that_meet_are_given_what_is_done(
    machine: Machine, waited_for: list[int], foreign: set[int]
) -> None:
    given: list[Any] = [tensor((4, 4)) for _ in "abc"]
    tw.matmul(given[0], given[1], out=given[2])
    assert waited_for == []
    given = [Foreign(x.array) if i in foreign else x for i, x in enumerate(given)]
    tw.matmul(given[0], given[1], out=given[2])
    assert waited_for == [streams.DEFAULT]
    assert is_product(given[2], given[0], given[1])


def test_conjugated_views_are_copied_every_time(machine: Machine) -> None:
    a, b = tensor((4, 4), "complex64"), tensor((4, 4), "complex64")
    a.array = a.array.T
    lazy = Tensor(a.array, flag="conj")
    for _ in range(2):
        for x, values in ((lazy, a.array.conj()), (a, a.array)):
            assert (tw.matmul(x, b).array == values @ b.array).all()
    assert machine.general == 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: setattr(x, "requires_grad", True), DTypeError, "requires grad"),
        (lambda x: setattr(x, "layout", "torch.sparse_coo"), DTypeError, "sparse"),
        (lambda x: setattr(x, "flag", "freed"), DeviceError, "storage was freed"),
        (lambda x: setattr(x, "is_nested", True), DTypeError, "nested.*unbind"),
        (lambda x: setattr(x.device, "index", 1), DeviceError, "on different GPUs"),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("is_planned", [True, False])
def test_what_is_refused_is_refused_after_a_good_product_too(
    machine: Machine, change: Any, error: Any, message: str, position: int, is_planned: bool
) -> None:
    arrays = [tensor((4, 4)) for _ in "abc"]
    call = tw.plan(*arrays[:2], out=arrays[2]) if is_planned else tw.matmul
    for _ in range(2):
        call(*arrays[:2], out=arrays[2])
    bad = [tensor((4, 4)) for _ in "abc"]
    change(bad[position])
    if message == "sparse":
        bad[position].flag = "traced"
    with pytest.raises(error, match=message):
        call(*bad[:2], out=bad[2])
    general = machine.general
    call(*arrays[:2], out=arrays[2])
    assert machine.general == general
    assert is_product(arrays[2], *arrays[:2])


@pytest.mark.parametrize("flag", ["conj", "neg"])
def test_a_result_is_not_written_through_a_lazy_view(machine: Machine, flag: str) -> None:
    a, b, c = (tensor((4, 4), "complex64") for _ in "abc")
    lazy = Tensor(c.array, flag=flag)
    before = c.array.copy()
    for _ in range(2):
        with pytest.raises(DTypeError, match=r"out is a lazily .* pass the tensor"):
            tw.matmul(a, b, out=lazy)
        with pytest.raises(DTypeError, match=r"c is a lazily .* pass the tensor"):
            tw.gemm(a, b, lazy)
        tw.matmul(a, b, out=tensor((4, 4), "complex64"))
    assert (c.array == before).all()


def test_a_plan_that_verifies_does_so_every_time(machine: Machine) -> None:
    a, b, c = (tensor((4, 4)) for _ in "abc")
    plain = tw.plan(a, b, out=c)
    checked = replace(plain, asked=plain.asked._replace(verify=True))
    plain(a, b, out=c)
    for _ in range(2):
        checked(a, b, out=c)
    assert machine.general == 4  # to plan, to run the plain one first, and to verify twice


def test_a_plan_stays_strict_about_what_it_is_for(machine: Machine) -> None:
    a, b, c = (tensor((4, 4)) for _ in "abc")
    plan = tw.plan(a, b, out=c)
    for _ in range(2):
        plan(a, b, out=c)
        with pytest.raises(ShapeError, match="b .* is not what this plan is for"):
            plan(a, Tensor(b.array.T), out=c)
        with pytest.raises(ShapeError, match="out .* is not what this plan is for"):
            plan(a, b, out=Tensor(c.array.T))
        with pytest.raises(ShapeError, match="out .* exactly the result's shape"):
            plan(a, b, out=tensor((6, 4)))
        with pytest.raises(OptionError, match="whether out= is given"):
            plan(a, b)
        tw.matmul(a, b)
        tw.matmul(a, Tensor(b.array.T), out=c)


def test_a_plan_for_host_arrays_is_not_for_device_arrays_of_their_layout(machine: Machine) -> None:
    """It would be for copies, which are not transposed."""
    a, b = np.ones((5, 4), np.float32).T, np.ones((5, 3), np.float32)
    plan = planned(Operand.of(a), Operand.of(b), gpu=facts_of())
    with pytest.raises(OptionError, match="in device memory, and this plan is for .* host memory"):
        plan(Tensor(a), Tensor(b))


def test_a_plan_for_device_arrays_is_not_for_host_arrays_of_their_layout(machine: Machine) -> None:
    """Whose copies would lie otherwise than its kernels were chosen for."""
    a, b = np.ones((5, 4), np.float32).T, np.ones((5, 3), np.float32)
    plan = tw.plan(Tensor(a), Tensor(b))
    with pytest.raises(OptionError, match="a .* is in host memory, and this plan is for .* cuda:0"):
        plan(a, b)


def test_the_stream_is_the_one_that_is_current_or_given(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered: list[tuple[int, int]] = []
    monkeypatch.setattr(streams, "follow", lambda *given: ordered.append(given[:2]))

    class Stream:
        def __init__(self, handle: int) -> None:
            self.__cuda_stream__ = (0, handle)

    a, b, c = (tensor((4, 4)) for _ in "abc")
    tw.matmul(a, b, out=c)
    tw.matmul(a, b, out=c)
    machine.stream = OTHER_STREAM
    tw.matmul(a, b, out=c)
    machine.stream = 0
    tw.matmul(a, b, out=c, stream=Stream(1))
    assert machine.streams == [1, 1, OTHER_STREAM, 1]
    assert machine.general == 1
    assert not ordered
    machine.stream = 2  # operands made there are waited for, which only the general way does
    tw.matmul(a, b, out=c, stream=Stream(1))
    assert machine.streams[4:] == [1]
    assert ordered == [(1, 2)] * 3
    with pytest.raises(OptionError, match="is not a stream"):
        tw.matmul(a, b, out=c, stream="default")


def test_a_forked_process_is_told_before_anything_is_made(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = tensor((4, 4)), tensor((4, 4))
    tw.matmul(a, b)

    def forked() -> Any:
        raise DeviceError("this process was forked")

    monkeypatch.setattr(driver, "require", forked)
    monkeypatch.setattr(Tensor, "new_empty_strided", None)
    monkeypatch.setattr(sys.modules["torch"], "empty", None)
    with pytest.raises(DeviceError, match="forked"):
        tw.matmul(a, b)
    with pytest.raises(DeviceError, match="forked"):
        tw.matmul(a, tensor((4, 7)))


def test_options_without_a_hash_are_answered_as_ever(machine: Machine) -> None:
    a, b = tensor((4, 4)), tensor((4, 4))
    for _ in range(2):
        tw.matmul(a, b)
        with pytest.raises(tw.TilewiseError, match="precision"):
            tw.matmul(a, b, precision=["ieee"])  # type: ignore[arg-type]
        with pytest.raises(tw.TilewiseError, match="dtype"):
            tw.matmul(a, b, dtype=[1])


def test_what_is_remembered_is_bounded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_repeat, "_MOST_QUESTIONS", 5)
    for n in range(1, 40):
        assert tw.matmul(tensor((2, n)), tensor((n, 2))).shape == (2, 2)
        kept = _repeat._memories[Tensor].kept
        assert len(kept) <= 5
    for steps in range(1, 20):
        a = Tensor(tensor((4, 4 * steps)).array[:, ::steps])
        b = tensor((4, 4))
        for _ in range(2):
            assert is_product(tw.matmul(a, b), a, b)
    assert max(map(len, kept.values())) == _repeat._MOST_KINDS


def test_what_is_known_is_not_remembered_again(machine: Machine) -> None:
    a, b = tensor((4, 4)), tensor((4, 4))
    tw.matmul(a, b)
    for _ in range(10):  # out overlaps a, so the general way is gone each time
        tw.matmul(a, b, out=a)
    assert machine.general == 11
    assert [len(kept) for kept in _repeat._memories[Tensor].kept.values()] == [2]


class Ndarray:
    """What tilewise asks of a CuPy array."""

    def __init__(self, array: Any, dtype: Any = None) -> None:
        self.array = buffer(array, dtype) if isinstance(array, tuple) else array
        self.shape, self.strides, self.dtype = (
            self.array.shape,
            self.array.strides,
            self.array.dtype,
        )
        self.data = SimpleNamespace(ptr=self.array.ctypes.data, device_id=0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_libraries_do_not_take_each_others_products(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy: Any = ModuleType("cupy")
    cupy.ndarray = Ndarray
    stream = SimpleNamespace(ptr=OTHER_STREAM)
    runtime = SimpleNamespace(getDevice=lambda: 0)
    cupy.cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda index: stream)
    monkeypatch.setattr(Ndarray, "__module__", "cupy")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    a, b = tensor((4, 4)), tensor((4, 4))
    x, y = Ndarray(a.array), Ndarray(b.array)
    plan = tw.plan(a, b)
    for _ in range(3):
        for call in (plan, tw.matmul):
            for first, second in ((a, b), (x, y)):
                found = call(first, second)
                assert type(found) is type(first)
                assert (found.array == a.array @ b.array).all()
        out = Ndarray((4, 4), "float32")
        assert tw.matmul(x, y, out=out) is out
        assert (out.array == a.array @ b.array).all()
        for one, other in ((a, y), (x, b)):
            with pytest.raises(DTypeError, match="different libraries"):
                tw.matmul(one, other)
    assert machine.general == 1 + 4 + 1 + 6
    assert set(machine.streams) == {1, OTHER_STREAM}
    for first, second in ((a, b), (x, y)):  # a result in host memory is none like it
        asked = _repeat.question(first, second, None, None)
        assert _repeat.product(first, second, np.zeros((4, 4), "f4"), None, asked) is None
        assert _repeat.product(first, second, None, None, asked) is not None
    transposed = Ndarray(a.array.T)
    assert (tw.matmul(transposed, y).array == a.array.T @ b.array).all()
    far = Ndarray(np.copyto(held := buffer((4, 4), "float32", skip=4), a.array) or held)
    assert (tw.matmul(far, y).array == a.array @ b.array).all()
    assert machine.general == 14


def test_D2_no_room_for_a_result_is_said_with_the_way_out(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OutOfMemoryError(RuntimeError):
        """torch's."""

    def full(*given: Any, **options: Any) -> Any:
        raise OutOfMemoryError("CUDA out of memory")

    a, b = tensor((4, 5)), tensor((5, 6))
    tw.matmul(a, b)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "new_empty_strided", full)  # what a product like one before calls
        patch.setattr(sys.modules["torch"], "empty", full)
        for _ in range(2):
            with pytest.raises(BudgetError, match=r"\(4, 6\) float32 takes 96 B.*np\.memmap"):
                tw.matmul(a, b)
    assert is_product(tw.matmul(a, b), a, b)


def test_a_group_like_one_before_is_launched_at_once(machine: Machine) -> None:
    a, b = [tensor((3, 4)) for _ in range(4)], [tensor((4, 5)) for _ in range(4)]
    for general in (4, 4, 4):
        for c, x, y in zip(tw.matmul(a, b), a, b, strict=True):
            assert is_product(c, x, y)
        assert machine.general <= general
    b[2] = tensor((4, 6))
    assert tw.matmul(a, b)[2].shape == (3, 6)
    with pytest.raises(ShapeError, match="pair 3 of the group"):
        tw.matmul(a, [*b[:3], tensor((5, 5))])


def test_a_group_on_a_device_is_checked_whole(machine: Machine) -> None:
    a = [tensor((4, 4)) for _ in range(3)]
    before = [x.array.copy() for x in a]
    wide, place = tensor((4, 8)), tensor((4, 4))
    first, second = Tensor(wide.array[:, ::2]), Tensor(wide.array[:, 1::2])
    for out in (
        [place, place, first],
        [a[1], place, first],
        [Tensor(wide.array[:, :4]), first, place],
    ):
        with pytest.raises(ShapeError, match=r"out\[0\] shares memory with an array of another"):
            tw.matmul(a, a, out=out)
    with pytest.raises(ShapeError, match="pair 2 of the group: out"):
        tw.matmul(a, a, out=[place, first, tensor((3, 3))])
    with pytest.raises(BudgetError, match="pair 0 of the group: the results of all others take"):
        tw.matmul(a, a, memory=100)
    assert not machine.streams
    tw.matmul(a, a, out=[first, second, place])  # which alternate, and share nothing
    for x, y, z in zip(a, before, (first, second, place), strict=True):
        assert np.array_equal(x.array, y)
        assert is_product(z, x, x)


def test_a_budget_is_of_the_device_and_counts_copies(
    machine: Machine,
) -> None:
    a, b, c = tensor((16, 16)), tensor((16, 16)), tensor((16, 16))
    assert tw.plan(a, b, memory="50%").asked.memory_bytes == facts_of().memory_bytes // 2
    assert "allowed on cuda:0" in str(tw.plan(a, b, memory="50%"))
    with pytest.raises(OptionError, match="is not a budget"):
        tw.plan(a, b, memory="half")
    before = a.array.copy()
    plan = tw.plan(a, b, out=c, memory=2000)
    assert tw.plan(a, b, out=a).held_bytes == 1024 + 16
    with pytest.raises(BudgetError, match="an out that shares no memory with an operand"):
        tw.matmul(a, a, out=a, memory=2000)
    apart = tw.plan(a, a, out=c, memory=2000)
    with pytest.raises(BudgetError, match="shares no memory"):
        apart(a, a, out=a)
    assert np.array_equal(a.array, before)
    assert not machine.streams
    plan(a, b, out=c)
    assert is_product(c, a, b)
    tw.matmul(a, b, out=a, memory=2000)
    assert np.array_equal(a.array, before @ b.array)
    assert machine.shrunk == [(streams.DEFAULT, 2000), (streams.DEFAULT, 2000 - 1040)]


def test_a_workspace_gives_back_what_a_budget_has_no_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed = []

    class Memory:
        def __init__(self, nbytes: int) -> None:
            self.nbytes, self.pointer = nbytes, 4096

        def free(self, stream: int) -> None:
            freed.append((self.nbytes, stream))

    monkeypatch.setattr(memory, "allocate", lambda nbytes, *_: Memory(nbytes))
    monkeypatch.setattr(streams, "identity", lambda stream, index: stream or None)
    space = memory.Workspace(0)
    space.shrink(5, 0)
    for stream in (5, 6):
        with space.on(stream, 1000):
            pass
    space.shrink(5, 1000)
    space.shrink(0, 0)  # of a stream that is captured
    assert space.held_bytes == 2000
    space.shrink(5, 999)
    assert (freed, space.held_bytes) == ([(1000, 5)], 1000)
