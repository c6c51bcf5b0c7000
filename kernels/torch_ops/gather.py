"""Copies of stored keys or values by torch's indexing, some blocks at a time.

Letters: N segments, R physical rows, G kv heads, W tokens of a segment, M slots of a list, D dim;
U tokens of a unit, the largest run that never crosses the border of a block or of a segment; P
units of a segment, L units of a block.
"""

import math

import torch
from torch import Tensor

from sparsekv.kernels.block_lists import BlockLists

WORKSPACE_BYTES = 16 * 2**20
"""What blocks may take that are on their way from source to out."""


def gather_blocks(
    source: Tensor,
    blocks: BlockLists,
    out: Tensor,
    *,
    row_table: Tensor | None = None,
) -> None:
    """Copy listed blocks end to end into `out`; defined by the reference op of the same name."""
    num_segments, _, _, tokens, dim = source.shape
    if source.numel() == 0 or out.numel() == 0:
        return
    unit = math.gcd(tokens, blocks.block_size)
    stored = source.unflatten(3, (-1, unit))  # [N, R, G, P, U, D]
    slots = out.unflatten(3, (-1, unit))  # [B, G, M, L, U, D]
    units_of_segment, units_of_block = tokens // unit, blocks.block_size // unit

    listed = blocks.is_listed().nonzero()  # row, head, slot of each block
    parts = torch.arange(units_of_block)
    block_bytes = blocks.block_size * dim * source.element_size()
    for some in listed.split(max(1, WORKSPACE_BYTES // block_bytes)):
        row, head, slot = some.unbind(1)
        units = blocks.indices[row, head, slot][:, None] * units_of_block + parts  # [some, L]
        index, part = (units < num_segments * units_of_segment).nonzero(as_tuple=True)
        unit_ids = units[index, part]
        row, head, slot = row[index], head[index], slot[index]
        segment, place = unit_ids // units_of_segment, unit_ids % units_of_segment
        physical = row if row_table is None else row_table[segment, row]
        slots[row, head, slot, part] = stored[segment, physical, head, place]


def copy_segment(source: Tensor, out: Tensor) -> None:
    """Copy a segment to its place; defined by the reference op of the same name."""
    out.copy_(source)
