"""The ways to store a token and attend to all before it that are compared, layer after layer.

A step adds one token to every layer and attends to the layer; all ways give the same results. On
CUDA a step is finished only when the device has been synchronised.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.attention_shapes import Shape
from benchmarks.decode_case import Case
from benchmarks.decode_rates import placed_bytes
from sparsekv import CacheConfig, InplaceKVCache
from sparsekv.engine import attend

SPARSEKV = "sparsekv"
DYNAMIC, OFFLOADED = "DynamicCache", "DynamicCache, offloaded"


class DecodeWay(Protocol):
    """One way, holding the context of a case."""

    name: str

    def step(self) -> Tensor:
        """Add a token to each layer and attend: the last layer's (batch, num_heads, 1, dim)."""
        ...


class RegionDecode:
    """The library's cache and its attention.

    Args:
        case: what is decoded; its context is placed at once, as a prefill does.
        cpu_share: part of the placed tokens that the CPU attends to.
        num_steps: steps there will be, so that memory is taken for them too.
    Raises:
        CapacityError: the machine's memory does not hold the case.
    """

    name = SPARSEKV

    def __init__(self, case: Case, cpu_share: float, num_steps: int) -> None:
        self._case = case
        config = CacheConfig(cpu_share=cpu_share)
        spec = config.spec(case.geometry, case.batch_size)
        self.cache = InplaceKVCache(spec, case.device, config.router())
        self.cache.reserve(case.context + num_steps)
        self._query, self._token = case.query(), case.new_token()
        key, value = case.prompt()
        for layer_idx in range(case.num_layers):
            self.cache.append(layer_idx, key, value)
            self.cache.flush(layer_idx)

    def step(self) -> Tensor:
        """Append and attend, in every layer."""
        scale = self._case.shape.softmax_scale
        for layer_idx in range(self._case.num_layers):
            self.cache.append(layer_idx, *self._token)
            out = attend(self.cache, layer_idx, self._query, scale)
        return out

    def placed_bytes(self) -> dict[str, int]:
        """Bytes of the tokens in each CPU region, by its name."""
        return placed_bytes(self.cache.stats())

    def is_full_window_next(self) -> bool:
        """Whether the next step fills the windows, so that they leave the accelerator in it."""
        return (self.cache.num_tokens + 1) % self.cache.spec.window_size == 0


class DynamicDecode:
    """transformers' cache and its sdpa attention, called as a model's layers call them.

    Args:
        case: what is decoded.
        is_offloaded: keep the layers in host memory, but for the one in use and the next.
    """

    def __init__(self, case: Case, is_offloaded: bool = False) -> None:
        self.name = self.name_of(is_offloaded)
        self._case = case
        self._module = AttentionModule(case.shape)
        self._query, self._token = case.query(), case.new_token()
        # Layers made beforehand, as generate has them: offloading looks at those that follow.
        config = Qwen3Config(num_hidden_layers=case.num_layers)
        self._cache = DynamicCache(config=config, offloading=is_offloaded)
        prompt = case.prompt()
        for layer_idx in range(case.num_layers):
            self._cache.update(*prompt, layer_idx)

    @staticmethod
    def name_of(is_offloaded: bool) -> str:
        """What rows call it."""
        return OFFLOADED if is_offloaded else DYNAMIC

    def step(self) -> Tensor:
        """Update and attend, in every layer."""
        for layer_idx in range(self._case.num_layers):
            key, value = self._cache.update(*self._token, layer_idx)
            out = attend_by_sdpa(self._module, self._query, key, value)
        return out


class AttentionModule(nn.Module):
    """What transformers' attention functions ask of the module that calls them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_key_value_groups = shape.num_heads // shape.num_kv_heads
        self.is_causal = True


def attend_by_sdpa(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """transformers' sdpa attention, causal, with the usual scale: (batch, num_heads, tokens, dim).

    Args:
        module: an AttentionModule.
        query: (batch, num_heads, tokens, head_dim), the newest tokens.
        key: (batch, num_kv_heads, all tokens, head_dim).
        value: (batch, num_kv_heads, all tokens, head_dim_v).
    """
    scale = query.shape[3] ** -0.5
    out, _ = sdpa_attention_forward(module, query, key, value, None, scaling=scale)
    return out.transpose(1, 2)
