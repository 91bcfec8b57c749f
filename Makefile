# The verbs of this project; continuous integration calls the same ones.
# Each makes its own .venv when there is none.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --editable

.PHONY: demo test test-slow test-gpu check kernels bench clean

demo: .venv/.demo  ## multiply real data, check it, run the guide's kernel
	$(BIN)/tilewise demo

test: kernels  ## the CPU suite
	$(BIN)/pytest -q --numprocesses auto --maxprocesses 4 --dist worksteal

test-slow: kernels  ## the cases above 2 GB or 10 s
	$(BIN)/pytest -q -m 'slow and not gpu and not multigpu' --timeout 1800

test-gpu: kernels  ## the GPU suite; fails, and does not skip, without a GPU
	$(BIN)/pytest -q -m 'gpu and not multigpu' --require-gpu

check: .venv/.dev  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

kernels: .venv/.dev  ## compile the GPU kernels that are not compiled yet; needs no GPU
	$(BIN)/python -m tilewise.kernels.compile

bench: kernels  ## every benchmark, written to benchmarks/results/
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf src/tilewise/kernels/built
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.demo: pyproject.toml
	$(PYTHON) -m venv .venv
	$(INSTALL) '.[demo]'
	@touch $@

.venv/.dev: pyproject.toml
	$(PYTHON) -m venv .venv
	$(INSTALL) '.[dev]'
	@touch $@
