"""Attention calls to be timed: queries of a shape, and keys and values laid out as regions are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekv.format import KVGeometry
from sparsekv.kernels.dispatch import partial_attention_for
from sparsekv.regions.stack import split_elements

SEGMENT_TOKENS = 256
"""Tokens of a segment: the window that caches have by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLoad:
    """One layer's decode attention, of a batch."""

    geometry: KVGeometry
    num_heads: int
    batch_size: int

    @property
    def segment_flops(self) -> int:
        """Operations of attention to a segment of every sequence; a product and its sum are two."""
        dims = self.geometry.head_dim + self.geometry.value_dim
        return 2 * self.batch_size * SEGMENT_TOKENS * self.num_heads * dims

    def over(self, memory: Tensor, device: torch.device) -> Callable[[], object]:
        """A call, by the kernels of `device`, that reads all of some host memory once.

        Args:
            memory: bytes, whole segments of them; registered, unless `device` is the CPU.
            device: which attends.
        """
        heads = (self.batch_size, self.geometry.num_kv_heads)
        head_elements = SEGMENT_TOKENS * self.geometry.elements_per_token
        return self._call(memory.view(self.geometry.dtype).view(-1, *heads, head_elements), device)

    def in_caches(self, num_segments: int) -> Callable[[], object]:
        """A call, by the CPU, that reads the keys and values of one head again and again: the
        caches hold them, so that nothing but its products takes time.
        """
        size = SEGMENT_TOKENS * self.geometry.elements_per_token
        heads = (self.batch_size, self.geometry.num_kv_heads)
        elements = random_numbers((size,), self.geometry.dtype)
        return self._call(elements.expand(num_segments, *heads, size), elements.device)

    def _call(self, elements: Tensor, device: torch.device) -> Callable[[], object]:
        key, value = split_elements(elements, self.geometry, SEGMENT_TOKENS)
        shape = (self.batch_size, self.num_heads, 1, self.geometry.head_dim)
        query = random_numbers(shape, self.geometry.dtype).to(device)
        num_segments = len(elements)
        positions = SEGMENT_TOKENS * torch.arange(num_segments, device="cpu")
        attend = partial_attention_for(device)

        def call() -> object:
            return attend(
                query,
                key,
                value,
                positions,
                self.geometry.head_dim**-0.5,
                query_start=num_segments * SEGMENT_TOKENS,
            )

        return call


def random_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normally distributed, on the CPU, the same each time: the caller's own are left alone."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
