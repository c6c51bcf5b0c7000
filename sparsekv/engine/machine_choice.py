"""Which machine a plan is made for, and what memory it has to give."""

from __future__ import annotations

import torch

from sparsekv.checks import check_positive_int
from sparsekv.engine.fit import Budget
from sparsekv.engine.model_size import ModelSize
from sparsekv.engine.planner import Rates
from sparsekv.engine.profile_key import check_geometry, find_calibration
from sparsekv.errors import LayoutError
from sparsekv.regions import memory
from sparsekv.roofline import PRESETS, Calibration, MachineProfile

STAND_IN = "h200"
"""The preset in place of a measurement: the host of this project's benchmarks."""
THIS = "this"
_THIS_GPU = torch.device("cuda")
"""The current one."""


def choose_rates(
    machine: str | MachineProfile | Calibration | None, model: ModelSize, batch_size: int
) -> Rates:
    """The rates of a machine for a model and batch; see `sparsekv.plan`.

    Raises:
        LayoutError: no such machine, "this" where nothing was measured, a calibration for another
            model or batch, or a batch size that is not a positive whole number.
    """
    if isinstance(machine, Calibration):
        _check_calibration(machine, model, batch_size)
        return Rates(machine=machine.machine, cost=machine.cost, origin="given")
    if isinstance(machine, MachineProfile):
        cost = model.cost_on(machine, batch_size)
        return Rates(machine=machine, cost=cost, origin="given")
    if machine in (None, THIS):
        if (measured := _measured(model, batch_size)) is not None:
            return measured
        if machine is None:
            return _of_preset(STAND_IN, model, batch_size, is_stand_in=True)
        raise LayoutError(
            f"machine={THIS!r}: this machine was not measured for {model.name} with a batch of "
            f"{batch_size}; run `sparsekv calibrate` first, or plan for a known machine: "
            f"{', '.join(PRESETS)}"
        )
    if machine not in PRESETS:
        raise LayoutError(
            f"machine={machine!r}: must be one of {', '.join((*PRESETS, THIS))}, a file ending in "
            ".json on the command line, and in Python a MachineProfile or what calibrate returns"
        )
    return _of_preset(machine, model, batch_size, is_stand_in=False)


def choose_budget(rates: Rates, ram_bytes: int | None, vram_bytes: int | None) -> Budget:
    """What a run may take: as given, else what the machine of the rates has to give. Where a preset
    stands in for this machine, what this machine has, as far as it has a GPU.

    Raises:
        LayoutError: a size that is not a positive whole number of bytes.
    """
    is_here = rates.origin in ("calibration", "stand-in")
    profile, name = rates.machine, rates.preset or rates.machine.name
    ram_source = vram_source = "given"
    if ram_bytes is None:
        ram_bytes, ram_source = profile.ram_bytes - memory.RESERVED_BYTES, name
        if is_here:
            ram_bytes, ram_source = memory.available_bytes(), "this machine"
    if vram_bytes is None:
        vram_bytes, vram_source = profile.vram_bytes, name
        if is_here and torch.cuda.is_available():
            vram_bytes, vram_source = torch.cuda.mem_get_info()[0], "this machine"
    return Budget(
        ram_bytes=ram_bytes,
        vram_bytes=vram_bytes,
        ram_source=ram_source,
        vram_source=vram_source,
    )


def _measured(model: ModelSize, batch_size: int) -> Rates | None:
    """What was measured here for this model and batch."""
    check_positive_int("batch_size", batch_size, "a run needs at least one sequence")
    found = find_calibration(
        model.attended, model.num_heads, batch_size=batch_size, device=_THIS_GPU
    )
    if found is None:
        return None
    return Rates(machine=found.machine, cost=found.cost, origin="calibration")


def _check_calibration(calibration: Calibration, model: ModelSize, batch_size: int) -> None:
    key = calibration.key
    check_geometry(key, model.attended, model.num_heads)
    if key.batch_size != batch_size:
        raise LayoutError(
            f"machine=a calibration for a batch of {key.batch_size}: this plan is for "
            f"{batch_size}; calibrate for that, or give the calibration's machine"
        )


def _of_preset(name: str, model: ModelSize, batch_size: int, *, is_stand_in: bool) -> Rates:
    machine = PRESETS[name]
    return Rates(
        machine=machine,
        cost=model.cost_on(machine, batch_size),
        origin="stand-in" if is_stand_in else "preset",
        preset=name,
    )
