"""Products like one before, on a GPU: the same answers and errors as of the first."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import tilewise as tw
from tilewise import _libraries, _repeat
from tilewise.errors import DTypeError, OptionError

pytestmark = pytest.mark.gpu

N = 64


@pytest.fixture(autouse=True, params=["torch's guard", "plain guard"])
def guard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go through everything both with torch's own check of tensors and without it."""
    import torch

    known: Any = _libraries.known_library("torch")
    guard = _libraries._trusted_guard(torch) if request.param == "torch's guard" else None
    monkeypatch.setattr(known, "_guard", guard or _libraries._plain_guard)
    monkeypatch.setattr(_repeat, "_memories", {})


def whole(shape: tuple[int, ...], dtype: str = "float32") -> Any:
    import torch

    made = torch.randint(-4, 5, shape, device="cuda").to(getattr(torch, dtype))
    if made.is_complex():
        made = made + 1j * torch.randint(-4, 5, shape, device="cuda")
    return made


def exact(a: Any, b: Any) -> Any:
    import torch

    wide = torch.complex128 if a.is_complex() else torch.float64
    return a.to(wide) @ b.to(wide)


def test_every_view_after_a_plain_product() -> None:
    """In the same shapes and types, so that nothing but the view itself tells them apart."""
    import torch

    for dtype in ("bfloat16", "float32", "complex64"):
        kind = getattr(torch, dtype)

        def views(kind: Any = kind, dtype: str = dtype) -> list[Any]:
            wide = whole((2 * N, 2 * N), dtype)
            made = [
                whole((N, N), dtype),
                whole((N, N), dtype).T,
                wide[::2, ::2],
                wide[1 : N + 1, :N],
            ]
            made += [wide[:N, 1 : N + 1], wide[3, :N].expand(N, N)]
            if kind.is_complex:
                made += [made[0].conj(), made[1].conj(), torch._neg_view(made[0])]
            else:
                made += [torch._neg_view(made[0]), torch._neg_view(made[2])]
                made += [(wide[:N, :N].float() + 0j).conj().imag.to(kind)]
            return made

        for _ in range(2):
            for a in views():
                for b in views()[::3]:
                    out = torch.full((N, N), torch.nan, device="cuda", dtype=kind)
                    tw.matmul(a, b, out=out)
                    assert torch.equal(out, exact(a, b).to(kind))
                    assert torch.equal(tw.matmul(a, b), out)


def test_outs_of_all_kinds_after_a_plain_product() -> None:
    import torch

    a, b = whole((N, N)), whole((N, N))
    for _ in range(2):
        tw.matmul(a, b, out=whole((N, N)))
        wide = torch.full((2 * N, 2 * N), 7.0, device="cuda")
        for out in (wide[:N, :N].T, wide[::2, 1::2], wide[N:, 1 : N + 1]):
            tw.matmul(a, b, out=out)
            assert torch.equal(out.double(), exact(a, b))
        for part in (0, 16, N * N):
            memory = whole((3 * N * N,))
            x = memory[: N * N].view(N, N)
            out = memory[part : part + N * N].view(N, N)
            expected = exact(x, b)
            tw.matmul(x, b, out=out)
            assert torch.equal(out.double(), expected)
            x.copy_(whole((N, N)))
            expected = exact(b, x)
            tw.matmul(b, x, out=out)
            assert torch.equal(out.double(), expected)


def test_what_is_refused_is_refused_after_a_good_product_too() -> None:
    import torch

    a, b, out = (whole((N, N)) for _ in "abc")
    plan = tw.plan(a, b, out=out)
    for call in (plan, tw.matmul, plan, tw.matmul):
        call(a, b, out=out)
        for bad, error, message in (
            (whole((N, N)).requires_grad_(), DTypeError, "requires grad"),
            (whole((N, N)).to_sparse(), DTypeError, "sparse"),
        ):
            for arrays in ((bad, b, out), (a, bad, out), (a, b, bad)):
                with pytest.raises(error, match=message):
                    call(*arrays[:2], out=arrays[2])
        with pytest.raises(DTypeError, match="lazily"):
            call(a, b, out=torch._neg_view(out))
        there = whole((N, N)).cpu()  # is another product, which matmul computes
        for arrays in ((there, b, out), (a, there, out), (a, b, there)):
            if call is plan:
                with pytest.raises(OptionError, match="make a plan"):
                    call(*arrays[:2], out=arrays[2])
            else:
                call(*arrays[:2], out=arrays[2])
                expected = exact(*(x.cuda() for x in arrays[:2]))
                assert torch.equal(arrays[2].cuda().double(), expected)
        call(a, b, out=out)
        assert torch.equal(out.double(), exact(a, b))


def test_libraries_and_streams_in_turn() -> None:
    import cupy
    import torch

    a, b = whole((N, N)), whole((N, N))
    x, y = cupy.asarray(a), cupy.asarray(b)
    other, third = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    expected = exact(a, b)
    for _ in range(20):
        with torch.cuda.stream(other):
            p = a.clone()
            found = [tw.matmul(p, b), tw.matmul(p, b, out=torch.empty_like(a))]
            assert all(torch.equal(c.double(), expected) for c in found)
        with third:
            c = tw.matmul(x + 0, y)
            assert type(c) is cupy.ndarray
            third.synchronize()
        assert bool((torch.as_tensor(c, device="cuda").double() == expected).all())
        assert torch.equal(tw.matmul(a, b).double(), expected)


def test_repeated_products_in_many_threads_and_contexts() -> None:
    """A thread of its own has no current context until a launch makes one so."""
    import torch

    arrays = [(whole((N, N)), whole((N, N)), whole((N, N))) for _ in range(8)]
    torch.cuda.synchronize()
    tw.matmul(*arrays[0][:2], out=arrays[0][2])

    def work(a: Any, b: Any, c: Any) -> None:
        for _ in range(200):
            tw.matmul(a, b, out=c)

    threads = [threading.Thread(target=work, args=three) for three in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert all(torch.equal(c.double(), exact(a, b)) for a, b, c in arrays)


def test_a_plain_product_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy
    import torch

    kept = []
    keep = _repeat.keep
    monkeypatch.setattr(_repeat, "keep", lambda *args, **more: kept.append(keep(*args, **more)))
    for a, b in ((whole((N, 24)), whole((24, 8))), (cupy.ones((N, 25)), cupy.ones((25, 8)))):
        kept.clear()
        plan = tw.plan(a, b)
        for _ in range(3):
            plan(a, b)
            c = tw.matmul(a, b)
            tw.matmul(a, b, out=c)
        assert len(kept) == 3
    torch.cuda.synchronize()
