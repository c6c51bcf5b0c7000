"""The benchmark of attention on the GPU: what it checks, and that it runs where there is one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu_attention import checks, main


def rate(shape: str, place: str, pieces: str, fraction: float) -> dict[str, Any]:
    return {
        "kind": "rate",
        "shape": shape,
        "place": place,
        "pieces": pieces,
        "fraction": fraction,
    }


def test_rates_are_held_to_the_copy_of_their_place_and_steps_to_a_limit() -> None:
    rows = [
        rate("qwen3", "gpu", "rows", 0.81),
        rate("v4", "gpu", "rows", 0.1),  # the operations bind
        rate("v4", "host", "pieces", 0.79),
        {"kind": "step", "shape": "mla", "step_us": 41.0},
    ]
    found = {check.name: check.is_met for check in checks(rows)}
    assert found == {
        "qwen3, rows, gpu: fraction of the copy inside the GPU": True,
        "v4, pieces, host: fraction of the copy from the host": False,
        "mla, a short step: microseconds": False,
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_quick_run_writes_its_rows(tmp_path: Path) -> None:
    main(["--quick", "--rounds", "1", "--shapes", "qwen3", "mla", "--out", str(tmp_path)])
    (file,) = tmp_path.iterdir()
    rows = json.loads(file.read_text())["rows"]
    assert len([row for row in rows if row["kind"] == "rate"]) == 2 * 2 * 3
    assert all(row["gbs"] > 0 for row in rows if row["kind"] == "rate")
