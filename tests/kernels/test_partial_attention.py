"""Partial attention: the definition against plain softmax, the implementations against it."""

import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from attention_case import DTYPES, NAN, Case, make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from native_ops import NATIVE_OPS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton_ops import HAS_TRITON, TRITON_OPS

from sparsekv.errors import LayoutError
from sparsekv.kernels import cpu, reference
from sparsekv.kernels.dispatch import partial_attention_for
from sparsekv.kernels.torch_ops import partial_attention

torch_ops = import_module("sparsekv.kernels.torch_ops.partial_attention")
IMPLEMENTATIONS = [pytest.param(partial_attention, id="torch"), *NATIVE_OPS, *TRITON_OPS]
ALL_OPS = [pytest.param(reference.partial_attention, id="reference"), *IMPLEMENTATIONS]

every_implementation = pytest.mark.parametrize("op", IMPLEMENTATIONS)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out unwritten holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def plain_attention(case: Case) -> tuple[Tensor, Tensor]:
    """Plain torch, in the case's own dtype: keys in order of position, one softmax.

    Keys that no query may see are left out; a key that some may see must hold numbers.
    """
    query, options = case.query, case.options
    batch, num_heads, num_queries, _ = query.shape
    group_size = num_heads // case.key.shape[2]
    size = case.num_positions
    keys = query.new_zeros(batch, case.key.shape[2], size, case.key.shape[4])
    values = query.new_zeros(batch, case.key.shape[2], size, case.value.shape[4])
    present = torch.zeros(size, dtype=torch.bool)
    for n, start in enumerate(case.positions.tolist()):
        rows = options["row_table"][n] if "row_table" in options else slice(None)
        place = slice(start, start + case.key.shape[3])
        keys[:, :, place], values[:, :, place] = case.key[n, rows], case.value[n, rows]
        present[place] = True
    visible = present.expand(batch, num_heads, num_queries, size)
    bias = query.new_zeros(())
    mask = options.get("mask")
    if mask is None:
        ends = options.get("query_start", 0) + torch.arange(num_queries)
        visible = visible & (torch.arange(size) <= ends[:, None])
    elif mask.dtype == torch.bool:
        visible = visible & mask[..., :size]
    else:
        bias = mask[..., :size].to(query.dtype)
        visible = visible & (mask[..., :size] > torch.finfo(mask.dtype).min)
    if "key_mask" in options:
        visible = visible & options["key_mask"][:, None, None, :size]
    unseen = ~visible.unflatten(1, (-1, group_size)).any(dim=3).any(dim=2)  # [B, G, S]
    keys, values = (
        t.masked_fill(unseen[..., None], 0.0).repeat_interleave(group_size, 1)
        for t in (keys, values)
    )
    scores = (query @ keys.transpose(-1, -2)) * case.scale + bias
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = torch.softmax(scores, dim=-1).masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return weights @ values, torch.logsumexp(scores, dim=-1)


def check(case: Case, op: Any = partial_attention) -> tuple[Tensor, Tensor]:
    """The op errs at most twice as much as plain torch does; returns what the op gave."""
    before = [t.clone() for t in (case.query, case.key, case.value)]
    result = case.run(op)  # before the reference, so that it cannot find its result
    truth = case.double().run(reference.partial_attention)
    plain = plain_attention(case)
    for old, new in zip(before, (case.query, case.key, case.value), strict=True):
        assert torch.equal(old.nan_to_num(), new.nan_to_num()), "an input was written to"
    for name, got, usual, true in zip(("out", "lse"), result, plain, truth, strict=True):
        assert got.dtype == (torch.float64 if case.query.dtype == torch.float64 else torch.float32)
        assert got.shape == true.shape
        finite = true.isfinite()
        assert torch.equal(got.double()[~finite], true[~finite]), name
        error = (got.double() - true)[finite].abs()
        usual_error = (usual.double() - true)[finite].abs()
        if error.numel():
            floor = 8 * torch.finfo(got.dtype).eps * max(1.0, true[finite].abs().max().item())
            assert error.max() <= 2 * usual_error.max() + floor, name
    return result


def padding(case: Case, lengths: list[int]) -> Tensor:
    """Left padding: row b sees its last lengths[b] positions."""
    size = case.num_positions
    return torch.arange(size) >= size - torch.tensor(lengths)[:, None]


# The definition


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31), num_queries=st.integers(1, 6), rows=st.sampled_from([None, 1, 5])
)
def test_the_reference_is_softmax_attention(seed: int, num_queries: int, rows: int | None) -> None:
    case = make_case(torch.float64, seed=seed, num_queries=num_queries, rows=rows)
    for got, want in zip(case.run(reference.partial_attention), plain_attention(case), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


# Implementations against it


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [1, 3, 5, 7, 8, 12])
def test_group_sizes_and_dtypes_match_the_reference(
    op: Any, dtype: torch.dtype, group_size: int
) -> None:
    check(make_case(dtype, group_size=group_size, num_queries=1), op)
    check(make_case(dtype, group_size=group_size, num_queries=7, cut=True), op)


@every_implementation
@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    workspace=st.sampled_from([1, 600, 3000, 20_000, 2**24]),
    rows=st.sampled_from([None, 1, 2, 5]),
    segments=st.integers(1, 6),
    tokens=st.integers(1, 9),
    num_queries=st.integers(1, 9),
    cut=st.booleans(),
    lengths=st.none() | st.lists(st.integers(0, 30), min_size=2, max_size=2),
    late=st.integers(-9, 3),
)
def test_blocks_tables_and_masks_do_not_change_the_result(
    op: Any,
    seed: int,
    dtype: torch.dtype,
    workspace: int,
    rows: int | None,
    segments: int,
    tokens: int,
    num_queries: int,
    cut: bool,
    lengths: list[int] | None,
    late: int,
) -> None:
    case = make_case(
        dtype,
        seed=seed,
        rows=rows,
        segments=segments,
        tokens=tokens,
        num_queries=num_queries,
        cut=cut,
    )
    case = case.given(query_start=case.options["query_start"] + late)  # also before all keys
    if lengths is not None:
        case = case.given(key_mask=padding(case, lengths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "WORKSPACE_BYTES", workspace)
        check(case, op)


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**31),
    workspace=st.sampled_from([600, 20_000, 2**24]),
    per_row=st.booleans(),
    per_head=st.booleans(),
    kind=st.sampled_from([torch.bool, *DTYPES]),
    longer=st.integers(0, 3),
    holes=st.booleans(),
)
def test_4d_masks_replace_the_causal_rule(
    seed: int,
    workspace: int,
    per_row: bool,
    per_head: bool,
    kind: torch.dtype,
    longer: int,
    holes: bool,
) -> None:
    case = make_case(seed=seed, segments=4, num_queries=5).given(query_start=3)
    random = torch.Generator().manual_seed(seed)
    shape = (2 if per_row else 1, 6 if per_head else 1, 5, case.num_positions + longer)
    mask = torch.rand(shape, generator=random) < 0.6
    if kind != torch.bool:
        hide = -torch.inf if seed % 2 else torch.finfo(kind).min
        mask = torch.randn(shape, generator=random).to(kind).masked_fill(~mask, hide)
    case = case.given(mask=mask)
    if holes:
        case = case.given(key_mask=torch.rand(2, shape[-1], generator=random) < 0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "WORKSPACE_BYTES", workspace)
        check(case)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_queries", [1, 4])
def test_shared_keys_and_values(op: Any, dtype: torch.dtype, num_queries: int) -> None:
    shape = {"num_kv_heads": 1, "group_size": 16, "head_dim": 36, "head_dim_v": 32}
    check(make_case(dtype, num_queries=num_queries, shared_kv=True, **shape), op)


@every_implementation
@pytest.mark.parametrize(("segments", "tokens"), [(1, 1), (1, 257), (17, 16), (2, 256), (300, 1)])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_few_many_and_uneven_tokens(op: Any, segments: int, tokens: int, num_queries: int) -> None:
    num_queries = min(num_queries, segments * tokens)
    check(make_case(segments=segments, tokens=tokens, num_queries=num_queries), op)


@every_implementation
def test_new_keys_in_the_order_of_a_model(op: Any) -> None:
    case = make_case(segments=1, tokens=40, num_queries=40)
    transposed = [
        t[0].transpose(1, 2).contiguous().transpose(1, 2)[None] for t in (case.key, case.value)
    ]
    check(replace(case, key=transposed[0], value=transposed[1]), op)


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("op", ALL_OPS)
def test_no_keys_give_zero_and_minus_infinity(op: Any, tokens: int) -> None:
    case = make_case(segments=3 if tokens == 0 else 0, tokens=tokens, num_queries=2)
    out, lse = case.given(query_start=0).run(op)
    assert torch.equal(out, torch.zeros(2, 6, 2, 12))
    assert torch.equal(lse, torch.full((2, 6, 2), -torch.inf))


@pytest.mark.parametrize("op", ALL_OPS)
def test_no_queries_give_no_results(op: Any) -> None:
    out, lse = make_case(num_queries=0).run(op)
    assert out.shape == (2, 6, 0, 12)
    assert lse.shape == (2, 6, 0)


@every_implementation
def test_a_query_that_sees_nothing_gives_zero_and_leaves_others_alone(op: Any) -> None:
    case = make_case(num_queries=8, segments=2, tokens=4)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    mask[..., 4:, :] = False
    out, lse = check(case.given(mask=mask), op)
    assert torch.equal(out[:, :, 4:], torch.zeros(2, 6, 4, 12))
    assert (lse[:, :, 4:] == -torch.inf).all()
    assert lse[:, :, :4].isfinite().all()


@every_implementation
def test_the_causal_rule_shows_a_query_its_own_key_and_no_later_one(op: Any) -> None:
    case = make_case(batch=1, segments=2, tokens=3, num_queries=6).given(query_start=0)
    whole, _ = case.run(op)
    for t in range(6):
        later = case.positions[:, None] + torch.arange(3) > t  # [N, W]
        key, value = (
            x.masked_fill(later[:, None, None, :, None], NAN) for x in (case.key, case.value)
        )
        one = replace(case, query=case.query[:, :, t : t + 1], key=key, value=value)
        out, _ = one.given(query_start=t).run(op)
        torch.testing.assert_close(out, whole[:, :, t : t + 1])


@every_implementation
def test_ties_share_the_weight(op: Any) -> None:
    case = make_case()
    case = replace(case, key=torch.ones_like(case.key), query=torch.ones_like(case.query))
    out, lse = check(case, op)
    values = case.value.float().mean(dim=(0, 3))  # [B, G, V]
    torch.testing.assert_close(out[:, :, 0], values.repeat_interleave(3, 1))
    assert torch.allclose(lse, torch.full_like(lse, 8 * case.scale + math.log(15)))


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_stay_finite(op: Any, dtype: torch.dtype) -> None:
    case = replace(make_case(dtype, head_dim=64, num_queries=4), scale=1 / 8)
    large = 20.0 if dtype == torch.float16 else 133120.0
    case = replace(case, key=torch.full_like(case.key, large))
    case = replace(case, query=torch.full_like(case.query, large))
    out, lse = check(case, op)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    out, _ = check(replace(case, query=-case.query), op)
    assert out.isfinite().all()


# NaN


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workspace", [3000, 2**24])
@pytest.mark.parametrize("junk", [NAN, torch.inf, -torch.inf])
@pytest.mark.parametrize("num_queries", [1, 6])
@pytest.mark.parametrize("form", ["key_mask", "bool", "lowest", "-inf"])
def test_nan_in_masked_slots_never_reaches_an_output(
    dtype: torch.dtype,
    workspace: int,
    junk: float,
    num_queries: int,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", workspace)
    clean = make_case(dtype, segments=4, num_queries=num_queries)
    seen = padding(clean, [7, 12])
    seen[1, 15] = False  # a hole
    if form == "key_mask":
        clean = clean.given(key_mask=seen)
    else:
        ends = clean.options["query_start"] + torch.arange(num_queries)
        mask = seen[:, None, None] & (torch.arange(20) <= ends[:, None])
        if form != "bool":
            hide = -torch.inf if form == "-inf" else torch.finfo(dtype).min
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hide)
        clean = clean.given(mask=mask)
    place = clean.positions[:, None] + torch.arange(5)  # [N, W]
    hidden = ~seen[:, place].transpose(0, 1)[:, :, None, :, None]  # [N, B, 1, W, 1]
    key, value = (t.masked_fill(hidden, junk) for t in (clean.key, clean.value))

    out, lse = replace(clean, key=key, value=value).run(partial_attention)
    want_out, want_lse = check(clean)
    torch.testing.assert_close(out, want_out)
    torch.testing.assert_close(lse, want_lse)


@every_implementation
@pytest.mark.parametrize("workspace", [600, 2**24])
def test_unwritten_slots_after_the_query_never_reach_an_output(
    op: Any, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", workspace)
    clean = make_case(segments=4, num_queries=6).given(query_start=4)  # sees 0..9 of 0..19
    unwritten = (clean.positions[:, None] + torch.arange(5) > 9)[:, None, None, :, None]
    key, value = (t.masked_fill(unwritten, NAN) for t in (clean.key, clean.value))
    out, lse = replace(clean, key=key, value=value).run(op)
    want_out, want_lse = check(clean, op)
    assert out.isfinite().all()
    torch.testing.assert_close(out, want_out)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("op", ALL_OPS)
@pytest.mark.parametrize("workspace", [600, 2**24])
@pytest.mark.parametrize("junk", [NAN, torch.inf])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("weight", ["some", "none"])
def test_nan_in_a_visible_value_shows_for_those_who_see_it(
    op: Any,
    workspace: int,
    junk: float,
    masked: bool,
    weight: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", workspace)
    case = make_case(segments=4, num_queries=6)  # queries at 14..19
    segment = case.positions.tolist().index(15)
    case.value[segment, 1, 0, 2, 4] = junk  # position 17, row 1, kv head 0, column 4
    if weight == "none":  # its score is so low that its weight is exactly 0
        case = replace(case, query=torch.ones_like(case.query))
        case.key[segment, 1, 0, 2] = -1e4
    if masked:
        case = case.given(key_mask=torch.ones(2, 20, dtype=torch.bool))
    out, _ = case.run(op)
    shown = torch.zeros(out.shape, dtype=torch.bool)
    shown[1, :3, 3:, 4] = True
    assert torch.equal(~out.isfinite(), shown)


@pytest.mark.parametrize("op", ALL_OPS)
@pytest.mark.parametrize("workspace", [600, 2**24])
@pytest.mark.parametrize("junk", [NAN, torch.inf])
def test_nan_in_a_visible_key_shows_for_those_who_see_it(
    op: Any, workspace: int, junk: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", workspace)
    case = make_case(segments=4, num_queries=6)
    case = replace(case, query=case.query.abs())  # an infinite score is +inf: NaN, never "empty"
    case.key[case.positions.tolist().index(15), 1, 0, 2, 4] = junk
    out, lse = case.run(op)
    shown = torch.zeros(lse.shape, dtype=torch.bool)
    shown[1, :3, 3:] = True
    assert torch.equal(out.isnan(), shown[..., None].expand_as(out))
    assert torch.equal(lse.isnan(), shown)
    assert lse[~shown].isfinite().all()


# Memory and work


class Recorder(TorchDispatchMode):
    """Which ops ran, the largest new tensor and the most new bytes alive at a time."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        tensors = (case.query, case.key, case.value, *case.options.values())
        self.given = {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, Tensor)}
        self.alive: list[weakref.ref[Tensor]] = []
        self.ops: list[str] = []
        self.largest_bytes = self.peak_bytes = self.num_scores = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ops.append(func.overloadpacket.__name__)
        if self.ops[-1] == "bmm" and args[0].shape[-1] == 64:
            self.num_scores += result.numel()
        if isinstance(result, Tensor):
            self.alive.append(weakref.ref(result))
        self.alive = [ref for ref in self.alive if ref() is not None]
        storages = {t.untyped_storage() for ref in self.alive if (t := ref()) is not None}
        new = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in self.given}
        self.largest_bytes = max([self.largest_bytes, *new.values()])
        self.peak_bytes = max(self.peak_bytes, sum(new.values()))
        return result


LARGE = {"batch": 1, "num_kv_heads": 3, "head_dim": 64, "head_dim_v": 32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("option", ["causal", "key_mask", "mask", "row_table"])
@pytest.mark.parametrize(("segments", "tokens"), [(1, 1024), (64, 16), (256, 1)])
def test_memory_stays_within_the_workspace(
    dtype: torch.dtype, option: str, segments: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = 2**18
    monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", workspace)
    rows = 1 if option == "row_table" else None
    case = make_case(dtype, rows=rows, segments=segments, tokens=tokens, num_queries=96, **LARGE)
    if option == "key_mask":
        case = case.given(key_mask=padding(case, [200]))
        case.value[0, 0, 0, 0] = NAN  # the careful path too
    if option == "mask":
        case = case.given(mask=torch.zeros(1, 9, 96, case.num_positions, dtype=dtype))
    recorder = Recorder(case)
    with recorder:
        out, lse = case.run(partial_attention)
    results = out.nbytes + lse.nbytes
    assert recorder.largest_bytes <= max(workspace, results)
    assert recorder.peak_bytes <= 4 * workspace + results


def test_float32_keys_of_a_region_are_read_where_they_lie() -> None:
    case = make_case(segments=16, tokens=256, **LARGE)
    recorder = Recorder(case)
    with recorder:
        case.run(partial_attention)
    assert recorder.largest_bytes <= case.key.nbytes // 10
    assert recorder.ops.count("bmm") == 2


def test_keys_before_the_query_need_no_mask() -> None:
    case = make_case(segments=4, tokens=16, num_queries=8, **LARGE).given(query_start=63)
    recorder = Recorder(case)
    with recorder:
        case.run(partial_attention)
    assert not {"gt", "masked_fill", "masked_fill_", "arange", "isfinite"} & set(recorder.ops)


@pytest.mark.parametrize(("segments", "tokens"), [(1, 512), (16, 32)])
def test_keys_that_no_query_sees_cost_nothing(
    segments: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", 2**18)
    case = make_case(segments=segments, tokens=tokens, num_queries=512, **LARGE)
    case = replace(case, positions=case.positions.sort().values)  # as regions have them
    recorder = Recorder(case)
    with recorder:
        case.run(partial_attention)
    assert recorder.num_scores <= 0.6 * 9 * 512 * 512


# Dispatch


def test_dispatch_answers_for_every_device_or_says_so() -> None:
    assert partial_attention_for(torch.device("cpu")) is cpu.partial_attention
    name = "sparsekv.kernels.triton" if HAS_TRITON else "sparsekv.kernels.torch_ops"
    assert partial_attention_for(torch.device("cuda")) is import_module(name).partial_attention
    with pytest.raises(LayoutError, match=r"device=meta.*runs on cpu or cuda"):
        partial_attention_for(torch.device("meta"))
