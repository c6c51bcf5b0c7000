"""What a prompt takes of the accelerator's memory, beside what the model computes: as planned."""

import pytest
import torch
from harness import accelerators, build, geometry, new_tokens
from simulated_streams import MeteredAccelerator

from sparsekv.engine import CacheConfig
from sparsekv.engine.memory_plan import plan_memory
from sparsekv.format import KVGeometry


def planned(kv, config, batch_size, prompt):
    return plan_memory(
        kv,
        config,
        batch_size=batch_size,
        num_tokens=4 * prompt,
        prompt_tokens=prompt,
        placed_share=0.5,
    )


def read_at_once(cache, key, value):
    """A prompt as a model without any other work gives it: copies fall as far behind as may be."""
    for layer_idx in range(cache.spec.geometry.num_layers):
        cache.append(layer_idx, key, value)
        cache.flush(layer_idx)


@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("earlier", [0, 3])
@pytest.mark.parametrize("prompt", [1, 4, 7, 40])
def test_a_prompt_holds_no_more_than_planned(share, num_layers, earlier, prompt):
    kv = geometry(num_layers=num_layers)
    config = CacheConfig(cpu_share=share, window_size=4, block_size=2, ping_pong_tokens=8)
    plan = planned(kv, config, 2, prompt)
    with accelerators(MeteredAccelerator):
        cache = build(config.spec(kv, 2), share)
    accelerator = cache.accelerator
    read_at_once(cache, *new_tokens(cache, earlier))
    assert accelerator.held_bytes == plan.footprint.window_bytes
    for _ in range(3):  # the turns of a chat
        read_at_once(cache, *new_tokens(cache, prompt))
    most = plan.gpu_bytes - plan.footprint.ping_pong_bytes + plan.prompt_bytes
    assert accelerator.peak_bytes <= most
    if share == 0 and prompt == 40 and not earlier:  # the bound is reached
        assert accelerator.peak_bytes == most
    cache.settle()
    assert accelerator.held_bytes == plan.footprint.window_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_prompt_of_16_times_4k_holds_no_more_than_planned_on_cuda(share):
    kv, config = KVGeometry(num_layers=4, num_kv_heads=4, head_dim=128), CacheConfig()
    plan = planned(kv, config, 16, 4096)
    key, value = torch.randn(2, 16, 4, 4096, 128, device="cuda").to(kv.dtype).unbind(0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    cache = build(config.spec(kv, 16), share, device="cuda")
    for _ in range(3):
        read_at_once(cache, key, value)
    cache.settle()
    # What streams still read counts, though torch calls it free: it cannot be used for anything.
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert peak <= plan.gpu_bytes + plan.prompt_bytes
    assert cache.num_tokens == 3 * 4096
