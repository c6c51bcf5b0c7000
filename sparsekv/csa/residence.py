"""Selected entries, collected from wherever they live.

A selection names entries by position. Which region holds each is a lookup in the views of the pool;
each part is gathered there and attended there, and parts are merged outside.

Letters: B batch, T query tokens, K selected entries a token, N segments of a view, S entries of a
    segment, D dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekv.format import KVView


def find(view: KVView, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the selected entries a view holds.

    Args:
        view: consecutive slots of one region, positions ascending.
        indices: (batch, tokens, k) int64 positions of entries on the CPU; -1 = absent.
    Returns:
        segment (batch, tokens, k) int64 index within the view, and is_here (batch, tokens, k) bool;
        segment is 0 where is_here is False.
    """
    size = view.key.shape[3]
    # The last segment that starts at or before the entry. Segments start anywhere in the window's
    # view, at multiples of their size elsewhere.
    segment = torch.searchsorted(view.positions, indices, right=True) - 1
    start = view.positions[segment.clamp(min=0)]
    is_here = (segment >= 0) & (indices >= start) & (indices < start + size)
    return torch.where(is_here, segment, 0), is_here


def gather(view: KVView, indices: Tensor) -> tuple[Tensor, Tensor] | None:
    """Collect the selected entries that a view holds, on the device where they lie.

    Args:
        view: (N, rows, 1, S, D) entries, K = V.
        indices: (batch, tokens, k) int64 on the CPU; -1 = absent.
    Returns:
        gathered (batch, tokens, most, D) and is_valid (batch, tokens, most) bool, on the view's
        device, where `most` is the largest number of entries that a token selects here; None if no
        token selects any.
    """
    segment, is_here = find(view, indices)
    most = int(is_here.sum(-1).max()) if is_here.numel() else 0
    if most == 0:
        return None
    # Those here first, in their order; the rest of each row is cut off or marked.
    order = torch.argsort((~is_here).to(torch.uint8), dim=-1, stable=True)[..., :most]
    segment, is_valid = segment.gather(-1, order), is_here.gather(-1, order)
    chosen = torch.where(is_valid, indices.gather(-1, order), 0)
    offset = torch.where(is_valid, chosen - view.positions[segment], 0)
    rows = torch.arange(indices.shape[0])[:, None, None].expand_as(segment)
    if view.row_table is not None:
        rows = view.row_table[segment, rows]
    device = view.key.device
    entries = view.key[segment.to(device), rows.to(device), 0, offset.to(device)]  # [B, T, most, D]
    return entries, is_valid.to(device)
