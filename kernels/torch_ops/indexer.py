"""The lightning indexer in bounded memory: blocks of tokens, and of entries with a running top-k.

Letters: B batch, T query tokens of a block, H index heads, C entries of a block, K chosen so far,
D index_dim.
"""

import torch
from torch import Tensor

from sparsekv.kernels.reference.indexer import check_topk

WORKSPACE_BYTES = 32 * 2**20
"""No tensor made on the way is larger, unless one token of all rows and one entry need more."""

_ENTRIES_WORTH_A_PRODUCT = 4096
"""A block is given this many entries, if there are, before it is given a second query token."""


def lightning_indexer(
    query: Tensor,
    keys: Tensor,
    weights: Tensor,
    num_visible: Tensor,
    topk: int,
    softmax_scale: float,
) -> Tensor:
    """The entries each query token attends to; defined by the reference op of the same name.

    Exactly the definition's entries, tie for tie, if products of blocks round as one product does;
    neither all scores of a token block nor those of single heads are ever held together. Does not
    synchronise.
    """
    check_topk(topk)
    batch, num_tokens = query.shape[:2]
    width = min(topk, keys.shape[1])
    selected = torch.full((batch, num_tokens, width), -1, dtype=torch.int64, device=query.device)
    if selected.numel() == 0:
        return selected
    num_visible = num_visible.expand(batch, num_tokens)
    tokens_per_block, entries_per_block = _block_size(query, keys, width)
    for first in range(0, num_tokens, tokens_per_block):
        tokens = slice(first, first + tokens_per_block)
        best = _RunningTopK(num_visible[:, tokens], width)
        block_query = query[:, tokens]
        scaled = weights[:, tokens].to(_accumulator(query)) * softmax_scale
        for first_entry in range(0, keys.shape[1], entries_per_block):
            block_keys = keys[:, first_entry : first_entry + entries_per_block]
            best.add(_scores(block_query, block_keys, scaled), first_entry)
        selected[:, tokens] = best.indices
    return selected


def _accumulator(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _block_size(query: Tensor, keys: Tensor, width: int) -> tuple[int, int]:
    """Query tokens and entries of a block that keep each tensor within the workspace."""
    batch, num_tokens, num_heads, index_dim = query.shape
    num_entries = keys.shape[1]
    itemsize = _accumulator(query).itemsize
    budget = WORKSPACE_BYTES // batch
    worth = min(num_entries, _ENTRIES_WORTH_A_PRODUCT)
    per_token = max(num_heads * max(worth, index_dim) * itemsize, 8 * (worth + width))
    tokens_per_block = max(1, min(num_tokens, budget // per_token))
    by_products = budget // (max(tokens_per_block * num_heads, index_dim) * itemsize)
    by_candidates = budget // (8 * tokens_per_block) - width  # an index takes 8 bytes
    return tokens_per_block, max(1, min(num_entries, by_products, by_candidates))


def _scores(query: Tensor, keys: Tensor, scaled_weights: Tensor) -> Tensor:
    """Scores of a block of entries: [B, T, C]."""
    dtype = scaled_weights.dtype
    batch, num_tokens, num_heads, _ = query.shape
    rows = query.to(dtype).reshape(batch, num_tokens * num_heads, -1)  # [B, T H, D]
    products = torch.bmm(rows, keys.to(dtype).transpose(1, 2)).relu_()  # [B, T H, C]
    products = products.view(batch * num_tokens, num_heads, -1)
    scores = torch.bmm(scaled_weights.reshape(batch * num_tokens, 1, num_heads), products)
    return scores.view(batch, num_tokens, -1)


class _RunningTopK:
    """The best entries of the blocks seen so far, blocks in ascending order of their entries.

    Chosen entries are held in ascending order and lie before all entries to come, so among the
    candidates of a step the order of places is the order of indices, and ties fall as they should.
    """

    def __init__(self, num_visible: Tensor, width: int) -> None:
        self._limit = num_visible[..., None]  # [B, T, 1]
        self._width = width
        self._scores: Tensor | None = None
        self.indices = num_visible.new_empty((*num_visible.shape, 0), dtype=torch.int64)

    def add(self, scores: Tensor, first_entry: int) -> None:
        """Let a block of entries [B, T, C] compete with those chosen so far."""
        last_entry = first_entry + scores.shape[-1]
        entry_idx = torch.arange(first_entry, last_entry, device=scores.device)
        indices = torch.cat([self.indices, entry_idx.expand(scores.shape)], dim=-1)
        if self._scores is not None:
            scores = torch.cat([self._scores, scores], dim=-1)
        is_visible = (indices >= 0) & (indices < self._limit)
        places = _best_places(scores, is_visible, min(self._width, last_entry))
        is_absent = places == scores.shape[-1]
        places = places.masked_fill(is_absent, 0)
        self.indices = indices.gather(-1, places).masked_fill(is_absent, -1)
        self._scores = scores.gather(-1, places)


def _best_places(scores: Tensor, is_visible: Tensor, count: int) -> Tensor:
    """Places of the `count` best visible candidates, ascending; num_candidates for absent ones.

    torch.topk does not say which of several equal candidates it takes; the value of the last one
    it takes is certain, and the first candidates with that value fill what is left.
    """
    scores = scores.masked_fill(scores.isnan() | ~is_visible, -torch.inf)
    threshold = scores.topk(count, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    is_above = scores > threshold
    is_tied = (scores == threshold) & is_visible
    room = count - is_above.sum(dim=-1, keepdim=True)
    is_chosen = is_above | (is_tied & (is_tied.cumsum(dim=-1, dtype=torch.int32) <= room))
    rank = is_chosen.cumsum(dim=-1, dtype=torch.int32)  # the n-th chosen is where n first appears
    wanted = torch.arange(1, count + 1, dtype=torch.int32, device=scores.device)
    return torch.searchsorted(rank, wanted.expand(*rank.shape[:-1], count).contiguous())
