"""Each example runs as a user runs it, and says what it promises."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_generate_example_gives_the_models_own_tokens() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "generate.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "same tokens as without sparsekv: True"
    for region in ("window", "ping-pong", "unpinned", "pinned"):
        assert region in done.stdout


def test_every_example_has_a_test() -> None:
    tested = {"generate.py"}
    assert {file.name for file in (ROOT / "examples").glob("*.py")} == tested
