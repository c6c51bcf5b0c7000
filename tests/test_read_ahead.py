"""Chunks are copied ahead while that pays, and tried again where it did not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_stopwatch import NUM_LAYERS, Ticking, _prepared, steps, taken, twin_of

from sparsekv.attention.read_ahead import ReadAhead
from sparsekv.attention.stopwatch import Stopwatch
from sparsekv.regions import PingPong

__all__ = ["_prepared"]


def judged(read_ahead, *ratios):
    for ratio in ratios:
        read_ahead.note(ratio, 1.0)
    return read_ahead.pays


@given(st.lists(st.floats(0, 1.49), min_size=40), st.lists(st.floats(2, 1e6), max_size=4))
def test_chunks_that_come_in_time_pay_whatever_a_few_layers_take(ratios, late):
    """Four of nine, wherever they stand."""
    read_ahead = ReadAhead()
    for start in range(0, len(ratios), 9 - len(late)):
        assert judged(read_ahead, *late, *ratios[start : start + 9 - len(late)])


@given(st.lists(st.floats(1.51, 100), min_size=9, max_size=9))
def test_chunks_that_come_late_do_not_pay_until_they_come_as_soon_as_the_rest(ratios):
    read_ahead = ReadAhead()
    assert not judged(read_ahead, *ratios)
    assert not judged(read_ahead, *18 * [1.2])
    assert judged(read_ahead, *9 * [1.05])
    assert judged(read_ahead, *18 * [1.4])


def test_times_of_a_clock_that_jumped_say_nothing():
    read_ahead = ReadAhead()
    for _ in range(20):
        read_ahead.note(5.0, 0.0)
        read_ahead.note(5.0, -1.0)
    assert read_ahead.pays


class Bus(Ticking):
    """Chunks are there after `wait_s`, and the rest of a layer is read in a millisecond."""

    def __init__(self):
        super().__init__()
        self.now = self.wait_s = 0.0
        self.clock = lambda: self.now


@pytest.fixture
def loads(monkeypatch):
    """Loads ahead of each step."""
    counts, load, is_due = [], PingPong.load, Stopwatch.is_due
    lap, stop = Stopwatch.lap, Stopwatch.stop

    def counted(self, *chunks):
        counts[-1] += not all(map(self.holds, chunks))
        load(self, *chunks)

    def late(self, num_tokens):
        self._accelerator.now += self._accelerator.wait_s
        lap(self, num_tokens)

    def read(self, num_tokens):
        self._accelerator.now += 1e-3
        stop(self, num_tokens)

    def begun(self, layer_idx):
        counts.extend([0] if layer_idx == 0 else [])
        return is_due(self, layer_idx)

    monkeypatch.setattr(PingPong, "load", counted)
    monkeypatch.setattr(Stopwatch, "lap", late)
    monkeypatch.setattr(Stopwatch, "stop", read)
    monkeypatch.setattr(Stopwatch, "is_due", begun)
    return counts


@pytest.mark.parametrize("is_wanted", [True, False])
def test_beside_anothers_copies_one_layer_a_step_is_tried(loads, is_wanted):
    """Whether anybody else wants the times or not; results stay what they are."""
    twin = twin_of(Bus, share=0, window_size=64, block_size=16, ping_pong_tokens=64)
    recent = twin.cache.companion.timings.gpu
    recent.is_wanted = is_wanted
    twin.append(600)
    bus = twin.cache.accelerator

    def settled():
        steps(twin, 14)
        loads.clear()
        steps(twin, 5)
        return set(loads)

    assert settled() == {NUM_LAYERS}
    bus.wait_s = 1.0
    assert settled() == {1}
    bus.wait_s = 0.0
    assert settled() == {NUM_LAYERS}
    assert bool(taken(twin)[1]) == is_wanted
