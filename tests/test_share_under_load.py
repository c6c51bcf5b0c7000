"""The benchmark of shares under load judges steps rightly, and measures every way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import share_under_load
from benchmarks.model_pair import ONE_PROCESS, TWO_PROCESSES
from benchmarks.results import Row, load_result, make_result
from benchmarks.share_plot import draw_loads
from benchmarks.share_tables import share_under_load as table
from benchmarks.share_under_load import (
    AFTER,
    BEFORE,
    BUS,
    ELASTIC,
    FIXED,
    FROZEN,
    MEMORY,
    PAIR,
    RIVAL,
    UNDER,
    checks,
    steps_until_near,
)

KNOWN: Row = {
    "shape": "qwen3",
    "size": "16 x 16K",
    "device": "cuda:0",
    "kind": "steps",
    "num_threads": 15,
}


def rival_rows(under: list[float], load: str = MEMORY) -> list[Row]:
    """Steps that take so long under the load; 5 ms at the best fixed share, 0.5."""
    known = {**KNOWN, "part": RIVAL, "load": load}
    times = [3.0] * BEFORE + under + [3.0] * AFTER
    assert len(under) == UNDER
    row: dict[str, Any] = {
        "way": ELASTIC,
        "ms_per_layer": under[-1],
        "share": 0.52,
        "placed_share": 0.5,
        "steps": [{"share": 0.52, "ms_per_layer": ms} for ms in times],
        "cpu_factor": 2.0,
        "h2d_factor": 1.0,
    }
    fixed = [(0.4, 6.0), (0.5, 5.0), (0.6, 7.0)]
    return [
        known | row,
        *(known | {"way": FIXED, "share": share, "ms_per_layer": ms} for share, ms in fixed),
    ]


def pair_rows(frozen: float, elastic: float) -> list[Row]:
    known = {**KNOWN, "part": PAIR, "where": TWO_PROCESSES}
    return [
        known | {"way": way, "shares": [0.7, 0.6], "ms_per_layer": ms}
        for way, ms in ((FROZEN, frozen), (ELASTIC, elastic))
    ]


@pytest.mark.parametrize(
    ("under", "num_steps", "is_soon", "is_near"),
    [
        ([5.0] * UNDER, 0, True, True),
        ([8.0] * 9 + [5.4] * (UNDER - 9), 7, True, True),  # three of five are near from there on
        ([8.0] * 30 + [5.4] * (UNDER - 30), 28, False, True),
        ([5.6] * UNDER, UNDER, False, False),
        ([8.0] * 9 + [5.4] * 7 + [9.0] * (UNDER - 16), 7, True, False),
    ],
)
def test_steps_are_judged_by_the_best_fixed_share(
    under: list[float], num_steps: int, is_soon: bool, is_near: bool
) -> None:
    rows = rival_rows(under)
    best = rows[2]
    assert steps_until_near(rows[0], best) == num_steps
    soon, near = checks(rows)
    assert (soon.is_met, near.is_met) == (is_soon, is_near)
    assert checks([row | {"device": "cpu"} for row in rows]) == []


@pytest.mark.parametrize(("elastic", "is_met"), [(6.9, True), (7.0, True), (7.1, False)])
def test_two_models_are_judged_by_their_frozen_shares(elastic: float, is_met: bool) -> None:
    rows = pair_rows(7.0, elastic)
    (check,) = checks(rows)
    assert check.is_met == is_met
    assert checks([row | {"device": "cpu"} for row in rows]) == []


def test_a_table_and_a_picture_are_made(tmp_path: Path) -> None:
    left_out: Row = {**KNOWN, "part": RIVAL, "kind": "left out", "reason": "no memory"}
    rows = [
        *rival_rows([5.0] * UNDER),
        *rival_rows([5.5] * UNDER, BUS),
        left_out,
        *pair_rows(7.0, 6.0),
    ]
    result = make_result("share_under_load", rows, checks, "abacus")
    text = table([result])
    assert "| qwen3, 16 x 16K, memory | 2.00 / 1.00 | 0.50 | 0.52 | 5.000 | 0.50 | 5.000 |" in text
    cells = [
        "qwen3, 16 x 16K, two processes",
        *(2 * ["0.70 and 0.60", "7.000"]),
        "0.70 and 0.60",
        "7.000",
    ]
    cells[4] = "6.000"
    assert f"| {' | '.join(cells)} |" in text
    picture = draw_loads(result, tmp_path).read_text()
    assert "qwen3, 16 x 16K, bus" in picture


def test_the_script_measures_every_way(tmp_path: Path) -> None:
    share_under_load.main(
        ["--quick", "--rounds", "1", "--threads", "1", "--shapes", "qwen3", "--out", str(tmp_path)]
    )
    (path,) = tmp_path.iterdir()
    rows = load_result(path).rows
    assert {(row["part"], row["way"]) for row in rows} >= {
        (RIVAL, ELASTIC),
        (RIVAL, FIXED),
        (PAIR, FROZEN),
        (PAIR, ELASTIC),
        (PAIR, FIXED),
    }
    assert {row["where"] for row in rows if row["part"] == PAIR} == {ONE_PROCESS, TWO_PROCESSES}
    assert all(row["ms_per_layer"] > 0 for row in rows)
    (elastic,) = [row for row in rows if row["part"] == RIVAL and row["way"] == ELASTIC]
    assert len(elastic["steps"]) == BEFORE + UNDER + AFTER
