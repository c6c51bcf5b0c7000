"""Views that follow one another in memory, seen as one."""

import torch

from sparsekv.format import KVView, joined


def views_of(memory, *pieces, row_table=None):
    """Views of consecutive (first, last) slots of memory (slots, rows, heads, tokens, 2 * dim)."""
    key, value = memory.chunk(2, dim=-1)
    return [
        KVView(key[first:last], value[first:last], torch.arange(first, last) * 10, row_table)
        for first, last in pieces
    ]


def test_neighbours_become_one_and_nothing_is_lost():
    memory = torch.randn(9, 2, 3, 4, 10)
    ((whole,), views) = views_of(memory, (1, 8)), views_of(memory, (1, 2), (2, 5), (5, 8))
    (one,) = joined(views)
    for name in ("key", "value", "positions"):
        assert torch.equal(getattr(one, name), getattr(whole, name))
    assert one.key.data_ptr() == views[0].key.data_ptr()
    assert one.key.stride() == whole.key.stride()


def test_only_neighbours_do():
    memory, other = torch.randn(9, 2, 3, 4, 10), torch.randn(9, 2, 3, 4, 10)
    table = torch.tensor([[1, 0]])
    for views in (
        [],
        views_of(memory, (0, 2), (3, 4)),
        views_of(memory, (2, 4), (0, 2)),
        views_of(memory, (0, 2)) + views_of(other, (2, 4)),
        views_of(memory, (0, 2)) + views_of(memory, (2, 3), row_table=table),
        views_of(memory, (0, 1), row_table=table) + views_of(memory, (1, 3)),
        views_of(memory, (0, 2)) + views_of(memory[:, :1], (2, 4)),
        views_of(memory, (0, 2)) + views_of(memory[..., :8], (2, 4)),
    ):
        found = joined(views)
        assert len(found) == len(views)
        assert all(a is b for a, b in zip(found, views, strict=True))
