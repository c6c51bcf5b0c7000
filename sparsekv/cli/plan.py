"""`sparsekv plan`: what a run takes and how fast its steps will be, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsekv.cli.arguments import (
    BatchSize,
    Dtype,
    ModelArgument,
    ModelOption,
    one_model,
    parse_share,
)
from sparsekv.cli.console import print_json
from sparsekv.cli.sizes import parse_bytes, parse_tokens

if TYPE_CHECKING:
    from sparsekv.roofline import MachineProfile


def plan(
    context: typer.Context,
    model: ModelArgument = None,
    model_option: ModelOption = None,
    batch_size: BatchSize = 1,
    tokens: Annotated[
        str,
        typer.Option(
            "--tokens",
            "--context",
            envvar=["SPARSEKV_TOKENS", "SPARSEKV_CONTEXT"],
            help="Context of each sequence, as 32K, 1M or 32768.",
        ),
    ] = "32K",
    prompt_tokens: Annotated[
        str, typer.Option(help="How much of the context is a prompt; the rest is generated.")
    ] = "2K",
    machine: Annotated[
        str | None,
        typer.Option(
            help="h200, a100, v100, a file that calibrate saved on another machine, or this: what "
            "was measured here. Else this where it was measured, and h200 in its place where not."
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(help="Host memory to use, as 120GiB; else what the machine has to give."),
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option(help="GPU memory to use, as 80GiB; else what the machine has."),
    ] = None,
    cpu_share: Annotated[
        str,
        typer.Option(help="Share of the tokens that the CPU attends to, 0 to 1; auto: the best."),
    ] = "auto",
    window_size: Annotated[
        int,
        typer.Option(help="Newest tokens (DeepSeek-V4: compressed entries), kept on the GPU."),
    ] = 256,
    block_size: Annotated[
        int, typer.Option(help="Tokens of a block; the window is a multiple of it.")
    ] = 64,
    dtype: Dtype = None,
    entry_format: Annotated[
        str,
        typer.Option(help="DeepSeek-V4's entries on the CPU: native, or packed (584 bytes)."),
    ] = "native",
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw shares and times over the context into this .png or .svg file."),
    ] = None,
    map_file: Annotated[
        Path | None,
        typer.Option(
            "--map",
            envvar="SPARSEKV_MAP",
            help="Draw the best share over the two bandwidths, with the machine marked, into this "
            ".png or .svg file.",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Show what a model and its KV cache take, whether that fits, and how fast steps will be."""
    name = one_model(context, model, model_option)
    num_tokens = parse_tokens("--tokens", tokens)
    num_prompt_tokens = parse_tokens("--prompt-tokens", prompt_tokens)
    share = parse_share(cpu_share)
    ram_bytes = None if ram is None else parse_bytes("--ram", ram)
    vram_bytes = None if vram is None else parse_bytes("--vram", vram)

    from sparsekv.cli.plan_plots import check_picture, draw_map, draw_plan

    for option, file in (("--plot", plot), ("--map", map_file)):
        if file is not None:
            check_picture(option, file)

    import sparsekv
    from sparsekv.cli.devices import parse_dtype, parse_entry_format
    from sparsekv.cli.plan_report import print_plan
    from sparsekv.cli.quiet import quiet_libraries

    if Path(name).exists():
        quiet_libraries()
    planned = sparsekv.plan(
        name,
        batch_size=batch_size,
        num_tokens=num_tokens,
        prompt_tokens=num_prompt_tokens,
        cpu_share=share,
        machine=_machine(machine),
        ram_bytes=ram_bytes,
        vram_bytes=vram_bytes,
        window_size=window_size,
        block_size=block_size,
        dtype=None if dtype is None else parse_dtype(dtype),
        entry_format=parse_entry_format(entry_format),
    )
    if plot is not None:
        draw_plan(planned, plot)
    if map_file is not None:
        draw_map(planned, map_file)
    if json:
        print_json(planned.as_dict())
    else:
        print_plan(planned)


def _machine(given: str | None) -> str | MachineProfile | None:
    """A name, or the machine of a calibration's file: its costs are those of one model, what it
    measured of the machine is not.
    """
    if given is None or not given.endswith(".json"):
        return given

    from sparsekv.roofline import Calibration

    return Calibration.read(Path(given)).machine
