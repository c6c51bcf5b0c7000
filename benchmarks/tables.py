"""Markdown of results: one function for each table that a document can show.

Each takes the results of one topic, one for each machine, and reads nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.attention_checks import ISAS, RANDOM_BLOCKS
from benchmarks.plots import has_scaling, plot_name
from benchmarks.results import Result, Row

_TORCH = ("torch sdpa", "torch sdpa, folded", "torch ops")


def ceilings(results: Sequence[Result]) -> str:
    """What each machine's memory and bus give, for each number of threads."""
    parts = []
    for result in results:
        on_cpu = [row for row in result.rows if "huge_fraction" in row]
        together = [row for row in result.rows if "h2d_gbs" in row]
        bus = [row for row in result.rows if row not in on_cpu and row not in together]
        kinds = list(dict.fromkeys(row["what"] for row in on_cpu))
        lines = []
        for n in _threads(on_cpu):
            cells = [rate(_only(on_cpu, what=what, num_threads=n)["gbs"]) for what in kinds]
            lines.append([n, *cells, *(_both(row) for row in together if row["num_threads"] == n)])
        columns = ["threads", *kinds, *(["read + host to GPU, together"] if together else [])]
        parts += [provenance(result), markdown(columns, lines)]
        if bus:
            parts.append(markdown(["", "GB/s"], [[row["what"], rate(row["gbs"])] for row in bus]))
    return "\n\n".join(parts)


def compute_sanitizer(results: Sequence[Result]) -> str:
    """What each tool found, and how long it watched."""
    parts = []
    for result in results:
        lines = [[row["tool"], row["errors"], f"{row['seconds']:.0f}"] for row in result.rows]
        parts += [provenance(result), markdown(["tool", "errors", "seconds"], lines)]
    return "\n\n".join(parts)


def cpu_attention(results: Sequence[Result]) -> str:
    """GB/s of keys and values of each shape and way, over threads; errors; targets."""
    parts = []
    for result in results:
        rates = [row for row in result.rows if row["kind"] == "rate"]
        found = [row for row in result.rows if row["kind"] == "error"]
        parts.append(provenance(result))
        if has_scaling(result):
            parts.append(f"![GB/s over threads on {result.machine['name']}]({plot_name(result)})")
        for shape in dict.fromkeys(row["shape"] for row in rates):
            rows = [row for row in rates if row["shape"] == shape]
            ways = (*ISAS, RANDOM_BLOCKS, *_TORCH)
            parts.append(_scaling(shape, rows, {"read ceiling": "ceiling_gbs"}, ways))
        calls = [row for row in result.rows if row["kind"] == "call"]
        if calls:
            parts.append(_calls(calls))
        if found:
            lines = [
                [row["shape"], row["way"], *(f"{row[key]:.1e}" for key in _ERRORS)] for row in found
            ]
            parts.append(markdown(["shape", "instruction set", *_ERRORS.values()], lines))
        parts.append(checks(result))
    return "\n\n".join(parts)


def _calls(rows: Sequence[Row]) -> str:
    """GB/s of calls that read less, and of the ceiling, which counts no start and no end."""
    lines = [
        [
            f"{row['shape']}, {row['way']}",
            f"{row['call_bytes'] / 2**20:.0f} MiB",
            f"{row['call_bytes'] / row['gbs'] / 1e6:.2f}",
            f"{rate(row['gbs'])} ({percent(row['fraction'])})",
        ]
        for row in rows
    ]
    return markdown(["shape, instruction set", "a call reads", "ms", "GB/s"], lines)


def cpu_attention_in_short(results: Sequence[Result]) -> str:
    """The best way beside torch's attention, at the highest number of threads."""
    lines = []
    for result in results:
        rates = [row for row in result.rows if row["kind"] == "rate"]
        most = max(row["num_threads"] for row in rates)
        rates = [row for row in rates if row["num_threads"] == most]
        for shape in dict.fromkeys(row["shape"] for row in rates):
            here = [row for row in rates if row["shape"] == shape]
            best = max((r for r in here if r["way"] in ISAS), key=lambda r: r["gbs"])
            torchs = max(r["gbs"] for r in here if r["way"] in _TORCH[:2])
            machine = f"{result.machine['name']}, {most} threads"
            ours = f"{rate(best['gbs'])} ({best['way']})"
            lines.append([machine, shape, ours, percent(best["fraction"]), rate(torchs)])
    columns = ["machine", "shape", "GB/s", "of the read ceiling", "torch's attention, GB/s"]
    return markdown(columns, lines)


def cpu_gather(results: Sequence[Result]) -> str:
    """GB/s of each size of pieces and way, over threads; targets."""
    parts = []
    for result in results:
        parts.append(provenance(result))
        for size in dict.fromkeys(row["piece_bytes"] for row in result.rows):
            rows = [row for row in result.rows if row["piece_bytes"] == size]
            ways = dict.fromkeys(row["way"] for row in rows)
            copies = {"memcpy": "memcpy_gbs", "non-temporal": "stream_gbs"}
            parts.append(_scaling(f"{size:,} B", rows, copies, ways))
        parts.append(checks(result))
    return "\n\n".join(parts)


def gpu_attention(results: Sequence[Result]) -> str:
    """GB/s of keys and values in GPU memory and, in place, in the host's; targets."""
    columns = ["shape", "keys and values in", "read as", "GB/s", "of a copy"]
    places = {"gpu": "GPU memory", "host": "registered host memory"}
    parts = []
    for result in results:
        lines = [
            [
                row["shape"],
                places[row["place"]],
                row["pieces"],
                rate(row["gbs"]),
                percent(row["fraction"]),
            ]
            for row in result.rows
            if row["kind"] == "rate"
        ]
        parts += [provenance(result), markdown(columns, lines), checks(result)]
    return "\n\n".join(parts)


_ERRORS = {"relative_error": "out, relative to its head's largest", "lse_error": "lse"}


def provenance(result: Result) -> str:
    """Machine, software, commit, day and command of a result."""
    machine = result.machine
    hardware = [machine["cpu"], f"{machine['num_cores']} cores", machine["gpu"]]
    software = [f"{name} {version}" for name, version in result.versions.items()]
    words = ", ".join(word for word in (*hardware, *software) if word)
    return (
        f"**{machine['name']}**: {words}; commit {(result.commit or 'unknown')[:12]}, "
        f"{result.date}, `{result.command}`"
    )


def checks(result: Result) -> str:
    """What a result reached, beside its targets."""
    lines = []
    for check in result.checks:
        sign = "at most" if check.lower_is_better else "at least"
        is_met = "yes" if check.is_met else "no"
        lines.append([check.name, f"{check.value:.3g}", f"{sign} {check.target:.3g}", is_met])
    return markdown(["what", "reached", "target", "met"], lines)


def markdown(columns: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table; the first column to the left, the others to the right."""
    rule = "|---|" + "---:|" * (len(columns) - 1)
    body = ["| " + " | ".join(str(cell) for cell in line) + " |" for line in (columns, *lines)]
    return "\n".join([body[0], rule, *body[1:]])


def rate(gbs: float) -> str:
    """GB/s to three digits."""
    return f"{gbs:.0f}" if gbs >= 100 else f"{gbs:.1f}" if gbs >= 10 else f"{gbs:.2f}"


def percent(fraction: float) -> str:
    """A part of one in hundredths."""
    return f"{100 * fraction:.0f} %"


def _scaling(title: str, rows: Sequence[Row], ceilings: dict[str, str], ways: Iterable[str]) -> str:
    """A line for each number of threads, a column for each ceiling (its key) and each way."""
    ways = [way for way in ways if any(row["way"] == way for row in rows)]
    lines = []
    for n in _threads(rows):
        here = {row["way"]: row for row in rows if row["num_threads"] == n}
        some = next(iter(here.values()))
        cells = [
            f"{rate(here[way]['gbs'])} ({percent(here[way]['fraction'])})" if way in here else ""
            for way in ways
        ]
        lines.append([n, *(rate(some[key]) for key in ceilings.values()), *cells])
    return markdown([f"{title}, threads", *ceilings, *ways], lines)


def _both(row: Row) -> str:
    return f"{rate(row['read_gbs'])} + {rate(row['h2d_gbs'])}"


def _threads(rows: Sequence[Row]) -> list[int]:
    return sorted({row["num_threads"] for row in rows})


def _only(rows: Sequence[Row], **fields: Any) -> Row:
    (row,) = (r for r in rows if all(r[name] == value for name, value in fields.items()))
    return row
