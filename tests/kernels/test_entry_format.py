"""Packed entries: every byte, every rounding, both ways; and the simulated formats."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsekv.errors import LayoutError
from sparsekv.kernels.reference import entry_format
from sparsekv.kernels.reference.entry_format import (
    PACKED_BYTES,
    pack_entries,
    simulate_fp4,
    simulate_fp8,
    unpack_entries,
)
from sparsekv.kernels.torch_ops.entry_format import pack_entries as pack_by_cast

PACKERS = [pytest.param(pack_entries, id="reference"), pytest.param(pack_by_cast, id="torch_ops")]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
FP4_GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out unwritten holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random_entries(seed: int, dtype: torch.dtype, count: int = 5) -> Tensor:
    """Entries whose blocks differ in size by many powers of two, with zeros among them."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, 64, generator=random, dtype=torch.float64)
    low, high = (-8, 8) if dtype == torch.float16 else (-30, 30)
    x *= 2.0 ** torch.randint(low, high, (count, 8, 1), generator=random)
    x[torch.rand(x.shape, generator=random) < 0.05] = 0.0
    return x.flatten(1).to(dtype)


def row(codes: int = 0, scale: int = 105) -> Tensor:
    """One packed entry with all codes and all scales alike."""
    packed = torch.zeros(1, PACKED_BYTES, dtype=torch.uint8)
    packed[:, :448] = codes
    packed[:, 576:583] = scale
    return packed


def nearest_by_search(value: float, grid: list[float]) -> float:
    """The grid's nearest number; of two, that with the even place, which has the even mantissa."""
    magnitude = abs(value)
    above = min(bisect_left(grid, magnitude), len(grid) - 1)
    candidates = [max(above - 1, 0), above]
    best = min(candidates, key=lambda place: (abs(grid[place] - magnitude), place % 2))
    return math.copysign(grid[best], value)


def simulate_by_search(block: list[float], grid: list[float], floor: float) -> list[float]:
    """One block in Python's floats, the scale found by trying."""
    amax = max(floor, *(abs(v) for v in block))
    exponent = -200
    while amax > grid[-1] * 2.0**exponent:
        exponent += 1
    return [nearest_by_search(v / 2.0**exponent, grid) * 2.0**exponent for v in block]


def fp8_grid() -> list[float]:
    values = ALL_BYTES[:0x7F].view(torch.float8_e4m3fn).to(torch.float64).tolist()
    assert values == sorted(values)
    return values


# Bytes


def test_all_256_codes_have_torchs_values() -> None:
    packed = row(scale=127)
    packed[0, :256] = ALL_BYTES
    values = unpack_entries(packed)[0, :256]
    want = ALL_BYTES.view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(values.isnan(), want.isnan())
    assert values.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(values.nan_to_num(), want.nan_to_num())
    assert torch.equal(values.signbit()[:0xFF], want.signbit()[:0xFF])  # -0.0 too
    assert values[[0x01, 0x08, 0x38, 0x7E, 0xFE]].tolist() == [2**-9, 2**-6, 1.0, 448.0, -448.0]


def test_all_256_scales_are_powers_of_two() -> None:
    packed = row(codes=0x38).repeat(256, 1)
    packed[:, 576:583] = ALL_BYTES[:, None]
    values = unpack_entries(packed)[:, 0].double()
    want = [2.0 ** (byte - 127) for byte in range(255)]
    assert values[:255].tolist() == want
    assert values[0] == 2.0**-127  # a subnormal float32, not zero
    assert values[255].isnan()
    torchs = ALL_BYTES.view(torch.float8_e8m0fnu).to(torch.float32).double()
    assert torch.equal(values[:255], torchs[:255])


def test_a_row_is_laid_out_as_stated() -> None:
    x = torch.zeros(1, 512)
    x[0, 0], x[0, 64], x[0, 447], x[0, 448], x[0, 511] = 448.0, -1.0, 2.0**-10, 1.0, -2.0
    packed = pack_entries(x)[0]
    assert packed.shape == (584,)
    assert packed.dtype == torch.uint8
    assert packed[0] == 0x7E
    assert packed[576] == 127  # 448 = 448 * 2**0
    assert packed[64] == 0x80 | 0x78  # 256 of 2**-8
    assert packed[577] == 127 - 8
    assert packed[447] == 0x78
    assert packed[582] == 127 - 18
    assert packed[448:450].tolist() == [0x80, 0x3F]
    assert packed[574:576].tolist() == [0x00, 0xC0]
    assert packed[583] == 0
    assert packed[[1, 63, 65, 446, 450, 573]].tolist() == [0] * 6
    assert packed[578:582].tolist() == [105] * 4  # nothing but zeros: the floor, 2**-22
    torch.testing.assert_close(unpack_entries(packed[None]), x, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_lie_anywhere(dtype: torch.dtype) -> None:
    packed = pack_entries(random_entries(0, torch.float32, 6)).view(2, 3, 584)
    buffer = torch.full((2, 7, 601), 0xFF, dtype=torch.uint8)
    cut = buffer[:, 1::2, 5:589]  # an odd offset: the bf16 values are not aligned
    cut.copy_(packed)
    assert torch.equal(unpack_entries(cut, dtype), unpack_entries(packed, dtype))
    assert torch.equal(unpack_entries(cut[:1, :1], dtype), unpack_entries(packed[:1, :1], dtype))
    assert unpack_entries(cut[:, :0]).shape == (2, 0, 512)
    assert pack_entries(torch.zeros(2, 0, 512)).shape == (2, 0, 584)


# There and back


@pytest.mark.parametrize("pack", PACKERS)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(DTYPES))
def test_packing_is_the_simulation(pack: Any, seed: int, dtype: torch.dtype) -> None:
    x = random_entries(seed, dtype)
    before = x.clone()
    packed = pack(x)
    assert torch.equal(packed, pack_entries(x))
    assert torch.equal(x, before)
    values = unpack_entries(packed)
    want = torch.cat([simulate_fp8(x[:, :448]), x[:, 448:].bfloat16().to(x.dtype)], dim=1)
    assert torch.equal(values.double(), want.double())
    assert torch.equal(values.signbit(), want.signbit())
    if dtype == torch.bfloat16:  # nothing is lost in bfloat16
        assert torch.equal(unpack_entries(packed, torch.bfloat16).float(), values)
    again = pack(values)
    assert torch.equal(unpack_entries(again), values)
    assert torch.equal(pack(unpack_entries(again)), again)


@pytest.mark.parametrize("pack", PACKERS)
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_canonical_rows_come_back_byte_for_byte(pack: Any, seed: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(seed)
    packed = torch.randint(256, (4, 584), generator=random, dtype=torch.uint8)
    codes = packed[:, :448]
    codes[(codes & 0x7F) == 0x7F] = 0x80  # no NaN; more of -0.0
    scales = torch.randint(105, 240, (4, 7), generator=random, dtype=torch.uint8)
    scales[:, 3] = 105
    packed[:, 576:583] = scales
    # At the floor anything goes; above it, some value is beyond half the range.
    codes.unflatten(1, (7, 64))[:, :3, 5] = torch.randint(
        0x77, 0x7F, (4, 3), generator=random, dtype=torch.uint8
    )
    codes.unflatten(1, (7, 64))[:, 4:, 63] = 0xFB
    packed[:, 448:576] = torch.randn(4, 64, generator=random).bfloat16().view(torch.uint8)
    packed[:, 583] = 0
    assert torch.equal(pack(unpack_entries(packed, dtype)), packed)


def test_half_a_scale_is_taken_where_it_holds_the_same_numbers() -> None:
    x = torch.zeros(1, 512)
    x[0, :3] = torch.tensor([225.0, 3.0, 2.0**-9])  # 225 needs scale 1, and rounds to 224
    packed = pack_entries(x)
    assert packed[0, [0, 576]].tolist() == [0x76, 127]
    values = unpack_entries(packed)
    again = pack_entries(values)
    assert again[0, [0, 576]].tolist() == [0x7E, 126]
    assert torch.equal(unpack_entries(again), values)


# Rounding


def test_fp8_rounds_every_midpoint_to_even_and_its_neighbours_to_the_nearest() -> None:
    grid = fp8_grid()
    points = []
    for low, high in itertools.pairwise(grid):
        middle = (low + high) / 2
        points += [low, math.nextafter(middle, low), middle, math.nextafter(middle, high)]
    points += [-p for p in points]
    for dtype in (torch.float64, torch.float32):
        x = torch.tensor(points, dtype=torch.float64).to(dtype)  # float32: midpoints thrice
        blocks = torch.nn.functional.pad(x, (0, -len(points) % 63)).view(-1, 63)
        blocks = torch.cat([blocks, torch.full_like(blocks[:, :1], 448.0)], dim=1)  # scale 1
        got = simulate_fp8(blocks)
        want = [nearest_by_search(v, grid) for v in blocks.flatten().tolist()]
        assert got.flatten().tolist() == want
        assert got.signbit().flatten().tolist() == [math.copysign(1, w) < 0 for w in want]
        entries = torch.nn.functional.pad(blocks, (0, 448))
        assert torch.equal(pack_by_cast(entries), pack_entries(entries))


def test_fp4_rounds_every_midpoint_to_even_and_its_neighbours_to_the_nearest() -> None:
    points = []
    for low, high in itertools.pairwise(FP4_GRID):
        middle = (low + high) / 2
        points += [low, math.nextafter(middle, low), middle, math.nextafter(middle, high)]
    x = torch.tensor([*points, *[0.0] * 3, 6.0], dtype=torch.float64)
    assert len(x) == 32
    for sign in (1, -1):
        want = [nearest_by_search(v, FP4_GRID) for v in (sign * x).tolist()]
        assert simulate_fp4(sign * x).tolist() == want
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    assert simulate_fp4(middles, block=8).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("simulate", "largest", "smallest"), [(simulate_fp8, 448.0, 2**-9), (simulate_fp4, 6.0, 0.5)]
)
def test_the_scale_is_the_smallest_power_of_two_that_fits(
    simulate: Any, largest: float, smallest: float
) -> None:
    """Exact at the border, where a rounded logarithm may fall on either side."""
    for exponent in range(-20, 60):
        edge = torch.tensor([largest * 2.0**exponent])
        beyond = torch.nextafter(edge, torch.tensor(INF))
        for amax, scale in ((edge, 2.0**exponent), (beyond, 2.0 ** (exponent + 1))):
            step = scale * smallest
            block = torch.cat([amax, torch.tensor([step, 0.49 * step])])
            assert simulate(block, block=3)[1:].tolist() == [step, 0.0]


@pytest.mark.parametrize(("simulate", "step"), [(simulate_fp8, 2**-31), (simulate_fp4, 2**-127)])
def test_blocks_of_tiny_numbers_share_the_lowest_scale(simulate: Any, step: float) -> None:
    block = torch.tensor([step, 0.51 * step, 0.49 * step, -0.49 * step])
    got = simulate(block, block=4)
    assert got.tolist() == [step, step, 0.0, 0.0]
    assert got.signbit().tolist() == [False, False, False, True]


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    block=st.sampled_from([1, 3, 32, 64]),
    kind=st.sampled_from(["fp8", "fp4"]),
)
def test_the_simulations_are_a_search_over_the_grid(
    seed: int, dtype: torch.dtype, block: int, kind: str
) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 2 * block, generator=random).to(dtype)
    x *= 2.0 ** torch.randint(-14, 10, (2, 3, 1), generator=random)
    grid, floor = (fp8_grid(), 1e-4) if kind == "fp8" else (FP4_GRID, 6 * 2.0**-126)
    simulate = simulate_fp8 if kind == "fp8" else simulate_fp4
    got = simulate(x, block=block)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for values, blocks in zip(
        got.unflatten(-1, (2, block)).flatten(0, 2),
        x.unflatten(-1, (2, block)).flatten(0, 2),
        strict=True,
    ):
        assert values.tolist() == simulate_by_search(blocks.tolist(), grid, floor)
    assert torch.equal(simulate(got, block=block), got)


# NaN, infinity, refusals


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_a_block_that_is_not_finite_is_nan_and_no_other(pack: Any, junk: float) -> None:
    x = random_entries(3, torch.float32)
    want = unpack_entries(pack(x))
    x[2, 70] = junk
    packed = pack(x)
    assert packed[2, 64:128].tolist() == [0x7F] * 64
    assert packed[2, 577] == 255
    got = unpack_entries(packed)
    want[2, 64:128] = NAN
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert torch.equal(simulate_fp8(x[:, :448]).isnan(), want[:, :448].isnan())
    assert torch.equal(pack(got), packed)
    assert simulate_fp4(x)[2, 64:96].isnan().all()
    assert simulate_fp4(x).isnan().sum() == 32


@pytest.mark.parametrize("pack", PACKERS)
def test_rotated_channels_keep_nan_and_infinity(pack: Any) -> None:
    x = random_entries(4, torch.float32)
    x[1, 500], x[2, 501] = NAN, -INF
    got = unpack_entries(pack(x))
    assert got.isnan().nonzero().tolist() == [[1, 500]]
    assert got[2, 501] == -INF


@pytest.mark.parametrize("pack", PACKERS)
def test_other_widths_are_refused(pack: Any) -> None:
    with pytest.raises(LayoutError, match=r"\(2, 448\): a packed entry has 512 channels"):
        pack(torch.zeros(2, 448))
    with pytest.raises(LayoutError, match="rows of 584 bytes"):
        unpack_entries(torch.zeros(2, 583, dtype=torch.uint8))
    with pytest.raises(LayoutError, match=r"must be torch\.uint8"):
        unpack_entries(torch.zeros(2, 584))
    with pytest.raises(LayoutError, match=r"dtype=torch\.float16"):
        unpack_entries(row(), torch.float16)
    with pytest.raises(LayoutError, match="multiple of block=64"):
        simulate_fp8(torch.zeros(2, 96))


def test_sizes_are_those_of_the_formats() -> None:
    assert entry_format.PACKED_BYTES == 584
    assert entry_format.BF16_BYTES == torch.zeros(512, dtype=torch.bfloat16).nbytes == 1024
