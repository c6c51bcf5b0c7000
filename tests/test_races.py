"""The caller's work and the copies beside it, in any order that streams allow: one result."""

import copy
import gc
import threading

import pytest
import torch
from harness import Twin, accelerators, build, geometry, new_tokens, read, same_bits, spec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from simulated_streams import (
    ACCELERATORS,
    DelayedAccelerator,
    LateAccelerator,
    LateCaller,
    LateOutbox,
    RefusingAccelerator,
)
from test_regions import run_script
from test_state_machine import CacheMachine
from test_step import assert_attends

from sparsekv.device import CudaAccelerator, CudaStream, SimulatedStream
from sparsekv.engine import attend
from sparsekv.regions.memory import PAGE_BYTES
from sparsekv.transfer import stream

SLOW = [LateAccelerator, DelayedAccelerator]


@pytest.fixture(params=SLOW)
def slow(request):
    with accelerators(request.param):
        yield


# Any operations


class _RarelyChecked(CacheMachine):
    """Between checks nobody waits for copies but the cache itself."""

    make: type

    def __init__(self):
        super().__init__()
        self._context = accelerators(self.make)
        self._context.__enter__()

    def teardown(self):
        self._context.__exit__(None, None, None)
        super().teardown()

    @rule()
    def check(self):
        self.twin.check()

    def it_answers_as_plain_tensors_do(self):
        assert not hasattr(self, "twin") or self.cache.is_complete

    def placed_bytes_have_not_moved(self):
        """Looked at by the machine that checks at each step."""


class LateMachine(_RarelyChecked):
    make = LateAccelerator


class DelayedMachine(_RarelyChecked):
    make = DelayedAccelerator


class RefusedMachine(_RarelyChecked):
    """The system registers now more, now less, and takes back what was given up."""

    make = RefusingAccelerator

    @rule(num_pages=st.one_of(st.none(), st.integers(0, 40)))
    def limit(self, num_pages):
        self.cache.accelerator.most_bytes = num_pages and num_pages * PAGE_BYTES

    def load(self, elsewhere):
        """Wants the regions that were saved."""

    def the_router_is_within_half_a_segment(self):
        """Not where segments find no room."""

    @invariant()
    def nothing_is_given_up_while_it_is_copied(self):
        assert not hasattr(self, "twin") or not self.cache.accelerator.violations


class TestLate(LateMachine.TestCase):
    settings = settings(max_examples=30)


class TestDelayed(DelayedMachine.TestCase):
    settings = settings(max_examples=15)


class TestRefused(RefusedMachine.TestCase):
    settings = settings(max_examples=30)


# Steps


@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("window_size", [4, 8])
def test_steps_are_the_same_however_late_copies_are(slow, share, window_size):
    cut = spec(geometry(num_layers=3), window_size=window_size, ping_pong_tokens=window_size)
    twin = Twin(build(cut, share))
    for length in (30, 1, 1, 9, 4, 1, 1, 1, 1):
        twin.append(length, flush=False)
        assert_attends(twin, length)
    twin.check()


def test_the_window_is_not_overwritten_before_its_eviction_has_read_it(slow):
    twin = Twin(build(share=0.5))
    for _ in range(12):
        twin.append(4, layers=[0])  # fills the window, and sends it away
        twin.append(3, layers=[0])
        twin.append(1, layers=[0])
    twin.append(96, layers=[1])
    twin.check()


def test_an_eviction_does_not_read_the_window_before_it_is_written():
    """Two windows are written late, and leave at once as far as their stream is concerned."""
    with accelerators(LateCaller):
        twin = Twin(build(share=0.5))
        for length in (4, 4, 3, 6, 13):
            twin.append(length)
        twin.cache.accelerator.current_stream().synchronize()
        twin.check()


def test_pending_tokens_are_copied_before_the_layer_is_used_again(slow):
    """What `append` keeps by reference may be written to once the next call has been made."""
    cache = build(share=0.5)
    key, value = new_tokens(cache, 18)
    cache.append(0, key, value)
    cache.flush(0)
    old_key = key.clone()
    cache.append(0, *new_tokens(cache, 1))
    key.zero_()
    found, _ = read(cache, 0)
    assert same_bits(found[:, :, :18], old_key)


@pytest.mark.parametrize("ping_pong", [1, 2])
@pytest.mark.parametrize("make", [*SLOW, LateCaller])
def test_a_buffer_is_not_refilled_before_its_reader_is_done(make, ping_pong):
    """Chunks are read by the caller's stream, which may be late, as may the copies be."""
    with accelerators(make):
        twin = Twin(build(spec(ping_pong_tokens=4 * ping_pong), share=0))
    twin.append(41)
    cache = twin.cache
    caller, found, order = cache.accelerator.current_stream(), [], [0, 1, 0, 1]
    caller.synchronize()
    for i, layer_idx in enumerate(order):
        views = cache.views(layer_idx).pinned
        upcoming, after = cache.pinned_ahead(order[(i + 1) % 4])
        for part in stream(cache.ping_pong, views, upcoming, after):
            found.append((layer_idx, part.positions, torch.empty(part.key.shape)))
            caller.copy(found[-1][2], part.key)
    caller.synchronize()
    assert len(found) == 4 * -(-10 // ping_pong)
    for layer_idx, positions, keys in found:
        for start, key in zip(positions.tolist(), keys, strict=True):
            assert torch.equal(key, twin.dense[layer_idx][0][:, :, start : start + 4])


@pytest.mark.parametrize("flush", [False, True], ids=["not flushed", "flushed"])
@pytest.mark.parametrize("use", ["crop", "select", "copy", "save"])
def test_what_is_under_way_is_waited_for_before_it_is_used(slow, use, flush, tmp_path):
    twin = Twin(build(share=0.5))
    for length in (11, 3, 8, 25):
        twin.append(length, flush=flush)
        if use == "crop":
            _crop(twin, twin.cache.num_tokens // 4 * 4 - 2)
        elif use == "select":
            _select(twin, [1, 0])
        elif use == "copy":
            twin.cache = copy.deepcopy(twin.cache)
        else:
            twin.cache.save(tmp_path / "saved")
            twin.cache.load(tmp_path / "saved")
    twin.check()


def test_what_is_loaded_ahead_is_used_only_if_it_is_still_what_lies_there(slow):
    twin = Twin(build(share=0))
    twin.append(41)
    for change in (
        lambda: None,
        lambda: _crop(twin, 30),
        lambda: _select(twin, [1, 0]),
        lambda: (_crop(twin, 8), twin.append(22)),
        lambda: _select(twin, [1, 1, 0]),
        lambda: (twin.cache.reset(), twin.apply(lambda t: t[:2, :, :0]), twin.append(9)),
    ):
        twin.append(1, flush=False)
        assert_attends(twin, 1)  # the last layer loads the first one's chunks
        change()


@pytest.mark.parametrize("window_size", [4, 8])
def test_what_is_loaded_ahead_has_arrived_before(window_size):
    """The last layer loads what the first one has just sent away."""
    with accelerators(LateOutbox):
        twin = Twin(build(spec(window_size=window_size), share=0))
    assert type(twin.cache.ping_pong._stream) is SimulatedStream
    for length in (window_size - 1, *[1] * (2 * window_size)):
        twin.append(length, flush=False)
        assert_attends(twin, length)
    twin.check()


def test_few_layers_of_a_prompt_wait_for_their_copies():
    """Those that wait keep their keys and values, and the caller may be a whole prompt ahead."""
    with accelerators(LateAccelerator):
        cache = build(spec(geometry(num_layers=12)), share=0)
    operations, waiting = cache._outbox.stream._operations, []
    for layer_idx in range(12):
        cache.append(layer_idx, *new_tokens(cache, 40))
        cache.flush(layer_idx)
        waiting.append(len(operations))
    assert max(waiting) <= 2 * waiting[0]


def test_a_prompt_leaves_while_it_is_attended_to():
    """The caller, who may have to wait for copies, has attention enqueued by then; they do not wait
    for it in turn.
    """
    with accelerators(LateCaller):
        twin = Twin(build(share=0.5))
    attention, done = torch.zeros(1), torch.zeros(1)
    key, value = new_tokens(twin.cache, 41)
    for layer_idx in range(2):
        twin.cache.append(layer_idx, key, value)
        twin.note(layer_idx, key, value)
        twin.cache.accelerator.current_stream().copy(done, attention + 1)
        twin.cache.flush(layer_idx)
        assert done == 0
        twin.cache.accelerator.current_stream().synchronize()
        done.zero_()
    twin.check()


def _crop(twin, num_tokens):
    twin.cache.crop(num_tokens)
    twin.apply(lambda tensor: tensor[:, :, :num_tokens])


def _select(twin, rows):
    twin.cache.batch_select_indices(torch.tensor(rows))
    twin.apply(lambda tensor: tensor[rows])


def test_chunks_are_loaded_once_each_and_two_ahead():
    twin = Twin(build(spec(ping_pong_tokens=4), share=0))
    twin.append(33)
    cache, per_layer = twin.cache, 8 * 4 * 2 * geometry().bytes_per_token_per_layer
    twin.append(1, flush=False)
    before = cache.accelerator.h2d_bytes
    assert_attends(twin, 1)
    assert cache.accelerator.h2d_bytes - before == 2 * per_layer + per_layer // 4
    twin.append(1, flush=False)
    assert_attends(twin, 1)
    assert cache.accelerator.h2d_bytes - before == 4 * per_layer + per_layer // 4


# Failures, and the end


class Stop(Exception):
    pass


@pytest.mark.parametrize("make", ACCELERATORS.values())
@pytest.mark.parametrize("error", [Stop(), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_step_that_fails_at_any_chunk_can_be_done_again(make, error):
    with accelerators(make):
        twin = Twin(build(spec(ping_pong_tokens=4), share=0))
    twin.append(22)
    twin.append(1, flush=False)
    cache = twin.cache
    real = cache.ping_pong.take
    for countdown in range(1, 6):
        calls = iter(range(1, 100))

        def take(chunk, calls=calls, countdown=countdown):
            if next(calls) == countdown:
                raise error
            return real(chunk)

        cache.ping_pong.take = take
        with pytest.raises(type(error)):
            attend(cache, countdown % 2, torch.randn(2, 4, 1, 4), 0.3)
        cache.ping_pong.take = real
        assert_attends(twin, 1)
    twin.check()


def test_nothing_is_freed_while_it_is_copied(slow):
    """Dropped, reset and closed in the middle: the next cache's memory is not written to."""
    cache = build(spec(window_size=8), share=0.5)
    pool = cache._pool
    endings = [lambda c: None, lambda c: c.reset(), lambda c: c.close("over"), copy.deepcopy]
    for ending in endings:
        key, value = new_tokens(cache, 50)
        for layer_idx in range(2):
            cache.append(layer_idx, key, value)
            cache.flush(layer_idx)
        cache.append(0, *new_tokens(cache, 5))
        attend(cache, 0, torch.randn(2, 4, 1, 4), 0.3)
        ending(cache)
        del cache, key, value
        gc.collect()
        cache = build(spec(window_size=8), share=0.5, pool=pool)
        twin = Twin(cache)
        twin.append(50)
        twin.check()


def test_caches_on_several_threads_do_not_disturb_each_other():
    errors = []

    def run(seed):
        try:
            twin = Twin(build(share=0.5))
            for length in (19, 1, 1, 6, 1, 1, 1):
                twin.append(length, flush=False)
                assert_attends(twin, length)
            twin.check()
        except BaseException as error:
            errors.append(error)

    with accelerators(DelayedAccelerator):
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors


@pytest.mark.parametrize("share", [0, 0.5])
def test_at_exit_nothing_is_unregistered_while_it_is_copied(share):
    result = run_script(
        f"""
        from simulated_streams import RefusingAccelerator

        class Reporting(RefusingAccelerator):
            def unregister(self, address):
                super().unregister(address)
                print(len(self.violations))

        with accelerators(Reporting):
            cache = build(share={share})
        for layer_idx in range(2):
            cache.append(layer_idx, *new_tokens(cache, 30))
            cache.flush(layer_idx)
        assert any(stream._operations for stream in cache.accelerator._streams)
        """
    )
    assert result.returncode == 0, result.stderr
    assert set(result.stdout.split()) == {"0"}


# On CUDA


class SleepyStream(CudaStream):
    """Sleeps before each copy of the kinds that its accelerator names."""

    def _to_host(self, host, source):
        self._sleep_before("out")
        super()._to_host(host, source)

    def _from_host(self, target, host):
        self._sleep_before("in")
        super()._from_host(target, host)

    def copy(self, target, source):
        self._sleep_before("within")
        super().copy(target, source)

    def _sleep_before(self, kind):
        if kind not in self._accelerator.sleeps_before:
            return
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(2_000_000)  # about 1 ms


class SleepyAccelerator(CudaAccelerator):
    """Copies beside the caller's work are slow."""

    sleeps_before = ("out", "in", "within")

    def new_stream(self):
        return SleepyStream(self, torch.cuda.Stream(self.device))


class SleepyOut(SleepyAccelerator):
    sleeps_before = ("out",)


class SleepyIn(SleepyAccelerator):
    sleeps_before = ("in",)


class SleepyCaller(CudaAccelerator):
    """What the caller writes and reads is slow."""

    sleeps_before = ("out", "in", "within")

    def current_stream(self):
        torch.cuda._sleep(500_000)
        return SleepyStream(self, torch.cuda.current_stream(self.device))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("make", [SleepyAccelerator, SleepyOut, SleepyIn, SleepyCaller])
@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("is_own", [True, False], ids=["own stream", "default stream"])
def test_steps_on_cuda_are_the_same_however_late_copies_are(make, share, is_own):
    with accelerators(lambda: make(torch.device("cuda", torch.cuda.current_device()))):
        twin = Twin(build(spec(window_size=8), share, device="cuda"))
    stream = torch.cuda.Stream() if is_own else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for length in (60, *[1] * 20, 9, 30, 1):
            twin.append(length, flush=False)
            assert_attends(twin, length)
        twin.cache.crop(50)
        twin.apply(lambda tensor: tensor[:, :, :50])
        twin.append(40)
        twin.check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("ending", ["del", "reset", "close"])
def test_a_cuda_cache_may_end_while_its_copies_run(ending):
    with accelerators(lambda: SleepyAccelerator(torch.device("cuda", torch.cuda.current_device()))):
        cache = build(spec(window_size=8), share=0.5, device="cuda")
        pool = cache._pool
        for _ in range(20):
            key, value = new_tokens(cache, 50)
            for layer_idx in range(2):
                cache.append(layer_idx, key, value)
                cache.flush(layer_idx)
            if ending == "reset":
                cache.reset()
            if ending == "close":
                cache.close("over")
            del cache, key, value
            cache = build(spec(window_size=8), share=0.5, device="cuda", pool=pool)
            twin = Twin(cache)
            twin.append(50)
            twin.check()


two_devices = pytest.param(
    ["cuda:0", "cuda:1"],
    marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second CUDA device"),
)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("devices", [["cuda"], two_devices], ids=["one device", "two devices"])
def test_24_threads_on_cuda_get_the_answers_of_one(devices):
    errors = []

    def run(device):
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                twin = Twin(build(share=0.5, device=device))
                for length in (19, 1, 1, 6, 1, 1, 1):
                    twin.append(length, flush=False)
                    assert_attends(twin, length)
                twin.check()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(devices[i % len(devices)],)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
