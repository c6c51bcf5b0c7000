"""One token through a whole model of Qwen3-30B-A3B's sizes and random weights.

Three models share the weights: one keeps transformers' DynamicCache, one keeps it offloaded, and
one is patched, and decodes at several shares: what is best for attention alone need not be best
beside experts, during which the CPU has nothing to do. Embeddings and the last layer's logits are
part of a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen3MoeConfig

import sparsekv
from benchmarks.decode_case import Case
from benchmarks.decode_rates import placed_bytes, region_rates, step_rates
from benchmarks.decode_rounds import StepCeilings, take_turns
from benchmarks.decode_sweep import WARM_UP
from benchmarks.decode_ways import DYNAMIC, OFFLOADED, SPARSEKV
from benchmarks.results import Row
from sparsekv.models.compat import CACHE_KW

_FULL: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_QUICK: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def model_rows(
    case: Case, shares: Sequence[float], rounds: int, is_quick: bool, ceilings: StepCeilings
) -> Iterator[Row]:
    """A row for each cache, and for each share of the patched model; all in turn, and the ceilings.

    Args:
        case: of the shape `qwen3`; its keys and values stand for a prompt that was read.
        shares: of the patched model, whose tokens are placed at the least; the CPU borrows the
            rest.
        rounds: steps of each.
        is_quick: a small model.
        ceilings: measured in the same rounds.
    """
    model = random_model(case, is_quick)
    twin = with_same_weights(model)
    config = sparsekv.CacheConfig(cpu_share=min(shares))
    found: list[Row] = []
    with sparsekv.patch(twin, config) as patched, torch.no_grad():
        caches = {DYNAMIC: DynamicCache(config=model.config)}
        if case.device.type == "cuda":
            caches[OFFLOADED] = DynamicCache(config=model.config, offloading=True)
        num_steps = (WARM_UP + rounds + 1) * len(shares)
        ours = _SharedDecoder(twin, patched.new_cache(), case, num_steps)
        steps: list[Callable[[], object]] = [
            *(_Decoder(model, cache, case).step for cache in caches.values()),
            *(partial(ours.step, share) for share in shares),
            lambda: found.append(ceilings.measure()),
        ]
        samples = take_turns(steps, case.device, rounds, WARM_UP)
        read = [ours.bytes_read(share) for share in shares]
    known = {**case.known, "kind": "model", "experts": _experts(model)}
    for name, seconds in zip(caches, samples, strict=False):
        yield known | {"way": name} | step_rates(case, seconds, case.kv_bytes, found[WARM_UP:])
    for share, placed, seconds in zip(shares, read, samples[len(caches) :], strict=False):
        rates = region_rates(case, seconds, placed, found[WARM_UP:])
        yield known | {"way": SPARSEKV, "share": share} | rates


def _experts(model: PreTrainedModel) -> str:
    """How transformers computes the experts, in all of the models alike."""
    return str(getattr(model.config, "_experts_implementation", None))


class _Decoder:
    """A model and a cache that holds the context."""

    def __init__(self, model: PreTrainedModel, cache: Any, case: Case) -> None:
        self._model, self._cache = model, cache
        prompt = case.prompt()
        for layer_idx in range(case.num_layers):
            cache.update(*prompt, layer_idx)
        self._ids = torch.zeros(case.batch_size, 1, dtype=torch.int64, device=case.device)

    def step(self) -> Tensor:
        """Read one token and choose the next: the logits (batch, 1, vocabulary)."""
        logits: Tensor = self._model(self._ids, use_cache=True, **{CACHE_KW: self._cache}).logits
        self._ids = logits[:, -1:].argmax(-1)
        return logits


class _SharedDecoder:
    """A patched model and its cache, for steps of several shares.

    Args:
        num_steps: steps there will be.
    """

    def __init__(self, model: PreTrainedModel, cache: Any, case: Case, num_steps: int) -> None:
        # As generate does before it reads a prompt.
        cache.reserve(case.context + num_steps, case.context)
        self._decoder = _Decoder(model, cache, case)
        self._cache, self._regions = cache, cache.store.cache

    def step(self, share: float) -> Tensor:
        """As `_Decoder` has it, at a share that is not below the one at which tokens are placed."""
        self._regions.step_share = share
        return self._decoder.step()

    def bytes_read(self, share: float) -> dict[str, int]:
        """Bytes that each engine reads in a step of such a share, by region; takes a step."""
        before = self._cache.stats()
        self.step(share)
        stats = self._cache.stats()
        borrowed, placed = stats.borrowed_bytes - before.borrowed_bytes, placed_bytes(stats)
        return {"unpinned": placed["unpinned"] + borrowed, "pinned": placed["pinned"] - borrowed}


def random_model(case: Case, is_quick: bool) -> PreTrainedModel:
    """Qwen3-30B-A3B with the case's layers, in bfloat16 on its device; a small one if quick."""
    config = Qwen3MoeConfig(
        **(_QUICK if is_quick else _FULL),
        num_hidden_layers=case.num_layers,
        num_attention_heads=case.shape.num_heads,
        num_key_value_heads=case.shape.num_kv_heads,
        head_dim=case.shape.head_dim,
        max_position_embeddings=1 << 18,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    with case.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def with_same_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Another model with the same parameters and buffers, and a configuration of its own."""
    shared = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
