"""What the native library shows to other code of its process."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sparsekv.kernels import cpu

ROOT = Path(__file__).parents[2]


def exported() -> set[str]:
    """Names that the library defines for others; not the C++ library's own, which are weak."""
    path, nm = cpu.backend().library, shutil.which("nm")
    if path is None or nm is None:
        pytest.skip(cpu.backend().reason if path is None else "nm is not installed")
    listing = subprocess.run(
        [nm, "-D", "-C", "--defined-only", str(path)], capture_output=True, text=True, check=True
    ).stdout
    symbols = [line.split(maxsplit=2)[1:] for line in listing.splitlines()]
    return {name for kind, name in symbols if not (kind in "VWu" and "std::" in name)}


def test_the_library_exports_its_c_interface_and_nothing_else() -> None:
    text = (ROOT / "kernels" / "cpu" / "api.h").read_text(encoding="utf-8")
    assert exported() == set(re.findall(r"SPARSEKV_EXPORT [^(]*?(sparsekv_\w+)\(", text))
