"""Compiles the launches of a call for a CUDA device that is not there; nothing runs."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

backends = pytest.importorskip("triton.backends.compiler")
driver = pytest.importorskip("triton.runtime").driver

from sparsekv.kernels.triton import append_kernel, attention_kernel, config, memory, merge_kernel  # noqa: E402

KERNELS = (
    attention_kernel.attention_kernel,
    merge_kernel.merge_kernel,
    append_kernel.append_kernel,
)

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""Of a program, by compute capability (CUDA C++ Programming Guide)."""


@dataclass(frozen=True)
class Build:
    """What one launch was compiled to: bytes of shared memory, registers and stack of a thread."""

    name: str
    num_warps: int
    shared_bytes: int
    registers: int
    stack_bytes: int
    ptx: str


class _AbsentDevice:
    """What triton asks the driver for until it has a kernel."""

    def __init__(self, capability: int) -> None:
        self._target = backends.GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int) -> Iterator[list[Build]]:
    """Within, kernels that are launched on tensors of the CPU are compiled only, and listed."""
    builds: list[Build] = []

    def compile_only(run: Any) -> Callable[..., Any]:
        def compiled(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            builds.append(_measure(run(*args, grid=grid, warmup=True, **kwargs)))

        return compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "IS_INTERPRETED", True)  # tensors of the CPU will do
        patch.setattr(config, "shared_memory_bytes", lambda device: SHARED_BYTES[capability])
        for kernel in KERNELS:
            patch.setattr(kernel, "run", compile_only(kernel.run))
        patch.setattr(driver, "_active", _AbsentDevice(capability))
        yield builds


@cache
def _measure(kernel: Any) -> Build:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "-res-usage", str(path)]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return Build(
        name=kernel.metadata.name,
        num_warps=kernel.metadata.num_warps,
        shared_bytes=kernel.metadata.shared,
        registers=found["REG"],
        stack_bytes=found["STACK"],
        ptx=kernel.asm["ptx"],
    )
