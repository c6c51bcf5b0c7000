"""The cache: four regions whose place and layout are fixed when a token is written
(arXiv:2609.14507, section 3).

`append` writes new tokens and decides nothing about older ones; `views` shows a layer where it
lies; `flush`, after the layer's attention, sends full segments from the window to their one CPU
region. What is placed never moves, except that `crop` into a placed segment takes its surviving
tokens back to the window.

Each layer's state changes by single assignments in an order that leaves the cache whole wherever an
error or Ctrl-C strikes. Copies go on beside the caller's work; whoever shows, moves or frees bytes
first waits for those that concern them.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsekv.device import Event, open_accelerator
from sparsekv.errors import CacheStateError, CapacityError, LayoutError
from sparsekv.format import (
    CacheStats,
    KVView,
    LayerViews,
    PartitionSpec,
    Placement,
    RegionName,
    RegionStats,
    SegmentPlace,
    ShareStats,
)
from sparsekv.regions import (
    LayerParts,
    LayerStore,
    Outbox,
    PingPong,
    Progress,
    RegionPool,
    Registrar,
    Window,
    evict,
    lay_out_windows,
)
from sparsekv.regions.ahead import grant, release, wanted_room
from sparsekv.regions.lending import check_step_share, num_lent
from sparsekv.regions.memory import available_bytes, check_available
from sparsekv.regions.pace import Pace
from sparsekv.regions.registration import RegistrationRefused
from sparsekv.roofline import ShareRouter

_INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Companion(Protocol):
    """Somebody who reads the regions while the caller goes on."""

    def synchronize(self) -> None:
        """Return when nothing is read any more; nothing of the regions is held afterwards."""


class Balance(Protocol):
    """Somebody who keeps the share right while the cache is used."""

    def stats(self, cpu_share: float, num_tokens: int) -> ShareStats:
        """How well it does at this share of so many placed tokens."""
        ...

    def copy(self) -> Balance:
        """The same for a copy of the cache."""
        ...

    @property
    def router(self) -> ShareRouter:
        """The cache's."""
        ...


class InplaceKVCache:
    """Keys and values of a batch of sequences, all layers.

    Args:
        spec: what is stored, for how many rows, cut how.
        device: the accelerator: "cuda", "cuda:<index>", or "cpu" for the simulated one.
        router: decides the region of each segment; half to each side if None.
        pool: where host memory comes from and returns to; one of its own if None.
        step_share: part of the placed tokens that the CPU attends to in each step; it borrows
            pinned segments for what is not unpinned. None: it attends to what is unpinned.
    Raises:
        LayoutError: no such device, or no such share.

    Not thread-safe: one cache serves one sequence batch at a time. A forked child gets
    CacheStateError.
    """

    def __init__(
        self,
        spec: PartitionSpec,
        device: str | torch.device = "cuda",
        router: ShareRouter | None = None,
        *,
        pool: RegionPool | None = None,
        step_share: float | None = None,
    ) -> None:
        self.spec = spec
        self.accelerator = open_accelerator(device)
        self.router = ShareRouter(0.5) if router is None else router
        self.ping_pong = PingPong(self.accelerator, spec)
        self.registrar = Registrar(self.accelerator)
        """Registers host memory for this cache, also for those who work on it."""
        self._outbox = Outbox(self.registrar, spec)
        # Runs before anything of the cache is freed, and at exit while the device still works.
        weakref.finalize(self, _finish, os.getpid(), self._outbox, self.ping_pong)
        self.companion: Companion | None = None
        """Who else reads the regions, beside the caller's work: is waited for as copies are."""
        self.balance: Balance | None = None
        """Who sets `router.marginal_share` and `step_share` between steps; None: the caller may."""
        self.reads_in_place = True
        """Whether one new token of each sequence attends to the pinned region where it lies, but
        for what is copied ahead; or to copies of all of it. To be set before the first step.
        """
        self._pool = RegionPool() if pool is None else pool
        self._pid = os.getpid()
        self._closed: str | None = None
        self._borrowed_bytes = 0
        self._start(spec.batch_size)
        self.step_share = step_share

    def _start(self, batch_size: int) -> None:
        layers, windows = self._new_layers(), self._new_windows(batch_size)
        self._placement, self._windows, self._layers = Placement(batch_size), windows, layers
        self.router.error = 0.0
        self._reserved_tokens = 0
        self._fitting_tokens = 0
        """For which all layers are known to find memory."""
        self._fits_ahead: tuple[Pace, bool] | None = None
        self._retry_registering()

    def _retry_registering(self) -> None:
        self.registrar.retry()
        self._outbox.retry()

    def _new_layers(self) -> list[LayerStore]:
        return [
            LayerStore(self.spec, self.registrar, self._pool)
            for _ in range(self.spec.geometry.num_layers)
        ]

    def _new_windows(self, batch_size: int) -> list[Window]:
        return [self._new_window(batch_size) for _ in range(self.spec.geometry.num_layers)]

    def _new_window(self, batch_size: int) -> Window:
        return Window(self.accelerator, self.spec, batch_size)

    # What it holds

    @property
    def device(self) -> torch.device:
        """Where new keys, values and queries must be."""
        return self.accelerator.device

    @property
    def batch_size(self) -> int:
        """Sequences now: batch operations change it."""
        return self._placement.batch_size

    @property
    def num_tokens(self) -> int:
        """Tokens of a sequence that every layer holds."""
        return min(self._layer_lengths())

    @property
    def num_placed_tokens(self) -> int:
        """Tokens of a sequence whose CPU region is decided."""
        return len(self._placement) * self.spec.segment_tokens

    @property
    def is_complete(self) -> bool:
        """Whether all layers hold the same tokens; not so inside a step, or after one that was
        interrupted.
        """
        return len(self._layer_lengths()) == 1

    def _layer_lengths(self) -> set[int]:
        self._check_usable()
        return {layer.num_tokens for layer in self._layers}

    def layer_num_tokens(self, layer_idx: int) -> int:
        """Tokens of a sequence in one layer."""
        return self._layer(layer_idx).num_tokens

    def region_of(self, layer_idx: int, token_idx: int) -> RegionName:
        """The one region that holds a token; tokens not yet flushed count as the window's.

        Raises:
            LayoutError: no such layer or token.
        """
        layer = self._layer(layer_idx)
        num_tokens = layer.num_tokens
        if not 0 <= token_idx < num_tokens:
            raise LayoutError(
                f"token_idx={token_idx}: layer {layer_idx} holds tokens 0 to {num_tokens - 1}"
            )
        segment_idx = token_idx // self.spec.segment_tokens
        if segment_idx >= layer.progress.num_segments:
            return "window"
        return self._placement.places[segment_idx].region

    def views(self, layer_idx: int) -> LayerViews:
        """Zero-copy views of everything the layer holds, with positions and row tables.

        Valid until the layer is next changed; host views stay readable as long as they are held,
        but what a later `crop` or `reset` frees may be written again.
        """
        layer = self._layer(layer_idx)
        layer.settle()
        progress = layer.progress
        unpinned, pinned = layer.host_views(self._placement)
        window, parts = self._windows[layer_idx], []
        start = progress.num_segments * self.spec.segment_tokens
        for first, key, value in window.pieces(progress.fill):
            steps = torch.arange(key.shape[0]) * self.spec.segment_tokens
            parts.append(KVView(key, value, start + first + steps))
        if progress.pending is not None:
            key, stored = progress.pending
            value = key[..., : self.spec.geometry.value_dim] if stored is None else stored
            parts.append(KVView(key[None], value[None], torch.tensor([start + progress.fill])))
        return LayerViews(window=tuple(parts), unpinned=unpinned, pinned=pinned)

    def parts(self, layer_idx: int) -> LayerParts | None:
        """The layer's regions, each whole, by who attends to them as in `step_views`; None while
        tokens wait that overflow the window. Valid as `views` are.
        """
        layer = self._layer(layer_idx)
        layer.settle()
        progress = layer.progress
        if progress.pending is not None:
            return None
        readers = layer.readers(self._placement, self._step_share)
        return LayerParts(
            self._windows[layer_idx],
            progress.fill,
            layer.num_tokens,
            readers.cpu,
            readers.accelerator,
        )

    @property
    def step_share(self) -> float | None:
        """Part of the placed tokens that the CPU attends to in each step, to the nearest segment:
        what is unpinned, and as many pinned segments as are missing, which it borrows where they
        lie. None: what is unpinned.

        It may be set between any two steps; a share from `router.marginal_share` to 1, since what
        is unpinned is not lent to the accelerator.

        Raises:
            LayoutError: a share outside of that.
            CacheStateError: set inside a step: all layers of a step borrow the same segments.
        """
        return self._step_share

    @step_share.setter
    def step_share(self, share: float | None) -> None:
        check_step_share(share, self.router.marginal_share)
        if not self.is_complete:
            raise CacheStateError(
                f"step_share={share!r} in the middle of a step: all its layers borrow the same "
                f"segments, so set it between steps; {self._incomplete_message()}"
            )
        self._step_share = share

    def step_views(self, layer_idx: int) -> LayerViews:
        """`views` by who attends to them in a step: pinned segments that the CPU borrows stand
        among the unpinned ones. Their bytes are there, as those of all others are: `views` has
        waited for them.
        """
        views = self.views(layer_idx)
        readers = self._layers[layer_idx].readers(self._placement, self._step_share)
        if not readers.num_borrowed:
            return views
        return replace(views, unpinned=readers.cpu, pinned=readers.accelerator)

    def count_borrowed(self, layer_idx: int) -> None:
        """Count what the CPU borrows of a layer as read in a step, before `flush`."""
        readers = self._layers[layer_idx].readers(self._placement, self._step_share)
        if readers.num_borrowed:
            per_token = self.batch_size * self.spec.geometry.bytes_per_token_per_layer
            self._borrowed_bytes += readers.num_borrowed * per_token

    def pinned_ahead(self, layer_idx: int) -> tuple[tuple[KVView, ...], Event | None]:
        """The pinned views of a layer, before `step_views` is asked for them, and the event after
        which their bytes are there; None: they are.
        """
        layer = self._layer(layer_idx)
        readers = layer.readers(self._placement, self._step_share)
        return readers.accelerator, None if layer.arrival is None else layer.arrival.copied

    def stats(self) -> CacheStats:
        """Tokens and bytes of each region."""
        geometry, num_tokens = self.spec.geometry, self.num_tokens
        placed = self._placement.places[
            : min(layer.progress.num_segments for layer in self._layers)
        ]
        num_unpinned = sum(place.region == "unpinned" for place in placed)
        num_pinned = len(placed) - num_unpinned
        num_attended = num_unpinned + num_lent(num_unpinned, num_pinned, self._step_share)
        size = self.spec.segment_tokens
        counts = {"unpinned": num_unpinned * size, "pinned": num_pinned * size}
        per_window = self.spec.window_size * geometry.bytes_per_token_per_layer * self.batch_size
        buffer_bytes = self.registrar.buffer_bytes
        cpu_share = num_attended / len(placed) if placed else 0.0

        def region(name: str, memory: str, tokens: int, used_bytes: int) -> RegionStats:
            share = tokens / num_tokens if num_tokens else 0.0
            return RegionStats(
                name=name,
                memory=memory,
                tokens=tokens,
                used_bytes=used_bytes,
                committed_bytes=self._committed_bytes(name, used_bytes),
                share=share,
            )

        return CacheStats(
            num_tokens=num_tokens,
            batch_size=self.batch_size,
            cpu_share=cpu_share,
            placed_share=num_unpinned / len(placed) if placed else 0.0,
            regions=(
                region(
                    "window",
                    "GPU",
                    num_tokens - len(placed) * size,
                    geometry.num_layers * per_window,
                ),
                region("ping-pong", "GPU", 0, self.ping_pong.num_bytes),
                *(
                    region(
                        name,
                        "CPU",
                        tokens,
                        sum(layer.stacks[name].used_bytes for layer in self._layers),
                    )
                    for name, tokens in counts.items()
                ),
            ),
            h2d_bytes=self.accelerator.h2d_bytes,
            d2h_bytes=self.accelerator.d2h_bytes,
            borrowed_bytes=self._borrowed_bytes,
            buffer_bytes=buffer_bytes,
            registered_bytes=buffer_bytes
            + sum(layer.pinned.registered_bytes for layer in self._layers),
            longest_registration_s=self.registrar.longest_s,
            balance=None
            if self.balance is None
            else self.balance.stats(cpu_share, len(placed) * size),
        )

    def _committed_bytes(self, region: str, used_bytes: int) -> int:
        """Bytes of memory taken for a region, of which `used_bytes` hold something."""
        if region not in ("unpinned", "pinned"):
            return used_bytes
        leases = [lease for layer in self._layers for lease in layer.stacks[region].leases]
        return sum(lease.mapping.committed_bytes for lease in leases)

    # Writing

    def append(self, layer_idx: int, key: Tensor, value: Tensor | None = None) -> None:
        """Add new tokens to a layer.

        Tokens that fit into the window are copied there; more are kept by reference, and must not
        be written to, until the next `append` or `views` of this layer after `flush`.

        Args:
            key: (batch, num_kv_heads, tokens, head_dim) on `device`, of the geometry's dtype.
            value: (batch, num_kv_heads, tokens, head_dim_v) likewise; None exactly where V is part
                of K.
        Raises:
            LayoutError: a shape, dtype or device differs from the spec's.
            CapacityError: over `max_tokens`, or over the machine's memory.
            torch.OutOfMemoryError: the accelerator has no room for the full windows of so many
                tokens, which take their bytes once more until they have left: give fewer at a
                time. Nothing was added.
        """
        layer = self._layer(layer_idx)
        layer.settle()
        self.spec.geometry.check_tokens(key, value, self.batch_size, self.device)
        self._check_capacity(layer_idx, key.shape[2])
        if key.shape[2] == 0:
            return
        if layer.progress.pending is not None or layer.progress.fill == self.spec.window_size:
            self.flush(layer_idx)
        key, value = key.detach(), None if value is None else value.detach()
        progress = layer.progress
        if progress.fill + key.shape[2] <= self.spec.window_size:
            self._windows[layer_idx].write(progress.fill, key, value)
            layer.progress = Progress(progress.num_segments, progress.fill + key.shape[2])
        else:
            # Before attention, whose kernels may keep the accelerator to themselves to their end.
            new = replace(progress, pending=(key, value))
            missing = -progress.fill % self.spec.window_size
            rest = new.narrow(missing, new.num_pending - missing)
            windows = lay_out_windows(self.accelerator, self.spec, *rest)
            layer.given = self.accelerator.current_stream().record()
            layer.progress = replace(new, windows=windows)

    def flush(self, layer_idx: int) -> None:
        """Send what fills whole segments from the window to its CPU region; call it after the
        layer's attention.

        Raises:
            CapacityError: memory was refused; the layer is as before then, and nothing is lost.
        """
        layer = self._layer(layer_idx)
        progress = layer.progress
        num_windows = (progress.fill + progress.num_pending) // self.spec.window_size
        if num_windows:
            self._evict(layer, self._windows[layer_idx], num_windows)
            progress = layer.progress
        if progress.pending is not None:
            key, value = progress.pending
            self._windows[layer_idx].write(progress.fill, key, value)
            layer.progress = Progress(progress.num_segments, progress.fill + key.shape[2])

    def _evict(self, layer: LayerStore, window: Window, num_windows: int) -> None:
        first = layer.progress.num_segments
        end = first + num_windows * self.spec.segments_per_window
        layer.trim(self._placement)  # what Ctrl-C may have left of an earlier step
        try:
            self._decide(end)
            names = [place.region for place in self._placement.places[first:end]]
            progress = evict(layer, window, self._outbox, names)
        except BaseException:
            self._let_end()  # nothing may be under way to slots that are given up
            layer.trim(self._placement)
            self._forget_unreached()
            raise
        layer.progress = progress

    def _decide(self, num_segments: int) -> None:
        """Extend the placement table to `num_segments`; the first layer to get there decides for
        all.
        """
        granted = self._prepare(num_segments - len(self._placement))
        while len(self._placement) < num_segments:
            error, region = self.router.error, self.router.route()
            if region == "pinned" and granted:
                granted -= 1
            elif region == "pinned":
                self.router.divert()
                region = "unpinned"
            self._placement.add(SegmentPlace(region, self.batch_size, error))

    def _count_pinned(self, num_segments: int) -> int:
        """How many of the next segments the router sends there: exactly, by asking a copy of it."""
        router = copy.copy(self.router)
        return [router.route() for _ in range(num_segments)].count("pinned")

    def _prepare(self, num_segments: int) -> int:
        """Register what the way to the next segments' places needs; of those that the router sends
        to the pinned region, how many may go there.

        Raises:
            CapacityError: over the machine's memory.
        """
        num_pinned = self._count_pinned(num_segments)
        if num_pinned < num_segments:
            self._outbox.prepare(self.batch_size)  # first: all others pass through the little it is
        return self._grant(num_pinned)

    def _grant(self, num_pinned: int) -> int:
        """Of so many more segments, those for which every layer has, or now gets, registered
        memory.

        Raises:
            CapacityError: over the machine's memory.
        """
        if not num_pinned:
            return 0
        stacks = [layer.pinned for layer in self._layers]
        needed = sum(stack.bytes_to_commit(num_pinned, self.batch_size) for stack in stacks)
        self._check_memory(needed, f"{num_pinned} more segments x {len(stacks)} layers")
        return grant(self._layers, self.registrar, self._placement, num_pinned, self.batch_size)

    def _forget_unreached(self) -> None:
        """Drop the places that no layer has reached, and their effect on the share."""
        reached = max(layer.progress.num_segments for layer in self._layers)
        if reached < len(self._placement):
            self.router.error = self._placement.places[reached].router_error
            self._placement.truncate(reached)

    def register_ahead(self, layer_idx: int) -> None:
        """Register, or begin to, what this layer's next segments need: at most one chunk of 16 MiB,
        one segment, or one buffer on the way to the unpinned region. Layers take turns over the
        steps of a window, so that no step is held up for long.

        Call it once a layer in each decode step, where its kernels have been launched (they run on
        while this waits): after `flush`. Without it each segment is registered when it is placed.
        """
        layer = self._layer(layer_idx)
        if layer_idx == 0 and not self._outbox.is_ready(self.batch_size):
            per_window = self.spec.segments_per_window
            if self.registrar.is_refused or self._count_pinned(per_window) < per_window:
                self._outbox.prepare(self.batch_size, 1)
                return
        if self.registrar.is_refused:
            return
        fill, num_rows, stack = layer.progress.fill, self.batch_size, layer.pinned
        is_reserved = layer.num_tokens <= self._reserved_tokens
        pace = layer.pace
        if pace is None or not pace.is_of(layer.progress.num_segments, num_rows, is_reserved):
            layer.pace = pace = self._new_pace(layer, is_reserved)
        if not pace.needed:
            return
        due = pace.num_due(fill, self.spec.window_size, layer_idx, len(self._layers))
        if not due or stack.room(num_rows) >= due:
            return
        if not self._fits(pace):
            return  # placing them will say so
        try:
            stack.prepare_chunk(pace.wanted, num_rows)
        except RegistrationRefused as error:
            self.registrar.give_up(error)
            release(self._layers)
        except CapacityError:
            return  # no addresses: likewise

    def _fits(self, pace: Pace) -> bool:
        """Whether memory holds what the layers want to register while their windows fill: asked by
        the first of them.
        """
        known = self._fits_ahead
        if known is None or known[0] != pace:
            wanted = (
                layer.pinned.bytes_to_commit(pace.wanted, pace.num_rows) for layer in self._layers
            )
            self._fits_ahead = known = (pace, sum(wanted) <= available_bytes())
        return known[1]

    def _new_pace(self, layer: LayerStore, is_reserved: bool) -> Pace:
        """What to register while this layer's window fills: nothing if it is not expected to."""
        spec, first, num_rows = self.spec, layer.progress.num_segments, self.batch_size
        last = first + spec.segments_per_window
        most = self._reserved_tokens if is_reserved else spec.max_tokens
        if most is not None:
            most = most // spec.window_size * spec.segments_per_window
        needed = wanted = 0
        if most is None or last <= most:
            decided = self._placement.places[first:last]
            needed = sum(place.region == "pinned" for place in decided)
            needed += self._count_pinned(last - first - len(decided))
        if needed:
            unreached = layer.num_unreached(self._placement)
            rest = 0 if most is None else max(most - len(self._placement), 0)
            expected = None if most is None else unreached + self.router.count_pinned(rest)
            wanted = wanted_room(layer.pinned, num_rows, needed, expected, is_reserved)
        return Pace(first, num_rows, is_reserved, layer.progress.fill, needed, wanted)

    # Rows and length

    def crop(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of each sequence, in every layer; no more than there
        are stay.

        Raises:
            LayoutError: a negative number.
        """
        self._check_usable()
        if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or num_tokens < 0:
            raise LayoutError(
                f"crop({num_tokens!r}): the number of tokens to keep must be a whole number, 0 "
                "or more"
            )
        self._crop(range(len(self._layers)), num_tokens)

    def crop_layer(self, layer_idx: int, num_tokens: int) -> None:
        """`crop` for one layer: to take back what a failed step has appended to it."""
        self._layer(layer_idx)
        self._crop([layer_idx], num_tokens)

    def _crop(self, layer_indices: Iterable[int], num_tokens: int) -> None:
        num_segments, kept = divmod(num_tokens, self.spec.segment_tokens)
        windows = list(self._windows)
        for layer_idx in layer_indices:
            self.flush(layer_idx)
        self.settle()
        for layer_idx in layer_indices:
            layer = self._layers[layer_idx]
            if kept and layer.progress.num_segments > num_segments:
                windows[layer_idx] = self._recall(layer, num_segments)
        # No copy is left to fail: from here on each layer is cut at one stroke.
        for layer_idx in layer_indices:
            layer = self._layers[layer_idx]
            progress = layer.progress
            if progress.num_segments > num_segments:
                progress = Progress(num_segments, kept)
            else:
                room = num_tokens - progress.num_segments * self.spec.segment_tokens
                progress = replace(progress, fill=min(progress.fill, room))
            self._windows[layer_idx], layer.progress = windows[layer_idx], progress
            layer.trim(self._placement)
        self._forget_unreached()

    def _recall(self, layer: LayerStore, segment_idx: int) -> Window:
        """A new window with the tokens of a placed segment, in logical rows."""
        rows = self._placement.rows_of(segment_idx)
        source = layer.segment(segment_idx, self._placement)
        window = self._new_window(self.batch_size)
        source = source if rows is None else source[rows]
        self.accelerator.copy_from_host(window.elements[0], source)
        return window

    def reorder(self, batch_idx: Tensor) -> None:
        """Let sequence b continue what sequence `batch_idx[b]` was (beam search): (batch,)
        integers.

        Only windows are copied; placed segments get new row tables.

        Raises:
            LayoutError: not one index per sequence, or one out of range.
            CacheStateError: layers hold different numbers of tokens.
        """
        if batch_idx.ndim != 1 or len(batch_idx) != self.batch_size:
            raise LayoutError(
                f"batch_idx of shape {tuple(batch_idx.shape)}: reorder needs one index for each "
                f"of {self.batch_size} "
                "sequences; use batch_select_indices to change their number"
            )
        self.batch_select_indices(batch_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices`, (new_batch,) integers or (batch,) booleans, in that order.

        Raises:
            LayoutError: none chosen, or an index out of range.
            CacheStateError: layers hold different numbers of tokens.
        """
        self._check_usable()
        indices = self.checked_rows(indices)
        if not self.is_complete:
            raise CacheStateError(self._incomplete_message())
        for layer_idx in range(len(self._layers)):
            self.flush(layer_idx)
        self.settle()
        self._forget_unreached()
        placement, windows = self._placement.select_rows(indices), self._new_windows(len(indices))
        chosen = indices.to(self.device)
        for old, new in zip(self._windows, windows, strict=True):
            torch.index_select(old.elements, 1, chosen, out=new.elements)
        self._placement, self._windows = placement, windows

    def checked_rows(self, indices: Tensor) -> Tensor:
        """The rows that a selection names, (new_batch,) integers.

        Raises:
            LayoutError: none chosen, or an index out of range.
        """
        given = indices
        if indices.dtype == torch.bool and indices.shape == (self.batch_size,):
            indices = indices.nonzero().flatten()
        if (
            indices.dtype not in _INDEX_DTYPES
            or indices.ndim != 1
            or len(indices) == 0
            or indices.min() < 0
            or indices.max() >= self.batch_size
        ):
            raise LayoutError(
                f"indices={given.tolist()}: must be whole numbers from 0 to {self.batch_size - 1}, "
                f"at least one, or {self.batch_size} booleans, at least one true"
            )
        return indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Turn each sequence into `repeats` consecutive copies; placed bytes are shared, not
        copied.
        """
        if not isinstance(repeats, int) or repeats < 1:
            raise LayoutError(f"repeats={repeats!r}: must be a whole number of at least 1")
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget every token and return to the spec's batch size; the host memory is kept for what
        comes.
        """
        self._check_usable()
        self._let_end()
        self._start(self.spec.batch_size)

    def settle(self) -> None:
        """Return when host memory is not written or read any more by what was begun before.

        Raises:
            CacheStateError: what has been placed is not where it should be.
        """
        self._let_end()
        for layer in self._layers:
            layer.settle()

    def _let_end(self) -> None:
        self._fitting_tokens = 0  # the regions may be about to change
        self._outbox.synchronize()
        self.ping_pong.synchronize()
        if self.companion is not None:
            self.companion.synchronize()

    def reserve(self, num_tokens: int, prompt_tokens: int = 0) -> None:
        """Take addresses for sequences of `num_tokens`, and make sure that the machine can hold
        them. Register now what the first `prompt_tokens` of them, and the window begun with them,
        are expected to need; the rest is registered while decoding.

        Raises:
            CapacityError: over `max_tokens`, or more than may still be committed.
        """
        self._check_usable()
        if self.spec.max_tokens is not None and num_tokens > self.spec.max_tokens:
            raise CapacityError(self._over_max_message(num_tokens))
        num_segments = num_tokens // self.spec.segment_tokens
        stacks = [stack for layer in self._layers for stack in layer.stacks.values()]
        needed = num_segments * stacks[0].slot_bytes(self.batch_size) * len(self._layers)
        held = sum(lease.mapping.touched_bytes for stack in stacks for lease in stack.leases)
        self._check_memory(needed - held, f"{num_tokens} tokens x {self.batch_size} sequences")
        for stack in stacks:
            stack.reserved_segments = max(num_segments, 1)
        self._reserved_tokens = num_tokens
        self._retry_registering()
        if prompt_tokens:
            num_windows = min(prompt_tokens + self.spec.window_size, num_tokens)
            num_windows //= self.spec.window_size
            num_new = num_windows * self.spec.segments_per_window - len(self._placement)
            self._prepare(max(num_new, 0))

    # Life

    def close(self, reason: str) -> None:
        """End the cache: regions are freed as soon as no view holds them, and any further use
        raises `reason`.
        """
        self._closed = reason
        if os.getpid() == self._pid:
            self._let_end()
        self._layers = []

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to a safetensors file; see FORMAT.md. The file appears whole or not at
        all.
        """
        from sparsekv.archive import save_cache

        self._check_usable()
        save_cache(self, Path(path))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the content by a saved cache's, each segment in the region it was in.

        Raises:
            FormatError: truncated, foreign, newer, or of another geometry or window; the cache is
                as before then.
            CapacityError: over `max_tokens`, or over the machine's memory; likewise.
        """
        from sparsekv.archive import load_cache

        self._check_usable()
        load_cache(self, Path(path))

    def __deepcopy__(self, memo: dict[int, Any]) -> InplaceKVCache:
        """An independent cache with the same tokens in the same regions."""
        self._check_usable()
        self.settle()
        balance = None if self.balance is None else self.balance.copy()
        router = copy.copy(self.router) if balance is None else balance.router
        other = InplaceKVCache(self.spec, self.device, router, pool=self._pool)
        other.balance, other.reads_in_place = balance, self.reads_in_place
        memo[id(self)] = other
        other._placement = self._placement.copy()
        other.router.error, other._step_share = self.router.error, self._step_share
        other._layers, other._windows = other._new_layers(), other._new_windows(self.batch_size)
        needed = sum(stack.used_bytes for layer in self._layers for stack in layer.stacks.values())
        self._check_memory(needed, "a copy of this cache")
        for layer, new in zip(self._layers, other._layers, strict=True):
            for place in self._placement.places[: layer.progress.num_segments]:
                stack = new.stacks[place.region]
                stack.push(1, place.num_rows)
                slot = len(stack) - 1
                stack.segment(slot).copy_(layer.stacks[place.region].segment(slot))
            pending = layer.progress.pending
            if pending is not None:
                pending = (pending[0].clone(), None if pending[1] is None else pending[1].clone())
            new.progress = replace(layer.progress, pending=pending)
        for old_window, new_window in zip(self._windows, other._windows, strict=True):
            new_window.elements.copy_(old_window.elements)
        return other

    def __reduce__(self) -> Any:
        raise CacheStateError(
            "a cache cannot be pickled: its bytes live in fixed regions; use save(path) and "
            "load(path)"
        )

    # Checks

    def _check_usable(self) -> None:
        if self._closed is not None:
            raise CacheStateError(self._closed)
        if os.getpid() != self._pid:
            raise CacheStateError(
                f"this cache belongs to process {self._pid}, and its host memory is not "
                "inherited by a fork (this is "
                f"{os.getpid()}); build the cache in the process that uses it, or start "
                "processes with 'spawn'"
            )

    def _layer(self, layer_idx: int) -> LayerStore:
        self._check_usable()
        if not 0 <= layer_idx < len(self._layers):
            raise LayoutError(
                f"layer_idx={layer_idx}: this cache has layers 0 to {len(self._layers) - 1}"
            )
        return self._layers[layer_idx]

    def _check_capacity(self, layer_idx: int, new_tokens: int) -> None:
        layer, spec = self._layers[layer_idx], self.spec
        num_tokens = layer.num_tokens + new_tokens
        if spec.max_tokens is not None and num_tokens > spec.max_tokens:
            raise CapacityError(self._over_max_message(num_tokens))
        num_unplaced = num_tokens - layer.progress.num_segments * spec.segment_tokens
        num_new = num_unplaced // spec.window_size * spec.segments_per_window
        if num_new and num_tokens > self._fitting_tokens:
            # Where each goes is not decided yet: what both stacks have committed already counts for
            # one of them.
            committing = max(
                stack.bytes_to_commit(num_new, self.batch_size) for stack in layer.stacks.values()
            )
            # To ask takes a millisecond: in the steps in which windows are full, one layer asks for
            # all.
            if committing * len(self._layers) <= available_bytes():
                self._fitting_tokens = num_tokens
            else:
                self._check_memory(
                    committing, f"{new_tokens} more tokens x {self.batch_size} sequences"
                )

    def _check_memory(self, num_bytes: int, what: str) -> None:
        if num_bytes <= 0 or num_bytes - self._pool.idle_bytes() <= available_bytes():
            return
        self._pool.trim()
        check_available(num_bytes, what)

    def _over_max_message(self, num_tokens: int) -> str:
        return (
            f"{num_tokens} tokens: over max_tokens={self.spec.max_tokens}; raise max_tokens "
            "(None: as many as memory "
            "holds) or shorten the prompt and max_new_tokens"
        )

    def _incomplete_message(self) -> str:
        counts = sorted(self._layer_lengths())
        return (
            f"layers hold {counts[0]} to {counts[-1]} tokens: a step was interrupted before its "
            "last layer; "
            f"crop({counts[0]}) drops what it left"
        )


def _finish(pid: int, outbox: Outbox, ping_pong: PingPong) -> None:
    # A forked child does not have the streams. What the host has still to put in place it keeps
    # alive itself, and must not be waited for: this may run on its own thread.
    if os.getpid() == pid:
        outbox.stream.synchronize()
        ping_pong.synchronize()
