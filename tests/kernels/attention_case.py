"""Calls of partial attention, for tests of all its implementations."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAN = torch.nan


@dataclass(frozen=True)
class Case:
    """One call: tensors, and the options that are given by keyword."""

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor
    scale: float = 0.3
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, op: Any) -> tuple[Tensor, Tensor]:
        tensors = (self.query, self.key, self.value, self.positions)
        out, lse = op(*tensors, self.scale, **self.options)
        return out, lse

    def given(self, **options: Any) -> "Case":
        return replace(self, options=self.options | options)

    def double(self) -> "Case":
        query, key, value = (t.double() for t in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value)

    @property
    def num_positions(self) -> int:
        return int(self.positions.max()) + self.key.shape[3]


def make_case(
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    batch: int = 2,
    rows: int | None = None,
    num_kv_heads: int = 2,
    group_size: int = 3,
    segments: int = 3,
    tokens: int = 5,
    num_queries: int = 1,
    head_dim: int = 8,
    head_dim_v: int = 12,
    cut: bool = False,
    shared_kv: bool = False,
) -> Case:
    """Random tensors; segments in any order of positions, the queries the newest tokens.

    `cut`: views into a larger buffer of NaN, whose strides do not collapse. `rows`: with a random
    row table over so many physical rows.
    """
    random = torch.Generator().manual_seed(seed)
    width = max(head_dim, head_dim_v)
    shape = [segments, rows or batch, num_kv_heads, 2, tokens, width]
    margin = [0, 1, 1, 0, 2, 0] if cut else [0] * 6
    buffer = torch.full([n + m for n, m in zip(shape, margin, strict=True)], NAN, dtype=dtype)
    stored = buffer[tuple(slice(0, n) for n in shape)]
    stored.copy_(torch.randn(shape, generator=random))
    key = stored[:, :, :, 0, :, :head_dim]
    value = key[..., :head_dim_v] if shared_kv else stored[:, :, :, 1, :, :head_dim_v]
    query = torch.randn(
        batch, num_kv_heads * group_size, num_queries, head_dim, generator=random
    ).to(dtype)
    positions = torch.randperm(segments, generator=random) * tokens
    case = Case(query, key, value, positions).given(query_start=segments * tokens - num_queries)
    if rows is None:
        return case
    return case.given(row_table=torch.randint(rows, (segments, batch), generator=random))
