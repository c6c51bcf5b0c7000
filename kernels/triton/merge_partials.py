"""The merge of partial attention as one launch."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

import triton
from sparsekv.errors import LayoutError
from sparsekv.kernels.reference.merge_partials import merge_partials as reference_merge
from sparsekv.kernels.triton.launch import Launch
from sparsekv.kernels.triton.memory import check_home, check_readable, check_result, launching_on
from sparsekv.kernels.triton.merge_kernel import merge_kernel

MAX_PARTS = 8
"""Of one launch: the kernel is compiled for each number of parts."""


def merge_partials(
    parts: Sequence[tuple[Tensor, Tensor]],
    attn_sink: Tensor | None = None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine attention over disjoint key sets into attention over their union.

    Defined by the reference op of the same name. One kernel on the current stream for each 8 parts;
    nothing waits. Parts that are not contiguous are copied first; those in float64 are merged by
    the reference op.

    Args:
        parts: (out, lse) pairs: out (batch, num_heads, ..., head_dim_v), float32, bfloat16
            or float16; lse (batch, num_heads, ...) float32. On one CUDA device, or in registered
            host memory; at least one on the device, if no `out` is given.
        attn_sink: (num_heads,) floating, likewise.
        out: takes the result: contiguous, shape and dtype of the parts', on the device. May be that
            of a part, which is then merged with the others in place. None: a new one.
        lse: likewise.

    Returns:
        out and lse.

    Raises:
        LayoutError: no parts, or one breaks the rules above; nothing has been written.
    """
    if not parts:
        raise LayoutError("no parts: at least one (out, lse) pair is needed to know the shape")
    if out is None and torch.float64 in (parts[0][0].dtype, parts[0][1].dtype):
        return reference_merge(parts, attn_sink)
    on_device = [part_out for part_out, _ in parts if part_out.device.type != "cpu"]
    first = (on_device or [parts[0][0]])[0] if out is None else out
    check_home("out", first)
    _check_parts(parts, attn_sink, first)
    shape = tuple(first.shape)
    out = torch.empty(shape, dtype=first.dtype, device=first.device) if out is None else out
    if lse is None:
        lse = torch.empty(shape[:-1], dtype=torch.float32, device=first.device)
    check_result("out", out, shape, first.dtype)
    check_result("lse", lse, shape[:-1], torch.float32)
    outs = tuple(part_out.contiguous() for part_out, _ in parts)
    lses = tuple(part_lse.contiguous() for _, part_lse in parts)
    while len(outs) > MAX_PARTS:  # in float32, so that the result alone is rounded
        merged_out = torch.empty(shape, dtype=torch.float32, device=first.device)
        merged_lse = torch.empty_like(lse)
        now = (outs[:MAX_PARTS], lses[:MAX_PARTS])
        launch_merge(*now, None, None, 0, None, merged_out, merged_lse)
        outs, lses = (merged_out, *outs[MAX_PARTS:]), (merged_lse, *lses[MAX_PARTS:])
    launch_merge(outs, lses, None, None, 0, attn_sink, out, lse)
    return out, lse


class PreparedMerge:
    """Calls of `merge_partials` with the same tensors, of which only the contents change, and with
    more parts end to end, of which there may be any number.

    Checked and compiled once; a launch takes a few microseconds of Python.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Tensor, Tensor]],
        attn_sink: Tensor | None = None,
        *,
        out: Tensor,
        lse: Tensor,
        others: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Compile; nothing is launched. Arguments as there: contiguous, at most 8 parts.

        Args:
            others: (num_others, *shape of out) and (num_others, *shape of lse), of out's dtype and
                float32: more parts, on the device or in registered host memory. None: no more.

        Raises:
            LayoutError: a rule is broken.
        """
        check_home("out", out)
        in_rows = [] if others is None else list(zip(*others, strict=True))
        _check_parts([*parts, *in_rows], attn_sink, out)
        check_result("lse", lse, tuple(out.shape[:-1]), torch.float32)
        tensors = [tensor for part in (*parts, others or ()) for tensor in part] + [out]
        if not 0 < len(parts) <= MAX_PARTS or not all(t.is_contiguous() for t in tensors):
            raise LayoutError(
                f"{len(parts)} parts: must be 1 to {MAX_PARTS}, contiguous as `out` is; merge in "
                "several steps"
            )
        outs, lses = zip(*parts, strict=True)
        split_out, split_lse = (None, None) if others is None else others
        arguments = merge_arguments(
            outs, lses, split_out, split_lse, len(in_rows), attn_sink, out, lse
        )
        self._launch = launch = Launch(merge_kernel, *arguments, out.device)
        self._width = lse.numel()
        self._outs = outs
        self._outs_at = launch.place_of_tensor("part_outs")
        self._out_at = launch.place_of_tensor("out_ptr")

    def __call__(self, out: Tensor | None = None) -> None:
        """Launch, on the current stream of the device.

        Args:
            out: the first part's, and takes the result; None: those that were prepared with. Like
                them.
        """
        if out is not None:
            self._launch.point(self._outs_at, (out, *self._outs[1:]))
            self._launch.point(self._out_at, out)
        self._launch(self._width)


def launch_merge(
    outs: tuple[Tensor, ...],
    lses: tuple[Tensor, ...],
    split_out: Tensor | None,
    split_lse: Tensor | None,
    num_splits: int,
    attn_sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Launch the kernel; everything is contiguous, and checked."""
    if not lse.numel():
        return
    arguments, options = merge_arguments(
        outs, lses, split_out, split_lse, num_splits, attn_sink, out, lse
    )
    with launching_on(out.device):
        merge_kernel[(lse.numel(),)](*arguments, **options)


def merge_arguments(
    outs: tuple[Tensor, ...],
    lses: tuple[Tensor, ...],
    split_out: Tensor | None,
    split_lse: Tensor | None,
    num_splits: int,
    attn_sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[list[Any], dict[str, Any]]:
    """What the kernel takes in order, and by name; one program for each number of `lse`."""
    head_dim_v = out.shape[-1]
    arguments = [
        outs,
        lses,
        split_out,
        split_lse,
        num_splits,
        lse.numel(),
        None if attn_sink is None else attn_sink.contiguous(),
        out,
        lse,
        prod(out.shape[2:-1]),
        out.shape[1] if out.dim() > 2 else 1,
    ]
    return arguments, {
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_V": triton.next_power_of_2(max(head_dim_v, 1)),
        "num_warps": 1 if head_dim_v <= 128 else 4,
    }


def _check_parts(
    parts: Sequence[tuple[Tensor, Tensor]], attn_sink: Tensor | None, first: Tensor
) -> None:
    if first.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise LayoutError(f"out is {first.dtype}: must be float32, bfloat16 or float16; convert it")
    for index, (part_out, part_lse) in enumerate(parts):
        fits = part_out.shape == first.shape and part_out.dtype == first.dtype
        if not fits or part_lse.shape != first.shape[:-1] or part_lse.dtype != torch.float32:
            raise LayoutError(
                f"parts[{index}]: out {tuple(part_out.shape)} of {part_out.dtype}, lse "
                f"{tuple(part_lse.shape)} of {part_lse.dtype}: must be {tuple(first.shape)} of "
                f"{first.dtype} and {tuple(first.shape[:-1])} of torch.float32; convert them"
            )
        check_readable(f"out of parts[{index}]", part_out, first.device)
        check_readable(f"lse of parts[{index}]", part_lse, first.device)
    if attn_sink is None:
        return
    if first.dim() < 3 or attn_sink.shape != first.shape[1:2] or not attn_sink.is_floating_point():
        raise LayoutError(
            f"attn_sink {tuple(attn_sink.shape)} of {attn_sink.dtype} does not fit out "
            f"{tuple(first.shape)}: must be floating, one logit for each head; reshape it"
        )
    check_readable("attn_sink", attn_sink, first.device)
