"""Copies of stored keys or values, by definition: token by token.

Letters: N segments, R physical rows, B batch (logical rows), G kv heads, W tokens of a segment,
M blocks of a list, S tokens of a block, D dim.
"""

from torch import Tensor


def gather_blocks(
    source: Tensor,
    block_ids: Tensor,
    num_blocks: Tensor,
    block_size: int,
    out: Tensor,
    *,
    row_table: Tensor | None = None,
) -> None:
    """Copy the blocks that each row and kv head names, end to end, into `out`.

    Block n is tokens n * block_size ... (n + 1) * block_size - 1, counted through all segments in
    order: it may cross from one segment into the next, and the last one may be partial. `out` is
    written in place; its slots beyond `num_blocks`, and the tokens of a slot beyond the last
    segment's end, keep what they hold. A block may be named more than once.

    Args:
        source: (num_segments, rows, num_kv_heads, tokens, dim), any dtype: keys, values, or packed
            entries as bytes.
        block_ids: (batch, num_kv_heads, max_blocks) int64 on the CPU. Entries beyond `num_blocks`
            are not looked at.
        num_blocks: (batch, num_kv_heads) int64 on the CPU: how many of the block_ids count, within
            0 and max_blocks.
        block_size: tokens of a block, at least 1; need not divide `tokens`.
        out: (batch, num_kv_heads, max_blocks, block_size, dim), dtype and device of the source. It
            must share no memory with the source, nor its elements with each other.
        row_table: (num_segments, batch) int64 on the CPU, logical row -> physical row; None: row b
            is row b.
    """
    num_segments, _, _, tokens, _ = source.shape  # [N, R, G, W, D]
    batch, num_kv_heads, _ = block_ids.shape  # [B, G, M]
    for row in range(batch):
        for head in range(num_kv_heads):
            for slot in range(int(num_blocks[row, head])):
                first = int(block_ids[row, head, slot]) * block_size
                for token in range(min(block_size, num_segments * tokens - first)):
                    segment, place = divmod(first + token, tokens)
                    physical = row if row_table is None else int(row_table[segment, row])
                    out[row, head, slot, token] = source[segment, physical, head, place]


def copy_segment(source: Tensor, out: Tensor) -> None:
    """Copy a segment's keys or values from a staging buffer to their place.

    Args:
        source: (rows, num_kv_heads, tokens, dim), any dtype.
        out: the same shape, dtype and device; written in place. It must share no memory with the
            source, nor its elements with each other.
    """
    out.copy_(source)
