"""How the caches of a patched model behave."""

from __future__ import annotations

from dataclasses import dataclass

from sparsekv.checks import check_positive_int, check_share
from sparsekv.format import KVGeometry, PartitionSpec
from sparsekv.roofline import ShareRouter

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

    cpu_share: float = 0.5
    """Part of the placed tokens that the CPU attends to; the rest is streamed to the GPU."""
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

    def __post_init__(self) -> None:
        check_share("cpu_share", self.cpu_share)
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

    def router(self) -> ShareRouter:
        """A router that starts at, and keeps to, `cpu_share`."""
        return ShareRouter(self.cpu_share)

    def _ping_pong_tokens(self, geometry: KVGeometry, batch_size: int) -> int:
        if self.ping_pong_tokens is not None:
            return self.ping_pong_tokens
        check_positive_int("window_size", self.window_size, "256 suits most models")
        check_positive_int("batch_size", batch_size, "a cache needs at least one sequence")
        per_token = batch_size * geometry.bytes_per_token_per_layer
        tokens = max(_MIN_PING_PONG_TOKENS, -(-_MIN_PING_PONG_BYTES // per_token))
        return -(-tokens // self.window_size) * self.window_size
