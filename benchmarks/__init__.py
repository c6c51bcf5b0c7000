"""Measurements: `python -m benchmarks.<name>` from the root; see docs/benchmarks.md."""
