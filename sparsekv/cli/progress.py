"""Progress bars on stderr, and the text that streams to stdout above them.

Bars appear only when stderr is a terminal. When stdout is one too, the line being written is kept
with the bars and moves to stdout once it is complete, so that the two never overwrite each other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sparsekv.cli.console import stderr_console

_LINES_SHOWN = 4
"""Terminal lines of an unfinished line of text that stay in sight above the bar."""


class Display:
    """The screen of one run: `phase` shows a bar, `write` streams text.

    Use as a context manager.
    """

    def __init__(self) -> None:
        console = stderr_console()
        self._width = console.width
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._line = ""
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live:
            self._live.stop()
        _write_through(self._line)

    @contextmanager
    def phase(self, description: str, total: int, unit: str) -> Iterator[Callable[[], None]]:
        """Show a bar while the body runs; what it yields moves the bar by one of `total`."""
        task = self._bars.add_task(description, total=total, unit=unit)
        if self._live:
            self._live.refresh()  # even a phase shorter than the time between two frames is seen
        try:
            yield lambda: self._bars.advance(task)
        finally:
            self._bars.remove_task(task)

    @property
    def is_terminal(self) -> bool:
        """Whether stderr is one, and bars are shown."""
        return self._live is not None

    def note(self, text: str, *, is_warning: bool) -> None:
        """Write a line to stderr, above the bars."""
        style = "yellow" if is_warning else None
        self._bars.console.print(text, style=style, markup=False, soft_wrap=True)

    def write(self, text: str) -> None:
        """Append text to stdout, at once unless its line shares the terminal with a bar."""
        if self._live is None or not sys.stdout.isatty():
            _write_through(text)
            return
        finished, newline, self._line = (self._line + text).rpartition("\n")
        if newline:
            self._live.stop()
            _write_through(finished + newline)
            self._live.start()

    def _render(self) -> RenderableType:
        bars = self._bars.get_renderable()
        shown = self._line[-_LINES_SHOWN * self._width :]
        return Group(Text(shown), bars) if shown else bars


def _write_through(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
