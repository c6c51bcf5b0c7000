"""When the accelerator reads the pinned region where it lies, and what a step then does."""

import pytest
import torch

from sparsekv import engine
from sparsekv.engine import step
from sparsekv.transfer import in_place
from tests.harness import Twin, build


@pytest.mark.parametrize(
    ("num_heads", "num_queries", "dtype", "mask", "expected"),
    [
        (8, 1, torch.bfloat16, None, True),
        (8, 4, torch.float32, None, True),  # 4 heads a group: 16 rows
        (8, 5, torch.float32, None, False),
        (8, 1, torch.float64, None, False),
        (8, 1, torch.float32, torch.ones(1, 1, 1, 9, dtype=torch.bool), False),
    ],
)
def test_few_query_rows_are_answered_in_place(
    monkeypatch, num_heads, num_queries, dtype, mask, expected
):
    monkeypatch.setattr(in_place, "decode_ops_for", lambda device: object())
    query = torch.zeros(2, num_heads, num_queries, 4, dtype=dtype)
    assert in_place.reads_in_place(query, 2, mask) is expected


def test_without_kernels_for_it_everything_is_copied():
    assert not in_place.reads_in_place(torch.zeros(2, 8, 1, 4), 2, None)


def test_a_step_in_place_equals_one_through_the_buffers(monkeypatch):
    copied, in_order = Twin(build(share=0.0)), Twin(build(share=0.0))
    for twin in (copied, in_order):
        torch.manual_seed(0)
        twin.append(43)
    geometry = copied.cache.spec.geometry
    query = torch.randn(copied.cache.batch_size, geometry.num_kv_heads * 2, 1, geometry.head_dim)
    expected = engine.attend(copied.cache, 0, query, 0.3)
    monkeypatch.setattr(step, "reads_in_place", lambda *arguments: True)
    before = in_order.cache.stats().h2d_bytes
    torch.testing.assert_close(engine.attend(in_order.cache, 0, query, 0.3), expected)
    assert in_order.cache.ping_pong.num_bytes == 0
    placed = {r.name: r.tokens for r in in_order.cache.stats().regions}["pinned"]
    crossed = placed * geometry.bytes_per_token_per_layer * in_order.cache.batch_size
    assert in_order.cache.stats().h2d_bytes - before == crossed
