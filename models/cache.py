"""A transformers Cache whose full-attention layers live in regions.

Full-attention layers hand their keys and values to one shared store and return handles; layers that
slide are transformers' own. Reads happen in `attention.py`, where the handles arrive.
"""

from __future__ import annotations

import copy
import itertools
import os
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from sparsekv.engine.config import CacheConfig
from sparsekv.errors import CacheStateError, UnsupportedModelError
from sparsekv.format import CacheStats
from sparsekv.models.owned_cache import OwnedCache, as_indices
from sparsekv.models.store import CacheOwner, RegionStore

HANDLE = "_sparsekv_handle"
"""Attribute of the tensors that stand for a layer's keys and values."""


class KVHandle:
    """One layer's keys and values during one attention call."""

    __slots__ = ("key", "layer_idx", "num_past_tokens", "store", "value")

    def __init__(
        self, store: RegionStore, layer_idx: int, num_past_tokens: int, key: Tensor, value: Tensor
    ):
        self.store = store
        self.layer_idx = layer_idx
        self.num_past_tokens = num_past_tokens
        # This step's own, for a first prefill: nothing has to be read back from the regions then.
        self.key = key
        self.value = value

    def stand_in(self, like: Tensor) -> Tensor:
        """A tensor of the shape that all keys (or values) would have, without storage.

        On the meta device any attention code but ours fails loudly instead of reading something
        else.
        """
        length = self.num_past_tokens + like.shape[2]
        shape = (like.shape[0], like.shape[1], length, like.shape[3])
        tensor = torch.empty(shape, dtype=like.dtype, device="meta")
        setattr(tensor, HANDLE, self)
        return tensor


class RegionLayer(CacheLayerMixin):
    """One full-attention layer of a SparseKVCache: a window on the shared store."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, store: RegionStore, layer_idx: int) -> None:
        super().__init__()
        self.store = store
        self.layer_idx = layer_idx

    @property
    def is_initialized(self) -> bool:
        """Whether the store is built."""
        return self.store.cache is not None

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        """Nothing to do: the base class says False at birth, and the store knows."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store is built by the first append."""

    @torch.compiler.disable
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store (batch, num_kv_heads, tokens, head_dim) keys and values. Returns handles for all
        of the layer's.
        """
        past = self.store.append(self.layer_idx, key_states, value_states)
        handle = KVHandle(self.store, self.layer_idx, past, key_states, value_states)
        return handle.stand_in(key_states), handle.stand_in(value_states)

    @torch.compiler.disable
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys after `query_length` more tokens, position of the first key)."""
        return self.get_seq_length() + query_length, 0

    @torch.compiler.disable
    def get_seq_length(self) -> int:
        """Tokens of this layer."""
        return self.store.num_tokens(self.layer_idx)

    def get_max_length(self) -> int:
        """-1: no fixed size."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The older name of `get_max_length`."""
        return -1

    def offload(self) -> None:
        """Nothing to do: placement is decided when tokens are written."""

    def prefetch(self) -> None:
        """Nothing to do: see `offload`."""

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refuse: layers share row tables and placement, so only the whole cache can change."""
        self._whole_cache_only("crop")

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Refuse: see `crop`."""
        self._whole_cache_only("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refuse: see `crop`."""
        self._whole_cache_only("batch_repeat_interleave")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Refuse: see `crop`."""
        self._whole_cache_only("batch_select_indices")

    def reset(self) -> NoReturn:
        """Refuse: see `crop`."""
        self._whole_cache_only("reset")

    def _whole_cache_only(self, name: str) -> NoReturn:
        raise CacheStateError(
            f"{name} on one layer: the layers of a SparseKVCache share their row tables and "
            f"placement; call {name} on the cache"
        )


class SparseKVCache(OwnedCache):
    """Keys and values in the D-window and the two CPU regions, for transformers' `generate` and
    `forward`.

    Made by `Patched.new_cache()`; `generate` of a patched model makes its own. Serves the one model
    it was made for until that model is restored. `copy.deepcopy` gives an independent cache (a
    shared prefix, for instance).

    Args:
        model_config: the patched model's config; decides which layers slide.
        owner: the patch this cache belongs to.
        config: sizes and share of the regions.
    """

    def __init__(self, model_config: Any, *, owner: CacheOwner, config: CacheConfig) -> None:
        self.owner = owner
        self._model_config = model_config
        layers = self._template()
        self.store = RegionStore(owner, config, sum(not _slides(layer) for layer in layers))
        super().__init__(layers=self._with_regions(layers))

    def _template(self) -> list[Any]:
        """transformers' own layers for this model, empty."""
        config = self._model_config.get_text_config(decoder=True)
        return list(DynamicCache(config=config).layers)

    def _with_regions(self, template: list[Any]) -> list[Any]:
        """The template with its full-attention layers replaced by ours."""
        numbers = itertools.count()
        return [
            layer if _slides(layer) else RegionLayer(self.store, next(numbers))
            for layer in template
        ]

    def __repr__(self) -> str:
        if not self.owner.is_open:
            return f"{type(self).__name__}({len(self)} layers, of a restored model)"
        tokens = max((layer.get_seq_length() for layer in self._layers), default=0)
        layers = f"{len(self)} layers, {self.store.num_layers} in regions"
        return f"{type(self).__name__}({layers}, {tokens} tokens)"

    @property
    def foreign_layers(self) -> list[Any]:
        """The layers that are transformers' own (those that slide)."""
        return [layer for layer in self.layers if not isinstance(layer, RegionLayer)]

    @property
    def batch_size(self) -> int:
        """Sequences, or -1 before the first keys."""
        self.owner.check_open()
        return -1 if self.store.cache is None else self.store.cache.batch_size

    def reserve(self, num_tokens: int, prompt_tokens: int = 0) -> None:
        """See `OwnedCache.reserve`."""
        self.owner.check_open()
        self.store.reserve(num_tokens, prompt_tokens)

    def mark(self) -> int:
        """The number of tokens."""
        return self.get_seq_length()

    def roll_back(self, mark: int) -> None:
        """Cut every layer to `mark` tokens; layers that slide cannot go back, and stay."""
        if not self.foreign_layers:
            self.store.crop(mark)

    def stats(self) -> CacheStats | None:
        """Tokens and bytes per region; None before the first keys."""
        return None if self.store.cache is None else self.store.cache.stats()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the newest `-tokens_to_remove` tokens; all of them if there are fewer.

        0 removes none (layers that slide then trim what they recorded, as transformers does). Where
        transformers still takes a positive length to keep (5.17), so does this. After an
        interrupted forward, every layer is cut to what the longest would keep.

        Raises:
            LayoutError: a positive number on versions that no longer take one.
        """
        num_tokens = self._tokens_to_keep(tokens_to_remove)
        # Foreign layers first: they may refuse, and then nothing has changed.
        for layer in self.foreign_layers:
            if layer.get_seq_length():
                layer.crop(min(num_tokens - layer.get_seq_length(), 0))
        self.store.crop(num_tokens)

    def reset(self) -> None:
        """Forget every token. The regions return to the pool; the next keys may bring another
        batch.
        """
        is_recording = any(getattr(layer, "record_past", False) for layer in self.foreign_layers)
        self.store.discard()
        # New ones: what transformers' own `reset` leaves behind differs between its versions.
        self.layers = self._with_regions(self._template())
        if is_recording:
            self.activate_past_recording()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was; bytes placed on the CPU stay where they are."""
        for layer in self.foreign_layers:
            layer.reorder_cache(beam_idx)
        if self.store.cache is not None:
            self.store.cache.reorder(as_indices(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a boolean mask keeps the rows where it is True."""
        for layer in self.foreign_layers:
            layer.batch_select_indices(indices)
        if self.store.cache is not None:
            self.store.cache.batch_select_indices(as_indices(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, copies side by side."""
        for layer in self.foreign_layers:
            layer.batch_repeat_interleave(repeats)
        if self.store.cache is not None:
            self.store.cache.batch_repeat_interleave(repeats)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write every token's keys and values to one file.

        Raises:
            UnsupportedModelError: layers that slide hold tokens that are not in the regions.
            CacheStateError: nothing to save yet, or the model was restored.
        """
        self._check_all_in_regions("save")
        self.check_complete()
        if self.store.cache is None:
            raise CacheStateError("save of an empty cache: run the model with it first")
        self.store.cache.save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace what this cache holds by a saved cache of the same model.

        Raises:
            UnsupportedModelError: layers that slide are not in the regions.
            FormatError: truncated, foreign or newer file, or another geometry; the cache stays as
                it was.
        """
        self._check_all_in_regions("load")
        self.store.load(path)

    def _check_all_in_regions(self, name: str) -> None:
        if self.foreign_layers:
            raise UnsupportedModelError(
                f"{name}: {len(self.foreign_layers)} of {len(self)} layers slide and keep "
                f"transformers' own cache layer, which {name} does not cover; use "
                "copy.deepcopy(cache), or run the prompt again"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseKVCache:
        self.owner.check_open()
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        memo[id(self._model_config)] = self._model_config  # the model's: shared, not copied
        twin.__dict__.update(
            {name: copy.deepcopy(value, memo) for name, value in vars(self).items()}
        )
        return twin


def _slides(layer: Any) -> bool:
    return bool(getattr(layer, "is_sliding", False))
