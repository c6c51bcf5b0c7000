"""Block lists, first positions and sliding windows, against masks that say the same by position."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_case import NAN, Case, make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from native_ops import NATIVE_OPS, tolerance_of
from torch import Tensor
from triton_ops import TRITON_OPS

from sparsekv.errors import LayoutError
from sparsekv.kernels import cpu, reference, torch_ops
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.cpu import library

OPS = [
    pytest.param(reference.partial_attention, id="reference"),
    pytest.param(torch_ops.partial_attention, id="torch"),
    *NATIVE_OPS,
]
every_op = pytest.mark.parametrize("op", [*OPS, *TRITON_OPS])
every_checking_op = pytest.mark.parametrize("op", OPS)  # a look at lists on CUDA would be a wait
every_isa = pytest.mark.parametrize("op", NATIVE_OPS)
GARBAGE = torch.tensor([-1, -(2**62), 2**62, 10**6])


def random_lists(
    case: Case, block_size: int, seed: int, *, counts: list[int] | None = None, room: int = 2
) -> BlockLists:
    """Existing blocks in random order, uneven lists, and garbage in the room after each.

    `counts`: the lengths, in order of row and head and from the first again; None: random ones.
    """
    random = torch.Generator().manual_seed(seed)
    shape = (len(case.query), case.key.shape[2])
    existing = -(-case.key.shape[0] * case.key.shape[3] // block_size)
    num_blocks = torch.randint(existing + 1, shape, generator=random)
    if counts is not None:
        counts = [counts[i % len(counts)] for i in range(num_blocks.numel())]
        num_blocks = torch.tensor(counts).view(shape).clamp(max=existing)
    indices = torch.rand(*shape, existing, generator=random).argsort(dim=-1)
    indices = torch.nn.functional.pad(indices, (0, room))
    lists = BlockLists(indices=indices, num_blocks=num_blocks, block_size=block_size)
    junk = GARBAGE[torch.randint(len(GARBAGE), indices.shape, generator=random)]
    return replace(lists, indices=torch.where(lists.is_listed(), indices, junk))


def every_block(case: Case, block_size: int, seed: int = 0) -> BlockLists:
    """All blocks, in another random order for each row and kv head."""
    existing = -(-case.key.shape[0] * case.key.shape[3] // block_size)
    return random_lists(case, block_size, seed, counts=[existing])


def visible(case: Case) -> Tensor:
    """(batch, num_heads, num_queries, keys) bool, in the order in which the keys are stored."""
    options, blocks = case.options, case.options.get("blocks")
    batch, num_heads, num_queries, _ = case.query.shape
    num_segments, _, num_kv_heads, tokens, _ = case.key.shape
    seen = torch.zeros(batch, num_heads, num_queries, num_segments * tokens, dtype=torch.bool)
    for row in range(batch):
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            for index in range(num_segments * tokens):
                if blocks is not None:
                    count = blocks.num_blocks[row, kv_head]
                    if index // blocks.block_size not in blocks.indices[row, kv_head, :count]:
                        continue
                position = int(case.positions[index // tokens]) + index % tokens
                if "key_mask" in options and not options["key_mask"][row, position]:
                    continue
                if "key_start" in options and position < options["key_start"][row]:
                    continue
                first = position - options["query_start"]  # the first query that sees it
                last = first + (options.get("sliding_window") or 10**9)
                seen[row, head, max(first, 0) : max(last, 0), index] = True
    return seen


def in_float64(case: Case, seen: Tensor) -> tuple[Tensor, Tensor]:
    """What `seen` shows, and nothing else, by a mask that replaces all other options."""
    places = case.positions[:, None] + torch.arange(case.key.shape[3])  # [N, W]
    mask = torch.zeros(*seen.shape[:3], case.num_positions, dtype=torch.bool)
    mask[..., places.flatten()] = seen
    options = {name: case.options[name] for name in case.options if name == "row_table"}
    return replace(case.double(), options=options | {"mask": mask}).run(reference.partial_attention)


def junked(case: Case, seen: Tensor, junk: float) -> Case:
    """`junk` in every stored key and value that no query of any row sees."""
    num_segments, rows, num_kv_heads, tokens, _ = case.key.shape
    used = seen.unflatten(1, (num_kv_heads, -1)).any(dim=3).any(dim=2)  # [B, G, N * W]
    used = used.unflatten(2, (num_segments, tokens)).permute(2, 0, 1, 3)  # [N, B, G, W]
    stored = torch.zeros(num_segments, rows, num_kv_heads, tokens, dtype=torch.bool)
    table = case.options.get("row_table", torch.arange(rows).expand(num_segments, -1))
    for n, physical in enumerate(table.tolist()):
        for row, place in enumerate(physical):
            stored[n, place] |= used[n, row]
    hidden = ~stored[..., None]
    key, value = (tensor.masked_fill(hidden, junk) for tensor in (case.key, case.value))
    return replace(case, key=key, value=value)


def check(case: Case, op: Any, junk: float = NAN) -> tuple[Tensor, Tensor]:
    """The result is that of a mask by position, and no hidden slot reaches it."""
    seen = visible(case)
    out, lse = junked(case, seen, junk).run(op)
    want_out, want_lse = in_float64(case, seen)
    tolerance = tolerance_of(op, case.query, case.key)
    torch.testing.assert_close(out.double(), want_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    return out, lse


@every_op
@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    group_size=st.sampled_from([1, 3, 8]),
    rows=st.sampled_from([None, 1, 5]),
    segments=st.integers(1, 5),
    tokens=st.integers(1, 9),
    num_queries=st.integers(1, 9),
    late=st.integers(-9, 3),
    block_size=st.sampled_from([None, 1, 2, 3, 7, 100]),
    key_start=st.none() | st.lists(st.integers(-3, 30), min_size=2, max_size=2),
    sliding_window=st.sampled_from([None, 1, 2, 5, 100]),
    holes=st.booleans(),
    junk=st.sampled_from([NAN, torch.inf]),
)
def test_all_that_hides_keys_combines(
    op: Any,
    seed: int,
    dtype: torch.dtype,
    group_size: int,
    rows: int | None,
    segments: int,
    tokens: int,
    num_queries: int,
    late: int,
    block_size: int | None,
    key_start: list[int] | None,
    sliding_window: int | None,
    holes: bool,
    junk: float,
) -> None:
    case = make_case(
        dtype,
        seed=seed,
        rows=rows,
        segments=segments,
        tokens=tokens,
        num_queries=num_queries,
        group_size=group_size,
    )
    case = case.given(query_start=case.options["query_start"] + late, sliding_window=sliding_window)
    if block_size is not None:
        case = case.given(blocks=random_lists(case, block_size, seed))
    if key_start is not None:
        case = case.given(key_start=torch.tensor(key_start))
    if holes:
        random = torch.Generator().manual_seed(seed)
        case = case.given(key_mask=torch.rand(2, case.num_positions, generator=random) < 0.6)
    check(case, op, junk)


# Block lists


@every_op
@pytest.mark.parametrize("num_queries", [1, 6])
@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 100])
def test_all_blocks_in_any_order_equal_no_list(op: Any, num_queries: int, block_size: int) -> None:
    case = make_case(segments=6, tokens=12, num_queries=num_queries)
    want_out, want_lse = case.run(op)
    for seed in range(3):
        out, lse = case.given(blocks=every_block(case, block_size, seed)).run(op)
        torch.testing.assert_close(out, want_out)
        torch.testing.assert_close(lse, want_lse)


@every_op
@pytest.mark.parametrize("counts", [[0], [3, 0], [1, 2, 3, 9], [0, 0, 0, 9]])
def test_lists_may_be_uneven_and_empty(op: Any, counts: list[int]) -> None:
    case = make_case(segments=6, tokens=12)
    blocks = random_lists(case, 8, 0, counts=counts)
    out, lse = check(case.given(blocks=blocks), op)
    is_empty = (blocks.num_blocks == 0).repeat_interleave(3, dim=1)
    assert (out[is_empty] == 0).all()
    assert (lse[is_empty] == -torch.inf).all()
    assert lse[~is_empty].isfinite().all()


@every_op
def test_lists_without_room_are_empty(op: Any) -> None:
    case = make_case()
    indices = torch.empty(2, 2, 0, dtype=torch.int64)
    count = torch.zeros(2, 2, dtype=torch.int64)
    out, lse = case.given(blocks=BlockLists(indices=indices, num_blocks=count, block_size=4)).run(
        op
    )
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@every_op
def test_a_block_crosses_segments_and_the_last_one_is_partial(op: Any) -> None:
    case = make_case(segments=3, tokens=5)  # 15 keys: block 0 = 0 ... 7, block 1 = 8 ... 14
    for block in (0, 1):
        indices = torch.full((2, 2, 1), block)
        count = torch.ones(2, 2, dtype=torch.int64)
        blocks = BlockLists(indices=indices, num_blocks=count, block_size=8)
        check(case.given(blocks=blocks), op)


@every_checking_op
@pytest.mark.parametrize("index", [-1, 4, 2**62, -(2**63)])
def test_a_block_that_does_not_exist_raises(op: Any, index: int) -> None:
    case = make_case(segments=3, tokens=5)  # blocks 0 ... 3
    blocks = random_lists(case, 4, 0, counts=[2])
    blocks.indices[1, 1, 1] = index
    with pytest.raises(LayoutError, match="list"):
        case.given(blocks=blocks).run(op)
    blocks.num_blocks[1, 1] = 1  # now it is beyond the end of its list
    case.given(blocks=blocks).run(op)


@every_checking_op
@pytest.mark.parametrize("count", [-1, 5, 2**62])
def test_a_list_longer_than_its_room_or_than_there_are_blocks_raises(op: Any, count: int) -> None:
    case = make_case(segments=3, tokens=5)
    for room in (0, 3):
        blocks = random_lists(case, 4, 0, counts=[4], room=room)
        blocks.num_blocks[0, 1] = count
        with pytest.raises(LayoutError, match="list"):
            case.given(blocks=blocks).run(op)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size=0: must be at least 1"),
        ({"indices": torch.zeros(2, 2, dtype=torch.int64)}, r"indices \(2, 2\)"),
        ({"indices": torch.zeros(2, 2, 3, dtype=torch.int32)}, "torch.int32: must be int64"),
        ({"num_blocks": torch.zeros(2, 2)}, "num_blocks .* of torch.float32"),
        ({"num_blocks": torch.zeros(2, 1, dtype=torch.int64)}, "the same rows and kv heads"),
        ({"num_blocks": torch.zeros(2, 2, dtype=torch.int64, device="meta")}, "one device"),
    ],
)
def test_lists_of_a_wrong_form_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        replace(every_block(make_case(), 4), **changes)


@every_op
def test_lists_for_other_rows_or_heads_are_refused(op: Any) -> None:
    blocks = every_block(make_case(num_kv_heads=4), 4)
    with pytest.raises(LayoutError, match=r"block lists for \(2, 4\).*must be for \(2, 2\)"):
        make_case().given(blocks=blocks).run(op)


# First positions and windows


@every_op
def test_padded_keys_are_those_before_the_first_position(op: Any) -> None:
    case = make_case(segments=6, tokens=12, num_queries=4)
    starts = torch.tensor([7, 40])
    by_mask = case.given(key_mask=torch.arange(72) >= starts[:, None]).run(op)
    by_start = check(case.given(key_start=starts), op)
    for got, want in zip(by_start, by_mask, strict=True):
        torch.testing.assert_close(got, want)


@every_op
def test_a_row_whose_first_position_is_never_reached_sees_nothing(op: Any) -> None:
    case = make_case(num_queries=3).given(key_start=torch.tensor([-(2**63), 2**63 - 1]))
    out, lse = check(case, op)
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()
    assert lse[0].isfinite().all()


@every_op
@pytest.mark.parametrize("num_queries", [1, 8, 40])
@pytest.mark.parametrize("sliding_window", [1, 3, 8, 9, 70, 71, 72, 2**62])
def test_a_window_shows_the_newest_keys(op: Any, num_queries: int, sliding_window: int) -> None:
    case = make_case(segments=6, tokens=12, num_queries=num_queries)
    check(case.given(sliding_window=sliding_window), op)


@every_op
def test_a_window_of_one_gives_each_query_the_value_beside_it(op: Any) -> None:
    case = make_case(batch=1, segments=1, tokens=9, num_queries=9, group_size=1)
    out, _ = case.given(sliding_window=1).run(op)
    torch.testing.assert_close(out, case.value[0])


@every_op
@pytest.mark.parametrize("sliding_window", [0, -1])
def test_a_window_without_a_key_raises(op: Any, sliding_window: int) -> None:
    with pytest.raises(LayoutError, match=f"sliding_window={sliding_window}: must be at least 1"):
        make_case().given(sliding_window=sliding_window).run(op)


@pytest.mark.parametrize("op", OPS[:2])
def test_lists_and_windows_combine_with_a_4d_mask(op: Any) -> None:
    case = make_case(segments=4, num_queries=5)
    random = torch.Generator().manual_seed(0)
    shown = torch.rand(2, 6, 5, 20, generator=random) < 0.7
    rules = {"blocks": random_lists(case, 3, 0), "key_start": torch.tensor([2, 9])}
    places = (case.positions[:, None] + torch.arange(5)).flatten()
    ahead = case.given(query_start=10**6)  # without the causal rule, which the mask replaces
    seen = visible(ahead.given(**rules)) & shown[..., places]
    queries = case.options["query_start"] + torch.arange(5)
    seen &= places > queries[:, None] - 11
    given = case.given(mask=shown, sliding_window=11, **rules)
    for got, want in zip(given.run(op), in_float64(case, seen), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


# The native library: long lists, many threads


@every_isa
@pytest.mark.parametrize("group_size", [1, 3, 5, 6, 7, 8, 12, 16, 64])
def test_group_sizes(op: Any, group_size: int) -> None:
    case = make_case(
        torch.bfloat16, batch=1, group_size=group_size, segments=4, tokens=50, head_dim=32
    )
    check(case.given(blocks=random_lists(case, 1, group_size), key_start=torch.tensor([9])), op)


@every_isa
@pytest.mark.parametrize("block_size", [1, 64, 300])
def test_long_lists_are_cut_and_merged(op: Any, block_size: int) -> None:
    case = make_case(torch.bfloat16, batch=1, segments=20, tokens=256, group_size=1, shared_kv=True)
    case = case.given(blocks=random_lists(case, block_size, 0, counts=[5120, 3]))
    want_out, want_lse = case.double().run(torch_ops.partial_attention)
    out, lse = case.run(op)
    torch.testing.assert_close(out.double(), want_out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    if library.native_library() is None:
        pytest.skip(f"no native library: {cpu.backend().reason}")
    case = make_case(torch.bfloat16, segments=30, tokens=256, num_queries=2, head_dim=64)
    case = case.given(blocks=random_lists(case, 16, 1), sliding_window=5000)
    results = []
    try:
        for num_threads in (1, 2, 5):
            library.set_num_threads(num_threads)
            results.append(case.run(cpu.partial_attention))
    finally:
        library.set_num_threads(None)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
