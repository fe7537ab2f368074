"""Atomic checkpoint files of a rank, and the newest step for which all ranks have one.

A file's name ends in a hash of its content, and it gets that name once all of it is on disk.
It is a plain file of `torch.save`, which `torch.load` reads without this package.
"""

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradwire.checks import check_whole
from gradwire.comm.base import Collective
from gradwire.comm.groups import check_member
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.errors import ConfigError

log = logging.getLogger("gradwire")

_HASH_DIGITS = 16
_READ_BYTES = 1 << 20
_STEP_BYTES = 8
_MAX_STEPS = 1 << 20


class Resumed(NamedTuple):
    """The number of steps that are done, and this rank's state after them."""

    step: int
    state: dict[str, object]


class _File(NamedTuple):
    step: int
    path: Path


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoint files of one rank, in a folder that ranks may share.

    The newest `keep` files stay. With 2 or more, ranks that save at the same steps always have one
    in common: when the first of them saves a step, all have saved the one before.
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

        The returned file survives a crash of the machine; older files survive a crash in here.
        """
        check_whole("checkpoints", "step", step, 0)
        if not isinstance(state, Mapping):
            kind = type(state).__name__
            raise ConfigError(f"checkpoints: state must be a mapping, got {kind}")
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{self._stem(step)}.tmp"
        with temporary.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"{self._stem(step)}-{_hash_of(temporary)}.pt"
        temporary.replace(path)
        _sync_folder(folder)
        self._remove_old(_File(step, path))
        return path

    def steps(self) -> list[int]:
        """Returns the steps of which this rank has an intact file, sorted; reads all its files."""
        return sorted({step for step, path in self._files() if _is_intact(path)})

    def load(self, step: int, device: torch.device | str = "cpu") -> dict[str, object]:
        """Returns the state after `step` steps; raises ConfigError if no intact file has it."""
        for found, path in self._files():
            if found == step and _is_intact(path):
                state: dict[str, object] = torch.load(path, map_location=device, weights_only=True)
                return state
        raise ConfigError(
            f"checkpoints: rank {self.rank} has no intact file of step {step} in {self.folder}"
        )

    def resume(
        self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> Resumed | None:
        """Returns the newest state that all ranks have, or None; called on all ranks of the group.

        Removes this rank's files of later steps: these steps will be repeated, and a file of the
        first run must never be combined with one of the second.
        """
        if group is None:
            group = dist.distributed_c10d._get_default_group()
        check_member(group)
        step = self._newest_common(group)
        for found, path in self._files():
            if step is None or found > step:
                log.warning("checkpoints: not all ranks have %s, so it is removed", path.name)
                path.unlink()
        return None if step is None else Resumed(step, self.load(step, device))

    def _newest_common(self, group: dist.ProcessGroup) -> int | None:
        comm = ProcessGroupComm(group)
        if (comm.rank, comm.size) != (self.rank, self.size):
            raise ConfigError(
                f"checkpoints: belong to rank {self.rank} of {self.size}, "
                f"but resumed by rank {comm.rank} of {comm.size}"
            )
        own = [byte for step in self.steps() for byte in step.to_bytes(_STEP_BYTES, "big")]
        steps = torch.tensor(own, dtype=torch.uint8, device="cuda" if comm.on_device else "cpu")
        limits = [_MAX_STEPS * _STEP_BYTES] * comm.size
        gathered = comm.run(Collective("gather", [steps], limits=limits))
        common = set.intersection(*(_steps(bytes(row.tolist())) for row in gathered))
        return max(common, default=None)

    def _remove_old(self, saved: _File) -> None:
        """Removes unfinished files, and all but the newest `keep` steps with one file each."""
        last = sorted({file.step for file in self._files()})[-self.keep :]
        for file in self._files():
            if file.step not in last or (file.step == saved.step and file != saved):
                file.path.unlink()
        for temporary in Path(self.folder).glob(f"step*-rank{self.rank}of{self.size}.tmp"):
            temporary.unlink()

    def _stem(self, step: int) -> str:
        return f"step{step:09d}-rank{self.rank}of{self.size}"

    def _files(self) -> list[_File]:
        """Returns all files with the name of a finished one of this rank, intact or not."""
        name = re.compile(rf"step(\d+)-rank{self.rank}of{self.size}-[0-9a-f]{{{_HASH_DIGITS}}}\.pt")
        paths = sorted(Path(self.folder).glob("step*.pt"))
        return [_File(int(m[1]), path) for path in paths if (m := name.fullmatch(path.name))]


def _steps(data: bytes) -> set[int]:
    starts = range(0, len(data), _STEP_BYTES)
    return {int.from_bytes(data[i : i + _STEP_BYTES], "big") for i in starts}


def _is_intact(path: Path) -> bool:
    return path.stem.endswith(_hash_of(path))


def _hash_of(path: Path) -> str:
    content = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            content.update(block)
    return content.hexdigest()[:_HASH_DIGITS]


def _sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
