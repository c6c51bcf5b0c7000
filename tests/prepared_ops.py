"""The prepared launches of a decode step, played by the reference ops on the CPU.

They refuse what those of Triton refuse, and compute at once.
"""

import torch

from sparsekv.errors import LayoutError
from sparsekv.kernels import reference


def _kind(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype


class PreparedAppend:
    count = 0

    def __init__(self, key, value, window_key, window_value):
        assert (value is None) == (window_value is None)
        PreparedAppend.count += 1
        self._kinds = [None if t is None else _kind(t) for t in (key, value)]
        self._targets = window_key, window_value

    def __call__(self, key, value, offset):
        if [None if t is None else _kind(t) for t in (key, value)] != self._kinds:
            raise LayoutError("prepare anew")
        for source, target in zip((key, value), self._targets, strict=True):
            if source is not None:
                target[:, :, offset : offset + source.shape[2]].copy_(source)


class PreparedAttention:
    count = 0

    def __init__(
        self,
        query,
        key,
        value,
        softmax_scale,
        *,
        out,
        lse,
        workspace,
        row_table,
        is_carried,
        blocks=None,
    ):
        PreparedAttention.count += 1
        assert workspace.numel() >= workspace_numel(query, key, value)
        self._query_kind, self._scale = _kind(query), softmax_scale
        self._lse, self._row_table, self._is_carried = lse, row_table, is_carried
        self._key, self._value, self._blocks = key, value, blocks

    def attend_to(self, key, value):
        alike = key.stride() == self._key.stride() and key.shape[1:] == self._key.shape[1:]
        if not alike or self._row_table is not None:
            raise LayoutError("prepare anew")
        self._key, self._value = key, value

    def __call__(self, query, query_start, num_tokens, out):
        assert _kind(query) == self._query_kind
        key, value = (t[:, :, :, :num_tokens] for t in (self._key, self._value))
        before = torch.full((len(key),), query_start - key.shape[3])  # all are seen
        part = reference.partial_attention(
            query,
            key,
            value,
            before,
            self._scale,
            row_table=self._row_table,
            blocks=self._blocks,
        )
        parts = [part, (out, self._lse)] if self._is_carried else [part]
        for result, target in zip(reference.merge_partials(parts), (out, self._lse), strict=True):
            target.copy_(result)


class PreparedMerge:
    def __init__(self, parts, *, out, lse, others):
        ((first, self._lse),) = parts
        assert first is out
        assert lse is self._lse
        self._others = others

    def __call__(self, out):
        parts = [(out, self._lse), *zip(*self._others, strict=True)]
        for result, target in zip(reference.merge_partials(parts), (out, self._lse), strict=True):
            target.copy_(result)


def workspace_numel(query, key, value):
    return query.shape[1] * len(key)
