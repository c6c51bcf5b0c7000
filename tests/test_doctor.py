"""The rules of `sparsekv doctor`: each fires where it should, and only there."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sparsekv.doctor.finding import Finding, Level
from sparsekv.doctor.gpu import judge_gpu, judge_gpu_kernels, judge_link
from sparsekv.doctor.kernels import judge_cpu_kernels
from sparsekv.doctor.memory import judge_memory
from sparsekv.doctor.processor import judge_cpu
from sparsekv.doctor.versions import LEAST_PYTHON, NEWEST_TESTED, judge_versions
from sparsekv.machine.cpu import Cpu
from sparsekv.machine.gpu import Gpu, GpuDevice
from sparsekv.machine.kernels import Backend, GpuKernels
from sparsekv.machine.link import CopyRate, Link, PcieLink
from sparsekv.machine.memory import HostMemory
from sparsekv.machine.versions import OPTIONAL, REQUIREMENTS, Versions

ROOT = Path(__file__).parent.parent
GIB = 1 << 30

CPU = Cpu(
    model="Xeon",
    best_isa="amx",
    machine_cores=16,
    machine_cpus=32,
    allowed_cores=16,
    allowed_cpus=32,
    cgroup_cpus=None,
    nodes=(0, 1),
    can_interleave=True,
    binding=(),
    unread=(),
)
BACKEND = Backend(
    name="native",
    isa="amx",
    num_threads=15,
    library=Path("lib.so"),
    is_packaged=True,
    reason="",
    remedy="",
)
TORCH_OPS = replace(
    BACKEND, name="torch", isa=None, num_threads=16, reason="SPARSEKV_CPU=torch", remedy="unset it"
)
MEMORY = HostMemory(
    total_bytes=128 * GIB,
    available_bytes=120 * GIB,
    cgroup_bytes=None,
    usable_bytes=118 * GIB,
    huge_pages="madvise",
    process_has_huge_pages=True,
    locked_limit_bytes=64 << 10,
    address_limit_bytes=None,
    never_overcommits=False,
    unread=(),
)
DEVICE = GpuDevice(
    name="H200",
    index=0,
    count=1,
    total_bytes=140 * GIB,
    free_bytes=139 * GIB,
    capability=(9, 0),
    architectures=("sm_80", "sm_90"),
)
GPU = Gpu(
    device=DEVICE,
    reason="",
    cuda="13.0",
    is_rocm=False,
    driver="580.1",
    has_nodes=True,
    hidden_by=None,
)
NO_GPU = replace(GPU, device=None, driver=None, has_nodes=False, cuda=None)
GPU_KERNELS = GpuKernels(is_triton=True, triton_error="", error="")
PCIE = PcieLink(generation=5, max_generation=5, width=16, max_width=16, source="sysfs")
LINK = Link(copy=CopyRate(gbs=55.1, num_bytes=64 << 20, refusal=""), pcie=PCIE)
VERSIONS = Versions(
    python="3.12.1",
    packages={
        "torch": "2.11.0+cu130",
        "transformers": "5.24.0",
        "safetensors": "0.8.0",
        "einops": "0.8.1",
        "psutil": "7.0",
        "rich": "13.0",
        "typer": "0.15.0",
        "triton": "3.6.0",
        "huggingface-hub": "2.4.0",
    },
    requirements={
        "transformers": ("huggingface-hub<3.0,>=1.31.0", "safetensors>=0.8.0"),
        "torch": ("triton==3.6.0",),
    },
)
BASES = (CPU, BACKEND, TORCH_OPS, MEMORY, GPU, NO_GPU, GPU_KERNELS, LINK, VERSIONS)


def judge(facts: Any) -> list[Finding]:
    judges = {
        Cpu: judge_cpu,
        Backend: partial(judge_cpu_kernels, cpu=CPU),
        HostMemory: judge_memory,
        Gpu: judge_gpu,
        GpuKernels: judge_gpu_kernels,
        Link: judge_link,
        Versions: judge_versions,
    }
    return judges[type(facts)](facts)


def packages(**changes: str | None) -> Versions:
    named = {name.replace("_", "-"): version for name, version in changes.items()}
    return replace(VERSIONS, packages={**VERSIONS.packages, **named})


def gpu(**changes: Any) -> Gpu:
    return replace(GPU, device=replace(DEVICE, **changes))


def pcie(gbs: float = 55.1, **changes: Any) -> Link:
    return Link(copy=replace(LINK.copy, gbs=gbs), pcie=replace(PCIE, **changes))


def amiss(facts: Any) -> list[Finding]:
    return [finding for finding in judge(facts) if finding.level is not Level.OK]


SOUND = {
    "a sound processor": CPU,
    "as many cores granted as allowed": replace(CPU, cgroup_cpus=16.0),
    "OpenMP binds, but to all": replace(CPU, binding=("OMP_PROC_BIND",)),
    "a machine of 2 cores": replace(CPU, machine_cores=2, allowed_cores=2),
    "a sound library": BACKEND,
    "a library built here": replace(
        BACKEND, is_packaged=False, reason="the package holds no library"
    ),
    "sound memory": MEMORY,
    "huge pages for all": replace(MEMORY, huge_pages="always"),
    "no limit of locked memory": replace(MEMORY, locked_limit_bytes=None),
    "a container as large as the machine": replace(MEMORY, cgroup_bytes=128 * GIB),
    "an eighth of memory left": replace(MEMORY, usable_bytes=16 * GIB),
    "a sound GPU": GPU,
    "one of two GPUs": gpu(count=2, index=1),
    "more than half of its memory free": gpu(free_bytes=71 * GIB),
    "a GPU whose driver does not show itself": replace(GPU, driver=None, has_nodes=False),
    "binaries of an older minor": gpu(capability=(8, 9)),
    "intermediate code of an older GPU": gpu(architectures=("compute_75",)),
    "binaries for this GPU alone": gpu(architectures=("sm_90a",)),
    "code for this family": gpu(capability=(10, 3), architectures=("sm_100f",)),
    "torch does not name architectures": gpu(architectures=()),
    "Triton's kernels": GPU_KERNELS,
    "a sound link": LINK,
    "a link of which 71 % are used": pcie(gbs=0.71 * 63.0),
    "an older link, used well": pcie(gbs=25.0, generation=4, max_generation=4),
    "a fast link that nobody describes": replace(LINK, pcie=None),
    "faster than PCIe": pcie(gbs=300.0),
    "a link that was idle again when asked": pcie(generation=1, width=8),
    "sound versions": VERSIONS,
    "the oldest versions": packages(torch="2.11.0", transformers="5.18.0"),
    "the versions around 5.17": packages(transformers="5.16.0"),
    "no triton": packages(triton=None),
    "a nightly build within the tested": packages(torch="2.13.0.dev20260101+cu130"),
}

AMISS: dict[str, tuple[Any, Level, str]] = {
    # the processor
    "affinity": (replace(CPU, allowed_cores=15), Level.WARNING, "15 of 16 cores.*taskset"),
    "affinity by OpenMP": (
        replace(CPU, allowed_cores=15, binding=("OMP_PROC_BIND",)),
        Level.WARNING,
        "unset OMP_PROC_BIND, or start",
    ),
    "time of the group": (
        replace(CPU, cgroup_cpus=1.5),
        Level.WARNING,
        "time of 1.5 processors to 16 cores.*--cpus",
    ),
    "a single core": (
        replace(CPU, machine_cores=1, allowed_cores=1),
        Level.WARNING,
        "a single core.*cpu_share=0",
    ),
    "memory nodes": (
        replace(CPU, can_interleave=False),
        Level.WARNING,
        "nodes 0, 1: .*numactl.*SYS_NICE",
    ),
    "no cpuinfo": (replace(CPU, unread=("/proc/cpuinfo",)), Level.NOTE, "/proc/cpuinfo: cannot"),
    # its kernels
    "a stale packaged library": (
        replace(BACKEND, is_packaged=False, reason="old.so is stale", remedy="install again"),
        Level.NOTE,
        "old.so is stale.*install again",
    ),
    "AMX not granted": (replace(BACKEND, isa="avx512"), Level.WARNING, "AMX.*avx512.*Linux 5.16"),
    "torch's ops": (TORCH_OPS, Level.WARNING, "torch's ops.*SPARSEKV_CPU=torch.*unset it"),
    "torch's ops without a remedy": (
        replace(TORCH_OPS, remedy=""),
        Level.WARNING,
        "install a C[+][+]17 compiler",
    ),
    # memory
    "no memory": (replace(MEMORY, usable_bytes=0), Level.MUST_FIX, "0.0 GiB.*free memory"),
    "little memory": (
        replace(MEMORY, usable_bytes=12 * GIB),
        Level.WARNING,
        "may take 12.0 GiB.*less context",
    ),
    "a smaller container": (
        replace(MEMORY, cgroup_bytes=127 * GIB),
        Level.NOTE,
        "grants 127.0 GiB.*--memory",
    ),
    "huge pages off": (replace(MEMORY, huge_pages="never"), Level.WARNING, "never: .*echo madvise"),
    "no huge pages": (replace(MEMORY, huge_pages=None), Level.NOTE, "no transparent huge pages"),
    "huge pages off here": (
        replace(MEMORY, process_has_huge_pages=False),
        Level.WARNING,
        "for this process.*PR_SET_THP_DISABLE",
    ),
    "limited addresses": (
        replace(MEMORY, address_limit_bytes=64 * GIB),
        Level.WARNING,
        "limited to 64.0 GiB.*ulimit -v",
    ),
    "no overcommitting": (
        replace(MEMORY, never_overcommits=True),
        Level.WARNING,
        "overcommit_memory=2.*sysctl",
    ),
    "no meminfo": (replace(MEMORY, unread=("/proc/meminfo",)), Level.NOTE, "/proc/meminfo: cannot"),
    # the GPU
    "no GPU": (NO_GPU, Level.NOTE, "none: .*simulated.*install NVIDIA's driver"),
    "a CUDA build without a GPU": (replace(NO_GPU, cuda="13.0"), Level.NOTE, "none: .*simulated"),
    "a hidden GPU": (
        replace(GPU, device=None, hidden_by=""),
        Level.NOTE,
        "CUDA_VISIBLE_DEVICES=''.*unset CUDA_VISIBLE_DEVICES",
    ),
    "torch without CUDA": (
        replace(GPU, device=None, cuda=None),
        Level.MUST_FIX,
        "built without CUDA.*install a CUDA build",
    ),
    "torch without CUDA, a GPU hidden": (
        replace(GPU, device=None, cuda=None, hidden_by="0"),
        Level.MUST_FIX,
        "built without CUDA",
    ),
    "a container without its GPU": (
        replace(GPU, device=None, has_nodes=False),
        Level.WARNING,
        "no device to open.*--gpus all",
    ),
    "an old driver": (
        replace(GPU, device=None, reason="driver is too old"),
        Level.MUST_FIX,
        r"cannot use it \(driver is too old\).*supports CUDA 13.0",
    ),
    "AMD": (replace(GPU, is_rocm=True), Level.MUST_FIX, "AMD.*CUDA build"),
    "a GPU in use": (gpu(free_bytes=69 * GIB), Level.WARNING, "69.0 GiB of 140.0.*nvidia-smi"),
    "too old a GPU": (gpu(capability=(7, 0)), Level.MUST_FIX, "sm_80, sm_90, none.*7.0"),
    "too new a GPU": (gpu(capability=(12, 0)), Level.MUST_FIX, "none.*12.0"),
    "a newer minor's binaries": (
        gpu(capability=(8, 0), architectures=("sm_86",)),
        Level.MUST_FIX,
        "sm_86, none",
    ),
    "another GPU's own binaries": (
        gpu(capability=(10, 3), architectures=("sm_100a", "compute_100a")),
        Level.MUST_FIX,
        "none",
    ),
    "another family's code": (
        gpu(capability=(12, 0), architectures=("compute_100f",)),
        Level.MUST_FIX,
        "none",
    ),
    # its kernels
    "no triton to import": (
        replace(GPU_KERNELS, is_triton=False, triton_error="No module named 'triton'"),
        Level.WARNING,
        "torch's ops.*No module named 'triton'.*pip install triton",
    ),
    "no C compiler for triton": (
        replace(GPU_KERNELS, error="RuntimeError: Failed to find C compiler."),
        Level.MUST_FIX,
        "Failed to find C compiler.*needs a C compiler",
    ),
    # the link
    "no registration": (
        replace(LINK, copy=CopyRate(gbs=None, num_bytes=64 << 20, refusal="error 2")),
        Level.WARNING,
        "registered: error 2",
    ),
    "a slow link": (pcie(gbs=0.69 * 63.0), Level.WARNING, "69% of 63.0 GB/s"),
    "a slow link that nobody describes": (
        Link(copy=replace(LINK.copy, gbs=9.9), pcie=None),
        Level.WARNING,
        "9.9 GB/s.*generation 3 .*nobody describes",
    ),
    "half of the lanes": (pcie(gbs=27.0, width=8), Level.WARNING, "8 of the GPU's 16 lanes"),
    "an older slot": (pcie(gbs=27.0, generation=4), Level.NOTE, "generation 4.*could use 5"),
    # versions
    "an old Python": (replace(VERSIONS, python="3.9.18"), Level.MUST_FIX, "Python 3.9.18.*3.10"),
    "an old torch": (packages(torch="2.10.1+cu128"), Level.MUST_FIX, "torch 2.10.1.*>=2.11"),
    "an old transformers": (packages(transformers="5.14.2"), Level.MUST_FIX, "5.14.2.*>=5.15"),
    "no einops": (packages(einops=None), Level.MUST_FIX, "einops is not installed.*pip install"),
    "an old triton": (packages(triton="3.5.1"), Level.WARNING, "triton 3.5.1.*>=3.6"),
    "another triton than torch's": (
        packages(triton="3.9.0"),
        Level.WARNING,
        "triton 3.9.0: torch 2.11.0[+]cu130 needs ==3.6.0.*pip install",
    ),
    "another hub than transformers'": (
        packages(huggingface_hub="1.30.0"),
        Level.MUST_FIX,
        "huggingface-hub 1.30.0: transformers 5.24.0 needs .*1.31.0",
    ),
    "no hub": (packages(huggingface_hub=None), Level.MUST_FIX, "hub is not installed: transf"),
    "DeepSeek-V4 in 5.17": (packages(transformers="5.17.0"), Level.NOTE, "5.17.0.*DeepSeek-V4"),
    "a newer transformers": (packages(transformers="5.25.0"), Level.NOTE, "5.25.0 is newer"),
    "a newer torch": (packages(torch="2.14.0"), Level.NOTE, "2.14.0 is newer"),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_is_ok(name: str) -> None:
    assert judge(SOUND[name]), "something is said of it all the same"
    assert amiss(SOUND[name]) == []


@pytest.mark.parametrize("name", AMISS)
def test_what_is_amiss_is_said_with_its_remedy(name: str) -> None:
    facts, level, words = AMISS[name]
    said = [
        finding
        for finding in amiss(facts)
        if re.search(words, f"{finding.text} -> {finding.remedy}")
    ]
    assert [finding.level for finding in said] == [level], amiss(facts)


def test_a_remedy_is_one_sentence_without_a_stop() -> None:
    for facts, _, _ in AMISS.values():
        for finding in amiss(facts):
            assert "\n" not in finding.text + finding.remedy
            assert not finding.remedy.endswith((".", ";"))


def test_a_limit_of_locked_memory_is_no_fault() -> None:
    (finding,) = [f for f in judge(replace(MEMORY, locked_limit_bytes=0)) if "locked" in f.topic]
    assert finding.level is Level.OK
    assert "limit 0 KiB" in finding.text


@pytest.mark.parametrize(
    ("link", "words"),
    [
        (LINK, "87% of 63.0 GB/s, generation 5 with 16 lanes (sysfs)"),
        (replace(LINK, pcie=None), "as much as 16 lanes need generation 5 for; nobody"),
        (pcie(generation=1), "16 lanes need generation 5 for; sysfs says generation 1 with 16"),
        (pcie(gbs=300.0), "more than 16 lanes of any generation carry; sysfs says generation 5"),
    ],
)
def test_the_link_is_told_as_measured_and_as_described(link: Link, words: str) -> None:
    (finding,) = judge(link)
    assert words in finding.text


class TestCpuKernels:
    def test_torchs_threads_are_held_to_the_cores(self) -> None:
        few = judge_cpu_kernels(replace(TORCH_OPS, num_threads=1), CPU)
        assert any("set OMP_NUM_THREADS to 16" in finding.remedy for finding in few)
        assert len(few) == len(judge_cpu_kernels(TORCH_OPS, CPU)) + 1
        assert len(judge_cpu_kernels(replace(TORCH_OPS, num_threads=1), None)) == 1

    def test_a_processor_without_vectors_is_noted(self) -> None:
        portable = replace(BACKEND, isa="portable")
        plain = judge_cpu_kernels(portable, replace(CPU, best_isa="portable"))
        assert [finding.level for finding in plain] == [Level.OK, Level.NOTE]
        avx2 = judge_cpu_kernels(replace(BACKEND, isa="avx2"), replace(CPU, best_isa="avx2"))
        assert [finding.level for finding in avx2] == [Level.OK]


class TestBounds:
    def test_they_are_those_of_the_project(self) -> None:
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        dependencies = text.split("dependencies = [")[1].split("]")[0]
        assert dict(re.findall(r'"([\w-]+)(.+?)"', dependencies)) == REQUIREMENTS
        assert f'requires-python = "{LEAST_PYTHON}"' in text
        extra = text.split("\ntriton = [")[1].split("]")[0]
        assert dict(re.findall(r'"([\w-]+)([^;]+?);', extra)) == OPTIONAL

    def test_the_newest_tested_are_those_of_the_constraints(self) -> None:
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        pinned = dict(line.split("==") for line in lines if "==" in line)
        newest = {name: ".".join(version.split(".")[:2]) for name, version in pinned.items()}
        assert newest == NEWEST_TESTED
