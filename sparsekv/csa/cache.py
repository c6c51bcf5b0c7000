"""A DeepSeek-V4 cache: CSA entries in four regions, everything else on the accelerator.

The pool of CSA entries is an `InplaceKVCache` whose unit is the entry. A layer's small state is
replaced as a whole at the end of its step; a step that fails takes back what it had appended.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsekv.cache import InplaceKVCache
from sparsekv.csa.buffer import GrowingBuffer
from sparsekv.csa.compressor import CompressorState
from sparsekv.csa.layer import LayerState
from sparsekv.errors import CacheStateError, LayoutError
from sparsekv.format import PartitionSpec
from sparsekv.format.compressed import LAYER_KINDS, CompressedGeometry, LayerKind
from sparsekv.format.statistics import CompressedStats, KindStats
from sparsekv.regions import RegionPool
from sparsekv.roofline import ShareRouter


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a cache."""

    states: list[LayerState]
    token_ids: Tensor
    num_selections: int
    """Row selections so far: each makes other sequences of them."""


class CompressedCache:
    """What all layers remember of a batch of equally long sequences.

    Args:
        geometry: kinds and sizes of the layers.
        spec: the cut of the pool of CSA entries; window, block and max_tokens count entries.
        device: the accelerator: "cuda", "cuda:<index>", or "cpu" for the simulated one.
        router: decides the region of each run of entries.
        pool: where host memory comes from and returns to.
    """

    def __init__(
        self,
        geometry: CompressedGeometry,
        spec: PartitionSpec,
        device: str | torch.device,
        router: ShareRouter | None = None,
        *,
        pool: RegionPool | None = None,
    ) -> None:
        self.geometry = geometry
        self.entries = InplaceKVCache(spec, device, router, pool=pool)
        self._csa_idx = {layer_idx: i for i, layer_idx in enumerate(geometry.layers_of("csa"))}
        self._is_rewound = False
        self._start(spec.batch_size)

    def _start(self, batch_size: int) -> None:
        self._num_selections = 0
        self.states = [LayerState() for _ in self.geometry.layer_kinds]
        self.token_ids = torch.zeros(batch_size, 0, dtype=torch.int64)
        """(batch, tokens) int64 on the CPU: what was read, to rebuild small states after a crop."""
        self._buffers = {i: self.new_buffer(i, batch_size) for i in self.layers_with_buffers}

    @property
    def layers_with_buffers(self) -> list[int]:
        """The layers that keep index keys or entries on the accelerator."""
        return [i for i, kind in enumerate(self.geometry.layer_kinds) if kind != "sliding"]

    def new_buffer(self, layer_idx: int, batch_size: int) -> GrowingBuffer:
        """An empty buffer for such a layer."""
        is_hca = self.geometry.layer_kinds[layer_idx] == "hca"
        dim = self.geometry.head_dim if is_hca else self.geometry.index_head_dim
        return GrowingBuffer(self.entries.accelerator, batch_size, dim, self.geometry.dtype)

    def reserve(self, num_tokens: int, prompt_tokens: int = 0) -> None:
        """Make sure that sequences of `num_tokens` fit, and that buffers grow to that size at once;
        register what the entries of the first `prompt_tokens` need.

        Raises:
            CapacityError: over `max_tokens`, or more than may still be committed.
        """
        ratio = self.geometry.csa_ratio
        self.entries.reserve(num_tokens // ratio, prompt_tokens // ratio)
        for layer_idx, buffer in self._buffers.items():
            buffer.expected = num_tokens // self.geometry.ratio_of(
                self.geometry.layer_kinds[layer_idx]
            )

    def mark(self) -> Mark:
        """Where the sequences are now, for `return_to`. Costs nothing: states are never written in
        place.
        """
        return Mark(list(self.states), self.token_ids, self._num_selections)

    def return_to(self, mark: Mark) -> None:
        """Drop what came after `mark`, if the sequences are still the same ones."""
        if mark.num_selections == self._num_selections:
            self.states, self.token_ids = list(mark.states), mark.token_ids
            for layer_idx, state in enumerate(self.states):
                self._truncate(layer_idx, state.compressor.num_entries)

    def adopt(
        self, states: list[LayerState], buffers: dict[int, GrowingBuffer], token_ids: Tensor
    ) -> None:
        """Take over what was loaded for everything but the pool."""
        self.states, self._buffers, self.token_ids = states, buffers, token_ids

    # What it holds

    @property
    def device(self) -> torch.device:
        """The accelerator."""
        return self.entries.device

    @property
    def batch_size(self) -> int:
        """Sequences now."""
        return self.entries.batch_size

    @property
    def num_tokens(self) -> int:
        """Tokens that every layer has seen."""
        return min(state.num_tokens for state in self.states)

    @property
    def is_complete(self) -> bool:
        """Whether all layers have seen the same tokens."""
        return len({state.num_tokens for state in self.states}) == 1

    def pool_idx(self, layer_idx: int) -> int:
        """The layer's place in the pool of CSA entries."""
        return self._csa_idx[layer_idx]

    def num_entries(self, layer_idx: int) -> int:
        """Compressed entries stored for a layer; after `rewind` more than its state has made."""
        if layer_idx in self._csa_idx:
            return self.entries.layer_num_tokens(self._csa_idx[layer_idx])
        return len(self._buffers[layer_idx]) if layer_idx in self._buffers else 0

    def buffer(self, layer_idx: int) -> GrowingBuffer:
        """Index keys of a CSA layer, entries of an HCA layer."""
        return self._buffers[layer_idx]

    def stats(self) -> CompressedStats:
        """Entries and bytes of each layer kind and region."""
        pool = self.entries.stats()
        rows = [row for kind in LAYER_KINDS for row in self._kind_stats(kind)]
        csa = len(self._csa_idx)
        rows += [
            KindStats(
                kind="csa",
                num_layers=csa,
                name=region.name,
                memory=region.memory,
                entries=region.tokens,
                used_bytes=region.used_bytes,
            )
            for region in pool.regions
        ]
        return CompressedStats(
            num_tokens=self.num_tokens, batch_size=self.batch_size, kinds=tuple(rows), pool=pool
        )

    def _kind_stats(self, kind: LayerKind) -> Iterator[KindStats]:
        """What the layers of a kind keep on the accelerator, CSA's pool apart."""
        layers = self.geometry.layers_of(kind)
        if not layers:
            return
        states = [self.states[layer_idx] for layer_idx in layers]
        buffers = [self._buffers[layer_idx] for layer_idx in layers if layer_idx in self._buffers]
        recent = 0 if states[0].recent is None else states[0].recent.shape[1]
        named = {"sliding": "", "csa": "index keys", "hca": "entries"}[kind]
        open_windows = [t for state in states for t in state.open_tensors()]
        for name, entries, used_bytes in (
            ("recent tokens", recent, sum(state.recent_bytes() for state in states)),
            ("open windows", 0, sum(t.numel() * t.element_size() for t in open_windows)),
            (named, len(buffers[0]) if buffers else 0, sum(b.num_bytes for b in buffers)),
        ):
            if name and (kind != "sliding" or name == "recent tokens"):
                yield KindStats(
                    kind=kind,
                    num_layers=len(layers),
                    name=name,
                    memory="GPU",
                    entries=entries,
                    used_bytes=used_bytes,
                )

    # Writing

    @contextmanager
    def layer_step(self, layer_idx: int) -> Iterator[None]:
        """Take back what the block appended to this layer if it fails."""
        state = self.states[layer_idx]
        if not self._is_rewound:  # what an interrupted crop, or a refused flush, may have left
            self._truncate(layer_idx, state.compressor.num_entries)
        stored = self.num_entries(layer_idx)
        try:
            yield
        except BaseException:
            self.states[layer_idx] = state
            self._truncate(layer_idx, stored)
            raise

    def _truncate(self, layer_idx: int, num_entries: int) -> None:
        if layer_idx in self._csa_idx and self.num_entries(layer_idx) > num_entries:
            self.entries.crop_layer(self._csa_idx[layer_idx], num_entries)
        if layer_idx in self._buffers:
            self._buffers[layer_idx].truncate(num_entries)

    def record(self, token_ids: Tensor) -> None:
        """Remember the tokens of the step that begins: (batch, tokens)."""
        seen = self.token_ids[:, : self.num_tokens]
        self.token_ids = torch.cat([seen, token_ids.to("cpu", torch.int64)], 1)

    # Rows and length

    def select_rows(self, indices: Tensor) -> None:
        """Let sequence b continue what sequence `indices[b]` was. No placed entry moves.

        Raises:
            LayoutError: none chosen, or an index out of range.
            CacheStateError: layers have seen different tokens.
        """
        self.check_complete()
        chosen = self.entries.checked_rows(indices).to(torch.int64)
        on_device = chosen.to(self.device)
        states = [state.select_rows(on_device) for state in self.states]
        buffers = {i: buffer.select_rows(on_device) for i, buffer in self._buffers.items()}
        token_ids = self.token_ids[chosen.cpu()]
        self.entries.batch_select_indices(chosen)  # the last that may fail
        self.states, self._buffers, self.token_ids = states, buffers, token_ids
        self._num_selections += 1

    @contextmanager
    def rewound(self, num_tokens: int) -> Iterator[Tensor]:
        """Cut to `num_tokens` tokens: in the block, go back further, far enough to rebuild the
        small states; if it fails, the cache is as before.

        Recent keys, open windows and overlaps at `num_tokens` come from the layers' inputs there,
        which nobody keeps. They depend on few tokens: each layer sees `sliding_window` raw tokens
        back, and compressed entries are still there: none is written again, none dropped before
        the block is done.

        Yields:
            (batch, tokens) ids that the block feeds to the model, whose outputs for them are of no
            use; this brings the cache to `num_tokens`.
        Raises:
            LayoutError: more tokens than this cache has read.
        """
        if not 0 <= num_tokens <= self.token_ids.shape[1]:
            raise LayoutError(
                f"{num_tokens} tokens to keep: this cache has read {self.token_ids.shape[1]}"
            )
        before, start = (self.states, self.token_ids), self._replay_start(num_tokens)
        ratios = [self.geometry.ratio_of(kind) for kind in self.geometry.layer_kinds]
        made = [CompressorState(num_entries=start // ratio if ratio else 0) for ratio in ratios]
        try:
            self._is_rewound = True
            self.states = [LayerState(num_tokens=start, compressor=m, indexer=m) for m in made]
            self.token_ids = self.token_ids[:, :start]
            yield before[1][:, start:num_tokens]
        except BaseException:
            self.states, self.token_ids = before
            raise
        finally:
            self._is_rewound = False
        for layer_idx, state in enumerate(self.states):
            self._truncate(layer_idx, state.compressor.num_entries)

    def _replay_start(self, num_tokens: int) -> int:
        geometry = self.geometry
        # Layer l reads exact inputs from `start + l * (sliding_window - 1)` on. The last layer's
        # recent keys, and the open and prior windows, reach back this much further:
        reach = max(geometry.sliding_window, geometry.hca_ratio, 2 * geometry.csa_ratio)
        depth = len(geometry.layer_kinds) * geometry.sliding_window + reach
        unit = math.lcm(geometry.csa_ratio, geometry.hca_ratio)
        return max(num_tokens - depth, 0) // unit * unit

    def reset(self) -> None:
        """Forget every token."""
        self.entries.reset()
        self._start(self.entries.batch_size)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to a safetensors file; see FORMAT.md. The file appears whole or not at
        all.
        """
        from sparsekv.csa.archive import save_compressed

        save_compressed(self, Path(path))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the content by a saved cache's.

        Raises:
            FormatError: truncated, foreign, newer, or of another geometry; the cache is as before.
            CapacityError: over the machine's memory; likewise.
        """
        from sparsekv.csa.archive import load_compressed

        load_compressed(self, Path(path))

    def close(self, reason: str) -> None:
        """End the cache; any further use of its entries raises `reason`."""
        self.entries.close(reason)
        self._buffers = {}

    def check_complete(self) -> None:
        """Raise CacheStateError if a step was interrupted half way through the layers."""
        if not self.is_complete:
            counts = sorted({state.num_tokens for state in self.states})
            raise CacheStateError(
                f"layers have seen {counts[0]} to {counts[-1]} tokens: a step was interrupted "
                f"before its last layer; crop to {counts[0]} tokens drops what it left"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        other = copy.copy(self)
        memo[id(self)] = other
        other.entries = copy.deepcopy(self.entries, memo)
        everyone = torch.arange(self.batch_size, device=self.device)
        other._buffers = {i: b.select_rows(everyone) for i, b in self._buffers.items()}
        other.states = list(self.states)  # states are never written in place
        return other
