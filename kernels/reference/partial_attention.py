"""Partial attention, by definition: gather the rows, join the segments, one softmax.

Letters: N segments, R physical rows, B batch (logical rows), H query heads, G kv heads, W tokens of
a segment, T query tokens, K = N * W key tokens, S sequence positions, D head_dim, V head_dim_v.
"""

import torch
from torch import Tensor

from sparsekv.errors import LayoutError
from sparsekv.kernels.block_lists import BlockLists


def partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    softmax_scale: float,
    *,
    row_table: Tensor | None = None,
    query_start: int = 0,
    key_mask: Tensor | None = None,
    key_start: Tensor | None = None,
    sliding_window: int | None = None,
    blocks: BlockLists | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of `query` to one set of keys, and the lse that merges it with that to other sets.

    score = softmax_scale * q.k (+ mask);  lse = log(sum of exp(score));
    out = sum of exp(score - lse) * v;  all over the visible keys.
    A key is visible where `mask` shows it, or without a mask where it stands at or before the
    query; and in either case only where `key_mask` is True, at or after `key_start`, within
    `sliding_window`, and in a block that `blocks` lists. Hidden keys and values never reach a
    result, whatever they hold, NaN included. A NaN among the visible ones, or a score of +inf,
    makes the query's out NaN (and its lse, if it is the score); an infinite value makes out
    infinite or NaN. Nothing is written in place.

    Args:
        query: (batch, num_heads, num_queries, head_dim), floating; token t stands at position
            query_start + t.
        key: (num_segments, rows, num_kv_heads, tokens, head_dim), dtype and device of the query;
            num_heads is a multiple of num_kv_heads, and query head h reads kv head
            h // (num_heads // num_kv_heads).
        value: (num_segments, rows, num_kv_heads, tokens, head_dim_v); may overlap `key` in memory.
        positions: (num_segments,) int64 on the CPU: sequence position of the first token of each
            segment.
        softmax_scale: factor of the scores.
        row_table: (num_segments, batch) int64 on the CPU, logical row -> physical row; None: row b
            is row b.
        query_start: sequence position of the first query token.
        key_mask: (batch, S) bool on the query's device, by sequence position, True = visible:
            padding and holes.
        key_start: (batch,) int64, where `positions` is: the first visible position of each row, as
            left padding has it.
        sliding_window: a query at position p sees keys at p - sliding_window + 1 and later; at
            least 1. None: from the first.
        blocks: on the query's device: the blocks that each row and kv head attends to; None: all
            keys.
        mask: (batch or 1, num_heads or 1, num_queries, S), by sequence position, instead of the
            causal rule. Bool: True = visible. Floating: added to the scores; -inf, or the lowest
            finite number of its dtype (which transformers writes for "hidden"), hides the key.

    Returns:
        out (batch, num_heads, num_queries, head_dim_v) and lse (batch, num_heads, num_queries),
        natural log; both float64 for a float64 query, else float32. Where no key is visible: out 0,
        lse -inf.

    Raises:
        LayoutError: sliding_window < 1, or blocks that do not exist or fit the shapes.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, num_heads, num_queries, _ = query.shape
    group_size = num_heads // key.shape[2]
    check_visibility(query, key, sliding_window, blocks)
    keys = _join_segments(key, row_table, batch).to(dtype)  # [B, G, K, D]
    keys = keys.repeat_interleave(group_size, dim=1)  # [B, H, K, D]
    values = _join_segments(value, row_table, batch).to(dtype)
    values = values.repeat_interleave(group_size, dim=1)  # [B, H, K, V]
    key_positions = positions[:, None] + torch.arange(key.shape[3])  # [N, W]
    key_positions = key_positions.flatten().to(query.device)  # [K]
    query_positions = query_start + torch.arange(num_queries, device=query.device)  # [T]

    scores = torch.einsum("bhtd,bhkd->bhtk", query.to(dtype), keys) * softmax_scale
    visible = torch.ones_like(scores, dtype=torch.bool)
    if mask is None:
        visible &= key_positions <= query_positions[:, None]
    elif mask.dtype == torch.bool:
        visible &= mask[..., key_positions]
    else:
        bias = mask[..., key_positions]
        visible &= ~(bias <= torch.finfo(bias.dtype).min)
        scores = scores + bias.to(dtype)
    if key_mask is not None:
        visible &= key_mask[:, None, None, key_positions]
    if key_start is not None:
        visible &= key_positions >= key_start.to(query.device)[:, None, None, None]
    if sliding_window is not None:
        visible &= key_positions > query_positions[:, None] - sliding_window
    if blocks is not None:
        listed = _is_in_a_block(blocks, keys.shape[2])  # [B, G, K]
        visible &= listed.repeat_interleave(group_size, dim=1)[:, :, None]

    scores = scores.masked_fill(~visible, -torch.inf)
    lowest = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    top = torch.cat([scores, lowest], dim=-1).amax(dim=-1, keepdim=True)  # -inf if there is no key
    base = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - base)
    total = weights.sum(dim=-1, keepdim=True)  # [B, H, T, 1]
    terms = weights[..., None] * values[:, :, None]  # [B, H, T, K, V]
    out = terms.masked_fill(~visible[..., None], 0.0).sum(dim=3)
    out = out / total.masked_fill(total == 0.0, 1.0)
    return out, (base + torch.log(total)).squeeze(-1)


def check_visibility(
    query: Tensor, key: Tensor, sliding_window: int | None, blocks: BlockLists | None
) -> None:
    """Raise for a window or for lists that break the rules of `partial_attention`."""
    if sliding_window is not None and sliding_window < 1:
        raise LayoutError(f"sliding_window={sliding_window}: must be at least 1, or None")
    if blocks is not None:
        blocks.check_shape(query.shape[0], key.shape[2], query.device)
        blocks.check_indices(key.shape[0] * key.shape[3])


def _is_in_a_block(blocks: BlockLists, num_keys: int) -> Tensor:
    """(batch, num_kv_heads, num_keys) bool: whether a listed block holds the key."""
    found = torch.zeros(*blocks.num_blocks.shape, num_keys, dtype=torch.bool)
    for row, lists in enumerate(blocks.indices):
        for kv_head, indices in enumerate(lists):
            for index in indices[: blocks.num_blocks[row, kv_head]].tolist():
                found[row, kv_head, index * blocks.block_size : (index + 1) * blocks.block_size] = 1
    return found.to(blocks.indices.device)


def _join_segments(stored: Tensor, row_table: Tensor | None, batch: int) -> Tensor:
    """Logical rows of all segments, end to end: (batch, num_kv_heads, all tokens, dim)."""
    num_segments, _, num_kv_heads, tokens, dim = stored.shape
    joined = stored.new_zeros(batch, num_kv_heads, num_segments * tokens, dim)
    for n in range(num_segments):
        for row in range(batch):
            physical = row if row_table is None else int(row_table[n, row])
            joined[row, :, n * tokens : (n + 1) * tokens] = stored[n, physical]
    return joined
