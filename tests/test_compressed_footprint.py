"""Planning a DeepSeek-V4 cache: what its tokens add, what stays as it is."""

from __future__ import annotations

import pytest

from sparsekv.format.compressed import CompressedGeometry, EntryFormat, LayerKind

FLASH: tuple[LayerKind, ...] = ("sliding", "sliding", *("csa", "hca") * 20, "csa")
PRO: tuple[LayerKind, ...] = ("hca", "hca", *("csa", "hca") * 29, "csa")
MIB = 1 << 20


def test_bytes_that_a_token_adds() -> None:
    assert CompressedGeometry(layer_kinds=FLASH).bytes_per_token() == 21 * 320 + 20 * 8 == 6880
    assert CompressedGeometry(layer_kinds=PRO).bytes_per_token() == 30 * 320 + 31 * 8 == 9848


@pytest.mark.parametrize("entry_format", ["native", "packed"])
def test_a_long_context_takes_what_its_tokens_add(entry_format: EntryFormat) -> None:
    geometry = CompressedGeometry(layer_kinds=FLASH, entry_format=entry_format)
    grown = sum(kind.entry_bytes + kind.index_bytes for kind in geometry.footprint(MIB, 3))
    assert grown == 3 * MIB * geometry.bytes_per_token()


def test_constant_bytes_of_flash() -> None:
    sliding, csa, hca = CompressedGeometry(layer_kinds=FLASH).footprint(MIB, 1)
    assert (sliding.num_layers, csa.num_layers, hca.num_layers) == (2, 21, 20)
    assert sliding.recent_bytes + csa.recent_bytes + hca.recent_bytes == 43 * 127 * 1024
    # Three open tokens, 1,024 + 256 wide; a prior window of 4 tokens, half as wide, in float32.
    assert csa.open_bytes == 21 * 2 * (3 * (1024 + 256) * 2 + 4 * (512 + 128) * 4)
    assert hca.open_bytes == 20 * 2 * 127 * 512 * 2
    assert sliding.open_bytes == sliding.growing_gpu_bytes == 0


def test_a_short_context_takes_less() -> None:
    _, csa, hca = CompressedGeometry(layer_kinds=FLASH).footprint(3, 1)
    assert csa.entry_bytes == csa.index_bytes == hca.entry_bytes == 0
    assert csa.open_bytes == 21 * 2 * 3 * (1024 + 256) * 2
    assert hca.recent_bytes == 20 * 3 * 1024


def test_only_index_keys_and_hca_entries_grow_on_the_accelerator() -> None:
    geometry = CompressedGeometry(layer_kinds=FLASH)
    for short, long in zip(geometry.footprint(MIB, 2), geometry.footprint(2 * MIB, 2), strict=True):
        assert long.growing_gpu_bytes == 2 * short.growing_gpu_bytes
        assert long.gpu_bytes - long.growing_gpu_bytes == short.gpu_bytes - short.growing_gpu_bytes
