"""The Triton kernels are compiled for GPUs that are not there, with all that calls can ask for."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton_compiler import SHARED_BYTES, Build, compiling

from sparsekv.kernels import triton as ops
from sparsekv.kernels.block_lists import BlockLists

CAPABILITIES = [80, 90]  # 90 is compiled as sm_90a
SHAPES = {  # kv heads, group size, head_dim, head_dim_v
    "qwen3": (4, 8, 128, 128),
    "mixtral": (8, 4, 128, 128),
    "mla": (1, 16, 576, 512),
    "mla 128": (1, 128, 576, 512),
    "v4": (1, 64, 512, 512),
    "64": (8, 5, 64, 64),
    "80": (8, 1, 80, 80),
    "96": (8, 3, 96, 96),
    "192": (16, 1, 192, 128),
    "256": (8, 4, 256, 256),
}
STACK_BYTES = {80: 1536, 90: 16}
"""That a thread of a usual call may use: sm_90a, with twice the tensor cores, all but none."""
RARE_STACK_BYTES = {80: 8192, 90: 128}
"""Of other calls. What spills differs between compilers: Triton 3.6 needs up to 1304 and 16 bytes,
3.9 up to 6984 (16 queries over the window) and 120.
"""


def attend(
    name: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    num_queries: int = 1,
    segments: int = 4,
    tokens: int = 256,
    query_start: int = 4095,
    block_size: int = 0,
    **options: Any,
) -> None:
    num_kv_heads, group_size, head_dim, head_dim_v = SHAPES[name]
    key = torch.zeros(segments, 2, num_kv_heads, tokens, head_dim, dtype=dtype)
    value = key[..., :head_dim_v] if num_kv_heads == 1 else torch.zeros_like(key)[..., :head_dim_v]
    query = torch.zeros(2, num_kv_heads * group_size, num_queries, head_dim, dtype=dtype)
    if block_size:
        indices = torch.zeros(2, num_kv_heads, 16, dtype=torch.int64)
        options["blocks"] = BlockLists(
            indices=indices, num_blocks=indices[..., 0] + 1, block_size=block_size
        )
    positions = torch.arange(segments) * tokens
    ops.partial_attention(query, key, value, positions, 0.1, query_start=query_start, **options)


def check(builds: list[Build], capability: int, stack_bytes: dict[int, int] = STACK_BYTES) -> None:
    assert builds
    for build in builds:
        assert build.shared_bytes <= SHARED_BYTES[capability]
        assert build.stack_bytes <= stack_bytes[capability], build.name
        assert f".target sm_{capability}{'a' if capability == 90 else ''}" in build.ptx


PROMPT = {"segments": 1, "tokens": 512, "num_queries": 512, "query_start": 0}
USUAL = {
    "a step, qwen3": ("qwen3", {}),
    "a step, mla": ("mla", {}),
    "blocks of 64": ("qwen3", {"block_size": 64}),
}
OTHERS = {
    **{f"a step, {name}": (name, {}) for name in SHAPES if name not in ("qwen3", "mla")},
    **{f"a prompt, {n}": (n, PROMPT) for n in ("qwen3", "mla", "v4", "192", "256")},
    "a later turn": ("qwen3", {"num_queries": 512}),
    "8 queries over the window": ("qwen3", {"num_queries": 8, "segments": 1, "query_start": 200}),
    "any tokens": ("qwen3", {"tokens": 250}),
    "blocks of 16": ("qwen3", {"block_size": 16}),
    "entries": ("v4", {"block_size": 1}),
    "masked": ("qwen3", {"key_mask": torch.ones(2, 1024, dtype=torch.bool)}),
    "padded": ("qwen3", {"key_start": torch.zeros(2, dtype=torch.int64)}),
    "reordered": ("qwen3", {"row_table": torch.zeros(4, 2, dtype=torch.int64)}),
    "within a window": ("qwen3", {"sliding_window": 300}),
    "float32": ("qwen3", {"dtype": torch.float32}),
    "float16": ("v4", {"dtype": torch.float16}),
    "float32 latents": ("mla", {"dtype": torch.float32}),
    "2 queries, mla": ("mla", {"num_queries": 2}),
    "16 queries over the window": (
        "qwen3",
        {"num_queries": 16, "segments": 1, "query_start": 200},
    ),
    "16 queries, 256": ("256", {"num_queries": 16}),
    "float32 prompt": ("256", {"dtype": torch.float32} | PROMPT),
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("call", USUAL)
def test_usual_calls_fit_the_device(call: str, capability: int) -> None:
    name, options = USUAL[call]
    with compiling(capability) as builds:
        attend(name, **options)
    check(builds, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("call", OTHERS)
def test_other_calls_fit_the_device(call: str, capability: int) -> None:
    name, options = OTHERS[call]
    with compiling(capability) as builds:
        attend(name, **options)
    check(builds, capability, RARE_STACK_BYTES)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_keys_are_read_by_16_byte_copies_ahead_of_use(capability: int) -> None:
    with compiling(capability) as builds:
        attend("qwen3")
    build = builds[0]
    copies = [line for line in build.ptx.splitlines() if "cp.async.c" in line and "[" in line]
    assert len(copies) >= 3 * 64 * 256 // (16 * 32 * build.num_warps)
    assert all(", 0x10," in line for line in copies)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_merges_and_appends_fit_the_device(capability: int) -> None:
    parts = [(torch.zeros(2, 4, 1, 512), torch.zeros(2, 4, 1)) for _ in range(3)]
    window = torch.zeros(2, 4, 256, 512, dtype=torch.bfloat16)
    new, query = window[:, :, :1], torch.zeros(2, 8, 1, 512, dtype=torch.bfloat16)
    with compiling(capability) as builds:
        ops.merge_partials(parts, torch.zeros(4))
        ops.append(new, new, window, window, 3, query=query, stored_query=query.float())
    assert [build.name for build in builds] == ["merge_kernel", "append_kernel"]
    check(builds, capability)


def test_numbers_that_change_from_step_to_step_are_not_compiled_for() -> None:
    from sparsekv.kernels.triton.attention_kernel import attention_kernel

    with compiling(90):
        attend("64", segments=16, query_start=8191)
        before = sum(len(cache[0]) for cache in attention_kernel.device_caches.values())
        for segments, query_start in ((17, 8192), (18, 9000), (31, 9001), (32, 1 << 20)):
            attend("64", segments=segments, query_start=query_start)
        after = sum(len(cache[0]) for cache in attention_kernel.device_caches.values())
    assert after == before
