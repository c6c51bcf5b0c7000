"""DeepSeek-V4 on regions: the attention modules' forward, over a cache whose CSA entries leave the
accelerator.

Only attention changes. Experts, hash routing, hyper-connections and projections are the model's
own, and a cache that is not ours goes through the model's own forward.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from sparsekv.csa.compressor import CompressorWeights
from sparsekv.csa.step import CompressorInput, IndexerInput, LayerInput, attend_compressed
from sparsekv.engine.config import CacheConfig
from sparsekv.errors import UnsupportedModelError
from sparsekv.format.compressed import CompressedGeometry, EntryFormat, LayerKind
from sparsekv.models import compat
from sparsekv.models.compressed_cache import CompressedKVCache
from sparsekv.models.journal import AttributeJournal
from sparsekv.models.registry import output_attentions_error
from sparsekv.models.store import CacheOwner

_CSA, _HCA = "compressed_sparse_attention", "heavily_compressed_attention"
_REPLAYED_AT_ONCE = 512
_KINDS: dict[str, LayerKind] = {"sliding_attention": "sliding", _CSA: "csa", _HCA: "hca"}


class Adapter:
    """How `patch` treats DeepSeek-V4; see `registry.Adapter`."""

    def check(self, model: Any, config: CacheConfig) -> None:
        """Raise before anything is touched if the model and the settings do not go together."""
        if config.elastic:
            raise UnsupportedModelError(
                f"elastic=True for {type(model).__name__}: its selected entries are attended where "
                "they are placed; leave it False"
            )
        config.entry_spec(compressed_geometry(model.config, model.dtype, config.entry_format), 1)

    def install(self, model: Any, journal: AttributeJournal) -> None:
        """Replace the forward of the inner model and of every attention module."""
        for module, forward in _changed_forwards(model):
            # accelerate's hooks call `_old_forward`; replacing `forward` would drop them.
            is_hooked = hasattr(module, "_hf_hook") and hasattr(module, "_old_forward")
            journal.set(module, "_old_forward" if is_hooked else "forward", forward)

    def check_installed(self, model: Any) -> None:
        """Nothing can undo the change but `restore`."""

    def new_cache(self, model: Any, owner: CacheOwner, config: CacheConfig) -> CompressedKVCache:
        """An empty cache."""
        geometry = compressed_geometry(model.config, model.dtype, config.entry_format)
        return CompressedKVCache(geometry, owner=owner, config=config, replay=_Replay(owner))


class _Replay:
    """Runs the layers of the patched model over tokens that its cache has read before."""

    def __init__(self, owner: CacheOwner) -> None:
        self._owner = owner

    def __call__(self, token_ids: Tensor, cache: CompressedKVCache) -> None:
        inner = self._owner.model.model
        with torch.no_grad():
            for chunk in token_ids.split(_REPLAYED_AT_ONCE, dim=1):
                inner(input_ids=chunk, use_cache=True, **{compat.CACHE_KW: cache})


def compressed_geometry(
    config: Any, dtype: torch.dtype, entry_format: EntryFormat = "native"
) -> CompressedGeometry:
    """What the layers of a DeepSeek-V4 config store.

    Raises:
        UnsupportedModelError: a layer type that is not known, or no CSA layer, whose entries are
            what regions hold.
    """
    if set(config.layer_types) - set(_KINDS) or _CSA not in config.layer_types:
        raise UnsupportedModelError(
            f"layer_types={config.layer_types}: sparsekv knows {', '.join(_KINDS)}, and needs at "
            f"least one {_CSA} layer; use the model as it is"
        )
    return CompressedGeometry(
        layer_kinds=tuple(_KINDS[kind] for kind in config.layer_types),
        head_dim=config.head_dim,
        index_head_dim=config.index_head_dim,
        sliding_window=config.sliding_window,
        csa_ratio=config.compress_rates[_CSA],
        hca_ratio=config.compress_rates[_HCA],
        dtype=dtype,
        entry_format=entry_format,
    )


def _changed_forwards(model: Any) -> list[tuple[nn.Module, Any]]:
    inner = model.model
    attentions = [layer.self_attn for layer in inner.layers]
    changed = [(inner, types.MethodType(model_forward, inner))]
    return changed + [(a, types.MethodType(attention_forward, a)) for a in attentions]


def model_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward of a `DeepseekV4Model`: with a cache of ours, check what the regions cannot hold,
    remember the tokens, and build no (tokens x tokens) mask.
    """
    own_forward: Any = type(self).forward
    if args:
        names = list(inspect.signature(own_forward).parameters)[1:]
        kwargs |= dict(zip(names, args, strict=False))
    cache = compat.cache_in(kwargs)
    if isinstance(cache, CompressedKVCache):
        if kwargs.get("output_attentions"):
            raise output_attentions_error("output_attentions=True")
        module: Any = self
        given = [kwargs.get(name) for name in ("input_ids", "attention_mask", "position_ids")]
        cache.begin_step(module.layers[0].self_attn, *given)
        kwargs["attention_mask"] = {"sliding_attention": None}
    return own_forward(self, **kwargs)


def attention_forward(
    self: nn.Module,
    hidden_states: Tensor,
    position_embeddings: Any,
    position_ids: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Forward of a `DeepseekV4Attention` module: (batch, tokens, hidden) -> the same; attention
    weights are never formed.
    """
    cache = args[0] if args else compat.cache_in(kwargs)
    if not isinstance(cache, CompressedKVCache):
        own_forward: Any = type(self).forward
        return own_forward(
            self, hidden_states, position_embeddings, position_ids, attention_mask, *args, **kwargs
        )
    module: Any = self
    with torch.no_grad():
        new = _layer_input(module, hidden_states, *position_embeddings[module.rope_layer_type])
        out = attend_compressed(cache.store_for(module, new.kv), module.layer_idx, new)
    out = out.to(hidden_states.dtype)
    grouped = rearrange(out, "b (g h) t d -> b t g (h d)", g=module.config.o_groups)
    return module.o_b_proj(module.o_a_proj(grouped).flatten(2)), None


def _layer_input(module: Any, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> LayerInput:
    residual = module.q_a_norm(module.q_a_proj(hidden_states))
    query = _split_heads(module.q_b_proj(residual), module.head_dim)
    compressor = module.compressor
    indexer = getattr(compressor, "indexer", None)
    return LayerInput(
        query=module.q_b_norm(query),
        kv=module.kv_norm(module.kv_proj(hidden_states)),
        cos=cos,
        sin=sin,
        sinks=module.sinks,
        frequencies=None if compressor is None else _Frequencies(compressor, hidden_states),
        compressor=None if compressor is None else _compressor_input(compressor, hidden_states),
        indexer=None if indexer is None else _indexer_input(indexer, hidden_states, residual),
    )


def _compressor_input(module: Any, hidden_states: Tensor) -> CompressorInput:
    norm = module.kv_norm
    weights = CompressorWeights(
        position_bias=module.position_bias, norm_weight=norm.weight, eps=norm.variance_epsilon
    )
    kv, gate = module.kv_proj(hidden_states), module.gate_proj(hidden_states)
    return CompressorInput(kv=kv, gate=gate, weights=weights)


def _indexer_input(module: Any, hidden_states: Tensor, residual: Tensor) -> IndexerInput:
    scorer = module.scorer
    return IndexerInput(
        compressor=_compressor_input(module, hidden_states),
        query=_split_heads(module.q_b_proj(residual), module.head_dim),
        head_weights=_widened(scorer.weights_proj(hidden_states)) * scorer.weights_scaling,
        topk=module.index_topk,
    )


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _split_heads(x: Tensor, head_dim: int) -> Tensor:
    """(batch, tokens, heads * head_dim) -> (batch, heads, tokens, head_dim)"""
    return rearrange(x, "b t (h d) -> b h t d", d=head_dim)


class _Frequencies:
    """Cosines and sines of compressed entries, from a compressor module's own table."""

    def __init__(self, module: Any, like: Tensor) -> None:
        self._module, self._like = module, like

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        module = self._module
        cos, sin = module.rotary_emb(
            self._like, position_ids=positions[None], layer_type=module.rope_layer_type
        )
        return cos, sin
