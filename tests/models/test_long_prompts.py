"""Prompts read in pieces, further turns and what they take of the GPU, with Qwen3-30B-A3B's
attention sizes on CUDA, and small ones on the simulated accelerator.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from model_zoo import needs_cuda
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

import sparsekv
from sparsekv.engine.memory_plan import plan_memory
from sparsekv.models import compat
from sparsekv.models.registry import geometry_from_config


@dataclass(frozen=True)
class Sizes:
    """A model of two layers, and how much it reads and writes."""

    model: dict[str, int]
    cache: dict[str, int]
    prompt: int
    chunk: int
    question: int
    """Of the second turn. A window is full within its answer."""
    answer: int


SIZES = {
    "cpu": Sizes(
        model={"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
        cache={"window_size": 16, "block_size": 4, "ping_pong_tokens": 16},
        prompt=320,
        chunk=48,
        question=90,
        answer=20,
    ),
    "cuda": Sizes(
        model={"hidden_size": 1024, "num_attention_heads": 32, "num_key_value_heads": 4},
        cache={},
        prompt=32_768,
        chunk=4096,
        question=8192 + 200,
        answer=70,
    ),
}


def build(sizes: Sizes, device: str, num_layers: int = 2) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000,
        intermediate_size=1024,
        num_hidden_layers=num_layers,
        head_dim=128,
        max_position_embeddings=65_536,
        **sizes.model,
    )
    return Qwen3ForCausalLM(config).to(device, torch.bfloat16).eval()


def forced(model: Any, ids: Tensor, num_last: int, chunk: int) -> Tensor:
    """The model's logits of the last tokens, the others read in pieces before."""
    kept = {"use_cache": True, compat.CACHE_KW: DynamicCache(config=model.config)}
    with torch.no_grad():
        for piece in ids[:, :-num_last].split(chunk, dim=1):
            model(piece, **kept, logits_to_keep=1)
        return model(ids[:, -num_last:], **kept).logits.float()


def test_a_long_prompt_in_pieces_and_a_second_turn_are_exact(device: str) -> None:
    sizes = SIZES["cpu" if device == "cpu" else "cuda"]
    plain = build(sizes, device)
    model, exact = copy.deepcopy(plain), copy.deepcopy(plain).float()
    prompt = torch.randint(0, 1000, (2, sizes.prompt), device=device)
    question = torch.randint(0, 1000, (2, sizes.question), device=device)
    options = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    config = sparsekv.CacheConfig(cpu_share=0.5, **sizes.cache)
    with sparsekv.patch(model, config) as patched:
        given = {compat.CACHE_KW: patched.new_cache(), **options}
        first = model.generate(
            prompt, **given, max_new_tokens=2, prefill_chunk_size=sizes.chunk
        ).sequences
        sequence = torch.cat([first, question], 1)
        out = model.generate(sequence, **given, max_new_tokens=sizes.answer, output_logits=True)
        stats = patched.stats()
    fed = out.sequences[:, :-1]
    assert stats.num_tokens == fed.shape[1]
    by_name = {region.name: region.tokens for region in stats.regions}
    assert abs(by_name["unpinned"] - by_name["pinned"]) <= config.window_size
    geometry = geometry_from_config(model.config, model.dtype)
    plan = plan_memory(
        geometry,
        config,
        batch_size=2,
        num_tokens=stats.num_tokens,
        prompt_tokens=sizes.question,
        placed_share=0.5,
    )
    assert sum(r.used_bytes for r in stats.regions if r.memory == "GPU") <= plan.gpu_bytes
    # In pieces that are small enough for scores in float32.
    expected = forced(exact, fed, sizes.answer, 256)
    own_error = (forced(plain, fed, sizes.answer, sizes.chunk) - expected).abs()
    our_error = (torch.stack(out.logits, 1).float() - expected).abs()
    assert our_error.max() <= 2 * own_error.max()
    assert our_error.mean() <= 2 * own_error.mean()


def peak_bytes(model: Any, ids: Tensor, **given: Any) -> int:
    """Bytes of the GPU that a forward needs at most, also those that only copies still hold; what
    torch adds to a block that it does not split does not count.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        model(ids, **given, logits_to_keep=1)
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"]


@pytest.mark.parametrize("share", [pytest.param(share, marks=needs_cuda) for share in (0.0, 0.5)])
def test_a_prompt_of_16_times_4k_takes_what_is_planned(share: float) -> None:
    plain = build(SIZES["cuda"], "cuda", num_layers=4)
    model = copy.deepcopy(plain)
    ids = torch.randint(0, 1000, (16, 4096), device="cuda")
    config = sparsekv.CacheConfig(cpu_share=share)
    plan = plan_memory(
        geometry_from_config(plain.config, plain.dtype),
        config,
        batch_size=16,
        num_tokens=8192,
        prompt_tokens=4096,
        placed_share=share,
    )
    peak_bytes(plain, ids[:1], use_cache=False)  # what libraries keep for good
    computing = peak_bytes(plain, ids, use_cache=False)
    with sparsekv.patch(model, config) as patched:
        peak = peak_bytes(model, ids, **{compat.CACHE_KW: patched.new_cache()})
    assert peak - computing <= plan.gpu_bytes + plan.prompt_bytes


@pytest.mark.parametrize("share", [pytest.param(share, marks=needs_cuda) for share in (0.0, 0.5)])
def test_later_pieces_of_a_prompt_take_no_more_than_earlier_ones(share: float) -> None:
    sizes = SIZES["cuda"]
    model = build(sizes, "cuda")
    ids = torch.randint(0, 1000, (2, sizes.prompt), device="cuda")
    with sparsekv.patch(model, sparsekv.CacheConfig(cpu_share=share)) as patched:
        given = {compat.CACHE_KW: patched.new_cache()}
        peaks = [peak_bytes(model, piece, **given) for piece in ids.split(sizes.chunk, dim=1)]
    # Of one chunk of the ping-pong buffers, of which there are up to 14: in float32.
    result_bytes = 4 * 2 * sizes.chunk * model.config.num_attention_heads * model.config.head_dim
    # The fifth has as many as are held at a time.
    assert max(peaks[5:]) - peaks[4] < result_bytes
