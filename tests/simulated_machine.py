"""A machine whose engines take the time that a cost model says, whatever they really take."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import prepared_ops
import pytest
import torch
from torch import nn

from sparsekv.attention import decode
from sparsekv.attention.timings import Recent, Timings
from sparsekv.engine import CacheConfig, attend, step
from sparsekv.kernels import dispatch
from sparsekv.models.store import CacheOwner, RegionStore
from sparsekv.regions import window
from sparsekv.roofline import PRESETS, Calibration, CostModel, ProfileKey
from sparsekv.transfer import in_place

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 4
WINDOW = 16


class Machine:
    """What attention costs here, and how that is read from a clock.

    Attributes:
        cost: may be changed at any time.
        clock: what is read for the seconds that passed.
        reads_ahead: so that the window is not in the accelerator's times.
        waits: seconds by which a step is longer than either engine's part of so many tokens.
        copying: times as long as in place attention takes to what is copied, but for the overhead.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.clock = lambda seconds: seconds
        self.reads_ahead = True
        self.waits = lambda cpu_tokens, gpu_tokens: 0.0
        self.copying = 1.0
        self.is_copying = False
        self._cpu_tokens = self._gpu_tokens = 0

    def timings(self) -> Timings:
        return Timings(
            cpu=_Told(lambda num_tokens: self.clock(self._cpu_time(num_tokens))),
            gpu=_Told(lambda num_tokens: self.clock(self._gpu_time(num_tokens))),
            steps=_Told(lambda _: self.clock(self._step_time())),
        )

    def _step_time(self) -> float:
        cpu_tokens, gpu_tokens = self._cpu_tokens, self._gpu_tokens
        cpu, gpu = self.cost.cpu_time(1.0, cpu_tokens), self.cost.gpu_time(0.0, gpu_tokens)
        return max(cpu, gpu) + self.waits(cpu_tokens, gpu_tokens)

    def _cpu_time(self, num_tokens: int) -> float:
        self._cpu_tokens = num_tokens
        return self.cost.cpu_time(1.0, num_tokens)

    def _gpu_time(self, num_tokens: int) -> float:
        self._gpu_tokens = num_tokens
        times = self.copying if self.is_copying else 1.0
        overhead_s = 0.0 if self.reads_ahead else self.cost.gpu_overhead_s
        return times * self.cost.h2d_s_per_token * num_tokens + overhead_s


class _Told(Recent):
    """Notes what it is told that passed."""

    def __init__(self, seconds_of):
        super().__init__()
        self._seconds_of = seconds_of

    def note(self, num_tokens, seconds):
        assert seconds >= 0
        super().note(num_tokens, self._seconds_of(num_tokens))


def install(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Let caches that begin from here on run on it; only times come of their attention."""
    monkeypatch.setattr(decode, "Timings", machine.timings)
    monkeypatch.setattr(step, "reads_in_place", lambda *arguments: True)
    monkeypatch.setattr(step, "split_attention", lambda *arguments, **options: (None, None))

    def attend(self, *arguments):
        machine.is_copying = not self.reads_in_place
        return _attend(self, *arguments)

    monkeypatch.setattr(decode.DecodeAttention, "attend", attend)
    return machine


def install_with_attention(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The same with attention too, by prepared launches and jobs, as on a GPU."""
    if dispatch.attention_jobs() is None:
        pytest.skip("no native library")
    for module in (decode, in_place, window):
        monkeypatch.setattr(module, "decode_ops_for", lambda device: prepared_ops)
    monkeypatch.setattr(decode, "Timings", machine.timings)
    return machine


def _attend(self, layer_idx, query, softmax_scale, parts, upcoming):
    """In the place of DecodeAttention's: who attends to how much, noted when it would be known."""
    if layer_idx == 0:
        self.timings.steps.note(1, 0.0)
        for num_tokens in vars(self).pop("timed", []):
            self.timings.gpu.note(num_tokens, 0.0)
    cpu, gpu = (sum(view.num_tokens for view in views) for views in (parts.unpinned, parts.pinned))
    if cpu:
        self.timings.cpu.note(cpu, 0.0)
    if self._stopwatch.is_due(layer_idx) and gpu:
        vars(self).setdefault("timed", []).append(gpu)
    return query


def calibration(
    cost: CostModel,
    geometry: str = f"{NUM_HEADS} heads {NUM_KV_HEADS} kv {HEAD_DIM} {HEAD_DIM}",
    batch_size: int = 2,
) -> Calibration:
    """What a calibration would have found."""
    key = ProfileKey(
        cpu="",
        gpu="",
        driver="",
        geometry=geometry,
        dtype="float32",
        batch_size=batch_size,
        num_threads=1,
    )
    return Calibration(key=key, machine=PRESETS["h200"], cost=cost, residual=0.0, points=())


class Chat:
    """A model's attention layers, without the model: random keys, values and queries."""

    def __init__(self, cost: CostModel, *, num_layers=3, batch_size=2, **config) -> None:
        sizes = {"window_size": WINDOW, "block_size": 4, "ping_pong_tokens": 2 * WINDOW}
        profile = calibration(cost, batch_size=batch_size)
        config = CacheConfig(profile=profile, **(sizes | config))
        self._model = _Model()
        self.batch_size = batch_size
        self.store = RegionStore(CacheOwner(self._model), config, num_layers)

    @property
    def cache(self):
        return self.store.cache

    @property
    def balance(self):
        return self.cache.balance

    @property
    def num_unpinned(self):
        """Tokens of a sequence."""
        return next(r.tokens for r in self.cache.stats().regions if r.name == "unpinned")

    def read(self, num_tokens, *, chunk=None):
        """A turn of the user, as generate has it read."""
        past = self.store.num_tokens(0)
        self.store.reserve(past + num_tokens + 1000, past + num_tokens)
        while num_tokens:
            size = min(num_tokens, chunk or num_tokens)
            self.forward(size)
            num_tokens -= size

    def decode(self, num_steps):
        for _ in range(num_steps):
            self.forward(1)

    def forward(self, num_new):
        for layer_idx in range(self.store.num_layers):
            key, value = (self._random(NUM_KV_HEADS, num_new) for _ in range(2))
            self.store.append(layer_idx, key, value)
            attend(self.cache, layer_idx, self._random(NUM_HEADS, num_new), 0.3)

    def copy(self):
        twin = copy.copy(self)
        twin.store = copy.deepcopy(self.store)
        return twin

    def _random(self, num_heads, num_tokens):
        return torch.randn(self.batch_size, num_heads, num_tokens, HEAD_DIM)


class _Model(nn.Module):
    """As much of a model as a store asks for."""

    def __init__(self):
        super().__init__()
        text = SimpleNamespace(num_attention_heads=NUM_HEADS)
        self.config = SimpleNamespace(get_text_config=lambda decoder: text)
