"""What the library logs while a command runs, as lines on stderr above the bars."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from sparsekv.cli.progress import Display

_LIBRARY = "sparsekv"


@contextmanager
def shown_notes(display: Display) -> Iterator[None]:
    """Show warnings, and on a terminal also what takes a while, such as a first measurement."""
    logger, handler = logging.getLogger(_LIBRARY), _Notes(display)
    level = logger.level
    logger.addHandler(handler)
    if display.is_terminal:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


class _Notes(logging.Handler):
    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        message = " ".join(record.getMessage().split())
        self._display.note(f"warning: {message}" if is_warning else message, is_warning=is_warning)
