"""Measurements: `python -m benchmarks.<name>` from the root; see docs/benchmarks.md."""

import os

# Before torch starts its threads: those that wait would spin while others are measured.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
