"""The demo of DeepSeek-V4: a tiny model of random weights, which has no tokenizer."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV4Config, PreTrainedModel

PROMPT_TOKENS = 1100
"""Enough for 275 entries: the default window of 256 has left the GPU once."""

_SLIDING = "sliding_attention"
_CSA, _HCA = "compressed_sparse_attention", "heavily_compressed_attention"
_LAYER_TYPES = [_SLIDING, _CSA, _HCA, _CSA, _HCA, _CSA]
_NUM_EXPERTS = 8


def random_model(dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """All three kinds of layers, both kinds of experts, entries of the released models' size; the
    same weights at every call.
    """
    config = DeepseekV4Config(
        vocab_size=1000,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=len(_LAYER_TYPES),
        num_attention_heads=4,
        head_dim=512,
        q_lora_rank=32,
        n_routed_experts=_NUM_EXPERTS,
        num_experts_per_tok=2,
        layer_types=_LAYER_TYPES,
        mlp_layer_types=["hash_moe"] * 2 + ["moe"] * 4,
        o_groups=2,
        o_lora_rank=32,
        index_n_heads=16,
        index_head_dim=64,
        index_topk=64,
        max_position_embeddings=1 << 20,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _randomize(model)
    return model.to(device).eval()


def random_prompt(model: PreTrainedModel) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, both (1, PROMPT_TOKENS): the same ids at every call."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(1, model.config.vocab_size, (1, PROMPT_TOKENS), generator=random)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
def _randomize(model: PreTrainedModel) -> None:
    """Draw every parameter and every hash table; a fresh model has sinks, biases and hash tables of
    zeros, under which much of the attention and all hash routing would go unseen.
    """
    random = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        if "norm" in name:
            parameter.copy_(1 + 0.1 * noise)
        else:
            parameter.copy_(noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            drawn = torch.rand(table.shape[0], _NUM_EXPERTS, generator=random)
            table.copy_(drawn.topk(table.shape[1]).indices)
