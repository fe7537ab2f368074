"""Shared by the trainer integrations: version checks, deferred attach, and one state file per rank.

Trainers save the state of rank 0 and load it on all ranks, but residuals differ from rank to rank,
so every rank writes a file of its own into the trainer's checkpoint.
"""

import logging
from collections.abc import Sequence
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.torch_version import TorchVersion

from gradwire.base import Compressor
from gradwire.checkpoint.files import Checkpoints
from gradwire.comm.base import Collective
from gradwire.control.base import find_controller
from gradwire.errors import ConfigError
from gradwire.integrations.ddp import Link, attach
from gradwire.integrations.handle import Handle
from gradwire.spec import compressor_of

VERSIONS = {"lightning": ("2.5", "3"), "accelerate": ("1.0", "2"), "transformers": ("5.0", "6")}
"""From which version on a package has the places where we mount, and where nobody has looked."""


def check_version(package: str, found: str | None = None) -> None:
    """Raises ConfigError where the package is older or newer than what we know."""
    found = found or version(package)
    oldest, unknown = VERSIONS[package]
    if TorchVersion(found) < oldest or TorchVersion(found) >= unknown:
        raise ConfigError(
            f"gradwire.integrations.{package} needs {package} >= {oldest} and < {unknown}, got {found}"
        )


class Asked(NamedTuple):
    """A link to be made as soon as the trainer has wrapped its model."""

    who: str
    compressor: Compressor | str
    options: dict[str, Any]

    def attach(self, model: nn.Module, scaler: torch.amp.GradScaler | None) -> Link:
        """Compresses the gradients of what the trainer trains, if that is a DDP model."""
        # torch.compile may have wrapped the wrapper.
        inner = getattr(model, "_orig_mod", model)
        if not isinstance(inner, DDP):
            raise ConfigError(
                f"{self.who}: the trainer must wrap its model in DistributedDataParallel, got "
                f"{type(inner).__name__}; start several processes, and choose data parallelism"
            )
        return attach(inner, self.compressor, **{"scaler": scaler, **self.options})


def ask(who: str, compressor: Compressor | str, options: dict[str, Any]) -> Asked:
    """Refuses at once what can be known to be wrong before there is a model."""
    compressor_of(compressor)
    known = [*signature(attach).parameters][2:]
    strange = sorted(options.keys() - set(known))
    if strange:
        raise ConfigError(f"{who}: unknown options {strange}, expected some of {known}")
    find_controller(options.get("controller"))
    return Asked(who, compressor, options)


log = logging.getLogger("gradwire")

FOLDER = "gradwire"
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
            "it was saved without Gradwire, missing_ok=True starts with empty residuals"
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
    told = handle._comm.answer(Collective("gather", [own], [1] * handle._comm.size))
    return [rank for rank, has in enumerate(torch.cat(told).tolist()) if not has]
