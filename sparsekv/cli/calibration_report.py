"""What a calibration found, as its user reads it: ceilings, the costs of attention, the share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from sparsekv.cli.console import print_table, print_text, stdout_console
from sparsekv.cli.sizes import format_tokens
from sparsekv.roofline import Calibration

_LENGTHS = tuple(1024 << doublings for doublings in range(1, 8))
"""2K to 128K tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """A calibration of a model, and where it is kept."""

    model: str
    found: Calibration
    bytes_per_token: int
    """Keys and values of one position of every sequence, one layer."""
    file: Path

    @property
    def attention_gbs(self) -> tuple[float, float]:
        """A and B as rates: keys and values to which the CPU attends and which reach the GPU, in
        1e9 bytes/s, each while the other works.
        """
        cost = self.found.cost
        cpu, gpu = (self.bytes_per_token / s for s in (cost.cpu_s_per_token, cost.h2d_s_per_token))
        return cpu / 1e9, gpu / 1e9

    @property
    def shares(self) -> dict[int, float]:
        """r(L) by the number of tokens."""
        return {length: self.found.cost.optimal_share(length) for length in _LENGTHS}

    def as_dict(self) -> dict[str, object]:
        """The calibration, its file and what follows from it, as JSON holds them."""
        cpu_gbs, gpu_gbs = self.attention_gbs
        return {
            "model": self.model,
            "file": str(self.file),
            **asdict(self.found),
            "attention_gbs": {"cpu": cpu_gbs, "gpu": gpu_gbs},
            "marginal_share": self.found.cost.marginal_share,
            "shares": [{"num_tokens": length, "share": r} for length, r in self.shares.items()],
        }


def print_calibration(result: CalibrationResult) -> None:
    """Write the tables to stdout, and at the end the file."""
    key = result.found.key
    print_text(f"{result.model}: batch {key.batch_size} in {key.dtype}")
    print_text(result.found.machine.name)
    print_text("")
    _print_ceilings(result)
    print_text("")
    _print_costs(result)
    print_text("")
    shares = [f"{share:.2f}" for share in result.shares.values()]
    columns = ["context", *map(format_tokens, result.shares)]
    print_table("The CPU's share", columns, [["share", *shares]], num_words=1)
    print_text(
        f"It tends to p = {result.found.cost.marginal_share:.3f} as the context grows, and is what "
        "sparsekv aims at where no share is given."
    )
    print_text("")
    stdout_console().print(f"saved: {result.file}", markup=False, soft_wrap=True)


def _print_ceilings(result: CalibrationResult) -> None:
    machine = result.found.machine
    rows = [
        ["attention on the CPU, memory the limit", f"{machine.cpu_read_gbs:,.1f} GB/s"],
        ["attention on the CPU, products the limit", f"{machine.cpu_tflops:,.2f} TFLOP/s"],
        ["host memory to GPU, beside it", f"{machine.h2d_gbs:,.1f} GB/s"],
        ["GPU to host memory", f"{machine.d2h_gbs:,.1f} GB/s"],
        ["GPU kernels reading host memory in place", f"{machine.direct_read_gbs:,.1f} GB/s"],
        ["gather of 16 KiB pieces by the CPU", f"{machine.gather_gbs:,.1f} GB/s"],
        ["GPU memory", f"{machine.hbm_gbs:,.1f} GB/s"],
    ]
    print_table("What the machine gives", ["what", "rate"], rows, num_words=1)
    speed = "as fast as" if machine.reads_pinned_at_full_speed else "more slowly than"
    print_text(f"The CPU reads registered memory {speed} any other.")


def _print_costs(result: CalibrationResult) -> None:
    found, (cpu_gbs, gpu_gbs) = result.found, result.attention_gbs
    cost = found.cost
    rows = [
        ["CPU", f"{cpu_gbs:,.1f}", f"{1e6 * cost.cpu_overhead_s:,.1f}"],
        ["GPU", f"{gpu_gbs:,.1f}", f"{1e6 * cost.gpu_overhead_s:,.1f}"],
    ]
    columns = ["engine", "keys and values, GB/s", "overhead, us"]
    print_table("Attention of one layer, both engines at work", columns, rows, num_words=1)
    lengths = [point.num_tokens for point in found.points]
    print_text(
        f"Fitted to {len(lengths)} measurements, from {min(lengths):,} to {max(lengths):,} tokens; "
        f"the times differ from the fit by {found.residual:.1%}."
    )
    where = "where it lies" if found.reads_in_place else "through copies, the faster way here"
    print_text(f"The GPU attends to the pinned region {where}.")
