"""Run the GPU kernels under CUDA's compute-sanitizer: `python tests/kernels/compute_sanitizer.py`.

memcheck finds reads and writes outside of memory, racecheck threads of a block that do not wait for
each other's shared memory. Sizes are small, since both are slow; each kernel is called with whole
rows and lists of blocks, over device memory and registered host memory in place. Where there is no
CUDA, no such tool, or the tool cannot watch the device, a line says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attention_case import Case, make_case
from torch import Tensor

TOOLS = ("memcheck", "racecheck")
_FOLDERS = ("CUDA_HOME", "CUDA_PATH")
_UNABLE = ("Device not supported", "not supported on this", "Unable to find")
_CALLS = "calls"


def main() -> int:
    """Run every tool; the exit status."""
    tool, status = find_tool(), 0
    if tool is None or not torch.cuda.is_available():
        print(f"SKIPPED compute-sanitizer: {'no CUDA device' if tool else 'not installed'}")
        return 0
    for name in TOOLS:
        start = time.perf_counter()
        done = subprocess.run(
            [tool, "--tool", name, "--error-exitcode", "86", sys.executable, __file__, _CALLS],
            # Each tensor in memory of its own: what lies beyond it belongs to nobody.
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seconds = time.perf_counter() - start
        if done.returncode and any(text in done.stdout for text in _UNABLE):
            print(f"SKIPPED {name}: compute-sanitizer cannot watch this device")
            continue
        verdict = "clean" if done.returncode == 0 else "FOUND SOMETHING, or the calls failed"
        print(f"{name}: {verdict}, {seconds:.0f} s")
        if done.returncode:
            print(done.stdout[-20_000:])
            status = 1
        else:
            print("\n".join(line for line in done.stdout.splitlines() if "SUMMARY" in line))
    return status


def find_tool() -> str | None:
    """compute-sanitizer, on the path or where CUDA's toolkit is usually installed."""
    homes = [os.environ[name] for name in _FOLDERS if name in os.environ]
    folders = [Path(home) / "bin" for home in (*homes, "/usr/local/cuda")]
    folders += sorted(Path("/usr/local").glob("cuda-*/bin"), reverse=True)
    return shutil.which("compute-sanitizer", path=os.pathsep.join(map(str, folders))) or (
        shutil.which("compute-sanitizer")
    )


def calls() -> None:
    """Call each kernel a few times."""
    from triton_ops import CudaOp

    from sparsekv.kernels import triton as ops

    for case in cases():
        want: tuple[Tensor, Tensor] | None = None
        for op in (CudaOp(), CudaOp(in_place=True)):
            got = case.run(op)
            assert all(t.isfinite().all() for t in got)
            want = want or got
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    for dtype in (torch.bfloat16, torch.float32):
        parts = [(random(2, 6, 1, 128, dtype=dtype), random(2, 6, 1)) for _ in range(9)]
        out, lse = ops.merge_partials(parts, random(6))
        ops.merge_partials(parts[:2], out=parts[0][0], lse=parts[0][1])
        assert out.isfinite().all()
        assert lse.isfinite().all()
        new, window = random(2, 3, 5, 128, dtype=dtype), random(2, 3, 16, 256, dtype=dtype)
        query, stored = random(2, 6, 5, 128, dtype=dtype), torch.zeros(2, 6, 5, 128).pin_memory()
        key, value = window[..., :128], window[..., 128:]
        ops.append(new, new, key, value, 11, query=query, stored_query=stored)
        ops.append(new, None, key, None, 0)
        torch.cuda.synchronize()
        assert torch.equal(key[:, :, 11:], new)
        assert torch.equal(stored, query.float().cpu())


def cases() -> Iterator[Case]:
    """Partial attention in every kernel's way: vectors and tiles, one part and several splits, all
    of a row or lists of blocks, what is hidden from some, and shared keys and values.
    """
    from sparsekv.kernels.block_lists import BlockLists

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
    long = make_case(torch.bfloat16, **shapes[0] | {"batch": 1, "tokens": 64, "segments": 24})
    yield long
    case = make_case(torch.bfloat16, **shapes[0])
    yield case.given(key_mask=torch.rand(2, case.num_positions) < 0.7)
    indices = torch.stack([torch.randperm(30) for _ in range(4)]).view(2, 2, 30)
    blocks = BlockLists(indices=indices, num_blocks=torch.tensor([[30, 7], [1, 12]]), block_size=4)
    yield case.given(blocks=blocks)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


if __name__ == "__main__":
    sys.exit(calls() if sys.argv[1:] == [_CALLS] else main())
