"""Jobs of a decode step: checked once, then submitted with one call into the library each."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsekv.errors import LayoutError
from sparsekv.kernels.cpu.jobs import Flag, Job, Keep, Signal, check_in_place, job_library, start
from sparsekv.kernels.cpu.partial_attention import (
    check_inputs,
    check_position,
    check_scale,
    check_tensor,
    error_of,
    is_contiguous_at_last,
    native_call,
)

__all__ = ["KeyPart", "PreparedAttentionJob"]

KeyPart = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""key, value, positions and row_table, as `submit_partial_attention` has them."""


class PreparedAttentionJob:
    """Partial attention of one query to several sets of keys, one after the other: jobs that differ
    in what the query holds, in its position and in their flags. Not for several threads at a time.

    Attributes:
        num_queries, num_keys: of a sequence, in all sets.
    """

    def __init__(
        self,
        query: Tensor,
        parts: Sequence[KeyPart],
        softmax_scale: float,
        *,
        out: Tensor,
        lse: Tensor,
        key_mask: Tensor | None = None,
    ) -> None:
        """Check; nothing is submitted.

        Args:
            query: (batch, num_heads, num_queries, head_dim) float32, its last dimension contiguous:
                read in place, as the keys are, after a job's flag was set.
            parts: at least one, whose values have the same head_dim_v.
            out: (num_parts, batch, num_heads, num_queries, head_dim_v) float32, contiguous.
            lse: (num_parts, batch, num_heads, num_queries) float32, contiguous; NaN once a job has
                ended that is not done.
            key_mask: (batch, positions) bool, its last dimension contiguous; None: all are seen.

        Raises:
            LayoutError: a type, dtype, device, shape or stride breaks a rule, or there is no
                native library.
        """
        self._library = job_library()
        uses = [query]
        _check_parts(query, parts, key_mask)
        check_scale(softmax_scale)
        check_in_place("query", query, torch.float32, is_contiguous_at_last(query))
        if key_mask is not None:
            check_in_place("key_mask", key_mask, torch.bool, is_contiguous_at_last(key_mask))
            uses.append(key_mask)
        shape = (len(parts), *query.shape[:3], parts[0][1].shape[-1])
        for name, tensor, wanted in (("out", out, shape), ("lse", lse, shape[:-1])):
            check_tensor(name, tensor)
            if tensor.shape != wanted:
                raise LayoutError(
                    f"{name} {tuple(tensor.shape)} for {len(parts)} parts: must be {wanted}; give "
                    "such a tensor"
                )
            check_in_place(name, tensor, torch.float32, tensor.is_contiguous())
        calls = []
        for i, (key, value, positions, row_table) in enumerate(parts):
            positions = positions.contiguous()
            row_table = None if row_table is None else row_table.contiguous()
            uses += [key, value, positions] + ([] if row_table is None else [row_table])
            calls.append(
                native_call(
                    query,
                    key,
                    value,
                    positions,
                    softmax_scale,
                    out[i],
                    lse[i],
                    row_table=row_table,
                    query_start=0,
                    key_mask=key_mask,
                    key_start=None,
                    sliding_window=None,
                    blocks=None,
                )
            )
        self.num_queries = query.shape[2]
        self.num_keys = sum(key.shape[0] * key.shape[3] for key, *_ in parts)
        self._results, self._uses = (out, lse), tuple(uses)
        self._array = (type(calls[0]) * len(calls))(*calls)
        self._calls = list(self._array)  # the same memory
        self._signal = Signal(unless_done=lse.data_ptr(), num_unless_done=lse.numel())
        self._error_of = functools.partial(error_of, call=self._calls[0])

    def submit(
        self,
        query_start: int,
        wait: tuple[Flag, int],
        done: tuple[Flag, int],
        keep: Keep | None = None,
    ) -> Job:
        """A job whose results are (out, lse).

        Args:
            query_start: position of the first query token.
            wait, done: as `submit_partial_attention` has them.
            keep: as `start` has it.

        Raises:
            LayoutError: query_start or positions lie out of range or beyond key_mask, or a row
                table names a row that does not exist; nothing has been submitted.
            CapacityError: no memory or no thread for the job.
        """
        check_position(query_start)
        for call in self._calls:
            call.query_start = query_start
        signal = self._signal
        signal.wait, signal.wait_value = wait[0].address, wait[1] % 2**32
        signal.done, signal.done_value = done[0].address, done[1] % 2**32
        return start(
            functools.partial(
                self._library.sparsekv_submit_partial_attention, self._array, len(self._calls)
            ),
            signal,
            self._results,
            (*self._uses, wait[0].words, done[0].words),
            self._error_of,
            keep,
        )


def _check_parts(query: Tensor, parts: Sequence[KeyPart], key_mask: Tensor | None) -> None:
    """Raises a LayoutError unless the library can take each with the query, and all in one room."""
    if not isinstance(parts, (list, tuple)):
        raise LayoutError(f"parts is a {type(parts).__name__}: must be a list; put them into one")
    if not parts:
        raise LayoutError("0 parts for out and lse: must be at least one; give the keys")
    for part in parts:
        if not isinstance(part, tuple) or len(part) != 4:
            raise LayoutError(
                f"a part is a {type(part).__name__}: must be a tuple of key, value, positions and "
                "row_table or None; give such a tuple"
            )
        key, value, positions, row_table = part
        check_inputs(query, key, value, positions, row_table, key_mask, None)
    sizes = {part[1].shape[-1] for part in parts}
    if len(sizes) > 1:
        raise LayoutError(
            f"values of head_dim_v {sorted(sizes)}: must be the same in all parts, whose results "
            "lie in one tensor; make a job of each"
        )
