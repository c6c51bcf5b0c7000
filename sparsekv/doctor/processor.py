"""Judges the processor: its instruction set, and how much of it this process may use."""

from __future__ import annotations

from sparsekv.doctor.finding import Finding, Level, count, unread
from sparsekv.machine.cpu import Cpu

_TOPIC = "processor"


def judge_cpu(cpu: Cpu) -> list[Finding]:
    """What the processor is, then whatever keeps part of it away."""
    return [
        _processor(cpu),
        *_affinity(cpu),
        *_cgroup(cpu),
        *_single_core(cpu),
        *_nodes(cpu),
        *unread(_TOPIC, cpu.unread),
    ]


def _processor(cpu: Cpu) -> Finding:
    model = cpu.model or "of unknown model"
    has = "" if cpu.best_isa is None else f", instruction sets up to {cpu.best_isa}"
    cores = count(cpu.machine_cores, "core")
    threads = f" ({cpu.machine_cpus} hardware threads)" * (cpu.machine_cpus != cpu.machine_cores)
    nodes = f", {count(len(cpu.nodes), 'memory node')} in use" * (len(cpu.nodes) > 0)
    text = f"{model}: {cores}{threads}{has}{nodes}"
    return Finding(topic=_TOPIC, level=Level.OK, text=text)


def _affinity(cpu: Cpu) -> list[Finding]:
    if cpu.allowed_cores >= cpu.machine_cores:
        return []
    unset = f"unset {' and '.join(cpu.binding)}, or " if cpu.binding else ""
    return [
        Finding(
            topic=_TOPIC,
            level=Level.WARNING,
            text=f"this process may run on {cpu.allowed_cores} of {cpu.machine_cores} cores (its "
            "affinity mask), and attention on the CPU with it",
            remedy=f"{unset}start it with more: taskset, numactl, the container's cpuset or the "
            "job's allocation decide",
        )
    ]


def _cgroup(cpu: Cpu) -> list[Finding]:
    if cpu.cgroup_cpus is None or cpu.cgroup_cpus >= cpu.allowed_cores:
        return []
    return [
        Finding(
            topic=_TOPIC,
            level=Level.WARNING,
            text=f"the control group grants the time of {cpu.cgroup_cpus:g} processors to "
            f"{count(cpu.allowed_cores, 'core')}",
            remedy="raise the container's limit of CPU time (docker run --cpus, limits.cpu in "
            "Kubernetes)",
        )
    ]


def _single_core(cpu: Cpu) -> list[Finding]:
    if cpu.allowed_cores > 1:
        return []
    return [
        Finding(
            topic=_TOPIC,
            level=Level.WARNING,
            text="attention on the CPU and Python, which drives the GPU, share a single core",
            remedy="give the process 2 cores or more; or let the GPU attend to everything, "
            "with cpu_share=0",
        )
    ]


def _nodes(cpu: Cpu) -> list[Finding]:
    if cpu.can_interleave:
        return []
    return [
        Finding(
            topic=_TOPIC,
            level=Level.WARNING,
            text=f"the system refuses to spread host memory over the memory nodes "
            f"{', '.join(map(str, cpu.nodes))}: it is read through one of them",
            remedy="start under numactl --interleave=all, or allow mbind (docker run --cap-add "
            "SYS_NICE)",
        )
    ]
