"""The native library as an optional part of the package; all else is in pyproject.toml.

Without a compiler the package installs all the same: the library is then built at first use where
there is one by then, and torch's ops compute where there is none. An editable install leaves it
out: the sources are about to change, and what is built at first use follows them.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = Path("sparsekv/kernels/cpu")


def load_build() -> ModuleType:
    """kernels/cpu/build.py, without the package around it, which imports torch."""
    spec = importlib.util.spec_from_file_location("native_build", FOLDER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()


class BuildNative(build_ext):
    """Builds as at first use: the same compiler and flags, all sources at once."""

    def run(self) -> None:
        if self.editable_mode:
            self.extensions = []
        super().run()

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name)).absolute()
        library.unlink(missing_ok=True)  # of an earlier build, which may not be repeated
        try:
            build.build_library(library)
        except build.BuildError as error:
            raise CompileError(f"no native library: {error}") from error


class NativeWheel(bdist_wheel):
    """One wheel for every Python: the library knows nothing of Python, only of the system."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


native = Extension(
    "sparsekv.kernels.cpu." + build.PACKAGED_NAME,
    sources=sorted(map(str, FOLDER.glob("*.cpp"))),
    depends=sorted(map(str, FOLDER.glob("*.h"))),
    py_limited_api=True,  # names it _native.abi3.so, whatever Python builds it
    optional=True,
)
setup(ext_modules=[native], cmdclass={"build_ext": BuildNative, "bdist_wheel": NativeWheel})
