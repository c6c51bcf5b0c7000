"""`sparsekv plan` as its user meets it: tables, JSON, pictures, and one line for each mistake."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_model
import torch

import sparsekv
from sparsekv.cli import console
from sparsekv.cli.main import main
from sparsekv.cli.sizes import format_bytes, format_tokens, parse_tokens
from sparsekv.engine.profile_key import profile_key
from sparsekv.models.known import known_names, known_size
from sparsekv.regions import memory
from sparsekv.roofline import PRESETS, Calibration, CostModel, profile_folder

ROOT = Path(__file__).parent.parent
EXAMPLE = ["plan", "--model", "qwen3-30b-a3b", "--batch", "16", "--context", "128K"]
TIGHT = ["--ram", "120GiB", "--vram", "57GiB"]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("SPARSEKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_tiny_llama(tmp_path_factory.mktemp("plans") / "tiny")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    result = json.loads(run(capsys, *arguments, "--json"))
    assert isinstance(result, dict)
    return result


def rows_of(table: str) -> list[list[str]]:
    """Cells of every row of every table, headers apart."""
    lines = [line for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


class TestTables:
    @pytest.mark.parametrize("model", known_names())
    def test_tables_and_json_say_the_same(
        self, model: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["plan", model, "--batch", "3", "--context", "20K", *TIGHT]
        rows, plan = rows_of(run(capsys, *arguments)), run_json(capsys, *arguments)
        by_name = {row[0]: row for row in rows}
        asked = by_name["as asked"]
        assert asked[2:] == [format_bytes(plan["vram_bytes"]), format_bytes(plan["ram_bytes"])]
        assert (asked[1] == "yes") == plan["fits"] == (plan["fits_ram"] and plan["fits_vram"])
        assert [row[2:] for row in rows if row[1] == "yes" and row is not asked] == [
            [format_bytes(remedy["vram_bytes"]), format_bytes(remedy["ram_bytes"])]
            for remedy in plan["remedies"]
        ]
        shown_bytes = [row[-1] for row in rows[: rows.index(asked)]]
        placed = [row["bytes"] for row in plan["layers"]] if "layers" in plan else []
        regions = ("window_bytes", "ping_pong_bytes", "unpinned_bytes", "pinned_bytes")
        expected = [plan["weights"]["bytes"], *(placed or [plan[name] for name in regions])]
        assert shown_bytes == [format_bytes(count) for count in expected]
        on_gpu = plan["gpu_bytes"] + plan["prompt_bytes"]
        assert on_gpu + plan["weights"]["bytes"] == plan["vram_bytes"]

        forecast = rows[-len(plan["lengths"]) :]
        for row, length in zip(forecast, plan["lengths"], strict=True):
            assert parse_tokens("", row[0]) == length["num_tokens"]
            shown = [float(cell) for cell in row[1:]]
            assert shown[:2] == pytest.approx(
                [length["best_share"], length["running_share"]], abs=0.005
            )
            assert shown[2:] == pytest.approx(
                [
                    length["attention_ms_per_layer"],
                    length["ms_per_token"],
                    length["tokens_per_s"],
                    length["streaming_only"]["tokens_per_s"],
                    length["cpu_only"]["tokens_per_s"],
                ],
                rel=0.006,
            )

    @pytest.mark.parametrize("width", [80, 100])
    @pytest.mark.parametrize(
        "arguments",
        [
            EXAMPLE,
            [*EXAMPLE, *TIGHT],
            [*EXAMPLE, "--ram", "2GiB", "--vram", "20GiB", "--cpu-share", "0.5"],
            [*EXAMPLE, "--machine", "a100"],
            ["plan", "deepseek-v4-pro", "--context", "1048575", "--batch", "512", *TIGHT],
            ["plan", "smollm2", "--context", "200"],
        ],
    )
    def test_no_line_is_cut_or_broken(
        self,
        width: int,
        arguments: list[str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(console, "RESULT_WIDTH", width)
        lines = run(capsys, *arguments).splitlines()
        assert max(map(len, lines)) <= width
        assert "…" not in "".join(lines)
        assert [line for line in lines if line != line.rstrip()] == []
        # A table broken in the middle has rows that differ in length.
        borders = [idx for idx, line in enumerate(lines) if line.startswith("┏")]
        assert len(borders) == 3
        for start in borders:
            end = next(i for i in range(start, len(lines)) if lines[i].startswith("└"))
            assert len({len(line) for line in lines[start : end + 1]}) == 1

    def test_it_says_that_a_preset_stands_in_and_how_to_measure(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shown = " ".join(run(capsys, *EXAMPLE).split())
        assert "This machine was not measured for this model and batch." in shown
        assert 'Rates of the preset "h200" stand in: NVIDIA H200' in shown
        assert "`sparsekv calibrate` measures this machine" in shown
        assert "not measured" not in run(capsys, *EXAMPLE, "--machine", "h200")

    def test_what_was_measured_here_is_used(self, capsys: pytest.CaptureFixture[str]) -> None:
        model = known_size("qwen3-30b-a3b", torch.bfloat16, "native")
        Calibration(
            key=profile_key(
                model.attended,
                model.num_heads,
                batch_size=16,
                device=torch.device("cuda"),
                num_threads=1,
            ),
            machine=replace(PRESETS["h200"], name="the box under the desk"),
            cost=CostModel(cpu_s_per_token=0.0, h2d_s_per_token=1e-6),
            residual=0.0,
            points=(),
        ).save(profile_folder())
        for machine in ([], ["--machine", "this"]):
            shown = " ".join(run(capsys, *EXAMPLE, *machine).split())
            assert "Measured here, for this model and batch: the box under the desk." in shown
            assert "Attention on the CPU at no cost, host memory to GPU 32.8 GB/s" in shown

    def test_it_says_what_the_times_cover(self, capsys: pytest.CaptureFixture[str]) -> None:
        shown = " ".join(run(capsys, *EXAMPLE, *TIGHT).split())
        assert "of the 37.06 GiB of weights (82 of 128 experts a layer) that a step uses" in shown
        assert "a real step takes longer. They hold only where all weights are" in shown
        assert "take turns" in run(capsys, "plan", "deepseek-v4-flash")
        assert "experts a layer" not in run(capsys, "plan", "smollm2")

    def test_what_fits_this_machine_is_told(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 30)
        small = run(capsys, "plan", "smollm2", "--tokens", "1K")
        for region in ("window", "ping-pong", "unpinned", "pinned", "weights"):
            assert region in small
        assert "1.00 GiB (this machine) for the CPU" in small
        assert "as asked │ yes" in small
        assert "not on the CPU" in run(capsys, "plan", "qwen3-30b-a3b", "--tokens", "1M")
        large = run(capsys, "plan", "deepseek-v4-flash", "--vram", "32GiB")
        assert "not on the GPU" in large
        assert "No smaller batch, shorter context or smaller window makes it fit." in large

    def test_a_context_within_the_window_has_no_share(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows = rows_of(run(capsys, "plan", "smollm2", "--context", "200"))
        assert rows[-1][:3] == ["200", "-", "-"]


class TestOptions:
    def test_every_way_to_name_a_run_is_the_same(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        machine = ["--machine", "h200"]
        expected = run(capsys, *EXAMPLE, *machine)
        sizes = ["--batch-size", "16", "--tokens", "128K"]
        assert run(capsys, "plan", "qwen3-30b-a3b", *sizes, *machine) == expected
        both = ["plan", "qwen3-30b-a3b", "--model", "qwen3-30b-a3b", *sizes, *machine]
        assert run(capsys, *both) == expected
        for names in (
            ("MODEL", "BATCH", "CONTEXT", "MACHINE"),
            ("MODEL", "BATCH_SIZE", "TOKENS", "MACHINE"),
        ):
            with monkeypatch.context() as patch:
                for name, value in zip(names, ("qwen3-30b-a3b", "16", "128K", "h200"), strict=True):
                    patch.setenv(f"SPARSEKV_{name}", value)
                assert run(capsys, "plan") == expected
                assert run(capsys, "plan", "smollm2").startswith("smollm2:")

    @pytest.mark.parametrize(
        ("option", "value", "key"),
        [
            ("--ram", "120GiB", "budget"),
            ("--vram", "80GB", "budget"),
            ("--cpu-share", "0.25", "unpinned_bytes"),
            ("--machine", "v100", "machine"),
            ("--prompt-tokens", "8K", "lengths"),
            ("--window-size", "512", "window_bytes"),
            ("--block-size", "32", "block_size"),
            ("--dtype", "float32", "weights"),
            ("--batch", "2", "cost"),
            ("--context", "64K", "pinned_bytes"),
        ],
    )
    def test_every_option_has_an_effect(
        self, option: str, value: str, key: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plain = run_json(capsys, "plan", "qwen3-30b-a3b")
        assert run_json(capsys, "plan", "qwen3-30b-a3b", option, value)[key] != plain[key]

    def test_budgets_are_taken_as_given(self, capsys: pytest.CaptureFixture[str]) -> None:
        plan = run_json(capsys, *EXAMPLE, "--ram", "120GiB", "--vram", "80GB")
        assert plan["budget"]["ram_bytes"] == 120 << 30
        assert plan["budget"]["vram_bytes"] == 80 * 10**9

    def test_auto_is_the_share_of_the_context(self, capsys: pytest.CaptureFixture[str]) -> None:
        plan = run_json(capsys, *EXAMPLE, "--cpu-share", "auto")
        assert plan["cpu_share"] == "auto"
        share = plan["lengths"][-1]["running_share"]
        assert plan["unpinned_bytes"] == round(plan["cpu_bytes"] * share)

    def test_json_holds_the_librarys_plan(self, capsys: pytest.CaptureFixture[str]) -> None:
        planned = sparsekv.plan("mixtral-8x7b", batch_size=2, machine="v100")
        shown = run_json(capsys, "plan", "mixtral-8x7b", "--batch", "2", "--machine", "v100")
        assert shown == json.loads(json.dumps(planned.as_dict()))
        assert shown["lengths"][0]["cpu_only"].keys() == {
            "attention_ms_per_layer",
            "ms_per_token",
            "tokens_per_s",
        }

    def test_a_folder_is_planned_with_its_weights(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plan = run_json(capsys, "plan", "--model", str(folder), "--context", "1K")
        weights = (folder / "model.safetensors").stat().st_size
        assert plan["weights"]["bytes"] == pytest.approx(weights, rel=0.05)  # and a header
        assert plan["dtype"] == "float32"

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["plan"], ["MODEL", "qwen3-30b-a3b", "--model"]),
            (["plan", "smollm2", "--model", "mixtral-8x7b"], ["smollm2", "mixtral", "one model"]),
            (["plan", "--model", "gpt5"], ["gpt5", "qwen3-30b-a3b"]),
            (["plan", "smollm2", "--ram", "much"], ["--ram=much", "32GiB"]),
            (["plan", "smollm2", "--vram", "0"], ["--vram=0", "at least 1"]),
            (["plan", "smollm2", "--machine", "b300"], ["b300", "h200", "this"]),
            (["plan", "smollm2", "--machine", "this"], ["this", "not measured", "calibrate"]),
            (["plan", "smollm2", "--cpu-share", "much"], ["much", "auto"]),
            (["plan", "smollm2", "--cpu-share", "nan"], ["nan"]),
            (["plan", "smollm2", "--prompt-tokens", "0"], ["--prompt-tokens=0"]),
            (["plan", "smollm2", "--plot", "a.pdf"], ["--plot=a.pdf", ".png", ".svg"]),
            (["plan", "smollm2", "--map", "nowhere/a.png"], ["nowhere", "no folder"]),
        ],
    )
    def test_mistake_is_named_in_one_line(
        self, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(arguments) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("error: ")
        assert len(shown.err.splitlines()) == 1
        assert [word for word in words if word.lower() not in shown.err.lower()] == []

    def test_a_known_name_needs_no_transformers(self) -> None:
        code = (
            "import sys; from sparsekv.cli.main import main; main(sys.argv[1:]); "
            "sys.exit(any(m in sys.modules for m in ('transformers', 'matplotlib')))"
        )
        command = [sys.executable, "-c", code, *EXAMPLE]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize(
        ("num_tokens", "text"),
        [(1024, "1K"), (131072, "128K"), (1 << 20, "1M"), (3 << 19, "1536K"), (1000, "1000")],
    )
    def test_tokens_are_written_as_they_are_read(self, num_tokens: int, text: str) -> None:
        assert format_tokens(num_tokens) == text
        assert parse_tokens("--tokens", text) == num_tokens


class TestPictures:
    @pytest.mark.parametrize(
        ("model", "machine"), [("qwen3-30b-a3b", None), ("deepseek-v4-flash", "a100")]
    )
    def test_axes_have_names_and_units_and_lines_a_legend(
        self,
        model: str,
        machine: str | None,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        pytest.importorskip("matplotlib")
        plot, heat = tmp_path / "plan.svg", tmp_path / "map.svg"
        chosen = ["--machine", machine] if machine else []
        run(capsys, "plan", model, "--plot", str(plot), "--map", str(heat), *chosen)
        drawn = re.sub(r"<[^>]*>", "\n", plot.read_text(encoding="utf-8"))
        for words in (
            "context, tokens",
            "ms per token of each sequence",
            "r(L), fastest",
            "R(L), placed",
            "streamed to the GPU only",
            "CPU only",
            "both, at R(L)",
            "32K",
            model,
        ):
            assert words in drawn, words
        drawn = re.sub(r"<[^>]*>", "\n", heat.read_text(encoding="utf-8"))
        marked = machine or "h200"
        share = sparsekv.plan(model, machine=marked).rates.cost.marginal_share
        others = PRESETS.keys() - {marked}
        for words in (
            "from host memory to the GPU, GB/s",
            "attended by the CPU, GB/s of keys and values",
            "CPU's share of a long context",
            f"{marked}: share {share:.2f}",
            *others,
        ):
            assert words in drawn, words

    @pytest.mark.parametrize("context", ["100", "3000", "1M"])
    def test_png_of_any_length(
        self, context: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("matplotlib")
        file = tmp_path / "plan.png"
        run(capsys, "plan", "smollm2", "--context", context, "--plot", str(file), "--json")
        assert file.read_bytes().startswith(b"\x89PNG")

    def test_points_are_whole_windows_between_prompt_and_context(self) -> None:
        from sparsekv.cli.plan_plots import _lengths

        lengths = _lengths(sparsekv.plan("smollm2", num_tokens=100_000, machine="h200"))
        assert (lengths[0], lengths[-1]) == (2048, 100_000)
        assert lengths == sorted(set(lengths))
        assert len(lengths) > 50
        assert [length for length in lengths[:-1] if length % 256] == []

    @pytest.mark.parametrize("option", ["--plot", "--map"])
    def test_without_matplotlib_the_extra_is_named(
        self, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert main(["plan", "smollm2", option, "a.png"]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "pip install 'sparsekv[plot]'" in shown.err

    def test_a_file_that_cannot_be_written_is_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("matplotlib")
        (tmp_path / "a.png").mkdir()
        assert main(["plan", "smollm2", "--plot", str(tmp_path / "a.png")]) == 2
        assert "a.png: cannot be written" in capsys.readouterr().err.replace("\n", " ")


def test_a_terminal_is_as_wide_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    console.print_text("word " * 40)
    lines = terminal.getvalue().splitlines()
    assert 50 < max(map(len, lines)) <= 60


def test_a_run_on_another_machine_is_planned_from_what_was_measured_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """For any model and batch: by that machine's rates, not by the costs of one model."""
    model = known_size("qwen3-30b-a3b", torch.bfloat16, "native")
    device = torch.device("cuda")
    key = profile_key(model.attended, model.num_heads, batch_size=4, device=device, num_threads=9)
    file = Calibration(
        key=replace(key, cpu="of another machine"),
        machine=replace(PRESETS["v100"], name="the other one"),
        cost=CostModel(cpu_s_per_token=3e-6, h2d_s_per_token=1e-6),
        residual=0.01,
        points=(),
    ).save(tmp_path)
    options = ("plan", "mixtral-8x7b", "--batch", "2", "--machine")
    found, expected = (run_json(capsys, *options, machine) for machine in (str(file), "v100"))
    assert found["machine"]["profile"]["name"] == "the other one"
    assert found["lengths"] == expected["lengths"]
    file.write_text(file.read_text()[:99])
    for broken in (file, tmp_path / "none.json"):
        assert main([*options, str(broken)]) == 2
        assert "cannot be used" in capsys.readouterr().err
