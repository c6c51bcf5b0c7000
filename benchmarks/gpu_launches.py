"""What a decode step launches on the GPU, layer by layer, prepared as the library prepares it.

A layer has its keys and values elsewhere than the one before it: nothing is found in a cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.attention_shapes import WINDOW_SIZE, KVMemory
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.dispatch import DecodeOps, decode_ops_for

Launches = list[Callable[[], Tensor]]
"""For each layer, what launches its kernels; returns where the result will be."""


def attention_launches(
    memory: KVMemory,
    query: Tensor,
    count: int,
    *,
    blocks: BlockLists | None = None,
    is_carried: bool = False,
) -> Launches:
    """Attention to `count` segments in each layer, of as many layers as the memory holds.

    Args:
        memory: keys and values, on the GPU or in registered host memory.
        query: (rows, num_heads, 1, head_dim) on the GPU.
        count: segments of a layer.
        blocks: the blocks of each layer to attend to; None: all.
        is_carried: add to the result of the launch before, as a layer's attention to the pinned
            region adds to that to its window.
    """
    out, lse, workspace = _results(memory, query, count)
    ops = _ops(query)

    def prepared(first: int) -> Callable[[], Tensor]:
        key, value = memory.segments(first, count)
        attend = ops.PreparedAttention(
            query,
            key,
            value,
            memory.shape.softmax_scale,
            out=out,
            lse=lse,
            workspace=workspace,
            row_table=None,
            blocks=blocks,
            is_carried=is_carried,
        )

        def launch() -> Tensor:
            attend(query, 0, None, out)
            return out

        return launch

    return [prepared(first) for first in range(0, memory.num_segments - count + 1, count)]


def step_launches(
    memory: KVMemory,
    query: Tensor,
    token: tuple[Tensor, Tensor | None],
    stored_query: Tensor,
    found: tuple[Tensor, Tensor],
    num_layers: int,
) -> Launches:
    """Short steps: the token is appended, its query is stored for the CPU, it attends to a window
    that it fills, and what the CPU has found is merged with that.

    Args:
        memory: on the GPU; each layer's window is a segment of it.
        query: (rows, num_heads, 1, head_dim) on the GPU.
        token: keys (rows, num_kv_heads, 1, head_dim) and values, None where they are part of them.
        stored_query: shape of `query`, float32, in registered host memory.
        found: (1, rows, num_heads, 1, head_dim_v) and the same without the last, float32, likewise.
        num_layers: at most as many as there are segments.
    """
    out, lse, workspace = _results(memory, query, 1)
    ops, (new_key, new_value) = _ops(query), token
    store = ops.PreparedAppend(query, None, stored_query, None)
    merge = ops.PreparedMerge([(out, lse)], out=out, lse=lse, others=found)

    def prepared(layer_idx: int) -> Callable[[], Tensor]:
        key, value = memory.segments(layer_idx, 1)
        append = ops.PreparedAppend(
            new_key, new_value, key[0], None if new_value is None else value[0]
        )
        attend = ops.PreparedAttention(
            query,
            key,
            value,
            memory.shape.softmax_scale,
            out=out,
            lse=lse,
            workspace=workspace,
            row_table=None,
            is_carried=False,
        )

        def launch() -> Tensor:
            append(new_key, new_value, WINDOW_SIZE - 1)
            store(query, None, 0)
            result = torch.empty_like(out)
            attend(query, 0, WINDOW_SIZE, result)
            merge(result)
            return result

        return launch

    return [prepared(layer_idx) for layer_idx in range(num_layers)]


def _ops(query: Tensor) -> DecodeOps:
    ops = decode_ops_for(query.device)
    if ops is None:
        raise RuntimeError(f"no prepared launches on {query.device}: use CUDA, and install triton")
    return ops


def _results(memory: KVMemory, query: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Out and lse, which carry nothing yet, and room for parts of them."""
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    out = lse.new_zeros((*lse.shape, memory.shape.head_dim_v))
    size = _ops(query).workspace_numel(query, *memory.segments(0, count))
    return out, lse, lse.new_empty(size)
