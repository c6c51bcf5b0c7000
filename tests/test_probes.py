"""What `sparsekv.machine` makes of the system's files, of torch, and of a copy."""

from __future__ import annotations

import importlib.metadata
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsekv.device import CudaAccelerator, SimulatedAccelerator
from sparsekv.errors import CapacityError
from sparsekv.machine import link
from sparsekv.machine.cpu import Cpu, probe_cpu
from sparsekv.machine.gpu import Gpu, probe_gpu
from sparsekv.machine.kernels import probe_gpu_kernels
from sparsekv.machine.link import (
    PcieLink,
    carrying_generation,
    measure_copies,
    probe_link,
    smi_link,
    sysfs_link,
)
from sparsekv.machine.memory import HostMemory, probe_memory
from sparsekv.machine.versions import probe_versions
from sparsekv.regions import numa
from sparsekv.regions.memory import Mapping

AVX2 = "fpu avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"
AMX = f"{AVX512} avx512_bf16 amx_bf16 amx_tile amx_int8"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def cpu_files(flags: str = AMX) -> dict[str, str]:
    """4 cores of 2 threads each, on 2 memory nodes."""
    files = {
        "proc/cpuinfo": f"processor\t: 0\nmodel name\t: Some Xeon\nflags\t\t: {flags}\n\n" * 8,
        "sys/devices/system/cpu/online": "0-7\n",
        "sys/devices/system/node/node0/cpulist": "0-1,4-5\n",
        "sys/devices/system/node/node1/cpulist": "2-3,6-7\n",
        "sys/devices/system/node/possible": "0-1\n",
    }
    for n in range(8):
        siblings = f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list"
        files[siblings] = f"{n % 4},{n % 4 + 4}\n"
    return files


def cpu_at(root: Path, allowed: set[int], **environ: str) -> Cpu:
    return probe_cpu(root, allowed, lambda: True, environ)


class TestCpu:
    def test_cores_threads_and_nodes_are_counted(self, tmp_path: Path) -> None:
        cpu = cpu_at(write(tmp_path, cpu_files()), set(range(8)))
        assert (cpu.model, cpu.best_isa) == ("Some Xeon", "amx")
        assert (cpu.machine_cores, cpu.machine_cpus) == (4, 8)
        assert (cpu.allowed_cores, cpu.allowed_cpus) == (4, 8)
        assert (cpu.nodes, cpu.cgroup_cpus, cpu.unread) == ((0, 1), None, ())

    def test_the_affinity_mask_counts_cores_not_threads(self, tmp_path: Path) -> None:
        cpu = cpu_at(write(tmp_path, cpu_files()), {1, 5})
        assert (cpu.allowed_cores, cpu.allowed_cpus, cpu.nodes) == (1, 2, (0,))
        assert cpu.machine_cores == 4

    @pytest.mark.parametrize(
        ("flags", "isa"),
        [(AMX, "amx"), (AVX512, "avx512"), (AVX2, "avx2"), ("fpu sse2", "portable")],
    )
    def test_the_best_instruction_set_is_found(self, tmp_path: Path, flags: str, isa: str) -> None:
        assert cpu_at(write(tmp_path, cpu_files(flags)), {0}).best_isa == isa

    @pytest.mark.parametrize("missing", ["avx512_bf16", "amx_tile", "amx_bf16", "avx512vl"])
    def test_a_set_that_lacks_a_part_is_not_had(self, tmp_path: Path, missing: str) -> None:
        flags = " ".join(flag for flag in AMX.split() if flag != missing)
        expected = "avx2" if missing == "avx512vl" else "avx512"
        assert cpu_at(write(tmp_path, cpu_files(flags)), {0}).best_isa == expected

    def test_an_empty_tree_is_named_and_still_answered(self, tmp_path: Path) -> None:
        cpu = cpu_at(tmp_path, {0, 1})
        assert (cpu.model, cpu.best_isa) == (None, None)
        assert (cpu.machine_cores, cpu.allowed_cores) == (2, 2)
        assert cpu.unread == ("/proc/cpuinfo", "/sys/devices/system/cpu/online")

    def test_broken_files_are_named_and_still_answered(self, tmp_path: Path) -> None:
        broken = dict.fromkeys(cpu_files(), "\x00 -- ?")
        cpu = cpu_at(write(tmp_path, broken), {0, 1})
        assert cpu.allowed_cpus == 2
        assert "/sys/devices/system/cpu/online" in cpu.unread
        assert "/sys/devices/system/node/node0/cpulist" in cpu.unread

    def test_bytes_that_are_no_text_do_no_harm(self, tmp_path: Path) -> None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/cpuinfo").write_bytes(b"\xff\xfe\xff")
        assert cpu_at(tmp_path, {0}).model is None

    def test_variables_of_openmp_are_named_if_set(self, tmp_path: Path) -> None:
        cpu = cpu_at(tmp_path, {0}, OMP_PROC_BIND="true", OMP_PLACES="", HOME="/")
        assert cpu.binding == ("OMP_PROC_BIND",)

    def test_this_machine_answers(self) -> None:
        cpu = probe_cpu()
        assert 1 <= cpu.allowed_cores <= cpu.machine_cores <= cpu.machine_cpus


class TestInterleaving:
    @pytest.mark.parametrize(("nodes", "status", "can"), [((0,), -1, True), ((0, 1), 0, True)])
    def test_it_is_possible(
        self, monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...], status: int, can: bool
    ) -> None:
        self._stage(monkeypatch, nodes, status)
        assert numa.can_interleave() is can

    def test_a_refusal_is_seen_without_a_warning(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        self._stage(monkeypatch, (0, 1), -1)
        assert not numa.can_interleave()
        assert caplog.records == []

    def _stage(self, monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...], status: int) -> None:
        monkeypatch.setattr(numa, "nodes_in_use", lambda: nodes)
        monkeypatch.setattr(numa.platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(numa, "_libc", SimpleNamespace(syscall=lambda *_: status))


MEMORY_FILES = {
    "proc/meminfo": "MemTotal:       1048576 kB\nMemFree: 1 kB\nMemAvailable:    524288 kB\n",
    "proc/self/status": "Name:\tpython\nTHP_enabled:\t1\n",
    "proc/sys/vm/overcommit_memory": "0\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def memory_at(root: Path, limits: dict[int, int] | None = None, **files: str) -> HostMemory:
    named = dict(zip(("meminfo", "status", "overcommit", "huge"), MEMORY_FILES, strict=True))
    write(root, {**MEMORY_FILES, **{named[name]: text for name, text in files.items()}})
    soft = limits or {}
    return probe_memory(
        root, lambda: 7, lambda which: (soft[which], -1) if which in soft else UNLIMITED
    )


class TestMemory:
    def test_sizes_are_read(self, tmp_path: Path) -> None:
        memory = memory_at(tmp_path)
        assert (memory.total_bytes, memory.available_bytes) == (1 << 30, 1 << 29)
        assert (memory.usable_bytes, memory.cgroup_bytes, memory.unread) == (7, None, ())
        assert memory.process_has_huge_pages
        assert not memory.never_overcommits

    @pytest.mark.parametrize("mode", ["always", "madvise", "never"])
    def test_the_mode_of_huge_pages_is_the_bracketed_one(self, tmp_path: Path, mode: str) -> None:
        text = "always madvise never".replace(mode, f"[{mode}]")
        assert memory_at(tmp_path, huge=text).huge_pages == mode

    def test_a_process_may_be_denied_huge_pages(self, tmp_path: Path) -> None:
        assert not memory_at(tmp_path, status="THP_enabled:\t0\n").process_has_huge_pages
        assert memory_at(tmp_path, status="Name:\told kernel\n").process_has_huge_pages

    @pytest.mark.parametrize(("mode", "never"), [("0", False), ("1", False), ("2", True)])
    def test_overcommitting_may_be_forbidden(self, tmp_path: Path, mode: str, never: bool) -> None:
        assert memory_at(tmp_path, overcommit=mode).never_overcommits is never

    def test_soft_limits_are_told_and_no_limit_is_none(self, tmp_path: Path) -> None:
        memory = memory_at(tmp_path, {resource.RLIMIT_MEMLOCK: 65536})
        assert (memory.locked_limit_bytes, memory.address_limit_bytes) == (65536, None)
        memory = memory_at(tmp_path, {resource.RLIMIT_AS: 1 << 36})
        assert (memory.locked_limit_bytes, memory.address_limit_bytes) == (None, 1 << 36)

    @pytest.mark.parametrize("text", ["", "MemTotal: many kB\n", "\x00"])
    def test_a_broken_meminfo_is_named(self, tmp_path: Path, text: str) -> None:
        memory = memory_at(tmp_path, meminfo=text)
        assert (memory.total_bytes, memory.unread) == (None, ("/proc/meminfo",))

    def test_an_empty_tree_is_answered(self, tmp_path: Path) -> None:
        memory = probe_memory(tmp_path, lambda: 0, lambda which: UNLIMITED)
        assert (memory.huge_pages, memory.total_bytes) == (None, None)

    def test_this_machine_answers(self) -> None:
        memory = probe_memory()
        assert memory.total_bytes is not None
        assert 0 < memory.usable_bytes < memory.total_bytes


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


def fake_torch(cuda: str | None = "13.0", hip: str | None = None, **changes: Any) -> Any:
    """A torch that sees the second of two H200s."""
    functions = {
        "is_available": lambda: True,
        "init": lambda: None,
        "current_device": lambda: 1,
        "device_count": lambda: 2,
        "mem_get_info": lambda index: (100, 140),
        "get_device_name": lambda index: f"H200 number {index}",
        "get_device_capability": lambda index: (9, 0),
        "get_arch_list": lambda: ["sm_90"],
    }
    return SimpleNamespace(
        version=SimpleNamespace(cuda=cuda, hip=hip), cuda=SimpleNamespace(**functions | changes)
    )


NVIDIA = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
    "580.159.04  Release Build\nGCC version: 13\n",
    "dev/nvidia0": "",
    "dev/nvidiactl": "",
}


class TestGpu:
    def probe(self, root: Path, torch: Any, **environ: str) -> Gpu:
        return probe_gpu(root, environ, torch)

    def test_the_current_device_is_described(self, tmp_path: Path) -> None:
        gpu = self.probe(write(tmp_path, NVIDIA), fake_torch())
        assert gpu.device is not None
        assert (gpu.device.name, gpu.device.index, gpu.device.count) == ("H200 number 1", 1, 2)
        assert (gpu.device.free_bytes, gpu.device.total_bytes) == (100, 140)
        assert (gpu.device.capability, gpu.device.architectures) == ((9, 0), ("sm_90",))
        assert (gpu.driver, gpu.has_nodes, gpu.cuda) == ("580.159.04", True, "13.0")
        assert (gpu.reason, gpu.hidden_by, gpu.is_rocm) == ("", None, False)

    def test_the_closed_driver_is_known_too(self, tmp_path: Path) -> None:
        text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun 6\n"
        write(tmp_path, {"proc/driver/nvidia/version": text})
        assert self.probe(tmp_path, fake_torch()).driver == "535.54.03"

    def test_what_torch_says_when_it_cannot_is_kept(self, tmp_path: Path) -> None:
        cannot = {"is_available": lambda: False, "init": raising(RuntimeError("too\n old"))}
        gpu = self.probe(write(tmp_path, NVIDIA), fake_torch(**cannot))
        assert (gpu.device, gpu.reason, gpu.has_nodes) == (None, "too old", True)

    def test_a_device_that_fails_when_asked_is_none(self, tmp_path: Path) -> None:
        gpu = self.probe(tmp_path, fake_torch(mem_get_info=raising(RuntimeError("lost"))))
        assert (gpu.device, gpu.reason) == (None, "lost")

    def test_a_build_without_cuda_is_not_asked(self, tmp_path: Path) -> None:
        plain = fake_torch(None, is_available=lambda: False, init=raising(AssertionError("asked")))
        gpu = self.probe(tmp_path, plain, CUDA_VISIBLE_DEVICES="")
        assert (gpu.device, gpu.reason, gpu.cuda, gpu.driver) == (None, "", None, None)
        assert (gpu.hidden_by, gpu.has_nodes) == ("", False)

    def test_the_drivers_control_node_is_no_device(self, tmp_path: Path) -> None:
        assert not self.probe(write(tmp_path, {"dev/nvidiactl": ""}), fake_torch()).has_nodes

    def test_a_build_for_amd_is_known(self, tmp_path: Path) -> None:
        assert self.probe(tmp_path, fake_torch(None, "6.4")).is_rocm


class TestGpuKernels:
    def test_torchs_ops_answer_on_the_simulated_accelerator(self) -> None:
        kernels = probe_gpu_kernels(torch.device("cpu"))
        assert (kernels.is_triton, kernels.error) == (False, "")

    def test_a_wrong_answer_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "sparsekv.machine.kernels.merge_partials_for", lambda device: lambda parts: parts[0]
        )
        assert "not that part" in probe_gpu_kernels(torch.device("cpu")).error

    def test_a_failing_call_is_told_with_its_kind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fail = raising(RuntimeError("no C compiler"))
        monkeypatch.setattr("sparsekv.machine.kernels.merge_partials_for", fail)
        assert probe_gpu_kernels(torch.device("cpu")).error == "RuntimeError: no C compiler"


class TestCopies:
    def test_they_are_measured_and_leave_nothing_registered(self) -> None:
        accelerator = SimulatedAccelerator()
        rate = measure_copies(accelerator, 1 << 20)
        assert rate.gbs is not None
        assert rate.gbs > 0
        assert accelerator.h2d_bytes >= 4 << 20
        assert accelerator.registered == {}

    def test_the_fastest_copy_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ticks = iter([0.0, 0.5, 1.0, 1.25, 2.0, 3.0, 4.0, 5.0])
        clock = SimpleNamespace(perf_counter=lambda: next(ticks))
        monkeypatch.setattr(link, "time", clock)
        rate = measure_copies(SimulatedAccelerator(), 1 << 20)
        assert rate.gbs == (1 << 20) / 0.25 / 1e9

    def test_a_refused_registration_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        accelerator = SimulatedAccelerator()
        fail = raising(CapacityError("refused (error 2); free memory"))
        monkeypatch.setattr(accelerator, "register", fail)
        unmapped = []
        unmap = Mapping.unmap
        monkeypatch.setattr(Mapping, "unmap", lambda self: unmapped.append(unmap(self)))
        rate = measure_copies(accelerator, 1 << 20)
        assert len(unmapped) == 1
        assert (rate.gbs, rate.refusal) == (None, "refused (error 2)")

    def test_the_simulated_accelerator_hangs_on_no_bus(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link, "COPY_BYTES", 1 << 20)
        assert probe_link(SimulatedAccelerator()).pcie is None


class TestPcieLink:
    ID = "0000:81:00.0"
    FIFTH = PcieLink(generation=5, max_generation=5, width=16, max_width=16, source="sysfs")

    def files(self, **changes: str) -> dict[str, str]:
        texts = {
            "current_link_speed": "32.0 GT/s PCIe",
            "max_link_speed": "32.0 GT/s PCIe",
            "current_link_width": "16",
            "max_link_width": "16",
        }
        return {f"sys/bus/pci/devices/{self.ID}/{n}": t for n, t in {**texts, **changes}.items()}

    def test_the_kernels_files_are_read(self, tmp_path: Path) -> None:
        assert sysfs_link(self.ID, write(tmp_path, self.files())) == self.FIFTH

    @pytest.mark.parametrize(
        ("speed", "generation", "gbs"),
        [
            ("2.5 GT/s PCIe", 1, 4.0),
            ("5.0 GT/s PCIe", 2, 8.0),
            ("8.0 GT/s PCIe", 3, 15.76),
            ("16 GT/s", 4, 31.5),
            ("32.0 GT/s PCIe", 5, 63.0),
            ("64.0 GT/s PCIe", 6, 121.0),
        ],
    )
    def test_each_generation_has_its_rate(
        self, tmp_path: Path, speed: str, generation: int, gbs: float
    ) -> None:
        found = sysfs_link(self.ID, write(tmp_path, self.files(current_link_speed=speed)))
        assert found is not None
        assert (found.generation, found.gbs) == (generation, pytest.approx(gbs, rel=1e-3))

    @pytest.mark.parametrize(
        ("gbs", "width", "generation"),
        [(55.1, 16, 5), (25.0, 16, 4), (12.5, 16, 3), (12.5, 8, 4), (0.1, 1, 1), (130.0, 16, None)],
    )
    def test_a_rate_needs_a_generation(
        self, gbs: float, width: int, generation: int | None
    ) -> None:
        assert carrying_generation(gbs, width) == generation

    @pytest.mark.parametrize(
        "changes",
        [
            {"current_link_speed": "Unknown"},
            {"current_link_speed": "7.0 GT/s PCIe"},
            {"current_link_width": "0"},
            {"current_link_width": "255"},
            {"current_link_width": ""},
        ],
    )
    def test_what_the_kernel_does_not_know_is_none(
        self, tmp_path: Path, changes: dict[str, str]
    ) -> None:
        assert sysfs_link(self.ID, write(tmp_path, self.files(**changes))) is None

    def test_the_driver_names_the_place_on_the_bus(self) -> None:
        accelerator = object.__new__(CudaAccelerator)
        accelerator.device = torch.device("cuda", 3)

        def call(name: str, text: Any, size: int, index: int) -> int:
            assert (name, index) == ("cuDeviceGetPCIBusId", 3)
            text.value = b"0000:81:00.0"[:size]
            return 0

        accelerator.call = call  # type: ignore[method-assign,assignment]
        assert link._bus_id(accelerator) == self.ID
        accelerator.call = lambda *_: 101  # type: ignore[method-assign]
        assert link._bus_id(accelerator) is None

    def test_a_device_that_is_not_there_is_none(self, tmp_path: Path) -> None:
        assert sysfs_link(self.ID, tmp_path) is None

    def test_nvidia_smi_is_asked_for_this_device(self) -> None:
        asked = []

        def run(command: tuple[str, ...]) -> str:
            asked.append(command)
            return "4, 5, 8, 16\n"

        found = smi_link(self.ID, run)
        assert found == PcieLink(
            generation=4, max_generation=5, width=8, max_width=16, source="nvidia-smi"
        )
        ((program, *arguments),) = asked
        assert program == "nvidia-smi"
        assert f"--id={self.ID}" in arguments

    @pytest.mark.parametrize("answer", ["", "[N/A], [N/A], [N/A], [N/A]", "5, 5, 16", "No devices"])
    def test_an_answer_without_numbers_is_none(self, answer: str) -> None:
        assert smi_link(self.ID, lambda command: answer) is None

    @pytest.mark.parametrize(
        "error", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 10)]
    )
    def test_no_nvidia_smi_is_none(self, error: Exception) -> None:
        assert smi_link(self.ID, raising(error)) is None


class TestVersions:
    def test_requirements_that_hold_here_are_kept(self) -> None:
        asked = {
            "transformers": ["numpy>=1.17", 'torch>=2.6; extra == "torch"'],
            "torch": ["filelock", "triton==3.6.0", 'triton==9; platform_system == "Windows"'],
        }
        found = probe_versions(lambda name: f"1.0+{name}", asked.get, "3.12.1")
        assert found.requirements == {
            "transformers": ("numpy>=1.17",),
            "torch": ("triton==3.6.0",),
        }
        assert found.python == "3.12.1"
        assert found.packages["numpy"] == "1.0+numpy"

    def test_what_is_not_installed_is_none(self) -> None:
        absent = raising(importlib.metadata.PackageNotFoundError("x"))
        found = probe_versions(absent, absent)
        assert found.packages["torch"] is None
        assert found.requirements == {}

    def test_the_installed_packages_answer(self) -> None:
        found = probe_versions()
        assert found.packages["torch"] == importlib.metadata.version("torch")
        assert any("hub" in text for text in found.requirements["transformers"])
