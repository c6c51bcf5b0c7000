"""CostModel: both engines end together at its share, and segments routed at p keep it so.

Figures of arXiv:2609.14507 stand beside the laws that give them.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import cost_models, shares

from sparsekv.errors import LayoutError
from sparsekv.roofline import CostModel, ShareRouter

SEGMENT = 256
A100_GBS, V100_GBS = 25.4, 13.0
"""Rates from host memory of the paper's machines (PCIe 4 and 3, 16 lanes)."""
ODD_NUMBERS = [float("nan"), float("inf"), -1e-9, True, "1", None]

lengths = st.integers(1, 2**20)


@st.composite
def unclipped(draw):
    """(model, L0) with r(L0) anywhere in [0, 1], not clipped: the overheads are made for it."""
    model, num_tokens, share = draw(cost_models()), draw(lengths), draw(st.floats(0, 1))
    per_token_s = model.cpu_s_per_token + model.h2d_s_per_token
    slack_s = (share - model.marginal_share) * per_token_s * num_tokens
    return replace(
        model, cpu_overhead_s=max(-slack_s, 0.0), gpu_overhead_s=max(slack_s, 0.0)
    ), num_tokens


def grown(model, num_tokens, initial_tokens):
    """R(L) of tokens that were placed as was best at `initial_tokens`."""
    return model.running_share(
        num_tokens,
        initial_share=model.optimal_share(initial_tokens),
        initial_tokens=initial_tokens,
    )


@given(unclipped(), st.integers(0, 2**20))
def test_at_the_best_share_both_engines_end_together(case, later):
    model, num_tokens = case
    share = model.optimal_share(num_tokens + later)
    cpu, gpu = (side(share, num_tokens + later) for side in (model.cpu_time, model.gpu_time))
    assert cpu == pytest.approx(gpu, rel=1e-8)  # costs differ by up to 1e6
    assert model.step_time(share, num_tokens + later) == max(cpu, gpu)


@given(cost_models(), lengths)
def test_step_time_is_convex_and_least_at_the_best_share(model, num_tokens):
    times = [model.step_time(i / 64, num_tokens) for i in range(65)]
    slack = 1e-9 * max(times)
    for before, here, after in zip(times, times[1:], times[2:], strict=False):
        assert here <= (before + after) / 2 + slack
    best = model.optimal_share(num_tokens)
    assert model.step_time(best, num_tokens) <= min(times) + slack


@given(cost_models(), lengths)
def test_where_the_share_is_clipped_one_engine_waits_at_any_share(model, num_tokens):
    share = model.optimal_share(num_tokens)
    slack = 1e-9 * model.step_time(share, num_tokens)
    if share == 0:
        assert model.cpu_time(0, num_tokens) >= model.gpu_time(0, num_tokens) - slack
    if share == 1:
        assert model.gpu_time(1, num_tokens) >= model.cpu_time(1, num_tokens) - slack


@given(cost_models(), st.lists(st.integers(0, 2**20), min_size=2, max_size=8))
def test_the_best_share_goes_to_p_from_one_side_as_the_context_grows(model, some_lengths):
    bests = [model.optimal_share(num_tokens) for num_tokens in sorted(some_lengths)]
    if model.gpu_overhead_s > model.cpu_overhead_s:
        bests.reverse()
    if model.gpu_overhead_s == model.cpu_overhead_s:
        assert set(bests) == {model.marginal_share}
    assert bests == sorted(bests)
    assert model.optimal_share(10**18) == pytest.approx(model.marginal_share, abs=1e-6)


@given(unclipped(), st.integers(0, 2**20))
def test_what_is_routed_at_p_stays_where_it_is_best(case, later):
    model, initial = case
    assert grown(model, initial + later, initial) == pytest.approx(
        model.optimal_share(initial + later), abs=1e-9
    )


@given(cost_models(), shares(), lengths, st.integers(0, 500))
def test_each_segment_shrinks_the_distance_to_p_by_the_growth(model, share, initial, segments):
    here = initial + segments * SEGMENT
    before, after = (
        abs(
            model.running_share(length, initial_share=share, initial_tokens=initial)
            - model.marginal_share
        )
        for length in (here, here + SEGMENT)
    )
    assert after == pytest.approx(before * here / (here + SEGMENT), abs=1e-12)


@given(cost_models(), shares(), st.integers(0, 2**20), st.integers(0, 2**20))
def test_the_running_share_lies_between_the_first_and_p(model, share, initial, later):
    running = model.running_share(initial + later, initial_share=share, initial_tokens=initial)
    low, high = sorted((share, model.marginal_share))
    assert low - 1e-12 <= running <= high + 1e-12
    assert 0 <= running <= 1
    if later == 0:
        assert running == share


@given(cost_models(), st.integers(1, 64), st.integers(0, 300))
def test_routed_segments_stay_within_half_of_one_of_the_running_share(model, initial, later):
    tokens = initial * SEGMENT
    router = ShareRouter(model.optimal_share(tokens))
    count = sum(router.route() == "unpinned" for _ in range(initial))
    router.marginal_share = model.marginal_share
    for segments in range(initial, initial + later + 1):
        target = grown(model, segments * SEGMENT, tokens)
        length = segments * SEGMENT
        assert abs(count / segments - target) <= SEGMENT / (2 * length) + 1e-7
        count += router.route() == "unpinned"


@pytest.mark.parametrize(
    ("printed", "context", "segments"),
    [
        (0.469, 8192, 15),
        (0.438, 8192, 14),
        (0.375, 8192, 12),
        (0.28, 8192, 9),
        (0.469, 16384, 30),
        (0.547, 16384, 35),
        (0.18, 16384, 12),
    ],
)
def test_shares_of_table_3_are_whole_segments(printed, context, segments):
    router = ShareRouter(printed)
    of = context // SEGMENT
    assert sum(router.route() == "unpinned" for _ in range(of)) == segments
    digits = 0.01 if printed in (0.28, 0.18) else 0.0005001  # cut off after two, rounded at three
    assert segments / of == pytest.approx(printed, abs=digits)


def a100(bytes_per_token, marginal_share):
    """A layer on the paper's A100 host, by the share to which its routing converges."""
    cpu_gbs = A100_GBS * marginal_share / (1 - marginal_share)
    model = CostModel.from_bandwidths(
        bytes_per_token=bytes_per_token, cpu_gbs=cpu_gbs, h2d_gbs=A100_GBS
    )
    assert model.marginal_share == pytest.approx(marginal_share, abs=1e-12)
    return model


@pytest.mark.parametrize(
    ("bytes_per_token", "on_a100", "on_v100"),
    [(32 * 1152, 0.5, 0.661), (32 * 2048, 0.625, 0.765), (32 * 4096, 0.75, 0.854)],
    ids=["deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b"],
)
def test_a_slower_link_raises_the_share_as_on_the_v100(bytes_per_token, on_a100, on_v100):
    model = a100(bytes_per_token, on_a100)
    slower = replace(model, h2d_s_per_token=model.h2d_s_per_token * A100_GBS / V100_GBS)
    assert slower.marginal_share == pytest.approx(on_v100, abs=0.0005)


@pytest.mark.parametrize(
    ("marginal_share", "initial_share", "running"),
    [(0.625, 493 / 2048, 0.601), (0.75, 0.75, 0.75)],
    ids=["qwen3-30b-a3b", "mixtral-8x7b"],
)
def test_the_running_share_at_32k_is_that_of_table_2(marginal_share, initial_share, running):
    model = a100(32 * 2048, marginal_share)
    grown_share = model.running_share(32768, initial_share=initial_share, initial_tokens=2048)
    assert grown_share == pytest.approx(running, abs=0.0005)


def test_streaming_most_of_a_qwen3_layer_takes_what_the_paper_measured():
    model = a100(16 * 2048, 0.625)
    assert model.h2d_s_per_token == pytest.approx(1.290e-6, abs=1e-9)
    assert model.gpu_time(0.2, 32768) == pytest.approx(33.7e-3, rel=0.005)


def test_times_are_the_two_lines():
    model = CostModel(
        cpu_s_per_token=2e-6, h2d_s_per_token=3e-6, cpu_overhead_s=1e-4, gpu_overhead_s=2e-4
    )
    assert model.cpu_time(0.25, 1000) == pytest.approx(0.25 * 2e-3 + 1e-4)
    assert model.gpu_time(0.25, 1000) == pytest.approx(0.75 * 3e-3 + 2e-4)
    assert model.marginal_share == pytest.approx(0.6)
    assert model.optimal_share(1000) == pytest.approx(0.6 + 1e-4 / 5e-3)


@pytest.mark.parametrize(
    ("cpu_overhead_s", "gpu_overhead_s", "share"),
    [(1e-5, 2e-5, 1.0), (2e-5, 1e-5, 0.0), (1e-5, 1e-5, 0.75)],
)
def test_without_tokens_the_share_is_what_it_is_at_the_shortest(
    cpu_overhead_s, gpu_overhead_s, share
):
    model = CostModel(
        cpu_s_per_token=1e-9,
        h2d_s_per_token=3e-9,
        cpu_overhead_s=cpu_overhead_s,
        gpu_overhead_s=gpu_overhead_s,
    )
    assert model.optimal_share(0) == model.optimal_share(1) == share
    assert model.step_time(share, 0) == max(cpu_overhead_s, gpu_overhead_s)
    assert model.running_share(0, initial_share=0.3, initial_tokens=0) == 0.3
    assert model.running_share(256, initial_share=0.3, initial_tokens=0) == 0.75


@pytest.mark.parametrize(("cpu", "h2d", "share"), [(0, 1e-6, 1.0), (1e-6, 0, 0.0)])
@given(shares(), st.integers(0, 2**20))
def test_an_engine_that_costs_nothing_takes_all(cpu, h2d, share, other, num_tokens):
    model = CostModel(cpu_s_per_token=cpu, h2d_s_per_token=h2d)
    assert model.marginal_share == model.optimal_share(num_tokens) == share
    assert model.step_time(share, num_tokens) == 0 <= model.step_time(other, num_tokens)


@given(cost_models(), st.floats(1e-3, 1e3))
def test_shares_do_not_depend_on_the_unit_of_time(model, factor):
    scaled = CostModel(
        cpu_s_per_token=model.cpu_s_per_token * factor,
        h2d_s_per_token=model.h2d_s_per_token * factor,
        cpu_overhead_s=model.cpu_overhead_s * factor,
        gpu_overhead_s=model.gpu_overhead_s * factor,
    )
    assert scaled.marginal_share == pytest.approx(model.marginal_share, abs=1e-9)
    assert scaled.optimal_share(4096) == pytest.approx(model.optimal_share(4096), abs=1e-9)


def test_a_model_is_a_value():
    model = CostModel(cpu_s_per_token=1e-6, h2d_s_per_token=2e-6)
    assert model == replace(model)
    assert hash(model) == hash(replace(model))
    with pytest.raises(FrozenInstanceError):
        model.cpu_s_per_token = 2e-6
    with pytest.raises(TypeError):
        CostModel(1e-6, 2e-6)


@pytest.mark.parametrize("value", ODD_NUMBERS)
@pytest.mark.parametrize(
    "field", ["cpu_s_per_token", "h2d_s_per_token", "cpu_overhead_s", "gpu_overhead_s"]
)
def test_numbers_that_are_no_seconds_are_refused(field, value):
    with pytest.raises(LayoutError, match=rf"^{field}=.*: must be .*measure again"):
        CostModel(**{"cpu_s_per_token": 1e-6, "h2d_s_per_token": 1e-6, field: value})


def test_a_machine_on_which_nothing_costs_anything_is_refused():
    with pytest.raises(LayoutError, match="one of the two must cost something"):
        CostModel(cpu_s_per_token=0, h2d_s_per_token=0)


@pytest.mark.parametrize("value", [*ODD_NUMBERS, 0, 0.0])
@pytest.mark.parametrize("field", ["cpu_gbs", "h2d_gbs"])
def test_rates_that_nothing_has_are_refused(field, value):
    with pytest.raises(LayoutError, match=rf"^{field}=.*: must be a finite rate above 0"):
        CostModel.from_bandwidths(
            **{"bytes_per_token": 1, "cpu_gbs": 1, "h2d_gbs": 1, field: value}
        )


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_bytes_that_are_no_bytes_are_refused(value):
    with pytest.raises(LayoutError, match="bytes_per_token="):
        CostModel.from_bandwidths(bytes_per_token=value, cpu_gbs=1, h2d_gbs=1)


@pytest.mark.parametrize("method", ["cpu_time", "gpu_time", "step_time"])
def test_shares_and_lengths_that_cannot_be_are_refused(method):
    call = getattr(CostModel(cpu_s_per_token=1e-6, h2d_s_per_token=1e-6), method)
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(LayoutError, match="share="):
            call(share, 1)
    for length in (-1, 1.5, True, None):
        with pytest.raises(LayoutError, match="num_tokens="):
            call(0.5, length)


def test_a_context_shorter_than_its_beginning_is_refused():
    model = CostModel(cpu_s_per_token=1e-6, h2d_s_per_token=1e-6)
    with pytest.raises(LayoutError, match="num_tokens=-1"):
        model.optimal_share(-1)
    with pytest.raises(LayoutError, match="num_tokens=255: must be at least initial_tokens=256"):
        model.running_share(255, initial_share=0.5, initial_tokens=256)
    with pytest.raises(LayoutError, match="initial_share=2"):
        model.running_share(256, initial_share=2, initial_tokens=256)
    with pytest.raises(LayoutError, match="initial_tokens=-1"):
        model.running_share(256, initial_share=0.5, initial_tokens=-1)
