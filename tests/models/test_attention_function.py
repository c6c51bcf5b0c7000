"""The function registered with transformers: what it refuses, what it passes on, and its masks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from model_zoo import build, same_tokens
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import and_masks, causal_mask_function

import sparsekv
from sparsekv import LayoutError, UnsupportedModelError
from sparsekv.models import attention, compat, masks
from sparsekv.models.masks import dense_mask, sparsekv_mask, split_mask


def _attend(module: Any, **kwargs: Any) -> Any:
    query, key = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    return attention.sparsekv_attention(module, query, key, key, None, **kwargs)


class TestRefusals:
    """Loud, naming what and what to do."""

    @pytest.mark.parametrize("name", ["s_aux", "softcap", "position_bias"])
    def test_what_it_would_ignore(self, name) -> None:
        module = build("llama").model.layers[0].self_attn
        with pytest.raises(UnsupportedModelError, match=rf"{name}.*eager"):
            _attend(module, **{name: torch.ones(4)})
        _attend(module, **{name: None})

    def test_unknown_attention_module(self) -> None:
        with pytest.raises(UnsupportedModelError, match=r"Linear.*sdpa"):
            _attend(torch.nn.Linear(1, 1))

    def test_sliding_window_on_a_layer_kept_in_full(self, make_patched, ids) -> None:
        patched = make_patched("qwen3")
        cache = patched.new_cache()
        patched.model.model.layers[1].self_attn.sliding_window = 4
        with torch.no_grad(), pytest.raises(UnsupportedModelError, match="sliding_window=4"):
            patched.model(ids, **{compat.CACHE_KW: cache})
        assert cache.get_seq_length(1) == 0

    @pytest.mark.parametrize("name", ["GptOssConfig", "DeepseekV4Config"])
    def test_attention_sinks_by_hand(self, make_patched, name) -> None:
        """Models that are not on the list accept the name, and must not run with it."""
        make_patched("llama")  # registers the name
        special: dict[str, dict[str, Any]] = {
            "GptOssConfig": {"num_key_value_heads": 2, "num_local_experts": 2},
            "DeepseekV4Config": {
                "num_key_value_heads": 1,
                "q_lora_rank": 16,
                "o_lora_rank": 8,
                "o_groups": 2,
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "moe_intermediate_size": 16,
                "index_n_heads": 4,
                "index_head_dim": 8,
                "index_topk": 4,
                "qk_rope_head_dim": 8,
                "num_nextn_predict_layers": 0,
            },
        }
        config = getattr(transformers, name)(
            vocab_size=31,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            head_dim=16,
            num_experts_per_tok=1,
            pad_token_id=0,
            **special[name],
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        model.set_attn_implementation("sparsekv")
        with torch.no_grad(), pytest.raises(UnsupportedModelError, match=r"s_aux.*eager"):
            model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)

    def test_unlisted_model_without_any_special_argument(self, make_patched) -> None:
        make_patched("llama")
        config = transformers.Qwen2Config(
            vocab_size=31,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = AutoModelForCausalLM.from_config(config).eval()
        model.set_attn_implementation("sparsekv")
        with pytest.raises(UnsupportedModelError, match="Qwen2Attention"):
            model(torch.tensor([[1, 2, 3]]))

    def test_attention_weights(self, make_patched, ids) -> None:
        patched = make_patched("llama")
        model = patched.model
        with pytest.raises(UnsupportedModelError, match=r"output_attentions.*restore.*eager"):
            model.generate(ids, output_attentions=True, return_dict_in_generate=True)
        config = transformers.GenerationConfig(output_attentions=True, return_dict_in_generate=True)
        with pytest.raises(UnsupportedModelError, match="output_attentions"):
            model.generate(ids, generation_config=config)
        for given in ({}, {"use_cache": False}, {compat.CACHE_KW: patched.new_cache()}):
            with pytest.raises(UnsupportedModelError, match="output_attentions"):
                model(ids, output_attentions=True, **given)
        patched.restore()
        model.set_attn_implementation("eager")
        assert model(ids, output_attentions=True).attentions[0] is not None
        model.config.output_attentions = True
        with pytest.raises(UnsupportedModelError, match=r"config\.output_attentions"):
            sparsekv.patch(model)

    def test_continuous_batching(self, make_patched, ids) -> None:
        model = make_patched("llama").model
        with pytest.raises(UnsupportedModelError, match="continuous batching"):
            model.generate_batch(inputs=ids.tolist())
        with pytest.raises(UnsupportedModelError, match="continuous batching"):
            model.generate(ids, cache_implementation="paged", max_new_tokens=2)
        with pytest.raises(UnsupportedModelError, match="continuous batching"):
            model.init_continuous_batching()


class TestForeignCaches:
    """A cache that is not ours works, densely, and that is said once."""

    @pytest.fixture(autouse=True)
    def _say_it_again(self) -> None:
        attention._warn_dense.cache_clear()

    @pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_mixed"])
    def test_dynamic_cache(self, make_patched, padded, caplog, name) -> None:
        patched, plain = make_patched(name), build(name)
        caplog.set_level(logging.WARNING, "sparsekv")
        for _ in range(2):
            outputs = [
                model.generate(
                    **padded,
                    **{compat.CACHE_KW: DynamicCache(config=plain.config)},
                    max_new_tokens=8,
                    do_sample=False,
                )
                for model in (plain, patched.model)
            ]
            assert torch.equal(*outputs)
        said = [r for r in caplog.records if r.name.startswith("sparsekv")]
        assert [r.levelname for r in said] == ["WARNING"]
        assert "new_cache()" in said[0].getMessage()

    def test_chunks_without_padding(self, make_patched, ids) -> None:
        """Queries at the end of more keys, no mask: sdpa's own reading of None would be wrong."""
        plain, model = build("llama"), make_patched("llama").model
        expected = plain(ids).logits
        cache, parts = DynamicCache(config=plain.config), []
        for start, stop in ((0, 6), (6, 11), (11, 17)):
            parts.append(model(ids[:, start:stop], **{compat.CACHE_KW: cache}).logits)
        torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=1e-5)

    def test_ours_says_nothing(self, make_patched, padded, caplog) -> None:
        patched = make_patched("qwen3_mixed")
        patched.model.generate(**padded, max_new_tokens=4)
        patched.model.generate(**padded, max_new_tokens=4, use_cache=False)
        assert not [r for r in caplog.records if r.name.startswith("sparsekv")]

    @pytest.mark.parametrize("implementation", ["dynamic", "static", "offloaded"])
    def test_by_name(self, make_patched, ids, implementation) -> None:
        if implementation == "offloaded" and not torch.cuda.is_available():
            pytest.skip("transformers' offloaded cache needs CUDA streams")
        options = {"cache_implementation": implementation, "max_new_tokens": 5}
        same_tokens(build("llama"), make_patched("llama").model, ids, **options)

    def test_static_cache_object(self, make_patched, padded) -> None:
        plain, model = build("llama"), make_patched("llama").model
        outputs = [
            who.generate(
                **padded,
                **{
                    compat.CACHE_KW: transformers.StaticCache(config=plain.config, max_cache_len=40)
                },
                max_new_tokens=6,
                do_sample=False,
            )
            for who in (plain, model)
        ]
        assert torch.equal(*outputs)


class TestMasks:
    """The mask function, and what becomes of its answer."""

    def _mask(self, q_length: int, kv_length: int, **kwargs: Any) -> Any:
        offset = kwargs.pop("q_offset", kv_length - q_length)
        return sparsekv_mask(
            batch_size=2, q_length=q_length, kv_length=kv_length, q_offset=offset, **kwargs
        )

    def test_plain_causal_needs_none(self) -> None:
        full = torch.ones(2, 7, dtype=torch.bool)
        assert self._mask(7, 7) is None
        assert self._mask(1, 7) is None
        assert self._mask(7, 7, attention_mask=full) is None
        assert self._mask(1, 7, attention_mask=full) is None

    def test_chunk_needs_no_padding_mask_but_is_not_none(self) -> None:
        mask = self._mask(3, 7)
        assert mask.shape == (2, 7)
        assert mask.untyped_storage().nbytes() == 1
        assert split_mask(mask, 3, 7) == (None, None)
        assert torch.equal(dense_mask(mask, 3, 7)[1, 0], torch.ones(3, 7).tril(4).bool())

    def test_padding_stays_two_dimensional(self) -> None:
        padding = torch.ones(2, 7, dtype=torch.bool)
        padding[0, :3] = False
        mask = self._mask(7, 7, attention_mask=padding)
        assert torch.equal(mask, padding)
        assert split_mask(mask, 7, 7) == (mask, None)
        dense = dense_mask(mask, 7, 7)
        assert dense_mask(mask, 7, 7) is dense, "built once for all layers"
        assert torch.equal(dense[0, 0], torch.ones(7, 7).tril().bool() & padding[0])

    def test_short_mask_hides_what_it_does_not_cover(self) -> None:
        mask = self._mask(2, 7, attention_mask=torch.ones(2, 5, dtype=torch.bool))
        assert mask.tolist() == [[True] * 5 + [False] * 2] * 2

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"mask_function": and_masks(causal_mask_function, lambda b, h, q, k: k != 2)},
            {"q_offset": 0},  # a static cache: keys that are not written yet
            {"allow_is_causal_skip": False},
        ],
    )
    def test_everything_else_is_transformers_own(self, kwargs) -> None:
        padding = torch.ones(2, 7, dtype=torch.bool)
        padding[0, 0] = False
        mask = self._mask(3, 7, attention_mask=padding, **kwargs)
        expected = masks.sdpa_mask(
            batch_size=2,
            q_length=3,
            kv_length=7,
            **({"q_offset": 4, "attention_mask": padding} | kwargs),
        )
        assert mask.shape == (2, 1, 3, 7)
        assert torch.equal(mask, expected)

    @pytest.mark.parametrize(
        "mask",
        [
            torch.ones(2, 1, 3, 7, dtype=torch.long),
            torch.ones(2, 1, 3, 6),
            torch.ones(2, 6, dtype=torch.bool),
            torch.ones(3, 7, dtype=torch.bool)[None],
            "causal",
        ],
    )
    def test_masks_that_fit_nothing(self, mask) -> None:
        with pytest.raises(LayoutError, match="attention_mask"):
            split_mask(mask, 3, 7)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
    def test_rows_that_see_nothing_are_zero(self, dtype) -> None:
        query, key, value = torch.randn(3, 1, 2, 5, 4).unbind(0)
        visible = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
        visible[..., 2, :] = False
        mask = visible
        if dtype.is_floating_point:
            mask = torch.zeros(1, 1, 5, 5).masked_fill(~visible, float("-inf"))
        out = attention.prefill_attention(query, key, value, 0.5, mask=mask)
        assert (out[:, :, 2] == 0).all()
        assert torch.isfinite(out).all()
