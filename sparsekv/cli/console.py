"""Where the command line writes: results to stdout, progress and errors to stderr.

Colours appear on a terminal only.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

RESULT_WIDTH = 100
"""Columns of a table that goes to a file or a pipe, where there is no terminal to ask."""


def stdout_console() -> Console:
    """A console on today's stdout (looked up per call, because tests and shells replace it)."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=RESULT_WIDTH)


def stderr_console() -> Console:
    """A console on today's stderr."""
    return Console(file=sys.stderr, highlight=False)


def print_error(message: str) -> None:
    """Write one red line to stderr: what was given, which rule holds, what to do."""
    one_line = " ".join(str(message).split())
    stderr_console().print("error: " + one_line, style="bold red", markup=False, soft_wrap=True)


def print_json(result: Mapping[str, object]) -> None:
    """Write one JSON object to stdout and nothing else."""
    stdout_console().print(json.dumps(result, indent=2), markup=False, soft_wrap=True)


def print_text(text: str) -> None:
    """Write prose, broken between words where the console ends."""
    console = stdout_console()
    console.print(textwrap.fill(text, console.width, break_on_hyphens=False), markup=False)


def print_table(
    title: str, columns: list[str], rows: list[list[str]], *, num_words: int = 2
) -> None:
    """Write a title and a table: `num_words` columns of words, then numbers aligned right."""
    table = Table()
    for idx, column in enumerate(columns):
        table.add_column(column, justify="left" if idx < num_words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = stdout_console()
    console.print(title, style="bold", soft_wrap=True)
    console.print(table)
