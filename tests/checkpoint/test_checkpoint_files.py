import errno
import hashlib
import re
import resource
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import checkpoint_jobs as jobs
import numpy as np
import pytest
import torch

from gradwire import CheckpointError, Checkpoints, ConfigError, checkpoint
from gradwire.checkpoint.atomic_write import os as used_os
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


class Crashes:
    """Copies of a folder as crashes would leave it, before every line of `gradwire.checkpoint`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.snapshots: list[dict[str, tuple[bytes, int]]] = []

    def __enter__(self) -> "Crashes":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        self._look()

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if Path(frame.f_code.co_filename).parent != Path(checkpoint.__file__).parent:
            return None
        if event == "line":
            self._look()
        return self._trace

    def _look(self) -> None:
        found = [path for path in sorted(self._folder.rglob("*")) if path.is_file()]
        content = {
            str(path.relative_to(self._folder)): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in found
        }
        if content not in self.snapshots:
            self.snapshots.append(content)

    def replay(self, place: Path) -> Iterator[Path]:
        """Writes each copy to a folder of its own."""
        for number, content in enumerate(self.snapshots):
            for name, (data, mtime_ns) in content.items():
                path = place / str(number) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                used_os.utime(path, ns=(mtime_ns, mtime_ns))
            yield place / str(number)


@pytest.mark.parametrize(("saved", "content"), [(3, 3), (2, 20)])
def test_a_crash_at_any_line_of_save_leaves_a_state(
    files: Checkpoints, tmp_path: Path, saved: int, content: int
) -> None:
    """A new step, or another state of the newest one: it is there once, or the older one is."""
    for step in (1, 2):
        path = files.save(step, state(step))
        used_os.utime(path, (step, step))
    (Path(files.folder) / "step000000003-rank1of4.tmp").write_bytes(b"of a crash")
    with Crashes(Path(files.folder)) as crashes:
        files.save(saved, state(content))
    seen = []
    for folder in crashes.replay(tmp_path / "crashes"):
        after = replace(files, folder=folder)
        seen.append(after.load(after.steps()[-1])["step"])
        # Later ones remove what the crash left.
        for step in (8, 9):
            after.save(step, state(step))
        assert after.steps() == [8, 9]
        assert len(list(folder.iterdir())) == 2
    assert seen == [2] * seen.count(2) + [content] * seen.count(content)
    assert seen.count(2) >= 4
    assert seen.count(content) >= 2


def test_a_crash_at_any_line_of_resume_loses_no_file(files: Checkpoints, tmp_path: Path) -> None:
    files = replace(files, keep=5)
    damaged = files.save(5, state(5))
    damaged.write_bytes(b"damaged")
    for step in (10, 20, 30, 40):
        files.save(step, state(step))
    folder = Path(files.folder)
    content = sorted(path.read_bytes() for path in folder.glob("*.pt"))
    with Crashes(folder) as crashes:
        files._move_aside(20, [damaged])
    assert len(crashes.snapshots) == 4
    for after in crashes.replay(tmp_path / "crashes"):
        files = replace(files, folder=after)
        assert sorted(path.read_bytes() for path in after.rglob("*.pt")) == content
        assert 20 in files.steps()
        files._move_aside(20, files._survey().damaged)
        assert files.steps() == [10, 20]
        assert sorted(path.read_bytes() for path in after.rglob("*.pt")) == content


def test_a_crash_at_any_line_of_a_new_start_gives_the_same_answer(
    files: Checkpoints, tmp_path: Path
) -> None:
    files.save(10, state(10))
    with Crashes(Path(files.folder)) as crashes:
        files._move_aside(None, [])
    assert len(crashes.snapshots) == 3
    for folder in crashes.replay(tmp_path / "crashes"):
        survey = replace(files, folder=folder)._survey()
        assert survey.steps or survey.never_saved
    files.save(1, state(1))
    assert not files._survey().never_saved


def test_a_file_has_its_name_once_it_is_on_disk(
    files: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the machine loses power, what was not flushed is lost, in any order."""
    files.save(1, state(1))
    files.save(2, state(2))
    order: list[str] = []

    def note(module: Any, name: str) -> None:
        original = getattr(module, name)

        def noted(*args: Any, **options: Any) -> Any:
            order.append(name)
            return original(*args, **options)

        monkeypatch.setattr(module, name, noted)

    note(used_os, "fsync")
    note(Path, "replace")
    note(Path, "unlink")
    files.save(3, state(3))
    assert order == ["fsync", "replace", "fsync", "unlink"]


def test_a_full_disk_leaves_no_draft(files: Checkpoints) -> None:
    """The kernel refuses to write more than a limit, as it does without free space."""
    files.save(1, state(1))
    files.save(2, state(2))
    before = sorted(Path(files.folder).iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step 3 .*step000000003-rank1of4") as caught:
            files.save(3, {"big": torch.zeros(1_000_000)})
        assert caught.value.errno == errno.EFBIG
        assert isinstance(caught.value.__cause__, OSError)
        assert sorted(Path(files.folder).iterdir()) == before
        files.save(3, state(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files.steps() == [2, 3]


@pytest.mark.parametrize("moment", ["fsync", "replace", "unlink"])
def test_an_error_of_the_disk_names_step_and_path(
    files: Checkpoints, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    files.save(1, state(1))
    files.save(2, state(2))

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(used_os if moment == "fsync" else Path, moment, fail)
    with pytest.raises(CheckpointError, match=r"step 3 .*step000000003-rank1of4") as caught:
        files.save(3, state(3))
    monkeypatch.undo()
    assert caught.value.errno == errno.EIO
    assert files.steps() == ([1, 2, 3] if moment == "unlink" else [1, 2])
    assert not list(Path(files.folder).glob("*.tmp"))


def test_drafts_of_a_crash_make_room_first(
    files: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = files.save(1, state(1)).parent
    (folder / "step000000007-rank1of4.tmp").write_bytes(b"of an older version")
    (folder / "step000000008-rank1of4-0123456789abcdef.tmp").write_bytes(b"of a crash")
    others = [folder / "step000000007-rank1of40.tmp", folder / "step000000007-rank11of4.tmp"]
    for other in others:
        other.write_bytes(b"of another rank")
    flush, seen = used_os.fsync, []

    def look(fd: int) -> None:
        seen.append(sorted(folder.glob("*.tmp")))
        flush(fd)

    monkeypatch.setattr(used_os, "fsync", look)
    files.save(9, state(9))
    assert len(seen[0]) == 3
    assert all(path.name.startswith("step000000009-rank1of4-") for path in {*seen[0]} - {*others})
    assert sorted(folder.glob("*.tmp")) == sorted(others)


def test_symbolic_links_are_not_followed(files: Checkpoints, tmp_path: Path) -> None:
    target = files.save(3, state(3))
    content = target.read_bytes()
    target.unlink()
    victim = tmp_path / "victim"
    victim.write_bytes(b"of somebody else")
    (target.parent / "step000000003-rank1of4.tmp").symlink_to(victim)
    target.symlink_to(victim)
    assert files.save(3, state(3)) == target
    assert victim.read_bytes() == b"of somebody else"
    assert not target.is_symlink()
    assert target.read_bytes() == content


class Hyper(dict[str, int]):
    """A mapping that pickle saves by its class's name."""


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"a": [1, {"b": np.float64(3)}]}, r"state['odd']['a'][1]['b'] is a numpy.float64"),
        ({np.int64(3): 1}, r"a key of state['odd'] is a numpy.int64"),
        ((1, Path("x")), r"state['odd'][1] is a pathlib.PosixPath"),
        (Hyper(a=1), r"state['odd'] is a test_checkpoint_files.Hyper"),
        (threading.Lock(), r"state['odd'] is a _thread.lock"),
    ],
)
def test_a_state_that_would_not_load_is_not_saved(
    files: Checkpoints, odd: object, message: str
) -> None:
    files.save(1, state(1))
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        files.save(2, {**state(2), "odd": odd})
    assert "step 2" in str(caught.value)
    assert files.steps() == [1]
    assert len(list(Path(files.folder).iterdir())) == 1


def test_a_step_before_the_newest_is_not_saved(files: Checkpoints) -> None:
    """Such a save belongs to another run: its file must neither vanish nor replace newer ones."""
    files.save(4000, state(4000))
    files.save(5000, state(5000))
    with pytest.raises(ConfigError, match=r"step 100 .*\[4000, 5000\]"):
        files.save(100, state(100))
    assert files.steps() == [4000, 5000]
    files.save(5000, state(5001))
    assert files.load(5000)["step"] == 5001


def test_other_files_are_ignored(files: Checkpoints) -> None:
    folder = files.save(1, state(1)).parent
    for name in ("notes.txt", "step2-rank1of4.pt", "step000000002-rank1of4-xyz.pt"):
        (folder / name).write_bytes(b"hello")
    assert files.steps() == [1]


def test_objects_are_not_unpickled(files: Checkpoints) -> None:
    folder = files.save(1, state(1)).parent
    torch.save({"path": Path("x")}, folder / "draft")
    digest = hashlib.sha256((folder / "draft").read_bytes()).hexdigest()[:16]
    (folder / "draft").rename(folder / f"step000000002-rank1of4-{digest}.pt")
    assert files.steps() == [1, 2]
    with pytest.raises(Exception, match="weights_only"):
        files.load(2)


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


COMMON_20 = {0: "20 30 40", 1: "20 30 40", 2: "20 30x 40", 3: "10x 20 30"}


def test_resumes_from_the_newest_that_all_ranks_have(four_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 2's file of step 30 is damaged, and rank 3 did not save step 40."""
    outcomes = four_ranks.run(jobs.resume_job, str(tmp_path), COMMON_20, {})
    assert [o.step for o in outcomes] == [20] * 4
    assert [o.here for o in outcomes] == [[20]] * 4
    assert [o.aside for o in outcomes] == [[30, 40], [30, 40], [30, 40], [10, 30]]


@pytest.mark.parametrize("method", ["rename", "open"])
def test_a_failure_of_one_rank_is_one_of_all(
    four_ranks: Ranks, tmp_path: Path, method: str
) -> None:
    """Rank 1 cannot move or read its files at first; the second attempt gives the same answer."""
    broken = {"broken": (1, method)}
    first = four_ranks.run(jobs.resume_job, str(tmp_path), COMMON_20, broken)
    assert {o.error for o in first} == {"CheckpointError"}
    assert all("rank 1: " in o.message and "Permission denied" in o.message for o in first)
    assert first[1].here == [20, 30, 40]
    assert first[0].here == ([20] if method == "rename" else [20, 30, 40])
    second = four_ranks.run(jobs.resume_job, str(tmp_path), {}, {})
    assert [o.step for o in second] == [20] * 4
    assert [o.here for o in second] == [[20]] * 4
    assert [o.aside for o in second] == [[30, 40], [30, 40], [30, 40], [10, 30]]


def test_files_are_never_moved_onto_others(four_ranks: Ranks, tmp_path: Path) -> None:
    """The same steps, with the same content, are saved and moved aside twice."""
    for _ in range(2):
        saved = {rank: "20 30" if rank else "20" for rank in range(4)}
        outcomes = four_ranks.run(jobs.resume_job, str(tmp_path), saved, {})
    assert [o.step for o in outcomes] == [20] * 4
    assert [o.aside for o in outcomes] == [[], [30, 30], [30, 30], [30, 30]]


NOTHING_COMMON = {1: "10", 2: "10", 3: "20x 30"}


@pytest.mark.parametrize("attempts", [1, 2])
def test_no_common_step_is_an_error_on_all_ranks(
    four_ranks: Ranks, tmp_path: Path, attempts: int
) -> None:
    """Rank 0 sees no file, as after the loss of its disk: the others' files stay as they are."""
    outcomes = four_ranks.run(jobs.resume_job, str(tmp_path), NOTHING_COMMON, *[{}] * attempts)
    assert {o.error for o in outcomes} == {"ConfigError"}
    assert len({o.message for o in outcomes}) == 1
    for line in ("[0]: no files", "[1, 2]: steps [10]", "[3]: steps [30], 1 damaged file"):
        assert f"\n  rank {line}" in outcomes[0].message
    assert 'no_common_step="start_anew"' in outcomes[0].message
    assert [o.here for o in outcomes] == [[], [10], [10], [20, 30]]
    assert [o.aside for o in outcomes] == [[]] * 4


def test_a_new_start_on_request_moves_files_aside(four_ranks: Ranks, tmp_path: Path) -> None:
    """Resumed a second time, ranks still start anew: no file is left."""
    anew = {"no_common_step": "start_anew"}
    outcomes = four_ranks.run(jobs.resume_job, str(tmp_path), NOTHING_COMMON, anew, {})
    assert [(o.step, o.error) for o in outcomes] == [(None, "")] * 4
    assert [o.here for o in outcomes] == [[]] * 4
    assert [o.aside for o in outcomes] == [[], [10], [10], [20, 30]]


def test_a_crash_in_the_first_save_is_a_new_start(four_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 0 was killed before it had saved its first step, so no rank could resume from that."""
    saved = {1: "10", 2: "10", 3: "10"}
    for first, second in four_ranks.run(jobs.first_save_job, str(tmp_path), saved, None):
        assert (first.step, first.error, first.here) == (None, "", [])
        assert second == first
    aside = sorted(path.name[:22] for path in tmp_path.glob("superseded/*/*.pt"))
    assert aside == [f"step000000010-rank{rank}of4" for rank in (1, 2, 3)]


@pytest.mark.parametrize(
    ("saved", "lost"),
    [
        (dict.fromkeys(range(4), "10"), 0),
        ({1: "10 20", 2: "10", 3: "10"}, None),
        ({1: "10x", 2: "10", 3: "10"}, None),
    ],
)
def test_a_rank_that_has_lost_its_files_is_not_one_that_never_saved(
    four_ranks: Ranks, tmp_path: Path, saved: dict[int, str], lost: int | None
) -> None:
    """Nor is a new start automatic if a rank has saved twice, or a file is damaged."""
    for outcomes in four_ranks.run(jobs.first_save_job, str(tmp_path), saved, lost):
        assert [o.error for o in outcomes] == ["ConfigError"] * 2
        assert "\n  rank [0]: no files\n" in outcomes[1].message
        assert outcomes[1].aside == []


def test_a_common_step_is_resumed_whatever_was_requested(four_ranks: Ranks, tmp_path: Path) -> None:
    """A script that is restarted with the request of its first start does not lose its steps."""
    anew = {"no_common_step": "start_anew"}
    outcomes = four_ranks.run(jobs.resume_job, str(tmp_path), COMMON_20, anew)
    assert [o.step for o in outcomes] == [20] * 4


def test_no_files_are_a_new_start(four_ranks: Ranks, tmp_path: Path) -> None:
    for outcome in four_ranks.run(jobs.resume_job, str(tmp_path / "fresh"), {}, {}):
        assert outcome == (None, "", "", [], [])


def test_ranks_must_request_the_same(four_ranks: Ranks, tmp_path: Path) -> None:
    by_rank = [{"no_common_step": "start_anew"}, {}, {}, {}]
    saved = dict.fromkeys(range(4), "10")
    outcomes = four_ranks.run(jobs.resume_job, str(tmp_path), saved, {"by_rank": by_rank})
    assert {o.error for o in outcomes} == {"ConfigError"}
    assert all("start_anew on rank [0]" in o.message for o in outcomes)
    texts = four_ranks.run(jobs.wrong_rank_job, str(tmp_path))
    assert len({*texts}) == 1
    assert "rank 2: belong to rank 0 of 4, but resumed by rank 2 of 4" in texts[0]


def test_unknown_requests_are_refused(files: Checkpoints) -> None:
    with pytest.raises(ConfigError, match=r"no_common_step must be one of .*, got True"):
        files.resume(no_common_step=True)  # type: ignore[arg-type]


def test_a_new_start_warns_of_another_number_of_ranks(
    files: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    replace(files, size=8).save(1, state(1))
    files._warn_of_other_sizes()
    assert "no files of 4 ranks, and a new start ignores those of [8] ranks" in caplog.text
