"""How a cache is cut: segments, window, ping-pong; and the bytes each region takes at a given
length.

Planning arithmetic follows arXiv:2609.14507, Table 2: shares are not rounded to segments there and
the window is not subtracted from the CPU's side.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsekv.checks import check_positive_int, check_share
from sparsekv.errors import CapacityError, LayoutError
from sparsekv.format.geometry import KVGeometry

LEAVING_LAYERS = 3
"""Layers of a prompt that are on the accelerator at a time: one attends to itself while two are
copied.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of each region, whole batch, all layers (ping-pong: one layer, it is reused)."""

    window_bytes: int
    ping_pong_bytes: int
    unpinned_bytes: int
    pinned_bytes: int

    @property
    def gpu_bytes(self) -> int:
        """Bytes on the accelerator: independent of the context's length."""
        return self.window_bytes + self.ping_pong_bytes

    @property
    def cpu_bytes(self) -> int:
        """Bytes in host memory."""
        return self.unpinned_bytes + self.pinned_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSpec:
    """The cut of one cache: what is stored, for how many rows and tokens, in which units.

    Raises:
        LayoutError: a count is not a positive whole number, `window_size` is not a multiple of
            `block_size`, or `ping_pong_tokens` not one of `window_size`.
    """

    geometry: KVGeometry
    batch_size: int
    """Rows (sequences) at the start."""
    max_tokens: int | None
    """Most tokens of a sequence; None: as many as host memory holds."""
    block_size: int = 64
    """Tokens of a block, the unit of selection."""
    window_size: int = 256
    """Tokens of a segment: the window on the GPU, the unit of eviction and placement."""
    ping_pong_tokens: int = 512
    """Tokens of one of the two streaming buffers, which hold one layer's chunk each."""
    segment_size: int | None = None
    """Tokens that go to one region together; None: the whole window. A window of several segments
    still leaves the accelerator at once, but what selections hit is spread more evenly.
    """

    def __post_init__(self) -> None:
        check_positive_int("batch_size", self.batch_size, "a cache needs at least one sequence")
        if self.max_tokens is not None:
            check_positive_int(
                "max_tokens", self.max_tokens, "use None for no limit but the machine's memory"
            )
        check_positive_int("block_size", self.block_size, "64 suits most models")
        check_positive_int("window_size", self.window_size, "256 suits most models")
        check_positive_int("ping_pong_tokens", self.ping_pong_tokens, "512 suits most models")
        if self.segment_size is None:
            object.__setattr__(self, "segment_size", self.window_size)
        check_positive_int("segment_size", self.segment_size, "leave it None for whole windows")
        _check_multiple("window_size", self.window_size, "block_size", self.block_size)
        _check_multiple("window_size", self.window_size, "segment_size", self.segment_tokens)
        _check_multiple("ping_pong_tokens", self.ping_pong_tokens, "window_size", self.window_size)

    @property
    def segment_tokens(self) -> int:
        """`segment_size`, never None."""
        assert self.segment_size is not None
        return self.segment_size

    @property
    def segments_per_window(self) -> int:
        """Segments that leave the window together."""
        return self.window_size // self.segment_tokens

    @property
    def segment_bytes(self) -> int:
        """Bytes of one segment of one layer, all rows."""
        return self.batch_size * self.segment_tokens * self.geometry.bytes_per_token_per_layer

    def footprint(self, num_tokens: int, cpu_share: float) -> Footprint:
        """Bytes per region when each sequence holds `num_tokens`, of which `cpu_share` stays on the
        CPU's side.

        Args:
            num_tokens: tokens of a sequence, 0 or more.
            cpu_share: part attended by the CPU, from 0 to 1.
        Raises:
            LayoutError: a negative length or a share outside [0, 1].
            CapacityError: more tokens than `max_tokens`.
        """
        if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or num_tokens < 0:
            raise LayoutError(f"num_tokens={num_tokens!r}: must be a whole number, 0 or more")
        check_share("cpu_share", cpu_share)
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise CapacityError(
                f"num_tokens={num_tokens}: over max_tokens={self.max_tokens}; raise max_tokens "
                "or shorten the context"
            )
        per_token = self.batch_size * self.geometry.bytes_per_token
        total = num_tokens * per_token
        unpinned = round(total * cpu_share)
        ping_pong = (
            2 * self.ping_pong_tokens * self.batch_size * self.geometry.bytes_per_token_per_layer
        )
        return Footprint(
            window_bytes=self.window_size * per_token,
            ping_pong_bytes=ping_pong,
            unpinned_bytes=unpinned,
            pinned_bytes=total - unpinned,
        )

    def leaving_bytes(self, num_tokens: int) -> int:
        """Bytes on the accelerator, at most, of a prompt that is read at once and has not left for
        host memory yet.

        Args:
            num_tokens: tokens of each row, read at once.
        """
        per_layer = num_tokens * self.batch_size * self.geometry.bytes_per_token_per_layer
        return min(self.geometry.num_layers, LEAVING_LAYERS) * per_layer


def _check_multiple(name: str, value: int, unit_name: str, unit: int) -> None:
    if value % unit:
        below, above = value // unit * unit, (value // unit + 1) * unit
        choices = f"{below} or {above}" if below else f"{above}"
        raise LayoutError(
            f"{name}={value}: must be a multiple of {unit_name}={unit}; use {choices}"
        )
