"""What threads read before they assign it, against Python running one thread at a time.

Python raises a NameError at the first such read of a thread; the machine goes on, and
tells who reads along. The first of each thread must be the same, and so must the results of the
threads that have none.
"""

from __future__ import annotations

import traceback
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simt.generated import compiled
from tilewise import simt
from tilewise.errors import KernelError

THREADS, BLOCKS = 6, 2
HEAD = """
import numpy as np
from tilewise.simt import cuda

@cuda.jit(device=True)
def half(x):
    if x % 2 == 0:
        y = x // 2
    elif x > 7:
        return x
    return y

def kernel(X, C, n):
    tid = cuda.threadIdx.x
    gid = cuda.blockIdx.x * cuda.blockDim.x + tid
"""


class Watch:
    """Remembers the line of each thread's first read of what it has not assigned or written."""

    def __init__(self) -> None:
        self.first: dict[tuple[int, int], int] = {}

    def on_launch(self, launch: Any) -> None:
        pass

    on_access = on_barrier = on_launch

    def on_fault(self, fault: Any) -> bool:
        assert fault.reason in ("unassigned variable", "uninitialised read")
        for row, thread in zip(*np.nonzero(fault.active), strict=True):
            self.first.setdefault((int(fault.blocks[row]), int(thread)), fault.site.line)
        return True


class Unwritten(Exception):
    """A thread reads an element of a local array that it has not written."""


class Local(dict[int, int]):
    """A local array of one thread."""

    def __missing__(self, place: int) -> int:
        raise Unwritten


def seen(source: str, X: Any, C: Any, n: int) -> dict[tuple[int, int], int]:
    watch = Watch()
    simt.launch(compiled(source), BLOCKS, THREADS, X, C, n, observer=watch)
    return watch.first


def one_at_a_time(source: str, X: Any, C: Any, n: int) -> dict[tuple[int, int], int]:
    first = {}
    for block, thread in np.ndindex(BLOCKS, THREADS):
        cuda = SimpleNamespace(
            threadIdx=SimpleNamespace(x=thread),
            blockIdx=SimpleNamespace(x=block),
            blockDim=SimpleNamespace(x=THREADS),
            local=SimpleNamespace(array=lambda shape, dtype: Local()),
            jit=lambda device: lambda function: function,
        )
        scope: dict[str, Any] = {}
        exec(compile(source, "<kernel>", "exec"), scope)
        scope["cuda"] = cuda
        try:
            scope["kernel"](X.tolist(), C, n)
        except (NameError, Unwritten) as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == "<kernel>"]
            first[block, thread] = lines[-1]
    return first


class Writer:
    """Writes a kernel in which variables a, b, c and the local array L may be unassigned."""

    def __init__(self, random: Any) -> None:
        self.random = random
        self.lines = HEAD.splitlines()
        self.loops = 0
        self.declared = False

    def source(self) -> str:
        for name in "abc":
            guard = self.random.choice(["n < 0", "n < 0", "tid > 1", "n > 1", ""])
            if guard:  # n is never below 0
                self.lines += [f"    if {guard}:", f"        {name} = 0"]
        if self.random.random() < 0.9:
            self.declare("    ")
        self.block("    ", 3, in_loop=False)
        return "\n".join([*self.lines, "    C[gid, 3] = 1", ""])

    def declare(self, indent: str) -> None:
        if not self.declared:  # a name stands for one array in the dialect
            self.lines.append(f"{indent}L = cuda.local.array(3, np.int64)")
            self.declared = True

    def block(self, indent: str, depth: int, in_loop: bool) -> None:
        for _ in range(self.random.randint(1, 4)):
            self.statement(indent, depth, in_loop)

    def statement(self, indent: str, depth: int, in_loop: bool) -> None:
        simple = (
            "{v} = {e}", "{v} = {e}", "{v} = {e}", "{v}, {v} = {e}, {e}", "{v} += {e}",
            "C[gid, {k}] = {e}", "C[gid, {k}] = {e}", "C[gid, {k}] += {e}", "pass",
            "L[{k}] = {e}", "L[tid % 3] = {e}",
        )  # fmt: skip
        choices = ["simple"] * 4 + ["if", "if", "if else", "if else", "for", "while"] * (depth > 0)
        choices += ["leave"] * in_loop + ["return"] * (depth < 3) + ["declare"]
        kind = self.random.choice(choices)
        if kind == "simple":
            self.lines.append(indent + self.filled(self.random.choice(simple)))
        elif kind == "declare":
            self.declare(indent)
            self.lines.append(f"{indent}pass")
        elif kind.startswith("if"):
            self.lines.append(indent + self.filled("if {c}:"))
            self.block(indent + "    ", depth - 1, in_loop)
            if kind == "if else":
                self.lines.append(indent + "else:")
                self.block(indent + "    ", depth - 1, in_loop)
        elif kind == "for":
            name = self.random.choice(["k", "a"])
            self.lines.append(indent + self.filled(f"for {name} in range({{e}} % 3):"))
            self.block(indent + "    ", depth - 1, in_loop=True)
        elif kind == "while":
            self.loops += 1
            turn = f"w{self.loops}"
            self.lines += [
                f"{indent}{turn} = 0",
                indent + self.filled(f"while {turn} < 3 and {{c}}:"),
                f"{indent}    {turn} += 1",
            ]
            self.block(indent + "    ", depth - 1, in_loop=True)
        else:
            word = "return" if kind == "return" else self.random.choice(["break", "continue"])
            self.lines += [indent + self.filled("if {c}:"), f"{indent}    {word}"]

    def filled(self, template: str) -> str:
        pieces = {
            "{v}": "abc",
            "{k}": "012",
            "{e}": (
                "1", "tid", "n", "a", "b", "c", "X[gid]", "(a + 1)", "L[{k}]", "half({e})",
                "({e} if {c} else {e})", "max(b, 2)",
            ),
            "{c}": (
                "tid < 3", "n > 2", "X[gid] > 0", "a > 0", "({c} and b > 1)", "({c} or c > 1)",
                "0 < {e} < c", "gid % 2 == 0", "not {c}", "blockIsFirst",
            ),
        }  # fmt: skip
        while "{" in template:
            slot = template[template.index("{") : template.index("}") + 1]
            # What is nested comes to an end.
            choices = [c for c in pieces[slot] if len(template) < 50 or "{" not in c]
            template = template.replace(slot, self.random.choice(choices), 1)
        return template.replace("blockIsFirst", "cuda.blockIdx.x == 0")


@given(
    random=st.randoms(use_true_random=False),
    n=st.integers(0, 4),
    values=st.lists(st.integers(-1, 3), min_size=12, max_size=12),
)
@settings(max_examples=150, deadline=None)
def test_every_thread_first_reads_unassigned_what_python_says(random, n, values) -> None:
    source, X = Writer(random).source(), np.array(values)
    expected, found = (np.zeros((BLOCKS * THREADS, 4), np.int64) for _ in range(2))
    want = one_at_a_time(source, X, expected, n)
    try:
        have = seen(source, X, found, n)
    except KernelError as error:  # as numba does
        if not str(error).endswith(("is used before anything is assigned to it", "is not defined")):
            raise
        return
    assert have == want, source
    finished = [b * THREADS + t for b, t in np.ndindex(BLOCKS, THREADS) if (b, t) not in want]
    np.testing.assert_array_equal(found[finished], expected[finished], err_msg=source)


def launched(body: str, n: int = 3) -> tuple[dict[tuple[int, int], int], list[int]]:
    """The lines after the kernel's head where threads first read too early, and what they leave."""
    source = HEAD + "".join(f"    {line}\n" for line in body.strip().splitlines())
    C = np.full((BLOCKS * THREADS, 4), -1, np.int64)
    first = seen(source, np.arange(BLOCKS * THREADS), C, n)
    return {who: line - len(HEAD.splitlines()) for who, line in first.items()}, C[:, 0].tolist()


def test_a_thread_that_skips_the_branch_holds_nought_as_numba_has_it() -> None:
    first, left = launched("if gid < 8:\n    x = gid + 1\nC[gid, 0] = x")
    assert first == {(1, thread): 3 for thread in range(2, 6)}
    assert left == [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "body",
    [
        "if tid < 2:\n    x = 1\nelse:\n    x = 2\nC[gid, 0] = x",
        "if tid < 2:\n    x = 1\nif tid < 2:\n    C[gid, 0] = x",
        "if tid < 2:\n    x = 1\nC[gid, 0] = x if tid < 2 else 0",
        "if tid < 2:\n    x = 1\nif tid < 2 and x > 0:\n    C[gid, 0] = 1",
        "if tid < 2:\n    x = 1\nif tid >= 2 or x > 0:\n    C[gid, 0] = 1",
        "if tid < 2:\n    x = 1\nelse:\n    return\nC[gid, 0] = x",
        "for k in range(3):\n    x = k\nC[gid, 0] = x + k",
        "for k in range(n):\n    if k == 0:\n        x = 1\n    C[gid, 0] = x",
        "for k in range(tid, 9):\n    x = k\nC[gid, 0] = x",
        "for k in range(4):\n    if k == tid:\n        x = k\nif tid < 4:\n    C[gid, 0] = x",
        "k = 0\nwhile True:\n    x = k\n    k += 1\n    if k > tid:\n        break\nC[gid, 0] = x",
        "for k in range(3):\n    if tid == k:\n        continue\n    x = k\nC[gid, 0] = x",
        "x: np.int64\nx = 1\nC[gid, 0] = x",
        "L = cuda.local.array(2, np.int64)\nL[tid % 2] = 1\nC[gid, 0] = L[tid % 2]",
    ],
)
def test_nothing_is_said_of_a_thread_that_has_assigned_what_it_reads(body: str) -> None:
    assert launched(body)[0] == {}


@pytest.mark.parametrize(
    ("body", "n", "line", "threads"),
    [
        ("for k in range(n):\n    x = k\nC[gid, 0] = x", 0, 3, range(6)),
        ("for k in range(n):\n    pass\nC[gid, 0] = k", 0, 3, range(6)),
        ("for k in range(tid):\n    x = k\nC[gid, 0] = x", 3, 3, [0]),
        ("if tid > 1:\n    x, y = 1, 2\nC[gid, 0] = y", 3, 3, [0, 1]),
        ("if tid > 1:\n    x = 1\nx += 1\nC[gid, 0] = x", 3, 3, [0, 1]),
        ("if tid > 1:\n    if tid < 4:\n        x = 1\n    C[gid, 0] = x", 3, 4, [4, 5]),
        ("k = 0\nwhile k < tid:\n    x = k\n    k += 1\nC[gid, 0] = x", 3, 5, [0]),
        ("for k in range(2):\n    if tid < 5:\n        continue\n    x = k\nC[gid, 0] = x",
         3, 5, range(5)),
        ("if tid < 3:\n    L = cuda.local.array(2, np.int64)\nL[0] = 1", 3, 3, [3, 4, 5]),
        ("L = cuda.local.array(2, np.int64)\nL[tid % 2] = 1\nC[gid, 0] = L[0]", 3, 3, [1, 3, 5]),
        ("for k in range(2):\n  L = cuda.local.array(1, np.int64)\n  if k<1: L[0] = 1\n  n = L[0]",
         3, 4, range(6)),
        ("C[gid, 0] = half(3 + 2 * tid)", 3, -4, range(3)),
    ],
)  # fmt: skip
def test_a_read_before_the_assignment_is_told(body, n, line, threads) -> None:
    expected = {(block, thread): line for block in range(BLOCKS) for thread in threads}
    assert launched(body, n)[0] == expected


def test_a_variable_that_nothing_assigns_before_is_refused() -> None:
    with pytest.raises(KernelError, match="x is used before anything is assigned to it"):
        launched("C[gid, 0] = x\nx = 1")
