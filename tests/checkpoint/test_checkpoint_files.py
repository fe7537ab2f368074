from pathlib import Path
from typing import Any

import checkpoint_jobs as jobs
import pytest
import torch

from gradwire import Checkpoints, ConfigError
from gradwire.checkpoint.files import os as used_os
from processes import Ranks


def state(step: int) -> dict[str, Any]:
    weight = torch.arange(64, dtype=torch.float32) + step
    return {"model": {"weight": weight}, "step": step, "names": ["a", "b"]}


@pytest.fixture
def files(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "run", rank=1, size=4)


def test_loads_what_was_saved(files: Checkpoints) -> None:
    path = files.save(10, state(10))
    loaded: Any = files.load(10)
    assert torch.equal(loaded.pop("model")["weight"], state(10)["model"]["weight"])
    assert loaded == {"step": 10, "names": ["a", "b"]}
    assert torch.load(path, weights_only=True)["step"] == 10


def test_keeps_the_newest(tmp_path: Path) -> None:
    files = Checkpoints(tmp_path, rank=0, size=1, keep=3)
    for step in range(0, 50, 10):
        files.save(step, state(step))
    assert files.steps() == [20, 30, 40]
    assert len(list(tmp_path.iterdir())) == 3


def test_keeps_the_files_of_other_ranks(tmp_path: Path) -> None:
    ranks = [Checkpoints(tmp_path, rank, 12) for rank in (1, 11)]
    another_run = Checkpoints(tmp_path, 1, 2)
    another_run.save(1, state(1))
    for step in range(5):
        for files in ranks:
            files.save(step, state(step))
    assert [files.steps() for files in ranks] == [[3, 4], [3, 4]]
    assert another_run.steps() == [1]


def test_saving_a_step_again_replaces_it(files: Checkpoints) -> None:
    files.save(5, state(5))
    files.save(5, state(6))
    assert files.load(5)["step"] == 6
    assert len(list(Path(files.folder).iterdir())) == 1


def test_a_truncated_file_is_never_chosen(files: Checkpoints) -> None:
    files.save(1, state(1))
    path = files.save(2, state(2))
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert files.steps() == [1]
    with pytest.raises(ConfigError, match="rank 1 has no intact file of step 2"):
        files.load(2)


def test_any_flipped_bit_is_found(files: Checkpoints) -> None:
    files.save(1, state(1))
    path = files.save(2, state(2))
    whole = path.read_bytes()
    for place in range(0, len(whole), 101):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert files.steps() == [1]
    path.write_bytes(whole)
    assert files.steps() == [1, 2]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_crash_while_saving_leaves_the_older_ones(
    files: Checkpoints, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    files.save(1, state(1))
    files.save(2, state(2))

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(used_os if moment == "fsync" else Path, moment, crash)
    with pytest.raises(KeyboardInterrupt):
        files.save(3, state(3))
    monkeypatch.undo()
    assert files.steps() == [1, 2]
    assert len(list(Path(files.folder).glob("*.tmp"))) == 1
    files.save(4, state(4))
    assert files.steps() == [2, 4]
    assert not list(Path(files.folder).glob("*.tmp"))


def test_other_files_are_ignored(files: Checkpoints) -> None:
    folder = files.save(1, state(1)).parent
    for name in ("notes.txt", "step2-rank1of4.pt", "step000000002-rank1of4-xyz.pt"):
        (folder / name).write_bytes(b"hello")
    assert files.steps() == [1]


def test_objects_are_not_unpickled(files: Checkpoints) -> None:
    files.save(1, {"path": Path("x")})
    with pytest.raises(Exception, match="weights_only"):
        files.load(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4, "size": 4}, "rank must be 0 to 3, got 4"),
        ({"rank": "0"}, "rank must be a whole number, 0 to 0, got '0'"),
        ({"size": None}, "size must be a whole number, at least 1, got None"),
        ({"keep": 1}, "keep must be at least 2, got 1"),
        ({"keep": "2"}, "keep must be a whole number, at least 2, got '2'"),
        ({"folder": None}, "folder must be a path, got None"),
        ({"folder": __file__}, f"folder must be a directory, got {__file__}"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^checkpoints: {message}$"):
        Checkpoints(**{"folder": "x", "rank": 0, "size": 1, **settings})


@pytest.mark.parametrize(
    ("step", "state", "message"),
    [
        ("1", {}, "step must be a whole number, at least 0, got '1'"),
        (-1, {}, "step must be at least 0, got -1"),
        (1, None, "state must be a mapping, got NoneType"),
    ],
)
def test_invalid_states_are_not_saved(
    files: Checkpoints, step: Any, state: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^checkpoints: {message}$"):
        files.save(step, state)
    assert not Path(files.folder).exists()


def test_resumes_from_the_newest_that_all_ranks_have(four_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 2's file of step 30 is damaged, and rank 3 did not save step 40."""
    for step, value, left in four_ranks.run(jobs.resume_job, str(tmp_path)):
        assert step == value == 20
        assert left == [20]


def test_resume_without_a_common_step(four_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 0 has no file; those of the others must not be combined with later ones."""
    for first, left in four_ranks.run(jobs.fresh_job, str(tmp_path)):
        assert first is None
        assert left == []
