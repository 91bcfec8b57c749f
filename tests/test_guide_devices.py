"""Where the guide's Mul runs: devices by name, and the trace of its five steps."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise import guide
from tilewise.errors import DeviceError, OptionError
from tilewise.runtime import driver

STEPS = ["allocate"] * 3 + ["copy in"] * 2 + ["launch", "copy out"] + ["free"] * 3


def test_a_trace_shows_the_five_steps() -> None:
    a, b = np.ones((16, 32), np.float32), np.ones((32, 48), np.float32)
    c = np.full((16, 48), np.nan, np.float32)
    traced = guide.Traced("cpu")
    guide.Mul(a, b, 16, 32, 48, c, device=traced)
    np.testing.assert_array_equal(c, 32)
    assert [name for name, _, _ in traced.steps] == STEPS
    sizes = [a.nbytes, b.nbytes, c.nbytes]
    assert [nbytes for _, nbytes, _ in traced.steps] == [
        *(*sizes, *sizes[:2]),
        *(sum(sizes), sizes[2], *sizes),
    ]
    assert all(seconds > 0 for _, _, seconds in traced.steps)
    lines = str(traced).splitlines()
    assert len(lines) == len(STEPS)
    assert lines[3].startswith("copy in")
    assert lines[3].endswith("GB/s")


def test_a_device_that_is_none_is_refused() -> None:
    a = np.ones((16, 16), np.float32)
    with pytest.raises(OptionError, match="device 'tpu' is not 'cuda:0'"):
        guide.Mul(a, a, 16, 16, 16, a.copy(), device="tpu")


@pytest.mark.skipif(driver.is_usable(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_never_replaced() -> None:
    a, c = np.ones((16, 16), np.float32), np.full((16, 16), 7, np.float32)
    with pytest.raises(DeviceError, match=r"NVIDIA driver|'tilewise\[cuda\]'"):
        guide.Mul(a, a, 16, 16, 16, c, device="cuda:0")
    np.testing.assert_array_equal(c, 7)
