"""DeepSeek-V4 with its compressed entries in four regions: small random weights, on the CPU.

    python examples/deepseek_v4_decode.py                # a second of work
    python examples/deepseek_v4_decode.py --flash-dims   # V4-Flash's attention, about a minute

With `--flash-dims` each layer attends as V4-Flash's do: 64 heads of 512, a window of 128, entries
of 4 and 128 tokens, 64 indexer heads of 128 that select 512 entries. The rest is small: few layers,
narrow, few experts.

The released weights load as those of any model, from a folder on disk, and nothing else changes:

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

They were not run here. V4-Flash has 284 billion parameters, which is 568 GB in bfloat16, and
sparsekv leaves weights where they were put: on one GPU and the CPU, not on several GPUs. What the
cache takes is said by `sparsekv plan deepseek-v4-flash --tokens 1M`.
"""

import argparse
import time

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

import sparsekv

SLIDING = "sliding_attention"
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
NUM_EXPERTS = 8

TINY = {
    "layer_types": [SLIDING, CSA, HCA, CSA],
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    "num_attention_heads": 4,
    "head_dim": 64,
    "partial_rotary_factor": 0.25,
    "sliding_window": 16,
    "compress_rates": {CSA: 4, HCA: 16},
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 16,
    "hidden_size": 64,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
}
FLASH = {
    "layer_types": [SLIDING, CSA, HCA],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "num_attention_heads": 64,
    "head_dim": 512,
    "sliding_window": 128,
    "compress_rates": {CSA: 4, HCA: 128},
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hidden_size": 256,
    "q_lora_rank": 128,
    "o_groups": 8,
    "o_lora_rank": 64,
}


def build_model(sizes: dict) -> DeepseekV4ForCausalLM:
    """A model with every parameter drawn; fresh ones have sinks and hash tables of zeros."""
    config = DeepseekV4Config(
        **sizes,
        vocab_size=1000,
        num_hidden_layers=len(sizes["layer_types"]),
        moe_intermediate_size=64,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = DeepseekV4ForCausalLM(config).eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            else:
                scale = 1 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
                parameter.copy_(noise * scale)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                drawn = torch.rand(len(table), NUM_EXPERTS, generator=random)
                table.copy_(drawn.topk(table.shape[1]).indices)
    return model


def generate(model: DeepseekV4ForCausalLM, prompt: torch.Tensor, name: str) -> torch.Tensor:
    """Greedy tokens after the prompt, which is read in pieces; says how long it took."""
    started = time.perf_counter()
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=24,
        do_sample=False,
        prefill_chunk_size=256,
    )
    print(f"{name}: {tokens.shape[1]:,} tokens in {time.perf_counter() - started:.1f} s")
    return tokens


def main() -> None:
    """Generate twice, with and without sparsekv, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flash-dims", action="store_true", help="V4-Flash's attention sizes")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = build_model(FLASH if options.flash_dims else TINY)
    # More than 4 * index_topk tokens: beyond that the indexer selects, and does not take all.
    prompt = torch.randint(1, 1000, (1, 2100 if options.flash_dims else 600))

    # Window and block count compressed entries, of 4 tokens each.
    config = sparsekv.CacheConfig(window_size=64, block_size=16)
    with sparsekv.patch(model, config) as patched:
        actual = generate(model, prompt, "sparsekv")
        print(patched.stats())

    expected = generate(model, prompt, "unpatched")
    print("same tokens as without sparsekv:", torch.equal(actual, expected))


if __name__ == "__main__":
    main()
