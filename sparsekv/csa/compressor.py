"""What a compressor carries from one call to the next, so that any cut of a sequence into calls
gives the same entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsekv.kernels.dispatch import carried_series, compress


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorWeights:
    """One compressor's parameters."""

    position_bias: Tensor
    """(ratio, width): added to the gate by place in the window; width is twice the entry's where
    windows overlap.
    """
    norm_weight: Tensor
    """(dim,)"""
    eps: float

    @property
    def ratio(self) -> int:
        """Tokens of a window, which makes one entry."""
        return self.position_bias.shape[0]

    @property
    def overlaps(self) -> bool:
        """Whether an entry also reads the window before its own."""
        return self.position_bias.shape[1] == 2 * self.norm_weight.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorState:
    """Tokens of the open window and, where windows overlap, the last closed one. Never written in
    place.
    """

    open_kv: Tensor | None = None
    """(batch, tokens of the open window, width): values not in an entry yet; None before any."""
    open_gate: Tensor | None = None
    """Likewise, without the position bias."""
    prior_kv: Tensor | None = None
    """(batch, ratio, dim): series a of the last closed window; None before one closes."""
    prior_gate: Tensor | None = None
    """Likewise, position bias added."""
    num_entries: int = 0
    """Entries made so far: the next one is of window `num_entries`."""

    def advance(
        self, kv: Tensor, gate: Tensor, weights: CompressorWeights
    ) -> tuple[CompressorState, Tensor]:
        """Add tokens: (the state after them, the entries they close).

        Args:
            kv, gate: (batch, tokens, width) projections of the new tokens.
        Returns:
            entries (batch, num_closed, dim), not rotated yet; entry i is that of window
            `self.num_entries + i` and gets the rotary position of that window's first token.
        """
        if self.open_kv is not None and self.open_gate is not None:
            kv, gate = torch.cat([self.open_kv, kv], 1), torch.cat([self.open_gate, gate], 1)
        num_closed = kv.shape[1] // weights.ratio
        closed = num_closed * weights.ratio
        entries = compress(
            kv[:, :closed],
            gate[:, :closed],
            weights.position_bias,
            weights.norm_weight,
            ratio=weights.ratio,
            eps=weights.eps,
            prior_kv=self.prior_kv,
            prior_gate=self.prior_gate,
        )
        state = replace(
            self,
            # Clones: a slice would keep a whole prefill's projections alive.
            open_kv=kv[:, closed:].clone(),
            open_gate=gate[:, closed:].clone(),
            num_entries=self.num_entries + num_closed,
        )
        if weights.overlaps and num_closed:
            prior_kv, prior_gate = carried_series(
                kv[:, :closed], gate[:, :closed], weights.position_bias
            )
            state = replace(state, prior_kv=prior_kv, prior_gate=prior_gate)
        return state, entries

    def tensors(self) -> dict[str, Tensor]:
        """The tensors there are, by field."""
        fields = ("open_kv", "open_gate", "prior_kv", "prior_gate")
        return {name: t for name in fields if (t := getattr(self, name)) is not None}

    def select_rows(self, indices: Tensor) -> CompressorState:
        """The state of sequences `indices`, in that order."""
        chosen = {name: tensor.index_select(0, indices) for name, tensor in self.tensors().items()}
        return CompressorState(**chosen, num_entries=self.num_entries)
