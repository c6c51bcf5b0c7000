"""One decode step to measure: a model's attention layers, a batch, and how much was said before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.attention_shapes import SHAPES, Shape
from benchmarks.results import Row
from sparsekv.format import KVGeometry

NUM_LAYERS = {"qwen3": 48, "mixtral": 32}
"""Attention layers of Qwen3-30B-A3B and of Mixtral-8x7B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What every way of computing the step is given, so that all give the same result.

    Attributes:
        shape: heads and sizes of a layer.
        num_layers: layers of a step.
        batch_size: sequences.
        context: tokens of each sequence before the first step.
        device: the accelerator, "cpu" for the simulated one.
    """

    shape: Shape
    num_layers: int
    batch_size: int
    context: int
    device: torch.device

    @classmethod
    def of_model(cls, name: str, batch_size: int, context: int, device: torch.device) -> Case:
        """All layers of the model whose shape has that name."""
        return cls(
            shape=SHAPES[name],
            num_layers=NUM_LAYERS[name],
            batch_size=batch_size,
            context=context,
            device=device,
        )

    @property
    def geometry(self) -> KVGeometry:
        """What a token of all layers stores."""
        return replace(self.shape.geometry, num_layers=self.num_layers)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values before the first step, all layers."""
        return self.batch_size * self.context * self.geometry.bytes_per_token

    @property
    def size(self) -> str:
        """Batch and context as people write them, such as `16 x 32K`."""
        context = f"{self.context // 1024}K" if self.context % 1024 == 0 else str(self.context)
        return f"{self.batch_size} x {context}"

    @property
    def known(self) -> Row:
        """What stands in each of its rows."""
        return {
            "shape": self.shape.name,
            "batch": self.batch_size,
            "context": self.context,
            "size": self.size,
            "layers": self.num_layers,
            "device": str(self.device),
        }

    def with_layers(self, most: int) -> Case:
        """The same with at most so many layers."""
        return replace(self, num_layers=min(most, self.num_layers))

    def prompt(self) -> tuple[Tensor, Tensor]:
        """Keys and values (batch, num_kv_heads, context, head_dim) of one layer, and of each."""
        return self._tokens(self.context, seed=0)

    def new_token(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the token that each step adds to each layer."""
        return self._tokens(1, seed=1)

    def query(self) -> Tensor:
        """(batch, num_heads, 1, head_dim), wide enough that scores prefer some keys to others."""
        shape = (self.batch_size, self.shape.num_heads, 1, self.shape.head_dim)
        return 3.0 * self._random(shape, self._generator(2))

    def _tokens(self, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = self._generator(seed)
        heads = (self.batch_size, self.shape.num_kv_heads, num_tokens)
        return (
            self._random((*heads, self.shape.head_dim), generator),
            self._random((*heads, self.shape.head_dim_v), generator),
        )

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def _random(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)
