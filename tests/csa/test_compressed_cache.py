"""A DeepSeek-V4 cache keeps its laws: no entry lost or twice, and every failure leaves it whole."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import deepseek_v4_reference as reference
import harness
import layer_inputs
import pytest
import torch

from sparsekv.csa.step import attend_compressed
from sparsekv.device import SimulatedAccelerator
from sparsekv.engine.config import CacheConfig
from sparsekv.errors import CacheStateError, CapacityError, LayoutError

CSA = [i for i, kind in enumerate(layer_inputs.KINDS) if kind == "csa"]


def _entries(layers: layer_inputs.Layers, layer_idx: int, num_tokens: int) -> torch.Tensor:
    """What a layer's compressor makes of its first tokens, by definition."""
    new = layer_inputs.part(layers.inputs[layer_idx], 0, num_tokens)
    return torch.stack(
        [
            reference.compressed(
                layer_inputs._compressor(new.compressor, row),
                lambda positions: positions[:, None] * layer_inputs.FREQUENCIES.double(),
            )
            for row in range(len(new.kv))
        ]
    )


def check_entries(layers: layer_inputs.Layers, num_tokens: int) -> None:
    """Every entry is where one region, and only one, says; and is what it should be."""
    cache = layers.cache
    for layer_idx, kind in enumerate(cache.geometry.layer_kinds):
        if kind == "sliding":
            assert cache.num_entries(layer_idx) == 0
            continue
        wanted = _entries(layers, layer_idx, num_tokens)
        if kind == "hca":
            found = cache.buffer(layer_idx).entries
        else:
            found = harness.read(cache.entries, cache.pool_idx(layer_idx))[0][:, 0]
            assert len(cache.buffer(layer_idx)) == wanted.shape[1]
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


# Where entries live


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_every_entry_lives_once_and_the_share_holds(share: float) -> None:
    layers = layer_inputs.Layers(layer_inputs.build(share=share), 170)
    start = 0
    for num_tokens in (3, 1, 50, 1, 1, 60, 1, 53):
        layers.run(start, start + num_tokens)
        start += num_tokens
        check_entries(layers, start)
    stats = layers.cache.stats()
    placed = {region.name: region.tokens for region in stats.pool.regions}
    assert placed["unpinned"] + placed["pinned"] == 40  # 42 entries, 2 of them in the window
    assert abs(placed["unpinned"] - share * 40) <= 2  # a segment
    assert stats.cpu_share == placed["unpinned"] / 40


@pytest.mark.parametrize("first", [0, 3, 700])
def test_a_run_of_selected_entries_is_split_at_the_share(first: int) -> None:
    spec = CacheConfig().entry_spec(layer_inputs.geometry(layer_kinds=("csa",)), 2)
    cache = harness.build(spec, 0.3)
    cache.append(0, torch.zeros(2, 1, 1600, layer_inputs.DIM, dtype=torch.float64))
    cache.flush(0)
    regions = [cache.region_of(0, i) for i in range(first, first + 512)]
    assert abs(regions.count("unpinned") / 512 - 0.3) < 8 / 512


class CountingAccelerator(SimulatedAccelerator):
    """Knows the bytes of its memory that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        self.peak = 0

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor = super().empty(shape, dtype)
        if len(shape) != 3:  # index keys and HCA entries, which do grow
            num_bytes = tensor.numel() * tensor.element_size()
            self.alive += num_bytes
            self.peak = max(self.peak, self.alive)
            weakref.finalize(tensor, self._free, num_bytes)
        return tensor

    def _free(self, num_bytes: int) -> None:
        self.alive -= num_bytes


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_pool_takes_no_more_of_the_accelerator_as_the_context_grows(
    share: float, monkeypatch: Any
) -> None:
    accelerator = CountingAccelerator()
    geometry = layer_inputs.geometry(layer_kinds=("csa", "csa"))
    cache = layer_inputs.build(geometry, share, accelerator=accelerator, monkeypatch=monkeypatch)
    windows = accelerator.alive
    assert windows == 2 * 2 * 4 * layer_inputs.DIM * 8  # layers, rows, entries, values, bytes
    inputs = [layer_inputs.layer_input("csa", 900, topk=5, seed=i) for i in range(2)]
    peaks, seen = [], []
    for start in range(0, 900, 30):
        accelerator.peak = 0
        for layer_idx, new in enumerate(inputs):
            attend_compressed(cache, layer_idx, layer_inputs.part(new, start, start + 30))
        peaks.append(accelerator.peak)
        seen.append(accelerator.alive)
        window = next(r for r in cache.stats().kinds if (r.kind, r.name) == ("csa", "window"))
        assert window.used_bytes == windows
    assert set(seen) == {windows}
    # In flight: what 30 tokens of 2 rows select, at most.
    assert max(peaks) - windows <= 30 * 2 * 5 * layer_inputs.DIM * 8


def test_a_decode_step_reads_the_selected_pinned_entries_only() -> None:
    cache = layer_inputs.build(layer_inputs.geometry(layer_kinds=("csa",)), share=0.4)
    new = layer_inputs.layer_input("csa", 300, topk=9)
    _, chosen = layer_inputs.expected(new)
    attend_compressed(cache, 0, layer_inputs.part(new, 0, 280))
    for t in range(280, 300):
        homes = [cache.entries.region_of(0, i) for i in range(cache.num_entries(0))]
        pinned = sum(homes[i : i + 1] == ["pinned"] for row in chosen for i in row[t])
        before = cache.entries.accelerator.h2d_bytes
        attend_compressed(cache, 0, layer_inputs.part(new, t, t + 1))
        assert cache.entries.accelerator.h2d_bytes - before == pinned * layer_inputs.DIM * 8


# Rows, length, copies


@pytest.mark.parametrize("length", [1, 3, 4, 9, 31, 46])
@pytest.mark.parametrize("chosen", [[1, 0], [1], [0, 0, 1, 1], [1, 1]])
def test_rows_are_chosen(length: int, chosen: list[int]) -> None:
    layers = layer_inputs.Layers(layer_inputs.build(), 70)
    layers.run(0, length)
    layers.select(chosen)
    assert layers.cache.batch_size == len(chosen)
    assert layers.cache.token_ids.shape == (len(chosen), length)
    layers.run(length, length + 9)
    layers.select([0])
    layers.run(length + 9, 70)
    check_entries(layers, 70)


@pytest.mark.parametrize("wrong", [[], [2], [-1], [0.0], [[0]]])
def test_rows_that_do_not_exist(wrong: Any) -> None:
    layers = layer_inputs.Layers(layer_inputs.build(), 30)
    layers.run(0, 21)
    with pytest.raises(LayoutError):
        layers.cache.select_rows(torch.tensor(wrong))
    layers.run(21, 30)
    check_entries(layers, 30)


def _cut(layers: layer_inputs.Layers, num_tokens: int) -> None:
    """Outputs of the tokens read again are of no use: they are not compared."""
    cache = layers.cache
    with cache.rewound(num_tokens) as replay:
        _read_again(layers, replay)


def _read_again(layers: layer_inputs.Layers, ids: torch.Tensor) -> None:
    for part in ids.split(13, 1):
        if not part.shape[1]:
            continue
        start, stop = int(part[0, 0]), int(part[0, -1]) + 1
        layers.cache.record(part)
        for layer_idx, new in enumerate(layers.inputs):
            attend_compressed(layers.cache, layer_idx, layer_inputs.part(new, start, stop))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_cut_to_every_length(share: float) -> None:
    layers = layer_inputs.Layers(layer_inputs.build(share=share), 100)
    layers.run(0, 90)
    full = layers.cache
    assert full._replay_start(60) > 0
    for length in range(0, 91, 1 if share == 0.5 else 7):
        layers.cache = copy.deepcopy(full)
        _cut(layers, length)
        assert layers.cache.num_tokens == layers.cache.token_ids.shape[1] == length
        check_entries(layers, length)
        layers.run(length, min(length + 9, 100))
    layers.cache = full
    layers.run(90, 100)
    check_entries(layers, 100)


def test_lengths_that_were_never_read() -> None:
    layers = layer_inputs.Layers(layer_inputs.build(), 30)
    layers.run(0, 21)
    for wrong in (22, -1):
        with pytest.raises(LayoutError, match="has read 21"), layers.cache.rewound(wrong):
            pass
    layers.run(21, 30)


def test_reset_and_close() -> None:
    cache = layer_inputs.build()
    for length, seed in ((41, 0), (3, 1), (2, 2), (30, 3)):
        layers = layer_inputs.Layers(cache, length + 11, seed=10 * seed)
        layers.run(0, length)
        layers.run(length, length + 11)
        check_entries(layers, length + 11)
        cache.reset()
        assert (cache.num_tokens, cache.token_ids.shape[1]) == (0, 0)
    cache.close("it is over")
    with pytest.raises(CacheStateError, match="it is over"):
        layers.run(0, 1)


def test_a_copy_shares_nothing() -> None:
    one = layer_inputs.Layers(layer_inputs.build(), 60)
    one.run(0, 33)
    other = layer_inputs.Layers(copy.deepcopy(one.cache), 60)
    one.run(33, 60)
    other.run(33, 34)
    other.select([1])
    other.run(34, 60)
    for layers in (one, other):
        check_entries(layers, 60)


# Failures


class RefusingAccelerator(harness.FaultyAccelerator):
    """Refuses every operation from the n-th on, not just that one."""

    def tick(self) -> None:
        self.num_operations += 1
        if self.countdown is not None and self.num_operations >= self.countdown:
            raise self.error


def _faulty(monkeypatch: Any, kind: type = harness.FaultyAccelerator) -> layer_inputs.Layers:
    cache = layer_inputs.build(accelerator=kind(), monkeypatch=monkeypatch)
    layers = layer_inputs.Layers(cache, 60)
    layers.run(0, 21)
    return layers


@pytest.mark.parametrize("layer_idx", range(4))
@pytest.mark.parametrize("kind", [harness.FaultyAccelerator, RefusingAccelerator])
@pytest.mark.parametrize("num_tokens", [3, 30])
def test_a_failing_operation_leaves_the_layer(
    monkeypatch: Any, layer_idx: int, kind: type, num_tokens: int
) -> None:
    error, countdown = CapacityError("no memory"), 0
    while error is not None:
        countdown += 1
        layers, stop = _faulty(monkeypatch, kind), 21 + num_tokens
        layers.run(21, stop, range(layer_idx))
        cache, accelerator = layers.cache, layers.cache.entries.accelerator
        state, stored = cache.states[layer_idx], cache.num_entries(layer_idx)
        accelerator.fail(countdown, error)
        # Other tokens than those that come later: nothing of them may stay.
        other = layer_inputs.layer_input(layer_inputs.KINDS[layer_idx], stop, seed=99)
        try:
            attend_compressed(cache, layer_idx, layer_inputs.part(other, 21, stop))
        except CapacityError:
            assert cache.states[layer_idx] is state
            if kind is harness.FaultyAccelerator:  # else going back may be refused, until later
                assert cache.num_entries(layer_idx) == stored
            accelerator.countdown = None
            layers.run(21, stop, range(layer_idx, 4))
            layers.run(stop, 60)
            check_entries(layers, 60)
        else:
            error = None
    assert (countdown > 1) == (layer_inputs.KINDS[layer_idx] != "sliding")


@pytest.mark.parametrize("layer_idx", [0, 1, 3])
def test_ctrl_c_at_any_line_of_a_step(layer_idx: int) -> None:
    layers = layer_inputs.Layers(layer_inputs.build(), 60)
    layers.run(0, 23)
    layers.run(23, 32, range(layer_idx))
    full, at_line, was_interrupted = layers.cache, 1, True
    new = layer_inputs.part(layers.inputs[layer_idx], 23, 32)
    while was_interrupted:
        layers.cache = cache = copy.deepcopy(full)
        was_interrupted = harness.interrupt(
            at_line, lambda cache=cache: attend_compressed(cache, layer_idx, new)
        )
        if cache.states[layer_idx].num_tokens == 23:
            assert cache.states[layer_idx] is full.states[layer_idx]
            layers.run(23, 32, range(layer_idx, 4))
        else:
            layers.run(23, 32, range(layer_idx + 1, 4))
        layers.run(32, 45)
        check_entries(layers, 45)
        at_line += 23  # every line takes minutes; a prime, and other lines for each layer
    assert at_line > 200


def test_rows_stay_when_a_choice_of_rows_fails(monkeypatch: Any) -> None:
    for countdown in range(1, 20):
        layers = _faulty(monkeypatch)
        layers.cache.entries.accelerator.fail(countdown, CapacityError("no memory"))
        try:
            layers.cache.select_rows(torch.tensor([1]))
        except CapacityError:
            layers.cache.entries.accelerator.countdown = None
            layers.run(21, 60)
            check_entries(layers, 60)
        else:
            break
    assert countdown > 5  # 3 buffers and 2 windows had failed before


@pytest.mark.parametrize("layer_idx", range(4))
def test_an_interrupted_step_is_seen_and_cut_off(layer_idx: int) -> None:
    layers = layer_inputs.Layers(layer_inputs.build(), 60)
    layers.run(0, 21)
    layers.run(21, 34, range(layer_idx))
    cache = layers.cache
    assert cache.num_tokens == 21
    assert cache.is_complete == (layer_idx == 0)
    if layer_idx:
        with pytest.raises(CacheStateError, match="21 to 34"):
            cache.check_complete()
        with pytest.raises(CacheStateError, match="21 to 34"):
            cache.select_rows(torch.tensor([0]))
    _cut(layers, 21)
    check_entries(layers, 21)
    layers.run(21, 60)
    check_entries(layers, 60)


@pytest.mark.parametrize("length", [0, 5, 50, 58])
def test_an_interrupted_cut_leaves_the_cache(length: int) -> None:
    layers = layer_inputs.Layers(layer_inputs.build(), 70)
    layers.run(0, 60)
    cache = layers.cache
    with pytest.raises(ZeroDivisionError), cache.rewound(length) as replay:  # noqa: PT012
        _read_again(layers, replay[:, : replay.shape[1] // 2])
        raise ZeroDivisionError
    assert cache.num_tokens == cache.token_ids.shape[1] == 60
    check_entries(layers, 60)
    layers.run(60, 70)
    _cut(layers, length)
    check_entries(layers, length)
    layers.run(length, 70)


def test_entries_that_could_not_be_dropped_are_not_taken_for_new_ones(monkeypatch: Any) -> None:
    layers = _faulty(monkeypatch)
    layers.run(21, 47)
    cache, accelerator = layers.cache, layers.cache.entries.accelerator
    with pytest.raises(CapacityError), cache.rewound(30) as replay:  # noqa: PT012
        _read_again(layers, replay)
        accelerator.fail(1, CapacityError("no memory"))
    accelerator.countdown = None
    assert cache.num_tokens == 30
    other = layer_inputs.Layers(cache, 70, seed=50)
    other.inputs = [
        _joined(old, new, 30) for old, new in zip(layers.inputs, other.inputs, strict=True)
    ]
    other.expected = [layer_inputs.expected(new)[0] for new in other.inputs]
    other.run(30, 70)
    check_entries(other, 70)


def _joined(old: Any, new: Any, length: int) -> Any:
    """The first `length` tokens of one input, then those of another."""

    def both(one: torch.Tensor, other: torch.Tensor, dim: int) -> torch.Tensor:
        rest = other.narrow(dim, length, other.shape[dim] - length)
        return torch.cat([one.narrow(dim, 0, length), rest], dim)

    new = copy.deepcopy(new)
    for holder, source, names in _token_tensors(new, old):
        for name, dim in names:
            object.__setattr__(
                holder, name, both(getattr(source, name), getattr(holder, name), dim)
            )
    return new


def _token_tensors(new: Any, old: Any) -> Any:
    yield new, old, [("query", 2), ("kv", 1)]
    if new.compressor is not None:
        yield new.compressor, old.compressor, [("kv", 1), ("gate", 1)]
    if new.indexer is not None:
        keys, old_keys = new.indexer.compressor, old.indexer.compressor
        yield keys, old_keys, [("kv", 1), ("gate", 1)]
        yield new.indexer, old.indexer, [("query", 2), ("head_weights", 1)]
