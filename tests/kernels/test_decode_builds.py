"""All that a decode step can launch is compiled for GPUs that are not there.

The interpreter takes what the compiler refuses: a variable that changes its type in a loop is one.
"""

from itertools import product
from typing import Any

import pytest
import torch
from harness import build, geometry, new_tokens, regions, spec

pytest.importorskip("triton")

from test_triton_builds import CAPABILITIES, RARE_STACK_BYTES, SHAPES, check
from triton_compiler import compiling

from sparsekv.attention import decode
from sparsekv.engine import attend
from sparsekv.kernels import dispatch
from sparsekv.kernels import triton as ops
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.triton.merge_partials import launch_merge
from sparsekv.regions import window
from sparsekv.transfer import in_place

BF16 = torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("count", [0, 1, 2, 8])
def test_merges_of_parts_and_splits(count: int, capability: int) -> None:
    out, lse = torch.zeros(2, 4, 1, 128), torch.zeros(2, 4, 1)
    with compiling(capability) as builds:
        for others, sink in product((0, 1, 2, 17), (None, torch.zeros(4))):
            if not count + others:
                continue
            given = tuple(t.expand(others, *t.shape).contiguous() for t in (out, lse))
            outs, lses = (t.expand(count, *t.shape) for t in (out, lse))
            split_out, split_lse = given if others else (None, None)
            arguments = (split_out, split_lse, others, sink, out, lse)
            launch_merge(tuple(outs), tuple(lses), *arguments)
    assert {build.name for build in builds} == {"merge_kernel"}
    check(builds, capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(d, marks=pytest.mark.slow) for d in (BF16, torch.float16))],
)
def test_prepared_merges(dtype: torch.dtype, capability: int) -> None:
    out, lse = torch.zeros(2, 4, 1, 128, dtype=dtype), torch.zeros(2, 4, 1)
    with compiling(capability) as builds:
        for others, sink in product((0, 1, 3), (None, torch.zeros(4))):
            found = tuple(t.expand(others, *t.shape).contiguous() for t in (out, lse))
            parts = [(out, lse)]
            merge = ops.PreparedMerge(
                parts, sink, out=out, lse=lse, others=found if others else None
            )
            merge(torch.zeros_like(out))
    assert len(builds) == 2 * 3 * 2
    check(builds, capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mla", "80"))]
)
def test_prepared_appends(name: str, capability: int) -> None:
    with compiling(capability) as builds:
        for dtype in (torch.float32, BF16):
            num_kv_heads, group_size, head_dim, head_dim_v = SHAPES[name]
            key = torch.zeros(2, num_kv_heads, 256, head_dim, dtype=BF16)
            new_key = key[:, :, :1].to(dtype)
            query = torch.zeros(2, num_kv_heads * group_size, 1, head_dim, dtype=dtype)
            stored = torch.zeros(query.shape)
            for value in (None, torch.zeros(*key.shape[:3], head_dim_v, dtype=BF16)):
                new_value = None if value is None else value[:, :, :1].to(dtype)
                ops.PreparedAppend(new_key, new_value, key, value)(new_key, new_value, 7)
                both = {"query": query, "stored_query": stored}
                append = ops.PreparedAppend(new_key, new_value, key, value, **both)
                append(new_key, new_value, 7, query)
            ops.PreparedAppend(query, None, stored, None)(query, None, 0)
    check(builds, capability)


USUAL: dict[str, dict[str, Any]] = {"window": {"segments": 1}, "segments": {}}
OTHERS: dict[str, dict[str, Any]] = {
    "many segments": {"segments": 32},
    "row table": {"row_table": torch.zeros(4, 2, dtype=torch.int64)},
    "any tokens": {"tokens": 250},
    "row table, any tokens": {"tokens": 250, "row_table": torch.zeros(4, 2, dtype=torch.int64)},
    "padded": {"positions": torch.arange(4) * 256, "key_start": torch.zeros(2, dtype=torch.int64)},
    "within a window": {"positions": torch.arange(4) * 256, "sliding_window": 300},
    "blocks": {"block_size": 64},
}


def prepare(
    name: str,
    dtype: torch.dtype = BF16,
    *,
    segments: int = 4,
    tokens: int = 256,
    block_size: int = 0,
    **options: Any,
) -> None:
    num_kv_heads, group_size, head_dim, head_dim_v = SHAPES[name]
    key = torch.zeros(segments, 2, num_kv_heads, tokens, head_dim, dtype=dtype)
    value = key[..., :head_dim_v] if num_kv_heads == 1 else torch.zeros_like(key)[..., :head_dim_v]
    query = torch.zeros(2, num_kv_heads * group_size, 1, head_dim, dtype=dtype)
    out = torch.zeros(*query.shape[:3], head_dim_v)
    if block_size:
        indices = torch.zeros(2, num_kv_heads, 16, dtype=torch.int64)
        num_blocks = indices[..., 0] + 1
        options["blocks"] = BlockLists(
            indices=indices, num_blocks=num_blocks, block_size=block_size
        )
    workspace = torch.zeros(ops.workspace_numel(query, key, value))
    for is_carried in (False, True):
        attention = ops.PreparedAttention(
            query,
            key,
            value,
            0.1,
            out=out,
            lse=out[..., 0].clone(),
            workspace=workspace,
            is_carried=is_carried,
            **options,
        )
        attention(query, 4095, None, torch.zeros_like(out))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "keys", [*USUAL, *(pytest.param(k, marks=pytest.mark.slow) for k in OTHERS)]
)
def test_prepared_attention(keys: str, capability: int) -> None:
    with compiling(capability) as builds:
        prepare("qwen3", **(USUAL | OTHERS)[keys])
    check(builds, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", SHAPES)
def test_prepared_attention_of_other_models(name: str, capability: int) -> None:
    with compiling(capability) as builds:
        for keys in ("window", "segments", "row table", "any tokens"):
            prepare(name, **(USUAL | OTHERS)[keys])
        prepare(name, torch.float32)
    check(builds, capability, RARE_STACK_BYTES)


@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_steps_of_a_cache(share: float, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if dispatch.attention_jobs() is None:
        pytest.skip("no native library")
    for module in (decode, in_place, window):
        monkeypatch.setattr(module, "decode_ops_for", lambda device: ops)
    kv = geometry(num_kv_heads=4, head_dim=128, dtype=BF16, num_layers=1)
    cache = build(spec(kv, window_size=64, block_size=16), share=share)
    cache.append(0, *new_tokens(cache, 64 * 8 + 1))
    cache.flush(0)

    def steps() -> None:
        for _ in range(70):
            cache.append(0, *new_tokens(cache, 1))
            attend(cache, 0, torch.zeros(cache.batch_size, 32, 1, 128, dtype=BF16), 0.1)

    with compiling(capability) as builds:
        steps()
        cache.batch_select_indices(torch.tensor([1, 0, 1]))
        steps()
    want = {"append_kernel", "attention_kernel"} | ({"merge_kernel"} if share else set())
    assert {build.name for build in builds} >= want
    assert {"pinned", "unpinned"} & set(regions(cache))
    check(builds, capability)
