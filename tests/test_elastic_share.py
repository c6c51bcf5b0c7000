"""The CPU borrows pinned segments in a step: who reads changes, nothing else does."""

import copy
import itertools
import math

import prepared_ops
import pytest
import torch
from harness import Twin, accelerators, build, geometry, new_tokens, regions, same_bits, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from simulated_streams import DelayedAccelerator, LateAccelerator, LateCaller, LateOutbox
from strategies import shares
from test_races import SleepyAccelerator, SleepyCaller
from test_state_machine import CacheMachine
from test_step import TOLERANCE, assert_attends, whole

from sparsekv.attention import DecodeAttention, HostJobs, decode, host_jobs, merge_partials
from sparsekv.attention.host import Question
from sparsekv.cache import InplaceKVCache
from sparsekv.engine import CacheConfig, attend, step
from sparsekv.errors import CacheStateError, LayoutError
from sparsekv.kernels import dispatch
from sparsekv.regions import window
from sparsekv.regions.lending import lend, num_lent
from sparsekv.transfer import in_place

SLOW = [LateAccelerator, DelayedAccelerator, LateOutbox]


@pytest.fixture(params=["through the buffers", "in place", "prepared"])
def way(request, monkeypatch):
    """How the accelerator reads what is left to it."""
    read(request.param, monkeypatch)
    return request.param


def read(way, monkeypatch):
    if way == "prepared":
        for module in (decode, in_place, window):
            monkeypatch.setattr(module, "decode_ops_for", lambda device: prepared_ops)
    else:
        monkeypatch.setattr(step, "reads_in_place", lambda *arguments: way == "in place")


def elastic(spec_=None, placed=0.3, share=0.7):
    """A twin whose steps leave `share` of the placed tokens to the CPU."""
    twin = Twin(build(spec_, placed))
    twin.cache.step_share = share
    return twin


def tokens_of(parts):
    return sum(part.num_tokens for part in parts)


def segments_of(parts):
    """[(position, address, keys, values, row table)] in the order of the parts."""
    found = []
    for part in parts:
        for i, start in enumerate(part.positions.tolist()):
            rows = torch.arange(part.batch_size) if part.row_table is None else part.row_table[i]
            found.append((start, part.key[i].data_ptr(), part.key[i], part.value[i], rows))
    return found


# Which segments


@given(st.integers(0, 40), st.integers(0, 40), shares())
def test_the_cpus_part_is_the_share_to_the_nearest_segment_or_what_is_unpinned(
    num_unpinned, num_pinned, share
):
    count = num_lent(num_unpinned, num_pinned, share)
    assert 0 <= count <= num_pinned
    error = num_unpinned + count - share * (num_unpinned + num_pinned)
    assert error >= -0.5 - 1e-6
    assert not count or error <= 0.5 + 1e-6
    assert num_lent(num_unpinned, num_pinned, None) == 0


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    placed=st.sampled_from([0, 0.3]),
    share=st.floats(0.3, 1),
    rows=st.lists(st.integers(0, 1), min_size=1, max_size=3),
    is_latent=st.booleans(),
)
def test_every_segment_has_one_reader_and_lies_where_it_lay(
    lengths, placed, share, rows, is_latent
):
    latent = geometry(num_kv_heads=1, head_dim=9, head_dim_v=8, shared_kv=True)
    twin = Twin(build(spec(latent if is_latent else geometry()), placed))
    for length in lengths:
        twin.append(length)
        rows = [row % twin.cache.batch_size for row in rows]
        twin.cache.batch_select_indices(torch.tensor(rows))
        twin.apply(lambda tensor, rows=rows: tensor[rows])
    views = twin.cache.views(0)
    pinned = segments_of(views.pinned)
    count = num_lent(len(segments_of(views.unpinned)), len(pinned), share)
    readers = lend((views.unpinned, views.pinned), count)
    rest = segments_of(readers.accelerator)
    assert len(pinned) - len(rest) == count
    assert readers.num_borrowed == 4 * count
    found = segments_of(readers.cpu) + rest
    expected = segments_of(views.unpinned) + pinned
    for (start, address, *tensors), (start_, address_, *tensors_) in zip(
        found, expected, strict=True
    ):
        assert (start, address) == (start_, address_)
        assert all(map(torch.equal, tensors, tensors_))
    # The oldest are lent, and the rest are the same runs: no copy gets shorter but the first.
    runs = [view.key.shape[0] for view in views.pinned]
    left = [view.key.shape[0] for view in readers.accelerator]
    assert left[1:] == runs[len(runs) - len(left) + 1 :]


def test_a_run_of_registrations_is_one_part_of_the_cpus():
    """The end of a registration stops copies only: to the CPU its neighbours are one piece."""
    twin = Twin(build(share=0))
    for _ in range(60):
        twin.append(4)  # registered when it is placed, a page at a time
    views = twin.cache.views(0)
    assert len(views.pinned) >= 6
    addresses = [address for _, address, *_ in segments_of(views.pinned)]
    steps = [after - before for before, after in itertools.pairwise(addresses)]
    num_pieces = 1 + sum(step != steps[0] for step in steps)
    readers = lend((views.unpinned, views.pinned), len(addresses))
    assert len(readers.cpu) == num_pieces < len(views.pinned)


def test_all_layers_of_a_step_borrow_the_same_segments(monkeypatch):
    """Also in steps in which windows leave, where some layers have placed more than others."""
    twin, seen = Twin(build(spec(geometry(num_layers=3)), 0.3)), []
    real = InplaceKVCache.step_views

    def watched(cache, layer_idx):
        views = real(cache, layer_idx)
        seen.append([start for start, *_ in segments_of(views.pinned)])
        return views

    monkeypatch.setattr(InplaceKVCache, "step_views", watched)
    twin.append(30)
    for i in range(12):
        twin.cache.step_share = 0.3 + 0.7 * (i % 5) / 4
        twin.append(1, flush=False)
        for layer_idx in range(3):
            attend(twin.cache, layer_idx, torch.randn(2, 4, 1, 4), 0.3)
        assert seen[-1] == seen[-2] == seen[-3]
    assert len({len(starts) for starts in seen}) > 5


def test_views_and_regions_know_nothing_of_it():
    lent, kept = elastic(placed=0.3, share=0.9), Twin(build(share=0.3))
    for twin in (lent, kept):
        twin.append(45)
        twin.append(1, flush=False)
    assert regions(lent.cache) == regions(kept.cache)
    lent.check()
    views, as_read = lent.cache.views(0), lent.cache.step_views(0)
    assert tokens_of(as_read.unpinned) > tokens_of(views.unpinned)
    assert as_read.num_tokens == views.num_tokens


# Exact


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    placed=st.sampled_from([0, 0.3, 0.6]),
    steps=st.lists(st.floats(0.6, 1), min_size=4, max_size=4),
    ping_pong=st.integers(1, 4),
    rows=st.lists(st.integers(0, 1), min_size=1, max_size=4),
    group_size=st.sampled_from([1, 3]),
    dtype=st.sampled_from(list(TOLERANCE)),
    kind=st.sampled_from(["equal", "other", "shared"]),
    masked=st.sampled_from(["", "key_mask", "mask"]),
    way=st.sampled_from(["through the buffers", "in place"]),
)
def test_steps_are_exact_at_any_share(
    lengths, placed, steps, ping_pong, rows, group_size, dtype, kind, masked, way
):
    shape = {
        "equal": {},
        "other": {"head_dim_v": 7},
        "shared": {"num_kv_heads": 1, "head_dim": 9, "head_dim_v": 8, "shared_kv": True},
    }[kind]
    twin = Twin(build(spec(geometry(dtype=dtype, **shape), ping_pong_tokens=4 * ping_pong), placed))
    with pytest.MonkeyPatch.context() as patch:
        read(way, patch)
        for length, share in zip(lengths, steps, strict=False):
            twin.cache.step_share = share
            twin.append(length, flush=False)
            size = (twin.cache.batch_size, twin.cache.num_tokens)
            masks = {
                "": {},
                "key_mask": {"key_mask": torch.rand(size) < 0.7},
                "mask": {"mask": torch.rand(size[0], 1, length, size[1]) < 0.7},
            }[masked]
            assert_attends(twin, length, group_size, **masks)
            rows = [row % twin.cache.batch_size for row in rows]
            twin.cache.batch_select_indices(torch.tensor(rows))
            twin.apply(lambda tensor, rows=rows: tensor[rows])
    twin.check()


class ElasticMachine(CacheMachine):
    """Any operations, with steps at any share between them."""

    @rule(data=st.data())
    def borrow(self, data):
        least = self.cache.router.marginal_share
        share = data.draw(st.one_of(st.none(), st.just(1), st.floats(least, 1)))
        self.cache.step_share = share

    @rule(share=shares())
    def change_share(self, share):
        """A share under that of the placement borrows nothing."""
        self.cache.router.marginal_share = share

    @precondition(lambda self: self.cache.num_tokens)
    @rule(way=st.sampled_from(["through the buffers", "in place"]), num_queries=st.integers(1, 3))
    def attend(self, way, num_queries):
        with pytest.MonkeyPatch.context() as patch:
            read(way, patch)
            assert_attends(self.twin, min(num_queries, self.cache.num_tokens))

    @invariant()
    def the_share_in_use_is_the_share_asked_for(self):
        if not hasattr(self, "twin"):
            return
        stats, asked = self.cache.stats(), self.cache.step_share
        num_placed = sum(r.tokens for r in stats.regions[2:]) // self.cache.spec.segment_tokens
        assert stats.placed_share <= stats.cpu_share <= 1
        if asked is None or asked <= stats.placed_share:
            assert abs(stats.cpu_share - stats.placed_share) * num_placed <= 0.5 + 1e-6
        else:
            assert abs(stats.cpu_share - asked) * num_placed <= 0.5 + 1e-6


class TestElastic(ElasticMachine.TestCase):
    settings = settings(max_examples=40)


@pytest.mark.parametrize("share", [0.5, 1])
def test_without_jobs_calls_read_what_is_borrowed(monkeypatch, way, share):
    monkeypatch.setattr(host_jobs, "attention_jobs", lambda: None)
    twin = elastic(placed=0, share=share)
    for length in (30, 1, 4):
        twin.append(length, flush=False)
        assert_attends(twin, length)


# Races


@pytest.mark.parametrize("make", SLOW)
@pytest.mark.parametrize("share", [0.6, 1])
def test_the_cpu_reads_no_segment_that_is_still_under_way(make, way, share):
    """Most or all of what leaves the window is read by the CPU in the very next step."""
    with accelerators(make):
        twin = elastic(placed=0, share=share)
    for length in (3, 1, 1, 1, 1, 1, 30, 1, 1):
        twin.append(length, flush=False)
        assert_attends(twin, length)
    twin.check()


@pytest.mark.parametrize("make", [LateAccelerator, LateOutbox])
def test_what_a_step_shows_the_cpu_is_there(make):
    """Looked at by somebody who waits for nothing."""
    with accelerators(make):
        twin = elastic(placed=0, share=1)
    for length in (3, 1, 8, 1, 11):
        twin.append(length)
        for layer_idx in range(2):
            parts = twin.cache.step_views(layer_idx).unpinned
            assert tokens_of(parts) == twin.cache.num_tokens // 4 * 4
            for start, _, key, value, rows in segments_of(parts):
                dense = (tensor[:, :, start : start + 4] for tensor in twin.dense[layer_idx])
                assert all(map(same_bits, (key[rows], value[rows]), dense))


CHANGES = {
    "crop": lambda cache: cache.crop(6),
    "crop a layer": lambda cache: cache.crop_layer(0, 6),
    "reset": lambda cache: cache.reset(),
    "reorder": lambda cache: cache.reorder(torch.tensor([1, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_cpu_has_borrowed_is_not_written_again_before_it_has_read_it(change):
    """The accelerator starts the CPU's jobs as late as it may; what comes after writes slots."""
    if dispatch.attention_jobs() is None:
        pytest.skip("no native library")
    with accelerators(LateCaller):
        twin = elastic(placed=0, share=0.8)
    twin.append(41)
    cache, query = twin.cache, torch.randn(2, 4, 1, 4)
    cache.accelerator.current_stream().synchronize()
    views, expected = cache.step_views(0), whole(twin, 0, query, 0.3)
    cache.companion = companion = DecodeAttention(
        cache.registrar, cache.ping_pong, cache.spec.geometry
    )
    question = Question(query=query, softmax_scale=0.3, query_start=40, key_mask=None, mask=None)
    finish = companion.host.begin(question, views.unpinned)
    parts = [question.attend(part) for part in views.pinned + views.window] + finish()
    CHANGES[change](cache)
    for _ in range(4):
        cache.append(0, *new_tokens(cache, 4))
        cache.flush(0)
    cache.accelerator.current_stream().synchronize()
    torch.testing.assert_close(merge_partials(parts)[0], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("make", [SleepyAccelerator, SleepyCaller])
@pytest.mark.parametrize("share", [0.6, 1])
@pytest.mark.parametrize("is_copied", [False, True])
def test_on_cuda_the_cpu_reads_no_segment_that_is_still_under_way(
    make, share, is_copied, monkeypatch
):
    if is_copied:
        read("through the buffers", monkeypatch)
    with accelerators(lambda: make(torch.device("cuda", torch.cuda.current_device()))):
        twin = Twin(build(spec(window_size=8), share=0, device="cuda"))
    twin.cache.step_share = share
    for length in (7, *[1] * 20, 30, 1, 1):
        twin.append(length, flush=False)
        assert_attends(twin, length)
    twin.cache.batch_select_indices(torch.tensor([1, 0, 1]))
    twin.apply(lambda tensor: tensor[[1, 0, 1]])
    for length in (20, *[1] * 9):
        twin.append(length, flush=False)
        assert_attends(twin, length)
    twin.cache.crop(41)
    twin.apply(lambda tensor: tensor[:, :, :41])
    twin.append(1, flush=False)
    assert_attends(twin, 1)
    twin.check()


# What crosses the bus


@pytest.mark.parametrize("share", [0, 0.5, 0.7, 1])
def test_only_the_rest_crosses_the_bus_each_byte_once(way, share):
    """The last layer has copied the first one's beginning as the next step will want it."""
    twin = elastic(spec(ping_pong_tokens=4), placed=0, share=share)
    twin.append(40)
    cache, size = twin.cache, 4 * 2 * geometry().bytes_per_token_per_layer
    for _ in range(2):
        twin.append(1, flush=False)
        assert_attends(twin, 1)
    before = cache.stats()
    twin.append(1, flush=False)
    assert_attends(twin, 1)
    after = cache.stats()
    num_lent = math.floor(10 * share + 0.5)
    answers = _bytes_of_answers(cache) if num_lent else 0
    assert after.h2d_bytes - before.h2d_bytes == 2 * (size * (10 - num_lent) + answers)
    assert after.borrowed_bytes - before.borrowed_bytes == 2 * size * num_lent
    assert (after.cpu_share, after.placed_share) == (num_lent / 10, 0)


def test_what_was_begun_for_another_share_is_not_used(way):
    """Chunks that were copied ahead, launches and jobs that were prepared."""
    twin = elastic(spec(ping_pong_tokens=4), placed=0, share=0.5)
    twin.append(41)
    for share in (0.5, 0.5, 0.7, 0.7, 0.2, 1, 1, None, None, 0.1):
        twin.cache.step_share = share
        twin.append(1, flush=False)
        assert_attends(twin, 1)


def _bytes_of_answers(cache):
    """The CPU's results, if it gives them by jobs: 4 heads' lse and out of 2 rows."""
    return 4 * 2 * 4 * (1 + 4) if isinstance(cache.companion.host, HostJobs) else 0


# Settings


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, math.inf, "0.5", True])
def test_a_share_that_is_none_is_refused(share):
    cache = build(share=0)
    with pytest.raises(LayoutError, match="step_share="):
        cache.step_share = share
    with pytest.raises(LayoutError, match="step_share="):
        InplaceKVCache(spec(), "cpu", step_share=share)
    assert cache.step_share is None


def test_nothing_is_lent_to_the_accelerator():
    cache = build(share=0.5)
    with pytest.raises(LayoutError, match=r"step_share=0.4: must be at least 0.5"):
        cache.step_share = 0.4
    cache.step_share = 0.5
    assert Twin(cache).cache.stats().cpu_share == 0


def test_the_share_of_a_step_is_not_changed_in_the_middle_of_it():
    twin = Twin(build(share=0.5))
    twin.append(9)
    twin.append(1, layers=[0], flush=False)
    with pytest.raises(CacheStateError, match=r"step_share=0.7 .*crop\(9\)"):
        twin.cache.step_share = 0.7
    twin.append(1, layers=[1], flush=False)
    twin.cache.step_share = 0.7
    assert_attends(twin, 1)


def test_a_copy_and_a_reset_cache_go_on_at_the_same_share():
    twin = elastic(placed=0, share=0.5)
    twin.append(40)
    twin.cache.router.marginal_share = 0.9
    twin.cache = copy.deepcopy(twin.cache)
    assert twin.cache.stats().cpu_share == twin.cache.step_share == 0.5
    twin.cache.reset()
    assert twin.cache.step_share == 0.5


def test_the_statistics_tell_the_share_in_use_and_how_it_comes_about():
    twin = elastic(placed=0.3, share=0.8)
    twin.append(41)
    assert "80.0% (30.0% unpinned, 50.0% borrowed)" in str(twin.cache.stats())
    twin.cache.step_share = None
    assert "borrowed" not in str(twin.cache.stats())


@pytest.mark.parametrize(("share", "placed"), [(0, 0), (0.4, 0.25), (0.75, 0.6), (1, 1)])
def test_an_elastic_cache_places_less_than_its_steps_leave_to_the_cpu(share, placed):
    config = CacheConfig(cpu_share=share, elastic=True)
    assert config.router().marginal_share == config.placed_share == pytest.approx(placed)
    assert config.step_share == share
    fixed = CacheConfig(cpu_share=share)
    assert fixed.router().marginal_share == share
    assert fixed.step_share is None
    with pytest.raises(LayoutError, match="elastic=1"):
        CacheConfig(elastic=1)
