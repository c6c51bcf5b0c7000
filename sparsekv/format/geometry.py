"""The shape of one token's keys and values in one layer, and how many bytes it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekv.checks import check_positive_int
from sparsekv.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """What a model stores for each token.

    Raises:
        LayoutError: a count is not a positive whole number, the dtype is not a floating one, or
            `shared_kv` with values wider than keys.
    """

    num_layers: int
    """Layers with full attention; layers that slide keep their own small cache and do not count."""
    num_kv_heads: int
    """Key/value heads of a layer."""
    head_dim: int
    """Values of one key."""
    head_dim_v: int | None = None
    """Values of one value vector; None: as wide as a key."""
    dtype: torch.dtype = torch.bfloat16
    """Element type of every region."""
    shared_kv: bool = False
    """V is the first `head_dim_v` columns of K (MLA 576/512, DeepSeek-V4 512/512): stored once."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            check_positive_int(name, getattr(self, name), "take it from the model's config")
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        check_positive_int(
            "head_dim_v", self.head_dim_v, "leave it None if values are as wide as keys"
        )
        # Bytes stand for packed entries, which only their own ops can read.
        is_packed = self.dtype == torch.uint8 and self.shared_kv
        if not is_packed and not getattr(self.dtype, "is_floating_point", False):
            raise LayoutError(
                f"dtype={self.dtype!r}: must be a floating torch dtype; use torch.bfloat16, "
                "torch.float16 or "
                "torch.float32"
            )
        if self.shared_kv and self.value_dim > self.head_dim:
            raise LayoutError(
                f"head_dim_v={self.head_dim_v} with shared_kv: values are the first columns of "
                "keys, so at most "
                f"head_dim={self.head_dim}; lower head_dim_v or set shared_kv=False"
            )

    @property
    def value_dim(self) -> int:
        """`head_dim_v`, never None."""
        assert self.head_dim_v is not None
        return self.head_dim_v

    @property
    def elements_per_token(self) -> int:
        """Stored elements of one token of one kv head: keys, and values unless they are shared."""
        return self.head_dim + (0 if self.shared_kv else self.value_dim)

    @property
    def bytes_per_token_per_layer(self) -> int:
        """Bytes of one token of one sequence in one layer, all kv heads."""
        return self.num_kv_heads * self.elements_per_token * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one sequence in all layers."""
        return self.num_layers * self.bytes_per_token_per_layer

    def check_tokens(
        self, key: Tensor, value: Tensor | None, batch_size: int, device: torch.device
    ) -> None:
        """Raise LayoutError unless keys (batch, num_kv_heads, tokens, head_dim) and values, None
        where they are part of the keys, are what a cache of this geometry stores.
        """
        if (value is None) != self.shared_kv:
            rule = (
                "V is part of K here; pass no value"
                if self.shared_kv
                else "keys come with values; pass both"
            )
            raise LayoutError(
                f"value={'None' if value is None else 'a tensor'}: {rule} "
                f"(shared_kv={self.shared_kv})"
            )
        tokens = key.shape[2] if key.ndim == 4 else 0
        for name, tensor, width in (
            ("key", key, self.head_dim),
            ("value", value, self.value_dim),
        ):
            if tensor is None:
                continue
            expected = (batch_size, self.num_kv_heads, tokens, width)
            if tuple(tensor.shape) != expected:
                raise LayoutError(
                    f"{name} of shape {tuple(tensor.shape)}: this cache holds (batch, "
                    "num_kv_heads, tokens, dim) = "
                    f"({expected[0]}, {expected[1]}, tokens, {expected[3]}); build a new cache "
                    "for another model or batch"
                )
            if tensor.dtype != self.dtype:
                raise LayoutError(
                    f"{name} of dtype {tensor.dtype}: this cache holds {self.dtype}; cast it first"
                )
            if tensor.device != device:
                raise LayoutError(
                    f"{name} on {tensor.device}: this cache's accelerator is {device}; move "
                    "it there"
                )
