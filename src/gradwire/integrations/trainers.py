"""Shared by the trainer integrations: version checks, deferred attach, and one state file per rank.

Trainers save the state of rank 0 and load it on all ranks, but residuals differ from rank to rank,
so every rank writes a file of its own into the trainer's checkpoint.
"""

import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.torch_version import TorchVersion

from gradwire.checkpoint.files import Checkpoints
from gradwire.comm.base import Collective
from gradwire.errors import ConfigError
from gradwire.integrations.ddp import Link, attach
from gradwire.integrations.fsdp import Shards, attach_fsdp
from gradwire.integrations.fsdp_private import is_sharded
from gradwire.integrations.handle import Handle
from gradwire.integrations.settings import Options, Settings, settings_of
from gradwire.policies import MethodSpec, check_method

VERSIONS = {"lightning": ("2.5", "3"), "accelerate": ("1.0", "2"), "transformers": ("5.0", "6")}
"""Versions of a package that are supported: from the first one on, below the second one."""


def check_version(package: str, found: str | None = None) -> None:
    """Raises ConfigError if the package is older or newer than the supported versions."""
    found = found or version(package)
    oldest, unknown = VERSIONS[package]
    if TorchVersion(found) < oldest or TorchVersion(found) >= unknown:
        raise ConfigError(
            f"gradwire.integrations.{package} needs {package} >= {oldest} and < {unknown}, "
            f"got {found}"
        )


DDP_OPTIONS = ("process_group", "scaler", "optimizer")
"""Options of `attach` that `attach_fsdp` has not."""


class AttachRequest(NamedTuple):
    """Arguments of `attach` or `attach_fsdp`, called once the trainer has wrapped its model."""

    requester: str
    compressor: MethodSpec | Settings
    options: dict[str, Any]

    def attach(self, model: nn.Module, scaler: torch.amp.GradScaler | None) -> Link:
        """Attaches to the trainer's model; raises ConfigError if that is not a DDP model."""
        # torch.compile may have wrapped the wrapper.
        inner = getattr(model, "_orig_mod", model)
        if not isinstance(inner, DDP) and is_sharded(inner):
            raise ConfigError(
                f"{self.requester}: the model went through fully_shard (FSDP2), which has no "
                "DistributedDataParallel; leave this out, and call gradwire.attach_fsdp(model, "
                "...) when training starts"
            )
        if isinstance(inner, FullyShardedDataParallel):
            raise ConfigError(
                f"{self.requester}: the model is in FullyShardedDataParallel (FSDP1), whose hooks "
                "cannot compress; shard it by fully_shard (FSDP2)"
            )
        if not isinstance(inner, DDP):
            raise ConfigError(
                f"{self.requester}: the trainer must wrap its model in DistributedDataParallel, "
                f"got {type(inner).__name__}; start several processes, and choose data parallelism"
            )
        if "weights" in self.options:
            raise ConfigError(
                f"{self.requester}: weights= is for models under FSDP2; DDP sends no weights"
            )
        return attach(inner, self.compressor, **{"scaler": scaler, **self.options})

    def attach_any(self, model: nn.Module, scaler: torch.amp.GradScaler | None) -> Link | Shards:
        """Attaches to the trainer's DDP or FSDP2 model; raises ConfigError if it is neither."""
        inner = getattr(model, "_orig_mod", model)
        if isinstance(inner, DDP) or not is_sharded(inner):
            return self.attach(model, scaler)
        if scaler is not None:
            raise ConfigError(
                f"{self.requester}: a GradScaler under FSDP2 is not supported; use bf16, or call "
                "gradwire.attach_fsdp and its loss_scale_changed by hand"
            )
        if of_ddp := sorted(self.options.keys() & set(DDP_OPTIONS)):
            raise ConfigError(f"{self.requester}: options {of_ddp} are for DDP, not for FSDP2")
        shards = attach_fsdp(inner, self.compressor, **self.options)
        if shards._comm.size != dist.get_world_size():
            shards.detach()
            raise ConfigError(
                f"{self.requester}: the model is sharded over {shards._comm.size} of "
                f"{dist.get_world_size()} ranks; its checkpoints hold one state a rank of one "
                "group, so call gradwire.attach_fsdp(model, ...) and save its state by hand"
            )
        return shards


def attach_request(
    requester: str, compressor: MethodSpec | Settings, options: dict[str, Any]
) -> AttachRequest:
    """Makes a request; raises ConfigError for what is known to be wrong without a model."""
    of_settings = [*get_type_hints(Options)]
    known = [*of_settings, *DDP_OPTIONS, "weights"]
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise ConfigError(f"{requester}: unknown options {unknown}, expected some of {known}")
    settings = settings_of(compressor, {k: v for k, v in options.items() if k in of_settings})
    check_method(settings.first_method())
    return AttachRequest(requester, compressor, options)


log = logging.getLogger("gradwire")

FOLDER = "gradwire"
"""The folder of our files inside a checkpoint."""

_STEP = 0
"""The step in the file names, always 0, since every checkpoint has a folder of its own."""


def save_rank_file(handle: Handle, folder: Path, fingerprint: Sequence[int] = ()) -> None:
    """Writes this rank's state; called on all ranks, which may share a folder.

    The `fingerprint` identifies the checkpoint's parameters.
    """
    _files(handle, folder).save(
        _STEP, {"state": handle.state_dict(), "fingerprint": [*fingerprint]}
    )


def load_rank_file(
    handle: Handle, folder: Path, fingerprint: Sequence[int] = (), *, missing_ok: bool
) -> None:
    """Restores each rank's state exactly; called on all ranks, which all succeed or all raise.

    With `missing_ok` a folder without any file is a new start, with a line in the log.
    """
    files = _files(handle, folder)
    missing = _ranks_without(handle, bool(files.steps()))
    if missing_ok and len(missing) == files.size:
        log.warning("%s: no rank has a state there, so residuals begin at zero", folder)
        return
    if missing:
        present = sorted(path.name for path in folder.glob("*.pt"))
        raise ConfigError(
            f"{folder}: ranks {missing} of {files.size} have no intact file there, only {present}; "
            "if it was saved without Gradwire, missing_ok=True starts with empty residuals"
        )
    found = files.load(_STEP)
    if odd := _ranks_without(handle, found["fingerprint"] == [*fingerprint]):
        raise ConfigError(
            f"{folder}: saved with other parameters than the model has now, on ranks {odd}"
        )
    state = found["state"]
    assert isinstance(state, dict)
    handle.load_state_dict(state)


def _files(handle: Handle, folder: Path) -> Checkpoints:
    return Checkpoints(folder, handle._comm.rank, handle._comm.size)


def _ranks_without(handle: Handle, exists: bool) -> list[int]:
    """Returns, on all ranks, the ranks on which `exists` is false."""
    own = torch.tensor([exists], device=handle._device).view(torch.uint8)
    gathered = handle._check_comm.run(Collective("gather", [own], [1] * handle._comm.size))
    return [rank for rank, has in enumerate(torch.cat(gathered).tolist()) if not has]
