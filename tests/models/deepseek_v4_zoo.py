"""Tiny DeepSeek-V4 models with random weights, and what their attention should give."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepseek_v4_reference as reference
import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

import sparsekv
from sparsekv.models import compat

SLIDING = "sliding_attention"
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
VOCAB = 97

_CHANGES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "everything selected": {"index_topk": 512},
    "ties": {"index_n_heads": 1},  # with one head half of the scores are exactly 0
    "real rates": {
        "sliding_window": 128,
        "compress_rates": {CSA: 4, HCA: 128},
        "index_topk": 24,
        "layer_types": [SLIDING, CSA, HCA],
    },
    "entries of 512": {"head_dim": 512, "partial_rotary_factor": 0.125, "index_head_dim": 128},
    "flash": {"layer_types": [SLIDING, SLIDING, CSA, HCA, CSA]},
    "pro": {"layer_types": [HCA, HCA, CSA, HCA, CSA]},
    # No layer routes by scores, whose near ties bf16 would decide differently.
    "hash routed": {"mlp_layer_types": ["hash_moe"] * 4, "index_topk": 512},
}


def tiny_config(**changes: Any) -> DeepseekV4Config:
    """All kinds of layers, a window of 8, rates 4 and 16, 4 of the entries selected; 16 indexer
    heads, so that no two scores are equal.
    """
    layer_types = changes.pop("layer_types", [SLIDING, CSA, HCA, CSA])
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "mlp_layer_types": (["hash_moe", "hash_moe"] + ["moe"] * len(layer_types))[
            : len(layer_types)
        ],
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "compress_rates": {CSA: 4, HCA: 16},
        "sliding_window": 8,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 4,
        "hc_mult": 2,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    return DeepseekV4Config(**(sizes | changes))


def randomized(config: DeepseekV4Config, seed: int = 0) -> Any:
    """A model in float32 with every weight and table drawn at random; experts run eagerly."""
    model = DeepseekV4ForCausalLM(config).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            elif name.endswith(("sinks", "position_bias")):
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                draws = [torch.randperm(config.n_routed_experts, generator=random) for _ in buffer]
                buffer.copy_(torch.stack(draws)[:, : buffer.shape[1]])
    model.set_experts_implementation("eager")
    return model


@functools.cache
def original(name: str = "tiny") -> Any:
    """The model of that name, never patched. Not to be changed."""
    return randomized(tiny_config(**_CHANGES[name]))


def build(name: str = "tiny") -> Any:
    """A model of its own with the same weights."""
    return copy.deepcopy(original(name))


def small_config(**changes: Any) -> sparsekv.CacheConfig:
    """Regions so small that a few dozen tokens fill them."""
    sizes: dict[str, Any] = {"window_size": 4, "block_size": 2, "ping_pong_tokens": 8}
    return sparsekv.CacheConfig(**({"cpu_share": 0.3} | sizes | changes))


def token_ids(batch_size: int, num_tokens: int, seed: int = 5) -> Tensor:
    """Random ids without the special ones."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch_size, num_tokens), generator=random)


@functools.cache
def expected_logits(name: str, batch_size: int, num_tokens: int) -> Tensor:
    """What the model gives for `token_ids` without any cache."""
    with torch.no_grad():
        logits: Tensor = original(name)(token_ids(batch_size, num_tokens), use_cache=False).logits
    return logits


def forward(model: Any, ids: Tensor, cache: Any, **kwargs: Any) -> Tensor:
    """Logits of the next tokens."""
    with torch.no_grad():
        logits: Tensor = model(ids, use_cache=True, **{compat.CACHE_KW: cache}, **kwargs).logits
    return logits


def forward_in(model: Any, ids: Tensor, cache: Any, calls: Iterable[int]) -> Tensor:
    """Logits of the next tokens, so many a call."""
    logits, start = [], 0
    for num_tokens in calls:
        logits.append(forward(model, ids[:, start : start + num_tokens], cache))
        start += num_tokens
    return torch.cat(logits, 1)


def chunks(num_tokens: int, size: int) -> list[int]:
    """Calls of `size` tokens, and the rest."""
    return [min(size, num_tokens - start) for start in range(0, num_tokens, size)]


@contextmanager
def watched(model: Any) -> Iterator[list[tuple[list[Tensor], list[Tensor]]]]:
    """What goes in and out of each layer's attention: lists of hidden states, call by call."""
    seen: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in model.model.layers]

    def note(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        inputs, outputs = seen[module.layer_idx]
        inputs.append(args[0] if args else kwargs["hidden_states"])
        outputs.append(output[0])

    handles = [
        layer.self_attn.register_forward_hook(note, with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def check_attention(model: Any, seen: Any, atol: float, stored: Any = None) -> None:
    """Compare what `watched` has seen with the float64 reference, layer by layer, row by row."""
    for layer, (inputs, outputs) in zip(model.model.layers, seen, strict=True):
        given, got = torch.cat(inputs, 1), torch.cat(outputs, 1)
        for row in range(len(given)):
            expected = reference_output(model, layer.self_attn, given[row], stored)
            difference = (got[row].double() - expected).abs().amax(-1)
            assert difference.max() < atol, (layer.self_attn.layer_idx, row, difference.tolist())


def reference_output(model: Any, module: Any, hidden: Tensor, stored: Any = None) -> Tensor:
    """What an attention module should give for one whole sequence (tokens, hidden)."""
    hidden, config, compressor = hidden.double(), module.config, module.compressor
    rope_type = "main" if module.layer_type == SLIDING else "compress"
    frequencies = getattr(model.model.rotary_emb, f"{rope_type}_inv_freq").float()
    residual = _normed(_linear(hidden, module.q_a_proj), module.q_a_norm)
    query = _linear(residual, module.q_b_proj).unflatten(-1, (-1, config.head_dim))
    x = reference.Sequence(
        query=query / (query.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt(),
        kv=_normed(_linear(hidden, module.kv_proj), module.kv_norm),
        sinks=module.sinks,
        angles=lambda positions: positions[:, None].float() * frequencies,
        sliding_window=config.sliding_window,
        compressor=None if compressor is None else _compressor(hidden, compressor),
    )
    if stored is not None and module.layer_type == CSA:
        x.stored = stored
    if module.layer_type == CSA:
        indexer = compressor.indexer
        x.indexer = reference.Indexer(
            compressor=_compressor(hidden, indexer),
            query=_linear(residual, indexer.q_b_proj).unflatten(-1, (-1, config.index_head_dim)),
            head_weights=_linear(hidden, indexer.scorer.weights_proj) * config.index_n_heads**-0.5,
            topk=config.index_topk,
        )
    out, _ = reference.attention(x)
    groups = out.flatten(1).unflatten(1, (config.o_groups, -1))
    weight = module.o_a_proj.weight.double().unflatten(0, (config.o_groups, -1))
    return _linear(torch.einsum("tgd,grd->tgr", groups, weight).flatten(1), module.o_b_proj)


def _compressor(hidden: Tensor, module: Any) -> reference.Compressor:
    return reference.Compressor(
        kv=_linear(hidden, module.kv_proj),
        gate=_linear(hidden, module.gate_proj),
        position_bias=module.position_bias,
        norm_weight=module.kv_norm.weight,
        eps=module.kv_norm.variance_epsilon,
    )


def _linear(x: Tensor, module: Any) -> Tensor:
    return x @ module.weight.double().T


def _normed(x: Tensor, module: Any) -> Tensor:
    root = (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()
    return x / root * module.weight.double()
