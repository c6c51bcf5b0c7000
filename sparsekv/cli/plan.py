"""`sparsekv plan`: the bytes each region will take, before anything is loaded."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsekv.cli.console import print_json, stdout_console
from sparsekv.cli.sizes import format_bytes, parse_tokens

_KNOWN = (
    "qwen3-30b-a3b, mixtral-8x7b, deepseek-v2-lite, smollm2, deepseek-v4-flash, deepseek-v4-pro"
)


def plan(
    model: Annotated[
        str,
        typer.Argument(help=f"A known name ({_KNOWN}), a model folder or a config.json."),
    ],
    batch_size: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    tokens: Annotated[
        str, typer.Option(help="Context of each sequence, as 32K, 1M or 32768.")
    ] = "32K",
    cpu_share: Annotated[
        float, typer.Option(help="Share of the tokens that the CPU attends to, 0 to 1.")
    ] = 0.5,
    window_size: Annotated[
        int,
        typer.Option(help="Newest tokens (DeepSeek-V4: compressed entries), kept on the GPU."),
    ] = 256,
    block_size: Annotated[
        int, typer.Option(help="Tokens of a block; the window is a multiple of it.")
    ] = 64,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16 or float32; else the model's own, or bfloat16."),
    ] = None,
    entry_format: Annotated[
        str,
        typer.Option(help="DeepSeek-V4's entries on the CPU: native, or packed (584 bytes)."),
    ] = "native",
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Show how much memory the KV cache of a model takes, and whether this machine has it."""
    num_tokens = parse_tokens("--tokens", tokens)

    from sparsekv import CacheConfig
    from sparsekv.cli.devices import parse_dtype, parse_entry_format
    from sparsekv.cli.geometries import find_geometry
    from sparsekv.cli.memory_plans import plan_memory
    from sparsekv.regions.memory import available_bytes

    config = CacheConfig(cpu_share=cpu_share, window_size=window_size, block_size=block_size)
    wanted = None if dtype is None else parse_dtype(dtype)
    geometry = find_geometry(model, wanted, parse_entry_format(entry_format))
    planned = plan_memory(geometry, config, num_tokens, batch_size)
    available = available_bytes()
    fits = planned.cpu_bytes <= available
    if json:
        print_json({**planned.as_dict(), "available_cpu_bytes": available, "fits": fits})
        return
    packed = ", entries packed" if entry_format == "packed" else ""
    dtype_name = str(geometry.dtype).removeprefix("torch.")
    planned.print(f"{model}: {batch_size} x {num_tokens:,} tokens in {dtype_name}{packed}")
    stdout_console().print(
        f"CPU: {format_bytes(planned.cpu_bytes)}; {'fits' if fits else 'does not fit'} this "
        f"machine, which has {format_bytes(available)} to give"
    )
