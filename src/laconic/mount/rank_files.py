"""What a mount remembers, in a file a rank, inside the checkpoint of whoever trains.

Trainers save what rank 0 has, and give it to all; but residuals are each rank's own.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from laconic.checkpoint_files import Checkpoints
from laconic.comm.base import Call
from laconic.errors import ConfigError
from laconic.mount.handle import Handle

log = logging.getLogger("laconic")

FOLDER = "laconic"
"""Where our files are in a checkpoint that is a folder."""

_STEP = 0
"""Every checkpoint has a folder of its own, so that the step of our only file says nothing."""


def save_files(handle: Handle, folder: Path, mark: Sequence[int] = ()) -> None:
    """Writes this rank's state; called on all ranks, whose files may meet in one folder.

    A `mark` is something by which the checkpoint is known again.
    """
    _files(handle, folder).save(_STEP, {"state": handle.state_dict(), "mark": [*mark]})


def load_files(handle: Handle, folder: Path, mark: Sequence[int] = (), *, missing_ok: bool) -> None:
    """Goes on exactly where each rank was saved; called on all ranks, which all do or all raise.

    With `missing_ok` a folder without any file is a new start, with a line in the log.
    """
    files = _files(handle, folder)
    missing = _missing(handle, bool(files.steps()))
    if missing_ok and len(missing) == files.size:
        log.warning("%s: no rank has a state there, so residuals begin at zero", folder)
        return
    if missing:
        there = sorted(path.name for path in folder.glob("*.pt"))
        raise ConfigError(
            f"{folder}: ranks {missing} of {files.size} have no sound file there, only {there}; if "
            "it was saved without Laconic, missing_ok=True starts with empty residuals"
        )
    found = files.load(_STEP)
    if odd := _missing(handle, found["mark"] == [*mark]):
        raise ConfigError(
            f"{folder}: saved with other parameters than the model has now, on ranks {odd}"
        )
    state = found["state"]
    assert isinstance(state, dict)
    handle.load_state_dict(state)


def _files(handle: Handle, folder: Path) -> Checkpoints:
    return Checkpoints(folder, handle._comm.rank, handle._comm.size)


def _missing(handle: Handle, there: bool) -> list[int]:
    """The ranks that have nothing, as all ranks are told."""
    own = torch.tensor([there], device=handle._device).view(torch.uint8)
    told = handle._comm.answer(Call("gather", [own], [1] * handle._comm.size))
    return [rank for rank, has in enumerate(torch.cat(told).tolist()) if not has]
