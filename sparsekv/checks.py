"""Checks shared by the specs: each raises LayoutError naming the field, the value, the rule and the
remedy.
"""

from __future__ import annotations

import math

from sparsekv.errors import LayoutError


def check_positive_int(name: str, value: object, remedy: str) -> None:
    """Raise unless `value` is an int of at least 1 (bool is not an int here)."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutError(f"{name}={value!r}: must be a whole number of at least 1; {remedy}")


def check_share(name: str, value: object) -> None:
    """Raise unless `value` is a finite number in [0, 1]."""
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not math.isfinite(value)
        or not 0.0 <= value <= 1.0
    ):
        raise LayoutError(
            f"{name}={value!r}: must be a number from 0 (all of it on the GPU's side) to 1 (all "
            "of it on the "
            "CPU's side); use 0.5 if unsure"
        )
