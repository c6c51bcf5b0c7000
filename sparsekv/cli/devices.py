"""Names of dtypes, formats and devices, as options give them."""

from __future__ import annotations

import torch

from sparsekv.cli.errors import CommandLineError
from sparsekv.format.compressed import EntryFormat

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ENTRY_FORMATS: tuple[EntryFormat, ...] = ("native", "packed")


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name.

    Raises:
        CommandLineError: not one a cache can be kept in.
    """
    if name not in DTYPES:
        raise CommandLineError(f"--dtype={name}: must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def parse_entry_format(name: str) -> EntryFormat:
    """The format of DeepSeek-V4's entries of that name.

    Raises:
        CommandLineError: there is no such format.
    """
    for known in ENTRY_FORMATS:
        if name == known:
            return known
    raise CommandLineError(
        f"--entry-format={name}: must be native (the model's dtype, exact) or packed (584 bytes an "
        "entry, rounded)"
    )


def parse_device(name: str | None) -> torch.device:
    """The device of that name; None: the first CUDA device, or the CPU where there is none.

    Raises:
        CommandLineError: no such device here.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CommandLineError(
            f"--device={name}: must be 'cpu', 'cuda' or 'cuda:<index>'"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise CommandLineError(f"--device={name}: must be 'cpu', 'cuda' or 'cuda:<index>'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CommandLineError(
            f"--device={name}: torch sees {torch.cuda.device_count()} CUDA devices here; use one "
            "of these, cpu where nothing is measured, or install a CUDA build of torch"
        )
    return device
