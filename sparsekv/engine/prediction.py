"""How long a decode step will take at each length, and at which share: two straight lines for the
attention, and what the GPU reads from its own memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsekv.roofline import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthForecast:
    """A decode step at one length: every sequence gets a token."""

    num_tokens: int
    """Context of each sequence."""
    attended_positions: int
    """Of each sequence and layer in CPU memory: tokens, or selected entries of DeepSeek-V4."""
    best_share: float
    """r(L): the CPU's share with which the step would be shortest."""
    running_share: float
    """R(L): the CPU's share of all that is placed by then."""
    attention_s: float
    """Seconds of a layer's attention at the running share."""
    streaming_attention_s: float
    """The same with everything brought to the GPU."""
    cpu_attention_s: float
    """The same with everything attended by the CPU."""
    gpu_memory_s: float
    """Seconds that a step spends reading weights and resident keys and values in GPU memory."""
    num_layers: int
    """Layers whose attention is shared."""
    batch_size: int
    """Tokens of a step."""

    @property
    def step_s(self) -> float:
        """Seconds of a step at the running share: the time per token of each sequence."""
        return self._step_s(self.attention_s)

    @property
    def streaming_step_s(self) -> float:
        """Seconds of a step with everything brought to the GPU."""
        return self._step_s(self.streaming_attention_s)

    @property
    def cpu_step_s(self) -> float:
        """Seconds of a step with everything attended by the CPU."""
        return self._step_s(self.cpu_attention_s)

    def as_dict(self) -> dict[str, object]:
        """The row as JSON holds it."""
        has_share = self.attended_positions > 0
        return {
            "num_tokens": self.num_tokens,
            "attended_positions": self.attended_positions,
            "best_share": self.best_share if has_share else None,
            "running_share": self.running_share if has_share else None,
            "attention_ms_per_layer": self.attention_s * 1e3,
            "gpu_memory_ms_per_token": self.gpu_memory_s * 1e3,
            "ms_per_token": self.step_s * 1e3,
            "tokens_per_s": self.batch_size / self.step_s,
            "streaming_only": self._alternative(self.streaming_attention_s),
            "cpu_only": self._alternative(self.cpu_attention_s),
        }

    def _step_s(self, attention_s: float) -> float:
        return self.num_layers * attention_s + self.gpu_memory_s

    def _alternative(self, attention_s: float) -> dict[str, float]:
        step_s = self._step_s(attention_s)
        return {
            "attention_ms_per_layer": attention_s * 1e3,
            "ms_per_token": step_s * 1e3,
            "tokens_per_s": self.batch_size / step_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePath:
    """Which share is best at each length, and which one is reached by placing what comes."""

    cost: CostModel
    """Per position that is attended to."""
    initial_positions: int
    """L0: what the prompt places, at r(L0)."""
    most_attended: int | None = None
    """Positions that a query attends to at most; None: all. Beyond it r(L) is flat."""
    fixed_share: float | None = None
    """The user's own, in place of the running share; None: as the costs have it."""

    def attended(self, placed: int) -> int:
        """Of `placed` positions, those that a query attends to."""
        return placed if self.most_attended is None else min(placed, self.most_attended)

    def best(self, placed: int) -> float:
        """r(L) with `placed` positions."""
        return self.cost.optimal_share(self.attended(placed))

    def running(self, placed: int) -> float:
        """R(L) with `placed` positions: the prompt's at r(L0), later ones at the marginal share, or
        at r where it has become flat.
        """
        if self.fixed_share is not None:
            return self.fixed_share
        if placed <= self.initial_positions:
            return self.best(placed)
        bent = max(self.attended(placed), self.initial_positions)  # later, r is flat
        share = self.cost.running_share(
            bent,
            initial_share=self.best(self.initial_positions),
            initial_tokens=self.initial_positions,
        )
        return (share * bent + self.best(placed) * (placed - bent)) / placed

    def attention_s(self, share: float, placed: int) -> float:
        """Seconds of a layer's attention at this share. An engine without a part is not waited for;
        the GPU always has the window.
        """
        num_tokens = self.attended(placed)
        if share == 0 or num_tokens == 0:
            return self.cost.gpu_time(0.0, num_tokens)
        return self.cost.step_time(share, num_tokens)
