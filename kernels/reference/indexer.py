"""DeepSeek-V4's lightning indexer, by definition: score every entry, sort, keep the best.

It chooses which compressed entries a query token of a CSA layer attends to, one list for all its
heads. What the scores are compared by (higher, then lower index) is part of the definition, so
that any two implementations choose the same entries from the same scores.
"""

import torch
from torch import Tensor

from sparsekv.errors import LayoutError


def index_scores(query: Tensor, keys: Tensor, weights: Tensor, softmax_scale: float) -> Tensor:
    """Score of each entry for each query token (DeepSeek-V4, equations 13-17).

    score[t, i] = sum over heads h of weights[t, h] * relu(query[t, h] . keys[i]) * softmax_scale

    Args:
        query: (batch, tokens, index_heads, index_dim), floating, rotated.
        keys: (batch, num_entries, index_dim), floating, rotated.
        weights: (batch, tokens, index_heads), floating, with any scale of theirs in them; may be
            negative.
        softmax_scale: index_dim ** -0.5.

    Returns:
        (batch, tokens, num_entries), float64 for a float64 query, else float32. Where no head's
        product is positive the score is exactly 0, so ties are common with few heads.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    products = torch.einsum("bthd,bnd->bthn", query.to(dtype), keys.to(dtype))
    scores = torch.einsum("bth,bthn->btn", weights.to(dtype), torch.relu(products))
    return scores * softmax_scale


def select_entries(scores: Tensor, num_visible: Tensor, topk: int) -> Tensor:
    """The `topk` best of the visible entries of each query token.

    Entry i is visible to token t if i < num_visible[t]. Of two visible entries the one with the
    higher score is better, and with equal scores the one with the lower index; 0.0 and -0.0 are
    equal. -inf and NaN count as one score, below every other. Such entries are still chosen where
    fewer than `topk` others are visible: as long as num_visible <= topk, all visible entries are.

    Args:
        scores: (batch, tokens, num_entries), floating.
        num_visible: (batch or 1, tokens), int32 or int64; more than num_entries means all, less
            than 1 none. In a model, (position + 1) // ratio: the token that fills a window
            already sees its entry.
        topk: entries to choose, at least 1.

    Returns:
        (batch, tokens, min(topk, num_entries)) int64, ascending; where fewer are visible, -1 fills
        the tail.

    Raises:
        LayoutError: topk below 1.
    """
    check_topk(topk)
    num_entries = scores.shape[-1]
    limit = num_visible[..., None].clamp(max=num_entries)  # [B or 1, T, 1]
    entry_idx = torch.arange(num_entries, device=scores.device)
    # Visible entries come first by index, so a stable sort keeps hidden ones behind their -inf.
    ranked = scores.masked_fill(scores.isnan() | (entry_idx >= limit), -torch.inf)
    best = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    best = best.masked_fill(best >= limit, num_entries).sort(dim=-1).values
    return best.masked_fill(best == num_entries, -1)


def lightning_indexer(
    query: Tensor,
    keys: Tensor,
    weights: Tensor,
    num_visible: Tensor,
    topk: int,
    softmax_scale: float,
) -> Tensor:
    """The entries each query token attends to: `select_entries` of its `index_scores`.

    Args:
        query, keys, weights, softmax_scale: as in `index_scores`.
        num_visible, topk: as in `select_entries`.

    Returns:
        (batch, tokens, min(topk, num_entries)) int64, ascending, -1 at the tail.

    Raises:
        LayoutError: topk below 1.
    """
    return select_entries(index_scores(query, keys, weights, softmax_scale), num_visible, topk)


def check_topk(topk: int) -> None:
    """Raise unless at least one entry is to be chosen."""
    if topk < 1:
        raise LayoutError(f"topk={topk}: must be at least 1; use the model's index_topk")
