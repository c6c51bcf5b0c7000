"""Rotary embedding: interleaved pairs on the last channels, and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from deepseek_v4_modules import CSA, SLIDING, angles, modeling, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsekv.errors import LayoutError
from sparsekv.kernels.reference.rotary import apply_rotary

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out unwritten holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make_case(
    seed: int, dtype: torch.dtype, batch: int, tokens: int, nope: int, pairs: int, shared: bool
) -> tuple[Tensor, Tensor]:
    """x, and the angles (batch or 1, tokens, pairs) in float64."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 3, tokens, nope + 2 * pairs, generator=random).to(dtype)
    rows = 1 if shared else batch
    return x, 10 * torch.randn(rows, tokens, pairs, generator=random, dtype=torch.float64)


def by_complex_numbers(x: Tensor, theta: Tensor) -> Tensor:
    """The pair (a, b) as a + ib, times exp(i theta)."""
    pairs = theta.shape[-1]
    split = x.shape[-1] - 2 * pairs
    real, imaginary = x[..., split:].double().unflatten(-1, (pairs, 2)).unbind(-1)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(theta), theta)[:, None]
    return torch.cat([x[..., :split].double(), torch.view_as_real(turned).flatten(-2)], dim=-1)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(1, 3),
    tokens=st.integers(0, 5),
    nope=st.integers(0, 5),
    pairs=st.integers(1, 4),
    shared=st.booleans(),
)
def test_pairs_turn_as_complex_numbers_do(
    seed: int, dtype: torch.dtype, batch: int, tokens: int, nope: int, pairs: int, shared: bool
) -> None:
    x, theta = make_case(seed, dtype, batch, tokens, nope, pairs, shared)
    before = x.clone()
    for inverse, sign in ((False, 1), (True, -1)):
        got = apply_rotary(x, theta.cos(), theta.sin(), inverse=inverse)
        want = by_complex_numbers(x, sign * theta)
        assert got.dtype == dtype
        assert torch.equal(got[..., :nope], x[..., :nope])
        eps = torch.finfo(dtype).eps
        rtol, atol = 2 * eps, 4 * eps
        if dtype in (torch.float16, torch.bfloat16):  # one rounding, not several
            rtol, atol = 0.5001 * eps, 1e-6
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)
    assert torch.equal(x, before)


def test_the_inverse_undoes_the_rotation() -> None:
    x, theta = make_case(0, torch.float64, 2, 7, 24, 4, shared=False)
    turned = apply_rotary(x, theta.cos(), theta.sin())
    back = apply_rotary(turned, theta.cos(), theta.sin(), inverse=True)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-14)
    assert not torch.allclose(turned, x)


def test_rotating_back_may_follow_the_merge() -> None:
    x, theta = make_case(1, torch.float64, 2, 7, 24, 4, shared=True)
    y, _ = make_case(2, torch.float64, 2, 7, 24, 4, shared=True)
    cos, sin = theta.cos(), theta.sin()
    merged = apply_rotary(0.3 * x + 0.7 * y, cos, sin, inverse=True)
    parts = [apply_rotary(part, cos, sin, inverse=True) for part in (x, y)]
    torch.testing.assert_close(merged, 0.3 * parts[0] + 0.7 * parts[1], rtol=0, atol=1e-14)


def test_products_depend_on_the_distance_only() -> None:
    x, _ = make_case(3, torch.float64, 1, 1, 0, 4, shared=True)
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.01], dtype=torch.float64)

    def product(query_position: int, key_position: int) -> Tensor:
        turned = [
            apply_rotary(
                x, (p * frequencies)[None, None].cos(), (p * frequencies)[None, None].sin()
            )
            for p in (query_position, key_position)
        ]
        return (turned[0] * turned[1]).sum(-1)

    torch.testing.assert_close(product(9, 4), product(1005, 1000), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layer_type", [SLIDING, CSA])
def test_it_is_the_rotation_of_transformers(layer_type: str) -> None:
    config = tiny_config()
    x = torch.randn(2, 4, 30, 32, generator=torch.Generator().manual_seed(0))
    cos, sin = angles(config, layer_type, torch.arange(30)[None] + 1000, torch.float32)
    want = modeling.apply_rotary_pos_emb(x, cos, sin)
    torch.testing.assert_close(apply_rotary(x, cos, sin), want, rtol=0, atol=1e-6)
    want = modeling.apply_rotary_pos_emb(x, cos, -sin)
    torch.testing.assert_close(apply_rotary(x, cos, sin, inverse=True), want, rtol=0, atol=1e-6)


def test_one_angle_a_channel_is_refused() -> None:
    x, theta = make_case(0, torch.float32, 1, 2, 0, 4, shared=True)
    doubled = theta.repeat_interleave(2, dim=-1)
    with pytest.raises(LayoutError, match=r"8 angles for head_dim=8.*at most 4"):
        apply_rotary(x, doubled.cos(), doubled.sin())
