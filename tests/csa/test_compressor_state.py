"""A compressor's state: any cut of a sequence into calls gives the same entries."""

from __future__ import annotations

import deepseek_v4_reference as reference
import layer_inputs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.csa.compressor import CompressorState

DIM = 6


def _run(
    kv: torch.Tensor, gate: torch.Tensor, weights: layer_inputs.CompressorWeights, calls: list[int]
) -> tuple[CompressorState, torch.Tensor]:
    state, entries, start = CompressorState(), [], 0
    for num_tokens in calls:
        part = slice(start, start + num_tokens)
        state, new = state.advance(kv[:, part], gate[:, part], weights)
        entries.append(new)
        start += num_tokens
    return state, torch.cat(entries, 1)


def _draw(num_tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    kv, gate = torch.randn(2, 2, num_tokens, width, dtype=torch.float64)
    return kv, gate


def _without_rotation(positions: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(positions), 1)


@pytest.mark.parametrize(("ratio", "width"), [(4, 2 * DIM), (8, DIM)])
@given(calls=st.lists(st.integers(0, 11), min_size=1, max_size=12))
def test_any_cut_is_the_definition(ratio: int, width: int, calls: list[int]) -> None:
    weights = layer_inputs.weights(DIM, ratio, width, seed=3)
    kv, gate = _draw(sum(calls), width)
    state, entries = _run(kv, gate, weights, calls)
    assert state.num_entries == entries.shape[1] == sum(calls) // ratio
    for row in range(2):
        x = reference.Compressor(
            kv=kv[row],
            gate=gate[row],
            position_bias=weights.position_bias,
            norm_weight=weights.norm_weight,
            eps=weights.eps,
        )
        wanted = reference.compressed(x, _without_rotation)
        torch.testing.assert_close(entries[row], wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("ratio", "width"), [(4, 2 * DIM), (8, DIM)])
def test_a_state_is_never_written_to(ratio: int, width: int) -> None:
    weights = layer_inputs.weights(DIM, ratio, width, seed=3)
    kv, gate = _draw(40, width)
    state, _ = _run(kv, gate, weights, [13])
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    once = state.advance(kv[:, 13:], gate[:, 13:], weights)[1]
    state.advance(gate[:, 13:], kv[:, 13:], weights)
    assert torch.equal(state.advance(kv[:, 13:], gate[:, 13:], weights)[1], once)
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor, before[name])


def test_a_state_keeps_no_prompt_alive() -> None:
    weights = layer_inputs.weights(DIM, 4, 2 * DIM, seed=3)
    state, _ = _run(*_draw(403, 2 * DIM), weights, [403])
    for tensor in state.tensors().values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 8
        assert tensor.shape[1] <= 4


@pytest.mark.parametrize("num_tokens", range(10))
def test_rows_are_chosen(num_tokens: int) -> None:
    weights = layer_inputs.weights(DIM, 4, 2 * DIM, seed=3)
    kv, gate = _draw(num_tokens + 9, 2 * DIM)
    state, _ = _run(kv, gate, weights, [num_tokens])
    chosen = state.select_rows(torch.tensor([1, 1, 0]))
    assert chosen.num_entries == state.num_entries
    got = chosen.advance(kv[[1, 1, 0], num_tokens:], gate[[1, 1, 0], num_tokens:], weights)[1]
    wanted = state.advance(kv[:, num_tokens:], gate[:, num_tokens:], weights)[1][[1, 1, 0]]
    assert torch.equal(got, wanted)


def test_an_empty_state_has_rows_too() -> None:
    assert CompressorState().select_rows(torch.tensor([0])) == CompressorState()
