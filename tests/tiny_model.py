"""A model folder as users have it: random weights, a tokenizer of single bytes, a chat template."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def write_tiny_llama(folder: Path, *, chat: bool = True) -> Path:
    """Write config, weights and tokenizer of a two-layer Llama in float32; returns the folder."""
    vocab_size = _write_tokenizer(folder, chat=chat)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab_size,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=4096,
                bos_token_id=None,
                eos_token_id=0,
                pad_token_id=0,
                initializer_range=0.3,
            )
        )
    model.save_pretrained(folder)
    return folder


def write_tiny_deepseek_v4(folder: Path) -> Path:
    """The same of a DeepSeek-V4 with every kind of layer and expert."""
    vocab_size = _write_tokenizer(folder, chat=False)
    csa, hca = "compressed_sparse_attention", "heavily_compressed_attention"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = DeepseekV4ForCausalLM(
            DeepseekV4Config(
                vocab_size=vocab_size,
                hidden_size=32,
                moe_intermediate_size=16,
                num_hidden_layers=4,
                num_attention_heads=2,
                head_dim=64,
                partial_rotary_factor=0.25,
                q_lora_rank=16,
                n_routed_experts=4,
                num_experts_per_tok=2,
                layer_types=["sliding_attention", csa, hca, csa],
                compress_rates={csa: 4, hca: 16},
                mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
                sliding_window=8,
                o_groups=2,
                o_lora_rank=16,
                index_n_heads=16,
                index_head_dim=32,
                index_topk=4,
                bos_token_id=None,
                eos_token_id=0,
                pad_token_id=0,
                initializer_range=0.3,
            )
        )
    model.save_pretrained(folder)
    return folder


def _write_tokenizer(folder: Path, *, chat: bool) -> int:
    """One token for each byte and one for the end; returns their number."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: idx for idx, symbol in enumerate(["<end>", *symbols])}
    bytes_tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    bytes_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_tokenizer.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_tokenizer, eos_token="<end>")
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(vocabulary)
