"""The cost of guards: the ratio within rounds, from blocks with and without."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from scripted_cluster import ScriptedCluster, finished

from gradwire.bench.records.files import from_row
from gradwire.bench.records.schema import GuardRecord
from gradwire.bench.runs import guards
from gradwire.bench.runs.guards import GuardBench
from gradwire.bench.worker.protocol import Failed, Job, Message, Started
from gradwire.errors import ConfigError, PeerError
from gradwire.testbed.cluster import LoopbackCluster

SPEC = "topk:ratio=0.01"
UNGUARDED, CHECKED = f"{SPEC} @ nan_policy=ignore", f"{SPEC} @ checksum=true"


def bench(path: Path | None = None, rounds: int = 3) -> GuardBench:
    workload = "mlp:hidden=64,batch_size=4"
    return GuardBench((SPEC,), 2, "1gbit", rounds, 3, 1, workload, path, "gradwire bench guards")


def text_console() -> Console:
    return Console(file=StringIO(), width=120)


def test_the_ratio_is_within_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that gets slower from round to round changes all times, and no ratio."""

    def script(job: Job) -> Iterator[Message]:
        for i, case in enumerate(job.case_order):
            unit = 10.0 * (1 + i // 3)
            factor = {UNGUARDED: 1.0, SPEC: 1.5, CHECKED: 1.5 * 1.25}[case]
            yield Started(case=case)
            yield finished(case, (unit * factor, 1e6, 0.0))

    cluster = ScriptedCluster([script])
    monkeypatch.setattr(guards, "open_cluster", cluster.open)
    path, console = tmp_path / "guards.jsonl", text_console()
    nan, checksum = bench(path).run(console)
    assert (nan.guard, nan.ratio, nan.quartiles) == ("nan", 1.5, (1.5, 1.5))
    assert (checksum.guard, checksum.ratio) == ("checksum", 1.25)
    assert (nan.without_ms, nan.with_ms, checksum.without_ms) == (20, 30, 30)
    [job] = cluster.jobs
    first = UNGUARDED, SPEC, CHECKED
    assert job.case_order == (*first, *first[::-1], *first)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [from_row(GuardRecord, row) for row in rows] == [nan, checksum]
    assert "1.500" in console.file.getvalue()  # type: ignore[attr-defined]


def test_on_real_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def loopback(workers: int, rate: str | None) -> Iterator[LoopbackCluster]:
        yield LoopbackCluster(workers)

    monkeypatch.setattr(guards, "open_cluster", loopback)
    found = bench(rounds=2).run(text_console())
    assert [record.guard for record in found] == ["nan", "checksum"]
    assert all(record.ratio > 0 and record.without_ms > 0 for record in found)


def test_a_case_that_fails_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(job: Job) -> Iterator[Message]:
        yield Started(case=job.case_order[0])
        yield Failed(case=job.case_order[0], error="it broke")

    monkeypatch.setattr(guards, "open_cluster", ScriptedCluster([script]).open)
    with pytest.raises(PeerError, match="it broke"):
        bench().run(text_console())


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="rounds must be at least 1, got 0"):
        bench(rounds=0)
    with pytest.raises(ConfigError, match="without options, got 'efsign @ checksum=true'"):
        GuardBench(("efsign @ checksum=true",), 2, None, 1, 1, 1, "mlp", None, "")
    with pytest.raises(ConfigError, match="baselines have no guards, got 'ddp-fp32'; name a"):
        GuardBench(("efsign", "ddp-fp32"), 2, None, 1, 1, 1, "mlp", None, "")
