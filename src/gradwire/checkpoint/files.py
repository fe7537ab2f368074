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
_MOST_STEPS = 1 << 20


class Resumed(NamedTuple):
    """Where to go on: how many steps are done, and this rank's state after them."""

    step: int
    state: dict[str, object]


class _File(NamedTuple):
    step: int
    path: Path


@dataclass(frozen=True)
class Checkpoints:
    """The files of one rank, in a folder that ranks may share.

    `keep` files are left of them. With 2 or more, ranks that save at the same steps always have one
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

        What it returns survives a crash of the machine; if it is cut short, the older files do.
        """
        check_whole("checkpoints", "step", step, 0)
        if not isinstance(state, Mapping):
            kind = type(state).__name__
            raise ConfigError(f"checkpoints: state must be a mapping, got {kind}")
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{self._stem(step)}.draft"
        with draft.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"{self._stem(step)}-{_hash_of(draft)}.pt"
        draft.replace(path)
        _sync(folder)
        self._tidy(_File(step, path))
        return path

    def steps(self) -> list[int]:
        """The steps of which this rank has a sound file, in order; reads all of its files."""
        return sorted({step for step, path in self._files() if _sound(path)})

    def load(self, step: int, device: torch.device | str = "cpu") -> dict[str, object]:
        """The state after `step` steps; raises ConfigError where no sound file has it."""
        for found, path in self._files():
            if found == step and _sound(path):
                state: dict[str, object] = torch.load(path, map_location=device, weights_only=True)
                return state
        raise ConfigError(
            f"checkpoints: rank {self.rank} has no sound file of step {step} in {self.folder}"
        )

    def resume(
        self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> Resumed | None:
        """The newest state that all ranks have, or None; called on all ranks of the group.

        Removes what this rank has of later steps: they will be done again, and what one rank saved
        of them before must never meet what another saves then.
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
                f"checkpoints: of rank {self.rank} of {self.size}, "
                f"but resumed by rank {comm.rank} of {comm.size}"
            )
        own = [byte for step in self.steps() for byte in step.to_bytes(_STEP_BYTES, "big")]
        told = torch.tensor(own, dtype=torch.uint8, device="cuda" if comm.on_device else "cpu")
        limits = [_MOST_STEPS * _STEP_BYTES] * comm.size
        heard = comm.answer(Collective("gather", [told], limits=limits))
        return max(set.intersection(*(_steps(bytes(row.tolist())) for row in heard)), default=None)

    def _tidy(self, saved: _File) -> None:
        """Leaves the newest files, one of each step, and no unfinished ones."""
        last = sorted({file.step for file in self._files()})[-self.keep :]
        for file in self._files():
            if file.step not in last or (file.step == saved.step and file != saved):
                file.path.unlink()
        for draft in Path(self.folder).glob(f"step*-rank{self.rank}of{self.size}.draft"):
            draft.unlink()

    def _stem(self, step: int) -> str:
        return f"step{step:09d}-rank{self.rank}of{self.size}"

    def _files(self) -> list[_File]:
        """All that has the name of a finished file of this rank, sound or not."""
        name = re.compile(rf"step(\d+)-rank{self.rank}of{self.size}-[0-9a-f]{{{_HASH_DIGITS}}}\.pt")
        paths = sorted(Path(self.folder).glob("step*.pt"))
        return [_File(int(m[1]), path) for path in paths if (m := name.fullmatch(path.name))]


def _steps(told: bytes) -> set[int]:
    starts = range(0, len(told), _STEP_BYTES)
    return {int.from_bytes(told[i : i + _STEP_BYTES], "big") for i in starts}


def _sound(path: Path) -> bool:
    return path.stem.endswith(_hash_of(path))


def _hash_of(path: Path) -> str:
    content = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            content.update(block)
    return content.hexdigest()[:_HASH_DIGITS]


def _sync(folder: Path) -> None:
    """Puts the names in a folder on disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
