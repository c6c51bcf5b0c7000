"""From a model's name or configuration to its size, without its weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from sparsekv.engine.model_size import Geometry, ModelSize, WeightCounts
from sparsekv.errors import UnsupportedModelError
from sparsekv.format import KVGeometry
from sparsekv.format.compressed import EntryFormat
from sparsekv.models.known import known_names, known_size
from sparsekv.models.registry import geometry_from_config


def find_size(
    model: Any, dtype: torch.dtype | None = None, entry_format: EntryFormat = "native"
) -> ModelSize:
    """The size of a model.

    Args:
        model: a known name, a model folder, a `config.json`, or a configuration of transformers.
        dtype: of weights and cache; None: the configuration's own, or bfloat16.
        entry_format: of DeepSeek-V4's entries.
    Raises:
        UnsupportedModelError: none of these, a file that cannot be read, a model that sparsekv does
            not support, or a packed format for one that has none.
        LayoutError: a packed format for sizes that it does not have.
    """
    if isinstance(model, (str, os.PathLike)):
        name = os.fspath(model)
        if name.lower() in known_names() or not Path(name).exists():
            size = known_size(name, dtype or torch.bfloat16, entry_format)
            _check_format(size.geometry, name, entry_format)
            return size
        return config_size(name, read_config(Path(name)), dtype, entry_format)
    return config_size(getattr(model, "name_or_path", "") or "model", model, dtype, entry_format)


def config_size(
    name: str, config: Any, dtype: torch.dtype | None, entry_format: EntryFormat
) -> ModelSize:
    """The size of a model with this configuration of transformers; errors as `find_size`."""
    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    geometry = config_geometry(name, config, dtype, entry_format)
    text = config.get_text_config(decoder=True)
    weights = count_weights(config)
    keys = ("num_local_experts", "n_routed_experts", "num_experts")
    counts = [getattr(text, key, None) or 0 for key in keys]
    return ModelSize(
        name=name,
        geometry=geometry,
        num_heads=text.num_attention_heads,
        weights=weights,
        num_experts=max(counts) if weights.experts else 0,
        experts_per_token=text.num_experts_per_tok if weights.experts else 0,
        selected_entries=None if isinstance(geometry, KVGeometry) else text.index_topk,
    )


def config_geometry(
    name: str, config: Any, dtype: torch.dtype, entry_format: EntryFormat
) -> Geometry:
    """What a model with this configuration of transformers stores; errors as `find_size`."""
    if getattr(config, "model_type", None) == "deepseek_v4":
        from sparsekv.models.deepseek_v4 import compressed_geometry

        return compressed_geometry(config, dtype, entry_format)
    geometry = geometry_from_config(config, dtype)
    _check_format(geometry, name, entry_format)
    return geometry


def count_weights(config: Any) -> WeightCounts:
    """Parameters of the model that transformers makes of a configuration; nothing is allocated."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counts = dict.fromkeys(WeightCounts.__dataclass_fields__, 0)
    for name, parameter in model.named_parameters():
        counts[_reader_of(name)] += parameter.numel()
    return WeightCounts(**counts)


def read_config(path: Path) -> Any:
    """The configuration of a model folder, or of one `config.json`.

    Raises:
        UnsupportedModelError: there is none, or it cannot be read.
    """
    from transformers import AutoConfig

    if not path.exists():
        raise UnsupportedModelError(
            f"{path}: no such file or folder; give a folder with config.json, weights and "
            "tokenizer, as `hf download` or save_pretrained writes it"
        )
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UnsupportedModelError(
            f"{path}: the folder holds no config.json; give the folder that save_pretrained wrote"
        )
    try:
        return AutoConfig.from_pretrained(file, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedModelError(
            f"{file}: cannot be read as a model ({reason}); check that the download is complete"
        ) from error


def _reader_of(parameter: str) -> str:
    """The field of `WeightCounts` that a parameter belongs to, by its name."""
    for part, field in (
        (".experts.", "experts"),
        (".embed_tokens.", "embedding"),
        (".self_attn.", "attention"),
        (".mlp.", "feed_forward"),
    ):
        if part in parameter:
            return field
    return "head" if parameter.startswith("lm_head.") else "other"


def _check_format(geometry: Geometry, name: str, entry_format: EntryFormat) -> None:
    if isinstance(geometry, KVGeometry) and entry_format != "native":
        raise UnsupportedModelError(
            f"entry_format={entry_format!r}: {name} keeps no compressed entries, only DeepSeek-V4 "
            "does; use 'native'"
        )
