"""Whether a run fits the two memories, and if not, which single change makes it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from sparsekv.checks import check_positive_int
from sparsekv.engine.config import CacheConfig
from sparsekv.engine.memory_plan import plan_memory
from sparsekv.engine.model_size import ModelSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What decides how many bytes a run takes."""

    model: ModelSize
    batch_size: int
    num_tokens: int
    prompt_tokens: int
    """Of the context, read at once; all of a shorter one."""
    config: CacheConfig
    """Window, block and entry format."""
    experts_on_cpu: bool = False
    """Routed experts lie in host memory; all other weights on the GPU."""

    @property
    def ram_bytes(self) -> int:
        """Bytes in host memory."""
        return self._kv_bytes[0] + (self.model.expert_bytes if self.experts_on_cpu else 0)

    @property
    def vram_bytes(self) -> int:
        """Bytes on the GPU; activations apart."""
        moved = self.model.expert_bytes if self.experts_on_cpu else 0
        return self._kv_bytes[1] + self.model.weight_bytes - moved

    @property
    def _kv_bytes(self) -> tuple[int, int]:
        planned = plan_memory(
            self.model.geometry,
            self.config,
            batch_size=self.batch_size,
            num_tokens=self.num_tokens,
            prompt_tokens=min(self.prompt_tokens, self.num_tokens),
            placed_share=0.0,  # no sum over regions of one memory depends on it
        )
        return planned.cpu_bytes, planned.gpu_bytes + planned.prompt_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes that a run may take.

    Raises:
        LayoutError: a size that is not a positive whole number of bytes.
    """

    ram_bytes: int
    vram_bytes: int
    ram_source: str = "given"
    """Who says so, for people."""
    vram_source: str = "given"
    """The same of the GPU's."""

    def __post_init__(self) -> None:
        for name in ("ram_bytes", "vram_bytes"):
            check_positive_int(name, getattr(self, name), "give what the run may take")

    def holds(self, demand: Demand) -> bool:
        """Whether both memories suffice."""
        return demand.ram_bytes <= self.ram_bytes and demand.vram_bytes <= self.vram_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change with which a run fits; what is not changed is as it was asked for."""

    batch_size: int
    num_tokens: int
    window_size: int
    experts_on_cpu: bool
    ram_bytes: int
    """Bytes in host memory then."""
    vram_bytes: int
    """Bytes on the GPU then."""

    def as_dict(self) -> dict[str, object]:
        """The remedy as JSON holds it."""
        return asdict(self)


def find_remedies(asked: Demand, budget: Budget) -> tuple[Remedy, ...]:
    """What makes a run fit that does not: the largest batch, the longest context in whole windows
    and the largest window in whole blocks; experts in host memory; and where none of these
    suffices, a batch of 1 with the longest context, or the same changes with experts in host
    memory. Empty: nothing does.
    """
    has_experts = asked.model.expert_bytes > 0
    moved = replace(asked, experts_on_cpu=True)
    found = [*_single_changes(asked, budget)]
    if has_experts and budget.holds(moved):
        found.append(moved)
    if not found:
        found += _shrunk(asked, budget)
    if not found and has_experts:
        found += [*_single_changes(moved, budget)] or _shrunk(moved, budget)
    return tuple(_as_remedy(demand) for demand in found)


def _single_changes(asked: Demand, budget: Budget) -> Iterator[Demand]:
    block, window = asked.config.block_size, asked.config.window_size

    def with_batch(count: int) -> Demand:
        return replace(asked, batch_size=count)

    def with_window(count: int) -> Demand:
        return replace(asked, config=replace(asked.config, window_size=count * block))

    if (count := _most(with_batch, asked.batch_size, budget)) is not None:
        yield with_batch(count)
    if (longest := _with_longest_context(asked, budget)) is not None:
        yield longest
    if (count := _most(with_window, window // block, budget)) is not None:
        yield with_window(count)


def _shrunk(asked: Demand, budget: Budget) -> list[Demand]:
    """One sequence, as long as fits."""
    longest = _with_longest_context(replace(asked, batch_size=1), budget)
    return [] if longest is None else [longest]


def _with_longest_context(asked: Demand, budget: Budget) -> Demand | None:
    window = asked.config.window_size

    def with_windows(count: int) -> Demand:
        return replace(asked, num_tokens=count * window)

    count = _most(with_windows, -(-asked.num_tokens // window), budget)
    return None if count is None else with_windows(count)


def _most(with_count: Callable[[int], Demand], too_many: int, budget: Budget) -> int | None:
    """A count that fits while one more does not; None if not even 1 does. `too_many` does not."""
    least = 1
    if too_many <= least or not budget.holds(with_count(least)):
        return None
    while too_many - least > 1:
        middle = (least + too_many) // 2
        least, too_many = (
            (middle, too_many) if budget.holds(with_count(middle)) else (least, middle)
        )
    return least


def _as_remedy(demand: Demand) -> Remedy:
    return Remedy(
        batch_size=demand.batch_size,
        num_tokens=demand.num_tokens,
        window_size=demand.config.window_size,
        experts_on_cpu=demand.experts_on_cpu,
        ram_bytes=demand.ram_bytes,
        vram_bytes=demand.vram_bytes,
    )
