"""What is installed: the native library where a compiler was, and a working package where not."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sparsekv.kernels.cpu import build, library

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "kernels" / "cpu"


def test_a_packaged_library_is_used_beside_its_own_sources_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an edited tree holds one that was built before."""
    if library.native_library() is None:
        pytest.skip(f"no native library: {library.backend().reason}")
    path = library.backend().library
    assert path is not None
    sources = tmp_path / "cpu"
    shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for module in (build, library):
        monkeypatch.setattr(module, "SOURCES", sources)
    monkeypatch.setenv("CXX", "/bin/false")

    with pytest.raises(build.BuildError, match="the package holds no library, and none can be"):
        library._load_library()
    packaged = shutil.copy(path, sources / f"{build.PACKAGED_NAME}.abi3.so")
    loaded = library._load_library()
    assert (loaded.path, loaded.is_packaged, loaded.reason) == (packaged, True, "")
    with (sources / "pool.h").open("a") as header:
        header.write("// changed\n")
    with pytest.raises(build.BuildError, match="was built from other sources, and none can be"):
        library._load_library()
    packaged.rename(tmp_path / "loaded")  # the loader knows it by its name
    (sources / f"{build.PACKAGED_NAME}.so").write_bytes(b"no library")
    with pytest.raises(build.BuildError, match="cannot be loaded"):
        library._load_library()


def test_a_built_library_says_why_none_was_packaged() -> None:
    backend = library.backend()
    if backend.name == "torch":
        assert not backend.is_packaged
        assert backend.reason
    else:
        assert backend.is_packaged == (backend.reason == "")


# Real builds


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a package is made from, with its links."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    leave_out = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("sparsekv", "kernels", "models"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=leave_out)
    return tree


NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}


def run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def build_package(hook: str, tree: Path, **environment: str) -> Path:
    """The file that a hook of the build backend makes of a tree, in a folder of its own."""
    folder = tree.parent / f"{tree.name}-{hook}-{'-'.join(environment)}"
    folder.mkdir()
    code = f"from setuptools import build_meta; build_meta.{hook}({str(folder)!r})"
    run([sys.executable, "-c", code], tree, **environment)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    if library.native_library() is None:
        pytest.skip(f"no native library: {library.backend().reason}")
    return build_package("build_wheel", tree)


@pytest.fixture(scope="module")
def wheel_without_library(tree: Path) -> Path:
    return build_package("build_wheel", tree, **NO_COMPILER)


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as packed:
        return set(packed.namelist())


def installed(wheel: Path, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile"]
    run([*pip, "--target", str(folder), str(wheel)], folder.parent)
    return folder


ATTEND = """
import json, logging, torch, sparsekv
logging.basicConfig(format="%(levelname)s %(message)s")
from sparsekv.kernels import cpu
kv = torch.ones(1, 1, 1, 3, 8)
out, _ = cpu.partial_attention(kv[0, :, :, :1], kv, kv, torch.tensor([0]), 1.0, query_start=3)
assert torch.equal(out, kv[0, :, :, :1])
backend = cpu.backend()
print(json.dumps([sparsekv.__file__, backend.name, backend.is_packaged, backend.reason]))
"""


def report(site: Path, tmp_path: Path, **environment: str) -> tuple[list[Any], str]:
    """What the installed package says of itself, after it has attended, and its warnings."""
    paths = {"PYTHONPATH": str(site), "SPARSEKV_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", ATTEND]
    done = run(command, tmp_path, SPARSEKV_CPU="auto", **paths, **environment)
    file, *said = json.loads(done.stdout)
    assert Path(file).is_relative_to(site)
    return said, done.stderr


@pytest.mark.slow
def test_a_wheel_made_with_a_compiler_needs_none(wheel: Path, tmp_path: Path) -> None:
    assert wheel.name.split("-", 2)[2].startswith("py3-none-linux_")
    site = installed(wheel, tmp_path / "site")
    assert report(site, tmp_path, **NO_COMPILER) == (["native", True, ""], "")
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_wheel_made_without_a_compiler_works(wheel_without_library: Path, tmp_path: Path) -> None:
    assert not [name for name in names_in(wheel_without_library) if name.endswith(".so")]
    site = installed(wheel_without_library, tmp_path / "site")
    (name, is_packaged, reason), warnings = report(site, tmp_path, **NO_COMPILER)
    assert warnings.count("WARNING") == 1
    assert warnings.startswith("WARNING Attention on the CPU uses torch's ops")
    assert (name, is_packaged) == ("torch", False)
    assert reason.startswith("the package holds no library, and none can be built")
    if library.native_library() is not None:  # a compiler that came later
        said, warnings = report(site, tmp_path)
        assert (said, warnings) == (["native", False, "the package holds no library"], "")


@pytest.mark.slow
def test_a_source_distribution_makes_the_same_wheel(
    tree: Path, wheel_without_library: Path, tmp_path: Path
) -> None:
    with tarfile.open(build_package("build_sdist", tree)) as packed:
        packed.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    names = names_in(wheel_without_library)
    assert names_in(build_package("build_wheel", unpacked, **NO_COMPILER)) == names
    sources = {path.name for path in SOURCES.iterdir() if path.suffix in (".py", ".cpp", ".h")}
    assert {f"sparsekv/kernels/cpu/{name}" for name in sources} < names


@pytest.mark.slow
def test_an_editable_install_builds_nothing(tree: Path) -> None:
    wheel = build_package("build_editable", tree)
    assert not [name for name in names_in(wheel) if name.endswith(".so")]
    assert not list((tree / "kernels" / "cpu").glob("*.so"))
