"""The CPU's part of split attention: the unpinned views, attended where they lie.

Here it is called when the accelerator's work has been issued; `host_jobs` lets it run beside that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from sparsekv.attention.merge import merge_partials
from sparsekv.attention.timings import Recent
from sparsekv.format.views import KVView
from sparsekv.kernels.dispatch import partial_attention_for

Partial = tuple[Tensor, Tensor]
"""out and lse of some of the keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of every part of a layer: the arguments of partial attention but the part."""

    query: Tensor
    softmax_scale: float
    query_start: int
    key_mask: Tensor | None
    mask: Tensor | None

    def attend(self, part: KVView) -> Partial:
        """Attention to one part, by the device where the query is."""
        return partial_attention_for(self.query.device)(
            self.query,
            part.key,
            part.value,
            part.positions,
            self.softmax_scale,
            row_table=part.row_table,
            query_start=self.query_start,
            key_mask=self.key_mask,
            mask=self.mask,
        )

    def to(self, device: torch.device) -> Question:
        """The same with its tensors on `device`."""
        return Question(
            query=self.query.to(device),
            softmax_scale=self.softmax_scale,
            query_start=self.query_start,
            key_mask=None if self.key_mask is None else self.key_mask.to(device),
            mask=None if self.mask is None else self.mask.to(device),
        )


class HostAttention(Protocol):
    """How the CPU attends to its parts."""

    def begin(self, question: Question, parts: Sequence[KVView]) -> Callable[[], list[Partial]]:
        """Begin. The accelerator's work is issued next; then the returned function is called once
        and gives the results on the query's device, in the order of the caller's stream.
        """

    def synchronize(self) -> None:
        """Return when nothing of it reads host memory any more."""


class HostCalls:
    """Attends on the calling thread, which waits for the query.

    Args:
        timings: where it is noted how long calls of one query took; None: nobody asks.
    """

    def __init__(self, timings: Recent | None = None) -> None:
        self._timings = timings

    def begin(self, question: Question, parts: Sequence[KVView]) -> Callable[[], list[Partial]]:
        device = question.query.device
        on_host = question.to(torch.device("cpu"))  # first: later it would wait for other work

        def finish() -> list[Partial]:
            start = perf_counter()
            results = [on_host.attend(part) for part in parts]
            if self._timings is not None and question.query.shape[2] == 1:
                num_tokens = sum(part.num_tokens for part in parts)
                self._timings.note(num_tokens, perf_counter() - start)
            out, lse = merge_partials(results)  # of a prompt, each is larger than its keys
            return [(out.to(device), lse.to(device))]

        return finish

    def synchronize(self) -> None:
        """Nothing to do: nothing is begun that is not finished."""
