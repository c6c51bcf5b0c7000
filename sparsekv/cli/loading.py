"""From a model folder to a model and its tokenizer, checked before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sparsekv.cli.errors import CommandLineError
from sparsekv.cli.progress import Display

_T = TypeVar("_T")


def load_model(
    folder: Path, dtype: torch.dtype, device: torch.device, display: Display
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load tokenizer and weights, and move the model to the device.

    Raises:
        CommandLineError: files are missing or damaged.
    """
    with display.phase("loading", 3, "parts") as advance:
        tokenizer = _readable(
            folder, lambda: AutoTokenizer.from_pretrained(folder, local_files_only=True)
        )
        advance()
        model = _readable(
            folder,
            lambda: AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True
            ),
        )
        advance()
        model = model.to(device).eval()
        advance()
    return model, tokenizer


def _readable(path: Path, read: Callable[[], _T]) -> _T:
    """Run a loader of transformers; what it finds missing or damaged becomes one line."""
    try:
        return read()
    except (OSError, ValueError, KeyError, SafetensorError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CommandLineError(
            f"{path}: cannot be read as a model ({reason}); check that the download is complete"
        ) from error
