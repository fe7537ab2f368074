import errno
import json
import logging
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gradwire.bench.machine import machine_facts
from gradwire.bench.records.files import append, check_writable, files_in, read
from gradwire.bench.records.schema import VERSION, Record, TrainRecord
from gradwire.errors import ConfigError
from synthetic_runs import step, train, training_runs


def write_row(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**asdict(step("sign", 173, 16)), **changes}) + "\n")
    return path


def test_records_are_read_back_unchanged(tmp_path: Path) -> None:
    written: list[Record] = [*training_runs(), step("sign", 173, 16)]
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


def test_an_incomplete_line_of_a_killed_run_does_not_affect_other_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "runs.jsonl"
    append(path, train("sign", 356, 32))
    with path.open("a") as file:
        file.write('{"kind": "tra')
    append(path, train("topk:ratio=0.01", 286, 25))
    first, torn, last = path.read_text().splitlines()
    assert torn == '{"kind": "tra'
    assert [json.loads(line)["spec"] for line in (first, last)] == ["sign", "topk:ratio=0.01"]
    with caplog.at_level(logging.WARNING):
        assert [record.spec for record in read([path])] == ["sign", "topk:ratio=0.01"]
    assert "runs.jsonl line 2: skipped, since the line is cut off" in caplog.text
    with path.open("a") as file:
        file.write("pasted by mistake\n")
    with pytest.raises(ConfigError, match=r"runs.jsonl line 4: not JSON"):
        read([path])


def test_a_full_disk_does_not_damage_earlier_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.jsonl"
    append(path, train("sign", 356, 32))
    before, write = path.read_bytes(), os.write

    def write_a_little(descriptor: int, content: bytes) -> int:
        if len(content) < 20_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content[:100])

    assert len(before) < 20_000
    with monkeypatch.context() as full:
        full.setattr(os, "write", write_a_little)
        with pytest.raises(ConfigError, match=r"cannot write records to .*: No space left on dev"):
            append(path, replace(train("topk:ratio=0.01", 286, 25), command="x" * 20_000))
    assert path.read_bytes() == before
    append(path, train("none", 356, 32))
    assert [record.spec for record in read([path])] == ["sign", "none"]


def test_an_unwritable_path_is_found_before_a_run(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "runs.jsonl")
    assert read([tmp_path / "new" / "runs.jsonl"]) == []
    for place in (tmp_path, Path("/dev/full")):
        with pytest.raises(ConfigError, match=r"cannot write records to .*: not a regular file"):
            check_writable(place)


def test_records_from_before_a_field_was_added_are_read(tmp_path: Path) -> None:
    run = train("sign", 356, 32)
    row = asdict(run)
    for name in ("losses", "interface_bytes", "workload_spec", "device", "scaling_efficiency"):
        del row[name]
    row["points"] = [{key: p[key] for key in p if key != "metric"} for p in row["points"]]
    (tmp_path / "old.jsonl").write_text(json.dumps(row))
    [back] = read([tmp_path / "old.jsonl"])
    assert isinstance(back, TrainRecord)
    assert back == run


def test_the_results_in_the_repository_are_readable() -> None:
    files = sorted((Path(__file__).parents[3] / "results").glob("*.jsonl"))
    assert len(files) >= 2
    assert len(read(files)) > 40


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file of records: .*gone.jsonl"):
        read([tmp_path / "gone.jsonl"])


def test_a_folder_is_not_a_file_of_records(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read records from"):
        read([tmp_path])
    with pytest.raises(ConfigError, match="cannot write records to"):
        append(tmp_path, train("sign", 356, 32))


@pytest.mark.parametrize("kind", ["step", "a future kind"])
def test_an_error_names_both_versions_and_the_remedy(tmp_path: Path, kind: str) -> None:
    path = write_row(tmp_path / "old.jsonl", version=99, kind=kind)
    message = (
        f"line 1: record format version 99, .* reads {VERSION}; name another file, or use the "
    )
    with pytest.raises(ConfigError, match=message):
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


def test_the_machine_facts_are_strings() -> None:
    facts = machine_facts()
    assert {"cpu", "cores", "python", "torch", "gradwire"} <= set(facts)
    assert all(isinstance(value, str) and value for value in facts.values())


def test_a_loop_of_links_is_named(tmp_path: Path) -> None:
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    with pytest.raises(
        ConfigError, match=r"cannot read records from .*loop.jsonl: Too many levels"
    ):
        read(files_in([loop]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"kind": ' + "1" * 5_000 + "}", "Exceeds the limit"),
    ],
)
def test_a_line_that_python_refuses_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=rf"odd.jsonl line 1: not a record: {message}"):
        read([path])


@pytest.mark.parametrize("field", ["workers", "step_ms"])
def test_a_number_beyond_the_range_of_floats_is_named(tmp_path: Path, field: str) -> None:
    path = write_row(tmp_path / "odd.jsonl", **{field: 10**400})
    with pytest.raises(ConfigError, match=rf"line 1: step record field '{field}' must be"):
        read([path])
