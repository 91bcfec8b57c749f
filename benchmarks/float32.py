"""float32 on Hopper against torch.mm (cuBLAS SGEMM, TF32 off), on the device's own clock.

Needs a Hopper GPU and torch. Measured is all that a product launches: splitting, multiplying and
what is flagged computed again. Results are first held to the bound that the plan states, element by
element, against float64, on NaN; then timed as in ``benchmarks.hopper``. With ``precision="tf32"``
the other is cuBLAS with TF32 on. Errors of both are compared on three kinds of data.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tilewise as tw
from benchmarks import hopper
from benchmarks.harness import Benchmark
from tilewise import kernels
from tilewise._gpu import OnGpu
from tilewise._plan import Plan
from tilewise._recipe import Recipe
from tilewise.runtime import device
from tilewise.runtime.launch import Launch

#: Sizes, and the least ratio of SGEMM's time to ours.
SHAPES = {
    (1024, 1024, 1024): 1.0,
    (2048, 2048, 2048): 3.3,
    (4096, 4096, 4096): 4.0,
    (8192, 8192, 8192): 4.2,
    (16384, 16384, 16384): 3.7,
    (32768, 32768, 32768): 3.7,
    (4097, 4097, 4097): 3.0,
    (777, 3333, 5555): 3.0,
    (16, 8192, 8192): 1.5,
    (64, 7168, 2112): 0.9,
    (8192, 64, 8192): 0.9,
    (8192, 16, 8192): 0.85,
    (8192, 1, 8192): 0.5,
    (4096, 16, 4096): 0.6,
    (128, 4096, 7168): 1.0,
    (128, 128, 100000): 0.75,
    (4096, 4096, 32): 0.9,
}
#: The same for precision="tf32" against cuBLAS with TF32.
TF32 = {4096: 1.3, 8192: 1.5, 16384: 1.6, 32768: 1.3}
#: Rows of 8192 that hold a NaN or an Inf, and the least ratio, on normal data.
FLAGGED = {("NaN", 1): 3.5, ("NaN", 82): 3.5, ("NaN", 8192): 20, ("Inf", 82): 3.0}
LEAST_LOGNORMAL = 1.5
LEAST_COMPLEX = 3.5
#: Our error, of SGEMM's, at most.
MOST_ERROR = 0.5

_LONG_US = 5000.0


def main() -> None:
    reason = missing()
    if reason:
        print(f"float32: not run, {reason}")
        return
    bench = Benchmark("float32", "float32 on Hopper against torch.mm, device time")
    for shape, least in SHAPES.items():
        for layout in ("NN", "NT") if shape in ((4096,) * 3, (16, 8192, 8192)) else ("NN",):
            against_torch(bench, "float32", shape, layout, least)
    for n, least in TF32.items():
        against_torch(bench, "float32", (n, n, n), "NN", least, precision="tf32")
    against_torch(bench, "complex64", (4096, 4096, 4096), "NN", LEAST_COMPLEX)
    for (what, rows), least in FLAGGED.items():
        kind = f"{what} in {rows} rows"
        against_torch(bench, "float32", (8192, 8192, 8192), "NN", least, kind)
    against_torch(bench, "float32", (8192, 8192, 8192), "NN", LEAST_LOGNORMAL, "lognormal")
    for kind in ("normal", "uniform", "positive"):
        for n in (1024, 4096, 8192):
            errors(bench, kind, n)
    bench.save()


def missing() -> str:
    """Return what this needs and is not there, or nothing."""
    reason = hopper.missing()
    if not reason:
        try:
            kernels.manifest("hopper_float32")
        except tw.TilewiseError as error:
            return str(error)
    return reason


def against_torch(
    bench: Benchmark,
    dtype: str,
    shape: tuple[int, int, int],
    layout: str,
    least: float,
    kind: str = "normal",
    precision: str | None = None,
) -> None:
    """Measure one product, and claim that torch.mm takes at least ``least`` times as long."""
    import torch

    other = "torch.mm" if precision is None else "torch.mm, TF32"
    with operands(*shape, layout, dtype, kind) as sets, tf32_in_torch(precision == "tf32"):
        plans = [tw.plan(a, b, out=c, precision=precision) for a, b, c in sets]
        recipe = recipe_of(plans[0])
        contenders: dict[str, list[Callable[[], Any]]] = {
            "tilewise": [prepare(plan, *x) for plan, x in zip(plans, sets, strict=True)],
            other: [lambda x=x: torch.mm(x[0], x[1], out=x[2]) for x in sets],
        }

        def check(name: str, out: Any) -> None:
            if name == "tilewise":
                keeps_its_bound(plans[0], *sets[0])

        count = 5 if recipe.expected_us > _LONG_US else 15
        timings = hopper.measure(contenders, sets, recipe.expected_us, count, check)
    name = dtype if kind == "normal" else f"{dtype}, {kind}"
    name = name if precision is None else f"{precision}, {name}"
    case = f"{name} {'x'.join(map(str, shape))} {layout}"
    bench.cases.append(
        {
            "case": case,
            "inputs": kind,
            "baseline": other,
            "method": plans[0].method,
            "why": list(plans[0].why),
            "expected_us": recipe.expected_us,
            "calls": timings,
        }
    )
    pairs = zip(timings[other]["readings_s"], timings["tilewise"]["readings_s"], strict=True)
    ratio = statistics.median(theirs / ours for theirs, ours in pairs)
    us = 1e6 * timings["tilewise"]["median_s"]
    operations = 2 * math.prod(shape) * (4 if dtype == "complex64" else 1)
    print(
        f"float32: {case:<48} {us:10.2f} us {1e-6 * operations / us:6.0f} TFLOP/s  "
        f"{ratio:.3f} of {other}  expected {recipe.expected_us:.0f}",
        flush=True,
    )
    bench.claim(case, f"our time, of that of {other}", 1 / ratio, 1 / least)


def errors(bench: Benchmark, kind: str, n: int) -> None:
    """Compare our error with SGEMM's on one kind of data, by norm and by the worst element."""
    import torch

    with operands(n, n, n, "NN", "float32", kind) as sets, tf32_in_torch(False):
        a, b, c = sets[0]
        exact = a.double() @ b.double()
        size = a.double().abs() @ b.double().abs()
        found = {}
        for name, call in (
            ("tilewise", prepare(tw.plan(a, b, out=c), a, b, c)),
            ("torch.mm", None),
        ):
            c.fill_(math.nan)
            if call is None:
                torch.mm(a, b, out=c)
            else:
                call()
            off = (c.double() - exact).abs()
            found[name] = float(off.norm() / exact.norm()), float((off / size).max())
    for i, what in enumerate(("relative Frobenius error", "largest |err|/(|A||B|)")):
        ours, theirs = found["tilewise"][i], found["torch.mm"][i]
        case = f"{kind} {n}x{n}x{n}"
        bench.cases.append({"case": case, "what": what, "tilewise": ours, "torch.mm": theirs})
        bench.claim(case, f"our {what}, of torch.mm's", ours / theirs, MOST_ERROR)


@contextmanager
def operands(
    m: int, n: int, k: int, layout: str, dtype: str, kind: str
) -> Iterator[list[tuple[Any, ...]]]:
    """Give as many sets of a, b and c as keep the L2 cache cold."""
    import torch

    with hopper.operands(m, n, k, layout, dtype) as sets:
        for a, b, _ in sets:
            for x in (a, b):
                if kind == "uniform":
                    x.uniform_()
                elif kind == "positive":
                    x.uniform_(1, 1.125)
                elif kind == "lognormal":
                    x.mul_(torch.exp(48 * torch.rand_like(x) - 24))
            if "rows" in kind:
                what, _, rows, _ = kind.split()
                a[: int(rows), k // 2] = float(what)
        yield sets


@contextmanager
def tf32_in_torch(is_allowed: bool) -> Iterator[None]:
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def recipe_of(plan: Plan) -> Recipe:
    """Return the launches of a product of device arrays."""
    assert isinstance(plan.how, OnGpu)
    return plan.how.recipe


def prepare(plan: Plan, a: Any, b: Any, c: Any) -> Callable[[], None]:
    """Return a call that puts a planned product on torch's current stream."""
    import torch

    recipe = recipe_of(plan)
    assert len(recipe.offsets) == 1
    workspace = torch.empty(max(recipe.workspace_bytes, 1), device="cuda", dtype=torch.uint8)
    pointers = [x.data_ptr() for x in (a, b, c, workspace)]
    calls = []
    capability = device.facts(0).capability
    for step in recipe.steps:
        built = kernels.find(recipe.family, step.kernel, capability)
        launch = Launch(built, 0, step.grid, step.arguments)
        calls.append((launch, tuple(pointers[i] for i in step.operands)))

    def call(workspace: Any = workspace) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for launch, given in calls:
            launch(stream, given)

    return call


def keeps_its_bound(plan: Plan, a: Any, b: Any, c: Any) -> None:
    """Raise unless each element is within the bound of its plan, or Inf or NaN as it has to be."""
    import torch

    wide = torch.complex128 if c.is_complex() else torch.float64
    for first in range(0, a.shape[0], 4096):
        rows = slice(first, first + 4096)
        x, y = a[rows].to(wide), b.to(wide)
        ours, exact, size = c[rows].to(wide), x @ y, _size(x, y)
        error = ours - exact
        if c.is_complex():
            error = torch.maximum(error.real.abs(), error.imag.abs())
        allowed = plan.bound.factor * size + plan.bound.underflow
        right = size.isfinite() & (error.abs() <= allowed)
        wrong = ~(right | (ours == exact) | (exact.isnan() & ours.isnan()))
        if bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            raise AssertionError(f"{int(wrong.sum())} elements are wrong, the first {at}")


def _size(x: Any, y: Any) -> Any:
    """Return |A||B|, the least of the two parts' if complex."""
    if not x.is_complex():
        return x.abs() @ y.abs()
    import torch

    real, imag = x.real.abs(), x.imag.abs()
    return torch.minimum(
        real @ y.real.abs() + imag @ y.imag.abs(), real @ y.imag.abs() + imag @ y.real.abs()
    )
