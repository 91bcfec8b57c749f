"""One thread at a time: an executor of kernels that shares nothing with the one under test.

The original function runs as the Python it is, once for each thread, in a greenlet that is switched
at barriers and warp operations. Numbers are boxed so that they follow numba's types, which are
looked up in a table recorded from numba-cuda; FMA is done with fractions. Slow, and meant to be.

Contraction is by expression: a product is fused if it is added where it is computed. (Kernels that
name a product first are compared with the compiler's own decisions in test_contraction.py.)
"""

from __future__ import annotations

import json
import math
import sys
import types
from fractions import Fraction
from pathlib import Path

import greenlet
import numpy as np

from tests.simt.exact import fma, round_to

_TABLE = json.loads((Path(__file__).parent / "data" / "numba_types.json").read_text())
_TYPES = {code: place for place, code in enumerate(_TABLE["types"])}
_DTYPES = {code: np.dtype(code if code != "b1" else bool) for code in _TYPES}
_NAMES = {dtype: code for code, dtype in _DTYPES.items()}


class Fault(Exception):
    """A thread did what it must not."""


def run(kernel, grid, block, *args):
    """Run all threads of all blocks, one after the other; arrays are changed in place."""
    grid, block = _triple(grid), _triple(block)
    for number in range(math.prod(grid)):
        _Block(kernel, grid, block, number, args).run()


def _triple(value):
    items = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return (*items, 1, 1)[:3]


def _wrap(code, value):
    bits = 8 * int(code[1])
    value &= (1 << bits) - 1
    return value - (1 << bits) if code[0] == "i" and value >> (bits - 1) else value


def convert(code, value):
    """Return a plain number as the value that a variable of this type holds."""
    if code == "b1":
        return bool(value != 0)
    if code[0] == "f":
        if isinstance(value, np.floating):
            return _DTYPES[code].type(value)
        return (
            round_to(Fraction(int(value)), _DTYPES[code].type) if value else _DTYPES[code].type(0)
        )
    if isinstance(value, np.floating):
        via = code if code[1] != "1" else f"{code[0]}2"
        if math.isnan(value):  # PTX ISA, "cvt"
            wide = value.dtype == np.float64 or code[1] == "8"
            return _wrap(code, 1 << (8 * int(via[1]) - 1)) if wide else 0
        low, high = np.iinfo(_DTYPES[via]).min, np.iinfo(_DTYPES[via]).max
        value = low if value <= low else high if value >= high else math.trunc(float(value))
    return _wrap(code, int(value))


def poison(code):
    if code[0] == "f":
        return _DTYPES[code].type(math.nan)
    return np.frombuffer(b"\xab" * _DTYPES[code].itemsize, _DTYPES[code])[0].item()


#: Integer divisions by what is no constant so far, and float divisions and roots: a product is not
#: fused across the first kind, nor into a difference across the second.
_stretch, _calls = [0], [0]


class Number:
    """A boxed number: its type, its value, and for a product what was multiplied."""

    __slots__ = ("calls", "code", "constant", "factors", "negated", "stretch", "value")

    def __init__(self, code, value, factors=None, constant=False):
        self.code, self.value, self.factors = code, convert(code, value), factors
        self.constant, self.stretch, self.calls = constant, _stretch[0], _calls[0]
        self.negated = False

    def __bool__(self):
        return bool(self.value != 0)

    def __index__(self):
        assert self.code[0] in "iu"
        return self.value

    def __repr__(self):
        return f"{self.code}({self.value})"


def box(value):
    """Return a Python literal or NumPy number as numba types it."""
    if isinstance(value, Number):
        return value
    if isinstance(value, (bool, np.bool_)):
        return Number("b1", bool(value))
    if isinstance(value, int):
        return Number("i8" if value < 1 << 63 else "u8", value, constant=True)
    if isinstance(value, float) and not isinstance(value, np.floating):
        return Number("f8", np.float64(value), constant=True)
    plain = value if value.dtype.kind == "f" else int(value)
    return Number(_NAMES[value.dtype], plain, constant=True)


def _argument(value):
    boxed = box(value)
    boxed.constant = False
    return boxed


def _look_up(rows, left, right):
    return rows[_TYPES[left]].split()[_TYPES[right]]


def _binary(name, compute, reflected=False):
    def method(self, other):
        left, right = (box(other), self) if reflected else (self, box(other))
        code = _look_up(_TABLE["binary"][name], left.code, right.code)
        return compute(code, left, right)

    return method


def _arithmetic(operate):
    def compute(code, left, right):
        a, b = convert(code, left.value), convert(code, right.value)
        with np.errstate(all="ignore"):
            value = operate(a, b)
        folded = code[0] == "f" and left.constant and right.constant
        factors = (a, b) if operate is _multiply and code[0] == "f" and not folded else None
        return Number(code, value, factors, constant=folded)

    return compute


def _multiply(a, b):
    return a * b


def _fusible(number, code, sign):
    if not number.factors or number.code != code or number.stretch != _stretch[0]:
        return False
    return (sign == 1 and not number.negated) or number.calls == _calls[0]


def _sum(sign):
    def compute(code, left, right):
        with np.errstate(all="ignore"):
            if code in ("f4", "f8"):
                dtype = _DTYPES[code].type
                fresh = [_fusible(n, code, sign) for n in (left, right)]
                assert not all(fresh), "which of two products is fused is tested elsewhere"
                if any(fresh):
                    product, other = (left, right) if fresh[0] else (right, left)
                    x, y = product.factors
                    x, z = dtype(x), convert(code, other.value)
                    if sign == -1:
                        x, z = (x, -z) if fresh[0] else (-x, z)
                    return Number(code, fma(x, y, z, dtype))
            a, b = convert(code, left.value), convert(code, right.value)
            folded = code[0] == "f" and left.constant and right.constant
            return Number(code, a + b if sign == 1 else a - b, constant=folded)

    return compute


def _floor(which):
    def compute(code, left, right):
        assert code[0] in "iu"
        a, b = convert(code, left.value), convert(code, right.value)
        if not right.constant:
            _stretch[0] += 1
        if b == 0 or (code == "i8" and a == -(2**63) and b == -1):
            return Number(code, 0)
        return Number(code, divmod(a, b)[which])

    return compute


def _divide(code, left, right):
    _calls[0] += 1
    a, b = convert(code, left.value), convert(code, right.value)
    with np.errstate(all="ignore"):
        return Number(code, a / b)


def _shift(to_left):
    def compute(code, left, right):
        value, amount = convert(code, left.value), convert("i8", right.value)
        if to_left:
            return Number(code, value << amount if 0 <= amount < 64 else 0)
        return Number(code, value >> (amount if 0 <= amount < 64 else 200))

    return compute


def _compare(operate):
    def method(self, other):
        other = box(other)
        code = _look_up(_TABLE["compared_as"], self.code, other.code)
        return Number("b1", operate(convert(code, self.value), convert(code, other.value)))

    return method


_OPERATORS = {
    "add": ("Add", _sum(1)),
    "sub": ("Sub", _sum(-1)),
    "mul": ("Mult", _arithmetic(_multiply)),
    "truediv": ("Div", _divide),
    "floordiv": ("FloorDiv", _floor(0)),
    "mod": ("Mod", _floor(1)),
    "lshift": ("LShift", _shift(True)),
    "rshift": ("RShift", _shift(False)),
    "and": ("BitAnd", _arithmetic(lambda a, b: a & b)),
    "or": ("BitOr", _arithmetic(lambda a, b: a | b)),
    "xor": ("BitXor", _arithmetic(lambda a, b: a ^ b)),
}
for _word, (_name, _compute) in _OPERATORS.items():
    setattr(Number, f"__{_word}__", _binary(_name, _compute))
    setattr(Number, f"__r{_word}__", _binary(_name, _compute, reflected=True))
for _word, _operate in {
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
}.items():  # fmt: skip
    setattr(Number, f"__{_word}__", _compare(_operate))
Number.__hash__ = None


def _square(self, exponent):
    assert exponent == 2
    if self.code[0] == "f":
        return self * self
    code = _look_up(_TABLE["binary"]["Pow"], self.code, "i8")
    return Number(code, self.value**2)


def _unary(name, operate):
    def method(self):
        code = _TABLE["unary"][name].split()[_TYPES[self.code]]
        narrow = self.code if self.code != "b1" or name == "Invert" else code
        value = convert(narrow, operate(convert(narrow, self.value)))
        return Number(code, value, None)

    return method


def _negative(self):
    result = _unary("USub", lambda v: -v)(self)
    if self.factors:
        result.factors = (-self.factors[0], self.factors[1])
        result.stretch, result.calls = self.stretch, self.calls
        result.negated = not self.negated
    return result


Number.__pow__ = _square
Number.__neg__ = _negative
Number.__pos__ = lambda self: self if self.code[0] == "f" else _unary("UAdd", lambda v: v)(self)
Number.__invert__ = _unary("Invert", lambda v: (not v) if isinstance(v, bool) else ~v)


class _Array:
    def __init__(self, data, prefix=()):
        self.prefix = prefix
        self.data, self.shape = data, tuple(box(extent) for extent in data.shape)
        self.code = _NAMES[data.dtype]

    def at(self, index):
        items = (*self.prefix, *(index if isinstance(index, tuple) else (index,)))
        place = tuple(box(item).value for item in items)
        if any(not 0 <= i < extent for i, extent in zip(place, self.data.shape, strict=True)):
            raise Fault(f"{place} of {self.data.shape}")
        return place

    def __getitem__(self, index):
        if not isinstance(index, tuple) and self.data.ndim > 1 + len(self.prefix):
            return _Array(self.data, (*self.prefix, index))
        found = self.data[self.at(index)]
        return Number(self.code, found if self.code[0] == "f" else int(found))

    def __setitem__(self, index, value):
        self.data[self.at(index)] = convert(self.code, box(value).value)


class _Block:
    """One block: its threads, its shared memory, and the scheduler that switches them."""

    def __init__(self, kernel, grid, block, number, args):
        self.grid, self.block, self.number, self.args = grid, block, number, args
        self.shared, self.kernel = {}, getattr(kernel, "py_func", kernel)

    def run(self):
        self.threads = [_Thread(self, t) for t in range(math.prod(self.block))]
        alive = list(self.threads)
        while alive:
            for thread in alive:
                if thread.request is None:
                    thread.resume()
            alive = [thread for thread in alive if not thread.done]
            if alive and not (self._warps(alive) or self._barrier(alive)):
                raise Fault("threads wait for each other for ever")

    def _barrier(self, alive):
        if any(thread.request[0] != "barrier" for thread in alive):
            return False
        says = [thread.request[2] for thread in alive]
        total = {"": None, "count": sum(map(bool, says)), "and": all(says), "or": any(says)}
        for thread in alive:
            thread.answer, thread.request = total[thread.request[1]], None
        return True

    def _warps(self, alive):
        moved = False
        for warp in range(-(-len(self.threads) // 32)):
            waiting = {t.number % 32: t for t in alive
                       if t.number // 32 == warp and t.request[0] == "warp"}  # fmt: skip
            present = {t.number % 32 for t in alive if t.number // 32 == warp}
            for thread in list(waiting.values()):
                if thread.request is None:
                    continue
                members = thread.request[2]
                group = {lane for lane in present if members >> lane & 1}
                if all(lane in waiting and waiting[lane].request is not None for lane in group):
                    self._answer({lane: waiting[lane] for lane in group})
                    moved = True
        return moved

    @staticmethod
    def _answer(group):
        asked = {lane: thread.request for lane, thread in group.items()}
        for lane, thread in group.items():
            how, _, value, amount = thread.request[1:]
            if how in ("all", "any", "ballot"):
                says = {other: bool(request[3]) for other, request in asked.items()}
                bits = sum(1 << other for other, yes in says.items() if yes)
                thread.answer = {
                    "all": all(says.values()),
                    "any": any(says.values()),
                    "ballot": Number("i4", bits),
                }[how]
            elif how == "sync":
                thread.answer = None
            else:
                amount &= 31
                source = {"index": amount, "up": lane - amount, "down": lane + amount,
                          "xor": lane ^ amount}[how]  # fmt: skip
                source = source if 0 <= source < 32 else lane
                given = asked.get(source)
                thread.answer = Number(value.code, given[3].value if given else poison(value.code))
        for thread in group.values():
            thread.request = None


class _Thread:
    def __init__(self, block, number):
        self.block, self.number, self.done = block, number, False
        self.request = self.answer = None
        self.local = {}
        function = _rebound(block.kernel, _Cuda(self), {})
        args = [_Array(a) if isinstance(a, np.ndarray) else _argument(a) for a in block.args]
        self.greenlet = greenlet.greenlet(lambda: function(*args))

    def resume(self):
        self.request = (
            self.greenlet.switch(self.answer) if self.greenlet else self.greenlet.switch()
        )
        self.done = self.greenlet.dead

    def wait(self, *request):
        return greenlet.getcurrent().parent.switch(request)


def _rebound(function, cuda, known):
    """Return the function with the dialect's names, and device functions, made this thread's."""
    if function in known:
        return known[function]
    scope = dict(function.__globals__)
    made = types.FunctionType(
        function.__code__, scope, function.__name__, None, function.__closure__
    )
    known[function] = made
    for name in function.__code__.co_names:
        value = scope.get(name)
        if type(value).__name__ == "_Cuda":
            scope[name] = cuda
        elif isinstance(value, types.FunctionType):
            scope[name] = _rebound(value, cuda, known)
        elif isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
            scope[name] = box(value)
        elif value is math:
            scope[name] = _Math
        elif value is np:
            scope[name] = _Types
    scope.update(min=_extreme(False), max=_extreme(True), abs=_absolute, int=_int, float=_float,
                 range=_range, bool=lambda v: Number("b1", bool(v)))  # fmt: skip
    return made


class _Types:
    def __getattr__(self, name):
        code = _NAMES[np.dtype(name)]

        def converted(value):
            given = box(value)  # the same type is no conversion: a product stays one
            if given.code == code:
                return given
            return Number(code, given.value, constant=given.constant)

        return converted


_Types = _Types()


class _Math:
    @staticmethod
    def sqrt(value):
        _calls[0] += 1
        value = box(value)
        code = value.code if value.code[0] == "f" else "f8"
        with np.errstate(all="ignore"):
            return Number(code, np.sqrt(convert(code, value.value)))

    @staticmethod
    def floor(value):
        value = box(value)
        code = value.code if value.code[0] == "f" else "f8"
        return Number(code, np.floor(convert(code, value.value)))


def _extreme(largest):
    def choose(*values):
        boxed = [box(value) for value in values]
        if len(boxed) == 2 and boxed[0].code == boxed[1].code and boxed[0].code[0] == "f":
            a, b = boxed[0].value, boxed[1].value
            if math.isnan(a) or math.isnan(b):
                return Number(boxed[0].code, b if math.isnan(a) else a)
            if a == b == 0:
                minus = [np.signbit(a), np.signbit(b)]
                return Number(boxed[0].code, a * 0 if all(minus) else _zero(a, minus, largest))
            return Number(boxed[0].code, max(a, b) if largest else min(a, b))
        best = boxed[0]
        for value in boxed[1:]:
            code = _look_up(_TABLE["unify"], best.code, value.code)
            a, b = convert(code, best.value), convert(code, value.value)
            best = Number(code, b if (b > a if largest else b < a) else a)
        return best

    return choose


def _zero(a, minus, largest):
    return type(a)(0.0 if largest else (-0.0 if any(minus) else 0.0))


def _absolute(value):
    value = box(value)
    return Number(value.code if value.code != "b1" else "i8", abs(convert(value.code, value.value)))


def _int(value):
    value = box(value)
    return value if value.code[0] in "iu" else Number("i8", value.value)


def _float(value):
    value = box(value)
    return value if value.code[0] == "f" else Number("f8", value.value)


def _range(*bounds):
    codes = [box(bound).code for bound in bounds]
    code = "i4" if all(c in ("i1", "i2", "i4", "b1") for c in codes) else "i8"
    return (Number(code, i) for i in range(*(box(bound).value for bound in bounds)))


class _Vector:
    def __init__(self, values):
        self.x, self.y, self.z = (Number("i4", value) for value in values)


class _Cuda:
    """``cuda`` as one thread sees it."""

    def __init__(self, thread):
        block, n = thread.block, thread.number
        self._thread = thread
        (bx, by, _), (gx, gy, _) = block.block, block.grid
        self.threadIdx = _Vector((n % bx, n // bx % by, n // bx // by))
        b = block.number
        self.blockIdx = _Vector((b % gx, b // gx % gy, b // gx // gy))
        self.blockDim, self.gridDim = _Vector(block.block), _Vector(block.grid)
        self.laneid = Number("i4", n % 32)
        self.shared = types.SimpleNamespace(array=self._shared)
        self.local = types.SimpleNamespace(array=self._local)
        self.atomic = types.SimpleNamespace(
            add=self._atomic(lambda a, b: a + b), sub=self._atomic(lambda a, b: a - b),
            max=self._atomic(max), min=self._atomic(min), xor=self._atomic(lambda a, b: a ^ b),
            exch=self._atomic(lambda a, b: b), and_=self._atomic(lambda a, b: a & b),
            or_=self._atomic(lambda a, b: a | b), cas=self._cas,
        )  # fmt: skip

    def grid(self, axes):
        parts = [
            getattr(self.blockIdx, a) * getattr(self.blockDim, a) + getattr(self.threadIdx, a)
            for a in "xyz"[: box(axes).value]
        ]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def gridsize(self, axes):
        parts = [getattr(self.gridDim, a) * getattr(self.blockDim, a) for a in "xyz"[:axes]]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _shared(self, shape, dtype):
        return self._declared(self._thread.block.shared, shape, dtype)

    def _local(self, shape, dtype):
        return self._declared(self._thread.local, shape, dtype)

    @staticmethod
    def _declared(known, shape, dtype):
        frame = sys._getframe(2)
        key = (frame.f_code, frame.f_lasti)  # the call itself, not its line
        if key not in known:
            shape = shape if isinstance(shape, tuple) else (shape,)
            code = (
                _NAMES[np.dtype(dtype)]
                if not callable(dtype) or isinstance(dtype, type)
                else dtype(0).code
            )
            shape = tuple(box(extent).value for extent in shape)
            known[key] = np.full(shape, poison(code), _DTYPES[code])
        return _Array(known[key])

    def syncthreads(self):
        self._thread.wait("barrier", "", False)

    def syncthreads_count(self, says):
        return Number("i4", self._thread.wait("barrier", "count", bool(says)))

    def syncthreads_and(self, says):
        return Number("i4", self._thread.wait("barrier", "and", bool(says)))

    def syncthreads_or(self, says):
        return Number("i4", self._thread.wait("barrier", "or", bool(says)))

    def syncwarp(self, members=0xFFFFFFFF):
        self._thread.wait("warp", "sync", members, None, 0)

    def _warp(self, how, members, value, amount=0):
        return self._thread.wait("warp", how, box(members).value, value, box(amount).value)

    def shfl_sync(self, members, value, lane):
        return self._warp("index", members, box(value), lane)

    def shfl_up_sync(self, members, value, lane):
        return self._warp("up", members, box(value), lane)

    def shfl_down_sync(self, members, value, lane):
        return self._warp("down", members, box(value), lane)

    def shfl_xor_sync(self, members, value, lane):
        return self._warp("xor", members, box(value), lane)

    def all_sync(self, members, says):
        return self._warp("all", members, bool(says))

    def any_sync(self, members, says):
        return self._warp("any", members, bool(says))

    def ballot_sync(self, members, says):
        return self._warp("ballot", members, bool(says))

    @staticmethod
    def _atomic(update):
        def atomic(array, index, value):
            old = array[index]
            new = update(old.value, convert(array.code, box(value).value))
            array.data[array.at(index)] = convert(array.code, new)
            return old

        return atomic

    @staticmethod
    def _cas(array, index, expected, value):
        old = array[index]
        if old.value == convert(array.code, box(expected).value):
            array[index] = value
        return old
