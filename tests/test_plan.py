"""What a plan says holds: bytes are the format's, times the cost model's, remedies do help."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import strategies
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import sparsekv
from sparsekv.engine.config import CacheConfig
from sparsekv.engine.fit import Budget, Demand, Remedy, find_remedies
from sparsekv.engine.model_size import ModelSize, WeightCounts
from sparsekv.engine.planner import Plan
from sparsekv.engine.prediction import SharePath
from sparsekv.engine.profile_key import find_calibration, profile_key
from sparsekv.errors import LayoutError, UnsupportedModelError
from sparsekv.format import KVGeometry
from sparsekv.models.known import known_names, known_size
from sparsekv.models.sizes import count_weights
from sparsekv.regions import memory
from sparsekv.roofline import PRESETS, Calibration, CostModel, profile_folder

GIB = 1 << 30
FULL_ATTENTION = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite", "smollm2")
SMALL = ModelSize(
    name="small",
    geometry=KVGeometry(num_layers=3, num_kv_heads=2, head_dim=8),
    num_heads=4,
    num_experts=4,
    experts_per_token=2,
    weights=WeightCounts(
        attention=400, experts=9000, feed_forward=100, embedding=300, head=300, other=7
    ),
)


@pytest.fixture(autouse=True)
def _no_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))


def size_of(name: str) -> ModelSize:
    return known_size(name, torch.bfloat16, "native")


# Shares


@given(strategies.cost_models(), st.integers(1, 10_000), st.integers(0, 1_000_000))
def test_running_share_equals_the_best_one_while_none_is_clipped(
    cost: CostModel, initial: int, later: int
) -> None:
    path = SharePath(cost=cost, initial_positions=initial)
    assume(0 < path.best(initial) < 1)
    assert path.running(initial + later) == pytest.approx(path.best(initial + later), abs=1e-9)


@given(
    strategies.cost_models(), st.integers(1, 2000), st.integers(1, 2000), st.integers(0, 1_000_000)
)
def test_where_a_query_attends_to_a_constant_number_the_share_is_flat(
    cost: CostModel, initial: int, most: int, placed: int
) -> None:
    path = SharePath(cost=cost, initial_positions=initial, most_attended=most)
    assume(0 < path.best(initial) < 1)
    assert path.best(placed) == path.best(min(placed, most))
    assert path.running(placed) == pytest.approx(path.best(placed), abs=1e-9)


@given(strategies.cost_models(), st.integers(1, 2000), st.integers(1, 2000))
def test_a_flat_share_is_reached_however_the_prompt_was_placed(
    cost: CostModel, initial: int, most: int
) -> None:
    path = SharePath(cost=cost, initial_positions=initial, most_attended=most)
    assert path.running(10**9) == pytest.approx(path.best(10**9), abs=1e-5)


@given(strategies.cost_models(), st.integers(0, 1_000_000))
def test_an_engine_without_a_part_is_not_waited_for(cost: CostModel, placed: int) -> None:
    path = SharePath(cost=cost, initial_positions=0)
    assert path.attention_s(0.0, placed) == cost.gpu_time(0.0, placed)
    assert path.attention_s(1.0, placed) >= cost.gpu_overhead_s  # the window is the GPU's


@given(strategies.cost_models(), st.integers(0, 1_000_000))
def test_both_engines_are_never_slower_than_one_of_them(cost: CostModel, placed: int) -> None:
    path = SharePath(cost=cost, initial_positions=0)
    both = path.attention_s(path.best(placed), placed)
    for share in (0.0, 1.0):
        assert both <= path.attention_s(share, placed) * (1 + 1e-9)


@given(strategies.cost_models(), st.integers(1, 10_000), st.integers(0, 1_000_000))
def test_a_clipped_share_runs_towards_the_marginal_one(
    cost: CostModel, initial: int, later: int
) -> None:
    path = SharePath(cost=cost, initial_positions=initial)
    share, first = path.running(initial + later), path.best(initial)
    assert 0 <= share <= 1
    low, high = sorted((first, cost.marginal_share))
    assert low - 1e-12 <= share <= high + 1e-12


def test_the_papers_hosts_converge_to_the_papers_shares() -> None:
    shares = {
        name: sparsekv.plan(name, batch_size=32, machine="a100").lengths[-1].running_share
        for name in FULL_ATTENTION[:3]
    }
    assert shares == pytest.approx(
        {"qwen3-30b-a3b": 0.625, "mixtral-8x7b": 0.75, "deepseek-v2-lite": 0.5}, abs=0.02
    )


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_deepseek_v4_follows_products_and_is_flat_once_its_selection_is_full(name: str) -> None:
    sizes = {"batch_size": 16, "num_tokens": 1 << 20, "prompt_tokens": 4096}
    planned = sparsekv.plan(name, **sizes, machine=PRESETS["h200"])
    heads = planned.model.num_heads
    assert planned.model.attention_flops_per_byte == 2 * heads
    profile = PRESETS["h200"]
    tflops = profile.cpu_shared_kv_tflops or profile.cpu_tflops
    assert planned.cpu_gbs == pytest.approx(min(profile.cpu_read_gbs, 500 * tflops / heads))
    full = 4 * planned.model.selected_entries
    flat = [length for length in planned.lengths if length.num_tokens >= full]
    assert len(flat) > 5
    assert len({length.best_share for length in flat}) == 1
    assert [length.running_share for length in flat] == pytest.approx(
        [length.best_share for length in flat]
    )
    assert {length.attended_positions for length in flat} == {planned.model.selected_entries}


@pytest.mark.parametrize("machine", [None, "h200", "a100"])
def test_deepseek_v4_has_the_share_that_a_run_has_for_which_nobody_gives_a_profile(
    machine: str | None,
) -> None:
    planned = sparsekv.plan("deepseek-v4-flash", num_tokens=1 << 16, machine=machine)
    unmeasured = CacheConfig().placed_share
    assert {length.running_share for length in planned.lengths} == {unmeasured}
    assert (
        planned.memory
        == sparsekv.plan("deepseek-v4-flash", num_tokens=1 << 16, cpu_share=unmeasured).memory
    )


def test_a_given_share_is_used_at_every_length_and_in_the_regions() -> None:
    planned = sparsekv.plan("mixtral-8x7b", cpu_share=0.25, machine="h200")
    assert {length.running_share for length in planned.lengths} == {0.25}
    footprint = planned.memory.footprint
    assert footprint.unpinned_bytes * 3 == footprint.pinned_bytes
    cost = planned.rates.cost
    assert planned.lengths[-1].attention_s == cost.step_time(0.25, 32768)


# Times


@pytest.mark.parametrize("name", known_names())
def test_a_step_is_its_layers_and_one_reading_of_gpu_memory(name: str) -> None:
    planned = sparsekv.plan(name, batch_size=4, num_tokens=20_000, machine="h200")
    for length in planned.lengths:
        layers = planned.model.attended.num_layers
        assert length.step_s == layers * length.attention_s + length.gpu_memory_s
        read = length.gpu_memory_s * PRESETS["h200"].hbm_gbs * 1e9
        grown = read - planned.weight_bytes_read
        if name in FULL_ATTENTION:
            assert grown == pytest.approx(0, abs=1e3)
        else:
            kinds = planned.model.geometry.footprint(length.num_tokens, 4)
            assert grown == pytest.approx(sum(k.growing_gpu_bytes for k in kinds), rel=1e-6)


def test_lengths_go_from_the_prompt_to_the_context_by_doubling() -> None:
    def lengths(**options: int) -> list[int]:
        planned = sparsekv.plan("smollm2", machine="h200", **options)
        assert planned.prompt_tokens == planned.lengths[0].num_tokens
        return [length.num_tokens for length in planned.lengths]

    assert lengths(num_tokens=16384) == [2048, 4096, 8192, 16384]
    assert lengths(num_tokens=5000) == [2048, 4096, 5000]
    assert lengths(num_tokens=5000, prompt_tokens=3000) == [3000, 4096, 5000]
    assert lengths(num_tokens=100) == lengths(num_tokens=100, prompt_tokens=100) == [100]


def test_a_context_within_the_window_is_attended_on_the_gpu_alone() -> None:
    (length,) = sparsekv.plan("qwen3-30b-a3b", num_tokens=255, machine="h200").lengths
    assert length.attended_positions == 0
    assert length.attention_s == PRESETS["h200"].gpu_overhead_s
    assert length.attention_s == length.streaming_attention_s == length.cpu_attention_s
    assert length.as_dict()["running_share"] is None


@pytest.mark.parametrize(("cpu_overhead_s", "share"), [(1.0, 0.0), (0.0, 1.0)])
def test_a_share_clamped_to_either_end_is_a_plan_like_any_other(
    cpu_overhead_s: float, share: float
) -> None:
    machine = replace(
        PRESETS["h200"], cpu_overhead_s=cpu_overhead_s, gpu_overhead_s=1.0 - cpu_overhead_s
    )
    length = sparsekv.plan("smollm2", machine=machine, num_tokens=2048).lengths[0]
    assert length.best_share == length.running_share == share
    fastest = min(length.streaming_attention_s, length.cpu_attention_s)
    assert length.attention_s == fastest


# Bytes


@pytest.mark.parametrize("name", FULL_ATTENTION)
@pytest.mark.parametrize("batch_size", [1, 7])
@pytest.mark.parametrize("cpu_share", ["auto", 0.3])
def test_regions_are_those_of_the_partition(
    name: str, batch_size: int, cpu_share: float | str
) -> None:
    planned = sparsekv.plan(
        name, batch_size=batch_size, num_tokens=10_000, cpu_share=cpu_share, machine="v100"
    )
    share = planned.lengths[-1].running_share
    spec = sparsekv.CacheConfig().spec(planned.model.geometry, batch_size)
    assert planned.memory.footprint == spec.footprint(10_000, share)
    assert planned.demand.ram_bytes == planned.memory.cpu_bytes
    leaving = spec.leaving_bytes(planned.prompt_tokens)
    assert planned.memory.prompt_bytes == leaving
    on_gpu = planned.memory.gpu_bytes + leaving
    assert planned.demand.vram_bytes == on_gpu + planned.model.weight_bytes


@pytest.mark.parametrize("name", known_names())
@pytest.mark.parametrize("short", [(0, 0), (1, 0), (0, 1)])
def test_it_fits_if_and_only_if_no_memory_is_a_byte_short(
    name: str, short: tuple[int, int]
) -> None:
    asked = sparsekv.plan(name, batch_size=2, num_tokens=4096, machine="h200").demand
    planned = sparsekv.plan(
        name,
        batch_size=2,
        num_tokens=4096,
        ram_bytes=asked.ram_bytes - short[0],
        vram_bytes=asked.vram_bytes - short[1],
    )
    assert (planned.fits_ram, planned.fits_vram) == (not short[0], not short[1])
    assert planned.fits == (short == (0, 0))
    assert not (planned.fits and planned.remedies)


def changes(asked: Demand, remedy: Remedy) -> set[str]:
    given_ = {
        "batch_size": asked.batch_size,
        "num_tokens": asked.num_tokens,
        "window_size": asked.config.window_size,
        "experts_on_cpu": False,
    }
    return {name for name, value in given_.items() if getattr(remedy, name) != value}


def demand_of(asked: Demand, remedy: Remedy, **more: int) -> Demand:
    window = remedy.window_size + more.get("window_size", 0)
    return replace(
        asked,
        batch_size=remedy.batch_size + more.get("batch_size", 0),
        num_tokens=remedy.num_tokens + more.get("num_tokens", 0),
        config=replace(asked.config, window_size=window),
        experts_on_cpu=remedy.experts_on_cpu,
    )


@given(
    model=st.sampled_from([SMALL, *(size_of(name) for name in known_names())]),
    batch_size=st.integers(1, 40),
    num_tokens=st.integers(1, 40_000),
    prompt_tokens=st.integers(1, 50_000),
    ram=st.floats(0, 1.5),
    vram=st.floats(0, 1.5),
)
def test_every_remedy_fits_and_one_more_does_not(
    model: ModelSize,
    batch_size: int,
    num_tokens: int,
    prompt_tokens: int,
    ram: float,
    vram: float,
) -> None:
    asked = Demand(
        model=model,
        batch_size=batch_size,
        num_tokens=num_tokens,
        prompt_tokens=prompt_tokens,
        config=sparsekv.CacheConfig(entry_format="native"),
    )
    budget = Budget(
        ram_bytes=int(ram * asked.ram_bytes) + 1, vram_bytes=int(vram * asked.vram_bytes) + 1
    )
    assume(not budget.holds(asked))
    for remedy in find_remedies(asked, budget):
        assert changes(asked, remedy)
        changed = demand_of(asked, remedy)
        assert budget.holds(changed)
        assert (remedy.ram_bytes, remedy.vram_bytes) == (changed.ram_bytes, changed.vram_bytes)
        assert remedy.batch_size <= batch_size
        assert remedy.num_tokens <= num_tokens
        steps = {"batch_size": 1, "num_tokens": 256, "window_size": 64}
        grown = changes(asked, remedy) & steps.keys()
        if "num_tokens" in grown and "batch_size" in grown:
            assert remedy.batch_size == 1
            grown = {"num_tokens"}
        for name in grown:
            assert not budget.holds(demand_of(asked, remedy, **{name: steps[name]}))


def remedies(name: str, ram_gib: float, vram_gib: float, **options: int) -> list[set[str]]:
    planned = sparsekv.plan(
        name,
        **{"batch_size": 16, "num_tokens": 131072, **options},
        ram_bytes=int(ram_gib * GIB),
        vram_bytes=int(vram_gib * GIB),
    )
    return [changes(planned.demand, remedy) for remedy in planned.remedies]


def test_only_what_helps_is_proposed() -> None:
    assert remedies("qwen3-30b-a3b", 193, 58) == []
    assert remedies("qwen3-30b-a3b", 120, 58) == [{"batch_size"}, {"num_tokens"}]
    # A context beyond the prompt takes nothing on the GPU.
    moved = {"experts_on_cpu"}
    assert remedies("qwen3-30b-a3b", 300, 57.2) == [{"batch_size"}, {"window_size"}, moved]
    assert remedies("qwen3-30b-a3b", 300, 20) == [moved]
    assert remedies("qwen3-30b-a3b", 193, 20) == [
        {"experts_on_cpu", "batch_size"},
        {"experts_on_cpu", "num_tokens"},
    ]
    assert remedies("qwen3-30b-a3b", 2, 57) == [{"batch_size", "num_tokens"}]
    assert remedies("qwen3-30b-a3b", 2, 20) == []
    assert remedies("smollm2", 1, 1, batch_size=1) == [{"num_tokens"}]
    assert remedies("smollm2", 60, 0.1) == []


@pytest.mark.parametrize("machine", ["h200", "a100", PRESETS["v100"]])
def test_a_named_machine_gives_its_own_memory(machine: object) -> None:
    budget = sparsekv.plan("smollm2", machine=machine).budget
    profile = PRESETS[machine] if isinstance(machine, str) else machine
    assert budget.ram_bytes == profile.ram_bytes - memory.RESERVED_BYTES
    assert budget.vram_bytes == profile.vram_bytes


# Weights


def published_configs() -> dict[str, object]:
    from transformers import (
        DeepseekV2Config,
        DeepseekV4Config,
        LlamaConfig,
        MixtralConfig,
        Qwen3MoeConfig,
    )

    csa, hca = "compressed_sparse_attention", "heavily_compressed_attention"
    moe = ["hash_moe"] * 3 + ["moe"] * 58
    return {
        "qwen3-30b-a3b": Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            tie_word_embeddings=False,
        ),
        "mixtral-8x7b": MixtralConfig(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
            tie_word_embeddings=False,
        ),
        "deepseek-v2-lite": DeepseekV2Config(
            vocab_size=102400,
            hidden_size=2048,
            intermediate_size=10944,
            moe_intermediate_size=1408,
            num_hidden_layers=27,
            num_attention_heads=16,
            num_key_value_heads=16,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            first_k_dense_replace=1,
            tie_word_embeddings=False,
        ),
        "smollm2": LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        ),
        "deepseek-v4-flash": DeepseekV4Config(
            num_hidden_layers=43,
            layer_types=["sliding_attention"] * 2 + [csa, hca] * 20 + [csa],
            mlp_layer_types=moe[:43],
        ),
        "deepseek-v4-pro": DeepseekV4Config(
            hidden_size=7168,
            num_hidden_layers=61,
            num_attention_heads=128,
            q_lora_rank=1536,
            o_groups=16,
            n_routed_experts=384,
            moe_intermediate_size=3072,
            index_topk=1024,
            layer_types=[hca] * 2 + [csa, hca] * 29 + [csa],
            mlp_layer_types=moe,
        ),
    }


def test_weights_of_known_models_are_those_of_their_published_configurations() -> None:
    configs = published_configs()
    assert set(configs) == set(known_names())
    for name, config in configs.items():
        assert count_weights(config) == size_of(name).weights, name


def test_a_configuration_is_the_size_of_the_known_model() -> None:
    for name, config in published_configs().items():
        if name != "deepseek-v2-lite":  # not patched, so no configuration of it is taken
            config.name_or_path = name
            planned = sparsekv.plan(config, machine="h200", dtype=torch.bfloat16)
            assert planned.model == size_of(name)
            assert planned == sparsekv.plan(name, machine="h200")


def test_a_step_uses_the_experts_of_its_tokens() -> None:
    assert SMALL.used_experts(1) == 2
    assert SMALL.used_experts(2) == 3  # each of 4 is left out by both with a chance of one quarter
    assert SMALL.used_experts(1000) == pytest.approx(4)
    always = 400 + 100 + 300 + 7  # all but the experts and the rows of the embedding
    assert SMALL.weight_bytes_read(1) == 2 * (always + 4500)
    assert SMALL.weight_bytes_read(2) == 2 * (always + 6750)
    tied = replace(SMALL, weights=replace(SMALL.weights, head=0))
    assert tied.weight_bytes_read(1) == 2 * (always + 4500)  # the embedding is the head
    dense = size_of("smollm2")
    assert dense.weight_bytes_read(1) == dense.weight_bytes_read(64) == dense.weight_bytes


# Whose rates


def save_calibration(batch_size: int = 4, num_threads: int = 1, **other: str) -> Calibration:
    model = size_of("qwen3-30b-a3b")
    key = profile_key(
        model.attended,
        model.num_heads,
        batch_size=batch_size,
        device=torch.device("cuda"),
        num_threads=num_threads,
    )
    calibration = Calibration(
        key=replace(key, **other),
        machine=replace(PRESETS["h200"], name="measured here"),
        cost=CostModel(cpu_s_per_token=3e-6, h2d_s_per_token=1e-6),
        residual=0.01,
        points=(),
    )
    calibration.save(profile_folder())
    return calibration


def test_what_was_measured_here_is_used_for_that_model_and_batch_only() -> None:
    calibration = save_calibration()
    for machine in (None, "this"):
        planned = sparsekv.plan("qwen3-30b-a3b", batch_size=4, machine=machine)
        assert planned.rates.origin == "calibration"
        assert planned.rates.cost == calibration.cost
        assert planned.lengths[-1].running_share == 0.25
        assert planned.budget.ram_source == "this machine"
    for name, batch_size in (("qwen3-30b-a3b", 5), ("mixtral-8x7b", 4)):
        planned = sparsekv.plan(name, batch_size=batch_size)
        assert (planned.rates.origin, planned.rates.preset) == ("stand-in", "h200")
        with pytest.raises(LayoutError, match=r"not measured .* batch of \d.*calibrate.*h200"):
            sparsekv.plan(name, batch_size=batch_size, machine="this")
    assert sparsekv.plan("qwen3-30b-a3b", batch_size=4, machine="h200").rates.preset == "h200"


def test_a_calibration_is_taken_for_its_model_and_batch_alone() -> None:
    calibration = save_calibration(cpu="of another machine")
    planned = sparsekv.plan("qwen3-30b-a3b", batch_size=4, machine=calibration)
    assert (planned.rates.origin, planned.rates.cost) == ("given", calibration.cost)
    assert planned.budget.vram_bytes == calibration.machine.vram_bytes
    for options in (
        {"model": "mixtral-8x7b", "batch_size": 4},
        {"model": "qwen3-30b-a3b", "batch_size": 5},
        {"model": "qwen3-30b-a3b", "batch_size": 4, "dtype": torch.float16},
    ):
        with pytest.raises(LayoutError, match=r"calibration for .* calibrate for that"):
            sparsekv.plan(**options, machine=calibration)


@pytest.mark.parametrize("field", ["cpu", "gpu", "driver", "geometry", "dtype"])
def test_a_calibration_of_another_machine_is_not_used(field: str) -> None:
    save_calibration(**{field: "another"})
    assert sparsekv.plan("qwen3-30b-a3b", batch_size=4).rates.origin == "stand-in"


def test_of_several_the_one_with_most_threads_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for num_threads in (1, 3, 9):
        save_calibration(num_threads=num_threads)
    model = size_of("qwen3-30b-a3b")
    found = find_calibration(
        model.attended, model.num_heads, batch_size=4, device=torch.device("cuda")
    )
    assert found is not None
    assert found.key.num_threads == 3


def test_where_nothing_was_measured_this_machines_memory_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    budget = sparsekv.plan("smollm2").budget
    assert (budget.ram_bytes, budget.ram_source) == (5 * GIB, "this machine")
    assert (budget.vram_bytes, budget.vram_source) == (PRESETS["h200"].vram_bytes, "h200")
    budget = sparsekv.plan("smollm2", ram_bytes=7, vram_bytes=8).budget
    assert budget == Budget(ram_bytes=7, vram_bytes=8)


# What is refused


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": "gpt5"}, UnsupportedModelError, "gpt5.*qwen3-30b-a3b"),
        ({"entry_format": "packed"}, UnsupportedModelError, "packed.*smollm2.*'native'"),
        ({"machine": "b300"}, LayoutError, "'b300'.*h200.*this"),
        ({"machine": "this"}, LayoutError, "not measured"),
        ({"batch_size": 0}, LayoutError, "batch_size=0"),
        ({"batch_size": 1.5, "machine": "h200"}, LayoutError, "batch_size=1.5"),
        ({"num_tokens": 0}, LayoutError, "num_tokens=0"),
        ({"prompt_tokens": -1}, LayoutError, "prompt_tokens=-1"),
        ({"cpu_share": 1.1}, LayoutError, "cpu_share=1.1"),
        ({"cpu_share": "best"}, LayoutError, "cpu_share='best'.*'auto'"),
        ({"ram_bytes": 0}, LayoutError, "ram_bytes=0"),
        ({"vram_bytes": -1}, LayoutError, "vram_bytes=-1"),
        ({"window_size": 100}, LayoutError, "window_size=100"),
        ({"block_size": 0}, LayoutError, "block_size=0"),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(
    options: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        sparsekv.plan(**{"model": "smollm2", **options})


def test_a_length_to_look_at_is_checked() -> None:
    planned = sparsekv.plan("smollm2", machine="h200")
    assert isinstance(planned, Plan)
    assert planned.at(32768) == planned.lengths[-1]
    with pytest.raises(LayoutError, match="num_tokens=0"):
        planned.at(0)
