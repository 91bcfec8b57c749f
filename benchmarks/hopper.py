"""Hopper's kernels against torch.mm (cuBLAS), on the device's own clock.

Needs a Hopper GPU and torch. Operands are normal; where they are smaller than the L2 cache, calls
go round several sets of them, so that memory is read as it would be. Many calls are captured in one
graph, whose replays are timed by events and interleaved with the other contender's. Products that
take over half a millisecond run for a while first: the clock is then what the chip's power allows,
and stays so. Every result is compared with a float32 product of the same operands before anything
is timed, on NaN.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import Benchmark, refuse_impossible
from tilewise import kernels
from tilewise.errors import DeviceError
from tilewise.kernels.hopper_plan import Choice, Problem, choose, launches
from tilewise.kernels.steps import Strides
from tilewise.runtime import device
from tilewise.runtime.launch import Launch

SQUARES = (512, 1024, 2048, 4096, 8192, 16384)
SHAPES = (
    *((16, 8192, 8192), (64, 7168, 2112), (128, 4096, 7168)),
    *((4096, 4096, 64), (8192, 64, 8192), (100000, 128, 128), (128, 128, 100000)),
    *((1000, 1000, 1000), (4097, 4097, 4097), (777, 3333, 5555)),
)
#: So many tiles that blocks would drift apart; of bfloat16 alone, since it takes a while.
LARGE = (32768, 32768, 32768)
#: Squares whose rows start on sectors of the L2 cache but not on lines, or on neither.
ROUND = (2000, 3000, 5000, 7000, 10000)
#: Least ratio of torch.mm's time to ours.
LEAST = {
    (2048, 2048, 2048): 0.97,
    (4096, 4096, 4096): 1.0,
    (8192, 8192, 8192): 1.02,
    (16384, 16384, 16384): 1.02,
    LARGE: 0.95,
    (16, 8192, 8192): 0.9,
    (64, 7168, 2112): 0.8,
    (128, 4096, 7168): 0.9,
    (4096, 4096, 64): 1.0,
    (8192, 64, 8192): 0.9,
    (100000, 128, 128): 1.0,
    (128, 128, 100000): 0.75,
    (4097, 4097, 4097): 4.0,
    (777, 3333, 5555): 2.8,
}
LEAST_GEOMETRIC_MEAN = 1.15
#: Dense bfloat16 and float16 operations a second of an H200, from NVIDIA's data sheet.
PEAK = 989e12

_COLD_BYTES = 240e6  # four times the L2 cache of an H200
_GRAPH_US = 1000.0
_READING_MS = 3.0
_READINGS = 15
_WARM_MS = 200.0
_LONGEST_WARM_MS = 2000.0


def main() -> None:
    reason = missing()
    if reason:
        print(f"hopper: not run, {reason}")
        return
    bench = Benchmark("hopper", "bfloat16 and float16 on Hopper against torch.mm, device time")
    for dtype in ("bfloat16", "float16"):
        cases = [(n, n, n, layout) for n in SQUARES for layout in ("NN", "NT", "TN")]
        cases += [(*shape, "NN") for shape in SHAPES]
        cases += [(*LARGE, "NN")] * (dtype == "bfloat16")
        ratios = {case: against_torch(bench, *case, dtype) for case in cases}
        for n in ROUND:
            against_torch(bench, n, n, n, "NN", dtype)
        for (*shape, layout), ratio in ratios.items():
            least = LEAST.get(tuple(shape))
            if least is not None and (dtype == "bfloat16" or shape[0] == shape[1] == shape[2]):
                name = f"{dtype} {'x'.join(map(str, shape))} {layout}"
                bench.claim(name, "our time, of torch.mm's", 1 / ratio, 1 / least)
        mean = statistics.geometric_mean([r for case, r in ratios.items() if case[3] == "NN"])
        what = "geometric mean of our time, of torch.mm's"
        bench.claim(dtype, what, 1 / mean, 1 / LEAST_GEOMETRIC_MEAN)
    bench.save()


def missing() -> str:
    """Return what this needs and is not there, or nothing."""
    try:
        import torch  # noqa: F401

        kernels.manifest("hopper")
        if device.facts(0).capability != (9, 0):
            return "the GPU is not a Hopper"
    except (ImportError, DeviceError) as error:
        return str(error)
    return ""


def against_torch(bench: Benchmark, m: int, n: int, k: int, layout: str, dtype: str) -> float:
    """Measure one product; return torch.mm's time over ours."""
    import torch

    with operands(m, n, k, layout, dtype) as sets:
        a, b, c = sets[0]
        p = problem(a, b, c)
        choice = choose(p, device.facts(0).multiprocessors)
        contenders = {
            "tilewise": [prepare(p, choice, *tensors) for tensors in sets],
            "torch.mm": [lambda x=x: torch.mm(x[0], x[1], out=x[2]) for x in sets],
        }
        timings = measure(contenders, sets, choice.expected_us)
    case = f"{dtype} {m}x{n}x{k} {layout}"
    bench.cases.append(
        {
            "case": case,
            "inputs": "normal",
            "baseline": "torch.mm",
            "kernel": choice.kernel.name,
            "why": choice.why,
            "expected_us": choice.expected_us,
            "calls": timings,
        }
    )
    pairs = zip(timings["torch.mm"]["readings_s"], timings["tilewise"]["readings_s"], strict=True)
    ratio = statistics.median(theirs / ours for theirs, ours in pairs)
    for timing in timings.values():
        refuse_impossible(case, 2 * m * n * k, timing["median_s"], PEAK)
    us = 1e6 * timings["tilewise"]["median_s"]
    tile = f"{choice.kernel.tile_m}x{choice.kernel.tile_n} {choice.kernel.way}"
    print(
        f"hopper: {case:<34} {us:10.2f} us {2e-6 * m * n * k / us:6.0f} TFLOP/s  "
        f"{ratio:.3f} of torch.mm  {tile}",
        flush=True,
    )
    return ratio


@contextmanager
def operands(m: int, n: int, k: int, layout: str, dtype: str) -> Iterator[list[tuple[Any, ...]]]:
    """Give as many sets of a, b and c as keep the L2 cache cold."""
    import torch

    kind = getattr(torch, dtype)
    nbytes = 2 * (m * k + k * n + m * n)
    count = max(1, min(24, math.ceil(_COLD_BYTES / nbytes)))

    def make(rows: int, columns: int, order: str) -> Any:
        shape = (rows, columns) if order == "N" else (columns, rows)
        made = torch.randn(shape, device="cuda", dtype=kind)
        return made if order == "N" else made.T

    yield [
        (make(m, k, layout[0]), make(k, n, layout[1]), torch.empty(m, n, device="cuda", dtype=kind))
        for _ in range(count)
    ]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def problem(a: Any, b: Any, c: Any) -> Problem:
    """Describe the product of torch tensors."""
    names = {"bfloat16": "bf16", "float16": "fp16"}
    a_strides, b_strides, c_strides = (
        Strides(0, 0, *x.stride(), is_aligned=x.data_ptr() % 16 == 0) for x in (a, b, c)
    )
    name = names[str(a.dtype).removeprefix("torch.")]
    (m, k), n = a.shape, b.shape[1]
    return Problem(m=m, n=n, k=k, a=a_strides, b=b_strides, c=c_strides, dtype=name, out=name)


def prepare(p: Problem, choice: Choice, a: Any, b: Any, c: Any) -> Callable[[], None]:
    """Return a call that puts a product on torch's current stream."""
    import torch

    workspace = torch.empty(max(choice.workspace_bytes, 1), device="cuda", dtype=torch.uint8)
    pointers = [x.data_ptr() for x in (a, b, c, workspace)]
    calls = []
    for step in launches(p, choice):
        built = kernels.find("hopper", step.kernel, (9, 0))
        launch = Launch(built, 0, step.grid, step.arguments)
        given = tuple(pointers[i] for i in step.operands)
        calls.append((launch, given, (1.0, 0.0)[: step.numbers]))

    def call(workspace: Any = workspace) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for launch, given, numbers in calls:
            launch(stream, given, numbers)

    return call


def measure(
    contenders: dict[str, list[Callable[[], Any]]],
    sets: list[tuple[Any, ...]],
    expected_us: float,
    count: int = _READINGS,
    verify: Callable[[str, Any], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Check each contender's result, then time graphs of its calls, interleaved."""
    if verify is None:
        reference = sets[0][0].float() @ sets[0][1].float()

        def verify(name: str, out: Any) -> None:
            check(name, out, sets[0], reference, is_ours=name != "torch.mm")

    length = max(len(sets), min(48, int(_GRAPH_US / expected_us)), 1)
    graphs = {}
    for name, calls in contenders.items():
        out = sets[0][2]
        out.fill_(math.nan)
        calls[0]()
        verify(name, out)
        graphs[name] = capture([calls[i % len(calls)] for i in range(length)])
    once = {name: clock(graph, 1) for name, graph in graphs.items()}
    loops = {name: max(1, round(_READING_MS / ms)) for name, ms in once.items()}
    if length == 1:
        for name, graph in graphs.items():
            replays = round(_WARM_MS / len(graphs) / _READING_MS) * loops[name]
            clock(graph, max(1, min(replays, round(_LONGEST_WARM_MS / once[name]))))
    readings: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(count):
        for name in list(graphs)[:: 1 if turn % 2 else -1]:
            ms = clock(graphs[name], loops[name])
            readings[name].append(1e-3 * ms / (loops[name] * length))
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


def check(name: str, out: Any, operands: tuple[Any, ...], reference: Any, *, is_ours: bool) -> None:
    """Raise unless a result is the reference, rounded, but for sums in another order.

    torch.mm adds up partial sums that it has rounded to the operands' type, by default, so of its
    result only the norm is looked at.
    """
    import torch

    a, b = operands[:2]
    unit = torch.finfo(out.dtype).eps / 2
    error = (out.float() - reference).abs()
    if not is_ours:
        share = float(error.norm() / reference.norm())
        assert share < 4 * unit, f"{name}: relative error {share}"
        return
    # The norms bound |A||B| by Cauchy and Schwarz.
    scale = a.float().norm(dim=1)[:, None] * b.float().norm(dim=0)[None, :]
    wrong = ~(error <= unit * reference.abs() + 2**-22 * math.sqrt(a.shape[1]) * scale)
    if bool(wrong.any()):
        first = wrong.nonzero()[0].tolist()
        raise AssertionError(f"{name}: {int(wrong.sum())} elements are wrong, the first {first}")


def capture(calls: list[Callable[[], Any]]) -> Any:
    import torch

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def clock(graph: Any, count: int) -> float:
    """Return the milliseconds that replays of a graph take."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))
