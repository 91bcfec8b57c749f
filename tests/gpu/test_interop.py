"""Case group F on a GPU: other libraries' arrays, streams, threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import tilewise as tw

pytestmark = pytest.mark.gpu


def test_F2_every_order_of_imports_works() -> None:
    for order in permutations(("tilewise", "torch", "cupy")):
        program = "\n".join(f"import {name}" for name in order)
        program += """
a = cupy.ones((64, 64), cupy.float32)
t = torch.ones((64, 64), device="cuda")
assert (tilewise.matmul(a, a) == 64).all() and (tilewise.matmul(t, t) == 64).all()
assert (a @ a == 64).all() and (t @ t == 64).all()
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, (order, done.stderr)


def test_F4_F6_views_arrive_with_their_strides() -> None:
    import cupy

    a = cupy.arange(63, dtype=cupy.float32).reshape(7, 9)
    b = cupy.arange(45, dtype=cupy.float32).reshape(9, 5)
    for view in (a[:, ::-1], a[::-1].T[::-1].T, a[::2], cupy.asfortranarray(a)):
        assert (tw.matmul(view, b).get() == view.get() @ b.get()).all()
    out = cupy.zeros((14, 5), np.float32)
    tw.matmul(a, b, out=out[::2])
    assert (out[::2].get() == a.get() @ b.get()).all()
    assert not out[1::2].any()


def test_F7_F12_results_are_of_the_operands_kind() -> None:
    import cupy
    import torch

    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32):
        t = torch.ones((33, 70), device="cuda").to(dtype)
        got = tw.matmul(t, t.T)
        assert type(got) is torch.Tensor
        assert got.dtype is dtype
        assert got.device == t.device
        assert (got == 70).all()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        t = torch.ones((33, 70), device="cuda").to(dtype)
        got = tw.matmul(t, t.T)
        assert got.dtype is torch.float32
        assert (got == 70).all()
    assert type(tw.matmul(cupy.ones((2, 3)), cupy.ones((3, 2)))) is cupy.ndarray
    with pytest.raises(tw.TilewiseError, match="detach"):
        tw.matmul(t.float().requires_grad_(), t.float().T)
    with pytest.raises(tw.TilewiseError, match="cupy, torch"):
        tw.matmul(cupy.ones((33, 70), np.float32), t.float().T)


def test_F12_dask_chunks_of_cupy_give_chunks_of_cupy() -> None:
    pytest.importorskip("dask", reason="dask is not installed")
    import cupy
    import dask.array as da

    rng = np.random.default_rng(5)
    for dtype in ("float16", "float32", "int32"):
        a = rng.integers(-4, 5, (700, 900)).astype(dtype)
        b = rng.integers(-4, 5, (900, 500)).astype(dtype)
        x = da.from_array(cupy.asarray(a), (300, 250), asarray=False)
        y = da.from_array(cupy.asarray(b), (400, 500), asarray=False)
        z = tw.matmul(x, y)
        assert type(z._meta) is cupy.ndarray
        for scheduler in ("sync", "threads"):
            got = z.compute(scheduler=scheduler)
            assert type(got) is cupy.ndarray
            assert got.dtype == dtype
            assert (got.get() == (a.astype("f8") @ b.astype("f8")).astype(dtype)).all()
        mixed = tw.matmul(x, b).compute(scheduler="threads")
        assert type(mixed) is np.ndarray
        assert (mixed == got.get()).all()


def test_F7_jax_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else JAX takes three quarters of the device for itself, and the tests after this one lack it.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax", reason="jax is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("jax sees no GPU")
    a = jax.numpy.ones((33, 70), jax.numpy.float32)
    got = tw.matmul(a, a.T)
    assert isinstance(got, jax.Array)
    assert (np.asarray(got) == 70).all()
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.cuda._sleep(2**28)  # on the stream that products of JAX's arrays are on, not on JAX's
    assert (np.asarray(tw.matmul(a, a.T)) == 70).all()


def test_F9_the_product_is_in_the_order_of_the_stream() -> None:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(50):
            a = torch.randn((2048, 2048), device="cuda")
            b = a * 2
            c = tw.matmul(a, b)
            d = torch.matmul(a.double(), b.double())
            assert (c.double() - d).abs().max() < 1e-2
    other = torch.cuda.Stream()
    a = torch.ones((1024, 1024), device="cuda")
    out = torch.zeros((1024, 1024), device="cuda")
    torch.cuda.synchronize()

    class Raw:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, other.cuda_stream

    tw.matmul(a, a, out=out, stream=Raw())
    other.synchronize()
    assert (out == 1024).all()


def test_F13_threads_keep_to_themselves() -> None:
    import cupy

    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(40):
                dtype = ("float32", "float16", "int32")[seed % 3]
                a = cupy.asarray(rng.integers(-3, 4, (200, 150)).astype(dtype))
                got = tw.matmul(a, a.T, precision="ieee" if dtype == "float32" else None)
                stream.synchronize()
                host = a.get().astype(float)
                if not (got.get() == (host @ host.T).astype(dtype)).all():
                    wrong.append((seed, dtype))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_called_plan_can_be_captured_in_a_graph() -> None:
    import torch

    a = torch.ones((512, 512), device="cuda", dtype=torch.float16)
    out = torch.zeros((512, 512), device="cuda", dtype=torch.float16)
    plan = tw.plan(a, a, out=out)
    plan(a, a, out=out)
    torch.cuda.synchronize()
    out.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(a, a, out=out)
    assert not out.any()
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 512).all()
