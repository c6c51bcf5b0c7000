"""Build the native library with a C++ compiler: into the package, or into the user's cache folder.

Imports nothing but the standard library: setup.py loads this file where the package cannot be.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
LIBRARY_NAME = "libsparsekv_cpu.so"
PACKAGED_NAME = "_native"  # what a library that came with the package is called, before its suffix
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-pthread")
# Some compilers link their own copy of the C++ library: it must not mix with the process's.
LINK_FLAGS = ("-Wl,--exclude-libs,ALL",)

_COMPILE_SECONDS = 600
_NEEDS_COMPILER = "install a C++17 compiler such as g++, or set CXX to one"
_WRONG_CXX = "set CXX to a C++17 compiler, or unset it"


class BuildError(Exception):
    """Why there is no library, in words for the user; `remedy` says what would bring one, or
    nothing.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


def built_library() -> Path:
    """Path of the library built from these sources by this compiler; builds it where there is none.

    Processes that build at the same time wait for one of them. A library appears under its name
    only when it is whole.

    Raises:
        BuildError: no compiler, a compiler that fails, or a cache folder that cannot be written.
    """
    compiler = _compiler()
    try:
        folder = cache_folder() / f"cpu-{_hash_of_build(compiler)}"
        library = folder / LIBRARY_NAME
        if library.exists():
            return library
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            # A lock of this process alone. That of flock would be held by a child forked meanwhile
            # too, which then waits for itself.
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if not library.exists():
                logger.info(
                    "Building %s with %s, once: up to a minute", library, shlex.join(compiler)
                )
                _build(compiler, library)
        return library
    except OSError as error:
        raise BuildError(
            f"the library could not be written: {error}",
            "set SPARSEKV_CACHE to a folder that this user may write to",
        ) from error


def build_library(library: Path) -> None:
    """Build the library under that name, which it gets when it is whole.

    Raises:
        BuildError: as built_library.
    """
    compiler = _compiler()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        _build(compiler, library)
    except OSError as error:
        raise BuildError(f"the library could not be written: {error}") from error


def fingerprint() -> str:
    """Hash of the sources and flags; a library knows the one that it was built from."""
    hashed = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.h")) + _translation_units():
        hashed.update(f"{source.name}\0".encode() + source.read_bytes() + b"\0")
    hashed.update(" ".join(FLAGS + LINK_FLAGS).encode())
    return hashed.hexdigest()[:16]


def cache_folder() -> Path:
    """$SPARSEKV_CACHE, else the user's cache folder for sparsekv."""
    given = os.environ.get("SPARSEKV_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsekv"


def _compiler() -> list[str]:
    """The words of $CXX, the first one resolved; where it is not set, the path of c++ or g++."""
    given = os.environ.get("CXX", "").strip()
    if given:
        return _compiler_given(given)
    for name in ("c++", "g++"):
        path = shutil.which(name)
        if path:
            return [path]
    raise BuildError("no C++ compiler (looked for $CXX, c++, g++)", _NEEDS_COMPILER)


def _compiler_given(given: str) -> list[str]:
    try:
        program, *flags = shlex.split(given)
    except ValueError as error:
        raise BuildError(
            f"CXX={given!r} cannot be split into words: {error}", _WRONG_CXX
        ) from error
    path = shutil.which(program)
    if path is None:
        raise BuildError(f"CXX={given!r}: there is no program {program!r}", _WRONG_CXX)
    return [path, *flags]


def _hash_of_build(compiler: list[str]) -> str:
    """Hash of all that decides what a library is that this machine builds."""
    decides = [fingerprint(), *compiler[1:], _run([*compiler, "--version"])]
    return hashlib.sha256(" ".join(decides).encode()).hexdigest()[:16]


def _translation_units() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


@contextlib.contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    """As tempfile.TemporaryDirectory, which a child forked meanwhile would remove when it exits."""
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="build-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _build(compiler: list[str], library: Path) -> None:
    flags = [*FLAGS, f'-DSPARSEKV_FINGERPRINT="{fingerprint()}"']
    with _temporary_folder(library.parent) as temporary:
        sources = {source: temporary / f"{source.stem}.o" for source in _translation_units()}
        running = [
            subprocess.Popen(
                [*compiler, *flags, "-c", str(source), "-o", str(made)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            for source, made in sources.items()
        ]
        try:
            for process in running:
                output, _ = process.communicate(timeout=_COMPILE_SECONDS)
                _check(compiler, process.returncode, output)
        except subprocess.TimeoutExpired as error:
            raise _too_slow(compiler) from error
        finally:
            for process in running:
                process.kill()
                process.wait()
        linked = temporary / library.name
        objects = [str(made) for made in sources.values()]
        _run([*compiler, "-shared", *FLAGS, *LINK_FLAGS, *objects, "-o", str(linked)])
        os.replace(linked, library)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_COMPILE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _too_slow(command) from error
    except OSError as error:
        raise BuildError(f"`{shlex.join(command)}` cannot be run: {error}", _WRONG_CXX) from error
    _check(command, done.returncode, done.stdout)
    return done.stdout


def _check(command: list[str], code: int, output: str) -> None:
    if code != 0:
        why = _telling_line(output)
        raise BuildError(f"`{shlex.join(command)}` failed with {code}: {why}", _NEEDS_COMPILER)


def _telling_line(output: str) -> str:
    """Of what a compiler said: its first error, or else its last word."""
    lines = output.strip().splitlines() or ["it said nothing"]
    return next((line for line in lines if "error" in line), lines[-1]).strip()


def _too_slow(command: list[str]) -> BuildError:
    return BuildError(f"`{shlex.join(command)}` took more than {_COMPILE_SECONDS} s")
