"""The costs that measured times imply; measuring them is left to others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparsekv.checks import check_seconds, check_share, check_tokens
from sparsekv.errors import LayoutError
from sparsekv.roofline.cost_model import CostModel

_LEAST_SPREAD = 1.5
"""The most tokens that an engine had, as a multiple of its fewest, to tell A or B from C."""

_Samples = Sequence[tuple[float, float]]
"""(tokens, seconds) of one engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPoint:
    """Times of one layer's step, both engines at work.

    Raises:
        LayoutError: a negative length, a share outside [0, 1], or a time that is negative or not
            finite, as a clock that jumped gives it.
    """

    num_tokens: int
    """L: placed tokens of a sequence."""
    share: float
    """r: the part of them that the CPU attended to."""
    cpu_s: float
    """Seconds of the CPU's part, without waiting for the GPU."""
    gpu_s: float
    """Seconds of the GPU's part, without waiting for the CPU."""

    def __post_init__(self) -> None:
        check_tokens("num_tokens", self.num_tokens)
        check_share("share", self.share)
        check_seconds("cpu_s", self.cpu_s)
        check_seconds("gpu_s", self.gpu_s)


def fit(points: Iterable[CalibrationPoint]) -> tuple[CostModel, float]:
    """The two lines that fit measured times best, by least squares of relative errors.

    An engine without tokens at a point says nothing there. An overhead that would be negative is 0,
    and its line the best through the origin. (arXiv:2609.14507, equation 1.)

    Args:
        points: of one machine, model and batch, at several lengths or shares.
    Returns:
        The costs, and the residual: the root mean square of the relative errors of all times.
    Raises:
        LayoutError: the points cannot determine the lines: an engine never had tokens, or always
            about as many; took no time; or took no longer for more tokens.
    """
    points = list(points)
    cpu = _samples("cpu_s", [(p.share * p.num_tokens, p.cpu_s) for p in points])
    gpu = _samples("gpu_s", [((1 - p.share) * p.num_tokens, p.gpu_s) for p in points])
    cpu_line, gpu_line = _best_line("cpu_s", cpu), _best_line("gpu_s", gpu)
    cost = CostModel(
        cpu_s_per_token=cpu_line[0],
        h2d_s_per_token=gpu_line[0],
        cpu_overhead_s=cpu_line[1],
        gpu_overhead_s=gpu_line[1],
    )
    errors = [*_relative_errors(cpu, *cpu_line), *_relative_errors(gpu, *gpu_line)]
    return cost, math.sqrt(math.fsum(error**2 for error in errors) / len(errors))


def _samples(name: str, samples: _Samples) -> _Samples:
    """Those of an engine with tokens, if they can determine a line."""
    samples = [(tokens, seconds) for tokens, seconds in samples if tokens > 0]
    if not all(seconds > 0 for _, seconds in samples):
        raise LayoutError(f"{name}=0: an engine with tokens must take time; measure again")
    tokens = [tokens for tokens, _ in samples]
    if not tokens or max(tokens) < _LEAST_SPREAD * min(tokens):
        given = f"{min(tokens):.0f} to {max(tokens):.0f}" if tokens else "no"
        raise LayoutError(
            f"{name} of {given} tokens: the most must be at least {_LEAST_SPREAD} times the "
            "fewest, to tell the cost of a token from the overhead; measure at two lengths, one "
            "twice the other, and a share between 0 and 1"
        )
    return samples


def _best_line(name: str, samples: _Samples) -> tuple[float, float]:
    """(seconds per token, overhead): each error weighs by the time that it is an error of."""
    least = min(seconds for _, seconds in samples)
    weighted = [((least / seconds) ** 2, tokens, seconds) for tokens, seconds in samples]
    total = math.fsum(w for w, _, _ in weighted)
    mean_tokens = math.fsum(w * x for w, x, _ in weighted) / total
    mean_seconds = math.fsum(w * y for w, _, y in weighted) / total
    covariance = math.fsum(w * (x - mean_tokens) * (y - mean_seconds) for w, x, y in weighted)
    variance = math.fsum(w * (x - mean_tokens) ** 2 for w, x, _ in weighted)
    if covariance <= 0 or variance <= 0:
        raise LayoutError(
            f"{name}: must grow with the tokens, and does not; measure again, with longer contexts "
            "and nothing else running"
        )
    slope = covariance / variance
    overhead = mean_seconds - slope * mean_tokens
    if overhead >= 0:
        return slope, overhead
    products = math.fsum(w * x * y for w, x, y in weighted)
    return products / math.fsum(w * x * x for w, x, _ in weighted), 0.0


def _relative_errors(samples: _Samples, slope: float, overhead: float) -> list[float]:
    return [(slope * tokens + overhead) / seconds - 1 for tokens, seconds in samples]
