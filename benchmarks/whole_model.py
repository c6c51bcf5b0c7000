"""One token through a whole model of Qwen3-30B-A3B's sizes and random weights.

Three models share the weights: one keeps transformers' DynamicCache, one keeps it offloaded, and
one is patched. Embeddings and the last layer's logits are part of a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
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
    case: Case, cpu_share: float, rounds: int, is_quick: bool, ceilings: StepCeilings
) -> Iterator[Row]:
    """A row for each cache, the models and the ceilings in turn.

    Args:
        case: of the shape `qwen3`; its keys and values stand for a prompt that was read.
        cpu_share: of the patched model.
        rounds: steps of each.
        is_quick: a small model.
        ceilings: measured in the same rounds.
    """
    model = random_model(case, is_quick)
    twin = with_same_weights(model)
    config = sparsekv.CacheConfig(cpu_share=cpu_share)
    found: list[Row] = []
    with sparsekv.patch(twin, config) as patched, torch.no_grad():
        caches = {DYNAMIC: (model, DynamicCache(config=model.config))}
        if case.device.type == "cuda":
            caches[OFFLOADED] = (model, DynamicCache(config=model.config, offloading=True))
        caches[SPARSEKV] = (twin, patched.new_cache())
        # As generate does before it reads a prompt.
        caches[SPARSEKV][1].reserve(case.context + WARM_UP + rounds, case.context)
        steps: list[Callable[[], object]] = [_Decoder(*pair, case).step for pair in caches.values()]
        steps.append(lambda: found.append(ceilings.measure()))
        samples = take_turns(steps, case.device, rounds, WARM_UP)
        placed = placed_bytes(patched.stats())
    for name, seconds in zip(caches, samples, strict=False):
        row = {**case.known, "kind": "model", "way": name, "experts": _experts(model)}
        if name == SPARSEKV:
            row["share"] = cpu_share
            row |= region_rates(case, seconds, placed, found[WARM_UP:])
        else:
            row |= step_rates(case, seconds, case.kv_bytes, found[WARM_UP:])
        yield row


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
