"""Result files: what was measured, on which machine, by which commit, and whether it is enough.

`benchmarks/results/<topic>_<machine>_<yyyymm>.json` is written by the scripts only. In a copy on
another machine SPARSEKV_COMMIT gives the commit it was copied from, and SPARSEKV_DIRTY=0 says that
nothing was changed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, machine_as_json

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "results"

# What is written from results does not make the tree that measured them another one.
RENDERED = ("benchmarks/results", "docs", "README.md")
_PACKAGES = ("torch", "transformers", "triton")

Row = dict[str, Any]
"""One measured configuration: names and numbers as JSON has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One number that is to reach a target.

    Attributes:
        name: what was measured.
        value: the number, computed from rows.
        target: what it must be at least, or at most.
        lower_is_better: whether the target is an upper limit.
    """

    name: str
    value: float
    target: float
    lower_is_better: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the value is as good as the target; never for NaN."""
        return self.value <= self.target if self.lower_is_better else self.value >= self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of a benchmark; the fields are those of the file."""

    topic: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    dirty: bool
    command: str
    rows: list[Row]
    checks: list[Check]

    @property
    def file_name(self) -> str:
        """`<topic>_<machine>_<yyyymm>.json`."""
        return f"{self.topic}_{self.machine['name']}_{self.date[:7].replace('-', '')}.json"


def make_result(
    topic: str,
    rows: Sequence[Row],
    checks: Callable[[Sequence[Row]], Sequence[Check]],
    machine_name: str | None = None,
) -> Result:
    """The result of the run that is now ending; `checks` computes the checks from the rows."""
    commit, dirty = _commit()
    return Result(
        topic=topic,
        date=datetime.now(timezone.utc).date().isoformat(),
        machine=machine_as_json(describe_machine(machine_name)),
        versions=_versions(),
        commit=commit,
        dirty=dirty,
        command=_command(),
        rows=list(rows),
        checks=list(checks(rows)),
    )


def write_result(result: Result, folder: Path = FOLDER) -> Path:
    """Write a result, in place of one of the same topic, machine and month; the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / result.file_name
    path.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    return path


def load_result(path: Path) -> Result:
    """The result in a file.

    Raises:
        ValueError: the file lacks a field, has one too many, or its name is not what it should be.
    """
    stored = json.loads(path.read_text(encoding="utf-8"))
    try:
        checks = [Check(**check) for check in stored.pop("checks")]
        result = Result(**stored, checks=checks)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result file ({error}): write it again") from error
    if path.name != result.file_name:
        raise ValueError(f"{path} should be called {result.file_name}: rename it")
    return result


def load_results(topic: str, folder: Path = FOLDER) -> list[Result]:
    """The newest result of each machine, in the order of the machines' names."""
    results = (load_result(path) for path in folder.glob("*.json"))
    newest: dict[str, Result] = {}
    for result in sorted((r for r in results if r.topic == topic), key=lambda r: r.date):
        newest[result.machine["name"]] = result
    return [newest[name] for name in sorted(newest)]


def _commit() -> tuple[str | None, bool]:
    """The commit of the tree, and whether the tree differs from it (or nobody knows).

    What the environment says comes first: a copy on another machine may lie in a repository that
    knows nothing of it.
    """
    if commit := os.environ.get("SPARSEKV_COMMIT"):
        return commit, os.environ.get("SPARSEKV_DIRTY") != "0"
    if not (ROOT / ".git").exists():  # git would look further up
        return None, True
    outside = [f":(exclude){path}" for path in RENDERED]
    try:
        changed = _git("status", "--porcelain", "--", ".", *outside)
        return _git("rev-parse", "HEAD"), bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None, True


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _command() -> str:
    """The command that this process was started with, as it can be typed from the root.

    Without --out: where the file went first decides nothing.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name] if spec is not None else sys.argv[:1]
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return shlex.join(["python", *program, *kept])
