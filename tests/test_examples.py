"""Each example runs as a user runs it, and says what it promises."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REGIONS = ("window", "ping-pong", "unpinned", "pinned")


def lines_printed_by(name: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_generate_example_gives_the_models_own_tokens() -> None:
    lines = lines_printed_by("generate.py")
    assert lines[-1] == "same tokens as without sparsekv: True"
    assert [name for name in REGIONS if not any(name in line for line in lines)] == []


@pytest.mark.parametrize(
    "arguments",
    [[], pytest.param(["--flash-dims"], marks=pytest.mark.slow)],
    ids=["tiny", "flash-dims"],
)
def test_deepseek_v4_example_gives_the_models_own_tokens(arguments: list[str]) -> None:
    lines = lines_printed_by("deepseek_v4_decode.py", *arguments)
    assert lines[-1] == "same tokens as without sparsekv: True"
    for name in ("sliding", "csa", "hca", "open windows", "index keys", *REGIONS):
        assert any(name in line for line in lines), name


def test_every_example_has_a_test() -> None:
    tested = {"generate.py", "deepseek_v4_decode.py"}
    assert {file.name for file in (ROOT / "examples").glob("*.py")} == tested
