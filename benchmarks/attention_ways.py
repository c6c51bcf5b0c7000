"""The ways to compute decode attention on the CPU that are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention_checks import ISAS, RANDOM_BLOCKS
from benchmarks.attention_shapes import WINDOW_SIZE, KVMemory
from sparsekv.errors import LayoutError
from sparsekv.kernels import cpu, torch_ops
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.cpu import library

_BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute attention.

    Attributes:
        name: an instruction set of the native library, or what of torch.
        isa: the instruction set to choose; None for torch.
        prepare: what attends to `count` segments from `first` on, its inputs ready: as in a decode
            step, which makes views of what grew, and keeps them.
    """

    name: str
    isa: str | None
    prepare: Callable[[int, int], Callable[[], object]]


def available_isas() -> list[str]:
    """Instruction sets that the native library has and this processor too; best first."""
    found = []
    for isa in ISAS:
        try:
            library.set_isa(isa)
        except LayoutError:
            continue
        found.append(isa)
    library.set_isa(None)
    return found


def native_ways(memory: KVMemory, query: Tensor) -> list[Way]:
    """The native library, in each instruction set that differs for the shape.

    The query is float32, as a decode step hands it over.
    """
    prepare = partial(in_place, cpu.partial_attention, memory, query.float())
    return [Way(isa, isa, prepare) for isa in available_isas() if isa == _kernel_in(isa, memory)]


def _kernel_in(isa: str, memory: KVMemory) -> str:
    """Name of the kernel that computes the shape in an instruction set."""
    try:
        library.set_isa(isa)
        return library.kernel_for(
            num_heads=memory.shape.num_heads,
            num_kv_heads=memory.shape.num_kv_heads,
            num_queries=1,
            dtype=torch.bfloat16,
        )
    finally:
        library.set_isa(None)


def random_blocks_way(memory: KVMemory, query: Tensor) -> Way:
    """The best instruction set, over the same keys block by block in random order.

    So does a sparse selection read; the order is another one for each row and kv head.
    """
    heads = (memory.rows, memory.shape.num_kv_heads)

    @cache
    def blocks(count: int) -> BlockLists:
        generator = torch.Generator().manual_seed(0)
        num_blocks = count * WINDOW_SIZE // _BLOCK_SIZE
        order = torch.rand(*heads, num_blocks, generator=generator).argsort(dim=-1)
        lengths = torch.full(heads, num_blocks)
        return BlockLists(indices=order, num_blocks=lengths, block_size=_BLOCK_SIZE)

    def prepare(first: int, count: int) -> Callable[[], tuple[Tensor, Tensor]]:
        op = partial(cpu.partial_attention, blocks=blocks(count))
        return in_place(op, memory, query.float(), first, count)

    return Way(RANDOM_BLOCKS, native_ways(memory, query)[0].isa, prepare)


def torch_ways(memory: KVMemory, query: Tensor) -> list[Way]:
    """torch's attention, as it is called and as it is faster, and the fallback."""
    folded = query.view(memory.rows, memory.shape.num_kv_heads, -1, memory.shape.head_dim)
    return [
        Way("torch sdpa", None, partial(_joined, memory, query)),
        # The query heads of a kv head as if they were tokens: no mask, so the result is the same.
        Way("torch sdpa, folded", None, partial(_joined, memory, folded)),
        Way("torch ops", None, partial(in_place, torch_ops.partial_attention, memory, query)),
    ]


def in_place(
    op: Callable[..., tuple[Tensor, Tensor]],
    memory: KVMemory,
    query: Tensor,
    first: int,
    count: int,
) -> Callable[[], tuple[Tensor, Tensor]]:
    """The op over segments where the library keeps them."""
    key, value = memory.segments(first, count)
    positions = torch.arange(count) * WINDOW_SIZE
    newest = count * WINDOW_SIZE - 1
    scale = memory.shape.softmax_scale
    return partial(op, query, key, value, positions, scale, query_start=newest)


def _joined(memory: KVMemory, query: Tensor, first: int, count: int) -> Callable[[], Tensor]:
    key, value = memory.joined(first, count)
    is_grouped = query.shape[1] != key.shape[1]
    scale = memory.shape.softmax_scale
    return partial(
        scaled_dot_product_attention, query, key, value, scale=scale, enable_gqa=is_grouped
    )
