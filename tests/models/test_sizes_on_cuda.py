"""Qwen3-30B-A3B's attention dimensions at a context that matters, on a CUDA device."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

import sparsekv
from sparsekv.models import compat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_LAYERS, _BATCH, _PROMPT, _STEPS = 4, 4, 16_384, 24


def _model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=_LAYERS,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=65_536,
    )
    return Qwen3ForCausalLM(config).to("cuda", torch.bfloat16).eval()


def _decode(model, cache, ids, chunk: int = _PROMPT) -> tuple[torch.Tensor, int]:
    """Logits of the steps after the prompt, and the device memory they held on to."""
    before = _requested_bytes()
    outputs = []
    with torch.no_grad():
        kept = {"use_cache": True, "logits_to_keep": 1, compat.CACHE_KW: cache}
        for part in ids[:, :_PROMPT].split(chunk, dim=1):
            last = model(part, **kept).logits
        outputs.append(last)
        for i in range(_PROMPT, ids.shape[1]):
            outputs.append(model(ids[:, i : i + 1], **kept).logits)
    logits = torch.cat(outputs, 1).float()
    return logits, _requested_bytes() - before - logits.nbytes


def _requested_bytes() -> int:
    """Without what torch adds to a block that it does not split."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_a_long_context_is_exact_and_leaves_the_device() -> None:
    plain = _model()
    model = copy.deepcopy(plain)
    ids = torch.randint(0, 1000, (_BATCH, _PROMPT + _STEPS), device="cuda")
    exact = copy.deepcopy(plain).float()
    # In chunks: in float32 torch forms the whole matrix of scores.
    expected, _ = _decode(exact, DynamicCache(config=exact.config), ids, chunk=256)
    del exact
    upstream, dense_bytes = _decode(plain, DynamicCache(config=plain.config), ids)
    with sparsekv.patch(model, sparsekv.CacheConfig(cpu_share=0.5)) as patched:
        cache = patched.new_cache()
        got, used_bytes = _decode(model, cache, ids)
        stats = cache.stats()
    own_error = (upstream - expected).abs().max()
    assert (got - expected).abs().max() <= 2 * own_error
    on_device = sum(r.used_bytes for r in stats.regions if r.memory == "GPU")
    # What steps work in does not grow with the context: results, and those of splits, of one layer.
    assert used_bytes <= 1.1 * on_device + 2**22
    assert dense_bytes > 15 * used_bytes
    assert sum(r.tokens for r in stats.regions) == _PROMPT + _STEPS
