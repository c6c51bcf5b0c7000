"""Run the GPU kernels under CUDA's compute-sanitizer: `make test-compute-sanitizer`.

memcheck finds reads and writes outside of memory, racecheck threads of a block that do not wait for
each other's shared memory. Each must first find a fault that is planted for it. It fails where
there is no CUDA, no such tool, or the tool cannot watch the device: what was not watched is not
clean. What it found is recorded as benchmarks are.

initcheck is left out: windows are handed out unwritten, and other tests have NaN there to be seen.
So is synccheck: the kernels write no barriers, Triton places them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.results import FOLDER, ROOT, Check, Row, make_result, write_result

TOPIC = "compute_sanitizer"
TOOLS = ("memcheck", "racecheck")
_FOUND = 86
"""Status of a tool that found something."""
_PATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "kernels")))
_CODE = "import sanitized_calls; sanitized_calls.{}()"
_NUM_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


class Unwatched(Exception):
    """A tool does not find what is there."""


def watch(compute_sanitizer: str, tool: str) -> Row:
    """One tool's findings.

    Raises:
        Unwatched: it did not find the fault that is planted for it, or told no number.
    """
    status, output, _ = _run(compute_sanitizer, tool, "wrong")
    if status != _FOUND:
        raise Unwatched(f"{tool} does not find a planted fault (status {status})")
    status, output, seconds = _run(compute_sanitizer, tool, "calls")
    found = _NUM_ERRORS.findall(output)
    if not found:
        raise Unwatched(f"{tool} ended without a summary (status {status})")
    num_errors = sum(int(number) for pair in found for number in pair if number)
    if status and not num_errors:
        raise Unwatched(f"the calls failed under {tool} (status {status})")
    return {"tool": tool, "errors": num_errors, "seconds": seconds}


def checks(rows: Sequence[Row]) -> list[Check]:
    """No tool finds anything."""
    return [
        Check(name=f"{r['tool']}: errors", value=r["errors"], target=0, lower_is_better=True)
        for r in rows
    ]


def find_tool() -> str | None:
    """compute-sanitizer, on the path or where CUDA's toolkit is usually installed."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders = [Path(home) / "bin" for home in (*homes, "/usr/local/cuda")]
    folders += sorted(Path("/usr/local").glob("cuda-*/bin"), reverse=True)
    return shutil.which("compute-sanitizer", path=os.pathsep.join(map(str, folders))) or (
        shutil.which("compute-sanitizer")
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run every tool; 1 if one finds something, 2 if one cannot look."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--machine", help="name of this machine (default: made from its hardware)")
    options.add_argument("--out", type=Path, default=FOLDER, help="folder for the result file")
    arguments = options.parse_args(argv)
    tool = find_tool()
    if tool is None or not torch.cuda.is_available():
        missing = (
            "compute-sanitizer is not installed" if tool is None else "there is no CUDA device"
        )
        print(f"error: {missing}: nothing was watched; run it where both are", file=sys.stderr)
        return 2
    try:
        with ThreadPoolExecutor(len(TOOLS)) as threads:
            rows = list(threads.map(lambda name: watch(tool, name), TOOLS))
    except Unwatched as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = make_result(TOPIC, rows, checks, arguments.machine)
    for row in rows:
        print(f"{row['tool']}: {row['errors']} errors, {row['seconds']:.0f} s")
    print(f"written to {write_result(result, arguments.out)}")
    return int(not all(check.is_met for check in result.checks))


def _run(compute_sanitizer: str, tool: str, function: str) -> tuple[int, str, float]:
    """Status, the end of what was printed, which is shown to those who wait, and seconds."""
    start = time.perf_counter()
    options = ["--tool", tool, "--error-exitcode", str(_FOUND)]
    lines = []
    with subprocess.Popen(
        [compute_sanitizer, *options, sys.executable, "-c", _CODE.format(function)],
        # Each tensor in memory of its own: what lies beyond it belongs to nobody.
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": _PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as watched:
        assert watched.stdout is not None
        for line in watched.stdout:
            lines.append(line)
            print(f"{tool}: {line}", end="", file=sys.stderr, flush=True)
    return watched.returncode, "".join(lines[-200:]), time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
