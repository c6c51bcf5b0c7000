"""Where selected entries live: each in exactly one part, found by position."""

from __future__ import annotations

import harness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.csa.residence import find, gather

GEOMETRY = harness.geometry(num_layers=1, num_kv_heads=1, head_dim=3, shared_kv=True)


def _filled(share, calls, crop=None, rows=None, flush=True):
    """(cache, its entries (batch, entries, dim))"""
    spec = harness.spec(GEOMETRY, window_size=4, segment_size=2)
    cache = harness.build(spec, share)
    twin = harness.Twin(cache)
    for i, num_entries in enumerate(calls):
        twin.append(num_entries, flush=flush or i + 1 < len(calls))
    if crop is not None:
        cache.crop(crop)
        twin.apply(lambda tensor: tensor[:, :, :crop])
    if rows is not None:
        cache.batch_select_indices(torch.tensor(rows))
        twin.apply(lambda tensor: tensor[rows])
    return cache, twin.dense[0][0][:, 0]


@given(
    share=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    calls=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    crop=st.none() | st.integers(0, 30),
    rows=st.none() | st.lists(st.integers(0, 1), min_size=1, max_size=3),
    flush=st.booleans(),
    num_chosen=st.integers(0, 12),
    seed=st.integers(0, 99),
)
def test_every_selected_entry_is_found_once(share, calls, crop, rows, flush, num_chosen, seed):
    cache, entries = _filled(share, calls, crop, rows, flush)
    random = torch.Generator().manual_seed(seed)
    batch, num_entries, _ = entries.shape
    # -1 among them, each entry at most once a token.
    order = torch.rand(batch, 5, num_entries + 4, generator=random).argsort(-1)
    indices = torch.where(order < num_entries, order, -1)[..., :num_chosen]
    found = torch.zeros(indices.shape, dtype=torch.int64)
    collected = [[[] for _ in range(5)] for _ in range(batch)]
    for view in cache.views(0).parts:
        segment, is_here = find(view, indices)
        found += is_here
        assert bool((segment[~is_here] == 0).all())
        gathered = gather(view, indices)
        assert (gathered is None) == (not is_here.any())
        if gathered is None:
            continue
        values, is_valid = gathered
        assert values.shape[2] == is_valid.shape[2] == is_here.sum(-1).max()
        assert torch.equal(is_valid.sum(-1), is_here.sum(-1))
        for row in range(batch):
            for token in range(5):
                collected[row][token] += values[row, token][is_valid[row, token]].tolist()
    assert torch.equal(found, (indices >= 0).to(torch.int64))
    for row in range(batch):
        for token in range(5):
            chosen = indices[row, token]
            wanted = entries[row, chosen[chosen >= 0]].tolist()
            assert sorted(collected[row][token]) == sorted(wanted)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_one_side_may_hold_everything(share):
    cache, entries = _filled(share, [16])
    views, everything = cache.views(0), torch.arange(16).expand(2, 1, 16)
    side = views.unpinned if share else views.pinned
    assert not (views.pinned if share else views.unpinned)
    assert sum(int(find(view, everything)[1].sum()) for view in side) == 2 * 16
    values = torch.cat([gather(view, everything)[0] for view in side], 2)
    assert torch.equal(values[:, 0], entries)


def test_nothing_chosen():
    cache, _ = _filled(0.5, [11])
    for indices in (torch.full((2, 3, 4), -1), torch.zeros(2, 3, 0, dtype=torch.int64)):
        assert all(gather(view, indices) is None for view in cache.views(0).parts)


def test_beyond_the_last_entry_nothing_lives():
    cache, _ = _filled(0.5, [11])
    assert not any(
        find(view, torch.tensor([[[11, 12, 999]]]))[1].any() for view in cache.views(0).parts
    )
