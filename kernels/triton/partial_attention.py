"""Partial attention by Triton, on keys and values where they lie: HBM or registered host memory."""

from dataclasses import replace

import torch
from torch import Tensor

from sparsekv.kernels import torch_ops
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.triton import checks, config
from sparsekv.kernels.triton.arguments import (
    cut_workspace,
    kernel_arguments,
    num_row_programs,
    tiling_and_splits,
)
from sparsekv.kernels.triton.attention_kernel import attention_kernel
from sparsekv.kernels.triton.memory import launching_on
from sparsekv.kernels.triton.merge_partials import launch_merge

_LONGEST = 2**30
"""Of a window, in tokens: the kernel counts positions in 32 bits."""


def partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    softmax_scale: float,
    *,
    row_table: Tensor | None = None,
    query_start: int = 0,
    key_mask: Tensor | None = None,
    key_start: Tensor | None = None,
    sliding_window: int | None = None,
    blocks: BlockLists | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    is_carried: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of `query` to one set of keys; defined by the reference op of the same name.

    One kernel on the current stream, and a second one that merges where few rows are split over
    the whole GPU; nothing waits, and nothing is read back. With `out`, `lse` and `workspace` given
    nothing is allocated either, unless positions, row_table or key_start lie on the CPU and are
    needed: then they are copied first. Positions are not needed where none of key_mask and
    key_start is given and, seen on the CPU, all keys stand before the query.

    Keys and values may lie in host memory that is registered with CUDA: each is then read over
    PCIe where it lies, once for up to 128 query rows of a kv head (64 for dims over 128). Their
    results are those of the same call on HBM, to the bit, where the number of splits is the same.

    Up to 16 query tokens get float32's precision (errors of some 1e-6 of the values) unless more
    than 32 query rows share a kv head with values wider than 256. All others have their softmax
    weights rounded to the dtype of the values, as other attention kernels do.

    Calls with a `mask` or in float64 are computed by torch's ops, on keys on the device.

    Args:
        query, key, value, softmax_scale, query_start, key_mask, sliding_window, mask: as the
            reference op has them; float32, bfloat16 or float16, all of one dtype.
        positions, row_table, key_start: likewise, on the CPU or on the query's device. On the
            device nobody knows which keys stand after the query, so each is looked at.
        blocks: likewise; blocks that do not exist are left out, since to refuse them would take a
            look at them on the CPU.
        out: (batch, num_heads, num_queries, head_dim_v) float32, contiguous, on the query's device:
            takes the result. None: a new one.
        lse: (batch, num_heads, num_queries), likewise.
        workspace: float32, contiguous, at least `workspace_numel` numbers. None: a new one where it
            is needed.
        is_carried: `out` and `lse` hold attention to other keys; the result is that to both.

    Returns:
        out and lse.

    Raises:
        LayoutError: a dtype, device, shape or stride breaks a rule; nothing has been written.
    """
    if mask is not None or query.dtype == key.dtype == torch.float64:
        checks.check_plain_call(query, key, out, lse, is_carried)
        return torch_ops.partial_attention(
            query,
            key,
            value,
            positions,
            softmax_scale,
            row_table=row_table,
            query_start=query_start,
            key_mask=key_mask,
            key_start=key_start,
            sliding_window=sliding_window,
            blocks=blocks,
            mask=mask,
        )
    checks.check_tensors(query, key, value, positions, row_table, key_start, key_mask)
    checks.check_visibility(query, key, sliding_window, blocks)
    batch, num_heads, num_queries, _ = query.shape
    shape = (batch, num_heads, num_queries, value.shape[-1])
    checks.check_results(query, out, lse, shape, is_carried)
    device = query.device
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=device)
    if lse is None:
        lse = torch.empty(shape[:-1], dtype=torch.float32, device=device)
    if not lse.numel():
        return out, lse
    num_listed = key.shape[0] * key.shape[3]
    if blocks is not None:
        if blocks.block_size > max(num_listed, 1):
            blocks = replace(blocks, block_size=max(num_listed, 1))  # one block is all there is
        num_listed = min(-(-num_listed // blocks.block_size), blocks.indices.shape[2])
        num_listed *= blocks.block_size
    if not num_listed:
        return (out, lse) if is_carried else (out.zero_(), lse.fill_(-torch.inf))

    if sliding_window is not None:
        sliding_window = min(sliding_window, _LONGEST)
    is_hiding = sliding_window is not None or _may_stand_after(positions, key, query_start)
    needs_positions = is_hiding or key_mask is not None or key_start is not None
    _launch(
        query if query.stride(-1) == 1 else query.contiguous(),
        key,
        value,
        _moved(positions if needs_positions else None, device),
        _moved(row_table, device),
        _moved(key_start, device),
        key_mask if key_mask is None or key_mask.stride(-1) == 1 else key_mask.contiguous(),
        blocks,
        softmax_scale,
        query_start,
        sliding_window,
        is_hiding,
        num_listed,
        out,
        lse,
        workspace,
        is_carried,
    )
    return out, lse


def _launch(
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
    is_hiding: bool,
    num_listed: int,
    out: Tensor,
    lse: Tensor,
    workspace: Tensor | None,
    is_carried: bool,
) -> None:
    tiling, max_splits = tiling_and_splits(query, key, value, is_hiding)
    tiles_per_split, splits = config.cut(num_listed, tiling.block_n, max_splits)
    parts = (out, lse) if splits == 1 else cut_workspace(workspace, splits, out, lse)
    arguments, options = kernel_arguments(
        query,
        key,
        value,
        positions,
        row_table,
        key_start,
        key_mask,
        blocks,
        softmax_scale,
        query_start,
        sliding_window,
        is_hiding=is_hiding,
        tiling=tiling,
        tiles_per_split=tiles_per_split,
        parts=parts,
        carried=(out, lse) if is_carried else (None, None),
    )
    with launching_on(query.device):
        attention_kernel[(num_row_programs(query, key, tiling), splits)](*arguments, **options)
    if splits > 1:
        launch_merge((), (), *parts, splits, None, out, lse)


def _may_stand_after(positions: Tensor, key: Tensor, query_start: int) -> bool:
    """Whether a key may stand after the first query token, as far as the CPU can see."""
    if positions.device.type != "cpu":
        return True
    return int(positions.max()) + key.shape[3] - 1 > query_start


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """On the device, contiguous; what was in host memory is copied without a wait."""
    return None if tensor is None else tensor.to(device, non_blocking=True).contiguous()
