"""The accelerator: which devices there are, and the simulated one's books."""

import pytest
import torch

from sparsekv.device import SimulatedAccelerator, open_accelerator
from sparsekv.errors import LayoutError


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
