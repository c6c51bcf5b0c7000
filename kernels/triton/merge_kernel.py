"""The kernel that merges partial attention: one program for one row of all parts.

Floors, for P parts of R rows of V float32 numbers: (P + 1) * R * (V + 1) * 4 bytes, and 2 * P * R
* V operations.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
CHUNK = tl.constexpr(16)


@triton.jit
def _lse_of_part(lse_ptr, is_part):
    """-inf where there is no part or it is empty, which some kernels write as +inf."""
    lse = tl.load(lse_ptr, mask=is_part, other=float("-inf")).to(tl.float32)
    return tl.where(lse == float("inf"), float("-inf"), lse)


@triton.jit(do_not_specialize=["num_splits", "split_rows", "rows_per_head", "num_heads"])
def merge_kernel(
    part_outs,
    part_lses,
    split_out_ptr,
    split_lse_ptr,
    num_splits,
    split_rows,
    sink_ptr,
    out_ptr,
    lse_ptr,
    rows_per_head,
    num_heads,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Parts given one by one, and splits that lie `split_rows` rows apart, become one.

    The result may be one of the parts: a program reads its row of all parts before it writes.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_V)
    is_column = columns < HEAD_DIM_V
    steps = tl.arange(0, CHUNK)

    top = float("-inf")
    for i in tl.static_range(len(part_lses)):
        top = tl.maximum(top, _lse_of_part(part_lses[i] + row, True))
    if split_lse_ptr is not None:
        for first in range(0, num_splits, CHUNK):
            split = first + steps
            lse_at = split_lse_ptr + split.to(tl.int64) * split_rows + row
            top = tl.maximum(top, tl.max(_lse_of_part(lse_at, split < num_splits), 0))
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + row // rows_per_head % num_heads).to(tl.float32)
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf is never formed

    total = 0.0
    sums = tl.zeros((BLOCK_V,), tl.float32)
    for i in tl.static_range(len(part_lses)):
        lse = _lse_of_part(part_lses[i] + row, True)
        weight = tl.exp2((lse - base) * LOG2_E)
        is_read = columns < tl.where(lse == float("-inf"), 0, HEAD_DIM_V)
        out = tl.load(part_outs[i] + row * HEAD_DIM_V + columns, mask=is_read, other=0.0)
        sums += weight * out.to(tl.float32)
        total += weight
    if split_lse_ptr is not None:
        for first in range(0, num_splits, CHUNK):
            split = first + steps
            rows = split.to(tl.int64) * split_rows + row
            lses = _lse_of_part(split_lse_ptr + rows, split < num_splits)
            weights = tl.exp2((lses - base) * LOG2_E)
            is_wanted = is_column[None, :] & (lses != float("-inf"))[:, None]
            outs_at = split_out_ptr + rows[:, None] * HEAD_DIM_V + columns[None, :]
            outs = tl.load(outs_at, mask=is_wanted, other=0.0).to(tl.float32)
            sums += tl.sum(weights[:, None] * outs, 0)
            total += tl.sum(weights, 0)
    if sink_ptr is not None:
        total += tl.where(sink == base, 1.0, tl.exp2((sink - base) * LOG2_E))  # inf - inf is 0

    out = sums / tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), base + tl.log(total))
    tl.store(out_ptr + row * HEAD_DIM_V + columns, out.to(out_ptr.dtype.element_ty), mask=is_column)
    tl.store(lse_ptr + row, lse)
