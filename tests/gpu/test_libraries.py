"""How torch's tensors are recognised: on the host, which is like any device for torch's guard."""

from __future__ import annotations

import math
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilewise import _libraries

pytestmark = pytest.mark.gpu  # that is, where torch is

torch: Any = pytest.importorskip("torch", reason="torch is not installed")


def test_torchs_own_guard_tells_apart_what_it_must() -> None:
    guard = _libraries._trusted_guard(torch)
    assert guard is not None
    plain, *others = (torch.zeros((3, 4)) for _ in range(3))
    are_alike = guard([plain, *others])
    assert are_alike(plain, *others)
    assert are_alike(plain.clone(), plain, torch.ones((4, 4))[1:])
    imaginary = torch.zeros((3, 4), dtype=torch.complex64).conj().imag
    for odd in (
        torch.zeros((4, 3)).T,
        plain.half(),
        plain.to("meta"),
        plain.to_sparse(),
        imaginary.as_strided((3, 4), (4, 1)),
        torch.zeros((3, 4), requires_grad=True),
        torch.nn.Parameter(plain, requires_grad=False),
    ):
        for position in range(3):
            tensors = [plain, *others]
            tensors[position] = odd
            assert not are_alike(*tensors)
            with torch.no_grad():
                assert not are_alike(*tensors)


def some(*shape: int) -> Any:
    """Return a tensor at a multiple of 16 bytes."""
    room = torch.zeros(math.prod(shape) + 4)
    return room[-room.data_ptr() % 16 // 4 :][: math.prod(shape)].view(shape)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_tensors_are_recognised_by_torchs_guard() -> None:
    library = _libraries._Torch(torch)
    for shapes in (
        ((3, 4), (4, 8), None),
        ((3, 4), (4, 8), (3, 8)),
        ((4,), (4,), ()),
        ((2, 1, 3, 4), (5, 4, 8), (2, 5, 3, 8)),
    ):
        plain, others = (
            [None if shape is None else some(*shape) for shape in shapes] for _ in range(2)
        )
        recognise = library.recogniser(*plain)
        for given in (plain, others):
            assert recognise(*given) == tuple(0 if x is None else x.data_ptr() for x in given)
        for odd in (
            torch.nested.nested_tensor([some(4), some(4)]),  # ends the process if the guard sees it
            some(9)[1:],
            np.zeros((3, 4), np.float32),
            None,
        ):
            for position in range(2 if shapes[2] is None else 3):
                given = [*plain]
                given[position] = odd
                with suppress(RuntimeError):
                    assert recognise(*given) is None


def test_squares_are_recognised_as_such() -> None:
    library = _libraries._Torch(torch)
    a, b, c = some(4, 4), some(4, 4), some(4, 4)
    square, product = library.recogniser(a, a, c), library.recogniser(a, b, c)
    assert square(b, b, c) == (b.data_ptr(), b.data_ptr(), c.data_ptr())
    assert product(c, a, b) == (c.data_ptr(), a.data_ptr(), b.data_ptr())
    assert square(a, b, c) is None
    assert product(a, a, c) is None
    assert product(a, b, a) is None  # and would be refused for the overlap


@pytest.mark.parametrize("broken", ["missing", "says yes", "says no", "takes other things"])
def test_a_guard_that_is_not_what_it_was_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:

    class TensorGuards:
        def __init__(self, *tensors: Any, dynamic_dims_sizes: Any, dynamic_dims_strides: Any):
            if broken == "takes other things":
                raise TypeError

        def check(self, *tensors: Any) -> bool:
            return broken == "says yes"

    guards = (
        SimpleNamespace() if broken == "missing" else SimpleNamespace(TensorGuards=TensorGuards)
    )
    monkeypatch.setattr(torch._C._dynamo, "guards", guards)
    assert _libraries._trusted_guard(torch) is None
