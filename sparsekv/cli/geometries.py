"""From a model's name or configuration to what it stores, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sparsekv.cli.errors import CommandLineError
from sparsekv.cli.presets import preset_geometry, preset_names
from sparsekv.format import KVGeometry
from sparsekv.format.compressed import CompressedGeometry, EntryFormat

Geometry = KVGeometry | CompressedGeometry
"""The second for DeepSeek-V4."""


def find_geometry(model: str, dtype: torch.dtype | None, entry_format: EntryFormat) -> Geometry:
    """What a model stores.

    Args:
        model: a known name, a model folder or a `config.json`.
        dtype: None: the configuration's own, or bfloat16.
    Raises:
        CommandLineError: none of these, or a file that cannot be read, or a packed format for a
            model that has none.
        UnsupportedModelError: a model that sparsekv does not support.
    """
    if model.lower() in preset_names() or not Path(model).exists():
        geometry = preset_geometry(model, dtype or torch.bfloat16, entry_format)
        return _checked(geometry, model, entry_format)
    from sparsekv.cli.quiet import quiet_libraries

    quiet_libraries()
    from sparsekv.cli.loading import read_config

    config = read_config(Path(model))
    return config_geometry(model, config, dtype or config.dtype or torch.bfloat16, entry_format)


def config_geometry(
    name: str, config: Any, dtype: torch.dtype, entry_format: EntryFormat
) -> Geometry:
    """What a model with this configuration of transformers stores; errors as `find_geometry`."""
    from sparsekv.models.registry import geometry_from_config

    if config.model_type == "deepseek_v4":
        from sparsekv.models.deepseek_v4 import compressed_geometry

        return compressed_geometry(config, dtype, entry_format)
    return _checked(geometry_from_config(config, dtype), name, entry_format)


def _checked(geometry: Geometry, name: str, entry_format: EntryFormat) -> Geometry:
    if isinstance(geometry, KVGeometry) and entry_format != "native":
        raise CommandLineError(
            f"--entry-format={entry_format}: {name} keeps no compressed entries, only DeepSeek-V4 "
            "does; leave --entry-format and SPARSEKV_ENTRY_FORMAT out"
        )
    return geometry
