"""The kernel that stores new tokens: one program for some tokens of one head of one row.

Floors: each number is read once and written once.
"""

import triton
import triton.language as tl


@triton.jit
def _copy(
    source_ptr,
    target_ptr,
    source_stride,
    target_stride,
    tokens,
    num_tokens,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some tokens of one head, from one stride of tokens to another."""
    columns = tl.arange(0, BLOCK)
    is_number = (tokens < num_tokens)[:, None] & (columns < DIM)[None, :]
    tokens = tokens.to(tl.int64)[:, None]
    numbers = tl.load(source_ptr + tokens * source_stride + columns[None, :], mask=is_number)
    target_at = target_ptr + tokens * target_stride + columns[None, :]
    tl.store(target_at, numbers.to(target_ptr.dtype.element_ty), mask=is_number)


@triton.jit(do_not_specialize=["offset", "num_tokens"])
def append_kernel(
    key_ptr,
    value_ptr,
    query_ptr,
    window_key_ptr,
    window_value_ptr,
    stored_query_ptr,
    key_stride_row,
    key_stride_head,
    key_stride_token,
    value_stride_row,
    value_stride_head,
    value_stride_token,
    query_stride_row,
    query_stride_head,
    query_stride_token,
    window_key_stride_row,
    window_key_stride_head,
    window_key_stride_token,
    window_value_stride_row,
    window_value_stride_head,
    window_value_stride_token,
    stored_query_stride_row,
    stored_query_stride_head,
    stored_query_stride_token,
    offset,
    num_tokens,
    num_kv_heads,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program axis 1 counts the heads of the keys, then of the values, then of the query."""
    num_token_blocks = tl.cdiv(num_tokens, BLOCK_T)
    row = (tl.program_id(0) // num_token_blocks).to(tl.int64)
    tokens = tl.program_id(0) % num_token_blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    num_stored_heads = num_kv_heads
    if value_ptr is not None:
        num_stored_heads = 2 * num_kv_heads

    if head < num_kv_heads:
        key_at = window_key_ptr + row * window_key_stride_row + head * window_key_stride_head
        _copy(
            key_ptr + row * key_stride_row + head * key_stride_head,
            key_at + tl.cast(offset, tl.int64) * window_key_stride_token,
            key_stride_token,
            window_key_stride_token,
            tokens,
            num_tokens,
            HEAD_DIM,
            BLOCK_D,
        )
    elif head < num_stored_heads:
        if value_ptr is not None:
            kv_head = head - num_kv_heads
            value_at = window_value_ptr + row * window_value_stride_row
            value_at += kv_head * window_value_stride_head
            _copy(
                value_ptr + row * value_stride_row + kv_head * value_stride_head,
                value_at + tl.cast(offset, tl.int64) * window_value_stride_token,
                value_stride_token,
                window_value_stride_token,
                tokens,
                num_tokens,
                HEAD_DIM_V,
                BLOCK_V,
            )
    else:
        if query_ptr is not None:
            query_head = head - num_stored_heads
            query_at = stored_query_ptr + row * stored_query_stride_row
            _copy(
                query_ptr + row * query_stride_row + query_head * query_stride_head,
                query_at + query_head * stored_query_stride_head,
                query_stride_token,
                stored_query_stride_token,
                tokens,
                num_tokens,
                HEAD_DIM,
                BLOCK_D,
            )
