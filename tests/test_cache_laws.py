"""The laws of InplaceKVCache: where tokens are, that placed bytes stay, what crop and copies do."""

import copy
import pickle

import pytest
import torch
from harness import (
    Twin,
    assert_not_moved,
    build,
    geometry,
    new_tokens,
    placed_segments,
    read,
    regions,
    same_bits,
    spec,
    value_of,
)
from hypothesis import given
from hypothesis import strategies as st
from strategies import appends, row_choices, shares, specs

from sparsekv.errors import CacheStateError, LayoutError
from sparsekv.format import KVGeometry, PartitionSpec

GEOMETRIES = {
    "gqa": geometry(),
    "wide values": geometry(head_dim=3, head_dim_v=5, dtype=torch.float16),
    "latents": geometry(num_kv_heads=1, head_dim=9, head_dim_v=8, shared_kv=True),
    "bf16": geometry(num_layers=3, dtype=torch.bfloat16),
}


@pytest.fixture(params=GEOMETRIES)
def kv(request):
    return GEOMETRIES[request.param]


# Where tokens are


@given(spec_=specs(), share=shares(), lengths=appends(), flush=st.booleans())
def test_every_token_lives_in_exactly_one_region(spec_, share, lengths, flush):
    """`read` checks region by region; here also which part of the sequence each region has."""
    twin = Twin(build(spec_, share))
    for length in lengths:
        twin.append(length, flush=flush)
        twin.check()
    cache, total = twin.cache, sum(lengths)
    assert cache.num_tokens == total
    in_window = regions(cache).count("window")
    if flush:
        assert in_window == total % spec_.window_size
    assert regions(cache)[total - in_window :] == ["window"] * in_window


@given(spec_=specs(), share=shares(), lengths=appends(max_size=10))
def test_placed_bytes_never_move_while_tokens_come(spec_, share, lengths):
    twin, before = Twin(build(spec_, share)), {}
    for length in lengths:
        twin.append(length)
        after = placed_segments(twin.cache)
        assert_not_moved(before, after)
        before = after
    twin.check()


@given(spec_=specs(), length=st.integers(0, 60), data=st.data())
def test_batch_operations_copy_no_placed_byte(spec_, length, data):
    twin = Twin(build(spec_))
    twin.append(length)
    cache = twin.cache
    before, counted = placed_segments(cache), _traffic(cache)
    rows = data.draw(st.permutations(range(cache.batch_size)))
    cache.reorder(torch.tensor(rows))
    twin.apply(lambda tensor: tensor[rows])
    rows = data.draw(row_choices(cache.batch_size))
    cache.batch_select_indices(torch.tensor(rows, dtype=torch.int32))
    twin.apply(lambda tensor: tensor[rows])
    cache.batch_repeat_interleave(2)
    twin.apply(lambda tensor: tensor.repeat_interleave(2, 0))
    assert _traffic(cache) == counted, "bytes crossed the bus"
    assert_not_moved(before, placed_segments(cache))
    twin.check()
    twin.append(length // 2 + 1)  # new segments have the new number of rows
    assert_not_moved(before, placed_segments(cache))
    twin.check()


def _traffic(cache):
    return cache.accelerator.h2d_bytes, cache.accelerator.d2h_bytes


def test_eviction_copies_each_placed_byte_once():
    cache = build(share=0.5)
    twin = Twin(cache)
    for length in (3, 14, 1, 1, 1, 9):
        twin.append(length)
    placed = 29 // 4 * 4 * cache.batch_size * cache.spec.geometry.bytes_per_token
    assert _traffic(cache) == (0, placed)


def test_evict_then_read_is_identity(kv):
    """Bitwise, infinities and NaN payloads too."""
    cache = build(spec(kv))
    key, value = new_tokens(cache, 13)
    for tensor in (key, value):
        if tensor is not None:
            bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
            bits.copy_(
                torch.randint(-(2**15), 2**15, bits.shape) * (bits.element_size() == 2 or 65537)
            )
    for layer_idx in range(kv.num_layers):
        cache.append(layer_idx, key, value)
        cache.flush(layer_idx)
        found_key, found_value = read(cache, layer_idx)
        assert same_bits(found_key, key)
        assert same_bits(found_value, value_of(cache, key, value))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 9, 40])
def test_append_never_moves_what_this_step_attends(kv, length):
    """Until flush the old window stays where it was, and the new tokens are a second part."""
    twin = Twin(build(spec(kv)))
    twin.append(7)
    cache = twin.cache
    old = cache.views(0)
    assert [part.num_tokens for part in old.window] == [3]
    placed = placed_segments(cache)
    twin.append(length, layers=[0], flush=False)
    new = cache.views(0)
    assert new.window[0].key.data_ptr() == old.window[0].key.data_ptr()
    if length > 1:
        assert [part.num_tokens for part in new.window] == [3, length]
    assert placed_segments(cache).keys() == placed.keys()
    twin.check()
    before = [part.key.clone() for part in new.parts]
    assert all(same_bits(part.key, key) for part, key in zip(new.parts, before, strict=True))
    cache.flush(0)
    assert regions(cache, 0).count("window") == (7 + length) % 4
    twin.check()


def test_tokens_that_fit_are_copied_and_a_window_may_be_exactly_full():
    cache = build()
    twin = Twin(cache)
    key, value = new_tokens(cache, 4)
    cache.append(0, key, value)
    twin.note(0, key.clone(), value.clone())
    key.zero_(), value.zero_()
    assert [part.num_tokens for part in cache.views(0).window] == [4]
    assert regions(cache, 0) == ["window"] * 4
    twin.check()
    cache.append(0, *new_tokens(cache, 0))  # no tokens: nothing moves
    assert regions(cache, 0) == ["window"] * 4
    key, value = new_tokens(cache, 1)
    cache.append(0, key, value)  # without flush: the full window leaves first
    twin.note(0, key, value)
    assert regions(cache, 0).count("window") == 1
    twin.check()


def test_an_append_after_an_unflushed_overflow_loses_nothing():
    twin = Twin(build())
    for length in (3, 9, 6, 1, 22, 0, 1):
        twin.append(length, flush=False)
        twin.check()


@given(share=shares(), lengths=st.lists(st.integers(1, 30), max_size=20))
def test_the_share_stays_within_one_segment_of_its_target(share, lengths):
    cache = build(spec(geometry(num_layers=1, num_kv_heads=1, head_dim=1)), share)
    twin = Twin(cache)
    for length in lengths:
        twin.append(length)
        placed = [region for region in regions(cache) if region != "window"]
        assert abs(placed.count("unpinned") - share * len(placed)) <= 4


def test_accelerator_bytes_do_not_depend_on_the_length():
    cache = build()
    twin = Twin(cache)

    def gpu_bytes():
        return sum(r.used_bytes for r in cache.stats().regions if r.memory == "GPU")

    start = gpu_bytes()
    for length in (1, 40, 1, 1, 1, 1, 400):
        twin.append(length)
        assert gpu_bytes() == start
    assert start == 2 * 4 * cache.spec.geometry.bytes_per_token
    storages = {window.elements.untyped_storage().nbytes() for window in cache._windows}
    assert storages == {2 * 4 * cache.spec.geometry.bytes_per_token_per_layer}


def test_statistics_add_up():
    twin = Twin(build(share=0.3))
    twin.append(43)
    stats = twin.cache.stats()
    assert (stats.num_tokens, stats.batch_size) == (43, 2)
    assert {r.name: r.tokens for r in stats.regions} == {
        "window": 3,
        "ping-pong": 0,
        "unpinned": 12,
        "pinned": 28,
    }
    assert sum(r.share for r in stats.regions) == pytest.approx(1)
    assert stats.cpu_share == 0.3
    sizes = {r.name: r.used_bytes for r in stats.regions}
    assert sizes["unpinned"] == 12 * 2 * twin.cache.spec.geometry.bytes_per_token
    assert "unpinned" in str(stats)
    assert "43" in str(stats)
    assert stats.host_used_bytes == sizes["unpinned"] + sizes["pinned"]
    assert stats.registered_bytes == sum(twin.cache.accelerator.registered.values())
    assert 0 < stats.buffer_bytes <= stats.registered_bytes - sizes["pinned"]
    assert all(r.committed_bytes >= r.used_bytes for r in stats.regions)
    assert stats.longest_registration_s > 0
    assert "registered" in str(stats).splitlines()[-1]
    assert stats.to_dict()["num_tokens"] == 43
    assert build().stats().cpu_share == 0.0


def test_layers_may_be_at_different_tokens_of_one_step(kv):
    twin = Twin(build(spec(kv)))
    for layers in ([0], [0], [1], [0, 1], [1]):
        twin.append(7, layers=layers)
        twin.check()
    assert twin.cache.layer_num_tokens(0) == 21
    last = kv.num_layers - 1
    assert twin.cache.num_tokens == min(twin.cache.layer_num_tokens(i) for i in range(last + 1))
    shared = min(map(len, (regions(twin.cache, 0), regions(twin.cache, 1)))) // 4 * 4
    assert regions(twin.cache, 0)[:shared] == regions(twin.cache, 1)[:shared]


def test_gradients_are_not_recorded():
    cache = build()
    twin = Twin(cache)
    for length in (3, 9, 1):
        for layer_idx in range(2):
            key, value = (t.requires_grad_() for t in new_tokens(cache, length))
            cache.append(layer_idx, key, value)
            twin.note(layer_idx, key.detach(), value.detach())
            assert not any(
                p.key.requires_grad or p.value.requires_grad for p in cache.views(0).parts
            )
            cache.flush(layer_idx)
    cache.reorder(torch.tensor([1, 0]))
    twin.apply(lambda tensor: tensor[[1, 0]])
    twin.check()


def test_a_cache_made_under_inference_mode_goes_on_outside_it(tmp_path):
    with torch.inference_mode():
        twin = Twin(build())
        twin.append(14)
        twin.cache.reorder(torch.tensor([1, 0]))
        twin.cache.crop(13)
        twin.cache.save(tmp_path / "saved")
        twin.cache.load(tmp_path / "saved")
    twin.apply(lambda tensor: tensor[[1, 0]][:, :, :13])
    for flush in (True, False, True):
        twin.append(9, flush=flush)
        twin.check()
    twin.cache.crop(2)
    twin.apply(lambda tensor: tensor[:, :, :2])
    twin.append(1)
    twin.check()


def test_tokens_may_have_any_strides():
    cache = build()
    twin = Twin(cache)
    for length in (1, 3, 11):
        key = torch.randn(2, length, 2, 4).transpose(1, 2)
        value = torch.randn(1, 2, 1, 4).expand(2, 2, length, 4)
        for layer_idx in range(2):
            cache.append(layer_idx, key, value)
            twin.note(layer_idx, key, value)
            twin.check()
            cache.flush(layer_idx)
    twin.check()


# Crop


@given(spec_=specs(), share=shares(), lengths=appends(max_size=4), data=st.data())
def test_crop_keeps_the_first_tokens_and_the_router_goes_on_as_if_the_rest_never_was(
    spec_, share, lengths, data
):
    twin = Twin(build(spec_, share))
    for length in lengths:
        twin.append(length)
    kept = data.draw(st.integers(0, sum(lengths) + 3))
    before = placed_segments(twin.cache)
    num_placed = sum(lengths) - regions(twin.cache).count("window")
    twin.cache.crop(kept)
    twin.apply(lambda tensor: tensor[:, :, :kept])
    twin.check()
    left = min(kept, sum(lengths))
    in_window = left - num_placed if left >= num_placed else left % spec_.segment_tokens
    assert regions(twin.cache).count("window") == in_window
    survivors = {
        start: seen for start, seen in before.items() if start + spec_.segment_tokens <= kept
    }
    assert_not_moved(survivors, placed_segments(twin.cache))
    twin.append(17)
    twin.check()
    straight = Twin(build(spec_, share))
    straight.append(min(kept, sum(lengths)) + 17)
    # Windows of several segments may fill at other moments; where both have placed, they agree.
    both = zip(regions(twin.cache), regions(straight.cache), strict=True)
    assert all(a == b or "window" in (a, b) for a, b in both), "the share remembers what is gone"


def test_crop_after_the_share_changed_shows_the_new_segments():
    """The same number of segments again, but elsewhere: no view may be kept from before."""
    cache = build(share=1)
    twin = Twin(cache)
    twin.append(16)
    twin.check()
    cache.crop(8)
    twin.apply(lambda tensor: tensor[:, :, :8])
    cache.router.marginal_share = 0
    twin.append(8)
    twin.check()
    assert regions(cache)[8:] == ["pinned"] * 8


def test_crop_of_reordered_rows_brings_back_logical_rows(kv):
    twin = Twin(build(spec(kv)))
    twin.append(11)
    rows = [1, 1, 0]
    twin.cache.batch_select_indices(torch.tensor(rows))
    twin.apply(lambda tensor: tensor[rows])
    twin.append(6)
    for kept in (15, 14, 6, 3):
        twin.cache.crop(kept)
        twin.apply(lambda tensor, kept=kept: tensor[:, :, :kept])
        twin.check()
    twin.append(9)
    twin.check()


def test_crop_mends_an_interrupted_step():
    twin = Twin(build())
    twin.append(6)
    twin.append(7, layers=[0], flush=False)
    cache = twin.cache
    assert not cache.is_complete
    cache.crop(6)
    twin.apply(lambda tensor: tensor[:, :, :6])
    assert cache.is_complete
    twin.check()
    twin.append(9)
    twin.check()


@pytest.mark.parametrize("num_tokens", [-1, 1.0, True, None, "3", float("nan")])
def test_crop_takes_a_whole_number(num_tokens):
    twin = Twin(build())
    twin.append(9)
    with pytest.raises(LayoutError, match=r"crop\(.*whole number"):
        twin.cache.crop(num_tokens)
    twin.check()


# Life


def test_a_deepcopy_is_independent(kv):
    twin = Twin(build(spec(kv), share=0.3))
    twin.append(11)
    rows = [1, 0, 0]
    twin.cache.batch_select_indices(torch.tensor(rows))
    twin.apply(lambda tensor: tensor[rows])
    twin.append(9)
    twin.append(6, flush=False)
    other = Twin(copy.deepcopy(twin.cache))
    other.dense = [list(layer) for layer in twin.dense]
    other.check()
    assert regions(other.cache) == regions(twin.cache)
    addresses = [
        {seen[1] for seen in placed_segments(c).values()} for c in (twin.cache, other.cache)
    ]
    assert not addresses[0] & addresses[1]
    twin.append(13)
    other.cache.crop(5)
    other.apply(lambda tensor: tensor[:, :, :5])
    other.append(3)
    twin.check()
    other.check()
    assert other.cache.router is not twin.cache.router


def test_a_copy_routes_as_the_original_does():
    twin = Twin(build(share=0.3))
    twin.append(22)
    other = Twin(copy.deepcopy(twin.cache))
    other.dense = [list(layer) for layer in twin.dense]
    for each in (twin, other):
        each.append(37)
    assert regions(twin.cache) == regions(other.cache)


def test_reset_forgets_and_keeps_the_memory():
    cache = build()
    twin = Twin(cache)
    twin.append(23)
    cache.batch_repeat_interleave(2)
    addresses = {m.mapping.address for s in cache._layers[0].stacks.values() for m in s.leases}
    cache.reset()
    assert (cache.num_tokens, cache.batch_size) == (0, 2)
    twin = Twin(cache)
    twin.check()
    twin.append(23)
    twin.check()
    again = {
        m.mapping.address
        for layer in cache._layers
        for s in layer.stacks.values()
        for m in s.leases
    }
    assert addresses <= again


def test_a_closed_cache_says_why(tmp_path):
    cache = build()
    Twin(cache).append(9)
    cache.close("the model was restored; patch it again")
    for use in (
        lambda: cache.num_tokens,
        lambda: cache.views(0),
        lambda: cache.flush(0),
        lambda: cache.append(0, *new_tokens(build(), 1)),
        lambda: cache.crop(0),
        lambda: cache.reorder(torch.tensor([0, 1])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.region_of(0, 0),
        lambda: cache.reserve(1),
        lambda: cache.stats(),
        lambda: cache.save(tmp_path / "saved"),
        lambda: cache.load(tmp_path / "saved"),
        lambda: copy.deepcopy(cache),
        cache.reset,
    ):
        with pytest.raises(CacheStateError, match="the model was restored; patch it again"):
            use()


@pytest.mark.parametrize("action", [pickle.dumps, copy.copy])
def test_a_cache_is_not_pickled(action):
    with pytest.raises(CacheStateError, match=r"cannot be pickled.*save\(path\)"):
        action(build())


def test_one_giant_append_places_everything_at_once():
    cut = PartitionSpec(
        geometry=KVGeometry(num_layers=1, num_kv_heads=1, head_dim=4, dtype=torch.float32),
        batch_size=1,
        max_tokens=None,
        block_size=1,
        window_size=8,
        ping_pong_tokens=8,
    )
    twin = Twin(build(cut, share=0.25))
    twin.append(8 * 1000 + 5)
    twin.check()
    assert regions(twin.cache).count("unpinned") == 8 * 250
    assert len(twin.cache.views(0).unpinned) == 1, "one run"
