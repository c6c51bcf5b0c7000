"""What every cache of a patched model has in common: an owner that may end it, and one way to name
lengths across versions of transformers.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from sparsekv.errors import CacheStateError, LayoutError, UnsupportedModelError
from sparsekv.models import compat
from sparsekv.models.store import CacheOwner


class LegacyAttributeError(UnsupportedModelError, AttributeError):
    """A name of older transformers caches; also an AttributeError, so that `hasattr` stays
    truthful.
    """


class OwnedCache(Cache):
    """A transformers Cache that serves one patched model until that model is restored.

    Subclasses set `owner` before they call this class's `__init__`.
    """

    owner: CacheOwner

    @property
    def layers(self) -> list[Any]:
        """The layers in order. Everything a Cache does starts here, so this is where a dead cache
        refuses.

        Raises:
            CacheStateError: the model was restored.
        """
        self.owner.check_open()
        return self._layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        self._layers = layers

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def is_initialized(self) -> bool:
        """Whether any keys have arrived."""
        return any(layer.get_seq_length() for layer in self.layers)

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Sequences, or -1 before the first keys."""

    @abstractmethod
    def reserve(self, num_tokens: int, prompt_tokens: int = 0) -> None:
        """Check that sequences of `num_tokens` fit: over `max_tokens` at once, over memory once the
        batch is known. Then register what the first `prompt_tokens` of them need.

        Raises:
            CapacityError: they do not fit.
        """

    @abstractmethod
    def mark(self) -> Any:
        """Where the cache is now, for `roll_back`."""

    @abstractmethod
    def roll_back(self, mark: Any) -> None:
        """Go back to `mark` after an error, where that is possible."""

    @abstractmethod
    def stats(self) -> Any:
        """Tokens and bytes per region; None before the first keys."""

    def check_complete(self) -> None:
        """Raise CacheStateError if a forward was interrupted half way through the layers."""
        lengths = [layer.get_seq_length() for layer in self.layers]
        if len(set(lengths)) > 1:
            raise interrupted_error(min(lengths), max(lengths))

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """The older name of `get_max_length`: -1, no fixed size."""
        return self.get_max_length(layer_idx)

    def _tokens_to_keep(self, tokens_to_remove: int | Tensor) -> int:
        """What the argument of `crop` means on this version of transformers.

        Raises:
            LayoutError: a positive number on versions that no longer take one.
        """
        length = max((layer.get_seq_length() for layer in self.layers), default=0)
        tokens_to_remove = int(tokens_to_remove)  # prompt lookup counts in a tensor
        if tokens_to_remove <= 0:
            return max(length + tokens_to_remove, 0)
        if compat.CROP_TAKES_LENGTH:
            return min(tokens_to_remove, length)
        raise LayoutError(
            f"crop({tokens_to_remove}): takes the negative number of tokens to remove; to keep "
            f"{tokens_to_remove} tokens use crop({tokens_to_remove} - cache.get_seq_length())"
        )

    def _legacy(self, name: str) -> NoReturn:
        raise LegacyAttributeError(
            f"{name}: this name left transformers with version 5, and keys and values of a "
            f"{type(self).__name__} are not tensors of one device; use get_seq_length(), crop(), "
            "copy.deepcopy(cache) or save(path)"
        )

    @property
    def key_cache(self) -> NoReturn:
        """Refuse: a name of transformers 4."""
        self._legacy("key_cache")

    @property
    def value_cache(self) -> NoReturn:
        """Refuse: a name of transformers 4."""
        self._legacy("value_cache")

    @property
    def to_legacy_cache(self) -> NoReturn:
        """Refuse: a name of transformers 4."""
        self._legacy("to_legacy_cache")


def interrupted_error(shortest: int, longest: int) -> CacheStateError:
    """Layers of one cache hold different numbers of tokens."""
    return CacheStateError(
        f"this cache was interrupted in the middle of a forward: some layers hold {shortest} "
        f"tokens, others {longest}; call crop(-{longest - shortest}) to go back to the last "
        "complete step, or reset()"
    )


def as_indices(indices: Any) -> Tensor:
    """Row numbers; a boolean mask means the rows where it is True."""
    indices = torch.as_tensor(indices)
    return indices.nonzero().flatten() if indices.dtype == torch.bool else indices
