"""fit: the costs that made the times come out of them, as exactly as the times are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import cost_models

from sparsekv.errors import LayoutError
from sparsekv.roofline import CalibrationPoint, CostModel, fit

MODEL = CostModel(
    cpu_s_per_token=1e-6, h2d_s_per_token=1.5e-6, cpu_overhead_s=2e-4, gpu_overhead_s=1e-4
)
LENGTHS = (2048, 4096, 8192, 16384, 32768)
SHARES = (0.3, 0.6)

grids = st.tuples(
    st.lists(st.integers(1, 2**20), min_size=1, max_size=6),
    st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3),
)


def measured(model, lengths=LENGTHS, shares=SHARES, clock=lambda seconds: seconds):
    """Points of a machine; `clock` says what is read for a time that passed."""
    return [
        CalibrationPoint(
            num_tokens=length,
            share=share,
            cpu_s=clock(model.cpu_time(share, length)),
            gpu_s=clock(model.gpu_time(share, length)),
        )
        for length in lengths
        for share in shares
    ]


def error_of(model, points):
    """The root mean square of the relative errors of a model's times."""
    errors = [model.cpu_time(p.share, p.num_tokens) / p.cpu_s - 1 for p in points]
    errors += [model.gpu_time(p.share, p.num_tokens) / p.gpu_s - 1 for p in points]
    return (sum(error**2 for error in errors) / len(errors)) ** 0.5


@given(cost_models(), st.integers(0, 2**32))
def test_exact_times_give_back_the_costs(model, seed):
    points = measured(model, lengths=[2**k for k in range(4, 21, 2)])
    random.Random(seed).shuffle(points)
    found, residual = fit(points)
    assert found.cpu_s_per_token == pytest.approx(model.cpu_s_per_token, rel=1e-6)
    assert found.h2d_s_per_token == pytest.approx(model.h2d_s_per_token, rel=1e-6)
    assert found.cpu_overhead_s == pytest.approx(model.cpu_overhead_s, rel=1e-6, abs=1e-13)
    assert found.gpu_overhead_s == pytest.approx(model.gpu_overhead_s, rel=1e-6, abs=1e-13)
    assert residual <= 1e-9


@given(cost_models(), grids)
def test_times_of_any_points_that_determine_lines_are_met(model, grid):
    lengths, some_shares = grid
    points = measured(model, lengths, some_shares)
    spread = max(lengths) / min(lengths)
    of_cpu = spread * max(some_shares) / min(some_shares)
    of_gpu = spread * (1 - min(some_shares)) / (1 - max(some_shares))
    if min(of_cpu, of_gpu) < 1.49:
        with pytest.raises(LayoutError, match=r"must be at least 1\.5 times"):
            fit(points)
    elif min(of_cpu, of_gpu) > 1.51:
        found, residual = fit(points)
        assert residual == pytest.approx(error_of(found, points), abs=1e-12)
        assert residual <= 1e-6


@given(st.integers(0, 2**32), st.floats(0, 0.1))
def test_costs_are_found_within_the_noise(seed, noise):
    rng = random.Random(seed)
    points = measured(MODEL, clock=lambda seconds: seconds * (1 + rng.uniform(-noise, noise)))
    found, residual = fit(points)
    assert found.cpu_s_per_token == pytest.approx(MODEL.cpu_s_per_token, rel=1.1 * noise + 1e-9)
    assert found.h2d_s_per_token == pytest.approx(MODEL.h2d_s_per_token, rel=1.1 * noise + 1e-9)
    assert abs(found.marginal_share - MODEL.marginal_share) <= 0.5 * noise + 1e-9
    # Overheads are a small part of these times: they are known by what is noise of the shortest.
    shortest = min(min(point.cpu_s, point.gpu_s) for point in points)
    assert abs(found.cpu_overhead_s - MODEL.cpu_overhead_s) <= 3 * noise * shortest + 1e-12
    assert abs(found.gpu_overhead_s - MODEL.gpu_overhead_s) <= 3 * noise * 2 * shortest + 1e-12
    assert residual == pytest.approx(error_of(found, points))
    assert residual <= noise / (1 - noise) + 1e-9


@given(st.integers(0, 2**32), cost_models(), cost_models())
def test_no_other_costs_fit_better(seed, model, other):
    rng = random.Random(seed)
    points = measured(model, clock=lambda seconds: seconds * (1 + rng.uniform(-0.05, 0.05)))
    try:
        found, residual = fit(points)
    except LayoutError:
        return  # noise of the overhead hides the cost
    others = [other, model, replace(found, cpu_overhead_s=found.cpu_overhead_s + 1e-6)]
    others += [replace(found, cpu_s_per_token=found.cpu_s_per_token * by) for by in (0.99, 1.01)]
    others += [replace(found, h2d_s_per_token=found.h2d_s_per_token * by) for by in (0.99, 1.01)]
    assert all(residual <= error_of(model, points) + 1e-12 for model in others)


@given(st.floats(1e-6, 1e6))
def test_costs_are_in_the_unit_of_the_times(factor):
    points = measured(MODEL)
    scaled = [replace(p, cpu_s=p.cpu_s * factor, gpu_s=p.gpu_s * factor) for p in points]
    found, _ = fit(scaled)
    assert found.cpu_s_per_token == pytest.approx(MODEL.cpu_s_per_token * factor)
    assert found.gpu_overhead_s == pytest.approx(MODEL.gpu_overhead_s * factor)


def test_overheads_are_never_negative():
    # Times that grow faster than the tokens: a straight line would begin below zero.
    points = measured(MODEL, clock=lambda seconds: seconds**1.2)
    found, residual = fit(points)
    assert (found.cpu_overhead_s, found.gpu_overhead_s) == (0.0, 0.0)
    assert residual == pytest.approx(error_of(found, points))
    for by in (0.99, 1.01):
        moved = replace(found, cpu_s_per_token=found.cpu_s_per_token * by)
        assert residual < error_of(moved, points)


def test_an_engine_without_tokens_says_nothing():
    alone = [
        CalibrationPoint(num_tokens=9999, share=0.0, cpu_s=0.0, gpu_s=MODEL.gpu_time(0, 9999)),
        CalibrationPoint(num_tokens=9999, share=1.0, cpu_s=MODEL.cpu_time(1, 9999), gpu_s=5.0),
        CalibrationPoint(num_tokens=0, share=0.5, cpu_s=3.0, gpu_s=0.0),
    ]
    found, residual = fit(measured(MODEL) + alone)
    assert found.cpu_s_per_token == pytest.approx(MODEL.cpu_s_per_token)
    assert found.gpu_overhead_s == pytest.approx(MODEL.gpu_overhead_s)
    assert residual <= 1e-9


def test_one_length_at_two_shares_is_enough():
    found, _ = fit(measured(MODEL, lengths=[16384]))
    assert found.cpu_s_per_token == pytest.approx(MODEL.cpu_s_per_token)
    assert found.cpu_overhead_s == pytest.approx(MODEL.cpu_overhead_s)


@pytest.mark.parametrize(
    ("lengths", "shares", "what"),
    [
        ([], SHARES, "cpu_s of no tokens"),
        (LENGTHS, [0.0], "cpu_s of no tokens"),
        (LENGTHS, [1.0], "gpu_s of no tokens"),
        ([0], SHARES, "cpu_s of no tokens"),
        ([4096], [0.5], "cpu_s of 2048 to 2048 tokens"),
        ([4096, 4096], [0.5], "cpu_s of 2048 to 2048 tokens"),
        ([4096, 5120], [0.5], "cpu_s of 2048 to 2560 tokens"),
        ([4096], [0.1, 0.2], "gpu_s of 3277 to 3686 tokens"),
    ],
)
def test_points_that_determine_nothing_are_refused(lengths, shares, what):
    with pytest.raises(LayoutError, match=f"^{what}: the most .*; measure at two lengths"):
        fit(measured(MODEL, lengths, shares))


@pytest.mark.parametrize("times", [(1e-3, 1e-3), (2e-3, 1e-3), (1e-200, 1.0)])
def test_times_that_do_not_grow_are_refused(times):
    points = [
        CalibrationPoint(num_tokens=tokens, share=0.5, cpu_s=seconds, gpu_s=seconds)
        for tokens, seconds in zip((1024, 8192), times, strict=True)
    ]
    with pytest.raises(LayoutError, match=r"^cpu_s: must grow with the tokens.*; measure again"):
        fit(points)


@pytest.mark.parametrize("field", ["cpu_s", "gpu_s"])
def test_an_engine_that_takes_no_time_is_refused(field):
    points = measured(MODEL)
    with pytest.raises(LayoutError, match=f"^{field}=0: .*; measure again"):
        fit([replace(points[0], **{field: 0.0}), *points[1:]])


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), None])
@pytest.mark.parametrize("field", ["cpu_s", "gpu_s"])
def test_times_of_a_clock_that_jumped_are_refused(field, value):
    with pytest.raises(LayoutError, match=f"^{field}=.*a clock that jumped"):
        replace(measured(MODEL)[0], **{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("num_tokens", -1), ("num_tokens", 1.5), ("share", 1.1), ("share", None)]
)
def test_points_that_cannot_be_are_refused(field, value):
    with pytest.raises(LayoutError, match=f"^{field}="):
        replace(measured(MODEL)[0], **{field: value})
