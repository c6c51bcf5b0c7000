"""Looks at everything and judges it. Whatever fails on the way becomes a finding."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from sparsekv.doctor.finding import Finding, Level, one_line
from sparsekv.errors import SparseKVError

Fact = TypeVar("Fact")
Watch = Callable[[str], AbstractContextManager[object]]
"""Is told what is looked at, for as long as that takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was found.

    Attributes:
        findings: in the order in which a reader wants them.
        facts: what the findings were made from, by topic: fields of `sparsekv.machine`'s classes,
            in types that JSON has or that turn into text.
    """

    findings: tuple[Finding, ...]
    facts: dict[str, dict[str, Any]]

    def num_findings(self, level: Level) -> int:
        """How many are of a level."""
        return sum(finding.level is level for finding in self.findings)


def examine(watch: Watch) -> Examination:
    """Look at this machine: a second or two, more where the native library must be built first.

    Raises nothing but what ends the process, such as Ctrl-C.
    """
    looking = _Looking(watch)
    versions = looking.at("versions", "versions", _versions)
    if looking.at("versions", "torch, which takes a while to import", _import_torch):
        _look_at_machine(looking)
    if versions is not None:
        looking.judge("versions", lambda: _judge_versions(versions))
    return Examination(findings=tuple(looking.findings), facts=looking.facts)


class _Looking:
    """Probes and judges, one after the other, each of which may fail."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.findings: list[Finding] = []
        self.facts: dict[str, dict[str, Any]] = {}

    def at(self, topic: str, what: str, probe: Callable[[], Fact]) -> Fact | None:
        """What `probe` returns; None, and a finding, where it fails."""
        try:
            with self._watch(what):
                fact = probe()
        except Exception as error:  # the machine's state is not ours: any kind may come
            self.findings.append(_failure(topic, error))
            return None
        if dataclasses.is_dataclass(fact) and not isinstance(fact, type):
            self.facts[topic] = dataclasses.asdict(fact)
        return fact

    def judge(self, topic: str, rules: Callable[[], list[Finding]]) -> None:
        """Keep what the rules find."""
        try:
            self.findings += rules()
        except Exception as error:  # a version that is no version, for example
            self.findings.append(_failure(topic, error))


def _failure(topic: str, error: Exception) -> Finding:
    """sparsekv's own errors name a setting and its remedy: nothing would run with it."""
    text = one_line(str(error))
    if isinstance(error, SparseKVError):
        found, separator, remedy = text.rpartition("; ")
        if not separator:
            found, remedy = text, "correct that setting, or unset it"
        return Finding(topic=topic, level=Level.MUST_FIX, text=found, remedy=remedy)
    if isinstance(error, _CannotImport):
        return Finding(
            topic=topic,
            level=Level.MUST_FIX,
            text=f"torch cannot be imported, so nothing else was looked at: {text}",
            remedy="install torch again (https://pytorch.org)",
        )
    return Finding(
        topic=topic,
        level=Level.WARNING,
        text=f"could not be looked at: {type(error).__name__}: {text}",
        remedy="see whether the rest of this report explains it; if not, please report it with "
        "the output of sparsekv doctor --json",
    )


class _CannotImport(Exception):
    """torch is missing or broken."""


def _versions() -> Any:
    from sparsekv.machine.versions import probe_versions

    return probe_versions()


def _judge_versions(versions: Any) -> list[Finding]:
    from sparsekv.doctor.versions import judge_versions

    return judge_versions(versions)


def _import_torch() -> bool:
    try:
        importlib.import_module("torch")
    except Exception as error:  # a missing library, or one of another CUDA
        raise _CannotImport(str(error)) from error
    return True


def _look_at_machine(looking: _Looking) -> None:
    """All that needs torch, if only to be imported."""
    from sparsekv.device import open_accelerator
    from sparsekv.doctor import gpu as gpu_rules
    from sparsekv.doctor.kernels import judge_cpu_kernels
    from sparsekv.doctor.memory import judge_memory
    from sparsekv.doctor.processor import judge_cpu
    from sparsekv.machine.cpu import probe_cpu
    from sparsekv.machine.gpu import probe_gpu
    from sparsekv.machine.kernels import probe_cpu_kernels, probe_gpu_kernels
    from sparsekv.machine.link import probe_link
    from sparsekv.machine.memory import probe_memory

    cpu = looking.at("processor", "the processor", probe_cpu)
    if cpu is not None:
        looking.judge("processor", lambda: judge_cpu(cpu))
    building = "the CPU's kernels, which are built once: up to a minute"
    backend = looking.at("CPU kernels", building, probe_cpu_kernels)
    if backend is not None:
        looking.judge("CPU kernels", lambda: judge_cpu_kernels(backend, cpu))
    memory = looking.at("memory", "memory", probe_memory)
    if memory is not None:
        looking.judge("memory", lambda: judge_memory(memory))
    gpu = looking.at("GPU", "the GPU", probe_gpu)
    if gpu is None:
        return
    looking.judge("GPU", lambda: gpu_rules.judge_gpu(gpu))
    if gpu.device is None or gpu.is_rocm:
        return
    accelerator = looking.at("GPU", "the GPU's driver", lambda: open_accelerator("cuda"))
    if accelerator is None:
        return
    device = accelerator.device
    compiling = "the GPU's kernels, which are compiled once"
    kernels = looking.at("GPU kernels", compiling, lambda: probe_gpu_kernels(device))
    if kernels is not None:
        looking.judge("GPU kernels", lambda: gpu_rules.judge_gpu_kernels(kernels))
    link = looking.at("PCIe", "copies to the GPU", lambda: probe_link(accelerator))
    if link is not None:
        looking.judge("PCIe", lambda: gpu_rules.judge_link(link))
