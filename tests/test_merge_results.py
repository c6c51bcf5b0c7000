"""Parts measured one by one make one file, and only if they belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import merge
from benchmarks.merge import keep_result
from benchmarks.results import Check, Result, Row, load_result, make_result, write_result


def checks(rows: Sequence[Row]) -> list[Check]:
    """The fastest of each part."""
    parts = dict.fromkeys(row["part"] for row in rows)
    return [
        Check(name=part, value=min(r["ms"] for r in rows if r["part"] == part), target=1.0)
        for part in parts
    ]


def result(*rows: Row, **changes: object) -> Result:
    made = make_result("decode_attention", rows, checks, "abacus-1core")
    command = " ".join(["python", *dict.fromkeys(row["part"] for row in rows)])
    fields = {"commit": "abc", "dirty": False, "command": command}
    return replace(made, **{**fields, **changes})


def row(part: str, ms: float, size: str = "4 x 8K", shape: str = "qwen3") -> Row:
    return {"part": part, "shape": shape, "size": size, "ms": ms}


def test_parts_add_up_and_a_part_that_is_measured_again_is_replaced_as_a_whole(
    tmp_path: Path,
) -> None:
    sweep = [row("sweep", 3.0), row("sweep", 2.0), row("sweep", 9.0, size="4 x 16K")]
    keep_result(result(*sweep), checks, tmp_path)
    keep_result(result(row("model", 5.0)), checks, tmp_path)
    path = keep_result(result(row("sweep", 4.0), row("sweep", 7.0, shape="x")), checks, tmp_path)
    found = load_result(path)
    assert found.rows == [
        sweep[2],
        row("model", 5.0),
        row("sweep", 4.0),
        row("sweep", 7.0, shape="x"),
    ]
    assert {check.name: check.value for check in found.checks} == {"sweep": 4.0, "model": 5.0}
    assert found.command == "python sweep && python model"


@pytest.mark.parametrize(
    "changes",
    [
        {"commit": "def"},
        {"commit": None},
        {"dirty": True},
        {"versions": {"torch": "1.0"}},
        {"machine": {"name": "abacus-1core", "cpu": "another"}},
        {"command": "python --quick"},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("is_older", [True, False], ids=["older", "newer"])
def test_what_does_not_belong_together_replaces_the_file(
    tmp_path: Path, changes: dict[str, object], is_older: bool
) -> None:
    other, usual = result(row("sweep", 3.0), **changes), result(row("model", 5.0))
    first, last = (other, usual) if is_older else (usual, other)
    write_result(first, tmp_path)
    assert load_result(keep_result(last, checks, tmp_path)) == last


def test_memory_that_grew_as_it_was_used_is_the_same_machine(tmp_path: Path) -> None:
    first, last = result(row("sweep", 3.0)), result(row("model", 5.0))
    last = replace(last, machine={**last.machine, "memory_bytes": 1})
    keep_result(first, checks, tmp_path)
    assert len(load_result(keep_result(last, checks, tmp_path)).rows) == 2


def test_topics_without_parts_are_replaced(tmp_path: Path) -> None:
    def none(rows: Sequence[Row]) -> list[Check]:
        return []

    first, last = (replace(result(), rows=[{"gbs": gbs}]) for gbs in (1.0, 2.0))
    keep_result(first, none, tmp_path)
    assert load_result(keep_result(last, none, tmp_path)).rows == [{"gbs": 2.0}]


def test_a_file_that_is_none_does_not_cost_what_was_measured(tmp_path: Path) -> None:
    measured = result(row("sweep", 3.0))
    (tmp_path / measured.file_name).write_text("{")
    assert load_result(keep_result(measured, checks, tmp_path)) == measured


def test_files_from_elsewhere_are_taken_in(tmp_path: Path) -> None:
    there, here = [tmp_path / name for name in ("1", "2")], tmp_path / "results"
    known = {"device": "cuda", "way": "sparsekv", "share": 0.7, "layers": 48}
    rows = [
        {**row("sweep", 3.0, size="16 x 32K"), **known, "kind": "decode", "fraction": 0.9},
        {**row("model", 5.0, size="16 x 32K"), **known, "kind": "model"},
    ]
    files = [
        write_result(replace(result(each | {"ms_per_layer": 1.0}), checks=[]), folder)
        for each, folder in zip(rows, there, strict=True)
    ]
    merge.main([*map(str, files), "--out", str(here)])
    (path,) = here.iterdir()
    found = load_result(path)
    assert [r["kind"] for r in found.rows] == ["decode", "model"]
    assert [check.value for check in found.checks] == [0.9]
