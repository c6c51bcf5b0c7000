"""DeepSeek-V4 with the model on a CUDA device: entries leave it, selected ones come back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from deepseek_v4_zoo import randomized, tiny_config

import sparsekv
from sparsekv.models import compat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=[0.0, 0.5, 1.0], ids=lambda share: f"share {share}")
def pair(request: pytest.FixtureRequest) -> Any:
    """(model as it is, patched model, patch), on the device."""
    plain = randomized(tiny_config()).cuda()
    model = copy.deepcopy(plain)
    config = sparsekv.CacheConfig(cpu_share=request.param, window_size=16, block_size=4)
    with sparsekv.patch(model, config) as patched:
        yield plain, model, patched


@pytest.mark.parametrize("cuts", [[150], [60] + [1] * 90, [13] * 11 + [7]], ids=str)
def test_logits_are_the_unpatched_models(pair, cuts) -> None:
    plain, model, patched = pair
    ids = torch.randint(3, 97, (2, 150), generator=torch.Generator().manual_seed(5)).cuda()
    cache, start, outputs = patched.new_cache(), 0, []
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits
        for length in cuts:
            chunk = ids[:, start : start + length]
            outputs.append(model(chunk, use_cache=True, **{compat.CACHE_KW: cache}).logits)
            start += length
    torch.testing.assert_close(torch.cat(outputs, 1), expected, atol=1e-4, rtol=1e-4)


def test_generate_crop_and_beams_give_the_same_tokens(pair) -> None:
    plain, model, patched = pair
    ids = torch.randint(3, 97, (1, 90), generator=torch.Generator().manual_seed(6)).cuda()
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    for extra in ({}, {"num_beams": 3}):
        expected = plain.generate(ids, **options, **extra, use_cache=False)
        assert torch.equal(model.generate(ids, **options, **extra), expected)
    cache = patched.new_cache()
    with torch.no_grad():
        model(ids, **{compat.CACHE_KW: cache})
        cache.crop(-20)
        got = model(ids[:, 70:], **{compat.CACHE_KW: cache}).logits
        expected = plain(ids, use_cache=False).logits[:, 70:]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_memory_of_the_pool_on_the_device_does_not_grow(pair) -> None:
    _, model, patched = pair
    seen = []
    for length in (200, 1600):
        cache = patched.new_cache()
        ids = torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(7)).cuda()
        with torch.no_grad():
            for chunk in ids.split(100, dim=1):
                model(chunk, **{compat.CACHE_KW: cache})
        pool = cache.stats().pool
        seen.append([r.used_bytes for r in pool.regions if r.memory == "GPU"])
        assert sum(r.tokens for r in pool.regions) == length // 4
    assert seen[0] == seen[1]
