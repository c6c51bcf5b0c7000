"""Blocks of one size to gather from keys and values in memory, others in every call."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.attention_shapes import WINDOW_SIZE, KVMemory
from benchmarks.buffer import Buffer
from sparsekv.kernels import cpu
from sparsekv.kernels.block_lists import BlockLists


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """What one call gathers.

    Attributes:
        source: keys, or values (num_segments, rows, num_kv_heads, tokens, head_dim).
        blocks: the blocks of each row and kv head.
        flat_indices: the same pieces, as numbers of rows of `GatherPieces.flat`.
    """

    source: Tensor
    blocks: BlockLists
    flat_indices: Tensor


class GatherPieces:
    """All blocks of some memory in random order, a part of them in each call, keys or values.

    Args:
        memory: keys and values of a shape that stores both, heads alike; a buffer's first bytes.
        buffer: that buffer.
        target: bytes to gather into, as many as each call gathers.
        piece_bytes: size of a block of one kv head.
    """

    def __init__(self, memory: KVMemory, buffer: Buffer, target: Tensor, piece_bytes: int) -> None:
        rows, heads, dim = memory.rows, memory.shape.num_kv_heads, memory.shape.head_dim
        block_size = piece_bytes // (2 * dim)
        max_blocks = target.numel() // (rows * heads * piece_bytes)
        self.flat = numbers_of(memory, buffer).view(-1, block_size * dim)
        self.num_bytes = rows * heads * max_blocks * piece_bytes
        gathered = target[: self.num_bytes].view(torch.bfloat16)
        self.out = gathered.view(rows, heads, max_blocks, block_size, dim)
        self.selections = _selections(memory, block_size, max_blocks)
        self._next = itertools.cycle(self.selections)

    def gather(self) -> None:
        """By the library."""
        chosen = next(self._next)
        cpu.gather_blocks(chosen.source, chosen.blocks, self.out)

    def index_select(self) -> None:
        """By torch, from one matrix of pieces, which a region without a row table is."""
        indices = next(self._next).flat_indices
        torch.index_select(self.flat, 0, indices, out=self.out.view(-1, self.flat.shape[1]))

    def is_exact(self) -> bool:
        """Whether a gather leaves the same bytes as indexing."""
        chosen = next(self._next)
        cpu.gather_blocks(chosen.source, chosen.blocks, self.out)
        want = self.flat[chosen.flat_indices].view_as(self.out)
        return torch.equal(self.out.view(torch.int16), want.view(torch.int16))


def numbers_of(memory: KVMemory, buffer: Buffer) -> Tensor:
    """All segments end to end, as bfloat16."""
    return buffer.tensor()[: memory.span.num_bytes].view(torch.bfloat16)


def _selections(memory: KVMemory, block_size: int, max_blocks: int) -> list[Selection]:
    rows, heads = memory.rows, memory.shape.num_kv_heads
    of_segment = WINDOW_SIZE // block_size
    num_blocks = memory.num_segments * of_segment
    generator = torch.Generator().manual_seed(0)
    lists = torch.arange(rows * heads).view(rows, heads, 1)
    lengths = torch.full((rows, heads), max_blocks)
    found = []
    stored = memory.segments(0, memory.num_segments)
    for part, source in enumerate(stored):  # keys, values
        order = torch.rand(rows, heads, num_blocks, generator=generator).argsort(dim=-1)
        for indices in order.split(max_blocks, dim=-1):
            if indices.shape[-1] < max_blocks:
                continue
            segment, within = indices // of_segment, indices % of_segment
            run = (segment * rows * heads + lists) * len(stored) + part
            blocks = BlockLists(
                indices=indices.contiguous(), num_blocks=lengths, block_size=block_size
            )
            flat = (run * of_segment + within).flatten()
            found.append(Selection(source=source, blocks=blocks, flat_indices=flat))
    return found
