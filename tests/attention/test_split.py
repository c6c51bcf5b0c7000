"""Split attention: where tokens lie makes no difference to what attention gives."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsekv.attention import split_attention
from sparsekv.attention.host import HostCalls, Question
from sparsekv.errors import LayoutError
from sparsekv.format.views import KVView, LayerViews
from sparsekv.kernels import reference

TOKENS = 4  # of a segment
SCALE = 0.4


def sequence(
    seed: int, num_tokens: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Keys (2, 2, num_tokens, 8) and values (2, 2, num_tokens, 6)."""
    random = torch.Generator().manual_seed(seed)
    key = torch.randn(2, 2, num_tokens, 8, generator=random)
    return key.to(dtype), torch.randn(2, 2, num_tokens, 6, generator=random).to(dtype)


def queries(seed: int, num_queries: int, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator().manual_seed(seed + 1)
    return torch.randn(2, 6, num_queries, 8, generator=random).to(dtype)


def view(key: Tensor, value: Tensor, starts: list[int], tokens: int = TOKENS) -> KVView:
    """The segments that begin at `starts`."""
    blocks = [[t[:, :, s : s + tokens] for s in starts] for t in (key, value)]
    return KVView(torch.stack(blocks[0]), torch.stack(blocks[1]), torch.tensor(starts))


def place(key: Tensor, value: Tensor, places: str, window: int) -> LayerViews:
    """One letter a segment, "u" unpinned or "p" pinned; the rest in windows of up to `window`."""
    starts = {c: [TOKENS * i for i, p in enumerate(places) if p == c] for c in "up"}
    parts = {c: (view(key, value, starts[c]),) if starts[c] else () for c in "up"}
    total = key.shape[2]
    windows = tuple(
        view(key, value, [s], min(window, total - s))
        for s in range(TOKENS * len(places), total, window)
    )
    return LayerViews(window=windows, unpinned=parts["u"], pinned=parts["p"])


def dense(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The reference over one segment that holds the whole sequence."""
    options["query_start"] = key.shape[2] - query.shape[2]
    return reference.partial_attention(
        query, key[None], value[None], torch.zeros(1, dtype=torch.int64), SCALE, **options
    )


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**31),
    places=st.text("up", max_size=5),
    rest=st.integers(0, 9),
    window=st.integers(1, 9),
    num_queries=st.integers(1, 12),
    masks=st.sampled_from(["causal", "padding", "mask", "both"]),
)
def test_the_placement_makes_no_difference(
    seed: int, places: str, rest: int, window: int, num_queries: int, masks: str
) -> None:
    num_tokens = max(TOKENS * len(places) + rest, 1)
    num_queries = min(num_queries, num_tokens)
    key, value = sequence(seed, num_tokens)
    query = queries(seed, num_queries)
    random = torch.Generator().manual_seed(seed)
    options: dict[str, Tensor] = {}
    if masks in ("padding", "both"):
        options["key_mask"] = torch.rand(2, num_tokens, generator=random) < 0.7
    if masks in ("mask", "both"):
        options["mask"] = torch.rand(2, 1, num_queries, num_tokens, generator=random) < 0.7
    views = place(key, value, places, window)
    assert views.num_tokens == num_tokens

    out, lse = split_attention(query, views, SCALE, **options)
    want_out, want_lse = dense(query, key, value, **options)
    torch.testing.assert_close(out, want_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_results_are_wide_for_every_dtype(dtype: torch.dtype) -> None:
    key, value = sequence(0, 19, dtype)
    query = queries(0, 1, dtype)  # few rows: no matrix unit, which would round weights
    got = split_attention(query, place(key, value, "upu", 4), SCALE)
    for result, want in zip(got, dense(query, key, value), strict=True):
        assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-5)


def test_row_tables_are_followed_in_every_region() -> None:
    key, value = sequence(1, 14)
    query = queries(1, 1)
    views = place(key, value, "upu", 2)

    def scattered(part: KVView) -> KVView:
        """The same logical rows, stored among others: row 0 in slot 2, row 1 in slot 0."""
        key, value = (t[:, [1, 0, 0]].clone() for t in (part.key, part.value))
        key[:, 1], value[:, 1] = torch.nan, torch.nan
        return KVView(key, value, part.positions, torch.tensor([[2, 0]] * len(part.positions)))

    regions = (views.window, views.unpinned, views.pinned)
    moved = LayerViews(*[tuple(scattered(part) for part in region) for region in regions])
    for got, want in zip(
        split_attention(query, moved, SCALE), split_attention(query, views, SCALE), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_the_sink_is_one_more_key_without_a_value() -> None:
    key, value = sequence(2, 18)
    query, sink = queries(2, 3), torch.randn(6)
    out, lse = split_attention(query, place(key, value, "upp", 4), SCALE, attn_sink=sink)
    want_out, want_lse = dense(query, key, value)
    total = torch.logaddexp(want_lse, sink[:, None])
    torch.testing.assert_close(lse, total)
    torch.testing.assert_close(out, want_out * torch.exp(want_lse - total)[..., None])


def test_empty_views_give_zero_and_minus_infinity() -> None:
    query = queries(3, 2)
    out, lse = split_attention(query, LayerViews((), (), ()), SCALE)
    assert torch.equal(out, torch.zeros(2, 6, 2, 8))
    assert torch.equal(lse, torch.full((2, 6, 2), -torch.inf))
    out, lse = split_attention(query, LayerViews((), (), ()), SCALE, attn_sink=torch.ones(6))
    assert torch.equal(out, torch.zeros(2, 6, 2, 8))
    assert torch.equal(lse, torch.ones(2, 6, 2))


def test_loaded_parts_are_used_up_one_by_one() -> None:
    key, value = sequence(4, 22)
    query = queries(4, 2)
    views = place(key, value, "ppupp", 2)
    buffer = KVView(torch.empty(1, 2, 2, 4, 8), torch.empty(1, 2, 2, 4, 6), torch.zeros(1).long())
    asked = []

    def load(pinned: tuple[KVView, ...]) -> Iterator[KVView]:
        """One segment at a time, through one buffer that is reused."""
        asked.append(pinned)
        for part in pinned:
            for n in range(len(part.positions)):
                buffer.key.copy_(part.key[n : n + 1])
                buffer.value.copy_(part.value[n : n + 1])
                yield KVView(buffer.key, buffer.value, part.positions[n : n + 1])
                buffer.key.fill_(torch.nan)
                buffer.value.fill_(torch.nan)

    out, lse = split_attention(query, views, SCALE, load=load)
    want_out, want_lse = dense(query, key, value)
    torch.testing.assert_close(out, want_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    assert asked == [views.pinned]


def test_the_results_held_at_a_time_do_not_grow_with_the_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend, held, most = Question.attend, weakref.WeakSet[Tensor](), 0

    def counted(question: Question, part: KVView) -> tuple[Tensor, Tensor]:
        nonlocal most
        out, lse = attend(question, part)
        held.add(out)
        most = max(most, len(held))
        return out, lse

    monkeypatch.setattr(Question, "attend", counted)
    key, value = sequence(5, 40 * TOKENS)
    parts = tuple(view(key, value, [start]) for start in range(0, 40 * TOKENS, TOKENS))
    out, lse = split_attention(queries(5, 3), LayerViews((), (), parts), SCALE)
    expected = dense(queries(5, 3), key, value)
    torch.testing.assert_close((out, lse), expected, atol=1e-6, rtol=1e-5)
    assert most <= 5


def test_the_host_gives_one_result_of_all_its_parts() -> None:
    """Of a prompt each would take more of the accelerator than its keys."""
    key, value = sequence(5, 4 * TOKENS)
    parts = [view(key, value, [start]) for start in range(0, 4 * TOKENS, TOKENS)]
    query = queries(5, 3)
    question = Question(
        query=query, softmax_scale=SCALE, query_start=4 * TOKENS - 3, key_mask=None, mask=None
    )
    (found,) = HostCalls().begin(question, parts)()
    expected = dense(query, key, value)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_nothing_is_loaded_when_nothing_is_pinned() -> None:
    key, value = sequence(5, 10)

    def load(pinned: tuple[KVView, ...]) -> Iterator[KVView]:
        raise AssertionError(f"asked to load {pinned}")

    split_attention(queries(5, 1), place(key, value, "uu", 2), SCALE, load=load)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 6, 8), {}, r"query \(2, 6, 8\) of torch.float32: must be .*head_dim"),
        ((2, 6, 11, 8), {}, "11 query tokens over a cache of 10: .*append"),
        ((3, 6, 1, 8), {}, "query has batch 3, the views 2: must be equal"),
        ((2, 6, 1, 9), {}, "query has head_dim 9 and torch.float32, the keys 8"),
        ((2, 5, 1, 8), {}, "query has 5 heads, the keys 2: must be a multiple"),
        ((2, 6, 1, 8), {"key_mask": torch.ones(2, 9).bool()}, r"key_mask \(2, 9\).*at least 10"),
        ((2, 6, 1, 8), {"key_mask": torch.ones(1, 10).bool()}, r"key_mask \(1, 10\) of torch.bool"),
        (
            (2, 6, 1, 8),
            {"key_mask": torch.ones(2, 10)},
            "key_mask .* of torch.float32: must be bool",
        ),
        ((2, 6, 2, 8), {"mask": torch.ones(1, 1, 1, 10)}, r"mask \(1, 1, 1, 10\).*1 or 6, 2"),
        ((2, 6, 1, 8), {"mask": torch.ones(1, 1, 1, 10).int()}, "mask .* must be bool or floating"),
        ((2, 6, 1, 8), {"mask": torch.ones(2, 2, 1, 10)}, r"mask \(2, 2, 1, 10\)"),
        ((2, 6, 1, 8), {"mask": torch.ones(1, 1, 1, 9)}, "mask .*at least 10"),
        ((2, 6, 1, 8), {"attn_sink": torch.ones(2)}, r"attn_sink \(2,\) does not fit"),
    ],
)
def test_what_does_not_fit_is_named(
    shape: tuple[int, ...], options: dict[str, Tensor], message: str
) -> None:
    views = place(*sequence(6, 10), "up", 2)
    with pytest.raises(LayoutError, match=message):
        split_attention(torch.zeros(shape), views, SCALE, **options)


def test_a_query_of_another_dtype_or_device_is_named() -> None:
    views = place(*sequence(7, 10), "up", 2)
    with pytest.raises(LayoutError, match=r"and torch.float16, the keys 8 and torch.float32"):
        split_attention(queries(7, 1).half(), views, SCALE)
    with pytest.raises(LayoutError, match="a window part lies on cpu: must lie on meta"):
        split_attention(queries(7, 1).to("meta"), views, SCALE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("padded", [False, True])
def test_a_gpu_and_the_cpu_together_give_what_one_gives(
    dtype: torch.dtype, num_queries: int, padded: bool
) -> None:
    key, value = sequence(8, 30, dtype)
    query = queries(8, num_queries, dtype)
    views = place(key, value, "upuppu", 3)
    window = tuple(part.to(torch.device("cuda", 0)) for part in views.window)
    views = LayerViews(window=window, unpinned=views.unpinned, pinned=views.pinned)
    key_mask = torch.arange(30) >= torch.tensor([[0], [11]]) if padded else None
    out, lse = split_attention(
        query.cuda(), views, SCALE, key_mask=None if key_mask is None else key_mask.cuda()
    )
    want_out, want_lse = dense(query, key, value, key_mask=key_mask)
    assert out.is_cuda
    assert lse.is_cuda
    # A CPU's matrix unit rounds the weights of so many rows of bfloat16.
    is_rounded = dtype == torch.bfloat16 and num_queries > 1
    tolerance = 3e-3 * want_out.abs().max().item() if is_rounded else 1e-4
    torch.testing.assert_close(out.cpu(), want_out, rtol=1e-4, atol=tolerance)
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-4, atol=1e-4)
