"""Copies of stored keys or values, by definition: token by token.

Letters: N segments, R physical rows, G kv heads, W tokens of a segment, D dim.
"""

from torch import Tensor

from sparsekv.kernels.block_lists import BlockLists


def gather_blocks(
    source: Tensor,
    blocks: BlockLists,
    out: Tensor,
    *,
    row_table: Tensor | None = None,
) -> None:
    """Copy the blocks that each row and kv head lists, end to end, into `out`.

    `out` is written in place. Its slots beyond the end of a list, and the tokens of a partial last
    block that do not exist, keep what they hold.

    Args:
        source: (num_segments, rows, num_kv_heads, tokens, dim), any dtype: keys, values, or packed
            entries as bytes.
        blocks: on the CPU; block_size need not divide `tokens`, and a block may be listed twice.
        out: (batch, num_kv_heads, max_blocks, block_size, dim), dtype and device of the source. It
            must share no memory with the source, nor its elements with each other.
        row_table: (num_segments, batch) int64 on the CPU, logical row -> physical row; None: row b
            is row b.
    """
    num_segments, _, _, tokens, _ = source.shape  # [N, R, G, W, D]
    for row, lists in enumerate(blocks.indices):
        for head, indices in enumerate(lists):
            listed = indices[: blocks.num_blocks[row, head]].tolist()
            for slot, first in enumerate(index * blocks.block_size for index in listed):
                for token in range(min(blocks.block_size, num_segments * tokens - first)):
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
