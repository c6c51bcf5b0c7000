"""PartitionSpec: the paper's tables, and refusal of cuts that do not nest."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import shares, specs

from sparsekv.errors import CapacityError, LayoutError
from sparsekv.format import KVGeometry, PartitionSpec

PAPER = json.loads((Path(__file__).parent / "golden" / "paper_tables.json").read_text())
GEOMETRIES = {
    "deepseek-v2-lite": KVGeometry(
        num_layers=27, num_kv_heads=1, head_dim=576, head_dim_v=512, shared_kv=True
    ),
    "qwen3-30b-a3b": KVGeometry(num_layers=48, num_kv_heads=4, head_dim=128),
    "mixtral-8x7b": KVGeometry(num_layers=32, num_kv_heads=8, head_dim=128),
}
CONTEXT = 32 * 1024
GOOD = {"geometry": GEOMETRIES["mixtral-8x7b"], "batch_size": 2, "max_tokens": 4096}


@pytest.mark.parametrize("model", PAPER["models"])
def test_bytes_per_token_are_the_papers(model):
    geometry, paper = GEOMETRIES[model], PAPER["models"][model]
    assert geometry.num_layers == paper["num_layers"]
    assert geometry.bytes_per_token_per_layer == paper["bytes_per_token_per_layer"]
    assert geometry.bytes_per_token == paper["bytes_per_token"]


@pytest.mark.parametrize("model", PAPER["models"])
def test_footprint_gives_table_1(model):
    spec = PartitionSpec(geometry=GEOMETRIES[model], batch_size=4, max_tokens=CONTEXT)
    total = spec.footprint(CONTEXT, 0.5).cpu_bytes / 1e9
    assert total == pytest.approx(
        PAPER["models"][model]["table1_kv_gb"], abs=PAPER["tolerance"]["gb"]
    )


@pytest.mark.parametrize("model", PAPER["models"])
def test_footprint_gives_table_2(model):
    paper, tolerance = PAPER["models"][model]["table2"], PAPER["tolerance"]
    spec = PartitionSpec(geometry=GEOMETRIES[model], batch_size=32, max_tokens=CONTEXT)
    found = spec.footprint(CONTEXT, paper["cpu_share"])
    assert found.ping_pong_bytes / 1e6 == pytest.approx(
        paper["ping_pong_mb"], abs=tolerance["ping_pong_mb"]
    )
    assert found.window_bytes / 1e6 == pytest.approx(paper["window_mb"], abs=tolerance["window_mb"])
    assert found.unpinned_bytes / 1e9 == pytest.approx(
        paper["unpinned_gb"], abs=tolerance["cpu_gb"]
    )
    assert found.pinned_bytes / 1e9 == pytest.approx(paper["pinned_gb"], abs=tolerance["cpu_gb"])


@given(specs(), st.integers(0, 10**9), shares())
def test_footprint_neither_loses_nor_doubles_a_byte(spec, num_tokens, share):
    found = spec.footprint(num_tokens, share)
    total = num_tokens * spec.batch_size * spec.geometry.bytes_per_token
    assert found.cpu_bytes == found.unpinned_bytes + found.pinned_bytes == total
    assert abs(found.unpinned_bytes - share * total) <= max(1, total * 1e-12)
    assert found.gpu_bytes == spec.footprint(0, share).gpu_bytes, "depends on the context"
    assert all(isinstance(size, int) for size in (found.unpinned_bytes, found.gpu_bytes))


@pytest.mark.parametrize(
    "name", ["batch_size", "max_tokens", "block_size", "window_size", "ping_pong_tokens"]
)
@pytest.mark.parametrize("value", [0, -256, 256.0, True, "256", float("nan")])
def test_sizes_are_whole_numbers(name, value):
    with pytest.raises(LayoutError, match=name) as caught:
        PartitionSpec(**{**GOOD, name: value})
    assert repr(value) in str(caught.value)
    assert ";" in str(caught.value), "no remedy"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"window_size": 100}, "window_size=100: .* multiple of block_size=64; use 64 or 128"),
        ({"window_size": 32}, "window_size=32: .*; use 64$"),
        ({"block_size": 48}, "window_size=256: .*block_size=48; use 240 or 288"),
        ({"ping_pong_tokens": 300}, "ping_pong_tokens=300: .*window_size=256; use 256 or 512"),
        ({"window_size": 1024}, "ping_pong_tokens=512: .*window_size=1024; use 1024"),
    ],
)
def test_sizes_nest(sizes, message):
    with pytest.raises(LayoutError, match=message):
        PartitionSpec(**{**GOOD, **sizes})


@pytest.mark.parametrize(
    "share", [-0.1, 1.0001, float("nan"), float("inf"), True, "0.5", None, torch.tensor(0.5)]
)
def test_shares_are_between_0_and_1(share):
    with pytest.raises(LayoutError, match=r"cpu_share=.*from 0 .* to 1 .*; use"):
        PartitionSpec(**GOOD).footprint(1024, share)


@pytest.mark.parametrize("num_tokens", [-1, 1.0, True, "1", None])
def test_lengths_are_whole_numbers(num_tokens):
    with pytest.raises(LayoutError, match="num_tokens="):
        PartitionSpec(**GOOD).footprint(num_tokens, 0.5)


def test_a_footprint_over_max_tokens_is_refused():
    spec = PartitionSpec(**GOOD)
    spec.footprint(4096, 0.5)
    with pytest.raises(CapacityError, match="num_tokens=4097: over max_tokens=4096; raise"):
        spec.footprint(4097, 0.5)
    PartitionSpec(**{**GOOD, "max_tokens": None}).footprint(10**9, 0.5)
