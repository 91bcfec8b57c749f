"""Arrays in files are sliced as NumPy's are, and read as they are sliced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.numerics.unread import Unread, broadcast_to, taken


def unread(x: Any, log: list[int] | None = None) -> Unread:
    """Return ``x``, an array that is a view of a whole one, as a file would have that one."""
    whole = x.base if x.base is not None else x
    data = np.ravel(whole, "K").view(np.uint8).tobytes()
    start = x.__array_interface__["data"][0] - whole.__array_interface__["data"][0]

    def read(offset: int, into: memoryview) -> None:
        assert offset + len(into) <= len(data)
        if log is not None:
            log.append(len(into))
        into[:] = data[offset : offset + len(into)]

    return Unread(read, x.dtype, x.shape, x.strides, start)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_part_is_what_numpy_has_there(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=4)))
    order: Any = data.draw(st.sampled_from("CF"))
    dtype = data.draw(st.sampled_from(["u1", "<f4", ">f8", "c16"]))
    x = np.arange(np.prod(shape)).astype(dtype).reshape(shape, order=order)
    here, there = x, unread(x)
    for _ in range(data.draw(st.integers(1, 2))):
        index: list[Any] = []
        for n in here.shape:
            start, stop = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
            some = st.sampled_from([slice(start, stop), slice(None)])
            index.append(data.draw(some | st.integers(0, n - 1) if n else some))
        left, right = sorted(data.draw(st.integers(0, len(index))) for _ in "lr")
        index[left:right] = [..., None]
        here, there = here[tuple(index)], there[tuple(index)]
    wide = (2, *(3 if n == 1 else n for n in here.shape))
    here, there = np.broadcast_to(here, wide), broadcast_to(there, wide)
    assert (there.shape, there.ndim, there.size) == (here.shape, here.ndim, here.size)
    assert np.array_equal(np.asarray(there), here)
    assert np.asarray(there).dtype == here.dtype


def test_what_lies_together_is_read_together() -> None:
    x = np.arange(64 * 1000, dtype="f4").reshape(64, 1000)
    log: list[int] = []
    assert np.array_equal(unread(x, log)[3:40], x[3:40])
    assert log == [37 * 4000]
    log.clear()
    assert np.array_equal(unread(x, log)[3:40, 10:20], x[3:40, 10:20])
    assert len(log) == 3  # rows of 4000 bytes, of 40 that count
    log.clear()
    assert np.array_equal(np.asarray(broadcast_to(unread(x)[0], (50, 1000))), x[[0] * 50])


@pytest.mark.parametrize("order", ["C", "F"])
def test_listed_rows_and_columns_are_read(order: Any) -> None:
    x = np.asarray(np.arange(20 * 30).reshape(20, 30), order=order)
    rows, columns = np.array([0, 1, 2, 7, 19]), np.array([4, 8, 9])
    for i, j in ((rows, columns), (rows, slice(2, 9)), (slice(3, 5), columns)):
        assert np.array_equal(taken(unread(x), i, j), x[i][:, j])
        assert np.array_equal(taken(x, i, j), x[i][:, j])
    assert isinstance(taken(unread(x), slice(1, 4), slice(2, 3)), Unread)
