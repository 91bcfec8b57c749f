"""The portable kernels against torch (cuBLAS) and, for integers, CuPy, on the device's own clock.

Needs an NVIDIA GPU and torch. Floats are normal, integers uniform over all that their type holds.
Calls are captured in graphs, whose replays are interleaved; every result is compared, on NaN or
-1, with one that is not ours before anything is timed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark
from benchmarks.hopper import capture, clock
from tilewise import kernels
from tilewise.errors import DeviceError
from tilewise.kernels.portable_plan import Choice, Problem, choose
from tilewise.kernels.steps import Strides
from tilewise.runtime import device
from tilewise.runtime.launch import Launch

Call = Callable[[], Any]

#: Operands' type, C's type, sizes, layouts.
CASES = (
    *(("float64", "float64", (n, n, n), ("NN", "NT", "TN")) for n in (2048, 4096, 8192)),
    ("float64", "float64", (4097, 4097, 4097), ("NN",)),
    ("float64", "float64", (1000, 1000, 1000), ("NN",)),
    *(("float32", "float32", (n, n, n), ("NN", "NT", "TN")) for n in (1024, 4096, 8192)),
    ("float32", "float32", (4097, 4097, 4097), ("NN",)),
    ("float32", "float32", (16, 8192, 8192), ("NN",)),
    ("float32", "float32", (128, 128, 100000), ("NN",)),
    ("int8", "int32", (128, 128, 100000), ("NT",)),
    ("int8", "int32", (1000, 1000, 1000), ("NT", "NN")),
    ("int8", "int32", (4096, 4096, 4096), ("NT", "NN")),
    ("int8", "int32", (8192, 8192, 8192), ("NT", "NN")),
    ("float8_e4m3fn", "float32", (8192, 8192, 8192), ("NT",)),
    ("complex64", "complex64", (4096, 4096, 4096), ("NN",)),
    ("complex128", "complex128", (4096, 4096, 4096), ("NN",)),
    *((f"int{bits}", f"int{bits}", (2048, 2048, 2048), ("NN",)) for bits in (8, 16, 32, 64)),
)
#: Least ratio of the other's time to ours.
LEAST = {
    ("float64", 2048): 0.9,
    ("float64", 4096): 0.9,
    ("float64", 8192): 0.9,
    ("float64", 4097): 1.2,
    ("float32", 4096): 0.9,
    ("float32", 8192): 0.9,
    ("int8", 128): 8.0,
    ("int8", 1000): 2.0,
    ("int8", 8192): 1.4,
}

_READINGS = 9
_READING_MS = 4.0


def main() -> None:
    reason = missing()
    if reason:
        print(f"portable: not run, {reason}")
        return
    bench = Benchmark("portable", "portable kernels against torch and CuPy, device time")
    for dtype, result, (m, n, k), layouts in CASES:
        for layout in layouts:
            ratio = against_others(bench, dtype, result, m, n, k, layout)
            least = LEAST.get((dtype, m))
            if least is not None and ratio is not None:
                name = f"{dtype} {m}x{n}x{k} {layout}"
                bench.claim(name, "our time, of the other's", 1 / ratio, 1 / least)
    bench.save()


def missing() -> str:
    """Return what this needs and is not there, or nothing."""
    try:
        import torch  # noqa: F401

        kernels.manifest("portable")
        device.facts(0)
    except (ImportError, DeviceError) as error:
        return str(error)
    return ""


def against_others(
    bench: Benchmark, dtype: str, result: str, m: int, n: int, k: int, layout: str
) -> float | None:
    """Measure one product; return the other's time over ours, if there is another."""
    import torch

    a, b = make(m, k, layout[0], dtype), make(k, n, layout[1], dtype)
    c = torch.empty(m, n, device="cuda", dtype=getattr(torch, result))
    facts = device.facts(0)
    problem = describe(a, b, c)
    choice = choose(problem, capability=facts.capability, multiprocessors=facts.multiprocessors)
    contenders = {"tilewise": prepare(choice, a, b, c)}
    other, call = opponent(a, b, c)
    if call is not None:
        contenders[other] = call
    c.view(torch.uint8).fill_(0xFF)
    contenders["tilewise"]()
    verify(a, b, c)
    timings = measure(contenders, choice.expected_us)
    case = f"{dtype} {m}x{n}x{k} {layout}"
    bench.cases.append(
        {
            "case": case,
            "inputs": "normal" if c.is_floating_point() or c.is_complex() else "uniform",
            "baseline": other,
            "why": choice.why,
            "expected_us": choice.expected_us,
            "calls": timings,
        }
    )
    us = 1e6 * timings["tilewise"]["median_s"]
    operations = 2 * m * n * k * (4 if c.is_complex() else 1)
    ratio = None
    if call is not None:
        pairs = zip(timings[other]["readings_s"], timings["tilewise"]["readings_s"], strict=True)
        ratio = statistics.median(theirs / ours for theirs, ours in pairs)
    print(
        f"portable: {case:<36} {us:10.2f} us {1e-6 * operations / us:7.1f} TOP/s  "
        f"{f'{ratio:.3f} of {other}' if ratio else 'alone':<22} "
        f"expected {choice.expected_us:.0f}  {choice.why}",
        flush=True,
    )
    torch.cuda.empty_cache()
    return ratio


def make(rows: int, columns: int, order: str, dtype: str) -> Any:
    import torch

    shape = (rows, columns) if order == "N" else (columns, rows)
    kind = getattr(torch, dtype)
    if kind.is_floating_point or kind.is_complex:
        wide = kind if kind.itemsize >= 4 else torch.float32
        made = torch.randn(shape, device="cuda", dtype=wide).to(kind)
    else:
        limits = torch.iinfo(kind)
        made = torch.randint(limits.min, limits.max, shape, device="cuda", dtype=kind)
    return made if order == "N" else made.T


def describe(a: Any, b: Any, c: Any) -> Problem:
    """Describe the product of torch tensors."""
    strides = [Strides(0, 0, *x.stride(), is_aligned=x.data_ptr() % 16 == 0) for x in (a, b, c)]
    names = [str(x.dtype).removeprefix("torch.") for x in (a, b, c)]
    (m, k), n = a.shape, b.shape[1]
    return Problem(
        m=m,
        n=n,
        k=k,
        a=strides[0],
        b=strides[1],
        c=strides[2],
        a_dtype=names[0],
        b_dtype=names[1],
        c_dtype=names[2],
    )


def prepare(choice: Choice, a: Any, b: Any, c: Any) -> Call:
    """Return a call that puts a product on torch's current stream."""
    import torch

    workspace = torch.empty(choice.workspace_bytes + 256, device="cuda", dtype=torch.uint8)
    pointers = [x.data_ptr() for x in (a, b, c, workspace)]
    capability = device.facts(0).capability
    calls = []
    for step in choice.steps:
        built = kernels.find("portable", step.kernel, capability)
        launch = Launch(built, 0, step.grid, step.arguments)
        calls.append((launch, tuple(pointers[i] for i in step.operands)))

    def call(workspace: Any = workspace) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for launch, given in calls:
            launch(stream, given)

    return call


def opponent(a: Any, b: Any, c: Any) -> tuple[str, Call | None]:
    """Return the other library's product of the same operands, if it has one."""
    import torch

    if a.dtype == torch.float8_e4m3fn:
        one = torch.ones((), device="cuda")
        options = {"out_dtype": torch.float32, "use_fast_accum": False}
        return "torch._scaled_mm", lambda: torch._scaled_mm(a, b, one, one, **options)
    if a.is_floating_point() or a.is_complex():
        out = torch.empty_like(c)
        return "torch.mm", lambda: torch.mm(a, b, out=out)
    if c.dtype == torch.int32 and a.dtype == torch.int8:
        return "torch._int_mm", lambda: torch._int_mm(a, b)
    try:
        import cupy
    except ImportError:
        return "none", None
    x, y = cupy.asarray(a), cupy.asarray(b)

    def call() -> Any:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            return cupy.matmul(x, y)

    return "cupy.matmul", call


def verify(a: Any, b: Any, c: Any) -> None:
    """Raise unless c is a·b: exactly for integers, else within twice the bound of norms."""
    import torch

    torch.cuda.synchronize()
    if not (c.is_floating_point() or c.is_complex()):
        rows = np.random.default_rng(0).choice(a.shape[0], 4, replace=False)
        exact = np.matmul(a.cpu().numpy()[rows].astype(np.int64), b.cpu().numpy().astype(np.int64))
        found = c.cpu().numpy()
        assert (found[rows] == exact.astype(found.dtype)).all(), "wrong integers"
        assert len(np.unique(found[:, 0])) > 1
        return
    wide = torch.complex128 if c.is_complex() else torch.float64
    x, y = (t.float() if t.element_size() == 1 else t for t in (a, b))
    error = torch.zeros(c.shape, device="cuda", dtype=torch.float64)
    for first in range(0, c.shape[0], 1024):
        part = slice(first, first + 1024)
        error[part] = (c[part].to(wide) - x[part].to(wide) @ y.to(wide)).abs()
    # The norms bound |A||B| by Cauchy and Schwarz; float64's reference has an error of its own.
    unit = {4: 2.0**-24, 8: 2.0**-53}[c.real.element_size()]
    unit = 2.0**-13 if a.element_size() == 1 else unit
    scale = x.abs().norm(dim=1).double()[:, None] * y.abs().norm(dim=0).double()[None, :]
    allowed = 4 * unit * math.sqrt(a.shape[1]) * scale
    assert bool((error <= allowed).all()), f"wrong by {float((error / allowed).max())} of the bound"


def measure(contenders: dict[str, Call], expected_us: float) -> dict[str, dict[str, Any]]:
    """Time graphs of each contender's calls, interleaved."""
    length = max(1, min(32, int(500 / expected_us)))
    graphs: dict[str, Any] = {}
    for name, call in contenders.items():
        if name == "cupy.matmul":
            graphs[name] = _Calls([call] * length)
        else:
            graphs[name] = capture([call] * length)
    loops = {name: max(1, round(_READING_MS / clock(graph, 1))) for name, graph in graphs.items()}
    readings: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(_READINGS):
        for name, graph in graphs.items():
            readings[name].append(1e-3 * clock(graph, loops[name]) / (loops[name] * length))
    return {
        name: {
            "median_s": statistics.median(values),
            "low_s": statistics.quantiles(values, n=4)[0],
            "high_s": statistics.quantiles(values, n=4)[2],
            "readings_s": values,
            "calls": loops[name] * length,
        }
        for name, values in readings.items()
    }


class _Calls:
    """What is replayed like a graph, but called: CuPy allocates its results."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls

    def replay(self) -> None:
        for call in self._calls:
            call()
