"""Judges the GPU, what computes there, and the link to it."""

from __future__ import annotations

import re

from sparsekv.doctor.finding import Finding, Level, count, gibibytes, one_line
from sparsekv.machine.gpu import Gpu, GpuDevice
from sparsekv.machine.kernels import GpuKernels
from sparsekv.machine.link import Link, PcieLink, carrying_generation

_LEAST_FREE = 0.5
_LEAST_OF_LINK = 0.7
"""Healthy links give 80 to 90 % of what the lanes carry to large copies; virtual machines vary by a
tenth or two.
"""
_USUAL_LANES = 16
_SLOW_GBS = 10.0
"""Less than PCIe 3.0 with 16 lanes gives: said where nobody describes the link."""


def judge_gpu(gpu: Gpu) -> list[Finding]:
    """Whether there is a GPU to use; then what it is."""
    if gpu.is_rocm:
        return [
            Finding(
                topic="GPU",
                level=Level.MUST_FIX,
                text="this torch is built for AMD's GPUs, and sparsekv drives NVIDIA's only",
                remedy="install a CUDA build of torch, or run on the simulated accelerator with "
                "device='cpu'",
            )
        ]
    if gpu.device is None:
        return [_absent(gpu)]
    return [_present(gpu, gpu.device), *_architecture(gpu.device)]


def _absent(gpu: Gpu) -> Finding:
    because = f" ({one_line(gpu.reason)})" if gpu.reason else ""
    if gpu.driver is None and not gpu.has_nodes:
        level = Level.NOTE
        text = "none: everything runs on the simulated accelerator, in host memory"
        remedy = "to use a GPU, install NVIDIA's driver and a CUDA build of torch"
    elif gpu.hidden_by is not None and gpu.cuda:
        level = Level.NOTE
        text = (
            f"hidden by CUDA_VISIBLE_DEVICES={gpu.hidden_by!r}: the simulated accelerator is used"
        )
        remedy = "unset CUDA_VISIBLE_DEVICES to use the GPU"
    elif not gpu.has_nodes:
        level = Level.WARNING
        text = f"the kernel has NVIDIA's driver {gpu.driver}, but no device to open here{because}"
        remedy = "give the container its GPU: docker run --gpus all"
    elif gpu.cuda is None:
        level = Level.MUST_FIX
        text = "there is a GPU, but this torch is built without CUDA"
        remedy = "install a CUDA build of torch (https://pytorch.org)"
    else:
        level = Level.MUST_FIX
        text = f"driver {gpu.driver}: torch, built for CUDA {gpu.cuda}, cannot use it{because}"
        remedy = f"install a driver that supports CUDA {gpu.cuda}, and see that nvidia-smi works"
    return Finding(topic="GPU", level=level, text=text, remedy=remedy)


def _present(gpu: Gpu, device: GpuDevice) -> Finding:
    which = f" (cuda:{device.index} of {device.count})" if device.count > 1 else ""
    major, minor = device.capability
    text = (
        f"{device.name}{which}: {gibibytes(device.free_bytes)} of "
        f"{gibibytes(device.total_bytes)} free, compute capability {major}.{minor}, driver "
        f"{gpu.driver or 'unknown'}, CUDA {gpu.cuda}"
    )
    if device.free_bytes < _LEAST_FREE * device.total_bytes:
        return Finding(
            topic="GPU",
            level=Level.WARNING,
            text=text,
            remedy="end the processes that hold the rest: nvidia-smi names them",
        )
    return Finding(topic="GPU", level=Level.OK, text=text)


def _architecture(device: GpuDevice) -> list[Finding]:
    if not device.architectures or any(
        _runs_on(name, device.capability) for name in device.architectures
    ):
        return []
    major, minor = device.capability
    return [
        Finding(
            topic="GPU",
            level=Level.MUST_FIX,
            text=f"this torch has kernels for {', '.join(device.architectures)}, none of which run "
            f"on compute capability {major}.{minor}",
            remedy="install a build of torch that names this GPU's architecture",
        )
    ]


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Binaries run within their generation, from their minor number on; intermediate code on all
    that came later. A suffix ties both to one architecture.
    """
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if found is None:
        return False
    built = int(found[2]), int(found[3])
    if found[4] == "a":
        return built == capability
    if found[1] == "compute" and not found[4]:
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]


def judge_gpu_kernels(kernels: GpuKernels) -> list[Finding]:
    """What computes on the GPU, and whether it answers."""
    topic = "GPU kernels"
    findings = []
    if kernels.error:
        findings.append(
            Finding(
                topic=topic,
                level=Level.MUST_FIX,
                text=f"a small call fails: {one_line(kernels.error)}",
                remedy="see that nvidia-smi works; Triton also needs a C compiler (or CC) and "
                "Python's headers (python3-dev)",
            )
        )
    elif kernels.is_triton:
        findings.append(Finding(topic=topic, level=Level.OK, text="Triton; a small call is right"))
    if not kernels.is_triton and kernels.triton_error:
        findings.append(
            Finding(
                topic=topic,
                level=Level.WARNING,
                text=f"torch's ops, which are slower and copy what lies in host memory: triton "
                f"cannot be imported ({one_line(kernels.triton_error)})",
                remedy="pip install triton, in the version that torch asks for",
            )
        )
    return findings


def judge_link(link: Link) -> list[Finding]:
    """Whether host memory can be registered, and whether copies run as the link should let them."""
    if link.copy.gbs is None:
        return [
            Finding(
                topic="PCIe",
                level=Level.WARNING,
                text=f"no host memory can be registered: {one_line(link.copy.refusal)}",
                remedy="free host memory, or raise the container's limit; until then the CPU "
                "attends to everything outside the window",
            )
        ]
    return [_rate(link.copy.gbs, link.copy.num_bytes, link.pcie), *_lanes(link)]


def _rate(gbs: float, num_bytes: int, pcie: PcieLink | None) -> Finding:
    measured = f"{gbs:.1f} GB/s to the GPU, in copies of {num_bytes >> 20} MiB"
    limit = None if pcie is None else pcie.gbs
    if pcie is None or limit is None:
        text, is_slow = f"{measured}: {_implied(gbs)}; nobody describes it", gbs < _SLOW_GBS
    elif gbs > limit:
        text, is_slow = f"{measured}: {_implied(gbs)}; {pcie.source} says {_named(pcie)}", False
    else:
        is_slow = gbs < _LEAST_OF_LINK * limit
        text = f"{measured}: {gbs / limit:.0%} of {limit:.1f} GB/s, {_named(pcie)} ({pcie.source})"
    if not is_slow:
        return Finding(topic="PCIe", level=Level.OK, text=text)
    return Finding(
        topic="PCIe",
        level=Level.WARNING,
        text=text,
        remedy="run again when nothing else uses the bus or host memory; if it stays, the GPU may "
        "hang behind a switch, or on another socket than this process's CPUs",
    )


def _named(pcie: PcieLink) -> str:
    return f"generation {pcie.generation} with {count(pcie.width or 0, 'lane')}"


def _implied(gbs: float) -> str:
    """What link a rate needs, by its own evidence."""
    generation = carrying_generation(gbs, _USUAL_LANES)
    if generation is None:
        return f"more than {_USUAL_LANES} lanes of any generation carry"
    return f"as much as {_USUAL_LANES} lanes need generation {generation} for"


def _lanes(link: Link) -> list[Finding]:
    """What keeps the link below what the GPU could use; nothing if it was asked when idle again."""
    pcie = link.pcie
    if pcie is None or (pcie.gbs or 0.0) < (link.copy.gbs or 0.0):
        return []
    findings = []
    if _is_less(pcie.width, pcie.max_width):
        findings.append(
            Finding(
                topic="PCIe",
                level=Level.WARNING,
                text=f"{pcie.width} of the GPU's {pcie.max_width} lanes are in use",
                remedy="put the GPU into a slot with all lanes, and see that it sits well",
            )
        )
    if _is_less(pcie.generation, pcie.max_generation):
        findings.append(
            Finding(
                topic="PCIe",
                level=Level.NOTE,
                text=f"generation {pcie.generation}, where the GPU could use {pcie.max_generation}",
                remedy="see whether the mainboard, its firmware's settings or a riser hold it back",
            )
        )
    return findings


def _is_less(number: int | None, limit: int | None) -> bool:
    return number is not None and limit is not None and number < limit
