"""Cases of groups A, B, E and F that need a GPU and belong to no other file."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewise as tw
from benchmarks import harness, hopper
from tests.gpu.support import download, upload
from tests.support import small_integers, within_bound
from tilewise import kernels
from tilewise.errors import CheckError, DeviceError, OptionError, TilewiseError
from tilewise.kernels.hopper_plan import choose
from tilewise.runtime import device

pytestmark = pytest.mark.gpu

BITS = Path(__file__).parents[1] / "data" / "bits.json"


def normal(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * np.random.default_rng(seed + 1).standard_normal(shape)
    return values.astype(dtype)


def test_A4_a_benchmark_refuses_a_kernel_that_does_half_of_the_work() -> None:
    if device.facts(0).capability != (9, 0):
        pytest.skip("compute capability 9.0 is needed")
    import torch

    a, b, c = (torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    problem = hopper.problem(a, b, c)
    choice = choose(problem)
    good = hopper.prepare(problem, choice, a, b, c)

    def broken() -> None:
        good()
        c[:, 512:] = float("nan")

    timings = hopper.measure({"tilewise": [good]}, [(a, b, c)], 10.0, count=2)
    assert timings["tilewise"]["median_s"] > 0
    with pytest.raises(AssertionError, match="524288 elements are wrong, the first"):
        hopper.measure({"tilewise": [broken]}, [(a, b, c)], 10.0, count=2)
    with pytest.raises(AssertionError, match="operations a second"):
        harness.refuse_impossible("1024", 2 * 1024**3, 1e-6, hopper.PEAK)


def test_A21_F3_a_device_newer_than_every_kernel_gets_ptx_or_a_refusal() -> None:
    assert kernels.find("portable", "finish_fp32", (13, 0)).target == "compute_80"
    with pytest.raises(DeviceError, match=r"compute capability 13\.0"):
        kernels.find("hopper", "pack_16", (13, 0))


def test_A27_a_flipped_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    a, b = (upload(normal((1024, 1024), np.float32, seed)) for seed in (1, 2))
    honest = tw.matmul(a, b, verify=True)
    assert tw.check(a.get(), b.get(), honest.get())
    for bit in (28, 21):  # an exponent's, and a mantissa's far above the bound
        c = honest.copy()
        c.view(cupy.uint32)[700, 41] ^= np.uint32(1 << bit)
        found = tw.check(a.get(), b.get(), c.get())
        assert not found
        assert "row 700, column 41" in str(found)

    from tilewise import _gpu

    launch = _gpu.multiply

    def flipping(plan: Any, x: Any, y: Any, out: Any, *rest: Any) -> Any:
        put = launch(plan, x, y, out, *rest)
        view = cupy.ndarray(
            out.shape,
            np.uint32,
            cupy.cuda.MemoryPointer(
                cupy.cuda.UnownedMemory(out.pointer, out.shape[0] * 4096, out), 0
            ),
        )
        view[3, 5] ^= np.uint32(1 << 28)
        return put

    monkeypatch.setattr(_gpu, "multiply", flipping)
    with pytest.raises(CheckError, match="row 3, column 5"):
        tw.matmul(a, b, verify=True)


def test_A27_honest_products_are_never_accused() -> None:
    rng = np.random.default_rng(27)
    for _ in range(100):
        scale = np.float32(10) ** rng.uniform(-6, 6, (64, 1)).astype(np.float32)
        a = rng.standard_normal((64, 200)).astype(np.float32) * scale
        b = rng.standard_normal((200, 48)).astype(np.float32)
        tw.matmul(upload(a), upload(b), verify=True)


def test_B12_no_shape_ends_the_process() -> None:
    program = """
import cupy, numpy as np, tilewise as tw
rng = np.random.default_rng(0)
near = np.array([64, 14688, 1536]) + rng.integers(-9, 9, (300, 3))
shapes = [(64, 14688, 1536), *near.tolist()]
for m, k, n in shapes:
    assert not tw.matmul(cupy.zeros((m, k), np.float16), cupy.zeros((k, n), np.float16)).any()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_B20_a_long_thin_float16_operand() -> None:
    import cupy

    tall = cupy.ones((8388353, 1), np.float16)
    assert (tw.matmul(tall, cupy.ones((1, 2), np.float16)) == 1).all()
    assert not tw.matmul(cupy.zeros_like(tall), cupy.ones((1, 2), np.float16)).any()


def test_E2_each_call_follows_its_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    host = normal((200, 300), np.float32, 2)
    a = torch.from_numpy(host).cuda()
    wrong: list[Any] = []

    def work(precision: str | None) -> None:
        first = None
        for _ in range(20):
            plan = tw.plan(a, a.T, precision=precision)
            got = plan(a, a.T).cpu().numpy()
            first = got if first is None else first
            if plan.precision != precision or not np.array_equal(first, got):
                wrong.append(precision)
            if precision != "tf32" and not within_bound(got, host, host.T):
                wrong.append(precision)

    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for override in ("0", "1"):
            monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
            torch.backends.cuda.matmul.allow_tf32 = override == "1"
            modes = (None, "ieee", "tf32", None, "ieee")
            threads = [threading.Thread(target=work, args=(mode,)) for mode in modes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert not wrong
    with pytest.raises(OptionError, match="precision"):
        tw.matmul(a, a.T, precision="fast")


def test_E3_a_product_and_its_transpose_agree_within_the_bound() -> None:
    a = np.float32(1e10) * normal((7000, 6), np.float32, 3)
    b = np.float32(1e10) * normal((7000, 7000), np.float32, 4)
    x, y = upload(a), upload(b)
    one, other = tw.matmul(x.T, y).get(), tw.matmul(y.T, x).get().T
    assert within_bound(one, a.T, b)
    assert within_bound(other, a.T, b)


def test_E11_the_plan_says_which_promise_of_bits_holds() -> None:
    host = np.ones((200, 200), np.float32)
    assert tw.plan(upload(host), upload(host)).bits.startswith("K alone")
    assert tw.plan(host, host, devices="cpu").bits.startswith("this plan")


def test_E12_bits_need_no_environment_variable_and_no_order_of_imports() -> None:
    program = """
import hashlib, sys
if sys.argv[1] == "late":
    import torch
    torch.ones(8, device="cuda") @ torch.ones(8, device="cuda")
import numpy as np, tilewise as tw, torch
rng = np.random.default_rng(12)
a, b = (torch.from_numpy(rng.standard_normal((300, 20000), np.float32)).cuda() for _ in range(2))
for kind in (torch.float32, torch.bfloat16):
    c = tw.matmul(a.to(kind), b.to(kind).T).float().cpu().numpy()
    print(hashlib.sha256(c.tobytes()).hexdigest())
"""
    said = {
        subprocess.run(
            [sys.executable, "-c", program, when], capture_output=True, text=True, check=True
        ).stdout
        for when in ("early", "late")
    }
    assert len(said) == 1


def test_E18_bits_on_one_model_are_those_on_record() -> None:
    name = device.facts(0).name
    known = json.loads(BITS.read_text())
    if name not in known:
        pytest.skip(f"no bits on record for {name}: python -m tests.gpu.test_cases shows them")
    assert bits_of_products() == known[name]


def test_F1_F10_F11_what_is_read_where_and_by_whom() -> None:
    import cupy

    host = small_integers(np.random.default_rng(1), (40, 30), "float32")
    host.setflags(write=False)
    frozen = np.frombuffer(host.tobytes(), np.float32).reshape(40, 30)
    for a in (host, frozen):
        got = tw.matmul(a, a.T, devices="cuda:0")
        assert (got == host @ host.T).all()
        assert tw.plan(a, a.T, devices="cuda:0").device == "cuda:0"
    with pytest.raises(TilewiseError, match="read-only"):
        tw.matmul(host, host.T, out=np.broadcast_to(np.float32(0), (40, 40)), devices="cuda:0")
    assert type(tw.matmul([[1.0, 2.0]], [[3.0], [4.0]], devices="cuda:0")) is np.ndarray
    assert tw.plan(cupy.asarray(host), cupy.asarray(host).T).device == "cuda:0"


def test_F5_axes_of_length_one_have_any_strides() -> None:
    import cupy

    row = cupy.arange(77, dtype=np.float32).reshape(1, 77)
    odd = cupy.ndarray((1, 77), np.float32, row.data, (12, 4))
    taken = cupy.from_dlpack(odd)
    for x in (row, odd, taken):
        assert float(tw.matmul(x, x.T)[0, 0]) == float((row * row).sum())
        assert (tw.matmul(x.T, x) == row.T * row).all()


def bits_of_products() -> dict[str, str]:
    """Return hashes of products whose bits a GPU model keeps."""
    found = {}
    for dtype in (
        *("float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128"),
        ml_dtypes.float8_e4m3fn,
    ):
        for m, n, k in ((33, 65, 40), (200, 130, 1000), (64, 64, 30000)):
            a, b = normal((m, k), dtype, 5), normal((k, n), dtype, 6)
            c = download(tw.matmul(upload(a), upload(b)))
            name = f"{np.dtype(dtype).name} {m}x{n}x{k}"
            found[name] = hashlib.sha256(np.ascontiguousarray(c).tobytes()).hexdigest()[:16]
    return found


if __name__ == "__main__":
    print(json.dumps({device.facts(0).name: bits_of_products()}, indent=1))
