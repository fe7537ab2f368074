"""Workers that are killed, stopped, slow or disconnected, on emulated hosts."""

import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from deadlines import scaled
from gradwire.bench.faults.campaign import JOBS, KINDS, is_bad
from gradwire.bench.faults.jobs import JobKind
from gradwire.bench.records.files import read_kinds
from gradwire.bench.records.schema import OTHERS, CampaignRecord, FaultRecord

HERE = Path(__file__).parent
TOKEN = "GRADWIRE_TEST_TOKEN"
REASON = re.compile(r"^gather among 4 ranks failed on rank (\d) after [\d.]+ s: (\S.*)$")
LARGE_TIMEOUT_S = 6.0
SMALL_TIMEOUT_S = 2.0
# Takes 15 s on an idle machine.
TIME_LIMIT_S = 150


def run_script(script: str, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Returns the rows that a script prints, and its stderr."""
    done = run_python(str(HERE / script), *arguments)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python; checks that all processes ended."""
    word = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, TOKEN: word, "TORCH_CPP_LOG_LEVEL": "FATAL", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=scaled(TIME_LIMIT_S - 10),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not survivors(word)
    return done


def survivors(word: str) -> list[str]:
    """Returns processes left behind; an anonymous namespace ends with its last process."""
    deadline_s = time.monotonic() + scaled(5)
    while found := [p for p in Path("/proc").glob("[0-9]*/environ") if has(p, word)]:
        if time.monotonic() > deadline_s:
            return [str(p) for p in found]
        time.sleep(0.02)
    return []


def has(environ: Path, word: str) -> bool:
    try:
        return f"{TOKEN}={word}".encode() in environ.read_bytes()
    except OSError:  # it ended meanwhile
        return False


def assert_errors_name_the_reason(row: dict[str, Any], ranks: set[int]) -> None:
    assert {e["rank"] for e in row["errors"]} == ranks
    for error in row["errors"]:
        assert error["kind"] == "PeerError"
        match = REASON.match(error["text"])
        assert match is not None, error["text"]
        assert int(match[1]) == error["rank"]
        assert error["threads"] == []


@pytest.mark.timeout(TIME_LIMIT_S)
def test_a_worker_that_dies_is_noticed_by_all_others(emulated: None) -> None:
    rows, stderr = run_script("scenarios.py", "kills")
    *rows, hook = rows
    assert [row["name"] for row in rows] == ["encode", "wire", "decode"]
    for killed, row in enumerate(rows):
        others = {0, 1, 2, 3} - {killed}
        assert row["missed"] == []
        assert row["codes"] == [-9 if rank == killed else 1 for rank in range(4)]
        assert_errors_name_the_reason(row, others)
        assert max(row["detected_s"]) < LARGE_TIMEOUT_S + scaled(5)
        # The errors of ranks that were connected to the killed one name its address.
        address = f"[198.18.0.{killed + 1}]"
        assert sum(address in error["text"] for error in row["errors"]) >= 1
    raised = re.findall(r"gradwire\.errors\.PeerError: gather among 4 ranks failed", stderr)
    assert len(raised) == 12
    # Rank 3 of the last attempt failed in a user's hook, while buckets were being exchanged.
    assert hook["codes"] == [1, 1, 1, 1]
    assert [e["kind"] for e in hook["errors"] if e["rank"] == 3] == ["ValueError"]
    others = [e for e in hook["errors"] if e["rank"] != 3]
    assert_errors_name_the_reason({**hook, "errors": others}, {0, 1, 2})
    assert stderr.count("ValueError: a mistake of the user's") == 1
    assert "terminate called" not in stderr


@pytest.mark.timeout(TIME_LIMIT_S)
def test_training_waits_for_slow_stopped_and_cut_off_workers(emulated: None) -> None:
    rows, _ = run_script("scenarios.py", "waits")
    assert [row["name"] for row in rows] == ["undisturbed", "slow and stopped", "cut"]
    for row, least_s in zip(rows, (0.0, 3.0, 5.0), strict=True):
        assert row["codes"] == [0, 0, 0, 0]
        assert row["took_s"] > least_s
        assert row["weights"] == rows[0]["weights"]
    assert len(set(rows[0]["weights"])) == 1


@pytest.mark.timeout(TIME_LIMIT_S)
def test_training_gives_up_after_the_timeout(emulated: None) -> None:
    rows, _ = run_script("scenarios.py", "gives_up")
    assert [row["name"] for row in rows] == ["stopped", "cut"]
    for row in rows:
        assert row["codes"] == [1, 1, 1, 1]
        assert_errors_name_the_reason(row, {0, 1, 2, 3})
        assert any("Timed out waiting 2000ms" in error["text"] for error in row["errors"])
        first_s = min(error["at_s"] for error in row["errors"])
        assert first_s - row["stalled_at_s"] < SMALL_TIMEOUT_S + scaled(5)


@pytest.mark.timeout(TIME_LIMIT_S)
@pytest.mark.parametrize("job", JOBS)
def test_faults_of_every_kind_lose_nothing(emulated: None, tmp_path: Path, job: JobKind) -> None:
    """Runs one fault of each kind in each way of training; most of the time is timeouts."""
    records = tmp_path / "faults.jsonl"
    words = f"-m gradwire bench faults --faults {len(KINDS[job])} --jobs {job} --seed 7 --json"
    run_python(*words.split(), str(records))
    *faults, campaign = read_kinds(records, OTHERS)
    kinds = {fault.fault for fault in faults if isinstance(fault, FaultRecord)}
    # Too few checkpoints may be left for one of them to be damaged.
    assert kinds >= set(KINDS[job]) - {"damaged-file"}
    assert isinstance(campaign, CampaignRecord)
    assert not is_bad(campaign)
