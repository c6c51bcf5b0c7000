"""What people put around a model: pipelines, streamers, PEFT, quantisation, torch.compile."""

from __future__ import annotations

import copy
import logging
import warnings
from threading import Thread
from typing import Any

import pytest
import torch
from model_zoo import build, same_tokens, small_config
from transformers import (
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

import sparsekv
from sparsekv import UnsupportedModelError
from sparsekv.models import compat
from sparsekv.models.cache import SparseKVCache


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0 ... w96, one token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1} | {f"w{i}": i for i in range(2, 96)} | {"</s>": 96}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side="left",
    )


PROMPTS = ["w5 w6 w7 w8 w9 w10 w11 w12 w13", "w20 w21"]


def test_pipeline(make_patched, tokenizer) -> None:
    texts = []
    for model in (build("llama"), make_patched("llama").model):
        generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
        texts.append(
            [
                [out[0]["generated_text"] for out in generator(PROMPTS, batch_size=size, **options)]
                for size in (1, 2)
                for options in ({"max_new_tokens": 12, "do_sample": False},)
            ]
        )
    assert texts[0] == texts[1]


def test_pipeline_made_before_the_patch(tokenizer) -> None:
    model = build("qwen3_moe")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = generator(PROMPTS[0], **options)
    with sparsekv.patch(model, small_config()) as patched:
        assert generator(PROMPTS[0], **options) == expected
        assert patched.stats().num_tokens > 12
    assert generator(PROMPTS[0], **options) == expected


def test_streamers(make_patched, tokenizer, capsys) -> None:
    model = make_patched("llama").model
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    inputs.pop("token_type_ids", None)
    options = {"max_new_tokens": 12, "do_sample": False}
    whole = tokenizer.decode(model.generate(**inputs, **options)[0])
    model.generate(**inputs, **options, streamer=TextStreamer(tokenizer))
    assert capsys.readouterr().out.split() == whole.split()
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    thread = Thread(target=model.generate, kwargs={**inputs, **options, "streamer": streamer})
    thread.start()
    assert "".join(streamer).split() == whole.split()
    thread.join()


@pytest.mark.parametrize("beams", [1, 3])
def test_scores_logits_and_hidden_states(make_patched, padded, beams) -> None:
    outputs = [
        model.generate(
            **padded,
            num_beams=beams,
            max_new_tokens=8,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            output_hidden_states=True,
        )
        for model in (build("qwen3_moe"), make_patched("qwen3_moe").model)
    ]
    expected, got = outputs
    assert torch.equal(expected.sequences, got.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(getattr(expected, name), getattr(got, name), strict=True):
            torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)
    assert len(got.hidden_states) == len(expected.hidden_states)
    assert isinstance(compat.cache_in(got), SparseKVCache)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
class TestPeft:
    """Adapters around the model, patched before or after."""

    @staticmethod
    def _lora(model: Any) -> Any:
        peft = pytest.importorskip("peft")
        torch.manual_seed(5)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
        return peft.get_peft_model(model, config).eval()

    @pytest.mark.parametrize("patched_first", [False, True])
    def test_lora(self, ids, patched_first) -> None:
        plain, model = self._lora(build("llama")), build("llama")
        if patched_first:
            patched = sparsekv.patch(model, small_config())
            wrapped = self._lora(model)
        else:
            wrapped = self._lora(model)
            patched = sparsekv.patch(wrapped, small_config())
            assert patched.model is wrapped
        with patched:
            same_tokens(plain, wrapped, input_ids=ids, max_new_tokens=12)
            assert patched.stats().num_tokens == 17 + 11
            same_tokens(plain, copy.deepcopy(wrapped), input_ids=ids, max_new_tokens=8)
        same_tokens(plain, wrapped, input_ids=ids, max_new_tokens=4)
        assert "generate" not in vars(model)

    def test_other_base_model_is_refused(self) -> None:
        from transformers import AutoModelForCausalLM, GPT2Config

        peft = pytest.importorskip("peft")
        base = AutoModelForCausalLM.from_config(
            GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
        )
        wrapped = peft.get_peft_model(base, peft.LoraConfig(target_modules=["c_attn"]))
        with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
            sparsekv.patch(wrapped)

    @pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache`:FutureWarning")
    def test_prefix_tuning_brings_its_own_cache(self, ids) -> None:
        peft = pytest.importorskip("peft")
        models = []
        for _ in range(2):
            torch.manual_seed(5)
            config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
            models.append(peft.get_peft_model(build("llama"), config).eval())
        with sparsekv.patch(models[1], small_config()):
            same_tokens(models[0], models[1], input_ids=ids, max_new_tokens=6)


def test_weight_only_quantisation(ids) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    models = []
    for _ in range(2):
        models.append(build("llama"))
        quantization.quantize_(models[-1], quantization.Int8WeightOnlyConfig())
    assert type(models[0].model.layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
    with sparsekv.patch(models[1], small_config()) as patched:
        same_tokens(models[0], models[1], ids, max_new_tokens=12)
        assert patched.stats().num_tokens == 17 + 11


class TestCompile:
    """Dynamo stops at our functions and goes on after them."""

    @pytest.fixture(autouse=True)
    def _fresh(self) -> Any:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize(
        "backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)]
    )
    def test_compiled_in_place(self, make_patched, ids, backend) -> None:
        patched = make_patched("llama", cpu_share=0.5)
        patched.model.compile(backend=backend)
        same_tokens(build("llama"), patched.model, ids, max_new_tokens=9)
        assert patched.stats().num_tokens == 17 + 8

    def test_compiled_before_the_patch(self, ids) -> None:
        model = build("llama")
        compiled = torch.compile(model, backend="eager")
        with sparsekv.patch(compiled, small_config()) as patched:
            same_tokens(build("llama"), compiled, ids, max_new_tokens=6)
            cache = patched.new_cache()
            with torch.no_grad():
                got = compiled(ids, **{compat.CACHE_KW: cache}).logits
                expected = build("llama")(ids).logits
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        assert "generate" not in vars(model)

    @pytest.mark.slow
    def test_number_of_compilations_does_not_grow_with_the_text(self, make_patched, ids) -> None:
        patched = make_patched("llama", cpu_share=0.5)
        counter = torch._dynamo.testing.CompileCounter()
        patched.model.compile(backend=counter)
        patched.model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None)
        early = counter.frame_count
        patched.model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None)
        assert early > 0
        assert counter.frame_count <= early + 2


def test_wrapped_in_device_alignment_hooks(make_patched, padded) -> None:
    """accelerate's dispatch moves inputs of every module; caches and handles must pass."""
    accelerate = pytest.importorskip("accelerate")
    plain = build("qwen3_moe")
    model = build("qwen3_moe")
    accelerate.dispatch_model(
        model, {"model": "cpu", "lm_head": "cpu"}, main_device="cpu", force_hooks=True
    )
    with sparsekv.patch(model, small_config()) as patched:
        same_tokens(plain, model, **padded, max_new_tokens=9)
        assert patched.stats().num_tokens == 17 + 8


def test_weights_offloaded_by_accelerate(padded) -> None:
    """Parameters on meta between the calls, brought by hooks: a `cpu` entry of a device map."""
    accelerate = pytest.importorskip("accelerate")
    model = build("llama")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with sparsekv.patch(model, small_config()) as patched:
        same_tokens(build("llama"), model, **padded, max_new_tokens=6)
        assert patched.stats().num_tokens > 17


def test_nothing_is_said_on_the_usual_path(make_patched, padded, caplog) -> None:
    """No deprecation, no log: the arguments are named as this transformers names them."""
    patched = make_patched("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        caplog.set_level(logging.WARNING)
        patched.model.generate(**padded, max_new_tokens=5, do_sample=False)
        with torch.no_grad():
            out = patched.model(**padded, **{compat.CACHE_KW: patched.new_cache()})
        assert compat.cache_in(out).get_seq_length() == 17
    assert not caplog.records
    assert compat.cache_in({"past_key_values": None, "cache": 3}) == 3
