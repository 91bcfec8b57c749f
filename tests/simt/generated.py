"""Random kernels: source text from a grammar, always legal and free of races.

Each thread writes its own elements only; what threads exchange goes through shared memory between
barriers that all live threads reach, through warp shuffles, or through atomics whose order does not
matter. Every loop ends. Variables keep one type: i (int64), f (float32), d (float64), and none of
them is a bare product: that the executors contract ``x + a*b`` alike is seen within expressions.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import re
import sys
import tempfile
from pathlib import Path

import numpy as np

__all__ = ["arguments", "bits", "compiled", "kernel_source"]

HEADER = """
import math
import numpy as np
from tilewise.simt import cuda

THREE = 3
HALF = np.float32(0.5)

@cuda.jit(device=True)
def clip(x, low, high):
    if x < low:
        return low
    if x > high:
        return high
    return x

@cuda.jit(device=True)
def collatz(n):
    steps = int(0)
    while n > 1:
        if n % 2 == 0:
            n = n // 2
            continue
        n = 3 * n + 1
        steps += 1
        if steps > 9:
            break
    return steps

@cuda.jit(device=True)
def both_ways(x, y):
    if x > y:
        return y, x - y
    return x, y - x

@cuda.jit(device=True)
def scale(values, place, by):
    values[place] = values[place] * by
    return values[place]
"""

# In a template <i>, <f>, <d>, <c> stand for an expression: integer, float32, float64, condition;
# <v> for a divisor and <0..9> for a literal in that range.
LEAVES = {
    "i": [
        "i0", "i1", "i2", "tx", "gid", "n", "THREE", "cuda.blockIdx.x", "cuda.blockDim.x",
        "cuda.threadIdx.y", "A.shape[0]", "X[gid%n]", "X[(i0+7)%n]", "np.int64(U[gid%n])",
        "H[tx%n]", "L[i1%4]", "<-9..40>", "<-9..40>",
    ],
    "f": [
        "f0", "f1", "A[gid%n]", "A[(i0*3+1)%n]", "A[2]", "HALF", "np.float32(<-40..40>.25)",
        "np.float32(gid)",
    ],
    "d": ["d0", "D[gid%n]", "<-99..99>.5", "1e-3"],
    "v": ["i0", "i1", "n", "X[gid%n]", "<1..9>", "(-<1..9>)", "THREE", "(i2 + 1)"],
    "c": [
        "<i> < <i>", "<i> <= <i> < <i>", "<i> == <i>", "<f> > f0", "<i> % 3 != 0", "tx > 3",
        "n > 5", "cuda.blockIdx.x == 0", "d0 >= <d>", "M[gid%n]", "bool(<i>)",
    ],
}  # fmt: skip
COMPOUND = {
    "i": [
        "(<i> + <i>)", "(<i> - <i>)", "(<i> * <i>)", "(<i> // <v>)", "(<i> % <v>)", "(<i> & <i>)",
        "(<i> | <i>)", "(<i> ^ <i>)", "(<i> << (<i> & 7))", "(<i> >> (<i> & 15))", "(-<i>)",
        "(~<i>)", "min(<i>, <i>)", "max(<i>, <i>, 3)", "abs(<i>)", "np.int64(<i> if <c> else <i>)",
        "int(<f>)", "np.int32(<i>)", "np.int64(-np.uint8(<i>))", "int(np.int16(<d>))",
        "(<i> ** 2)", "collatz(abs(<i>) % 50)", "int(<c>)", "np.int64(U[gid%n] * np.uint64(<i>))",
        "np.int64(U[gid%n] // np.uint64(abs(<i>)))", "np.int64(U[gid%n] >> (<i> & 31))",
        "np.int64(np.uint8(<i>) << (<i> & 7))", "np.int64(~np.uint16(<i>))",
    ],
    "f": [
        "(<f> + <f> * <f>)", "(<f> * <f> + <f>)", "(<f> - <f> * <f>)", "(<f> * <f> - <f>)",
        "(-(<f> * <f>) + <f>)", "abs((<f> * <f>) * <f>)", "((f0 + <f>) / <f>)", "(-<f>)",
        "abs(<f>)", "min(<f>, <f>)", "max(<f>, <f>)", "(<f> if <c> else <f>)",
        "math.sqrt(abs(<f>))", "np.float32(<d>)", "np.float32(<i>)", "math.floor(<f>)",
        "clip(<f>, f0, f1)", "float(<f>)",
    ],
    "d": [
        "(<d> + <d> * <d>)", "(<d> - <d> * <d>)", "abs(<d> * <d>)", "(<d> + float(<f>) * 2.0)",
        "(<f> + 0.5)", "(float(<i>) / 3)", "abs(<i> * np.float32(0.5))", "(<d> - <i>)",
        "(<i> / 7)", "math.sqrt(abs(<d>))", "max(<d>, <d>)", "np.float64(<f>)",
    ],
    "c": [
        "(<c> and <c>)", "(<c> or <c>)", "not (<c>)", "(gid < n and A[gid] > f0)",
        "(i0 >= 0 and i0 < n and X[i0] > <i>)", "(i0 < 0 or i0 >= n or A[i0] > f0)",
    ],
}  # fmt: skip
STATEMENTS = {
    "assign": [
        "i0 = np.int64(<i>)", "i1 = np.int64(<i>)", "i2 = np.int64(<i>)", "f0 = <f>", "f1 = <f>",
        "d0 = <d>", "i0 += <i>", "i1 *= <i>", "i2 -= <i>", "i1 //= <i>", "i0 ^= 5", "i1 <<= 1",
        "f0 += <f> * <f>", "f1 -= <f> * <f>", "f0 = abs(f0 * <f>)", "d0 += <d>",
        "L[abs(i0) % 4] = <i>", "i0, i1 = i1, i0", "f0, f1 = f1, f0", "i0, i1, i2 = i2, i0, i1",
        "i1 = i2 = i0", "f0, f1 = both_ways(f0, f1)", "i0 = clip(i0, -5, i1)",
        "f1 = scale(K, 0, f0)",
    ],
    "store": [
        "O[gid, <0..1>] = <f>", "O[gid, abs(i0) % 2] = <d>", "P[gid] = <i>", "P[gid] += <i>",
        "O[gid][1] += <f>", "N[gid] = <i>", "Q[gid] = <c>",
        # One kind of atomic an array, since different ones do not commute.
        "cuda.atomic.add(T, abs(i1) % 4, <i>)", "cuda.atomic.max(W, tx % 4, <i>)",
        "cuda.atomic.xor(V, (0, abs(i2) % 3), <i>)",
    ],
    "together": [
        """
S[tid] = f0
SI[tid, 0] = i0
cuda.syncthreads()
f1 = S[(tid + <1..5>) % 32]
i1 += SI[(tid * 3 + 1) % 32, 0]
cuda.syncthreads()
""",
        "f0 = cuda.shfl_down_sync(0xffffffff, f0, 3)", "d0 = cuda.shfl_up_sync(0xffffffff, d0, 2)",
        "i0 = cuda.shfl_xor_sync(0xffffffff, i0, 1)",
        "f1 = cuda.shfl_sync(0xffffffff, f0, abs(i0) % 8)",
        "i1 = np.int64(cuda.ballot_sync(0xffffffff, i0 > i1))",
        "i2 = np.int64(4) if cuda.any_sync(0xffffffff, f0 > f1) else np.int64(6)",
        "i2 = np.int64(cuda.syncthreads_count(np.int32(<c>)))",
        "i2 = np.int64(cuda.syncthreads_and(np.int32(<c>)))",
        "i2 = np.int64(cuda.syncthreads_or(np.int32(<c>)))", "cuda.syncwarp()",
    ],
}  # fmt: skip
CONDITIONAL = re.compile(r" and | or | if |<=.*<")
DIVIDES = re.compile(r"%|/|sqrt|<v>")
WILD = ("int(<f>)", "int(np.int16(<d>))")
UNIFORM = ("n > 5", "cuda.blockIdx.x == 1", "n % 2 == 0")
UNIFORM_RANGES = ("3", "1, 4", "4, 0, -2", "n % 4")
RANGES = ("abs(i0) % 5", "tx % 3, 4", "2, -(abs(i1) % 4), -1", "3", "tx, 9, 1 + abs(i2) % 3")

START = """
S = cuda.shared.array(32, np.float32); SI = cuda.shared.array((32, 1), np.int64)
L = cuda.local.array(4, np.int64)
K = cuda.local.array(1, np.float32)
tx = cuda.threadIdx.x
tid = tx + cuda.threadIdx.y * cuda.blockDim.x
gid = cuda.blockIdx.x * cuda.blockDim.x * cuda.blockDim.y + tid
i0 = np.int64(tx)
i1 = np.int64(gid * 2)
i2 = np.int64(0)
f0 = np.float32(gid)
f1 = A[gid % n]
d0 = 0.25
for q in range(4):
    L[q] = q + tx
K[0] = f1
"""
FINISH = """
O[gid, 0] = f0
O[gid, 1] = f1
P[gid] = i0 + 3 * i1 + 5 * i2 + L[1]
R[gid] = d0
"""


def kernel_source(seed, statements, tame=False):
    """Return the source of a kernel of about so many statements.

    A tame one leaves out what a compiler is free about, or only our machine defines: integers stay
    small, no float out of range becomes an integer, no thread leaves early, and no index is taken
    modulo n (a branch, for the compiler, across which it may move a sum away from its product).
    """
    return _Writer(random.Random(seed), statements, tame).source()


def arguments(seed, threads, n=11, tame=False):
    """Return arguments for a kernel; the last ones are its results."""
    rng = np.random.default_rng(seed)
    singles = (rng.standard_normal(n) * 2.0 ** rng.integers(-4, 6, n)).astype(np.float32)
    doubles = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)
    high = 100 if tame else 2**31
    return [
        singles,
        rng.integers(-high, high, n).astype(np.int32),
        doubles,
        rng.integers(0, high**2, n).astype(np.uint64),
        rng.integers(-128, 128, n).astype(np.int8),
        rng.integers(0, 2, n).astype(bool),
        n,
        np.full((threads, 2), np.nan, np.float32),
        np.zeros(threads, np.int64),
        np.zeros(threads, np.int16),
        np.zeros(threads, bool),
        np.zeros(4, np.int64),
        np.zeros(4, np.int32),
        np.zeros((1, 3), np.uint32),
        np.full(threads, np.nan),
    ]


def bits(array):
    """The array's bits; NaNs alike, since their payload is not modelled."""
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), np.nan, array).astype(array.dtype)
    return array.view(np.dtype(f"u{array.itemsize}"))


class _Writer:
    def __init__(self, rng, statements, tame):
        self.rng, self.left, self.tame = rng, statements, tame
        self.lines, self.depth, self.loops, self.counters = [], 1, 0, 0

    def source(self):
        self.emit(START)
        while self.left > 0:
            self.statement(uniform=True)
        self.emit(FINISH)
        body = "\n".join(self.lines)
        if self.tame:
            body = re.sub(r" ?% ?n\b", " & 7", body)
        return f"{HEADER}\n\ndef kernel(A, X, D, U, H, M, n, O, P, N, Q, T, W, V, R):\n{body}\n"

    def emit(self, text):
        self.lines += ["    " * self.depth + line for line in text.strip("\n").split("\n")]

    def expand(self, template, depth=0, plain=False):
        # A division ends what products may be fused across. The executor of single threads knows
        # only those that are reached, so there are none in operands that may not be.
        plain = plain or CONDITIONAL.search(template) is not None

        def fill(match):
            kind = match[1]
            if ".." in kind:
                low, high = map(int, kind.split(".."))
                return str(self.rng.randint(low, high))
            simple = kind == "v" or depth > 2 or self.rng.random() < 0.4
            choices = (LEAVES if simple else COMPOUND)[kind]
            choice = self.rng.choice([c for c in choices if not plain or not DIVIDES.search(c)])
            if self.tame and choice in WILD:
                choice = "i0"
            return self.expand(choice, depth + (1 if not simple or depth < 3 else 10), plain)

        if depth > 9:  # conditions have no leaf without an operand
            template = template.replace("<i>", "i0").replace("<f>", "f1").replace("<d>", "d0")
        return re.sub(r"<([ifdcv]|-?\d+\.\.-?\d+)>", fill, template)

    def body(self, uniform):
        self.depth += 1
        for _ in range(self.rng.randint(1, 3)):
            self.statement(uniform)
        self.depth -= 1

    def statement(self, uniform):
        self.left -= 1
        if self.left < 0:
            return self.emit("i0 += 1")
        kinds = ["assign"] * 5 + ["store"] * 2 + ["if", "if", "for", "while"] * (self.depth < 5)
        kinds += ["leave"] * bool(self.loops) + ["together"] * 3 * uniform
        kinds += ["exit"] * (not self.tame and self.depth <= 3 and self.rng.random() < 0.3)
        kind = self.rng.choice(kinds)
        if kind in STATEMENTS:
            text = self.expand(self.rng.choice(STATEMENTS[kind]))
            small = "\ni0 &= 255\ni1 &= 255\ni2 &= 255" if self.tame and "i" in text else ""
            return self.emit(text + small)
        return getattr(self, f"write_{kind}")(uniform)

    def write_if(self, uniform):
        same = uniform and self.rng.random() < 0.4
        self.emit(f"if {self.rng.choice(UNIFORM) if same else self.expand('<c>')}:")
        self.body(same)
        if self.rng.random() < 0.5:
            self.emit("else:")
            self.body(same)

    def write_for(self, uniform):
        self.counters += 1
        k = f"k{self.counters}"
        same = uniform and self.rng.random() < 0.5
        self.emit(f"for {k} in range({self.rng.choice(UNIFORM_RANGES if same else RANGES)}):")
        self.emit(
            "    "
            + self.rng.choice([f"i0 += {k}", f"f0 += np.float32({k})", f"i1 = np.int64({k})"])
        )
        outer = self.loops
        # From a loop with barriers in it no thread may break away from the others.
        self.loops = 0 if same else outer + 1
        self.body(same)
        self.loops = outer

    def write_while(self, _):
        self.counters += 1
        left = f"left{self.counters}"
        more = self.rng.choice(["", " and f0 > f1 - 100", " or i2 == 99999"])
        self.emit(f"{left} = {self.rng.choice(['abs(i0) % 6', 'tx % 4', '3'])}")
        self.emit(f"while {left} > 0{more}:\n    {left} -= 1\n    if {left} < -20:\n        break")
        self.loops += 1
        self.body(False)
        self.loops -= 1

    def write_leave(self, _):
        self.emit(f"if {self.expand('<c>')}:")
        if self.rng.random() < 0.5:
            self.emit("    i2 += 3")
        self.emit("    " + self.rng.choice(["break", "continue"]))

    def write_exit(self, _):
        self.emit(f"if {self.expand('<c>')}:\n    return")


_serial = itertools.count()
_folder = None


def compiled(source, name="kernel"):
    """Import source text from a file, since a kernel's source must be readable."""
    global _folder
    _folder = _folder or tempfile.TemporaryDirectory()
    path = Path(_folder.name) / f"generated_{next(_serial)}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    return getattr(module, name)
