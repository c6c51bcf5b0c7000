"""Compressors: the definition by loops, cuts into calls, and transformers' own modules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from deepseek_v4_modules import (
    CSA,
    HCA,
    RATIOS,
    angles,
    attention_layer,
    hidden_states,
    run_compressor,
    tiny_config,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsekv.errors import LayoutError
from sparsekv.kernels.reference.compressor import carried_series, compress
from sparsekv.kernels.reference.rotary import apply_rotary

EPS = 1e-6


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out unwritten holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Case:
    kv: Tensor
    gate: Tensor
    position_bias: Tensor
    norm_weight: Tensor

    @property
    def ratio(self) -> int:
        return self.position_bias.shape[0]

    def run(self, **prior: Any) -> Tensor:
        weights = (self.position_bias, self.norm_weight)
        return compress(self.kv, self.gate, *weights, ratio=self.ratio, eps=EPS, **prior)

    def windows(self, first: int, last: int) -> Case:
        tokens = slice(first * self.ratio, last * self.ratio)
        return replace(self, kv=self.kv[:, tokens], gate=self.gate[:, tokens])

    def carried(self) -> dict[str, Tensor]:
        kv, gate = carried_series(self.kv, self.gate, self.position_bias)
        return {"prior_kv": kv, "prior_gate": gate}


def make_case(
    num_windows: int,
    ratio: int = 4,
    *,
    overlap: bool,
    seed: int = 0,
    batch: int = 2,
    dim: int = 6,
    dtype: torch.dtype = torch.float64,
) -> Case:
    random = torch.Generator().manual_seed(seed)
    width = 2 * dim if overlap else dim
    shapes = [(batch, num_windows * ratio, width)] * 2 + [(ratio, width)]
    kv, gate, bias = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
    weight = 1 + 0.1 * torch.randn(dim, generator=random).to(dtype)
    return Case(kv, 3 * gate, bias, weight)


def by_loops(case: Case) -> Tensor:
    """Entry by entry and channel by channel in float64, as the equations say."""
    dim, ratio = case.norm_weight.shape[0], case.ratio
    overlap = case.kv.shape[2] == 2 * dim
    kv, gate = case.kv.double(), case.gate.double()
    bias = case.position_bias.double().repeat(kv.shape[1] // ratio, 1)
    entries = torch.zeros(len(kv), kv.shape[1] // ratio, dim, dtype=torch.float64)
    for row in range(len(kv)):
        for i in range(entries.shape[1]):
            for channel in range(dim):
                own = channel + dim if overlap else channel
                slots = [(t, own) for t in range(i * ratio, (i + 1) * ratio)]
                if overlap and i:
                    slots += [(t, channel) for t in range((i - 1) * ratio, i * ratio)]
                exps = [torch.exp(gate[row, t, c] + bias[t, c]) for t, c in slots]
                terms = [e * kv[row, t, c] for e, (t, c) in zip(exps, slots, strict=True)]
                entries[row, i, channel] = sum(terms) / sum(exps)
            square = entries[row, i].square().mean()
            entries[row, i] *= case.norm_weight.double() / torch.sqrt(square + EPS)
    return entries


# The definition


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("num_windows", "ratio"), [(0, 4), (1, 4), (5, 4), (1, 128), (2, 128)])
def test_entries_are_the_softmax_of_their_windows(
    overlap: bool, num_windows: int, ratio: int
) -> None:
    case = make_case(num_windows, ratio, overlap=overlap)
    got = case.run()
    assert got.shape == (2, num_windows, 6)
    torch.testing.assert_close(got, by_loops(case), rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    num_windows=st.integers(0, 4),
    ratio=st.integers(1, 5),
    overlap=st.booleans(),
    batch=st.integers(1, 3),
    dim=st.integers(1, 4),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_sizes_and_dtypes(
    seed: int,
    num_windows: int,
    ratio: int,
    overlap: bool,
    batch: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    case = make_case(
        num_windows, ratio, overlap=overlap, seed=seed, batch=batch, dim=dim, dtype=dtype
    )
    before = (case.kv.clone(), case.gate.clone())
    got = case.run()
    exact = dtype == torch.float64
    assert got.dtype == (torch.float64 if exact else torch.float32)
    tolerance = 1e-11 if exact else 3e-4  # a pooled value near 0 loses digits, then is scaled up
    torch.testing.assert_close(got.double(), by_loops(case), rtol=tolerance, atol=tolerance)
    assert torch.equal(case.kv, before[0])
    assert torch.equal(case.gate, before[1])


def test_large_gates_do_not_overflow() -> None:
    case = make_case(3, overlap=True, dtype=torch.float32)
    case = replace(case, gate=case.gate + 1000.0)
    assert case.run().isfinite().all()


def test_a_nan_reaches_its_own_entry_and_by_series_a_the_next() -> None:
    for channel, hit in ((2, 3), (8, 2)):  # series a of window 2 is read by entry 3, b by entry 2
        case = make_case(5, overlap=True)
        case.kv[1, 9, channel] = torch.nan
        is_nan = case.run().isnan().any(dim=-1)
        assert is_nan.nonzero().tolist() == [[1, hit]]
    case = make_case(5, overlap=False)
    case.kv[1, 9, 2] = torch.nan
    assert case.run().isnan().any(dim=-1).nonzero().tolist() == [[1, 2]]


# From call to call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("split", range(7))
def test_two_calls_give_the_entries_of_one(split: int, dtype: torch.dtype) -> None:
    case = make_case(6, overlap=True, dtype=dtype)
    head, tail = case.windows(0, split), case.windows(split, 6)
    prior = head.carried() if split else {}
    assert torch.equal(torch.cat([head.run(), tail.run(**prior)], dim=1), case.run())


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), cuts=st.lists(st.integers(0, 7), max_size=7))
def test_any_cut_gives_the_same_entries(seed: int, cuts: list[int]) -> None:
    case = make_case(7, overlap=True, seed=seed)
    bounds = [0, *sorted(cuts), 7]
    prior: dict[str, Tensor] = {}
    entries = []
    for first, last in itertools.pairwise(bounds):
        part = case.windows(first, last)
        entries.append(part.run(**prior))
        prior = part.carried() if last > first else prior
    assert torch.equal(torch.cat(entries, dim=1), case.run())


def test_what_is_carried_keeps_no_larger_tensor_alive() -> None:
    case = make_case(6, overlap=True, dtype=torch.float32)
    kv, gate = carried_series(case.kv, case.gate, case.position_bias)
    assert torch.equal(kv, case.kv[:, -4:, :6])
    assert torch.equal(gate, case.gate[:, -4:, :6] + case.position_bias[:, :6])
    assert kv.untyped_storage().nbytes() == kv.nbytes
    assert gate.untyped_storage().nbytes() == gate.nbytes


def test_an_entry_needs_series_a_of_the_window_before() -> None:
    case = make_case(2, overlap=True)
    alone = case.windows(1, 2).run()
    assert not torch.allclose(alone, case.run()[:, 1:])


# transformers' own compressors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layer_type", [CSA, HCA])
@pytest.mark.parametrize("calls", [[75], [3, 1, 1, 40, 5, 25], [1] * 37, [16, 16, 16]])
def test_entries_are_those_of_transformers(
    layer_type: str, calls: list[int], dtype: torch.dtype
) -> None:
    config, ratio = tiny_config(), RATIOS[layer_type]
    layer = attention_layer(config, layer_type, dtype)
    hidden = hidden_states(config, dtype, sum(calls))
    with torch.no_grad():
        want = run_compressor(config, layer, hidden, calls)
        module = layer.compressor
        whole = hidden[:, : hidden.shape[1] // ratio * ratio]
        weights = (module.position_bias, module.kv_norm.weight)
        kv, gate = module.kv_proj(whole), module.gate_proj(whole)
        entries = compress(kv, gate, *weights, ratio=ratio, eps=config.rms_norm_eps)
    positions = torch.arange(0, whole.shape[1], ratio)[None]
    cos, sin = angles(config, layer_type, positions, dtype)
    got = apply_rotary(entries[:, None], cos, sin)[:, 0]
    assert got.shape == want.shape
    # transformers takes softmax, norm and rotation in float32 whatever its input is.
    torch.testing.assert_close(got, want, rtol=0, atol=5e-6)


# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": torch.zeros(2, 8, 6)}, "does not fit kv"),
        ({"position_bias": torch.zeros(4, 6)}, r"must be \(ratio, width of kv\) = \(4, 12\)"),
        ({"norm_weight": torch.ones(5)}, "5 wide, or 10 with overlap"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str) -> None:
    case = replace(make_case(2, overlap=True, dtype=torch.float32), **change)
    with pytest.raises(LayoutError, match=message):
        case.run()


def test_tokens_beyond_whole_windows_are_refused() -> None:
    case = make_case(2, overlap=True)
    with pytest.raises(LayoutError, match=r"7 tokens: must be whole windows.*last 3 for the next"):
        replace(case, kv=case.kv[:, :7], gate=case.gate[:, :7]).run()


def test_a_prior_that_does_not_fit_is_refused() -> None:
    case = make_case(2, overlap=True)
    prior = case.carried()
    with pytest.raises(LayoutError, match="pass both or neither"):
        case.run(prior_kv=prior["prior_kv"])
    with pytest.raises(LayoutError, match=r"prior_gate \(1, 4, 6\): must be .* = \(2, 4, 6\)"):
        case.run(prior_kv=prior["prior_kv"], prior_gate=prior["prior_gate"][:1])
    with pytest.raises(LayoutError, match="without overlap"):
        make_case(2, overlap=False).run(**prior)
    with pytest.raises(LayoutError, match="carry on what was carried before"):
        case.windows(0, 0).carried()
