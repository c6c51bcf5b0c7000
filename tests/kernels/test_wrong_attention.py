"""Wrong calls of partial attention on the CPU: the same refusals, whatever would have computed."""

import contextlib
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsekv.errors import LayoutError, SparseKVError
from sparsekv.kernels import cpu
from sparsekv.kernels.block_lists import BlockLists
from sparsekv.kernels.cpu import library
from sparsekv.kernels.cpu.jobs import Flag, submit_partial_attention
from sparsekv.kernels.cpu.prepared_job import PreparedAttentionJob

op_module = import_module("sparsekv.kernels.cpu.partial_attention")
HANG = 60.0  # seconds; nothing here takes a hundredth of it
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_library = pytest.mark.skipif(
    library.native_library() is None, reason="jobs need the native library"
)


def choose(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the op find the native library, or none."""
    if choice == "torch":
        monkeypatch.setattr(op_module, "native_library", lambda: None)
    elif library.native_library() is None:
        pytest.skip(f"no native library: {cpu.backend().reason}")


KEY = torch.randn(3, 2, 2, 77, 64).bfloat16()
MASK = torch.ones(1, 8, 1, 231, dtype=torch.bool)
LISTS = torch.zeros(2, 2, 1, dtype=torch.int64)


def wrong(**changes: Any) -> dict[str, Any]:
    return {
        "query": torch.randn(2, 8, 1, 64).bfloat16(),
        "key": KEY,
        "value": KEY,
        "positions": torch.arange(3) * 77,
        "softmax_scale": 0.125,
        "query_start": 230,
    } | changes


def lists(**changes: Any) -> BlockLists:
    given = {"indices": LISTS, "num_blocks": LISTS[..., 0], "block_size": 77} | changes
    return BlockLists(**given)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (wrong(query=torch.zeros(2, 8, 1, 64, dtype=torch.float16)), "query is torch.float16"),
        (wrong(query=torch.zeros(2, 8, 1, 64, dtype=torch.float64)), "query is torch.float64"),
        (wrong(key=KEY.double(), value=KEY.double()), "query is torch.bfloat16, .* be equal; conv"),
        (wrong(value=KEY.float()), "value torch.float32"),
        (wrong(key=KEY.long(), value=KEY.long()), "key is torch.int64"),
        (wrong(key=KEY.cfloat(), value=KEY.cfloat()), "key is torch.complex64"),
        (wrong(query=torch.zeros(2, 8, 1, 32)), "head_dim must be equal"),
        (wrong(query=torch.zeros(2, 7, 1, 64)), "a multiple of num_kv_heads"),
        (wrong(query=torch.zeros(3, 8, 1, 64)), "query has 3 rows"),
        (wrong(query=torch.zeros(8, 1, 64)), "must be"),
        (wrong(value=KEY[:, :, :, :5]), "the same but for dim"),
        (wrong(key=KEY.transpose(3, 4).contiguous().transpose(3, 4)), "last dimension contiguous"),
        (wrong(value=KEY[..., :0]), "at least one"),
        (wrong(key=KEY.to("meta")), "key is torch.strided on meta"),
        (wrong(value=KEY.to_sparse()), "value is torch.sparse_coo on cpu"),
        (wrong(query=[[0.0]]), "query is a list: must be a tensor"),
        (wrong(value=None), "value is a NoneType: must be a tensor"),
        (wrong(positions=[0, 77, 154]), "positions is a list: must be a tensor"),
        (wrong(row_table=0), "row_table is a int: must be a tensor"),
        (wrong(positions=torch.arange(2)), "positions"),
        (wrong(positions=torch.arange(3.0)), "positions"),
        (wrong(positions=torch.arange(3, dtype=torch.int32)), "positions .* must be int64"),
        (wrong(positions=torch.full((3,), 2**60)), "positions lie out of range"),
        (wrong(positions=torch.full((3,), -(2**60))), "positions lie out of range"),
        (wrong(row_table=torch.zeros(2, 3, dtype=torch.int64)), "row_table"),
        (wrong(row_table=torch.zeros(3, 2, dtype=torch.int32)), "row_table .* must be int64"),
        (wrong(row_table=torch.full((3, 2), 2)), "row_table names"),
        (wrong(row_table=torch.full((3, 2), -1)), "row_table names"),
        (wrong(key_mask=torch.ones(2, 230, dtype=torch.bool)), "beyond key_mask"),
        (wrong(key_mask=torch.ones(2, 231)), "key_mask"),
        (wrong(key_mask=torch.ones(1, 231, dtype=torch.bool)), "key_mask"),
        (
            wrong(key_mask=torch.ones(2, 231, dtype=torch.bool), positions=torch.arange(-1, 2)),
            "beyond key_mask",
        ),
        (wrong(key_start=torch.zeros(2)), "key_start"),
        (wrong(key_start=torch.zeros(3, dtype=torch.int64)), "key_start"),
        (wrong(key_start=torch.zeros(2, dtype=torch.int64, device="meta")), "key_start is"),
        (wrong(softmax_scale="0.1"), "softmax_scale='0.1': must be a number"),
        (wrong(query_start=2**70), f"query_start={2**70}: must be a whole number"),
        (wrong(query_start=-(2**48) - 1), "query_start=-.*: must be a whole number"),
        (wrong(query_start=230.0), "query_start=230.0: must be a whole number"),
        (wrong(query_start=None), "query_start=None: must be a whole number"),
        (wrong(sliding_window=0), "sliding_window=0: must be at least 1"),
        (wrong(sliding_window=2.0), "sliding_window=2.0: must be at least 1, a whole number"),
        (wrong(blocks=[0, 1]), "blocks is a list: must be BlockLists"),
        (wrong(blocks=lists(indices=LISTS[:1], num_blocks=LISTS[:1, :, 0])), "block lists for"),
        (wrong(blocks=lists(indices=LISTS.to_sparse())), "blocks.indices is torch.sparse_coo"),
        (
            wrong(blocks=lists(indices=LISTS + 3, num_blocks=LISTS[..., 0] + 1)),
            r"each (block )?once",
        ),
        (wrong(blocks=lists(num_blocks=LISTS[..., 0] - 1)), r"each (block )?once"),
    ],
)
@pytest.mark.parametrize("choice", ["native", "torch", "mask"])
def test_wrong_inputs_raise(
    case: dict[str, Any], message: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if choice == "mask":  # which torch's ops compute, with or without a library
        case = case | {"mask": MASK}
    else:
        choose(choice, monkeypatch)
    with pytest.raises(LayoutError, match=message):
        cpu.partial_attention(**case)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (MASK.tolist(), "mask is a list: must be a tensor"),
        (MASK.to("meta"), "mask is torch.strided on meta"),
        (MASK.long(), "mask .* of torch.int64: must be bool"),
        (MASK.cfloat(), "mask .* of torch.complex64: must be bool"),
        (MASK.to(torch.float8_e4m3fn), "mask .* of torch.float8_e4m3fn: must be bool"),
        (MASK[0], r"mask .* of shape \(2 or 1, 8 or 1, 1, positions\)"),
        (MASK.expand(3, -1, -1, -1), r"mask .* of shape \(2 or 1, 8 or 1, 1, positions\)"),
        (MASK[:, :2], r"mask .* of shape \(2 or 1, 8 or 1, 1, positions\)"),
        (MASK.expand(-1, -1, 2, -1), r"mask .* of shape \(2 or 1, 8 or 1, 1, positions\)"),
        (MASK[..., :230], "positions 0 to 230 of keys, and a mask of 230: must lie within it"),
    ],
)
def test_wrong_masks_raise(mask: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        cpu.partial_attention(**wrong(mask=mask))


def test_a_mask_starts_at_position_0() -> None:
    with pytest.raises(LayoutError, match="positions -1 to"):
        cpu.partial_attention(**wrong(mask=MASK, positions=torch.arange(-1, 2)))


@pytest.mark.parametrize("choice", ["native", "torch"])
@pytest.mark.parametrize("blocks", [None, lists(num_blocks=LISTS[..., 0] + 1)])
def test_the_largest_numbers_are_no_error(
    choice: str, blocks: BlockLists | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest query sees all keys, through a window of any length; the earliest sees none."""
    choose(choice, monkeypatch)
    query = wrong()["query"]
    everything = cpu.partial_attention(**wrong(query=query, blocks=blocks))
    for window in (None, 2**48 + 1, 2**70):
        case = wrong(query=query, sliding_window=window, blocks=blocks)
        for got, want in zip(cpu.partial_attention(**case), everything, strict=True):
            assert torch.equal(got, want)
        late = cpu.partial_attention(**(case | {"query_start": 2**48}))
        assert torch.equal(late[1], everything[1])
        none = cpu.partial_attention(**(case | {"query_start": -(2**48)}))
        assert (none[1] == -torch.inf).all()


@needs_library
@pytest.mark.parametrize("query_start", [2**70, -(2**48) - 1, 230.0, None])
def test_a_prepared_job_is_submitted_at_a_position_alone(query_start: Any) -> None:
    """Those beyond 64 bits would wrap around, to a wrong answer."""
    case = wrong()
    part = (case["key"], case["value"], case["positions"], None)
    out, lse = torch.zeros(1, 2, 8, 1, 64), torch.zeros(1, 2, 8, 1)
    job = PreparedAttentionJob(case["query"].float(), [part], 0.125, out=out, lse=lse)
    flags = [Flag(torch.zeros(1, dtype=torch.int32)) for _ in range(2)]
    with pytest.raises(LayoutError, match=r"query_start=.*: must be a whole number"):
        job.submit(query_start, (flags[0], 0), (flags[1], 1))
    assert flags[1].value == 0


# Anything


class Draws:
    """Tensors of few and mostly wrong numbers, and calls of them."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw

    def flips(self) -> bool:
        return self.draw(st.booleans())

    def tensor(self, rank: int, dtype: torch.dtype) -> Tensor:
        shape = self.draw(st.lists(st.integers(0, 5), min_size=rank, max_size=rank))
        made = torch.ones(shape).to(dtype)
        return made.transpose(-1, -2) if rank > 1 and self.flips() else made

    def fitting(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Of that shape, or mostly: so that some calls get past their shapes."""
        is_right = self.draw(st.sampled_from([True, True, True, False]))
        return torch.ones(shape).to(dtype) if is_right else self.tensor(len(shape), dtype)

    def whole(self) -> int:
        return self.draw(st.integers(-3, 9) | st.integers(-(2**70), 2**70))

    def int64(self) -> int:
        return self.draw(st.integers(-3, 9) | st.integers(-(2**63), 2**63 - 1))

    def other(self, right: Any) -> Any:
        """`right`, or now and then something that is no such thing."""
        odd = st.sampled_from([None, 1.5, "1", [1], torch.ones(2, 2).to_sparse(), torch.tensor(1)])
        return self.draw(odd) if self.draw(st.integers(0, 19)) == 7 else right

    def call(self, dtypes: list[torch.dtype]) -> dict[str, Any]:
        dtype = self.draw(st.sampled_from(dtypes))
        key = self.tensor(self.draw(st.sampled_from([5, 5, 5, 5, 4])), dtype)
        sizes = key.shape if key.dim() == 5 else torch.Size((1, 1, 1, 1, 1))
        batch, segments, num_kv_heads = sizes[1], sizes[0], sizes[2]
        shape = (batch, num_kv_heads * self.draw(st.integers(1, 2)), 2, sizes[4])
        positions = self.fitting((segments,), torch.int64)
        start = self.draw(st.integers(-1, 3) | st.integers(-(2**62), 2**62))
        case = {
            "query": self.fitting(shape, dtype),
            "key": key,
            "value": self.draw(st.sampled_from([key, key[..., :1], self.tensor(5, dtype)])),
            "positions": positions * start,
            "softmax_scale": self.other(self.draw(st.floats(-4, 4, width=32))),
            "query_start": self.other(self.whole()),
        }
        if self.flips():
            table = self.fitting((segments, batch), torch.int64)
            case["row_table"] = table * self.draw(st.integers(-1, 2))
        if self.flips():
            case["key_mask"] = self.fitting((batch, 9), torch.bool)
        if self.flips():
            case["key_start"] = self.fitting((batch,), torch.int64) * self.int64()
        if self.flips():
            window = self.draw(st.integers(-1, 3) | st.integers(2**62, 2**70))
            case["sliding_window"] = self.other(window)
        for name in ("query", "key", "value", "positions"):
            case[name] = self.other(case[name])
        if self.flips():
            case["blocks"] = self.other(self.blocks((batch, num_kv_heads)))
        return case

    def blocks(self, shape: tuple[int, int]) -> BlockLists | None:
        indices = self.fitting((*shape, 2), torch.int64) * self.int64()
        num_blocks = torch.ones(indices.shape[:2], dtype=torch.int64) * self.int64()
        with contextlib.suppress(SparseKVError):
            return BlockLists(indices=indices, num_blocks=num_blocks, block_size=self.whole())
        return None

    def flag(self) -> Flag:
        """A flag, whatever it is made of.

        Raises:
            SparseKVError: of that there is none.
        """
        words = self.other(torch.zeros(3, dtype=torch.int32))
        return Flag(words, self.other(self.draw(st.integers(-1, 3))))


def result(case: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """None: the call was refused, by an error of this library."""
    try:
        return cpu.partial_attention(**case)
    except SparseKVError:
        return None


def assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_anything_is_refused_or_computed_alike_with_and_without_the_library(
    data: st.DataObject,
) -> None:
    draws = Draws(data)
    case = draws.call([*DTYPES, torch.int8, torch.float64, torch.complex64])
    if draws.flips():
        query = case["query"]
        shape = (*query.shape[:3], 9) if isinstance(query, Tensor) and query.dim() == 4 else (1,)
        dtype = draws.draw(st.sampled_from([torch.bool, torch.float32, torch.int64]))
        case["mask"] = draws.other(draws.fitting(shape, dtype))
    got = result(case)
    with pytest.MonkeyPatch.context() as patch:
        choose("torch", patch)
        plain = result(case)
    assert (got is None) == (plain is None)
    if got is not None and plain is not None:
        assert_close(got, plain, 1e-2)
        assert got[0].shape == (*case["query"].shape[:3], case["value"].shape[-1])
        assert got[1].shape == case["query"].shape[:3]


@needs_library
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_job_is_refused_or_gives_what_the_call_gives(data: st.DataObject) -> None:
    draws = Draws(data)
    case = draws.call([torch.float32, *DTYPES, torch.float64])
    room = {}
    if draws.flips() and isinstance(case["query"], Tensor) and isinstance(case["value"], Tensor):
        shape = (*case["query"].shape[:3], *case["value"].shape[-1:])
        room["out"] = draws.other(draws.fitting(shape, torch.float32))
        room["lse"] = draws.other(draws.fitting(shape[:3], torch.float32))
    try:
        for name in ("wait", "done"):
            if draws.flips():
                room[name] = draws.other((draws.other(draws.flag()), draws.other(draws.whole())))
        if draws.flips():
            room["status"] = draws.other(draws.flag())
        if room.get("wait") is not None and isinstance(room["wait"], tuple):
            flag, value = room["wait"]
            if isinstance(flag, Flag):
                flag.set(value)
        got = submit_partial_attention(**case, **room).wait(HANG)
    except SparseKVError:
        return
    assert_close(got, cpu.partial_attention(**case), 0.0)


@needs_library
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_prepared_job_is_refused_or_gives_what_the_calls_give(data: st.DataObject) -> None:
    draws = Draws(data)
    case = draws.call([torch.float32, *DTYPES, torch.float64])
    names = ("key", "value", "positions")
    part = (*(case[name] for name in names), case.get("row_table"))
    parts = draws.other([draws.other(part) for _ in range(draws.draw(st.integers(0, 2)))])
    if (
        draws.flips()
        and isinstance(parts, list)
        and parts
        and isinstance(part[1], Tensor)
        and part[1].dim() == 5
    ):
        wider = torch.ones(*part[1].shape[:4], 5, dtype=part[1].dtype)
        parts = [part, (part[0], wider, *part[2:])]
    query, key_mask = case["query"], case.get("key_mask")
    shape = query.shape[:3] if isinstance(query, Tensor) else ()
    dims = part[1].shape[-1:] if isinstance(part[1], Tensor) else ()
    count = len(parts) if isinstance(parts, list) else 1
    out = draws.other(draws.fitting((count, *shape, *dims), torch.float32))
    lse = draws.other(draws.fitting((count, *shape), torch.float32))
    flag = Flag(torch.zeros(1, dtype=torch.int32))
    try:
        scale, query_start = case["softmax_scale"], case["query_start"]
        prepared = PreparedAttentionJob(query, parts, scale, out=out, lse=lse, key_mask=key_mask)
        done = Flag(torch.zeros(1, dtype=torch.int32))
        got = prepared.submit(query_start, (flag, 0), (done, draws.whole())).wait(HANG)
    except SparseKVError:
        return
    for i, (key, value, positions, row_table) in enumerate(parts):
        want = cpu.partial_attention(
            query,
            key,
            value,
            positions,
            scale,
            row_table=row_table,
            query_start=query_start,
            key_mask=key_mask,
        )
        assert_close((got[0][i], got[1][i]), want, 0.0)


@needs_library
@given(data=st.data())
def test_any_flag_is_refused_or_keeps_its_value_modulo_2_32(data: st.DataObject) -> None:
    draws = Draws(data)
    words = torch.zeros(3, 2, dtype=draws.draw(st.sampled_from([torch.int32, torch.int64])))
    words = draws.other(words.T if draws.flips() else words)
    index, value = draws.other(draws.whole()), draws.other(draws.whole())
    try:
        flag = Flag(words, index)
        flag.set(value)
    except SparseKVError:
        return
    assert flag.value == value % 2**32
    assert words.flatten().nonzero().flatten().tolist() == ([index] if value % 2**32 else [])
