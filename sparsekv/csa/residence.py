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
    segment = torch.searchsorted(view.positions, indices.contiguous(), right=True) - 1
    start = view.positions[segment.clamp(min=0)]
    is_here = (segment >= 0) & (indices >= start) & (indices < start + size)
    return torch.where(is_here, segment, 0), is_here


def slots(view: KVView, indices: Tensor) -> tuple[Tensor, Tensor] | None:
    """Where in a view the selected entries lie that it holds.

    Args:
        view: (N, rows, 1, S, D) entries, K = V.
        indices: (batch, tokens, k) int64 on the CPU; -1 = absent.
    Returns:
        slot (batch, tokens, most) int64, for `entries_at`, and is_valid (batch, tokens, most) bool,
        on the CPU, where `most` is the largest number of entries that a token selects here; slot is
        0 where is_valid is False. None if no token selects any.
    """
    segment, is_here = find(view, indices)
    most = int(is_here.sum(-1).max()) if is_here.numel() else 0
    if most == 0:
        return None
    # Those here first, in their order; the rest of each row is cut off or marked.
    order = torch.argsort((~is_here).to(torch.uint8), dim=-1, stable=True)[..., :most]
    segment, is_valid = segment.gather(-1, order), is_here.gather(-1, order)
    offset = indices.gather(-1, order) - view.positions[segment]
    rows = torch.arange(indices.shape[0])[:, None, None].expand_as(segment)
    if view.row_table is not None:
        rows = view.row_table[segment, rows]
    num_rows, size = view.key.shape[1], view.key.shape[3]
    slot = (segment * num_rows + rows) * size + offset
    return torch.where(is_valid, slot, 0), is_valid


def entries_at(view: KVView, slot: Tensor) -> Tensor:
    """The entries (..., D) in slots (...) of a view, on the device where they lie."""
    num_rows, size = view.key.shape[1], view.key.shape[3]
    slot = slot.to(view.key.device)
    segment, row = slot // (num_rows * size), slot // size % num_rows
    return view.key[segment, row, 0, slot % size]


def gather(view: KVView, indices: Tensor) -> tuple[Tensor, Tensor] | None:
    """Collect the selected entries that a view holds, on the device where they lie.

    Returns:
        gathered (batch, tokens, most, D) and is_valid (batch, tokens, most) bool, as in `slots`; on
        the view's device.
    """
    found = slots(view, indices)
    if found is None:
        return None
    slot, is_valid = found
    return entries_at(view, slot), is_valid.to(view.key.device)
