"""A torchft Manager as this folder uses it, and the checks of the one that it is given.

torchft itself is not imported: its Manager is an argument.
"""

from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Protocol

import torch.distributed as dist

from gradwire.errors import ConfigError, MissingExtra

OLDEST = "0.2"
"""The first version of torchft whose Manager hands over several states, each under a key."""

KEY = "gradwire"
"""The key of our state in what a Manager hands over; equal on all replicas."""


class ReplicaGroup(Protocol):
    """torchft's process group, which the Manager makes anew for each quorum."""

    _rank: int

    def size(self) -> int: ...

    def abort(self) -> None: ...

    def allreduce(self, tensors: list[Any], opts: Any) -> dist.Work: ...

    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any) -> dist.Work: ...

    def alltoall_base(
        self, output: Any, input: Any, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> dist.Work: ...

    def broadcast(self, tensors: list[Any], opts: Any) -> dist.Work: ...


class Manager(Protocol):
    """The part of torchft's Manager that is used here, with the attributes it has no method for."""

    _pg: ReplicaGroup
    _quorum_id: int
    _use_async_quorum: bool
    _load_state_dict_fns: dict[str, Any]
    _user_state_dicts: dict[str, Any]

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None: ...

    def start_quorum(self) -> None: ...

    def wait_quorum(self) -> None: ...

    def should_commit(self, timeout: timedelta | None = None) -> bool: ...

    def report_error(self, e: Exception) -> None: ...

    def errored(self) -> object | None: ...

    def is_participating(self) -> bool: ...

    def current_step(self) -> int: ...

    def shutdown(self, wait: bool = True) -> None: ...


_METHODS = (
    "register_state_dict_fn",
    "start_quorum",
    "wait_quorum",
    "should_commit",
    "report_error",
    "errored",
    "is_participating",
    "current_step",
    "shutdown",
)
_ATTRIBUTES = (
    "_pg",
    "_quorum_id",
    "_use_async_quorum",
    "_load_state_dict_fns",
    "_user_state_dicts",
)


def check_manager(method: str, manager: object) -> None:
    """Raises ConfigError unless this is a Manager of a supported torchft, without our state yet."""
    if not all(callable(getattr(manager, name, None)) for name in ("start_quorum", "shutdown")):
        if find_spec("torchft") is None:
            raise MissingExtra("gradwire.elastic", "torchft", "torchft")
        raise ConfigError(f"{method}: expected a torchft Manager, got {type(manager).__name__}")
    missing = [name for name in _METHODS if not callable(getattr(manager, name, None))]
    missing += [name for name in _ATTRIBUTES if not hasattr(manager, name)]
    if missing:
        raise ConfigError(
            f"{method}: needs torchft >= {OLDEST}, got {_installed()}, whose Manager has no "
            f"{', '.join(missing)}"
        )
    if KEY in getattr(manager, "_load_state_dict_fns", {}):
        raise ConfigError(
            f"{method}: this Manager is used by gradwire.elastic already; detach that, or make "
            "another Manager"
        )
    mode = getattr(manager, "_replica_world_size_mode", None)
    if getattr(mode, "name", "DYNAMIC") != "DYNAMIC":
        raise ConfigError(
            f"{method}: world_size_mode must be DYNAMIC, got {getattr(mode, 'name', mode)}: spares "
            "have no gradient, and so no residual"
        )


def _installed() -> str:
    """Returns the version of the installed torchft in words."""
    for name in ("torchft", "torchft-nightly"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "an unknown version"
