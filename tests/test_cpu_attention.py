"""The benchmark of attention on the CPU measures what it says, over the library's own layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import attention_ways, cpu_attention, memory_ceilings
from benchmarks.attention_checks import checks
from benchmarks.attention_error import errors
from benchmarks.attention_shapes import SHAPES, WINDOW_SIZE, KVMemory, Turns
from benchmarks.ceilings import filled_buffer
from benchmarks.results import Row, load_result
from sparsekv.kernels import cpu
from sparsekv.kernels.reference.partial_attention import partial_attention
from sparsekv.regions.pool import RegionPool
from sparsekv.regions.stack import SegmentStack

try:
    memory_ceilings._library()
except RuntimeError as error:
    pytest.skip(f"no ceilings here: {error}", allow_module_level=True)


def memory_of(name: str, rows: int = 2) -> KVMemory:
    shape = SHAPES[name]
    num_bytes = 3 * rows * WINDOW_SIZE * shape.geometry.bytes_per_token_per_layer
    return KVMemory(filled_buffer(num_bytes), shape, rows)


@pytest.mark.parametrize("name", SHAPES)
def test_segments_lie_as_in_a_region(name: str) -> None:
    memory = memory_of(name)
    stack = SegmentStack(RegionPool(), memory.shape.geometry, WINDOW_SIZE)
    stack.push(3, memory.rows)
    (view,) = stack.views([0, 1, 2], [None] * 3)
    key, value = memory.segments(0, 3)
    assert (key.shape, key.stride()) == (view.key.shape, view.key.stride())
    assert (value.shape, value.stride()) == (view.value.shape, view.value.stride())
    offset = view.value.storage_offset() - view.key.storage_offset()
    assert value.storage_offset() - key.storage_offset() == offset
    assert memory.segments(1, 1)[0].data_ptr() - key.data_ptr() == memory.segment_bytes
    assert key.isfinite().all()


@pytest.mark.parametrize("name", SHAPES)
def test_joined_keys_and_values_are_as_many_bytes_of_the_same_memory(name: str) -> None:
    memory = memory_of(name)
    key, value = memory.joined(1, 2)
    assert key.is_contiguous()
    assert key.shape[2] == value.shape[2] == 2 * WINDOW_SIZE
    stored = key.numel() + (0 if memory.shape.shared_kv else value.numel())
    assert 2 * stored == 2 * memory.segment_bytes
    assert key.data_ptr() == memory.span.address + memory.segment_bytes


def test_turns_come_back_to_a_byte_only_after_all_others() -> None:
    turns = Turns(10)
    assert [turns.take(3, 1) for _ in range(4)] == [0, 3, 6, 0]
    assert turns.take(4, 4) == 4
    assert turns.take(10, 1) == 0


@pytest.mark.parametrize("name", ["qwen3", "mla"])
def test_both_calls_of_torchs_attention_are_the_same_attention(name: str) -> None:
    memory = memory_of(name)
    query = cpu_attention._query(memory.shape, memory.rows)
    plain, folded, _ = (way.prepare(0, 1)() for way in attention_ways.torch_ways(memory, query))
    key, value = (part[None] for part in memory.joined(0, 1))
    truth, _ = partial_attention(
        query.double(),
        key.double(),
        value.double(),
        torch.zeros(1, dtype=torch.int64),
        memory.shape.softmax_scale,
        query_start=WINDOW_SIZE - 1,
    )
    for out in (plain, folded):
        torch.testing.assert_close(out.view(truth.shape).double(), truth, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(cpu.backend().name != "native", reason="no native library")
def test_random_blocks_are_the_same_attention() -> None:
    memory = memory_of("mixtral")
    query = cpu_attention._query(memory.shape, memory.rows)
    way = attention_ways.random_blocks_way(memory, query)
    inputs = (query, *memory.segments(0, 2), torch.tensor([0, WINDOW_SIZE]))
    in_order = cpu.partial_attention(
        *inputs, memory.shape.softmax_scale, query_start=2 * WINDOW_SIZE - 1
    )
    for got, expected in zip(way.prepare(0, 2)(), in_order, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_errors_are_those_that_were_made() -> None:
    memory = memory_of("qwen3")
    query = cpu_attention._query(memory.shape, memory.rows)
    key, value = memory.segments(0, 1)
    positions, scale = torch.zeros(1, dtype=torch.int64), memory.shape.softmax_scale
    out, lse = partial_attention(
        query.double(), key.double(), value.double(), positions, scale, query_start=WINDOW_SIZE - 1
    )
    assert max(errors(out, lse, query, key, value, scale)) < 1e-12
    largest = out[-1, -1, 0].abs().max()
    out[-1, -1, 0, 5] += 1e-3 * largest
    relative, of_lse = errors(out, lse, query, key, value, scale)
    assert relative == pytest.approx(1e-3, rel=1e-6)
    assert of_lse < 1e-12
    lse[0, 0, 0] = torch.nan
    assert errors(out, lse, query, key, value, scale)[1] == torch.inf


def error(shape: str, way: str, relative: float, of_lse: float) -> Row:
    known = {"kind": "error", "shape": shape, "way": way}
    return {**known, "relative_error": relative, "lse_error": of_lse}


def rate(shape: str, way: str, num_threads: int, gbs: float) -> Row:
    known = {"kind": "rate", "shape": shape, "way": way, "num_threads": num_threads}
    return {**known, "gbs": gbs, "ceiling_gbs": 100.0, "fraction": gbs / 100.0}


def test_checks_take_the_highest_number_of_threads_and_the_best_way() -> None:
    rows = [
        rate("qwen3", "avx512", 8, 99.0),
        rate("qwen3", "avx512", 16, 91.0),
        rate("qwen3", "avx2", 16, 92.0),
        rate("qwen3", "torch sdpa", 16, 10.0),
        rate("qwen3", "torch sdpa, folded", 16, 23.0),
        rate("qwen3", "torch ops", 16, 50.0),
        rate("v4", "amx", 16, 44.0),
        error("qwen3", "amx", 1e-6, 1e-7),
        error("v4", "avx512", 1e-6, 1e-7),
        error("v4", "amx", 2e-3, 2e-5),
    ]
    found = {check.name: check for check in checks(rows)}
    qwen3 = found["qwen3, best, 16 threads: fraction of the read ceiling"]
    assert (qwen3.value, qwen3.target, qwen3.is_met) == (0.92, 0.90, True)
    assert found["qwen3, best, 16 threads: times torch's attention"].value == 4.0
    v4 = found["v4, amx, 16 threads: fraction of the read ceiling"]
    assert (v4.value, v4.target, v4.is_met) == (0.44, 0.45, False)
    assert found["float32 weights: relative error against float64"].is_met
    assert found["bfloat16 weights: relative error against float64"].is_met
    assert not found["bfloat16 weights: error of lse against float64"].is_met
    assert len(found) == 7


def test_two_cores_have_targets_of_their_own() -> None:
    rows = [rate("mixtral", "avx512", 2, 64.0), rate("mixtral", "avx2", 2, 99.0)]
    (check,) = checks(rows)
    assert (check.value, check.target, check.is_met) == (0.64, 0.65, False)


@pytest.mark.skipif(cpu.backend().name != "native", reason="no native library")
def test_the_script_measures_every_way(tmp_path: Path) -> None:
    before = cpu.backend()
    cpu_attention.main(f"--quick --rounds 1 --threads 1 --shapes qwen3 v4 --out {tmp_path}".split())
    assert cpu.backend() == before
    (path,) = tmp_path.iterdir()
    result = load_result(path)
    assert result.checks == checks(result.rows)
    isas = set(attention_ways.available_isas())
    for shape in ("qwen3", "v4"):
        rows = [row for row in result.rows if row["shape"] == shape]
        timed = {row["way"] for row in rows if row["kind"] == "rate"}
        assert timed == isas | {"random blocks", "torch sdpa", "torch sdpa, folded", "torch ops"}
        assert {row["way"] for row in rows if row["kind"] == "error"} == isas
        (call,) = (row for row in rows if row["kind"] == "call")
        assert call["way"] in isas
        assert call["call_bytes"] >= 1 << 20
    for row in result.rows:
        if row["kind"] == "error":
            assert row["lse_error"] < 1e-5
            rounds = row["way"] == "amx"
            assert row["relative_error"] < (3e-3 if rounds else 1e-5)
