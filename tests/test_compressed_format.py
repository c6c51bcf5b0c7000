"""What DeepSeek-V4 stores, in bytes: published figures, and the rules of the description."""

import json
from pathlib import Path

import pytest
import torch

from sparsekv.errors import LayoutError
from sparsekv.format.compressed import CompressedGeometry

FIGURES = json.loads((Path(__file__).parent / "golden" / "paper_tables.json").read_text())
FLASH = ("sliding", "sliding") + ("csa", "hca") * 20 + ("csa",)
PRO = ("hca", "hca") + ("csa", "hca") * 29 + ("csa",)


def test_flash_at_32_sequences_of_64k():
    golden = FIGURES["deepseek_v4_flash"]
    footprint = CompressedGeometry(layer_kinds=FLASH).footprint(65536, 32)
    sliding, csa, hca = footprint
    tolerance = golden["tolerance_mb"]
    assert [row.kind for row in footprint] == ["sliding", "csa", "hca"]
    assert sum(row.num_layers for row in footprint) == golden["window_layers"]
    assert (csa.num_layers, hca.num_layers) == (golden["csa_layers"], golden["hca_layers"])
    for row in footprint:
        per_layer = row.recent_bytes / row.num_layers / 1e6
        assert per_layer == pytest.approx(golden["window_mb_per_layer"], abs=tolerance)
    for got, name in (
        (hca.entry_bytes / hca.num_layers, "hca_mb_per_layer"),
        (csa.entry_bytes / csa.num_layers, "csa_kv_mb_per_layer"),
        (csa.index_bytes / csa.num_layers, "csa_indexer_mb_per_layer"),
    ):
        assert got / 1e6 == pytest.approx(golden[name], abs=tolerance)
    total = (csa.entry_bytes + csa.index_bytes) / 1e9
    assert total == pytest.approx(golden["csa_total_gb"], abs=tolerance)
    assert sliding.entry_bytes == sliding.index_bytes == hca.index_bytes == 0


def test_production_bytes_per_token():
    flash = CompressedGeometry(layer_kinds=FLASH).production_bytes_per_token()
    assert flash == 3514.25
    assert int(flash) == FIGURES["deepseek_v4_flash"]["production_bytes_per_token"]
    assert CompressedGeometry(layer_kinds=PRO).production_bytes_per_token() == pytest.approx(
        30 * (584 + 68) / 4 + 31 * 584 / 128
    )
    with pytest.raises(LayoutError, match="head_dim=256"):
        CompressedGeometry(layer_kinds=FLASH, head_dim=256).production_bytes_per_token()


@pytest.mark.parametrize("num_tokens", [0, 3, 4, 127, 128, 129, 1 << 20])
def test_only_whole_windows_have_entries(num_tokens):
    native = CompressedGeometry(layer_kinds=PRO).footprint(num_tokens, 3)
    packed = CompressedGeometry(layer_kinds=PRO, entry_format="packed").footprint(num_tokens, 3)
    entries = 3 * 30 * (num_tokens // 4)
    assert (native[1].entry_bytes, packed[1].entry_bytes) == (entries * 1024, entries * 584)
    assert native[1].index_bytes == packed[1].index_bytes == entries * 256
    assert native[2].entry_bytes == packed[2].entry_bytes == 3 * 31 * (num_tokens // 128) * 1024


def test_the_pool_is_a_cache_of_entries():
    native = CompressedGeometry(layer_kinds=FLASH).pool_geometry
    assert (native.num_layers, native.bytes_per_token_per_layer) == (21, 1024)
    packed = CompressedGeometry(layer_kinds=FLASH, entry_format="packed").pool_geometry
    assert (packed.num_layers, packed.bytes_per_token_per_layer) == (21, 584)
    assert packed.dtype == torch.uint8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_kinds": ()}, "layer_kinds"),
        ({"layer_kinds": ("csa", "full")}, "full"),
        ({"head_dim": 0}, "head_dim"),
        ({"csa_ratio": 2.5}, "csa_ratio"),
        ({"hca_ratio": True}, "hca_ratio"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"dtype": torch.int8}, "dtype"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"entry_format": "fp8"}, "entry_format"),
        ({"entry_format": "packed", "head_dim": 256}, "512"),
    ],
)
def test_what_no_model_stores(changes, message):
    with pytest.raises(LayoutError, match=message):
        CompressedGeometry(**({"layer_kinds": FLASH} | changes))
