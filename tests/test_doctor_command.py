"""`sparsekv doctor` as its user meets it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_doctor import GPU, NO_GPU

from sparsekv.cli import doctor as command
from sparsekv.cli.main import main
from sparsekv.doctor import examination
from sparsekv.doctor.examination import Examination
from sparsekv.doctor.finding import Finding, Level
from sparsekv.errors import LayoutError
from sparsekv.kernels.cpu import library

ROOT = Path(__file__).parent.parent
PROBES = {
    "versions": "sparsekv.machine.versions.probe_versions",
    "processor": "sparsekv.machine.cpu.probe_cpu",
    "CPU kernels": "sparsekv.machine.kernels.probe_cpu_kernels",
    "memory": "sparsekv.machine.memory.probe_memory",
    "GPU": "sparsekv.machine.gpu.probe_gpu",
}


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPARSEKV_CPU", "SPARSEKV_HOST_MEMORY", "SPARSEKV_JSON", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command, "_PATIENCE_S", 1e6)
    monkeypatch.setattr(PROBES["GPU"], lambda: NO_GPU)


@pytest.fixture
def _forgetful_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of the library is made anew, and the one before comes back."""
    monkeypatch.setattr(library, "_loaded", None)


def found(capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert main(["doctor", "--json"]) == code
    shown = capsys.readouterr()
    assert shown.err == ""
    result = json.loads(shown.out)
    assert isinstance(result, dict)
    return result


def of_topic(result: dict[str, Any], topic: str) -> list[dict[str, Any]]:
    return [finding for finding in result["findings"] if finding["topic"] == topic]


def say(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    examined = Examination(findings=findings, facts={})
    monkeypatch.setattr(examination, "examine", lambda watch: examined)


def finding(level: Level, text: str = "something") -> Finding:
    return Finding(topic="x", level=level, text=text, remedy="" if level is Level.OK else "do it")


class TestOutput:
    def test_json_and_table_say_the_same(self, capsys: pytest.CaptureFixture[str]) -> None:
        result = found(capsys)
        assert main(["doctor"]) == 0
        table = capsys.readouterr().out
        words = "".join(table.translate(str.maketrans("", "", "│→ \n")).split())
        for item in result["findings"]:
            if item["topic"] != "memory":  # whose figures move by themselves
                assert "".join(item["text"].split()) in words, item
            assert "".join((item["remedy"] or "").split()) in words
        levels = [line.split("│")[1].strip() for line in table.splitlines() if line[0] == "│"]
        assert [level for level in levels if level] == [f["level"] for f in result["findings"]]
        assert result["counts"]["warning"] == levels.count("warning")
        assert set(result["facts"]) >= {"processor", "CPU kernels", "memory", "GPU", "versions"}

    @pytest.mark.parametrize("width", [80, 100])
    def test_it_fits_the_terminal(
        self, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("sparsekv.cli.console.RESULT_WIDTH", width)
        say(monkeypatch, finding(Level.WARNING, "many words " * 40), finding(Level.OK, "w" * 300))
        assert main(["doctor"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) == width

    def test_markup_in_a_finding_is_text(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        say(monkeypatch, finding(Level.NOTE, "[Errno 2] [bold]gone[/bold]"))
        main(["doctor"])
        assert "[Errno 2] [bold]gone[/bold]" in capsys.readouterr().out

    def test_the_last_line_sums_up(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        say(monkeypatch, *map(finding, (Level.OK, Level.WARNING, Level.WARNING, Level.NOTE)))
        assert main(["doctor"]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == "nothing must be fixed, 2 warnings, 1 note"

    @pytest.mark.parametrize("option", [[], ["--json"]])
    def test_what_must_be_fixed_exits_with_1(
        self,
        option: list[str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        for level in (Level.OK, Level.NOTE, Level.WARNING):
            say(monkeypatch, finding(level))
            assert main(["doctor", *option]) == 0
        say(monkeypatch, finding(Level.MUST_FIX), finding(Level.OK))
        assert main(["doctor", *option]) == 1
        assert "must" in capsys.readouterr().out.splitlines()[-1] or option

    def test_help_is_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor", "--help"]) == 0
        assert "Usage: sparsekv doctor" in capsys.readouterr().out


class TestPatience:
    def test_what_takes_long_is_said_on_stderr(self, monkeypatch: pytest.MonkeyPatch) -> None:
        said, lines = threading.Event(), []

        def write(line: str) -> None:
            lines.append(line)
            said.set()

        monkeypatch.setattr(command, "stderr_console", lambda: SimpleNamespace(print=write))
        monkeypatch.setattr(command, "_PATIENCE_S", 0.0)
        with command._say_what_takes_long("the weather"):
            assert said.wait(60)
        assert lines == ["looking at the weather ..."]

    def test_what_is_quick_is_not(self, capsys: pytest.CaptureFixture[str]) -> None:
        with command._say_what_takes_long("the weather"):
            pass
        assert capsys.readouterr().err == ""


class TestWhatFails:
    """Whatever goes wrong in looking is a finding; the rest is looked at all the same."""

    @pytest.mark.parametrize("topic", PROBES)
    @pytest.mark.parametrize(
        "error", [OSError("no such thing"), ValueError("no number"), MemoryError(), KeyError("x")]
    )
    def test_a_probe_that_fails_is_a_finding(
        self,
        topic: str,
        error: Exception,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def fail() -> None:
            raise error

        monkeypatch.setattr(PROBES[topic], fail)
        result = found(capsys)
        (said,) = of_topic(result, topic)
        assert said["level"] == "warning"
        assert type(error).__name__ in said["text"]
        assert {item["topic"] for item in result["findings"]} >= set(PROBES)

    def test_a_rule_that_fails_is_a_finding(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from sparsekv.machine import versions

        probe = versions.probe_versions
        monkeypatch.setattr(PROBES["versions"], lambda: probe(lambda name: "no version"))
        (said,) = of_topic(found(capsys), "versions")
        assert "InvalidVersion" in said["text"]

    def test_a_torch_that_cannot_be_imported_must_be_fixed(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(name: str) -> None:
            raise OSError(f"lib{name}.so is missing")

        monkeypatch.setattr(examination.importlib, "import_module", fail)
        result = found(capsys, code=1)
        texts = [item["text"] for item in result["findings"] if item["level"] == "must fix"]
        assert len(texts) == 1
        assert "torch cannot be imported" in texts[0]
        assert "libtorch.so is missing" in texts[0]

    def test_a_warning_of_torchs_stays_off_the_screen(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def warn() -> object:
            warnings.warn("the driver is too old", stacklevel=1)
            return NO_GPU

        monkeypatch.setattr(PROBES["GPU"], warn)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert of_topic(found(capsys), "GPU")[0]["level"] == "note"

    def test_ctrl_c_is_no_finding(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(PROBES["memory"], interrupt)
        assert main(["doctor"]) == 130
        assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("_forgetful_library")
class TestSettings:
    def test_torchs_ops_by_choice(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("SPARSEKV_CPU", "torch")
        said = of_topic(found(capsys), "CPU kernels")[0]
        assert (said["level"], said["remedy"]) == ("warning", "unset SPARSEKV_CPU")
        assert "SPARSEKV_CPU=torch" in said["text"]

    def test_no_compiler_and_no_library(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        self._hide_libraries(tmp_path, monkeypatch)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        said = of_topic(found(capsys), "CPU kernels")[0]
        assert said["level"] == "warning"
        assert "no C++ compiler" in said["text"]
        assert "install a C++17 compiler" in said["remedy"]
        assert caplog.records == [], "the finding says it; the log need not"
        assert logging.getLogger("sparsekv").level == logging.NOTSET

    def test_a_cache_folder_that_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._hide_libraries(tmp_path, monkeypatch)
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "file" / "folder"))
        said = of_topic(found(capsys), "CPU kernels")[0]
        assert "set SPARSEKV_CACHE" in said["remedy"]

    def test_a_packaged_library_of_other_sources(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "_native.so").write_text("no library")
        monkeypatch.setattr(library, "SOURCES", tmp_path)
        said = of_topic(found(capsys), "CPU kernels")[0]
        assert said["level"] == "note" or "torch's ops" in said["text"]
        assert "cannot be loaded" in said["text"]

    @pytest.mark.parametrize(
        ("name", "value", "topic", "remedy"),
        [
            ("SPARSEKV_CPU", "gpu", "CPU kernels", "correct that setting"),
            ("SPARSEKV_HOST_MEMORY", "lots", "memory", "write bytes or a number with a unit"),
        ],
    )
    def test_a_setting_that_is_no_value_must_be_fixed(
        self,
        name: str,
        value: str,
        topic: str,
        remedy: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv(name, value)
        (said,) = of_topic(found(capsys, code=1), topic)
        assert said["level"] == "must fix"
        assert value in said["text"]
        assert remedy in said["remedy"]

    def test_native_without_a_library_must_be_fixed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._hide_libraries(tmp_path, monkeypatch)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("SPARSEKV_CPU", "native")
        (said,) = of_topic(found(capsys, code=1), "CPU kernels")
        assert said["remedy"].startswith("install a C++17 compiler, or set SPARSEKV_CPU=auto")

    def _hide_libraries(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, "SOURCES", tmp_path)
        monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "empty"))


class TestOnCuda:
    """A GPU as far as torch's functions can play one."""

    def test_a_driver_that_cannot_be_opened_must_be_fixed(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(device: str) -> None:
            raise LayoutError(f"device={device}: cuDeviceGet failed; check nvidia-smi")

        monkeypatch.setattr(PROBES["GPU"], lambda: GPU)
        monkeypatch.setattr("sparsekv.device.open_accelerator", refuse)
        ok, said = of_topic(found(capsys, code=1), "GPU")
        assert ok["level"] == "ok"
        assert (said["text"], said["remedy"]) == (
            "device=cuda: cuDeviceGet failed",
            "check nvidia-smi",
        )

    def test_kernels_and_link_follow_a_device(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from sparsekv.device import SimulatedAccelerator

        monkeypatch.setattr(PROBES["GPU"], lambda: GPU)
        monkeypatch.setattr("sparsekv.device.open_accelerator", lambda _: SimulatedAccelerator())
        result = found(capsys)
        assert [item["topic"] for item in result["findings"]].index("PCIe")
        assert result["facts"]["PCIe"]["copy"]["num_bytes"] == 64 << 20
        assert result["facts"]["GPU kernels"]["error"] == ""


def test_a_fresh_process_answers_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sparsekv.cli.main", "doctor", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    assert all(line.startswith("looking at ") for line in done.stderr.splitlines())
    assert json.loads(done.stdout)["findings"]
