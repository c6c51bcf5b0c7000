"""A finding: one sentence about this machine, how bad it is, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_LONGEST = 300


class Level(str, Enum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing is lost that the user did not choose, or cannot have here."""
    WARNING = "warning"
    """Works, but slower or with less than this machine could."""
    MUST_FIX = "must fix"
    """Does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found.

    Attributes:
        topic: what it is about, a word or two.
        level: how bad it is.
        text: what was found, in words for the user.
        remedy: one sentence that says what to do; empty if and only if all is well.
    """

    topic: str
    level: Level
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.level is Level.OK) == (self.remedy == ""), f"{self.level}: {self.remedy!r}"


def unread(topic: str, names: tuple[str, ...]) -> list[Finding]:
    """What to say of files that should have told something."""
    if not names:
        return []
    return [
        Finding(
            topic=topic,
            level=Level.NOTE,
            text=f"{', '.join(names)}: cannot be read, or not understood; what is said of the "
            f"{topic} may be incomplete",
            remedy="in a container or sandbox, mount /proc and /sys as the system has them",
        )
    ]


def one_line(text: str) -> str:
    """What a compiler or a driver says, as part of a sentence."""
    words = " ".join(text.split())
    return words if len(words) <= _LONGEST else words[: _LONGEST - 4] + " ..."


def count(number: int, noun: str) -> str:
    """`1 core`, `2 cores`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def gibibytes(num_bytes: int) -> str:
    """`23.4 GiB`."""
    return f"{num_bytes / 2**30:.1f} GiB"
