"""Partial attention by the native library, on keys and values where they lie."""

import ctypes
from numbers import Real

import torch
from torch import Tensor

from sparsekv.errors import CapacityError, LayoutError, SparseKVError
from sparsekv.kernels import torch_ops
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.cpu.library import DTYPES, native_library

_BAD_ROW = 2
_BAD_POSITION = 3
_LAYOUT_ERRORS = {
    1: "a size is out of range; check the shapes",
    _BAD_ROW: "row_table names a physical row that does not exist; entries must be within 0 and "
    "rows - 1",
    _BAD_POSITION: "positions lie out of range, or beyond key_mask; key_mask must reach the last "
    "key",
    6: "a list names a block that does not exist, or is longer than its room; list each block once",
}
_NO_MEMORY = 4
_LARGEST = 2**48  # of a size or a position: longer than any sequence
_MASK_DTYPES = (torch.bool, *DTYPES, torch.float64)


class NativeCall(ctypes.Structure):
    """struct sparsekv_partial_attention_call of api.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "positions", "row_table")),
        *((name, ctypes.c_void_p) for name in ("key_mask", "key_start", "block_indices")),
        *((name, ctypes.c_void_p) for name in ("num_blocks", "out", "lse")),
        ("query_strides", ctypes.c_int64 * 3),
        ("key_strides", ctypes.c_int64 * 4),
        ("value_strides", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in ("key_mask_stride", "key_mask_size")),
        *((name, ctypes.c_int64) for name in ("batch", "num_heads", "num_queries")),
        *((name, ctypes.c_int64) for name in ("head_dim", "head_dim_v", "num_segments", "rows")),
        *((name, ctypes.c_int64) for name in ("num_kv_heads", "tokens", "query_start")),
        *((name, ctypes.c_int64) for name in ("sliding_window", "block_size", "max_blocks")),
        ("softmax_scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )


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
) -> tuple[Tensor, Tensor]:
    """Attention of `query` to one set of keys; defined by the reference op of the same name.

    Keys and values are float32, bfloat16 or float16 and are read once for up to 8 query tokens,
    whatever their strides; sums are in float32. In the instruction set "amx", calls of bfloat16
    with at least 5 query rows for each kv head (num_queries * num_heads / num_kv_heads) round the
    weights of values to bfloat16, as FlashAttention does (arXiv:2205.14135): results within about
    2e-3 of exact ones, the lse as precise as ever. Runs on the library's own threads, with the GIL
    released; the result does not depend on how many there are. No gradients. Calls with a `mask`
    or in float64, and all calls where there is no library, are computed by torch's ops.

    Raises:
        LayoutError: a type, dtype, device, shape, stride or number breaks a rule, whichever of
            them computes; nothing has been computed.
        CapacityError: the workspace does not fit into memory.
    """
    check_inputs(query, key, value, positions, row_table, key_mask, key_start, may_be_float64=True)
    check_scale(softmax_scale)
    check_visibility(query, key, query_start, sliding_window, blocks)
    if mask is not None:
        _check_mask(query, mask)
    is_for_torch = mask is not None or key.dtype == torch.float64
    library = None if is_for_torch else native_library()
    if library is None:
        _check_contents(query, key, positions, row_table, key_mask, mask)
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
    out = torch.empty(*query.shape[:3], value.shape[-1], dtype=torch.float32, device="cpu")
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device="cpu")
    query = (query.detach() if query.requires_grad else query).float()
    query = query if is_contiguous_at_last(query) else query.contiguous()
    if key_mask is not None and not is_contiguous_at_last(key_mask):
        key_mask = key_mask.contiguous()
    positions = positions.contiguous()
    row_table = None if row_table is None else row_table.contiguous()
    key_start = None if key_start is None else key_start.contiguous()
    if blocks is not None:
        blocks = BlockLists(
            indices=blocks.indices.contiguous(),
            num_blocks=blocks.num_blocks.contiguous(),
            block_size=blocks.block_size,
        )
    call = native_call(
        query,
        key,
        value,
        positions,
        softmax_scale,
        out,
        lse,
        row_table=row_table,
        query_start=query_start,
        key_mask=key_mask,
        key_start=key_start,
        sliding_window=sliding_window,
        blocks=blocks,
    )
    code = library.sparsekv_partial_attention(ctypes.byref(call))
    if code != 0:
        raise error_of(code, call)
    return out, lse


def native_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    *,
    row_table: Tensor | None,
    query_start: int,
    key_mask: Tensor | None,
    key_start: Tensor | None,
    sliding_window: int | None,
    blocks: BlockLists | None,
) -> NativeCall:
    """The call as the library takes it, of checked tensors that the caller keeps alive.

    query is float32; the last dimension of query and key_mask is contiguous; positions, row_table,
    key_start, the lists, out and lse are contiguous.
    """
    num_segments, rows, num_kv_heads, tokens, head_dim = key.shape
    batch, num_heads, num_queries, _ = query.shape
    return NativeCall(
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        positions=positions.data_ptr(),
        row_table=None if row_table is None else row_table.data_ptr(),
        key_mask=None if key_mask is None else key_mask.data_ptr(),
        key_start=None if key_start is None else key_start.data_ptr(),
        block_indices=None if blocks is None else blocks.indices.data_ptr(),
        num_blocks=None if blocks is None else blocks.num_blocks.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        query_strides=query.stride()[:3],
        key_strides=key.stride()[:4],
        value_strides=value.stride()[:4],
        key_mask_stride=0 if key_mask is None else key_mask.stride(0),
        key_mask_size=0 if key_mask is None else key_mask.shape[1],
        batch=batch,
        num_heads=num_heads,
        num_queries=num_queries,
        head_dim=head_dim,
        head_dim_v=value.shape[-1],
        num_segments=num_segments,
        rows=rows,
        num_kv_heads=num_kv_heads,
        tokens=tokens,
        query_start=query_start,
        # 0: from the first, as a window beyond all positions has it.
        sliding_window=0 if sliding_window is None or sliding_window > _LARGEST else sliding_window,
        block_size=0 if blocks is None else blocks.block_size,
        max_blocks=0 if blocks is None else blocks.indices.shape[2],
        softmax_scale=softmax_scale,
        dtype=DTYPES[key.dtype],
    )


def error_of(code: int, call: NativeCall) -> SparseKVError:
    """What the library's error code means to who made the call."""
    if code == _NO_MEMORY:
        return CapacityError(
            f"partial attention of {call.batch} x {call.num_heads} heads x {call.num_queries} "
            "queries: its workspace does not fit into memory; use fewer rows at a time"
        )
    return _refusal(code)


def _refusal(code: int) -> LayoutError:
    return LayoutError(f"partial attention was refused: {_LAYOUT_ERRORS[code]}")


def is_contiguous_at_last(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 1 or tensor.shape[-1] <= 1


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    row_table: Tensor | None,
    key_mask: Tensor | None,
    key_start: Tensor | None,
    *,
    may_be_float64: bool = False,
) -> None:
    """Raises a LayoutError unless the library can take these, or torch's ops those in float64."""
    required = (("query", query), ("key", key), ("value", value), ("positions", positions))
    for name, tensor in required:
        check_tensor(name, tensor)
    for name, given in (("row_table", row_table), ("key_mask", key_mask), ("key_start", key_start)):
        if given is not None:
            check_tensor(name, given)
    _check_dtypes(query, key, value, may_be_float64)
    _check_shapes(query, key, value)
    num_segments, batch = key.shape[0], query.shape[0]
    _check_integers("positions", positions, (num_segments,))
    if row_table is not None:
        _check_integers("row_table", row_table, (num_segments, batch))
    elif key.shape[1] != batch:
        raise LayoutError(
            f"query has {batch} rows, the keys {key.shape[1]}: must be equal without a row_table; "
            "give one"
        )
    if key_start is not None:
        _check_integers("key_start", key_start, (batch,))
    if key_mask is not None and (
        key_mask.dtype != torch.bool or key_mask.dim() != 2 or key_mask.shape[0] != batch
    ):
        raise LayoutError(
            f"key_mask {tuple(key_mask.shape)} of {key_mask.dtype}: must be bool, of shape "
            f"({batch}, positions); convert it"
        )


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raises a LayoutError unless it is a strided tensor on the CPU."""
    if not isinstance(tensor, Tensor):
        raise LayoutError(f"{name} is a {type(tensor).__name__}: must be a tensor; make it one")
    if not (tensor.is_cpu and tensor.layout is torch.strided):
        raise LayoutError(
            f"{name} is {tensor.layout} on {tensor.device}: must be strided, on the CPU; "
            "move or convert it"
        )


def check_scale(softmax_scale: float) -> None:
    """Raises a LayoutError unless it is a number."""
    if not isinstance(softmax_scale, Real):
        raise LayoutError(f"softmax_scale={softmax_scale!r}: must be a number; give a float")


def check_position(query_start: int) -> None:
    """Raises a LayoutError unless it is a position: the library's integers wrap around."""
    if not isinstance(query_start, int) or not -_LARGEST <= query_start <= _LARGEST:
        raise LayoutError(
            f"query_start={query_start!r}: must be a whole number of at most 2**48, or at least "
            "-2**48; give the position of the first query token"
        )


def check_visibility(
    query: Tensor,
    key: Tensor,
    query_start: int,
    sliding_window: int | None,
    blocks: BlockLists | None,
) -> None:
    """Raises a LayoutError for a position, a window or lists that do not fit the tensors."""
    check_position(query_start)
    if sliding_window is not None and not (isinstance(sliding_window, int) and sliding_window >= 1):
        raise LayoutError(
            f"sliding_window={sliding_window!r}: must be at least 1, a whole number, or None"
        )
    if blocks is None:
        return
    if not isinstance(blocks, BlockLists):
        raise LayoutError(f"blocks is a {type(blocks).__name__}: must be BlockLists, or None")
    blocks.check_shape(query.shape[0], key.shape[2], query.device)
    check_tensor("blocks.indices", blocks.indices)
    check_tensor("blocks.num_blocks", blocks.num_blocks)


def _check_mask(query: Tensor, mask: Tensor) -> None:
    check_tensor("mask", mask)
    batch, num_heads, num_queries, _ = query.shape
    if mask.dtype not in _MASK_DTYPES or not (
        mask.dim() == 4
        and mask.shape[0] in (1, batch)
        and mask.shape[1] in (1, num_heads)
        and mask.shape[2] == num_queries
    ):
        raise LayoutError(
            f"mask {tuple(mask.shape)} of {mask.dtype}: must be bool, float16, bfloat16, float32 "
            f"or float64, of shape ({batch} or 1, {num_heads} or 1, {num_queries}, positions); "
            "convert it"
        )


def _check_contents(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    row_table: Tensor | None,
    key_mask: Tensor | None,
    mask: Tensor | None,
) -> None:
    """What the native library checks itself, but for lists, and whether `mask` has all keys."""
    num_segments, rows, _, tokens, _ = key.shape
    if query.numel() == 0 or num_segments * tokens == 0:
        return
    first, last = (int(position) for position in positions.aminmax())
    end = last + tokens
    is_far = first < -_LARGEST or last > _LARGEST
    if is_far or (key_mask is not None and (first < 0 or end > key_mask.shape[1])):
        raise _refusal(_BAD_POSITION)
    if mask is not None and (first < 0 or end > mask.shape[3]):
        raise LayoutError(
            f"positions {first} to {end - 1} of keys, and a mask of {mask.shape[3]}: must lie "
            "within it; extend the mask"
        )
    if row_table is not None and not ((row_table >= 0) & (row_table < rows)).all():
        raise _refusal(_BAD_ROW)


def _check_dtypes(query: Tensor, key: Tensor, value: Tensor, may_be_float64: bool) -> None:
    is_float64 = may_be_float64 and key.dtype == torch.float64
    if (key.dtype not in DTYPES and not is_float64) or value.dtype != key.dtype:
        raise LayoutError(
            f"key is {key.dtype}, value {value.dtype}: must be the same, float32, bfloat16"
            f"{', float16 or float64' if may_be_float64 else ' or float16'}; convert them"
        )
    if query.dtype != key.dtype and (is_float64 or query.dtype != torch.float32):
        raise LayoutError(
            f"query is {query.dtype}, the keys {key.dtype}: must be equal"
            f"{'' if is_float64 else ', or the query float32'}; convert the query"
        )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    queries, keys, values = query.shape, key.shape, value.shape
    if (len(queries), len(keys), len(values)) != (4, 5, 5) or keys[:4] != values[:4]:
        raise LayoutError(
            f"query {tuple(queries)}, key {tuple(keys)}, value {tuple(values)}: must "
            "be (batch, num_heads, num_queries, head_dim) and twice (num_segments, rows, "
            "num_kv_heads, tokens, dim), the same but for dim; reshape them"
        )
    if queries[3] != keys[4] or not keys[2] or queries[1] % keys[2]:
        raise LayoutError(
            f"query {tuple(queries)} and key {tuple(keys)}: head_dim must be equal and "
            "num_heads a multiple of num_kv_heads; check the model's head counts"
        )
    for name, tensor in (("key", key), ("value", value)):
        if not is_contiguous_at_last(tensor) or tensor.shape[-1] == 0:
            raise LayoutError(
                f"{name} {tuple(tensor.shape)} has strides {tensor.stride()}: the numbers of a "
                "token must lie next to each other, at least one; make the last dimension "
                "contiguous"
            )


def _check_integers(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.int64 or tensor.shape != shape:
        raise LayoutError(
            f"{name} {tuple(tensor.shape)} of {tensor.dtype}: must be int64, of shape {shape}; "
            "convert it"
        )
