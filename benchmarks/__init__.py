"""Measurements behind every figure in the documentation: ``python -m benchmarks [name ...]``."""
