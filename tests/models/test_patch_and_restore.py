"""patch then restore leaves the model as found; what is not supported is refused before it is
touched.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
import transformers
from model_zoo import CONFIGS, build, same_tokens, small_config
from transformers import AutoModelForCausalLM, GPT2Config

import sparsekv
from sparsekv import (
    CacheStateError,
    CapacityError,
    LayoutError,
    UnsupportedModelError,
)
from sparsekv.models import compat
from sparsekv.models.registry import FAMILIES, geometry_from_config


def _snapshot(model: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Every module, and every config, with a copy of its attributes."""
    objects = list(model.modules())
    objects += [m.config for m in model.modules() if hasattr(m, "config")]
    objects.append(model.generation_config)
    return [(thing, dict(vars(thing))) for thing in objects]


def _assert_as_found(model: Any, before: list[tuple[Any, dict[str, Any]]]) -> None:
    after = _snapshot(model)
    assert [id(thing) for thing, _ in before] == [id(thing) for thing, _ in after]
    for (thing, old), (_, new) in zip(before, after, strict=True):
        assert old.keys() == new.keys(), type(thing)
        for name in old:
            assert old[name] is new[name] or old[name] == new[name], (type(thing), name)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_patch_then_restore_leaves_the_model_as_found(name, implementation, ids) -> None:
    model = build(name)
    model.set_attn_implementation(implementation)
    before = _snapshot(model)
    patched = sparsekv.patch(model, small_config())
    assert vars(model)["generate"].__self__ is model
    model.generate(ids, max_new_tokens=3, do_sample=False)
    patched.restore()
    _assert_as_found(model, before)
    patched.restore()
    _assert_as_found(model, before)
    same_tokens(build(name), model, ids, max_new_tokens=3)


def test_restore_after_an_error_in_the_block(ids) -> None:
    model = build("qwen3_moe")
    before = _snapshot(model)

    def work() -> None:
        with sparsekv.patch(model, small_config()) as patched:
            patched.model.generate(ids, max_new_tokens=2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    _assert_as_found(model, before)


def test_restore_keeps_a_generate_of_the_users_own(ids) -> None:
    model, calls = build("llama"), []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return type(model).generate(model, *args, **kwargs)

    model.generate = own
    with sparsekv.patch(model, small_config()):
        same_tokens(build("llama"), model, ids, max_new_tokens=4)
    assert model.generate is own
    assert len(calls) == 1
    assert calls[0][compat.CACHE_KW] is not None


def test_failing_patch_leaves_the_model_as_found(monkeypatch) -> None:
    model = build("llama")
    before = _snapshot(model)

    def fail(self: Any, name: str) -> None:
        self.config._attn_implementation_internal = name
        raise RuntimeError("no such implementation")

    with monkeypatch.context() as context:
        context.setattr(type(model), "set_attn_implementation", fail)
        with pytest.raises(RuntimeError, match="no such"):
            sparsekv.patch(model, small_config())
    _assert_as_found(model, before)


def test_second_patch_is_refused(make_patched) -> None:
    patched = make_patched("llama")
    with pytest.raises(CacheStateError, match="patched already"):
        sparsekv.patch(patched.model)
    patched.restore()
    with sparsekv.patch(patched.model, small_config()):
        pass


def test_everything_refuses_after_restore(make_patched, ids) -> None:
    patched = make_patched("llama")
    cache = patched.new_cache()
    patched.model.generate(ids, **{compat.CACHE_KW: cache}, max_new_tokens=9)
    bound = patched.model.generate
    patched.restore()
    assert len(cache) == 3
    assert "restored" in repr(cache)
    assert "restored" in repr(patched)
    key = torch.zeros(3, 2, 1, 16)
    for use in (
        lambda: cache.update(key, key, 0),
        lambda: cache.get_seq_length(),
        lambda: cache.get_mask_sizes(1, 0),
        lambda: cache.crop(-1),
        lambda: cache.reset(),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.batch_size,
        lambda: cache.reserve(3),
        lambda: copy.deepcopy(cache),
        lambda: patched.model(ids, **{compat.CACHE_KW: cache}),
        lambda: patched.model.generate(ids, **{compat.CACHE_KW: cache}, max_new_tokens=2),
    ):
        with pytest.raises(CacheStateError, match=r"restored.*patch the model again"):
            use()
    for use in (patched.new_cache, patched.stats, patched.__enter__):
        with pytest.raises(CacheStateError, match=r"restored; call sparsekv\.patch"):
            use()
    assert bound(ids, max_new_tokens=2).shape == (3, 19)  # the unpatched generate


def test_restore_frees_regions_and_caches_free_them_at_once(make_patched, ids) -> None:
    patched = make_patched("llama")
    patched.model.generate(ids, max_new_tokens=9)
    pool = patched.new_cache().store.owner.pool
    idle = pool.idle_bytes()
    assert idle > 0, "the regions of a finished generate wait for the next one"
    cache = patched.new_cache()
    dead = weakref.ref(cache.store)
    patched.model.generate(ids, **{compat.CACHE_KW: cache}, max_new_tokens=9)
    gc.disable()
    try:
        del cache
        assert dead() is None, "a reference cycle keeps regions until the next collection"
    finally:
        gc.enable()
    kept = patched.new_cache()
    patched.model.generate(ids, **{compat.CACHE_KW: kept}, max_new_tokens=9)
    patched.restore()
    assert pool.idle_bytes() == 0
    assert kept.store.cache is None


class TestSupport:
    """The allow-list."""

    def test_other_models_are_refused_untouched(self) -> None:
        model = AutoModelForCausalLM.from_config(
            GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
        )
        before = _snapshot(model)
        with pytest.raises(UnsupportedModelError) as error:
            sparsekv.patch(model)
        for word in ("GPT2LMHeadModel", "Qwen3MoeForCausalLM", "registry.py"):
            assert word in str(error.value)
        _assert_as_found(model, before)

    def test_what_is_no_model_is_refused(self) -> None:
        for thing in (torch.nn.Linear(2, 2), "Qwen/Qwen3-30B-A3B", build("llama").model):
            with pytest.raises(UnsupportedModelError, match="not supported"):
                sparsekv.patch(thing)

    def test_same_name_from_elsewhere_is_refused(self) -> None:
        class LlamaForCausalLM(torch.nn.Module):
            pass

        with pytest.raises(UnsupportedModelError, match="not supported"):
            sparsekv.patch(LlamaForCausalLM())

    def test_subclass_of_a_supported_class_is_supported(self, ids) -> None:
        class Mine(transformers.LlamaForCausalLM):
            pass

        model = build("llama")
        model.__class__ = Mine
        with sparsekv.patch(model, small_config()):
            same_tokens(build("llama"), model, ids, max_new_tokens=4)

    @pytest.mark.parametrize(
        "device_map",
        [
            {"model.layers.0": 0, "model.layers.1": 1},
            {"model": "cuda:0", "lm_head": torch.device("cuda:3")},
        ],
    )
    def test_several_accelerators_are_refused(self, device_map) -> None:
        model = build("llama")
        model.hf_device_map = device_map
        before = _snapshot(model)
        with pytest.raises(UnsupportedModelError, match=r"2 accelerators.*cuda:0"):
            sparsekv.patch(model)
        _assert_as_found(model, before)

    @pytest.mark.parametrize(
        "device_map", [{"": 0}, {"model": 0, "lm_head": "cuda:0", "x": "cpu", "y": "disk"}]
    )
    def test_one_accelerator_is_fine(self, device_map) -> None:
        model = build("llama")
        model.hf_device_map = device_map
        sparsekv.patch(model, small_config()).restore()

    def test_bidirectional_model_is_refused(self) -> None:
        model = build("llama")
        model.config.is_causal = False
        with pytest.raises(UnsupportedModelError, match="is_causal"):
            sparsekv.patch(model)

    def test_all_layers_sliding_is_said(self, caplog, make_patched) -> None:
        make_patched("mixtral_slides")
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert "sliding_window=6" in caplog.text

    def test_layout_is_checked_before_anything_is_touched(self) -> None:
        model = build("llama")
        before = _snapshot(model)
        for wrong in ({"window_size": 5}, {"cpu_share": 1.5}, {"cpu_share": float("nan")}):
            with pytest.raises(LayoutError):
                sparsekv.patch(model, small_config(**wrong))
        _assert_as_found(model, before)


class TestGeometry:
    """What a config says, without a model."""

    def test_tiny_configs(self) -> None:
        geometry = geometry_from_config(CONFIGS["llama"], torch.float32)
        assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim) == (3, 2, 16)
        assert geometry.dtype == torch.float32
        assert geometry_from_config(CONFIGS["qwen3_mixed"]).num_layers == 2

    def test_published_models(self) -> None:
        qwen = transformers.Qwen3MoeConfig(
            hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, head_dim=128
        )
        assert geometry_from_config(qwen).bytes_per_token == 48 * 4 * 2 * 128 * 2
        mixtral = transformers.MixtralConfig()
        assert geometry_from_config(mixtral).bytes_per_token == 32 * 8 * 2 * 128 * 2

    def test_refusals(self) -> None:
        with pytest.raises(UnsupportedModelError, match="slides"):
            geometry_from_config(CONFIGS["mixtral_slides"])
        with pytest.raises(UnsupportedModelError, match="'gpt2'"):
            geometry_from_config(GPT2Config())

    def test_every_adapter_has_a_config_here(self) -> None:
        tested_apart = {"deepseek_v4"}
        kinds = {family.model_type for family in FAMILIES}
        assert kinds - tested_apart == {c.model_type for c in CONFIGS.values()}


class TestLimits:
    """max_tokens is checked before any work."""

    @pytest.mark.parametrize(
        "options",
        [{"max_new_tokens": 9}, {"max_length": 26}, {"generation_config": 9}, {"inputs_embeds": 9}],
        ids=lambda options: next(iter(options)),
    )
    def test_generates_own_limit_against_max_tokens(self, make_patched, ids, options) -> None:
        patched = make_patched("llama", max_tokens=24)
        calls = []
        patched.model.model.register_forward_pre_hook(lambda *_: calls.append(1))
        options = dict(options)
        if "generation_config" in options:
            settings = {"max_new_tokens": 9, "do_sample": False}
            options["generation_config"] = transformers.GenerationConfig(**settings)
        inputs: dict[str, Any] = {"input_ids": ids}
        if "inputs_embeds" in options:
            embeds = patched.model.get_input_embeddings()(ids).detach()
            inputs = {"inputs_embeds": embeds}
            options = {"max_new_tokens": 9}
        with pytest.raises(CapacityError, match=r"25 cached tokens, over max_tokens=24"):
            patched.model.generate(**inputs, **options)
        assert not calls
        same_tokens(build("llama"), patched.model, ids, max_new_tokens=8)

    def test_cache_of_the_callers_own_has_its_own_limit(self, make_patched, ids) -> None:
        patched = make_patched("llama", max_tokens=100)
        cache = patched.new_cache(max_tokens=20)
        with pytest.raises(CapacityError, match="max_tokens=20"):
            patched.model.generate(ids, **{compat.CACHE_KW: cache}, max_new_tokens=5)
        patched.model.generate(ids, **{compat.CACHE_KW: cache}, max_new_tokens=4)

    def test_only_the_new_tokens_of_a_chat(self, make_patched, ids) -> None:
        """Inputs hold the new tokens, the mask all of them."""
        patched, plain = make_patched("llama"), build("llama")
        cache = patched.new_cache(max_tokens=17 + 4 + 2)
        with torch.no_grad():
            patched.model(ids, **{compat.CACHE_KW: cache})
        new = ids[:, :3]
        inputs = {"input_ids": new, "attention_mask": torch.ones(3, 20, dtype=torch.long)}
        given = {compat.CACHE_KW: cache}
        with pytest.raises(CapacityError, match="24 cached tokens"):
            patched.model.generate(**inputs, **given, max_new_tokens=5, do_sample=False)
        got = patched.model.generate(**inputs, **given, max_new_tokens=4, do_sample=False)
        whole = torch.cat([ids, new], 1)
        expected = plain.generate(whole, max_new_tokens=4, do_sample=False)
        assert torch.equal(got[:, 3:], expected[:, 20:])

    def test_more_than_memory_holds(self, make_patched, ids, monkeypatch) -> None:
        import sparsekv.cache
        import sparsekv.regions.memory

        patched = make_patched("llama")
        for module in (sparsekv.cache, sparsekv.regions.memory):
            if hasattr(module, "available_bytes"):
                monkeypatch.setattr(module, "available_bytes", lambda: 60_000)
        with pytest.raises(CapacityError):
            patched.model.generate(ids, max_new_tokens=100)
        same_tokens(build("llama"), patched.model, ids, max_new_tokens=2)


class TestStats:
    """Of the latest cache."""

    def test_none_yet(self, make_patched) -> None:
        patched = make_patched("llama")
        with pytest.raises(CacheStateError, match=r"run model\.generate"):
            patched.stats()
        patched.new_cache()
        with pytest.raises(CacheStateError, match="keep a cache"):
            patched.stats()

    def test_after_generate_and_while_a_cache_lives(self, make_patched, ids) -> None:
        patched = make_patched("llama")
        patched.model.generate(ids, max_new_tokens=4, do_sample=False)
        assert patched.stats().num_tokens == 20
        cache = patched.new_cache()
        with torch.no_grad():
            patched.model(ids[:, :9], **{compat.CACHE_KW: cache})
            assert patched.stats().num_tokens == 9
            patched.model(ids[:, 9:], **{compat.CACHE_KW: cache})
        assert patched.stats().num_tokens == 17
        assert "unpinned" in str(patched.stats())


class TestInterruption:
    """Ctrl-C, and errors, in the middle of generate."""

    @pytest.mark.parametrize("at_step", [0, 1, 5])
    @pytest.mark.parametrize("layer", [0, 1, 2])
    def test_generate_again(self, make_patched, ids, monkeypatch, at_step, layer) -> None:
        patched = make_patched("qwen3_moe")
        self._interrupt(patched.model, monkeypatch, at_step, layer)
        with pytest.raises(KeyboardInterrupt):
            patched.model.generate(ids, max_new_tokens=9, do_sample=False)
        monkeypatch.undo()
        same_tokens(build("qwen3_moe"), patched.model, ids, max_new_tokens=9)

    @pytest.mark.parametrize("at_step", [0, 1, 5])
    def test_cache_of_the_callers_own_is_as_before(
        self, make_patched, ids, monkeypatch, at_step
    ) -> None:
        patched = make_patched("qwen3_moe")
        cache = patched.new_cache()
        given = {compat.CACHE_KW: cache}
        first = patched.model.generate(ids, **given, max_new_tokens=4, do_sample=False)
        question = torch.cat([first, ids[:, :5]], 1)
        self._interrupt(patched.model, monkeypatch, at_step, 1)
        with pytest.raises(KeyboardInterrupt):
            patched.model.generate(question, **given, max_new_tokens=9, do_sample=False)
        monkeypatch.undo()
        assert cache.get_seq_length() == 20
        got = patched.model.generate(question, **given, max_new_tokens=9, do_sample=False)
        plain = build("qwen3_moe")
        assert torch.equal(got, plain.generate(question, max_new_tokens=9, do_sample=False))

    @staticmethod
    def _interrupt(model: Any, monkeypatch: Any, at_step: int, layer: int) -> None:
        mlp, steps = model.model.layers[layer].mlp, []
        forward = mlp.forward

        def interrupt(hidden: torch.Tensor) -> Any:
            steps.append(1)
            if len(steps) > at_step:
                raise KeyboardInterrupt
            return forward(hidden)

        monkeypatch.setitem(vars(mlp), "forward", interrupt)


def test_two_patched_models_in_one_process(make_patched, ids) -> None:
    first = make_patched("llama", cpu_share=1.0)
    second = make_patched("qwen3_moe", cpu_share=0.0)
    for _ in range(2):
        for name, patched in (("llama", first), ("qwen3_moe", second)):
            same_tokens(build(name), patched.model, ids, max_new_tokens=9)
    first.restore()
    same_tokens(build("qwen3_moe"), second.model, ids, max_new_tokens=9)


def test_two_threads_with_one_model(make_patched) -> None:
    patched, plain = make_patched("llama", cpu_share=0.5), build("llama")
    prompts = [
        torch.randint(1, 90, (rows, length), generator=torch.Generator().manual_seed(length))
        for rows, length in ((1, 11), (3, 24))
    ]
    options = {"max_new_tokens": 15, "do_sample": False}
    expected = [plain.generate(prompt, **options) for prompt in prompts]
    failures = []

    def work(which: int) -> None:
        try:
            for _ in range(5):
                got = patched.model.generate(prompts[which], **options)
                assert torch.equal(got, expected[which])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_attention_implementation_changed_after_patch_is_noticed(make_patched, ids) -> None:
    patched = make_patched("llama")
    patched.model.set_attn_implementation("eager")
    with pytest.raises(CacheStateError, match=r"'eager'.*restore"):
        patched.model.generate(ids, max_new_tokens=2)
    patched.restore()
    assert patched.model.config._attn_implementation == "sdpa"


def test_patched_model_does_not_pickle_and_says_why(make_patched) -> None:
    with pytest.raises(CacheStateError, match=r"restore\(\)"):
        pickle.dumps(make_patched("llama").model)


def test_many_generates_hold_no_more_memory_than_one(make_patched, ids) -> None:
    patched = make_patched("llama")
    for _ in range(3):
        patched.model.generate(ids, max_new_tokens=9)
    pool = patched.new_cache().store.owner.pool
    before = pool.idle_bytes()
    for _ in range(10):
        patched.model.generate(ids, max_new_tokens=9)
    assert pool.idle_bytes() == before
