"""Tiny models with random weights: every supported class, with and without layers that slide; what
people ask `generate` for; and where the tests run.
"""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import sparsekv

needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

needs_second_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device"),
]

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 96,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # wide: the largest logit must not hang on rounding
}
_QWEN3_MOE = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
_QWEN3_MOE["moe_intermediate_size"] = 32
_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}

CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, **_QWEN3_MOE),
    "mixtral": MixtralConfig(**_SIZES, **_MIXTRAL),
    "llama": LlamaConfig(**_SIZES),
    "qwen3": Qwen3Config(**_SIZES, head_dim=16),
    "mistral": MistralConfig(**_SIZES, sliding_window=None),
    "mixtral_slides": MixtralConfig(**_SIZES, **_MIXTRAL, sliding_window=6),
    "qwen3_moe_slides": Qwen3MoeConfig(
        **_SIZES, **_QWEN3_MOE, use_sliding_window=True, sliding_window=6
    ),
    "qwen3_mixed": Qwen3Config(
        **_SIZES,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
}
"""By name. Configs whose name says `slides` have no full-attention layer; `mixed` has both kinds.
"""

SHARES = {"qwen3_moe": 0.5, "mixtral": 0.0, "llama": 1.0}
"""Share of the CPU in each family's tests, so that both regions and either alone are covered."""

GENERATE_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 20},
    "beams": {"num_beams": 4, "max_new_tokens": 10},
    "beams-returned": {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 10},
    "beam-sampling": {"num_beams": 3, "do_sample": True, "max_new_tokens": 8},
    "sampling-returned": {
        "num_return_sequences": 4,
        "do_sample": True,
        "top_k": 20,
        "max_new_tokens": 12,
    },
    "prefill-chunks": {"prefill_chunk_size": 5, "max_new_tokens": 10},
    "no-cache": {"use_cache": False, "max_new_tokens": 5},
    "static-cache": {"cache_implementation": "static", "max_new_tokens": 5},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "max_new_tokens": 10},
    "guidance": {"guidance_scale": 1.5, "max_new_tokens": 6},
    "max-length": {"max_length": 25},
    "default-length": {},
}
"""Arguments of `generate`, by what they ask for."""


@functools.cache
def _original(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()


def build(name: str) -> Any:
    """A model of its own with the weights that every model of this name has."""
    return copy.deepcopy(_original(name))


def small_config(**changes: Any) -> sparsekv.CacheConfig:
    """Regions so small that a few dozen tokens fill them."""
    sizes: dict[str, Any] = {"window_size": 6, "block_size": 2, "ping_pong_tokens": 6}
    return sparsekv.CacheConfig(**(sizes | changes))


def same_logits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Of float32 models: equal but for the order of sums, which on CUDA are longer ones at once."""
    tolerance = 1e-4 if got.is_cuda else 1e-5
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def same_tokens(plain: Any, patched: Any, *args: Any, seed: int | None = None, **kwargs: Any):
    """Both models generate with the same arguments; the tokens must be the same.

    Skips where transformers itself fails without the patch.
    """
    kwargs.setdefault("do_sample", False)
    if seed is not None:
        torch.manual_seed(seed)
    try:
        expected = plain.generate(*args, **kwargs)
    except Exception as error:  # what counts is that upstream fails, not how
        version = transformers.__version__
        pytest.skip(f"transformers {version} fails here without the patch: {error!r:.200}")
    if seed is not None:
        torch.manual_seed(seed)
    got = patched.generate(*args, **kwargs)
    assert torch.equal(expected, got), (expected.tolist(), got.tolist())
    return got
