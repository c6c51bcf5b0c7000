"""The accelerator's time for its part: one layer in three, in turn; nobody waits for it."""

import math
import time
from itertools import count

import prepared_ops
import pytest
import torch
from harness import Twin, accelerators, build, geometry, interrupt, spec
from simulated_streams import LateCaller
from test_step import assert_attends, whole

from sparsekv.attention import decode
from sparsekv.attention.read_ahead import ReadAhead
from sparsekv.attention.stopwatch import Stopwatch
from sparsekv.attention.timings import Recent
from sparsekv.device import SimulatedAccelerator, SimulatedStream, open_accelerator
from sparsekv.engine import attend
from sparsekv.engine.balance import Balance
from sparsekv.kernels import dispatch
from sparsekv.regions import window
from sparsekv.roofline import CostModel
from sparsekv.transfer import in_place

NUM_LAYERS = 8


class Ticking(SimulatedAccelerator):
    """Each timed event comes a second after the one before."""

    def __init__(self):
        super().__init__()
        self.clock = count().__next__


@pytest.fixture(autouse=True)
def _prepared(monkeypatch):
    if dispatch.attention_jobs() is None:
        pytest.skip("no native library")
    for module in (decode, in_place, window):
        monkeypatch.setattr(module, "decode_ops_for", lambda device: prepared_ops)


@pytest.fixture
def timed(monkeypatch):
    """Layers that were timed, and None for each step."""
    layers, is_due = [], Stopwatch.is_due

    def noted(self, layer_idx):
        layers.extend([None] if layer_idx == 0 else [])
        found = is_due(self, layer_idx)
        layers.extend([layer_idx] if found else [])
        return found

    monkeypatch.setattr(Stopwatch, "is_due", noted)
    return layers


def twin_of(make=Ticking, share=0.5, num_layers=NUM_LAYERS, **changes):
    """After its prompt and the steps that prepare launches; its times are wanted from here on."""
    with accelerators(make):
        twin = Twin(build(spec(geometry(num_layers=num_layers), **changes), share))
    twin.append(30)
    steps(twin, 2)
    taken(twin)
    return twin


def taken(twin):
    """(the CPU's, the GPU's) times that are known now."""
    twin.cache.companion.host.synchronize()
    timings = twin.cache.companion.timings
    return timings.cpu.take(), timings.gpu.take()


def steps(twin, num_steps):
    for _ in range(num_steps):
        twin.append(1, flush=False)
        assert_attends(twin, 1)


def pinned_tokens(twin):
    return sum(view.num_tokens for view in twin.cache.parts(NUM_LAYERS - 1).pinned)


def test_each_step_times_one_layer_in_three_in_turn_but_the_first_two(timed):
    twin = twin_of()
    timed.clear()
    steps(twin, 6)
    found = "".join("|" if layer_idx is None else str(layer_idx) for layer_idx in timed)
    assert found in "|25|47|36|25|47|36" * 2
    assert found.count("|") == 6


def test_a_step_is_noted_in_the_next_with_the_tokens_read_in_place():
    """What is pinned, but for the two chunks that were copied ahead, if they were."""
    twin = twin_of(share=0)
    recent = twin.cache.companion.timings.gpu
    steps(twin, 1)
    recent.take()
    is_ahead, before = [], 0
    for i in range(12):
        pinned = pinned_tokens(twin)  # the step's own, before what it evicts
        steps(twin, 1)
        found = recent.take()
        if i:
            assert len(found) == 2
            assert all(seconds == 1 for _, seconds in found)
            assert {tokens for tokens, _ in found} <= {before, before - 16}
            is_ahead += [tokens < before for tokens, _ in found]
        before = pinned
    assert any(is_ahead)


def test_times_are_within_the_time_around():
    twin = twin_of(SimulatedAccelerator, share=0)
    accelerator = twin.cache.accelerator
    start = accelerator.clock()
    steps(twin, 6)
    found = [seconds for _, seconds in taken(twin)[1]]
    assert 10 <= len(found) <= 11  # and that of a step before, in which one layer was timed
    assert min(found) > 0
    assert sum(found) <= accelerator.clock() - start


def test_steps_go_on_while_no_event_has_come(monkeypatch, timed):
    """So many times are under way at most; then they are noted, and it goes on."""
    twin = twin_of(share=0)
    recent = twin.cache.companion.timings.gpu
    event = type(twin.cache.accelerator.timed_event())
    with monkeypatch.context() as patch:
        patch.setattr(event, "has_come", lambda self: False)
        patch.setattr(SimulatedStream, "synchronize", None)
        timed.clear()
        steps(twin, 40)
        assert recent.take() == []
        assert 60 < len(timed) - timed.count(None) <= 64
    steps(twin, 1)
    assert [seconds for _, seconds in recent.take()] == 64 * [1.0]


def test_nothing_is_timed_where_nothing_is_pinned():
    for twin in (twin_of(share=1), twin_of(num_layers=2)):
        steps(twin, 6)
        cpu, gpu = taken(twin)
        assert gpu == []
        assert len(cpu) > 6


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_layer_a_step_is_timed_before_somebody_asks(timed, when):
    """A balance does, whenever it comes; that one layer's chunks are judged by."""
    with accelerators(Ticking):
        twin = Twin(build(spec(geometry(num_layers=NUM_LAYERS)), 0.5))
    balance = Balance(CostModel(cpu_s_per_token=1, h2d_s_per_token=1), is_elastic=False)
    if when == "before":
        twin.cache.balance = balance
    twin.append(30)
    steps(twin, 6)
    num_steps, is_wanted = timed.count(None), when == "before"
    assert (len(timed) - num_steps > num_steps) == is_wanted
    assert (balance.stats(0.5, 30).measured_cpu_s is not None) == is_wanted
    twin.cache.balance = balance
    steps(twin, 6)
    stats = balance.stats(0.5, 30)
    assert stats.measured_cpu_s > 0
    assert stats.measured_gpu_s > 0


def test_prepared_jobs_are_noted_too():
    twin = twin_of()
    taken(twin)
    expected = []
    for _ in range(6):
        unpinned = twin.cache.step_views(0).unpinned
        expected += NUM_LAYERS * [sum(view.num_tokens for view in unpinned)]
        steps(twin, 1)
    found, _ = taken(twin)
    assert [num_tokens for num_tokens, _ in found] == expected
    assert min(seconds for _, seconds in found) > 0


def test_ctrl_c_at_any_line_of_a_timed_layer_leaves_times_in_order():
    twin = twin_of(batch_size=1)
    twin.append(1, flush=False)
    recent, query = twin.cache.companion.timings.gpu, torch.randn(1, 4, 1, 4)
    expected = [whole(twin, i, query, 0.3) for i in range(NUM_LAYERS)]
    at_line, num_noted = 1, 0
    while interrupt(at_line, lambda: [attend(twin.cache, i, query, 0.3) for i in (0, 2, 3, 4)]):
        for layer_idx in range(NUM_LAYERS):
            found = attend(twin.cache, layer_idx, query, 0.3)
            torch.testing.assert_close(found, expected[layer_idx], atol=1e-5, rtol=1e-5)
        noted = recent.take()
        assert all(seconds > 0 for _, seconds in noted)
        num_noted += len(noted)
        at_line += 23
    assert num_noted > 20


def test_late_work_is_timed_when_it_is_done():
    accelerator, recent = LateCaller(), Recent()
    accelerator.clock = count().__next__
    recent.take()
    stopwatch = Stopwatch(accelerator, 5, recent, ReadAhead())
    stream = accelerator.current_stream()
    for num_tokens in (7, 8):
        assert [stopwatch.is_due(layer_idx) for layer_idx in range(5)].count(True) == 1
        stopwatch.start()
        stream.copy(torch.zeros(1), torch.ones(1))
        stopwatch.stop(num_tokens)
    assert recent.take() == []
    stream.synchronize()
    assert recent.take() == []
    assert not stopwatch.is_due(0)
    assert recent.take() == [(7, 1), (8, 1)]


class Queued(LateCaller):
    """Whose caller is ahead of it, unless it has done everything so far."""

    has_queue = True


@pytest.mark.parametrize(
    ("is_idle", "pause_s", "with_caller", "is_noted"),
    [
        (True, 0.2, False, False),
        (True, 0.2, True, True),
        (True, 0.0, False, True),
        (False, 0.2, False, True),
    ],
)
def test_a_time_in_which_the_accelerator_waited_for_its_caller_is_not_noted(
    is_idle, pause_s, with_caller, is_noted
):
    accelerator, recent = Queued(), Recent()
    accelerator.clock = count().__next__
    recent.take()
    stopwatch = Stopwatch(accelerator, 5, recent, ReadAhead())
    stream = accelerator.current_stream()
    assert [stopwatch.is_due(layer_idx) for layer_idx in range(5)].count(True) == 1
    stopwatch.start(with_caller=with_caller)
    if is_idle:
        stream.synchronize()
    time.sleep(pause_s)
    stopwatch.stop(7)
    stream.synchronize()
    stopwatch.is_due(0)
    ((num_tokens, seconds),) = recent.take()
    assert num_tokens == 7
    assert seconds == 1 if is_noted else math.isnan(seconds)


def test_times_that_are_under_way_are_not_those_of_the_next_rows(monkeypatch):
    twin = twin_of(share=0)
    event = type(twin.cache.accelerator.timed_event())
    with monkeypatch.context() as patch:
        patch.setattr(event, "has_come", lambda self: False)
        steps(twin, 3)
    twin.apply(lambda tensor: tensor[:1])
    twin.cache.batch_select_indices(torch.tensor([0]))
    steps(twin, 2)  # the first prepares launches, the second's times are not known yet
    assert taken(twin)[1] == []
    steps(twin, 1)
    assert len(taken(twin)[1]) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_device_is_timed_without_waiting_for_it():
    recent = Recent()
    recent.take()
    stopwatch = Stopwatch(open_accelerator("cuda"), 5, recent, ReadAhead())
    torch.cuda._sleep(1)  # the first one is loaded before it runs
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for num_tokens in range(1, 7):
            assert not stopwatch.is_due(0)
            if sum(stopwatch.is_due(layer_idx) for layer_idx in (2, 3, 4)):
                stopwatch.start()
                torch.cuda._sleep(20_000_000)  # about 10 ms
                stopwatch.stop(num_tokens)
        assert recent.take() == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    stopwatch.is_due(0)
    found = recent.take()
    assert [num_tokens for num_tokens, _ in found] == [1, 2, 3, 4, 5, 6]
    assert all(1e-3 < seconds < 1 for _, seconds in found)
