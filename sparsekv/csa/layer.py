"""Everything one DeepSeek-V4 layer remembers.

On the accelerator: the raw keys of the last tokens, compressor states, index keys, HCA entries. In
the four regions: the CSA layers' compressed entries. A step reads and extends this; states are
replaced, never written in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from sparsekv.csa.compressor import CompressorState


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """The small, constant-sized memory of a layer between two steps."""

    num_tokens: int = 0
    recent: Tensor | None = None
    """(batch, at most sliding_window - 1, dim): raw keys = values, rotated."""
    compressor: CompressorState = field(default_factory=CompressorState)
    indexer: CompressorState = field(default_factory=CompressorState)

    def recent_bytes(self) -> int:
        """Bytes of the raw keys."""
        return 0 if self.recent is None else self.recent.numel() * self.recent.element_size()

    def open_tensors(self) -> list[Tensor]:
        """What both compressors carry."""
        return [*self.compressor.tensors().values(), *self.indexer.tensors().values()]

    def select_rows(self, indices: Tensor) -> LayerState:
        """The state of sequences `indices`, in that order."""
        return replace(
            self,
            recent=None if self.recent is None else self.recent.index_select(0, indices),
            compressor=self.compressor.select_rows(indices),
            indexer=self.indexer.select_rows(indices),
        )
