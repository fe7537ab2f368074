"""What the mounts inside other people's trainers share: what is asked for, and what is refused."""

from importlib.metadata import version
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.torch_version import TorchVersion

from laconic.contract import Compressor
from laconic.control.find import find_controller
from laconic.errors import ConfigError
from laconic.mount.ddp import Link, attach
from laconic.spec import compressor_of

VERSIONS = {"lightning": ("2.5", "3"), "accelerate": ("1.0", "2"), "transformers": ("5.0", "6")}
"""From which version on a package has the places where we mount, and where nobody has looked."""


def check_version(package: str, found: str | None = None) -> None:
    """Raises ConfigError where the package is older or newer than what we know."""
    found = found or version(package)
    oldest, unknown = VERSIONS[package]
    if TorchVersion(found) < oldest or TorchVersion(found) >= unknown:
        raise ConfigError(
            f"laconic.mount.{package} needs {package} >= {oldest} and < {unknown}, got {found}"
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
