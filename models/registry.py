"""Which models sparsekv supports, and what it needs to know about each.

An allow-list: a model whose attention differs in a way this package does not know (sinks, soft
caps, compressed entries) would run and be silently wrong, so anything not listed is refused before
it is touched.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from sparsekv.errors import UnsupportedModelError
from sparsekv.format import KVGeometry

if TYPE_CHECKING:
    from sparsekv.engine.config import CacheConfig
    from sparsekv.models.journal import AttributeJournal
    from sparsekv.models.owned_cache import OwnedCache
    from sparsekv.models.store import CacheOwner


class Adapter(Protocol):
    """How `patch` treats a family of models."""

    def check(self, model: Any, config: CacheConfig) -> None:
        """Raise before anything is touched if the model and the settings do not go together."""

    def install(self, model: Any, journal: AttributeJournal) -> None:
        """Change the model's attention; every change goes through the journal."""

    def check_installed(self, model: Any) -> None:
        """Raise CacheStateError if the change was undone behind the patch's back."""

    def new_cache(self, model: Any, owner: CacheOwner, config: CacheConfig) -> OwnedCache:
        """An empty cache for the model."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A supported model: its names, and the module whose `Adapter` knows its attention."""

    model_class: str
    """The class that has `generate`."""
    attention_class: str
    """The modules that call the attention function."""
    model_type: str
    """`config.model_type`, for planning from a config alone."""
    adapter_module: str
    """Imported when a model of the family is patched."""

    def adapter(self) -> Adapter:
        """The family's adapter."""
        adapter: Adapter = importlib.import_module(self.adapter_module).Adapter()
        return adapter


FAMILIES: tuple[ModelFamily, ...] = tuple(
    ModelFamily(
        model_class=f"{family}ForCausalLM",
        attention_class=f"{family}Attention",
        model_type=kind,
        adapter_module=f"sparsekv.models.{module}",
    )
    for family, kind, module in (
        ("Qwen3", "qwen3", "gqa"),
        ("Qwen3Moe", "qwen3_moe", "gqa"),
        ("Mixtral", "mixtral", "gqa"),
        ("Llama", "llama", "gqa"),
        ("Mistral", "mistral", "gqa"),
        ("DeepseekV4", "deepseek_v4", "deepseek_v4"),
    )
)

_GQA = [family for family in FAMILIES if family.adapter_module.endswith(".gqa")]
_ATTENTION_CLASSES = frozenset(family.attention_class for family in _GQA)
_SUPPORTED = ", ".join(family.model_class for family in FAMILIES)


def unwrap(model: Any) -> Any:
    """The transformers model inside the wrappers people put around it (`torch.compile`, PEFT)."""
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return getattr(model, "_orig_mod", model)


def find_adapter(model: object) -> Adapter:
    """The adapter of an unwrapped model; a subclass of a supported class counts as that class.

    Raises:
        UnsupportedModelError: not on the list, bidirectional, spread over several accelerators, or
            configured to return attention weights.
    """
    names = _transformers_classes(type(model))
    family = next((f for f in FAMILIES if f.model_class in names), None)
    if family is None or not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"{type(model).__module__}.{type(model).__qualname__} is not supported: sparsekv would "
            f"not compute its attention correctly. Supported are transformers' own {_SUPPORTED} "
            "(also inside PEFT or torch.compile); use the model without sparsekv.patch, or add an "
            "adapter to sparsekv/models/registry.py"
        )
    _check_devices(model)
    config: Any = model.config
    if not getattr(config, "is_causal", True):
        raise UnsupportedModelError(
            f"{family.model_class} with config.is_causal=False: only causal attention is "
            "supported; leave this model unpatched"
        )
    if getattr(config, "output_attentions", False) or getattr(
        getattr(model, "generation_config", None), "output_attentions", False
    ):
        raise output_attentions_error("config.output_attentions=True")
    return family.adapter()


def is_supported_attention(module: nn.Module) -> bool:
    """Whether an attention module belongs to a supported model."""
    return type(module).__name__ in _ATTENTION_CLASSES or not _ATTENTION_CLASSES.isdisjoint(
        _transformers_classes(type(module))
    )


def geometry_from_config(config: Any, dtype: torch.dtype = torch.bfloat16) -> KVGeometry:
    """What the full-attention layers of a model with this config store per token.

    Args:
        config: a transformers config; no model is needed.
        dtype: element type of keys and values.
    Raises:
        UnsupportedModelError: a model type that is not supported, or one whose layers all slide.
    """
    config = config.get_text_config(decoder=True)
    kinds = [family.model_type for family in _GQA]
    if config.model_type not in kinds:
        raise UnsupportedModelError(
            f"model_type={config.model_type!r} is not supported; supported are {', '.join(kinds)}"
        )
    num_layers = sum(not sliding for sliding in sliding_layers(config))
    if num_layers == 0:
        raise UnsupportedModelError(
            f"every layer of this {config.model_type} slides "
            f"(sliding_window={config.sliding_window}): its cache is small whatever the context, "
            "and nothing is left for the regions; use the model as it is"
        )
    num_heads = config.num_attention_heads
    return KVGeometry(
        num_layers=num_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        dtype=dtype,
    )


def sliding_layers(config: Any) -> list[bool]:
    """For each layer whether transformers gives it a sliding cache layer."""
    from transformers import DynamicCache

    return [
        bool(getattr(layer, "is_sliding", False)) for layer in DynamicCache(config=config).layers
    ]


def output_attentions_error(given: str) -> UnsupportedModelError:
    """The refusal of attention weights, which never exist here: each region yields a sum, not its
    terms.
    """
    return UnsupportedModelError(
        f"{given}: attention weights are never formed by sparsekv; call restore() and load or set "
        "the model with "
        'attn_implementation="eager" to get them'
    )


def _transformers_classes(kind: type) -> set[str]:
    # By name, so that finding out does not import five model files; remote code may reuse a name,
    # hence the module.
    return {c.__name__ for c in kind.__mro__ if c.__module__.startswith("transformers.models.")}


def _check_devices(model: nn.Module) -> None:
    mapped = _accelerators(getattr(model, "hf_device_map", {}).values())
    used = mapped | _accelerators(parameter.device for parameter in model.parameters())
    if len(used) > 1:
        raise UnsupportedModelError(
            f"this model is spread over {len(used)} accelerators ({', '.join(sorted(used))}): one "
            "is supported; load "
            'it with device_map={"": 0}, or with the experts on "cpu"'
        )


def _accelerators(devices: Iterable[Any]) -> set[str]:
    names = {f"cuda:{device}" if isinstance(device, int) else str(device) for device in devices}
    names = {"cuda:0" if name == "cuda" else name for name in names}
    return {name for name in names if name.split(":")[0] not in ("cpu", "disk", "meta")}
