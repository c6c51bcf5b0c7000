"""What DeepSeek-V4 stores: raw keys of a short window, compressed entries, index keys; and in how
many bytes.

Entries are of 512 values, K = V; a CSA entry stands for 4 tokens and an HCA entry for 128
(arXiv:2609.14507, section 6; the defaults are those of the released configurations).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from sparsekv.checks import check_positive_int
from sparsekv.errors import LayoutError
from sparsekv.format.geometry import KVGeometry

LayerKind = Literal["sliding", "csa", "hca"]
LAYER_KINDS: tuple[LayerKind, ...] = ("sliding", "csa", "hca")
EntryFormat = Literal["native", "packed"]

PACKED_ENTRY_BYTES = 584
"""448 fp8 values, 64 bfloat16 values, 7 scales, 1 byte of padding; for entries of 512 values."""
FP4_KEY_BYTES = 68
"""128 fp4 values and 4 scales; for index keys of 128 values."""
_PACKED_DIM, _FP4_DIM = 512, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedFootprint:
    """Bytes of one layer kind: all its layers, the whole batch."""

    kind: LayerKind
    num_layers: int
    recent_bytes: int
    """Accelerator: raw keys of the sliding window, those of the token in hand apart."""
    open_bytes: int
    """Accelerator: the most that open and prior windows of compressors take on the way."""
    entry_bytes: int
    """Compressed entries: in the four regions for CSA, on the accelerator for HCA."""
    index_bytes: int
    """Accelerator: index keys of CSA layers."""

    @property
    def growing_gpu_bytes(self) -> int:
        """Bytes on the accelerator that grow with the context."""
        return self.index_bytes + (self.entry_bytes if self.kind == "hca" else 0)

    @property
    def gpu_bytes(self) -> int:
        """Bytes on the accelerator; CSA's window of entries, which has a size of its own, apart."""
        return self.recent_bytes + self.open_bytes + self.growing_gpu_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedGeometry:
    """What each layer of a DeepSeek-V4 model stores.

    Raises:
        LayoutError: a count is not a positive whole number, an unknown layer kind or format, or a
            packed format for sizes that it does not have.
    """

    layer_kinds: tuple[LayerKind, ...]
    """Each layer's kind, in order."""
    head_dim: int = 512
    """Values of an entry, and of a raw key; K = V."""
    index_head_dim: int = 128
    """Values of an index key."""
    sliding_window: int = 128
    """Raw tokens that a query sees, its own included."""
    csa_ratio: int = 4
    """Tokens of a CSA entry."""
    hca_ratio: int = 128
    """Tokens of an HCA entry."""
    dtype: torch.dtype = torch.bfloat16
    """Of raw keys, index keys, HCA entries and native CSA entries."""
    entry_format: EntryFormat = "native"
    """CSA entries in the regions: in `dtype`, or packed into 584 bytes."""

    def __post_init__(self) -> None:
        for name in ("head_dim", "index_head_dim", "sliding_window", "csa_ratio", "hca_ratio"):
            check_positive_int(name, getattr(self, name), "take it from the model's config")
        if not self.layer_kinds or set(self.layer_kinds) - set(LAYER_KINDS):
            raise LayoutError(
                f"layer_kinds={self.layer_kinds}: one of {', '.join(LAYER_KINDS)} for each layer; "
                "take them from the model's config.layer_types"
            )
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise LayoutError(
                f"dtype={self.dtype!r}: must be a floating torch dtype; use torch.bfloat16"
            )
        if self.entry_format not in ("native", "packed"):
            raise LayoutError(
                f"entry_format={self.entry_format!r}: must be 'native' (the model's dtype) or "
                "'packed' (584 bytes)"
            )
        if self.entry_format == "packed" and self.head_dim != _PACKED_DIM:
            raise LayoutError(
                f"entry_format='packed' with head_dim={self.head_dim}: the packed format is for "
                f"entries of {_PACKED_DIM} values; use 'native'"
            )

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Indices of the layers of one kind."""
        return tuple(i for i, k in enumerate(self.layer_kinds) if k == kind)

    def ratio_of(self, kind: LayerKind) -> int:
        """Tokens of an entry; 0 for layers that make none."""
        return {"sliding": 0, "csa": self.csa_ratio, "hca": self.hca_ratio}[kind]

    @property
    def pool_geometry(self) -> KVGeometry:
        """The four-region cache of CSA entries; a token there is an entry here."""
        packed = self.entry_format == "packed"
        return KVGeometry(
            num_layers=len(self.layers_of("csa")),
            num_kv_heads=1,
            head_dim=PACKED_ENTRY_BYTES if packed else self.head_dim,
            dtype=torch.uint8 if packed else self.dtype,
            shared_kv=True,
        )

    def production_bytes_per_token(self) -> float:
        """Bytes that one more token of context adds where every entry is packed and index keys are
        fp4, as production engines store them; constant parts are not in it.

        Raises:
            LayoutError: sizes that those formats do not have.
        """
        if (self.head_dim, self.index_head_dim) != (_PACKED_DIM, _FP4_DIM):
            raise LayoutError(
                f"head_dim={self.head_dim}, index_head_dim={self.index_head_dim}: production "
                f"formats are for {_PACKED_DIM} and {_FP4_DIM}; use footprint for other sizes"
            )
        csa, hca = len(self.layers_of("csa")), len(self.layers_of("hca"))
        csa_bytes = csa * (PACKED_ENTRY_BYTES + FP4_KEY_BYTES) / self.csa_ratio
        return csa_bytes + hca * PACKED_ENTRY_BYTES / self.hca_ratio

    def bytes_per_token(self) -> float:
        """Bytes that one more token of context adds as this library stores it; constant parts are
        not in it.
        """
        total = 0.0
        for kind in LAYER_KINDS:
            if ratio := self.ratio_of(kind):
                entry_bytes, key_bytes = self._bytes_per_entry(kind)
                total += len(self.layers_of(kind)) * (entry_bytes + key_bytes) / ratio
        return total

    def footprint(self, num_tokens: int, batch_size: int) -> tuple[CompressedFootprint, ...]:
        """Bytes per layer kind at `num_tokens` tokens of each of `batch_size` sequences."""
        rows = []
        num_recent = min(num_tokens, self.sliding_window - 1)
        for kind in LAYER_KINDS:
            num_layers, ratio = len(self.layers_of(kind)), self.ratio_of(kind)
            entry_bytes, key_bytes = self._bytes_per_entry(kind)
            times = batch_size * num_layers
            entries = times * (num_tokens // ratio) if ratio else 0
            rows.append(
                CompressedFootprint(
                    kind=kind,
                    num_layers=num_layers,
                    recent_bytes=times * num_recent * self.head_dim * self.dtype.itemsize,
                    open_bytes=times * self._most_open_bytes(kind, num_tokens),
                    entry_bytes=entries * entry_bytes,
                    index_bytes=entries * key_bytes,
                )
            )
        return tuple(rows)

    def _bytes_per_entry(self, kind: LayerKind) -> tuple[int, int]:
        """Bytes of an entry and of its index key."""
        native = self.head_dim * self.dtype.itemsize
        if kind != "csa":
            return native, 0
        packed = self.entry_format == "packed"
        return PACKED_ENTRY_BYTES if packed else native, self.index_head_dim * self.dtype.itemsize

    def _most_open_bytes(self, kind: LayerKind, num_tokens: int) -> int:
        """What the compressors of one layer and sequence carry, at its most up to `num_tokens`."""
        if not (ratio := self.ratio_of(kind)):
            return 0
        is_csa = kind == "csa"
        values = 2 * (self.head_dim + (self.index_head_dim if is_csa else 0))  # kv and gate
        # CSA's windows overlap: projections are twice as wide, and a closed window leaves a half.
        width = 2 * values if is_csa else values
        has_prior = is_csa and num_tokens >= ratio
        wide = torch.promote_types(self.dtype, torch.float32).itemsize
        open_bytes = min(num_tokens, ratio - 1) * width * self.dtype.itemsize
        return open_bytes + (ratio * values * wide if has_prior else 0)
