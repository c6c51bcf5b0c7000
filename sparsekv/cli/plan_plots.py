"""Pictures of a plan: shares and times over the context, and the best share over two bandwidths.

matplotlib is imported when a picture is asked for.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from sparsekv.cli.errors import CommandLineError
from sparsekv.cli.sizes import format_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sparsekv.engine.planner import Plan
    from sparsekv.engine.prediction import LengthForecast

_INK, _GRAY, _LIGHT = "#1f2933", "#8a949e", "#e3e7ea"
_BOTH, _STREAMED, _CPU = _INK, "#b3452c", "#1f5fa8"
"""Red where the GPU attends, blue where the CPU does."""
_PER_DOUBLING = 16
_SUFFIXES = (".png", ".svg")
_MAP_H2D_GBS, _MAP_CPU_GBS = (2.0, 256.0), (1.0, 1024.0)
"""From 4 lanes of PCIe 3, and a core or two, to what the next machines bring."""
_MOST_LINEAR = 10.0
"""A span of times beyond this factor is drawn on a logarithmic axis."""
_MOST_TICKS = 10
_MAP_SHARES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]


def check_picture(option: str, file: Path) -> None:
    """Raise before any work if no picture can be drawn there.

    Raises:
        CommandLineError: another kind of file, a folder that does not exist, or no matplotlib.
    """
    if file.suffix.lower() not in _SUFFIXES:
        raise CommandLineError(f"{option}={file}: must end in {' or '.join(_SUFFIXES)}")
    if not file.parent.is_dir():
        raise CommandLineError(f"{option}={file}: there is no folder {file.parent}; make it first")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CommandLineError(
            f"{option}={file}: needs matplotlib; run pip install 'sparsekv[plot]'"
        ) from error


def draw_plan(plan: Plan, file: Path) -> None:
    """Draw r(L) and R(L), and the time of a step in three ways, over the context."""
    figure, (shares, times) = _panels(2, width=9.6)
    lengths = _lengths(plan)
    rows = [plan.at(num_tokens) for num_tokens in lengths]
    _draw_shares(shares, rows)
    _draw_times(times, rows)
    for panel in (shares, times):
        _context_axis(panel, lengths)
        panel.legend(frameon=False)
    sequences = "1 sequence" if plan.batch_size == 1 else f"{plan.batch_size} sequences"
    _save(figure, file, f"{plan.model.name}, {sequences}; {_machine(plan)}")


def _draw_shares(panel: Axes, rows: list[LengthForecast]) -> None:
    placed = [row for row in rows if row.attended_positions]  # the others have no share
    lengths = [row.num_tokens for row in placed]
    marker = "o" if len(rows) == 1 else None
    for label, color, width, alpha, attribute in (
        ("R(L), placed", _GRAY, 6, 0.4, "running_share"),
        ("r(L), fastest", _INK, 1.4, 1, "best_share"),
    ):
        values = [getattr(row, attribute) for row in placed]
        panel.plot(lengths, values, color=color, lw=width, alpha=alpha, marker=marker, label=label)
    panel.set_ylim(-0.02, 1.02)
    panel.set_ylabel("part of keys and values")
    panel.set_title("The CPU's share", color=_INK)


def _draw_times(panel: Axes, rows: list[LengthForecast]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    lengths = [row.num_tokens for row in rows]
    marker = "o" if len(rows) == 1 else None
    for label, color, attribute in (
        ("streamed to the GPU only", _STREAMED, "streaming_step_s"),
        ("CPU only", _CPU, "cpu_step_s"),
        ("both, at R(L)", _BOTH, "step_s"),
    ):
        milliseconds = [getattr(row, attribute) * 1e3 for row in rows]
        panel.plot(lengths, milliseconds, color=color, lw=2, marker=marker, label=label)
    shortest = min(row.step_s for row in rows)
    if max(max(row.streaming_step_s, row.cpu_step_s) for row in rows) > _MOST_LINEAR * shortest:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_minor_formatter(NullFormatter())
    else:
        panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(_plain)
    panel.set_ylabel("ms per token of each sequence")
    panel.set_title("Predicted decode step", color=_INK)


def draw_map(plan: Plan, file: Path) -> None:
    """Draw the share to which long runs converge over the rates of the two engines
    (arXiv:2609.14507, Figure 13), with the plan's machine marked and the presets beside it.
    """
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    from sparsekv.roofline import PRESETS

    figure, (panel,) = _panels(1, width=6.4, height=5.2)
    h2d_gbs, cpu_gbs = np.geomspace(*_MAP_H2D_GBS, 80), np.geomspace(*_MAP_CPU_GBS, 80)
    share = cpu_gbs[:, None] / (cpu_gbs[:, None] + h2d_gbs[None, :])
    colors = LinearSegmentedColormap.from_list("engines", [_STREAMED, "#f7f7f7", _CPU])
    surface = panel.pcolormesh(
        h2d_gbs, cpu_gbs, share, cmap=colors, vmin=0, vmax=1, shading="gouraud", rasterized=True
    )
    lines = panel.contour(
        h2d_gbs, cpu_gbs, share, _MAP_SHARES, colors=_INK, linewidths=0.5, alpha=0.6
    )
    panel.clabel(lines, fontsize=8, fmt="%.1f", manual=[_label_place(p) for p in _MAP_SHARES])
    bar = figure.colorbar(surface, ax=panel, ticks=[0, 0.25, 0.5, 0.75, 1])
    bar.set_label("CPU's share of a long context")

    rates = plan.rates
    for name, machine in PRESETS.items():
        if name != rates.preset:
            cost = plan.model.cost_on(machine, plan.batch_size)
            point = plan.gbs(cost.h2d_s_per_token), plan.gbs(cost.cpu_s_per_token)
            _mark(panel, point, name, is_main=False)
    share_here = rates.cost.marginal_share
    name = "this machine" if rates.origin == "calibration" else rates.preset or rates.machine.name
    gain = 1 / max(share_here, 1 - share_here)
    text = f"{name}: share {share_here:.2f}\n{gain:.1f} x the faster engine alone"
    _mark(panel, (plan.h2d_gbs, plan.cpu_gbs), text, is_main=True)

    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(_plain)
    panel.set_xlabel("from host memory to the GPU, GB/s")
    panel.set_ylabel("attended by the CPU, GB/s of keys and values")
    _save(figure, file, f"The CPU's share by the rates of both engines; marks: {plan.model.name}")


def _label_place(share: float) -> tuple[float, float]:
    """Where a line of equal share has its label: near the upper or right edge."""
    slope = share / (1 - share)
    x = min(0.8 * _MAP_H2D_GBS[1], 0.8 * _MAP_CPU_GBS[1] / slope)
    return x, x * slope


def _plain(value: float, _: float) -> str:
    return f"{value:g}"


def _mark(panel: Axes, point: tuple[float, float], text: str, *, is_main: bool) -> None:
    """A point with its name; one beyond the map stands at its edge."""
    x, y = (
        min(max(rate, least), most)
        for rate, (least, most) in zip(point, (_MAP_H2D_GBS, _MAP_CPU_GBS), strict=True)
    )
    shape, size, fill = ("*", 15, _INK) if is_main else ("o", 6, "white")
    panel.plot(x, y, shape, ms=size, mfc=fill, mec=_INK, zorder=5, clip_on=False)
    panel.annotate(
        text,
        (x, y),
        xytext=(0, 11) if is_main else (0, -15),
        textcoords="offset points",
        ha="center",
        fontsize=9 if is_main else 8,
        fontweight="bold" if is_main else "normal",
        color=_INK,
        bbox={"boxstyle": "round,pad=0.25", "fc": "white", "ec": "none", "alpha": 0.75},
        zorder=6 if is_main else 4,
    )


def _lengths(plan: Plan) -> list[int]:
    """From the prompt to the context, evenly on a logarithmic axis, in whole windows."""
    unit = plan.demand.config.window_size * plan.model.tokens_per_entry
    first, last = plan.prompt_tokens, plan.num_tokens
    count = math.ceil(_PER_DOUBLING * math.log2(last / first)) if last > first else 0
    between = (first * (last / first) ** (i / count) for i in range(1, count))
    whole = {round(length / unit) * unit for length in between}
    return sorted({first, last, *(length for length in whole if first < length < last)})


def _context_axis(panel: Axes, lengths: list[int]) -> None:
    panel.set_xscale("log", base=2)
    powers = [2**i for i in range(lengths[0].bit_length() - 1, lengths[-1].bit_length() + 1)]
    ticks = [power for power in powers if lengths[0] <= power <= lengths[-1]] or lengths
    ticks = ticks[:: math.ceil(len(ticks) / _MOST_TICKS)]
    panel.set_xticks(ticks, [format_tokens(tick) for tick in ticks])
    panel.minorticks_off()
    panel.set_xlabel("context, tokens")
    panel.grid(color=_LIGHT, linewidth=0.6)


def _machine(plan: Plan) -> str:
    rates = plan.rates
    if rates.origin == "stand-in":
        return f'rates of the preset "{rates.preset}", nothing measured'
    return f'preset "{rates.preset}"' if rates.preset else rates.machine.name


def _panels(count: int, *, width: float, height: float = 3.8) -> tuple[Figure, list[Axes]]:
    """A figure that no window shows, with panels in a row."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9, "axes.edgecolor": _GRAY}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        panels = list(figure.subplots(1, count, squeeze=False)[0])
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _save(figure: Figure, file: Path, title: str) -> None:
    from matplotlib import rc_context

    figure.suptitle(title, color=_INK, fontsize=11)
    try:
        with rc_context({"svg.fonttype": "none"}):  # text stays text
            figure.savefig(file, dpi=150)
    except OSError as error:
        raise CommandLineError(f"{file}: cannot be written ({error.strerror})") from error
