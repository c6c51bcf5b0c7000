"""DeepSeek-V4 on the command line: its plan, its demo, a folder with its weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny_model
import torch

import sparsekv
from sparsekv.cli.main import main
from sparsekv.models import compat

GOLDEN_FLASH_BYTES = {"native": 21 * 256, "packed": 21 * 146}
"""On the CPU, of a token in V4-Flash's 21 CSA layers."""
PROMPT = "It was the best of times, it was the worst of times."
# A window of 8 entries, so that a prompt of 52 tokens already fills all regions.
SMALL = ["--window-size", "8", "--block-size", "4", "--max-new-tokens", "12", "--ignore-eos"]

SHORT_DEMO = ["generate", "--demo", "deepseek-v4", "--window-size", "32", "--block-size", "8"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_tiny_deepseek_v4(tmp_path_factory.mktemp("models") / "tiny-v4")


@pytest.fixture
def short_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 400 tokens: 100 entries, 96 of them beyond a window of 32."""
    monkeypatch.setattr("sparsekv.cli.random_model.PROMPT_TOKENS", 400)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPARSEKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert isinstance(result, dict)
    return result


def bytes_by_place(result: dict[str, Any]) -> dict[tuple[str, str], int]:
    return {(row["kind"], row["name"]): row["bytes"] for row in result["layers"]}


class TestPlan:
    @pytest.mark.parametrize("entry_format", ["native", "packed"])
    def test_flash_at_a_million_tokens(
        self, entry_format: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["--batch-size", "3", "--cpu-share", "0.25", "--entry-format", entry_format]
        plan = run_json(capsys, "plan", "deepseek-v4-flash", "--tokens", "1M", *arguments)
        cpu_bytes = 3 * GOLDEN_FLASH_BYTES[entry_format] << 20
        assert plan["cpu_bytes"] == cpu_bytes
        assert (plan["unpinned_bytes"], plan["pinned_bytes"]) == (cpu_bytes / 4, cpu_bytes * 3 / 4)
        assert plan["production_bytes_per_token"] == 3514.25
        assert plan["growing_gpu_bytes"] == 3 * (21 * 64 + 20 * 8) << 20
        assert plan["gpu_bytes"] == sum(r["bytes"] for r in plan["layers"] if r["memory"] == "GPU")
        assert plan["cpu_bytes"] == sum(r["bytes"] for r in plan["layers"] if r["memory"] == "CPU")

    def test_layers_of_flash_and_pro(self, capsys: pytest.CaptureFixture[str]) -> None:
        counts = {}
        for name in ("flash", "pro"):
            plan = run_json(capsys, "plan", f"deepseek-v4-{name}")
            counts[name] = {row["kind"]: row["num_layers"] for row in plan["layers"]}
        assert counts == {
            "flash": {"sliding": 2, "csa": 21, "hca": 20},
            "pro": {"csa": 30, "hca": 31},
        }

    def test_the_gpus_part_of_csa_entries_does_not_grow(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        short, long = (
            run_json(capsys, "plan", "deepseek-v4-pro", "--tokens", tokens)
            for tokens in ("8K", "1M")
        )
        assert short["window_bytes"] == long["window_bytes"] == 30 * 256 * 1024
        constant = [plan["gpu_bytes"] - plan["growing_gpu_bytes"] for plan in (short, long)]
        assert constant[0] == constant[1]

    def test_table_says_what_grows_and_what_a_token_adds(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["plan", "deepseek-v4-flash", "--entry-format", "packed"]) == 0
        shown = capsys.readouterr().out
        assert "in bfloat16, entries packed\n" in shown
        shown = " ".join(shown.split())
        assert "Each token adds 4,570 B (3,514 B in production formats" in shown
        assert "index keys and HCA entries, 47.00 MiB, grow with the context" in shown

    def test_a_config_as_released_is_the_preset(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = {
            "model_type": "deepseek_v4",
            "architectures": ["DeepseekV4ForCausalLM"],
            "num_hidden_layers": 43,
            "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],  # the last is the MTP layer's
            "qk_rope_head_dim": 64,
            "num_hash_layers": 3,
            "torch_dtype": "bfloat16",
        }
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        plans = [
            run_json(capsys, "plan", model, "--tokens", "100K", "--machine", "h200")
            for model in ("deepseek-v4-flash", str(tmp_path), str(tmp_path / "config.json"))
        ]
        for plan in plans:
            plan.pop("model")
        assert plans[0] == plans[1] == plans[2]

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_plan_is_what_the_cache_holds(
        self, dtype: str, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from transformers import AutoModelForCausalLM

        num_tokens = 16 * 9 - 1  # where open windows are at their largest
        size = ["--tokens", str(num_tokens), "--batch-size", "2", "--dtype", dtype]
        regions = ["--window-size", "8", "--block-size", "4"]
        planned = bytes_by_place(run_json(capsys, "plan", str(folder), *size, *regions))

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        token_ids = torch.ones(2, num_tokens, dtype=torch.int64)
        try:
            model(token_ids)
        except RuntimeError as error:  # transformers 5.17 in 16-bit types
            pytest.skip(f"transformers fails here without the patch: {error!r:.200}")
        config = sparsekv.CacheConfig(window_size=8, block_size=4)
        with sparsekv.patch(model, config) as patched:
            cache = patched.new_cache()
            model(token_ids, **{compat.CACHE_KW: cache})
            held = {(row.kind, row.name): row.used_bytes for row in cache.stats().kinds}
        placed = [("csa", "unpinned"), ("csa", "pinned")]
        # A plan counts all entries on the CPU's side, those still in the window too.
        entry_bytes = 2 * 2 * 64 * (4 if dtype == "float32" else 2)  # 2 layers, 2 rows
        assert sum(planned.pop(place) for place in placed) == num_tokens // 4 * entry_bytes
        assert sum(held.pop(place) for place in placed) == num_tokens // 32 * 8 * entry_bytes
        assert held.pop(("csa", "ping-pong")) == 0
        assert planned == held


class TestGenerate:
    def test_demo_prints_ids_and_a_table_and_compares(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert (
            main(["generate", "--demo", "deepseek-v4", "--max-new-tokens", "8", "--compare"]) == 0
        )
        shown = capsys.readouterr()
        assert shown.err == ""
        text, _, table = shown.out.partition("\nKV cache by kind of layer and region\n")
        note, ids = text.strip().splitlines()
        assert "token ids in place of text" in note
        assert len([int(token) for token in ids.split()]) == 8
        for word in ("sliding", "csa", "hca", "index keys", "open windows", "unpinned", "pinned"):
            assert word in table
        assert "CPU share of placed entries 50.0%; auto aims at one half" in table
        assert table.endswith("identical to the unpatched model: 8 of 8 tokens\n")

    def test_elastic_is_refused(self, short_demo: None, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*SHORT_DEMO, "--elastic"]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("error: elastic=True")

    def test_demo_fills_the_regions_as_asked(
        self, short_demo: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = run_json(capsys, *SHORT_DEMO, "--max-new-tokens", "2", "--cpu-share", "0.25")
        assert len(result["token_ids"]) == result["new_tokens"] == 2
        assert "text" not in result
        entries = {(r["kind"], r["name"]): r["entries"] for r in result["layers"]}
        assert entries["csa", "window"] == 100 - 96
        assert (entries["csa", "unpinned"], entries["csa", "pinned"]) == (24, 72)
        assert result["cpu_share"] == 0.25

    def test_packed_entries_take_584_bytes(
        self, short_demo: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        packed = ["--entry-format", "packed", "--cpu-share", "1", "--max-new-tokens", "1"]
        result = run_json(capsys, *SHORT_DEMO, *packed)
        assert bytes_by_place(result)["csa", "unpinned"] == 3 * 96 * 584

    def test_a_difference_from_rounded_entries_is_explained(
        self, short_demo: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        packed = ["--entry-format", "packed", "--compare", "--max-new-tokens", "24"]
        assert main([*SHORT_DEMO, *packed]) == 1
        assert "use --entry-format native" in capsys.readouterr().out.splitlines()[-1]

    @pytest.mark.parametrize("share", ["0", "0.3", "1"])
    def test_a_folder_answers_as_the_unpatched_model(
        self, share: str, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["generate", str(folder), "--prompt", PROMPT, *SMALL, "--cpu-share", share]
        result = run_json(capsys, *arguments, "--compare")
        assert (result["identical_tokens"], result["compared_tokens"]) == (12, 12)
        assert result["text"]
        assert {row["kind"] for row in result["layers"]} == {"sliding", "csa", "hca"}

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["generate", "--demo", "deepseek-v4", "--prompt", "hi"], ["--prompt=hi", "smollm2"]),
            (["generate", "--demo", "deepseek-v4", "--prompt", ""], ["--prompt=", "smollm2"]),
            (["generate", "--demo", "deepseek-v4", "--prompt-file", "f"], ["-file=f", "token ids"]),
            (["generate", "--demo", "deepseek-v4", "--raw"], ["--raw", "leave --raw out"]),
            (["generate", "--demo", "deepseek-v4", "--max-tokens", "99"], ["max_tokens=99"]),
            (["generate", "--demo", "deepseek", "--prompt", "x"], ["deepseek", "deepseek-v4"]),
            (["generate", "{v4}", "--prompt", "x", "--entry-format", "fp8"], ["fp8", "packed"]),
            (["generate", "{v4}", "--prompt", "x", "--entry-format", "packed"], ["=64", "native"]),
            (["plan", "{v4}", "--entry-format", "packed"], ["head_dim=64", "512", "native"]),
            (["plan", "deepseek-v4-flash", "--entry-format", "fp8"], ["fp8", "native", "packed"]),
            (["plan", "deepseek-v4-flash", "--batch-size", "0"], ["batch_size=0"]),
            (["plan", "deepseek-v4-flash", "--window-size", "100"], ["window_size=100", "64"]),
            (["plan", "smollm2", "--entry-format", "packed"], ["packed", "smollm2", "DeepSeek-V4"]),
            (["plan", "deepseek-v4"], ["deepseek-v4-flash", "deepseek-v4-pro"]),
            (["plan", "{odd}"], ["layer_types", "compressed_sparse_attention"]),
        ],
    )
    def test_mistake_is_named_in_one_line(
        self,
        arguments: list[str],
        words: list[str],
        folder: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        odd = {"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [128, 128]}
        (tmp_path / "config.json").write_text(json.dumps(odd), encoding="utf-8")
        code = main([word.format(v4=folder, odd=tmp_path) for word in arguments])
        shown = capsys.readouterr()
        assert code == 2
        assert shown.out == ""
        assert shown.err.startswith("error: ")
        assert len(shown.err.splitlines()) == 1
        assert [word for word in words if word.lower() not in shown.err.lower()] == []

    def test_environment_sets_the_entry_format(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("SPARSEKV_ENTRY_FORMAT", "packed")
        assert run_json(capsys, "plan", "deepseek-v4-flash")["entry_format"] == "packed"
        plan = run_json(capsys, "plan", "deepseek-v4-flash", "--entry-format", "native")
        assert plan["entry_format"] == "native"
