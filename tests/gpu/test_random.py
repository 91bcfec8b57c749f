"""Two thousand random problems on the GPU, bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.gpu.support import download, upload
from tests.problems import Problem, check, problems

pytestmark = pytest.mark.gpu


@settings(max_examples=2000)
@given(problems())
def test_B21_random_problems_are_exact(problem: Problem) -> None:
    check(problem, upload, download)
