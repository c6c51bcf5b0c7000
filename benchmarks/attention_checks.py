"""What attention on the CPU is to reach, by the number of threads and the instruction set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.results import Check, Row

ISAS = ("amx", "avx512", "avx2", "portable")
"""Instruction sets of the native library, best first."""

RANDOM_BLOCKS = "random blocks"
"""The best of them over blocks of 64 tokens in random order, as a sparse selection reads."""

_ROUNDING = ("qwen3", "mla", "v4")
"""Shapes for which AMX rounds the weights of values to bfloat16; Mixtral's are in two parts, and as
good as float32.
"""

# Fractions of the read ceiling: shape, instruction set (None: the best of all), at least.
_SIXTEEN_THREADS = (
    ("qwen3", None, 0.90),
    ("mixtral", None, 0.90),
    ("mla", "amx", 0.75),
    ("mla", "avx512", 0.30),
    ("v4", "amx", 0.45),
)
_TWO_THREADS = (
    ("qwen3", "avx512", 0.55),
    ("mixtral", "avx512", 0.65),
)
_FRACTIONS = {16: _SIXTEEN_THREADS, 2: _TWO_THREADS}

_TIMES_TORCH = 1.5
_ERROR, _ROUNDING_ERROR, _LSE_ERROR = 1e-5, 3e-3, 1e-5


def checks(rows: Sequence[Row]) -> list[Check]:
    """Speed at the highest number of threads, and errors; what was not measured is not checked."""
    rates = [row for row in rows if row["kind"] == "rate"]
    most = max((row["num_threads"] for row in rates), default=0)
    rates = [row for row in rates if row["num_threads"] == most]
    return [
        *_fractions(rates, _FRACTIONS.get(most, ()), most),
        *_against_torch(rates, most),
        *_errors([row for row in rows if row["kind"] == "error"]),
    ]


def _fractions(
    rates: Sequence[Row], targets: Sequence[tuple[str, str | None, float]], num_threads: int
) -> Iterator[Check]:
    for shape, isa, target in targets:
        ways = ISAS if isa is None else (isa,)
        reached = [r["fraction"] for r in rates if r["shape"] == shape and r["way"] in ways]
        if reached:
            how = isa or "best"
            yield Check(
                name=f"{shape}, {how}, {num_threads} threads: fraction of the read ceiling",
                value=max(reached),
                target=target,
            )


def _against_torch(rates: Sequence[Row], num_threads: int) -> Iterator[Check]:
    """The best instruction set that the machine has, as torch too takes what there is.

    torch's attention is called in two ways, of which the faster one counts.
    """
    for shape in dict.fromkeys(row["shape"] for row in rates):
        here = [row for row in rates if row["shape"] == shape]
        ours = [row["gbs"] for row in here if row["way"] in ISAS]
        torchs = [row["gbs"] for row in here if row["way"].startswith("torch sdpa")]
        if ours and torchs:
            yield Check(
                name=f"{shape}, best, {num_threads} threads: times torch's attention",
                value=max(ours) / max(torchs),
                target=_TIMES_TORCH,
            )


def _errors(rows: Sequence[Row]) -> Iterator[Check]:
    rounded = [row for row in rows if row["way"] == "amx" and row["shape"] in _ROUNDING]
    exact = [row for row in rows if row not in rounded]
    for found, what, limit in (
        (exact, "float32 weights", _ERROR),
        (rounded, "bfloat16 weights", _ROUNDING_ERROR),
    ):
        if found:
            for name, key, target in (
                ("relative error", "relative_error", limit),
                ("error of lse", "lse_error", _LSE_ERROR),
            ):
                yield Check(
                    name=f"{what}: {name} against float64",
                    value=max(row[key] for row in found),
                    target=target,
                    lower_is_better=True,
                )
