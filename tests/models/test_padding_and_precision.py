"""Left padding of any length, prompts of any length, 16-bit weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_zoo import build, same_tokens

from sparsekv.models import attention, compat


def _prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 90, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pads", range(34))
def test_padded_batch_equals_each_prompt_alone(make_patched, pads) -> None:
    """Also when the padded length is 1 mod 32, where masks of one more column broke others."""
    patched = make_patched("llama", cpu_share=0.5)
    long = 33 if pads < 33 else 65  # pads == 32: one valid token
    batch = torch.cat([_prompt(long, 1), _prompt(long, 2)])
    mask = torch.ones_like(batch)
    mask[0, :pads] = 0
    batch = batch * mask
    padded = {"input_ids": batch, "attention_mask": mask}
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    together = same_tokens(build("llama"), patched.model, **padded, **options)
    for row in range(2):
        alone = patched.model.generate(batch[row : row + 1, mask[row].bool()], **options)
        assert torch.equal(together[row, -4:], alone[0, -4:])
    with torch.no_grad():
        # Ours is read where padding, the window and both regions are in play: after a first chunk.
        cache = {compat.CACHE_KW: patched.new_cache()}
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        half = long // 2
        parts = [
            patched.model(
                batch[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                **cache,
            ).logits
            for start, stop in ((0, half), (half, long))
        ]
        expected = build("llama")(batch[:1, pads:]).logits
    got = torch.cat(parts, 1)[:1, pads:]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen3_mixed"])
@pytest.mark.parametrize("pads", [1, 7, 16])
def test_padded_batch_on_other_families(make_patched, name, pads) -> None:
    batch = torch.cat([_prompt(17, 1), _prompt(17, 2)])
    mask = torch.ones_like(batch)
    mask[1, :pads] = 0
    same_tokens(
        build(name),
        make_patched(name).model,
        batch * mask,
        attention_mask=mask,
        max_new_tokens=8,
    )


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 11, 12, 13, 24])
def test_prompts_around_the_window(make_patched, length) -> None:
    same_tokens(
        build("qwen3_moe"), make_patched("qwen3_moe").model, _prompt(length), max_new_tokens=9
    )


def test_fully_padded_row_stays_finite(make_patched) -> None:
    """Rows that see nothing give 0, never NaN, and do not touch the other rows."""
    patched = make_patched("llama", cpu_share=0.5)
    batch = torch.cat([_prompt(13, 1), _prompt(13, 2)])
    mask = torch.ones_like(batch)
    mask[0] = 0
    with torch.no_grad():
        cache = {compat.CACHE_KW: patched.new_cache()}
        got = [
            patched.model(batch[:, a:b], attention_mask=mask[:, :b], **cache).logits
            for a, b in ((0, 9), (9, 13))
        ]
        expected = build("llama")(batch[1:]).logits
    assert torch.isfinite(torch.cat(got, 1)).all()
    torch.testing.assert_close(torch.cat(got, 1)[1:], expected, atol=1e-5, rtol=1e-5)


def test_padded_prefill_does_not_depend_on_its_runs(make_patched, monkeypatch, padded) -> None:
    """Long prompts are masked a run of queries at a time."""
    expected = make_patched("llama").model(**padded, use_cache=True)
    patched = make_patched("llama")
    monkeypatch.setattr(attention, "_MASK_ELEMENTS", 1)
    monkeypatch.setattr(attention, "_MIN_RUN", 4)
    with torch.no_grad():
        got = patched.model(**padded, **{compat.CACHE_KW: patched.new_cache()})
    real = padded["attention_mask"].bool()
    torch.testing.assert_close(got.logits[real], expected.logits[real], atol=1e-5, rtol=1e-5)


def test_nan_in_padding_never_reaches_an_output() -> None:
    query, key, value = torch.randn(3, 2, 2, 9, 4).unbind(0)
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    key_mask[0, :4] = False
    clean = attention.prefill_attention(query, key, value, 0.5, key_mask=key_mask)
    key[0, :, :4], value[0, :, :4] = float("nan"), float("nan")
    dirty = attention.prefill_attention(query, key, value, 0.5, key_mask=key_mask)
    assert torch.equal(clean, dirty)
    assert (dirty[0, :, :4] == 0).all()


@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_error_is_at_most_twice_the_unpatched_models(
    make_patched, device, name, dtype
) -> None:
    """Logits under teacher forcing, against the float32 model: rounding may flip an expert."""
    tokens = torch.cat([_prompt(48, seed) for seed in range(4)]).to(device)
    plain = build(name).to(device, dtype)
    patched = make_patched(name, cpu_share=0.5)
    patched.model.to(device, dtype)
    # The float32 reference has the rounded weights: what is compared is arithmetic.
    exact = copy.deepcopy(plain).float()

    def logits(model: Any, cache: Any = None) -> torch.Tensor:
        steps = [(0, 20), *((i, i + 1) for i in range(20, 40)), (40, 48)]
        given = {"use_cache": True} if cache is None else {compat.CACHE_KW: cache}
        parts = []
        with torch.no_grad():
            for start, stop in steps:
                out = model(tokens[:, start:stop], **given)
                given = {compat.CACHE_KW: compat.cache_in(out)}
                parts.append(out.logits.float())
        return torch.cat(parts, 1)

    reference = logits(exact)
    own = (logits(plain) - reference).abs()
    ours = (logits(patched.model, patched.new_cache()) - reference).abs()
    assert ours.mean() <= 2 * own.mean()
    assert ours.quantile(0.99) <= 2 * own.quantile(0.99)


def test_autocast_works_with_mixed_key_and_value_types(make_patched, ids) -> None:
    patched = make_patched("llama", cpu_share=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        out = patched.model.generate(
            ids,
            max_new_tokens=8,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        with torch.no_grad():
            forced = build("llama")(out.sequences[:, :-1]).logits[:, 16:].float()
    error = (torch.stack(out.logits, 1) - forced).abs().max()
    assert error < 0.1 * forced.abs().max()
