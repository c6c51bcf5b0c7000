"""The benchmark of chosen shares finds optima that are there, and measures every way."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import share_tracking
from benchmarks.results import Row, load_result
from benchmarks.share_tables import share_tracking as table
from benchmarks.share_tracking import CHOSEN, FIXED, SAME, checks, optimum

SHARES = [round(0.48 + 0.03 * i, 2) for i in range(15)]


def rows_of(best: float, rising: float, noise: list[float], chosen: float = 0.7) -> list[Row]:
    """Steps that wait for the GPU below `best`, and for the CPU above."""
    known = {
        "kind": "tracking",
        "shape": "qwen3",
        "size": "16 x 32K",
        "context": 32 << 10,
        "batch": 16,
        "device": "cuda:0",
    }

    def time(share: float) -> float:
        return 1 + max(3 * (best - share), rising * (share - best))

    return [
        known | {"way": CHOSEN, "share": chosen, "ms_per_layer": 2 * time(chosen)},
        known | {"way": SAME, "share": chosen, "ms_per_layer": time(chosen)},
        *(
            known | {"way": FIXED, "share": share, "samples": [time(share) * (1 + error)]}
            for share, error in zip(SHARES, noise, strict=True)
        ),
    ]


@given(
    st.floats(0.6, 0.78),
    st.floats(0.5, 2),
    st.lists(st.floats(-0.005, 0.005), min_size=15, max_size=15),
)
def test_the_optimum_is_found_though_times_scatter(
    best: float, rising: float, noise: list[float]
) -> None:
    low, high, time = optimum(rows_of(best, rising, noise))
    assert time == pytest.approx(1, abs=0.02)
    assert low - 0.02 <= best <= high + 0.02
    assert high - low < 0.01 / 3 + 0.02 / rising + 0.04


def test_every_share_beyond_a_knee_is_best_where_times_are_flat() -> None:
    low, high, time = optimum(rows_of(0.7, 0.0, [0.0] * 15))
    assert time == pytest.approx(1)
    assert low == pytest.approx(0.7 - 0.01 / 3, abs=0.01)
    assert high == pytest.approx(0.9, abs=0.002)


def test_shares_between_those_of_whole_segments_are_the_nearest_ones() -> None:
    times = {0.5: 1.4, 0.625: 1.0, 0.75: 1.1, 0.875: 1.2}  # of 8 segments
    rows = [
        {"way": FIXED, "context": 2048, "share": share, "samples": [times[round(share * 8) / 8]]}
        for share in SHARES
    ]
    assert optimum(rows) == (0.625, 0.625, 1.0)


@pytest.mark.parametrize(
    ("chosen", "is_near", "is_fast"),
    [(0.7, True, True), (0.715, True, True), (0.78, False, False), (0.6, False, False)],
)
def test_a_share_is_judged_by_its_distance_and_its_step(
    chosen: float, is_near: bool, is_fast: bool
) -> None:
    rows = rows_of(0.7, 1.5, [0.0] * 15, chosen)
    near, fast = checks(rows)
    assert (near.is_met, fast.is_met) == (is_near, is_fast)
    assert checks([row | {"device": "cpu"} for row in rows]) == []


@pytest.mark.parametrize(("seconds", "is_met"), [(19.0, True), (61.0, False)])
def test_a_calibration_is_judged_by_what_it_takes(seconds: float, is_met: bool) -> None:
    row: Row = {"kind": "calibration", "shape": "qwen3", "seconds": seconds}
    assert [check.is_met for check in checks([row])] == [is_met]
    assert checks([row | {"seconds": None}]) == []  # without a GPU none is made


def test_the_script_measures_every_way(tmp_path: Path) -> None:
    share_tracking.main(
        ["--quick", "--rounds", "1", "--threads", "1", "--shapes", "qwen3", "--out", str(tmp_path)]
    )
    (path,) = tmp_path.iterdir()
    result = load_result(path)
    tracked = [row for row in result.rows if row["kind"] == "tracking"]
    assert {row["way"] for row in tracked} == {CHOSEN, SAME, FIXED}
    assert all(row["ms_per_layer"] > 0 for row in tracked)
    assert result.rows[0]["kind"] == "calibration"


def test_what_was_recorded_makes_a_table() -> None:
    from benchmarks.results import load_results

    text = table(load_results("share_tracking"))
    assert "| qwen3, 16 x 32K |" in text
