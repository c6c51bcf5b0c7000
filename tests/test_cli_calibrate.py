"""`sparsekv calibrate` as its user meets it, over times that are told instead of measured."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_model
import torch

import sparsekv
from sparsekv.cli.main import main
from sparsekv.cli.sizes import format_tokens
from sparsekv.engine.costs import cost_of
from sparsekv.models.known import known_size
from sparsekv.roofline import PRESETS, Calibration, CalibrationPoint, CostModel, profile_folder

COST = CostModel(
    cpu_s_per_token=3e-7, h2d_s_per_token=7.5e-7, cpu_overhead_s=2.5e-4, gpu_overhead_s=3e-5
)
MODEL = "qwen3-30b-a3b"
BYTES_PER_TOKEN = 16 * 2 * 4 * 128 * 2
ARGUMENTS = ["calibrate", "--model", MODEL, "--batch", "16"]


SIZES = ((4096, 4), (16384, 4), (65536, 4))
"""Tokens and layers."""


class _ToldSteps:
    """Steps that take what `COST` says, on a GPU that is not there."""

    least_share = 0.01
    num_made = 0
    copying = 1.0
    """Times as long as in place attention takes to what is copied."""

    def __init__(self, *_: object) -> None:
        type(self).num_made += 1
        self._num_tokens = 0

    def grow(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def measure(self, share: float, *, reads_in_place: bool = True) -> CalibrationPoint:
        times = 1.0 if reads_in_place else self.copying
        return CalibrationPoint(
            num_tokens=self._num_tokens,
            share=share,
            cpu_s=COST.cpu_time(share, self._num_tokens),
            gpu_s=times * COST.gpu_time(share, self._num_tokens),
        )


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("SPARSEKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_tiny_llama(tmp_path_factory.mktemp("calibrated") / "tiny")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> type[_ToldSteps]:
    """A GPU as far as `calibrate` looks, and the steps that are timed on it."""

    class Steps(_ToldSteps):
        pass

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("sparsekv.engine.profile_key._gpu", lambda device: ("NVIDIA H200", "580.1"))
    for module in ("calibrate", "costs"):
        monkeypatch.setattr(f"sparsekv.engine.{module}.num_attending_threads", lambda: 15)
    monkeypatch.setattr("sparsekv.engine.calibrate._Steps", Steps)
    monkeypatch.setattr("sparsekv.engine.calibrate._sizes", lambda *_: SIZES)
    monkeypatch.setattr(
        "sparsekv.engine.calibrate.measure_machine", lambda *_, **__: PRESETS["h200"]
    )
    return Steps


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    result = json.loads(run(capsys, *arguments, "--json"))
    assert isinstance(result, dict)
    return result


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a wrong input gives."""
    assert main(list(arguments)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert shown.err.startswith("error: ")
    return shown.err


def rows_of(tables: str) -> list[list[str]]:
    lines = [line for line in tables.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def saved_files() -> list[Path]:
    return sorted(profile_folder().glob("*")) if profile_folder().exists() else []


@pytest.mark.usefixtures("gpu")
class TestResult:
    def test_json_has_the_calibration_and_what_follows(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = run_json(capsys, *ARGUMENTS)
        assert result["model"] == MODEL
        assert result["key"]["batch_size"] == 16
        assert result["cost"]["cpu_s_per_token"] == pytest.approx(COST.cpu_s_per_token)
        assert result["cost"]["gpu_overhead_s"] == pytest.approx(COST.gpu_overhead_s)
        assert result["attention_gbs"]["cpu"] == pytest.approx(BYTES_PER_TOKEN / 3e-7 / 1e9)
        assert result["attention_gbs"]["gpu"] == pytest.approx(BYTES_PER_TOKEN / 7.5e-7 / 1e9)
        assert result["marginal_share"] == pytest.approx(7.5 / 10.5)
        assert [entry["num_tokens"] for entry in result["shares"]] == [
            2048 << doublings for doublings in range(7)
        ]
        for entry in result["shares"]:
            assert entry["share"] == pytest.approx(COST.optimal_share(entry["num_tokens"]))
        assert result["residual"] == pytest.approx(0, abs=1e-9)
        assert result["machine"] == PRESETS["h200"].to_json()

    def test_the_way_to_read_the_pinned_region_is_told(
        self, capsys: pytest.CaptureFixture[str], gpu: type[_ToldSteps]
    ) -> None:
        for copying, words in ((1.0, "region where it lies."), (0.5, "region through copies, ")):
            gpu.copying = copying
            result = run_json(capsys, *ARGUMENTS)
            assert result["reads_in_place"] is (copying == 1.0)
            assert words in run(capsys, *ARGUMENTS)

    def test_tables_say_the_same_in_100_columns(self, capsys: pytest.CaptureFixture[str]) -> None:
        shown, result = run(capsys, *ARGUMENTS), run_json(capsys, *ARGUMENTS)
        assert [line for line in shown.splitlines()[:-1] if len(line) > 100] == []
        assert "…" not in shown
        rows = {row[0]: row[1:] for row in rows_of(shown)}
        cost, gbs, machine = result["cost"], result["attention_gbs"], PRESETS["h200"]
        for engine in ("cpu", "gpu"):
            assert rows[engine.upper()] == [
                f"{gbs[engine]:,.1f}",
                f"{1e6 * cost[f'{engine}_overhead_s']:,.1f}",
            ]
        for rate in ("cpu_read", "h2d", "d2h", "direct_read", "gather", "hbm"):
            assert [f"{getattr(machine, rate + '_gbs'):,.1f} GB/s"] in rows.values()
        assert rows["share"] == [f"{entry['share']:.2f}" for entry in result["shares"]]
        header = next(line for line in shown.splitlines() if "context" in line)
        assert header.split("┃")[2:-1] == [
            f" {format_tokens(entry['num_tokens']):>4} " for entry in result["shares"]
        ]
        assert f"p = {result['marginal_share']:.3f}" in shown
        assert "Fitted to 6 measurements, from 4,096 to 65,536 tokens" in shown
        assert shown.splitlines()[-1] == f"saved: {result['file']}"

    def test_registered_memory_that_is_read_slowly_is_named(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "reads registered memory as fast as any other" in run(capsys, *ARGUMENTS)
        monkeypatch.setattr(
            "sparsekv.engine.calibrate.measure_machine", lambda *_, **__: PRESETS["a100"]
        )
        assert "reads registered memory more slowly than any other" in run(capsys, *ARGUMENTS)

    def test_what_is_saved_is_what_a_cache_begins_with(
        self, gpu: type[_ToldSteps], capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = run_json(capsys, *ARGUMENTS)
        assert saved_files() == [Path(result["file"])]
        size = known_size(MODEL, torch.bfloat16, "native")
        found = {
            batch_size: cost_of(
                size.attended,
                num_heads=size.num_heads,
                batch_size=batch_size,
                device=torch.device("cuda"),
            )
            for batch_size in (16, 17)
        }
        assert found[16] == CostModel(**result["cost"])
        assert gpu.num_made == 2 * len(SIZES)  # the other batch was measured, and only that
        assert len(saved_files()) == 2

    def test_again_means_measured_again(
        self, gpu: type[_ToldSteps], capsys: pytest.CaptureFixture[str]
    ) -> None:
        files = [run_json(capsys, *ARGUMENTS)["file"] for _ in range(2)]
        assert gpu.num_made == 2 * len(SIZES)
        assert saved_files() == [Path(files[0])] == [Path(files[1])]

    def test_a_folder_gives_heads_and_dtype(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        by_folder = run_json(capsys, "calibrate", str(folder))["key"]
        assert by_folder["dtype"] == "float32"
        assert by_folder["geometry"] == "4 heads 2 kv 8 8"
        by_file = run_json(capsys, "calibrate", str(folder / "config.json"))["key"]
        assert by_file == by_folder
        narrow = run_json(capsys, "calibrate", str(folder), "--dtype", "bfloat16")["key"]
        assert narrow == {**by_folder, "dtype": "bfloat16"}

    def test_environment_names_model_and_batch(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("SPARSEKV_MODEL", "mixtral-8x7b")
        monkeypatch.setenv("SPARSEKV_BATCH_SIZE", "3")
        result = run_json(capsys, "calibrate")
        assert (result["model"], result["key"]["batch_size"]) == ("mixtral-8x7b", 3)

    def test_a_bar_is_shown_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stderr = io.StringIO()
        monkeypatch.setattr(stderr, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stderr", stderr)
        assert main([*ARGUMENTS]) == 0
        assert "measuring" in stderr.getvalue()


class TestMistakes:
    def test_without_a_gpu_it_says_so_and_measures_nothing(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(*_: object, **__: object) -> Calibration:
            raise AssertionError("measured")

        monkeypatch.setattr(sparsekv, "calibrate", refuse)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        said = mistake(capsys, *ARGUMENTS)
        assert "no GPU" in said
        assert "sparsekv plan" in said
        assert "--machine" in said
        assert "--device=cpu: only a GPU" in mistake(capsys, *ARGUMENTS, "--device", "cpu")
        assert saved_files() == []

    @pytest.mark.usefixtures("gpu")
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], ["MODEL", "sparsekv calibrate", "--model"]),
            (["gpt5"], ["gpt5", MODEL]),
            ([MODEL, "--model", "smollm2"], ["smollm2", "one model"]),
            ([MODEL, "--batch", "0"], ["batch_size=0"]),
            ([MODEL, "--dtype", "int8"], ["int8", "bfloat16"]),
            ([MODEL, "--device", "cuda:7"], ["cuda:7"]),
            (["deepseek-v4-flash"], ["deepseek-v4-flash", "take turns", "plan"]),
        ],
    )
    def test_each_is_named_in_one_line(
        self, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        said = mistake(capsys, "calibrate", *arguments)
        assert [word for word in words if word not in said] == []
        assert saved_files() == []

    @pytest.mark.usefixtures("gpu")
    def test_too_little_gpu_memory_is_named(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def exhaust(*_: object, **__: object) -> Calibration:
            raise torch.OutOfMemoryError("no room for 1 GiB")

        monkeypatch.setattr(sparsekv, "calibrate", exhaust)
        said = mistake(capsys, *ARGUMENTS)
        assert "--batch-size=16" in said
        assert "smaller batch" in said

    @pytest.mark.usefixtures("gpu")
    def test_a_folder_that_cannot_be_written_is_named(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "file"))
        said = mistake(capsys, *ARGUMENTS)
        assert str(tmp_path / "file") in said
        assert "SPARSEKV_CACHE" in said


class TestInterrupted:
    def test_while_measuring_nothing_is_left(
        self,
        gpu: type[_ToldSteps],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def interrupt(*_: object) -> CalibrationPoint:
            raise KeyboardInterrupt

        monkeypatch.setattr(gpu, "measure", interrupt)
        assert main(ARGUMENTS) == 130
        shown = capsys.readouterr()
        assert (shown.out, shown.err) == ("", "interrupted\n")
        assert saved_files() == []

    @pytest.mark.usefixtures("gpu")
    def test_while_saving_the_file_is_as_it_was(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = Path(run_json(capsys, *ARGUMENTS)["file"])
        before = file.read_bytes()
        write = Path.write_text

        def write_half(path: Path, text: str, **options: Any) -> int:
            write(path, text[: len(text) // 2], **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(Path, "write_text", write_half)
        assert main(ARGUMENTS) == 130
        assert saved_files() == [file]
        assert file.read_bytes() == before
        file.unlink()
        assert main(ARGUMENTS) == 130
        assert saved_files() == []
