"""A plan as its user reads it: what it takes, whether that fits, and time over the context."""

from __future__ import annotations

import math

from sparsekv.cli.console import print_table, print_text
from sparsekv.cli.sizes import format_bytes, format_tokens
from sparsekv.engine.fit import Remedy
from sparsekv.engine.memory_plan import CompressedPlan, RegionPlan
from sparsekv.engine.planner import Plan
from sparsekv.engine.prediction import LengthForecast

_SOURCES = {"given": "as given", "this machine": "this machine"}


def print_plan(plan: Plan) -> None:
    """Write the plan to stdout."""
    _print_memory(plan)
    print_text("")
    _print_fit(plan)
    print_text("")
    print_table(
        "Decode steps as the context grows",
        ["context", "r(L)", "R(L)", "ms/layer", "ms/token", "tok/s", "streamed", "CPU only"],
        [_forecast_row(length) for length in plan.lengths],
        num_words=0,
    )
    for paragraph in ("", _rates(plan), _legend(plan), _coverage(plan)):
        print_text(paragraph)


def _print_memory(plan: Plan) -> None:
    """What lies where, and what a token adds."""
    dtype = str(plan.model.geometry.dtype).removeprefix("torch.")
    packed = ", entries packed" if plan.demand.config.entry_format == "packed" else ""
    size = f"{plan.batch_size} x {plan.num_tokens:,} tokens"
    title = f"{plan.model.name}: {size} in {dtype}{packed}"
    weights, memory = format_bytes(plan.model.weight_bytes), plan.memory
    if isinstance(memory, RegionPlan):
        rows = [["weights", "GPU", weights]]
        rows += [[name, place, format_bytes(count)] for name, place, count in memory.rows()]
        print_table(title, ["what", "memory", "bytes"], rows)
        per_token = format_bytes(memory.geometry.bytes_per_token)
        print_text(
            f"Each token takes {per_token} in {memory.geometry.num_layers} layers; the cache keeps "
            f"{format_bytes(memory.gpu_bytes)} on the GPU, whatever the context. {_leaving(plan)}"
        )
        return
    rows = [[f"all {len(memory.geometry.layer_kinds)}", "weights", "GPU", weights]]
    rows += [
        [f"{kind.num_layers} {kind.kind}", name, place, format_bytes(count)]
        for kind, name, place, count in memory.rows()
    ]
    print_table(title, ["layers", "what", "memory", "bytes"], rows, num_words=3)
    adds = f"{memory.geometry.bytes_per_token():,.0f} B"
    if (production := memory.production_bytes_per_token) is not None:
        adds += f" ({production:,.0f} B in production formats: packed entries, fp4 index keys)"
    growing = memory.growing_gpu_bytes
    print_text(
        f"Each token adds {adds}. The cache keeps {format_bytes(memory.gpu_bytes)} on the GPU: "
        f"index keys and HCA entries, {format_bytes(growing)}, grow with the context, "
        f"{format_bytes(memory.gpu_bytes - growing)} do not. {_leaving(plan)}"
    )


def _leaving(plan: Plan) -> str:
    """What a prompt takes besides, for a while."""
    return (
        f"{plan.prompt_tokens:,} tokens that are read at once take "
        f"{format_bytes(plan.memory.prompt_bytes)} more there until they have left for the CPU."
    )


def _print_fit(plan: Plan) -> None:
    """What each memory must hold and has, and what would make it fit."""
    demand, budget = plan.demand, plan.budget
    rows = [["as asked", _verdict(plan), *_sizes(demand.vram_bytes, demand.ram_bytes)]]
    rows += [
        [_change(plan, remedy), "yes", *_sizes(remedy.vram_bytes, remedy.ram_bytes)]
        for remedy in plan.remedies
    ]
    gpu, cpu = (
        f"{format_bytes(count)} ({_SOURCES.get(source, source)})"
        for count, source in (
            (budget.vram_bytes, budget.vram_source),
            (budget.ram_bytes, budget.ram_source),
        )
    )
    print_table(
        f"There are {gpu} on the GPU and {cpu} for the CPU",
        ["plan", "fits", "GPU", "CPU"],
        rows,
    )
    if not plan.fits and not plan.remedies:
        print_text("No smaller batch, shorter context or smaller window makes it fit.")
    print_text(
        "Weights, the cache and what a prompt takes on its way are counted. Activations are not, "
        "nor what the CPU's memory holds ahead of need: leave room for them."
    )


def _sizes(*counts: int) -> list[str]:
    return [format_bytes(count) for count in counts]


def _verdict(plan: Plan) -> str:
    if plan.fits:
        return "yes"
    if plan.fits_ram:
        return "not on the GPU"
    return "not on the CPU" if plan.fits_vram else "on neither"


def _change(plan: Plan, remedy: Remedy) -> str:
    changes = []
    if remedy.batch_size != plan.batch_size:
        changes.append(f"batch {remedy.batch_size}")
    if remedy.num_tokens != plan.num_tokens:
        changes.append(f"context {remedy.num_tokens:,}")
    if remedy.window_size != plan.demand.config.window_size:
        changes.append(f"window {remedy.window_size}")
    if remedy.experts_on_cpu:
        changes.append("experts on the CPU")
    return ", ".join(changes)


def _forecast_row(length: LengthForecast) -> list[str]:
    has_share = length.attended_positions > 0
    steps = (length.step_s, length.streaming_step_s, length.cpu_step_s)
    return [
        format_tokens(length.num_tokens),
        *(
            f"{share:.2f}" if has_share else "-"
            for share in (length.best_share, length.running_share)
        ),
        _number(length.attention_s * 1e3),
        _number(length.step_s * 1e3),
        *(_number(length.batch_size / seconds) for seconds in steps),
    ]


def _number(value: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _rates(plan: Plan) -> str:
    """Whose rates these are, and what they are."""
    rates, machine = plan.rates, plan.rates.machine
    whose = {
        "calibration": f"Measured here, for this model and batch: {machine.name}.",
        "preset": f'Rates of the preset "{rates.preset}": {machine.name}.',
        "stand-in": (
            "This machine was not measured for this model and batch. Rates of the preset "
            f'"{rates.preset}" stand in: {machine.name}. `sparsekv calibrate` measures this '
            "machine."
        ),
        "given": f"Rates as given: {machine.name}.",
    }
    return (
        f"{whose[rates.origin]} Attention on the CPU {_gbs(plan.cpu_gbs)}, host memory to GPU "
        f"{_gbs(plan.h2d_gbs)}, GPU memory {_gbs(machine.hbm_gbs)}."
    )


def _gbs(rate: float) -> str:
    if math.isinf(rate):
        return "at no cost"
    return f"{rate:,.0f} GB/s" if rate >= 1000 else f"{rate:.1f} GB/s"


def _legend(plan: Plan) -> str:
    what = "keys and values" if isinstance(plan.memory, RegionPlan) else "selected entries"
    text = f"r(L): the CPU's share of {what} that makes the step shortest. R(L): "
    if plan.cpu_share == "auto":
        text += "its share of all that is placed by then, which sets the times. "
    else:
        text += "the share asked for, which sets the times. "
    return text + (
        "ms/layer is attention, ms/token a whole step, tok/s counts the batch; streamed and CPU "
        "only: tok/s if the GPU, or the CPU, attended to everything."
    )


def _coverage(plan: Plan) -> str:
    """What the times cover."""
    model = plan.model
    read = f"{format_bytes(plan.weight_bytes_read)} of weights"
    if model.num_experts:
        used = model.used_experts(plan.batch_size)
        read += f" ({used:.0f} of {model.num_experts} experts a layer)"
    text = (
        "Times add attention, by both engines at once, and one reading from GPU memory of the "
        f"{read} that a step uses. Computation and launches are not in them: a real step takes "
        "longer."
    )
    if isinstance(plan.memory, CompressedPlan):
        text += (
            " DeepSeek-V4's engines take turns for now, at one half each where no share is given: "
            "its layers take up to the sum of both."
        )
    if not plan.fits_vram:
        text += " They hold only where all weights are in GPU memory."
    return text
