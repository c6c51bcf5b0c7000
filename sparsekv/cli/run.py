"""One run of `sparsekv generate`: load, answer with the patched model, compare, report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparsekv import CacheConfig, patch
from sparsekv.cli import report
from sparsekv.cli.console import print_json, stderr_console
from sparsekv.cli.demo import demo_folder, demo_prompt
from sparsekv.cli.loading import load_model
from sparsekv.cli.notes import shown_notes
from sparsekv.cli.progress import Display
from sparsekv.cli.prompts import RANDOM_DEMO
from sparsekv.cli.random_model import random_model, random_prompt
from sparsekv.cli.streaming import generate_watched
from sparsekv.models.sizes import config_geometry, read_config

_NO_TEXT = "Random weights and no tokenizer, so token ids in place of text:\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What was asked for, checked as far as that goes without reading a file."""

    model_folder: Path | None
    """None: the demo model."""
    demo: str
    """Name of the demo model; not looked at when there is a folder."""
    prompt: str | None
    """None: the demo's own, which is token ids where it has no tokenizer."""
    raw: bool
    """Leave the chat template out."""
    max_new_tokens: int
    ignore_eos: bool
    """Go on to `max_new_tokens` where the answer would end."""
    config: CacheConfig
    device: torch.device
    dtype: torch.dtype | None
    """None: the checkpoint's."""
    compare: bool
    """Run the unpatched model as well."""
    json: bool
    """Print one JSON object, no text."""


def run(request: GenerateRequest) -> bool:
    """Answer the prompt and print what there is to say.

    Returns:
        False when a comparison was asked for and found a token that differs.
    """
    answer: list[str] = []
    with Display() as display, shown_notes(display):
        model, tokenizer, inputs = _prepare(request, display)

        def show(text: str) -> None:
            if tokenizer is None and not answer:
                display.write(_NO_TEXT)
            answer.append(text)
            display.write(text)

        _warn_beyond_context(model, inputs["input_ids"].shape[1] + request.max_new_tokens)
        answer_prompt = partial(
            generate_watched,
            model,
            tokenizer,
            inputs,
            request.max_new_tokens,
            display,
            ignore_eos=request.ignore_eos,
        )
        with patch(model, request.config) as patched:
            generated = answer_prompt(on_text=answer.append if request.json else show)
            stats = patched.stats()
        reference = answer_prompt(label="unpatched: ") if request.compare else None

    result = report.RunResult(
        prompt_tokens=inputs["input_ids"].shape[1],
        generated=generated,
        reference=reference,
        stats=stats,
        asked_share=request.config.cpu_share,
        dtype=model.dtype,
        entry_format=request.config.entry_format,
    )
    if request.json:
        text = "".join(answer).strip()
        said = {"text": text} if tokenizer else {"token_ids": generated.tokens}
        print_json({**said, **result.as_dict()})
    else:
        report.print_result(result)
    return result.is_identical


def _prepare(
    request: GenerateRequest, display: Display
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None, dict[str, Tensor]]:
    """The model, its tokenizer if it has one, and the prompt's token ids on its device."""
    if request.demo == RANDOM_DEMO:
        model = random_model(request.dtype or torch.float32, request.device)
        inputs, tokenizer = random_prompt(model), None
    else:
        model, tokenizer = _load(request, display)
        prompt = demo_prompt(tokenizer) if request.prompt is None else request.prompt
        inputs = _tokenize(tokenizer, prompt, request.raw)
    return model, tokenizer, {name: ids.to(request.device) for name, ids in inputs.items()}


def _load(
    request: GenerateRequest, display: Display
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    folder = request.model_folder or demo_folder(request.demo, display)
    config = read_config(folder)
    dtype = request.dtype or config.dtype or torch.float32
    # Refuses what cannot work before weights are read.
    config_geometry(str(folder), config, dtype, request.config.entry_format)
    return load_model(folder, dtype, request.device, display)


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str, raw: bool) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`: one user turn where the tokenizer has a chat template."""
    if raw or not tokenizer.chat_template:
        return dict(tokenizer(text, return_tensors="pt"))
    turns = [{"role": "user", "content": text}]
    return dict(
        tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    )


def _warn_beyond_context(model: PreTrainedModel, num_tokens: int) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and num_tokens > limit:
        stderr_console().print(
            f"warning: prompt and answer take up to {num_tokens:,} tokens, "
            f"the model was made for {limit:,}",
            style="yellow",
        )
