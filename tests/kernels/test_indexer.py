"""The lightning indexer: scores, the rule of choice, bounded memory, transformers' own choices."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepseek_v4_modules import CSA, angles, attention_layer, hidden_states, modeling, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsekv.errors import LayoutError
from sparsekv.kernels.reference.compressor import compress
from sparsekv.kernels.reference.indexer import index_scores, select_entries
from sparsekv.kernels.reference.indexer import lightning_indexer as reference_indexer
from sparsekv.kernels.reference.rotary import apply_rotary
from sparsekv.kernels.torch_ops.indexer import lightning_indexer

torch_ops = importlib.import_module("sparsekv.kernels.torch_ops.indexer")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out unwritten holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make_case(
    seed: int = 0,
    *,
    batch: int = 2,
    tokens: int = 3,
    heads: int = 16,
    entries: int = 40,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
    small_integers: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys, weights. Small integers: scores are exact however they are summed, and tie."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(batch, tokens, heads, dim), (batch, entries, dim), (batch, tokens, heads)]
    if small_integers:
        query, keys, weights = (torch.randint(-1, 2, s, generator=random).to(dtype) for s in shapes)
    else:
        query, keys, weights = (torch.randn(s, generator=random).to(dtype) for s in shapes)
    return query, keys, weights


def by_rule(scores: Tensor, num_visible: Tensor, topk: int) -> Tensor:
    """Python's own sort, by (higher score, lower index), row by row."""
    batch, tokens, entries = scores.shape
    chosen = torch.full((batch, tokens, min(topk, entries)), -1)
    for row in range(batch):
        for token in range(tokens):
            visible = int(num_visible[row % len(num_visible), token])
            values = [-INF if math.isnan(s) else s for s in scores[row, token].tolist()]
            order = sorted(range(min(max(visible, 0), entries)), key=lambda i: (-values[i], i))
            best = sorted(order[:topk])
            chosen[row, token, : len(best)] = torch.tensor(best, dtype=torch.int64)
    return chosen


# Scores


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_weighted_sums_of_positive_products(dtype: torch.dtype) -> None:
    query, keys, weights = make_case(dtype=dtype, entries=7)
    got = index_scores(query, keys, weights, 0.3)
    want = torch.zeros(2, 3, 7, dtype=torch.float64)
    for head in range(16):
        products = (query[:, :, None, head].double() * keys[:, None].double()).sum(-1)
        want += weights[:, :, head, None].double() * products.clamp(min=0) * 0.3
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    assert (weights < 0).any()


# The rule of choice


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    entries=st.integers(0, 30),
    topk=st.integers(1, 35),
    shared=st.booleans(),
    values=st.sampled_from([[0.0, 1.0], [0.0, -0.0], [NAN, 1.0, -INF], [INF, NAN, 2.0, -INF, 0.5]]),
)
def test_select_entries_follows_the_rule(
    seed: int, entries: int, topk: int, shared: bool, values: list[float]
) -> None:
    random = torch.Generator().manual_seed(seed)
    scores = torch.tensor(values)[torch.randint(len(values), (2, 4, entries), generator=random)]
    num_visible = torch.randint(-1, entries + 3, (1 if shared else 2, 4), generator=random)
    got = select_entries(scores, num_visible, topk)
    assert torch.equal(got, by_rule(scores, num_visible, topk))


def test_nan_and_minus_infinity_fill_up_but_never_win() -> None:
    scores = torch.tensor([[[NAN, -3.0, -INF, NAN, 5.0, 9.0]]])
    visible = torch.tensor([[5]])
    assert select_entries(scores, visible, 2).tolist() == [[[1, 4]]]
    assert select_entries(scores, visible, 3).tolist() == [[[0, 1, 4]]]
    assert select_entries(scores, visible, 9).tolist() == [[[0, 1, 2, 3, 4, -1]]]


@pytest.mark.parametrize("visible", [0, 1, 3, 4, 5, 40, 1000])
def test_up_to_topk_all_visible_entries_are_chosen(visible: int) -> None:
    query, keys, weights = make_case()
    num_visible = torch.full((1, 3), visible)
    for op in (reference_indexer, lightning_indexer):
        got = op(query, keys, weights, num_visible, 4, 0.3)
        if visible <= 4:
            assert (got == torch.tensor([*range(visible), *[-1] * (4 - visible)])).all()
        else:
            assert (got >= 0).all()
            assert (got < visible).all()
            assert (got.diff() > 0).all()


# The implementation in bounded memory


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    workspace=st.sampled_from([1, 3000, 20_000, 2**25]),
    worth=st.sampled_from([1, 8, 4096]),
    batch=st.integers(1, 3),
    tokens=st.integers(0, 6),
    heads=st.integers(1, 3),
    entries=st.integers(0, 60),
    topk=st.integers(1, 70),
    shared=st.booleans(),
)
def test_blocks_choose_what_the_definition_chooses(
    seed: int,
    dtype: torch.dtype,
    workspace: int,
    worth: int,
    batch: int,
    tokens: int,
    heads: int,
    entries: int,
    topk: int,
    shared: bool,
) -> None:
    sizes = {"batch": batch, "tokens": tokens, "heads": heads, "entries": entries}
    case = make_case(seed, dtype=dtype, small_integers=True, **sizes)
    random = torch.Generator().manual_seed(seed)
    shape = (1 if shared else batch, tokens)
    num_visible = torch.randint(-1, entries + 3, shape, generator=random)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "WORKSPACE_BYTES", workspace)
        patch.setattr(torch_ops, "_ENTRIES_WORTH_A_PRODUCT", worth)
        got = lightning_indexer(*case, num_visible, topk, 0.25)
    want = reference_indexer(*case, num_visible, topk, 0.25)
    assert got.dtype == torch.int64
    assert torch.equal(got, want)
    assert torch.equal(want, by_rule(index_scores(*case, 0.25), num_visible, topk))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    values=st.sampled_from([[0.0, -0.0], [NAN, 1.0, -INF], [INF, NAN, 2.0, -INF, 0.5]]),
    topk=st.integers(1, 30),
)
def test_special_scores_are_ranked_alike_in_blocks(
    seed: int, values: list[float], topk: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    scores = torch.tensor(values)[torch.randint(len(values), (2, 4, 25), generator=random)]
    num_visible = torch.randint(0, 27, (2, 4), generator=random)
    best = torch_ops._RunningTopK(num_visible, min(topk, 25))
    for first, last in ((0, 3), (3, 4), (4, 20), (20, 25)):
        best.add(scores[..., first:last], first)
    assert torch.equal(best.indices, by_rule(scores, num_visible, topk))


@pytest.mark.parametrize("workspace", [2**14, 2**25])
@pytest.mark.parametrize("topk", [512, 1024])
def test_thousands_of_exact_ties_fall_to_the_lowest_indices(
    topk: int, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", workspace)
    query, keys, weights = make_case(batch=1, heads=2, entries=5000)
    weights = weights.abs()
    keys[:] = 0.0  # every score is 0
    keys[0, [7, 4000, 4999]] = query[0, 0, 0]  # but these, for the first token
    num_visible = torch.tensor([[5000, 5000, 3]])
    got = lightning_indexer(query, keys, weights, num_visible, topk, 1.0)
    positive = index_scores(query, keys, weights, 1.0)[0, 1, 7] > 0
    assert got[0, 0].tolist() == [*range(topk - 2), 4000, 4999]
    assert got[0, 1].tolist() == ([*range(topk - 2), 4000, 4999] if positive else [*range(topk)])
    assert got[0, 2].tolist() == [0, 1, 2, *[-1] * (topk - 3)]
    assert torch.equal(got, reference_indexer(query, keys, weights, num_visible, topk, 1.0))


@pytest.mark.parametrize("workspace", [2**18, 2**25])
def test_random_scores_choose_the_same_entries(
    workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", workspace)
    query, keys, weights = make_case(tokens=16, heads=64, entries=3000, dim=32)
    num_visible = torch.arange(16)[None] * 200
    scores = index_scores(query.double(), keys.double(), weights.double(), 0.2)
    got = lightning_indexer(query, keys, weights, num_visible, 128, 0.2)
    want = select_entries(scores, num_visible, 128)
    assert torch.equal(got, want)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made, but for tensors of one shape."""

    def __init__(self, result_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.result_shape = result_shape
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        made = result if isinstance(result, (tuple, list)) else (result,)
        for tensor in made:
            is_new = tensor.untyped_storage().data_ptr() not in given
            if is_new and tuple(tensor.shape) != self.result_shape:
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "tokens": 200, "heads": 16, "entries": 2000},  # prefill
        {"batch": 1, "tokens": 1, "heads": 64, "entries": 20_000},  # decode
        {"batch": 16, "tokens": 1, "heads": 16, "entries": 2000},  # of many sequences
        {"batch": 1, "tokens": 500, "heads": 1, "entries": 1000},  # few heads: indices weigh more
        {"batch": 1, "tokens": 7, "heads": 1, "entries": 20_000},
        {"batch": 1, "tokens": 3000, "heads": 4, "entries": 3, "dim": 64},  # hardly any entries
    ],
)
def test_memory_stays_within_the_workspace(
    dtype: torch.dtype, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = 2**18
    monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", workspace)
    case = make_case(dtype=dtype, **sizes)
    num_visible = torch.full((1, sizes["tokens"]), sizes["entries"])
    result_shape = (sizes["batch"], sizes["tokens"], min(64, sizes["entries"]))
    with Largest(result_shape) as largest:
        lightning_indexer(*case, num_visible, 64, 0.3)
    assert largest.num_bytes <= workspace


# transformers' own indexer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_tokens", [3, 4, 75])
@pytest.mark.parametrize("topk", [4, 100])
def test_choices_are_those_of_transformers(topk: int, num_tokens: int, dtype: torch.dtype) -> None:
    config = tiny_config(topk)
    layer = attention_layer(config, CSA, dtype)
    module = layer.compressor.indexer
    hidden = hidden_states(config, dtype, num_tokens)
    positions = torch.arange(num_tokens)[None].expand(2, -1)
    with torch.no_grad():
        residual = layer.q_a_norm(layer.q_a_proj(hidden))
        want = module(hidden, residual, positions, None, 1)
        whole = hidden[:, : num_tokens // 4 * 4]
        parts = (module.kv_proj(whole), module.gate_proj(whole), module.position_bias)
        keys = compress(*parts, module.kv_norm.weight, ratio=4, eps=config.rms_norm_eps)
        cos, sin = angles(config, CSA, torch.arange(num_tokens)[None], dtype)
        keys = apply_rotary(keys[:, None], cos[:, :-3:4], sin[:, :-3:4])[:, 0].to(dtype)
        query = module.q_b_proj(residual).view(2, num_tokens, 16, 16).transpose(1, 2)
        query = apply_rotary(query, cos, sin).transpose(1, 2)
        weights = module.scorer.weights_proj(hidden) * module.scorer.weights_scaling
    num_visible = (positions[:1] + 1) // 4
    case = (query, keys, weights, num_visible, topk, module.scorer.softmax_scale)
    got = lightning_indexer(*case)
    assert torch.equal(got, reference_indexer(*case))
    absent = keys.shape[1]
    want = want.masked_fill(want < 0, absent).sort(dim=-1).values
    assert torch.equal(got, want.masked_fill(want == absent, -1))
    if num_tokens == 75 and topk == 4:
        assert not torch.equal(got[0], got[1])
        assert modeling.DeepseekV4Indexer is type(module)


@pytest.mark.parametrize("op", [reference_indexer, lightning_indexer])
def test_choosing_nothing_is_refused(op: Any) -> None:
    with pytest.raises(LayoutError, match="topk=0: must be at least 1"):
        op(*make_case(), torch.full((1, 3), 40), 0, 0.3)
