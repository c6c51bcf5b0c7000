"""Registration of the pinned region: ahead of need, in chunks, as much as is asked, and refused."""

import copy
import gc
import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
from harness import (
    Twin,
    build,
    geometry,
    interrupt,
    mappings,
    new_tokens,
    regions,
    spec,
)
from hypothesis import given
from hypothesis import strategies as st
from test_step import assert_attends

import sparsekv.cache as cache_module
from sparsekv.device import SimulatedAccelerator, SimulatedStream
from sparsekv.errors import CapacityError
from sparsekv.format import KVGeometry, PartitionSpec
from sparsekv.regions import PinnedStack, RegionPool, Registrar, pinned, registration
from sparsekv.regions.memory import PAGE_BYTES, Mapping
from sparsekv.regions.pace import Pace

WIDE = geometry(num_kv_heads=2, head_dim=1024)
"""Segments of 4 tokens and 2 rows are 128 KiB: each is worth a registration."""
QWEN3 = KVGeometry(num_layers=4, num_kv_heads=4, head_dim=128)
SEGMENT = 256 * QWEN3.bytes_per_token_per_layer


class WatchedAccelerator(SimulatedAccelerator):
    """Logs registrations, refuses beyond limits, and copies as a DMA engine does: within one
    registration or outside all of them.
    """

    def __init__(self):
        super().__init__()
        self.sizes, self.buffer_sizes = [], []
        self.most_bytes = self.most_at_once = None
        self.num_refused = 0

    def register(self, address, num_bytes):
        for start, size in self.registered.items():
            assert address >= start + size or address + num_bytes <= start, "registered twice"
        total = self.registered_bytes + num_bytes
        if self.most_bytes is not None and total > self.most_bytes:
            self.num_refused += 1
            raise CapacityError("no more may be locked")
        if self.most_at_once is not None and num_bytes > self.most_at_once:
            raise CapacityError("too much at once")
        self.sizes.append(num_bytes)
        super().register(address, num_bytes)

    @property
    def registered_bytes(self):
        return sum(self.registered.values())

    def new_stream(self):
        return WatchedStream(self)

    current_stream = new_stream

    def check_copy(self, host):
        first = host.data_ptr()
        steps = zip(host.shape, host.stride(), strict=True)
        last = first + host.element_size() * (1 + sum((n - 1) * step for n, step in steps))
        touched = [
            (start, start + size)
            for start, size in self.registered.items()
            if start < last and first < start + size
        ]
        assert len(touched) <= 1, "a copy crosses two registrations"
        assert all(start <= first and last <= end for start, end in touched), "half registered"


class WatchedStream(SimulatedStream):
    """Each copy is one that a DMA engine could do."""

    def _to_host(self, host, source):
        self._accelerator.check_copy(host)
        super()._to_host(host, source)

    def _from_host(self, target, host):
        self._accelerator.check_copy(host)
        super()._from_host(target, host)


class FailingAccelerator(SimulatedAccelerator):
    """Its n-th registration raises."""

    def __init__(self, countdown, error):
        super().__init__()
        self.countdown, self.error, self.num_asked = countdown, error, 0

    def register(self, address, num_bytes):
        self.num_asked += 1
        if self.num_asked == self.countdown:
            raise self.error
        super().register(address, num_bytes)


@pytest.fixture
def build_watched(monkeypatch):
    real = Registrar.buffer

    def buffer(registrar, shape, dtype):
        watched = registrar.accelerator
        count = len(watched.sizes)
        made = real(registrar, shape, dtype)
        watched.buffer_sizes += watched.sizes[count:]
        del watched.sizes[count:]
        return made

    monkeypatch.setattr(Registrar, "buffer", buffer)
    monkeypatch.setattr(cache_module, "open_accelerator", lambda device: WatchedAccelerator())
    return build


def cut(max_tokens=None, batch_size=1, kv=QWEN3, **changes):
    return PartitionSpec(geometry=kv, batch_size=batch_size, max_tokens=max_tokens, **changes)


def used_bytes(cache):
    return sum(layer.pinned.used_bytes for layer in cache._layers)


def pinned_bytes(cache):
    """Registered, of the pinned regions."""
    return cache.accelerator.registered_bytes - sum(cache.accelerator.buffer_sizes)


def append(cache, num_tokens):
    """Zeros to each layer; every registration of segments that placing them makes."""
    sizes, kv = cache.accelerator.sizes, cache.spec.geometry
    count = len(sizes)
    new = torch.zeros(cache.batch_size, kv.num_kv_heads, 1, kv.head_dim, dtype=kv.dtype)
    new = new.expand(-1, -1, num_tokens, -1)
    for layer_idx in range(kv.num_layers):
        cache.append(layer_idx, new, new)
        cache.flush(layer_idx)
    return sizes[count:]


def step(cache):
    """Decode one token. The registrations of segments made by placing, and those made ahead."""
    watched = cache.accelerator
    num_buffers = len(watched.buffer_sizes)
    placing, count = append(cache, 1), len(watched.sizes)
    for layer_idx in range(cache.spec.geometry.num_layers):
        before = len(watched.sizes) + len(watched.buffer_sizes)
        cache.register_ahead(layer_idx)
        assert len(watched.sizes) + len(watched.buffer_sizes) <= before + 1, "two in one call"
    assert len(watched.buffer_sizes) <= num_buffers + 1, "two buffers in one step"
    return placing, watched.sizes[count:]


# When


@given(st.data())
def test_layers_take_turns_evenly_and_are_done_before_the_window_is_full(data):
    window_size, num_layers = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 60))
    start, needed = data.draw(st.integers(0, window_size - 1)), data.draw(st.integers(1, 4))
    pace = Pace(0, 1, True, start, needed, needed)
    due = [
        [pace.num_due(fill, window_size, layer_idx, num_layers) for layer_idx in range(num_layers)]
        for fill in range(start, window_size)
    ]
    assert all(count == needed for count in due[-1])
    totals = [0, *map(sum, due)]
    news = [after - before for before, after in itertools.pairwise(totals)]
    last = window_size - window_size // 8
    steps = (last if start < last else window_size) - start
    assert max(news) <= -(-needed * num_layers // steps)
    assert min(news[:steps]) >= needed * num_layers // steps
    assert not any(news[steps:])


@pytest.mark.parametrize("share", [0, 0.3, 0.5])
@pytest.mark.parametrize("reserved", [0, 4096], ids=["unknown", "reserved"])
def test_decoding_registers_ahead_and_never_when_placing(build_watched, share, reserved):
    cache = build_watched(cut(), share)
    if reserved:
        cache.reserve(reserved)
    append(cache, 100)  # the window that is begun is caught up with, evenly too
    for _ in range(4096 - 100):
        placing, ahead = step(cache)
        assert not placing
        assert len(ahead) <= 1, "four layers share at least 100 steps"
    assert used_bytes(cache) > 0
    assert cache.accelerator.buffer_sizes == [SEGMENT] * (4 if share else 0)


def test_a_prompt_is_registered_before_it_is_read(build_watched):
    cache = build_watched(cut(), 0.5)
    cache.reserve(4096, 2000)
    # Seven windows of the prompt, and the eighth, which is begun with it.
    assert pinned_bytes(cache) == 4 * 4 * SEGMENT
    assert len(cache.accelerator.sizes) == 4, "one piece a layer"
    assert len(cache.accelerator.buffer_sizes) == 4, "the way to the other region is made too"
    assert append(cache, 2000) == []
    for _ in range(48):
        assert step(cache) == ([], [])
    assert cache.stats().cpu_share == 0.5
    cache.reserve(4096, 3000)  # the next turn of a chat
    assert pinned_bytes(cache) == 6 * 4 * SEGMENT
    assert append(cache, 3000 - 2048) == []


def test_what_is_registered_at_once_is_bounded(build_watched, monkeypatch):
    monkeypatch.setattr(pinned, "_BULK_BYTES", 5 * SEGMENT)
    cache = build_watched(cut(), 0)
    append(cache, 256 * 12)
    assert cache.accelerator.sizes == [5 * SEGMENT, 5 * SEGMENT, 2 * SEGMENT] * 4
    monkeypatch.setattr(pinned, "CHUNK_BYTES", 2 * SEGMENT)
    cache.reserve(256 * 100)
    ahead = [size for _ in range(256) for size in step(cache)[1]]
    assert ahead
    assert set(ahead) == {2 * SEGMENT}
    monkeypatch.setattr(pinned, "CHUNK_BYTES", SEGMENT - 1)  # a segment is never divided
    ahead = [size for _ in range(1000) for size in step(cache)[1]]
    assert set(ahead) == {SEGMENT}


# How much


@pytest.mark.parametrize("num_tokens", [300, 1_000, 4_000, 20_000])
@pytest.mark.parametrize("prompt_part", [0, 0.5, 1])
@pytest.mark.parametrize("limit", ["reserve", "max_tokens", "none"])
def test_registered_bytes_are_the_bytes_asked_for(build_watched, num_tokens, prompt_part, limit):
    cache = build_watched(cut(num_tokens if limit == "max_tokens" else None), 0.5)
    prompt = int(num_tokens * prompt_part)
    if limit == "reserve":
        cache.reserve(num_tokens, prompt)
    append(cache, prompt)
    for _ in range(prompt, num_tokens, 50):  # 50 tokens at a time, as after long drafts
        append(cache, min(50, num_tokens - cache.num_tokens))
        for layer_idx in range(4):
            cache.register_ahead(layer_idx)
    stats, registered = cache.stats(), pinned_bytes(cache)
    assert stats.registered_bytes == cache.accelerator.registered_bytes
    assert stats.buffer_bytes == sum(cache.accelerator.buffer_sizes) <= 4 * SEGMENT
    asked = used_bytes(cache)
    if limit == "none":
        asked += 4 * SEGMENT  # the window that is being filled
    assert used_bytes(cache) <= registered <= 1.05 * asked
    resident = sum(mapping.resident_bytes() for mapping in mappings(cache))
    committed = stats.host_committed_bytes - stats.buffer_bytes
    assert resident <= committed <= 1.05 * (asked + stats.regions[2].used_bytes)


def test_small_segments_are_registered_together(build_watched):
    kv = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=73, dtype=torch.bfloat16)
    small = cut(kv=kv, window_size=16, block_size=16, ping_pong_tokens=16)
    cache = build_watched(small, 0)
    cache.reserve(16 * 400)
    for _ in range(16 * 400):
        assert step(cache)[0] == []
    assert used_bytes(cache) <= cache.accelerator.registered_bytes <= 1.05 * used_bytes(cache)
    assert max(cache.accelerator.sizes) <= 400 * 16 * kv.bytes_per_token / 4


def test_pages_are_given_back_with_their_registration():
    accelerator, pool = WatchedAccelerator(), RegionPool()
    stack = PinnedStack(pool, geometry(num_kv_heads=2, head_dim=256), 4, Registrar(accelerator))
    stack.reserved_segments = 64
    stack.push(2, 8)
    stack.segment(1).fill_(7)
    before = stack.registered_bytes
    stack.prepare(40, 8)
    (mapping,) = (lease.mapping for lease in stack.leases)
    assert mapping.resident_bytes() == mapping.committed_bytes > before
    stack.release()
    assert stack.registered_bytes == accelerator.registered_bytes == before
    assert mapping.resident_bytes() == before
    assert (stack.segment(1) == 7).all()
    stack.truncate(0)
    stack.release()
    assert stack.registered_bytes == accelerator.registered_bytes == mapping.resident_bytes() == 0


def test_the_longest_registration_is_reported(build_watched, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(registration.time, "perf_counter", lambda: clock.now)
    cache = build_watched(cut(), 0)
    assert cache.stats().longest_registration_s == 0
    assert "at once" not in str(cache.stats())
    real = cache.accelerator.register

    def slow(address, num_bytes):
        clock.now += num_bytes / SEGMENT
        real(address, num_bytes)

    monkeypatch.setattr(cache.accelerator, "register", slow)
    append(cache, 256 * 3)
    append(cache, 256)
    cache.reset()
    append(cache, 256)
    assert cache.stats().longest_registration_s == pytest.approx(3)
    text = str(cache.stats())
    assert "2.00 MiB taken for 2.00 MiB" not in text  # what the first turn left counts
    assert "3,000.0 ms at most at once" in text


# Refused


def assert_sound(twin):
    """Right bytes, every layer alike, and the share that the regions show."""
    twin.check()
    cache = twin.cache
    where = [regions(cache, layer_idx) for layer_idx in range(len(twin.dense))]
    assert all(layer == where[0] for layer in where)
    placed = [name for name in where[0] if name != "window"]
    if placed:
        assert cache.stats().cpu_share == placed.count("unpinned") / len(placed)


def warnings_in(caplog):
    return [r for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize("num_segments", range(12))
@pytest.mark.parametrize("prompt", [0, 30])
def test_segments_without_registered_memory_are_unpinned(
    build_watched, caplog, num_segments, prompt
):
    twin = Twin(build_watched(spec(WIDE), 0.25))
    cache, per_segment = twin.cache, 4 * 2 * WIDE.bytes_per_token_per_layer
    cache.accelerator.most_bytes = num_segments * per_segment
    if prompt:
        cache.reserve(60, prompt)
        twin.append(prompt)
    while cache.num_tokens < 60:
        twin.append(1)
        for layer_idx in range(2):
            cache.register_ahead(layer_idx)
    assert_sound(twin)
    # 15 segments, a quarter of them to the CPU: what two layers can lock is used, once the windows
    # on their way there have buffers, up to four; nothing besides.
    num_pinned = regions(cache).count("pinned") // 4
    num_buffers = len(cache.accelerator.buffer_sizes)
    most = min((num_segments - num_buffers) // 2, 11)
    assert num_pinned <= most if prompt else num_pinned == most
    assert num_buffers <= 4
    assert num_buffers >= min(num_segments, 4) or not prompt
    assert pinned_bytes(cache) == 2 * num_pinned * per_segment
    (warning,) = warnings_in(caplog)
    assert "no more may be locked. Segments that find no registered memory" in warning.message
    cache.accelerator.most_bytes = None
    cache.reserve(200)  # the next turn asks again
    twin.append(100)
    assert_sound(twin)
    assert "pinned" in regions(cache)[60:]
    assert len(warnings_in(caplog)) == 1


def test_pieces_become_smaller_until_the_system_takes_them(build_watched, caplog):
    twin = Twin(build_watched(spec(WIDE), 0))
    per_segment = 4 * 2 * WIDE.bytes_per_token_per_layer
    twin.cache.accelerator.most_at_once = 3 * per_segment
    twin.append(44)
    assert_sound(twin)
    assert twin.cache.stats().cpu_share == 0
    assert sum(twin.cache.accelerator.sizes) == 2 * 11 * per_segment
    assert 1 < len(twin.cache.accelerator.sizes) < 2 * 11
    for part in twin.cache.views(0).pinned:  # as a view is streamed, whole
        twin.cache.accelerator.check_copy(part.key)
    assert not warnings_in(caplog)


def test_a_layer_that_lags_keeps_what_was_decided_for_it(build_watched):
    twin = Twin(build_watched(spec(WIDE), 0))
    per_segment = 4 * 2 * WIDE.bytes_per_token_per_layer
    twin.append(20, layers=[0])  # five segments, for which the other layer has room as well
    assert not twin.cache.accelerator.buffer_sizes
    twin.cache.accelerator.most_bytes = 11 * per_segment
    twin.append(20, layers=[0])
    assert len(twin.cache.accelerator.buffer_sizes) == 1
    assert regions(twin.cache, 0)[::4] == ["pinned"] * 5 + ["unpinned"] * 5
    twin.append(40, layers=[1])
    assert_sound(twin)


@pytest.mark.parametrize("num_pages", range(9))
def test_steps_go_on_where_hardly_anything_may_be_registered(build_watched, caplog, num_pages):
    """Without segments, without some buffers, without all: right, and said once."""
    twin = Twin(build_watched(share=0.5))
    watched = twin.cache.accelerator
    watched.most_bytes = num_pages * PAGE_BYTES
    for length in (30, 1, 1, 9, 1, 1, 1, 1):
        twin.append(length, flush=False)
        key_mask = torch.rand(2, twin.cache.num_tokens) < 0.7
        assert_attends(twin, length)
        assert_attends(twin, length, key_mask=key_mask)
    assert_sound(twin)
    assert len(warnings_in(caplog)) == (watched.num_refused > 0)
    if num_pages == 0:
        assert twin.cache.stats().cpu_share == 1
        assert watched.num_refused < 10, "asked again and again"
    watched.most_bytes = None
    twin.cache.reserve(100, 60)  # the next turn asks again
    twin.append(20, flush=False)
    assert_attends(twin, 20)
    twin.append(20)
    assert_sound(twin)
    assert len(watched.buffer_sizes) >= 6
    assert "pinned" in regions(twin.cache)[44:]
    assert len(warnings_in(caplog)) <= 1


@pytest.mark.parametrize("error", [CapacityError("full"), KeyboardInterrupt(), OSError("lost")])
def test_a_failure_at_any_registration_loses_nothing(monkeypatch, error):
    for countdown in range(1, 30):
        accelerator = FailingAccelerator(countdown, error)
        monkeypatch.setattr(cache_module, "open_accelerator", lambda _, a=accelerator: a)
        twin = Twin(build(spec(WIDE), 0.25))
        monkeypatch.undo()
        for _ in range(46):
            for layer_idx in range(2):
                key, value = new_tokens(twin.cache, 1)
                twin.cache.append(layer_idx, key, value)
                twin.note(layer_idx, key, value)
                for do in (twin.cache.flush, twin.cache.register_ahead):
                    try:
                        do(layer_idx)
                    except type(error):
                        assert not isinstance(error, CapacityError)
                        do(layer_idx)
        assert_sound(twin)
        assert sum(accelerator.registered.values()) == twin.cache.stats().registered_bytes
        if accelerator.num_asked < countdown:
            break
    assert countdown > 12


@pytest.mark.parametrize(
    ("operation", "stride"), [("register_ahead", 97), ("reserve", 211), ("release", 7)]
)
def test_ctrl_c_at_any_line_leaves_nothing_registered_behind(build_watched, operation, stride):
    start = build_watched(spec(geometry(num_kv_heads=2, head_dim=128)), 0.25)
    twin = Twin(start)
    twin.append(10)
    at_line, struck = 1, True
    while struck:
        cache = copy.deepcopy(start)
        accelerator = cache.accelerator
        if operation == "register_ahead":
            struck = interrupt(
                at_line, lambda cache=cache: [cache.register_ahead(i) for i in (0, 1, 0, 1)]
            )
        elif operation == "reserve":
            struck = interrupt(at_line, lambda cache=cache: cache.reserve(100, 80))
        else:
            cache.reserve(100, 80)
            struck = interrupt(
                at_line, lambda cache=cache: [layer.pinned.release() for layer in cache._layers]
            )
        after = Twin(cache)
        after.dense = [list(layer) for layer in twin.dense]
        after.append(1)
        cache.register_ahead(0)
        after.append(20)
        after.check()
        assert accelerator.registered_bytes == cache.stats().registered_bytes
        del cache, after
        gc.collect()
        start._pool.trim()
        assert not accelerator.registered
        at_line += stride
    assert at_line > 3 * stride


# Life


def test_decoding_caches_that_come_and_go_leave_nothing_registered(monkeypatch):
    books = {}
    real = SimulatedAccelerator.unregister
    monkeypatch.setattr(
        SimulatedAccelerator, "register", lambda self, a, n: books.__setitem__(a, n)
    )
    monkeypatch.setattr(
        SimulatedAccelerator, "unregister", lambda self, a: (real(self, a), books.pop(a, None))
    )
    pool, held = RegionPool(), set()
    small = cut(kv=KVGeometry(num_layers=2, num_kv_heads=4, head_dim=128), window_size=64)
    new = torch.zeros(1, 4, 100, 128, dtype=torch.bfloat16)
    for i in range(100):
        cache = build(small, 0.5, pool=pool)
        cache.reserve(200 + i % 3, 100)
        for num_tokens in (100, 30, 30, 30):
            for layer_idx in range(2):
                cache.append(layer_idx, new[:, :, :num_tokens], new[:, :, :num_tokens])
                cache.flush(layer_idx)
                cache.register_ahead(layer_idx)
        del cache
        held.add(sum(books.values()))
    assert len(held) <= 3, "it grows"
    pool.close()
    assert not books


def test_mappings_end_only_after_their_registrations_and_touches():
    accelerator, pool = WatchedAccelerator(), RegionPool()
    lease = pool.lease(64 << 20, 64, accelerator)
    mapping = lease.mapping
    touch = lease.touch(64 << 20)
    pool.close()
    del lease
    touch.wait()
    gc.collect()
    assert mapping not in pool._mappings
    assert mapping not in pool._idle


def test_what_a_broken_off_release_left_does_not_stop_the_next_registration():
    accelerator = WatchedAccelerator()
    mapping = Mapping(16 * PAGE_BYTES, (64, "cpu"))
    for end in (2, 4, 6):
        mapping.register(accelerator, end * PAGE_BYTES)

    class Stuck(Exception):
        pass

    def stuck(address):
        raise Stuck

    accelerator.unregister, real = stuck, accelerator.unregister
    with pytest.raises(Stuck):
        mapping.release(PAGE_BYTES)
    accelerator.unregister = real
    assert mapping.registered_bytes == 2 * PAGE_BYTES
    mapping.register(accelerator, 5 * PAGE_BYTES)
    assert accelerator.registered_bytes == 5 * PAGE_BYTES
    mapping.unmap()
    assert not accelerator.registered
