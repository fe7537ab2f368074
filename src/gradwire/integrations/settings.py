"""The settings that all integrations share: a method, and how its gradients are exchanged."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TypedDict

from gradwire.auto.auto import Auto, check_alone, find_auto
from gradwire.base import Memory
from gradwire.checks import check_flag, check_whole
from gradwire.control.base import Controller, find_controller
from gradwire.engine.engine import NanPolicy
from gradwire.errors import ConfigError
from gradwire.policies import MethodSpec


class Options(TypedDict, total=False):
    """Keyword arguments that `attach` and the other integrations accept; see `Settings`."""

    memory: Memory | str | None
    exchange: str
    seed: int
    nan_policy: NanPolicy
    check_every: int
    checksum: bool
    controller: Controller | str | None
    cuda_graphs: bool
    least_bytes: int | None
    chunk_bytes: int | None


@dataclass(frozen=True)
class Settings:
    """A compression method and the options of its exchange, for any integration.

    `attach(model, Settings("topk:ratio=0.01", checksum=True))` is the same as
    `attach(model, "topk:ratio=0.01", checksum=True)`.

    `compressor` is a spec string or an instance, or gives parameters methods by patterns of their
    names (docs/how-to/policies.md). `memory` None means the residual if the method
    needs error feedback, else none. `exchange` "auto" means the mean if messages can be summed,
    else gather, unless sharded is predicted to be much faster (`exchange/auto.py`). `seed` decides
    all random numbers. `nan_policy` is "propagate", "raise" or "ignore". Ranks compare their
    parameters every `check_every` backward passes, unless it is 0. `checksum` appends a CRC to
    every message that is not summed in transit. `controller` changes settings of the compressor
    during training: "autopilot", "gravac", "accordion" or "schedule", with their settings. With
    `cuda_graphs` a bucket's work on a GPU is captured as CUDA graphs where it is the same at every
    step. Buckets whose messages have less than `least_bytes` are sent with the next; None means,
    where a GPU's messages are staged through the host, 250,000, or a million for methods of several
    rounds (`powersgd`), since each message waits for the GPU; elsewhere 64,000 for methods of
    several rounds, else 0. Parameters of more than `chunk_bytes` are cut into chunks with messages
    of their own, unless it is 0; None means 25 MiB on a CPU, and 0 on a GPU, which encodes in a
    small part of the time that the wire takes.

    With "auto" or "auto:risk=low" as the compressor, method, memory and exchange are chosen from
    measurements.
    """

    compressor: MethodSpec | Auto
    memory: Memory | str | None = None
    exchange: str = "auto"
    seed: int = 0
    nan_policy: NanPolicy = "propagate"
    check_every: int = 0
    checksum: bool = False
    controller: Controller | str | None = None
    cuda_graphs: bool = True
    least_bytes: int | None = None
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        check_whole("settings", "check_every", self.check_every, 0)
        check_flag("settings", "checksum", self.checksum)
        check_flag("settings", "cuda_graphs", self.cuda_graphs)
        if self.least_bytes is not None:
            check_whole("settings", "least_bytes", self.least_bytes, 0)
        if self.chunk_bytes is not None:
            check_whole("settings", "chunk_bytes", self.chunk_bytes, 0)
        find_controller(self.controller)
        if self.auto() is not None:
            check_alone(self.memory, self.exchange, self.controller)

    def auto(self) -> Auto | None:
        """Returns the configuration of the automatic mode, or None if a method was given."""
        return find_auto(self.compressor)

    def first_method(self) -> MethodSpec:
        """Returns the method of the first plan; the automatic mode begins without compression."""
        return "none" if isinstance(self.compressor, Auto) or self.auto() else self.compressor

    def refuse_auto(self, integration: str) -> None:
        """Raises ConfigError if the method is the automatic mode, which the integration lacks."""
        if self.auto() is not None:
            raise ConfigError(f"{integration}: auto is not supported here, give a method")

    def make_controller(self) -> Controller | None:
        """Returns the controller that `controller` names or is."""
        return find_controller(self.controller)

    def refuse(self, integration: str, *names: str) -> None:
        """Raises ConfigError if one of these settings, which the integration lacks, is set."""
        defaults = {f.name: f.default for f in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ConfigError(f"{integration}: {name} is not supported here, leave it out")


def settings_of(
    compressor: MethodSpec | Auto | Settings, options: Mapping[str, object]
) -> Settings:
    """Returns settings given as such, or as a compressor and keyword arguments."""
    if isinstance(compressor, Settings):
        if options:
            raise ConfigError(f"settings: put {sorted(options)} into the Settings, not beside them")
        return compressor
    known = [f.name for f in fields(Settings)][1:]
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
            raise ConfigError(f"settings: no option named {name!r}{hint}")
    return Settings(compressor, **options)  # type: ignore[arg-type]
