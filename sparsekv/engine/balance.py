"""The share of one cache, kept where both engines finish together (arXiv:2609.14507, section 4).

Placed bytes never move: what changes is where the next segments go and, where the share is elastic,
how much of the pinned region the CPU borrows in a step.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

from sparsekv.attention import Timings
from sparsekv.attention.timings import Timing
from sparsekv.cache import InplaceKVCache
from sparsekv.engine.trial import Trial
from sparsekv.format import ShareStats
from sparsekv.roofline import CostModel, CostTracker, ShareRouter

_ELASTIC_STEPS = 4
_ELASTIC_SAMPLES = 40
"""Steps between two looks at the costs, at least, and times of each engine that is at work, where
the next step can follow them.
"""


def placed_share(share: float, is_elastic: bool) -> float:
    """Part of the segments to place unpinned.

    Where steps may borrow the rest, as much as is best for a CPU of half the speed: from p = B / (A
    + B) follows B / (2 A + B) = p / (2 - p). What is unpinned cannot be lent to the accelerator, so
    this is how slow the CPU may become before it holds up a step.
    """
    return share / (2.0 - share) if is_elastic else share


class Balance:
    """Decides the share of a cache by what its layers cost, and follows what they cost.

    Begun at r(L0) and routed at p since, the running share is r(L) at every length. The costs are
    looked at again once a window, or every few steps where the share is elastic; a change of a
    step's share is taken back where steps get longer by it.

    Args:
        cost: one layer of the batch that the cache is made for; another number of rows later costs
            in proportion.
        is_elastic: choose the share of each step too.
    Attributes:
        router: for the cache.
    """

    def __init__(self, cost: CostModel, *, is_elastic: bool) -> None:
        self._tracker = CostTracker(cost)
        self._is_elastic = is_elastic
        self._trial = Trial()
        self._num_rows: int | None = None
        """Of the cache in its last step; None: there was none."""
        self._first_tokens = 0
        self._num_steps = 0
        """Of the window that is under way, and the times of either engine in it."""
        self._num_cpu_times = self._num_gpu_times = 0
        self._measured_cpu_s: float | None = None
        self._measured_gpu_s: float | None = None
        self.router = ShareRouter(self._placed(cost.marginal_share))

    @property
    def cost(self) -> CostModel:
        """The costs in use."""
        return self._tracker.model

    def begin(self, num_tokens: int) -> None:
        """Choose where the first segments of an empty cache go.

        Args:
            num_tokens: how many tokens of a sequence will be placed first.
        """
        self._first_tokens = num_tokens
        self.router.marginal_share = self._placed(self.cost.optimal_share(num_tokens))

    def go_on(self, num_placed_tokens: int) -> None:
        """Place further segments at p, once the first ones are placed.

        Args:
            num_placed_tokens: of a sequence.
        """
        if num_placed_tokens < self._first_tokens:
            return
        share = self._placed(self.cost.marginal_share)
        if share != self.router.marginal_share:
            self.router.marginal_share = share

    def step_share(self, num_tokens: int) -> float | None:
        """The share of a step over so many placed tokens; None: what is unpinned."""
        if not self._is_elastic:
            return None
        return max(self.cost.optimal_share(num_tokens), self.router.marginal_share)

    def end_step(self, cache: InplaceKVCache, timings: Timings) -> None:
        """Take what the last steps took, and decide what follows from it; between two steps.

        Args:
            cache: of which this is the balance.
            timings: of its layers; they are taken.
        """
        num_tokens = cache.num_placed_tokens
        if not num_tokens:
            return
        cpu, gpu = timings.cpu.take(), timings.gpu.take()
        for _, seconds in _real(timings.steps.take()):
            self._trial.note(seconds)
        num_rows, before = cache.batch_size, self._num_rows or cache.spec.batch_size
        self._num_rows = num_rows
        if num_rows == before:
            self._observe(cpu, gpu)
        else:
            self._scale(num_rows / before)
        self._num_steps += 1
        if self._is_window_full(cache.spec.window_size):
            self._tracker.end_window()
            self._num_steps = self._num_cpu_times = self._num_gpu_times = 0
        self.go_on(num_tokens)
        wanted = self.step_share(num_tokens)
        if wanted is not None and cache.is_complete:  # not after the layers of a step out of order
            cache.step_share = self._next_share(cache.step_share, wanted, num_tokens)

    def stats(self, cpu_share: float, num_tokens: int) -> ShareStats:
        """What was aimed at, and what came of it.

        Args:
            cpu_share: of the placed tokens, what the CPU attends to.
            num_tokens: placed tokens of a sequence.
        """
        return ShareStats(
            target_share=self.cost.optimal_share(num_tokens),
            predicted_s=self.cost.step_time(cpu_share, num_tokens),
            measured_cpu_s=self._measured_cpu_s,
            measured_gpu_s=self._measured_gpu_s,
        )

    def copy(self) -> Balance:
        """The same for a copy of the cache, with a router of its own."""
        other = Balance(self.cost, is_elastic=self._is_elastic)
        other.router.marginal_share = self.router.marginal_share
        other._num_rows, other._first_tokens = self._num_rows, self._first_tokens
        other._measured_cpu_s, other._measured_gpu_s = self._measured_cpu_s, self._measured_gpu_s
        return other

    def _next_share(self, current: float | None, wanted: float, num_tokens: int) -> float:
        """The wanted share where steps get shorter by it, or cannot stay as they are."""
        if current is None or current < self.router.marginal_share:
            return wanted
        best_s = self.cost.step_time(wanted, num_tokens)
        gain = self.cost.step_time(current, num_tokens) / best_s if best_s else 1.0
        return max(self._trial.next_share(current, wanted, gain), self.router.marginal_share)

    def _placed(self, share: float) -> float:
        return placed_share(share, self._is_elastic)

    def _scale(self, factor: float) -> None:
        """Go on with so many times the costs per token, and with no time from before."""
        cpu, h2d = self.cost.cpu_s_per_token * factor, self.cost.h2d_s_per_token * factor
        self._tracker = CostTracker(replace(self.cost, cpu_s_per_token=cpu, h2d_s_per_token=h2d))
        self._trial = Trial()
        self._num_steps = self._num_cpu_times = self._num_gpu_times = 0
        self._measured_cpu_s = self._measured_gpu_s = None

    def _is_window_full(self, most_steps: int) -> bool:
        if self._num_steps >= most_steps:
            return True
        counts = (self._num_cpu_times, self._num_gpu_times)
        return (
            self._is_elastic
            and self._num_steps >= _ELASTIC_STEPS
            and all(count >= _ELASTIC_SAMPLES for count in counts if count)
        )

    def _observe(self, cpu: list[Timing], gpu: list[Timing]) -> None:
        self._num_cpu_times += len(cpu)
        self._num_gpu_times += len(gpu)
        cpu, gpu = _real(cpu), _real(gpu)
        for num_tokens, seconds in cpu:
            self._tracker.observe_cpu(seconds, 1.0, num_tokens)
        # Of what is read in place alone; the window is what the overhead stands for.
        gpu = [(num_tokens, seconds + self.cost.gpu_overhead_s) for num_tokens, seconds in gpu]
        for num_tokens, seconds in gpu:
            self._tracker.observe_gpu(seconds, 0.0, num_tokens)
        self._measured_cpu_s = _median_seconds(cpu, self._measured_cpu_s)
        self._measured_gpu_s = _median_seconds(gpu, self._measured_gpu_s)


def _real(timings: list[Timing]) -> list[Timing]:
    """Without those of a clock that jumped, and those that say nothing."""
    return [timing for timing in timings if 0 < timing[1] < math.inf]


def _median_seconds(timings: list[Timing], otherwise: float | None) -> float | None:
    return median(seconds for _, seconds in timings) if timings else otherwise
