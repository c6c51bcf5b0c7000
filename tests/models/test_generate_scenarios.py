"""What people do with `generate` and `forward`, on every family: the patched model gives the same
tokens, on the simulated accelerator and on CUDA.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import GENERATE_OPTIONS, build, same_logits, same_tokens
from transformers import AutoModelForCausalLM, DynamicCache

from sparsekv import CacheStateError
from sparsekv.models import compat
from sparsekv.models.cache import SparseKVCache

LOWEST = torch.finfo(torch.float32).min
FAMILIES = ["qwen3_moe", "mixtral", "llama", "mixtral_slides", "qwen3_moe_slides", "qwen3_mixed"]


@pytest.fixture
def make_patched(make_patched: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The same, with the model on the device."""

    def make(name: str, **changes: Any) -> Any:
        patched = make_patched(name, **changes)
        patched.model.to(device)
        return patched

    return make


@pytest.fixture
def ids(ids: torch.Tensor, device: str) -> torch.Tensor:
    """The same on the device, and so is `padded`, which is made of them."""
    return ids.to(device)


@pytest.fixture(params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, make_patched: Callable[..., Any], device: str
) -> tuple[Any, Any, Any]:
    """(model as it is, patched model, patch)."""
    if device != "cpu" and request.param.endswith("slides"):
        pytest.skip("every layer is transformers' own")
    patched = make_patched(request.param)
    return build(request.param).to(device), patched.model, patched


def test_logits_agree_step_by_step(pair, ids) -> None:
    plain, model, patched = pair
    reference, cache = DynamicCache(config=plain.config), patched.new_cache()
    with torch.no_grad():
        for start, stop in ((0, 9), (9, 14), (14, 15), (15, 16), (16, 17)):
            step = ids[:, start:stop]
            expected = plain(step, **{compat.CACHE_KW: reference}, use_cache=True).logits
            got = model(step, **{compat.CACHE_KW: cache}, use_cache=True).logits
            same_logits(got, expected)
    assert cache.get_seq_length() == 17


@pytest.mark.parametrize("options", GENERATE_OPTIONS.values(), ids=GENERATE_OPTIONS)
@pytest.mark.parametrize("left_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_generate_gives_the_same_tokens(pair, ids, padded, options, left_padded) -> None:
    plain, model, _ = pair
    inputs = padded if left_padded else {"input_ids": ids}
    same_tokens(plain, model, **inputs, seed=3, **options)


def test_prompt_lookup(pair, device) -> None:
    repetitive = torch.randint(1, 90, (1, 6), generator=torch.Generator().manual_seed(2))
    options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 20}
    same_tokens(pair[0], pair[1], repetitive.repeat(1, 4).to(device), **options)


@pytest.mark.parametrize("assistant_is_patched", [False, True])
def test_assistant_model(pair, ids, assistant_is_patched) -> None:
    plain, model, _ = pair
    assistant = copy.deepcopy(model) if assistant_is_patched else plain
    try:
        expected = plain.generate(
            ids[:1], assistant_model=copy.deepcopy(plain), max_new_tokens=12, do_sample=False
        )
    except Exception as error:
        pytest.skip(f"transformers fails here without the patch: {error!r:.200}")
    got = model.generate(ids[:1], assistant_model=assistant, max_new_tokens=12, do_sample=False)
    assert torch.equal(expected, got)


def test_chat_over_three_turns_with_the_returned_cache(pair, ids) -> None:
    def chat(model: Any) -> tuple[torch.Tensor, Any]:
        sequence, cache = ids[:1], None
        for question in ([], [7, 8, 9], [3, 4]):
            sequence = torch.cat([sequence, sequence.new_tensor([question])], 1)
            given = {} if cache is None else {compat.CACHE_KW: cache}
            out = model.generate(
                sequence,
                **given,
                max_new_tokens=6,
                do_sample=False,
                return_dict_in_generate=True,
            )
            sequence, cache = out.sequences, compat.cache_in(out)
        return sequence, cache

    expected, _ = chat(pair[0])
    got, cache = chat(pair[1])
    assert torch.equal(expected, got)
    assert isinstance(cache, SparseKVCache)
    assert cache.get_seq_length() == got.shape[1] - 1


@pytest.mark.filterwarnings("ignore:.*past_key_values.*")
@pytest.mark.parametrize("keyword", ["past_key_values", compat.CACHE_KW])
def test_cache_under_either_keyword(pair, ids, keyword) -> None:
    plain, model, patched = pair
    cache = patched.new_cache()
    expected = plain.generate(ids, max_new_tokens=5, do_sample=False)
    got = model.generate(ids, **{keyword: cache}, max_new_tokens=5, do_sample=False)
    assert torch.equal(expected, got)
    assert cache.get_seq_length() == 17 + 4


def test_one_prefix_two_continuations_by_deepcopy(pair, ids) -> None:
    plain, model, patched = pair
    outputs = []
    for who, prefix in ((plain, DynamicCache(config=plain.config)), (model, patched.new_cache())):
        with torch.no_grad():
            who(ids[:1, :10], **{compat.CACHE_KW: prefix}, use_cache=True)
        for tail in ([5, 6, 7], [8, 9]):
            whole = torch.cat([ids[:1, :10], ids.new_tensor([tail])], 1)
            branch = {compat.CACHE_KW: copy.deepcopy(prefix)}
            outputs.append(who.generate(whole, **branch, max_new_tokens=5, do_sample=False))
        assert prefix.get_seq_length() == 10
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


def test_inputs_embeds(pair, ids) -> None:
    embeds = pair[0].get_input_embeddings()(ids)
    same_tokens(pair[0], pair[1], inputs_embeds=embeds, max_new_tokens=5)


def test_forward_without_a_cache_of_ours(pair, padded) -> None:
    plain, model, _ = pair
    real = padded["attention_mask"].bool()
    for use_cache in (False, True):
        with torch.no_grad():
            expected = plain(**padded, use_cache=use_cache).logits[real]
            got = model(**padded, use_cache=use_cache).logits[real]
        same_logits(got, expected)


def test_training_step(pair, ids) -> None:
    losses = []
    for model in pair[:2]:
        model.train()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append((loss.item(), model.lm_head.weight.grad.clone()))
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-5)
    torch.testing.assert_close(losses[0][1], losses[1][1], atol=1e-5, rtol=1e-4)


def test_copied_model_is_patched_on_its_own(pair, ids) -> None:
    plain, model, patched = pair
    cache = patched.new_cache()
    twin = copy.deepcopy(model)
    assert twin.generate.__self__ is twin
    with pytest.raises(CacheStateError, match="a copy of a model is another model"):
        twin.generate(ids, **{compat.CACHE_KW: cache}, max_new_tokens=5)
    same_tokens(plain, twin, ids, max_new_tokens=5)
    patched.restore()
    same_tokens(plain, twin, ids, max_new_tokens=8)
    assert model.config._attn_implementation == plain.config._attn_implementation
    assert twin.config._attn_implementation == "sparsekv"


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_per_query_and_key(pair, ids, kind) -> None:
    plain, model, patched = pair
    visible = torch.tril(torch.ones(17, 17, dtype=torch.bool, device=ids.device))
    visible[8:, 2:4] = False  # a hole that no padding mask can say
    mask = visible.expand(3, 1, 17, 17)
    if kind == "float":
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, LOWEST)
    with torch.no_grad():
        expected = plain(ids, attention_mask=mask, use_cache=False).logits
        got = model(ids, attention_mask=mask, use_cache=False).logits
        same_logits(got, expected)
        if any(patched.new_cache().is_sliding):
            return  # a mask over all keys does not fit a layer that keeps only some
        cache = {compat.CACHE_KW: patched.new_cache()}
        first = model(ids[:, :9], attention_mask=mask[:, :, :9, :9], **cache).logits
        rest = model(ids[:, 9:], attention_mask=mask[:, :, 9:], **cache).logits
    same_logits(torch.cat([first, rest], 1), expected)


def test_packed_sequences(pair, ids) -> None:
    positions = torch.cat([torch.arange(9), torch.arange(8)]).to(ids.device).expand(3, -1)
    with torch.no_grad():
        expected = pair[0](ids, position_ids=positions, use_cache=False).logits
        got = pair[1](ids, position_ids=positions, use_cache=False).logits
    same_logits(got, expected)


def test_unpatched_model_fails_loudly_with_our_cache(pair, ids) -> None:
    plain, _, patched = pair
    if patched.new_cache().store.num_layers == 0:
        pytest.skip("every layer is transformers' own")
    for implementation in ("eager", "sdpa"):
        plain.set_attn_implementation(implementation)
        cache = {compat.CACHE_KW: patched.new_cache()}
        with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
            plain.generate(ids, **cache, max_new_tokens=3, do_sample=False)


def test_accelerate_hooks_on_attention(pair, ids) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    calls = []

    class Counter(hooks.ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(module)
            return args, kwargs

    _, model, _ = pair
    for layer in model.model.layers:
        hooks.add_hook_to_module(layer.self_attn, Counter())
    same_tokens(pair[0], model, ids, max_new_tokens=5)
    assert len(calls) == 15


def test_save_pretrained_leaves_no_trace(pair, ids, device) -> None:
    plain, model, _ = pair
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        assert "sparsekv" not in json.dumps(json.loads(Path(folder, "config.json").read_text()))
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    same_tokens(plain, loaded, ids, max_new_tokens=3)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_other_supported_classes(make_patched, padded, device, name, options) -> None:
    same_tokens(
        build(name).to(device), make_patched(name).model, **padded, max_new_tokens=16, **options
    )


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("window", [2, 4, 6, 64])
def test_tokens_do_not_depend_on_where_they_lie(
    make_patched, padded, device, share, window
) -> None:
    patched = make_patched(
        "qwen3_moe", cpu_share=share, window_size=window, ping_pong_tokens=2 * window
    )
    same_tokens(build("qwen3_moe").to(device), patched.model, **padded, max_new_tokens=24)
    stats = patched.stats()
    placed = (17 + 23) // window * window
    assert stats.num_tokens == 17 + 23
    assert sum(r.tokens for r in stats.regions if r.name in ("unpinned", "pinned")) == placed
    if placed:
        assert abs(stats.cpu_share - share) * placed <= window


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_tokens_do_not_depend_on_who_reads_them(
    make_patched, padded, device, tmp_path, options
) -> None:
    patched = make_patched("qwen3", cpu_share=0.75, elastic=True, window_size=2, ping_pong_tokens=4)
    same_tokens(build("qwen3").to(device), patched.model, **padded, max_new_tokens=24, **options)
    stats = patched.stats()
    assert (stats.cpu_share, stats.placed_share) == (0.75, 0.6)
    assert stats.borrowed_bytes
    saved, loaded = patched.new_cache(), patched.new_cache()
    patched.model(padded["input_ids"], **{compat.CACHE_KW: saved})
    saved.save(tmp_path / "saved")
    loaded.load(tmp_path / "saved")
    assert saved.stats().cpu_share == loaded.stats().cpu_share == 6 / 8


def test_library_is_used_where_it_should_be(make_patched, ids) -> None:
    """Guards the tests above: the tokens really went through the regions."""
    patched = make_patched("llama", cpu_share=0.5)
    patched.model.generate(ids, max_new_tokens=8, do_sample=False)
    by_name = {region.name: region.tokens for region in patched.stats().regions}
    assert by_name == {"window": 0, "ping-pong": 0, "unpinned": 12, "pinned": 12}
