"""What a call of partial attention must keep to, found before anything is written."""

import torch
from torch import Tensor

from sparsekv.errors import LayoutError
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.triton.memory import (
    check_home,
    check_readable,
    check_result,
    is_contiguous_at_last,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    row_table: Tensor | None,
    key_start: Tensor | None,
    key_mask: Tensor | None,
) -> None:
    """Raise unless dtypes, shapes, strides and devices fit each other.

    Raises:
        LayoutError: as said.
    """
    check_home("query", query)
    check_readable("key", key, query.device)
    check_readable("value", value, query.device)
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        raise LayoutError(
            f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: must be the same, "
            "float32, bfloat16 or float16; convert them"
        )
    _check_shapes(query, key, value)
    batch, num_segments = query.shape[0], key.shape[0]
    for name, tensor, shape in (
        ("positions", positions, (num_segments,)),
        ("row_table", row_table, (num_segments, batch)),
        ("key_start", key_start, (batch,)),
    ):
        if tensor is None:
            continue
        if tensor.dtype != torch.int64 or tensor.shape != shape:
            raise LayoutError(
                f"{name} {tuple(tensor.shape)} of {tensor.dtype}: must be int64, of shape {shape}; "
                "convert it"
            )
        if tensor.device not in (query.device, torch.device("cpu")):
            raise LayoutError(
                f"{name} lies on {tensor.device}: must lie on the CPU or on {query.device}; move it"
            )
    if row_table is None and key.shape[1] != batch:
        raise LayoutError(
            f"query has {batch} rows, the keys {key.shape[1]}: must be equal without a row_table; "
            "give one"
        )
    if key_mask is not None and (
        key_mask.dtype != torch.bool
        or key_mask.dim() != 2
        or key_mask.shape[0] != batch
        or key_mask.device != query.device
    ):
        raise LayoutError(
            f"key_mask {tuple(key_mask.shape)} of {key_mask.dtype} on {key_mask.device}: must be "
            f"bool, of shape ({batch}, positions), on {query.device}; convert or move it"
        )


def check_visibility(
    query: Tensor, key: Tensor, sliding_window: int | None, blocks: BlockLists | None
) -> None:
    """Raise for a window or for lists that break the rules of the reference op.

    Raises:
        LayoutError: as said.
    """
    if sliding_window is not None and sliding_window < 1:
        raise LayoutError(f"sliding_window={sliding_window}: must be at least 1, or None")
    if blocks is not None:
        blocks.check_shape(query.shape[0], key.shape[2], query.device)


def check_results(
    query: Tensor, out: Tensor | None, lse: Tensor | None, shape: tuple[int, ...], is_carried: bool
) -> None:
    """Raise unless the results can be written to what was given for them.

    Raises:
        LayoutError: as said.
    """
    if is_carried and (out is None or lse is None):
        raise LayoutError("is_carried without out and lse: they hold what is carried; give both")
    for name, tensor, wanted in (("out", out, shape), ("lse", lse, shape[:-1])):
        if tensor is not None:
            check_result(name, tensor, wanted, torch.float32)
            if tensor.device != query.device:
                raise LayoutError(f"{name} lies on {tensor.device}: must lie on {query.device}")


def check_plain_call(
    query: Tensor, key: Tensor, out: Tensor | None, lse: Tensor | None, is_carried: bool
) -> None:
    """Raise where torch's ops cannot do what was asked for.

    Raises:
        LayoutError: keys are to be read from host memory, or results to be given places.
    """
    if key.device != query.device or out is not None or lse is not None or is_carried:
        raise LayoutError(
            f"keys on {key.device} and a query on {query.device}, with a mask or in float64: such "
            "calls take keys on the query's device, and make new results; copy the keys"
        )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if (query.dim(), key.dim(), value.dim()) != (4, 5, 5) or key.shape[:4] != value.shape[:4]:
        raise LayoutError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}: must "
            "be (batch, num_heads, num_queries, head_dim) and twice (num_segments, rows, "
            "num_kv_heads, tokens, dim), the same but for dim; reshape them"
        )
    num_kv_heads = key.shape[2]
    if query.shape[3] != key.shape[4] or not num_kv_heads or query.shape[1] % num_kv_heads:
        raise LayoutError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)}: head_dim must be equal and "
            "num_heads a multiple of num_kv_heads; check the model's head counts"
        )
    for name, tensor in (("key", key), ("value", value)):
        if not is_contiguous_at_last(tensor) or tensor.shape[-1] == 0:
            raise LayoutError(
                f"{name} {tuple(tensor.shape)} has strides {tensor.stride()}: the numbers of a "
                "token must lie next to each other, at least one; make the last dimension "
                "contiguous"
            )
