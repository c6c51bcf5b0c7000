"""Sparse attention from torch's matrix products: rows and tokens block by block, bounded memory.

Letters: B batch, H heads, T query tokens of a block, K chosen entries, D head_dim.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsekv.kernels.reference.sparse_attention import check_indices

WORKSPACE_BYTES = 32 * 2**20
"""What one block may take: gathered entries, scores, queries and results; one token at least."""


def sparse_attention(
    query: Tensor, entries: Tensor, indices: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the entries that indices name; defined by the reference op of the same name.

    Entries are gathered a block at a time, from any strides; there is never a tensor of tokens by
    entries. On CUDA one flag is read back, for the check of the indices.
    """
    check_indices(indices, entries.shape[1])
    out, lse = _empty_results(query)
    if entries.shape[1] == 0:
        return out, lse
    for rows, tokens in _blocks(query, indices.shape[2]):
        chosen = indices[rows, tokens]  # [B, T, K]
        row_idx = torch.arange(rows.start, rows.stop, device=entries.device)[:, None, None]
        gathered = entries[row_idx, chosen.clamp(min=0)]  # [B, T, K, D]
        results = _attend(query[rows, :, tokens], gathered, chosen >= 0, softmax_scale)
        out[rows, :, tokens], lse[rows, :, tokens] = results
    return out, lse


def gathered_attention(
    query: Tensor, gathered: Tensor, is_valid: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to gathered entries; defined by the reference op of the same name.

    Entries are converted a block at a time. Does not synchronise.
    """
    out, lse = _empty_results(query)
    for rows, tokens in _blocks(query, is_valid.shape[2]):
        entries, valid = gathered[rows, tokens], is_valid[rows, tokens]
        results = _attend(query[rows, :, tokens], entries, valid, softmax_scale)
        out[rows, :, tokens], lse[rows, :, tokens] = results
    return out, lse


def _empty_results(query: Tensor) -> tuple[Tensor, Tensor]:
    """out 0 and lse -inf, in the dtype of the accumulators."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_full(query.shape[:-1], -torch.inf, dtype=dtype)
    return torch.zeros_like(query, dtype=dtype, memory_format=torch.contiguous_format), lse


def _blocks(query: Tensor, num_chosen: int) -> Iterator[tuple[slice, slice]]:
    """(rows, tokens) of each block that fits the workspace; none where there is nothing to do."""
    batch, num_heads, num_tokens, head_dim = query.shape
    if query.numel() == 0 or num_chosen == 0:
        return
    itemsize = 8 if query.dtype == torch.float64 else 4
    # Entries as they are gathered and as they are multiplied; scores twice; query and result.
    numbers = 2 * (num_chosen * head_dim + num_heads * num_chosen + num_heads * head_dim)
    fitting = max(1, WORKSPACE_BYTES // (numbers * itemsize))
    tokens_per_block = min(num_tokens, fitting)
    rows_per_block = min(batch, fitting // tokens_per_block)
    for row in range(0, batch, rows_per_block):
        rows = slice(row, min(row + rows_per_block, batch))
        for token in range(0, num_tokens, tokens_per_block):
            yield rows, slice(token, min(token + tokens_per_block, num_tokens))


def _attend(
    query: Tensor, gathered: Tensor, is_valid: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """One block, by two products a token: out [B, H, T, D] and lse [B, H, T]."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    entries = gathered.to(dtype).masked_fill(~is_valid[..., None], 0.0)  # [B, T, K, D]
    scaled = query.transpose(1, 2).to(dtype) * softmax_scale  # [B, T, H, D]
    scores = torch.matmul(scaled, entries.transpose(-1, -2))  # [B, T, H, K]
    scores.masked_fill_(~is_valid[:, :, None], -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    base = top.masked_fill(top == -torch.inf, 0.0)
    weights = scores.sub_(base).exp_()
    total = weights.sum(dim=-1, keepdim=True)  # [B, T, H, 1]
    out = torch.matmul(weights, entries).div_(total.masked_fill(total == 0.0, 1.0))
    lse = (base + torch.log(total)).squeeze(-1)
    return out.transpose(1, 2), lse.transpose(1, 2)
