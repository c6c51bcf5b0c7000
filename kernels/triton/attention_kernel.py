"""The kernel of partial attention: one program for some query rows of a kv head and some keys.

A query row is one query head of the kv head at one query token, folded head by head. Letters: M
query rows of a program, N keys of a tile, D head_dim, V head_dim_v.

Floors of a call of B rows, G kv heads, E = group_size * num_queries query rows of each, K visible
keys, b bytes a number:
    bytes       B * G * K * (D + V) * b: each key and value once (D alone where they are shared),
                as long as E fits one program (BLOCK_M); else cdiv(E, BLOCK_M) times
    operations  2 * B * G * E * K * (D + V)
In a decode step the bytes bind: HBM's rate, or PCIe's where the keys lie in host memory.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

CHANGING = (
    "num_keys",
    "tokens",
    "query_start",
    "sliding_window",
    "batch",
    "group_size",
    "num_queries",
    "max_blocks",
    "tiles_per_split",
    "split_rows",
    "key_mask_stride",
    "num_positions",
)
"""Numbers that change from call to call: compiling for a value of theirs would stop a generation
in its midst.
"""


@triton.jit
def _load_columns(pointers, is_wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """[N, BLOCK]: the first COUNT numbers at each pointer; zeros beyond, and where not wanted."""
    columns = tl.arange(0, BLOCK)
    wanted = is_wanted[:, None]
    if COUNT < BLOCK:
        wanted = wanted & (columns < COUNT)[None, :]
    return tl.load(pointers[:, None] + columns[None, :], mask=wanted, other=0.0)


@triton.jit
def _add_values(
    sums, weights, rest, values, is_seen, IS_EXACT: tl.constexpr, CAREFUL: tl.constexpr
):
    """[M, V] sums + (weights + rest) times values, untouched by values that a row does not see.

    Such a value has weight 0, but 0 * NaN is NaN. So finite values only are multiplied, and NaN is
    put where a value that the row does see is not finite. Where all rows see the same keys, those
    that they do not see were loaded as 0.
    """
    finite = values
    if CAREFUL:
        is_finite = tl.abs(values.to(tl.float32)) < float("inf")
        finite = tl.where(is_finite, values, 0.0).to(values.dtype)
        others = tl.where(is_finite, 0.0, 1.0).to(values.dtype)
        reached = tl.dot(is_seen.to(values.dtype), others, input_precision="ieee")
    sums = tl.dot(weights, finite, sums, input_precision="ieee")
    if IS_EXACT:
        sums = tl.dot(rest, finite, sums, input_precision="ieee")
    if CAREFUL:
        sums = tl.where(reached > 0.0, float("nan"), sums)
    return sums


@triton.jit
def _attend_tiles(
    top,
    total,
    sums,
    query,
    query_rest,
    query_positions,
    last_position,
    early_position,
    key_ptr,
    value_ptr,
    positions_ptr,
    row_table_ptr,
    key_mask_ptr,
    key_start_ptr,
    block_indices_ptr,
    key_stride_segment,
    key_stride_row,
    key_stride_token,
    value_stride_segment,
    value_stride_row,
    value_stride_token,
    first_tile,
    end_tile,
    row,
    batch,
    tokens,
    num_keys,
    num_listed,
    num_positions,
    first_visible,
    sliding_window,
    softmax_scale,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    FIRST_DIM: tl.constexpr,
    BLOCK_FIRST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_SHARED: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_ONE_QUERY: tl.constexpr,
    IS_EXACT: tl.constexpr,
    IS_HIDING: tl.constexpr,
):
    """The running softmax (largest score, total weight, weighted values) after some more tiles."""
    steps = tl.arange(0, BLOCK_N)
    for tile in range(first_tile, end_tile):
        # Which keys: `token` counts through all segments.
        start = tile * BLOCK_N
        if block_indices_ptr is not None:
            if IS_ALIGNED:
                block = tl.load(block_indices_ptr + start // BLOCK_SIZE)
                is_block = (block >= 0) & (block < tl.cdiv(num_keys, BLOCK_SIZE))
                block = tl.where(is_block, block, 0).to(tl.int32)
                first_token = block * BLOCK_SIZE + start % BLOCK_SIZE
                token = first_token + steps
                is_wanted = token < tl.where(is_block, num_keys, 0)
            else:
                place = start + steps
                block = tl.load(
                    block_indices_ptr + place // BLOCK_SIZE, mask=place < num_listed, other=-1
                )
                is_block = (block >= 0) & (block < tl.cdiv(num_keys, BLOCK_SIZE))
                block = tl.where(is_block, block, 0).to(tl.int32)
                token = block * BLOCK_SIZE + place % BLOCK_SIZE
                is_wanted = token < tl.where(is_block, num_keys, 0)
        else:
            first_token = start
            token = start + steps
            is_wanted = token < num_keys

        # Where they lie: all in one segment, or each in any.
        if IS_ALIGNED:
            segment = first_token // tokens
        else:
            token = tl.where(is_wanted, token, 0)
            segment = token // tokens
        offset = token - segment * tokens
        physical_row = row
        if row_table_ptr is not None:
            physical_row = tl.load(row_table_ptr + segment.to(tl.int64) * batch + row)
        segment_start = segment.to(tl.int64) * key_stride_segment + physical_row * key_stride_row
        key_at = key_ptr + (segment_start + offset.to(tl.int64) * key_stride_token)

        # Who sees them.
        is_seen = is_wanted[None, :]
        if positions_ptr is not None:
            position = tl.load(positions_ptr + segment).to(tl.int32) + offset
            if key_start_ptr is not None:
                is_wanted &= position >= first_visible
            if key_mask_ptr is not None:
                is_known = is_wanted & (position >= 0) & (position < num_positions)
                is_wanted &= tl.load(key_mask_ptr + position, mask=is_known, other=0) != 0
            if IS_HIDING:
                is_wanted &= position <= last_position
                if sliding_window is not None:
                    is_wanted &= position > early_position
            is_seen = is_wanted[None, :]
            if IS_HIDING and not IS_ONE_QUERY:
                is_seen = is_seen & (position[None, :] <= query_positions[:, None])
                if sliding_window is not None:
                    passed = query_positions - sliding_window
                    is_seen = is_seen & (position[None, :] > passed[:, None])

        keys = _load_columns(key_at, is_wanted, FIRST_DIM, BLOCK_FIRST)  # [N, D]
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")  # [M, N]
        if BLOCK_REST > 0:
            rest = _load_columns(key_at + FIRST_DIM, is_wanted, HEAD_DIM - FIRST_DIM, BLOCK_REST)
            scores = tl.dot(query_rest, tl.trans(rest), scores, input_precision="ieee")
        scores = tl.where(is_seen, scores * softmax_scale, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf is never formed
        weights = tl.exp2((scores - base[:, None]) * LOG2_E)
        decay = tl.exp2((top - base) * LOG2_E)
        top = new_top
        total = total * decay + tl.sum(weights, 1)
        if IS_SHARED:
            values = keys
        else:
            value_start = segment.to(tl.int64) * value_stride_segment
            value_start += physical_row * value_stride_row
            value_at = value_ptr + (value_start + offset.to(tl.int64) * value_stride_token)
            values = _load_columns(value_at, is_wanted, HEAD_DIM_V, BLOCK_V)  # [N, V]
        # Matrix units take weights of the values' dtype; two of them are within 2 ** -18 of one.
        rounded = weights.to(values.dtype)
        rest = rounded
        if IS_EXACT:
            rest = (weights - rounded.to(tl.float32)).to(values.dtype)
        careful: tl.constexpr = IS_HIDING and not IS_ONE_QUERY
        sums = _add_values(sums * decay[:, None], rounded, rest, values, is_seen, IS_EXACT, careful)
    return top, total, sums


@triton.jit(do_not_specialize=list(CHANGING))
def attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    positions_ptr,
    row_table_ptr,
    key_mask_ptr,
    key_start_ptr,
    block_indices_ptr,
    num_blocks_ptr,
    out_ptr,
    lse_ptr,
    carried_out_ptr,
    carried_lse_ptr,
    query_stride_row,
    query_stride_head,
    query_stride_token,
    key_stride_segment,
    key_stride_row,
    key_stride_head,
    key_stride_token,
    value_stride_segment,
    value_stride_row,
    value_stride_head,
    value_stride_token,
    key_mask_stride,
    batch,
    num_kv_heads,
    group_size,
    num_queries,
    tokens,
    num_keys,
    max_blocks,
    num_positions,
    query_start,
    sliding_window,
    tiles_per_split,
    split_rows,
    softmax_scale,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    FIRST_DIM: tl.constexpr,
    BLOCK_FIRST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_SHARED: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_ONE_SEGMENT: tl.constexpr,
    IS_ONE_QUERY: tl.constexpr,
    IS_EXACT: tl.constexpr,
    IS_HIDING: tl.constexpr,
):
    """Partial attention of one program's rows and keys, stored as part `split` of out and lse.

    Options that are not given are None: they cost nothing. IS_ALIGNED: a tile lies within one
    segment, and one block. IS_EXACT: weights are not rounded to the dtype of the values. IS_HIDING:
    the causal rule or the window may hide keys of this call.
    The sums begin with what `carried` holds, if it is given.
    """
    num_rows = group_size * num_queries
    num_row_blocks = tl.cdiv(num_rows, BLOCK_M)
    row_block = tl.program_id(0) % num_row_blocks
    batch_head = tl.program_id(0) // num_row_blocks
    split = tl.program_id(1)
    row = (batch_head // num_kv_heads).to(tl.int64)
    kv_head = (batch_head % num_kv_heads).to(tl.int64)

    # The query rows, and the positions from the first to the last of their tokens.
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    head = kv_head * group_size + rows // num_queries
    query_token = rows % num_queries
    query_positions = query_start + query_token
    first_query = row_block * BLOCK_M % num_queries
    is_wrapped = first_query + BLOCK_M > num_queries
    first_query = tl.where(is_wrapped, 0, first_query)
    last_query = tl.where(is_wrapped, num_queries, first_query + BLOCK_M) - 1
    last_position = query_start + last_query
    early_position = last_position
    if sliding_window is not None:
        early_position = query_start + first_query - sliding_window
    query_at = query_ptr + (
        row * query_stride_row
        + head * query_stride_head
        + query_token.to(tl.int64) * query_stride_token
    )
    query = _load_columns(query_at, is_row, FIRST_DIM, BLOCK_FIRST)  # [M, D]
    query_rest = query
    if BLOCK_REST > 0:
        query_rest = _load_columns(query_at + FIRST_DIM, is_row, HEAD_DIM - FIRST_DIM, BLOCK_REST)

    out_rows = batch_head.to(tl.int64) * num_rows + rows
    columns = tl.arange(0, BLOCK_V)
    is_out = is_row[:, None] & (columns < HEAD_DIM_V)[None, :]
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    if carried_lse_ptr is not None:
        is_ours = rows < tl.where(split == 0, num_rows, 0)
        top = tl.load(carried_lse_ptr + out_rows, mask=is_ours, other=float("-inf"))
        top = tl.where(top == float("inf"), float("-inf"), top)
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        carried_at = carried_out_ptr + out_rows[:, None] * HEAD_DIM_V + columns[None, :]
        sums = tl.load(carried_at, mask=is_out & (total > 0.0)[:, None], other=0.0)

    # The tiles of this split: those that all rows see, then those that only some do.
    num_listed = num_keys
    if block_indices_ptr is not None:
        num_blocks = tl.load(num_blocks_ptr + batch_head)
        num_listed = tl.minimum(tl.maximum(num_blocks, 0), max_blocks).to(tl.int32) * BLOCK_SIZE
    end_tile = tl.minimum((split + 1) * tiles_per_split, tl.cdiv(num_listed, BLOCK_N))
    first_tile = tl.minimum(split * tiles_per_split, end_tile)
    whole_tile = end_tile
    if IS_HIDING:
        whole_tile = first_tile
        if IS_ONE_SEGMENT and block_indices_ptr is None:
            position = tl.load(positions_ptr).to(tl.int32)
            num_seen = tl.maximum(last_position + 1 - position, 0)
            end_tile = tl.minimum(end_tile, tl.maximum(tl.cdiv(num_seen, BLOCK_N), first_tile))
            if sliding_window is not None:
                num_passed = tl.maximum(early_position + 1 - position, 0)
                first_tile = tl.minimum(tl.maximum(first_tile, num_passed // BLOCK_N), end_tile)
                whole_tile = first_tile
            else:
                num_seen = tl.maximum(query_start + first_query + 1 - position, 0)
                whole_tile = tl.maximum(tl.minimum(num_seen // BLOCK_N, end_tile), first_tile)

    first_visible = 0
    if key_start_ptr is not None:
        first_visible = tl.load(key_start_ptr + row)
    if key_mask_ptr is not None:
        key_mask_ptr += row * key_mask_stride
    if block_indices_ptr is not None:
        block_indices_ptr += batch_head.to(tl.int64) * max_blocks
    for part in tl.static_range(2):
        if part == 0 or IS_HIDING:
            top, total, sums = _attend_tiles(
                top,
                total,
                sums,
                query,
                query_rest,
                query_positions,
                last_position,
                early_position,
                key_ptr + kv_head * key_stride_head,
                value_ptr + kv_head * value_stride_head,
                positions_ptr,
                row_table_ptr,
                key_mask_ptr,
                key_start_ptr,
                block_indices_ptr,
                key_stride_segment,
                key_stride_row,
                key_stride_token,
                value_stride_segment,
                value_stride_row,
                value_stride_token,
                first_tile if part == 0 else whole_tile,
                whole_tile if part == 0 else end_tile,
                row,
                batch,
                tokens,
                num_keys,
                num_listed,
                num_positions,
                first_visible,
                sliding_window,
                softmax_scale,
                HEAD_DIM,
                HEAD_DIM_V,
                FIRST_DIM,
                BLOCK_FIRST,
                BLOCK_REST,
                BLOCK_V,
                BLOCK_N,
                BLOCK_SIZE,
                IS_SHARED,
                IS_ALIGNED,
                IS_ONE_QUERY,
                IS_EXACT,
                part == 1,
            )

    is_empty = total == 0.0
    out = sums / tl.where(is_empty, 1.0, total)[:, None]
    lse = tl.where(is_empty, float("-inf"), top + tl.log(total))
    stored_rows = split.to(tl.int64) * split_rows + out_rows
    tl.store(out_ptr + stored_rows[:, None] * HEAD_DIM_V + columns[None, :], out, mask=is_out)
    tl.store(lse_ptr + stored_rows, lse, mask=is_row)
