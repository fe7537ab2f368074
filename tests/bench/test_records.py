import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from synthetic_runs import race, step, train

from laconic.bench.records import VERSION, Record, append, machine_facts, read
from laconic.errors import ConfigError


def write_row(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**asdict(step("sign", 173, 16)), **changes}) + "\n")
    return path


def test_records_come_back_as_they_went(tmp_path: Path) -> None:
    written: list[Record] = [*race(), step("sign", 173, 16)]
    for record in written:
        append(tmp_path / "new" / "runs.jsonl", record)
    assert read([tmp_path / "new" / "runs.jsonl"]) == written


def test_a_line_is_strict_json_with_kind_and_version_first(tmp_path: Path) -> None:
    append(tmp_path / "runs.jsonl", train("sign", 356, 32))
    [line] = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert line.startswith('{"kind": "train", "version": 1, "spec": "sign"')


def test_a_loss_that_is_not_a_number_survives(tmp_path: Path) -> None:
    run = train("sign", 356, 32)
    point = replace(run.points[0], loss=math.inf)
    append(
        tmp_path / "runs.jsonl",
        replace(run, status="diverged", final_loss=math.nan, points=(point,)),
    )
    assert "NaN" not in (tmp_path / "runs.jsonl").read_text()
    [back] = read([tmp_path / "runs.jsonl"])
    assert back.kind == "train"
    assert back.final_loss is None
    assert math.isnan(back.points[0].loss)


def test_append_keeps_what_a_killed_run_left(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    append(path, train("sign", 356, 32))
    with path.open("a") as file:
        file.write('{"kind": "tra')
    append(path, train("topk:ratio=0.01", 286, 25))
    first, torn, last = path.read_text().splitlines()
    assert torn == '{"kind": "tra'
    assert [json.loads(line)["spec"] for line in (first, last)] == ["sign", "topk:ratio=0.01"]
    with pytest.raises(ConfigError, match=r"runs.jsonl line 2: not JSON"):
        read([path])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file of records: .*gone.jsonl"):
        read([tmp_path / "gone.jsonl"])


def test_a_folder_is_no_file_of_records(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read records from"):
        read([tmp_path])
    with pytest.raises(ConfigError, match="cannot write records to"):
        append(tmp_path, train("sign", 356, 32))


def test_both_versions_are_named(tmp_path: Path) -> None:
    path = write_row(tmp_path / "old.jsonl", version=99)
    with pytest.raises(ConfigError, match=f"line 1: record format version 99, .* reads {VERSION}"):
        read([path])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "dance"}, "unknown kind 'dance', expected .'train', 'step', 'kernel'."),
        ({"kind": ["step"]}, "unknown kind"),
        ({"spec": 3}, "step record field 'spec' must be str, got 3"),
        ({"workers": True}, "field 'workers' must be int, got True"),
        ({"status": "fine"}, "field 'status' must be .*'done'.*, got 'fine'"),
        ({"step_ms_quantiles": [1, 2]}, "'step_ms_quantiles' must have 3 items, got 2"),
        ({"machine": {"cores": 2}}, "field 'machine.cores' must be str, got 2"),
        ({"colour": "red"}, "has unknown fields .'colour'."),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read([write_row(tmp_path / "bad.jsonl", **changes)])


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    row = {"kind": "step", "version": VERSION, "spec": "sign"}
    (tmp_path / "bad.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=r"step record lacks .'workers', 'rate'"):
        read([tmp_path / "bad.jsonl"])


def test_the_machine_is_described_in_words() -> None:
    facts = machine_facts()
    assert {"cpu", "cores", "python", "torch", "laconic"} <= set(facts)
    assert all(isinstance(value, str) and value for value in facts.values())
