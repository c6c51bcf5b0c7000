"""Where the prompt comes from: an option, a file or standard input; exactly one of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from sparsekv.cli.errors import CommandLineError

STDIN = "-"
RANDOM_DEMO = "deepseek-v4"
"""The demo model of random weights: it has no tokenizer, so no text goes in or comes out."""


def read_prompt(
    prompt: str | None, prompt_file: Path | None, *, read_pipe: bool = True
) -> str | None:
    """The prompt's text, or None when no source was given.

    Args:
        prompt: the text itself; `-` means standard input.
        prompt_file: a text file in UTF-8; `-` means standard input.
        read_pipe: whether to take what is piped in when neither is given.
    Raises:
        CommandLineError: two sources, a file that cannot be read, or nothing but white space.
    """
    if prompt is not None and prompt_file is not None:
        raise CommandLineError(
            f"--prompt and --prompt-file={prompt_file}: only one source of the prompt can be used; "
            "leave one out"
        )
    piped = read_pipe and not sys.stdin.isatty()
    if (
        prompt == STDIN
        or str(prompt_file) == STDIN
        or (prompt is None and prompt_file is None and piped)
    ):
        text, source = _read_stdin(), "standard input"
    elif prompt_file is not None:
        text, source = _read_file(prompt_file), f"--prompt-file={prompt_file}"
    elif prompt is not None:
        text, source = prompt, "--prompt"
    else:
        return None
    if not text.strip():
        raise CommandLineError(
            f"{source}: holds no text, a prompt needs at least one word; give some text"
        )
    return text


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise CommandLineError(
            f"standard input: must be text in UTF-8 ({error}); convert it first"
        ) from error


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandLineError(
            f"--prompt-file={path}: cannot be read ({error.strerror}); give the path of a text file"
        ) from error
    except UnicodeDecodeError as error:
        raise CommandLineError(
            f"--prompt-file={path}: must be text in UTF-8 ({error}); convert it first"
        ) from error


def refuse_text(given: Mapping[str, object]) -> None:
    """Refuse options about text, by name, for the demo model that reads random token ids.

    Raises:
        CommandLineError: one of them has a value.
    """
    for option, value in given.items():
        if value is None or value is False:
            continue
        shown = option if value is True else f"{option}={value}"
        raise CommandLineError(
            f"{shown} with --demo {RANDOM_DEMO}: random weights have no tokenizer and read random "
            f"token ids; leave {option} out, or use --demo smollm2"
        )
