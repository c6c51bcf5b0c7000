"""Partial attention from torch's matrix products: block by block, in bounded memory.

A block is some whole segments, or a part of one, against some query tokens; a running softmax
joins the blocks. Letters: N segments, L segments of a block, B batch, G kv heads, E query heads of
one kv head (the group), T query tokens of a block, W tokens of a segment or of the block's part of
it, D head_dim, V head_dim_v.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.reference.partial_attention import check_visibility
from sparsekv.kernels.torch_ops.listed_keys import ListedKeys, Part
from sparsekv.kernels.torch_ops.visibility import Visibility, either, hidden_and_bias

WORKSPACE_BYTES = 16 * 2**20
"""What one block may take: scores, masks, and keys and values that are converted or gathered."""

_LARGEST_WINDOW = 2**50

_KEYS_WORTH_A_PRODUCT = 512
"""A block is given this many keys, if there are, before it is given a second query token."""


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
    """Attention of `query` to one set of keys; defined by the reference op of the same name.

    Products and sums are in float32 (float64 for float64 input). Float32 keys and values without a
    row table are read where they lie if their first three strides collapse into one, as a region's
    do; others are copied a block at a time. On CUDA nothing is read back for a single query token;
    for several, one flag for each block with hidden keys; with `blocks`, some more.
    """
    check_visibility(query, key, sliding_window, blocks)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, num_heads, num_queries, _ = query.shape
    head_dim_v = value.shape[-1]
    out = query.new_zeros(batch, num_heads, num_queries, head_dim_v, dtype=dtype)
    lse = query.new_full((batch, num_heads, num_queries), -torch.inf, dtype=dtype)
    if out.numel() == 0 or key.numel() == 0:
        return out, lse

    queries_per_block, keys_per_block = _block_size(query, key, head_dim_v, dtype)
    visibility = Visibility(
        query_start=query_start,
        key_mask=key_mask,
        key_start=key_start,
        # A window beyond all positions, which may not fit into an int64, hides nothing.
        sliding_window=None if sliding_window is None else min(sliding_window, _LARGEST_WINDOW),
        mask=mask,
    )
    source = (
        _AllKeys(key, value, positions, row_table, visibility)
        if blocks is None
        else ListedKeys(key, value, positions, row_table, blocks, visibility)
    )
    for first in range(0, num_queries, queries_per_block):
        queries = slice(first, min(first + queries_per_block, num_queries))
        scaled = query[:, :, queries].to(dtype) * softmax_scale  # [B, H, T, D]
        grouped = scaled.unflatten(1, (key.shape[2], -1))  # [B, G, E, T, D]
        softmax = _RunningSoftmax(grouped, head_dim_v)
        for keys, values, bias, hidden in source.parts(queries, keys_per_block):
            softmax.add(keys.to(dtype), values.to(dtype), bias, hidden)
        out[:, :, queries], lse[:, :, queries] = softmax.result()
    return out, lse


def _block_size(query: Tensor, key: Tensor, head_dim_v: int, dtype: torch.dtype) -> tuple[int, int]:
    """Query tokens and key tokens of a block that keep it within the workspace."""
    batch, num_heads, num_queries, head_dim = query.shape
    num_segments, _, num_kv_heads, tokens, _ = key.shape
    budget = WORKSPACE_BYTES // dtype.itemsize
    dims = head_dim + head_dim_v
    heads = batch * num_heads

    # A score takes two numbers: itself, and a mask or a bias of its size.
    worth = min(num_segments * tokens, _KEYS_WORTH_A_PRODUCT)
    queries_per_block = min(num_queries, max(1, budget // (heads * (2 * worth + dims))))
    rows = heads * queries_per_block
    # A key and its value are gathered and converted; a segment has its own queries and results.
    per_key = 2 * rows + 2 * batch * num_kv_heads * dims + rows * dims // tokens
    return queries_per_block, max(1, budget // per_key)


def _rows(stored: Tensor, row_table: Tensor | None, segments: slice, tokens: slice) -> Tensor:
    """Logical rows of a block [L, B, G, W, ...]: where they lie, or gathered by the table."""
    block = stored[segments, :, :, tokens]
    if row_table is None:
        return block
    table = row_table[segments].to(stored.device)
    return block[torch.arange(len(table), device=stored.device)[:, None], table]


class _AllKeys:
    """All keys of a call, block by block, and which of a block are hidden from which queries."""

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        row_table: Tensor | None,
        visibility: Visibility,
    ) -> None:
        self._key, self._value = key, value
        self._positions = positions
        self._starts: list[int] = positions.tolist()
        self._row_table = row_table
        self._num_kv_heads, self._tokens = key.shape[2:4]
        self._visibility = visibility
        self._device = key.device

    def parts(self, queries: slice, keys_per_part: int) -> Iterator[Part]:
        """All keys that some of the query tokens may see."""
        for segments, tokens in self._blocks(queries, keys_per_part):
            keys = _rows(self._key, self._row_table, segments, tokens)
            values = _rows(self._value, self._row_table, segments, tokens)
            bias, hidden = self._hidden(segments, tokens, queries)
            yield keys, values, bias, hidden

    def _blocks(self, queries: slice, keys_per_block: int) -> Iterator[tuple[slice, slice]]:
        """(segments, tokens) of each block, without keys too early or too late for the queries."""
        first_seen = self._visibility.first_position(queries)
        end_seen = self._visibility.end_position(queries)
        together = keys_per_block // self._tokens
        if together > 1:
            for first in range(0, len(self._starts), together):
                segments = slice(first, min(first + together, len(self._starts)))
                starts = self._starts[segments]
                is_late = end_seen is not None and min(starts) >= end_seen
                is_early = first_seen is not None and max(starts) + self._tokens <= first_seen
                if not is_late and not is_early:
                    yield segments, slice(0, self._tokens)
            return
        for index, start in enumerate(self._starts):
            begin = 0 if first_seen is None else max(0, first_seen - start)
            end = self._tokens if end_seen is None else min(self._tokens, end_seen - start)
            for first in range(begin, end, keys_per_block):
                yield slice(index, index + 1), slice(first, min(first + keys_per_block, end))

    def _hidden(
        self, segments: slice, tokens: slice, queries: slice
    ) -> tuple[Tensor | None, Tensor | None]:
        """(bias, hidden) of a block, each broadcasting to [L, B, G, E, T, W]; None: neither."""
        rule = self._visibility
        bias = hidden = None
        starts = self._starts[segments]
        first, last = min(starts) + tokens.start, max(starts) + tokens.stop - 1
        if rule.mask is not None:
            block = self._take(rule.mask[:, :, queries], segments, tokens)  # [B, H, T, L, W]
            block = block.permute(3, 0, 1, 2, 4)
            kv_heads = self._num_kv_heads if block.shape[2] > 1 else 1
            hidden, bias = hidden_and_bias(block.unflatten(2, (kv_heads, -1)))
        if rule.is_limited(first, last, queries):
            key_positions = self._key_positions(segments, tokens)[:, None, None, None]
            distance = rule.hidden_by_distance(key_positions, queries)  # [L, 1, 1, 1, T, W]
            hidden = either(hidden, distance)
        if rule.key_mask is not None:
            seen = self._take(rule.key_mask, segments, tokens)  # [B, L, W]
            hidden = either(hidden, ~seen.transpose(0, 1)[:, :, None, None, None])
        if rule.key_start is not None:
            key_positions = self._key_positions(segments, tokens)[:, None, None, None, None]
            row_starts = rule.key_start.to(self._device)[:, None, None, None, None]
            hidden = either(hidden, key_positions < row_starts)  # [L, B, 1, 1, 1, W]
        return bias, hidden

    def _take(self, by_position: Tensor, segments: slice, tokens: slice) -> Tensor:
        """[..., S] -> [..., L, W]: the entries of a block's keys; one segment's without a copy."""
        if segments.stop - segments.start == 1:
            start = self._starts[segments.start]
            return by_position[..., start + tokens.start : start + tokens.stop].unsqueeze(-2)
        return by_position[..., self._key_positions(segments, tokens)]

    def _key_positions(self, segments: slice, tokens: slice) -> Tensor:
        starts = self._positions[segments, None].to(self._device)
        return starts + torch.arange(tokens.start, tokens.stop, device=self._device)


class _RunningSoftmax:
    """Attention to the blocks added so far: largest score, total weight and weighted values."""

    def __init__(self, query: Tensor, head_dim_v: int) -> None:
        """`query` [B, G, E, T, D], scaled, in the dtype of the sums."""
        self._shape = query.shape[:-1]
        self._query = query.flatten(2, 3)  # [B, G, E*T, D]
        self._out = query.new_zeros(*self._shape, head_dim_v)
        self._total = query.new_zeros(self._shape)
        self._top = query.new_full(self._shape, -torch.inf)

    def add(self, keys: Tensor, values: Tensor, bias: Tensor | None, hidden: Tensor | None) -> None:
        """Add keys [L, B, G, W, D], values [L, B, G, W, V], and what _Masks.of says of them."""
        num_segments, tokens = keys.shape[0], keys.shape[3]
        query = self._query.expand(num_segments, -1, -1, -1, -1).flatten(0, 2)  # [L*B*G, E*T, D]
        scores = torch.bmm(query, keys.flatten(0, 2).transpose(1, 2))
        scores = scores.view(num_segments, *self._shape, tokens)  # [L, B, G, E, T, W]
        if bias is not None:
            scores += bias
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)

        top = torch.maximum(self._top, scores.amax(dim=(0, -1)))  # [B, G, E, T]
        base = _finite_base(top)
        weights = scores.sub_(base[..., None]).exp_()
        decay = torch.exp(self._top - base)
        self._top = top
        self._total = self._total * decay + weights.sum(dim=(0, -1))
        product = _weighted_sum(weights, values.flatten(0, 2), hidden)  # [L*B*G, E*T, V]
        added = product.view(num_segments, *self._shape, -1).sum(dim=0)
        self._out = self._out.mul_(decay[..., None]).add_(added)

    def result(self) -> tuple[Tensor, Tensor]:
        """out [B, H, T, V] and lse [B, H, T]; a query that saw no key has out 0 and lse -inf."""
        lse = _finite_base(self._top) + torch.log(self._total)
        out = self._out / self._total.clamp(min=1.0)[..., None]  # the top score alone weighs 1
        return out.flatten(1, 2), lse.flatten(1, 2)


def _finite_base(top: Tensor) -> Tensor:
    """What scores are taken relative to: `top`, finite where nothing is visible (no -inf + inf)."""
    return top.clamp(min=torch.finfo(top.dtype).min)


def _weighted_sum(weights: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """weights [L, B, G, E, T, W] times values [L*B*G, W, V], untouched by values that are hidden.

    A hidden key has weight 0, but 0 * NaN is NaN. So a product that is not finite is done again
    with finite values only, and NaN put back where a visible value was not.
    """
    flat = weights.flatten(3, 4).flatten(0, 2)  # [L*B*G, E*T, W]
    out = torch.bmm(flat, values)
    if hidden is None:
        return out
    one_query = weights.shape[4] == 1
    if not (out.is_cuda and one_query) and out.isfinite().all():
        return out
    finite = values.isfinite()
    visible = (~hidden).expand(weights.shape).flatten(3, 4).flatten(0, 2)
    out = torch.bmm(flat, values.masked_fill(~finite, 0.0))
    reached = torch.bmm(visible.to(values.dtype), (~finite).to(values.dtype))
    return out.masked_fill_(reached > 0.0, torch.nan)
