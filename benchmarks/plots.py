"""Pictures of results, drawn into docs/ when the documents are rendered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.attention_checks import ISAS
from benchmarks.results import Result, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRAY = "#1f2933", "#8a949e"
_COLORS = {"amx": "#b3452c", "avx512": "#1f5fa8", "avx2": "#5aa4d6", "portable": "#9fb7c9"}
_TORCH = {"torch sdpa": "o", "torch sdpa, folded": "s", "torch ops": "^"}
_LEAST_THREAD_COUNTS = 4


def has_scaling(result: Result) -> bool:
    """Whether a result has enough numbers of threads for a curve."""
    return len({row.get("num_threads") for row in _rates(result)}) >= _LEAST_THREAD_COUNTS


def plot_name(result: Result) -> str:
    """Name of the picture of a result, in docs/."""
    return f"{result.topic}_{result.machine['name']}.svg"


def digest(result: Result) -> str:
    """What stands in a picture to say which result it shows."""
    stored = json.dumps(asdict(result), sort_keys=True)
    return hashlib.sha256(stored.encode()).hexdigest()[:16]


def draw_scaling(result: Result, folder: Path) -> Path:
    """Draw GB/s over threads, a panel for each shape; the picture's path."""
    rates = _rates(result)
    shapes = list(dict.fromkeys(row["shape"] for row in rates))
    figure, panels = figure_of(len(shapes), width=2.7)
    for shape, panel in zip(shapes, panels, strict=True):
        _draw_panel(panel, shape, [row for row in rates if row["shape"] == shape])
    panels[0].set_ylabel("GB/s of keys and values")
    handles = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.suptitle(f"Decode attention on the CPU, {result.machine['name']}", color=INK)
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncol=len(handles), frameon=False
    )
    return save(figure, result, folder)


def figure_of(num_panels: int, width: float) -> tuple[Figure, Sequence[Axes]]:
    """A row of panels that share their vertical axis, each so many inches wide."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # Nothing depends on the day: a picture that did not change gives no diff.
    plt.rcParams.update({"svg.hashsalt": "sparsekv", "font.size": 9, "axes.edgecolor": GRAY})
    figure, panels = plt.subplots(
        1, num_panels, figsize=(width * num_panels, 3.4), sharey=True, squeeze=False
    )
    return figure, panels[0]


def save(figure: Figure, result: Result, folder: Path) -> Path:
    """Write the picture of a result, and close it; its path."""
    import matplotlib.pyplot as plt

    figure.tight_layout(rect=(0, 0.08, 1, 1))
    path = folder / plot_name(result)
    figure.savefig(path, metadata={"Date": None, "Description": digest(result)})
    plt.close(figure)
    return path


def tidy(panel: Axes) -> None:
    """A light grid, and no frame."""
    panel.grid(color="#e3e7ea", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_panel(panel: Axes, shape: str, rates: Sequence[Row]) -> None:
    """One shape: the read ceiling, a curve for each instruction set, torch as points."""
    ceilings = sorted({(row["num_threads"], row["ceiling_gbs"]) for row in rates})
    panel.plot(*zip(*ceilings, strict=True), "--", color=GRAY, label="read ceiling")
    for way in ISAS:
        points = sorted((row["num_threads"], row["gbs"]) for row in rates if row["way"] == way)
        if points:
            panel.plot(*zip(*points, strict=True), ".-", color=_COLORS[way], label=way)
    for way, marker in _TORCH.items():
        points = [(row["num_threads"], row["gbs"]) for row in rates if row["way"] == way]
        if points:
            panel.plot(*zip(*points, strict=True), marker, color=INK, mfc="none", label=way)
    panel.set_title(shape, color=INK)
    panel.set_xlabel("threads")
    panel.set_ylim(bottom=0)
    panel.set_xlim(left=0)
    tidy(panel)


def _rates(result: Result) -> list[Row]:
    return [row for row in result.rows if row.get("kind") == "rate"]
