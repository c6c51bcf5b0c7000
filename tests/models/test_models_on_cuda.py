"""What there is to a model only on a CUDA device: caches that move, or that do not fit it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_zoo import build, needs_cuda, same_logits, same_tokens, small_config
from transformers.cache_utils import Cache

import sparsekv
from sparsekv.models import compat

pytestmark = needs_cuda


@pytest.fixture(autouse=True)
def _offloading_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The offloaded cache of transformers 5.17 copies the next layer back on a stream that waits
    neither for the copy that brings this layer to the host nor for who still reads the memory it
    writes to (`Cache.update`; 5.24 waits for both). Where the device is behind the host, tokens
    change, with the patch or without.
    """
    prefetch = Cache.prefetch

    def when_all_is_done(self: Cache, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        prefetch(self, *args, **kwargs)

    monkeypatch.setattr(Cache, "prefetch", when_all_is_done)


@pytest.fixture(params=["qwen3_moe", "mixtral", "llama", "qwen3_mixed"])
def pair(request: pytest.FixtureRequest, make_patched: Any) -> tuple[Any, Any, Any]:
    """(model as it is, patched model, patch), on the device."""
    patched = make_patched(request.param, cpu_share=0.5)
    return build(request.param).cuda(), patched.model.cuda(), patched


@pytest.mark.parametrize("left_padded", [False, True])
def test_offloaded_cache_of_transformers_gives_the_same_tokens(
    pair, ids, padded, left_padded
) -> None:
    inputs = padded if left_padded else {"input_ids": ids}
    inputs = {name: tensor.cuda() for name, tensor in inputs.items()}
    options = {"cache_implementation": "offloaded", "max_new_tokens": 12}
    same_tokens(pair[0], pair[1], **inputs, **options)


def test_logits_agree_step_by_step(pair, ids, tmp_path) -> None:
    plain, model, patched = pair
    ids = ids.cuda()
    cache = patched.new_cache()
    with torch.no_grad():
        expected = plain(ids).logits
        for start, stop in ((0, 9), (9, 14), (14, 15), (15, 16)):
            got = model(ids[:, start:stop], **{compat.CACHE_KW: cache}).logits
            same_logits(got, expected[:, start:stop])
        caches = [copy.deepcopy(cache), cache]
        if not any(cache.is_sliding):
            cache.save(tmp_path / "cache")
            caches.append(patched.new_cache())
            caches[-1].load(tmp_path / "cache")
        for twin in caches:
            got = model(ids[:, 16:], **{compat.CACHE_KW: twin}).logits
            same_logits(got, expected[:, 16:])


def test_cache_on_the_cpu_does_not_fit_a_model_on_cuda(make_patched, ids) -> None:
    patched = make_patched("llama")
    cache = patched.new_cache()
    with torch.no_grad():
        patched.model(ids, **{compat.CACHE_KW: cache})
        patched.model.cuda()
        with pytest.raises(sparsekv.LayoutError, match="cuda"):
            patched.model(ids.cuda(), **{compat.CACHE_KW: cache})
    assert cache.get_seq_length() == 17


def test_dispatched_by_accelerate(padded) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = build("qwen3_moe")
    accelerate.dispatch_model(
        model, {"model": 0, "lm_head": "cpu"}, main_device=0, force_hooks=True
    )
    inputs = {name: tensor.cuda() for name, tensor in padded.items()}
    with sparsekv.patch(model, small_config()):
        same_tokens(build("qwen3_moe").cuda(), model, **inputs, max_new_tokens=9)
