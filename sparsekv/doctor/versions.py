"""Judges versions: what sparsekv needs, what the packages need of each other, what is known to be
broken.
"""

from __future__ import annotations

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sparsekv.doctor.finding import Finding, Level
from sparsekv.machine.versions import OPTIONAL, REQUIREMENTS, Versions

LEAST_PYTHON = ">=3.10"
NEWEST_TESTED = {"torch": "2.13", "transformers": "5.24"}
SHOWN = ("torch", "transformers", "triton")
_NO_16_BIT_DEEPSEEK_V4 = (5, 17)
_TOPIC = "versions"


def judge_versions(versions: Versions) -> list[Finding]:
    """What is installed, then what does not go together."""
    findings = [
        *_python(versions),
        *_needed(versions),
        *_optional(versions),
        *_of_each_other(versions),
        *_known(versions),
        *_untested(versions),
    ]
    shown = [f"Python {versions.python}"]
    shown += [f"{name} {version}" for name in SHOWN if (version := versions.packages.get(name))]
    return [Finding(topic=_TOPIC, level=Level.OK, text=", ".join(shown)), *findings]


def _python(versions: Versions) -> list[Finding]:
    if _is_in(versions.python, LEAST_PYTHON):
        return []
    return [
        Finding(
            topic=_TOPIC,
            level=Level.MUST_FIX,
            text=f"Python {versions.python}: sparsekv needs {LEAST_PYTHON}",
            remedy="make an environment with a newer Python",
        )
    ]


def _needed(versions: Versions) -> list[Finding]:
    findings = []
    for name, specifier in REQUIREMENTS.items():
        version = versions.packages.get(name)
        if version is None or not _is_in(version, specifier):
            findings.append(
                Finding(
                    topic=_TOPIC,
                    level=Level.MUST_FIX,
                    text=f"{_found(name, version)}: sparsekv needs {specifier}",
                    remedy=f'pip install "{name}{specifier}"',
                )
            )
    return findings


def _optional(versions: Versions) -> list[Finding]:
    findings = []
    for name, specifier in OPTIONAL.items():
        version = versions.packages.get(name)
        if version is not None and not _is_in(version, specifier):
            findings.append(
                Finding(
                    topic=_TOPIC,
                    level=Level.WARNING,
                    text=f"{_found(name, version)}: sparsekv's kernels were made for {specifier}",
                    remedy="install a newer torch, which brings its own triton",
                )
            )
    return findings


def _of_each_other(versions: Versions) -> list[Finding]:
    """transformers refuses to be imported beside what it cannot use; torch does not, of triton."""
    findings = []
    for package, texts in versions.requirements.items():
        for requirement in map(Requirement, texts):
            version = versions.packages.get(requirement.name)
            if package == "torch" and version is None:
                continue  # said where the GPU's kernels are judged
            if version is not None and _is_in(version, str(requirement.specifier)):
                continue
            is_fatal = package == "transformers"
            findings.append(
                Finding(
                    topic=_TOPIC,
                    level=Level.MUST_FIX if is_fatal else Level.WARNING,
                    text=f"{_found(requirement.name, version)}: {package} "
                    f"{versions.packages.get(package)} needs {requirement.specifier or 'it'}",
                    remedy=f'pip install "{requirement.name}{requirement.specifier}"',
                )
            )
    return findings


def _known(versions: Versions) -> list[Finding]:
    version = versions.packages.get("transformers")
    if version is None or Version(version).release[:2] != _NO_16_BIT_DEEPSEEK_V4:
        return []
    return [
        Finding(
            topic=_TOPIC,
            level=Level.NOTE,
            text=f"transformers {version} cannot run DeepSeek-V4 loaded from a folder in a 16-bit "
            "type, with or without sparsekv",
            remedy="for that model, pip install transformers==5.24.0",
        )
    ]


def _untested(versions: Versions) -> list[Finding]:
    findings = []
    for name, newest in NEWEST_TESTED.items():
        version = versions.packages.get(name)
        if version is not None and Version(version).release[:2] > Version(newest).release:
            findings.append(
                Finding(
                    topic=_TOPIC,
                    level=Level.NOTE,
                    text=f"{name} {version} is newer than any that sparsekv was tested with "
                    f"({newest})",
                    remedy=f'if something breaks, pip install "{name}=={newest}.*"',
                )
            )
    return findings


def _found(name: str, version: str | None) -> str:
    return f"{name} is not installed" if version is None else f"{name} {version}"


def _is_in(version: str, specifier: str) -> bool:
    return SpecifierSet(specifier).contains(Version(version), prereleases=True)
