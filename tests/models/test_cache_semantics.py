"""The cache object itself, against transformers' DynamicCache as the perfect model; what changes
length or rows also on CUDA.
"""

from __future__ import annotations

import copy
from typing import Any

import deepseek_v4_zoo
import pytest
import torch
import transformers
from model_zoo import CONFIGS, build, same_logits
from transformers import DynamicCache

import sparsekv
from sparsekv import (
    CacheStateError,
    CapacityError,
    FormatError,
    InplaceKVCache,
    LayoutError,
    SparseKVError,
    UnsupportedModelError,
)
from sparsekv.models import compat


def _feed(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens.to(model.device), **{compat.CACHE_KW: cache}).logits


def _tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 90, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["llama", "qwen3_moe"])
def both(request: pytest.FixtureRequest, make_patched: Any, device: str) -> Any:
    """(model, reference cache, patched model, its cache), all with the same 20 tokens."""
    patched = make_patched(request.param, cpu_share=0.5)
    patched.model.to(device)
    plain = build(request.param).to(device)
    reference, cache = DynamicCache(config=plain.config), patched.new_cache()
    _feed(plain, reference, _tokens(3, 20))
    _feed(patched.model, cache, _tokens(3, 20))
    return plain, reference, patched.model, cache


def _assert_same_future(both: Any, rows: int) -> None:
    plain, reference, model, cache = both
    assert cache.get_seq_length() == reference.get_seq_length()
    for seed, length in ((7, 1), (8, 5), (9, 1)):
        step = _tokens(rows, length, seed)
        expected, got = _feed(plain, reference, step), _feed(model, cache, step)
        same_logits(got, expected)


@pytest.mark.parametrize("removed", range(21))
def test_crop_across_every_border(both, removed) -> None:
    for cache in both[1::2]:
        cache.crop(-removed)
    assert both[3].get_seq_length() == 20 - removed
    _assert_same_future(both, rows=3)


@pytest.mark.parametrize("removed", [3, 5, 100])
def test_crop_of_more_than_there_is_leaves_nothing(make_patched, removed) -> None:
    patched = make_patched("llama")
    cache = patched.new_cache()
    _feed(patched.model, cache, _tokens(1, 3))
    cache.crop(-removed)
    assert cache.get_seq_length() == 0
    expected = build("llama")(_tokens(1, 9)).logits
    torch.testing.assert_close(_feed(patched.model, cache, _tokens(1, 9)), expected)


def test_crop_of_nothing_keeps_everything(both) -> None:
    for cache in both[1::2]:
        cache.crop(0)
    assert both[3].get_seq_length() == 20
    _assert_same_future(both, rows=3)


def test_positive_crop_means_what_this_transformers_says(both) -> None:
    *_, cache = both
    if compat.CROP_TAKES_LENGTH:
        cache.crop(30)
        assert cache.get_seq_length() == 20
        cache.crop(7)
        both[1].crop(7)
        assert cache.get_seq_length() == 7
    else:
        with pytest.raises(LayoutError, match=r"crop\(7\).*negative"):
            cache.crop(7)
    _assert_same_future(both, rows=3)


def test_crop_before_the_first_token_is_harmless(make_patched) -> None:
    for name in ("llama", "qwen3_mixed"):
        cache = make_patched(name).new_cache()
        cache.crop(0)
        cache.crop(-4)
        assert cache.get_seq_length() == 0


def test_reorder(both) -> None:
    order = torch.tensor([2, 0, 2])
    for cache in both[1::2]:
        cache.reorder_cache(order)
    _assert_same_future(both, rows=3)


def test_repeat_select_and_reorder_follow_each_other(both) -> None:
    for cache in both[1::2]:
        cache.batch_repeat_interleave(2)
    _assert_same_future(both, rows=6)
    for cache in both[1::2]:
        cache.batch_select_indices(torch.tensor([5, 0, 3]))
    _assert_same_future(both, rows=3)
    for cache in both[1::2]:
        cache.reorder_cache(torch.tensor([1, 1, 0]))
        cache.crop(-13)
    _assert_same_future(both, rows=3)
    for cache in both[1::2]:
        cache.batch_select_indices(torch.tensor([False, True, True]))
    _assert_same_future(both, rows=2)


def test_layers_that_slide_take_part_in_every_operation(make_patched) -> None:
    patched, plain = make_patched("qwen3_mixed"), build("qwen3_mixed")
    both = (plain, DynamicCache(config=plain.config), patched.model, patched.new_cache())
    _feed(plain, both[1], _tokens(3, 5))
    _feed(patched.model, both[3], _tokens(3, 5))
    for cache in both[1::2]:
        cache.crop(-2)
        cache.reorder_cache(torch.tensor([2, 0, 2]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 0, 3]))
    _assert_same_future(both, rows=3)
    both[3].reset()
    assert both[3].get_seq_length() == 0
    both = (plain, DynamicCache(config=plain.config), patched.model, both[3])
    _feed(plain, both[1], _tokens(1, 9))
    _feed(patched.model, both[3], _tokens(1, 9))
    _assert_same_future(both, rows=1)


def test_reset_makes_room_for_another_batch(both) -> None:
    plain, _, model, cache = both
    cache.reset()
    assert cache.get_seq_length() == 0
    reference = DynamicCache(config=plain.config)
    _feed(plain, reference, _tokens(2, 15))
    _feed(model, cache, _tokens(2, 15))
    _assert_same_future((plain, reference, model, cache), rows=2)


@pytest.mark.parametrize("name", ["llama", "deepseek_v4"])
def test_reset_forgets_what_was_reserved(make_patched, monkeypatch, name) -> None:
    """Another batch may not fit for as many tokens."""
    if name == "llama":
        patched = make_patched(name)
    else:
        patched = sparsekv.patch(deepseek_v4_zoo.build(), deepseek_v4_zoo.small_config())
    reserved = []
    monkeypatch.setattr(InplaceKVCache, "reserve", lambda *given: reserved.append(given[1:]))
    cache = patched.new_cache()
    cache.reserve(400, 200)
    _feed(patched.model, cache, _tokens(1, 9))
    assert len(reserved) == 1
    cache.reset()
    _feed(patched.model, cache, _tokens(2, 9))
    assert len(reserved) == 1
    patched.restore()


def test_a_copy_is_independent(both) -> None:
    plain, reference, model, cache = both
    twin = copy.deepcopy(cache)
    _feed(model, cache, _tokens(3, 9, 5))
    cache.crop(-15)
    assert twin.get_seq_length() == 20
    _assert_same_future((plain, reference, model, twin), rows=3)


@pytest.mark.parametrize("built", [False, True])
def test_saved_cache_goes_on(both, make_patched, tmp_path, built) -> None:
    plain, reference, model, cache = both
    path = tmp_path / "chat.safetensors"
    cache.save(path)
    fresh = type(cache)(model.config, owner=cache.store.owner, config=cache.store.config)
    if built:
        _feed(model, fresh, _tokens(2, 4))
    fresh.load(path)
    _assert_same_future((plain, reference, model, fresh), rows=3)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FormatError):
        cache.load(path)
    assert cache.get_seq_length() == 20


def test_save_needs_every_layer_and_some_tokens(make_patched, tmp_path) -> None:
    mixed = make_patched("qwen3_mixed").new_cache()
    with pytest.raises(UnsupportedModelError, match=r"save: 1 of 3 layers slide"):
        mixed.save(tmp_path / "x")
    with pytest.raises(UnsupportedModelError, match="load"):
        mixed.load(tmp_path / "x")
    with pytest.raises(CacheStateError, match="empty"):
        make_patched("llama").new_cache().save(tmp_path / "x")


@pytest.mark.parametrize("step", [1, 3, 5, 6, 7, 13])
def test_mask_sizes_say_how_many_keys_update_returns(make_patched, step) -> None:
    cache = make_patched("llama").new_cache()
    for _ in range(6):
        key = torch.randn(2, 2, step, 16)
        length, offset = cache.get_mask_sizes(step, 0)
        returned, values = cache.update(key, key[..., :8], 0)  # values narrower than keys
        assert offset == 0
        assert returned.shape == (2, 2, length, 16)
        assert values.shape == (2, 2, length, 8)
        assert returned.is_meta
        assert cache.get_seq_length() == length


def test_what_generate_asks_a_cache(make_patched) -> None:
    cache = make_patched("llama").new_cache()
    assert len(cache) == 3
    assert cache.get_max_length() == -1
    assert cache.get_max_cache_shape() == -1
    assert cache.layers[0].get_max_cache_shape() == -1
    assert cache.is_croppable
    assert not cache.is_compileable
    assert not cache.is_initialized
    assert cache.is_sliding == [False] * 3
    assert cache.batch_size == -1
    assert make_patched("qwen3_mixed").new_cache().is_sliding == [False, True, False]
    cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["key_cache", "value_cache", "to_legacy_cache"])
def test_names_of_older_caches_explain_themselves(make_patched, name) -> None:
    cache = make_patched("llama").new_cache()
    assert not hasattr(cache, name)
    with pytest.raises(SparseKVError, match=name):
        getattr(cache, name)


def test_one_layer_cannot_be_changed_alone(make_patched) -> None:
    layer = make_patched("llama").new_cache().layers[1]
    for call in (
        lambda: layer.crop(-1),
        lambda: layer.reorder_cache(torch.tensor([0])),
        lambda: layer.batch_repeat_interleave(2),
        lambda: layer.batch_select_indices(torch.tensor([0])),
        layer.reset,
    ):
        with pytest.raises(CacheStateError, match="on the cache"):
            call()


def test_another_batch_is_refused_and_nothing_is_lost(both) -> None:
    *_, model, cache = both
    for rows in (1, 2, 4):
        with pytest.raises(LayoutError, match="batch"):
            _feed(model, cache, _tokens(rows, 2))
    _assert_same_future(both, rows=3)


def test_another_dtype_is_refused_and_nothing_is_lost(both) -> None:
    *_, model, cache = both
    model.to(torch.bfloat16)
    with pytest.raises(LayoutError, match="dtype"):
        _feed(model, cache, _tokens(3, 2))
    model.to(torch.float32)
    assert cache.get_seq_length() == 20


def test_cache_of_another_model_is_refused_and_nothing_is_lost(both, make_patched) -> None:
    *_, cache = both
    other = make_patched("llama", cpu_share=0.5).model.to(both[0].device)
    with pytest.raises(CacheStateError, match="another model"):
        _feed(other, cache, _tokens(3, 9))
    whole = _tokens(3, 25).to(other.device)
    with pytest.raises(CacheStateError, match="another model"):
        other.generate(whole, **{compat.CACHE_KW: cache}, max_new_tokens=2)
    _assert_same_future(both, rows=3)


def test_over_max_tokens_is_refused_and_nothing_is_lost(make_patched) -> None:
    patched = make_patched("llama")
    cache = patched.new_cache(max_tokens=24)
    _feed(patched.model, cache, _tokens(3, 20))
    with pytest.raises(CapacityError, match="max_tokens=24"):
        _feed(patched.model, cache, _tokens(3, 5, 1))
    assert cache.get_seq_length() == 20
    plain = build("llama")
    expected = plain(torch.cat([_tokens(3, 20), _tokens(3, 4, 2)], 1)).logits[:, 20:]
    got = _feed(patched.model, cache, _tokens(3, 4, 2))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_interrupted_forward_is_noticed_and_crop_repairs_it(both, monkeypatch) -> None:
    plain, reference, model, cache = both
    with monkeypatch.context() as context:
        context.setattr(model.model.layers[1].mlp, "forward", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            _feed(model, cache, _tokens(3, 3, 4))
    assert cache.get_seq_length() == 23
    with pytest.raises(CacheStateError, match=r"interrupted.*crop\(-3\)"):
        _feed(model, cache, _tokens(3, 1))
    whole = _tokens(3, 30).to(model.device)
    with pytest.raises(CacheStateError, match="interrupted"):
        model.generate(whole, **{compat.CACHE_KW: cache}, max_new_tokens=2)
    cache.crop(-3)
    _assert_same_future((plain, reference, model, cache), rows=3)


def _interrupt(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


def test_gradients_do_not_get_lost_silently(make_patched) -> None:
    patched = make_patched("llama")
    cache = patched.new_cache()
    for length in (9, 3):  # a prefill, and a read of the regions
        logits = patched.model(_tokens(1, length), **{compat.CACHE_KW: cache}).logits
        with pytest.raises(CacheStateError, match="use_cache=False"):
            logits.sum().backward()


def test_every_config_has_the_layers_transformers_says(make_patched) -> None:
    for name, config in CONFIGS.items():
        cache = make_patched(name).new_cache()
        template = DynamicCache(config=config)
        assert cache.is_sliding == template.is_sliding
        assert len(cache) == len(template)
        assert isinstance(cache, transformers.Cache)
