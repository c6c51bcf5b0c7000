"""Keeps a cost model true while it is used, by what the steps of each window took.

Costs per token drift with caches, clocks and other users of the memory and are followed; overheads
stay as they were calibrated.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sparsekv.checks import check_share
from sparsekv.roofline.cost_model import CostModel

DEAD_BAND = 0.03
"""A cost moves when a window finds it wrong by more than this part of itself. One that is wrong by
a part e makes steps at most e / (1 - e) longer than they are at the best share.
"""

_SPIKES = 0.2
"""Part of the samples that may be anything, all of them on one side."""
_ENOUGH = 400
"""Samples with which chance leaves no more in doubt than spikes do: older ones add nothing."""


class CostTracker:
    """A and B of a CostModel, re-estimated once a window from measured times.

    The estimate is the median of the costs that a window's samples imply. The model moves to it if
    it lies outside of the dead band, and if the cost in use cannot be the samples' true median
    though a fifth of them be spikes: noise moves nothing back and forth. One whole window decides,
    so a step change is followed by the end of the second window that it touches. Where a window's
    samples scatter too much to tell, or are too few, those before are judged with them, twice as
    many at a time. (arXiv:2609.14507 takes a sliding mean of the CPU's times, which one long stall
    would move.)

    Args:
        model: the costs to start from, and the overheads.
    """

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._cpu_costs, self._h2d_costs = _Costs(), _Costs()

    @property
    def model(self) -> CostModel:
        """The costs in use; another object after each window that moved one."""
        return self._model

    def observe_cpu(self, seconds: float, share: float, num_tokens: int) -> None:
        """Note what the CPU's part of one layer took in one step.

        Times that are no time (not finite, zero, negative: a clock that jumped) and parts without
        tokens are left out.

        Args:
            seconds: of work, without waiting for the accelerator.
            share: the part of the placed tokens that the CPU attended to.
            num_tokens: placed tokens of a sequence.
        Raises:
            LayoutError: a share outside [0, 1].
        """
        check_share("share", share)
        overhead_s = self._model.cpu_overhead_s
        self._cpu_costs.note(seconds, overhead_s, share * num_tokens)

    def observe_gpu(self, seconds: float, share: float, num_tokens: int) -> None:
        """Note what the accelerator's part of one layer took in one step, as `observe_cpu` does.

        Args:
            seconds: of streaming and attending, without waiting for the CPU.
            share: the part of the placed tokens that the CPU attended to, not the accelerator's.
            num_tokens: placed tokens of a sequence.
        Raises:
            LayoutError: a share outside [0, 1].
        """
        check_share("share", share)
        overhead_s = self._model.gpu_overhead_s
        self._h2d_costs.note(seconds, overhead_s, (1.0 - share) * num_tokens)

    def end_window(self) -> CostModel:
        """Judge the window that is full now, and begin the next.

        Returns:
            The model from here on; the same object if nothing moved.
        """
        cpu = self._cpu_costs.end_window(self._model.cpu_s_per_token)
        h2d = self._h2d_costs.end_window(self._model.h2d_s_per_token)
        if (cpu, h2d) != (self._model.cpu_s_per_token, self._model.h2d_s_per_token):
            self._model = replace(self._model, cpu_s_per_token=cpu, h2d_s_per_token=h2d)
        return self._model


class _Costs:
    """Seconds per token of one engine, as samples imply them."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        """Since the cost moved last, at most `_ENOUGH` and those of the window under way."""
        self._num_new = 0
        """Of the window."""

    def note(self, seconds: float, overhead_s: float, num_tokens: float) -> None:
        """Add a sample to the window."""
        if seconds > 0 and num_tokens > 0:
            # Kept where it is negative: without the low side of its noise a median would be too
            # high.
            cost = (seconds - overhead_s) / num_tokens
            if math.isfinite(cost):
                self._samples.append(cost)
                self._num_new += 1

    def end_window(self, current: float) -> float:
        """The cost to go on with: the median of the fewest latest samples that refute `current`, or
        that.
        """
        count, self._num_new = self._num_new, 0
        while 0 < count <= len(self._samples):
            found = _refuting(self._samples[-count:], current)
            if found is not None:
                self._samples = []
                return found
            count *= 2
        self._samples = self._samples[-_ENOUGH:]
        return current


def _refuting(costs: list[float], current: float) -> float | None:
    """The samples' median, if `current` cannot be the true one, and is not near."""
    num_costs = len(costs)
    # Spikes push the true median by half their number of ranks; sampling by sqrt(n) / 2 for each
    # standard deviation, of which four are allowed for.
    margin = math.ceil(_SPIKES / 2 * num_costs + 2 * math.sqrt(num_costs))
    if num_costs <= 2 * margin:
        return None  # too few to tell
    costs = sorted(costs)
    first, last = num_costs // 2 - margin, (num_costs - 1) // 2 + margin
    if costs[first] <= current <= costs[last]:
        return None
    found = costs[num_costs // 2]
    return found if found > 0 and abs(found - current) > DEAD_BAND * current else None
