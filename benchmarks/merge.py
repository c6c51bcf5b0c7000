"""Put result files into benchmarks/results, part by part: `python -m benchmarks.merge FILE...`.

A benchmark may be run part by part, in calls of a few minutes each. Rows of another part, shape or
size stay if they are of the same machine, versions and clean commit; otherwise the newer file
replaces the older one, as every run does.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.results import FOLDER, Check, Result, Row, load_result, write_result

Checks = Callable[[Sequence[Row]], Sequence[Check]]


def keep_result(result: Result, checks: Checks, folder: Path = FOLDER) -> Path:
    """Write a result, with the other parts of its file where they go together; the file's path.

    Args:
        result: what was measured last.
        checks: computes its topic's checks from rows.
        folder: where the file is, or will be.
    """
    with suppress(OSError, ValueError):  # a file that is none costs nothing that was measured
        result = merge(load_result(folder / result.file_name), result, checks)
    return write_result(result, folder)


def merge(older: Result, newer: Result, checks: Checks) -> Result:
    """The newer result with those rows of the older one that are of parts it lacks; the newer one
    as it is if the two are not of the same state.

    What stands in one table was measured in turn: a part is replaced as a whole.
    """
    if _state(older) is None or _state(older) != _state(newer):
        return newer
    measured = {_part(row) for row in newer.rows}
    rows = [row for row in older.rows if _part(row) not in measured]
    if not rows:
        return newer
    rows += newer.rows
    commands = dict.fromkeys((*older.command.split(_AND), newer.command))
    return replace(newer, command=_AND.join(commands), rows=rows, checks=list(checks(rows)))


_AND = " && "


def _part(row: Row) -> tuple[object, ...]:
    """What rows that belong together have in common; topics without parts have one."""
    return tuple(row.get(key) if "part" in row else None for key in ("part", "shape", "size"))


def _state(result: Result) -> tuple[object, ...] | None:
    """What must be the same for rows to stand in one file; None: not to be kept at all.

    A virtual machine's memory grows as it is used: that much says nothing.
    """
    if result.dirty or result.commit is None or "--quick" in shlex.split(result.command):
        return None
    machine = {name: of for name, of in result.machine.items() if name != "memory_bytes"}
    return result.commit, machine, result.versions


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("files", nargs="+", type=Path, metavar="FILE", help="result files")
    options.add_argument("--out", type=Path, default=FOLDER, help=f"folder (default: {FOLDER})")
    arguments = options.parse_args(argv)
    for path in arguments.files:
        result = load_result(path)
        checks = importlib.import_module(f"benchmarks.{result.topic}").checks
        kept = keep_result(result, checks, arguments.out)
        Console(stderr=True).print(f"{path} is in {kept}", soft_wrap=True)


if __name__ == "__main__":
    main()
