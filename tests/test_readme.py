"""What the documents say is so: code runs, commands print what is shown, links lead somewhere."""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path

import pytest
import tiny_model

import sparsekv
from sparsekv.cli.main import main
from sparsekv.format.compressed import CompressedGeometry
from sparsekv.models.known import known_names
from sparsekv.roofline import profile_folder

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/*.md", "sparsekv/*/*.md")
    for path in sorted(ROOT.glob(pattern))
]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def printed_by(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments.split()) == 0
    return capsys.readouterr().out


@pytest.fixture
def _folder_with_my_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model.write_tiny_llama(tmp_path / "my-model")
    tiny_model.write_tiny_deepseek_v4(tmp_path / "my-deepseek-v4")
    (tmp_path / "book.txt").write_text("It was a dark night.", encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_folder_with_my_model")
def test_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = code_blocks("python")
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Once upon a time" in printed
    for region in ("window", "ping-pong", "unpinned", "pinned", "index keys", "hca"):
        assert region in printed


@pytest.mark.usefixtures("_folder_with_my_model")
def test_commands_of_the_readme_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(code_blocks("bash")).splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if "sparsekv " in line]
    assert len(commands) == 6
    for command in commands:
        if "|" in command:
            piped = Path(command[1]).read_text(encoding="utf-8")
            monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
        arguments = command[command.index("sparsekv") + 1 :]
        assert main(arguments) == 0, command
    assert sparsekv.__version__ in capsys.readouterr().out


def test_targets_of_the_readme_are_in_the_makefile() -> None:
    targets = re.findall(r"^make (\S+)", "".join(code_blocks("bash")), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_examples_of_the_readme_exist() -> None:
    examples = re.findall(r"^python (\S+)", "".join(code_blocks("bash")), re.MULTILINE)
    assert examples == ["examples/deepseek_v4_decode.py"]
    assert all((ROOT / example).is_file() for example in examples)


def test_console_output_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = code_blocks("console")
    assert blocks
    for block in blocks:
        command, shown = block.removeprefix("$ sparsekv ").split("\n", 1)
        printed = printed_by(command, capsys)
        assert printed.startswith(shown)
        assert printed.removeprefix(shown)[:1] in ("", "\n")  # whole paragraphs
    assert any(" ".join(block.split()).endswith("a real step takes longer.") for block in blocks)


def test_numbers_of_the_first_sentence_come_from_the_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sentence = README.split("\n\n")[1].replace("\n", " ")
    sequences, tokens, total, on_gpu = re.search(
        r"for (\d+) sequences of (\S+) tokens take (.*? GiB): sparsekv keeps (.*? MiB) ", sentence
    ).groups()
    plan = printed_by(f"plan qwen3-30b-a3b --batch-size {sequences} --tokens {tokens}", capsys)
    assert re.search(rf"as asked .*│ {total} │", plan)
    assert f"the cache keeps {on_gpu} on the GPU" in plan


def test_examples_leave_the_share_to_the_library() -> None:
    assert sparsekv.CacheConfig().cpu_share == "auto"
    for block in (*code_blocks("python"), *code_blocks("bash")):
        assert re.search("cpu[_-]share", block) is None


def test_the_share_section_tells_what_is_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = README.split("\n## The share\n")[1].split("\n## ")[0].replace("\n", " ")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("SPARSEKV_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert f"`{profile_folder()}`".replace("/home/somebody", "~") in section
    monkeypatch.setenv("SPARSEKV_CACHE", "$SPARSEKV_CACHE")
    assert f"`{profile_folder()}`" in section
    share, placed = re.search(
        r"`CacheConfig\(cpu_share=(\S+), elastic=True\)` places (\S+) and", section
    ).groups()
    config = sparsekv.CacheConfig(cpu_share=float(share), elastic=True)
    assert config.placed_share == pytest.approx(float(placed))
    command, model = re.search(r"`sparsekv (calibrate (\S+) [^`]*)`", section).groups()
    assert model in known_names()
    assert main([*command.split(), "--device", "cpu"]) == 2
    assert "only a GPU" in capsys.readouterr().err  # its options are known


def test_bytes_of_the_format_section_are_the_geometrys() -> None:
    geometry = sparsekv.KVGeometry(num_layers=48, num_kv_heads=4, head_dim=128)
    run_bytes = 256 * geometry.bytes_per_token_per_layer // geometry.num_kv_heads
    assert f"a run is {run_bytes:,} bytes and a token takes {geometry.bytes_per_token:,}" in README


def test_numbers_of_the_deepseek_v4_section_come_from_the_format() -> None:
    native, packed = (
        CompressedGeometry(layer_kinds=("csa",), entry_format=name).pool_geometry.bytes_per_token
        for name in ("native", "packed")
    )
    assert f"{packed} bytes instead of {native:,}" in README.replace("\n", " ")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8"))
    local = [target for target in targets if not target.startswith("https://")]
    assert [target for target in local if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_in_text_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = re.findall(
        r"`((?:sparsekv|kernels|models|tests|examples|docs|benchmarks)/[\w./]*)`", text
    )
    planned = {"sparsekv/selection/"}
    assert [path for path in named if not (ROOT / path).exists() and path not in planned] == []
