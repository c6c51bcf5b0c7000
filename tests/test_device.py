"""The accelerator: which devices there are, and the simulated one's books."""

import pytest
import torch

from sparsekv.device import CudaAccelerator, SimulatedAccelerator, cuda, open_accelerator
from sparsekv.errors import CacheStateError, LayoutError


def test_the_cpu_is_the_simulated_accelerator():
    for device in ("cpu", torch.device("cpu")):
        accelerator = open_accelerator(device)
        assert isinstance(accelerator, SimulatedAccelerator)
        assert accelerator.device == torch.device("cpu")


@pytest.mark.parametrize("device", ["tpu", "", "cuda:-1", "cuda:x", None, 1.5, ["cpu"]])
def test_what_is_no_device_is_refused(device):
    with pytest.raises(LayoutError, match=r"device=.*; use 'cuda'"):
        open_accelerator(device)


@pytest.mark.parametrize("device", ["mps", "meta", "xpu:1"])
def test_other_kinds_of_device_are_refused(device):
    with pytest.raises(LayoutError, match="must be 'cuda', 'cuda:<index>' or 'cpu'"):
        open_accelerator(device)


def test_cuda_without_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LayoutError, match="torch sees no CUDA device; use device='cpu'"):
        open_accelerator("cuda")


def test_a_cuda_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(LayoutError, match=r"'cuda:2': this machine has 2 CUDA device\(s\), from 0"):
        open_accelerator("cuda:2")


def test_copies_are_counted_and_bitwise():
    accelerator = SimulatedAccelerator()
    source = torch.randn(3, 5).to(torch.bfloat16)
    host, back = torch.empty(3, 5, dtype=torch.bfloat16), accelerator.empty((3, 5), torch.bfloat16)
    accelerator.copy_to_host(host, source)
    accelerator.copy_to_host(host[:1], source[:1])
    accelerator.copy_from_host(back, host)
    assert torch.equal(back, source)
    assert (accelerator.d2h_bytes, accelerator.h2d_bytes) == (40, 30)


def test_registrations_are_kept_until_they_are_undone():
    accelerator = SimulatedAccelerator()
    accelerator.register(4096, 8192)
    assert accelerator.registered == {4096: 8192}
    accelerator.unregister(4096)
    accelerator.unregister(4096)  # what was never done need not be undone
    assert accelerator.registered == {}


class _Driver:
    """Has the functions for flags."""

    def cuStreamWaitValue32_v2(self):
        """Not called here."""

    cuStreamWriteValue32_v2 = cuStreamWaitValue32_v2


class _FlagStream:
    def __init__(self, reached, error=None):
        self._reached = reached
        self._error = error

    def write_flag(self, word, value):
        if self._reached:
            word.fill_(value)

    def wait_flag(self, word, value):
        assert int(word) >= value, "waits for what does not come"
        if self._error:
            raise CacheStateError(self._error)

    def synchronize(self):
        pass


@pytest.fixture
def cuda_with(monkeypatch):
    """A CUDA device, as far as flags are tried on it; `calls` of it are kept."""
    monkeypatch.setattr(cuda, "_flags_work", {})

    def make(stream, driver, status=0):
        accelerator = CudaAccelerator.__new__(CudaAccelerator)
        accelerator.device, accelerator._driver = torch.device("cuda", 0), driver
        accelerator.calls = []
        accelerator.call = lambda *call: accelerator.calls.append(call) or status
        monkeypatch.setattr(CudaAccelerator, "new_stream", lambda self: stream)
        return accelerator

    return make


@pytest.mark.parametrize(
    ("stream", "driver", "reason"),
    [
        (_FlagStream(True), object(), "the driver has no such functions"),
        (_FlagStream(True, "failed with error 801"), _Driver(), "failed with error 801"),
        (_FlagStream(False), _Driver(), "a flag that was written is not seen"),
    ],
)
def test_flags_that_do_not_work_are_told_of_once_and_not_used(
    cuda_with, stream, driver, reason, caplog
):
    accelerator = cuda_with(stream, driver)
    assert [accelerator.has_flags for _ in range(3)] == [False] * 3
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert "cuda:0" in record.getMessage()
    (_, address, *_), *_, last = accelerator.calls
    assert last == ("cuMemHostUnregister", address)


def test_flags_are_tried_once_for_each_device(cuda_with, caplog):
    assert cuda_with(_FlagStream(True), _Driver()).has_flags
    assert cuda_with(None, None).has_flags
    assert cuda._flags_work == {0: True}
    assert not caplog.records


def test_flags_are_tried_again_where_no_memory_was_registered(cuda_with, caplog):
    """It may be by then; until it is, a cache has no flags to use."""
    accelerator = cuda_with(None, _Driver(), status=2)
    assert accelerator.has_flags
    assert [name for name, *_ in accelerator.calls] == ["cuMemHostRegister_v2"]
    assert cuda._flags_work == {}
    assert not caplog.records


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_flags_work_on_cuda(monkeypatch, caplog):
    monkeypatch.setattr(cuda, "_flags_work", {})
    assert open_accelerator("cuda").has_flags
    assert not caplog.records
