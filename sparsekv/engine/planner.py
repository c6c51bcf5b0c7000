"""What a run will take and how long its steps will be, before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

from sparsekv.checks import check_positive_int, check_share
from sparsekv.engine.config import UNMEASURED_SHARE, CacheConfig
from sparsekv.engine.fit import Budget, Demand, Remedy, find_remedies
from sparsekv.engine.memory_plan import MemoryPlan, plan_memory
from sparsekv.engine.model_size import ModelSize
from sparsekv.engine.prediction import LengthForecast, SharePath
from sparsekv.errors import LayoutError
from sparsekv.format import KVGeometry
from sparsekv.roofline import CostModel, MachineProfile

RatesOrigin = Literal["calibration", "preset", "stand-in", "given"]
"""Where a plan's rates come from: measured here for this model and batch, a preset asked for by
name, a preset in place of a measurement that was not made, or given by the caller.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The machine that a plan is made for."""

    machine: MachineProfile
    cost: CostModel
    """Of one layer's attention, for the model and the whole batch."""
    origin: RatesOrigin
    preset: str | None = None
    """The preset's name, where it is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run takes, whether it fits, and a forecast of its decode steps."""

    demand: Demand
    """What was asked for."""
    cpu_share: float | Literal["auto"]
    """As asked for."""
    rates: Rates
    budget: Budget
    memory: MemoryPlan
    """Bytes of the cache at the full context."""
    path: SharePath
    remedies: tuple[Remedy, ...]
    """What makes it fit, if it does not; see `find_remedies`."""
    prompt_tokens: int
    """Tokens of each sequence that are placed at once, at the share that is best for them."""

    @property
    def model(self) -> ModelSize:
        """The model."""
        return self.demand.model

    @property
    def batch_size(self) -> int:
        """Sequences at a time."""
        return self.demand.batch_size

    @property
    def num_tokens(self) -> int:
        """Context of each sequence."""
        return self.demand.num_tokens

    @property
    def fits_ram(self) -> bool:
        """Whether host memory suffices."""
        return self.demand.ram_bytes <= self.budget.ram_bytes

    @property
    def fits_vram(self) -> bool:
        """Whether the GPU's memory suffices for weights and cache; activations apart."""
        return self.demand.vram_bytes <= self.budget.vram_bytes

    @property
    def fits(self) -> bool:
        """Whether both suffice."""
        return self.budget.holds(self.demand)

    @property
    def cpu_gbs(self) -> float:
        """Rate at which the CPU attends to keys and values, in 1e9 bytes/s; inf at no cost."""
        return self.gbs(self.rates.cost.cpu_s_per_token)

    @property
    def h2d_gbs(self) -> float:
        """Rate at which they are brought to the GPU, in 1e9 bytes/s; inf at no cost."""
        return self.gbs(self.rates.cost.h2d_s_per_token)

    @property
    def weight_bytes_read(self) -> int:
        """Bytes of weights that a step reads from GPU memory."""
        return self.model.weight_bytes_read(self.batch_size)

    @property
    def lengths(self) -> tuple[LengthForecast, ...]:
        """Forecasts from the prompt's length to the context, at powers of two between."""
        between = 1 << self.prompt_tokens.bit_length()
        lengths = [self.prompt_tokens]
        while between < self.num_tokens:
            lengths.append(between)
            between *= 2
        lengths += [self.num_tokens] if self.num_tokens > self.prompt_tokens else []
        return tuple(self.at(num_tokens) for num_tokens in lengths)

    def at(self, num_tokens: int) -> LengthForecast:
        """The forecast of a step at another length of this run.

        Raises:
            LayoutError: a length that is not a positive whole number.
        """
        check_positive_int("num_tokens", num_tokens, "give the context of each sequence")
        model, path = self.model, self.path
        placed = _placed(self.demand, num_tokens)
        share = path.running(placed)
        return LengthForecast(
            num_tokens=num_tokens,
            attended_positions=path.attended(placed),
            best_share=path.best(placed),
            running_share=share,
            attention_s=path.attention_s(share, placed),
            streaming_attention_s=path.attention_s(0.0, placed),
            cpu_attention_s=path.attention_s(1.0, placed),
            gpu_memory_s=_gpu_memory_s(self.demand, self.rates.machine, num_tokens),
            num_layers=model.attended.num_layers,
            batch_size=self.batch_size,
        )

    def gbs(self, s_per_position: float) -> float:
        """A cost per position of the batch as a rate, in 1e9 bytes/s; inf at no cost."""
        num_bytes = self.batch_size * self.model.attended.bytes_per_token_per_layer
        return num_bytes / s_per_position / 1e9 if s_per_position > 0 else math.inf

    def as_dict(self) -> dict[str, object]:
        """The plan as JSON holds it."""
        demand, model, rates = self.demand, self.model, self.rates
        return {
            "model": model.name,
            "batch_size": demand.batch_size,
            "num_tokens": demand.num_tokens,
            "prompt_tokens": self.prompt_tokens,
            "dtype": str(model.geometry.dtype).removeprefix("torch."),
            "window_size": demand.config.window_size,
            "block_size": demand.config.block_size,
            **self.memory.as_dict(),
            "weights": {
                "parameters": model.weights.as_dict(),
                "bytes": model.weight_bytes,
                "expert_bytes": model.expert_bytes,
                "bytes_read_per_step": self.weight_bytes_read,
                "experts_per_layer": model.num_experts,
                "experts_used_per_layer": model.used_experts(demand.batch_size),
            },
            "ram_bytes": demand.ram_bytes,
            "vram_bytes": demand.vram_bytes,
            "budget": asdict(self.budget),
            "fits_ram": self.fits_ram,
            "fits_vram": self.fits_vram,
            "fits": self.fits,
            "remedies": [remedy.as_dict() for remedy in self.remedies],
            "machine": {
                "origin": rates.origin,
                "preset": rates.preset,
                "profile": rates.machine.to_json(),
            },
            "attention_flops_per_byte": model.attention_flops_per_byte,
            "cost": asdict(rates.cost),
            "cpu_share": self.cpu_share,
            "marginal_share": rates.cost.marginal_share,
            "lengths": [length.as_dict() for length in self.lengths],
        }


def plan_run(
    model: ModelSize,
    *,
    rates: Rates,
    budget: Budget,
    config: CacheConfig,
    batch_size: int,
    num_tokens: int,
    prompt_tokens: int,
    cpu_share: float | Literal["auto"],
) -> Plan:
    """Plan a run; see `sparsekv.plan`.

    Args:
        config: window, block and entry format; its share is not looked at.
    Raises:
        LayoutError: a count that is not a positive whole number, or a share that is neither "auto"
            nor a number from 0 to 1.
    """
    check_positive_int("num_tokens", num_tokens, "give the context of each sequence")
    check_positive_int("prompt_tokens", prompt_tokens, "give the tokens that prefill places")
    if isinstance(cpu_share, str) and cpu_share != "auto":
        raise LayoutError(f"cpu_share={cpu_share!r}: must be 'auto' or a number from 0 to 1")
    if cpu_share != "auto":
        check_share("cpu_share", cpu_share)
    prompt_tokens = min(prompt_tokens, num_tokens)
    demand = Demand(
        model=model,
        batch_size=batch_size,
        num_tokens=num_tokens,
        prompt_tokens=prompt_tokens,
        config=config,
    )
    path = SharePath(
        cost=rates.cost,
        initial_positions=_placed(demand, prompt_tokens),
        most_attended=model.selected_entries,
        fixed_share=_fixed_share(cpu_share, model, rates),
    )
    memory = plan_memory(
        model.geometry,
        config,
        batch_size=batch_size,
        num_tokens=num_tokens,
        prompt_tokens=prompt_tokens,
        placed_share=path.running(_placed(demand, num_tokens)),
    )
    return Plan(
        demand=demand,
        cpu_share=cpu_share,
        rates=rates,
        budget=budget,
        memory=memory,
        path=path,
        remedies=() if budget.holds(demand) else find_remedies(demand, budget),
        prompt_tokens=prompt_tokens,
    )


def _fixed_share(
    cpu_share: float | Literal["auto"], model: ModelSize, rates: Rates
) -> float | None:
    """The share that a run of the model keeps; None: it follows the costs."""
    if cpu_share != "auto":
        return cpu_share
    follows_costs = isinstance(model.geometry, KVGeometry) or rates.origin == "given"
    return None if follows_costs else UNMEASURED_SHARE


def _placed(demand: Demand, num_tokens: int) -> int:
    """Positions of each sequence that have left the window: whole windows."""
    positions = num_tokens // demand.model.tokens_per_entry
    return positions - positions % demand.config.window_size


def _gpu_memory_s(demand: Demand, machine: MachineProfile, num_tokens: int) -> float:
    """Seconds to read, once, the weights that a step uses and what of the cache grows on the GPU;
    the window's time is part of C_gpu.
    """
    model, geometry = demand.model, demand.model.geometry
    resident = 0
    if not isinstance(geometry, KVGeometry):
        kinds = geometry.footprint(num_tokens, demand.batch_size)
        resident = sum(kind.growing_gpu_bytes for kind in kinds)
    return (model.weight_bytes_read(demand.batch_size) + resident) / (machine.hbm_gbs * 1e9)
