"""Partial attention that is checked and compiled once, and launched at each step."""

from typing import Any

import torch
from torch import Tensor

from sparsekv.errors import LayoutError
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.triton import checks, config
from sparsekv.kernels.triton.arguments import (
    cut_workspace,
    kernel_arguments,
    num_row_programs,
    tiling_and_splits,
)
from sparsekv.kernels.triton.attention_kernel import attention_kernel
from sparsekv.kernels.triton.launch import Launch, is_aligned, kind_of
from sparsekv.kernels.triton.memory import check_readable
from sparsekv.kernels.triton.merge_kernel import merge_kernel
from sparsekv.kernels.triton.merge_partials import merge_arguments


class PreparedAttention:
    """Calls of `partial_attention` that differ in the query, in its place and in the keys' number.

    A launch takes a few microseconds of Python, allocates nothing and waits for nothing. Not for
    several threads at a time.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        softmax_scale: float,
        *,
        out: Tensor,
        lse: Tensor,
        workspace: Tensor | None = None,
        positions: Tensor | None = None,
        row_table: Tensor | None = None,
        key_start: Tensor | None = None,
        sliding_window: int | None = None,
        blocks: BlockLists | None = None,
        is_carried: bool = False,
    ) -> None:
        """Compile; nothing is launched.

        Args:
            query: as those to come: their shape, strides and dtype.
            key, value, softmax_scale: as `partial_attention` has them, where the first call finds
                them. A window is given whole, filled or not.
            out, lse: take the results, as in `partial_attention`, where a call gives no other out.
            workspace: as there, of `workspace_numel` numbers; needed where these are any.
            positions: on the query's device, and read there at each step. None: all keys stand
                before the query or at it.
            row_table, key_start, blocks: likewise on the device; what they hold may change, and
                key_start and sliding_window take positions.
            sliding_window, is_carried: as there.

        Raises:
            LayoutError: a dtype, device, shape or stride breaks a rule.
        """
        if positions is None and (key_start is not None or sliding_window is not None):
            raise LayoutError("key_start or sliding_window without positions: give positions")
        for name, tensor in (
            ("positions", positions),
            ("row_table", row_table),
            ("key_start", key_start),
        ):
            if tensor is not None and (tensor.device != query.device or not tensor.is_contiguous()):
                raise LayoutError(
                    f"{name} lies on {tensor.device}: must lie on {query.device}, contiguous, to "
                    "be read at each step; move it"
                )
        some = positions if positions is not None else torch.zeros(len(key), dtype=torch.int64)
        checks.check_tensors(query, key, value, some, row_table, key_start, None)
        checks.check_visibility(query, key, sliding_window, blocks)
        checks.check_results(query, out, lse, (*query.shape[:3], value.shape[-1]), is_carried)
        if query.stride(-1) != 1 or not query.numel() or not key.numel():
            raise LayoutError(
                f"query {tuple(query.shape)} with strides {query.stride()}, key "
                f"{tuple(key.shape)}: must hold numbers, the query's heads contiguous"
            )
        is_hiding = positions is not None
        tiling, self._max_splits = tiling_and_splits(query, key, value, is_hiding)
        self._block_n = tiling.block_n
        self._width = num_row_programs(query, key, tiling)
        self._results = out, lse
        self._is_carried = is_carried
        self._parts: tuple[Tensor, Tensor] | None = None
        if self._max_splits > 1:
            self._parts = cut_workspace(workspace, self._max_splits, out, lse)
        self._blocks = blocks
        self._keeps_segments = positions is not None or row_table is not None

        def launch(parts: tuple[Tensor, Tensor]) -> Launch:
            arguments, options = kernel_arguments(
                query,
                key,
                value,
                positions,
                row_table,
                key_start,
                None,
                blocks,
                softmax_scale,
                0,
                sliding_window,
                is_hiding=is_hiding,
                tiling=tiling,
                tiles_per_split=1,
                parts=parts,
                carried=(out, lse) if is_carried else (None, None),
            )
            return Launch(attention_kernel, arguments, options, query.device)

        self._whole = launch((out, lse))
        self._split = self._whole
        self._merge: Launch | None = None
        if self._parts is not None:
            self._split = launch(self._parts)
            merged = merge_arguments((), (), *self._parts, 2, None, out, lse)
            self._merge = Launch(merge_kernel, *merged, query.device)
            self._num_splits_at = self._merge.place_of_number("num_splits")
            self._merged_at = self._merge.place_of_tensor("out_ptr")
        tensors = ("query_ptr", "key_ptr", "value_ptr", "out_ptr", "carried_out_ptr")
        numbers = ("query_start", "tokens", "num_keys", "tiles_per_split")
        self._at = {name: self._whole.place_of_tensor(name) for name in tensors}
        self._at |= {name: self._whole.place_of_number(name) for name in numbers}
        self._query_kind = kind_of(query)
        self._key_kind, self._value_kind = _key_kind(key), _key_kind(value)
        self._num_segments, self._tokens = key.shape[0], key.shape[3]

    def attend_to(self, key: Tensor, value: Tensor) -> None:
        """From here on, attend to these keys: of the strides, alignment and kind of memory as those
        before, in another number of segments unless positions or a row table are given.

        Raises:
            LayoutError: they differ in something else; prepare anew.
        """
        alike = _key_kind(key) == self._key_kind and _key_kind(value) == self._value_kind
        if key.shape[0] != self._num_segments:
            one = 1 in (key.shape[0], self._num_segments) and self._tokens % self._block_n
            alike = alike and not one and not self._keeps_segments
        alike = alike and key.shape[0] == value.shape[0]
        if not alike or key.shape[3] != self._tokens or value.shape[3] != self._tokens:
            raise LayoutError(
                f"key {tuple(key.shape)} with strides {key.stride()}, value {tuple(value.shape)} "
                f"with strides {value.stride()}: prepared for others; prepare anew"
            )
        device = self._results[0].device
        check_readable("key", key, device)
        check_readable("value", value, device)
        self._num_segments = key.shape[0]
        for launch in {id(x): x for x in (self._whole, self._split)}.values():
            launch.point(self._at["key_ptr"], key)
            launch.point(self._at["value_ptr"], value)

    def __call__(
        self,
        query: Tensor,
        query_start: int,
        num_tokens: int | None = None,
        out: Tensor | None = None,
    ) -> None:
        """Launch, on the current stream of the query's device.

        Args:
            query: like the one that was prepared with.
            query_start: position of its first token.
            num_tokens: tokens of the window that are filled, where there is one segment; None: all.
            out: takes the result, and holds what is carried; like the one that was prepared with.

        Raises:
            LayoutError: another query, or more tokens than there are.
        """
        tokens = self._tokens if num_tokens is None else num_tokens
        if kind_of(query) != self._query_kind:
            raise LayoutError(
                f"query {tuple(query.shape)} of {query.dtype} with strides {query.stride()} on "
                f"{query.device}: prepared for another; prepare anew"
            )
        if tokens != self._tokens and (self._num_segments > 1 or not 0 < tokens < self._tokens):
            raise LayoutError(
                f"num_tokens={num_tokens}: must be from 1 to {self._tokens}, and all where there "
                "are several segments; leave out what is empty"
            )
        num_keys = self._num_segments * tokens
        num_listed, blocks = num_keys, self._blocks
        if blocks is not None:
            num_listed = min(-(-num_keys // blocks.block_size), blocks.indices.shape[2])
            num_listed *= blocks.block_size
        tiles_per_split, splits = config.cut(num_listed, self._block_n, self._max_splits)
        launch, at = self._whole if splits == 1 else self._split, self._at
        launch.point(at["query_ptr"], query)
        launch.put(at["query_start"], query_start)
        launch.put(at["tokens"], tokens)
        launch.put(at["num_keys"], num_keys)
        launch.put(at["tiles_per_split"], tiles_per_split)
        out = self._results[0] if out is None else out
        if splits == 1:
            launch.point(at["out_ptr"], out)
        if self._is_carried:
            launch.point(at["carried_out_ptr"], out)
        launch(self._width, splits)
        if splits > 1 and self._merge is not None:
            self._merge.put(self._num_splits_at, splits)
            self._merge.point(self._merged_at, out)
            self._merge(self._results[1].numel())


def _key_kind(key: Tensor) -> tuple[Any, ...]:
    return (
        key.shape[1:3],
        key.shape[4],
        key.stride(),
        key.dtype,
        key.device,
        is_aligned(key),
    )
