"""The benchmark of routing in a prefill routes all tokens, and changes nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import prefill_route
from benchmarks.attention_shapes import SHAPES
from benchmarks.decode_case import Case
from benchmarks.prefill_route import LAYER, LAYER_ROUTED, PrefillLayers, Width, checks
from benchmarks.results import load_result
from sparsekv import CacheConfig, InplaceKVCache


def test_routing_places_every_token_and_leaves_the_result_alone() -> None:
    device = torch.device("cpu")
    case = Case(shape=SHAPES["mixtral"], num_layers=2, batch_size=2, context=600, device=device)
    prompt = PrefillLayers(case, Width(64, 128))
    config = CacheConfig(cpu_share=0.5)
    cache = InplaceKVCache(config.spec(case.geometry, 2), device, config.router())
    for run in (prompt.layers, prompt.attention):
        cache.reset()
        assert torch.equal(run(cache), run(None))
        stats = cache.stats()
        assert stats.num_tokens == 600
        assert {region.name: region.tokens for region in stats.regions} == {
            "window": 88,
            "ping-pong": 0,
            "unpinned": 256,
            "pinned": 256,
        }
    (part,) = cache.views(1).unpinned
    tokens = slice(int(part.positions), int(part.positions) + 256)
    for placed, given in zip(
        (part.key, part.value), prompt._project(prompt._prompt)[1:], strict=True
    ):
        assert torch.equal(placed[0], given[:, :, tokens])


def test_the_cost_is_the_median_over_the_rounds() -> None:
    known = {"shape": "qwen3", "size": "16 x 8K", "device": "cuda:0"}
    rows = [
        {**known, "way": LAYER, "samples": [40.0, 50.0, 40.0]},
        {**known, "way": LAYER_ROUTED, "samples": [40.2, 50.2, 48.0]},
    ]
    (check,) = checks(rows)
    assert check.value == pytest.approx(0.005)
    assert check.is_met
    assert checks([row | {"device": "cpu"} for row in rows]) == []


def test_the_script_measures_every_way(tmp_path: Path) -> None:
    prefill_route.main(["--quick", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    result = load_result(path)
    assert len({row["way"] for row in result.rows}) == 5
    assert all(row["ms_per_layer"] > 0 for row in result.rows)
