"""Judges what computes attention on the CPU."""

from __future__ import annotations

from sparsekv.doctor.finding import Finding, Level, count, one_line
from sparsekv.machine.cpu import Cpu
from sparsekv.machine.kernels import Backend

_TOPIC = "CPU kernels"


def judge_cpu_kernels(backend: Backend, cpu: Cpu | None) -> list[Finding]:
    """The library or torch's ops; their instruction set and threads beside what there is.

    Args:
        cpu: None: nothing is known of the processor.
    """
    if backend.name != "native":
        return [_torch_ops(backend), *_torch_threads(backend, cpu)]
    return [_native(backend), *_isa(backend, cpu)]


def _native(backend: Backend) -> Finding:
    origin = "packaged" if backend.is_packaged else "built here"
    threads = count(backend.num_threads, "thread")
    text = f"native library ({origin}), {backend.isa}; attention in {threads}"
    if not backend.remedy:
        return Finding(topic=_TOPIC, level=Level.OK, text=text)
    reason = f"{text}; the packaged one is passed over: {one_line(backend.reason)}"
    return Finding(topic=_TOPIC, level=Level.NOTE, text=reason, remedy=backend.remedy)


def _isa(backend: Backend, cpu: Cpu | None) -> list[Finding]:
    if cpu is not None and cpu.best_isa == "amx" != backend.isa:
        return [
            Finding(
                topic=_TOPIC,
                level=Level.WARNING,
                text=f"the processor has AMX, but the system does not grant it: {backend.isa} is "
                "used",
                remedy="use Linux 5.16 or newer, and a virtual machine that passes AMX on",
            )
        ]
    if backend.isa == "portable":
        return [
            Finding(
                topic=_TOPIC,
                level=Level.NOTE,
                text="there are no vector kernels for this processor (AVX2, AVX-512, AMX)",
                remedy="leave more to the GPU, with a lower cpu_share",
            )
        ]
    return []


def _torch_ops(backend: Backend) -> Finding:
    return Finding(
        topic=_TOPIC,
        level=Level.WARNING,
        text=f"torch's ops, which are exact and slower, {count(backend.num_threads, 'thread')}: "
        f"{one_line(backend.reason)}",
        remedy=backend.remedy or "install a C++17 compiler such as g++",
    )


def _torch_threads(backend: Backend, cpu: Cpu | None) -> list[Finding]:
    if cpu is None or backend.num_threads >= cpu.allowed_cores:
        return []
    return [
        Finding(
            topic=_TOPIC,
            level=Level.WARNING,
            text=f"torch's ops run in {count(backend.num_threads, 'thread')} on "
            f"{count(cpu.allowed_cores, 'core')}",
            remedy=f"set OMP_NUM_THREADS to {cpu.allowed_cores}, or unset it",
        )
    ]
