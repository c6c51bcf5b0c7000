"""How the caches of a patched model behave."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sparsekv.checks import check_positive_int, check_share
from sparsekv.engine.balance import placed_share
from sparsekv.errors import LayoutError
from sparsekv.format import KVGeometry, PartitionSpec
from sparsekv.format.compressed import CompressedGeometry, EntryFormat
from sparsekv.roofline import Calibration, MachineProfile, ShareRouter

_RUN_OF_ENTRIES = 8
"""Neighbouring entries are often selected together: runs this short keep a selection's split near
the share.
"""
UNMEASURED_SHARE = 0.5
"""Where nothing is measured, since there is no bus to spare: on the simulated accelerator the CPU
reads everything.
"""
_MIN_PING_PONG_TOKENS = 512
_MIN_PING_PONG_BYTES = 8 << 20
"""Below this a transfer over PCIe does not reach its full rate (arXiv:2609.14507, section 2: 25.4
GB/s from 8 MB on).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Settings of every cache that a patched model makes.

    Raises:
        LayoutError: a share outside [0, 1], a size that is not a positive whole number, or sizes
            that do not nest.
    """

    cpu_share: float | Literal["auto"] = "auto"
    """Part of the placed tokens that the CPU attends to; the rest is streamed to the GPU. "auto":
    the part at which both finish together, by what `profile` or a measurement of this machine says,
    followed while the cache is used.
    """
    elastic: bool = False
    """Place less than that unpinned, and let the CPU borrow pinned tokens for the rest in each
    step. `InplaceKVCache.step_share` begins as `cpu_share` and may be changed; with "auto" it
    follows the machine every few steps.
    """
    profile: MachineProfile | Calibration | None = None
    """What "auto" begins with; None: the calibration saved for this machine and model, measured at
    the first use, in some seconds.
    """
    window_size: int = 256
    """Newest tokens on the GPU, and the unit in which they leave it."""
    block_size: int = 64
    """Tokens of a block; `window_size` is a multiple of it."""
    ping_pong_tokens: int | None = None
    """Tokens of a streaming buffer; None: the fewest (a multiple of the window, 512 or more) that
    make 8 MiB.
    """
    max_tokens: int | None = None
    """Most tokens of a sequence; None: what generate asks for, checked against the machine's
    memory.
    """
    entry_format: EntryFormat = "native"
    """DeepSeek-V4's compressed entries in the regions: in the model's dtype, or "packed" as
    production engines store them (fp8 with scales, 584 bytes), which is smaller and not exact.
    """

    def __post_init__(self) -> None:
        if self.cpu_share != "auto":
            check_share("cpu_share", self.cpu_share)
        self._check_profile()
        if not isinstance(self.elastic, bool):
            raise LayoutError(f"elastic={self.elastic!r}: must be True or False")
        if self.entry_format not in ("native", "packed"):
            raise LayoutError(
                f"entry_format={self.entry_format!r}: must be 'native' (the model's dtype) or "
                "'packed' (584 bytes)"
            )
        # The geometry does not matter to these rules: any will do to have them checked now.
        self.spec(KVGeometry(num_layers=1, num_kv_heads=1, head_dim=1), batch_size=1)

    def spec(self, geometry: KVGeometry, batch_size: int) -> PartitionSpec:
        """The cut of a cache for this geometry and batch."""
        return PartitionSpec(
            geometry=geometry,
            batch_size=batch_size,
            max_tokens=self.max_tokens,
            block_size=self.block_size,
            window_size=self.window_size,
            ping_pong_tokens=self._ping_pong_tokens(geometry, batch_size),
        )

    def entry_spec(self, geometry: CompressedGeometry, batch_size: int) -> PartitionSpec:
        """The cut of a DeepSeek-V4 pool; window and block count compressed entries, which go to
        their regions in runs of up to 8.
        """
        pool = geometry.pool_geometry
        limit = self.max_tokens
        return PartitionSpec(
            geometry=pool,
            batch_size=batch_size,
            max_tokens=None if limit is None else max(limit // geometry.csa_ratio, 1),
            block_size=self.block_size,
            window_size=self.window_size,
            ping_pong_tokens=self._ping_pong_tokens(pool, batch_size),
            segment_size=math.gcd(self.window_size, _RUN_OF_ENTRIES),
        )

    @property
    def placed_share(self) -> float:
        """Part of the segments that is placed unpinned."""
        return placed_share(self._share, self.elastic)

    @property
    def step_share(self) -> float | None:
        """Where a cache's `step_share` begins."""
        return self._share if self.elastic else None

    def router(self) -> ShareRouter:
        """A router that starts at, and keeps to, `placed_share`."""
        return ShareRouter(self.placed_share)

    @property
    def _share(self) -> float:
        return UNMEASURED_SHARE if self.cpu_share == "auto" else self.cpu_share

    def _check_profile(self) -> None:
        if self.profile is None:
            return
        if not isinstance(self.profile, (MachineProfile, Calibration)):
            raise LayoutError(
                f"profile of type {type(self.profile).__name__}: must be a MachineProfile or what "
                "calibrate returns; see sparsekv.roofline.PRESETS for machines that are known"
            )
        if self.cpu_share != "auto":
            raise LayoutError(
                f"profile beside cpu_share={self.cpu_share!r}: only a share that is chosen needs "
                'one; leave cpu_share at "auto", or the profile out'
            )

    def _ping_pong_tokens(self, geometry: KVGeometry, batch_size: int) -> int:
        if self.ping_pong_tokens is not None:
            return self.ping_pong_tokens
        check_positive_int("window_size", self.window_size, "256 suits most models")
        check_positive_int("batch_size", batch_size, "a cache needs at least one sequence")
        per_token = batch_size * geometry.bytes_per_token_per_layer
        tokens = max(_MIN_PING_PONG_TOKENS, -(-_MIN_PING_PONG_BYTES // per_token))
        return -(-tokens // self.window_size) * self.window_size
