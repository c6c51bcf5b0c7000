"""The benchmark of attention on the GPU: what it checks, and that it runs where there is one."""

import json
import time
from pathlib import Path
from typing import Any

import prepared_ops
import pytest
import torch
from torch import Tensor

from benchmarks import gpu_launches
from benchmarks.attention_shapes import SHAPES, WINDOW_SIZE, KVMemory
from benchmarks.buffer import Buffer
from benchmarks.gpu_attention import checks, main
from benchmarks.gpu_launches import attention_launches, step_launches
from benchmarks.gpu_timing import timed
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.reference import merge_partials, partial_attention

ROWS = 2


def rate(shape: str, place: str, pieces: str, fraction: float) -> dict[str, Any]:
    return {
        "kind": "rate",
        "shape": shape,
        "place": place,
        "pieces": pieces,
        "fraction": fraction,
    }


def test_rates_are_held_to_the_copy_of_their_place_and_steps_to_a_limit() -> None:
    rows = [
        rate("qwen3", "gpu", "rows", 0.81),
        rate("v4", "gpu", "rows", 0.1),  # the operations bind
        rate("v4", "host", "pieces", 0.79),
        {"kind": "step", "shape": "mla", "step_us": 41.0},
    ]
    found = {check.name: check.is_met for check in checks(rows)}
    assert found == {
        "qwen3, rows, gpu: fraction of the copy inside the GPU": True,
        "v4, pieces, host: fraction of the copy from the host": False,
        "mla, a short step: microseconds": False,
    }


@pytest.fixture(params=["qwen3", "mla"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KVMemory:
    """At least four segments on the CPU, where the reference ops play the prepared launches."""
    monkeypatch.setattr(gpu_launches, "decode_ops_for", lambda device: prepared_ops)
    shape = SHAPES[request.param]
    buffer = Buffer(4 * ROWS * WINDOW_SIZE * shape.geometry.bytes_per_token_per_layer)
    buffer.tensor().view(torch.bfloat16).normal_()
    return KVMemory(buffer, shape, ROWS)


def query_of(memory: KVMemory) -> Tensor:
    return torch.randn(ROWS, memory.shape.num_heads, 1, memory.shape.head_dim).bfloat16()


def attention(
    memory: KVMemory, query: Tensor, first: int, count: int, **options: Any
) -> tuple[Tensor, Tensor]:
    key, value = memory.segments(first, count)
    before = torch.full((count,), -WINDOW_SIZE)
    return partial_attention(query, key, value, before, memory.shape.softmax_scale, **options)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_each_layer_attends_to_its_own_segments(memory: KVMemory, is_sparse: bool) -> None:
    query, blocks = query_of(memory), None
    if is_sparse:
        heads = (ROWS, memory.shape.num_kv_heads)
        chosen = torch.tensor([1, 4, 7]).expand(*heads, 3).contiguous()
        blocks = BlockLists(indices=chosen, num_blocks=torch.full(heads, 3), block_size=64)
    launches = attention_launches(memory, query, 2, blocks=blocks)
    assert len(launches) == memory.num_segments // 2 > 1
    for i, launch in enumerate(launches):
        expected, _ = attention(memory, query, 2 * i, 2, blocks=blocks)
        torch.testing.assert_close(launch(), expected)


def test_carried_launches_add_one_layer_to_the_other(memory: KVMemory) -> None:
    query = query_of(memory)
    launches = attention_launches(memory, query, 2, is_carried=True)
    *_, out = (launch() for launch in launches)
    expected, _ = attention(memory, query, 0, 2 * len(launches))
    torch.testing.assert_close(out, expected)


def test_a_short_step_is_attention_to_the_window_and_what_was_found(memory: KVMemory) -> None:
    query, is_shared = query_of(memory), memory.shape.shared_kv
    new_key, new_value = (torch.randn_like(t[0, :, :, :1]) for t in memory.segments(0, 1))
    stored = torch.empty(query.shape, dtype=torch.float32)
    found = (
        torch.randn(1, *query.shape[:3], memory.shape.head_dim_v),
        torch.randn(1, *query.shape[:3]),
    )
    token = new_key, None if is_shared else new_value
    for i, launch in enumerate(step_launches(memory, query, token, stored, found, 2)):
        out = launch()
        key, value = memory.segments(i, 1)
        assert torch.equal(key[0, :, :, -1:], new_key)
        assert is_shared or torch.equal(value[0, :, :, -1:], new_value)
        window = attention(memory, query, i, 1)
        expected, _ = merge_partials([window, (found[0][0], found[1][0])])
        torch.testing.assert_close(out, expected)
    assert torch.equal(stored, query.float())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_quick_run_writes_its_rows(tmp_path: Path) -> None:
    main(["--quick", "--rounds", "1", "--shapes", "qwen3", "mla", "--out", str(tmp_path)])
    (file,) = tmp_path.iterdir()
    rows = json.loads(file.read_text())["rows"]
    assert len([row for row in rows if row["kind"] == "rate"]) == 2 * 2 * 3
    assert all(row["gbs"] > 0 for row in rows if row["kind"] == "rate")
    assert all(row["step_us"] > 0 for row in rows if row["kind"] == "step")
    assert all(row["issue_us"] > 0 for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_time_is_the_gpus_alone() -> None:
    numbers = torch.zeros(1, device="cuda")

    def slowly_issued() -> Tensor:
        time.sleep(1e-3)
        return numbers.add_(1.0)

    seconds, issue_seconds = timed([slowly_issued] * 4)
    assert issue_seconds > 4e-3
    assert seconds < issue_seconds / 2
