"""CostTracker: follows what changes within two windows, and nothing that only seems to.

A simulated machine has costs of its own, which change, and a clock with noise and spikes.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cost_models

from sparsekv.errors import LayoutError
from sparsekv.roofline import CostModel, CostTracker, ShareRouter
from sparsekv.roofline.cost_tracker import DEAD_BAND

SEGMENT = 256
STEPS = 1024
"""Samples of a window in these tests: four layers of a window of 256 steps."""
SPIKES = 0.2
"""Most samples of a window that may be anything."""
ROUNDING = 1e-9

MODEL = CostModel(
    cpu_s_per_token=1e-6, h2d_s_per_token=1.5e-6, cpu_overhead_s=2e-4, gpu_overhead_s=1e-4
)

seeds = st.integers(0, 2**32)
factors = st.floats(-3, 3).map(lambda exponent: 2**exponent)
inner_shares = st.floats(0.05, 0.95)


def run(tracker, machine, share=0.5, num_tokens=16384, steps=STEPS, clock=lambda seconds: seconds):
    """Let a machine take some steps; `clock` says what is read for a time that passed."""
    for _ in range(steps):
        tracker.observe_cpu(clock(machine.cpu_time(share, num_tokens)), share, num_tokens)
        tracker.observe_gpu(clock(machine.gpu_time(share, num_tokens)), share, num_tokens)


def run_window(tracker, machine, **how):
    run(tracker, machine, **how)
    return tracker.end_window()


def changed(model, cpu=1.0, h2d=1.0):
    """The model with other costs per token."""
    return replace(
        model,
        cpu_s_per_token=model.cpu_s_per_token * cpu,
        h2d_s_per_token=model.h2d_s_per_token * h2d,
    )


def noisy(rng, noise):
    """A clock that is wrong by up to a part `noise`, either way."""
    return lambda seconds: seconds * (1 + rng.uniform(-noise, noise))


def costs(model):
    return model.cpu_s_per_token, model.h2d_s_per_token


def assert_knows(model, machine, within=DEAD_BAND):
    for known, true in zip(costs(model), costs(machine), strict=True):
        assert abs(true - known) <= within * known + ROUNDING * true


@given(cost_models(), inner_shares, factors, factors)
def test_costs_that_are_wrong_are_found_in_one_window(model, share, cpu, h2d):
    machine = changed(model, cpu, h2d)
    num_tokens = 2**20  # long enough to see the least costs beside the greatest overheads
    found = run_window(CostTracker(model), machine, share=share, num_tokens=num_tokens, steps=64)
    assert_knows(found, machine)
    assert (found.cpu_overhead_s, found.gpu_overhead_s) == (
        model.cpu_overhead_s,
        model.gpu_overhead_s,
    )


@given(cost_models(), st.floats(0.98, 1.02), st.floats(0.98, 1.02))
def test_nothing_moves_within_the_dead_band(model, cpu, h2d):
    tracker = CostTracker(model)
    for _ in range(3):
        assert run_window(tracker, changed(model, cpu, h2d), num_tokens=2**20, steps=64) is model
    assert tracker.model is model


@given(factors, factors, st.integers(0, STEPS))
def test_a_step_change_is_followed_within_two_windows_wherever_it_falls(cpu, h2d, before):
    tracker, machine = CostTracker(MODEL), changed(MODEL, cpu, h2d)
    run(tracker, MODEL, steps=before)
    run_window(tracker, machine, steps=STEPS - before)
    assert_knows(run_window(tracker, machine), machine)


@given(seeds, factors, factors, st.integers(0, STEPS))
def test_a_step_change_is_followed_through_noise_and_then_nothing_moves(seed, cpu, h2d, before):
    clock = noisy(random.Random(seed), 0.1)
    tracker, machine = CostTracker(MODEL), changed(MODEL, cpu, h2d)
    run(tracker, MODEL, steps=before, clock=clock)
    run_window(tracker, machine, steps=STEPS - before, clock=clock)
    settled = run_window(tracker, machine, clock=clock)
    assert_knows(settled, machine, DEAD_BAND + 0.02)  # and what noise hides
    later = [settled, *(run_window(tracker, machine, clock=clock) for _ in range(6))]
    for values in zip(*map(costs, later), strict=True):
        # One that the change's own window left on the edge of the band may come in, once.
        assert len([pair for pair in pairwise(values) if pair[0] != pair[1]]) <= 1


@given(seeds, st.floats(0, 0.1), inner_shares)
def test_noise_moves_nothing(seed, noise, share):
    tracker, clock = CostTracker(MODEL), noisy(random.Random(seed), noise)
    for _ in range(6):
        assert run_window(tracker, MODEL, share=share, clock=clock) is MODEL


@given(
    st.lists(
        st.one_of(st.floats(0, 1e300), st.just(float("inf")), st.just(float("nan"))),
        max_size=int(SPIKES * 200),
    ),
    seeds,
)
def test_a_fifth_of_the_samples_may_be_anything(spikes, seed):
    rng = random.Random(seed)
    readings = spikes + [None] * (200 - len(spikes))
    tracker = CostTracker(MODEL)
    for _ in range(3):
        rng.shuffle(readings)
        for spike in readings:
            run(tracker, MODEL, steps=1, clock=lambda s, spike=spike: s if spike is None else spike)
        assert tracker.end_window() is MODEL


@given(seeds, st.floats(0, SPIKES), st.floats(0, 0.05), st.floats(1, 12))
def test_spikes_on_top_of_noise_move_nothing(seed, part, noise, decades):
    rng = random.Random(seed)
    clock, tracker = noisy(rng, noise), CostTracker(MODEL)
    num_spikes = int(part * STEPS)
    for _ in range(6):
        run(tracker, MODEL, steps=STEPS - num_spikes, clock=clock)
        run(tracker, MODEL, steps=num_spikes, clock=lambda s: s * 10 ** rng.uniform(0, decades))
        assert tracker.end_window() is MODEL


@given(seeds, st.floats(1.2, 8), st.booleans(), st.floats(0, SPIKES), st.floats(1, 12))
def test_spikes_do_not_hide_a_step_change(seed, factor, is_slower, part, decades):
    rng = random.Random(seed)
    machine = changed(MODEL, factor, factor) if is_slower else changed(MODEL, *[1 / factor] * 2)
    clock, tracker = noisy(rng, 0.05), CostTracker(MODEL)
    num_spikes = int(part * STEPS)
    run(tracker, machine, steps=STEPS - num_spikes, clock=clock)
    run(tracker, machine, steps=num_spikes, clock=lambda s: s * 10 ** rng.uniform(0, decades))
    assert_knows(tracker.end_window(), machine)


@settings(max_examples=10)
@given(seeds, st.floats(-0.02, 0.02), st.floats(0, 0.05))
def test_a_drift_is_followed_at_the_distance_of_the_band(seed, drift, noise):
    clock, tracker, steps = noisy(random.Random(seed), noise), CostTracker(MODEL), 16
    machine, moves = MODEL, 0
    for _ in range(20):
        for _ in range(steps):
            machine = changed(machine, *[(1 + drift) ** (1 / steps)] * 2)
            run(tracker, machine, steps=STEPS // steps, clock=clock)
        before = tracker.model
        moves += tracker.end_window() is not before
        assert_knows(tracker.model, machine, DEAD_BAND + abs(drift) + 0.015)
    # Each cost moves by a band at a time.
    assert moves <= 2 * (20 * abs(drift) / DEAD_BAND + 1)


@settings(max_examples=10)
@given(seeds, st.floats(1.2, 4), st.booleans())
def test_the_running_share_turns_to_the_new_target_and_stays(seed, rival, takes_memory):
    """A rival takes the CPU's memory or the link while contexts grow from 16K tokens to 64K."""
    rng = random.Random(seed)
    machine = changed(MODEL, cpu=rival) if takes_memory else changed(MODEL, h2d=rival)
    tracker, router = CostTracker(MODEL), ShareRouter(MODEL.marginal_share)
    segments = 64
    count = sum(router.route() == "unpinned" for _ in range(segments))
    targets = []
    for window in range(192):
        run(
            tracker,
            MODEL if window < 20 else machine,
            share=count / segments,
            num_tokens=segments * SEGMENT,
            steps=256,
            clock=noisy(rng, 0.1),
        )
        router.marginal_share = tracker.end_window().marginal_share
        targets.append(router.marginal_share)
        count += router.route() == "unpinned"
        segments += 1
    assert set(targets[:20]) == {MODEL.marginal_share}
    assert len(set(targets[21:])) <= 2
    true = machine.marginal_share
    assert targets[22] == pytest.approx(true, abs=0.02)
    expected = true + (MODEL.marginal_share - true) * 84 / segments
    assert count / segments == pytest.approx(expected, abs=0.02 + 1 / segments)


@given(cost_models(), st.integers(256, 2**20), st.floats(-DEAD_BAND, DEAD_BAND), st.booleans())
def test_a_cost_that_is_wrong_by_the_band_costs_no_more_than_the_band(model, tokens, wrong, of_cpu):
    machine = changed(model, cpu=1 + wrong) if of_cpu else changed(model, h2d=1 + wrong)
    used = machine.step_time(model.optimal_share(tokens), tokens)
    best = machine.step_time(machine.optimal_share(tokens), tokens)
    assert used <= best / (1 - DEAD_BAND) * (1 + ROUNDING)
    assert abs(model.optimal_share(10**12) - machine.optimal_share(10**12)) <= 0.01


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 0.0, -1.0, -1e300])
def test_times_that_are_none_do_not_count(bad):
    tracker = CostTracker(MODEL)
    run(tracker, MODEL, clock=lambda seconds: bad)
    run(tracker, changed(MODEL, 2, 2), steps=100)
    assert_knows(tracker.end_window(), changed(MODEL, 2, 2))


@pytest.mark.parametrize(("share", "cpu", "h2d"), [(0.0, 1, 2), (1.0, 2, 1), (0.5, 2, 2)])
def test_an_engine_without_tokens_says_nothing(share, cpu, h2d):
    found = run_window(CostTracker(MODEL), changed(MODEL, 2, 2), share=share)
    assert_knows(found, changed(MODEL, cpu, h2d))


def test_a_context_without_placed_tokens_says_nothing():
    assert run_window(CostTracker(MODEL), changed(MODEL, 2, 2), num_tokens=0) is MODEL


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_too_few_samples_say_nothing(steps):
    tracker = CostTracker(MODEL)
    for _ in range(4):
        assert run_window(tracker, changed(MODEL, 5, 5), steps=steps) is MODEL
    assert run_window(tracker, MODEL, steps=30) is MODEL


def test_what_was_before_a_move_does_not_undo_it():
    tracker, machine = CostTracker(MODEL), changed(MODEL, 2, 0.5)
    for _ in range(10):
        run_window(tracker, MODEL, steps=40)
    moved = run_window(tracker, machine, steps=40)
    assert_knows(moved, machine)
    for _ in range(10):
        assert run_window(tracker, machine, steps=40) is moved


def test_few_samples_a_window_tell_together():
    tracker, machine = CostTracker(MODEL), changed(MODEL, 2, 0.5)
    assert run_window(tracker, machine, steps=24) is MODEL
    assert_knows(run_window(tracker, machine, steps=24), machine)


@given(seeds, st.floats(1.5, 3), st.integers(0, 30))
def test_a_step_change_is_found_though_times_scatter_by_half(seed, factor, num_before):
    """Which no window of so few samples shows by itself."""
    clock = noisy(random.Random(seed), 0.6)
    tracker, machine = CostTracker(MODEL), changed(MODEL, factor, 1 / factor)
    for _ in range(num_before):
        assert run_window(tracker, MODEL, steps=40, clock=clock) is MODEL
    for _ in range(20):
        run_window(tracker, machine, steps=40, clock=clock)
    assert_knows(tracker.model, machine, within=0.4)
    later = {costs(run_window(tracker, machine, steps=40, clock=clock)) for _ in range(20)}
    assert len(later) <= 3


def test_windows_do_not_mix():
    tracker, machine = CostTracker(MODEL), changed(MODEL, 2, 2)
    run(tracker, machine, steps=STEPS)
    assert tracker.model is MODEL, "moved before the window's end"
    tracker.end_window()
    assert_knows(run_window(tracker, MODEL, steps=64), MODEL, ROUNDING)


def test_overheads_that_exceed_the_times_move_nothing():
    assert run_window(CostTracker(MODEL), MODEL, clock=lambda seconds: 1e-5) is MODEL


@given(seeds)
def test_times_that_are_mostly_overhead_bias_nothing(seed):
    """The costs' noise is four times the costs here, and a quarter of them come out negative."""
    tracker, clock = CostTracker(MODEL), noisy(random.Random(seed), 0.1)
    for _ in range(4):
        assert run_window(tracker, MODEL, num_tokens=10, clock=clock) is MODEL


def test_a_cost_of_zero_is_corrected():
    model = replace(MODEL, cpu_s_per_token=0.0)
    assert_knows(run_window(CostTracker(model), MODEL), MODEL)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), None])
def test_other_shares_are_refused(share):
    tracker = CostTracker(MODEL)
    for observe in (tracker.observe_cpu, tracker.observe_gpu):
        with pytest.raises(LayoutError, match="share="):
            observe(1e-3, share, 100)
