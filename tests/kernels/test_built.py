"""Which compiled kernel runs where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilewise import kernels
from tilewise.errors import DeviceError


@pytest.mark.parametrize(
    ("capability", "targets"),
    [
        ((7, 5), ()),
        ((8, 0), ("sm_80", "compute_80")),
        ((8, 6), ("sm_86", "sm_80", "compute_80")),
        ((8, 7), ("sm_86", "sm_80", "compute_80")),
        ((8, 9), ("sm_89", "sm_86", "sm_80", "compute_80")),
        ((9, 0), ("sm_90a", "compute_80")),
        ((10, 0), ("sm_100a", "compute_80")),
        ((10, 3), ("compute_80",)),
        ((12, 0), ("sm_120a", "compute_80")),
        ((13, 7), ("compute_80",)),
    ],
)
def test_targets_of_a_capability(capability: tuple[int, int], targets: tuple[str, ...]) -> None:
    assert kernels.targets_for(capability) == targets


def entry(name: str, target: str) -> dict[str, object]:
    return {
        "name": name,
        "target": target,
        "entry": name,
        "parameters": [{"name": "x", "type": "pointer"}],
        "null_pointers": 2,
        "warps": 4,
        "blocks": 1,
        "starts_early": False,
        "shared_bytes": 0,
        "static_shared_bytes": 0,
        "registers": 16,
        "stack_bytes": 0,
        "rewritten": 0,
        "instructions": {},
        "code_bytes": 0,
        "code_sha256": "",
        "compiler": "none",
        "key": "",
    }


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "some").mkdir()
    entries = [entry("both", "sm_90a"), entry("both", "compute_80"), entry("hopper", "sm_90a")]
    (tmp_path / "some" / "manifest.json").write_text(json.dumps({"kernels": entries}))
    return tmp_path


@pytest.mark.parametrize(
    ("capability", "target"),
    [((9, 0), "sm_90a"), ((8, 0), "compute_80"), ((13, 0), "compute_80")],
)
def test_find_takes_the_best(place: Path, capability: tuple[int, int], target: str) -> None:
    assert kernels.find("some", "both", capability, place).target == target


def test_A21_an_architecture_without_a_kernel_is_named(place: Path) -> None:
    with pytest.raises(DeviceError, match=r"no kernel for compute capability 12\.0: some/hopper"):
        kernels.find("some", "hopper", (12, 0), place)
    with pytest.raises(DeviceError, match=r"no kernel for compute capability 7\.5"):
        kernels.find("some", "both", (7, 5), place)


def test_a_kernel_that_is_not_there_is_named(place: Path) -> None:
    with pytest.raises(DeviceError, match="there is no kernel some/other; run make kernels"):
        kernels.find("some", "other", (9, 0), place)
