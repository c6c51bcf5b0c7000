"""Which keys a call of partial attention hides, and what it adds to the scores of the others."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Visibility:
    """The arguments of partial attention that decide it, as the reference op defines them."""

    query_start: int
    key_mask: Tensor | None
    key_start: Tensor | None
    sliding_window: int | None
    mask: Tensor | None

    def first_position(self, queries: slice) -> int | None:
        """Before it no key is visible to any of the query tokens; None: there is no such limit."""
        if self.sliding_window is None:
            return None
        return self.query_start + queries.start - self.sliding_window + 1

    def end_position(self, queries: slice) -> int | None:
        """From it on no key is visible to any of the query tokens; None: there is no such limit."""
        return self.query_start + queries.stop if self.mask is None else None

    def is_limited(self, first: int, last: int, queries: slice) -> bool:
        """Whether distance hides a key at `first` ... `last` from one of the query tokens."""
        first_query = self.query_start + queries.start
        last_query = self.query_start + queries.stop - 1
        is_late = self.mask is None and last > first_query
        window = self.sliding_window
        return is_late or (window is not None and first <= last_query - window)

    def hidden_by_distance(self, positions: Tensor, queries: slice) -> Tensor:
        """(..., query tokens, keys) bool: too late or too early keys, of positions (..., keys)."""
        query_positions = torch.arange(
            self.query_start + queries.start,
            self.query_start + queries.stop,
            device=positions.device,
        )[:, None]
        positions = positions[..., None, :]
        hidden = torch.zeros_like(positions, dtype=torch.bool)
        if self.mask is None:
            hidden = positions > query_positions
        if self.sliding_window is not None:
            hidden = hidden | (positions <= query_positions - self.sliding_window)
        return hidden


def hidden_and_bias(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a mask, bool or added to the scores, hides, and what it adds."""
    if mask.dtype == torch.bool:
        return ~mask, None
    return mask <= torch.finfo(mask.dtype).min, mask


def either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """What any of the two hides; None: nothing."""
    if one is None or other is None:
        return one if other is None else other
    return one | other
