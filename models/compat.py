"""Where the supported versions of transformers differ. Nothing else in sparsekv knows a version.

5.24 renamed the argument and output field `past_key_values` to `cache`; 5.17 still crops to an
absolute length.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import transformers
from packaging.version import Version
from transformers.models.llama.modeling_llama import LlamaForCausalLM

CACHE_NAMES = ("cache", "past_key_values")

CACHE_KW = (
    "cache"
    if "cache" in inspect.signature(inspect.unwrap(LlamaForCausalLM.forward)).parameters
    else "past_key_values"
)
"""The keyword that carries the cache into `forward` and `generate`."""

CROP_TAKES_LENGTH = Version(transformers.__version__) < Version("5.18")
"""Whether a positive `crop` argument still means the length to keep."""


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments or output fields, under either name; None without one.

    Reads the mapping only: the attribute `past_key_values` of an output warns about its age.
    """
    for name in CACHE_NAMES:
        if arguments.get(name) is not None:
            return arguments[name]
    return None


def with_cache(arguments: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """`arguments` with `cache` under the one name that this version calls its own."""
    return {k: v for k, v in arguments.items() if k not in CACHE_NAMES} | {CACHE_KW: cache}
