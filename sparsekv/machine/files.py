"""The small files in which Linux describes a machine, below a root that tests replace."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")


class SystemFiles:
    """Reads files, and remembers which of those that should be there said nothing."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._unread: list[str] = []

    @property
    def unread(self) -> tuple[str, ...]:
        """Names of the files that `read` made nothing of."""
        return tuple(self._unread)

    def text(self, name: str) -> str | None:
        """The text of a file, such as `proc/meminfo`; None where there is none to read."""
        try:
            return (self._root / name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def read(self, name: str, parse: Callable[[str], Value | None]) -> Value | None:
        """What `parse` finds in a file; None, and remembered, where that is nothing."""
        text = self.text(name)
        try:
            value = None if text is None else parse(text)
        except ValueError:
            value = None
        if value is None:
            self._unread.append(f"/{name}")
        return value

    def names(self, folder: str, pattern: str) -> Iterator[str]:
        """The files and folders in `folder` whose whole name matches a regular expression."""
        try:
            found = sorted(path.name for path in (self._root / folder).iterdir())
        except OSError:
            return
        yield from (name for name in found if re.fullmatch(pattern, name))


def field(name: str, text: str) -> str | None:
    """The value in the first line `name: value` of a text."""
    found = re.search(rf"^{re.escape(name)}\s*:[ \t]*(.*?)\s*$", text, re.MULTILINE)
    return found[1] if found else None


def kilobytes(name: str, text: str) -> int | None:
    """Bytes of a line `name: 1234 kB`."""
    value = field(name, text)
    found = re.fullmatch(r"(\d+) kB", value or "")
    return int(found[1]) << 10 if found else None
