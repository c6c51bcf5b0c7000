"""One layer: its two host stacks, and how far it has got."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparsekv.device import Event
from sparsekv.format import KVView, PartitionSpec, Placement
from sparsekv.regions.lending import HostViews, Readers, lend, num_lent
from sparsekv.regions.outbox import Arrival
from sparsekv.regions.pace import Pace
from sparsekv.regions.pinned import PinnedStack
from sparsekv.regions.pool import RegionPool
from sparsekv.regions.registration import Registrar
from sparsekv.regions.stack import SegmentStack
from sparsekv.regions.window import Window


@dataclass(frozen=True, slots=True)
class Progress:
    """What a layer holds; replaced as a whole."""

    num_segments: int = 0
    """Placed segments."""
    fill: int = 0
    """Tokens in the window."""
    pending: tuple[Tensor, Tensor | None] | None = None
    """New keys and values that overflow the window, still where the model left them, until `flush`.
    """
    windows: Tensor | None = None
    """Those that they fill after the one under way, on the accelerator: (windows, segments, rows,
    num_kv_heads, segment_size * elements).
    """

    @property
    def num_pending(self) -> int:
        return 0 if self.pending is None else self.pending[0].shape[2]

    def narrow(self, start: int, length: int) -> tuple[Tensor, Tensor | None]:
        """Pending keys and values `start` to `start + length`."""
        assert self.pending is not None
        key, value = self.pending
        value = None if value is None else value.narrow(2, start, length)
        return key.narrow(2, start, length), value


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What one layer holds, each region whole."""

    window: Window
    num_in_window: int
    """Tokens of it that are filled."""
    num_tokens: int
    """Of a sequence, in all regions."""
    unpinned: tuple[KVView, ...]
    pinned: tuple[KVView, ...]


@dataclass(frozen=True, slots=True)
class _Shown:
    """Views, and all that they depend on."""

    placement: Placement
    num_segments: int
    counts: tuple[int, int]
    """Segments of each stack."""
    views: HostViews


class LayerStore:
    """The host regions of one layer, and how far it has got."""

    def __init__(self, spec: PartitionSpec, registrar: Registrar, pool: RegionPool) -> None:
        geometry = spec.geometry
        self._segment_size = spec.segment_tokens
        self.pinned = PinnedStack(pool, geometry, spec.segment_tokens, registrar)
        self.stacks: dict[str, SegmentStack] = {
            "unpinned": SegmentStack(pool, geometry, spec.segment_tokens),
            "pinned": self.pinned,
        }
        self.progress = Progress()
        self.pace: Pace | None = None
        """What is registered ahead while the present window fills; the cache decides."""
        self.given: Event | None = None
        """When the pending keys and values are there; None: none have been."""
        self.arrival: Arrival | None = None
        """When the segments placed last will lie in their slots; None: all do."""
        self._shown: _Shown | None = None
        self._readers: tuple[HostViews, int, Readers] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of a sequence."""
        progress = self.progress
        return progress.num_segments * self._segment_size + progress.fill + progress.num_pending

    def num_unreached(self, placement: Placement) -> int:
        """Pinned segments that are decided and that this layer has not placed yet."""
        places = placement.places[self.progress.num_segments :]
        return sum(place.region == "pinned" for place in places)

    def settle(self) -> None:
        """Return when every placed segment lies in its slot."""
        if self.arrival is not None:
            self.arrival.synchronize()
            self.arrival = None

    def host_views(self, placement: Placement) -> HostViews:
        """Zero-copy views of both stacks; those of a stack are made again only when something of it
        has changed.
        """
        num_segments, shown = self.progress.num_segments, self._shown
        if shown is not None and shown.placement is not placement:
            shown = None
        if shown is not None and shown.num_segments == num_segments:
            return shown.views
        found = [placement.segments_in(name, num_segments) for name in ("unpinned", "pinned")]
        counts = len(found[0]), len(found[1])
        unpinned, pinned = (None, None) if shown is None else shown.views
        if shown is None or counts[0] != shown.counts[0]:
            unpinned = self._views("unpinned", found[0], placement)
        if shown is None or counts[1] != shown.counts[1]:
            pinned = self._views("pinned", found[1], placement)
        assert unpinned is not None
        assert pinned is not None
        self._shown = _Shown(placement, num_segments, counts, (unpinned, pinned))
        return self._shown.views

    def readers(self, placement: Placement, cpu_share: float | None) -> Readers:
        """Who attends to which of these views in a step; made again likewise, and when another
        number of segments is lent.

        Args:
            cpu_share: part of the placed tokens that the CPU attends to; None: what is unpinned.
        """
        views, known = self.host_views(placement), self._readers
        assert self._shown is not None
        count = num_lent(*self._shown.counts, cpu_share)
        if known is None or known[0] is not views or known[1] != count:
            self._readers = known = (views, count, lend(views, count))
        return known[2]

    def _views(self, region: str, segments: list[int], placement: Placement) -> tuple[KVView, ...]:
        positions = [i * self._segment_size for i in segments]
        return self.stacks[region].views(positions, [placement.rows_of(i) for i in segments])

    def segment(self, segment_idx: int, placement: Placement) -> Tensor:
        """(physical rows, num_kv_heads, segment_size * elements) view of a placed segment."""
        region = placement.places[segment_idx].region
        slot = sum(place.region == region for place in placement.places[:segment_idx])
        return self.stacks[region].segment(slot)

    def trim(self, placement: Placement) -> None:
        """Cut the stacks to the segments that the layer has placed; forget the views of more."""
        for name, stack in self.stacks.items():
            count = len(placement.segments_in(name, self.progress.num_segments))
            if count < len(stack):
                self._shown = None
                stack.truncate(count)
