"""Grouped-query attention models: Qwen3, Qwen3-MoE, Mixtral, Llama, Mistral.

Their attention calls a function by name, so the name is all that changes; see `attention.py`.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from sparsekv.engine.config import CacheConfig
from sparsekv.errors import CacheStateError, UnsupportedModelError
from sparsekv.models import attention
from sparsekv.models.cache import SparseKVCache
from sparsekv.models.journal import AttributeJournal
from sparsekv.models.registry import geometry_from_config, sliding_layers
from sparsekv.models.store import CacheOwner

logger = logging.getLogger(__name__)


class Adapter:
    """How `patch` treats these models; see `registry.Adapter`."""

    def check(self, model: Any, config: CacheConfig) -> None:
        """Raise before anything is touched if the model and the settings do not go together."""
        if config.entry_format != "native":
            raise UnsupportedModelError(
                f"entry_format={config.entry_format!r} for {type(model).__name__}: only "
                "DeepSeek-V4 has compressed entries to pack; leave it 'native'"
            )
        text_config = model.config.get_text_config(decoder=True)
        if all(sliding_layers(text_config)):
            logger.warning(
                "every layer of this %s slides (sliding_window=%s): all keep transformers' own "
                "small cache, and no region is used",
                type(model).__name__,
                text_config.sliding_window,
            )
            return
        dtype = model.dtype if model.dtype.is_floating_point else torch.float32
        config.spec(geometry_from_config(text_config, dtype), 1)

    def install(self, model: Any, journal: AttributeJournal) -> None:
        """Select our attention function; the journal notes what that changes."""
        attention.register()
        with journal.watch(_objects_of(model)):
            model.set_attn_implementation(attention.NAME)

    def check_installed(self, model: Any) -> None:
        """Raise CacheStateError if somebody selected another attention function since."""
        chosen = model.config._attn_implementation
        if chosen != attention.NAME:
            raise CacheStateError(
                f"the attention implementation was set to {chosen!r} after sparsekv.patch; call "
                "restore() first, or leave it"
            )

    def new_cache(self, model: Any, owner: CacheOwner, config: CacheConfig) -> SparseKVCache:
        """An empty cache."""
        return SparseKVCache(model.config, owner=owner, config=config)


def _objects_of(model: Any) -> list[Any]:
    """Every object whose attributes setting an attention implementation may change, each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        found[id(module)] = module
        _add_configs(getattr(module, "config", None), found)
    return list(found.values())


def _add_configs(config: Any, found: dict[int, Any]) -> None:
    if config is None or id(config) in found or not hasattr(config, "sub_configs"):
        return
    found[id(config)] = config
    for name in config.sub_configs:
        _add_configs(getattr(config, name, None), found)
