"""A transformers Cache for DeepSeek-V4: one CompressedCache behind all layers."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from sparsekv.archive import read_header
from sparsekv.csa.cache import CompressedCache, Mark
from sparsekv.engine.config import CacheConfig
from sparsekv.engine.costs import cost_of
from sparsekv.errors import CacheStateError, LayoutError, UnsupportedModelError
from sparsekv.format.compressed import CompressedGeometry
from sparsekv.models.owned_cache import OwnedCache, as_indices
from sparsekv.models.store import CacheOwner, check_limit


class CompressedLayer(CacheLayerMixin):
    """One layer of a CompressedKVCache, as transformers asks about it. Reads and writes happen in
    the attention module's forward.
    """

    is_sliding = True
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, store: CompressedStore, layer_idx: int) -> None:
        super().__init__()
        self._store = store
        self._layer_idx = layer_idx

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store is built by the first step."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: only the patched model's attention knows what this layer stores."""
        raise CacheStateError(
            "this cache was made for a patched DeepSeek-V4, and an unpatched attention module "
            "wrote to it; use the model it was made for, or a DynamicCache"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, position of the first key) of a mask that nobody reads."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of this layer."""
        cache = self._store.cache
        return 0 if cache is None else cache.states[self._layer_idx].num_tokens

    def get_max_length(self) -> int:
        """-1: no fixed size."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The older name of `get_max_length`."""
        return -1


class CompressedStore:
    """A CompressedCache that is built when the first keys arrive."""

    def __init__(
        self, owner: CacheOwner, config: CacheConfig, geometry: CompressedGeometry
    ) -> None:
        self.owner = owner
        self.config = config
        self.geometry = geometry
        self.cache: CompressedCache | None = None
        self._reserved = (0, 0)
        owner.register(self)

    def reserve(self, num_tokens: int, prompt_tokens: int = 0) -> None:
        """Make sure that sequences of `num_tokens` fit; see `OwnedCache.reserve`."""
        check_limit(self.config, num_tokens)
        self._reserved = (num_tokens, prompt_tokens)
        if self.cache is not None:
            self.cache.reserve(num_tokens, prompt_tokens)

    def new(self, batch_size: int, device: torch.device) -> CompressedCache:
        """An empty cache as the config says."""
        spec = self.config.entry_spec(self.geometry, batch_size)
        router, pool = self.config.router(), self.owner.pool
        if self.config.profile is not None:
            cost = cost_of(
                spec.geometry,
                num_heads=self.owner.model.config.num_attention_heads,
                batch_size=batch_size,
                device=device,
                profile=self.config.profile,
            )
            assert cost is not None
            router.marginal_share = cost.marginal_share
        return CompressedCache(self.geometry, spec, device, router, pool=pool)

    def build(self, batch_size: int, device: torch.device) -> CompressedCache:
        """The store, made now if there is none."""
        if self.cache is None:
            cache = self.new(batch_size, device)
            if self._reserved[0]:
                cache.reserve(*self._reserved)
            self.cache = cache
        return self.cache

    def close(self, reason: str) -> None:
        """Free the regions; a cache that somebody still holds raises `reason`."""
        if self.cache is not None:
            self.cache.close(reason)
        self.discard()

    def discard(self) -> None:
        """Give the regions back, and forget what was reserved; any batch may come next."""
        self.cache, self._reserved = None, (0, 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedStore:
        twin = CompressedStore(self.owner, self.config, self.geometry)
        memo[id(self)] = twin
        twin.cache = copy.deepcopy(self.cache, memo)
        twin._reserved = self._reserved
        return twin


class CompressedKVCache(OwnedCache):
    """Everything a DeepSeek-V4 model remembers; CSA entries live in four regions.

    Made by `Patched.new_cache()`; `generate` of a patched model makes its own.

    Args:
        geometry: kinds and sizes of the layers.
        owner: the patch this cache belongs to.
        config: sizes and share of the regions.
        replay: runs the model's layers on (batch, tokens) ids with this cache, for `crop`.
    """

    def __init__(
        self,
        geometry: CompressedGeometry,
        *,
        owner: CacheOwner,
        config: CacheConfig,
        replay: Callable[[Tensor, CompressedKVCache], None],
    ) -> None:
        self.owner = owner
        self.store = CompressedStore(owner, config, geometry)
        self._replay = replay
        num_layers = len(geometry.layer_kinds)
        super().__init__(layers=[CompressedLayer(self.store, i) for i in range(num_layers)])

    def __repr__(self) -> str:
        if not self.owner.is_open:
            return f"{type(self).__name__}({len(self)} layers, of a restored model)"
        return f"{type(self).__name__}({len(self)} layers, {self.get_seq_length()} tokens)"

    @property
    def batch_size(self) -> int:
        """Sequences, or -1 before the first keys."""
        self.owner.check_open()
        return -1 if self.store.cache is None else self.store.cache.batch_size

    # Steps

    def begin_step(
        self, module: nn.Module, input_ids: Any, attention_mask: Any, position_ids: Any
    ) -> None:
        """Check and remember the tokens of a forward, before any layer runs.

        Args:
            module: one of the attention modules that are going to use this cache.
        Raises:
            UnsupportedModelError: padding, positions that do not follow on, or no token ids.
            CacheStateError: an interrupted forward came before, or another model's module.
            CapacityError: over `max_tokens`.
            LayoutError: another batch.
        """
        self.check_complete()
        self._check_owns(module)
        if not isinstance(input_ids, Tensor):
            raise UnsupportedModelError(
                "DeepSeek-V4 without input_ids: its hash-routed layers need them; pass input_ids"
            )
        past, (batch_size, num_tokens) = self.get_seq_length(), input_ids.shape
        check_limit(self.store.config, past + num_tokens)
        _check_mask(attention_mask)
        # Reading masks and positions waits for a GPU: worth it for a prompt, not for each token.
        if num_tokens > 1 or input_ids.device.type == "cpu":
            _check_padding(attention_mask)
            _check_positions(position_ids, past, num_tokens)
        cache = self.store.build(batch_size, input_ids.device)
        if batch_size != cache.batch_size:
            raise LayoutError(
                f"{batch_size} sequences: this cache holds {cache.batch_size}; make a new cache "
                "for another batch"
            )
        cache.record(input_ids)

    def store_for(self, module: nn.Module, kv: Tensor) -> CompressedCache:
        """The store, for an attention module of the model it belongs to.

        Raises:
            CacheStateError: another model's module, or a forward that did not begin with
                `begin_step`.
            LayoutError: keys of another dtype or device.
        """
        cache = self.store.cache
        self._check_owns(module)
        if cache is None:
            raise CacheStateError(
                "an attention module of this model ran by itself; run the model, which checks and "
                "remembers the tokens first"
            )
        if kv.dtype != cache.geometry.dtype or kv.device != cache.device:
            raise LayoutError(
                f"keys of {kv.dtype} on {kv.device}: this cache holds {cache.geometry.dtype} on "
                f"{cache.device}; patch the model after it is cast and moved, and leave autocast"
            )
        return cache

    def _check_owns(self, module: nn.Module) -> None:
        if not self.owner.owns(module):
            raise CacheStateError(
                "this cache was made for another model (a copy of a model is another model); take "
                "one from the new_cache() of this model's patch"
            )

    # Rows and length

    def reserve(self, num_tokens: int, prompt_tokens: int = 0) -> None:
        """See `OwnedCache.reserve`."""
        self.owner.check_open()
        self.store.reserve(num_tokens, prompt_tokens)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the newest `-tokens_to_remove` tokens; all of them if there are fewer.

        Compressed entries stay where they are. What depends on the last tokens only (raw keys, open
        windows) is computed again by the model, from the ids of at most some thousand tokens.

        Raises:
            LayoutError: a positive number on versions that no longer take one.
        """
        num_tokens = self._tokens_to_keep(tokens_to_remove)
        cache = self.store.cache
        if cache is None or (cache.is_complete and num_tokens == cache.num_tokens):
            return
        with cache.rewound(num_tokens) as replay:
            if replay.shape[1]:
                self._replay(replay.to(cache.device), self)

    def mark(self) -> Mark | None:
        """Where the sequences are; None before the first keys."""
        return None if self.store.cache is None else self.store.cache.mark()

    def roll_back(self, mark: Mark | None) -> None:
        """Drop what came after `mark`; sequences that were selected anew since (beams) stay."""
        if mark is None:
            self.store.discard()
        elif self.store.cache is not None:
            self.store.cache.return_to(mark)

    def reset(self) -> None:
        """Forget every token. The regions return to the pool; the next keys may bring another
        batch.
        """
        self.owner.check_open()
        self.store.discard()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was; placed entries stay where they are."""
        self._select_rows(as_indices(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a boolean mask keeps the rows where it is True."""
        self._select_rows(as_indices(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, copies side by side."""
        if self.batch_size > 0:
            self._select_rows(torch.arange(self.batch_size).repeat_interleave(repeats))

    def _select_rows(self, indices: Tensor) -> None:
        self.owner.check_open()
        if self.store.cache is not None:
            self.store.cache.select_rows(indices)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything this cache remembers to one file.

        Raises:
            CacheStateError: nothing to save yet, or the model was restored.
        """
        self.check_complete()
        if self.store.cache is None:
            raise CacheStateError("save of an empty cache: run the model with it first")
        self.store.cache.save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace what this cache holds by a saved cache of the same model.

        Raises:
            FormatError: truncated, foreign or newer file, or another geometry; the cache stays as
                it was.
        """
        self.owner.check_open()
        cache = self.store.cache
        if cache is not None:
            cache.load(path)
            return
        new = self.store.new(read_header(Path(path))["batch_size"], self.owner.model.device)
        new.load(path)
        self.store.cache = new

    def stats(self) -> Any:
        """Entries and bytes per layer kind and region; None before the first keys."""
        return None if self.store.cache is None else self.store.cache.stats()

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedKVCache:
        self.owner.check_open()
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        memo[id(self._replay)] = self._replay
        twin.__dict__.update(
            {name: copy.deepcopy(value, memo) for name, value in vars(self).items()}
        )
        return twin


def _check_mask(attention_mask: Any) -> None:
    if attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2):
        return
    raise UnsupportedModelError(
        "an attention_mask that is not (batch, tokens): what a token sees follows from each "
        "layer's kind here; leave attention_mask out"
    )


def _check_padding(attention_mask: Any) -> None:
    if attention_mask is not None and not bool(attention_mask.bool().all()):
        raise UnsupportedModelError(
            "a padded batch for DeepSeek-V4: rows of different lengths complete their compressed "
            "entries at different steps; pass prompts of equal length, without padding, or one at "
            "a time"
        )


def _check_positions(position_ids: Any, past: int, num_tokens: int) -> None:
    if not isinstance(position_ids, Tensor):
        return
    expected = torch.arange(past, past + num_tokens, device=position_ids.device)
    if not bool((position_ids == expected).all()):
        raise UnsupportedModelError(
            f"position_ids that do not run from {past} to {past + num_tokens - 1}: compressed "
            "entries follow the order of tokens; leave position_ids out"
        )
