"""Steps whose launches are prepared: the same attention, whatever has changed since they were."""

import contextlib
import gc
import weakref
from contextlib import nullcontext

import prepared_ops
import pytest
import torch
from harness import (
    Twin,
    accelerators,
    build,
    geometry,
    new_tokens,
    regions,
    seconds_to_synchronize,
    spec,
)
from simulated_streams import ACCELERATORS, BusyCaller
from test_step import TOLERANCE, assert_attends, assert_redone_after_ctrl_c, whole

from sparsekv.attention import HostCalls, decode
from sparsekv.attention.host_jobs import HostJobs
from sparsekv.cache import InplaceKVCache
from sparsekv.device import SimulatedAccelerator, SimulatedStream, cuda
from sparsekv.engine import attend
from sparsekv.errors import CacheStateError
from sparsekv.kernels import dispatch
from sparsekv.kernels.dispatch import PreparedAttentionJob
from sparsekv.regions import PingPong, ping_pong, window
from sparsekv.regions.outbox import Outbox
from sparsekv.regions.pinned import CHUNK_BYTES
from sparsekv.transfer import in_place

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


second_gpu = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second CUDA device")


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=gpu),
        pytest.param("cuda:1", marks=[pytest.mark.gpu, second_gpu]),
    ]
)
def device(request):
    """Another one than the current one, too."""
    return request.param


@pytest.fixture(autouse=True)
def _prepared(request, monkeypatch):
    if dispatch.attention_jobs() is None:
        pytest.skip("no native library")
    is_on_device = "device" in request.fixturenames and request.getfixturevalue("device") != "cpu"
    if is_on_device or request.node.get_closest_marker("gpu"):
        return
    for module in (decode, in_place, window):
        monkeypatch.setattr(module, "decode_ops_for", lambda device: prepared_ops)


@pytest.fixture
def only_prepared(monkeypatch):
    """From `begin` on, whatever is attended to was prepared for."""

    def begin():
        def refuse(*args, **kwargs):
            raise AssertionError("attended to by split attention")

        monkeypatch.setattr("sparsekv.engine.step.split_attention", refuse)

    return begin


def steps(twin, count):
    for _ in range(count):
        twin.append(1, flush=False)
        assert_attends(twin, 1)


@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", ACCELERATORS.values(), ids=ACCELERATORS)
def test_steps_equal_attention_to_the_whole(share, dtype, make):
    latent = geometry(num_kv_heads=1, head_dim=9, head_dim_v=8, shared_kv=True, dtype=dtype)
    for kv in (geometry(dtype=dtype), geometry(dtype=dtype, head_dim_v=7), latent):
        with accelerators(make):
            twin = Twin(build(spec(kv), share))
            twin.append(17)
            steps(twin, 14)
            twin.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_the_second_step_on_all_is_prepared(device, dtype, only_prepared):
    twin = Twin(build(spec(geometry(head_dim=16, dtype=dtype)), share=0.5, device=device))
    twin.append(30)
    steps(twin, 1)
    only_prepared()
    steps(twin, 40)
    twin.check()
    assert {"unpinned", "pinned"} < set(regions(twin.cache))


class _StreamWithoutFlags(SimulatedStream):
    def write_flag(self, flag, value):
        raise AssertionError("this device has no flags")

    wait_flag = write_flag


class _WithoutFlags(SimulatedAccelerator):
    has_flags = False

    def current_stream(self):
        return _StreamWithoutFlags(self)

    new_stream = current_stream


@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_flags_the_caller_waits_for_the_cpu(device, share, dtype, monkeypatch):
    """And attention is the same, in steps of one token and of several, while windows leave."""
    monkeypatch.setattr(cuda, "_flags_work", {0: False, 1: False})
    with accelerators(_WithoutFlags) if device == "cpu" else nullcontext():
        twin = Twin(build(spec(geometry(dtype=dtype)), share, device=device))
    twin.append(17)
    for num_tokens in (1, 1, 3, *[1] * 14):
        twin.append(num_tokens, flush=False)
        assert_attends(twin, num_tokens)
    twin.check()
    assert isinstance(twin.cache.companion.host, HostCalls)
    assert twin.cache.registrar.flags is None


def test_what_stays_is_prepared_once():
    twin = Twin(build(spec(window_size=64, block_size=4), share=0.5))
    twin.append(129)
    steps(twin, 3)
    counts = prepared_ops.PreparedAttention.count, prepared_ops.PreparedAppend.count
    steps(twin, 50)
    assert counts == (prepared_ops.PreparedAttention.count, prepared_ops.PreparedAppend.count)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("evicts", [False, True], ids=["", "evicting"])
@pytest.mark.parametrize("reads_in_place", [True, False], ids=["in place", "copies"])
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_step_on_cuda_waits_for_nothing_and_takes_no_memory(share, reads_in_place, evicts):
    """All of it is enqueued while the device sleeps."""
    twin = Twin(build(spec(geometry(num_layers=8), window_size=16), share, device="cuda"))
    twin.cache.reads_in_place = reads_in_place
    twin.append(74 if evicts else 72)
    steps(twin, 5)
    layers = range(8)
    new = [new_tokens(twin.cache, 1) for _ in layers]
    queries = torch.randn(8, 2, 4, 1, 4, device="cuda")
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["num_device_alloc"]
    num_placed = twin.cache.num_placed_tokens
    torch.cuda._sleep(1_000_000_000)  # about half a second
    awake = torch.cuda.Event()
    awake.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = []
        for layer_idx in layers:
            twin.cache.append(layer_idx, *new[layer_idx])
            found.append(attend(twin.cache, layer_idx, queries[layer_idx], 0.3))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not awake.query()
    assert torch.cuda.memory_stats()["num_device_alloc"] == allocations
    assert (twin.cache.num_placed_tokens > num_placed) is evicts
    for layer_idx in layers:
        twin.note(layer_idx, *new[layer_idx])
        expected = whole(twin, layer_idx, queries[layer_idx], 0.3)
        torch.testing.assert_close(found[layer_idx], expected, atol=1e-5, rtol=1e-5)
    twin.check()


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_steps_register_a_chunk_ahead_of_need_at_most(device, share, monkeypatch, only_prepared):
    """Nothing where a query is attended to, nor where a window leaves."""
    twin = Twin(build(spec(geometry(head_dim=128), window_size=8), share, device=device))
    cache, ahead, sizes, allowed = twin.cache, InplaceKVCache.register_ahead, [], []
    query = torch.randn(2, 4, 1, 128, device=device)

    def steps_of(count):
        for _ in range(count):
            twin.append(1, flush=False)
            for layer_idx in (0, 1):
                attend(cache, layer_idx, query, 0.3)

    twin.append(30)
    steps_of(2)
    register = cache.accelerator.register

    def note(address, num_bytes):
        assert allowed, f"{num_bytes} bytes in the middle of a step"
        sizes.append(num_bytes)
        register(address, num_bytes)

    def note_ahead(cache, layer_idx):
        count = len(sizes)
        allowed.append(layer_idx)
        ahead(cache, layer_idx)
        allowed.pop()
        assert len(sizes) <= count + 1

    monkeypatch.setattr(cache.accelerator, "register", note)
    monkeypatch.setattr(InplaceKVCache, "register_ahead", note_ahead)
    only_prepared()
    steps_of(200)
    assert bool(sizes) is (share < 1)
    assert max(sizes, default=0) <= CHUNK_BYTES
    twin.check()


@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("make", ACCELERATORS.values(), ids=ACCELERATORS)
def test_rows_and_length_may_change_however_late_copies_are(share, make):
    with accelerators(make):
        change_rows_and_length(Twin(build(share=share)))


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_rows_and_length_may_change_between_steps(share, device):
    change_rows_and_length(Twin(build(share=share, device=device)))


def change_rows_and_length(twin):
    twin.append(30)
    steps(twin, 3)
    for rows in ([1, 0], [0, 0, 1], [2, 1]):
        twin.cache.batch_select_indices(torch.tensor(rows))
        twin.apply(lambda tensor, rows=rows: tensor[rows])
        steps(twin, 7)
    for kept in (41, 40, 33, 2):
        twin.cache.crop(kept)
        twin.apply(lambda tensor, kept=kept: tensor[:, :, :kept])
        steps(twin, 3)
    twin.append(9, flush=False)
    assert_attends(twin, 9)
    steps(twin, 3)
    twin.check()


def test_queries_and_masks_of_other_kinds_come_between(device):
    twin = Twin(build(share=0.5, device=device))
    twin.append(30)
    for _ in range(3):
        steps(twin, 3)
        twin.append(1, flush=False)
        assert_attends(twin, 1, group_size=3)
        twin.append(1, flush=False)
        key_mask = torch.rand(2, twin.cache.num_tokens, device=device) < 0.7
        assert_attends(twin, 1, key_mask=key_mask)
        twin.append(1, flush=False)
        query = torch.randn(2, 1, 4, 4, device=device).transpose(1, 2)
        for layer_idx in range(2):
            found = attend(twin.cache, layer_idx, query, 0.7)
            torch.testing.assert_close(found, whole(twin, layer_idx, query, 0.7))


def test_results_are_not_written_again(device, only_prepared):
    twin = Twin(build(share=0.5, device=device))
    twin.append(30)
    steps(twin, 2)
    only_prepared()
    answers = []
    for _ in range(6):
        twin.append(1, flush=False)
        query = torch.randn(2, 4, 1, 4, device=device)
        answers += [(attend(twin.cache, i, query, 0.3), whole(twin, i, query, 0.3)) for i in (0, 1)]
    for found, expected in answers:
        torch.testing.assert_close(found, expected, atol=TOLERANCE[torch.float32], rtol=1e-5)


def test_the_same_bytes_are_counted(monkeypatch):
    """And those that are there already for the step to come."""
    crossed = set()
    for is_prepared, reads_in_place in ((True, True), (True, False), (False, True)):
        torch.manual_seed(0)
        twin = Twin(build(share=0.3))
        twin.cache.reads_in_place = reads_in_place
        twin.append(42)
        with monkeypatch.context() as patch:
            if not is_prepared:
                patch.setattr(decode, "decode_ops_for", lambda device: None)
            steps(twin, 6)
        ahead = sum(loaded.view.num_tokens for loaded in twin.cache.ping_pong._ahead)
        assert (ahead > 0) is is_prepared
        waiting = ahead * 2 * twin.cache.spec.geometry.bytes_per_token_per_layer
        crossed.add(twin.cache.stats().h2d_bytes - waiting)
    assert len(crossed) == 1


# Chunks read ahead


@pytest.fixture
def taken(monkeypatch):
    """Chunks that were taken from the ping-pong buffers."""
    chunks = []
    take = PingPong.take
    monkeypatch.setattr(PingPong, "take", lambda *args: chunks.append(args[1]) or take(*args))
    return chunks


@pytest.mark.parametrize("ping_pong_tokens", [4, 8, 64])
@pytest.mark.parametrize("make", ACCELERATORS.values(), ids=ACCELERATORS)
def test_the_first_chunks_of_every_layer_are_there_before_its_query(make, ping_pong_tokens, taken):
    with accelerators(make):
        twin = Twin(build(spec(ping_pong_tokens=ping_pong_tokens), share=0.5))
        twin.append(28)
        steps(twin, 2)
        taken.clear()
        steps(twin, 1)
        pinned = [twin.cache.parts(layer_idx).pinned for layer_idx in (0, 1)]
        num_tokens = sum(view.num_tokens for view in pinned[0])
        num_chunks = min(2, -(-num_tokens // ping_pong_tokens))
        assert [chunk.index for chunk in taken] == 2 * list(range(num_chunks))
        assert all(chunk.owner is pinned[i // num_chunks] for i, chunk in enumerate(taken))


@pytest.mark.parametrize("ping_pong_tokens", [4, 8, 64])
@pytest.mark.parametrize("make", ACCELERATORS.values(), ids=ACCELERATORS)
def test_where_nothing_is_read_in_place_every_chunk_is_taken(
    make, ping_pong_tokens, taken, monkeypatch
):
    """Two at a time are under way: the next one is copied meanwhile."""
    num_loaded, take = [], PingPong.take
    monkeypatch.setattr(
        PingPong, "take", lambda *args: num_loaded.append(len(args[0]._ahead)) or take(*args)
    )
    with accelerators(make):
        twin = Twin(build(spec(ping_pong_tokens=ping_pong_tokens), share=0.5))
    twin.cache.reads_in_place = False
    twin.append(60)
    steps(twin, 2)
    for _ in range(6):
        num_tokens = sum(view.num_tokens for view in twin.cache.parts(0).pinned)
        num_chunks = -(-num_tokens // ping_pong_tokens)
        taken.clear(), num_loaded.clear()
        steps(twin, 1)
        assert [chunk.index for chunk in taken] == 2 * list(range(num_chunks))
        assert num_loaded == 2 * [*[2] * (num_chunks - 1), 1]
    twin.check()


@pytest.mark.parametrize("reads_ahead", [True, False])
def test_copies_of_all_of_it_give_the_same(device, only_prepared, reads_ahead):
    twin = Twin(build(share=0.3, device=device))
    twin.cache.reads_in_place = False
    twin.append(58)
    steps(twin, 2)
    twin.cache.companion.reads_ahead = reads_ahead
    only_prepared()
    steps(twin, 14)
    twin.cache.companion.reads_in_place = True
    twin.append(1, flush=False)
    assert twin.cache.companion._layers == {}


@pytest.mark.parametrize("make", ACCELERATORS.values(), ids=ACCELERATORS)
def test_copies_of_all_of_it_follow_rows_and_length(make):
    with accelerators(make):
        twin = Twin(build(share=0.3))
        twin.cache.reads_in_place = False
        change_rows_and_length(twin)


def test_both_chunks_wait_once_and_lie_where_they_lay(monkeypatch):
    """In steps between which nothing is evicted."""
    twin = Twin(build(spec(window_size=16, ping_pong_tokens=16), share=0))
    twin.append(98)
    steps(twin, 4)
    waits, wait = [], SimulatedStream.wait
    monkeypatch.setattr(ping_pong, "split_elements", None)
    monkeypatch.setattr(SimulatedStream, "wait", lambda *args: waits.append(args) or wait(*args))
    steps(twin, 6)
    copying = [stream for stream, _ in waits if stream is twin.cache.ping_pong._stream]
    assert len(copying) == 6 * twin.cache.spec.geometry.num_layers


def test_a_chunk_goes_to_buffers_that_have_grown():
    twin = Twin(build(share=0))
    twin.append(30)
    buffers, pinned = twin.cache.ping_pong, twin.cache.views(0).pinned
    chunk = next(buffers.chunks(pinned))
    buffers.load(chunk)
    buffers.take(chunk)
    old, buffers._buffers = buffers._buffers, None  # as for more rows
    buffers.load(chunk)
    view = buffers.take(chunk)
    assert view.key.data_ptr() in {buffer.data_ptr() for buffer in buffers._buffers}
    assert view.key.data_ptr() not in {buffer.data_ptr() for buffer in old}
    buffers.synchronize()
    assert torch.equal(view.key, chunk.view.key)


def test_nothing_is_read_ahead_of_rows_that_moved(taken):
    twin = Twin(build(share=0.5))
    twin.append(29)
    twin.cache.batch_select_indices(torch.tensor([1, 0]))
    twin.apply(lambda tensor: tensor[[1, 0]])
    steps(twin, 6)
    assert taken == []
    assert twin.cache.ping_pong.num_bytes == 0


def test_what_was_read_ahead_is_dropped_when_segments_are(taken):
    """Those that come in their place lie in the same memory."""
    twin = Twin(build(share=0))
    twin.append(29)
    steps(twin, 3)
    twin.cache.crop(2)
    twin.apply(lambda tensor: tensor[:, :, :2])
    twin.append(27)
    taken.clear()
    steps(twin, 1)
    assert taken == []
    steps(twin, 5)
    assert taken
    twin.check()


# Failures


def test_a_cancelled_job_gives_nan_and_an_error_at_the_next_step(device, monkeypatch):
    twin = Twin(build(share=0.5, device=device))
    twin.append(30)
    steps(twin, 2)
    submit = PreparedAttentionJob.submit

    def submit_in_vain(*args):
        job = submit(*args)
        job.cancel()
        return job

    query = torch.randn(2, 4, 1, 4, device=device)
    twin.append(1, flush=False)
    with monkeypatch.context() as patch:
        patch.setattr(PreparedAttentionJob, "submit", submit_in_vain)
        assert attend(twin.cache, 0, query, 0.3).isnan().all()
    with pytest.raises(CacheStateError, match="cancelled"):
        attend(twin.cache, 1, query, 0.3)
    assert_attends(twin, 1)
    steps(twin, 3)


@pytest.mark.parametrize("stride", [23, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reads_in_place", [True, False])
def test_ctrl_c_at_any_line_of_a_step_leaves_it_to_be_done_again(stride, reads_in_place, device):
    """And a device that comes to rest within a second."""
    twin = Twin(build(spec(window_size=8, batch_size=1), share=0.5, device=device))
    twin.cache.reads_in_place = reads_in_place
    twin.append(57)
    steps(twin, 2)
    query = torch.randn(1, 4, 1, 4, device=device)
    assert_redone_after_ctrl_c(twin, query, stride)


class Stop(Exception):
    pass


POINTS = {
    "query stored": lambda cache: (cache.companion._ops.PreparedAppend, "__call__"),
    "job submitted": lambda cache: (PreparedAttentionJob, "submit"),
    "flag written": lambda cache: (type(cache.accelerator.current_stream()), "write_flag"),
    "attention launched": lambda cache: (cache.companion._ops.PreparedAttention, "__call__"),
    "chunk taken": lambda cache: (PingPong, "take"),
    "chunks loaded": lambda cache: (PingPong, "load"),
    "flag awaited": lambda cache: (type(cache.accelerator.current_stream()), "wait_flag"),
    "merged": lambda cache: (cache.companion._ops.PreparedMerge, "__call__"),
    "results taken": lambda cache: (HostJobs, "take"),
    "window sent": lambda cache: (Outbox, "send"),
    "flushed": lambda cache: (InplaceKVCache, "flush"),
    "registered ahead": lambda cache: (InplaceKVCache, "register_ahead"),
}
"""What a step calls, in order: (owner, name)."""


@contextlib.contextmanager
def broken(point, is_after, error):
    """Whoever comes to a point of a step raises there, before it or after it."""
    owner, name = point
    real = getattr(owner, name)

    def fail(*args, **kwargs):
        if is_after:
            real(*args, **kwargs)
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield


def seconds_to_rest(accelerator):
    """Until the caller's stream has done what it was given."""
    if accelerator.device.type == "cuda":
        return seconds_to_synchronize()
    seconds = seconds_to_synchronize(accelerator.busy.synchronize)
    accelerator.is_busy = False
    return seconds


@pytest.mark.parametrize("error", [Stop(), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_a_step_that_breaks_at_a_point_can_be_done_again(device, point, is_after, error):
    """In each step of a window, the one that evicts it too; the device comes to rest at once."""
    with accelerators(BusyCaller) if device == "cpu" else contextlib.nullcontext():
        twin = Twin(build(spec(window_size=8), share=0.5, device=device))
    cache, broke = twin.cache, []
    cache.reads_in_place = not point.startswith("chunk")
    twin.append(57)
    steps(twin, 2)
    for i in range(9):
        twin.append(1, flush=False)
        query = torch.randn(2, 4, 1, 4, device=device)
        expected = [whole(twin, layer_idx, query, 0.3) for layer_idx in (0, 1)]
        with broken(POINTS[point](cache), is_after, error):
            cache.accelerator.is_busy = True
            try:
                attend(cache, 0, query, 0.3)
            except type(error):
                broke.append(i)
            assert seconds_to_rest(cache.accelerator) < 1.0
        for layer_idx in (0, 1) if i % 2 else (1, 0):
            found = attend(cache, layer_idx, query, 0.3)
            torch.testing.assert_close(found, expected[layer_idx], atol=1e-5, rtol=1e-5)
        twin.check()
    assert broke == ([4] if point == "window sent" else list(range(9)))
    steps(twin, 9)
    twin.check()


# Lifetime


@pytest.mark.parametrize("end", ["reset", "close", "drop"])
def test_nothing_is_held_that_is_let_go_of(end, device):
    twin = Twin(build(share=0.5, device=device))
    twin.append(30)
    steps(twin, 3)
    stacks = twin.cache._layers[0].stacks
    held = [weakref.ref(stacks[name].leases[0]) for name in ("unpinned", "pinned")]
    held += [weakref.ref(window.elements) for window in twin.cache._windows]
    del stacks
    if end == "reset":
        twin.cache.reset()
    elif end == "close":
        twin.cache.close("enough")
        held = held[:2]
    else:
        del twin
    gc.collect()
    assert not any(reference() is not None for reference in held)
