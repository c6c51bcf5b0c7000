"""The regions behind one transformers cache, shared by its layers, and the owner that may close
them.

No reference cycles: when the cache object dies its regions return to the pool at once, not at the
next collection.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sparsekv.archive import read_header
from sparsekv.cache import InplaceKVCache
from sparsekv.engine.balance import Balance
from sparsekv.engine.config import CacheConfig
from sparsekv.engine.costs import cost_of, may_borrow, reads_in_place
from sparsekv.errors import CacheStateError, CapacityError
from sparsekv.format import KVGeometry, PartitionSpec
from sparsekv.models.registry import geometry_from_config
from sparsekv.regions import RegionPool

RESTORED = (
    "this cache belongs to a patch that was restored, and its regions are freed; patch the model "
    "again and take a cache from new_cache(), or let generate make one"
)


class Closable(Protocol):
    """Regions that an owner can end."""

    def close(self, reason: str) -> None:
        """Free them; any further use raises `reason`."""


class CacheOwner:
    """One patch, as its caches see it: the pool they lease from and the attention modules they may
    serve.
    """

    def __init__(self, model: nn.Module) -> None:
        self.pool = RegionPool()
        self.is_open = True
        self._model = weakref.ref(model)
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._stores: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._lock = threading.Lock()

    def owns(self, module: nn.Module) -> bool:
        """Whether `module` is an attention module of the patched model."""
        if module in self._modules:
            return True
        model = self._model()
        if model is None:
            return False
        # A miss is rare: the first call, or a module swapped after the patch.
        found = [m for m in model.modules() if hasattr(m, "layer_idx")]
        with self._lock:
            self._modules.update(found)
        return module in self._modules

    @property
    def model(self) -> Any:
        """The patched model.

        Raises:
            CacheStateError: it is gone.
        """
        model = self._model()
        if model is None:
            raise CacheStateError(
                "the model of this cache is gone; keep it alive, or load it again"
            )
        return model

    def check_open(self) -> None:
        """Raise CacheStateError after `restore()`."""
        if not self.is_open:
            raise CacheStateError(RESTORED)

    def register(self, store: Closable) -> None:
        """Remember a store, weakly, to close it with the patch."""
        with self._lock:
            self._stores.add(store)

    def close(self) -> None:
        """Free the regions of every cache; each refuses to answer from here on."""
        with self._lock:
            self.is_open = False
            stores = list(self._stores)
        for store in stores:
            store.close(RESTORED)
        self.pool.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheOwner:
        return self  # a copied cache serves the same model


class RegionStore:
    """An InplaceKVCache that is built when the first keys arrive, with their batch, heads, dtype
    and device.
    """

    def __init__(self, owner: CacheOwner, config: CacheConfig, num_layers: int) -> None:
        self.owner = owner
        self.config = config
        self.num_layers = num_layers
        self.cache: InplaceKVCache | None = None
        self._reserved = (0, 0)
        owner.register(self)

    def reserve(self, num_tokens: int, prompt_tokens: int = 0) -> None:
        """Make sure that sequences of `num_tokens` fit, and register what the first `prompt_tokens`
        of them need, now if the store is built, else when it is.

        Raises:
            CapacityError: over `max_tokens`, or over the machine's memory.
        """
        check_limit(self.config, num_tokens)
        self._reserved = (num_tokens, prompt_tokens)
        if self.cache is not None:
            self.cache.reserve(num_tokens, prompt_tokens)

    def append(self, layer_idx: int, key: Tensor, value: Tensor) -> int:
        """Add a step's keys and values to one layer. Returns how many tokens it held before.

        Args:
            layer_idx: among the layers that live in regions.
            key: (batch, num_kv_heads, tokens, head_dim); value: (batch, num_kv_heads, tokens,
                head_dim_v).
        """
        with torch.no_grad():
            if key.dtype != value.dtype:  # autocast leaves values narrower than rotated keys
                common = torch.promote_types(key.dtype, value.dtype)
                key, value = key.to(common), value.to(common)
            if self.cache is None:
                self._build(key, value)
            assert self.cache is not None
            past = self.cache.layer_num_tokens(layer_idx)
            self._choose_share(self.cache, key.shape[2])
            self.cache.append(layer_idx, key.detach(), value.detach())
        return past

    def num_tokens(self, layer_idx: int) -> int:
        """Tokens of a layer, 0 before the store is built."""
        return 0 if self.cache is None else self.cache.layer_num_tokens(layer_idx)

    def layer_lengths(self) -> list[int]:
        """Tokens of every layer; they differ only when a forward was interrupted."""
        return [self.num_tokens(layer_idx) for layer_idx in range(self.num_layers)]

    def crop(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of every layer."""
        if self.cache is not None:
            self.cache.crop(num_tokens)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the content by a saved cache's; see `InplaceKVCache.load`."""
        if self.cache is not None:
            self.cache.load(path)
            return
        model = self.owner.model
        geometry = geometry_from_config(model.config, model.dtype)
        spec = self.config.spec(geometry, read_header(Path(path))["batch_size"])
        cache = self._new_cache(spec, model.device)
        cache.load(path)
        self.cache = cache

    def close(self, reason: str) -> None:
        """Free the regions; a cache that somebody still holds raises `reason`."""
        if self.cache is not None:
            self.cache.close(reason)
        self.discard()

    def discard(self) -> None:
        """Give the regions back, and forget what was reserved; the next append builds new ones, for
        any batch.
        """
        self.cache, self._reserved = None, (0, 0)

    def _build(self, key: Tensor, value: Tensor) -> None:
        geometry = KVGeometry(
            num_layers=self.num_layers,
            num_kv_heads=key.shape[1],
            head_dim=key.shape[3],
            head_dim_v=value.shape[3],
            dtype=key.dtype,
        )
        cache = self._new_cache(self.config.spec(geometry, key.shape[0]), key.device)
        self._choose_share(cache, key.shape[2])
        if self._reserved[0]:
            cache.reserve(*self._reserved)
        self.cache = cache

    def _choose_share(self, cache: InplaceKVCache, num_new: int) -> None:
        """Where the prompt's segments go, and then those after them."""
        balance, prompt_tokens = cache.balance, self._reserved[1]
        if not isinstance(balance, Balance):
            return
        if not cache.num_placed_tokens:
            num_tokens = max(prompt_tokens, num_new, cache.spec.window_size)
            balance.begin(num_tokens // cache.spec.window_size * cache.spec.window_size)
        else:
            balance.go_on(cache.num_placed_tokens)

    def _new_cache(self, spec: PartitionSpec, device: torch.device) -> InplaceKVCache:
        config = self.config
        machine = self._machine(spec, device) if config.cpu_share == "auto" else None
        balance = None if machine is None else self._new_balance(spec.geometry, machine)
        router = config.router() if balance is None else balance.router
        step_share = config.step_share
        if balance is not None:
            step_share = balance.step_share(spec.window_size)
        cache = InplaceKVCache(spec, device, router, pool=self.owner.pool, step_share=step_share)
        if machine is not None:
            cache.balance = balance
            cache.reads_in_place = reads_in_place(spec.geometry, **machine)
        return cache

    def _new_balance(self, geometry: KVGeometry, machine: dict[str, Any]) -> Balance | None:
        """None: there is nothing to balance."""
        cost = cost_of(geometry, **machine)
        if cost is None:
            return None
        is_elastic = self.config.elastic and may_borrow(geometry, **machine)
        return Balance(cost, is_elastic=is_elastic)

    def _machine(self, spec: PartitionSpec, device: torch.device) -> dict[str, Any]:
        """What a calibration is for, beside the geometry."""
        text_config = self.owner.model.config.get_text_config(decoder=True)
        return {
            "num_heads": text_config.num_attention_heads,
            "batch_size": spec.batch_size,
            "device": device,
            "profile": self.config.profile,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionStore:
        twin = RegionStore(self.owner, self.config, self.num_layers)
        memo[id(self)] = twin
        twin.cache = copy.deepcopy(self.cache, memo)
        twin._reserved = self._reserved
        return twin


def check_limit(config: CacheConfig, num_tokens: int) -> None:
    """Raise CapacityError if sequences of `num_tokens` are longer than the user allows."""
    if config.max_tokens is not None and num_tokens > config.max_tokens:
        raise CapacityError(
            f"this call may reach {num_tokens} cached tokens, over max_tokens={config.max_tokens}; "
            "raise max_tokens in CacheConfig or new_cache, shorten the prompt, or lower "
            "max_new_tokens"
        )


def with_max_tokens(config: CacheConfig, max_tokens: int | None) -> CacheConfig:
    """`config` with another limit; None leaves it as it is."""
    return config if max_tokens is None else replace(config, max_tokens=max_tokens)
