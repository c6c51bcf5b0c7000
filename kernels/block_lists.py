"""Which blocks of keys each row and kv head attends to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekv.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockLists:
    """Lists of blocks, one for each row and kv head, of different lengths.

    Block n is the keys n * block_size ... (n + 1) * block_size - 1, counted through all segments
    end to end, whatever their positions: it may cross from a segment to the next, and the last
    block may be a partial one.

    Attributes:
        indices: (batch, num_kv_heads, max_blocks) int64: the blocks, in any order, each at most
            once (this is not checked: a block listed twice counts twice in the softmax).
        num_blocks: (batch, num_kv_heads) int64, on the same device: how many of each list count,
            from its start. What lies beyond is ignored, whatever it holds.
        block_size: tokens of a block.

    Raises:
        LayoutError: shapes, dtypes or devices break these rules, or block_size is out of range.
    """

    indices: Tensor
    num_blocks: Tensor
    block_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= 2**48:
            raise LayoutError(
                f"block_size={self.block_size}: must be at least 1 token, and at most 2**48"
            )
        for name, tensor, num_dims in (
            ("indices", self.indices, 3),
            ("num_blocks", self.num_blocks, 2),
        ):
            if tensor.dtype != torch.int64 or tensor.dim() != num_dims:
                raise LayoutError(
                    f"{name} {tuple(tensor.shape)} of {tensor.dtype}: must be int64, of shape "
                    f"(batch, num_kv_heads{', max_blocks' if num_dims == 3 else ''}); convert it"
                )
        if self.indices.shape[:2] != self.num_blocks.shape:
            raise LayoutError(
                f"indices {tuple(self.indices.shape)} and num_blocks "
                f"{tuple(self.num_blocks.shape)}: must have the same rows and kv heads"
            )
        if self.indices.device != self.num_blocks.device:
            raise LayoutError(
                f"indices lie on {self.indices.device}, num_blocks on {self.num_blocks.device}: "
                "must lie on one device; move one"
            )

    def check_shape(self, batch: int, num_kv_heads: int, device: torch.device) -> None:
        """Raise unless there is a list for each row and kv head, on that device.

        Raises:
            LayoutError: as said.
        """
        if self.num_blocks.shape != (batch, num_kv_heads) or self.num_blocks.device != device:
            raise LayoutError(
                f"block lists for {tuple(self.num_blocks.shape)} rows and kv heads on "
                f"{self.num_blocks.device}: must be for ({batch}, {num_kv_heads}), on {device}"
            )

    def check_indices(self, num_keys: int) -> None:
        """Raise unless all that counts names blocks of `num_keys` keys. Reads one flag back.

        Raises:
            LayoutError: a list longer than max_blocks or than there are blocks, or a block that
                does not exist.
        """
        existing = -(-num_keys // self.block_size)
        longest = min(existing, self.indices.shape[2])
        is_wrong = (self.indices < 0) | (self.indices >= existing)
        is_wrong = is_wrong & self.is_listed()
        if bool(is_wrong.any() | ((self.num_blocks < 0) | (self.num_blocks > longest)).any()):
            raise LayoutError(
                f"block lists of up to {int(self.num_blocks.max())} blocks: of {num_keys} keys "
                f"there are blocks 0 to {existing - 1}, and room for {self.indices.shape[2]}; "
                "list existing blocks, each once"
            )

    def is_listed(self) -> Tensor:
        """(batch, num_kv_heads, max_blocks) bool: False where `indices` is to be ignored."""
        places = torch.arange(self.indices.shape[2], device=self.indices.device)
        return places < self.num_blocks[..., None]
