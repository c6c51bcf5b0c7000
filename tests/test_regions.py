"""Host memory: what is reserved, committed, registered and given back, and when."""

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from harness import Twin, build, geometry, mappings, regions, same_bits, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import stack_operations

from sparsekv.device import SimulatedAccelerator
from sparsekv.errors import CapacityError
from sparsekv.format import KVGeometry, PartitionSpec
from sparsekv.regions import PinnedStack, RegionPool, Registrar, SegmentStack, memory
from sparsekv.regions.memory import HUGE_PAGE_BYTES, PAGE_BYTES, Mapping

GIB = 1 << 30
REALISTIC = KVGeometry(num_layers=2, num_kv_heads=4, head_dim=128)


class CheckedAccelerator(SimulatedAccelerator):
    """Refuses what the driver refuses: overlaps, and registrations after the n-th."""

    def __init__(self, limit=None):
        super().__init__()
        self.limit = limit

    def register(self, address, num_bytes):
        assert num_bytes > 0
        assert address % PAGE_BYTES == num_bytes % PAGE_BYTES == 0
        for start, size in self.registered.items():
            assert address >= start + size or address + num_bytes <= start, "registered twice"
        if self.limit is not None and len(self.registered) >= self.limit:
            raise CapacityError("refused")
        super().register(address, num_bytes)

    def unregister(self, address):
        assert mapped(address), "unmapped before it was unregistered"
        super().unregister(address)


def mapped(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


def placed_bytes(cache):
    segments = sum(region != "window" for region in regions(cache))
    return segments * cache.batch_size * cache.spec.geometry.bytes_per_token


# Sizes


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("num_tokens", [300, 1_000, 4_000, 20_000])
@pytest.mark.parametrize("growth", ["prefill", "decode"])
def test_resident_bytes_are_the_placed_bytes(num_tokens, batch_size, growth):
    cut = PartitionSpec(geometry=REALISTIC, batch_size=batch_size, max_tokens=num_tokens)
    cache = build(cut)
    chunk = {"prefill": num_tokens, "decode": 250}[growth]
    token = torch.ones(batch_size, 4, 1, 128, dtype=torch.bfloat16)
    for start in range(0, num_tokens, chunk):
        new = token.expand(-1, -1, min(chunk, num_tokens - start), -1)
        for layer_idx in range(2):
            cache.append(layer_idx, new, new)
            cache.flush(layer_idx)
    resident = sum(mapping.resident_bytes() for mapping in mappings(cache))
    exact = num_tokens // 256 * 256 * batch_size * REALISTIC.bytes_per_token
    assert placed_bytes(cache) == exact
    used = {region.name: region.used_bytes for region in cache.stats().regions}
    assert used["unpinned"] + used["pinned"] == exact, "padding where none is needed"
    assert exact <= resident <= 1.05 * exact


def test_registered_bytes_are_the_placed_bytes():
    cache = build(PartitionSpec(geometry=REALISTIC, batch_size=1, max_tokens=None), share=0.25)
    new = torch.zeros(1, 4, 3000, 128, dtype=torch.bfloat16)
    for layer_idx in range(2):
        cache.append(layer_idx, new, new)
        cache.flush(layer_idx)
    asked = sum(layer.stacks["pinned"].used_bytes for layer in cache._layers)
    ends = [m.registration_ends[-1] for m in mappings(cache) if m.registration_ends]
    assert 0 < asked <= sum(ends) <= 1.05 * asked


@given(st.lists(st.integers(1, 3 << 20), min_size=1, max_size=12))
def test_huge_pages_go_only_where_little_is_wasted(sizes):
    """Every byte of advised pages beyond the used ones is waste; at most one part in 32."""
    mapping_end, advised, used = 64 << 20, 0, 0
    for size in sizes:
        used += size
        advised = max(advised, SegmentStack._huge_end(used, used))
        assert advised % HUGE_PAGE_BYTES == 0
        assert advised - used <= used / 32
        assert used - advised < HUGE_PAGE_BYTES, "whole huge pages stay small"
    assert advised <= mapping_end


def test_huge_pages_are_never_advised_beyond_the_mapping(monkeypatch):
    calls, real = [], memory._libc.madvise
    monkeypatch.setattr(memory._libc, "madvise", lambda *call: calls.append(call) or real(*call))
    mapping = Mapping(PAGE_BYTES, (64, None))
    mapping.advise_huge(HUGE_PAGE_BYTES)
    assert all(
        mapping._base <= start and start + size <= mapping._base + mapping._mapped_bytes
        for start, size, _ in calls
    )
    assert calls[-1][:2] == (mapping.address, PAGE_BYTES)
    mapping.unmap()


def test_nothing_is_committed_before_it_is_written():
    cache = build(PartitionSpec(geometry=REALISTIC, batch_size=4, max_tokens=None))
    cache.reserve(500_000)
    assert sum(mapping.resident_bytes() for mapping in mappings(cache)) == 0
    new = torch.zeros(4, 4, 256, 128, dtype=torch.bfloat16)
    cache.append(0, new, new)
    cache.flush(0)
    assert [m.num_bytes >= 500_000 // 256 * 4 * 256 * 2048 for m in mappings(cache)] == [True]
    assert sum(m.resident_bytes() for m in mappings(cache)) <= 1.05 * 4 * 256 * 2048


# Life


def process_state():
    gc.collect()
    lines = Path("/proc/self/maps").read_text().count("\n")
    return psutil.Process().memory_info().rss, lines


@pytest.mark.parametrize("shared", [True, False], ids=["one pool", "own pools"])
def test_1000_create_use_drop_cycles_are_flat(shared):
    cut = PartitionSpec(geometry=REALISTIC, batch_size=1, max_tokens=None, window_size=64)
    cut_2 = PartitionSpec(geometry=REALISTIC, batch_size=2, max_tokens=None, window_size=64)
    pool = RegionPool() if shared else None
    new = torch.zeros(2, 4, 200, 128, dtype=torch.bfloat16)

    def cycle(i):
        rows = 2 if i % 10 == 9 else 1
        cache = build(cut_2 if rows == 2 else cut, pool=pool)
        for layer_idx in range(2):
            cache.append(layer_idx, new[:rows], new[:rows])
            cache.views(layer_idx)
            cache.flush(layer_idx)
        if i % 3 == 0:
            cache.reorder(torch.arange(rows))
            cache.crop(100)

    for i in range(40):
        cycle(i)
    rss, lines = process_state()
    for i in range(1000):
        cycle(i)
    rss_after, lines_after = process_state()
    assert rss_after - rss < 4 << 20  # one leaked cycle in ten would be 40 MiB
    assert lines_after - lines < 20


def test_a_live_view_keeps_its_mapping_readable():
    cache = build(share=0.5)
    twin = Twin(cache)
    twin.append(17)
    held = [part for part in cache.views(0).parts if part.positions[0] % 4 == 0]
    contents = [(part.key.clone(), part.value.clone()) for part in held]
    addresses = [mapping.address for mapping in mappings(cache)]
    keys = [(part.key, part.value) for part in held]
    pool = cache._pool
    cache.close("over")
    pool.close()
    del cache, twin, pool, held
    gc.collect()
    other = build(share=0.5)  # would take over memory that was freed too early
    Twin(other).append(17)
    for (key, value), (old_key, old_value) in zip(keys, contents, strict=True):
        assert same_bits(key.contiguous(), old_key.contiguous())
        assert same_bits(value.contiguous(), old_value.contiguous())
    del keys, key, value, other
    gc.collect()
    assert not any(mapped(address) for address in addresses)


def test_a_dead_cache_leaves_no_mapping_behind():
    cache = build()
    Twin(cache).append(30)
    addresses = [mapping.address for mapping in mappings(cache)]
    accelerator = cache.accelerator
    assert all(mapped(address) for address in addresses)
    assert accelerator.registered
    del cache
    gc.collect()
    assert not any(mapped(address) for address in addresses)
    assert not accelerator.registered


def test_registrations_end_strictly_before_the_mapping(monkeypatch):
    events = []
    real_unregister, real_munmap = SimulatedAccelerator.unregister, memory._libc.munmap
    monkeypatch.setattr(
        SimulatedAccelerator,
        "unregister",
        lambda self, address: events.append("unregister") or real_unregister(self, address),
    )
    monkeypatch.setattr(
        memory._libc,
        "munmap",
        lambda base, size: (
            events.append(("unmap", len(accelerator.registered))) or real_munmap(base, size)
        ),
    )
    cache = build(spec(geometry(num_layers=1)), share=0)
    accelerator = cache.accelerator
    Twin(cache).append(30)
    cache.close("over")
    del cache
    gc.collect()
    assert events[0] == "unregister"
    assert events[-1] == ("unmap", 0)


def test_a_pool_gives_the_next_cache_the_same_registered_mappings():
    pool = RegionPool()
    first = build(pool=pool)
    Twin(first).append(30)
    addresses = {mapping.address: list(mapping.registration_ends) for mapping in mappings(first)}
    del first
    gc.collect()
    assert pool.idle_bytes() > 0
    second = build(pool=pool)
    twin = Twin(second)
    twin.append(30)
    twin.check()
    again = {mapping.address: list(mapping.registration_ends) for mapping in mappings(second)}
    assert again == addresses
    assert not addresses.keys() & second.accelerator.registered.keys(), "registered again"
    assert pool.idle_bytes() == 0


def test_idle_mappings_of_another_size_are_given_back():
    pool = RegionPool()
    first = build(spec(window_size=4), pool=pool)
    Twin(first).append(30)
    addresses = [mapping.address for mapping in mappings(first)]
    accelerator = first.accelerator
    del first
    second = build(spec(geometry(head_dim=8), window_size=8), pool=pool)
    Twin(second).append(30)
    assert not accelerator.registered
    assert {m.address for m in pool._mappings} == {m.address for m in mappings(second)}
    assert not any(mapped(a) for a in set(addresses) - {m.address for m in mappings(second)})


def test_mappings_registered_with_one_kind_of_device_are_not_anothers():
    pool = RegionPool()
    simulated = pool.lease(4096, 64, SimulatedAccelerator()).mapping
    other = SimpleNamespace(device=torch.device("cuda", 0))
    assert pool.lease(4096, 64, other).mapping is not simulated
    assert pool.lease(4096, 64, SimulatedAccelerator()).mapping is simulated


def test_closing_a_pool_frees_what_is_idle_and_later_what_comes_back():
    pool = RegionPool()
    idle, busy = build(pool=pool), build(pool=pool)
    Twin(idle).append(30)
    twin = Twin(busy)
    twin.append(30)
    idle_addresses = [mapping.address for mapping in mappings(idle)]
    busy_addresses = [mapping.address for mapping in mappings(busy)]
    del idle
    pool.close()
    assert not any(mapped(address) for address in idle_addresses)
    twin.append(9)
    twin.check()
    busy_addresses += [mapping.address for mapping in mappings(busy)]
    del busy, twin
    gc.collect()
    assert not any(mapped(address) for address in busy_addresses)


def test_mappings_are_not_inherited_by_a_fork():
    cache = build()
    Twin(cache).append(30)
    for mapping in mappings(cache):
        smaps = Path("/proc/self/smaps").read_text().split("\n")
        inside, flags = False, None
        for line in smaps:
            fields = line.split()
            if fields and "-" in fields[0] and not fields[0].endswith(":"):
                start, end = (int(part, 16) for part in fields[0].split("-"))
                inside = start <= mapping.address < end
            elif inside and line.startswith("VmFlags:"):
                flags = fields[1:]
        assert flags is not None
        assert "dc" in flags
        assert "nr" in flags, "reserves memory that nobody has written"


def run_script(body):
    prelude = (
        "import sys; sys.path.insert(0, 'tests'); from harness import *; import os, gc\n"
        "from sparsekv.regions import RegionPool\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(body)],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_forked_child_gets_an_error_and_harms_nobody():
    result = run_script(
        """
        import ctypes, mmap
        from sparsekv.errors import CacheStateError
        from sparsekv.regions import memory

        cache = build()
        twin = Twin(cache)
        twin.append(30)
        address = cache._layers[0].stacks["pinned"].leases[0].mapping.address
        pid = os.fork()
        if pid == 0:
            refused = 0
            for use in (lambda: cache.views(0), lambda: cache.num_tokens, lambda: cache.crop(1),
                        lambda: cache.append(0, *new_tokens(cache, 1)), lambda: cache.stats(),
                        cache.reset, lambda: cache.save("/tmp/never")):
                try:
                    use()
                except CacheStateError as error:
                    assert "fork" in str(error)
                    refused += 1
            # The child's own memory at the parent's address must outlive the cache.
            fixed = 0x10
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
            own = memory._libc.mmap(address, 4096, 3, flags, -1, 0)
            assert own == address
            cache.accelerator.unregister = None  # must not be called
            del twin, cache
            gc.collect()
            ctypes.memset(address, 7, 4096)
            os._exit(refused)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        twin.check()
        twin.append(9)
        twin.check()
        print("fine")
        """
    )
    assert result.stdout == "fine\n", result.stderr


def test_a_forked_child_leaves_its_parents_idle_mappings_alone():
    result = run_script(
        """
        pool = RegionPool()
        idle = build(pool=pool)
        Twin(idle).append(30)
        del idle
        gc.collect()
        assert pool.idle_bytes() > 0
        pid = os.fork()
        if pid == 0:
            twin = Twin(build(pool=pool))
            twin.append(30)
            twin.check()
            os._exit(7)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        twin = Twin(build(pool=pool))
        twin.append(30)
        twin.check()
        registered = sum(twin.cache.accelerator.registered.values())
        assert registered == twin.cache.registrar.buffer_bytes, "the parent still has its mappings"
        print("fine")
        """
    )
    assert result.stdout == "fine\n", result.stderr


def test_the_interpreter_ends_while_pages_are_committed_ahead():
    result = run_script(
        """
        from sparsekv.format import KVGeometry, PartitionSpec

        kv = KVGeometry(num_layers=2, num_kv_heads=8, head_dim=128)
        cache = build(PartitionSpec(geometry=kv, batch_size=8, max_tokens=None), 0)
        real = type(cache.accelerator).unregister
        cache.accelerator.unregister = lambda address: (
            real(cache.accelerator, address), print(len(cache.accelerator.registered))
        )
        key = torch.zeros(8, 8, 500, 128, dtype=torch.bfloat16)
        for layer_idx in range(2):
            cache.append(layer_idx, key, key)
            cache.flush(layer_idx)
        for _ in range(2):
            cache.register_ahead(0)
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("0\n"), "left registered"
    assert result.stderr == ""


def test_addresses_that_the_system_refuses_are_a_capacity_error():
    result = run_script(
        """
        import resource
        from sparsekv.errors import CapacityError

        from sparsekv.regions import memory

        os.environ["SPARSEKV_HOST_MEMORY"] = "1000TiB"
        memory.control_groups.memory_left = lambda: None
        cache = build(spec(geometry(head_dim=256, num_kv_heads=8)))
        twin = Twin(cache)
        twin.append(3)
        cache.reserve(10_000_000)
        limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (64 << 30, limit[1]))
        try:
            twin.append(1)
        except CapacityError as error:
            assert "reserving" in str(error) and "ulimit -v" in str(error), error
        else:
            raise AssertionError("not refused")
        twin.check()
        resource.setrlimit(resource.RLIMIT_AS, limit)
        cache.flush(0)
        twin.append(1, layers=[1])
        twin.check()
        twin.append(9)
        twin.check()
        print("fine")
        """
    )
    assert result.stdout == "fine\n", result.stderr


# Registrations


def slots_of(stack):
    """(start, end) of every slot, by address."""
    found = []
    for run in stack._runs:
        base = run.lease.mapping.address + run.start
        found += [(base + i * run.stride, base + (i + 1) * run.stride) for i in range(run.count)]
    return found


def assert_slots_are_sound(stack, accelerator, contents):
    slots = slots_of(stack)
    assert len(slots) == len(stack) == len(contents)
    assert all(a[1] <= b[0] or b[1] <= a[0] for i, a in enumerate(slots) for b in slots[:i])
    ranges = [(start, start + size) for start, size in accelerator.registered.items()]
    for run in stack.runs():
        start = run.data_ptr()
        end = start + (len(run) - 1) * run.stride(0) * run.element_size() + run[0].nbytes
        assert any(low <= start and end <= high for low, high in ranges), "crosses a registration"
    for slot, (rows, number) in enumerate(contents):
        segment = stack.segment(slot)
        assert segment.shape[0] == rows
        assert (segment == number).all(), f"slot {slot} was overwritten"


@pytest.mark.parametrize("kind", ["tiny", "page", "odd"])
@settings(max_examples=25)
@given(data=st.data())
def test_slots_never_cross_a_registration(kind, data):
    kv = {
        "tiny": geometry(num_kv_heads=1),
        "page": geometry(num_kv_heads=2, head_dim=128),
        "odd": geometry(num_kv_heads=3, head_dim=37),
    }[kind]
    pool, accelerator = RegionPool(), CheckedAccelerator()
    for _ in range(2):  # the second stack gets the first one's mappings, as they were left
        stack, contents = PinnedStack(pool, kv, 4, Registrar(accelerator)), []
        stack.reserved_segments = data.draw(st.sampled_from([1, 3, 16]))
        number = 0
        for name, amount, rows in data.draw(stack_operations()):
            if name == "push":
                stack.push(amount, rows)
                for slot in range(len(contents), len(contents) + amount):
                    number += 1
                    stack.segment(slot).fill_(number)
                    contents.append((rows, number))
            else:
                length = int(len(contents) * amount)
                stack.truncate(length)
                del contents[length:]
            assert_slots_are_sound(stack, accelerator, contents)
        assert sum(accelerator.registered.values()) <= sum(m.num_bytes for m in pool._mappings)
        del stack
        gc.collect(0)
    pool.close()
    assert not accelerator.registered


@pytest.mark.parametrize("limit", range(4))
def test_a_refused_registration_leaves_the_stack_as_before(limit):
    accelerator = CheckedAccelerator(limit)
    stack = PinnedStack(RegionPool(), geometry(head_dim=128), 4, Registrar(accelerator))
    stack.reserved_segments = 2
    for number in range(limit):
        stack.push(1, 2)
        stack.segment(number).fill_(number)
    before = slots_of(stack)
    for amount in (1, 5):
        with pytest.raises(CapacityError, match="refused"):
            stack.push(amount, 2)
    assert slots_of(stack) == before
    assert len(accelerator.registered) == limit
    accelerator.limit = None
    stack.push(5, 2)
    assert slots_of(stack)[:limit] == before
    assert all((stack.segment(number) == number).all() for number in range(limit))


def test_a_registration_interrupted_when_it_was_done_is_undone():
    class Interrupted(CheckedAccelerator):
        def register(self, address, num_bytes):
            super().register(address, num_bytes)
            if len(self.registered) == 2:
                raise KeyboardInterrupt

    accelerator = Interrupted()
    mapping = Mapping(8 * PAGE_BYTES, (64, "cpu"))
    mapping.register(accelerator, PAGE_BYTES)
    with pytest.raises(KeyboardInterrupt):
        mapping.register(accelerator, 3 * PAGE_BYTES)
    assert mapping.registration_ends == [PAGE_BYTES]
    assert list(accelerator.registered) == [mapping.address]
    mapping.unmap()
    assert not accelerator.registered
