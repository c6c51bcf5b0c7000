"""Copies of stored keys or values by the native library, with stores that pass the caches by."""

import ctypes

import torch
from torch import Tensor

from sparsekv.errors import CapacityError, LayoutError, SparseKVError
from sparsekv.kernels import torch_ops
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.cpu.library import native_library

_BAD_ROW = 2
_NO_MEMORY = 4
_LAYOUT_ERRORS = {
    1: "a size is out of range; check the shapes",
    _BAD_ROW: "row_table names a physical row that does not exist; entries must be within 0 and "
    "rows - 1",
    6: "a block list names a block that does not exist, or is longer than its room or than there "
    "are blocks; list existing blocks",
}


class _Call(ctypes.Structure):
    """struct sparsekv_gather_blocks_call of api.h."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("source", "block_indices", "num_blocks", "row_table")
        ),
        ("out", ctypes.c_void_p),
        ("source_strides", ctypes.c_int64 * 4),
        ("out_strides", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in ("batch", "num_kv_heads", "max_blocks", "block_size")),
        *((name, ctypes.c_int64) for name in ("num_segments", "rows", "tokens", "token_bytes")),
    )


def gather_blocks(
    source: Tensor,
    blocks: BlockLists,
    out: Tensor,
    *,
    row_table: Tensor | None = None,
) -> None:
    """Copy listed blocks end to end into `out`; defined by the reference op of the same name.

    Strides are free but for the last dimension, which must be contiguous; no address needs to be
    aligned. Runs on the library's own threads, with the GIL released, and returns when all is
    written and visible to other threads and devices. `out` must lie wholly before or behind the
    bytes that `source` spans. Where there is no library, torch's indexing copies.

    Raises:
        LayoutError: a dtype, device, shape, stride or index breaks a rule; nothing was written.
        CapacityError: the lists do not fit into memory; nothing was written.
    """
    _check_pair(source, out, 5)
    _check_lists(source, blocks, out, row_table)
    library = native_library()
    if library is None:
        _check_indices(source, blocks, row_table)
        torch_ops.gather_blocks(source, blocks, out, row_table=row_table)
        return
    num_segments, rows, num_kv_heads, tokens, _ = source.shape
    indices, num_blocks = blocks.indices.contiguous(), blocks.num_blocks.contiguous()
    row_table = None if row_table is None else row_table.contiguous()
    call = _Call(
        source=source.data_ptr(),
        block_indices=indices.data_ptr(),
        num_blocks=num_blocks.data_ptr(),
        row_table=None if row_table is None else row_table.data_ptr(),
        out=out.data_ptr(),
        source_strides=_byte_strides(source),
        out_strides=_byte_strides(out),
        batch=indices.shape[0],
        num_kv_heads=num_kv_heads,
        max_blocks=indices.shape[2],
        block_size=blocks.block_size,
        num_segments=num_segments,
        rows=rows,
        tokens=tokens,
        token_bytes=source.shape[-1] * source.element_size(),
    )
    _check_code(library.sparsekv_gather_blocks(ctypes.byref(call)))


def copy_segment(source: Tensor, out: Tensor) -> None:
    """Copy a segment to its place; defined by the reference op of the same name.

    A gather of one block for each row and kv head: what gather_blocks says of strides, threads and
    overlap holds here.

    Raises:
        LayoutError: a dtype, device, shape or stride breaks a rule; nothing was written.
        CapacityError: as gather_blocks.
    """
    library = native_library()
    if library is None or source.numel() == 0:
        _check_equal(source, out)
        torch_ops.copy_segment(source, out)
        return
    _check_code(library.sparsekv_gather_blocks(ctypes.byref(copy_call(source, out))))


def copy_call(source: Tensor, out: Tensor) -> ctypes.Structure:
    """The copy of a segment as the library takes it; the caller keeps the tensors alive.

    Raises:
        LayoutError: as `copy_segment`.
    """
    _check_equal(source, out)
    rows, num_kv_heads, tokens, dim = source.shape
    row_stride, head_stride, token_stride = _byte_strides(out)
    return _Call(
        source=source.data_ptr(),
        out=out.data_ptr(),
        source_strides=(0, *_byte_strides(source)),
        out_strides=(row_stride, head_stride, 0, token_stride),
        batch=rows,
        num_kv_heads=num_kv_heads,
        max_blocks=1,
        block_size=tokens,
        num_segments=1,
        rows=rows,
        tokens=tokens,
        token_bytes=dim * source.element_size(),
    )


def error_of_copy(code: int) -> SparseKVError:
    """What the library's error code means to who made the call."""
    if code == _NO_MEMORY:
        return CapacityError("the copy's lists do not fit into memory; gather fewer rows at a time")
    return LayoutError(f"the copy was refused: {_LAYOUT_ERRORS[code]}")


def _byte_strides(tensor: Tensor) -> tuple[int, ...]:
    """Of all dimensions but the last."""
    return tuple(stride * tensor.element_size() for stride in tensor.stride()[:-1])


def _check_code(code: int) -> None:
    if code != 0:
        raise error_of_copy(code)


def _check_equal(source: Tensor, out: Tensor) -> None:
    _check_pair(source, out, 4)
    if source.shape != out.shape:
        raise LayoutError(
            f"source {tuple(source.shape)} and out {tuple(out.shape)}: must be equal; give the "
            "segment's own view"
        )


def _check_pair(source: Tensor, out: Tensor, rank: int) -> None:
    for name, tensor in (("source", source), ("out", out)):
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise LayoutError(
                f"{name} is {tensor.layout} on {tensor.device}: must be strided, on the CPU; "
                "move or convert it"
            )
        if tensor.dim() != rank:
            raise LayoutError(
                f"{name} {tuple(tensor.shape)}: must have {rank} dimensions; reshape it"
            )
        if tensor.shape[-1] == 0 or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
            raise LayoutError(
                f"{name} {tuple(tensor.shape)} has strides {tensor.stride()}: the numbers of a "
                "token must lie next to each other, at least one; make the last dimension "
                "contiguous"
            )
    if source.dtype != out.dtype or source.shape[-1] != out.shape[-1]:
        raise LayoutError(
            f"source has {source.shape[-1]} x {source.dtype} a token, out {out.shape[-1]} x "
            f"{out.dtype}: must be equal; a copy converts nothing"
        )
    if _overlaps_itself(out):
        raise LayoutError(
            f"out {tuple(out.shape)} has strides {out.stride()}: its tokens overlap; give it "
            "memory for each"
        )
    (first, end), (out_first, out_end) = _span(source), _span(out)
    if first < out_end and out_first < end:
        raise LayoutError(
            "out lies within the memory that source spans: must be before or behind it; give it "
            "memory of its own"
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements may share memory: a dimension that does not step over the smaller ones."""
    if tensor.numel() == 0:
        return False
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False


def _span(tensor: Tensor) -> tuple[int, int]:
    """Address of the first byte, and of the one after the last."""
    if tensor.numel() == 0:
        return 0, 0
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    last = sum(stride * (size - 1) for stride, size in steps)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check_lists(source: Tensor, blocks: BlockLists, out: Tensor, row_table: Tensor | None) -> None:
    num_segments, rows, num_kv_heads, _, _ = source.shape
    batch = out.shape[0]
    blocks.check_shape(batch, num_kv_heads, source.device)
    shape = (*blocks.indices.shape, blocks.block_size, source.shape[-1])
    if out.shape != shape:
        raise LayoutError(
            f"out {tuple(out.shape)}: must be {shape}, (batch, num_kv_heads, max_blocks, "
            "block_size, dim) of these lists and this source; reshape it"
        )
    if row_table is not None:
        _check_row_table(row_table, (num_segments, batch))
    elif rows != batch:
        raise LayoutError(
            f"out has {batch} rows, the source {rows}: must be equal without a row_table; give one"
        )


def _check_row_table(row_table: Tensor, shape: tuple[int, int]) -> None:
    is_plain = row_table.device.type == "cpu" and row_table.layout == torch.strided
    if not is_plain or row_table.dtype != torch.int64 or row_table.shape != shape:
        raise LayoutError(
            f"row_table {tuple(row_table.shape)} of {row_table.dtype} on {row_table.device}: must "
            f"be int64, of shape {shape}, strided on the CPU; convert it"
        )


def _check_indices(source: Tensor, blocks: BlockLists, row_table: Tensor | None) -> None:
    """What the native library checks itself."""
    num_segments, rows, _, tokens, _ = source.shape
    if row_table is not None and not ((row_table >= 0) & (row_table < rows)).all():
        raise LayoutError(f"the copy was refused: {_LAYOUT_ERRORS[_BAD_ROW]}")
    blocks.check_indices(num_segments * tokens)
