"""Generate with the KV cache in four regions: a small Mixtral of random weights, on the CPU.

Run it with `python examples/generate.py`. For a real model, replace `build_model` by
`AutoModelForCausalLM.from_pretrained(folder)` and the token ids by a tokenizer's; nothing else
changes.
"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import sparsekv


def build_model() -> MixtralForCausalLM:
    """A mixture-of-experts model that is small enough to make in a second."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=4096,
    )
    return MixtralForCausalLM(config).eval()


def main() -> None:
    """Generate twice, with and without sparsekv, and compare."""
    model = build_model()
    prompt = torch.randint(3, 1000, (2, 1000))
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(prompt)

    expected = model.generate(prompt, **options)

    config = sparsekv.CacheConfig(window_size=128)
    with sparsekv.patch(model, config) as patched:
        actual = model.generate(prompt, **options)
        print(patched.stats())

    print("same tokens as without sparsekv:", torch.equal(actual, expected))


if __name__ == "__main__":
    main()
