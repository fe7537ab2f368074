"""The comparison of integrations runs and returns its rows; times are not checked."""

import json

import pytest

from gradwire.bench.microbench.integrations import PAIRS, IntegrationBench, compare
from gradwire.cli import app
from processes import Ranks


def test_every_integration_has_a_row(four_ranks: Ranks) -> None:
    rows = four_ranks.run(compare, 32, 3)[0]
    assert [row.integration for row in rows] == [*PAIRS]
    for row in rows:
        assert row.plain_ms > 0
        assert 0 < row.low <= row.ratio <= row.high


def test_the_command_prints_the_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = IntegrationBench.run
    narrow = IntegrationBench(2, 2, width=32)
    monkeypatch.setattr(IntegrationBench, "run", lambda _: run(narrow))
    app(["bench", "integrations", "--json", "-"], standalone_mode=False)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["integration"] for row in rows] == [*PAIRS]
    assert {(row["kind"], row["compared"], row["workers"]) for row in rows} == {("overhead", 2, 2)}
