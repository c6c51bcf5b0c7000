"""Ceilings are measured by loops that do what they say, and owe nothing to the product."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from benchmarks import buffer, bus_ceilings, ceilings, memory_ceilings
from benchmarks.buffer import HUGE_PAGE_BYTES, Buffer, Span
from benchmarks.ceilings import (
    CopyCeiling,
    ReadCeiling,
    ReadLoad,
    WriteCeiling,
    fill,
    filled_buffer,
)
from benchmarks.results import load_result

try:
    ISAS = range(memory_ceilings._library().ceilings_best_isa() + 1)
except RuntimeError as error:
    pytest.skip(f"no ceilings here: {error}", allow_module_level=True)
UNEVEN_BYTES = 3 * memory_ceilings.PIECE_BYTES + 256


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_word_is_read_once(isa: int, prefetch: bool, num_threads: int) -> None:
    memory = filled_buffer(2 * HUGE_PAGE_BYTES)
    words = memory.tensor()[:UNEVEN_BYTES].view(torch.int64)
    span = memory.span.part(0, UNEVEN_BYTES)
    for start in (0, 2 * memory_ceilings.PIECE_BYTES):
        total = memory_ceilings.read_sum(span, num_threads, prefetch=prefetch, isa=isa, start=start)
        assert total == int(words.sum()) % 2**64


def test_filling_gives_the_same_finite_numbers_each_time() -> None:
    memory = filled_buffer(HUGE_PAGE_BYTES)
    first = memory.tensor().clone()
    memory.tensor().zero_()
    fill(memory.span, num_threads=1)
    assert torch.equal(memory.tensor(), first)
    sizes = memory.tensor().view(torch.bfloat16).abs()
    assert sizes.min() == 0.125
    assert 1.9 < sizes.max() < 2.0


@pytest.mark.parametrize("way", ["memcpy", "stream"])
def test_a_copy_is_a_copy(way: str) -> None:
    source, target = filled_buffer(2 * HUGE_PAGE_BYTES), Buffer(2 * HUGE_PAGE_BYTES)
    spans = (target.span.part(0, UNEVEN_BYTES), source.span.part(0, UNEVEN_BYTES))
    assert getattr(CopyCeiling(3, *spans), way)() > 0
    assert torch.equal(target.tensor()[:UNEVEN_BYTES], source.tensor()[:UNEVEN_BYTES])
    assert not target.tensor()[UNEVEN_BYTES:].any()


def test_writing_writes_all() -> None:
    memory = Buffer(HUGE_PAGE_BYTES)
    assert WriteCeiling(2, memory.span).measure() > 0
    assert (memory.tensor() == 1).all()


def test_a_load_reads_until_it_is_ended() -> None:
    memory = filled_buffer(HUGE_PAGE_BYTES)
    with ReadLoad(1, memory.span) as load:
        while load.bytes_read < 4 * memory.span.num_bytes:
            time.sleep(0)
    ended = load.bytes_read
    assert ReadCeiling(1, memory.span).measure() > 0
    assert load.bytes_read == ended


@pytest.mark.parametrize("wrong", [(8, 256), (0, 100), (0, 0)])
def test_memory_that_the_loops_cannot_take_is_refused(wrong: tuple[int, int]) -> None:
    memory = Buffer(HUGE_PAGE_BYTES)
    span = Span(memory.span.address + wrong[0], wrong[1])
    with pytest.raises(ValueError, match="multiples of 64"):
        ReadCeiling(1, span).measure()


def test_buffers_exceed_four_caches_where_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "llc_bytes", lambda: 300 << 20)
    monkeypatch.setattr(buffer, "available_bytes", lambda: 64 << 30)
    assert buffer.measuring_bytes(2) > 4 * (300 << 20)
    monkeypatch.setattr(buffer, "available_bytes", lambda: 1 << 30)
    assert buffer.measuring_bytes(2) == (1 << 30) // 4


def test_the_script_writes_what_it_measured(tmp_path: Path) -> None:
    ceilings.main(["--quick", "--rounds", "2", "--threads", "1,2", "--out", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    rows = load_result(path).rows
    assert {row["num_threads"] for row in rows if row["what"] == "read"} == {1, 2}
    assert all(len(row["samples"]) == 2 and row["gbs"] > 0 for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_bus_is_measured_alone_and_beside_readers() -> None:
    memory = filled_buffer(64 << 20)
    with ceilings.BusCeiling(num_copies=8) as bus:
        assert bus.h2d() > 1
        assert bus.d2h() > 1
        h2d, read = bus.h2d_while_reading(2, memory.span)
        num_bytes = 5 * bus_ceilings.COPY_BYTES + 256
        seconds = bus.begin_h2d(num_bytes)()
    assert 1 < num_bytes / seconds / 1e9 < 1000
    assert h2d > 1
    assert read > 1
    assert ceilings.hbm_copy_gbs(num_copies=2) > 100
