"""Versions of Python and of the packages that sparsekv needs, and what those ask of each other."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import dataclass

REQUIREMENTS = {
    "torch": ">=2.11",
    "transformers": ">=5.15",
    "safetensors": ">=0.8",
    "einops": ">=0.8",
    "psutil": ">=5.9",
    "rich": ">=13",
    "typer": ">=0.15",
}
"""What sparsekv asks for, as pyproject.toml says: a tree that is not installed has no metadata."""
OPTIONAL = {"triton": ">=3.6"}
"""What it asks of packages that it can do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What is installed.

    Attributes:
        python: version of the interpreter.
        packages: version of each package that sparsekv, or another one here, asks for; None: it
            is not installed.
        requirements: what transformers asks of others, and torch of triton, as their metadata
            writes it: `huggingface-hub<3.0,>=1.31.0`.
    """

    python: str
    packages: dict[str, str | None]
    requirements: dict[str, tuple[str, ...]]


def probe_versions(
    version_of: Callable[[str], str] = importlib.metadata.version,
    requirements_of: Callable[[str], list[str] | None] = importlib.metadata.requires,
    python: str | None = None,
) -> Versions:
    """Read the metadata of installed packages; imports none of them.

    Args:
        version_of: the version of a package, as importlib.metadata has it.
        requirements_of: its requirements.
        python: version of the interpreter; None: of this one.
    """
    from packaging.requirements import Requirement  # comes with transformers

    asked: dict[str, tuple[str, ...]] = {}
    names = [*REQUIREMENTS, *OPTIONAL]
    for package in ("transformers", "torch"):
        try:
            texts = requirements_of(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        kept = []
        for text in texts:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            if package == "torch" and requirement.name != "triton":
                continue  # torch's libraries of CUDA may be the system's own
            kept.append(text)
            names.append(requirement.name)
        asked[package] = tuple(kept)
    return Versions(
        python=python or platform.python_version(),
        packages={name: _version(version_of, name) for name in names},
        requirements=asked,
    )


def _version(version_of: Callable[[str], str], name: str) -> str | None:
    try:
        return version_of(name)
    except importlib.metadata.PackageNotFoundError:
        return None
