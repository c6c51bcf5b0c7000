"""Which implementation of an op runs on which device.

Callers ask here and never import an implementation; a faster one is entered in the table below.
Triton is imported when an op for CUDA is first asked for; without it torch's ops do its work, and
one warning says so.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from sparsekv.errors import LayoutError
from sparsekv.kernels import cpu, reference, torch_ops
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.cpu import jobs
from sparsekv.kernels.cpu.jobs import Flag, Job, JobStatus
from sparsekv.kernels.cpu.library import Backend, native_library
from sparsekv.kernels.cpu.prepared_job import PreparedAttentionJob
from sparsekv.kernels.reference.compressor import carried_series, compress
from sparsekv.kernels.reference.entry_format import unpack_entries
from sparsekv.kernels.reference.rotary import apply_rotary
from sparsekv.kernels.torch_ops.entry_format import pack_entries
from sparsekv.kernels.torch_ops.indexer import lightning_indexer
from sparsekv.kernels.torch_ops.sparse_attention import gathered_attention

__all__ = [
    "Backend",
    "BlockLists",
    "CopySegment",
    "DecodeOps",
    "Flag",
    "GatherBlocks",
    "GatheredAttention",
    "Job",
    "JobStatus",
    "LightningIndexer",
    "MergePartials",
    "PartialAttention",
    "PreparedAttentionJob",
    "apply_rotary",
    "attention_jobs",
    "carried_series",
    "compress",
    "copy_jobs",
    "copy_segment_for",
    "cpu_backend",
    "decode_ops_for",
    "gather_blocks_for",
    "gathered_attention_for",
    "lightning_indexer_for",
    "merge_partials_for",
    "pack_entries",
    "partial_attention_for",
    "unpack_entries",
]

_logger = logging.getLogger(__name__)

Op = TypeVar("Op")


class PartialAttention(Protocol):
    """Attention to one set of keys; sparsekv.kernels.reference.partial_attention defines it."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        softmax_scale: float,
        *,
        row_table: Tensor | None = None,
        query_start: int = 0,
        key_mask: Tensor | None = None,
        key_start: Tensor | None = None,
        sliding_window: int | None = None,
        blocks: BlockLists | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class MergePartials(Protocol):
    """The merge of partial attention; sparsekv.kernels.reference.merge_partials defines it."""

    def __call__(
        self, parts: Sequence[tuple[Tensor, Tensor]], attn_sink: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


class DecodeOps(Protocol):
    """Ops that write into what they are given, so that a decode step allocates nothing, and that
    read registered host memory where it lies: sparsekv.kernels.triton has them, and says what they
    take.
    """

    @property
    def PreparedAppend(self) -> Callable[..., Callable[..., None]]: ...
    @property
    def PreparedAttention(self) -> Callable[..., Any]: ...
    @property
    def PreparedMerge(self) -> Callable[..., Callable[..., None]]: ...
    @property
    def append(self) -> Callable[..., None]: ...
    @property
    def merge_partials(self) -> Callable[..., tuple[Tensor, Tensor]]: ...
    @property
    def partial_attention(self) -> Callable[..., tuple[Tensor, Tensor]]: ...
    @property
    def workspace_numel(self) -> Callable[[Tensor, Tensor, Tensor], int]: ...


class LightningIndexer(Protocol):
    """Scores and top-k; sparsekv.kernels.reference.indexer defines it."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        weights: Tensor,
        num_visible: Tensor,
        topk: int,
        softmax_scale: float,
    ) -> Tensor: ...


class GatheredAttention(Protocol):
    """Attention to gathered entries; sparsekv.kernels.reference.sparse_attention defines it."""

    def __call__(
        self, query: Tensor, gathered: Tensor, is_valid: Tensor, softmax_scale: float
    ) -> tuple[Tensor, Tensor]: ...


class GatherBlocks(Protocol):
    """Copies of listed blocks; sparsekv.kernels.reference.gather defines it."""

    def __call__(
        self,
        source: Tensor,
        blocks: BlockLists,
        out: Tensor,
        *,
        row_table: Tensor | None = None,
    ) -> None: ...


class CopySegment(Protocol):
    """The copy of a segment to its place; sparsekv.kernels.reference.gather defines it."""

    def __call__(self, source: Tensor, out: Tensor) -> None: ...


_PARTIAL_ATTENTION: dict[str, PartialAttention] = {
    "cpu": cpu.partial_attention,
    "cuda": torch_ops.partial_attention,
}
_MERGE_PARTIALS: dict[str, MergePartials] = {
    "cpu": reference.merge_partials,
    "cuda": reference.merge_partials,
}
_LIGHTNING_INDEXER: dict[str, LightningIndexer] = {
    "cpu": lightning_indexer,
    "cuda": lightning_indexer,
}
_GATHERED_ATTENTION: dict[str, GatheredAttention] = {
    "cpu": gathered_attention,
    "cuda": gathered_attention,
}
_GATHER_BLOCKS: dict[str, GatherBlocks] = {
    "cpu": cpu.gather_blocks,
    "cuda": torch_ops.gather_blocks,
}
_COPY_SEGMENT: dict[str, CopySegment] = {
    "cpu": cpu.copy_segment,
    "cuda": torch_ops.copy_segment,
}


def partial_attention_for(device: torch.device) -> PartialAttention:
    """The implementation of partial attention for tensors on `device`.

    Raises:
        LayoutError: no implementation runs on such a device.
    """
    ops = decode_ops_for(device)
    return _on(device, _PARTIAL_ATTENTION) if ops is None else ops.partial_attention


def merge_partials_for(device: torch.device) -> MergePartials:
    """The implementation of the merge for parts on `device`; raises as above."""
    ops = decode_ops_for(device)
    return _on(device, _MERGE_PARTIALS) if ops is None else ops.merge_partials


def decode_ops_for(device: torch.device) -> DecodeOps | None:
    """The ops of a decode step on `device` without allocations; None: there are none for it."""
    return _triton_ops() if device.type == "cuda" else None


def cpu_backend() -> Backend:
    """What computes on the CPU, and why; loads or builds the native library if nobody has yet.

    Raises:
        LayoutError: `SPARSEKV_CPU` is none of its values, or `native` and there is no library.
    """
    return cpu.backend()


def attention_jobs() -> type[PreparedAttentionJob] | None:
    """Partial attention on the CPU as jobs; None without the native library."""
    return None if native_library() is None else PreparedAttentionJob


def num_attending_threads() -> int:
    """Threads of the CPU's partial attention."""
    return cpu.backend().num_threads


def copy_jobs() -> Callable[..., Job] | None:
    """What submits copies of segments to their places as a job; None as above."""
    return None if native_library() is None else jobs.submit_copies


def lightning_indexer_for(device: torch.device) -> LightningIndexer:
    """The implementation of the lightning indexer for tensors on `device`; raises as above."""
    return _on(device, _LIGHTNING_INDEXER)


def gathered_attention_for(device: torch.device) -> GatheredAttention:
    """The implementation of attention to gathered entries on `device`; raises as above."""
    return _on(device, _GATHERED_ATTENTION)


def gather_blocks_for(device: torch.device) -> GatherBlocks:
    """The implementation of the gather of blocks for tensors on `device`; raises as above."""
    return _on(device, _GATHER_BLOCKS)


def copy_segment_for(device: torch.device) -> CopySegment:
    """The implementation of the copy of a segment on `device`; raises as above."""
    return _on(device, _COPY_SEGMENT)


@cache
def _triton_ops() -> DecodeOps | None:
    try:
        from sparsekv.kernels import triton
    except ImportError as error:
        _logger.warning(
            "triton cannot be imported (%s): attention on CUDA is computed by torch's ops, which "
            "is slower, and copies what lies in host memory; pip install triton",
            error,
        )
        return None
    return triton


def _on(device: torch.device, implementations: dict[str, Op]) -> Op:
    try:
        return implementations[device.type]
    except KeyError:
        known = " or ".join(implementations)
        raise LayoutError(
            f"device={device}: this op runs on {known}; move the tensors there"
        ) from None
