"""transformers' own DeepSeek-V4 modules, tiny and random: what the ops are compared with."""

from __future__ import annotations

from typing import Any

import torch
import transformers.models.deepseek_v4.modeling_deepseek_v4 as modeling
from torch import Tensor, nn
from transformers import DeepseekV4Config, DynamicCache

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
SLIDING = "sliding_attention"
RATIOS = {CSA: 4, HCA: 16}


def tiny_config(topk: int = 4) -> DeepseekV4Config:
    """All kinds of layers; 16 indexer heads, so that equal scores are unlikely."""
    return DeepseekV4Config(
        vocab_size=97,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        q_lora_rank=24,
        num_experts_per_tok=2,
        n_routed_experts=4,
        n_shared_experts=1,
        layer_types=[SLIDING, CSA, HCA],
        compress_rates=RATIOS,
        mlp_layer_types=["moe"] * 3,
        sliding_window=8,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=16,
        index_head_dim=16,
        index_topk=topk,
        partial_rotary_factor=0.25,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        attn_implementation="eager",
    )


def attention_layer(
    config: DeepseekV4Config, layer_type: str, dtype: torch.dtype, seed: int = 0
) -> Any:
    """The attention of one layer with every parameter drawn at random."""
    module = modeling.DeepseekV4Attention(config, config.layer_types.index(layer_type))
    return randomized(module, seed).to(dtype)


def randomized(module: nn.Module, seed: int) -> nn.Module:
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            elif name.endswith(("position_bias", "sinks")):
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return module.eval()


def hidden_states(config: DeepseekV4Config, dtype: torch.dtype, num_tokens: int) -> Tensor:
    random = torch.Generator().manual_seed(num_tokens)
    return torch.randn(2, num_tokens, config.hidden_size, generator=random).to(dtype)


def angles(
    config: DeepseekV4Config, layer_type: str, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of the layer's rotary embedding at `positions` (1, tokens)."""
    rotary = modeling.DeepseekV4RotaryEmbedding(config)
    kind = "main" if layer_type == SLIDING else "compress"
    cos, sin = rotary(torch.empty(0, dtype=dtype), position_ids=positions, layer_type=kind)
    return cos, sin


def run_compressor(
    config: DeepseekV4Config, layer: Any, hidden: Tensor, calls: list[int]
) -> Tensor:
    """All entries of a layer's compressor, called on so many tokens at a time."""
    cache = DynamicCache(config=config)
    start, entries = 0, hidden.new_zeros(0)
    for num_tokens in calls:
        part = hidden[:, start : start + num_tokens]
        positions = torch.arange(start, start + num_tokens)[None].expand(len(hidden), -1)
        residual = part.new_ones(*part.shape[:2], config.q_lora_rank)
        entries, _ = layer.compressor(part, residual, positions, cache, layer.layer_idx)
        start += num_tokens
    return entries[:, 0]
