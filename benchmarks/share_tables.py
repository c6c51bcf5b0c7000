"""Markdown of how near chosen shares come to the best ones, alone and under load."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.plots import plot_name
from benchmarks.results import Result, Row
from benchmarks.share_tracking import CHOSEN, SAME, cases, optimum, row_of
from benchmarks.share_under_load import pairs, rivals
from benchmarks.tables import checks, markdown, provenance, rate

_CALIBRATED = ["calibrated", "CPU, GB/s", "host to GPU, GB/s", "overheads, us", "p", "residual"]
_TRACKED = ["", "chosen", "best, from and to", "ms a layer", "borrowed", "at the best"]
_UNDER_LOAD = [
    "load",
    "times A / B",
    "placed",
    "elastic",
    "ms a layer",
    "best fixed",
    "ms a layer there",
]
_TWO_MODELS = [
    "two models",
    "frozen",
    "ms a layer",
    "elastic",
    "ms a layer",
    "best of all that stay",
    "ms a layer",
]


def share_tracking(results: Sequence[Result]) -> str:
    """What was calibrated, the chosen shares beside the measured optimum, targets; a picture."""
    parts = []
    for result in results:
        parts.append(provenance(result))
        parts.append(f"![Shares over length on {result.machine['name']}]({plot_name(result)})")
        lines = [
            [
                f"{row['shape']}, batch {row['batch']}",
                rate(row["cpu_gbs"]),
                rate(row["h2d_gbs"]),
                f"{row['cpu_overhead_us']:.0f} / {row['gpu_overhead_us']:.0f}",
                f"{row['marginal_share']:.3f}",
                f"{row['residual']:.3f}",
            ]
            for row in result.rows
            if row["kind"] == "calibration"
        ]
        parts.append(markdown(_CALIBRATED, lines))
        lines = []
        for shape, size, here in cases(result.rows):
            low, high, best_ms = optimum(here)
            lines.append(
                [
                    f"{shape}, {size}",
                    f"{row_of(SAME, here)['share']:.3f}",
                    f"{low:.3f} to {high:.3f}",
                    f"{row_of(CHOSEN, here)['ms_per_layer']:.3f}",
                    f"{row_of(SAME, here)['ms_per_layer']:.3f}",
                    f"{best_ms:.3f}",
                ]
            )
        parts += [markdown(_TRACKED, lines), checks(result)]
    return "\n\n".join(parts)


def share_under_load(results: Sequence[Result]) -> str:
    """An elastic share beside the best fixed one under a load, two models at once; a picture."""
    parts = []
    for result in results:
        parts.append(provenance(result))
        parts.append(f"![Steps under load on {result.machine['name']}]({plot_name(result)})")
        lines = [
            [
                name,
                f"{elastic['cpu_factor']:.2f} / {elastic['h2d_factor']:.2f}",
                f"{elastic['placed_share']:.2f}",
                f"{elastic['share']:.2f}",
                f"{elastic['ms_per_layer']:.3f}",
                f"{best['share']:.2f}",
                f"{best['ms_per_layer']:.3f}",
            ]
            for name, elastic, best in rivals(result.rows)
        ]
        parts.append(markdown(_UNDER_LOAD, lines))
        lines = [
            [
                name,
                _shares(frozen),
                f"{frozen['ms_per_layer']:.3f}",
                _shares(elastic),
                f"{elastic['ms_per_layer']:.3f}",
                _shares(best),
                f"{best['ms_per_layer']:.3f}",
            ]
            for name, frozen, elastic, best in pairs(result.rows)
        ]
        parts += [markdown(_TWO_MODELS, lines), checks(result)]
    return "\n\n".join(parts)


def _shares(row: Row) -> str:
    return " and ".join(f"{share:.2f}" for share in row["shares"])
