"""Atomic checkpoint files of a rank, and the newest step for which all ranks have one.

A file's name ends in a hash of its content, and it gets that name once all of it is on disk.
It is a plain file of `torch.save`, which `torch.load` reads without this package. No file that a
later start could need is deleted: those that must not be combined with new ones are moved aside.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeVar, get_args

import torch
import torch.distributed as dist

from gradwire.checkpoint.atomic_write import (
    DRAFT_SUFFIX,
    FILE_SUFFIX,
    HASH_DIGITS,
    hash_of,
    sync_folder,
    write_atomically,
)
from gradwire.checkpoint.common_step import (
    Inventory,
    NoCommonStep,
    check_all_succeeded,
    common_step,
    error_text,
)
from gradwire.checks import check_whole
from gradwire.comm.groups import check_member
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.errors import CheckpointError, ConfigError

T = TypeVar("T")

log = logging.getLogger("gradwire")

SUPERSEDED = "superseded"
"""The folder of files that were moved aside, inside the folder of checkpoints."""


class Resumed(NamedTuple):
    """The number of steps that are done, and this rank's state after them."""

    step: int
    state: dict[str, object]


class _File(NamedTuple):
    step: int
    path: Path


class _Survey(NamedTuple):
    """The steps of which a rank has an intact file, sorted, its damaged files, and its marker."""

    steps: list[int]
    damaged: list[Path]
    never_saved: bool


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoint files of one rank, in a folder that ranks may share.

    The newest `keep` files stay. With 2 or more, ranks that save at the same steps always have one
    in common: when the first of them saves a step, all have saved the one before. Files that
    `resume` has moved aside do not count, and are never removed.
    """

    folder: Path | str
    rank: int
    size: int
    keep: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike):
            raise ConfigError(f"checkpoints: folder must be a path, got {self.folder!r}")
        if Path(self.folder).exists() and not Path(self.folder).is_dir():
            raise ConfigError(f"checkpoints: folder must be a directory, got {self.folder}")
        check_whole("checkpoints", "size", self.size, 1)
        check_whole("checkpoints", "rank", self.rank, 0, self.size - 1)
        check_whole("checkpoints", "keep", self.keep, 2)

    def save(self, step: int, state: Mapping[str, object]) -> Path:
        """Writes the state after `step` steps, then removes this rank's oldest files.

        The returned file survives a crash of the machine; older files survive a crash in here. A
        step may be saved again, which replaces it, but none before the newest: that is another
        run's, and raises ConfigError, as does a state that could not be loaded. CheckpointError
        means that the disk is full or has failed.
        """
        check_whole("checkpoints", "step", step, 0)
        if not isinstance(state, Mapping):
            kind = type(state).__name__
            raise ConfigError(f"checkpoints: state must be a mapping, got {kind}")
        stem = Path(self.folder) / self._stem(step)
        with _disk_errors(f"step {step} is not saved as {stem}"):
            stem.parent.mkdir(parents=True, exist_ok=True)
            self._check_newest(step)
            self._remove_drafts()
            try:
                path = write_atomically(stem, state)
            except ConfigError as error:
                raise ConfigError(f"checkpoints: step {step} is not saved: {error}") from error
        with _disk_errors(f"step {step} is saved as {path}, but an older file cannot be removed"):
            self._remove_old(_File(step, path))
        return path

    def steps(self) -> list[int]:
        """Returns the steps of which this rank has an intact file, sorted; reads all its files."""
        return self._survey().steps

    def load(self, step: int, device: torch.device | str = "cpu") -> dict[str, object]:
        """Returns the state after `step` steps; raises ConfigError if no intact file has it."""
        paths = [path for found, path in self._files() if found == step]
        # A crash may have left two files of a step that was saved again: the later one counts.
        for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            if _is_intact(path):
                state: dict[str, object] = torch.load(path, map_location=device, weights_only=True)
                return state
        raise ConfigError(
            f"checkpoints: rank {self.rank} has no intact file of step {step} in {self.folder}"
        )

    def resume(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        *,
        no_common_step: NoCommonStep = "raise",
    ) -> Resumed | None:
        """Returns the newest state that all ranks have; called on all ranks of the group.

        Returns None if no rank has any file, or if a crash interrupted the very first save. If
        otherwise some rank has files, but no step is intact on all of them, all ranks raise
        ConfigError with the steps of each, and nothing changes; with
        `no_common_step="start_anew"` they return None instead.

        Files of later steps must never be combined with those of the repeated steps. They are moved
        to the folder `superseded`, as are damaged ones and, for a new start, all; none is deleted.
        """
        if no_common_step not in get_args(NoCommonStep):
            known = [*get_args(NoCommonStep)]
            raise ConfigError(
                f"checkpoints: no_common_step must be one of {known}, got {no_common_step!r}"
            )
        if group is None:
            group = dist.distributed_c10d._get_default_group()
        check_member(group)
        comm = ProcessGroupComm(group)
        survey = _outcome_of(self._survey)
        step = common_step(comm, self._inventory(comm, survey, no_common_step))
        assert isinstance(survey, _Survey), "a failure is raised by common_step"

        def take() -> dict[str, object]:
            state = {} if step is None else self.load(step, device)
            self._move_aside(step, survey.damaged)
            return state

        state = _outcome_of(take)
        # A rank that went on while another still has its later files could save such a step again.
        check_all_succeeded(comm, state if isinstance(state, Exception) else None)
        assert not isinstance(state, Exception)
        if step is None:
            self._warn_of_other_sizes()
            return None
        return Resumed(step, state)

    def _survey(self) -> _Survey:
        """Reads all files of this rank."""
        files = self._files()
        damaged = [file.path for file in files if not _is_intact(file.path)]
        steps = sorted({file.step for file in files if file.path not in damaged})
        return _Survey(steps, damaged, self._begin_marker().exists())

    def _inventory(
        self, comm: ProcessGroupComm, survey: _Survey | Exception, no_common_step: NoCommonStep
    ) -> Inventory:
        """Returns what other ranks must know; errors are a part of it, so that no rank waits."""
        misuse, failure = "", ""
        if (comm.rank, comm.size) != (self.rank, self.size):
            misuse = (
                f"belong to rank {self.rank} of {self.size}, "
                f"but resumed by rank {comm.rank} of {comm.size}"
            )
        if isinstance(survey, Exception):
            failure = error_text(survey)
            survey = _Survey([], [], never_saved=False)
        steps, damaged, never_saved = survey
        return Inventory(steps, len(damaged), never_saved, no_common_step, misuse, failure)

    def _move_aside(self, step: int | None, damaged: Sequence[Path]) -> None:
        """Moves the damaged files, and those of later steps, or all without a step.

        They go into a new folder of this rank, so that no file is moved onto another. The common
        step is the same before and after, so a crash in here changes nothing for the next start.
        """
        if step is None:
            # First, since a rank without both its files and the marker has lost them.
            self._mark_begin()
        found = self._files()
        moved = [f for f in found if step is None or f.step > step or f.path in damaged]
        if not moved:
            return
        folder = Path(self.folder)
        target = _new_folder(folder / SUPERSEDED / f"rank{self.rank}of{self.size}")
        for file in moved:
            file.path.rename(target / file.path.name)
        for changed in (target, folder):
            sync_folder(changed)
        names = [file.path.name for file in moved]
        start = "the new start" if step is None else f"the repetition from step {step}"
        log.warning("checkpoints: %s moved to %s: not a part of %s", names, target, start)

    def _mark_begin(self) -> None:
        """Notes that a run begins here, until the first save of this rank is on disk.

        So after a crash during the first save, a rank without files is known never to have had any.
        """
        marker = self._begin_marker()
        marker.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
        sync_folder(marker.parent)

    def _begin_marker(self) -> Path:
        return Path(self.folder) / f"begun-rank{self.rank}of{self.size}"

    def _warn_of_other_sizes(self) -> None:
        name = re.compile(rf"step\d+-rank\d+of(\d+)-[0-9a-f]{{{HASH_DIGITS}}}")
        found = (name.fullmatch(p.stem) for p in Path(self.folder).glob(f"step*{FILE_SUFFIX}"))
        sizes = sorted({int(m[1]) for m in found if m} - {self.size})
        if sizes:
            log.warning(
                "checkpoints: %s has no files of %d ranks, and a new start ignores those of %s "
                "ranks; load_resized takes the states of another number of ranks",
                self.folder, self.size, sizes,
            )  # fmt: skip

    def _check_newest(self, step: int) -> None:
        newer = sorted({file.step for file in self._files() if file.step > step})
        if newer:
            raise ConfigError(
                f"checkpoints: step {step} of rank {self.rank} comes before steps {newer} in "
                f"{self.folder}; resume() continues from them, or use another folder for a new run"
            )

    def _remove_drafts(self) -> None:
        """Removes what crashes have left of this rank; before a save, which may need the space."""
        draft = re.compile(
            rf"step\d+-rank{self.rank}of{self.size}(-[0-9a-f]+)?{re.escape(DRAFT_SUFFIX)}"
        )
        for path in Path(self.folder).glob(f"*{DRAFT_SUFFIX}"):
            if draft.fullmatch(path.name):
                path.unlink()

    def _remove_old(self, saved: _File) -> None:
        """Removes all but the newest `keep` steps with one file each, and the marker of a begin."""
        files = [file for file in self._files() if file != saved]
        last = sorted({file.step for file in files} - {saved.step})[1 - self.keep :]
        for file in files:
            if file.step not in last:
                file.path.unlink()
        if self._begin_marker().exists():
            self._begin_marker().unlink()

    def _stem(self, step: int) -> str:
        return f"step{step:09d}-rank{self.rank}of{self.size}"

    def _files(self) -> list[_File]:
        """Returns all files with the name of a finished one of this rank, intact or not."""
        name = re.compile(
            rf"step(\d+)-rank{self.rank}of{self.size}"
            rf"-[0-9a-f]{{{HASH_DIGITS}}}{re.escape(FILE_SUFFIX)}"
        )
        paths = sorted(Path(self.folder).glob(f"step*{FILE_SUFFIX}"))
        return [_File(int(m[1]), path) for path in paths if (m := name.fullmatch(path.name))]


def _is_intact(path: Path) -> bool:
    return path.stem.endswith(hash_of(path))


def _new_folder(stem: Path) -> Path:
    """Makes a folder that did not exist, with the stem and a number as its name."""
    stem.parent.mkdir(exist_ok=True)
    for number in count(1):
        folder = stem.with_name(f"{stem.name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        sync_folder(stem.parent)
        return folder
    raise AssertionError("unreachable: count is infinite")


@contextmanager
def _disk_errors(effect: str) -> Iterator[None]:
    """Turns errors of the system into CheckpointError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(error.errno, f"checkpoints: {effect}: {reason}") from error


def _outcome_of(action: Callable[[], T]) -> T | Exception:
    """Returns an error instead of raising it: the other ranks must know of it first."""
    try:
        return action()
    except Exception as error:
        return error
