"""What compute_sanitizer.py has watched: each kernel, called and prepared, and whole decode steps.

Sizes are small, since the tools are slow; each kernel works on whole rows and lists of blocks, over
device memory and registered host memory in place.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from attention_case import Case, make_case
from torch import Tensor
from triton_ops import CudaOp, on_cuda, registered

from sparsekv.cache import InplaceKVCache
from sparsekv.engine import CacheConfig, attend
from sparsekv.format import KVGeometry
from sparsekv.kernels import triton as ops
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.torch_ops import partial_attention
from sparsekv.roofline import ShareRouter

_START = time.perf_counter()

# Two threads that do not wait for each other, and one that writes beyond the end.
WRONG_SOURCE = """
extern "C" __global__ void wrong(float* numbers, int count) {
  __shared__ float shared[64];
  shared[threadIdx.x] = numbers[threadIdx.x];
  numbers[threadIdx.x + count - 63] = shared[63 - threadIdx.x];
}
"""


def wrong() -> None:
    """Launch a kernel with one fault for each tool to find."""
    numbers = torch.zeros(256, device="cuda")
    kernel = torch.cuda._compile_kernel(WRONG_SOURCE, "wrong")
    kernel((1, 1, 1), (64, 1, 1), (numbers, numbers.numel()))
    torch.cuda.synchronize()


def calls() -> None:
    """Call everything, and check what comes out."""
    for case in cases():
        _attend(case)
        _told(f"attention to {tuple(case.key.shape)}")
    for dtype in (torch.bfloat16, torch.float32):
        _merge(dtype)
        _append(dtype)
        _told(f"merge and append, {dtype}")
    for share, reads_in_place in ((0.0, True), (0.5, True), (0.5, False), (1.0, True)):
        _decode(share, reads_in_place)
        _told(f"steps at share {share}")


def cases() -> Iterator[Case]:
    """Partial attention in every kernel's way: vectors and tiles, one part and several splits, all
    of a row or lists of blocks, what is hidden from some, and shared keys and values.
    """
    wide: dict[str, Any] = {"head_dim": 128, "head_dim_v": 128, "tokens": 40, "segments": 3}
    shapes: list[dict[str, Any]] = [
        {"group_size": 8, **wide},
        {"group_size": 4, "num_queries": 9, **wide},
        {"group_size": 3, "rows": 3, "cut": True, **wide},
        {"group_size": 16, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512}
        | {"tokens": 40, "shared_kv": True},
        {"group_size": 64, "num_kv_heads": 1, "head_dim": 512, "head_dim_v": 512}
        | {"tokens": 40, "shared_kv": True, "segments": 1},
    ]
    for shape in shapes:
        yield make_case(torch.bfloat16, **shape)
    yield make_case(torch.float32, **shapes[0])
    yield make_case(torch.bfloat16, **shapes[0] | {"batch": 1, "tokens": 64, "segments": 24})
    case = make_case(torch.bfloat16, **shapes[0])
    yield case.given(key_mask=torch.rand(2, case.num_positions) < 0.7)
    indices = torch.stack([torch.randperm(30) for _ in range(4)]).view(2, 2, 30)
    blocks = BlockLists(indices=indices, num_blocks=torch.tensor([[30, 7], [1, 12]]), block_size=4)
    yield case.given(blocks=blocks)


def _attend(case: Case) -> None:
    """As a call, over device memory and in place; and prepared, where it can be."""
    want = case.run(partial_attention)
    for in_place in (False, True):
        _assert_close(case.run(CudaOp(in_place)), want)
        if case.options.keys() <= {"query_start", "row_table"}:
            _assert_close(_prepared(case, in_place), want)


def _prepared(case: Case, in_place: bool) -> tuple[Tensor, Tensor]:
    """Attention to the first segment, and to all others added to it, each prepared for another."""
    moved: dict[int, Tensor] = {}
    move = registered if in_place else on_cuda
    query, key, value = on_cuda(case.query, {}), move(case.key, moved), move(case.value, moved)
    rows = case.options.get("row_table")
    out = torch.full((*query.shape[:3], value.shape[-1]), torch.nan, device="cuda")
    lse = torch.full(out.shape[:-1], torch.nan, device="cuda")
    workspace = torch.empty(ops.workspace_numel(query, key, value), device="cuda")
    # The newest token alone sees all others.
    where = None if query.shape[2] == 1 else case.positions.cuda()
    for is_carried, part in ((False, slice(0, 1)), (True, slice(1, None))):
        if not len(key[part]):
            break
        # What must not be read any more once others are attended to.
        elsewhere: dict[int, Tensor] = {}
        old_key, old_value = (move(t[part], elsewhere) for t in (case.key, case.value))
        old_key.fill_(torch.nan)
        old_value.fill_(torch.nan)
        launch = ops.PreparedAttention(
            query,
            old_key,
            old_value,
            case.scale,
            out=out,
            lse=lse,
            workspace=workspace,
            positions=None if where is None else where[part],
            row_table=None if rows is None else rows[part].cuda(),
            is_carried=is_carried,
        )
        launch.attend_to(key[part], value[part])
        launch(query, case.options["query_start"], None, out)
    return out.cpu(), lse.cpu()


def _merge(dtype: torch.dtype) -> None:
    parts = [(_random(2, 6, 1, 128, dtype=dtype), _random(2, 6, 1)) for _ in range(9)]
    out, lse = ops.merge_partials(parts, _random(6))
    assert out.isfinite().all()
    assert lse.isfinite().all()
    want = ops.merge_partials(parts[:3])
    others = tuple(
        torch.stack(tensors).cpu().pin_memory() for tensors in zip(*parts[1:3], strict=True)
    )
    (out, lse), *_ = parts
    ops.PreparedMerge([(out, lse)], out=out, lse=lse, others=others)()
    _assert_close((out, lse), want)


def _append(dtype: torch.dtype) -> None:
    new, window = _random(2, 3, 5, 128, dtype=dtype), _random(2, 3, 16, 256, dtype=dtype)
    query, stored = _random(2, 6, 5, 128, dtype=dtype), torch.zeros(2, 6, 5, 128).pin_memory()
    key, value = window[..., :128], window[..., 128:]
    ops.append(new, new, key, value, 11, query=query, stored_query=stored)
    torch.cuda.synchronize()
    assert torch.equal(key[:, :, 11:], new)
    assert torch.equal(stored, query.float().cpu())
    stored.zero_()
    ops.PreparedAppend(new, None, key, None)(new, None, 3)
    ops.PreparedAppend(query, None, stored, None)(query, None, 0)
    torch.cuda.synchronize()
    assert torch.equal(key[:, :, 3:8], new)
    assert torch.equal(stored, query.float().cpu())


def _decode(share: float, reads_in_place: bool) -> None:
    """A prompt, and steps in which windows leave, of a cache in all four regions."""
    dtype = torch.bfloat16
    geometry = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=128, dtype=dtype)
    config = CacheConfig(window_size=16, block_size=16, ping_pong_tokens=32)
    cache = InplaceKVCache(config.spec(geometry, 2), "cuda", ShareRouter(share))
    cache.reads_in_place = reads_in_place
    dense = [[_random(2, 2, 0, 128, dtype=dtype) for _ in range(2)] for _ in range(2)]
    for num_tokens in (70, *[1] * 20):
        for layer_idx in range(2):
            new = [_random(2, 2, num_tokens, 128, dtype=dtype) for _ in range(2)]
            dense[layer_idx] = [
                torch.cat(pair, 2) for pair in zip(dense[layer_idx], new, strict=True)
            ]
            cache.append(layer_idx, *new)
            query = _random(2, 16, num_tokens, 128, dtype=dtype)
            out = attend(cache, layer_idx, query, 0.1)
            if num_tokens == 1:
                key, value = (tensor[None].cpu() for tensor in dense[layer_idx])
                start = torch.zeros(1, dtype=torch.int64)
                where = {"query_start": key.shape[3] - 1}
                want, _ = partial_attention(query.cpu(), key, value, start, 0.1, **where)
                torch.testing.assert_close(out.cpu(), want, rtol=2e-3, atol=2e-3)
    cache.close("done")


def _told(what: str) -> None:
    print(f"{time.perf_counter() - _START:6.1f} s  {what}", flush=True)


def _assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float().cpu(), b.float().cpu(), rtol=1e-2, atol=1e-2)


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)
