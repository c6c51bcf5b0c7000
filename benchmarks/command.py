"""What the scripts' command lines share: options, a bar on stderr, the table, the result file."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.machine import num_cores
from benchmarks.merge import keep_result
from benchmarks.results import FOLDER, Check, Row, make_result, write_result

THREADS = (1, 2, 4, 8, 15, 16)
EXIT_TERMINATED = 128 + signal.SIGTERM


def run(main: Callable[[], None]) -> None:
    """Run a script, which SIGTERM ends as Ctrl-C does, with status 143.

    What it does at the end of a run that is cut short, such as to write what was measured, it does:
    a second signal of the kind does not cut that off. `timeout` sends two, to the process and to
    its group.
    """
    signal.signal(signal.SIGTERM, _terminate)
    # Where it is ignored already, as in a shell's background, it stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    main()


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(EXIT_TERMINATED)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def parser(description: str | None, rounds: int, *, scales: bool = True) -> argparse.ArgumentParser:
    """A parser with the options of every script.

    Args:
        description: what the script measures.
        rounds: the default of --rounds.
        scales: whether the script measures several numbers of threads, or one.
    """
    made = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if scales:
        made.add_argument(
            "--threads",
            type=numbers,
            default=[n for n in THREADS if n <= num_cores()],
            metavar="N,N,...",
            help="numbers of threads (default: those of 1, 2, 4, 8, 15, 16 that have a core each)",
        )
    else:
        made.add_argument(
            "--threads", type=int, help="threads (default: as many as the library takes)"
        )
    made.add_argument(
        "--rounds",
        type=int,
        default=rounds,
        help="interleaved rounds, of which medians are taken (default: %(default)s)",
    )
    made.add_argument("--machine", help="name of this machine (default: made from its hardware)")
    made.add_argument(
        "--out",
        type=Path,
        help="folder for the result file (default: benchmarks/results; none with --quick)",
    )
    made.add_argument(
        "--quick", action="store_true", help="small sizes, to see that it runs; no figures to keep"
    )
    return made


def numbers(text: str) -> list[int]:
    """The positive numbers of a list such as `1,2,4`."""
    values = [int(word) for word in text.split(",")]
    if min(values) < 1:
        raise ValueError(text)
    return values


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, if that is a terminal; what is yielded moves it by one of `total`.

    It is drawn only then: a thread that draws it would take a core from what is measured.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task(description, total=total)
        bar.refresh()
        yield lambda: bar.update(task, advance=1, refresh=True)


class Report:
    """Lines on stderr about what was measured, with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._console = Console(stderr=True, highlight=False)

    def __call__(self, text: str) -> None:
        """One more line."""
        seconds = time.perf_counter() - self._start
        self._console.print(f"{seconds:6.1f} s  {text}", markup=False, soft_wrap=True)


def print_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    """A table on stdout; numbers to the right, floats with two digits after the point."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        is_number = all(isinstance(line[index], (int, float)) for line in lines)
        table.add_column(column, justify="right" if is_number else "left")
    for line in lines:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in line))
    is_piped = not sys.stdout.isatty()
    Console(width=120 if is_piped else None).print(table)


Checks = Callable[[Sequence[Row]], Sequence[Check]]


def save(
    topic: str, rows: Sequence[Row], checks: Checks, arguments: argparse.Namespace
) -> Path | None:
    """Write the result file of what is measured by now; its path, None where none is wanted.

    A run of minutes calls it after each part: nothing can be done at the end of one that is killed.
    """
    if arguments.quick and arguments.out is None:
        return None
    result = make_result(topic, rows, checks, arguments.machine)
    folder = arguments.out or FOLDER
    return write_result(result, folder) if arguments.quick else keep_result(result, checks, folder)


def finish(topic: str, rows: Sequence[Row], checks: Checks, arguments: argparse.Namespace) -> None:
    """Print what the checks say, and write the result file."""
    result = make_result(topic, rows, checks, arguments.machine)
    if result.checks:
        lines = [
            (check.name, f"{check.value:.3g}", f"{check.target:.3g}", _verdict(check))
            for check in result.checks
        ]
        print_table("checks", ("what", "value", "target", ""), lines)
    console = Console(stderr=True)
    path = save(topic, rows, checks, arguments)
    if path is None:
        console.print("--quick: nothing written; --out says where to")
        return
    dirty = ", of a changed or unknown tree: not to be kept" if result.dirty else ""
    console.print(f"written to {path}{dirty}", soft_wrap=True)


def _verdict(check: Check) -> str:
    return "met" if check.is_met else "MISSED"
