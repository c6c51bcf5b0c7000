"""What attention costs on this machine, measured in decode steps like any others: both engines at
work, over keys and values in the regions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median, median_low

import torch

from sparsekv.attention import DecodeAttention
from sparsekv.attention.timings import Timing
from sparsekv.cache import InplaceKVCache
from sparsekv.engine.ceilings import measure_machine
from sparsekv.engine.config import CacheConfig
from sparsekv.engine.profile_key import profile_key
from sparsekv.engine.step import attend
from sparsekv.errors import LayoutError
from sparsekv.format import KVGeometry
from sparsekv.kernels.dispatch import num_attending_threads
from sparsekv.regions.memory import available_bytes
from sparsekv.roofline import Calibration, CalibrationPoint, ShareRouter, fit

_LAYER_BYTES = (48 << 20, 160 << 20, 512 << 20)
"""Keys and values of a layer at the lengths that are measured."""
_LEAST_LAYERS, _LEAST_BYTES = 4, 3 << 29
"""As many layers as hold so much: no layer may find its keys in the processor's caches again, which
have up to half a gigabyte.
"""
_MOST_TOKENS = 1 << 18
_PIECE_TOKENS = 4096
"""Appended at a time: the accelerator has to hold them."""
_MARGIN_BYTES = 2 << 30
_WARM_UP, _STEPS = 3, 12
_FIRST_SHARE, _ASIDE = 0.6, 0.06
_WORTH = 0.95
"""Of the time that reading in place takes: copies take the launches of many chunks, and memory
traffic of the accelerator's, so they are to be faster than this.
"""


def calibrate(
    geometry: KVGeometry,
    *,
    num_heads: int,
    batch_size: int = 1,
    device: str | torch.device = "cuda",
) -> Calibration:
    """Measure this machine for a model: some seconds, and about 2 GiB of host memory.

    A is measured while the bus is busy and B while the CPU attends, since they share the memory: at
    shares near the best one, which is found first. (arXiv:2609.14507, equation 1.) The pinned
    region is read in place and through copies, and B is that of the faster way.

    Args:
        geometry: what a token stores; its number of layers does not matter.
        num_heads: query heads.
        batch_size: sequences of a step.
        device: "cuda" or "cuda:<index>"; the simulated accelerator has no bus to time.
    Returns:
        The costs, and the machine's ceilings beside them; not saved.
    Raises:
        LayoutError: no such device, or one that is not timed; `num_heads` is no multiple of the kv
            heads; or the times do not grow with the length (something else was running).
        CapacityError: no memory for it.
    """
    if num_heads % geometry.num_kv_heads:
        raise LayoutError(
            f"num_heads={num_heads}: must be a multiple of num_kv_heads={geometry.num_kv_heads}; "
            "take both from the model's config"
        )
    device = torch.device(device)
    in_place: list[CalibrationPoint] = []
    copied: list[CalibrationPoint] = []
    best = _FIRST_SHARE
    for num_tokens, num_layers in _sizes(geometry, batch_size):
        steps = _Steps(replace(geometry, num_layers=num_layers), num_heads, batch_size, device)
        steps.grow(num_tokens)
        least = steps.least_share
        best = min(max(_balanced(steps.measure(best)), least), 1 - least)
        for share in (best - _ASIDE, best + _ASIDE):
            in_place.append(steps.measure(share))
            copied.append(steps.measure(share, reads_in_place=False))
        del steps  # the next ones need the memory
    reads_in_place = not _is_worth_copying(in_place, copied)
    points = in_place if reads_in_place else copied
    cost, residual = fit(points)
    machine = measure_machine(
        geometry, num_heads=num_heads, batch_size=batch_size, device=device, cost=cost
    )
    key = profile_key(
        geometry,
        num_heads,
        batch_size=batch_size,
        device=device,
        num_threads=num_attending_threads(),
    )
    return Calibration(
        key=key,
        machine=machine,
        cost=cost,
        residual=residual,
        points=tuple(points),
        reads_in_place=reads_in_place,
    )


class _Steps:
    """Decode steps of attention alone, over a cache that grows; the CPU borrows all that it
    attends to, so that any share can be had.
    """

    def __init__(
        self, geometry: KVGeometry, num_heads: int, batch_size: int, device: torch.device
    ) -> None:
        self._spec = CacheConfig().spec(geometry, batch_size)
        self.cache = InplaceKVCache(self._spec, device, ShareRouter(0.0), step_share=_FIRST_SHARE)
        # Of its own: a caller's samples do not change because a machine was measured.
        self._generator = torch.Generator(self.cache.device).manual_seed(0)
        self._query = self._random(num_heads, 1, geometry.head_dim)
        self._token = self._keys(1)
        self._scale = geometry.head_dim**-0.5

    def grow(self, num_tokens: int) -> None:
        """Let every layer hold so many tokens.

        Raises:
            CapacityError: see `InplaceKVCache.reserve`.
        """
        self.cache.reserve(num_tokens + self._spec.window_size)
        while (missing := num_tokens - self.cache.num_tokens) > 0:
            piece = self._keys(min(missing, _PIECE_TOKENS))
            for layer_idx in range(self._spec.geometry.num_layers):
                self.cache.append(layer_idx, *piece)
                self.cache.flush(layer_idx)

    @property
    def least_share(self) -> float:
        """That of one segment."""
        return self._spec.segment_tokens / self.cache.num_placed_tokens

    def measure(self, share: float, *, reads_in_place: bool = True) -> CalibrationPoint:
        """What the engines take in a step of that share, or the nearest at which both have some."""
        cache, least = self.cache, self.least_share
        cache.step_share = min(max(share, least), 1 - least)
        self._step()
        companion = cache.companion
        assert isinstance(companion, DecodeAttention)
        companion.reads_ahead, companion.reads_in_place = False, reads_in_place
        for _ in range(_WARM_UP):
            self._step()
        timings = companion.timings
        timings.cpu.take(), timings.gpu.take()
        for _ in range(_STEPS):
            self._step()
        self._step()  # by then the times of the others are known
        cpu_tokens, cpu_s = _medians("cpu", timings.cpu.take())
        gpu_tokens, gpu_s = _medians("gpu", timings.gpu.take())
        num_tokens = cpu_tokens + gpu_tokens
        return CalibrationPoint(
            num_tokens=num_tokens, share=cpu_tokens / num_tokens, cpu_s=cpu_s, gpu_s=gpu_s
        )

    def _step(self) -> None:
        for layer_idx in range(self._spec.geometry.num_layers):
            self.cache.append(layer_idx, *self._token)
            attend(self.cache, layer_idx, self._query, self._scale)
        self.cache.accelerator.current_stream().synchronize()

    def _keys(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        geometry = self._spec.geometry
        key = self._random(geometry.num_kv_heads, num_tokens, geometry.head_dim)
        if geometry.shared_kv:
            return key, None
        return key, self._random(geometry.num_kv_heads, num_tokens, geometry.value_dim)

    def _random(self, *shape: int) -> torch.Tensor:
        size, dtype = (self._spec.batch_size, *shape), self._spec.geometry.dtype
        return torch.randn(size, generator=self._generator, device=self.cache.device, dtype=dtype)


def _sizes(geometry: KVGeometry, batch_size: int) -> Iterator[tuple[int, int]]:
    """Lengths to measure at, in whole windows, each at least twice the one before, and the number
    of layers to do it with.

    Short of memory, lengths and layers are less; the shortest two lengths are given at least.
    """
    window = CacheConfig().window_size
    per_token = batch_size * geometry.bytes_per_token_per_layer
    room = max(available_bytes() - _MARGIN_BYTES, 0) // per_token
    num_tokens = 0
    for layer_bytes in _LAYER_BYTES:
        most = min(layer_bytes // per_token, _MOST_TOKENS, room // _LEAST_LAYERS)
        num_tokens = max(most // window, 4, 2 * num_tokens // window) * window
        num_layers = min(-(-_LEAST_BYTES // (num_tokens * per_token)), room // num_tokens)
        yield num_tokens, max(num_layers, _LEAST_LAYERS)


def _is_worth_copying(in_place: list[CalibrationPoint], copied: list[CalibrationPoint]) -> bool:
    """Whether copies are faster at both shares of the longest context."""
    pairs = zip(in_place[-2:], copied[-2:], strict=True)
    return all(copy.gpu_s < _WORTH * direct.gpu_s for direct, copy in pairs)


def _balanced(point: CalibrationPoint) -> float:
    """The share at which both would take as long, if neither had an overhead and nothing were read
    ahead.
    """
    cpu, gpu = point.cpu_s / point.share, point.gpu_s / (1 - point.share)
    return gpu / (cpu + gpu) if cpu + gpu else _FIRST_SHARE


def _medians(engine: str, timings: list[Timing]) -> tuple[int, float]:
    if not timings:
        raise LayoutError(
            f"no time of the {engine}'s part is known: only steps on a GPU are timed, with the "
            "native library for the CPU's part; see `sparsekv doctor`, or plan for a machine that "
            "is known"
        )
    return median_low(tokens for tokens, _ in timings), median(seconds for _, seconds in timings)
