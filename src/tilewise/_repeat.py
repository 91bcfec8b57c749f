"""Products like one before: recognised by what their operands look like, and launched at once.

The general way (`_api`, `_run`) looks at everything, says what is wrong, and plans. What it found
holds for every later product that asks the same of plain device arrays of the same shapes, strides,
types and device: only their addresses and the current stream are new. Whatever is not recognised
here goes the general way, errors too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._libraries import Library, Recogniser, known_library, library_name
from .runtime import driver, streams

if TYPE_CHECKING:
    from ._gpu import Prepared
    from .runtime.arrays import DeviceArray

__all__ = ["keep", "knows", "product", "question"]

#: How many questions are remembered (with more, all are forgotten), and how many kinds of products
#: of each, such as of other strides.
_MOST_QUESTIONS = 4096
_MOST_KINDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What all products of one kind have in common.

    The result may share memory with a where it begins more than ``near_a[0]`` and less than
    ``near_a[1]`` bytes behind it, and likewise with b.
    """

    recognise: Recogniser
    near_a: tuple[int, int]
    near_b: tuple[int, int]
    index: int
    make: Callable[[Any], tuple[Any, int]] | None  #: makes the result, if it is not given
    put: Prepared


class _Memory:
    """The products of one library's arrays, by what was asked."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.kept: dict[Hashable, tuple[_Kept, ...]] = {}


_memories: dict[type, _Memory] = {}


def question(a: Any, b: Any, dtype: Any, precision: Any) -> Hashable:
    """Return what a product depends on besides the arrays and the stream, for `product`.

    The shapes are there to tell the products of one program apart quickly.
    """
    try:
        return a.shape, b.shape, dtype, precision
    except (AttributeError, RuntimeError):  # no array, or one without a shape
        return None


def product(a: Any, b: Any, out: Any, stream: Any, asked: Hashable) -> Any:
    """Put ``out = a @ b`` on a stream and return it, if it is like one before; None if it is not.

    Parameters
    ----------
    a, b, out, stream
        As of `matmul`.
    asked : hashable
        What it depends on besides the arrays and the stream, as `keep` was told.
    """
    memory = _memories.get(type(a))
    if memory is None:
        return None
    try:
        for kept in memory.kept.get(asked, ()):
            pointers = kept.recognise(a, b, out)
            if pointers is not None:
                break
        else:
            return None
    except (RuntimeError, TypeError):  # the library's, and that of what has no hash
        return None
    a_at, b_at, c_at = pointers
    if out is not None:
        a_low, a_high = kept.near_a
        b_low, b_high = kept.near_b
        if a_low < c_at - a_at < a_high or b_low < c_at - b_at < b_high:
            return None
    handle = memory.library.stream(kept.index) or streams.DEFAULT
    if stream is not None and streams.handle_of(stream, kept.index) != handle:
        return None
    if kept.make is not None:
        driver.require()
        try:
            out, c_at = kept.make(a)
        except (MemoryError, RuntimeError):  # no room: the general way says so
            return None
        pointers = a_at, b_at, c_at
    kept.put(pointers, handle)
    return out


def knows(a: Any, b: Any, asked: Hashable) -> bool:
    """Say whether a product whose result is new is like one before; see `product`."""
    memory = _memories.get(type(a))
    try:
        every = () if memory is None else memory.kept.get(asked, ())
        return any(kept.recognise(a, b, None) is not None for kept in every)
    except (RuntimeError, TypeError):  # as in `product`
        return False


def keep(
    asked: Hashable,
    put: Prepared,
    arrays: tuple[Any, Any, Any],
    seen: tuple[DeviceArray, DeviceArray, DeviceArray],
    is_new: bool,
) -> None:
    """Remember a product, if later ones like it can be recognised.

    Parameters
    ----------
    asked : hashable
        What it depends on besides its arrays and the stream.
    put : Prepared
        What puts it on a stream.
    arrays, seen : tuple
        a, b and the result, as their library's arrays and as what they are here.
    is_new : bool
        Whether the result was made for it.
    """
    library = known_library(library_name(arrays[0]))
    if library is None or {type(x) for x in arrays} != {library.array}:
        return
    a, b, c = arrays[0], arrays[1], None if is_new else arrays[2]
    pointers = (seen[0].pointer, seen[1].pointer, 0 if is_new else seen[2].pointer)
    memory = _memories.setdefault(library.array, _Memory(library))
    try:
        if any(kept.recognise(a, b, c) == pointers for kept in memory.kept.get(asked, ())):
            return  # known, and here for another reason, such as where out is
        recognise = library.recogniser(a, b, c)
        if recognise(a, b, c) != pointers:
            return  # not as it seems, such as a conjugated view, which was copied
    except (RuntimeError, TypeError):  # as in `product`
        return
    kept = _Kept(
        recognise=recognise,
        near_a=_near(seen[2], seen[0]),
        near_b=_near(seen[2], seen[1]),
        index=seen[2].index,
        make=library.maker(arrays[2], a) if is_new else None,
        put=put,
    )
    if len(memory.kept) >= _MOST_QUESTIONS:
        memory.kept.clear()
    memory.kept[asked] = (kept, *memory.kept.get(asked, ())[: _MOST_KINDS - 1])


def _near(c: DeviceArray, x: DeviceArray) -> tuple[int, int]:
    """Return how far c begins behind x, in bytes, where their extents meet."""
    c_low, c_high = (end - c.pointer for end in c.extent)
    x_low, x_high = (end - x.pointer for end in x.extent)
    return x_low - c_high, x_high - c_low
