"""What people do with `generate`, in bfloat16. There tokens may differ from the unpatched model's,
as a sum that is split rounds differently: the law is that over the tokens the patched model chose
its logits are at most twice as far from exact ones as the unpatched model's are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from model_zoo import GENERATE_OPTIONS, build
from torch import Tensor

from sparsekv.models import compat

FAMILIES = ["llama", "qwen3_mixed"]
"""Without experts: where rounding chooses another one, nothing bounds the difference."""


@dataclass(frozen=True)
class Trio:
    """One model's weights, rounded to bfloat16."""

    exact: Any
    """Computes in float32."""
    plain: Any
    patched: Any

    @property
    def model(self) -> Any:
        return self.patched.model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """What the patched model generates; its logits obey the law."""
        shown = {"output_logits": True, "return_dict_in_generate": True}
        out = self.model.generate(*args, **{"do_sample": False, **kwargs, **shown})
        prompt = args[0] if args else kwargs["input_ids"]
        sequences, num_prompt = out.sequences, prompt.shape[1]
        prompt_mask = kwargs.get("attention_mask", torch.ones_like(prompt))
        mask = torch.ones_like(sequences)
        mask[:, :num_prompt] = prompt_mask.repeat_interleave(len(sequences) // len(prompt), 0)
        ours, is_chosen = _logits_that_chose(out, sequences.shape[1] - num_prompt)
        exact, own = (
            _forced(model, sequences, mask)[:, num_prompt - 1 : -1][is_chosen]
            for model in (self.exact, self.plain)
        )
        assert_rounds_as_much(ours, own, exact)
        return out


def _logits_that_chose(out: Any, num_new: int) -> tuple[Tensor, Tensor]:
    """Logits of the tokens that were generated, and which ones were (rows, new tokens): some beams
    end before others.
    """
    logits = torch.stack(out.logits[:num_new], 1)  # [rows or beams, new tokens, vocabulary]
    rows = getattr(out, "beam_indices", None)
    if rows is None:
        is_chosen = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
        return logits.flatten(0, 1), is_chosen
    is_chosen = rows[:, :num_new] >= 0
    steps = torch.arange(num_new, device=rows.device).expand_as(is_chosen)
    return logits[rows[is_chosen], steps[is_chosen]], is_chosen


def _forced(model: Any, sequences: Tensor, mask: Tensor) -> Tensor:
    """Logits of a model that is given every token."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(
            sequences, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits.float()


def assert_rounds_as_much(ours: Tensor, own: Tensor, exact: Tensor) -> None:
    """Our error is at most twice the unpatched model's own, on average and in the tail."""
    our_error, own_error = (ours.float() - exact).abs(), (own - exact).abs()
    assert our_error.mean() <= 2 * own_error.mean()
    assert our_error.quantile(0.99) <= 2 * own_error.quantile(0.99)


@pytest.fixture(params=FAMILIES)
def trio(request: pytest.FixtureRequest, make_patched: Callable[..., Any], device: str) -> Trio:
    plain = build(request.param).to(device, torch.bfloat16)
    patched = make_patched(request.param, cpu_share=0.5)
    patched.model.to(device, torch.bfloat16)
    return Trio(copy.deepcopy(plain).float(), plain, patched)


@pytest.fixture
def ids(ids: Tensor, device: str) -> Tensor:
    return ids.to(device)


@pytest.mark.parametrize("options", GENERATE_OPTIONS.values(), ids=GENERATE_OPTIONS)
@pytest.mark.parametrize("left_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_generate_rounds_as_the_unpatched_model(trio, ids, padded, options, left_padded) -> None:
    torch.manual_seed(3)
    trio.generate(**padded if left_padded else {"input_ids": ids}, **options)


def test_prompt_lookup_rounds_as_the_unpatched_model(trio, ids) -> None:
    repetitive = ids[:1, :6].repeat(1, 4)
    trio.generate(repetitive, prompt_lookup_num_tokens=3, max_new_tokens=20)


@pytest.mark.parametrize("name", FAMILIES)
def test_assisted_decoding_rounds_as_the_unpatched_model(trio, ids, name) -> None:
    assistant = build(name).to(trio.plain.device, torch.bfloat16)
    try:
        trio.plain.generate(ids[:1], assistant_model=copy.deepcopy(assistant), max_new_tokens=12)
    except Exception as error:
        pytest.skip(f"transformers fails here without the patch: {error!r:.200}")
    trio.generate(ids[:1], assistant_model=assistant, max_new_tokens=12)


def test_a_chat_rounds_as_the_unpatched_model(trio, ids) -> None:
    sequence, given = ids, {}
    for question in ([], [7, 8, 9], [3, 4]):
        sequence = torch.cat([sequence, ids.new_tensor([question]).expand(len(ids), -1)], 1)
        out = trio.generate(sequence, **given, max_new_tokens=6)
        sequence, given = out.sequences, {compat.CACHE_KW: compat.cache_in(out)}


def test_what_follows_a_cropped_prefix_rounds_as_the_unpatched_model(trio, ids) -> None:
    prefix = trio.patched.new_cache()
    if any(prefix.is_sliding):
        pytest.skip("layers that slide have forgotten what a crop would need")
    with torch.no_grad():
        trio.model(ids, **{compat.CACHE_KW: prefix})
    prefix.crop(-5)
    for tail in ([5, 6, 7], [8, 9]):
        whole = torch.cat([ids[:, :12], ids.new_tensor([tail]).expand(len(ids), -1)], 1)
        branch = {compat.CACHE_KW: copy.deepcopy(prefix)}
        trio.generate(whole, **branch, max_new_tokens=9)
