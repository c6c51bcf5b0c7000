"""Gathers of blocks and copies of segments: exactly the named bytes, in every implementation."""

import contextlib
import dataclasses
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_ops import ISAS, use_isa
from torch import Tensor

from sparsekv.errors import LayoutError, SparseKVError
from sparsekv.kernels import cpu, reference, torch_ops
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.cpu import library
from sparsekv.kernels.dispatch import copy_segment_for, gather_blocks_for

POISON = 0x5A
CPU = torch.device("cpu")


class Native:
    """The ops of the native library in one instruction set; skips where it cannot run."""

    def __init__(self, isa: str) -> None:
        self.isa = isa

    def gather_blocks(self, *tensors: Any, **options: Any) -> None:
        with use_isa(self.isa):
            cpu.gather_blocks(*tensors, **options)

    def copy_segment(self, source: Tensor, out: Tensor) -> None:
        with use_isa(self.isa):
            cpu.copy_segment(source, out)


every_op = pytest.mark.parametrize(
    "ops",
    [
        *(pytest.param(Native(isa), id=isa) for isa in ISAS),
        pytest.param(torch_ops, id="torch"),
    ],
)


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)


def poisoned(
    shape: tuple[int, ...], dtype: torch.dtype, *, shift: int = 0
) -> tuple[Tensor, Tensor]:
    """A tensor of poison that starts `shift` numbers off its alignment, and the bytes around it."""
    count = torch.Size(shape).numel()
    memory = torch.full((count + shift + 64,), 0, dtype=dtype)
    memory.view(torch.uint8).fill_(POISON)
    return memory[shift : shift + count].view(shape), memory.view(torch.uint8)


def make_case(
    dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int = 0,
    segments: int = 3,
    batch: int = 2,
    num_kv_heads: int = 2,
    tokens: int = 32,
    dim: int = 40,
    block_size: int = 8,
    max_blocks: int = 5,
    with_rows: bool = False,
) -> dict[str, Any]:
    """Arguments of one gather, but for out: keys beside values, lists of all lengths."""
    random = torch.Generator().manual_seed(seed)
    rows = 4 if with_rows else batch
    width = dim * torch.empty(0, dtype=dtype).element_size()
    stored = random_bytes(segments, rows, num_kv_heads, 2, tokens, width, seed=seed).view(dtype)
    blocks = -(-segments * tokens // block_size)
    lists = (batch, num_kv_heads)
    ids = torch.randint(0, blocks, (*lists, max_blocks), generator=random)
    longest = min(max_blocks, blocks)
    lengths = torch.randint(0, longest + 1, lists, generator=random)
    lengths[0, 0] = longest
    ids[0, 0, 0] = blocks - 1  # the one that may be partial
    ids[torch.arange(max_blocks) >= lengths[..., None]] = -(2**62)  # nobody may look at these
    return {
        "source": stored[:, :, :, 0],
        "blocks": BlockLists(indices=ids, num_blocks=lengths, block_size=block_size),
        "row_table": torch.randint(0, 4, (segments, batch), generator=random)
        if with_rows
        else None,
    }


def out_shape(case: dict[str, Any]) -> tuple[int, ...]:
    blocks = case["blocks"]
    return (*blocks.indices.shape, blocks.block_size, case["source"].shape[-1])


def check_gather(ops: Any, case: dict[str, Any], *, shift: int = 0) -> None:
    """The op and the reference leave the same bytes, in and around an out full of poison."""
    shape, dtype = out_shape(case), case["source"].dtype
    out, memory = poisoned(shape, dtype, shift=shift)
    ops.gather_blocks(**case, out=out)
    want, want_memory = poisoned(shape, dtype, shift=shift)
    reference.gather_blocks(**case, out=want)
    assert torch.equal(memory, want_memory)


# Gather


@every_op
@pytest.mark.parametrize("block_size", [1, 3, 8, 20, 32, 50, 200])
@pytest.mark.parametrize("with_rows", [False, True])
def test_gather_matches_the_reference(ops: Any, block_size: int, with_rows: bool) -> None:
    check_gather(ops, make_case(block_size=block_size, with_rows=with_rows))


@every_op
@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.float8_e4m3fn, torch.float16, torch.float32, torch.float64, torch.int64],
)
def test_any_dtype_is_copied_bit_by_bit(ops: Any, dtype: torch.dtype) -> None:
    check_gather(ops, make_case(dtype, seed=1))


@every_op
@pytest.mark.parametrize("dim", [1, 63, 64, 65, 584])
@pytest.mark.parametrize("shift", [0, 1, 17, 63])
def test_no_address_needs_to_be_aligned(ops: Any, dim: int, shift: int) -> None:
    case = make_case(torch.uint8, dim=dim + 1, block_size=5)
    case["source"] = case["source"][..., 1:]  # tokens apart, at odd addresses
    check_gather(ops, case, shift=shift)
    check_gather(ops, make_case(torch.uint8, dim=dim, block_size=7), shift=shift)


@every_op
def test_blocks_of_several_items_are_copied_whole(ops: Any) -> None:
    case = make_case(torch.uint8, tokens=64, dim=1000, block_size=61, max_blocks=40, segments=2)
    check_gather(ops, case, shift=5)


@every_op
def test_out_may_be_strided(ops: Any) -> None:
    case = make_case()
    batch, num_kv_heads, max_blocks, block_size, dim = out_shape(case)
    shape = (batch, max_blocks, block_size, num_kv_heads, dim + 3)
    want, want_memory = poisoned(shape, torch.bfloat16)
    out, memory = poisoned(shape, torch.bfloat16)
    ops.gather_blocks(**case, out=out.permute(0, 3, 1, 2, 4)[..., :dim])
    reference.gather_blocks(**case, out=want.permute(0, 3, 1, 2, 4)[..., :dim])
    assert torch.equal(memory, want_memory)


@every_op
@pytest.mark.parametrize(
    "change",
    [{"batch": 0}, {"max_blocks": 1}, {"num_kv_heads": 1}, {"segments": 1}, {"tokens": 1}],
)
def test_smallest_sizes(ops: Any, change: dict[str, int]) -> None:
    if change == {"batch": 0}:
        case = make_case()
        case["blocks"] = changed(indices=IDS[:0], num_blocks=LENGTHS[:0])
        case["source"] = case["source"][:, :0]
    else:
        case = make_case(**change)
    check_gather(ops, case)


@every_op
def test_empty_lists_write_nothing(ops: Any) -> None:
    case = make_case() | {"blocks": changed(num_blocks=torch.zeros_like(LENGTHS))}
    for source in (case["source"], case["source"][:0]):
        out, memory = poisoned(out_shape(case), torch.bfloat16)
        ops.gather_blocks(**(case | {"source": source}), out=out)
        assert (memory == POISON).all()


@settings(deadline=None)
@given(data=st.data())
def test_any_gather_matches_the_reference(data: st.DataObject) -> None:
    sizes = {name: data.draw(st.integers(1, 5)) for name in ("segments", "batch", "num_kv_heads")}
    case = make_case(
        data.draw(st.sampled_from([torch.uint8, torch.bfloat16])),
        seed=data.draw(st.integers(0, 1000)),
        tokens=data.draw(st.integers(1, 40)),
        dim=data.draw(st.integers(1, 100)),
        block_size=data.draw(st.integers(1, 50)),
        max_blocks=data.draw(st.integers(1, 6)),
        with_rows=data.draw(st.booleans()),
        **sizes,
    )
    shift = data.draw(st.integers(0, 64))
    check_gather(torch_ops, case, shift=shift)
    if library.native_library() is not None:
        check_gather(cpu, case, shift=shift)


# Segments


@every_op
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 3])
def test_a_copied_segment_equals_its_staging_buffer(
    ops: Any, dtype: torch.dtype, shift: int
) -> None:
    staged = random_bytes(2, 3, 2, 300, 80 * dtype.itemsize).view(dtype)
    out, memory = poisoned((2, 3, 2, 300, 80), dtype, shift=shift)
    want, want_memory = poisoned((2, 3, 2, 300, 80), dtype, shift=shift)
    for part in (0, 1):  # keys, then values: each a view between the other's
        ops.copy_segment(staged[:, :, part], out[:, :, part])
        reference.copy_segment(staged[:, :, part], want[:, :, part])
        assert torch.equal(memory, want_memory)


@every_op
def test_a_segment_of_several_items_is_copied_whole(ops: Any) -> None:
    staged = random_bytes(2, 2, 700, 1001)
    out, _ = poisoned((2, 2, 700, 1001), torch.uint8)
    ops.copy_segment(staged, out)
    assert torch.equal(out, staged)


@every_op
def test_an_empty_segment_is_no_error(ops: Any) -> None:
    for shape in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)):
        ops.copy_segment(torch.zeros(shape), torch.zeros(shape))


# Instructions


@pytest.mark.parametrize(("isa", "register"), [("avx512", "zmm"), ("avx2", "ymm")])
def test_stores_pass_the_caches_by_in_the_width_of_the_isa(isa: str, register: str) -> None:
    if library.native_library() is None:
        pytest.skip(f"no native library: {cpu.backend().reason}")
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump is not installed")
    path = cpu.backend().library
    assert path is not None
    command = [objdump, "-d", "--no-show-raw-insn", str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    bodies = re.findall(rf"^\w+ <(\w*{isa}\w*4copyE\w*Piece\w*)>:\n(.*?)^$", listing, re.M | re.S)
    if not bodies:
        pytest.skip("this processor is not of that family")
    ((_, body),) = bodies
    stores = re.findall(r"\b(v?movnt\w+)\s+%([xyz]mm)\d+,", body)
    assert len(stores) >= 4
    assert set(stores) == {("vmovntdq", register)}
    assert "sfence" in body
    assert "prefetcht" in body


# Wrong inputs

SOURCE, BLOCKS = make_case()["source"], make_case()["blocks"]
IDS, LENGTHS = BLOCKS.indices, BLOCKS.num_blocks
OUT = torch.zeros(2, 2, 5, 8, 40, dtype=torch.bfloat16)


def changed(**changes: Any) -> BlockLists:
    return dataclasses.replace(BLOCKS, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": SOURCE[0]}, "source .* must have 5 dimensions"),
        ({"out": OUT[0]}, "out .* must have 5 dimensions"),
        ({"out": OUT.float()}, "a copy converts nothing"),
        ({"out": OUT[..., :39]}, "must be equal"),
        ({"source": SOURCE.transpose(3, 4)}, "last dimension contiguous"),
        ({"out": OUT.transpose(3, 4).contiguous().transpose(3, 4)}, "last dimension contiguous"),
        ({"source": SOURCE[..., :0], "out": OUT[..., :0]}, "at least one"),
        ({"source": SOURCE.to("meta")}, "source is torch.strided on meta"),
        ({"out": OUT.to("meta")}, "out is torch.strided on meta"),
        ({"source": SOURCE.to_sparse()}, "source is torch.sparse"),
        ({"out": OUT[:, :, :, :7]}, r"out .*: must be \(2, 2, 5, 8, 40\)"),
        ({"out": OUT[:, :, :4]}, r"out .*: must be \(2, 2, 5, 8, 40\)"),
        ({"out": OUT[:, :, :1].expand(OUT.shape)}, "its tokens overlap"),
        ({"out": OUT[:1]}, "block lists for"),
        ({"source": SOURCE[:, :, :1]}, "block lists for"),
        ({"blocks": changed(indices=IDS.to("meta"), num_blocks=LENGTHS.to("meta"))}, "on meta"),
        ({"blocks": changed(num_blocks=LENGTHS + 6)}, "list existing blocks"),
        ({"blocks": changed(num_blocks=torch.full_like(LENGTHS, -1))}, "list existing blocks"),
        ({"blocks": changed(indices=torch.full_like(IDS, 12))}, "list existing blocks"),
        ({"blocks": changed(indices=torch.full_like(IDS, -1))}, "list existing blocks"),
        ({"blocks": changed(indices=torch.full_like(IDS, 2**63 - 1))}, "list existing blocks"),
        ({"source": SOURCE[:0]}, "list existing blocks"),
        ({"source": SOURCE[:, :1]}, "out has 2 rows, the source 1"),
        ({"row_table": torch.zeros(2, 3, dtype=torch.int64)}, "row_table .* of shape"),
        ({"row_table": torch.zeros(3, 2)}, "row_table .* must be int64"),
        ({"row_table": torch.full((3, 2), 2)}, "row_table names"),
        ({"row_table": torch.full((3, 2), -1)}, "row_table names"),
    ],
)
@pytest.mark.parametrize("choice", ["native", "torch"])
def test_wrong_gathers_raise_before_anything_is_written(
    changes: dict[str, Any], message: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(choice, monkeypatch)
    out, memory = poisoned(OUT.shape, torch.bfloat16)
    with pytest.raises(LayoutError, match=message):
        cpu.gather_blocks(**(make_case() | {"out": out} | changes))
    assert (memory == POISON).all()


def choose(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the op find the native library, or none."""
    if choice == "torch":
        monkeypatch.setattr("sparsekv.kernels.cpu.gather.native_library", lambda: None)
    elif library.native_library() is None:
        pytest.skip(f"no native library: {cpu.backend().reason}")


def test_out_must_not_lie_within_the_source() -> None:
    memory = torch.zeros(4, 2, 2, 16, 40)
    lists = torch.zeros(2, 2, 2, dtype=torch.int64)
    blocks = BlockLists(indices=lists, num_blocks=lists[..., 0], block_size=16)
    ahead = {"source": memory[:2], "blocks": blocks}
    cpu.gather_blocks(**ahead, out=memory[2:])
    with pytest.raises(LayoutError, match="must be before or behind it"):
        cpu.gather_blocks(**ahead, out=memory[1:3])
    with pytest.raises(LayoutError, match="must be before or behind it"):
        cpu.copy_segment(memory[0, :, :, ::2], memory[0, :, :, 1::2])


@pytest.mark.parametrize(
    ("source", "out", "message"),
    [
        (torch.zeros(2, 2, 8, 4), torch.zeros(2, 2, 8, 4, dtype=torch.half), "converts nothing"),
        (torch.zeros(2, 2, 8, 4), torch.zeros(2, 2, 7, 4), "must be equal"),
        (torch.zeros(2, 8, 4), torch.zeros(2, 8, 4), "must have 4 dimensions"),
        (torch.zeros(2, 2, 8, 4), torch.zeros(1, 2, 8, 4).expand(2, 2, 8, 4), "tokens overlap"),
        (torch.zeros(2, 2, 4, 8).transpose(2, 3), torch.zeros(2, 2, 8, 4), "last dimension"),
        (torch.zeros(2, 2, 8, 4), torch.zeros(2, 2, 8, 4, device="meta"), "on meta"),
    ],
)
def test_wrong_copies_raise(source: Tensor, out: Tensor, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        cpu.copy_segment(source, out)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_nothing_given_to_the_ops_ends_the_process(data: st.DataObject) -> None:
    """Whatever comes, poison outside of out stays; an error leaves out as it was, too."""
    dim = st.integers(0, 4)

    def shape(rank: int) -> list[int]:
        return data.draw(st.lists(dim, min_size=rank, max_size=rank))

    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]))
    source = torch.ones(shape(data.draw(st.sampled_from([5, 5, 5, 4])))).to(dtype)
    if data.draw(st.booleans()):
        source = source.transpose(-1, data.draw(st.integers(-4, -1)))
    sizes = shape(5)
    if source.dim() == 5 and data.draw(st.booleans()):
        sizes[1], sizes[4] = source.shape[2], source.shape[4]
    out, memory = poisoned(tuple(sizes), dtype)
    if data.draw(st.booleans()):
        out = out.transpose(data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4)))
    table = torch.full((len(source), sizes[0]), data.draw(st.integers(-1, 4)))
    is_refused = True
    with contextlib.suppress(SparseKVError):
        blocks = BlockLists(
            indices=torch.randint(0, data.draw(st.sampled_from([1, 3, 2**62])), tuple(sizes[:3])),
            num_blocks=torch.full(tuple(sizes[:2]), data.draw(st.integers(-1, 4))),
            block_size=data.draw(st.sampled_from([sizes[3], -1, 0, 2**48, 2**70])),
        )
        rows = table if data.draw(st.booleans()) else None
        cpu.gather_blocks(source, blocks, out, row_table=rows)
        is_refused = False
    inside = 0 if is_refused else out.numel() * out.element_size()
    assert (memory[inside:] == POISON).all()
    with contextlib.suppress(SparseKVError):
        cpu.copy_segment(source, out[0] if len(out) else out)


# Choice


def test_dispatch_knows_the_devices() -> None:
    chosen: list[tuple[Callable[[torch.device], Any], Any]] = [
        (gather_blocks_for, cpu.gather_blocks),
        (copy_segment_for, cpu.copy_segment),
    ]
    for choose_for, op in chosen:
        assert choose_for(CPU) is op
        with pytest.raises(LayoutError, match="device=meta"):
            choose_for(torch.device("meta"))


def test_without_a_library_torch_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    choose("torch", monkeypatch)
    check_gather(cpu, make_case(with_rows=True, block_size=20))
    staged, out = torch.rand(2, 2, 8, 4), torch.zeros(2, 2, 8, 4)
    cpu.copy_segment(staged, out)
    assert torch.equal(out, staged)
