"""The benchmark of decode steps compares what computes the same, and judges what it measured."""

from __future__ import annotations

import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import sparsekv
from benchmarks import (
    decode_ablations,
    decode_attention,
    decode_steps,
    decode_sweep,
    memory_ceilings,
    whole_model,
)
from benchmarks.attention_shapes import SHAPES
from benchmarks.ceilings import BusCeiling, ReadCeiling
from benchmarks.decode_ablations import (
    AblatedStep,
    PageableSource,
    StridedSource,
    Transfer,
    attend_by_torch,
)
from benchmarks.decode_case import Case
from benchmarks.decode_checks import best, checks
from benchmarks.decode_rates import awaited_flags
from benchmarks.decode_rounds import StepCeilings, take_turns
from benchmarks.decode_sweep import borrowing, sweep, unless_memory_is_short
from benchmarks.decode_ways import DecodeWay, DynamicDecode, RegionDecode
from benchmarks.machine_pass import MachinePass
from benchmarks.plain_decode import PlainDecode, sdpa_calls
from benchmarks.results import ROOT, Row, load_result
from sparsekv.device import CudaStream

try:
    memory_ceilings._library()
except RuntimeError as error:
    pytest.skip(f"no ceilings here: {error}", allow_module_level=True)

CPU = torch.device("cpu")
STEPS = 3

CUT_SHORT = """
import runpy, signal, sys
from benchmarks import decode_checks, decode_sweep

first, *others = map(int, sys.argv.pop(1).split())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it

def sweep(case, *arguments):
    yield {**case.known, "kind": "decode", "way": "sparsekv", "share": 0.5, "ms_per_layer": 1.0}
    signal.raise_signal(first)

def checks(rows):
    for number in others:
        signal.raise_signal(number)
    return []

decode_sweep.sweep, decode_checks.checks = sweep, checks
runpy.run_module("benchmarks.decode_attention", run_name="__main__", alter_sys=True)
"""
"""The script with a sweep that sends a signal after its first row; others come while it writes."""


KILLED = """
import runpy, signal
from benchmarks import decode_sweep

def sweep(case, *arguments):
    if case.shape.name == "mixtral":
        signal.raise_signal(signal.SIGKILL)
    yield {**case.known, "kind": "decode", "way": "sparsekv", "share": 0.5, "ms_per_layer": 1.0}

decode_sweep.sweep = sweep
runpy.run_module("benchmarks.decode_attention", run_name="__main__", alter_sys=True)
"""
"""The script, killed in its second part."""


def case_of(name: str, context: int = 1100) -> Case:
    """Two layers and rows: four placed segments and a part of a window."""
    return Case(shape=SHAPES[name], num_layers=2, batch_size=2, context=context, device=CPU)


def plain_ways(case: Case) -> list[PlainDecode]:
    return [PlainDecode(case, STEPS, call) for call in sdpa_calls(case.device)]


def last_of(step: Callable[[], Tensor]) -> Tensor:
    return [step() for _ in range(STEPS)][-1].float()


@pytest.fixture(scope="module")
def ceilings() -> Iterator[StepCeilings]:
    with StepCeilings(1, is_quick=True) as made:
        yield made


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_all_ways_are_the_same_attention(name: str) -> None:
    case = case_of(name)
    ways: list[DecodeWay] = [DynamicDecode(case), *plain_ways(case)]
    ways += [RegionDecode(case, share, STEPS) for share in (0.0, 0.5, 1.0)]
    expected, *others = (last_of(way.step) for way in ways)
    assert expected.abs().max() > 0.1
    for out in others:
        torch.testing.assert_close(out, expected, atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("is_rebuilt", [False, True])
@pytest.mark.parametrize(
    ("on_cpu", "tolerance"),
    [(sparsekv.kernels.cpu.partial_attention, 1e-4), (attend_by_torch, 1e-2)],
)
def test_the_step_of_public_parts_is_the_librarys(
    is_rebuilt: bool, on_cpu: Callable, tolerance: float
) -> None:
    case = case_of("qwen3")
    whole, parts = (RegionDecode(case, 0.5, STEPS) for _ in range(2))
    source = decode_ablations._rebuilt if is_rebuilt else lambda host: host
    load = Transfer(parts.cache.spec, CPU, source)
    step = AblatedStep(case, parts, load, on_cpu)
    expected = last_of(whole.step)
    torch.testing.assert_close(last_of(step.run), expected, atol=tolerance, rtol=tolerance)
    assert parts.cache.num_tokens == whole.cache.num_tokens


def test_a_transfer_brings_every_segment_once_and_in_order() -> None:
    case = case_of("mixtral", context=5 * 256)
    way = RegionDecode(case, 0.0, STEPS)
    pinned = way.cache.views(0).pinned
    load = Transfer(way.cache.spec, CPU, lambda host: host)
    # A view is good only until the next one is asked for.
    loaded = [(v.positions.tolist(), v.key.clone(), v.value.clone()) for v in load(pinned)]
    assert len(loaded) > 1
    assert [p for positions, _, _ in loaded for p in positions] == [i * 256 for i in range(5)]
    assert torch.equal(torch.cat([k for _, k, _ in loaded]), torch.cat([v.key for v in pinned]))
    assert torch.equal(torch.cat([v for _, _, v in loaded]), torch.cat([v.value for v in pinned]))


def test_other_sources_are_as_many_bytes_from_elsewhere() -> None:
    case = case_of("qwen3", context=4 * 256)
    spec = RegionDecode(case, 0.0, STEPS).cache.spec
    num_elements = spec.segment_bytes // 2
    memory = torch.arange(4 * num_elements, dtype=torch.int32)
    host = torch.empty(num_elements)
    for source in (PageableSource(memory), StridedSource(memory, spec)):
        taken = [source(host) for _ in range(4)]
        assert all(part.numel() == num_elements for part in taken)
        assert len(torch.cat([part.flatten() for part in taken]).unique()) == 4 * num_elements
    assert not taken[0].is_contiguous()
    assert taken[0].shape[2] == spec.segment_tokens


def test_windows_leave_in_the_steps_that_are_said_to_evict() -> None:
    case = case_of("qwen3", context=2 * 256 - 2)
    way = RegionDecode(case, 0.5, STEPS)
    for is_evicting in (False, True, False):
        before = sum(way.placed_bytes().values())
        assert way.is_full_window_next() is is_evicting
        way.step()
        assert (sum(way.placed_bytes().values()) > before) is is_evicting


def test_between_steps_the_machine_moves_the_bytes_of_a_step(
    ceilings: StepCeilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []

    def read(ceiling: ReadCeiling) -> float:
        turns.append("machine")
        assert ceiling.span.num_bytes == case.kv_bytes
        return 0.001 * turns.count("machine")

    real = RegionDecode.step

    def step(way: RegionDecode) -> Tensor:
        turns.append("step")
        return real(way)

    monkeypatch.setattr(ReadCeiling, "seconds", read)
    monkeypatch.setattr(RegionDecode, "step", step)
    case = case_of("qwen3", context=4 * 256)
    (row,) = decode_steps.steps(case, 0.25, 3 * decode_steps._STEPS_OF_A_TURN, ceilings)
    assert turns == [
        *["machine", "step"] * decode_sweep.WARM_UP,
        *["machine", *["step"] * decode_steps._STEPS_OF_A_TURN] * 3,
    ]
    assert row["machine_samples"] == pytest.approx([3.0, 4.0, 5.0])
    assert row["machine_p50_ms"] == pytest.approx(4.0)
    assert row["machine_p99_ms"] == pytest.approx(4.98)
    assert len(row["samples"]) == 3 * decode_steps._STEPS_OF_A_TURN


def test_windows_leave_in_the_steps_that_are_called_evicting() -> None:
    case = case_of("qwen3", context=2 * 256 + 3)
    (row,) = decode_steps.evicting(case, 0.5, 2)
    assert row.items() >= case.known.items()
    assert (len(row["samples"]), len(row["evicting_samples"])) == (6, 2)


@pytest.mark.parametrize(("read_bytes", "copied_bytes"), [(1024, 512), (1024, 0), (0, 512)])
def test_a_pass_takes_as_long_as_the_slower_of_reading_and_copying(
    read_bytes: int, copied_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bus:
        def begin_h2d(self, num_bytes: int) -> Callable[[], float]:
            return lambda: num_bytes / 64

    monkeypatch.setattr(ReadCeiling, "seconds", lambda ceiling: ceiling.span.num_bytes / 256)
    machine = MachinePass(1, read_bytes, copied_bytes, cast(BusCeiling, Bus()))
    assert machine.seconds() == max(read_bytes / 256, copied_bytes / 64)


def test_turns_alternate_and_forget_the_warm_up() -> None:
    seen: list[str] = []
    steps = [lambda: seen.append("a"), lambda: seen.append("b")]
    samples = take_turns(steps, CPU, rounds=3, warm_up=2)
    assert "".join(seen) == "ab" * 5
    assert [len(kept) for kept in samples] == [3, 3]


def test_a_short_step_is_held_to_the_fastest_plain_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = case_of("qwen3").with_layers(1)
    names = [way.name for way in plain_ways(case)]
    assert names == list(dict.fromkeys(names))
    slow = [[9e-5] * 3 for _ in names[2:]]
    found = [[6e-5, 7e-5, 5e-5], [5e-5] * 3, [1e-5, 4e-5, 3e-5], *slow, [1e-6] * 3]
    monkeypatch.setattr(decode_steps, "take_turns", lambda *_: found)
    ours, *others = decode_steps.short(case, rounds=3)
    assert ours["against"] == names[1]
    assert ours["extra_us"] == pytest.approx(30.0)  # of 50, 30 and 20
    assert [row["way"] for row in others] == [*names, "DynamicCache"]
    assert not any("extra_us" in row for row in others)


def test_rates_are_bytes_by_time(ceilings: StepCeilings) -> None:
    case = case_of("qwen3", context=4 * 256)
    (row,) = sweep(case, [0.25], rounds=1, ceilings=ceilings)
    seconds = row["ms_per_layer"] * case.num_layers / 1e3
    assert row["kv_bytes"] == case.kv_bytes
    assert row["placed_share"] == 0.25
    assert row["kv_gbs"] * seconds == pytest.approx(case.kv_bytes / 1e9)
    assert row["cpu_gbs"] * seconds == pytest.approx(case.kv_bytes / 4e9)
    assert row["h2d_gbs"] == pytest.approx(row["kv_gbs"] - row["cpu_gbs"])
    # What the CPU computed is copied too.
    assert row["h2d_bytes_per_step"] == pytest.approx(3 * case.kv_bytes / 4, rel=0.02)


def test_a_step_that_borrows_reads_the_same_bytes_by_the_other_engine(
    ceilings: StepCeilings,
) -> None:
    case = case_of("qwen3", context=4 * 256)
    placed, lent = borrowing(case, 0.25, [0.25, 0.75], rounds=1, ceilings=ceilings)
    for row, share in ((placed, 0.25), (lent, 0.75)):
        assert (row["placed_share"], row["share_in_use"]) == (0.25, share)
        assert row["borrowed_bytes_per_step"] == (share - 0.25) * case.kv_bytes
        assert row["cpu_gbs"] == pytest.approx(share * row["kv_gbs"])
        assert row["h2d_gbs"] == pytest.approx((1 - share) * row["kv_gbs"])
        # What the CPU computed is copied too.
        assert row["h2d_bytes_per_step"] == pytest.approx((1 - share) * case.kv_bytes, rel=0.1)


def test_one_share_is_gone_before_the_next_is_placed(
    ceilings: StepCeilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[object]] = []

    def only_one(*arguments: Any) -> RegionDecode:
        assert not any(cache() for cache in made)
        way = RegionDecode(*arguments)
        made.append(weakref.ref(way.cache))
        return way

    monkeypatch.setattr(decode_sweep, "RegionDecode", only_one)
    rows = list(sweep(case_of("qwen3"), [0.0, 0.5, 1.0], rounds=1, ceilings=ceilings))
    assert len(rows) == len(made) == 3


def test_what_memory_does_not_hold_is_left_out_with_the_reason(
    ceilings: StepCeilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEKV_HOST_MEMORY", "1MiB")
    (row,) = sweep(case_of("qwen3"), [0.5], rounds=1, ceilings=ceilings)
    assert (row["kind"], row["share"]) == ("left out", 0.5)
    assert "GiB" in row["reason"]
    assert checks([row | {"device": "cuda"}]) == []

    def broken() -> list[Row]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(unless_memory_is_short({}, broken))


def test_models_that_are_compared_are_one_model() -> None:
    case = case_of("qwen3", context=600)
    model = whole_model.random_model(case, is_quick=True)
    twin = whole_model.with_same_weights(model)
    assert twin.config is not model.config
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(ours is theirs for ours, theirs in pairs)
    with sparsekv.patch(twin) as patched, torch.no_grad():
        decoders = [
            whole_model._Decoder(model, whole_model.DynamicCache(config=model.config), case),
            whole_model._Decoder(twin, patched.new_cache(), case),
        ]
        expected, got = (last_of(decoder.step) for decoder in decoders)
        assert patched.stats().num_tokens == case.context + STEPS
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def decode(share: float | None, ms: float, **fields: object) -> Row:
    known = {"kind": "decode", "shape": "qwen3", "size": "16 x 32K", "device": "cuda", "layers": 48}
    way = "DynamicCache, offloaded" if share is None else "sparsekv"
    shares = {} if share is None else {"share": share, "fraction": 8.0 / ms}
    return {**known, "way": way, "ms_per_layer": ms, **shares, **fields}


def test_checks_judge_the_fastest_share_and_only_what_they_are_about() -> None:
    rows = [
        decode(0.0, 20.0),
        decode(0.6, 8.5),
        decode(1.0, 12.0),
        decode(None, 170.0),
        decode(0.5, 1.0, size="4 x 8K"),
        decode(0.5, 16.0, kind="model"),
        decode(None, 150.0, kind="model"),
        {
            **decode(0.5, 1.0, kind="short", size="16 x 128"),
            "us_per_layer": 60.0,
            "extra_us": 39.0,
            "against": "torch sdpa",
        },
        {**decode(None, 1.0, kind="short", size="16 x 128"), "us_per_layer": 21.0},
        {
            **decode(0.6, 1.0, kind="steps"),
            "num_steps": 1000,
            "p50_ms": 10.0,
            "p99_ms": 10.6,
            "machine_p50_ms": 9.0,
            "machine_p99_ms": 9.9,
        },
        {**decode(0.6, 1.0, kind="evicting"), "p50_ms": 10.0, "evicting_ms": 10.4},
    ]
    fastest = best(rows[:5])
    assert fastest is rows[4]
    found = {check.name.rsplit(": ")[-1]: check for check in checks(rows)}
    reached = {name: (check.value, check.is_met) for name, check in found.items()}
    assert reached == {
        "fraction of reading and host to GPU together": (8.0 / 8.5, True),
        "times transformers' offloaded cache": (150.0 / 16.0, False),
        "extra us a layer": (39.0, True),
        "P99 / P50": (1.06, False),
        "median evicting step / P50": (1.04, True),
    }
    ratio = next(c for c in checks(rows) if "cache update and attention" in c.name)
    assert (ratio.value, ratio.target) == (20.0, 15.0)
    assert "qwen3, 16 x 128, all in the window, against torch sdpa: extra us a layer" in [
        check.name for check in checks(rows)
    ]
    assert len(checks(rows)) == 6
    assert checks([row | {"device": "cpu"} for row in rows]) == []


def test_the_script_measures_every_part(tmp_path: Path) -> None:
    decode_attention.main(["--quick", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    result = load_result(path)
    assert result.checks == checks(result.rows)
    kinds = {row["kind"] for row in result.rows}
    assert kinds == {"decode", "borrowing", "short", "steps", "evicting", "ablation", "model"}
    assert {row["part"] for row in result.rows} == set(decode_attention.PARTS)
    swept = {
        (row["shape"], row["share"])
        for row in result.rows
        if row["kind"] == "decode" and "placed_share" in row
    }
    assert swept == {("qwen3", 0.5), ("mixtral", 0.0), ("mixtral", 1.0)}
    replaced = [row for row in result.rows if row["kind"] == "ablation"]
    assert len({row["way"] for row in replaced}) == 7
    rates = {"kv_gbs", "ms_per_layer", "ceiling_read_gbs"}
    assert all(row.keys() >= rates for row in result.rows if row["kind"] in ("decode", "model"))
    assert all(row.keys() >= rates | {"cpu_gbs", "h2d_gbs"} for row in replaced)
    assert all(row["num_threads"] == 1 for row in result.rows)
    (many,) = (row for row in result.rows if row["kind"] == "steps")
    assert (len(many["machine_samples"]), len(many["samples"])) == (2, 8)
    assert 0 < min(many["machine_samples"]) <= many["machine_p50_ms"] <= many["machine_p99_ms"]


def test_what_fails_costs_nothing_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> Iterator[Row]:
        raise ZeroDivisionError
        yield

    monkeypatch.setattr(decode_attention, "baselines", broken)
    arguments = ["--quick", "--rounds", "1", "--threads", "1", "--parts", "sweep", "baselines"]
    with pytest.raises(RuntimeError, match="baselines of qwen3, 2 x 640; baselines of mixtral"):
        decode_attention.main([*arguments, "--out", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    assert [row["share"] for row in load_result(path).rows] == [0.5, 0.0, 1.0]


@pytest.mark.parametrize(
    ("signals", "status"),
    # As `timeout` sends them: to the process, then to its group.
    [([signal.SIGINT, signal.SIGINT], -signal.SIGINT), ([signal.SIGTERM, signal.SIGTERM], 143)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_run_that_is_cut_short_keeps_what_it_measured(
    signals: list[signal.Signals], status: int, tmp_path: Path
) -> None:
    options = ["--quick", "--threads", "1", "--parts", "sweep", "--out", str(tmp_path)]
    numbers = " ".join(str(int(number)) for number in signals)
    command = [sys.executable, "-c", CUT_SHORT, numbers, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    (path,) = tmp_path.iterdir()
    assert [row["share"] for row in load_result(path).rows] == [0.5]


def test_a_run_that_is_killed_keeps_the_parts_that_were_done(tmp_path: Path) -> None:
    options = ["--quick", "--threads", "1", "--parts", "sweep", "--out", str(tmp_path)]
    command = [sys.executable, "-c", KILLED, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (path,) = tmp_path.iterdir()
    assert [row["shape"] for row in load_result(path).rows] == ["qwen3"]


def test_the_plans_are_the_full_one_in_pieces() -> None:
    plans = decode_attention._PLANS
    full = plans["full"]
    assert full == tuple(point for name in ("short", "rest", "largest") for point in plans[name])
    sizes = {(p.shape, p.batch_size, p.context >> 10) for p in full}
    every = {(s, b, c) for s in ("qwen3", "mixtral") for b in (4, 16, 32) for c in (8, 16, 32)}
    assert sizes == every
    assert len(full) == len(every)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_all_ways_are_the_same_attention_on_cuda() -> None:
    device = torch.device("cuda")
    case = replace(case_of("qwen3"), device=device)
    ways: list[DecodeWay] = [*plain_ways(case), DynamicDecode(case)]
    ways += [DynamicDecode(case, is_offloaded=True), RegionDecode(case, 0.5, STEPS)]
    parts = RegionDecode(case, 0.5, 3 * STEPS)
    steps = {way.name: way.step for way in ways}
    own = Transfer(parts.cache.spec, device, lambda h: h)
    steps["put together"] = AblatedStep(case, parts, own).run
    found = {name: last_of(step) for name, step in steps.items()}
    expected = found[ways[0].name]
    errors = {name: (out - expected).abs().max().item() for name, out in found.items()}
    assert max(errors.values()) < 3e-2, errors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("share", "has_waits"), [(0.0, False), (1.0, True)])
def test_waits_for_the_cpu_are_seen_on_cuda(share: float, has_waits: bool) -> None:
    case = replace(case_of("qwen3"), device=torch.device("cuda"))
    way = RegionDecode(case, share, STEPS)
    real = CudaStream.wait_flag
    with awaited_flags() as waited:
        way.step()
        torch.cuda.synchronize()
        seconds = waited()
    assert (seconds is not None and seconds > 0) == has_waits
    assert CudaStream.wait_flag is real
