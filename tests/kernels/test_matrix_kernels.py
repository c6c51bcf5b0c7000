"""The matrix kernel, on hardware and emulated: what it runs, and its laws in every corner of shape.

Laws that all kernels share are tested in test_native.py, test_partial_attention.py and
test_visible_keys.py, in part on shapes of this kernel too.
"""

import math
import re
import shutil
import subprocess
from typing import Any

import pytest
import torch
from native_ops import ISAS, MATRIX_OPS, NativeOp, use_isa
from torch import Tensor

from sparsekv.errors import LayoutError
from sparsekv.kernels import cpu, reference
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.cpu import library

NAN = torch.nan
on_matrices = pytest.mark.parametrize("op", MATRIX_OPS)


@pytest.fixture(autouse=True)
def native_library() -> None:
    if library.native_library() is None:
        pytest.skip(f"no native library: {cpu.backend().reason}")


def make_case(
    *,
    group_size: int = 16,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    tokens: int = 77,
    segments: int = 3,
    batch: int = 1,
    num_kv_heads: int = 1,
    num_queries: int = 1,
    shared_kv: bool = False,
    apart: bool = True,
    query_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Arguments of one call in bfloat16; `apart`: tokens with NaN between them."""
    random = torch.Generator().manual_seed(0)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    width = max(head_dim, head_dim_v)
    shape = (segments, batch, num_kv_heads, tokens, 2, width + 6 * apart)
    stored = torch.randn(shape, generator=random).to(torch.bfloat16)
    if apart:
        stored[..., width:] = NAN
        key, value = stored[..., 0, :head_dim], stored[..., 1, :head_dim_v]
    else:
        stored = stored.transpose(3, 4).contiguous()
        key, value = stored[:, :, :, 0, :, :head_dim], stored[:, :, :, 1, :, :head_dim_v]
    query = torch.randn(batch, num_kv_heads * group_size, num_queries, head_dim, generator=random)
    return {
        "query": (3 * query).to(query_dtype),
        "key": key,
        "value": key[..., :head_dim_v] if shared_kv else value,
        "positions": torch.randperm(segments, generator=random) * tokens,
        "softmax_scale": head_dim**-0.5,
        "query_start": segments * tokens - num_queries,
    }


def check(op: NativeOp, case: dict[str, Any]) -> None:
    """Results within the op's tolerance, lse within 1e-5 of it or of the largest logit."""
    assert op.kernel_for(case["query"], case["key"]) == op.isa
    tolerance = op.tolerance(case["query"], case["key"])
    out, lse = op(**case)
    exact = {name: case[name].double() for name in ("query", "key", "value")}
    want_out, want_lse = reference.partial_attention(**(case | exact))
    assert ((out - want_out).norm(dim=-1) <= tolerance * want_out.norm(dim=-1)).all()
    seen = want_lse.isfinite()
    assert torch.equal(lse[~seen].double(), want_lse[~seen])
    # No logit that matters is larger than the lse, but for what the number of keys adds to it.
    assert ((lse - want_lse)[seen].abs() <= 1e-5 * want_lse[seen].abs().clamp(min=1.0)).all()


# Which kernel runs


@pytest.mark.parametrize("isa", ISAS)
def test_the_shape_and_dtype_alone_choose_the_kernel(isa: str) -> None:
    shapes = [
        (16, 1, 1),
        (15, 1, 1),
        (32, 8, 1),
        (12, 4, 1),
        (3, 3, 3),
        (6, 2, 2),
        (1, 1, 16),
        (4, 1, 1),
    ]
    vectors = {"amx": "avx512", "amx_emulated": "portable"}.get(isa, isa)
    with use_isa(isa):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for num_heads, num_kv_heads, num_queries in shapes:
                fills = num_heads // num_kv_heads * num_queries >= 4 and dtype == torch.bfloat16
                kernel = library.kernel_for(
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    num_queries=num_queries,
                    dtype=dtype,
                )
                assert kernel == (isa if fills else vectors)
        with pytest.raises(LayoutError, match=r"dtype=torch\.int8"):
            library.kernel_for(num_heads=16, num_kv_heads=1, num_queries=1, dtype=torch.int8)


def error_of_weights(op: NativeOp, **shape: Any) -> float:
    """Largest relative error of the smaller of two weights, for many scales."""
    case = make_case(tokens=2, segments=1, **shape)
    key, value = torch.zeros_like(case["key"]), torch.zeros_like(case["value"])
    key[:, :, :, 1, 0], value[:, :, :, 1, 0] = -1.0, 1.0
    case |= {"query": torch.ones_like(case["query"]), "key": key, "value": value, "query_start": 2}
    errors = []
    for scale in torch.linspace(0.1, 0.7, 50).tolist():
        out, _ = op(**(case | {"softmax_scale": scale}))
        errors.append((out[..., 0].double() * (math.exp(scale) + 1) - 1).abs().max().item())
    return max(errors)


@on_matrices
def test_the_kernel_that_is_named_is_the_one_that_runs(op: NativeOp) -> None:
    """How many bits of a weight count shows: 8 in matrices, twice as many where few rows leave room
    for a second part, or all that a float has.
    """
    for group_size, num_queries in ((5, 1), (8, 1), (5, 3), (8, 2), (16, 1)):
        error = error_of_weights(op, group_size=group_size, num_queries=num_queries)
        assert 2**-10 < error < 2**-8
    for group_size, num_queries in ((4, 1), (2, 2), (1, 4)):
        error = error_of_weights(op, group_size=group_size, num_queries=num_queries)
        assert 2**-20 < error < 2**-17
    assert error_of_weights(op, group_size=3) < 2**-20


def test_the_emulation_is_never_chosen_by_itself() -> None:
    library.set_isa(None)
    assert cpu.backend().isa in set(ISAS) - {"amx_emulated"}


def test_matrix_instructions_are_in_the_amx_kernel_alone() -> None:
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump is not installed")
    listing = subprocess.run(
        [objdump, "-d", "--no-show-raw-insn", str(cpu.backend().library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    owners = set()
    products = 0
    for function in re.split(r"\n\n", listing):
        if re.search(r"\b(tdpbf16ps|tileloadd|tilestored|ldtilecfg)\b", function):
            owners.add("8sparsekv3amx" in function.splitlines()[0])
            products += function.count("tdpbf16ps")
    if not owners:
        pytest.skip("this processor or compiler does not know AMX")
    assert owners == {True}
    assert products >= 16


# Accuracy


@on_matrices
@pytest.mark.parametrize("group_size", [4, 5, 7, 8, 9, 12, 15, 16, 17, 32, 33, 64, 128])
@pytest.mark.parametrize("apart", [False, True])
def test_group_sizes(op: NativeOp, group_size: int, apart: bool) -> None:
    check(op, make_case(group_size=group_size, apart=apart))
    check(op, make_case(group_size=group_size, apart=apart, batch=2, num_kv_heads=2, tokens=20))


SIZES = [(d, d) for d in (64, 80, 96, 128, 192, 256, 512)] + [(576, 512), (192, 128), (7, 33)]


@on_matrices
@pytest.mark.parametrize("group_size", [4, 6, 16, 64])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), SIZES)
def test_head_sizes(op: NativeOp, group_size: int, head_dim: int, head_dim_v: int) -> None:
    for shared_kv in {False, head_dim_v <= head_dim}:
        for apart in (False, True):
            shape = {"head_dim": head_dim, "head_dim_v": head_dim_v, "shared_kv": shared_kv}
            check(op, make_case(group_size=group_size, apart=apart, tokens=35, **shape))


@on_matrices
@pytest.mark.parametrize("group_size", [4, 6, 16, 64])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 64, 65, 128, 129, 200, 3000])
def test_numbers_of_tokens(op: NativeOp, group_size: int, tokens: int) -> None:
    check(op, make_case(group_size=group_size, tokens=tokens, segments=1, head_dim=32))


@on_matrices
@pytest.mark.parametrize(
    ("group_size", "num_queries"),
    [
        (2, 2),
        (1, 4),
        (3, 2),
        (1, 7),
        (2, 4),
        (4, 3),
        (7, 2),
        (2, 8),
        (8, 2),
        (16, 3),
        (64, 2),
        (3, 30),
        (1, 70),
    ],
)
def test_several_query_tokens(op: NativeOp, group_size: int, num_queries: int) -> None:
    for sliding_window in (None, 5, 50, 100):
        case = make_case(group_size=group_size, num_queries=num_queries, tokens=50)
        check(op, case | {"sliding_window": sliding_window})


@on_matrices
@pytest.mark.parametrize("group_size", [4, 6, 16, 64])
def test_a_float32_query_keeps_all_its_digits(op: NativeOp, group_size: int) -> None:
    case = make_case(group_size=group_size, query_dtype=torch.float32, head_dim=256)
    query = case["query"]
    check(op, case)
    check(op, case | {"query": query / 7 + 1e-4})
    check(op, case | {"softmax_scale": -0.05})
    case["query"] = query.to(torch.bfloat16).float()  # exact in one part: the same to the bit
    exact = op(**case)
    for got, want in zip(op(**(case | {"query": query.to(torch.bfloat16)})), exact, strict=True):
        assert torch.equal(got, want)


@on_matrices
@pytest.mark.parametrize("group_size", [4, 6, 16, 64])
def test_a_largest_score_that_comes_late_decays_what_came_before(
    op: NativeOp, group_size: int
) -> None:
    case = make_case(group_size=group_size, tokens=700, segments=1)
    case["query"] = case["query"].abs()
    case["key"].mul_(torch.linspace(0, 2, 700)[:, None]).abs_()
    check(op, case)
    check(op, case | {"key": case["key"].flip(3)})


@on_matrices
@pytest.mark.parametrize("group_size", [4, 6, 16, 64])
def test_every_row_has_its_own_largest_score(op: NativeOp, group_size: int) -> None:
    case = make_case(group_size=group_size, tokens=260, segments=1)
    size = torch.logspace(-2, 2, group_size)[torch.randperm(group_size)]
    check(op, case | {"query": (case["query"] * size[None, :, None, None]).to(torch.bfloat16)})


@on_matrices
@pytest.mark.parametrize("group_size", [4, 6, 16, 64])
def test_equal_values_are_given_back(op: NativeOp, group_size: int) -> None:
    """Rounded weights are normalised by their own total, which this needs; the lse is not."""
    case = make_case(group_size=group_size, num_queries=2, tokens=300)
    case["value"] = torch.randn(64).to(torch.bfloat16).expand(case["value"].shape)
    check(op, case)
    out, _ = op(**case)
    torch.testing.assert_close(out, case["value"][0, :1, :, :1].float().expand(out.shape))


# What is hidden, and what is not


def hide(case: dict[str, Any], hidden: Tensor, junk: float) -> dict[str, Any]:
    """With `junk` in the slots of (segments, batch, tokens) that are hidden."""
    place = hidden[:, :, None, :, None]
    return case | {name: case[name].masked_fill(place, junk) for name in ("key", "value")}


@on_matrices
@pytest.mark.parametrize("junk", [NAN, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("group_size", "num_queries"),
    [(4, 1), (2, 2), (5, 1), (12, 1), (2, 4), (16, 1), (64, 1), (6, 6)],
)
def test_hidden_slots_never_reach_an_output(
    op: NativeOp, junk: float, group_size: int, num_queries: int
) -> None:
    case = make_case(group_size=group_size, num_queries=num_queries, batch=2, apart=False)
    case |= {"query_start": 200, "sliding_window": 150, "key_start": torch.tensor([60, 3])}
    mask = torch.rand(2, 231, generator=torch.Generator().manual_seed(1)) < 0.8
    mask[:, 96:190] = True
    position = case["positions"][:, None] + torch.arange(77)  # [N, W]
    seen = mask[:, position] & (position >= case["key_start"][:, None, None])
    seen &= (position < 200 + num_queries) & (position > 200 - 150)
    junked = hide(case, ~seen.transpose(0, 1), junk) | {"key_mask": mask}
    out, lse = op(**junked)
    want = op(**case, key_mask=mask)
    assert out.isfinite().all()
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    check(op, hide(case, ~seen.transpose(0, 1), 0.0) | {"key_mask": mask})


@on_matrices
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize(
    ("group_size", "num_queries"),
    [(4, 1), (2, 2), (5, 1), (12, 1), (2, 4), (16, 1), (64, 1), (16, 6)],
)
def test_visible_nan_shows(op: NativeOp, name: str, group_size: int, num_queries: int) -> None:
    case = make_case(group_size=group_size, num_queries=num_queries, segments=1, batch=2)
    case[name][0, 1, 0, 74, 5] = NAN  # the queries are at 77 - num_queries ... 76
    out, lse = op(**case)
    sees = torch.zeros(lse.shape, dtype=torch.bool)
    sees[1] = torch.arange(77 - num_queries, 77) >= 74
    if name == "key":
        assert torch.equal(lse.isnan(), sees)
        assert torch.equal(out.isnan(), sees[..., None].expand_as(out))
    else:
        assert not lse.isnan().any()
        assert torch.equal(out[..., 5].isnan(), sees)
        assert out[..., :5].isfinite().all()


@on_matrices
@pytest.mark.parametrize("query_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group_size", [4, 6, 16, 64])
def test_scores_of_minus_infinity_weigh_nothing(
    op: NativeOp, group_size: int, query_dtype: torch.dtype
) -> None:
    """Also where a query in parts would find an infinite key times zero."""
    case = make_case(group_size=group_size, segments=1, query_dtype=query_dtype)
    case["query"] = case["query"].abs()
    case["query"][..., 0] = 1.0  # one part
    case["key"][:, :, :, 3, 0] = -torch.inf
    mask = torch.ones(1, 77, dtype=torch.bool)
    mask[:, 3] = False
    out, lse = op(**case)
    want_out, want_lse = op(**case, key_mask=mask)
    torch.testing.assert_close(out, want_out, rtol=0, atol=3e-3)
    torch.testing.assert_close(lse, want_lse)

    case["key"][..., 0] = -torch.inf  # all of them: as if nothing were visible
    out, lse = op(**case)
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == -torch.inf).all()

    case["key"][:, :, :, 3, 0] = torch.inf
    out, lse = op(**case)
    assert out.isnan().all()
    assert lse.isnan().all()


@on_matrices
def test_an_infinite_or_nan_query_spoils_its_own_row_alone(op: NativeOp) -> None:
    case = make_case(query_dtype=torch.float32)
    want = op(**case)
    for junk in (NAN, torch.inf, -torch.inf):
        spoilt = case["query"].clone()
        spoilt[:, 3, :, 7] = junk
        out, lse = op(**(case | {"query": spoilt}))
        others = torch.arange(16) != 3
        assert out[:, 3].isnan().all()
        assert torch.equal(out[:, others], want[0][:, others])
        assert torch.equal(lse[:, others], want[1][:, others])


# Where keys lie


@on_matrices
@pytest.mark.parametrize("group_size", [4, 6, 16, 64])
@pytest.mark.parametrize("block_size", [1, 8, 16, 48])
def test_block_lists(op: NativeOp, group_size: int, block_size: int) -> None:
    case = make_case(group_size=group_size, batch=2, head_dim=96, shared_kv=block_size == 1)
    num_blocks = -(-3 * 77 // block_size)
    random = torch.Generator().manual_seed(2)
    order = torch.stack([torch.randperm(num_blocks, generator=random) for _ in range(2)])
    counts = torch.tensor([[num_blocks * 2 // 3], [1]])
    blocks = BlockLists(indices=order[:, None], num_blocks=counts, block_size=block_size)
    check(op, case | {"blocks": blocks})


@on_matrices
def test_tokens_of_rows_that_lie_backwards_or_on_one_another(op: NativeOp) -> None:
    case = make_case(tokens=64, segments=1)
    check(op, case | {name: case[name].flip(3) for name in ("key", "value")})
    same = {name: case[name][:, :, :, 5:6].expand(case[name].shape) for name in ("key", "value")}
    check(op, case | same)


@on_matrices
def test_values_of_another_stride_than_the_keys(op: NativeOp) -> None:
    case = make_case(apart=True)
    check(op, case | {"value": case["value"].contiguous()})
    check(op, case | {"value": case["key"]})
    odd = torch.randn(3, 1, 1, 77, 65).to(torch.bfloat16)[..., 1:]  # not even to 4 bytes
    check(op, case | {"value": odd, "key": odd})


@on_matrices
def test_a_row_table_moves_rows(op: NativeOp) -> None:
    case = make_case(batch=3, num_kv_heads=2)
    check(op, case | {"row_table": torch.tensor([[2, 2, 0], [1, 1, 1], [0, 2, 1]])})


@on_matrices
def test_nothing_to_see_gives_zero_and_minus_infinity(op: NativeOp) -> None:
    case = make_case(batch=2) | {"key_start": torch.tensor([0, 1000])}
    out, lse = op(**case)
    assert lse[0].isfinite().all()
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()


def test_hardware_and_emulation_agree() -> None:
    """They add in the same order, but for how the hardware rounds between."""
    for group_size in (2, 5, 6, 16, 64):
        case = make_case(group_size=group_size, num_queries=2)
        with use_isa("amx"):
            out, lse = cpu.partial_attention(**case)
        with use_isa("amx_emulated"):
            want_out, want_lse = cpu.partial_attention(**case)
        torch.testing.assert_close(out, want_out, rtol=0, atol=2e-3)
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
