"""DeepSeek-V4's sparse attention over chosen entries, by definition: gather, one softmax.

The parts of an attention (ring, entries here, entries there) are each computed by one of the two
ops below and merged by their lse; the sink is added once, in that merge, and never here.

Letters: B batch, H heads, T query tokens, K chosen entries, D head_dim.
"""

import torch
from torch import Tensor

from sparsekv.errors import LayoutError


def sparse_attention(
    query: Tensor, entries: Tensor, indices: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of each query token to the entries that its indices name; key and value are one.

    score = softmax_scale * q.e;  lse = log(sum of exp(score));  out = sum of exp(score - lse) * e
    (DeepSeek-V4, section 2.3, without the sink). All heads of a token share its indices, and the
    order of the indices does not matter. Entries that a token does not name never reach its
    result, whatever they hold. A NaN in a named entry makes the token's results NaN; an infinite
    score or value makes them infinite or NaN. Nothing is written in place.

    Args:
        query: (batch, num_heads, tokens, head_dim), floating, rotated.
        entries: (batch, num_entries, head_dim), floating, rotated; num_entries may be 0.
        indices: (batch, tokens, k) int64, each named once; -1, anywhere in a row, names nothing.
            k may be 0.
        softmax_scale: factor of the scores.

    Returns:
        out (batch, num_heads, tokens, head_dim), not rotated back, and lse (batch, num_heads,
        tokens), natural log; both float64 for a float64 query, else float32. A token that names
        nothing: out 0, lse -inf.

    Raises:
        LayoutError: indices that are not int64, below -1, beyond the entries, or twice in a row;
            found before anything is computed.
    """
    check_indices(indices, entries.shape[1])
    # One more entry, for -1 to point at: there may be no other.
    entries = torch.cat([entries, torch.zeros_like(query[:, 0, :1, :]).to(entries.dtype)], dim=1)
    rows = torch.arange(len(entries), device=entries.device)[:, None, None]
    return gathered_attention(query, entries[rows, indices], indices >= 0, softmax_scale)


def gathered_attention(
    query: Tensor, gathered: Tensor, is_valid: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """`sparse_attention` for entries that were collected beforehand, from wherever they lay.

    Args:
        query: (batch, num_heads, tokens, head_dim), floating, rotated.
        gathered: (batch, tokens, k, head_dim), floating: the entries of each query token. k may
            be 0.
        is_valid: (batch, tokens, k) bool: False where there is no entry; what `gathered` holds
            there, NaN included, never reaches a result.
        softmax_scale: factor of the scores.

    Returns:
        out (batch, num_heads, tokens, head_dim) and lse (batch, num_heads, tokens), as in
        `sparse_attention`.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    entries = gathered.to(dtype).masked_fill(~is_valid[..., None], 0.0)  # [B, T, K, D]
    scores = torch.einsum("bhtd,btkd->bhtk", query.to(dtype), entries) * softmax_scale
    scores = scores.masked_fill(~is_valid[:, None], -torch.inf)
    lowest = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    top = torch.cat([scores, lowest], dim=-1).amax(dim=-1, keepdim=True)  # -inf without an entry
    base = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - base)
    total = weights.sum(dim=-1, keepdim=True)  # [B, H, T, 1]
    out = torch.einsum("bhtk,btkd->bhtd", weights, entries)
    out = out / total.masked_fill(total == 0.0, 1.0)
    return out, (base + torch.log(total)).squeeze(-1)


def check_indices(indices: Tensor, num_entries: int) -> None:
    """Raise unless each row names distinct entries, with -1 for none. Reads one flag back.

    Raises:
        LayoutError: naming the first offending index.
    """
    if indices.dtype != torch.int64:
        raise LayoutError(f"indices are {indices.dtype}: must be torch.int64; convert them")
    ordered = indices.sort(dim=-1).values
    is_outside = (ordered < -1) | (ordered >= num_entries)
    is_repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if not bool(is_outside.any() | is_repeated.any()):
        return
    if bool(is_outside.any()):
        raise LayoutError(
            f"index {ordered[is_outside][0].item()} for {num_entries} entries: must be from 0 to "
            f"{num_entries - 1}, or -1 for none; choose among the entries that exist"
        )
    raise LayoutError(
        f"index {ordered[..., 1:][is_repeated][0].item()} is twice in one row: an entry counts "
        "once in a softmax; remove duplicates"
    )
