"""The native library: accuracy, instruction sets, threads and forks.

What it shares with the other implementations is tested in test_partial_attention.py, what it
refuses in test_wrong_attention.py, how it is found and built in test_library.py.
"""

import contextlib
import ctypes
import re
import shutil
import subprocess
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from native_ops import ISAS, NATIVE_OPS, NativeOp
from native_process import run_python

from sparsekv.errors import LayoutError
from sparsekv.kernels import cpu, reference, torch_ops
from sparsekv.kernels.cpu import library

ROOT = Path(__file__).parents[2]
NAN = torch.nan
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_isa = pytest.mark.parametrize("op", NATIVE_OPS)


@pytest.fixture(autouse=True)
def native_library() -> None:
    if library.native_library() is None:
        pytest.skip(f"no native library: {cpu.backend().reason}")


def make_case(
    dtype: torch.dtype,
    *,
    seed: int = 0,
    batch: int = 2,
    num_kv_heads: int = 2,
    group_size: int = 4,
    segments: int = 3,
    tokens: int = 77,
    num_queries: int = 1,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    shared_kv: bool = False,
) -> dict[str, Any]:
    """Arguments of one call: segments in no order, the queries the newest tokens."""
    random = torch.Generator().manual_seed(seed)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    shape = (segments, batch, num_kv_heads, 2, tokens, max(head_dim, head_dim_v))
    stored = torch.randn(shape, generator=random).to(dtype)
    key = stored[:, :, :, 0, :, :head_dim]
    query = torch.randn(batch, num_kv_heads * group_size, num_queries, head_dim, generator=random)
    return {
        "query": (3 * query).to(dtype),
        "key": key,
        "value": key[..., :head_dim_v] if shared_kv else stored[:, :, :, 1, :, :head_dim_v],
        "positions": torch.randperm(segments, generator=random) * tokens,
        "softmax_scale": head_dim**-0.5,
        "query_start": segments * tokens - num_queries,
    }


def check(op: Any, case: dict[str, Any]) -> None:
    """Each result of a head is as near to float64 as its kernel promises, the lse within 1e-5."""
    out, lse = op(**case)
    tolerance = op.tolerance(case["query"], case["key"])
    exact = {name: case[name].double() for name in ("query", "key", "value")}
    want_out, want_lse = reference.partial_attention(**(case | exact))
    assert out.dtype == lse.dtype == torch.float32
    assert ((out - want_out).norm(dim=-1) <= tolerance * want_out.norm(dim=-1)).all()
    seen = want_lse.isfinite()
    assert torch.equal(lse[~seen].double(), want_lse[~seen])
    scores = torch.einsum(
        "bghd,nbgkd->nbghk",
        exact["query"].flatten(1, 2).unflatten(1, (case["key"].shape[2], -1)),
        exact["key"][:, : len(out)],
    )
    largest = max(1.0, (scores * case["softmax_scale"]).abs().max().item())
    assert ((lse - want_lse)[seen].abs() <= 1e-5 * largest).all()


# Accuracy


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [1, 3, 5, 6, 7, 8, 12, 16, 64])
def test_group_sizes(op: NativeOp, dtype: torch.dtype, group_size: int) -> None:
    for num_queries in (1, 3):
        shape = {"group_size": group_size, "num_queries": num_queries, "head_dim": 32}
        check(op, make_case(dtype, batch=1, num_kv_heads=1 if group_size > 12 else 2, **shape))


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(d, d) for d in (64, 80, 96, 128, 192, 256, 512, 576)] + [(576, 512), (192, 128), (7, 33)],
)
def test_head_sizes(op: NativeOp, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    check(op, make_case(dtype, batch=1, num_kv_heads=1, head_dim=head_dim, head_dim_v=head_dim_v))


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_keys_and_values(op: NativeOp, dtype: torch.dtype) -> None:
    shapes = {"head_dim": 576, "head_dim_v": 512, "group_size": 16, "num_kv_heads": 1}
    check(op, make_case(dtype, shared_kv=True, num_queries=2, **shapes))


@every_isa
@pytest.mark.parametrize("num_queries", [1, 2, 8, 9, 40])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
def test_numbers_of_tokens(op: NativeOp, num_queries: int, tokens: int) -> None:
    num_queries = min(num_queries, 3 * tokens)
    shape = {"tokens": tokens, "num_queries": num_queries, "head_dim": 32}
    check(op, make_case(torch.bfloat16, batch=1, num_kv_heads=1, **shape))


@every_isa
def test_ranges_of_a_long_row_merge(op: NativeOp) -> None:
    case = make_case(torch.bfloat16, batch=1, segments=40, tokens=256, num_kv_heads=1, head_dim=32)
    check(op, case)
    check(op, case | {"key_mask": torch.arange(40 * 256)[None] >= 7000})  # whole ranges hidden


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_tables_and_key_masks(op: NativeOp, dtype: torch.dtype) -> None:
    case = make_case(dtype, batch=3, num_queries=5)
    table = torch.tensor([[2, 2, 0], [1, 1, 1], [0, 2, 1]])
    mask = torch.rand(3, 3 * 77, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[1] = False  # a row with nothing to see
    check(op, case | {"row_table": table})
    check(op, case | {"key_mask": mask})
    check(op, case | {"key_mask": mask, "row_table": table, "query_start": 100})


@every_isa
def test_every_number_of_float16_is_converted_exactly(op: NativeOp) -> None:
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    value = numbers.view(-1, 1, 1, 1, 32)
    zeros = torch.zeros(1, 1, 1, 1, 32, dtype=torch.float16)
    for start in range(0, len(value), 256):  # one key for each row, so its weight is 1
        rows = value[start : start + 256].transpose(0, 1)
        out, _ = op(
            zeros[0].expand(256, 1, 1, 32),
            zeros.expand(rows.shape),
            rows,
            torch.tensor([0]),
            1.0,
        )
        torch.testing.assert_close(
            out[:, 0, 0], rows[0, :, 0, 0].float(), rtol=0, atol=0, equal_nan=True
        )


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("large", [100.0, 200.0])
def test_large_scores(op: NativeOp, dtype: torch.dtype, large: float) -> None:
    case = make_case(dtype, num_queries=2)
    case["query"] = (case["query"] * large).to(dtype)
    out, lse = op(**case)
    exact = {name: case[name].double() for name in ("query", "key", "value")}
    single = {name: case[name].float() for name in ("query", "key", "value")}
    want = reference.partial_attention(**(case | exact))
    usual = torch_ops.partial_attention(**(case | single))
    assert want[1].max() > 1e3
    is_rounded = op.kernel_for(case["query"], case["key"]).startswith("amx")
    slacks = (op.tolerance(case["query"], case["key"]) if is_rounded else 1e-6, 1e-6)
    for got, true, plain, slack in zip((out, lse), want, usual, slacks, strict=True):
        assert got.isfinite().all()
        error, usual_error = (got - true).abs().max(), (plain - true).abs().max()
        assert error <= 2 * usual_error + slack * true.abs().max()


# Long sums, with whole vectors of query rows: not in matrices, which have tests of their own.
LONG_SUMS = {"batch": 1, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512}
vector_isas = pytest.mark.parametrize("op", NATIVE_OPS[-3:])
most_dtypes = pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],
)


@vector_isas
@most_dtypes
@pytest.mark.parametrize(("group_size", "num_queries"), [(16, 1), (12, 3)])
@pytest.mark.parametrize("cancels", [False, True])
def test_long_sums_round_little(
    op: NativeOp, dtype: torch.dtype, group_size: int, num_queries: int, cancels: bool
) -> None:
    """Products of one sign, or whose second half undoes the first: sums are large on the way."""
    case = make_case(dtype, group_size=group_size, num_queries=num_queries, **LONG_SUMS)
    key, query = case["key"].float().abs(), case["query"].float().abs()
    if cancels:
        key[..., 288:] = key[..., :288] + case["key"][..., 288:].float() / 10
        query[..., 288:] = -query[..., :288]
    query *= 2 if cancels else 2 / 3
    check(op, case | {"key": key.to(dtype), "query": query.to(dtype)})


@vector_isas
@most_dtypes
@pytest.mark.parametrize("one_sign", [False, True])
def test_large_scores_of_long_sums(op: NativeOp, dtype: torch.dtype, one_sign: bool) -> None:
    """Errors are means over heads: the largest depends on which two keys nearly tie."""
    case = make_case(dtype, group_size=64, **LONG_SUMS)
    case["query"] = (case["query"] * 100).to(dtype)
    if one_sign:
        case |= {"query": case["query"].abs(), "key": case["key"].abs()}
    exact = {name: case[name].double() for name in ("query", "key", "value")}
    single = {name: case[name].float() for name in ("query", "key", "value")}
    want = reference.partial_attention(**(case | exact))
    usual = torch_ops.partial_attention(**(case | single))
    assert want[1].max() > 1e3
    for got, true, plain in zip(op(**case), want, usual, strict=True):
        assert got.isfinite().all()
        assert (got - true).abs().mean() <= 2 * (plain - true).abs().mean()


@every_isa
@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale(op: NativeOp, scale: float) -> None:
    case = make_case(torch.float32, num_queries=4) | {"softmax_scale": scale}
    check(op, case | {"query": case["query"] / 3, "query_start": 150})


# NaN and infinity


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("junk", [NAN, torch.inf, -torch.inf])
@pytest.mark.parametrize("num_queries", [1, 6])
def test_hidden_slots_never_reach_an_output(
    op: NativeOp, dtype: torch.dtype, junk: float, num_queries: int
) -> None:
    case = make_case(dtype, num_queries=num_queries) | {"query_start": 200}
    mask = torch.arange(231) >= torch.tensor([[40], [231 - 31 - num_queries]])
    mask[0, 150:160] = mask[0, ::7] = False  # holes
    place = case["positions"][:, None] + torch.arange(77)  # [N, W]
    hidden = ~mask[:, place].transpose(0, 1)[:, :, None, :, None]
    hidden |= (place >= 200 + num_queries)[:, None, None, :, None]
    want = op(**case, key_mask=mask)
    junked = {name: case[name].masked_fill(hidden, junk) for name in ("key", "value")}
    out, lse = op(**(case | junked), key_mask=mask)
    assert out.isfinite().all()
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["key", "value"])
def test_visible_nan_shows(op: NativeOp, dtype: torch.dtype, name: str) -> None:
    case = make_case(dtype, num_queries=6, segments=1)  # queries at 71 ... 76
    case[name][0, 1, 0, 74, 5] = NAN
    out, lse = op(**case)
    sees = torch.zeros(lse.shape, dtype=torch.bool)
    sees[1, :4, 3:] = True
    if name == "key":
        assert torch.equal(lse.isnan(), sees)
        assert torch.equal(out.isnan(), sees[..., None].expand_as(out))
    else:
        assert not lse.isnan().any()
        assert torch.equal(out[..., 5].isnan(), sees)
        assert out[..., :5].isfinite().all()


@every_isa
def test_scores_of_minus_infinity_weigh_nothing(op: NativeOp) -> None:
    case = make_case(torch.float32, segments=1, head_dim=8)
    case["query"] = case["query"].abs()
    case["key"][:, :, :, 3, 0] = -torch.inf
    out, lse = op(**case)
    mask = torch.ones(2, 77, dtype=torch.bool)
    mask[:, 3] = False
    want_out, want_lse = op(**case, key_mask=mask)
    torch.testing.assert_close(out, want_out)
    torch.testing.assert_close(lse, want_lse)

    case["key"][..., 0] = -torch.inf  # all of them: as if nothing were visible
    out, lse = op(**case)
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == -torch.inf).all()

    case["key"][:, :, :, 3, 0] = torch.inf
    out, lse = op(**case)
    assert out.isnan().all()
    assert lse.isnan().all()


# Instruction sets


def instructions(isa: str) -> Counter[str]:
    """How often the code of one instruction set names registers of each width."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump is not installed")
    path = cpu.backend().library
    assert path is not None
    listing = subprocess.run(
        [objdump, "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True
    ).stdout
    counts: Counter[str] = Counter()
    own = False
    for line in listing.splitlines():
        if line.endswith(">:"):
            own = f"8sparsekv{len(isa)}{isa}" in line
        elif own:
            counts.update(name for name in ("zmm", "ymm", "xmm") if f"%{name}" in line)
    return counts


@pytest.mark.parametrize(("isa", "widest"), [("avx512", "zmm"), ("avx2", "ymm")])
def test_code_of_an_isa_uses_its_registers(isa: str, widest: str) -> None:
    counts = instructions(isa)
    if not counts:
        pytest.skip("this processor is not of that family")
    assert counts[widest] > 1000
    assert isa == "avx512" or not counts["zmm"]


def test_portable_code_uses_no_wide_registers() -> None:
    counts = instructions("portable")
    assert not counts["zmm"]
    assert not counts["ymm"]


def test_the_best_isa_is_chosen_and_another_can_be() -> None:
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    best = cpu.backend().isa
    request_matrices = (158, 0x1023, 18)  # arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA) of x86-64
    if {"amx_bf16", "amx_tile", "avx512_bf16"} <= set(flags) and not ctypes.CDLL(None).syscall(
        *request_matrices
    ):
        assert best == "amx"
    elif {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(flags):
        assert best == "avx512"
    for isa in ISAS:
        with contextlib.suppress(LayoutError):
            library.set_isa(isa)
            assert cpu.backend().isa == isa
    library.set_isa(None)
    assert cpu.backend().isa == best
    with pytest.raises(LayoutError, match="isa='sse9'"):
        library.set_isa("sse9")


# Threads and forks


@pytest.fixture
def restored_threads() -> Any:
    yield
    library.set_num_threads(None)


@pytest.mark.parametrize(
    "shape",
    [
        {"segments": 9, "tokens": 256, "num_queries": 2},
        # Ranges merged in many pieces, by threads that wait for the last of them too.
        {"segments": 9, "tokens": 256, "num_kv_heads": 1, "group_size": 64, "head_dim": 256},
        {"segments": 40, "tokens": 64, "num_queries": 100, "batch": 1},
    ],
)
def test_the_result_does_not_depend_on_the_number_of_threads(
    shape: dict[str, int], restored_threads: None
) -> None:
    case = make_case(torch.bfloat16, **shape)
    results = []
    for num_threads in (1, 2, 5, 5, 5):
        library.set_num_threads(num_threads)
        assert cpu.backend().num_threads == num_threads
        results.append(cpu.partial_attention(**case))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("wrong", [0, -1, 5000])
def test_impossible_numbers_of_threads_are_refused(wrong: int) -> None:
    with pytest.raises(LayoutError, match=f"num_threads={wrong}"):
        library.set_num_threads(wrong)


def test_several_python_threads_at_once(restored_threads: None) -> None:
    cases = [make_case(torch.bfloat16, seed=seed, segments=4, tokens=256) for seed in range(4)]
    want = [cpu.partial_attention(**case)[0] for case in cases]
    failed = []

    def work(index: int) -> None:
        for _ in range(20):
            if not torch.equal(cpu.partial_attention(**cases[index])[0], want[index]):
                failed.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for num_threads in (1, 3, 2):  # also while they run
        library.set_num_threads(num_threads)
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert not failed


FORK = """
import os, sys, torch, warnings
warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads: that is the test
from sparsekv.kernels import cpu
kv = torch.randn(9, 2, 2, 256, 64)
call = (torch.randn(2, 8, 1, 64), kv, kv, torch.arange(9) * 256, 0.1)
want, _ = cpu.partial_attention(*call, query_start=9 * 256)
for depth in range(3):  # children of children too
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if depth else 0 if code == 3 else 1)
    got, _ = cpu.partial_attention(*call, query_start=9 * 256)
    assert torch.equal(got, want)
os._exit(3)
"""


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    done = run_python(FORK)
    assert (done.returncode, done.stderr) == (0, "")


# Sources


def test_no_source_uses_streams() -> None:
    """Where the compiler links its own C++ library, their locales crash beside the process's."""
    for source in (ROOT / "kernels" / "cpu").glob("*.[ch]*"):
        text = source.read_text(encoding="utf-8")
        assert not re.search(r"#include <(fstream|sstream|iostream|iomanip|locale|regex)>", text)
