"""Checks shared by the specs: each raises LayoutError naming the field, the value, the rule and the
remedy.
"""

from __future__ import annotations

import sys
from typing import TypeGuard

from sparsekv.errors import LayoutError


def is_finite(value: object) -> TypeGuard[float]:
    """Whether `value` is an int or float that a float can hold (bool is no number here)."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max


def check_positive_int(name: str, value: object, remedy: str) -> None:
    """Raise unless `value` is an int of at least 1 (bool is not an int here)."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutError(f"{name}={value!r}: must be a whole number of at least 1; {remedy}")


def check_share(name: str, value: object) -> None:
    """Raise unless `value` is a finite number in [0, 1]."""
    if not is_finite(value) or not 0.0 <= value <= 1.0:
        raise LayoutError(
            f"{name}={value!r}: must be a number from 0 (all of it on the GPU's side) to 1 (all "
            "of it on the "
            "CPU's side); use 0.5 if unsure"
        )


def check_tokens(name: str, value: object) -> None:
    """Raise unless `value` is an int of 0 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise LayoutError(
            f"{name}={value!r}: must be a whole number, 0 or more; count the placed tokens of one "
            "sequence"
        )


def check_seconds(name: str, value: object) -> None:
    """Raise unless `value` is a finite number of seconds, 0 or more."""
    if not is_finite(value) or value < 0:
        raise LayoutError(
            f"{name}={value!r}: must be a finite number of seconds, 0 or more; measure again, for "
            "only a clock that jumped or a rate of zero gives another"
        )


def check_rate(name: str, value: object, unit: str = "1e9 bytes/s") -> None:
    """Raise unless `value` is a finite number above 0."""
    if not is_finite(value) or value <= 0:
        raise LayoutError(
            f"{name}={value!r}: must be a finite rate above 0, in {unit}; measure again with "
            "more bytes, or give the specified rate"
        )
