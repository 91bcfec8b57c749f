"""What a product of files wrote, finished or not, as other libraries than ours read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr


def load(path: str | Path) -> Any:
    """Return the array in a .npy file, a Zarr folder or, named c, an HDF5 file."""
    path = Path(path)
    if path.is_dir():
        return zarr.open_array(path, mode="r")[...]
    if ".npy" in path.suffixes:
        return np.load(path)
    with h5py.File(path) as file:
        return file["c"][...]
