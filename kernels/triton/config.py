"""How the kernels cut their work: tiles, warps, stages and splits, from shapes and dtypes only."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

_TILES_WORTH_A_SPLIT = 4
_PROGRAMS_PER_MULTIPROCESSOR = 2
_PROGRAMS_OVER_PCIE = 64
"""Each has 64 KiB or more on their way, all of them much more than PCIe holds; other kernels find
room beside them.
"""
_MAX_EXACT_QUERIES = 16
_EXACT_SUMS = 128 * 128
"""Numbers of a program's sums: twice as many spill when weights are multiplied in two parts."""
_SHARED_MEMORY_BYTES = 163 << 10
"""Of a program, where there is no device to ask: that of compute capability 8.0."""
_RESERVED_BYTES = 1 << 10
"""Of a multiprocessor's shared memory, for each program on it (CUDA C++ Programming Guide)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Compile-time sizes of the attention kernel.

    A key is read as its first columns and the rest, since blocks are powers of two and 576 columns
    would take one of 1024. Of shared keys and values the first columns are the value.

    Attributes:
        first_dim: columns of a key's first part.
        block_first: room for them.
        block_rest: room for the others; 0 without.
        block_v: room for a value.
        block_m: query rows of a program.
        block_n: keys of a tile.
        num_warps: warps of a program.
        num_stages: tiles on their way at a time, and the one that is worked on.
    """

    first_dim: int
    block_first: int
    block_rest: int
    block_v: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_memory_bytes(self, itemsize: int, is_shared: bool, is_hiding: bool) -> int:
        """What a program takes at most: query, tiles, weights, and values without their NaN."""
        key = self.block_first + self.block_rest
        tile = self.block_n * (key + (0 if is_shared else self.block_v))
        numbers = self.block_m * key + self.num_stages * tile
        if is_hiding:
            numbers += self.block_n * (self.block_m + self.block_v)
        return numbers * itemsize


@cache
def tiling_for(
    head_dim: int,
    head_dim_v: int,
    num_rows: int,
    dtype: torch.dtype,
    is_shared: bool,
    is_hiding: bool,
    limit_bytes: int,
) -> Tiling:
    """The tiling for `num_rows` query rows of each kv head.

    Args:
        head_dim: columns of a key; head_dim_v: of a value.
        num_rows: query heads of a kv head times query tokens.
        dtype: of keys and values.
        is_shared: whether a value is the first columns of its key.
        is_hiding: whether query tokens of a program may see different keys.
        limit_bytes: shared memory of a program.
    """
    power = _block(head_dim)
    first_dim = head_dim if head_dim <= 16 or head_dim == power else power // 2
    if is_shared:
        first_dim = head_dim_v
    rest_dim = head_dim - first_dim
    tiling = Tiling(
        first_dim=first_dim,
        block_first=_block(first_dim),
        block_rest=_block(rest_dim) if rest_dim else 0,
        block_v=_block(head_dim_v),
        block_m=min(_block(num_rows), 128),
        block_n=64,
        num_warps=4,
        num_stages=3,
    )
    width = max(tiling.block_first + tiling.block_rest, tiling.block_v)
    if dtype == torch.float32:  # no tensor cores: each number of a tile passes through registers
        block_n = 32 if width <= 128 else 16
        tiling = replace(tiling, block_m=16, block_n=block_n, num_warps=8, num_stages=2)
    elif width > 128:
        tiling = replace(tiling, block_m=min(tiling.block_m, 64), block_n=32)
        if width > 256 and is_hiding:
            tiling = replace(tiling, block_m=min(tiling.block_m, 32))
    if tiling.block_m * tiling.block_v * (2 if is_hiding else 1) > 64 * 128:
        tiling = replace(tiling, num_warps=8)
    while tiling.shared_memory_bytes(dtype.itemsize, is_shared, is_hiding) > limit_bytes:
        if tiling.num_stages > 2:
            tiling = replace(tiling, num_stages=tiling.num_stages - 1)
        elif tiling.block_m > 16:
            tiling = replace(tiling, block_m=tiling.block_m // 2)
        elif tiling.block_n > 16:
            tiling = replace(tiling, block_n=tiling.block_n // 2)
        else:
            break  # the launch says what it lacks
    return tiling


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Shared memory that a program on `device` may take."""
    if device.type != "cuda":
        return _SHARED_MEMORY_BYTES
    size: int = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return size - _RESERVED_BYTES


@cache
def max_programs(device: torch.device, over_pcie: bool) -> int:
    """Programs of the attention kernel that run at a time, and that a call is split into."""
    if over_pcie or device.type != "cuda":
        return _PROGRAMS_OVER_PCIE
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROGRAMS_PER_MULTIPROCESSOR * count


def max_splits(num_programs: int, device: torch.device, over_pcie: bool) -> int:
    """Into how many parts the keys may be cut, for `num_programs` programs in each part."""
    return max(1, max_programs(device, over_pcie) // max(1, num_programs))


def cut(num_listed: int, block_n: int, most_splits: int) -> tuple[int, int]:
    """Tiles of one split, and the splits that so many keys take; what is short is not cut."""
    num_tiles = -(-num_listed // block_n)
    splits = min(most_splits, -(-num_tiles // _TILES_WORTH_A_SPLIT))
    tiles_per_split = -(-num_tiles // max(1, splits))
    return tiles_per_split, -(-num_tiles // tiles_per_split)


def is_exact(num_queries: int, dtype: torch.dtype, tiling: Tiling) -> bool:
    """Whether weights are multiplied with float32's precision, at half as many operations again.

    A decode step waits for bytes and has operations to spare, and its result must not depend on
    where keys lie. In a prompt the operations bind, and weights are rounded as is usual; so they
    are where the sums of many rows of wide values leave no registers.
    """
    has_room = tiling.block_m * tiling.block_v <= _EXACT_SUMS
    return num_queries <= _MAX_EXACT_QUERIES and has_room and dtype != torch.float32


def is_shared(key: Tensor, value: Tensor) -> bool:
    """Whether the value is the first columns of the key, in the same memory."""
    return (
        value.data_ptr() == key.data_ptr()
        and value.stride() == key.stride()
        and value.shape[-1] <= key.shape[-1]
    )


def _block(size: int) -> int:
    """The room for `size` numbers: a power of two, and enough for a matrix product."""
    return max(16, 1 << (size - 1).bit_length())
