"""Sparse attention: the definition, the implementation, the split by residence, transformers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from deepseek_v4_modules import (
    CSA,
    HCA,
    RATIOS,
    SLIDING,
    angles,
    attention_layer,
    hidden_states,
    tiny_config,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsekv.attention import merge_partials
from sparsekv.errors import LayoutError
from sparsekv.kernels.reference.compressor import compress
from sparsekv.kernels.reference.rotary import apply_rotary
from sparsekv.kernels.torch_ops.indexer import lightning_indexer

reference = importlib.import_module("sparsekv.kernels.reference.sparse_attention")
torch_ops = importlib.import_module("sparsekv.kernels.torch_ops.sparse_attention")
MODULES = [pytest.param(reference, id="reference"), pytest.param(torch_ops, id="torch_ops")]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAN, INF = torch.nan, torch.inf
Partial = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out unwritten holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Case:
    query: Tensor
    entries: Tensor
    indices: Tensor
    scale: float = 0.3

    def run(self, module: Any) -> Partial:
        out, lse = module.sparse_attention(self.query, self.entries, self.indices, self.scale)
        return out, lse

    def run_gathered(self, module: Any, junk: float = NAN) -> Partial:
        """By way of entries that are collected here; absent ones hold junk."""
        is_valid = self.indices >= 0
        shape = (*self.indices.shape, self.query.shape[-1])
        gathered = self.entries.new_full(shape, junk)
        for row, token, place in is_valid.nonzero().tolist():
            gathered[row, token, place] = self.entries[row, self.indices[row, token, place]]
        out, lse = module.gathered_attention(self.query, gathered, is_valid, self.scale)
        return out, lse

    def part(self, is_here: Tensor) -> Case:
        """The same choice, but only of entries where `is_here` (batch, num_entries) is True."""
        named = self.indices >= 0
        rows = torch.arange(len(is_here))[:, None, None]
        if is_here.shape[1] == 0:
            return self
        here = named & is_here[rows, self.indices.clamp(min=0)]
        return replace(self, indices=self.indices.masked_fill(~here, -1))


def make_case(
    seed: int = 0,
    *,
    batch: int = 2,
    heads: int = 4,
    tokens: int = 3,
    entries: int = 20,
    k: int = 6,
    dim: int = 8,
    dtype: torch.dtype = torch.float64,
    absent: float = 0.2,
) -> Case:
    """Random choices in any order, some absent, anywhere in a row."""
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, tokens, dim, generator=random).to(dtype)
    stored = torch.randn(batch, entries, dim, generator=random).to(dtype)
    order = torch.rand(batch, tokens, max(entries, k), generator=random).argsort(dim=-1)[..., :k]
    is_absent = torch.rand(order.shape, generator=random) < absent
    return Case(query, stored, order.masked_fill(is_absent | (order >= entries), -1))


def by_loops(case: Case, sink: Tensor | None = None) -> Partial:
    """Token by token in float64: plain softmax over what is named, and the sink."""
    batch, heads, tokens, _ = case.query.shape
    out = torch.zeros(case.query.shape, dtype=torch.float64)
    lse = torch.full((batch, heads, tokens), -INF, dtype=torch.float64)
    for row in range(batch):
        for token in range(tokens):
            named = [i for i in case.indices[row, token].tolist() if i >= 0]
            chosen = case.entries[row, named].double()
            for head in range(heads):
                scores = chosen @ case.query[row, head, token].double() * case.scale
                extra = torch.full((1,), -INF) if sink is None else sink[head, None]
                logits = torch.cat([scores, extra.double()])
                lse[row, head, token] = torch.logsumexp(logits, 0)
                weights = torch.softmax(logits, 0).nan_to_num()[:-1]
                out[row, head, token] = weights @ chosen
    return out, lse


def assert_close(got: Partial, want: Partial, tolerance: float) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=tolerance)


# The definition, and the implementation against it


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    workspace=st.sampled_from([1, 3000, 20_000, 2**25]),
    batch=st.integers(1, 3),
    heads=st.integers(1, 5),
    tokens=st.integers(0, 5),
    entries=st.integers(0, 12),
    k=st.integers(0, 12),
)
def test_attention_is_softmax_over_the_named_entries(
    seed: int,
    dtype: torch.dtype,
    workspace: int,
    batch: int,
    heads: int,
    tokens: int,
    entries: int,
    k: int,
) -> None:
    sizes = {"batch": batch, "heads": heads, "tokens": tokens, "entries": entries, "k": k}
    case = make_case(seed, dtype=dtype, **sizes)
    before = [t.clone() for t in (case.query, case.entries)]
    want = by_loops(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "WORKSPACE_BYTES", workspace)
        results = [case.run(torch_ops), case.run_gathered(torch_ops)]
    results += [case.run(reference), case.run_gathered(reference)]
    for out, lse in results:
        assert (
            out.dtype == lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        )
        assert out.shape == case.query.shape
        assert_close((out, lse), want, 1e-13 if dtype == torch.float64 else 2e-6)
    assert torch.equal(case.query, before[0])
    assert torch.equal(case.entries, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_implementation_errs_no_more_than_plain_torch(dtype: torch.dtype) -> None:
    case = make_case(tokens=16, heads=8, entries=900, k=512, dim=64, dtype=dtype, absent=0.0)
    out, lse = case.run(torch_ops)
    want_out, want_lse = case.run(reference)
    exact = by_loops(case)
    floor = 8 * torch.finfo(out.dtype).eps
    for got, plain, true in ((out, want_out, exact[0]), (lse, want_lse, exact[1])):
        allowed = 2 * (plain.double() - true).abs().max() + floor
        assert (got.double() - true).abs().max() <= allowed


@pytest.mark.parametrize("module", MODULES)
def test_entries_may_have_any_strides(module: Any) -> None:
    case = make_case()
    wide = torch.full((2, 40, 11), NAN, dtype=torch.float64)
    wide[:, ::2, 1:9] = case.entries
    cut = replace(case, entries=wide[:, ::2, 1:9])
    assert_close(cut.run(module), by_loops(case), 1e-13)


@pytest.mark.parametrize("module", MODULES)
def test_the_order_of_the_indices_does_not_matter(module: Any) -> None:
    case = make_case(k=12)
    shuffled = replace(case, indices=case.indices.flip(-1))
    assert_close(shuffled.run(module), case.run(module), 1e-13)


@pytest.mark.parametrize("module", MODULES)
def test_large_scores_do_not_overflow(module: Any) -> None:
    case = make_case(dtype=torch.float32)
    case = replace(case, query=case.query * 1e4)
    out, lse = case.run(module)
    assert out.isfinite().all()
    assert_close((out, lse), by_loops(case), 1e-4)


# Edges


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("entries", "k"), [(0, 0), (0, 3), (5, 0), (5, 3)])
def test_a_token_that_names_nothing_gets_nothing(module: Any, entries: int, k: int) -> None:
    case = make_case(entries=entries, k=k, absent=1.1)
    case.entries.fill_(NAN)
    for out, lse in (case.run(module), case.run_gathered(module)):
        assert torch.equal(out, torch.zeros_like(case.query))
        assert (lse == -INF).all()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_entries_that_are_not_named_never_reach_a_result(module: Any, junk: float) -> None:
    case = make_case(entries=20, k=6, tokens=1)
    want = by_loops(case)
    for row in range(2):
        unnamed = sorted(set(range(20)) - set(case.indices[row, 0].tolist()))
        case.entries[row, unnamed] = junk
    assert_close(case.run(module), want, 1e-13)
    assert_close(case.run_gathered(module, junk), want, 1e-13)


@pytest.mark.parametrize("module", MODULES)
def test_nan_in_a_named_entry_shows_for_those_who_name_it(module: Any) -> None:
    case = make_case(entries=8, k=4, tokens=6)
    case = replace(case, query=case.query.abs())
    for junk in (NAN, INF):  # an infinite score is +inf: NaN, never "empty"
        case.entries[1, 5, 3] = junk
        is_named = (case.indices == 5).any(dim=-1)
        is_named[0] = False
        shown = is_named[:, None].expand(2, 4, 6)
        out, lse = case.run(module)
        assert torch.equal(lse.isnan(), shown)
        assert torch.equal(out.isnan().all(dim=-1), shown)
        assert torch.equal(out.isnan().any(dim=-1), shown)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([3, 1, 3, -1], "index 3 is twice in one row"),
        ([0, 0, -1, -1], "index 0 is twice in one row"),
        ([4, 5, 20, -1], "index 20 for 20 entries: must be from 0 to 19"),
        ([4, -2, 5, -1], "index -2 for 20 entries"),
        ([4, 2**40, 5, -1], "index 1099511627776 for 20 entries"),
    ],
)
def test_wrong_indices_are_refused(module: Any, row: list[int], message: str) -> None:
    case = make_case(k=4)
    case.indices[1, 2] = torch.tensor(row)
    with pytest.raises(LayoutError, match=message):
        case.run(module)
    with pytest.raises(LayoutError, match=r"must be torch\.int64"):
        replace(case, indices=case.indices.int()).run(module)


@pytest.mark.parametrize("module", MODULES)
def test_any_index_is_wrong_where_there_are_no_entries(module: Any) -> None:
    case = replace(make_case(entries=0, k=1), indices=torch.zeros(2, 3, 1, dtype=torch.int64))
    with pytest.raises(LayoutError, match="index 0 for 0 entries"):
        case.run(module)


# The split by residence


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**31),
    entries=st.integers(0, 24),
    k=st.integers(0, 24),
    num_parts=st.integers(1, 4),
    lonely=st.booleans(),
    sink=st.sampled_from([None, "random", INF, -INF]),
    gathered=st.booleans(),
    module=st.sampled_from([reference, torch_ops]),
)
def test_the_merge_does_not_depend_on_the_split(
    seed: int,
    entries: int,
    k: int,
    num_parts: int,
    lonely: bool,
    sink: str | float | None,
    gathered: bool,
    module: Any,
) -> None:
    case = make_case(seed, entries=entries, k=k)
    random = torch.Generator().manual_seed(seed)
    home = torch.randint(num_parts, (2, entries), generator=random)
    if lonely:  # one part holds everything, the others nothing
        home[:] = num_parts - 1
    attn_sink = None
    if sink == "random":
        attn_sink = torch.randn(4, generator=random, dtype=torch.float64)
    elif sink is not None:
        attn_sink = torch.full((4,), float(sink), dtype=torch.float64)
    pieces = [case.part(home == part) for part in range(num_parts)]
    run = Case.run_gathered if gathered else Case.run
    if entries == 0:
        pieces = [case, replace(case, indices=torch.full_like(case.indices, -1))]
    merged = merge_partials([run(piece, module) for piece in pieces], attn_sink)
    whole = merge_partials([case.run(reference)], attn_sink)
    assert_close(merged, whole, 1e-12)
    if sink == INF:
        assert (merged[0] == 0).all()
    else:
        assert_close(merged, by_loops(case, attn_sink), 1e-12)


# Memory


class Largest(TorchDispatchMode):
    """The most bytes of a tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.num_bytes = max(self.num_bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "tokens": 300, "heads": 2},  # prefill
        {"batch": 64, "tokens": 1, "heads": 16},  # decode of many sequences
        {"batch": 3, "tokens": 7, "heads": 64},
    ],
)
def test_memory_stays_within_the_workspace(
    dtype: torch.dtype, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = 2**19
    monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", workspace)
    case = make_case(entries=2000, k=64, dim=64, dtype=dtype, **sizes)
    indices = case.indices.nbytes  # sorted once, in the check
    with Largest() as largest:
        out, _ = case.run(torch_ops)
    assert largest.num_bytes <= max(workspace, out.nbytes, indices)
    gathered = case.entries[:, :64].unsqueeze(1).expand(-1, sizes["tokens"], -1, -1)
    with Largest() as largest:
        torch_ops.gathered_attention(case.query, gathered, case.indices >= 0, 0.3)
    assert largest.num_bytes <= max(workspace, out.nbytes)


# transformers' own attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layer_type", [SLIDING, CSA, HCA])
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("num_tokens", [3, 75])
@pytest.mark.parametrize("topk", [4, 100])
def test_attention_with_sink_is_that_of_transformers(
    topk: int, num_tokens: int, module: Any, layer_type: str, dtype: torch.dtype
) -> None:
    """A whole layer from the ops: ring, compressed entries split by residence, sink, rotation."""
    config = tiny_config(topk)
    layer = attention_layer(config, layer_type, dtype)
    hidden = hidden_states(config, dtype, num_tokens)
    positions = torch.arange(num_tokens)[None]
    cos, sin = angles(config, layer_type, positions, dtype)
    distance = positions.T - positions
    in_window = (distance >= 0) & (distance < config.sliding_window)
    mask = torch.zeros(2, 1, *in_window.shape, dtype=dtype).masked_fill(~in_window, -INF)
    with torch.no_grad():
        embeddings = {"main": (cos, sin), "compress": (cos, sin)}
        want, _ = layer(hidden, embeddings, positions.expand(2, -1), mask, None)

        residual = layer.q_a_norm(layer.q_a_proj(hidden))
        query = layer.q_b_norm(layer.q_b_proj(residual).view(2, num_tokens, 4, 32)).transpose(1, 2)
        query = apply_rotary(query, cos, sin)
        ring = apply_rotary(layer.kv_norm(layer.kv_proj(hidden))[:, None], cos, sin)[:, 0]
        offsets = torch.arange(config.sliding_window)
        window = (positions.T - offsets).expand(2, -1, -1)  # before the first token: no entry
        window = window.masked_fill(window < 0, -1)
        parts = [Case(query, ring, window, layer.scaling).run(module)]
        if layer_type != SLIDING:
            entries, chosen = choose(layer, hidden, residual, config, layer_type)
            case = Case(query, entries, chosen, layer.scaling)
            here = torch.arange(entries.shape[1]).expand(2, -1) % 3 == 0
            parts += [case.part(here).run(module), case.part(~here).run_gathered(module)]
            if layer_type == CSA and num_tokens == 75:
                assert (chosen >= 0).sum(-1).max() == min(topk, 18)
        out, _ = merge_partials(parts, layer.sinks)
        out = apply_rotary(out, cos, sin, inverse=True).to(dtype).transpose(1, 2)
        grouped = layer.o_a_proj(out.reshape(2, num_tokens, config.o_groups, -1))
        got = layer.o_b_proj(grouped.flatten(2))
    # transformers takes norms, rotation and the compressor's softmax in float32 in any case.
    torch.testing.assert_close(got, want, rtol=0, atol=5e-6)


def choose(
    layer: Any, hidden: Tensor, residual: Tensor, config: Any, layer_type: str
) -> tuple[Tensor, Tensor]:
    """The rotated entries of a CSA or HCA layer, and which of them each token attends to."""
    ratio, num_tokens, dtype = RATIOS[layer_type], hidden.shape[1], hidden.dtype
    num_visible = (torch.arange(num_tokens)[None] + 1) // ratio

    def rotated_entries(module: Any) -> Tensor:
        whole = hidden[:, : num_tokens // ratio * ratio]
        parts = (module.kv_proj(whole), module.gate_proj(whole), module.position_bias)
        made = compress(*parts, module.kv_norm.weight, ratio=ratio, eps=config.rms_norm_eps)
        cos, sin = angles(config, layer_type, torch.arange(0, whole.shape[1], ratio)[None], dtype)
        return apply_rotary(made[:, None], cos, sin)[:, 0].to(dtype)

    entries = rotated_entries(layer.compressor)
    if layer_type == HCA:
        every = torch.arange(entries.shape[1]).expand(2, num_tokens, -1)
        return entries, every.masked_fill(every >= num_visible[..., None], -1)
    indexer = layer.compressor.indexer
    cos, sin = angles(config, layer_type, torch.arange(num_tokens)[None], dtype)
    query = indexer.q_b_proj(residual).view(2, num_tokens, 16, 16).transpose(1, 2)
    query = apply_rotary(query, cos, sin).transpose(1, 2)
    weights = indexer.scorer.weights_proj(hidden) * indexer.scorer.weights_scaling
    keys, scale = rotated_entries(indexer), indexer.scorer.softmax_scale
    return entries, lightning_indexer(query, keys, weights, num_visible, config.index_topk, scale)
