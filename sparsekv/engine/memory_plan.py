"""What a cache will take: each region of it, or each kind of DeepSeek-V4's layers."""

from __future__ import annotations

from dataclasses import dataclass

from sparsekv.engine.config import CacheConfig
from sparsekv.engine.model_size import Geometry
from sparsekv.errors import LayoutError
from sparsekv.format import Footprint, KVGeometry
from sparsekv.format.compressed import CompressedFootprint, CompressedGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """The four regions, bytes of a whole batch."""

    geometry: KVGeometry
    footprint: Footprint
    prompt_bytes: int
    """Bytes on the GPU of the prompt's keys and values, for as long as they have not left it."""

    @property
    def cpu_bytes(self) -> int:
        """Bytes in host memory."""
        return self.footprint.cpu_bytes

    @property
    def gpu_bytes(self) -> int:
        """Bytes on the GPU, whatever the context."""
        return self.footprint.gpu_bytes

    @property
    def growing_gpu_bytes(self) -> int:
        """Bytes on the GPU that grow with the context: none."""
        return 0

    def rows(self) -> list[tuple[str, str, int]]:
        """Each region, its memory, and its bytes."""
        return [
            ("window", "GPU", self.footprint.window_bytes),
            ("ping-pong", "GPU", self.footprint.ping_pong_bytes),
            ("unpinned", "CPU", self.footprint.unpinned_bytes),
            ("pinned", "CPU", self.footprint.pinned_bytes),
        ]

    def as_dict(self) -> dict[str, object]:
        """The plan as JSON holds it."""
        footprint = self.footprint
        return {
            "bytes_per_token": self.geometry.bytes_per_token,
            "window_bytes": footprint.window_bytes,
            "ping_pong_bytes": footprint.ping_pong_bytes,
            "unpinned_bytes": footprint.unpinned_bytes,
            "pinned_bytes": footprint.pinned_bytes,
            "gpu_bytes": self.gpu_bytes,
            "prompt_bytes": self.prompt_bytes,
            "cpu_bytes": self.cpu_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedPlan:
    """DeepSeek-V4's layers, bytes of a whole batch."""

    geometry: CompressedGeometry
    kinds: tuple[CompressedFootprint, ...]
    """Of the kinds that the model has."""
    pool: Footprint
    """CSA's entries; ping-pong apart, which this model does not use."""
    prompt_bytes: int
    """Bytes on the GPU of the prompt's entries, for as long as they have not left it."""

    @property
    def cpu_bytes(self) -> int:
        """Bytes in host memory."""
        return self.pool.cpu_bytes

    @property
    def growing_gpu_bytes(self) -> int:
        """Bytes on the GPU that grow with the context: index keys and HCA entries."""
        return sum(kind.growing_gpu_bytes for kind in self.kinds)

    @property
    def gpu_bytes(self) -> int:
        """All bytes on the GPU."""
        return self.pool.window_bytes + sum(kind.gpu_bytes for kind in self.kinds)

    @property
    def production_bytes_per_token(self) -> float | None:
        """See `CompressedGeometry`; None: those formats do not have this model's sizes."""
        try:
            return self.geometry.production_bytes_per_token()
        except LayoutError:
            return None

    def rows(self) -> list[tuple[CompressedFootprint, str, str, int]]:
        """The kind of layer, what it keeps, in which memory, and its bytes."""
        rows = []
        for kind in self.kinds:
            rows.append((kind, "recent tokens", "GPU", kind.recent_bytes))
            if kind.kind != "sliding":
                rows.append((kind, "open windows", "GPU", kind.open_bytes))
            if kind.kind == "hca":
                rows.append((kind, "entries", "GPU", kind.entry_bytes))
            if kind.kind == "csa":
                rows += [
                    (kind, "index keys", "GPU", kind.index_bytes),
                    (kind, "window", "GPU", self.pool.window_bytes),
                    (kind, "unpinned", "CPU", self.pool.unpinned_bytes),
                    (kind, "pinned", "CPU", self.pool.pinned_bytes),
                ]
        return rows

    def as_dict(self) -> dict[str, object]:
        """The plan as JSON holds it."""
        return {
            "layers": [
                {
                    "kind": kind.kind,
                    "num_layers": kind.num_layers,
                    "name": name,
                    "memory": memory,
                    "bytes": num_bytes,
                }
                for kind, name, memory, num_bytes in self.rows()
            ],
            "entry_format": self.geometry.entry_format,
            "bytes_per_token": self.geometry.bytes_per_token(),
            "production_bytes_per_token": self.production_bytes_per_token,
            "window_bytes": self.pool.window_bytes,
            "unpinned_bytes": self.pool.unpinned_bytes,
            "pinned_bytes": self.pool.pinned_bytes,
            "gpu_bytes": self.gpu_bytes,
            "growing_gpu_bytes": self.growing_gpu_bytes,
            "prompt_bytes": self.prompt_bytes,
            "cpu_bytes": self.cpu_bytes,
        }


MemoryPlan = RegionPlan | CompressedPlan


def plan_memory(
    geometry: Geometry,
    config: CacheConfig,
    *,
    batch_size: int,
    num_tokens: int,
    prompt_tokens: int,
    placed_share: float,
) -> MemoryPlan:
    """What the cache of `batch_size` sequences of `num_tokens` tokens takes, of which
    `prompt_tokens` are read at once, with `placed_share` of them unpinned.

    Raises:
        LayoutError: a batch size that is not a positive whole number, or a share outside [0, 1].
    """
    if isinstance(geometry, KVGeometry):
        spec = config.spec(geometry, batch_size)
        footprint = spec.footprint(num_tokens, placed_share)
        leaving = spec.leaving_bytes(prompt_tokens)
        return RegionPlan(geometry=geometry, footprint=footprint, prompt_bytes=leaving)
    spec = config.entry_spec(geometry, batch_size)
    return CompressedPlan(
        geometry=geometry,
        kinds=tuple(k for k in geometry.footprint(num_tokens, batch_size) if k.num_layers),
        pool=spec.footprint(num_tokens // geometry.csa_ratio, placed_share),
        prompt_bytes=spec.leaving_bytes(prompt_tokens // geometry.csa_ratio),
    )
