"""One greedy `generate` call, watched: its text, a bar for each phase, the time of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from sparsekv.cli.progress import Display


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What one call produced."""

    tokens: list[int]
    """New tokens, the prompt not included."""
    prefill_s: float
    """Seconds from the call to the first new token."""
    decode_s: float
    """Seconds from the first new token to the last."""


def generate_watched(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    inputs: Mapping[str, Tensor],
    max_new_tokens: int,
    display: Display,
    *,
    label: str = "",
    ignore_eos: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> Generated:
    """Generate greedily from one prompt.

    Args:
        tokenizer: None: the model has none, its text is token ids.
        inputs: the tokenizer's `input_ids` and `attention_mask`, both (1, num_tokens), on the
            model's device.
        label: words before the name of each bar.
        ignore_eos: go on to `max_new_tokens` even where the model ends its answer.
        on_text: receives each piece of text once it is final; None: no text is decoded.
    """
    with ExitStack() as stack:
        watcher = _Watcher(model, tokenizer, display, max_new_tokens, label, on_text, stack)
        try:
            output = model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                min_new_tokens=max_new_tokens if ignore_eos else None,
                do_sample=False,
                streamer=watcher,
            )
        except KeyboardInterrupt:
            watcher.end()  # writes the words that were waiting for the tokens after them
            raise
    ended = time.perf_counter()
    tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return Generated(
        tokens=tokens,
        prefill_s=watcher.first_token - watcher.started,
        decode_s=ended - watcher.first_token,
    )


class _TokenIds:
    """Stands where a tokenizer would."""

    def decode(self, token_ids: list[int], **_: object) -> str:
        """The ids with spaces between them."""
        return " ".join(map(str, token_ids))


class _Watcher(TextStreamer):
    """Receives what `generate` streams: the prompt first, then each new token."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        display: Display,
        max_new_tokens: int,
        label: str,
        on_text: Callable[[str], None] | None,
        stack: ExitStack,
    ) -> None:
        super().__init__(tokenizer or _TokenIds(), skip_prompt=True, skip_special_tokens=True)
        self._display, self._on_text, self._stack = display, on_text, stack
        self._max_new_tokens, self._label = max_new_tokens, label
        self._prefill = stack.enter_context(_prefill_bar(model, display, f"{label}prefill"))
        self._advance: Callable[[], None] | None = None
        self._saw_prompt = False
        self.started = self.first_token = time.perf_counter()

    def put(self, value: Tensor) -> None:
        if self._on_text is not None:
            super().put(value)
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        if self._advance is None:
            self.first_token = time.perf_counter()
            self._prefill.close()
            self._advance = self._stack.enter_context(
                self._display.phase(f"{self._label}decode", self._max_new_tokens, "tokens")
            )
        self._advance()

    def end(self) -> None:
        if self._on_text is not None and self._advance is not None:
            super().end()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        assert self._on_text is not None
        self._on_text(text + "\n" if stream_end else text)


@contextmanager
def _prefill_bar(model: PreTrainedModel, display: Display, description: str) -> Iterator[ExitStack]:
    """A bar that moves as the prompt passes each decoder layer, until the yielded stack closes."""
    layers = _decoder_layers(model)
    with ExitStack() as stack:
        advance = stack.enter_context(display.phase(description, len(layers), "layers"))
        for layer in layers:
            stack.callback(layer.register_forward_hook(lambda *_: advance()).remove)
        yield stack


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers a prompt passes in order; the whole model where they have another name."""
    layers = getattr(model.get_decoder(), "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else [model]
