"""Random problems on the CPU, bit for bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from tests.problems import Problem, check, problems


@settings(max_examples=300, deadline=None)
@given(problems())
def test_B21_random_problems_are_exact(problem: Problem) -> None:
    check(problem, lambda x: x, np.asarray)
