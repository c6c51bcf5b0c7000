"""New tokens into the window, and their query to where the CPU finds it, as one launch."""

from torch import Tensor

import triton
from sparsekv.errors import LayoutError
from sparsekv.kernels.triton.append_kernel import append_kernel
from sparsekv.kernels.triton.memory import (
    check_home,
    check_readable,
    is_contiguous_at_last,
    launching_on,
)

_NUMBERS_OF_A_PROGRAM = 2048
_NO_STRIDES = (0, 0, 0)


def append(
    key: Tensor,
    value: Tensor | None,
    window_key: Tensor,
    window_value: Tensor | None,
    offset: int,
    *,
    query: Tensor | None = None,
    stored_query: Tensor | None = None,
) -> None:
    """Write new keys and values into the window from token `offset` on, and the query elsewhere.

    One kernel on the current stream; nothing waits. All tensors have any strides with the last
    dimension contiguous; numbers are converted to the dtype of where they go.

    Args:
        key: (batch, num_kv_heads, num_tokens, head_dim), on a CUDA device.
        value: (batch, num_kv_heads, num_tokens, head_dim_v); None where it is part of the key.
        window_key: (batch, num_kv_heads, window tokens, head_dim), on the device: written in place.
        window_value: likewise, with head_dim_v; None with no `value`.
        offset: token of the window that takes the first new one.
        query: (batch, num_heads, num_tokens, head_dim); None: no query is stored.
        stored_query: shape of `query`, float32 or any floating dtype, on the device or in
            registered host memory: written in place.

    Raises:
        LayoutError: shapes do not fit, or the new tokens do not fit into the window; nothing has
            been written.
    """
    check_home("key", key)
    if (value is None) != (window_value is None) or (query is None) != (stored_query is None):
        raise LayoutError(
            "value and window_value, and query and stored_query, are given together: give or "
            "leave out both"
        )
    targets = {"key": (key, window_key), "value": (value, window_value)}
    for name, (source, target) in (targets | {"query": (query, stored_query)}).items():
        if source is not None and target is not None:
            _check_pair(name, source, target, key, None if name == "query" else offset)
    batch, num_kv_heads, num_tokens, head_dim = key.shape
    if not key.numel():
        return
    head_dim_v = 1 if value is None else value.shape[-1]
    block_d, block_v = (triton.next_power_of_2(dim) for dim in (head_dim, head_dim_v))
    block_t = min(
        triton.next_power_of_2(num_tokens), max(1, _NUMBERS_OF_A_PROGRAM // max(block_d, block_v))
    )
    num_heads = num_kv_heads * (1 if value is None else 2)
    num_heads += 0 if query is None else query.shape[1]
    tensors = (key, value, query, window_key, window_value, stored_query)
    strides = [s for t in tensors for s in (_NO_STRIDES if t is None else t.stride()[:3])]
    with launching_on(key.device):
        append_kernel[(batch * triton.cdiv(num_tokens, block_t), num_heads)](
            *tensors,
            *strides,
            offset,
            num_tokens,
            num_kv_heads,
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            BLOCK_D=block_d,
            BLOCK_V=block_v,
            BLOCK_T=block_t,
            num_warps=1 if block_t * block_d <= 512 else 4,
        )


def _check_pair(name: str, source: Tensor, target: Tensor, key: Tensor, offset: int | None) -> None:
    """What is stored fits where it goes; `offset` None: exactly."""
    check_readable(name, source, key.device)
    check_readable(f"what takes the {name}", target, key.device)
    shape = (*source.shape[:2], target.shape[2], source.shape[3])
    alike = source.shape[0] == key.shape[0] and source.shape[2] == key.shape[2]
    alike = alike and (name == "value" or source.shape[3] == key.shape[3])
    if not alike or (name == "value" and source.shape[1] != key.shape[1]) or target.shape != shape:
        raise LayoutError(
            f"{name} {tuple(source.shape)} with key {tuple(key.shape)} into "
            f"{tuple(target.shape)}: batch, tokens and head_dim must agree; reshape them"
        )
    first = offset or 0
    if first < 0 or first + source.shape[2] > target.shape[2]:
        raise LayoutError(
            f"{source.shape[2]} tokens of {name} from offset {first} on, into "
            f"{target.shape[2]}: must fit; evict a segment first"
        )
    if not (is_contiguous_at_last(source) and is_contiguous_at_last(target)):
        raise LayoutError(
            f"{name}: the numbers of a token must lie next to each other; make the last dimension "
            "contiguous"
        )
