"""DeepSeek-V4 in regions: the answers of the unpatched model and of the float64 reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import deepseek_v4_zoo as zoo
import model_zoo
import pytest
import torch
from transformers import DynamicCache

import sparsekv
from sparsekv.errors import (
    CacheStateError,
    CapacityError,
    LayoutError,
    SparseKVError,
    UnsupportedModelError,
)
from sparsekv.kernels.reference.entry_format import QUANTIZED_DIM, simulate_fp8
from sparsekv.models import compat

ATOL = 1e-4
"""For float32 logits, whose standard deviation is near 1."""


@pytest.fixture
def patch() -> Iterator[Callable[..., sparsekv.Patched]]:
    """(model or its name, **CacheConfig changes) -> Patched; restored at the end."""
    patches = []

    def make(model: Any = "tiny", **changes: Any) -> sparsekv.Patched:
        model = zoo.build(model) if isinstance(model, str) else model
        patches.append(sparsekv.patch(model, zoo.small_config(**changes)))
        return patches[-1]

    yield make
    for patched in patches:
        patched.restore()


def check_continues(patched: Any, cache: Any, rows: Any = slice(None), past: int = 30) -> None:
    """The cache of `past` tokens of `token_ids` goes on as a model without cache does."""
    ids, expected = zoo.token_ids(2, 60)[rows], zoo.expected_logits("tiny", 2, 60)[rows]
    got = zoo.forward_in(patched.model, ids[:, past:], cache, [1] * 7 + zoo.chunks(53 - past, 9))
    torch.testing.assert_close(got, expected[:, past:], atol=ATOL, rtol=0)


# Lengths and cuts


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(0.0, marks=pytest.mark.slow),
        0.3,
        pytest.param(1.0, marks=pytest.mark.slow),
    ],
)
def test_prefill_of_every_length_then_decode(patch: Any, share: float) -> None:
    patched, ids = patch(cpu_share=share), zoo.token_ids(2, 60)
    expected = zoo.expected_logits("tiny", 2, 60)
    for length in range(1, 41, 1 if share == 0.3 else 3):
        # Past the next entry of both rates: one token a call, where one closes.
        stop = max(length // 16 * 16 + 18, length + 5)
        calls = [length, *zoo.chunks(stop - length - 5, 4), 1, 1, 1, 1, 1]
        got = zoo.forward_in(patched.model, ids, patched.new_cache(), calls)
        difference = (got - expected[:, :stop]).abs().max()
        assert difference < ATOL, (length, difference)


@pytest.mark.parametrize("length", [*range(120, 141), 255, 256, 257, 383, 384, 385, 511, 512, 513])
def test_the_real_window_and_rates(patch: Any, length: int) -> None:
    ids, expected = zoo.token_ids(1, 650), zoo.expected_logits("real rates", 1, 650)
    patched = patch("real rates", window_size=16, ping_pong_tokens=16)
    boundary = length // 128 * 128 + 128
    calls = [length, 1, 1, 1, 1, 1, *zoo.chunks(boundary - length - 7, 29), 1, 1, 1, 1]
    got = zoo.forward_in(patched.model, ids, patched.new_cache(), calls)
    torch.testing.assert_close(got, expected[:, : got.shape[1]], atol=ATOL, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 3, 126, 127, 128, 129])
def test_every_token_alone_past_the_real_boundaries(patch: Any, length: int) -> None:
    ids, expected = zoo.token_ids(1, 650), zoo.expected_logits("real rates", 1, 650)
    patched = patch("real rates", window_size=16, ping_pong_tokens=16)
    got = zoo.forward_in(patched.model, ids, patched.new_cache(), [length] + [1] * (520 - length))
    torch.testing.assert_close(got, expected[:, :520], atol=ATOL, rtol=0)


@pytest.mark.parametrize("size", range(1, 18))
@pytest.mark.parametrize("name", ["tiny", "everything selected"])
def test_chunks_of_every_size(patch: Any, name: str, size: int) -> None:
    patched, ids = patch(name), zoo.token_ids(2, 60)
    got = zoo.forward_in(patched.model, ids, patched.new_cache(), zoo.chunks(60, size))
    torch.testing.assert_close(got, zoo.expected_logits(name, 2, 60), atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_layer_patterns_of_the_released_models(patch: Any, name: str) -> None:
    patched, ids = patch(name), zoo.token_ids(2, 60)
    got = zoo.forward_in(patched.model, ids, patched.new_cache(), [29, 1, 1, 1, 1, 27])
    torch.testing.assert_close(got, zoo.expected_logits(name, 2, 60), atol=ATOL, rtol=0)


# The float64 reference


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("calls", [[70], [1] * 70, [3, 40, 1, 1, 1, 1, 23]], ids=len)
def test_attention_is_the_reference(patch: Any, share: float, calls: list[int]) -> None:
    patched = patch(zoo.build().double(), cpu_share=share)
    with zoo.watched(patched.model) as seen:
        zoo.forward_in(patched.model, zoo.token_ids(2, 70), patched.new_cache(), calls)
    zoo.check_attention(patched.model, seen, atol=2e-6)  # norms and angles are float32 upstream


@pytest.mark.parametrize("calls", [[400, *[1] * 8], zoo.chunks(400, 37)], ids=len)
def test_hundreds_of_equal_scores_go_to_the_lowest_index(patch: Any, calls: list[int]) -> None:
    model = zoo.build("ties").double()
    # Two CSA layers: one in which all scores are 0, one in which about half are.
    model.model.layers[1].self_attn.compressor.indexer.scorer.weights_proj.weight.data.zero_()
    patched = patch(model)
    with zoo.watched(patched.model) as seen:
        zoo.forward_in(patched.model, zoo.token_ids(1, 408), patched.new_cache(), calls)
    zoo.check_attention(patched.model, seen, atol=2e-6)


@pytest.mark.parametrize("sink", [torch.inf, -torch.inf])
def test_infinite_sinks(patch: Any, sink: float) -> None:
    model = zoo.build().double()
    for layer in model.model.layers:
        layer.self_attn.sinks.data[1] = sink
    patched = patch(model)
    with zoo.watched(patched.model) as seen:
        zoo.forward_in(patched.model, zoo.token_ids(1, 40), patched.new_cache(), [21] + [1] * 19)
    for _, outputs in seen:
        assert torch.cat(outputs, 1).isfinite().all()
    if sink < 0:  # of +inf, the reference's softmax makes NaN
        zoo.check_attention(patched.model, seen, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_packed_entries_are_the_reference_with_rounded_entries(
    patch: Any, share: float, dtype: torch.dtype
) -> None:
    def stored(entries: torch.Tensor) -> torch.Tensor:
        quantized, rope = entries[:, :QUANTIZED_DIM], entries[:, QUANTIZED_DIM:]
        return torch.cat([simulate_fp8(quantized).double(), rope.bfloat16().double()], 1)

    model = zoo.build("entries of 512").to(dtype)
    patched = patch(model, cpu_share=share, entry_format="packed")
    with zoo.watched(patched.model) as seen:
        zoo.forward_in(patched.model, zoo.token_ids(2, 50), patched.new_cache(), [31] + [1] * 19)
    # A number next to the middle between two fp8 values may go to either side of it: one part in
    # 16 of one of 512 channels of one of several keys.
    zoo.check_attention(patched.model, seen, atol=2e-3, stored=stored)
    with pytest.raises(AssertionError):  # and the rounding shows
        zoo.check_attention(patched.model, seen, atol=2e-3)


def test_bfloat16_is_as_near_as_the_unpatched_model(patch: Any) -> None:
    # Fed the same tokens. Medians: where rounding flips an expert or an entry, one token's logits
    # jump, in either model and not in the same places.
    ids, model = zoo.token_ids(2, 60), zoo.build("hash routed")
    exact = zoo.expected_logits("hash routed", 2, 60)
    # As from_pretrained loads it, save for the norms: with them in float32, 5.17 cannot run.
    keep = {"attn_hc", "ffn_hc", "hc_head", "sinks", "position_bias"}
    model = model.bfloat16()
    for name, parameter in model.named_parameters():
        if keep & set(name.split(".")):
            parameter.data = parameter.data.float()
    plain_cache, patched_model = DynamicCache(config=model.config), copy.deepcopy(model)
    plain = zoo.forward_in(model, ids, plain_cache, [30] + [1] * 30).float()
    patched = patch(patched_model)
    got = zoo.forward_in(patched.model, ids, patched.new_cache(), [30] + [1] * 30).float()
    error, allowed = (got - exact).abs(), (plain - exact).abs()
    assert error.median() <= 2 * allowed.median()
    assert error.mean() <= 2 * allowed.mean()


# One cache after another


def test_requests_one_after_the_other_share_nothing(patch: Any) -> None:
    patched = patch()
    used = patched.new_cache()
    for length in (50, 3, 1, 2, 37, 3):
        ids = zoo.token_ids(1, length + 8, seed=length)
        with torch.no_grad():
            expected = zoo.original()(ids, use_cache=False).logits
        used.reset()
        for cache in (used, patched.new_cache()):
            got = zoo.forward_in(patched.model, ids, cache, [length, 1, 1, 1, 1, 1, 3])
            torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)


def test_two_caches_in_turn(patch: Any) -> None:
    patched, expected = patch(), zoo.expected_logits("tiny", 2, 60)
    caches, ids = [patched.new_cache(), patched.new_cache()], zoo.token_ids(2, 60)
    for start in range(0, 60, 5):
        for row, cache in enumerate(caches):
            got = zoo.forward(patched.model, ids[row : row + 1, start : start + 5], cache)
            torch.testing.assert_close(
                got, expected[row : row + 1, start : start + 5], atol=ATOL, rtol=0
            )


# Generation

GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams with several results": {"num_beams": 4, "num_return_sequences": 3},
    "sampling": {"do_sample": True, "top_k": 20},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "sampled beams": {"do_sample": True, "num_beams": 3},
    "repetition penalty": {"repetition_penalty": 1.3},
}


@pytest.mark.parametrize("name", GENERATION)
@pytest.mark.parametrize("length", [3, 21])
def test_generate_is_that_of_the_model_without_cache(patch: Any, name: str, length: int) -> None:
    patched, ids = patch(), zoo.token_ids(2, length)
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    settings |= GENERATION[name]
    torch.manual_seed(0)
    expected = zoo.build().generate(ids, use_cache=False, **settings)
    torch.manual_seed(0)
    got = patched.model.generate(ids, **settings)
    assert torch.equal(got, expected)


def test_rows_that_end_early(patch: Any) -> None:
    patched, ids = patch(), zoo.token_ids(3, 14)
    free = zoo.build().generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": int(free[1, 18])}
    expected = zoo.build().generate(ids, use_cache=False, **settings)
    assert torch.equal(patched.model.generate(ids, **settings), expected)


def test_a_chat_and_a_prompt_in_chunks(patch: Any) -> None:
    patched = patch()
    settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    ids, cache = zoo.token_ids(1, 23), patched.new_cache()
    # In chunks only at first: later ones get positions from 0 on in transformers 5.17.
    for given in ({"prefill_chunk_size": 5}, {}, {}):
        expected = zoo.build().generate(ids, use_cache=False, **settings)
        given = given | {compat.CACHE_KW: cache}
        ids = patched.model.generate(ids, **given, **settings)
        assert torch.equal(ids, expected)
        ids = torch.cat([ids, zoo.token_ids(1, 6)], 1)


# Rows and length


def test_rows_are_reordered_selected_and_repeated(patch: Any) -> None:
    patched, ids = patch(), zoo.token_ids(2, 60)
    for apply, rows in (
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([False, True])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    ):
        cache = patched.new_cache()
        zoo.forward(patched.model, ids[:, :30], cache)
        apply(cache)
        assert cache.batch_size == len(rows)
        assert torch.equal(cache.store.cache.token_ids, ids[rows, :30])
        twin = copy.deepcopy(cache)
        check_continues(patched, cache, rows)
        # The ids moved with the rows: going back reads the right ones.
        twin.crop(-7)
        check_continues(patched, twin, rows, past=23)


def test_crop_to_many_lengths(patch: Any) -> None:
    patched, ids = patch(), zoo.token_ids(2, 90)
    expected = zoo.expected_logits("tiny", 2, 90)
    full = patched.new_cache()
    zoo.forward_in(patched.model, ids[:, :84], full, [70, *[1] * 14])
    assert full.store.cache._replay_start(84) > 0  # what the last tokens depend on is not all
    for length in [*range(0, 85, 7), *range(78, 85)]:
        cache = copy.deepcopy(full)
        cache.crop(length - 84)
        assert cache.get_seq_length() == length
        got = zoo.forward_in(patched.model, ids[:, length : length + 6], cache, [1, 5])
        torch.testing.assert_close(got, expected[:, length : length + 6], atol=ATOL, rtol=0)
    rest = zoo.forward(patched.model, ids[:, 84:], full)  # none of the copies changed it
    torch.testing.assert_close(rest, expected[:, 84:], atol=ATOL, rtol=0)


def test_other_tokens_after_a_crop(patch: Any) -> None:
    patched, ids, others = patch(), zoo.token_ids(1, 90), zoo.token_ids(1, 40, seed=9)
    for length in (0, 3, 40, 61, 64):
        cache = patched.new_cache()
        zoo.forward(patched.model, ids, cache)
        cache.crop(length - 90)
        whole = torch.cat([ids[:, :length], others], 1)
        got = zoo.forward_in(patched.model, others, cache, [5, 1, 1, 33])
        with torch.no_grad():
            expected = zoo.original()(whole, use_cache=False).logits[:, length:]
        torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)
        cache.crop(-39)
        got = zoo.forward(patched.model, others[:, 1:], cache)
        torch.testing.assert_close(got, expected[:, 1:], atol=ATOL, rtol=0)


def test_a_copy_goes_its_own_way(patch: Any) -> None:
    patched, ids = patch(), zoo.token_ids(2, 60)
    cache = patched.new_cache()
    zoo.forward(patched.model, ids[:, :30], cache)
    twin = copy.deepcopy(cache)
    zoo.forward(patched.model, zoo.token_ids(2, 20, seed=1), twin)
    check_continues(patched, cache)


# Errors and interruptions


class StopHere(Exception):
    """Raised in the middle of a model."""


class Stopper:
    """Raises in a layer's attention, or after it, at the n-th call."""

    def __init__(self, model: Any, layer_idx: int, part: str, calls: int = 1) -> None:
        self.calls, attention = calls, model.model.layers[layer_idx].self_attn
        module = attention.o_b_proj if part == "end" else attention.q_b_proj
        self.handle = module.register_forward_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        self.calls -= 1
        if self.calls == 0:
            raise StopHere


@pytest.mark.parametrize("part", ["start", "end"])
@pytest.mark.parametrize("layer_idx", range(4))
def test_an_interrupted_forward_says_so_and_crop_repairs(
    patch: Any, layer_idx: int, part: str
) -> None:
    patched, ids = patch(), zoo.token_ids(2, 60)
    for length in (3, 30):
        cache = patched.new_cache()
        zoo.forward(patched.model, ids[:, :length], cache)
        stopper = Stopper(patched.model, layer_idx, part)
        with pytest.raises(StopHere):
            zoo.forward(patched.model, zoo.token_ids(2, 9, seed=8), cache)
        stopper.handle.remove()
        if layer_idx or part == "end":
            is_last = layer_idx == 3 and part == "end"
            if not is_last:
                with pytest.raises(CacheStateError, match="interrupted"):
                    zoo.forward(patched.model, ids[:, length : length + 1], cache)
                with pytest.raises(CacheStateError, match="interrupted"):
                    cache.reorder_cache(torch.tensor([1, 0]))
            cache.crop(-9)
        assert cache.get_seq_length() == length
        check_continues(patched, cache, past=length)


def test_crop_keeps_any_length_after_an_interruption(patch: Any) -> None:
    patched, ids = patch(), zoo.token_ids(2, 60)
    full = patched.new_cache()
    zoo.forward(patched.model, ids[:, :30], full)
    stopper = Stopper(patched.model, 2, "start")
    with pytest.raises(StopHere):
        zoo.forward(patched.model, ids[:, 30:45], full)
    stopper.handle.remove()
    for length in range(0, 46, 5):  # more than the last layers had seen: they read them now
        cache = copy.deepcopy(full)
        cache.crop(length - 45)
        assert cache.get_seq_length() == length
        check_continues(patched, cache, past=length)


@pytest.mark.parametrize("layer_idx", range(4))
def test_an_interrupted_crop_leaves_the_cache(patch: Any, layer_idx: int) -> None:
    patched, ids = patch(), zoo.token_ids(2, 60)
    for length in (29, 13, 5):
        cache = patched.new_cache()
        zoo.forward(patched.model, ids[:, :30], cache)
        stopper = Stopper(patched.model, layer_idx, "start")
        with pytest.raises(StopHere):
            cache.crop(length - 30)
        stopper.handle.remove()
        assert cache.get_seq_length() == 30
        twin = copy.deepcopy(cache)
        check_continues(patched, cache)
        twin.crop(length - 30)
        check_continues(patched, twin, past=length)


def test_generate_works_after_an_interruption(patch: Any) -> None:
    patched, ids = patch(), zoo.token_ids(1, 21)
    settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    expected = zoo.build().generate(ids, use_cache=False, **settings)
    cache = patched.new_cache()
    for layer_idx in range(4):
        for given in ({}, {compat.CACHE_KW: cache}):
            stopper = Stopper(patched.model, layer_idx, "start", calls=4)
            with pytest.raises(StopHere):
                patched.model.generate(ids, **given, **settings)
            stopper.handle.remove()
        assert torch.equal(patched.model.generate(ids, **settings), expected)
        assert cache.get_seq_length() == 0
        got = patched.model.generate(ids, **{compat.CACHE_KW: cache}, **settings)
        assert torch.equal(got, expected)
        cache.reset()


@pytest.mark.parametrize("layer_idx", range(4))
def test_a_chat_is_as_before_after_an_interrupted_answer(patch: Any, layer_idx: int) -> None:
    patched = patch()
    cache = patched.new_cache()
    ids = zoo.token_ids(2, 60)
    zoo.forward(patched.model, ids[:, :30], cache)
    stopper = Stopper(patched.model, layer_idx, "end", calls=4)
    with pytest.raises(StopHere):
        patched.model.generate(
            ids[:, :33], max_new_tokens=9, do_sample=False, **{compat.CACHE_KW: cache}
        )
    stopper.handle.remove()
    assert cache.get_seq_length() == 30
    check_continues(patched, cache)


def _mask(ids: torch.Tensor, hidden: int) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[0, hidden] = 0
    return mask


REFUSED: dict[str, tuple[Callable[[torch.Tensor], dict[str, Any]], type[Exception]]] = {
    "left padding": (lambda ids: {"attention_mask": _mask(ids, 0)}, UnsupportedModelError),
    "right padding": (lambda ids: {"attention_mask": _mask(ids, -1)}, UnsupportedModelError),
    "a mask of its own": (
        lambda ids: {"attention_mask": torch.zeros(2, 1, ids.shape[1], ids.shape[1])},
        UnsupportedModelError,
    ),
    "a mask by layer type": (
        lambda ids: {"attention_mask": {zoo.SLIDING: torch.zeros(2, 1, ids.shape[1], 8)}},
        UnsupportedModelError,
    ),
    "shifted positions": (
        lambda ids: {"position_ids": torch.arange(ids.shape[1])[None] + 50},
        UnsupportedModelError,
    ),
    "attention weights": (lambda ids: {"output_attentions": True}, UnsupportedModelError),
    "another batch": (lambda ids: {"input_ids": ids[:1]}, LayoutError),
    "embeddings": (
        lambda ids: {
            "input_ids": None,
            "inputs_embeds": zoo.original().model.embed_tokens(ids).detach(),
        },
        UnsupportedModelError,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("num_tokens", [1, 6])
def test_what_is_refused_leaves_the_cache(patch: Any, name: str, num_tokens: int) -> None:
    patched, ids = patch(), zoo.token_ids(2, 60)
    arguments, error = REFUSED[name]
    cache = patched.new_cache()
    zoo.forward(patched.model, ids[:, :30], cache)
    new = ids[:, 30 : 30 + num_tokens]
    given = {"input_ids": new} | arguments(new)
    with pytest.raises(error), torch.no_grad():
        patched.model(**given, **{compat.CACHE_KW: cache})
    check_continues(patched, cache)
    if name != "another batch":
        empty = patched.new_cache()
        with pytest.raises(error), torch.no_grad():
            patched.model(**given, **{compat.CACHE_KW: empty})
        assert not empty.is_initialized
        assert empty.batch_size == -1


def test_the_inner_model_by_position(patch: Any) -> None:
    patched, ids = patch(), zoo.token_ids(2, 60)
    cache = patched.new_cache()
    with torch.no_grad():
        patched.model.model(ids[:, :30], torch.ones(2, 30), None, cache)
    check_continues(patched, cache)
    cache.crop(-20)
    check_continues(patched, cache, past=40)


def test_padded_batches_are_refused_by_generate(patch: Any) -> None:
    patched, ids = patch(), zoo.token_ids(2, 12)
    ids[0, :4] = 0
    with pytest.raises(UnsupportedModelError, match="padded batch"):
        patched.model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=3)


def test_a_cache_of_another_model(patch: Any) -> None:
    one, other, ids = patch(), patch(), zoo.token_ids(2, 12)
    cache = one.new_cache()
    with pytest.raises(CacheStateError, match="another model"):
        zoo.forward(other.model, ids, cache)
    assert cache.batch_size == -1
    with pytest.raises(CacheStateError, match="another model"):
        other.model.generate(ids, max_new_tokens=3, **{compat.CACHE_KW: cache})
    zoo.forward(one.model, ids, cache)
    with pytest.raises(CacheStateError, match="another model"):
        zoo.forward(other.model, ids, cache)
    assert cache.get_seq_length() == 12
    with pytest.raises(CacheStateError, match="unpatched"):
        zoo.forward(zoo.build(), ids, cache)
    llama = sparsekv.patch(model_zoo.build("llama"), model_zoo.small_config())
    with llama, pytest.raises(CacheStateError, match="made for a patched DeepSeek-V4"):
        zoo.forward(llama.model, ids, cache)


def test_max_tokens(patch: Any) -> None:
    patched, ids = patch(max_tokens=36), zoo.token_ids(2, 60)
    with pytest.raises(CapacityError, match="max_tokens=36"):
        patched.model.generate(ids[:, :20], max_new_tokens=18)
    cache = patched.new_cache(max_tokens=33)
    with pytest.raises(CapacityError, match="max_tokens=33"):
        zoo.forward(patched.model, ids[:, :34], cache)
    assert cache.batch_size == -1
    zoo.forward(patched.model, ids[:, :30], cache)
    with pytest.raises(CapacityError, match="max_tokens=33"):
        zoo.forward(patched.model, ids[:, :4], cache)
    got = zoo.forward_in(patched.model, ids[:, 30:33], cache, [1, 1, 1])
    expected = zoo.expected_logits("tiny", 2, 60)[:, 30:33]
    torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)
    patched.model.generate(ids[:, :20], max_new_tokens=17)


def test_assisted_decoding_is_refused_as_upstream(patch: Any) -> None:
    patched, ids = patch(), zoo.token_ids(1, 12)
    for given in ({"assistant_model": zoo.original()}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(ValueError, match=r"assisted|stateful") as upstream:
            zoo.build().generate(ids, max_new_tokens=4, **given)
        with pytest.raises(ValueError, match=r"assisted|stateful") as ours:
            patched.model.generate(ids, max_new_tokens=4, **given)
        assert str(ours.value) == str(upstream.value)


def test_what_patch_refuses() -> None:
    with pytest.raises(UnsupportedModelError, match="entry_format"):
        sparsekv.patch(model_zoo.build("llama"), zoo.small_config(entry_format="packed"))
    model = zoo.build()
    with pytest.raises(LayoutError, match="512"):
        sparsekv.patch(model, zoo.small_config(entry_format="packed"))
    with pytest.raises(UnsupportedModelError, match="elastic"):
        sparsekv.patch(model, zoo.small_config(elastic=True))
    no_csa = zoo.randomized(zoo.tiny_config(layer_types=[zoo.SLIDING, zoo.HCA]))
    with pytest.raises(UnsupportedModelError, match=zoo.CSA):
        sparsekv.patch(no_csa, zoo.small_config())
    for untouched in (model, no_csa):
        assert not any("forward" in vars(module) for module in untouched.modules())
        assert "generate" not in vars(untouched)


# Patch and restore


def _attributes(model: Any) -> list[dict[str, Any]]:
    return [dict(vars(module)) for module in model.modules()]


def test_restore_leaves_the_model_as_it_was() -> None:
    model, ids = zoo.build(), zoo.token_ids(2, 60)
    before = _attributes(model)
    with sparsekv.patch(model, zoo.small_config()) as patched:
        cache = patched.new_cache()
        zoo.forward(model, ids[:, :30], cache)
        model.generate(ids[:, :5], max_new_tokens=3)
    after = _attributes(model)
    for old, new in zip(before, after, strict=True):
        assert list(old) == list(new)
        assert all(new[name] is old[name] for name in old)
    for use in (
        lambda: zoo.forward(model, ids[:, :1], cache),
        lambda: cache.get_seq_length(),
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0])),
        lambda: cache.reset(),
        lambda: copy.deepcopy(cache),
    ):
        with pytest.raises(CacheStateError, match="restored"):
            use()
    own = DynamicCache(config=model.config)
    expected = zoo.expected_logits("tiny", 2, 60)
    torch.testing.assert_close(zoo.forward(model, ids, own), expected, atol=ATOL, rtol=0)


def test_foreign_caches_on_the_patched_model(patch: Any) -> None:
    patched, plain, ids = patch(), zoo.build(), zoo.token_ids(2, 60)
    outputs = []
    for model in (plain, patched.model):
        cache = DynamicCache(config=model.config)
        outputs.append(zoo.forward_in(model, ids, cache, [30] + [1] * 30))
        with torch.no_grad():
            outputs[-1] = torch.cat([outputs[-1], model(ids, use_cache=False).logits], 1)
    assert torch.equal(*outputs)


def test_a_copied_model_has_a_patch_of_its_own(patch: Any) -> None:
    patched, ids = patch(), zoo.token_ids(1, 21)
    twin = copy.deepcopy(patched.model)
    settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    expected = zoo.build().generate(ids, use_cache=False, **settings)
    patched.restore()
    assert torch.equal(twin.generate(ids, **settings), expected)
    assert vars(twin)["_sparsekv_patched"].stats().num_tokens == 29
    vars(twin)["_sparsekv_patched"].restore()
    assert not any("forward" in vars(module) for module in twin.modules())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_caches_pass_between_modes(patch: Any, mode: Any) -> None:
    patched, ids = patch(), zoo.token_ids(2, 60)
    cache = patched.new_cache()
    with mode():
        patched.model(ids[:, :30], **{compat.CACHE_KW: cache})
    twin = copy.deepcopy(cache)
    twin.reorder_cache(torch.tensor([0, 1]))
    twin.crop(-3)
    check_continues(patched, twin, past=27)
    patched.model(ids[:, 30:33], **{compat.CACHE_KW: cache})  # with gradients on
    check_continues(patched, cache, past=33)


# What it reports


def test_stats_tell_where_entries_live(patch: Any) -> None:
    patched, ids = patch(window_size=8), zoo.token_ids(2, 103)
    with pytest.raises(SparseKVError):
        patched.stats()
    cache = patched.new_cache()
    assert cache.stats() is None
    zoo.forward(patched.model, ids, cache)
    stats = patched.stats()
    assert (stats.num_tokens, stats.batch_size, stats.pool.num_tokens) == (103, 2, 25)
    rows = {(row.kind, row.name): row for row in stats.kinds}
    placed = rows["csa", "unpinned"].entries + rows["csa", "pinned"].entries
    assert placed == 24
    assert rows["csa", "window"].entries == 1
    assert rows["csa", "index keys"].entries == 25
    assert rows["hca", "entries"].entries == 103 // 16
    assert rows["sliding", "recent tokens"].entries == 7
    assert rows["csa", "unpinned"].used_bytes + rows["csa", "pinned"].used_bytes == (
        2 * 2 * 24 * 32 * 4  # layers, rows, entries, values, bytes
    )
    assert "unpinned" in str(stats)
