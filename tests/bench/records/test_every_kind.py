"""Files with every kind of record that Gradwire writes: reading, and errors with names."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from gradwire.bench.predictions.forecast_records import read_predictions
from gradwire.bench.records.files import append, files_in, read, read_every
from gradwire.bench.records.schema import KINDS, OTHERS, UNVERSIONED, AnyRecord
from gradwire.errors import ConfigError
from synthetic_others import fault, follow, others
from synthetic_runs import steps, train

ROOT = Path(__file__).parents[3]
BY_KIND = {record.kind: record for record in others()}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_every_kind_is_read_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    written: list[AnyRecord] = [train("sign", 356, 32), *others(), *steps()]
    assert {record.kind for record in others()} == set(OTHERS)
    for record in written:
        append(path, record)
    assert read_every([path]) == written
    assert read([path]) == [train("sign", 356, 32), *steps()]
    assert read_predictions(path) == [record for record in others() if record.kind == "forecast"]


def test_every_kind_that_is_written_is_known() -> None:
    """Searches both forms of a kind in the source: a dataclass, or a dict literal."""
    forms = r'kind: Literal\["(\w+)"\] = "\w+"\n    version: |"kind": "(\w+)",\s+"version"'
    files = list((ROOT / "src/gradwire").rglob("*.py"))
    found = [match for file in files for match in re.findall(forms, file.read_text())]
    assert {one or other for one, other in found} == {*KINDS, *OTHERS}


def test_no_record_of_the_repository_is_lost() -> None:
    files = files_in([ROOT / "results"])
    lines = [line for file in files for line in file.read_text().split("\n") if line.strip()]
    assert len(files) > 20
    assert len(read_every(files)) == len(lines) > 800


def test_the_old_package_name_is_read_as_the_new_one(tmp_path: Path) -> None:
    record = train("sign", 356, 32)
    machine = {"cpu": "one", "laconic": "0.1.0", "commit": "abc"}
    old = {**asdict(record), "machine": machine, "command": "laconic bench train"}
    path = write(tmp_path / "old.jsonl", old)
    [back] = read([path])
    assert back.command == "gradwire bench train"
    assert list(back.machine.items()) == [("cpu", "one"), ("gradwire", "0.1.0"), ("commit", "abc")]
    assert read_every([path]) == [back]
    new = write(tmp_path / "new.jsonl", asdict(back))
    assert read([new]) == [back]


@pytest.mark.parametrize("kind", UNVERSIONED)
def test_the_first_records_of_some_kinds_lack_a_version(tmp_path: Path, kind: str) -> None:
    row = asdict(BY_KIND[kind])
    del row["version"]
    assert read_every([write(tmp_path / "old.jsonl", row)]) == [BY_KIND[kind]]


@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_another_version_of_any_kind_is_refused(tmp_path: Path, kind: str) -> None:
    good, later = asdict(BY_KIND[kind]), {**asdict(BY_KIND[kind]), "version": 2}
    path = write(tmp_path / "new.jsonl", good, later)
    with pytest.raises(ConfigError, match=r"new.jsonl line 2: record format version 2, this"):
        read_every([path])
    if kind not in UNVERSIONED:
        del good["version"]
        with pytest.raises(ConfigError, match=f"line 1: {kind} record without the version of its"):
            read_every([write(tmp_path / "none.jsonl", good)])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"kind": "dance", "version": 1},
            r"unknown kind 'dance', expected \['train'.*'elastic'\]",
        ),
        ({"kind": ["fault"], "version": 1}, "unknown kind"),
        ({"mount": "ddp"}, "unknown kind None"),
        ({"kind": "dance"}, "unknown kind 'dance'"),
        ({**asdict(fault("wire", 1)), "hung": "yes"}, "fault record field 'hung' must be int"),
        ({**asdict(follow("none", 9)), "phases": 3}, "follow record field 'phases' must be"),
    ],
)
def test_an_unknown_or_invalid_record_is_named(
    tmp_path: Path, row: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"odd.jsonl line 1: {message}"):
        read_every([write(tmp_path / "odd.jsonl", row)])


def test_a_folder_is_replaced_by_the_files_below_it(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    last, first = tmp_path / "deep" / "er" / "b.jsonl", tmp_path / "a.jsonl"
    for path in (last, first, tmp_path / "notes.txt"):
        write(path, asdict(train("sign", 356, 32)))
    assert files_in([tmp_path]) == [first, last]
    assert files_in([last, tmp_path, first]) == [last, first]
    assert files_in([tmp_path / "gone.jsonl"]) == [tmp_path / "gone.jsonl"]


def test_a_folder_without_records_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no files of records \(\*.jsonl\) in the folder .*"):
        files_in([tmp_path])
