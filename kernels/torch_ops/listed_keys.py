"""Keys and values of block lists, gathered some at a time.

Letters as in partial_attention.py; K keys gathered at a time of each row and kv head.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.torch_ops.visibility import Visibility, hidden_and_bias

Part = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys [L, B, G, W, D], values [L, B, G, W, V], and bias and hidden, each [L, B, G, E, T, W]."""


class ListedKeys:
    """The keys of one call's block lists."""

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        row_table: Tensor | None,
        blocks: BlockLists,
        visibility: Visibility,
    ) -> None:
        device = key.device
        self._key, self._value = key, value
        self._num_segments, self._tokens = key.shape[0], key.shape[3]
        self._positions = positions.to(device)
        self._row_table = None if row_table is None else row_table.to(device)
        self._blocks = blocks
        self._visibility = visibility
        batch, num_kv_heads = blocks.num_blocks.shape
        self._rows = torch.arange(batch, device=device)[:, None, None]
        self._kv_heads = torch.arange(num_kv_heads, device=device)[:, None]

    def parts(self, queries: slice, keys_per_part: int) -> Iterator[Part]:
        """All listed keys for some query tokens; those past the end of a list are hidden."""
        if self._blocks.num_blocks.numel() == 0:
            return
        end = int(self._blocks.num_blocks.max()) * self._blocks.block_size
        for first in range(0, end, keys_per_part):
            index, is_listed = self._listed(first, min(first + keys_per_part, end))
            segments, offsets = index // self._tokens, index % self._tokens
            rows = self._rows if self._row_table is None else self._row_table[segments, self._rows]
            place = (segments, rows, self._kv_heads, offsets)
            positions = self._positions[segments] + offsets  # [B, G, K]
            bias, hidden = self._hidden(positions, is_listed, queries)
            yield self._key[place][None], self._value[place][None], bias, hidden

    def _listed(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys `first` to `last` of each list, and which of them exist; else they are key 0."""
        block_size = self._blocks.block_size
        places = torch.arange(first, last, device=self._key.device)
        index = self._blocks.indices[..., places // block_size] * block_size + places % block_size
        is_listed = places // block_size < self._blocks.num_blocks[..., None]
        is_listed &= index < self._num_segments * self._tokens  # the last block may be partial
        return index.masked_fill(~is_listed, 0), is_listed

    def _hidden(
        self, positions: Tensor, is_listed: Tensor, queries: slice
    ) -> tuple[Tensor | None, Tensor]:
        rule = self._visibility
        padded = ~is_listed
        if rule.key_mask is not None:
            padded |= ~rule.key_mask[self._rows, positions]
        if rule.key_start is not None:
            padded |= positions < rule.key_start.to(positions.device)[:, None, None]
        hidden = padded[None, :, :, None, None]  # [1, B, G, 1, 1, K]
        if rule.mask is None or rule.sliding_window is not None:
            distance = rule.hidden_by_distance(positions, queries)  # [B, G, T, K]
            hidden = hidden | distance[None, :, :, None]
        if rule.mask is None:
            return None, hidden
        masked, bias = hidden_and_bias(self._take(rule.mask[:, :, queries], positions))
        return bias, hidden | masked

    def _take(self, mask: Tensor, positions: Tensor) -> Tensor:
        """[B or 1, H or 1, T, S] -> [1, B, G, E, T, K]."""
        batch, num_kv_heads, _ = positions.shape
        mask = mask.expand(batch, -1, -1, -1)
        mask = mask.unflatten(1, (num_kv_heads if mask.shape[1] > 1 else 1, -1))
        mask = mask.expand(-1, num_kv_heads, -1, -1, -1)
        index = positions[:, :, None, None].expand(*mask.shape[:-1], -1)
        return mask.gather(-1, index)[None]
