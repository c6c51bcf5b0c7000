"""The command line as its user meets it: output, exit codes, one line for each mistake."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from torch import nn

from sparsekv.cli.main import main
from sparsekv.cli.progress import Display
from sparsekv.cli.sizes import format_bytes, parse_tokens
from sparsekv.errors import SparseKVError
from sparsekv.format import ShareStats
from sparsekv.roofline import CostModel

ROOT = Path(__file__).parent.parent
GOLDEN = json.loads((ROOT / "tests" / "golden" / "paper_tables.json").read_text(encoding="utf-8"))
PROMPT = "It was the best of times, it was the worst of times."
# A window of 8 tokens, so that a short prompt already fills all four regions.
SMALL = ["--window-size", "8", "--block-size", "4", "--max-new-tokens", "12", "--ignore-eos"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def odd_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("odd")
    configs = {
        "broken": "{",
        "listed": "[]",
        "weightless": json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}),
        "unsupported": json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}),
    }
    for name, config in configs.items():
        (base / name).mkdir()
        (base / name / "config.json").write_text(config, encoding="utf-8")
    (base / "empty").mkdir()
    (base / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    return {
        "empty": base / "empty",
        "binary": base / "bytes.txt",
        **{name: base / name for name in configs},
    }


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPARSEKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdin", _Stream("", is_terminal=True))


class _Stream(io.StringIO):
    """A stream of text that is, or is not, a terminal."""

    def __init__(self, text: str, *, is_terminal: bool) -> None:
        super().__init__(text)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert isinstance(result, dict)
    return result


class TestVersionAndHelp:
    @pytest.mark.parametrize("arguments", [["version"], ["--version"]])
    def test_version_names_the_program(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        import sparsekv

        assert main(arguments) == 0
        assert capsys.readouterr().out == f"sparsekv {sparsekv.__version__}\n"

    @pytest.mark.parametrize("command", ["calibrate", "doctor", "generate", "plan", "version"])
    def test_every_command_has_help(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([command, "--help"]) == 0
        assert "Usage: sparsekv " + command in capsys.readouterr().out

    def test_alone_it_shows_the_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 2
        shown = capsys.readouterr()
        assert "generate" in shown.out + shown.err
        assert "error" not in shown.out + shown.err

    @pytest.mark.parametrize(("arguments", "code"), [(["version"], 0), (["no-such-command"], 2)])
    def test_the_package_runs_as_a_module(self, arguments: list[str], code: int) -> None:
        command = [sys.executable, "-m", "sparsekv", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert done.stdout.startswith("sparsekv ") == (code == 0)

    def test_version_loads_neither_torch_nor_transformers(self) -> None:
        code = (
            "import sys; from sparsekv.cli.main import main; main(['version']); "
            "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
        )
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "tokens"),
        [("1", 1), ("32768", 32768), ("32K", 32768), ("32k", 32768), (" 1M ", 1 << 20)],
    )
    def test_tokens_are_read(self, text: str, tokens: int) -> None:
        assert parse_tokens("--tokens", text) == tokens

    @pytest.mark.parametrize("text", ["0", "-1", "", "K", "1.5K", "32KB", "1e3", "٣"])
    def test_what_is_no_number_of_tokens_is_refused(self, text: str) -> None:
        with pytest.raises(SparseKVError, match="--tokens="):
            parse_tokens("--tokens", text)

    @pytest.mark.parametrize(
        ("num_bytes", "text"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (3 << 29, "1.50 GiB"),
            (1 << 60, "1024.00 PiB"),
        ],
    )
    def test_bytes_are_written(self, num_bytes: int, text: str) -> None:
        assert format_bytes(num_bytes) == text


class TestWrongInput:
    """Each is one line on stderr that names the value and a remedy, nothing on stdout, exit 2."""

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["generate", "nowhere", "--prompt", "x"], ["nowhere", "no such", "save_pretrained"]),
            (["generate", "{empty}", "--prompt", "x"], ["empty", "config.json"]),
            (["generate", "{broken}", "--prompt", "x"], ["broken", "cannot be read"]),
            (["generate", "{listed}", "--prompt", "x"], ["listed", "cannot be read"]),
            (["generate", "{weightless}", "--prompt", "x"], ["weightless", "cannot be read"]),
            (["generate", "{unsupported}", "--prompt", "x"], ["gpt2", "not supported", "llama"]),
            (["generate", "{tiny}"], ["no prompt", "--prompt-file"]),
            (["generate", "{tiny}", "--prompt", " \n"], ["--prompt", "no text"]),
            (
                ["generate", "{tiny}", "--prompt-file", "absent.txt"],
                ["absent.txt", "cannot be read"],
            ),
            (["generate", "{tiny}", "--prompt-file", "{tiny}"], ["tiny", "cannot be read"]),
            (["generate", "{tiny}", "--prompt-file", "{binary}"], ["bytes.txt", "UTF-8"]),
            (["generate", "{tiny}", "--prompt", "x", "--prompt-file", "f"], ["only one", "f"]),
            (["generate"], ["MODEL_FOLDER", "--demo"]),
            (["generate", "{tiny}", "--demo", "smollm2"], ["exactly one", "smollm2"]),
            (["generate", "--demo", "gpt5"], ["gpt5", "smollm2"]),
            (["generate", "{tiny}", "--prompt", "x", "--cpu-share", "1.5"], ["cpu_share", "1.5"]),
            (["generate", "{tiny}", "--prompt", "x", "--cpu-share", "nan"], ["cpu_share", "nan"]),
            (
                ["generate", "{tiny}", "--prompt", "x", "--cpu-share", "half"],
                ["--cpu-share=half", "auto", "0 to 1"],
            ),
            (
                ["generate", "{tiny}", "--prompt", "x", "--window-size", "100"],
                ["window_size=100", "64"],
            ),
            (["generate", "{tiny}", "--prompt", "x", "--dtype", "int8"], ["int8", "float32"]),
            (["generate", "{tiny}", "--prompt", "x", "--device", "tpu"], ["tpu", "cuda"]),
            (["generate", "{tiny}", "--prompt", "x", "--device", "meta"], ["meta", "cuda"]),
            (["generate", "{tiny}", "--prompt", "x", "--device", "cuda:99"], ["cuda:99", "cpu"]),
            (["generate", "{tiny}", "--prompt", "x", "--max-tokens", "many"], ["many", "32K"]),
            (["generate", "{tiny}", "--prompt", "x", "--max-tokens", "4"], ["4", "max_tokens"]),
            (
                ["generate", "{tiny}", "--prompt", "x", "--max-new-tokens", "0"],
                ["-tokens=0", "at least 1"],
            ),
            (["plan", "gpt5"], ["gpt5", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v4-pro"]),
            (["plan", "{empty}"], ["empty", "config.json"]),
            (["plan", "{unsupported}"], ["gpt2", "not supported"]),
            (["plan", "smollm2", "--tokens", "lots"], ["lots", "32K"]),
            (["plan", "smollm2", "--cpu-share", "-0.1"], ["-0.1"]),
            (["plan", "smollm2", "--batch-size", "0"], ["batch_size=0"]),
            (["plan", "smollm2", "--batch-size", "two"], ["--batch-size", "integer"]),
            (["plan", "smollm2", "--dtype", "float8"], ["float8", "bfloat16"]),
            (["plan"], ["MODEL"]),
            (["paln"], ["paln", "plan"]),
            (["plan", "smollm2", "--tokns", "1"], ["--tokns"]),
        ],
    )
    def test_mistake_is_named_in_one_line(
        self,
        arguments: list[str],
        words: list[str],
        folder: Path,
        odd_folders: dict[str, Path],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        code = main([word.format(tiny=folder, **odd_folders) for word in arguments])
        shown = capsys.readouterr()
        assert code == 2
        assert shown.out == ""
        assert shown.err.startswith("error: ")
        assert len(shown.err.splitlines()) == 1
        assert [word for word in words if word.lower() not in shown.err.lower()] == []

    def test_empty_standard_input_is_named(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "stdin", _Stream("", is_terminal=False))
        assert main(["generate", str(folder)]) == 2
        assert "standard input" in capsys.readouterr().err


class TestPlan:
    @pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite"])
    def test_known_models_give_the_published_footprints(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = GOLDEN["models"][name]
        table, tolerance = model["table2"], GOLDEN["tolerance"]
        share = str(table["cpu_share"])
        plan = run_json(capsys, "plan", name, "--batch-size", "32", "--cpu-share", share)
        assert plan["bytes_per_token"] == model["bytes_per_token"]
        assert plan["window_bytes"] / 1e6 == pytest.approx(
            table["window_mb"], abs=tolerance["window_mb"]
        )
        assert plan["ping_pong_bytes"] / 1e6 == pytest.approx(
            table["ping_pong_mb"], abs=tolerance["ping_pong_mb"]
        )
        assert plan["unpinned_bytes"] / 1e9 == pytest.approx(
            table["unpinned_gb"], abs=tolerance["cpu_gb"]
        )
        assert plan["pinned_bytes"] / 1e9 == pytest.approx(
            table["pinned_gb"], abs=tolerance["cpu_gb"]
        )

    def test_a_folder_and_its_config_give_the_same_plan(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        by_folder = run_json(capsys, "plan", str(folder), "--machine", "h200")
        by_file = run_json(capsys, "plan", str(folder / "config.json"), "--machine", "h200")
        names = [plan.pop("model") for plan in (by_folder, by_file)]
        assert names == [str(folder), str(folder / "config.json")]
        assert by_folder == by_file
        # 2 layers, keys and values of 2 heads of 8 values, 4 bytes each as the checkpoint has them.
        assert by_folder["bytes_per_token"] == 2 * 2 * 2 * 8 * 4

    def test_dtype_replaces_the_models_own(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plan = run_json(capsys, "plan", str(folder), "--dtype", "bfloat16")
        assert plan["bytes_per_token"] == 2 * 2 * 2 * 8 * 2

    def test_environment_sets_options_and_flags_win(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        at_8k = run_json(capsys, "plan", "smollm2", "--tokens", "8K")["cpu_bytes"]
        monkeypatch.setenv("SPARSEKV_TOKENS", "8K")
        assert run_json(capsys, "plan", "smollm2")["cpu_bytes"] == at_8k
        assert run_json(capsys, "plan", "smollm2", "--tokens", "16K")["cpu_bytes"] == 2 * at_8k


class TestGenerate:
    def test_text_streams_and_the_region_table_follows(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["generate", str(folder), "--prompt", PROMPT, *SMALL, "--compare"]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""  # no bars, no warnings: stderr is no terminal here
        text, _, table = shown.out.partition("\nKV cache by region\n")
        assert text.strip()
        for region in ("window", "ping-pong", "unpinned", "pinned"):
            assert region in table
        assert table.endswith("identical to the unpatched model: 12 of 12 tokens\n")

    def test_json_says_the_same(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["generate", str(folder), "--prompt", PROMPT, *SMALL]
        assert main(arguments) == 0
        text = capsys.readouterr().out.partition("\nKV cache by region\n")[0].strip()
        result = run_json(capsys, *arguments, "--compare", "--cpu-share", "0.25")
        assert result["text"] == text
        assert result["new_tokens"] == 12
        assert (result["identical_tokens"], result["compared_tokens"]) == (12, 12)
        regions = {region["name"]: region for region in result["regions"]}
        assert list(regions) == ["window", "ping-pong", "unpinned", "pinned"]
        # The last token is never fed back, so the cache holds one fewer than prompt and answer.
        placed = regions["unpinned"]["tokens"] + regions["pinned"]["tokens"]
        assert regions["window"]["tokens"] + placed == result["prompt_tokens"] + 12 - 1
        assert result["cpu_share"] == pytest.approx(0.25, abs=8 / placed)

    @pytest.mark.parametrize("share", ["0", "1"])
    def test_a_share_of_0_or_1_is_exact_too(
        self, share: str, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["generate", str(folder), "--prompt", PROMPT, *SMALL, "--cpu-share", share]
        result = run_json(capsys, *arguments, "--compare")
        assert result["cpu_share"] == float(share)
        assert result["identical_tokens"] == 12

    def test_every_source_of_the_prompt_gives_the_same_answer(
        self,
        folder: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        file = tmp_path / "prompt.txt"
        file.write_text(PROMPT, encoding="utf-8")
        sources = (["--prompt", PROMPT], ["--prompt-file", str(file)], [], ["--prompt", "-"])
        texts = []
        for source in sources:
            monkeypatch.setattr(sys, "stdin", _Stream(PROMPT, is_terminal=False))
            texts.append(run_json(capsys, "generate", str(folder), *source, *SMALL)["text"])
        assert len(set(texts)) == 1

    def test_chat_template_is_applied_unless_raw(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["generate", str(folder), "--prompt", PROMPT, *SMALL]
        raw = run_json(capsys, *arguments, "--raw")["prompt_tokens"]
        assert raw == len(PROMPT)  # the tokenizer has one token for each byte
        turn = len("[user] \n[assistant] ")
        assert run_json(capsys, *arguments)["prompt_tokens"] == raw + turn

    def test_a_differing_token_is_counted_and_exits_with_1(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from sparsekv.cli import run

        real_patch = run.patch

        @contextmanager
        def wrong_patch(model: Any, config: Any) -> Iterator[Any]:
            scale = model.model.norm.weight
            with real_patch(model, config) as patched:
                scale.data.neg_()
                yield patched
                scale.data.neg_()

        monkeypatch.setattr(run, "patch", wrong_patch)
        assert main(["generate", str(folder), "--prompt", PROMPT, *SMALL, "--compare"]) == 1
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("identical to the unpatched model: ")
        assert last != "identical to the unpatched model: 12 of 12 tokens"

    def test_model_is_left_without_hooks_or_patch(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from sparsekv.cli import run

        loaded = []
        load = run.load_model
        monkeypatch.setattr(run, "load_model", lambda *a: loaded.append(load(*a)) or loaded[-1])
        assert main(["generate", str(folder), "--prompt", PROMPT, *SMALL]) == 0
        model: nn.Module = loaded[0][0]
        assert [m for m in model.modules() if m._forward_hooks] == []
        assert "generate" not in vars(model)

    def test_beyond_the_models_context_it_warns(
        self, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        file = tmp_path / "long.txt"
        file.write_text("word " * 820, encoding="utf-8")
        arguments = ["generate", str(folder), "--prompt-file", str(file), "--max-new-tokens", "1"]
        assert main(arguments) == 0
        assert "made for 4,096" in capsys.readouterr().err

    def test_ctrl_c_keeps_the_text_and_exits_with_130(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from sparsekv.cli.streaming import _Watcher

        put, calls = _Watcher.put, []

        def interrupted_put(self: _Watcher, value: Any) -> None:
            calls.append(value)
            if len(calls) == 8:  # the prompt and six tokens have passed
                raise KeyboardInterrupt
            put(self, value)

        arguments = ["generate", str(folder), "--prompt", PROMPT, *SMALL, "--raw"]
        whole = run_json(capsys, *arguments)["text"]
        monkeypatch.setattr(_Watcher, "put", interrupted_put)
        assert main(arguments) == 130
        shown = capsys.readouterr()
        assert shown.err == "interrupted\n"
        kept = shown.out.strip("\n")
        assert kept
        assert whole.startswith(kept.rstrip("\ufffd"))


class TestShareOfARun:
    ARGUMENTS = ("--prompt", PROMPT * 3, *SMALL)

    def test_auto_is_the_default_and_one_half_where_nothing_is_measured(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = run_json(capsys, "generate", str(folder), *self.ARGUMENTS)
        assert result["share"] == {
            "asked": "auto",
            "in_use": result["cpu_share"],
            "placed": result["cpu_share"],
            "balance": None,
        }
        assert result["cpu_share"] == pytest.approx(0.5, abs=0.03)
        shown = self._shown(folder, capsys)
        line = f"CPU share of placed tokens {result['cpu_share']:.1%}; auto aims at one half"
        assert line in shown
        assert "one half" not in self._shown(folder, capsys, "--cpu-share", "0.5")

    def test_a_number_is_kept_to(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = [*self.ARGUMENTS, "--cpu-share", "0.25"]
        share = run_json(capsys, "generate", str(folder), *arguments)["share"]
        assert share["asked"] == 0.25
        assert share["in_use"] == share["placed"] == pytest.approx(0.25, abs=0.03)
        shown = self._shown(folder, capsys, "--cpu-share", "0.25")
        assert f"CPU share of placed tokens {share['in_use']:.1%}\n" in shown

    def test_elastic_borrows_and_says_so(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        elastic = ["--cpu-share", "0.75", "--elastic"]
        arguments = [*self.ARGUMENTS, *elastic, "--compare"]
        result = run_json(capsys, "generate", str(folder), *arguments)
        share = result["share"]
        assert share["placed"] == pytest.approx(0.6, abs=0.03)
        assert share["in_use"] == pytest.approx(0.75, abs=0.03)
        assert result["identical_tokens"] == 12
        shown = self._shown(folder, capsys, *elastic)
        placed, borrowed = share["placed"], share["in_use"] - share["placed"]
        assert f"({placed:.1%} unpinned, {borrowed:.1%} borrowed)\n" in shown

    def test_what_balances_itself_tells_aim_and_prediction(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cost = CostModel(cpu_s_per_token=1e-6, h2d_s_per_token=3e-6)
        monkeypatch.setattr("sparsekv.models.store.cost_of", lambda *_, **__: cost)
        result = run_json(capsys, "generate", str(folder), *self.ARGUMENTS)
        share, balance = result["share"], result["share"]["balance"]
        assert balance["target_share"] == 0.75
        assert share["in_use"] == pytest.approx(0.75, abs=0.03)
        placed = sum(r["tokens"] for r in result["regions"] if r["memory"] == "CPU")
        predicted_s = cost.step_time(share["in_use"], placed)
        assert balance["predicted_s"] == pytest.approx(predicted_s)
        shown = self._shown(folder, capsys)
        assert "share aimed at 75.0%; ms a layer: " in shown
        assert f"{1e3 * predicted_s:.3f} predicted" in shown
        assert "one half" not in shown

    @pytest.mark.parametrize("is_terminal", [False, True])
    def test_a_first_measurement_is_told_on_a_terminal_and_warnings_always(
        self,
        is_terminal: bool,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        logger = logging.getLogger("sparsekv.engine.costs")

        def measure(*_: object, **__: object) -> None:
            logger.info("measuring this machine for %s, once", "4 heads")
            logger.warning("no memory to measure\nthis machine")

        monkeypatch.setattr("sparsekv.models.store.cost_of", measure)
        stderr = _Stream("", is_terminal=is_terminal)
        monkeypatch.setattr(sys, "stderr", stderr)
        self._shown(folder, capsys)
        said = re.sub("\x1b\\[[0-9;]*m", "", stderr.getvalue())  # colours apart
        assert said.count("warning: no memory to measure this machine\n") == 1
        assert said.count("measuring this machine for 4 heads, once\n") == is_terminal
        assert is_terminal or said.count("\n") == 1
        assert not logger.isEnabledFor(logging.INFO)
        assert logging.getLogger("sparsekv").handlers == []

    def test_measured_times_are_told_beside_the_predicted_one(self) -> None:
        stats = ShareStats(
            target_share=0.7, predicted_s=1.5e-3, measured_cpu_s=1.25e-3, measured_gpu_s=2e-3
        )
        assert str(stats).endswith(
            "ms a layer: 1.500 predicted, CPU 1.250 measured, GPU 2.000 measured"
        )

    def _shown(self, folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        assert main(["generate", str(folder), *self.ARGUMENTS, *arguments]) == 0
        return capsys.readouterr().out


class TestProgress:
    def test_bars_go_to_stderr_when_it_is_a_terminal(self, folder: Path) -> None:
        terminal, stderr = pty.openpty()
        chunks: list[bytes] = []

        def drain() -> None:
            # A terminal holds 4 KiB, which a slow run exceeds; once nobody writes, reading fails.
            with suppress(OSError):
                while chunk := os.read(terminal, 1 << 16):
                    chunks.append(chunk)

        reader = threading.Thread(target=drain)
        reader.start()
        arguments = ["generate", str(folder), "--prompt", PROMPT, *SMALL, "--compare"]
        done = subprocess.run(
            [sys.executable, "-m", "sparsekv.cli.main", *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        )
        os.close(stderr)
        reader.join()
        os.close(terminal)
        bars = b"".join(chunks).decode()
        assert done.returncode == 0, bars
        for phase in ("loading", "prefill", "decode", "unpatched: prefill", "unpatched: decode"):
            assert phase in bars
        assert "\x1b" not in done.stdout
        assert "12 of 12 tokens" in done.stdout

    def test_text_beside_bars_arrives_whole_and_in_order(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stdout = _Stream("", is_terminal=True)
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", _Stream("", is_terminal=True))
        with Display() as display, display.phase("decode", 3, "tokens") as advance:
            for piece in ("one ", "two\nthr", "ee\n\nfour", " five"):
                display.write(piece)
                advance()
            assert stdout.getvalue() == "one two\nthree\n\n"  # the open line waits beside the bar
        assert stdout.getvalue() == "one two\nthree\n\nfour five"
