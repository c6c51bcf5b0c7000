"""A result file says where its numbers come from, and its checks follow from its rows."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results
from benchmarks.machine import cpus_one_per_core, num_cores, short_name
from benchmarks.results import (
    FOLDER,
    ROOT,
    Check,
    Result,
    load_result,
    load_results,
    make_result,
    write_result,
)

KEPT = sorted(FOLDER.glob("*.json"))


def some_result() -> Result:
    def checks(rows: list[results.Row]) -> list[Check]:
        return [Check(name="rate", value=rows[0]["gbs"], target=2.0)]

    return make_result("sorting", [{"gbs": 3.0, "samples": [3.0]}], checks, "abacus-1core")


def test_writing_and_loading_is_the_identity(tmp_path: Path) -> None:
    result = some_result()
    path = write_result(result, tmp_path)
    assert path.name == f"sorting_abacus-1core_{result.date[:4]}{result.date[5:7]}.json"
    assert load_result(path) == result
    assert result.checks == [Check(name="rate", value=3.0, target=2.0)]
    assert result.versions.keys() >= {"python", "torch", "transformers"}
    assert (
        result.machine["num_cores"] == num_cores() == len(set(cpus_one_per_core()[: num_cores()]))
    )


@pytest.mark.parametrize("change", ["drop a field", "add a field", "rename the file"])
def test_what_is_no_result_file_is_refused(tmp_path: Path, change: str) -> None:
    path = write_result(some_result(), tmp_path)
    stored = json.loads(path.read_text())
    if change == "drop a field":
        del stored["commit"]
    elif change == "add a field":
        stored["comment"] = "fast"
    path.write_text(json.dumps(stored))
    if change == "rename the file":
        path = path.rename(tmp_path / "sorting_other_202001.json")
    with pytest.raises(ValueError, match=r"write it again|rename it"):
        load_result(path)


def test_the_newest_result_of_each_machine_counts(tmp_path: Path) -> None:
    result = some_result()
    other = {**result.machine, "name": "abacus-2core"}
    for changed in (
        dataclasses.replace(result, date="2026-10-31", commit="old"),
        dataclasses.replace(result, date="2026-11-01", commit="new"),
        dataclasses.replace(result, date="2026-10-31", commit="other", machine=other),
        dataclasses.replace(result, topic="searching"),
    ):
        write_result(changed, tmp_path)
    assert [found.commit for found in load_results("sorting", tmp_path)] == ["new", "other"]


@pytest.mark.parametrize(
    ("value", "lower_is_better", "is_met"),
    [
        (2.0, False, True),
        (1.9, False, False),
        (2.0, True, True),
        (2.1, True, False),
        (math.nan, False, False),
        (math.nan, True, False),
    ],
)
def test_a_check_is_met_at_its_target(value: float, lower_is_better: bool, is_met: bool) -> None:
    check = Check(name="x", value=value, target=2.0, lower_is_better=lower_is_better)
    assert check.is_met == is_met


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree without .git, in place of this one."""
    for name in ("SPARSEKV_COMMIT", "SPARSEKV_DIRTY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_tree_is_dirty_if_more_than_its_results_changed(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        known = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(tree), *known, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tree / "code.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-qm", "Start")
    head = git("rev-parse", "HEAD")
    assert results._commit() == (head, False)
    (tree / "benchmarks" / "results").mkdir(parents=True)
    (tree / "benchmarks" / "results" / "new.json").write_text("{}")
    (tree / "README.md").write_text("tables")
    assert results._commit() == (head, False)
    (tree / "code.py").write_text("a = 2\n")
    assert results._commit() == (head, True)
    git("checkout", "-q", "code.py")
    (tree / "new.py").write_text("")
    assert results._commit() == (head, True)
    monkeypatch.setenv("SPARSEKV_COMMIT", "abc")
    monkeypatch.setenv("SPARSEKV_DIRTY", "0")
    assert results._commit() == ("abc", False)  # a copy that lies in a repository knows better


def test_without_git_the_environment_says_which_commit(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results._commit() == (None, True)
    monkeypatch.setenv("SPARSEKV_DIRTY", "0")
    assert results._commit() == (None, True)
    monkeypatch.setenv("SPARSEKV_COMMIT", "abc")
    assert results._commit() == ("abc", False)
    monkeypatch.delenv("SPARSEKV_DIRTY")
    assert results._commit() == ("abc", True)


def test_the_command_does_not_say_where_the_file_went(monkeypatch: pytest.MonkeyPatch) -> None:
    for out in (["--out", "/there"], ["--out=/there"]):
        monkeypatch.setattr(sys, "argv", ["x", "--threads", "1,2", *out, "--rounds", "3"])
        assert results._command().endswith(" --threads 1,2 --rounds 3")


@pytest.mark.parametrize(
    ("cpu", "gpu", "name"),
    [
        ("Intel(R) Xeon(R) Processor", None, "xeon-2core"),
        ("AMD EPYC 9654 96-Core Processor", None, "epyc-2core"),
        ("Something else", None, "cpu-2core"),
        ("Intel(R) Xeon(R) Processor", "NVIDIA H200", "h200-2core"),
        ("", "NVIDIA GeForce RTX 4090", "rtx-4090-2core"),
    ],
)
def test_machines_get_short_names(cpu: str, gpu: str | None, name: str) -> None:
    assert short_name(cpu, gpu, 2) == name


def checks_of(topic: str) -> Any:
    """How the script of that topic judges its rows; one stands among the tests."""
    if topic == "compute_sanitizer":
        return runpy.run_path(str(ROOT / "tests" / "kernels" / "compute_sanitizer.py"))["checks"]
    return importlib.import_module(f"benchmarks.{topic}").checks


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_results_are_whole_clean_and_checked_by_their_rows(path: Path) -> None:
    result = load_result(path)
    assert not result.dirty
    assert result.commit is not None
    assert result.rows
    assert "--quick" not in result.command
    made = list(checks_of(result.topic)(result.rows))
    # Python's sum is more exact from 3.12 on.
    values = [check.value for check in result.checks]
    assert [check.value for check in made] == pytest.approx(values, rel=1e-12)
    assert [dataclasses.replace(check, value=0) for check in made] == [
        dataclasses.replace(check, value=0) for check in result.checks
    ]
