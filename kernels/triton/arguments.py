"""How a call of partial attention is cut, and what the kernel is given."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from sparsekv.errors import LayoutError
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.triton import config


def tiling_and_splits(
    query: Tensor, key: Tensor, value: Tensor, is_hiding: bool
) -> tuple[config.Tiling, int]:
    """How such a call is cut into tiles, and its keys into splits at most."""
    _, num_heads, num_queries, head_dim = query.shape
    num_kv_heads = key.shape[2]
    num_rows = num_heads // num_kv_heads * num_queries
    tiling = config.tiling_for(
        head_dim,
        value.shape[-1],
        num_rows,
        key.dtype,
        config.is_shared(key, value),
        is_hiding and num_queries > 1,
        config.shared_memory_bytes(query.device),
    )
    num_programs = num_row_programs(query, key, tiling)
    over_pcie = key.device != query.device
    return tiling, config.max_splits(num_programs, query.device, over_pcie)


def num_row_programs(query: Tensor, key: Tensor, tiling: config.Tiling) -> int:
    """Programs of each split."""
    batch, num_heads, num_queries, _ = query.shape
    num_kv_heads = key.shape[2]
    num_rows = num_heads // num_kv_heads * num_queries
    return -(-num_rows // tiling.block_m) * batch * num_kv_heads


def workspace_numel(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Numbers that `workspace` takes for such a query, however many keys there are."""
    splits = max(tiling_and_splits(query, key, value, hiding)[1] for hiding in (False, True))
    return splits * query[..., 0].numel() * (value.shape[-1] + 1) if splits > 1 else 0


def cut_workspace(
    workspace: Tensor | None, splits: int, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Room for out and lse of each split.

    Raises:
        LayoutError: there is too little.
    """
    size, room = splits * out.numel(), splits * (out.numel() + lse.numel())
    if workspace is None:
        workspace = torch.empty(room, dtype=torch.float32, device=out.device)
    elif workspace.numel() < room:
        raise LayoutError(
            f"workspace of {workspace.numel()} numbers: this call takes {room}; make one of "
            "workspace_numel numbers"
        )
    return workspace[:size], workspace[size:room]


def kernel_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor | None,
    row_table: Tensor | None,
    key_start: Tensor | None,
    key_mask: Tensor | None,
    blocks: BlockLists | None,
    softmax_scale: float,
    query_start: int,
    sliding_window: int | None,
    *,
    is_hiding: bool,
    tiling: config.Tiling,
    tiles_per_split: int,
    parts: tuple[Tensor, Tensor],
    carried: tuple[Tensor | None, Tensor | None],
) -> tuple[list[Any], dict[str, Any]]:
    """What the attention kernel takes in order, and by name; all tensors where it can read them.

    `parts`: where out and lse of each split go; `carried`: what the sums begin with.
    """
    batch, num_heads, num_queries, head_dim = query.shape
    num_segments, _, num_kv_heads, tokens, _ = key.shape
    unit = tokens if blocks is None else blocks.block_size
    is_aligned = num_segments == 1 or (unit % tiling.block_n == 0 and tokens % unit == 0)
    if blocks is not None:
        is_aligned = is_aligned and unit % tiling.block_n == 0
    arguments = [
        query,
        key,
        value,
        positions,
        row_table,
        None if key_mask is None else key_mask.view(torch.uint8),
        key_start,
        None if blocks is None else blocks.indices.contiguous(),
        None if blocks is None else blocks.num_blocks.contiguous(),
        *parts,
        *carried,
        *query.stride()[:3],
        *key.stride()[:4],
        *value.stride()[:4],
        0 if key_mask is None else key_mask.stride(0),
        batch,
        num_kv_heads,
        num_heads // num_kv_heads,
        num_queries,
        tokens,
        num_segments * tokens,
        0 if blocks is None else blocks.indices.shape[2],
        0 if key_mask is None else key_mask.shape[1],
        query_start,
        sliding_window,
        tiles_per_split,
        query[..., 0].numel(),
        softmax_scale,
    ]
    sizes = {k.upper(): v for k, v in asdict(tiling).items() if k.startswith(("first", "block"))}
    return arguments, {
        **sizes,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": value.shape[-1],
        "BLOCK_SIZE": 0 if blocks is None else blocks.block_size,
        "IS_SHARED": config.is_shared(key, value),
        "IS_ALIGNED": is_aligned,
        # Of no use to others: the first segment of many shall not be compiled for itself.
        "IS_ONE_SEGMENT": is_hiding and num_segments == 1,
        "IS_ONE_QUERY": num_queries == 1,
        "IS_EXACT": config.is_exact(num_queries, value.dtype, tiling),
        "IS_HIDING": is_hiding,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }
