"""How long the engines took for their parts of recent steps, for who follows what they cost.

Whoever attends notes a time once it is known; nobody waits for one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_MOST_KEPT = 1024
"""More than a model has layers, so that nothing is lost where each step's are taken."""

Timing = tuple[int, float]
"""Tokens of a sequence that were attended to, and the seconds that it took: of one layer, in a step
of one new token; NaN: it was timed, and the time says nothing. A plain pair, which costs a step
next to nothing.
"""


class Recent:
    """The latest timings of one engine that nobody has taken; earlier ones are forgotten.

    Nothing is kept, nor need be timed, before somebody has taken once: nobody may ever ask.

    Attributes:
        is_wanted: whether somebody has.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self._timings: deque[Timing] = deque(maxlen=_MOST_KEPT)

    def note(self, num_tokens: int, seconds: float) -> None:
        """Add one, if it is wanted."""
        if self.is_wanted:
            self._timings.append((num_tokens, seconds))

    def take(self) -> list[Timing]:
        """All of them, in the order in which they became known; they are forgotten, and further
        ones are wanted.
        """
        self.is_wanted = True
        taken = list(self._timings)
        self._timings.clear()
        return taken


@dataclass(frozen=True, slots=True)
class Timings:
    """Of both engines, and of steps."""

    cpu: Recent = field(default_factory=Recent)
    """Of attention alone, without waiting for the query; of every layer."""
    gpu: Recent = field(default_factory=Recent)
    """Of attention to what is read in place of the pinned region, in some layers of a step whose
    launches are prepared. What is read ahead takes the bus when it is free, and no longer with the
    length; where nothing is, the window's part is in it.
    """
    steps: Recent = field(default_factory=Recent)
    """Of whole steps by the caller's clock, from the first layer of one to that of the next, with
    all that a model does between; for its one token each.
    """
