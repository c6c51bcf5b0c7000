"""How a compressed entry is stored in bytes, and the quantisation that the bytes imply.

An entry of 512 numbers is stored as bf16, 1024 bytes, as it is; or packed, in one contiguous row of
584 bytes:

    bytes   0..447   channels 0..447 as e4m3fn, one byte each
    bytes 448..575   channels 448..511 (the rotated ones) as bf16, little-endian
    bytes 576..582   scales of channels 64 i .. 64 i + 63, i = 0..6, as ue8m0, one byte each
    byte  583        0

These are the bytes of DeepSeek-V4's production format, which keeps the first 576 and the last 8 of
an entry apart, by pages; here an entry is whole, so that one read fetches it.

e4m3fn: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity; 0x7f and 0xff are NaN; 448 is the
largest. ue8m0: byte e is 2 ** (e - 127), so byte 0 is 2 ** -127, not zero; 255 is NaN. e2m1, which
is only simulated: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
"""

import functools

import torch
from torch import Tensor

from sparsekv.errors import LayoutError

ENTRY_DIM = 512
"""Channels of an entry."""
ROPE_DIM = 64
"""Of these, the last ones, which are rotated and stay in bf16."""
QUANTIZED_DIM = ENTRY_DIM - ROPE_DIM
SCALE_BLOCK = 64
"""Quantised channels that share a scale."""
NUM_SCALES = QUANTIZED_DIM // SCALE_BLOCK
SCALES_OFFSET = QUANTIZED_DIM + 2 * ROPE_DIM
PACKED_BYTES = SCALES_OFFSET + NUM_SCALES + 1
BF16_BYTES = 2 * ENTRY_DIM

FP8_MAX = 448.0
FP8_FLOOR = 1e-4
"""Smallest amax that a scale is made for."""
_FP8_LOWEST = -6  # exponent of e4m3fn's smallest normal number
_FP8_MANTISSA = 3
_FP8_NAN = 0x7F
_FP4_MAX = 6.0
_FP4_LOWEST = 0
_FP4_MANTISSA = 1
_FP4_FLOOR = 6.0 * 2.0**-126
_SCALE_BIAS = 127
_SCALE_NAN = 255


def pack_entries(x: Tensor) -> Tensor:
    """Pack entries into rows of 584 bytes.

    Per block of 64 channels, as DeepSeek-V4's kernels do:

        amax = max(|x|, 1e-4);  scale = 2 ** ceil(log2(amax / 448));
        byte = e4m3fn(clamp(x / scale, -448, 448)), to nearest, ties to the even mantissa

    with the scale exact, not by a rounded logarithm. A block with a NaN or an infinity becomes NaN
    throughout: scale byte 255, values 0x7f. A NaN in the last 64 channels stays where it is.

    Args:
        x: (..., 512), floating, rotated. bfloat16, float16 and float32 are quantised in float32,
            float64 in float64.

    Returns:
        (..., 584) uint8, contiguous.

    Raises:
        LayoutError: another number of channels.
    """
    check_entries(x)
    blocks, exponent, is_finite = scaled_blocks(
        x[..., :QUANTIZED_DIM], SCALE_BLOCK, FP8_MAX, FP8_FLOOR
    )
    return packed_rows(_encode_e4m3fn(blocks), exponent, is_finite, x[..., QUANTIZED_DIM:])


def unpack_entries(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that packed rows stand for.

    Exact in float32 (and in bfloat16 for the scales that `pack_entries` makes from it: 2 ** -22
    and up), save that a scale above 2 ** 119 may give an infinity. The last byte of a row is not
    read.

    `pack_entries` gives the same bytes back for canonical rows: last byte 0, no NaN, and in each
    block scale byte 105 (2 ** -22), or one above it with a value whose code, sign aside, exceeds
    0x76 (224): otherwise half the scale holds the same numbers. It may itself make such a row, by
    rounding the largest value down to 224; packed once more, the numbers stay as they are.

    Args:
        packed: (..., 584) uint8, any strides.
        dtype: bfloat16 or float32.

    Returns:
        (..., 512) in `dtype`.

    Raises:
        LayoutError: rows that are not 584 bytes, or another dtype.
    """
    _check_packed(packed, dtype)
    codes = packed[..., :QUANTIZED_DIM].unflatten(-1, (NUM_SCALES, SCALE_BLOCK))
    scales = packed[..., SCALES_OFFSET : SCALES_OFFSET + NUM_SCALES, None]
    values = _look_up(_e4m3fn_table(packed.device), codes)
    values *= _look_up(_ue8m0_table(packed.device), scales)
    rope = packed[..., QUANTIZED_DIM:SCALES_OFFSET]
    rope = rope.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)  # now aligned
    return torch.cat([values.flatten(-2).to(dtype), rope.to(dtype)], dim=-1)


def simulate_fp8(x: Tensor, block: int = 64) -> Tensor:
    """Round to e4m3fn with a power-of-two scale for each `block` channels, as `pack_entries` does.

    Args:
        x: (..., dim), floating; dim is a multiple of `block`.
        block: channels that share a scale.

    Returns:
        Like x, in float64 for a float64 x, else float32, where the rounded numbers are exact (as
        they are in bfloat16 from a bfloat16 x). A block with a NaN or an infinity is NaN.

    Raises:
        LayoutError: dim is no multiple of `block`.
    """
    return _simulate(x, block, FP8_MAX, FP8_FLOOR, _FP8_LOWEST, _FP8_MANTISSA)


def simulate_fp4(x: Tensor, block: int = 32) -> Tensor:
    """Round to e2m1 with a power-of-two scale for each `block` channels (the indexer's format).

    amax = max(|x|, 6 * 2 ** -126);  scale = 2 ** ceil(log2(amax / 6));
    x / scale is clamped to [-6, 6] and rounded to nearest, ties to the even mantissa.

    Args:
        x: (..., dim), floating; dim is a multiple of `block`.
        block: channels that share a scale.

    Returns:
        Like x, in float64 for a float64 x, else float32. A block with a NaN or an infinity is NaN.

    Raises:
        LayoutError: dim is no multiple of `block`.
    """
    return _simulate(x, block, _FP4_MAX, _FP4_FLOOR, _FP4_LOWEST, _FP4_MANTISSA)


def scaled_blocks(
    x: Tensor, block: int, largest: float, floor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks divided by their scales and clamped, the scales' exponents, and which are finite.

    (..., num_blocks, block) floating, (..., num_blocks, 1) int32 and bool. The blocks that are not
    finite hold zeros.
    """
    if x.shape[-1] % block:
        raise LayoutError(
            f"x {tuple(x.shape)}: the last dimension must be a multiple of block={block}; quantise "
            "only channels that share scales"
        )
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    blocks = x.to(dtype).unflatten(-1, (x.shape[-1] // block, block))
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    is_finite = amax.isfinite()
    blocks = blocks.masked_fill(~is_finite, 0.0)
    amax = amax.masked_fill(~is_finite, 0.0).clamp(min=floor)
    # The smallest power of two that brings amax down to `largest`, from the two numbers' own bits.
    fraction, exponent = torch.frexp(amax)
    largest_fraction, largest_exponent = torch.frexp(torch.tensor(largest, dtype=dtype))
    exponent = exponent - largest_exponent + (fraction > largest_fraction)
    exponent = exponent.clamp(max=_SCALE_BIAS)
    scaled = blocks / _power_of_two(exponent, dtype)
    return scaled.clamp(-largest, largest), exponent, is_finite


def packed_rows(codes: Tensor, exponent: Tensor, is_finite: Tensor, rope: Tensor) -> Tensor:
    """Rows of the format from their parts.

    Args:
        codes: (..., 7, 64) uint8, e4m3fn.
        exponent: (..., 7, 1) integer, that of each block's scale.
        is_finite: (..., 7, 1) bool: False makes the block NaN.
        rope: (..., 64), floating: the channels kept in bf16.

    Returns:
        (..., 584) uint8, contiguous.
    """
    scales = (exponent + _SCALE_BIAS).masked_fill(~is_finite, _SCALE_NAN).to(torch.uint8)
    packed = codes.new_zeros((*rope.shape[:-1], PACKED_BYTES))
    packed[..., :QUANTIZED_DIM] = codes.masked_fill(~is_finite, _FP8_NAN).flatten(-2)
    rope = rope.to(torch.bfloat16).clone(memory_format=torch.contiguous_format)
    packed[..., QUANTIZED_DIM:SCALES_OFFSET] = rope.view(torch.uint8)
    packed[..., SCALES_OFFSET : SCALES_OFFSET + NUM_SCALES] = scales.squeeze(-1)
    return packed


def check_entries(x: Tensor) -> None:
    """Raise unless x holds entries of the width that the packed format is made for."""
    if x.shape[-1] != ENTRY_DIM:
        raise LayoutError(
            f"x {tuple(x.shape)}: a packed entry has {ENTRY_DIM} channels; store entries of "
            "another head_dim as bf16"
        )


def _check_packed(packed: Tensor, dtype: torch.dtype) -> None:
    """Raise unless `packed` holds rows of the format and `dtype` can be unpacked to."""
    if packed.dtype != torch.uint8 or packed.shape[-1] != PACKED_BYTES:
        raise LayoutError(
            f"packed is {packed.dtype} {tuple(packed.shape)}: must be torch.uint8 with rows of "
            f"{PACKED_BYTES} bytes; pass what pack_entries made"
        )
    if dtype not in (torch.bfloat16, torch.float32):
        raise LayoutError(
            f"dtype={dtype}: entries unpack to torch.bfloat16 or torch.float32, whose range holds "
            "them; convert afterwards"
        )


@functools.cache
def _ue8m0_table(device: torch.device) -> Tensor:
    """The 256 values of ue8m0 in float32."""
    values = [2.0 ** (byte - _SCALE_BIAS) for byte in range(_SCALE_NAN)]
    return torch.tensor([*values, torch.nan], dtype=torch.float32, device=device)


@functools.cache
def _e4m3fn_table(device: torch.device) -> Tensor:
    """The 256 values of e4m3fn in float32."""
    positive = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    positive += [(1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(8, _FP8_NAN)]
    positive.append(torch.nan)
    values = positive + [-value for value in positive]
    return torch.tensor(values, dtype=torch.float32, device=device)


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def _simulate(
    x: Tensor, block: int, largest: float, floor: float, lowest: int, mantissa_bits: int
) -> Tensor:
    blocks, exponent, is_finite = scaled_blocks(x, block, largest, floor)
    step, steps = _nearest(blocks.abs(), lowest, mantissa_bits)
    values = torch.copysign(steps * step, blocks) * _power_of_two(exponent, blocks.dtype)
    return values.masked_fill(~is_finite, torch.nan).flatten(-2)


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2 ** exponent, exactly, for exponents from -126 to 127."""
    bits = (exponent.to(torch.int32) + 127) << 23  # a float32 with mantissa 0
    return bits.view(torch.float32).to(dtype)


def _nearest(magnitude: Tensor, lowest: int, mantissa_bits: int) -> tuple[Tensor, Tensor]:
    """The step between neighbours at each magnitude, and the nearest whole number of steps.

    Below 2 ** lowest the step is that of 2 ** lowest. Halfway cases go to the even number, which
    has the even mantissa.
    """
    exponent = torch.frexp(magnitude.clamp(min=2.0**lowest)).exponent - 1
    step = _power_of_two(exponent - mantissa_bits, magnitude.dtype)
    return step, torch.round(magnitude / step)


def _encode_e4m3fn(x: Tensor) -> Tensor:
    """Bytes of numbers within [-448, 448]."""
    step, steps = _nearest(x.abs(), _FP8_LOWEST, _FP8_MANTISSA)
    exponent = torch.frexp(step).exponent - 1 + _FP8_MANTISSA
    # A normal number has 8 to 15 steps, of which the mantissa keeps the excess over 8; 16 steps
    # carry into the exponent, and a subnormal number, of exponent -6 too, is its steps.
    codes = (exponent - _FP8_LOWEST) * 8 + steps.to(torch.int32)
    return (codes | (torch.signbit(x).to(torch.int32) << 7)).to(torch.uint8)
