"""New tokens into the window, and their query to where the CPU finds it, as one launch."""

from typing import Any

from torch import Tensor

import triton
from sparsekv.errors import LayoutError
from sparsekv.kernels.triton.append_kernel import append_kernel
from sparsekv.kernels.triton.launch import Launch, kind_of
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
    _check(key, value, window_key, window_value, offset, query, stored_query)
    if not key.numel():
        return
    arguments, options, grid = _arguments(
        key, value, window_key, window_value, offset, query, stored_query
    )
    with launching_on(key.device):
        append_kernel[grid](*arguments, **options)


class PreparedAppend:
    """Calls of `append` that differ in where the new tokens are, and where in the window they go.

    Checked and compiled once; a launch takes a few microseconds of Python. Not for several threads
    at a time.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor | None,
        window_key: Tensor,
        window_value: Tensor | None,
        *,
        query: Tensor | None = None,
        stored_query: Tensor | None = None,
    ) -> None:
        """Compile; nothing is launched. Arguments as `append` takes them: those to come are alike.

        Raises:
            LayoutError: as there.
        """
        _check(key, value, window_key, window_value, 0, query, stored_query)
        arguments, options, self._grid = _arguments(
            key, value, window_key, window_value, 0, query, stored_query
        )
        self._launch = Launch(append_kernel, arguments, options, key.device)
        self._last_offset = window_key.shape[2] - key.shape[2]
        self._kinds = [None if t is None else kind_of(t) for t in (key, value, query)]
        self._offset_at = self._launch.place_of_number("offset")

    def __call__(
        self, key: Tensor, value: Tensor | None, offset: int, query: Tensor | None = None
    ) -> None:
        """Launch, on the current stream of the device.

        Args:
            key, value, query: like those that were prepared with.
            offset: token of the window that takes the first new one.

        Raises:
            LayoutError: others, or they do not fit into the window.
        """
        if not 0 <= offset <= self._last_offset:
            raise LayoutError(
                f"offset={offset}: must be from 0 to {self._last_offset} for the new tokens to fit "
                "into the window; evict a segment first"
            )
        launch = self._launch
        for place, (tensor, kind) in enumerate(zip((key, value, query), self._kinds, strict=True)):
            if (None if tensor is None else kind_of(tensor)) != kind:
                raise LayoutError(
                    "key, value or query differ in shape, strides, dtype, device or alignment from "
                    "those that were prepared with; prepare anew"
                )
            if tensor is not None:
                launch.point(place, tensor)
        launch.put(self._offset_at, offset)
        launch(*self._grid)


def _check(
    key: Tensor,
    value: Tensor | None,
    window_key: Tensor,
    window_value: Tensor | None,
    offset: int,
    query: Tensor | None,
    stored_query: Tensor | None,
) -> None:
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


def _arguments(
    key: Tensor,
    value: Tensor | None,
    window_key: Tensor,
    window_value: Tensor | None,
    offset: int,
    query: Tensor | None,
    stored_query: Tensor | None,
) -> tuple[list[Any], dict[str, Any], tuple[int, int]]:
    """What the kernel takes in order, and by name, and how many programs there are."""
    batch, num_kv_heads, num_tokens, head_dim = key.shape
    head_dim_v = 1 if value is None else value.shape[-1]
    block_d, block_v = (triton.next_power_of_2(dim) for dim in (head_dim, head_dim_v))
    block_t = min(
        triton.next_power_of_2(num_tokens), max(1, _NUMBERS_OF_A_PROGRAM // max(block_d, block_v))
    )
    num_heads = num_kv_heads * (1 if value is None else 2)
    num_heads += 0 if query is None else query.shape[1]
    tensors = (key, value, query, window_key, window_value, stored_query)
    strides = [s for t in tensors for s in (_NO_STRIDES if t is None else t.stride()[:3])]
    sizes = {"HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v}
    blocks = {"BLOCK_D": block_d, "BLOCK_V": block_v, "BLOCK_T": block_t}
    num_warps = 1 if block_t * block_d <= 512 else 4
    return (
        [*tensors, *strides, offset, num_tokens, num_kv_heads],
        {**sizes, **blocks, "num_warps": num_warps},
        (batch * triton.cdiv(num_tokens, block_t), num_heads),
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
