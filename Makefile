# The verbs of this project; continuous integration calls the same ones.
# Each makes its own .venv when there is none.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow test-gpu check bench clean

.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: .venv/.ready  ## multiply real data, check it, run the guide's kernel
	$(BIN)/tilewise demo

test: .venv/.ready  ## the CPU suite
	$(BIN)/pytest -q

test-slow: .venv/.ready  ## the cases above 2 GB or 10 s
	$(BIN)/pytest -q -m 'slow and not gpu and not multigpu' --timeout 1800

test-gpu: .venv/.ready  ## the GPU suite; fails, and does not skip, without a GPU
	$(BIN)/pytest -q -m gpu --require-gpu

check: .venv/.ready  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: .venv/.ready  ## every benchmark, written to benchmarks/results/
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
