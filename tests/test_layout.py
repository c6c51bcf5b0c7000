"""The tree keeps its shape: what lies where, who imports whom, what `import sparsekv` does."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparsekv

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "sparsekv"

# Each layer imports from the layers below it and from itself; units of one layer do not know each
# other. The package itself (`sparsekv`, a list of names) stands over all but the command line.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("checks",),
    ("device", "roofline", "format"),
    ("regions",),
    ("cache",),
    ("attention", "transfer", "machine"),
    ("selection",),
    ("csa", "experts"),
    ("engine",),
    ("models", "baselines", "doctor"),
    ("sparsekv",),
    ("cli",),
    ("__main__",),
)
# Modules that are one unit with another: saving and loading is half of the cache.
PART_OF = {"archive": "cache"}
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
MAY_CALL_KERNELS = {"regions", "attention", "selection", "transfer", "csa", "machine", "engine"}
KERNELS_MAY_IMPORT = {"torch", "triton", "tilelang"} | set(sys.stdlib_module_names)


def library_files() -> list[Path]:
    """Every Python file of the package, through the two links; paths below `sparsekv/`."""
    folders = [LIBRARY, LIBRARY / "kernels", LIBRARY / "models"]
    return sorted({file for folder in folders for file in folder.rglob("*.py")})


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of each import; `from a.b import c` counts as `a.b.c`.

    What stands under `if TYPE_CHECKING:` counts too: a reader follows it all the same.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def unit_of(path: Path) -> str:
    """The unit of a file: a folder or module right below `sparsekv/`, or `sparsekv` itself."""
    first = path.relative_to(LIBRARY).parts[0].removesuffix(".py")
    return "sparsekv" if first == "__init__" else PART_OF.get(first, first)


def broken_imports(path: Path, source: str) -> list[str]:
    """Imports of a file that go up or sideways, as `file:line: what`."""
    unit = unit_of(path)
    where = path.relative_to(ROOT)
    broken = []
    for line, module in imported_modules(ast.parse(source)):
        package, *rest = module.split(".")
        if package != "sparsekv":
            if unit == "kernels" and package not in KERNELS_MAY_IMPORT:
                broken.append(f"{where}:{line}: kernels import {module}")
            continue
        target = PART_OF.get(rest[0], rest[0]) if rest else "sparsekv"
        if target not in LEVEL and target != "kernels":
            target = "sparsekv"  # a public name taken from the package itself
        if target == unit:
            continue
        if unit == "kernels":
            allowed = target == "errors"
        elif target == "kernels":
            allowed = unit in MAY_CALL_KERNELS and rest[1:2] == ["dispatch"]
        else:
            allowed = LEVEL[target] < LEVEL[unit]
        if not allowed:
            broken.append(f"{where}:{line}: {unit} imports {module}")
    return broken


def test_kernels_and_models_are_namespaces_behind_relative_links() -> None:
    for name in ("kernels", "models"):
        link = LIBRARY / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name
        # transformers imports a package of Hugging Face's named `kernels`: ours must not be one.
        assert not (ROOT / name / "__init__.py").exists()


def test_every_file_belongs_to_a_layer() -> None:
    units = {unit_of(path) for path in library_files()}
    assert units <= LEVEL.keys() | {"kernels"}


def test_imports_go_down_only() -> None:
    broken = [
        line
        for path in library_files()
        for line in broken_imports(path, path.read_text(encoding="utf-8"))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("format/x.py", "from sparsekv.cache import InplaceKVCache"),
        ("regions/x.py", "import sparsekv.engine"),
        ("device/x.py", "from sparsekv.format import KVGeometry"),
        ("attention/x.py", "from sparsekv.transfer import stream"),
        ("attention/x.py", "from sparsekv.kernels.torch_ops import partial_attention"),
        ("cli/x.py", "from sparsekv.kernels.dispatch import partial_attention"),
        ("engine/x.py", "from sparsekv import CacheConfig"),
        ("models/x.py", "from sparsekv.cli import main"),
        ("kernels/reference/x.py", "from sparsekv.format import KVView"),
        ("kernels/reference/x.py", "import transformers"),
    ],
)
def test_an_import_that_goes_up_is_named_with_its_line(file: str, statement: str) -> None:
    source = f"import torch\n\ndef late():\n    {statement}\n"
    (broken,) = broken_imports(LIBRARY / file, source)
    assert broken.startswith(f"sparsekv/{file}:4: ")


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("cache.py", "from sparsekv.regions import Window"),
        ("attention/x.py", "from sparsekv.kernels.dispatch import partial_attention"),
        ("attention/x.py", "from sparsekv.attention.merge import merge_partials"),
        ("kernels/reference/x.py", "from sparsekv.errors import LayoutError"),
        ("cli/x.py", "from sparsekv.models.registry import geometry_from_config"),
    ],
)
def test_an_import_that_goes_down_is_allowed(file: str, statement: str) -> None:
    assert broken_imports(LIBRARY / file, statement) == []


def test_only_models_and_cli_name_transformers() -> None:
    users = {
        unit_of(path)
        for path in library_files()
        for _, module in imported_modules(ast.parse(path.read_text(encoding="utf-8")))
        if module.split(".")[0] == "transformers"
    }
    assert users <= {"models", "cli"}


def test_ceilings_import_nothing_of_the_product() -> None:
    ceilings, todo = {"benchmarks.ceilings"}, ["benchmarks.ceilings"]
    while todo:
        file = ROOT / (todo.pop().replace(".", "/") + ".py")
        for line, module in imported_modules(ast.parse(file.read_text(encoding="utf-8"))):
            package, *names = module.split(".")
            assert package != "sparsekv", f"{file.relative_to(ROOT)}:{line}: {module}"
            found = f"benchmarks.{names[0]}" if package == "benchmarks" and names else None
            if found and found not in ceilings:
                ceilings.add(found)
                todo.append(found)
    assert "benchmarks.memory_ceilings" in ceilings


def test_the_library_prints_nothing() -> None:
    prints = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in library_files()
        if unit_of(path) != "cli"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not prints


def test_public_names() -> None:
    assert sorted(sparsekv.__all__) == [
        "CacheConfig",
        "CacheStateError",
        "CapacityError",
        "CostModel",
        "FormatError",
        "InplaceKVCache",
        "KVGeometry",
        "LayoutError",
        "MachineProfile",
        "PartitionSpec",
        "ShareRouter",
        "SparseKVError",
        "UnsupportedModelError",
        "__version__",
        "calibrate",
        "merge_partials",
        "patch",
        "plan",
        "split_attention",
    ]
    assert [name for name in sparsekv.__all__ if not hasattr(sparsekv, name)] == []
    assert set(sparsekv.__all__) <= set(dir(sparsekv))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = sparsekv.nonsense


@pytest.mark.parametrize("module", ["sparsekv", "sparsekv.cli.main"])
def test_import_loads_nothing_heavy_and_prints_nothing(module: str) -> None:
    heavy = ("torch", "transformers", "triton", "tilelang", "numpy")
    code = f"import sys, {module}; sys.exit(','.join(m for m in {heavy} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_public_names_load_without_transformers() -> None:
    code = (
        "import sys, sparsekv; "
        "[getattr(sparsekv, name) for name in sparsekv.__all__ if name != 'patch']; "
        "sys.exit('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
