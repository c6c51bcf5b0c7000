"""What is made of compute-sanitizer's findings; a script plays its part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import compute_sanitizer
import pytest

from benchmarks.results import load_result

CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards"}


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What it prints is in files named for the tool and for what it watches, its status too."""
    script = tmp_path / "compute-sanitizer"
    script.write_text(
        "#!/bin/sh\n"
        'case "$7" in *wrong*) what=wrong ;; *) what=calls ;; esac\n'
        f'cat "{tmp_path}/$2-$what"; exit $(cat "{tmp_path}/$2-$what-status")\n'
    )
    script.chmod(0o755)
    for name, summary in CLEAN.items():
        say(tmp_path, name, "wrong", "found", 86)
        say(tmp_path, name, "calls", f"========= {summary}", 0)
    monkeypatch.setattr(compute_sanitizer, "find_tool", lambda: str(script))
    has_device(monkeypatch, True)
    return tmp_path


def has_device(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    """As far as the script looks."""
    cuda = SimpleNamespace(is_available=lambda: answer)
    monkeypatch.setattr(compute_sanitizer, "torch", SimpleNamespace(cuda=cuda))


def say(folder: Path, tool: str, what: str, text: str, status: int) -> None:
    (folder / f"{tool}-{what}").write_text(text)
    (folder / f"{tool}-{what}-status").write_text(str(status))


def run(folder: Path) -> int:
    return compute_sanitizer.main(["--machine", "here", "--out", str(folder / "out")])


def test_what_is_clean_is_recorded(tool: Path) -> None:
    assert run(tool) == 0
    (path,) = (tool / "out").iterdir()
    result = load_result(path)
    assert [(row["tool"], row["errors"]) for row in result.rows] == [
        ("memcheck", 0),
        ("racecheck", 0),
    ]
    assert all(check.is_met for check in result.checks)


def test_what_is_found_is_shown_and_recorded(
    tool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say(tool, "racecheck", "calls", "a hazard\nRACECHECK SUMMARY: 3 hazards displayed", 86)
    assert run(tool) == 1
    assert "a hazard" in capsys.readouterr().err
    (path,) = (tool / "out").iterdir()
    assert [check.is_met for check in load_result(path).checks] == [True, False]


@pytest.mark.parametrize(
    ("what", "text", "status", "message"),
    [
        ("wrong", "ERROR SUMMARY: 0 errors", 0, "does not find a planted fault"),
        ("calls", "Device not supported", 0, "without a summary"),
        ("calls", "AssertionError\nERROR SUMMARY: 0 errors", 1, "the calls failed"),
    ],
)
def test_what_was_not_watched_is_not_clean(
    tool: Path, capsys: pytest.CaptureFixture[str], what: str, text: str, status: int, message: str
) -> None:
    say(tool, "memcheck", what, text, status)
    assert run(tool) == 2
    assert message in capsys.readouterr().err
    assert not (tool / "out").exists()


@pytest.mark.parametrize("missing", ["tool", "device"])
def test_without_tool_or_device_it_fails(
    tool: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missing: str,
) -> None:
    if missing == "tool":
        monkeypatch.setattr(compute_sanitizer, "find_tool", lambda: None)
    else:
        has_device(monkeypatch, False)
    assert run(tool) == 2
    assert "nothing was watched" in capsys.readouterr().err
