"""Attention in GPU memory as short as a user of torch alone can have it, in several ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.decode_case import Case

_CHOICES: dict[str, tuple[SDPBackend | None, ...]] = {
    # torch prefers cuDNN from compute capability 9.0 on, which makes a plan for each new number of
    # keys; the others take any number.
    "cuda": (None, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
    "cpu": (None, SDPBackend.FLASH_ATTENTION),
}
_WORDS: dict[SDPBackend | None, str] = {
    None: "",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaCall:
    """One way to call torch's attention for one query token of each sequence.

    Attributes:
        is_folded: give the query heads of a kv head as if they were query tokens: no mask, so the
            result is the same. Otherwise `enable_gqa` says that they share keys.
        backend: the only one that may compute; None: torch chooses.
    """

    is_folded: bool
    backend: SDPBackend | None = None

    @property
    def name(self) -> str:
        """What rows call it."""
        words = ("torch sdpa", "folded" if self.is_folded else "", _WORDS[self.backend])
        return ", ".join(word for word in words if word)

    def only_backend(self) -> AbstractContextManager[object]:
        """Within, the backend is chosen."""
        return nullcontext() if self.backend is None else sdpa_kernel(self.backend)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention to all keys, as torch gives it: (batch, num_heads, 1, head_dim_v), or (batch,
        num_kv_heads, group_size, head_dim_v) if folded, in whatever order they lie in memory.

        Args:
            query: (batch, num_heads, 1, head_dim), contiguous.
            key: (batch, num_kv_heads, tokens, head_dim).
            value: (batch, num_kv_heads, tokens, head_dim_v).
            scale: factor of the scores.
        """
        if not self.is_folded:
            return scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
        batch, num_kv_heads = key.shape[:2]
        folded = query.view(batch, num_kv_heads, -1, query.shape[3])
        return scaled_dot_product_attention(folded, key, value, scale=scale)


def sdpa_calls(device: torch.device) -> Iterator[SdpaCall]:
    """Those that run on such a device.

    Not all versions of the efficient backend know `enable_gqa`, so there it is folded only.
    """
    for backend in _CHOICES[device.type]:
        if backend is not SDPBackend.EFFICIENT_ATTENTION:
            yield SdpaCall(is_folded=False, backend=backend)
        yield SdpaCall(is_folded=True, backend=backend)


class PlainDecode:
    """A token is written to its place in memory that was taken beforehand, and torch attends to all
    that is filled.

    Args:
        case: what is decoded.
        num_steps: steps for which there will be room.
        call: how torch's attention is called.
    """

    def __init__(self, case: Case, num_steps: int, call: SdpaCall) -> None:
        self.name = call.name
        self._call, self._scale = call, case.shape.softmax_scale
        self._query, self._token = case.query(), case.new_token()
        self._num_tokens = case.context
        key, value = (_with_room(tokens, num_steps) for tokens in case.prompt())
        self._layers = [(key.clone(), value.clone()) for _ in range(case.num_layers)]

    def step(self) -> Tensor:
        """Write and attend, in every layer."""
        query, (new_key, new_value), last = self._query, self._token, self._num_tokens
        self._num_tokens += 1
        with self._call.only_backend():
            for key, value in self._layers:
                key[:, :, last : last + 1].copy_(new_key)
                value[:, :, last : last + 1].copy_(new_value)
                seen_key, seen_value = key[:, :, : last + 1], value[:, :, : last + 1]
                out = self._call.attend(query, seen_key, seen_value, self._scale)
        return out.reshape(*query.shape[:3], out.shape[3])


def _with_room(tokens: Tensor, num_more: int) -> Tensor:
    """(batch, num_kv_heads, tokens + num_more, dim), of which the first are filled."""
    room = tokens.new_zeros((*tokens.shape[:2], num_more, tokens.shape[3]))
    return torch.cat((tokens, room), dim=2)
