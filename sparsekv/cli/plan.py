"""`sparsekv plan`: the bytes each region will take, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsekv.cli.console import print_json, print_table, stdout_console
from sparsekv.cli.sizes import format_bytes, parse_tokens

if TYPE_CHECKING:
    from sparsekv.format import Footprint, KVGeometry

_KNOWN = "qwen3-30b-a3b, mixtral-8x7b, deepseek-v2-lite, smollm2"


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
    window_size: Annotated[int, typer.Option(help="Newest tokens, kept on the GPU.")] = 256,
    block_size: Annotated[
        int, typer.Option(help="Tokens of a block; the window is a multiple of it.")
    ] = 64,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16 or float32; else the model's own, or bfloat16."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Show how much memory the KV cache of a model takes, and whether this machine has it."""
    num_tokens = parse_tokens("--tokens", tokens)

    from sparsekv import CacheConfig
    from sparsekv.regions.memory import available_bytes

    config = CacheConfig(cpu_share=cpu_share, window_size=window_size, block_size=block_size)
    geometry = _find_geometry(model, dtype)
    footprint = config.spec(geometry, batch_size).footprint(num_tokens, cpu_share)
    available = available_bytes()
    if json:
        print_json(_as_dict(geometry, footprint, available))
    else:
        dtype_name = str(geometry.dtype).removeprefix("torch.")
        title = f"{model}: {batch_size} x {num_tokens:,} tokens in {dtype_name}"
        _print_plan(title, geometry, footprint, available)


def _find_geometry(model: str, dtype_name: str | None) -> KVGeometry:
    import torch

    from sparsekv.cli.devices import parse_dtype
    from sparsekv.cli.presets import preset_geometry, preset_names

    dtype = None if dtype_name is None else parse_dtype(dtype_name)
    if model.lower() in preset_names() or not Path(model).exists():
        return preset_geometry(model, dtype or torch.bfloat16)
    from sparsekv.cli.quiet import quiet_libraries

    quiet_libraries()
    from sparsekv.cli.loading import read_config
    from sparsekv.models.registry import geometry_from_config

    config = read_config(Path(model))
    return geometry_from_config(config, dtype or config.dtype or torch.bfloat16)


def _print_plan(title: str, geometry: KVGeometry, footprint: Footprint, available: int) -> None:
    regions = (
        ("window", "GPU", footprint.window_bytes),
        ("ping-pong", "GPU", footprint.ping_pong_bytes),
        ("unpinned", "CPU", footprint.unpinned_bytes),
        ("pinned", "CPU", footprint.pinned_bytes),
    )
    rows = [[name, memory, format_bytes(num_bytes)] for name, memory, num_bytes in regions]
    console = stdout_console()
    print_table(title, ["region", "memory", "bytes"], rows)
    per_token = format_bytes(geometry.bytes_per_token)
    console.print(f"each token: {per_token} in {geometry.num_layers} layers")
    console.print(f"GPU: {format_bytes(footprint.gpu_bytes)}, whatever the context")
    fits = "fits" if footprint.cpu_bytes <= available else "does not fit"
    console.print(
        f"CPU: {format_bytes(footprint.cpu_bytes)}; {fits} this machine, "
        f"which has {format_bytes(available)} to give"
    )


def _as_dict(geometry: KVGeometry, footprint: Footprint, available: int) -> dict[str, object]:
    return {
        "bytes_per_token": geometry.bytes_per_token,
        "window_bytes": footprint.window_bytes,
        "ping_pong_bytes": footprint.ping_pong_bytes,
        "unpinned_bytes": footprint.unpinned_bytes,
        "pinned_bytes": footprint.pinned_bytes,
        "gpu_bytes": footprint.gpu_bytes,
        "cpu_bytes": footprint.cpu_bytes,
        "available_cpu_bytes": available,
        "fits": footprint.cpu_bytes <= available,
    }
