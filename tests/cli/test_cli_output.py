"""What commands print, and where: start-up, --quiet, --json, completion, colours."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from deadlines import scaled
from gradwire import cli
from gradwire.bench.records.files import read_every
from gradwire.bench.time_left import TimeLeft

GRADWIRE = [sys.executable, "-m", "gradwire"]


def gradwire(monkeypatch: pytest.MonkeyPatch, words: str) -> int:
    monkeypatch.setattr("sys.argv", ["gradwire", *words.split()])
    with pytest.raises(SystemExit) as end:
        cli.run()
    assert isinstance(end.value.code, int)
    return end.value.code


def run(*words: str, **environment: str) -> str:
    done = subprocess.run(
        [*GRADWIRE, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=scaled(20),
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_help_and_version_take_a_fraction_of_a_second(option: str) -> None:
    """Processor time, since others compete for the cores; importing torch takes seconds of it."""

    def cpu_s() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(option)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cpu_s() for _ in range(3)) < 0.3


def test_the_shell_completes_commands() -> None:
    words = run(_GRADWIRE_COMPLETE="complete_bash", COMP_WORDS="gradwire bench ke", COMP_CWORD="2")
    assert words.split() == ["kernels"]


def test_only_a_terminal_gets_colours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gradwire(monkeypatch, "methods") == 0
    text = capsys.readouterr().out
    assert "powersgd" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("words", ["methods", "bench workloads"])
def test_json_is_a_file_or_standard_output(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: str,
) -> None:
    path = tmp_path / "rows.jsonl"
    assert gradwire(monkeypatch, f"{words} --json -") == 0
    printed = capsys.readouterr().out
    assert all(json.loads(line) for line in printed.splitlines())
    assert gradwire(monkeypatch, f"{words} --json {path}") == 0
    assert capsys.readouterr().out == ""
    assert path.read_text() == printed


def test_records_on_standard_output_are_alone_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = "bench fuzz --messages 20 --case none,topk:ratio=0.1 --json -"
    assert gradwire(monkeypatch, words) == 0
    out, err = capsys.readouterr()
    assert "about" in err
    (tmp_path / "fuzz.jsonl").write_text(out)
    assert [r.spec for r in read_every([tmp_path / "fuzz.jsonl"])] == ["none", "topk:ratio=0.1"]
    assert gradwire(monkeypatch, f"{words} --quiet") == 0
    assert capsys.readouterr().err == ""


def test_a_quiet_command_prints_only_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gradwire(monkeypatch, "methods --quiet") == 0
    assert capsys.readouterr() == ("", "")
    assert gradwire(monkeypatch, "study nothing -q --json x.jsonl") == 2
    assert capsys.readouterr().err.startswith("gradwire: ")
    # The next command of this process prints again.
    assert gradwire(monkeypatch, "bench workloads") == 0
    assert "charlm" in capsys.readouterr().out


def test_a_study_needs_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gradwire(monkeypatch, "study cifar10 --json -") == 2
    assert "--json must be a file, got -" in capsys.readouterr().err


def test_the_time_left_follows_the_share_that_is_done() -> None:
    now = [100.0]
    left = TimeLeft(lambda: now[0])
    assert left.words(0, 4) == ""
    now[0] = 130.0
    assert left.words(1, 4) == ", about 90.0 s left"
    assert left.words(1, 4, limit_s=50) == ", about 20.0 s left"
    assert left.words(4, 4) == ""
