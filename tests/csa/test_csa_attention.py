"""The three kinds of attention, and a layer's step, against the float64 definition."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import harness
import layer_inputs
import pytest
import torch

from sparsekv.attention import merge_partials
from sparsekv.csa.attention import compressed_attention, selected_attention, window_attention
from sparsekv.csa.step import attend_compressed
from sparsekv.errors import LayoutError
from sparsekv.format import LayerViews
from sparsekv.kernels.dispatch import pack_entries, unpack_entries
from sparsekv.kernels.torch_ops.sparse_attention import sparse_attention

TOLERANCE = {"atol": 1e-11, "rtol": 0}
ENTRIES = harness.geometry(
    num_layers=1, num_kv_heads=1, head_dim=8, shared_kv=True, dtype=torch.float64
)


def _draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def _dense(query, keys, is_seen, scale):
    """(out, lse) of (B, H, T, D) queries over (B, S, D) keys, where (B or 1, T, S) is seen."""
    scores = torch.einsum("bhtd,bsd->bhts", query, keys) * scale
    scores = scores.masked_fill(~is_seen[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("bhts,bsd->bhtd", weights, keys), lse


def _check(got, wanted):
    torch.testing.assert_close(got[0], wanted[0], **TOLERANCE)
    torch.testing.assert_close(got[1], wanted[1], **TOLERANCE)


@pytest.mark.parametrize("window", [1, 2, 5, 128])
@pytest.mark.parametrize(
    ("past", "num_tokens"), [(0, 1), (0, 7), (4, 1), (1, 3), (127, 1), (127, 130), (0, 600)]
)
def test_window_attention(window, past, num_tokens):
    past = min(past, window - 1)
    query, recent = _draw(2, 3, num_tokens, 4), _draw(2, past + num_tokens, 4)
    distance = past + torch.arange(num_tokens)[:, None] - torch.arange(past + num_tokens)
    is_seen = ((distance >= 0) & (distance < window))[None]
    _check(window_attention(query, recent, window, 0.3), _dense(query, recent, is_seen, 0.3))


@pytest.mark.parametrize(("num_tokens", "num_entries"), [(1, 0), (1, 5), (9, 3), (520, 33)])
def test_compressed_attention(num_tokens, num_entries):
    query, entries = _draw(2, 3, num_tokens, 4), _draw(2, num_entries, 4)
    num_visible = torch.arange(num_tokens) // 16
    is_seen = (torch.arange(num_entries) < num_visible[:, None])[None]
    got = compressed_attention(query, entries, num_visible, 0.3)
    _check(got, _dense(query, entries, is_seen, 0.3))


def _pool(share, num_entries, dtype=torch.float64, dim=8):
    """(cache, its entries (2, num_entries, dim))"""
    geometry = harness.geometry(
        num_layers=1, num_kv_heads=1, head_dim=dim, shared_kv=True, dtype=dtype
    )
    spec = harness.spec(geometry, window_size=8, segment_size=4)
    cache = harness.build(spec, share)
    entries = _draw(2, 1, num_entries, dim)
    cache.append(0, entries)
    cache.flush(0)
    return cache, entries[:, 0]


def _selection(num_tokens, num_entries, k):
    """(2, num_tokens, k) distinct indices, with -1 anywhere among them."""
    order = torch.rand(2, num_tokens, num_entries + 3).argsort(-1)
    return torch.where(order < num_entries, order, -1)[..., :k]


def _seen(indices, num_entries):
    is_seen = torch.zeros(*indices.shape[:2], num_entries + 1, dtype=torch.bool)
    return is_seen.scatter_(2, indices.where(indices >= 0, num_entries), True)[..., :num_entries]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("num_tokens", "num_entries", "k"),
    [(1, 43, 7), (1, 3, 3), (5, 43, 43), (3, 43, 0), (2, 0, 3), (300, 43, 4)],
)
def test_selected_attention(share, num_tokens, num_entries, k):
    cache, entries = _pool(share, num_entries)
    query, indices = _draw(2, 3, num_tokens, 8), _selection(num_tokens, num_entries, k)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = selected_attention(query, cache.views(0), indices, 0.3, cache.accelerator)
    wanted = _dense(query, entries, _seen(indices, num_entries), 0.3)
    _check(got, wanted)
    _check(sparse_attention(query, entries, indices, 0.3), wanted)


@pytest.mark.parametrize("region", ["window", "unpinned", "pinned"])
def test_a_selection_within_one_region(region):
    cache, entries = _pool(0.5, 43)
    here = [i for i in range(43) if cache.region_of(0, i) == region]
    indices = torch.tensor([[*here[:2], -1], [-1] * 3])[:, None]  # and a row without any
    query = _draw(2, 3, 1, 8)
    got = selected_attention(query, cache.views(0), indices, 0.3, cache.accelerator)
    _check(got, _dense(query, entries, _seen(indices, 43), 0.3))
    assert (got[1][1] == -torch.inf).all()


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_only_selected_pinned_entries_are_copied(num_tokens):
    cache, _ = _pool(0.3, 203)
    query, indices = _draw(2, 3, num_tokens, 8), _selection(num_tokens, 203, 20)
    pinned = [i for i in range(203) if cache.region_of(0, i) == "pinned"]
    # However many tokens of a call select an entry.
    chosen = sum(len(set(row.flatten().tolist()) & set(pinned)) for row in indices)
    before = cache.accelerator.h2d_bytes
    selected_attention(query, cache.views(0), indices, 0.3, cache.accelerator)
    assert cache.accelerator.h2d_bytes - before == chosen * 8 * 8


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_packed_entries_are_attended_as_unpacked(share, dtype):
    cache, entries = _pool_of_packed(share)
    query, indices = _draw(2, 3, 2, 512).to(dtype), _selection(2, 21, 9)
    got = selected_attention(query, cache.views(0), indices, 0.04, cache.accelerator)
    wanted = _dense(query.double(), entries.double(), _seen(indices, 21), 0.04)
    torch.testing.assert_close(got[0].double(), wanted[0], atol=1e-5, rtol=0)


def _pool_of_packed(share):
    geometry = harness.geometry(
        num_layers=1, num_kv_heads=1, head_dim=584, shared_kv=True, dtype=torch.uint8
    )
    cache = harness.build(harness.spec(geometry, window_size=8, segment_size=4), share)
    packed = pack_entries(torch.randn(2, 1, 21, 512))
    cache.append(0, packed)
    cache.flush(0)
    return cache, unpack_entries(packed)[:, 0]


def test_the_op_refuses_what_is_no_selection():
    query, entries = _draw(1, 2, 1, 4), _draw(1, 5, 4)
    for indices in ([[[0, 5]]], [[[-2, 1]]], [[[3, 3]]]):
        with pytest.raises(LayoutError):
            sparse_attention(query, entries, torch.tensor(indices), 1.0)
    with pytest.raises(LayoutError):
        sparse_attention(query, entries, torch.zeros(1, 1, 2, dtype=torch.int32), 1.0)


def test_empty_views_give_nothing():
    cache, _ = _pool(0.5, 0)
    views = LayerViews(window=(), unpinned=(), pinned=())
    query, indices = _draw(2, 3, 2, 8), torch.zeros(2, 2, 0, dtype=torch.int64)
    out, lse = selected_attention(query, views, indices, 1.0, cache.accelerator)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    # What FlashMLA calls an empty part changes nothing either.
    full = _draw(2, 3, 2, 8), _draw(2, 3, 2)
    merged, _ = merge_partials([full, (out, torch.full_like(lse, torch.inf))])
    torch.testing.assert_close(merged, full[0])


# A layer's step


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("topk", [3, 99])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13, 60])
def test_layers_in_calls_of_any_size(share, topk, size):
    cache = layer_inputs.build(share=share)
    layers = layer_inputs.Layers(cache, 60, topk)
    for start in range(0, 60, size):
        layers.run(start, min(start + size, 60))


@pytest.mark.parametrize("length", [125, 126, 127, 128, 129])
def test_the_ring_of_128_wraps(length):
    cache = layer_inputs.build(layer_inputs.geometry(sliding_window=128, hca_ratio=8))
    layers = layer_inputs.Layers(cache, 134)
    layers.run(0, length)
    for start in range(length, 134):
        layers.run(start, start + 1)
        assert cache.states[0].recent.shape[1] == min(start + 1, 127)


def test_an_entry_is_selected_in_the_step_that_completes_it():
    new = layer_inputs.layer_input("csa", 44, topk=3)
    _, chosen = layer_inputs.expected(new)
    fresh = [t for t in range(3, 44, 4) for row in chosen if t > 20 and (t + 1) // 4 - 1 in row[t]]
    assert fresh  # else the outputs compared above would not show it
    assert all((t + 1) // 4 - 1 not in row[t - 1] for t in fresh for row in chosen)


@pytest.mark.parametrize("kind", layer_inputs.KINDS[:3])
def test_infinite_sinks(kind):
    new = layer_inputs.layer_input(kind, 30)
    new = replace(new, sinks=torch.tensor([torch.inf, -torch.inf, 0.5]))
    cache = layer_inputs.build(layer_inputs.geometry(layer_kinds=(kind, "csa")))
    out = torch.cat(
        [attend_compressed(cache, 0, layer_inputs.part(new, t, t + 1)) for t in range(30)], 2
    )
    assert (out[:, 0] == 0).all()  # the sink takes all weight
    wanted, _ = layer_inputs.expected(replace(new, sinks=torch.tensor([0.0, -math.inf, 0.5])))
    torch.testing.assert_close(out[:, 1:], wanted[:, 1:], **TOLERANCE)


def test_all_scores_equal():
    new = layer_inputs.layer_input("csa", 1600, batch_size=1, topk=5)
    assert new.indexer is not None
    zero = replace(new.indexer, head_weights=torch.zeros_like(new.indexer.head_weights))
    new = replace(new, indexer=zero)
    geometry = layer_inputs.geometry(layer_kinds=("csa",))
    cache = layer_inputs.build(geometry, batch_size=1, window_size=16, segment_size=8)
    parts = [(0, 1590), *[(t, t + 1) for t in range(1590, 1600)]]
    out = torch.cat([attend_compressed(cache, 0, layer_inputs.part(new, *p)) for p in parts], 2)
    wanted, chosen = layer_inputs.expected(new)
    assert chosen[0][1599] == [0, 1, 2, 3, 4]
    torch.testing.assert_close(out, wanted, **TOLERANCE)
