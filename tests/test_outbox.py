"""Windows on their way to the unpinned region, through fewer buffers than there are layers."""

import gc
import threading
import time

import pytest
import torch
from harness import Twin, accelerators, build, geometry, spec
from simulated_streams import ACCELERATORS, LateAccelerator

from sparsekv.errors import CacheStateError
from sparsekv.kernels import dispatch
from sparsekv.kernels.cpu.jobs import cancel_jobs
from sparsekv.kernels.dispatch import Flag, JobStatus
from sparsekv.regions import outbox

MANY, FEW = 3 * outbox._MOST_BOUNCES, outbox._MOST_BOUNCES

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def _native():
    if dispatch.copy_jobs() is None:
        pytest.skip("no native library")


def full_but_one(num_layers, device="cpu"):
    """A cache whose layers all have a window that the next token fills, in steps with flags."""
    cut = spec(geometry(num_layers=num_layers), window_size=8)
    twin = Twin(build(cut, share=1, device=device))
    twin.cache.registrar.make_flags()
    twin.append(23)
    twin.cache.settle()
    return twin


def open_later(flag, value, gate):
    while flag.value != value:
        time.sleep(1e-4)
    time.sleep(2e-3)
    gate.set(1)


@pytest.fixture
def slow_jobs(monkeypatch):
    """Jobs begin late, whatever flag is set."""
    submit = dispatch.copy_jobs()

    def submit_late(copies, wait, done, keep):
        gate = Flag(torch.zeros(1, dtype=torch.int32))
        threading.Thread(target=open_later, args=(*wait, gate)).start()
        return submit(copies, (gate, 1), done, keep)

    monkeypatch.setattr(outbox, "copy_jobs", lambda: submit_late)


def test_all_layers_may_evict_in_a_step_that_waits_for_nothing():
    with accelerators(LateAccelerator):
        twin = full_but_one(MANY)
    stream = twin.cache._outbox.stream
    num_done = stream._num_done
    twin.append(1)
    assert stream._num_done == num_done
    twin.check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_all_layers_may_evict_in_a_step_while_the_device_is_busy():
    torch.cuda._sleep(1000)
    twin = full_but_one(MANY, "cuda")
    stream = torch.cuda.ExternalStream(twin.cache._outbox.stream._handle)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # about half a second
    busy_until = stream.record_event()
    twin.append(1)
    assert not busy_until.query()
    twin.check()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_a_buffer_is_not_filled_again_before_its_window_has_been_put_in_place(slow_jobs, device):
    twin = full_but_one(MANY, device)
    for _ in range(3):
        twin.append(8)
    twin.check()


@pytest.mark.parametrize("make", ACCELERATORS.values(), ids=ACCELERATORS)
def test_a_long_prompt_has_more_windows_than_there_are_flags(make, slow_jobs, monkeypatch):
    monkeypatch.setattr(outbox, "_MOST_PLACINGS", 6)
    with accelerators(make):
        twin = full_but_one(2)
        twin.append(8 * 30)
        placings = twin.cache._outbox._placings
        assert len({placing.done[0].data_ptr() for placing in placings}) == len(placings)
        twin.check()


def test_a_layer_waits_for_its_own_windows_only():
    with accelerators(LateAccelerator):
        twin = full_but_one(MANY)
    twin.append(1)
    assert [len(layer.arrival.placed) for layer in twin.cache._layers] == [1] * MANY


def test_what_a_cancelled_job_leaves_is_put_in_place_while_it_is_there():
    with accelerators(LateAccelerator):
        twin = full_but_one(FEW)
    twin.append(1)
    cancel_jobs()
    assert {p.job.status for p in twin.cache._outbox._placings} == {JobStatus.CANCELLED}
    twin.cache._outbox.synchronize()
    twin.append(8, layers=[1, 0, 3, 2])  # each fills another's buffer
    twin.check()


def test_a_job_that_nobody_was_told_of_is_dropped(monkeypatch):
    """Ctrl-C strikes before its submission returns, and somebody keeps the error."""
    twin, jobs, submit = full_but_one(FEW), [], dispatch.copy_jobs()

    def strike(*args):
        jobs.append(submit(*args))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(outbox, "copy_jobs", lambda: strike)
        with pytest.raises(KeyboardInterrupt):
            twin.append(1)
    assert not jobs[0].drop.alive
    twin.cache.flush(0)
    twin.cache.crop(23)
    twin.dense = [[tensor[:, :, :23] for tensor in layer] for layer in twin.dense]
    twin.append(9)
    twin.check()


def test_what_a_cancelled_job_has_lost_is_not_shown():
    with accelerators(LateAccelerator):
        twin = full_but_one(MANY)
    twin.append(1)
    cancel_jobs()
    for look in (lambda: twin.cache.views(0), lambda: twin.cache.crop(20), twin.cache.settle):
        with pytest.raises(CacheStateError, match=r"is lost.*reset the cache"):
            look()
    twin.cache.reset()
    twin.apply(lambda tensor: tensor[:, :, :0])
    twin.append(30)
    twin.check()


def test_a_dropped_cache_gives_its_memory_back_at_once():
    """Not when Python next looks for what refers to itself."""
    gc.collect()
    gc.disable()
    try:
        twin = full_but_one(MANY)
        twin.append(1)
        twin.check()
        registered = twin.cache.accelerator.registered
        assert registered
        del twin
        assert not registered
    finally:
        gc.enable()
