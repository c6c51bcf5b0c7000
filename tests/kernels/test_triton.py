"""The ops in Triton: interpreted where there is no GPU, and for real where there is one.

The laws of partial attention are in test_partial_attention and test_visible_keys; here are those
of what the other implementations lack, and a few quick calls of what they share.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_case import NAN, Case, make_case
from torch import Tensor
from triton_ops import InterpretedOp, needs_cuda, needs_triton, on_cuda, registered

from sparsekv import merge_partials
from sparsekv.errors import LayoutError
from sparsekv.kernels import dispatch, reference
from sparsekv.kernels.block_lists import BlockLists

pytestmark = needs_triton

attend = InterpretedOp()
merge = InterpretedOp("merge_partials")
append = InterpretedOp("append")
room_for = InterpretedOp("workspace_numel")

HALF = torch.float16  # the interpreter has no bfloat16


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out unwritten holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def tensors_of(case: Case) -> tuple[Any, ...]:
    return case.query, case.key, case.value, case.positions, case.scale


def assert_close(got: tuple[Tensor, Tensor], case: Case, tolerance: float | None = None) -> None:
    """Out and lse are those of the reference in float64, but for the rounding of the dtype."""
    truth = case.double().run(reference.partial_attention)
    if tolerance is None:
        tolerance = 2e-6 if case.query.dtype == torch.float32 else 2e-3
    for one, true in zip(got, truth, strict=True):
        torch.testing.assert_close(one.double(), true, rtol=tolerance, atol=tolerance)


# Partial attention


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 64, "head_dim_v": 64, "group_size": 5},
        {"head_dim": 80, "head_dim_v": 96, "tokens": 70, "segments": 1, "num_queries": 3},
        {"head_dim": 192, "head_dim_v": 128, "group_size": 1, "rows": 3, "tokens": 32},
        {"head_dim": 40, "head_dim_v": 32, "shared_kv": True, "num_kv_heads": 1, "group_size": 20},
        {"head_dim": 48, "head_dim_v": 48, "shared_kv": True, "num_queries": 2, "cut": True},
    ],
    ids=str,
)
def test_shapes_match_the_reference(dtype: torch.dtype, shape: dict[str, Any]) -> None:
    case = make_case(dtype, batch=1 if "rows" not in shape else 2, **shape)
    assert_close(case.run(attend), case)


@pytest.mark.parametrize("num_queries", [1, 4])
@pytest.mark.parametrize("shared_kv", [False, True])
def test_a_few_queries_keep_the_precision_of_float32(num_queries: int, shared_kv: bool) -> None:
    case = make_case(HALF, tokens=16, num_queries=num_queries, head_dim=16, shared_kv=shared_kv)
    assert_close(case.run(attend), case, 5e-6)


def test_long_rows_are_split_and_merged() -> None:
    case = make_case(HALF, batch=1, num_kv_heads=1, segments=9, tokens=64, head_dim=16)
    assert room_for(case.query, case.key, case.value) > 0
    assert_close(case.run(attend), case)


def test_lists_of_blocks_and_what_they_hide() -> None:
    case = make_case(HALF, batch=2, num_kv_heads=2, segments=4, tokens=64, head_dim=16)
    for block_size in (64, 8, 1, 100):
        existing = -(-256 // block_size)
        indices = torch.stack([torch.randperm(existing) for _ in range(4)]).view(2, 2, -1)
        num_blocks = torch.tensor([[existing, 0], [1, existing // 2]])
        blocks = BlockLists(indices=indices, num_blocks=num_blocks, block_size=block_size)
        listed = case.given(blocks=blocks)
        assert_close(listed.run(attend), listed)


def test_blocks_that_do_not_exist_are_left_out() -> None:
    case = make_case(segments=4, tokens=16)
    wrong = torch.tensor([-1, 16, 2**62, -(2**63), 3])
    blocks = BlockLists(
        indices=wrong.expand(2, 2, 5).contiguous(),
        num_blocks=torch.tensor([[5, 99], [-3, 2**62]]),
        block_size=4,
    )
    right = BlockLists(
        indices=torch.full((2, 2, 1), 3), num_blocks=torch.tensor([[1, 1], [0, 1]]), block_size=4
    )
    case = replace(case, key=case.key.clone(), value=case.value.clone())
    got = case.given(blocks=blocks).run(attend)
    assert_close(got, case.given(blocks=right))


@pytest.mark.parametrize("num_queries", [1, 4])
def test_nan_shows_for_those_who_see_it_and_for_no_one_else(num_queries: int) -> None:
    case = make_case(segments=4, num_queries=num_queries)  # the queries end at position 19
    case.value[case.positions.tolist().index(15), 1, 0, 2, 4] = NAN  # position 17
    out, lse = case.run(attend)
    shown = torch.zeros(out.shape, dtype=torch.bool)
    shown[1, :3, max(0, num_queries - 3) :, 4] = True
    assert torch.equal(out.isnan(), shown)
    assert lse.isfinite().all()
    seen = torch.arange(20).expand(2, 20) != 17
    assert case.given(key_mask=seen).run(attend)[0].isfinite().all()


def test_keys_that_are_carried_count() -> None:
    """Chunk after chunk into the same out and lse is attention to all of them."""
    case = make_case(segments=6, num_queries=3)
    out, lse = torch.zeros(2, 6, 3, 12), torch.full((2, 6, 3), -torch.inf)
    for first in (0, 2, 5):
        chunk = slice(first, {0: 2, 2: 5, 5: 6}[first])
        part = replace(
            case,
            key=case.key[chunk],
            value=case.value[chunk],
            positions=case.positions[chunk].clone(),
        )
        part.run(lambda *t, **o: attend(*t, **o, out=out, lse=lse, is_carried=True))
    assert_close((out, lse), case)


def test_splits_carry_too_and_keep_to_their_room() -> None:
    case = make_case(HALF, batch=1, num_kv_heads=1, segments=8, tokens=64, head_dim=16)
    out, lse = (
        torch.full((1, 3, 1, 12), NAN),
        torch.full((1, 3, 1), torch.inf),
    )  # empty, as some say
    room = room_for(case.query, case.key, case.value)
    workspace = torch.full((room + 7,), -3.0)
    given = {"out": out, "lse": lse, "workspace": workspace[:room], "is_carried": True}
    for chunk in (slice(0, 3), slice(3, 8)):  # the second in two splits
        part = (case.key[chunk], case.value[chunk], case.positions[chunk].clone(), case.scale)
        attend(case.query, *part, **given, query_start=case.options["query_start"])
    assert_close((out, lse), case)
    assert (workspace[room:] == -3.0).all()
    with pytest.raises(LayoutError, match=r"workspace of 5 numbers: this call takes \d+"):
        attend(*tensors_of(case), workspace=workspace[:5], **case.options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.empty(2, 6, 1, 11)}, r"out is \(2, 6, 1, 11\)"),
        ({"lse": torch.empty(2, 6, 1, dtype=HALF)}, "lse is .*float16"),
        ({"is_carried": True}, "is_carried without out and lse"),
        ({"key_start": torch.zeros(3, dtype=torch.int64)}, "key_start"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"row_table": torch.zeros(2, 2, dtype=torch.int64)}, "row_table"),
        ({"mask": torch.ones(1, 1, 1, 15), "out": torch.empty(2, 6, 1, 12)}, "with a mask"),
    ],
    ids=lambda part: "+".join(part) if isinstance(part, dict) else part,
)
def test_calls_that_break_a_rule_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make_case().given(**change).run(attend)


def test_dtypes_that_differ_are_refused() -> None:
    case = make_case()
    with pytest.raises(LayoutError, match=r"query is torch.float32, key torch.float16"):
        replace(case, key=case.key.half()).run(attend)


# Merge


def random_parts(count: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(2, 3, 4, 20).to(dtype), 5 * torch.randn(2, 3, 4)) for _ in range(count)]


def assert_merges(op: Callable[..., Any], parts: list[Any], sink: Tensor | None = None) -> None:
    given = [(o.clone(), x.clone()) for o, x in parts]
    got = op(parts, sink)
    for part, before in zip(parts, given, strict=True):
        for now, then in zip(part, before, strict=True):
            assert torch.equal(now.nan_to_num(), then.nan_to_num())
    want = reference.merge_partials(given, sink)
    dtype = parts[0][0].dtype
    tolerance = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps  # rounded once
    for one, true in zip(got, want, strict=True):
        assert one.dtype == true.dtype
        one, true = one.float(), true.float()
        torch.testing.assert_close(one, true, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("count", [1, 2, 5, 8, 11])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_merges_match_the_reference(count: int, dtype: torch.dtype) -> None:
    assert_merges(merge, random_parts(count, dtype))
    assert_merges(merge, random_parts(count, dtype), torch.randn(3))


def corner_parts() -> list[tuple[Tensor, Tensor]]:
    """Rows that are empty in one part or in all, or NaN; large lse; out of empties holds NaN."""
    parts = random_parts(3)
    (_, a), (_, b), (_, c) = parts
    a[0], b[0, 0], c[0, 0] = -torch.inf, torch.inf, -torch.inf
    a[1, 0], b[1, 0] = 1e30, -1e30
    a[1, 1, 1] = NAN
    for out, lse in parts:
        out.masked_fill_(lse.isinf()[..., None], NAN)
    return parts


@pytest.mark.parametrize("sink", [None, 0.5, -math.inf, math.inf, NAN])
def test_empties_and_infinities_merge_as_the_reference_says(sink: float | None) -> None:
    assert_merges(merge, corner_parts(), None if sink is None else torch.tensor([sink, 1.0, sink]))


def test_a_merge_in_place_is_the_merge() -> None:
    parts = random_parts(2)
    want = reference.merge_partials(parts)
    out, lse = parts[0]
    merge(parts, out=out, lse=lse)
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(lse, want[1])


@pytest.mark.parametrize("count", [2, 20])
def test_parts_end_to_end_are_merged_with_one(count: int) -> None:
    parts = corner_parts() + random_parts(count)
    want = reference.merge_partials(parts)
    out, lse = parts[0]
    outs, lses = zip(*parts[1:], strict=True)
    others = torch.stack(outs), torch.stack(lses)
    InterpretedOp("PreparedMerge")([(out, lse)], out=out, lse=lse, others=others)
    torch.testing.assert_close(out, want[0], equal_nan=True)
    torch.testing.assert_close(lse, want[1], equal_nan=True)


# Append


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("stored", [torch.float32, HALF, None])
def test_append_writes_the_new_tokens_and_nothing_else(
    num_tokens: int, is_shared: bool, stored: torch.dtype | None
) -> None:
    key, value = torch.randn(2, num_tokens, 3, 20).half().transpose(1, 2), torch.randn(2, 3, 5, 24)
    value = value.half()[:, :, :num_tokens]
    query = torch.randn(2, 6, num_tokens, 20).half()
    window = torch.full(
        (2, 3, 16 * 44), NAN, dtype=HALF
    )  # keys, then values, as a segment has them
    window_key = window[..., : 16 * 20].unflatten(-1, (16, 20))
    window_value = window[..., 16 * 20 :].unflatten(-1, (16, 24))
    kept = torch.full((2, 6, num_tokens + 1, 20), NAN, dtype=stored or HALF)
    sources = (key, None) if is_shared else (key, value)
    results = []
    for op in (append, reference.append):
        w, q = window.clone(), kept.clone()
        targets = (w.as_strided(window_key.shape, window_key.stride()), None)
        if not is_shared:
            place = (window_value.shape, window_value.stride(), 16 * 20)
            targets = (targets[0], w.as_strided(*place))
        options = {"query": query, "stored_query": q[:, :, 1:]} if stored else {}
        op(*sources, *targets, 9, **options)
        results.append((w, q))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got.nan_to_num(777.0), want.nan_to_num(777.0))


def test_an_append_that_does_not_fit_is_refused() -> None:
    key, window = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 4, 8)
    with pytest.raises(LayoutError, match="3 tokens of key from offset 2 on, into 4: must fit"):
        append(key, None, window, None, 2)
    with pytest.raises(LayoutError, match="given together"):
        append(key, key, window, None, 0)
    with pytest.raises(LayoutError, match="must agree"):
        append(key, None, window[..., :7], None, 0)


# Dispatch


def test_without_triton_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("sparsekv.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delattr("sparsekv.kernels.triton", raising=False)
    dispatch._triton_ops.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                op = dispatch.partial_attention_for(torch.device("cuda"))
                assert op.__module__ == "sparsekv.kernels.torch_ops.partial_attention"
                merge_op = dispatch.merge_partials_for(torch.device("cuda"))
                assert merge_op is reference.merge_partials
        assert len(caplog.records) == 1
        assert "pip install triton" in caplog.text
    finally:
        dispatch._triton_ops.cache_clear()


# On a GPU, at real sizes


REAL = {
    "qwen3": {"num_kv_heads": 4, "group_size": 8, "head_dim": 128, "head_dim_v": 128},
    "mixtral": {"num_kv_heads": 8, "group_size": 4, "head_dim": 128, "head_dim_v": 128},
    "mla": {"num_kv_heads": 1, "group_size": 16, "head_dim": 576, "head_dim_v": 512},
    "mla 128": {"num_kv_heads": 1, "group_size": 128, "head_dim": 576, "head_dim_v": 512},
    "v4": {"num_kv_heads": 1, "group_size": 64, "head_dim": 512, "head_dim_v": 512},
    "wide": {"num_kv_heads": 2, "group_size": 3, "head_dim": 256, "head_dim_v": 256},
}


def real_case(name: str, dtype: torch.dtype, **changes: Any) -> Case:
    shape = {"segments": 9, "tokens": 256, "batch": 2} | REAL[name] | changes
    case = make_case(dtype, shared_kv=REAL[name]["head_dim"] >= 512, **shape)
    return replace(case, scale=shape["head_dim"] ** -0.5)


def check_on_cuda(case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    """The kernel's error is at most twice that of torch's own ops in the same dtype."""
    from sparsekv.kernels import triton as ops

    moved: dict[int, Tensor] = {}
    key, value = on_cuda(case.key, moved), on_cuda(case.value, moved)
    query = case.query.cuda()
    got = ops.partial_attention(
        query, key, value, case.positions, case.scale, **case.options, **options
    )
    truth = Case(query.double(), key.double(), value.double(), case.positions, case.scale)
    out, lse = replace(truth, options=case.options).run(reference_on_cuda)
    usual, usual_lse = replace(case, query=query, key=key, value=value).run(plain_on_cuda)
    for one, plain, true in ((got[0], usual, out), (got[1], usual_lse, lse)):
        floor = 8 * torch.finfo(torch.float32).eps * max(1.0, true.abs().max().item())
        bound = 2 * (plain.double() - true).abs().max() + floor
        assert (one.double() - true).abs().max() <= bound
    return got


def reference_on_cuda(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    from sparsekv.kernels.torch_ops import partial_attention

    return partial_attention(*tensors, **options)  # float64; checked against the definition


def plain_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, query_start: int = 0
) -> tuple[Tensor, Tensor]:
    """Plain torch in the dtype of the tensors."""
    group_size = query.shape[1] // key.shape[2]
    keys, values = (
        t.permute(1, 2, 0, 3, 4).flatten(2, 3).repeat_interleave(group_size, 1)
        for t in (key, value)
    )
    at = (positions[:, None] + torch.arange(key.shape[3])).flatten().to(query.device)
    ends = query_start + torch.arange(query.shape[2], device=query.device)
    scores = (query @ keys.transpose(-1, -2)) * scale
    scores = scores.masked_fill(at > ends[:, None], -torch.inf)
    return torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, HALF, torch.float32])
@pytest.mark.parametrize("num_queries", [1, 8, 100])
@pytest.mark.parametrize("name", REAL)
def test_real_shapes_on_cuda(name: str, num_queries: int, dtype: torch.dtype) -> None:
    check_on_cuda(real_case(name, dtype, num_queries=num_queries))


@pytest.mark.gpu
@needs_cuda
def test_a_prompt_attends_to_itself_on_cuda() -> None:
    shape = {"segments": 1, "tokens": 1000, "num_queries": 1000, "batch": 1}
    for name in ("qwen3", "mla", "v4"):
        check_on_cuda(real_case(name, torch.bfloat16, **shape))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("block_size", [None, 64, 16, 1])
@pytest.mark.parametrize("name", ["qwen3", "mla", "v4"])
def test_keys_read_from_host_memory_in_place_give_the_same_bits(
    name: str, block_size: int | None
) -> None:
    from sparsekv.kernels import triton as ops

    shape = {"batch": 4, "num_kv_heads": 2, "segments": 12}
    case = real_case(name, torch.bfloat16, **shape)
    options = dict(case.options)
    if block_size is not None:
        existing = 12 * 256 // block_size
        indices = torch.rand(4, 2, existing).argsort(-1).cuda()
        half = torch.full((4, 2), existing // 2, device="cuda")
        options["blocks"] = BlockLists(indices=indices, num_blocks=half, block_size=block_size)
    query, results = case.query.cuda(), []
    for place in (on_cuda, registered):
        moved: dict[int, Tensor] = {}
        key, value = place(case.key, moved), place(case.value, moved)
        assert key.is_cuda == (place is on_cuda)
        with pytest.MonkeyPatch.context() as patch:  # as many splits here as there
            patch.setattr("sparsekv.kernels.triton.config.max_splits", lambda *_: 3)
            out, lse = ops.partial_attention(
                query, key, value, case.positions, case.scale, **options
            )
        results.append((out.cpu(), lse.cpu()))
    (out, lse), (out_in_place, lse_in_place) = results
    assert out.isfinite().all()
    assert torch.equal(out, out_in_place)
    assert torch.equal(lse, lse_in_place)


@pytest.mark.gpu
@needs_cuda
def test_host_memory_that_is_not_registered_is_refused() -> None:
    from sparsekv.kernels import triton as ops

    case = make_case(HALF)
    with pytest.raises(LayoutError, match=r"key lies on cpu, not in registered host memory"):
        ops.partial_attention(
            case.query.cuda(), case.key, case.value, case.positions, 1.0, **case.options
        )


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("place", [on_cuda, registered])
@pytest.mark.parametrize("name", ["qwen3", "mla", "v4"])
def test_prepared_calls_give_the_same_bits(name: str, place: Any) -> None:
    from sparsekv.kernels import triton as ops

    case, moved = real_case(name, torch.bfloat16, batch=1, segments=12), dict[int, Tensor]()
    key, value = place(case.key, moved), place(case.value, moved)
    results = [
        (
            torch.full((*case.query.shape[:3], case.value.shape[-1]), NAN, device="cuda"),
            torch.full(case.query.shape[:3], NAN, device="cuda"),
        )
        for _ in range(2)
    ]
    options = {
        "workspace": torch.empty(ops.workspace_numel(case.query.cuda(), key, value), device="cuda")
    }
    (out, lse), (want_out, want_lse) = results
    query = case.query.cuda()
    window = ops.PreparedAttention(
        query, key[:1], value[:1], case.scale, out=out, lse=lse, **options
    )
    older = ops.PreparedAttention(
        query, key[:2], value[:2], case.scale, out=out, lse=lse, is_carried=True, **options
    )
    for tokens, first, last in ((1, 1, 3), (200, 2, 12), (256, 1, 6)):
        query = torch.randn(case.query.shape, device="cuda").bfloat16()
        window(query, 10**6, tokens)
        older.attend_to(key[first:last], value[first:last])
        older(query, 10**6)
        for part, stop, is_carried in (
            (slice(0, 1), tokens, False),
            (slice(first, last), 256, True),
        ):
            ops.partial_attention(
                query,
                key[part, :, :, :stop],
                value[part, :, :, :stop],
                torch.zeros(part.stop - part.start, dtype=torch.int64),
                case.scale,
                query_start=10**6,
                out=want_out,
                lse=want_lse,
                is_carried=is_carried,
                **options,
            )
        assert out.isfinite().all()
        assert torch.equal(out, want_out)
        assert torch.equal(lse, want_lse)


@pytest.mark.gpu
@needs_cuda
def test_a_prepared_step_allocates_nothing_and_does_not_wait() -> None:
    from sparsekv.kernels import triton as ops

    case = real_case("qwen3", torch.bfloat16, batch=1, segments=1)
    query, key, value = (t.cuda() for t in (case.query, case.key, case.value))
    new = torch.randn(1, 4, 1, 128, device="cuda").bfloat16()
    stored_query = torch.empty(1, 32, 1, 128).pin_memory()
    out, lse = torch.zeros(1, 32, 1, 128, device="cuda"), torch.zeros(1, 32, 1, device="cuda")
    other = (torch.randn(1, 32, 1, 128).pin_memory(), torch.randn(1, 32, 1).pin_memory())
    workspace = torch.empty(ops.workspace_numel(query, key, value), device="cuda")
    append = ops.PreparedAppend(new, new, key[0], value[0], query=query, stored_query=stored_query)
    attend = ops.PreparedAttention(
        query, key, value, case.scale, out=out, lse=lse, workspace=workspace
    )
    merge = ops.PreparedMerge([(out, lse), other], out=out, lse=lse)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for offset in (7, 8):
            append(new, new, offset, query)
            attend(query, offset, offset + 1)
            merge()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()
    assert torch.equal(stored_query, query.float().cpu())
    assert torch.equal(key[0, :, :, 7:9], new.expand(-1, -1, 2, -1))
    seen = (key[:, :, :, :9], value[:, :, :, :9], torch.zeros(1, dtype=torch.int64), case.scale)
    part = ops.partial_attention(query, *seen, query_start=8)
    want, want_lse = ops.merge_partials([part, tuple(t.cuda() for t in other)])
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@needs_cuda
def test_a_step_allocates_nothing_and_does_not_wait() -> None:
    from sparsekv.kernels import triton as ops

    case = real_case("qwen3", torch.bfloat16, batch=1)
    query, key, value = (t.cuda() for t in (case.query, case.key, case.value))
    window = torch.zeros(1, 4, 256, 128, dtype=torch.bfloat16, device="cuda")
    new = torch.randn(1, 4, 1, 128, device="cuda").bfloat16()
    stored_query = torch.empty(1, 32, 1, 128).pin_memory()
    out, lse = torch.zeros(1, 32, 1, 128, device="cuda"), torch.zeros(1, 32, 1, device="cuda")
    workspace = torch.empty(ops.workspace_numel(query, key, value), device="cuda")
    other = (torch.randn(1, 32, 1, 128).pin_memory(), torch.randn(1, 32, 1).pin_memory())

    def step(query_start: int) -> None:
        room = {"out": out, "lse": lse, "workspace": workspace}
        start = {"query_start": query_start}
        ops.append(new, new, window, window, 7, query=query, stored_query=stored_query)
        for is_carried, n in ((False, 4), (True, 9)):
            part = (key[:n], value[:n], case.positions[:n], case.scale)
            ops.partial_attention(query, *part, **room, **start, is_carried=is_carried)
        ops.merge_partials([(out, lse), other], out=out, lse=lse)

    step(3000)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(3001)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()
    assert torch.equal(stored_query, query.float().cpu())
    assert torch.equal(window[:, :, 7:8], new)
    assert out.isfinite().all()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merges_on_cuda(count: int, dtype: torch.dtype) -> None:
    def on_gpu(parts: list[Any], sink: Tensor | None) -> list[Tensor]:
        moved = [(o.cuda(), x.cuda()) for o, x in parts]
        return [t.cpu() for t in merge_partials(moved, None if sink is None else sink.cuda())]

    assert_merges(on_gpu, random_parts(count, dtype))
    assert_merges(on_gpu, random_parts(count, dtype), torch.randn(3))
    for sink in (None, -math.inf, math.inf, NAN):
        assert_merges(on_gpu, corner_parts(), None if sink is None else torch.full((3,), sink))
