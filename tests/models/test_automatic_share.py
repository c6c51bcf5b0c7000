"""cpu_share="auto" in a model: a profile decides who attends to what, and never what comes out."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepseek_v4_zoo
import pytest
import torch
from model_zoo import CONFIGS, build, same_tokens
from simulated_machine import calibration as calibration_of

import sparsekv
from sparsekv.engine import costs
from sparsekv.engine.config import CacheConfig
from sparsekv.models import compat
from sparsekv.roofline import PRESETS, Calibration, CostModel, MachineProfile

SLOW_LINK = replace(
    PRESETS["h200"], h2d_gbs=20.0, cpu_read_gbs=30.0, cpu_overhead_s=0.0, gpu_overhead_s=0.0
)
"""p = 0.6 where products do not matter."""
COST = CostModel(cpu_s_per_token=1e-6, h2d_s_per_token=3e-6, gpu_overhead_s=6e-6)
"""p = 0.75, and 1.5 tokens more than p L are best."""
WINDOW = 6


def calibration(cost: CostModel, batch_size: int = 3) -> Calibration:
    """For the models here."""
    return calibration_of(cost, "4 heads 2 kv 16 16", batch_size)


@pytest.fixture(autouse=True)
def _nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "calibrate", None)
    monkeypatch.setattr(costs, "profile_folder", None)


def _placed(num_tokens: int) -> int:
    return num_tokens // WINDOW * WINDOW


@pytest.mark.parametrize("name", ["qwen3_moe", "llama", "qwen3_mixed"])
@pytest.mark.parametrize("profile", [SLOW_LINK, calibration(COST)], ids=["machine", "measured"])
@pytest.mark.parametrize("elastic", [False, True])
def test_the_same_tokens_at_the_share_that_a_profile_says(
    make_patched: Callable[..., Any], ids: torch.Tensor, name: str, profile: Any, elastic: bool
) -> None:
    patched = make_patched(name, cpu_share="auto", profile=profile, elastic=elastic)
    same_tokens(build(name), patched.model, ids, max_new_tokens=30)
    stats = patched.stats()
    p = 0.6 if isinstance(profile, MachineProfile) else 0.75
    least = p / (2 - p) if elastic else p
    # The costs may be followed to this machine's in the end; where the prompt lies stays.
    prompt, num_placed = _placed(ids.shape[1]), _placed(stats.num_tokens)
    assert num_placed > prompt
    assert stats.placed_share * num_placed >= math.floor(least * prompt / WINDOW) * WINDOW
    assert 0 <= stats.balance.target_share <= 1
    assert stats.balance.predicted_s > 0


@pytest.mark.parametrize("elastic", [False, True])
def test_shares_are_the_cost_models(
    make_patched: Callable[..., Any], elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt, and of a step; by costs that stay."""
    monkeypatch.setattr("sparsekv.roofline.CostTracker.end_window", lambda tracker: None)
    ids = torch.randint(1, 90, (2, 61), generator=torch.Generator().manual_seed(0))
    profile = calibration(COST, batch_size=2)
    patched = make_patched("llama", cpu_share="auto", profile=profile, elastic=elastic)
    same_tokens(build("llama"), patched.model, ids, max_new_tokens=20)
    stats, num_placed = patched.stats(), _placed(80)
    best = COST.optimal_share(num_placed)
    assert stats.balance.target_share == pytest.approx(best)
    assert abs(stats.cpu_share - best) * num_placed <= WINDOW / 2 + 1e-6
    if elastic:
        share = COST.optimal_share(60)
        least = share / (2 - share)
        assert abs(stats.placed_share - least) * num_placed <= WINDOW
    else:
        assert stats.placed_share == stats.cpu_share
    assert stats.balance.predicted_s == COST.step_time(stats.cpu_share, num_placed)


def test_a_cpu_that_reads_registered_memory_slowly_borrows_none(
    make_patched: Callable[..., Any], ids: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning, however many caches there are."""
    slow = replace(PRESETS["h200"], name="a slow one", reads_pinned_at_full_speed=False)
    patched = make_patched("llama", cpu_share="auto", profile=slow, elastic=True)
    for _ in range(2):
        patched.model.generate(ids, max_new_tokens=9, do_sample=False)
        stats = patched.stats()
        assert stats.borrowed_bytes == 0
        assert stats.cpu_share == stats.placed_share > 0
    assert [record.message for record in caplog.records if "borrows none" in record.message] == [
        "elastic: the CPU of a slow one reads registered memory slower than other memory, so it "
        "borrows none of it: each step keeps the share that is placed; leave elastic out"
    ]


@pytest.mark.parametrize("in_place", [True, False])
def test_the_pinned_region_is_read_as_the_calibration_says(
    make_patched: Callable[..., Any], ids: torch.Tensor, in_place: bool
) -> None:
    profile = replace(calibration(COST), reads_in_place=in_place)
    patched = make_patched("llama", cpu_share="auto", profile=profile)
    cache = patched.new_cache()
    patched.model.generate(ids, max_new_tokens=9, do_sample=False, **{compat.CACHE_KW: cache})
    caches = [cache.store.cache, copy.deepcopy(cache).store.cache]
    assert [cache.reads_in_place for cache in caches] == [in_place] * 2
    assert caches[0].companion.reads_in_place is in_place


def test_stats_read_well(make_patched: Callable[..., Any], ids: torch.Tensor) -> None:
    patched = make_patched("llama", cpu_share="auto", profile=calibration(COST))
    patched.model.generate(ids, max_new_tokens=9, do_sample=False)
    stats = patched.stats()
    balance = stats.balance
    assert balance.measured_cpu_s > 0
    assert balance.measured_gpu_s is None  # nothing is timed on the simulated accelerator
    assert str(stats).splitlines()[-1] == (
        f"share aimed at {balance.target_share:.1%}; ms a layer: {1e3 * balance.predicted_s:.3f} "
        f"predicted, CPU {1e3 * balance.measured_cpu_s:.3f} measured"
    )
    assert all(len(line) <= 100 for line in str(stats).splitlines())
    assert stats.to_dict()["balance"]["predicted_s"] == balance.predicted_s


def test_the_default_measures_nothing_on_the_cpu(
    ids: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    assert CacheConfig().cpu_share == "auto"
    model = build("llama")
    long = ids.repeat(1, 40)[:, :500]
    with sparsekv.patch(model) as patched, caplog.at_level(logging.INFO):
        same_tokens(build("llama"), model, long, max_new_tokens=14)
        stats = patched.stats()
    assert stats.balance is None
    assert stats.cpu_share == pytest.approx(0.5, abs=0.5)
    assert "aimed" not in str(stats)
    assert not [record for record in caplog.records if record.name.startswith("sparsekv")]


def test_a_chat_and_its_copies_go_on(make_patched: Callable[..., Any], ids: torch.Tensor) -> None:
    patched = make_patched("qwen3", cpu_share="auto", profile=calibration(COST), elastic=True)
    cache, plain = patched.new_cache(), build("qwen3")
    said = ids
    for _ in range(3):
        said = patched.model.generate(
            said, max_new_tokens=8, do_sample=False, **{compat.CACHE_KW: cache}
        )
        said = torch.cat([said, ids[:, :5]], 1)
    expected = same_tokens(plain, patched.model, said, max_new_tokens=8)
    for each in (copy.deepcopy(cache), cache):
        found = patched.model.generate(
            said, max_new_tokens=8, do_sample=False, **{compat.CACHE_KW: each}
        )
        assert torch.equal(found, expected)
    assert cache.stats().balance is not None


def test_a_reset_cache_places_its_prompt_as_a_new_one_does(
    make_patched: Callable[..., Any], ids: torch.Tensor
) -> None:
    """Not as if it were as long as one that was announced before."""
    short = replace(COST, cpu_overhead_s=1e-4)  # the CPU is not worth its overhead
    patched = make_patched("llama", cpu_share="auto", profile=calibration(short))
    cache = patched.new_cache()
    cache.reserve(2000, 1500)
    for share in (0.75, 0.0):
        patched.model(ids, **{compat.CACHE_KW: cache})
        assert cache.stats().placed_share == pytest.approx(share, abs=0.3)
        cache.reset()


@pytest.mark.parametrize("name", ["llama", "deepseek_v4"])
def test_a_loaded_cache_costs_what_its_own_rows_cost(
    make_patched: Callable[..., Any],
    ids: torch.Tensor,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And everything else of it is made for them, too."""
    asked = []
    for module in ("store", "compressed_cache"):
        monkeypatch.setattr(
            f"sparsekv.models.{module}.cost_of",
            lambda geometry, **how: asked.append(how["batch_size"]) or COST,
        )
    settings = {"cpu_share": "auto", "profile": SLOW_LINK}
    if name == "llama":
        patched = make_patched(name, **settings)
    else:
        patched = sparsekv.patch(deepseek_v4_zoo.build(), deepseek_v4_zoo.small_config(**settings))
    saved, loaded = patched.new_cache(), patched.new_cache()
    patched.model(ids, **{compat.CACHE_KW: saved})
    saved.save(tmp_path / "saved")
    loaded.load(tmp_path / "saved")
    assert asked == [3, 3]
    regions = [getattr(each.store.cache, "entries", each.store.cache) for each in (saved, loaded)]
    assert regions[0].spec == regions[1].spec
    patched.restore()


def test_beams_and_batches_are_served(make_patched: Callable[..., Any], padded: Any) -> None:
    patched = make_patched("llama", cpu_share="auto", profile=SLOW_LINK)
    same_tokens(build("llama"), patched.model, **padded, max_new_tokens=20, num_beams=3)


V4_MEASURED = calibration_of(COST, "4 heads 1 kv 32 32 shared")


@pytest.mark.parametrize("profile", [SLOW_LINK, V4_MEASURED], ids=["machine", "measured"])
def test_deepseek_v4_places_entries_at_the_profiles_share(profile: Any) -> None:
    model, ids = deepseek_v4_zoo.build(), deepseek_v4_zoo.token_ids(2, 90)
    expected = deepseek_v4_zoo.build().generate(ids, max_new_tokens=8, do_sample=False)
    config = deepseek_v4_zoo.small_config(cpu_share="auto", profile=profile)
    with sparsekv.patch(model, config) as patched:
        found = model.generate(ids, max_new_tokens=8, do_sample=False)
        stats = patched.stats()
    assert torch.equal(found, expected)
    p = 0.6 if isinstance(profile, MachineProfile) else 0.75
    placed = sum(region.tokens for region in stats.pool.regions[2:])
    assert placed >= 20
    assert abs(stats.cpu_share - p) * placed <= 2 + 1e-6  # segments of up to 4 entries


def test_deepseek_v4_without_a_profile_has_one_half() -> None:
    model, ids = deepseek_v4_zoo.build(), deepseek_v4_zoo.token_ids(1, 90)
    with sparsekv.patch(model, deepseek_v4_zoo.small_config(cpu_share="auto")) as patched:
        model.generate(ids, max_new_tokens=4, do_sample=False)
        assert patched.stats().cpu_share == pytest.approx(0.5, abs=0.1)


def test_every_kind_of_model_takes_a_profile(make_patched: Callable[..., Any]) -> None:
    assert {"qwen3_moe", "mixtral"} <= CONFIGS.keys()
    ids = torch.randint(1, 90, (1, 20), generator=torch.Generator().manual_seed(0))
    for profile in PRESETS.values():
        patched = make_patched("mixtral", cpu_share="auto", profile=profile)
        same_tokens(build("mixtral"), patched.model, ids, max_new_tokens=5)
