"""How much of the machine may be committed, and what happens beyond it."""

import copy
import gc
from types import SimpleNamespace

import pytest
import torch
from harness import Twin, build, mappings

from sparsekv.errors import CapacityError, LayoutError
from sparsekv.format import KVGeometry, PartitionSpec
from sparsekv.regions import RegionPool, control_groups, memory
from sparsekv.regions.memory import parse_bytes

GIB = 1 << 30
REALISTIC = KVGeometry(num_layers=2, num_kv_heads=4, head_dim=128)


def with_available(monkeypatch, num_bytes):
    """Let the machine have so much left, the reserve not counted."""
    found = SimpleNamespace(available=num_bytes + memory.RESERVED_BYTES, total=1 << 40)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: found)
    monkeypatch.setattr(control_groups, "memory_left", lambda: None)
    monkeypatch.delenv("SPARSEKV_HOST_MEMORY", raising=False)


def test_short_memory_is_refused_before_anything_is_touched(monkeypatch):
    cache = build(PartitionSpec(geometry=REALISTIC, batch_size=1, max_tokens=None))
    twin = Twin(cache)
    twin.append(700)
    resident = sum(mapping.resident_bytes() for mapping in mappings(cache))
    with_available(monkeypatch, 4 * cache.spec.segment_bytes)
    key, value = new_tokens_of(cache, 6 * 256)
    with pytest.raises(CapacityError, match=r"1536 more tokens x 1 sequences: needs .* lower"):
        cache.append(0, key, value)
    with pytest.raises(CapacityError, match=r"100000 tokens x 1 sequences"):
        cache.reserve(100_000)
    assert sum(mapping.resident_bytes() for mapping in mappings(cache)) == resident
    twin.check()
    with_available(monkeypatch, GIB)
    twin.append(6 * 256)
    twin.check()


def new_tokens_of(cache, num_tokens):
    shape = (cache.batch_size, 4, num_tokens, 128)
    return torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)


def test_memory_that_only_idle_mappings_hold_is_given_back_for_what_they_do_not_fit(monkeypatch):
    pool = RegionPool()
    cut = PartitionSpec(geometry=REALISTIC, batch_size=1, max_tokens=None)
    small = build(cut, pool=pool)
    for layer_idx in range(2):
        small.append(layer_idx, *new_tokens_of(small, 16 * 256))
        small.flush(layer_idx)
    addresses = [mapping.address for mapping in mappings(small)]
    del small
    gc.collect()
    idle = pool.idle_bytes()
    with_available(monkeypatch, 0)
    large = build(cut, share=0, pool=pool)
    large.reserve(12 * 256)  # only the idle mappings make room for it
    large._layers[0].stacks["pinned"].reserved_segments = 64  # but none of them is that long
    large.append(0, *new_tokens_of(large, 2 * 256))
    large.flush(0)
    assert pool.idle_bytes() == 0 < idle
    assert len(pool._mappings) == 2  # one a layer
    assert len(addresses) > 2


def test_a_refused_load_or_copy_leaves_the_cache_as_before(monkeypatch, tmp_path):
    cache = build(PartitionSpec(geometry=REALISTIC, batch_size=1, max_tokens=None))
    twin = Twin(cache)
    twin.append(700)
    cache.save(tmp_path / "saved")
    with_available(monkeypatch, 100)
    with pytest.raises(CapacityError, match="loading"):
        cache.load(tmp_path / "saved")
    with pytest.raises(CapacityError, match="a copy of this cache"):
        copy.deepcopy(cache)
    twin.check()


def test_the_reserve_is_left_to_the_machine(monkeypatch):
    with_available(monkeypatch, 3 * GIB)
    assert memory.available_bytes() == 3 * GIB
    with_available(monkeypatch, -GIB)
    assert memory.available_bytes() == 0
    with pytest.raises(CapacityError, match=r"this: needs 1.00 GiB more .* 0.00 GiB may be used"):
        memory.check_available(GIB, "this")


def test_the_environment_replaces_the_machines_total(monkeypatch):
    found = SimpleNamespace(available=10 * GIB, total=12 * GIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: found)
    monkeypatch.setattr(control_groups, "memory_left", lambda: None)
    monkeypatch.setenv("SPARSEKV_HOST_MEMORY", "100GiB")
    assert memory.available_bytes() == 96 * GIB  # 100 less 2 in use less 2 reserved
    monkeypatch.setenv("SPARSEKV_HOST_MEMORY", "1GiB")
    assert memory.available_bytes() == 0
    monkeypatch.setenv("SPARSEKV_HOST_MEMORY", "lots")
    with pytest.raises(LayoutError, match="'lots' is not a size"):
        memory.available_bytes()


def test_control_groups_leave_less_than_the_machine(monkeypatch):
    with_available(monkeypatch, 3 * GIB)
    monkeypatch.setattr(control_groups, "memory_left", lambda: 3 * GIB)
    assert memory.available_bytes() == GIB  # less 2 reserved


def test_the_total_is_the_machines_or_the_containers_limit(monkeypatch):
    found = SimpleNamespace(available=GIB, total=12 * GIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: found)
    monkeypatch.setattr(control_groups, "memory_limit", lambda: None)
    monkeypatch.delenv("SPARSEKV_HOST_MEMORY", raising=False)
    assert memory.total_bytes() == 12 * GIB, "what others use counts too"
    monkeypatch.setattr(control_groups, "memory_limit", lambda: 64 * GIB)
    assert memory.total_bytes() == 12 * GIB
    monkeypatch.setenv("SPARSEKV_HOST_MEMORY", "100GiB")
    assert memory.total_bytes() == 64 * GIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("34359738368", 32 * GIB),
        ("32GiB", 32 * GIB),
        ("32G", 32 * GIB),
        ("32gib", 32 * GIB),
        ("32GB", 32 * 10**9),
        ("1.5 KiB", 1536),
        (" 2 MB ", 2_000_000),
        ("7B", 7),
        ("1T", 1 << 40),
        ("0", 0),
    ],
)
def test_sizes_are_read_as_people_write_them(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "1,5G", "32 Gi B", "nan", "1PiB", "0x10"])
def test_other_sizes_are_refused(text):
    with pytest.raises(LayoutError, match="is not a size; write"):
        parse_bytes(text)
