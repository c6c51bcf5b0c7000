"""What one call of `generate` asks for, read before it starts: settings, and how long its cache may
become.

The same order of precedence as transformers: keyword arguments, then the given generation_config,
then the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from sparsekv.models import compat

_DEFAULT_NEW_TOKENS = 20
"""transformers' own limit when nobody gives one."""


class GenerateCall:
    """The arguments of one call of `generate(inputs, generation_config, ..., **kwargs)`."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._kwargs = kwargs
        self._inputs = args[0] if args else kwargs.get("inputs")
        given = args[1] if len(args) > 1 else kwargs.get("generation_config")
        self._configs = [
            config
            for config in (given, getattr(model, "generation_config", None))
            if config is not None
        ]

    def setting(self, name: str) -> Any:
        """The value that transformers will use for a generation setting; None if nobody set it."""
        for value in (
            self._kwargs.get(name),
            *(getattr(config, name, None) for config in self._configs),
        ):
            if value is not None:
                return value
        return None

    @property
    def cache(self) -> Any:
        """The cache the caller passed, or None."""
        return compat.cache_in(self._kwargs)

    @property
    def wants_default_cache(self) -> bool:
        """Whether transformers would make a cache of its default kind for this call."""
        if self.cache is not None or self.setting("use_cache") is False:
            return False
        # "hybrid" is an old default in published generation configs, which transformers itself
        # ignores.
        return self.setting("cache_implementation") in (None, "hybrid")

    @property
    def prompt_tokens(self) -> int:
        """Tokens a sequence has in the cache once the prompt is read."""
        # With a cache, callers may pass only the new tokens and a mask over all of them.
        return max(self._num_inputs, _num_tokens(self._kwargs.get("attention_mask"), 1))

    @property
    def _num_inputs(self) -> int:
        embeds = self._kwargs.get("inputs_embeds")
        ids = self._inputs if self._inputs is not None else self._kwargs.get("input_ids")
        return max(_num_tokens(ids, 1), _num_tokens(embeds, 1))

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens a sequence can have in the cache at the end: the last generated token never
        enters it.
        """
        num_inputs, num_prompt = self._num_inputs, self.prompt_tokens
        new_tokens = self.setting("max_new_tokens")
        max_length = self.setting("max_length")
        if new_tokens is None and max_length is not None:
            return max(num_prompt - num_inputs + max_length - 1, num_prompt)
        if new_tokens is None:
            new_tokens = _DEFAULT_NEW_TOKENS
        return num_prompt + max(new_tokens - 1, 0)


def _num_tokens(tensor: Any, dim: int) -> int:
    if isinstance(tensor, Tensor) and tensor.ndim > dim:
        return tensor.shape[dim]
    return 0
