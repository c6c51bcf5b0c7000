"""The host is late with its part, whatever waits for it: attention's jobs, the jobs and functions
that put evicted windows in place. One result, on the simulated accelerator and on CUDA.
"""

import threading
import time

import prepared_ops
import pytest
import torch
from harness import Twin, accelerators, build, geometry, spec
from test_step import assert_attends

from sparsekv.attention import decode
from sparsekv.device import CudaAccelerator, CudaStream, SimulatedAccelerator
from sparsekv.kernels import dispatch
from sparsekv.kernels.dispatch import Flag, PreparedAttentionJob
from sparsekv.regions import outbox, window
from sparsekv.transfer import in_place

LATE_S, VERY_LATE_S = 2e-3, 4e-2
"""In every layer of every step, and where windows leave: longer than the steps until they are read.
"""

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class SlowStream(CudaStream):
    """Its functions are called late."""

    def then(self, function):
        return super().then(lambda: (time.sleep(VERY_LATE_S), function()))


class SlowHost(CudaAccelerator):
    def new_stream(self):
        return SlowStream(self, torch.cuda.Stream(self.device))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def device(request, monkeypatch):
    if dispatch.attention_jobs() is None:
        pytest.skip("no native library")
    if request.param == "cpu":
        for module in (decode, in_place, window):
            monkeypatch.setattr(module, "decode_ops_for", lambda device: prepared_ops)
    return request.param


def late(wait, seconds):
    """A flag that is set a while after another has its value, and that value."""
    gate, (flag, value) = Flag(torch.zeros(1, dtype=torch.int32)), wait

    def open_late():
        while (flag.value - value) & 0x80000000:
            time.sleep(1e-4)
        time.sleep(seconds)
        gate.set(1)

    threading.Thread(target=open_late, daemon=True).start()
    return gate, 1


@pytest.fixture
def slow_attention(monkeypatch):
    submit = PreparedAttentionJob.submit

    def submit_late(job, query_start, wait, done, keep):
        return submit(job, query_start, late(wait, LATE_S), done, keep)

    monkeypatch.setattr(PreparedAttentionJob, "submit", submit_late)


@pytest.fixture
def slow_copies(monkeypatch):
    submit = dispatch.copy_jobs()

    def submit_late(copies, wait, done, keep):
        return submit(copies, late(wait, VERY_LATE_S), done, keep)

    monkeypatch.setattr(outbox, "copy_jobs", lambda: submit_late)


@pytest.fixture
def slow_functions(monkeypatch):
    """Instead of jobs."""
    monkeypatch.setattr(outbox, "copy_jobs", lambda: None)


@pytest.mark.parametrize("slow", ["slow_attention", "slow_copies", "slow_functions"])
@pytest.mark.parametrize("share", [0.5, 1])
def test_results_are_the_same_however_late_the_host_is(device, slow, share, request):
    request.getfixturevalue(slow)
    make = SimulatedAccelerator
    if device == "cuda":
        make = lambda: SlowHost(torch.device("cuda", torch.cuda.current_device()))  # noqa: E731
    with accelerators(make):
        twin = Twin(build(spec(geometry(num_layers=6)), share, device=device))
    twin.append(41)
    for length in (*[1] * 14, 9, 1, 1, 1):
        twin.append(length, flush=False)
        assert_attends(twin, length)
    twin.cache.crop(30)
    twin.apply(lambda tensor: tensor[:, :, :30])
    for _ in range(5):
        twin.append(1, flush=False)
        assert_attends(twin, 1)
    twin.check()
