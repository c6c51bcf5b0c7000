"""Merging partial attention: empty is the identity, the split does not matter, NaN stays put."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsekv.attention import merge_partials
from sparsekv.errors import LayoutError

Part = tuple[Tensor, Tensor]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INF = torch.inf


def attention(scores: Tensor, values: Tensor) -> Part:
    """scores (batch, num_heads, K), values (batch, num_heads, K, V); no key: out 0, lse -inf."""
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return (weights[:, :, None] @ values)[:, :, 0], lse


def random_parts(seed: int, count: int, dtype: torch.dtype = torch.float32) -> list[Part]:
    """Parts of which a quarter of the rows is empty, written as -inf or +inf."""
    random = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(count):
        out = torch.randn(3, 4, 6, generator=random).to(dtype)
        lse = 5 * torch.randn(3, 4, generator=random)
        kind = torch.rand(3, 4, generator=random)
        lse[kind < 0.25] = -INF
        lse[kind < 0.10] = INF
        out[kind < 0.25] = 0.0
        parts.append((out, lse))
    return parts


def close(got: Part, want: Part) -> None:
    eps = max(torch.finfo(t.dtype).eps for t in got)
    torch.testing.assert_close(got[0], want[0], rtol=4 * eps, atol=8 * eps)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_sink", [False, True])
def test_merge_does_not_depend_on_the_split(with_sink: bool) -> None:
    random = torch.Generator().manual_seed(0)
    scores = 4 * torch.randn(2, 3, 17, generator=random, dtype=torch.float64)
    values = torch.randn(2, 3, 17, 5, generator=random, dtype=torch.float64)
    sink = torch.randn(3, generator=random, dtype=torch.float64) if with_sink else None
    whole_out, whole_lse = attention(scores, values)
    if sink is not None:  # one more key, whose value is zero
        scores_and_sink = torch.cat([scores, sink[None, :, None].expand(2, 3, 1)], dim=-1)
        whole_lse = torch.logsumexp(scores_and_sink, dim=-1)
        whole_out = (torch.softmax(scores_and_sink, -1)[:, :, None, :-1] @ values)[:, :, 0]
    for first in range(18):
        for second in range(first, 18):
            cuts = [slice(0, first), slice(first, second), slice(second, 17)]
            parts = [attention(scores[..., c], values[..., c, :]) for c in cuts]
            out, lse = merge_partials(parts, sink)
            torch.testing.assert_close(out, whole_out, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(lse, whole_lse, rtol=1e-13, atol=1e-13)


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(2, 6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    data=st.data(),
)
def test_merge_is_associative_and_commutative(
    seed: int, count: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    parts = random_parts(seed, count, dtype)
    want = merge_partials(parts)
    pool = data.draw(st.permutations(parts))
    while len(pool) > 1:  # merge any two neighbours, until one is left
        at = data.draw(st.integers(0, len(pool) - 2))
        pool = [*pool[:at], merge_partials(pool[at : at + 2]), *pool[at + 2 :]]
    got_out, got_lse = pool[0]
    torch.testing.assert_close(got_out, want[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_lse, want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mark", [-INF, INF])
@pytest.mark.parametrize("left", [False, True])
def test_empty_is_the_identity(dtype: torch.dtype, mark: float, left: bool) -> None:
    out = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    lse = torch.tensor([[-1e30, -90.0, -0.5], [0.0, 100.0, 3e30]])
    empty = (torch.zeros_like(out), torch.full_like(lse, mark))
    parts = [empty, (out, lse)] if left else [(out, lse), empty]
    got_out, got_lse = merge_partials(parts)
    assert torch.equal(got_out, out)
    assert torch.equal(got_lse, lse)


@pytest.mark.parametrize("mark", [-INF, INF])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_all_empty_gives_zero_and_minus_infinity(mark: float, count: int) -> None:
    part = (torch.zeros(1, 1, 64), torch.full((1, 1), mark))
    out, lse = merge_partials([part] * count)
    assert torch.equal(out, torch.zeros(1, 1, 64))
    assert torch.equal(lse, torch.full((1, 1), -INF))


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    sink=st.none() | st.lists(st.sampled_from([-INF, -3.0, 0.0, 2.0, INF]), min_size=4, max_size=4),
)
def test_empty_rows_never_make_a_nan(
    seed: int, count: int, dtype: torch.dtype, sink: list[float] | None
) -> None:
    parts = random_parts(seed, count, dtype)
    attn_sink = None if sink is None else torch.tensor(sink)
    out, lse = merge_partials(parts, attn_sink)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert out.isfinite().all()
    assert not lse.isnan().any()
    all_empty = torch.stack([p[1].isinf() for p in parts]).all(0)
    assert torch.equal(out[all_empty], torch.zeros_like(out[all_empty]))
    if attn_sink is None:
        assert torch.equal(lse == -INF, all_empty)
    else:
        torch.testing.assert_close(lse[all_empty], attn_sink.expand(3, 4)[all_empty])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_out_of_an_empty_row_is_not_read(dtype: torch.dtype) -> None:
    parts = random_parts(2, 4, dtype)
    want = merge_partials(parts)
    for out, lse in parts:
        out[lse.isinf()] = torch.nan
    got = merge_partials(parts)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_merge_writes_nothing_in_place() -> None:
    parts = random_parts(3, 3)
    before = [(out.clone(), lse.clone()) for out, lse in parts]
    sink = torch.randn(4)
    sink_before = sink.clone()
    merge_partials(parts, sink)
    for (out, lse), (old_out, old_lse) in zip(parts, before, strict=True):
        assert torch.equal(out, old_out)
        assert torch.equal(lse, old_lse)
    assert torch.equal(sink, sink_before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_that_of_the_parts(dtype: torch.dtype) -> None:
    parts = random_parts(4, 5, dtype)
    got = merge_partials(parts)
    wide = merge_partials([(out.double(), lse.double()) for out, lse in parts])
    close(got, (wide[0].to(dtype), wide[1].float()))


def test_equal_and_very_large_lse_share_the_weight() -> None:
    for size in (1e12, -1e12, 3e38, -3e38):
        parts = [(torch.full((1, 1, 2), x), torch.full((1, 1), size)) for x in (1.0, 3.0)]
        out, lse = merge_partials(parts)
        assert torch.equal(out, torch.full((1, 1, 2), 2.0))
        torch.testing.assert_close(lse, torch.full((1, 1), size))


def test_a_nan_stays_in_its_row() -> None:
    parts = random_parts(5, 3)
    want = merge_partials(parts)
    parts[1][1][0, 2] = torch.nan  # a NaN score
    parts[2][1][1, 3] = 0.0
    parts[2][0][1, 3, 4] = torch.nan  # a NaN value
    clean = merge_partials([(out.nan_to_num(), lse) for out, lse in parts])
    out, lse = merge_partials(parts)
    assert out[0, 2].isnan().all()
    assert lse[0, 2].isnan()
    assert out[1, 3, 4].isnan()
    assert out.isnan().sum() == 7
    assert lse.isnan().sum() == 1
    torch.testing.assert_close(lse[1, 3], clean[1][1, 3])
    others = torch.ones(3, 4, dtype=torch.bool)
    others[0, 2] = others[1, 3] = False
    assert torch.equal(out[others], want[0][others])


def test_the_sink_is_counted_once() -> None:
    out = torch.ones(1, 2, 3)
    lse = torch.zeros(1, 2)
    sink = torch.tensor([0.0, math.log(3.0)])
    for parts in ([(out, lse)], [(out, lse - math.log(2.0))] * 2):
        got_out, got_lse = merge_partials(parts, sink)
        torch.testing.assert_close(got_out[0, :, 0], torch.tensor([1 / 2, 1 / 4]))
        torch.testing.assert_close(got_lse[0], torch.tensor([math.log(2.0), math.log(4.0)]))


def test_a_sink_of_minus_infinity_changes_nothing() -> None:
    parts = random_parts(6, 3)
    got = merge_partials(parts, torch.full((4,), -INF))
    want = merge_partials(parts)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_a_sink_of_plus_infinity_takes_all_the_weight() -> None:
    out, lse = merge_partials(random_parts(7, 3), torch.tensor([INF, 0.0, INF, 0.0]))
    assert torch.equal(out[:, ::2], torch.zeros(3, 2, 6))
    assert (lse[:, ::2] == INF).all()
    assert lse[:, 1::2].isfinite().all()


def test_the_sink_belongs_to_dimension_one_of_many() -> None:
    random = torch.Generator().manual_seed(8)
    out, lse = (
        torch.randn(2, 3, 3, 3, 5, generator=random),
        torch.randn(2, 3, 3, 3, generator=random),
    )
    sink = torch.tensor([-INF, 0.0, INF])
    got, _ = merge_partials([(out, lse)], sink)
    torch.testing.assert_close(got[:, 0], out[:, 0])
    torch.testing.assert_close(got[:, 1], out[:, 1] * torch.sigmoid(lse[:, 1])[..., None])
    assert torch.equal(got[:, 2], torch.zeros(2, 3, 3, 5))


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (2, 3, 4, 5), (0, 3, 5)])
def test_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    out, lse = torch.randn(shape), torch.zeros(shape[:-1])
    got_out, got_lse = merge_partials([(out, lse), (3 * out, lse)])
    torch.testing.assert_close(got_out, 2 * out)
    torch.testing.assert_close(got_lse, lse + math.log(2.0))


OUT, LSE = torch.zeros(2, 3, 5), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("parts", "sink", "message"),
    [
        ([], None, "parts is empty: at least one"),
        (
            [(OUT, torch.zeros(2, 4))],
            None,
            r"parts\[0\]: lse \(2, 4\) does not fit out \(2, 3, 5\)",
        ),
        ([(OUT, LSE), (OUT, LSE[:1])], None, r"parts\[1\]: lse \(1, 3\)"),
        ([(OUT, LSE), (OUT[..., :4], LSE)], None, r"parts\[1\]: out is \(\(2, 3, 4\).*same shape"),
        ([(OUT, LSE), (OUT.half(), LSE)], None, r"parts\[1\]: out is .*float16.*convert"),
        ([(OUT, LSE), (OUT, LSE.double())], None, r"parts\[1\]: lse is .*float64.*convert"),
        ([(OUT, LSE), (OUT.to("meta"), LSE)], None, r"parts\[1\]: out is .*meta.*move"),
        ([(OUT.int(), LSE)], None, "out has dtype torch.int32: must be floating"),
        ([(OUT, LSE.half())], None, "lse has dtype torch.float16: must be float32 or float64"),
        ([(OUT, LSE)], torch.zeros(2), r"attn_sink \(2,\) does not fit out \(2, 3, 5\)"),
        ([(OUT[0], LSE[0])], torch.zeros(5), r"attn_sink \(5,\) does not fit out \(3, 5\)"),
        ([(OUT, LSE)], torch.zeros(3).int(), "attn_sink is torch.int32 .*must be floating"),
        ([(OUT, LSE)], torch.zeros(3, device="meta"), "attn_sink is .*meta.*parts' device, cpu"),
    ],
)
def test_what_does_not_fit_is_named(parts: Any, sink: Tensor | None, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        merge_partials(parts, sink)
