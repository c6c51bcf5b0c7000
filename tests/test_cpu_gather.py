"""The benchmark of the gather measures what it says, over the library's own layout."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
import torch

from benchmarks import cpu_gather, memory_ceilings
from benchmarks.attention_shapes import SHAPES, WINDOW_SIZE, KVMemory
from benchmarks.ceilings import filled_buffer
from benchmarks.gather_pieces import GatherPieces, numbers_of
from benchmarks.results import load_result

try:
    memory_ceilings._library()
except RuntimeError as error:
    pytest.skip(f"no ceilings here: {error}", allow_module_level=True)


@pytest.mark.parametrize("piece_bytes", cpu_gather.PIECE_BYTES)
def test_pieces_come_back_only_after_all_others(piece_bytes: int) -> None:
    buffer = filled_buffer(32 << 20)
    memory = KVMemory(buffer, SHAPES["qwen3"], rows=2)
    target = torch.zeros(4 << 20, dtype=torch.uint8)
    pieces = GatherPieces(memory, buffer, target, piece_bytes)
    assert pieces.num_bytes == target.numel()
    assert len(pieces.selections) == memory.span.num_bytes // target.numel()
    flat = torch.cat([selection.flat_indices for selection in pieces.selections])
    assert torch.equal(flat.sort().values, torch.arange(len(pieces.flat)))
    assert all(pieces.is_exact() for _ in pieces.selections)


def test_segments_are_copied_to_their_place() -> None:
    buffer, staging = filled_buffer(8 << 20), filled_buffer(2 << 20)
    memory = KVMemory(buffer, SHAPES["qwen3"], rows=1)
    staging.tensor().fill_(7)
    name, num_bytes, copy = cpu_gather.segment_copies(memory, buffer, staging)
    copy()
    assert (name, num_bytes) == ("segments", staging.span.num_bytes)
    per_segment = memory.segment_bytes // 2
    assert per_segment == 2 * SHAPES["qwen3"].num_kv_heads * WINDOW_SIZE * 128
    copied = numbers_of(memory, buffer).view(torch.uint8) == 7
    assert copied[:num_bytes].all()
    assert not copied[num_bytes:].all()


def test_a_run_is_judged_by_the_better_copy_of_its_rounds(tmp_path: Path) -> None:
    arguments = ["--quick", "--rounds", "2", "--threads", "1", "--out", str(tmp_path)]
    cpu_gather.main(arguments)
    (path,) = tmp_path.iterdir()
    result = load_result(path)
    ways = [(row["way"], row["piece_bytes"]) for row in result.rows]
    copies = [("gather", size) for size in cpu_gather.PIECE_BYTES]
    assert set(copies) < set(ways)
    assert ("segments", cpu_gather.PIECE_BYTES[0]) in ways
    for row in result.rows:
        best = max(median(row["memcpy_samples"]), median(row["stream_samples"]))
        assert row["fraction"] == pytest.approx(median(row["samples"]) / best)
    assert [(check.target, check.lower_is_better) for check in result.checks] == [
        (0.90, False),
        (0.65, False),
    ]
