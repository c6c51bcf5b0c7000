"""Sizes as people write them: `32K` tokens in, `1.50 GiB` out."""

from __future__ import annotations

import re

from sparsekv.cli.errors import CommandLineError
from sparsekv.errors import LayoutError

_UNITS = {"": 1, "K": 2**10, "M": 2**20}
_SUFFIXES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_tokens(name: str, text: str) -> int:
    """Read a number of tokens: a whole number, with K for 1024 or M for 1024 x 1024 after it.

    Raises:
        CommandLineError: not such a number, or less than 1.
    """
    match = re.fullmatch(r"([0-9]+)([KM]?)", text.strip().upper())
    tokens = int(match[1]) * _UNITS[match[2]] if match else 0
    if tokens < 1:
        raise CommandLineError(
            f"{name}={text}: must be a whole number of at least 1, K and M standing for 1024 and "
            "1024 x 1024; write 32768 or 32K"
        )
    return tokens


def parse_bytes(name: str, text: str) -> int:
    """Read a size: `32GiB` or `32G` (binary), `32GB` (decimal), or bytes.

    Raises:
        CommandLineError: not a size, or less than a byte.
    """
    from sparsekv.regions.memory import parse_bytes as parse

    try:
        num_bytes = parse(text)
    except LayoutError as error:
        raise CommandLineError(f"{name}={text}: {error}") from error
    if num_bytes < 1:
        raise CommandLineError(f"{name}={text}: must be at least 1 byte; write a size as 32GiB")
    return num_bytes


def format_tokens(num_tokens: int) -> str:
    """Write a number of tokens as `parse_tokens` reads it: `128K`, `1M`, or all digits."""
    for suffix in ("M", "K"):
        if num_tokens and num_tokens % _UNITS[suffix] == 0:
            return f"{num_tokens // _UNITS[suffix]}{suffix}"
    return str(num_tokens)


def format_bytes(num_bytes: int) -> str:
    """Write bytes in the largest binary unit of which there is at least one: `1.50 GiB`."""
    value, exponent = float(num_bytes), 0
    while value >= 1024 and exponent < len(_SUFFIXES) - 1:
        value /= 1024
        exponent += 1
    return f"{value:.2f} {_SUFFIXES[exponent]}" if exponent else f"{num_bytes} B"
