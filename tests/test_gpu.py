"""The main laws on a real CUDA device: `pytest -m gpu tests/test_gpu.py`, under a minute."""

import gc
from pathlib import Path

import psutil
import pytest
import torch
from harness import (
    Twin,
    assert_not_moved,
    build,
    geometry,
    placed_segments,
    regions,
    spec,
)
from test_step import assert_attends

from sparsekv.device import open_accelerator
from sparsekv.errors import CapacityError
from sparsekv.format import KVGeometry, PartitionSpec
from sparsekv.regions import RegionPool
from sparsekv.regions.memory import Mapping

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

GEOMETRIES = {
    "gqa fp32": geometry(),
    "gqa bf16": geometry(num_kv_heads=4, head_dim=128, dtype=torch.bfloat16),
    "wide values fp16": geometry(head_dim=3, head_dim_v=5, dtype=torch.float16),
    "latents bf16": geometry(
        num_kv_heads=1, head_dim=72, head_dim_v=64, shared_kv=True, dtype=torch.bfloat16
    ),
}


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.fixture(params=GEOMETRIES)
def kv(request):
    return GEOMETRIES[request.param]


@pytest.fixture(params=[0, 0.5, 1])
def twin(request, kv):
    return Twin(build(spec(kv), request.param, device="cuda"))


def works(device="cuda"):
    """Whether a kernel launches and no earlier error comes up."""
    torch.cuda.synchronize()
    return (torch.arange(4, device=device) * 2).sum().item() == 12


def test_steps_equal_attention_to_the_whole_and_placed_bytes_stay(twin):
    before = {}
    for length in (30, 1, 1, 9, 4):
        twin.append(length, flush=False)
        twin.check()
        assert_attends(twin, length)
        twin.check()
        after = placed_segments(twin.cache)
        assert_not_moved(before, after)
        before = after
    assert {part.key.device.type for part in twin.cache.views(0).window} <= {"cuda"}


def test_rows_and_length_change_as_on_the_cpu(twin):
    twin.append(30)
    for device, rows in (("cuda", [1, 0]), ("cpu", [1, 0, 1])):
        twin.cache.batch_select_indices(torch.tensor(rows, device=device))
        twin.apply(lambda tensor, rows=rows: tensor[rows])
        twin.append(7)
        twin.check()
    twin.cache.batch_repeat_interleave(2)
    twin.apply(lambda tensor: tensor.repeat_interleave(2, 0))
    for kept in (41, 33, 18, 3):
        twin.cache.crop(kept)
        twin.apply(lambda tensor, kept=kept: tensor[:, :, :kept])
        twin.check()
    twin.append(19, flush=False)
    assert_attends(twin, 19)
    twin.check()


def test_a_saved_cache_loads_on_either_device(twin, tmp_path):
    twin.append(23)
    twin.cache.save(tmp_path / "saved")
    for device in ("cuda", "cpu"):
        other = Twin(build(twin.cache.spec, device=device))
        other.cache.load(tmp_path / "saved")
        other.dense = [list(layer) for layer in twin.dense]
        other.check()
        assert regions(other.cache) == regions(twin.cache)
        other.append(9)
        other.check()


def test_pinned_views_are_pinned_and_unpinned_ones_are_not(kv):
    twin = Twin(build(spec(kv), 0.5, device="cuda"))
    twin.append(30)
    views = twin.cache.views(0)
    assert views.pinned
    assert views.unpinned
    assert all(part.key.is_pinned() and part.value.is_pinned() for part in views.pinned)
    assert not any(part.key.is_pinned() for part in views.unpinned)


def test_a_refused_registration_leaves_no_error_behind():
    accelerator, mapping = open_accelerator("cuda"), Mapping(1 << 20, (64, "cuda"))
    mapping.register(accelerator, 1 << 20)
    with pytest.raises(CapacityError, match=r"registering 1048576 bytes .*refused.*ulimit -l"):
        accelerator.register(mapping.address, 1 << 20)
    assert works()
    mapping.unmap()
    with pytest.raises(CapacityError):
        accelerator.register(mapping.address, 1 << 20)  # addresses that are not mapped
    accelerator.unregister(mapping.address)  # nor registered
    assert works()


def test_a_refused_registration_in_the_middle_of_a_step_loses_nothing(monkeypatch):
    twin = Twin(build(share=0, device="cuda"))
    twin.append(7)
    real = twin.cache.accelerator.register

    def twice(address, num_bytes):
        real(address, num_bytes)
        try:
            real(address, num_bytes)
        finally:
            twin.cache.accelerator.unregister(address)

    key = torch.randn(2, 2, 4000, 4, device="cuda")
    with monkeypatch.context() as patch:
        patch.setattr(twin.cache.accelerator, "register", twice)
        twin.cache.append(0, key, key)
        with pytest.raises(CapacityError):
            twin.cache.flush(0)
    assert works()
    twin.note(0, key, key)
    twin.check()
    twin.cache.flush(0)
    twin.append(4000, layers=[1])
    twin.check()


@pytest.mark.parametrize("shared", [True, False], ids=["one pool", "own pools"])
def test_200_create_use_drop_cycles_are_flat(shared):
    cut = PartitionSpec(
        geometry=KVGeometry(num_layers=2, num_kv_heads=4, head_dim=128),
        batch_size=1,
        max_tokens=None,
    )
    pool = RegionPool() if shared else None
    new = torch.zeros(1, 4, 1030, 128, dtype=torch.bfloat16, device="cuda")

    def cycle():
        cache = build(cut, device="cuda", pool=pool)
        for layer_idx in range(2):
            cache.append(layer_idx, new, new)
            cache.flush(layer_idx)

    def state():
        gc.collect()
        lines = Path("/proc/self/maps").read_text().count("\n")
        return psutil.Process().memory_info().rss, lines, torch.cuda.memory_allocated()

    for _ in range(10):
        cycle()
    rss, lines, allocated = state()
    for _ in range(200):
        cycle()
    rss_after, lines_after, allocated_after = state()
    assert rss_after - rss < 16 << 20  # one leaked cycle in ten would be 80 MiB
    assert lines_after - lines < 20
    assert allocated_after == allocated
    assert works()


def test_accelerator_memory_does_not_depend_on_the_length():
    kv = KVGeometry(num_layers=2, num_kv_heads=4, head_dim=128)
    cut = PartitionSpec(geometry=kv, batch_size=2, max_tokens=None)
    cache = build(cut, 0.5, device="cuda")
    query = torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    peaks = []
    for _ in range(4):
        for layer_idx in range(2):
            key = torch.zeros(2, 4, 2048, 128, device="cuda", dtype=torch.bfloat16)
            cache.append(layer_idx, key, key)
            cache.flush(layer_idx)
            del key
        torch.cuda.synchronize()
        peaks.append(torch.cuda.memory_allocated())
    assert query.is_cuda
    assert len(set(peaks)) == 1
