"""Prepared launches: what they hand to the driver is what Triton itself would hand to it."""

from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
import torch
from attention_case import Case, make_case
from torch import Tensor

pytest.importorskip("triton")

from triton_compiler import SHARED_BYTES, backends, driver

from sparsekv.errors import LayoutError
from sparsekv.kernels import triton as ops
from sparsekv.kernels.triton import config, memory
from sparsekv.kernels.triton.append import _arguments
from sparsekv.kernels.triton.append_kernel import append_kernel
from sparsekv.kernels.triton.attention_kernel import attention_kernel
from sparsekv.kernels.triton.launch import Launch
from sparsekv.kernels.triton.merge_kernel import merge_kernel
from sparsekv.kernels.triton.merge_partials import merge_arguments

LSE_OF_PARTS = {
    len(kernel.arg_names): kernel.arg_names.index(name)
    for kernel, name in ((attention_kernel, "lse_ptr"), (merge_kernel, "split_lse_ptr"))
}
"""Where each kernel, known by the number of its arguments, has what lies elsewhere in `workspace`
when splits are fewer than most.
"""


class _Recorder:
    """Stands for a device: kernels are compiled for it, and their launches noted."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.utils = self
        self.launcher_cls = lambda source, metadata: self._note

    def get_current_target(self) -> Any:
        return backends.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> None:
        return None  # the index of the CPU

    def get_current_stream(self, device: None) -> int:
        return 7

    def load_binary(self, name: str, binary: bytes, *_: Any) -> tuple[int, ...]:
        return 1, crc32(binary), 0, 0, 1024  # kernels that differ have different handles

    def _note(self, width: int, height: int, depth: int, stream: int, *rest: Any) -> None:
        compiled, arguments = rest[:2], rest[5:]
        self.launches.append(
            (width, height, depth, stream, compiled, [_plain(item) for item in arguments])
        )


_RECORDER = _Recorder()
"""The only one: Triton keeps what it has compiled, and the way to launch it with that."""


def _plain(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(_plain(item) for item in argument)
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    monkeypatch.setattr(memory, "IS_INTERPRETED", True)  # tensors of the CPU will do
    monkeypatch.setattr(config, "shared_memory_bytes", lambda device: SHARED_BYTES[90])
    monkeypatch.setattr("triton.compiler.compiler.max_shared_mem", lambda _: SHARED_BYTES[90])
    monkeypatch.setattr(driver, "_active", _RECORDER)
    _RECORDER.launches.clear()
    return _RECORDER.launches


def room(case: Case) -> dict[str, Tensor]:
    shape = (*case.query.shape[:3], case.value.shape[-1])
    return {
        "out": torch.zeros(shape),
        "lse": torch.zeros(shape[:-1]),
        "workspace": torch.zeros(ops.workspace_numel(case.query, case.key, case.value)),
    }


def from_odd_addresses(tensor: Tensor) -> Tensor:
    """The same numbers, not from a multiple of 16 bytes on."""
    room = tensor.new_empty(tensor.numel() + 1)[1:]
    assert room.data_ptr() % 16
    return room.view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("is_odd", [False, True])
@pytest.mark.parametrize("is_carried", [False, True])
def test_attention_is_launched_as_triton_would(
    launches: list[tuple[Any, ...]], is_carried: bool, is_odd: bool
) -> None:
    case = make_case(torch.bfloat16, segments=1, tokens=256, head_dim=64, head_dim_v=64)
    if is_odd:
        key, value = from_odd_addresses(case.key), from_odd_addresses(case.value)
        case = replace(case, key=key, value=value)
    given = {**room(case), "is_carried": is_carried}
    prepared = ops.PreparedAttention(case.query, case.key, case.value, 0.3, **given)
    assert not launches
    for query_start, tokens in ((99, 100), (4321, 256)):
        query = torch.randn(case.query.shape).bfloat16()
        key, value = (t[:, :, :, :tokens] for t in (case.key, case.value))
        positions = torch.zeros(1, dtype=torch.int64)
        prepared(query, query_start, tokens)
        ops.partial_attention(query, key, value, positions, 0.3, query_start=query_start, **given)
        elsewhere = given | {"out": torch.zeros_like(given["out"])}
        prepared(query, query_start, tokens, elsewhere["out"])
        ops.partial_attention(
            query, key, value, positions, 0.3, query_start=query_start, **elsewhere
        )
        assert launches[0] == launches[1]
        assert launches[2] == launches[3] != launches[0]
        launches.clear()


def test_long_keys_are_split_and_merged(launches: list[tuple[Any, ...]]) -> None:
    case = make_case(torch.bfloat16, segments=16, tokens=64, head_dim=64, head_dim_v=64)
    given = room(case)
    prepared = ops.PreparedAttention(case.query, case.key[:3], case.value[:3], 0.3, **given)
    sizes = []
    for count in (3, 16, 8, 1):
        key, value = case.key[:count], case.value[:count]
        positions = torch.arange(count) * 64
        prepared.attend_to(key, value)
        prepared(case.query, 5000)
        by_plan = list(launches)
        ops.partial_attention(case.query, key, value, positions, 0.3, query_start=5000, **given)
        usual = launches[len(by_plan) :]
        sizes.append([launch[1] for launch in usual])
        for ours, its in zip(by_plan, usual, strict=True):
            assert ours[:5] == its[:5]
            apart = {i for i, item in enumerate(its[5]) if ours[5][i] != item}
            assert apart <= ({LSE_OF_PARTS[len(its[5])]} if len(usual) == 2 else set())
        launches.clear()
    assert sizes == [[1], [4, 1], [2, 1], [1]]


def test_appends_and_merges_are_launched_as_triton_would(launches: list[tuple[Any, ...]]) -> None:
    window = torch.zeros(2, 4, 256, 64, dtype=torch.bfloat16)
    stored = torch.zeros(2, 8, 1, 64)
    prepared: Any = None
    for offset in (0, 17, 255):
        new, query = torch.zeros(2, 4, 1, 64), torch.zeros(2, 8, 1, 64)
        options = {"query": query, "stored_query": stored}
        prepared = prepared or ops.PreparedAppend(new, new, window, window, **options)
        prepared(new, new, offset, query)
        ops.append(new, new, window, window, offset, **options)
        assert launches[0] == launches[1]
        launches.clear()
    parts = [(torch.zeros(2, 8, 1, 64), torch.zeros(2, 8, 1)) for _ in range(3)]
    sink = torch.zeros(8)
    out, lse = parts[0]
    prepared = ops.PreparedMerge(parts, sink, out=out, lse=lse)
    for into in (out, torch.zeros_like(out)):
        prepared(into)
        ops.merge_partials([(into, lse), *parts[1:]], sink, out=into, lse=lse)
        assert launches[0] == launches[1]
        launches.clear()


def test_what_was_not_prepared_for_is_refused(launches: list[tuple[Any, ...]]) -> None:
    case = make_case(torch.bfloat16, segments=2, tokens=64, head_dim=64, head_dim_v=64)
    given, odd = room(case), torch.zeros(2 * 6 * 64 + 1, dtype=torch.bfloat16)[1:]
    prepared = ops.PreparedAttention(case.query, case.key, case.value, 0.3, **given)
    for query in (case.query.float(), case.query[:1], odd.view(case.query.shape)):
        with pytest.raises(LayoutError, match="prepared for another; prepare anew"):
            prepared(query, 127)
    with pytest.raises(LayoutError, match="num_tokens=63"):
        prepared(case.query, 127, 63)
    for key in (case.key.clone(), case.key[:, :, :, :32]):
        with pytest.raises(LayoutError, match="prepared for others; prepare anew"):
            prepared.attend_to(key, key)
    with pytest.raises(LayoutError, match="without positions"):
        ops.PreparedAttention(case.query, case.key, case.value, 0.3, sliding_window=9, **given)
    window = case.key[0]
    append = ops.PreparedAppend(window[:, :, :1], None, window, None)
    for offset in (-1, 64):
        with pytest.raises(LayoutError, match=f"offset={offset}: must be from 0 to 63"):
            append(window[:, :, :1], None, offset)
    with pytest.raises(LayoutError, match="prepare anew"):
        append(window[:, :, :2], None, 0)
    with pytest.raises(LayoutError, match="0 parts: must be 1 to 8"):
        ops.PreparedMerge([], out=given["out"], lse=given["lse"])
    assert not launches


def test_what_the_kernels_are_not_compiled_for_is_refused(launches: list[tuple[Any, ...]]) -> None:
    case = make_case(torch.bfloat16, segments=2, tokens=64, head_dim=64, head_dim_v=64)
    given = room(case)
    parts = [(given["out"], given["lse"])]
    attend = ops.PreparedAttention(case.query, case.key, case.value, 0.3, **given)
    merge = ops.PreparedMerge(parts, out=given["out"], lse=given["lse"])
    for out in (from_odd_addresses(given["out"]), given["out"].half()):
        with pytest.raises(LayoutError, match=r"out_ptr: .* compiled for .*prepare anew"):
            attend(case.query, 127, None, out)
        with pytest.raises(LayoutError, match=r"part_outs: .* compiled for .*prepare anew"):
            merge(out)
    arguments = merge_arguments((given["out"],), (given["lse"],), None, None, 0, None, *parts[0])
    launch = Launch(merge_kernel, *arguments, case.query.device)
    with pytest.raises(LayoutError, match=r"part_outs: .* compiled for"):
        launch.point(launch.place_of_tensor("part_outs"), (given["out"],) * 2)
    with pytest.raises(LayoutError, match=r"split_out_ptr: .* compiled for None"):
        launch.point(launch.place_of_tensor("split_out_ptr"), given["out"])
    arguments, options = _arguments(*[case.key[0]] * 2, *[case.value[0]] * 2, 0, None, None)[:2]
    launch = Launch(append_kernel, arguments, options, case.query.device)
    with pytest.raises(LayoutError, match=r"num_kv_heads changes .*do_not_specialize"):
        launch.place_of_number("num_kv_heads")
    assert not launches
