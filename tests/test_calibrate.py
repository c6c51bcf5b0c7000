"""What calibrate makes of times, and what it leaves behind when it is stopped.

A simulated machine tells the times, and its ceilings are of no interest here.
"""

from __future__ import annotations

import gc
import importlib
import math
import random
import weakref
from itertools import pairwise

import pytest
import torch
from harness import geometry, interrupt
from hypothesis import given
from hypothesis import strategies as st
from simulated_machine import Machine, install, install_with_attention

from sparsekv.attention import decode
from sparsekv.errors import CapacityError, LayoutError
from sparsekv.format import KVGeometry
from sparsekv.regions import Registrar, memory
from sparsekv.roofline import PRESETS, CostModel

module = importlib.import_module("sparsekv.engine.calibrate")

GEOMETRY = geometry(num_layers=61)
COST = CostModel(
    cpu_s_per_token=2e-6, h2d_s_per_token=3e-6, cpu_overhead_s=4e-4, gpu_overhead_s=1e-4
)


@pytest.fixture
def machine(monkeypatch):
    _quicken(monkeypatch)
    return install(_machine(), monkeypatch)


def _machine():
    machine = Machine(COST)
    machine.reads_ahead = False
    return machine


def _quicken(monkeypatch):
    monkeypatch.setattr(module, "_LAYER_BYTES", (1, 1, 1))
    monkeypatch.setattr(module, "_LEAST_BYTES", 1)
    monkeypatch.setattr(module, "num_attending_threads", lambda: 2)
    monkeypatch.setattr(module, "measure_machine", lambda geometry, **how: PRESETS["h200"])


def calibrate(geometry_=GEOMETRY, num_heads=4, **how):
    return module.calibrate(geometry_, num_heads=num_heads, device="cpu", **how)


def costs_of(model):
    return (
        model.cpu_s_per_token,
        model.h2d_s_per_token,
        model.cpu_overhead_s,
        model.gpu_overhead_s,
    )


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.98])
def test_the_machines_costs_are_found(machine, share):
    """At shares beside the best, wherever that is, and at lengths of which each doubles."""
    machine.cost = CostModel(
        cpu_s_per_token=(1 - share) * 1e-6,
        h2d_s_per_token=share * 1e-6,
        cpu_overhead_s=4e-6,
        gpu_overhead_s=1e-6,
    )
    found = calibrate(batch_size=2)
    assert costs_of(found.cost) == pytest.approx(costs_of(machine.cost), rel=1e-6)
    assert found.residual < 1e-9
    lengths = sorted({point.num_tokens for point in found.points})
    assert len(found.points) == 2 * len(lengths) == 6
    assert all(after >= 2 * before for before, after in pairwise(lengths))
    for point in found.points:
        # Beside it by 6 %, or by a segment of the few that there are.
        assert 0 < point.share < 1
        assert abs(point.share - share) < 0.08 + 2 * 256 / point.num_tokens
    assert (found.key.batch_size, found.key.num_threads) == (2, 2)
    assert found.machine is PRESETS["h200"]


@pytest.mark.parametrize(("copying", "in_place"), [(0.5, False), (0.94, False), (0.96, True)])
def test_the_pinned_region_is_read_in_the_faster_way(machine, copying, in_place):
    machine.copying = copying
    found = calibrate()
    assert found.reads_in_place is in_place
    times = 1.0 if in_place else copying
    assert found.cost.h2d_s_per_token == pytest.approx(times * COST.h2d_s_per_token, rel=1e-6)
    assert found.cost.cpu_s_per_token == pytest.approx(COST.cpu_s_per_token, rel=1e-6)


def test_noise_is_told_as_the_residual(machine):
    rng = random.Random(0)
    machine.clock = lambda seconds: seconds * rng.uniform(0.9, 1.1)
    found = calibrate()
    assert found.cost.cpu_s_per_token == pytest.approx(COST.cpu_s_per_token, rel=0.2)
    assert found.cost.h2d_s_per_token == pytest.approx(COST.h2d_s_per_token, rel=0.2)
    assert 1e-4 < found.residual < 0.1


@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim_v": 7},
        {"dtype": torch.bfloat16},
        {"num_kv_heads": 1, "head_dim": 9, "head_dim_v": 8, "shared_kv": True},
    ],
)
def test_any_kind_of_attention_is_measured_as_it_is(monkeypatch, shape):
    """By the real launches and jobs."""
    _quicken(monkeypatch)
    monkeypatch.setattr(module, "_LAYER_BYTES", (1, 1))
    monkeypatch.setattr(module, "_STEPS", 4)
    machine = install_with_attention(_machine(), monkeypatch)
    found = calibrate(geometry(num_layers=2, **shape))
    assert costs_of(found.cost) == pytest.approx(costs_of(machine.cost), rel=1e-6)


@pytest.mark.parametrize(
    ("clock", "message"),
    [
        (lambda seconds: 1e-3, "must grow with the tokens"),
        (lambda seconds: 0.0, "must take time"),
        (lambda seconds: -seconds, "_s=-.*clock that jumped"),
        (lambda seconds: math.nan, "_s=nan.*clock that jumped"),
        (lambda seconds: math.inf, "_s=inf.*clock that jumped"),
    ],
)
def test_times_that_cannot_be_are_refused(machine, clock, message):
    machine.clock = clock
    with pytest.raises(LayoutError, match=message):
        calibrate()


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_an_engine_that_is_not_timed_is_named(machine, monkeypatch, engine):
    def untimed():
        timings = machine.timings()
        getattr(timings, engine).note = lambda num_tokens, seconds: None
        return timings

    monkeypatch.setattr(decode, "Timings", untimed)
    with pytest.raises(LayoutError, match=f"of the {engine}'s part is known.*sparsekv doctor"):
        calibrate()


def test_the_key_names_the_device_that_is_measured(machine, monkeypatch):
    monkeypatch.setattr("sparsekv.engine.profile_key._gpu", lambda device: (str(device), "1"))
    assert calibrate().key.gpu == "cpu"


def test_the_simulated_accelerator_tells_no_times(monkeypatch):
    _quicken(monkeypatch)
    with pytest.raises(LayoutError, match="only steps on a GPU are timed"):
        calibrate()


def test_heads_that_do_not_share_kv_heads_are_refused_at_once(machine, monkeypatch):
    monkeypatch.setattr(module, "InplaceKVCache", None)
    with pytest.raises(LayoutError, match="num_heads=3: must be a multiple of num_kv_heads=2"):
        calibrate(num_heads=3)


@pytest.mark.parametrize("room", [0, 100_000])
def test_too_little_memory_is_told_before_anything_is_registered(machine, monkeypatch, room):
    for where in (memory, module, importlib.import_module("sparsekv.cache")):
        monkeypatch.setattr(where, "available_bytes", lambda: room)
    monkeypatch.setattr(Registrar, "buffer", None)
    monkeypatch.setattr(Registrar, "make_flags", None)
    with pytest.raises(CapacityError):
        calibrate()


def test_less_memory_is_measured_with_shorter_contexts(machine, monkeypatch):
    monkeypatch.setattr(module, "_LAYER_BYTES", (1 << 18, 1 << 19, 1 << 20))
    longest = max(point.num_tokens for point in calibrate().points)
    assert longest == (1 << 20) // GEOMETRY.bytes_per_token_per_layer
    # Four layers with 4 windows of 256 tokens, and a margin.
    room = module._MARGIN_BYTES + 4 * 4 * 256 * GEOMETRY.bytes_per_token_per_layer
    monkeypatch.setattr(module, "available_bytes", lambda: room)
    assert max(point.num_tokens for point in calibrate().points) == 16 * 256


@given(
    st.sampled_from([(4, 128), (8, 128), (1, 576), (1, 8)]),
    st.integers(1, 64),
    st.integers(0, 1 << 37),
)
def test_sizes_leave_the_processors_caches_and_fit_in_memory(heads, batch_size, available):
    num_kv_heads, head_dim = heads
    shape = KVGeometry(num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim)
    per_token = batch_size * shape.bytes_per_token_per_layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "available_bytes", lambda: available)
        sizes = list(module._sizes(shape, batch_size))
    room = available - module._MARGIN_BYTES
    assert all(after >= 2 * before for (before, _), (after, _) in pairwise(sizes))
    for index, (num_tokens, num_layers) in enumerate(sizes):
        num_bytes = num_tokens * num_layers * per_token
        assert num_layers >= 4
        if num_tokens > 1024 << index:  # not the least that must be
            assert num_bytes <= room
        if room > 8 << 30:
            assert num_bytes >= module._LEAST_BYTES


def test_one_cache_at_a_time_is_held(machine, monkeypatch):
    alive, caches = [], module.InplaceKVCache

    def noted(*arguments, **options):
        assert all(cache() is None for cache in alive)
        cache = caches(*arguments, **options)
        alive.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(module, "InplaceKVCache", noted)
    calibrate()
    assert len(alive) == 3


@pytest.mark.parametrize("at_line", [300, 3000, 9000, 20000])
def test_ctrl_c_frees_everything(machine, monkeypatch, at_line):
    made, caches = [], module.InplaceKVCache

    def noted(*arguments, **options):
        made.append(caches(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(module, "InplaceKVCache", noted)
    assert interrupt(at_line, calibrate), "it was done before"
    registered = [cache.accelerator.registered for cache in made]
    made.clear()
    gc.collect()
    assert all(memory == {} for memory in registered)
