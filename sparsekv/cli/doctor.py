"""`sparsekv doctor`: what this machine has, what is missing, and how to fix it."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from sparsekv.cli.console import print_json, stderr_console, stdout_console

if TYPE_CHECKING:
    from sparsekv.doctor.examination import Examination

EXIT_MUST_FIX = 1

_PATIENCE_S = 1.0
"""After so long the user is told what takes its time."""
_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "must fix": "bold red"}


def doctor(
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Examine this machine: what sparsekv can use, what is amiss, and what to do about it."""
    from sparsekv.doctor.examination import examine
    from sparsekv.doctor.finding import Level

    with _without_warnings():  # what the library would warn of is in the findings
        examination = examine(_say_what_takes_long)
    if json:
        print_json(as_dict(examination))
    else:
        print_examination(examination)
    if examination.num_findings(Level.MUST_FIX):
        raise typer.Exit(EXIT_MUST_FIX)


def as_dict(examination: Examination) -> dict[str, object]:
    """The examination as JSON holds it."""
    from sparsekv import __version__
    from sparsekv.doctor.finding import Level

    return {
        "sparsekv": __version__,
        "counts": {level.value: examination.num_findings(level) for level in Level},
        "findings": [
            {
                "topic": finding.topic,
                "level": finding.level.value,
                "text": finding.text,
                "remedy": finding.remedy or None,
            }
            for finding in examination.findings
        ],
        "facts": _plain(examination.facts),
    }


def print_examination(examination: Examination) -> None:
    """Write a row for each finding, with its remedy below it, and a line that sums up."""
    from sparsekv.doctor.finding import Level

    table = Table(show_lines=False)
    table.add_column("level", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("finding", overflow="fold")
    shown_topic = ""
    for finding in examination.findings:
        style = _STYLES[finding.level.value]
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style=style)
        topic = "" if finding.topic == shown_topic else finding.topic
        shown_topic = finding.topic
        table.add_row(Text(finding.level.value, style=style), topic, text)
    console = stdout_console()
    console.print(table)
    must_fix = examination.num_findings(Level.MUST_FIX)
    rest = [
        f"{number} {level.value}{'s' * (number > 1)}"
        for level in (Level.WARNING, Level.NOTE)
        if (number := examination.num_findings(level))
    ]
    verdict = f"{must_fix} must be fixed" if must_fix else "nothing must be fixed"
    style = _STYLES["must fix" if must_fix else "ok"]
    console.print(", ".join([verdict, *rest]), style=style, soft_wrap=True)


def _plain(value: Any) -> Any:
    """Values in the types that JSON has; all else as text."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


@contextmanager
def _say_what_takes_long(what: str) -> Iterator[None]:
    timer = threading.Timer(_PATIENCE_S, lambda: stderr_console().print(f"looking at {what} ..."))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Of the library's log, and of torch's about drivers and devices."""
    logger = logging.getLogger("sparsekv")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
