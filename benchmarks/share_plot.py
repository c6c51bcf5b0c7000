"""Pictures of shares: over the length (as Figure 12 of arXiv:2609.14507), and under a load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.plots import GRAY, INK, figure_of, save, tidy
from benchmarks.results import Result, Row
from benchmarks.share_tracking import CHOSEN, cases, optimum, row_of
from benchmarks.share_under_load import BEFORE, UNDER, rivals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _RED = "#1f5fa8", "#b3452c"
_VISIBLE = 0.006
"""Half the height of a single share."""


def draw_shares(result: Result, folder: Path) -> Path:
    """Draw the chosen share over the length, and where the best one was; the picture's path."""
    tracked = list(cases(result.rows))
    shapes = list(dict.fromkeys(shape for shape, _, _ in tracked))
    figure, panels = figure_of(len(shapes), width=4.4)
    for shape, panel in zip(shapes, panels, strict=True):
        _draw_panel(panel, shape, [rows for name, _, rows in tracked if name == shape])
    panels[0].set_ylabel("share of the CPU")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.suptitle(f"Chosen and best shares, {result.machine['name']}", color=INK)
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)
    return save(figure, result, folder)


def draw_loads(result: Result, folder: Path) -> Path:
    """Draw each step's time and share before, under and after each load; the picture's path."""
    loads = list(rivals(result.rows))
    figure, panels = figure_of(len(loads), width=3.6)
    top = 1.5 * max(best["ms_per_layer"] for _, _, best in loads)
    for (name, elastic, best), panel in zip(loads, panels, strict=True):
        _draw_load(panel, name, elastic, best, top)
    panels[0].set_ylim(0, top)
    panels[0].set_ylabel("ms a layer")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.suptitle(f"Elastic shares under a load, {result.machine['name']}", color=INK)
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)
    return save(figure, result, folder)


def _draw_load(panel: Axes, name: str, elastic: Row, best: Row, top: float) -> None:
    """A panel; steps that take longer than `top` stand at its edge."""
    steps = elastic["steps"]
    numbers = range(-BEFORE, len(steps) - BEFORE)
    panel.axvspan(-0.5, UNDER - 0.5, color=GRAY, alpha=0.15, lw=0, label="under the load")
    times = [step["ms_per_layer"] for step in steps]
    panel.plot(numbers, times, ".", color=_RED, label="elastic")
    late = [number for number, time in zip(numbers, times, strict=True) if time > top]
    panel.plot(late, [0.97 * top] * len(late), "^", color=_RED)
    panel.plot(
        (-0.5, UNDER - 0.5),
        [best["ms_per_layer"]] * 2,
        color=_BLUE,
        label="at the best fixed share for the load",
    )
    for last in (-1, UNDER - 1, numbers[-1]):
        share = f"{steps[BEFORE + last]['share']:.2f}"
        panel.annotate(
            share, (last, 0.03), xycoords=("data", "axes fraction"), ha="right", color=INK
        )
    panel.set_title(name, color=INK)
    panel.set_xlabel("steps since the load began; below: the share")
    tidy(panel)


def _draw_panel(panel: Axes, shape: str, sizes: Sequence[Sequence[Row]]) -> None:
    chosen = [row_of(CHOSEN, rows) for rows in sizes]
    tokens = [row["context"] for row in chosen]
    spans = [optimum(rows) for rows in sizes]
    middles = [(low + high) / 2 for low, high, _ in spans]
    halves = [max((high - low) / 2, _VISIBLE) for low, high, _ in spans]
    panel.errorbar(
        tokens,
        middles,
        halves,
        fmt="none",
        ecolor=_BLUE,
        elinewidth=10,
        alpha=0.35,
        label="within 1 % of the best step",
    )
    panel.plot(tokens, [row["predicted_share"] for row in chosen], "--", color=GRAY, label="r(L)")
    panel.plot(tokens, [row["share"] for row in chosen], "o", ms=4, color=_RED, label="chosen")
    panel.set_xscale("log", base=2)
    panel.set_xticks(tokens, [f"{n // 1024}K" for n in tokens])
    panel.set_ylim(0, 1)
    panel.set_title(f"{shape}, {chosen[0]['batch']} sequences", color=INK)
    panel.set_xlabel("tokens of a sequence")
    tidy(panel)
