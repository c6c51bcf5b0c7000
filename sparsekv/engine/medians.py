"""Times of calls that take turns, and the rates that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

from sparsekv.errors import LayoutError

MOST_ROUNDS, LEAST_ROUNDS = 9, 3
ENOUGH_S = 0.25
"""Once rounds took so long, a slow machine gets no more of them than it needs."""


def seconds_of(call: Callable[[], object]) -> float:
    """What one call takes."""
    began = perf_counter()
    call()
    return perf_counter() - began


def median_seconds(*calls: Callable[[], object]) -> list[float]:
    """What each call takes: medians of several rounds, in each of which all have their turn, so
    that what disturbs the machine disturbs all of them alike. The first round warms up.
    """
    for call in calls:
        seconds_of(call)
    rounds: list[list[float]] = []
    while len(rounds) < MOST_ROUNDS:
        rounds.append([seconds_of(call) for call in calls])
        if len(rounds) >= LEAST_ROUNDS and sum(map(sum, rounds)) > ENOUGH_S:
            break
    return [median(times) for times in zip(*rounds, strict=True)]


def rate(name: str, amount: float, seconds: float) -> float:
    """`amount` per second.

    Raises:
        LayoutError: it took no time.
    """
    if not seconds > 0:
        raise LayoutError(
            f"{name}: measured in {seconds!r} s, must take some time; measure again with nothing "
            "else running, for only a clock that jumped or a cost of zero gives none"
        )
    return amount / seconds
