"""Device arrays as far as no device is needed to see them."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise.runtime.arrays import DeviceArray, to_host


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (3, 0, 2)])
def test_nothing_comes_to_the_host_with_its_shape_and_type(shape: tuple[int, ...]) -> None:
    strides = np.empty(shape, np.complex64).strides
    nothing = DeviceArray(0, shape, strides, np.dtype(np.complex64), 0, False, None)
    found = to_host(nothing, 1)
    assert (found.shape, found.dtype) == (shape, np.complex64)
