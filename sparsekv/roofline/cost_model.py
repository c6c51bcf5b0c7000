"""What a layer's attention costs on either engine, and the share at which both finish together.

Decides shares from four measured numbers; how they are measured is left to others.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsekv.checks import check_positive_int, check_rate, check_seconds, check_share, check_tokens
from sparsekv.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Two straight lines (arXiv:2609.14507, equations 1 and 2), for one layer and the whole batch.

    With share r of L placed tokens (those in the CPU's regions; the window counts in C_gpu):

        T_cpu = r A L + C_cpu          T_gpu = (1 - r) B L + C_gpu
        p     = B / (A + B)            r(L)  = clip(p + (C_gpu - C_cpu) / ((A + B) L), 0, 1)

    A cost of zero is legal for one of the two: an engine that is never waited for, and the limit of
    the law, p = 1 or p = 0. A measured bandwidth is never infinite: see `from_bandwidths`.

    Raises:
        LayoutError: a number that is not finite or is negative, or both costs zero.
    """

    cpu_s_per_token: float
    """A: seconds the CPU takes to attend to one more position of every sequence."""
    h2d_s_per_token: float
    """B: seconds to bring one more position of every sequence to the accelerator."""
    cpu_overhead_s: float = 0.0
    """C_cpu: seconds of the CPU's part that do not grow with the length."""
    gpu_overhead_s: float = 0.0
    """C_gpu: seconds of the accelerator's part that do not grow with the length."""

    def __post_init__(self) -> None:
        check_seconds("cpu_s_per_token", self.cpu_s_per_token)
        check_seconds("h2d_s_per_token", self.h2d_s_per_token)
        check_seconds("cpu_overhead_s", self.cpu_overhead_s)
        check_seconds("gpu_overhead_s", self.gpu_overhead_s)
        if self.cpu_s_per_token == 0 and self.h2d_s_per_token == 0:
            raise LayoutError(
                "cpu_s_per_token=0 and h2d_s_per_token=0: one of the two must cost something, or "
                "every share is as good as any other; measure again with more tokens"
            )

    @classmethod
    def from_bandwidths(
        cls,
        *,
        bytes_per_token: int,
        cpu_gbs: float,
        h2d_gbs: float,
        cpu_overhead_s: float = 0.0,
        gpu_overhead_s: float = 0.0,
    ) -> CostModel:
        """The model of a machine known by its two rates.

        Args:
            bytes_per_token: keys and values of one position of every sequence, one layer.
            cpu_gbs: rate at which the CPU attends to keys and values, in 1e9 bytes/s. Not one
                number of a machine: where products and not memory are the limit it is lower.
            h2d_gbs: rate from host memory to the accelerator, in 1e9 bytes/s.
            cpu_overhead_s: seconds of the CPU's part that do not grow with the length.
            gpu_overhead_s: seconds of the accelerator's part that do not grow with the length.
        Raises:
            LayoutError: a rate that is zero, negative or not finite, or no whole number of bytes.
        """
        check_positive_int(
            "bytes_per_token", bytes_per_token, "give batch x KVGeometry.bytes_per_token_per_layer"
        )
        check_rate("cpu_gbs", cpu_gbs)
        check_rate("h2d_gbs", h2d_gbs)
        return cls(
            cpu_s_per_token=bytes_per_token / (cpu_gbs * 1e9),
            h2d_s_per_token=bytes_per_token / (h2d_gbs * 1e9),
            cpu_overhead_s=cpu_overhead_s,
            gpu_overhead_s=gpu_overhead_s,
        )

    @property
    def marginal_share(self) -> float:
        """p: part of each further segment that keeps both engines equally long at work."""
        return self.h2d_s_per_token / (self.cpu_s_per_token + self.h2d_s_per_token)

    def cpu_time(self, share: float, num_tokens: int) -> float:
        """Seconds of the CPU's part: `share` of `num_tokens` placed tokens.

        Raises:
            LayoutError: a share outside [0, 1] or a negative length.
        """
        _check_placed(share, num_tokens)
        return share * self.cpu_s_per_token * num_tokens + self.cpu_overhead_s

    def gpu_time(self, share: float, num_tokens: int) -> float:
        """Seconds of the accelerator's part: what `share` leaves of `num_tokens` placed tokens.

        Raises:
            LayoutError: a share outside [0, 1] or a negative length.
        """
        _check_placed(share, num_tokens)
        return (1.0 - share) * self.h2d_s_per_token * num_tokens + self.gpu_overhead_s

    def step_time(self, share: float, num_tokens: int) -> float:
        """Seconds until both parts are done. The merge is left out: no share changes it."""
        return max(self.cpu_time(share, num_tokens), self.gpu_time(share, num_tokens))

    def optimal_share(self, num_tokens: int) -> float:
        """r(L): the share with the shortest step at this length.

        At 0 tokens, where every share takes the same time, it is what it tends to at short lengths:
        0 or 1 by the overheads, and p where these are equal.

        Raises:
            LayoutError: a negative length.
        """
        check_tokens("num_tokens", num_tokens)
        slack_s = self.gpu_overhead_s - self.cpu_overhead_s
        if slack_s == 0:
            return self.marginal_share
        if num_tokens == 0:
            return 1.0 if slack_s > 0 else 0.0
        per_token_s = self.cpu_s_per_token + self.h2d_s_per_token
        return min(max(self.marginal_share + slack_s / (per_token_s * num_tokens), 0.0), 1.0)

    def running_share(self, num_tokens: int, *, initial_share: float, initial_tokens: int) -> float:
        """R(L) = p + (R0 - p) L0 / L: the share of all that is placed, once `initial_tokens` were
        placed at `initial_share` and everything since at p.

        Begun at r(L0) it equals r(L) at every later length, while no share is clipped: placed bytes
        need not move to stay where they are best.

        Args:
            num_tokens: L, placed tokens of a sequence.
            initial_share: R0, the share of what was placed first.
            initial_tokens: L0, how much that was; at most `num_tokens`.
        Raises:
            LayoutError: a share outside [0, 1], a negative length, or L below L0.
        """
        _check_placed(initial_share, initial_tokens, "initial_share", "initial_tokens")
        check_tokens("num_tokens", num_tokens)
        if num_tokens < initial_tokens:
            raise LayoutError(
                f"num_tokens={num_tokens}: must be at least initial_tokens={initial_tokens}, since "
                "placed tokens stay; count from a shorter beginning"
            )
        if num_tokens == initial_tokens:
            return initial_share
        later = num_tokens - initial_tokens
        return (initial_share * initial_tokens + self.marginal_share * later) / num_tokens


def _check_placed(
    share: float, num_tokens: int, share_name: str = "share", tokens_name: str = "num_tokens"
) -> None:
    check_share(share_name, share)
    check_tokens(tokens_name, num_tokens)
