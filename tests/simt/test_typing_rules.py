"""Types of operations, against a table recorded from numba-cuda."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tilewise.errors import KernelError
from tilewise.simt import typing_rules as rules

TABLE = json.loads((Path(__file__).parent / "data" / "numba_types.json").read_text())
TYPES = TABLE["types"]
PAIRS = list(product(range(len(TYPES)), repeat=2))


def recorded(rows, left, right):
    found = rows[left].split()[right]
    return None if found == "--" else found


@pytest.mark.parametrize("operator", TABLE["binary"])
def test_result_types_of_operators_are_numbas(operator):
    for left, right in PAIRS:
        if (operator, TYPES[left], TYPES[right]) == ("Pow", "b1", "i4"):
            continue  # float32 in numba, by an accident of its overload order
        try:
            result = rules.binary(operator, TYPES[left], TYPES[right])[0]
        except TypeError:
            result = None
        expected = recorded(TABLE["binary"][operator], left, right)
        assert result == expected, (operator, TYPES[left], TYPES[right])


def test_types_that_comparisons_are_made_in_are_numbas():
    for left, right in PAIRS:
        found = rules.comparison_operands(TYPES[left], TYPES[right])
        assert found == recorded(TABLE["compared_as"], left, right), (TYPES[left], TYPES[right])


def test_types_that_two_paths_join_in_are_numbas():
    for left, right in PAIRS:
        found = rules.unify(TYPES[left], TYPES[right])
        assert found == recorded(TABLE["unify"], left, right), (TYPES[left], TYPES[right])


@pytest.mark.parametrize("operator", ["USub", "UAdd", "Invert", "Not"])
def test_types_of_unary_operators_are_numbas(operator):
    for code, expected in zip(TYPES, TABLE["unary"][operator].split(), strict=True):
        try:
            found = rules.unary(operator, code)
        except TypeError:
            found = "--"
        assert found == expected, (operator, code)


def test_types_of_arguments():
    assert rules.type_of_scalar(3) == "i8"
    assert rules.type_of_scalar(2**63) == "u8"
    assert rules.type_of_scalar(True) == "b1"
    assert rules.type_of_scalar(1.5) == "f8"
    assert rules.type_of_scalar(np.float32(1.5)) == "f4"
    assert rules.type_of_scalar(np.float64(1.5)) == "f8"
    assert rules.type_of_scalar("no") is None
    assert rules.type_of_dtype(np.dtype(">f4")) is None
    assert rules.type_of_dtype(np.dtype(complex)) is None
    with pytest.raises(KernelError, match="64 bits"):
        rules.type_of_scalar(2**64)
