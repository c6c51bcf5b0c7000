"""The attention shapes of four models, and their keys and values cut from one piece of memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.buffer import Buffer
from sparsekv.format import KVGeometry
from sparsekv.regions.stack import split_elements

WINDOW_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Heads and sizes of one layer's attention; its numbers are bfloat16.

    Attributes:
        name: what the command line and the rows call it.
        title: what tables call it.
        num_heads: query heads.
        num_kv_heads: heads of keys and values.
        head_dim: numbers of a key.
        head_dim_v: numbers of a value.
        shared_kv: values are the first columns of the keys, and stored once.
    """

    name: str
    title: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    shared_kv: bool = False

    @property
    def geometry(self) -> KVGeometry:
        """What a token of one layer stores."""
        return KVGeometry(
            num_layers=1,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            shared_kv=self.shared_kv,
        )

    @property
    def softmax_scale(self) -> float:
        """The usual factor of the scores."""
        return float(self.head_dim) ** -0.5


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="qwen3",
            title="Qwen3 (32 / 4 heads, 128)",
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            head_dim_v=128,
        ),
        Shape(
            name="mixtral",
            title="Mixtral (32 / 8 heads, 128)",
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            head_dim_v=128,
        ),
        Shape(
            name="mla",
            title="MLA (16 heads, 576 / 512)",
            num_heads=16,
            num_kv_heads=1,
            head_dim=576,
            head_dim_v=512,
            shared_kv=True,
        ),
        Shape(
            name="v4",
            title="DeepSeek-V4 (64 heads, K = V, 512)",
            num_heads=64,
            num_kv_heads=1,
            head_dim=512,
            head_dim_v=512,
            shared_kv=True,
        ),
    )
}


class KVMemory:
    """Segments of one shape, one after the other as in a CPU region, over all of a buffer.

    Args:
        buffer: filled with finite bfloat16 numbers.
        shape: what is cut from it.
        rows: sequences of the batch.
    """

    def __init__(self, buffer: Buffer, shape: Shape, rows: int) -> None:
        self.shape = shape
        self.rows = rows
        self.segment_bytes = rows * WINDOW_SIZE * shape.geometry.bytes_per_token_per_layer
        self.num_segments = buffer.span.num_bytes // self.segment_bytes
        if not self.num_segments:
            raise ValueError(
                f"{buffer.span.num_bytes} bytes hold no segment of {self.segment_bytes} bytes: "
                "use fewer rows or more memory"
            )
        self.span = buffer.span.part(0, self.num_segments * self.segment_bytes)
        self._numbers = buffer.tensor()[: self.span.num_bytes].view(torch.bfloat16)

    def segments(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values (count, rows, num_kv_heads, tokens, dim) where the library keeps them."""
        geometry = self.shape.geometry
        per_head = WINDOW_SIZE * geometry.elements_per_token
        elements = self._numbers.view(-1, self.rows, self.shape.num_kv_heads, per_head)
        return split_elements(elements[first : first + count], geometry, WINDOW_SIZE)

    def joined(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """As many keys and values as of `segments`, (rows, num_kv_heads, all tokens, dim).

        What torch's attention wants: each row's tokens end to end. Other numbers, same memory.
        """
        shape, tokens = self.shape, count * WINDOW_SIZE
        size = self.segment_bytes // 2
        numbers = self._numbers[first * size : (first + count) * size]
        heads = (self.rows, shape.num_kv_heads, tokens)
        if shape.shared_kv:
            keys = numbers.view(*heads, shape.head_dim)
            return keys, keys[..., : shape.head_dim_v]
        keys, values = numbers.split(self.rows * shape.num_kv_heads * tokens * shape.head_dim)
        return keys.view(*heads, shape.head_dim), values.view(*heads, shape.head_dim_v)


class Turns:
    """Windows that go round a span, so that each byte comes back only after all the others."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.next_byte = 0

    def take(self, num_bytes: int, unit: int) -> int:
        """The first byte, a multiple of `unit`, of the next `num_bytes`, which are used now."""
        first = -(-self.next_byte // unit) * unit
        if first + num_bytes > self._num_bytes:
            first = 0
        self.next_byte = first + num_bytes
        return first
