"""Draw docs/format.svg: the four regions of a cache and the bytes of one run.

Run it with `python docs/draw_format.py` after a change of the format; it needs the extra `plot`.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

INK, PAPER = "#1f2933", "#ffffff"
GPU, CPU, PINNED, COPY = "#cfe3f7", "#f7e3c4", "#dcefd4", "#ececec"
SEGMENTS = ("unpinned", "pinned", "pinned", "unpinned", "pinned", "unpinned")


def box(ax: Axes, x: float, y: float, width: float, height: float, color: str, text: str) -> None:
    """A labelled rectangle with its lower left corner at (x, y)."""
    ax.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=INK, linewidth=1))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9, color=INK)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], dashed: bool) -> None:
    """An arrow for bytes that move: solid once, dashed at each step."""
    style = "dashed" if dashed else "solid"
    ax.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, linestyle=style, color=INK)
    )


def draw_regions(ax: Axes) -> None:
    """One layer: the sequence on top, then where its segments are."""
    ax.text(0, 9.55, "One layer of a sequence, cut into segments", fontsize=11, weight="bold")
    for idx, region in enumerate(SEGMENTS):
        color = CPU if region == "unpinned" else PINNED
        box(ax, 1.5 * idx, 8.5, 1.5, 0.7, color, f"segment {idx}")
    box(ax, 9, 8.5, 1.0, 0.7, GPU, "newest")

    ax.text(0, 7.45, "GPU", fontsize=11, weight="bold")
    box(ax, 0, 5.9, 4.2, 1.2, GPU, "window\nnewest tokens, one segment")
    box(ax, 5.8, 5.9, 4.2, 1.2, COPY, "ping-pong\n2 buffers, shared by all layers")

    ax.text(0, 3.8, "CPU", fontsize=11, weight="bold")
    for region, x, color in (("unpinned", 0.0, CPU), ("pinned", 5.8, PINNED)):
        members = [idx for idx, name in enumerate(SEGMENTS) if name == region]
        for slot, idx in enumerate(members):
            box(ax, x + 1.4 * slot, 2.6, 1.4, 1.0, color, f"segment {idx}")
    ax.text(2.1, 2.25, "unpinned: the CPU attends here, in place", ha="center", fontsize=9)
    ax.text(7.9, 2.25, "pinned: streamed to the GPU each step", ha="center", fontsize=9)

    arrow(ax, (1.4, 5.9), (1.4, 3.6), dashed=False)
    arrow(ax, (3.4, 5.9), (6.2, 3.6), dashed=False)
    arrow(ax, (8.6, 3.6), (8.6, 5.9), dashed=True)
    ax.text(1.25, 4.95, "a full window\nleaves, once", ha="right", va="center", fontsize=8)
    ax.text(8.75, 4.75, "copies,\neach step", ha="left", va="center", fontsize=8)


def draw_run(ax: Axes) -> None:
    """The bytes of one row and head of a segment."""
    ax.text(0, 0.95, "A segment: [rows, kv heads, run], contiguous", fontsize=11, weight="bold")
    box(ax, 0, -0.5, 3.4, 0.8, PAPER, "K: segment_size x head_dim")
    box(ax, 3.4, -0.5, 3.6, 0.8, PAPER, "V: segment_size x head_dim_v")
    box(ax, 7.0, -0.5, 1.5, 0.8, PAPER, "next head ...")
    box(ax, 8.5, -0.5, 1.5, 0.8, PAPER, "next row ...")
    ax.text(0, -0.95, "offset 0", fontsize=8)
    ax.text(3.4, -0.95, "segment_size · head_dim · itemsize", fontsize=8)


def main() -> None:
    """Write the picture beside this script."""
    # Nothing depends on the day: a picture that did not change gives no diff.
    plt.rcParams["svg.hashsalt"] = "sparsekv"
    fig, ax = plt.subplots(figsize=(8.6, 8.4))
    ax.set_xlim(-0.2, 10.2)
    ax.set_ylim(-1.3, 10)
    ax.axis("off")
    draw_regions(ax)
    draw_run(ax)
    target = Path(__file__).parent / "format.svg"
    fig.savefig(target, bbox_inches="tight", facecolor=PAPER, metadata={"Date": None})


if __name__ == "__main__":
    main()
