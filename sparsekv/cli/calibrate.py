"""`sparsekv calibrate`: what attention costs on this machine, measured and kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsekv.cli.arguments import BatchSize, Dtype, ModelArgument, ModelOption, one_model
from sparsekv.cli.console import print_json
from sparsekv.cli.errors import CommandLineError

if TYPE_CHECKING:
    import torch

    from sparsekv.engine.model_size import ModelSize
    from sparsekv.format import KVGeometry
    from sparsekv.roofline import Calibration


def calibrate(
    context: typer.Context,
    model: ModelArgument = None,
    model_option: ModelOption = None,
    batch_size: BatchSize = 1,
    dtype: Dtype = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cuda:<index>; else the first GPU.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Measure this machine for a model and batch, and keep what the CPU's share follows from."""
    name = one_model(context, model, model_option)

    from sparsekv.cli.calibration_report import CalibrationResult, print_calibration
    from sparsekv.cli.devices import parse_device, parse_dtype
    from sparsekv.cli.quiet import quiet_libraries
    from sparsekv.models.sizes import find_size

    wanted = None if dtype is None else parse_dtype(dtype)
    target = parse_device(device)
    if target.type != "cuda":
        given = "no GPU that torch can use" if device is None else f"--device={device}"
        raise CommandLineError(
            f"{given}: only a GPU can be calibrated for; `sparsekv plan` works without, with "
            "--machine for a machine that is known"
        )
    if Path(name).exists():
        quiet_libraries()
    size = find_size(name, wanted)
    geometry = _geometry(size, batch_size)
    found = _measure(geometry, size.num_heads, batch_size, target)
    result = CalibrationResult(
        model=name,
        found=found,
        bytes_per_token=batch_size * geometry.bytes_per_token_per_layer,
        file=_save(found),
    )
    if json:
        print_json(result.as_dict())
    else:
        print_calibration(result)


def _geometry(size: ModelSize, batch_size: int) -> KVGeometry:
    """What a token of the model stores, if that can be calibrated for."""
    from sparsekv.checks import check_positive_int
    from sparsekv.format import KVGeometry

    check_positive_int("batch_size", batch_size, "a run needs at least one sequence")
    if not isinstance(size.geometry, KVGeometry):
        raise CommandLineError(
            f"{size.name}: nothing to calibrate, since the CPU and the GPU take turns over "
            "DeepSeek-V4's selected entries; `sparsekv plan` works without"
        )
    return size.geometry


def _measure(
    geometry: KVGeometry, num_heads: int, batch_size: int, device: torch.device
) -> Calibration:
    import torch

    import sparsekv
    from sparsekv.cli.notes import shown_notes
    from sparsekv.cli.progress import Display

    measuring = "measuring, under a minute"
    with Display() as display, shown_notes(display), display.phase(measuring, 1, "machine"):
        try:
            return sparsekv.calibrate(
                geometry, num_heads=num_heads, batch_size=batch_size, device=device
            )
        except torch.OutOfMemoryError as error:
            raise CommandLineError(
                f"--batch-size={batch_size} on {device}: too little GPU memory to measure; free "
                "some, or give a smaller batch"
            ) from error


def _save(found: Calibration) -> Path:
    from sparsekv.roofline import profile_folder

    folder = profile_folder()
    try:
        return found.save(folder)
    except OSError as error:
        raise CommandLineError(
            f"{folder}: cannot be written ({error.strerror}); set SPARSEKV_CACHE to a folder of "
            "yours"
        ) from error
