"""The native library: which one is used, and how it is built."""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from native_process import run_python

from sparsekv.kernels import cpu
from sparsekv.kernels.cpu import build, library

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def native_library() -> None:
    if library.native_library() is None:
        pytest.skip(f"no native library: {cpu.backend().reason}")


REPORT = """
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
from sparsekv.kernels import cpu
print(cpu.backend().name)
print(cpu.backend().library)
"""

ATTEND = """
import torch
kv = torch.ones(1, 1, 1, 3, 8)
out, _ = cpu.partial_attention(kv[0, :, :, :1], kv, kv, torch.tensor([0]), 1.0, query_start=3)
print(torch.equal(out, kv[0, :, :, :1]))
"""


def test_the_environment_chooses() -> None:
    assert run_python(REPORT, SPARSEKV_CPU="torch").stdout.split() == ["torch", "None"]
    assert run_python(REPORT, SPARSEKV_CPU="native").stdout.split()[0] == "native"
    wrong = run_python(REPORT, SPARSEKV_CPU="fast")
    assert "LayoutError: SPARSEKV_CPU='fast': must be one of auto, native, torch" in wrong.stderr


def test_without_a_compiler_torch_computes_after_one_warning(tmp_path: Path) -> None:
    bare = {"SPARSEKV_CACHE": str(tmp_path), "PATH": str(tmp_path), "CXX": ""}
    done = run_python(REPORT + ATTEND, SPARSEKV_CPU="auto", **bare)
    assert done.stdout.split() == ["torch", "None", "True"]
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("WARNING Attention on the CPU uses torch's ops")
    assert "no C++ compiler" in warning
    done = run_python(REPORT, SPARSEKV_CPU="native", **bare)
    assert "LayoutError: SPARSEKV_CPU=native, but there is no native library" in done.stderr


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of one small source, built into a folder of its own."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    return sources


def test_processes_that_build_at_once_make_one_library(small_sources: Path) -> None:
    code = (
        "import pathlib, sys; from sparsekv.kernels.cpu import build; "
        f"build.SOURCES = pathlib.Path({str(small_sources)!r}); print(build.built_library())"
    )
    command = [sys.executable, "-c", code]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)
    ]
    paths = {process.communicate(timeout=120)[0].strip() for process in running}
    assert len(paths) == 1
    (path,) = map(Path, paths)
    assert {file.name for file in path.parent.iterdir()} == {path.name, "lock"}


def test_a_changed_source_is_another_library(small_sources: Path) -> None:
    first = build.built_library()
    made = first.stat().st_mtime_ns
    assert build.built_library() == first
    assert first.stat().st_mtime_ns == made
    (small_sources / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert build.built_library() != first


def test_a_source_that_does_not_compile_leaves_nothing_behind(small_sources: Path) -> None:
    (small_sources / "two.cpp").write_text("nonsense\n")
    with pytest.raises(build.BuildError, match="nonsense"):
        build.built_library()
    left = [file.name for file in build.cache_folder().rglob("*") if file.is_file()]
    assert left == ["lock"]


def test_a_folder_that_cannot_be_written_is_named(
    small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", str(small_sources / "one.cpp" / "cache"))
    with pytest.raises(build.BuildError, match=r"could not be written.*one\.cpp"):
        build.built_library()


def test_cxx_is_split_into_words(small_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in a folder with a space, and flags, which make another library."""
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    link = small_sources.parent / "my compilers" / "cxx"
    link.parent.mkdir()
    link.symlink_to(compiler)
    (small_sources / "one.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int one() { return ONE; }\n'
    )
    for number in (7, 8):
        monkeypatch.setenv("CXX", f"'{link}' -DONE={number}")
        assert ctypes.CDLL(str(build.built_library())).one() == number


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("/nonexistent/c++ -O2", "CXX='/nonexistent/c++ -O2': there is no program '/nonexistent/"),
        ("''", "there is no program ''"),
        ("'c++", "cannot be split into words: No closing quotation"),
    ],
)
def test_a_wrong_cxx_is_named_and_no_other_compiler_used(
    given: str, message: str, small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", given)
    with pytest.raises(build.BuildError, match=re.escape(message)) as raised:
        build.built_library()
    assert raised.value.remedy == "set CXX to a C++17 compiler, or unset it"
    assert not build.cache_folder().exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("not a program", "cannot be run: .*Exec format error"),
        (
            "#!/bin/sh\nprintf 'one: fatal error: \\377\\nsecond\\n'; exit 3",
            "failed with 3: one: fatal",
        ),
        ("#!/bin/sh\nexit 4", "failed with 4: it said nothing"),
        ("#!/bin/sh\nsleep 60", "took more than 0.5 s"),
    ],
)
def test_whatever_a_compiler_does_is_one_line_for_the_user(
    script: str, message: str, small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = small_sources.parent / "cxx"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "_COMPILE_SECONDS", 0.5)
    with pytest.raises(build.BuildError, match=message) as raised:
        build.built_library()
    assert len(str(raised.value).splitlines()) == 1


# Forks. Whoever waits for ever is ended by its alarm.

LOADING = """
import os, signal, threading, warnings
warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads: that is the test
from sparsekv.kernels.cpu import library
load, loading, go_on = library._load_library, threading.Event(), threading.Event()

def load_later():
    loading.set()
    go_on.wait()
    return load()

library._load_library = load_later
thread = threading.Thread(target=library.backend)
thread.start()
loading.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    library._load_library = load
    os._exit(0 if library.backend().name == "native" else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
go_on.set()
thread.join()
print(code, library.backend().name)
"""


def test_a_child_forked_while_a_thread_loads_loads_for_itself() -> None:
    done = run_python(LOADING)
    assert (done.stdout, done.stderr) == ("0 native\n", "")


BUILDING = """
import os, pathlib, signal, sys, threading, warnings
warnings.simplefilter("ignore")
from sparsekv.kernels.cpu import build
build.SOURCES = pathlib.Path(os.environ["SOURCES"])
run, building, go_on = build._run, threading.Event(), threading.Event()

def link_later(command):
    if "-shared" in command:
        building.set()
        go_on.wait()
    return run(command)

build._run = link_later
thread = threading.Thread(target=build.built_library, daemon=True)
thread.start()
building.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    build._run = run
"""

CHILD_BUILDS = """
    print("child", build.built_library().exists(), flush=True)
    os._exit(0)
"""

FINISH = """
go_on.set()
thread.join()
print("parent", build.built_library().exists())
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        # The parent leaves only after the child, which may hold what it has inherited till then.
        (CHILD_BUILDS + FINISH + "os.waitpid(child, 0)", {"child True", "parent True"}),
        (CHILD_BUILDS + "os._exit(0)", {"child True"}),
        ("    sys.exit()\nos.waitpid(child, 0)" + FINISH, {"parent True"}),
    ],
    ids=["waits for its parent", "outlives its parent", "ends at once"],
)
def test_a_child_forked_while_a_thread_builds(
    code: str, said: set[str], small_sources: Path
) -> None:
    done = run_python(BUILDING + code, SOURCES=str(small_sources))
    assert (set(done.stdout.splitlines()), done.stderr) == (said, "")
    assert {file.name for file in build.cache_folder().glob("*/*")} >= {build.LIBRARY_NAME, "lock"}
