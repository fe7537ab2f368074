"""Ranks agree on the newest step for which all of them have an intact file."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from gradwire.comm.base import Collective
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.errors import CheckpointError, ConfigError, WireError

T = TypeVar("T")

NoCommonStep: TypeAlias = Literal["raise", "start_anew"]
"""Decides what happens if some ranks have files, but no step is intact on all."""

_MAX_BYTES = 1 << 20
"""Upper bound of a message."""

_MAX_STEPS = 4096
"""Number of its newest steps that a rank sends."""

_MAX_TEXT = 2000
"""Most characters of an error that other ranks show."""

_SHOWN_STEPS = 10


class Inventory(NamedTuple):
    """The files of one rank; `misuse` and `failure` are texts of errors, and mostly empty."""

    steps: list[int]
    damaged: int
    never_saved: bool
    """Whether a run has begun in this folder, and this rank has not finished a save since."""
    no_common_step: str
    misuse: str
    failure: str


def common_step(comm: ProcessGroupComm, own: Inventory) -> int | None:
    """Returns the newest step that all ranks have, or None for a new start.

    All ranks return the same or raise alike.
    """
    own = own._replace(steps=own.steps[-_MAX_STEPS:])
    return decide(_gather(comm, own._asdict(), _inventory))


def decide(ranks: Sequence[Inventory]) -> int | None:
    """Returns the newest step of all ranks, or None; raises with a table of ranks otherwise."""
    if misuses := [f"  rank {r}: {one.misuse}" for r, one in enumerate(ranks) if one.misuse]:
        raise ConfigError("\n".join(["checkpoints: used by the wrong ranks:", *misuses]))
    _raise_failures([one.failure for one in ranks])
    if len({one.no_common_step for one in ranks}) > 1:
        wanted = "; ".join(_by_value([one.no_common_step for one in ranks], "{1} on rank {0}"))
        raise ConfigError(f"checkpoints: no_common_step must be the same on all ranks: {wanted}")
    common = set.intersection(*(set(one.steps) for one in ranks))
    if common:
        return max(common)
    if not any(one.steps or one.damaged for one in ranks) or _first_save_was_interrupted(ranks):
        return None
    if ranks[0].no_common_step == "start_anew":
        return None
    table = _by_value([_text(one) for one in ranks], "  rank {0}: {1}")
    raise ConfigError(
        "\n".join(
            [
                "checkpoints: ranks have files, but no step is intact on all of them:",
                *table,
                "Make the missing files available (is a disk not mounted?), or start at step 0 "
                'with resume(no_common_step="start_anew"), which moves all files aside.',
            ]
        )
    )


def _first_save_was_interrupted(ranks: Sequence[Inventory]) -> bool:
    """Returns whether some ranks have one and the same step, and the others never saved any."""
    steps = {step for one in ranks for step in one.steps}
    return len(steps) == 1 and all((o.steps or o.never_saved) and not o.damaged for o in ranks)


def check_all_succeeded(comm: ProcessGroupComm, own: Exception | None) -> None:
    """Raises CheckpointError on all ranks if any has an error; returns when all ranks are here."""
    text = "" if own is None else error_text(own)
    try:
        _raise_failures(_gather(comm, {"failure": text}, lambda found: _string(found, "failure")))
    except CheckpointError as error:
        raise error from own


def error_text(error: Exception) -> str:
    """Returns an error as other ranks show it."""
    return f"{type(error).__name__}: {error}"[:_MAX_TEXT]


def _raise_failures(failures: Sequence[str]) -> None:
    lines = [f"  rank {rank}: {text}" for rank, text in enumerate(failures) if text]
    if lines:
        raise CheckpointError("\n".join(["checkpoints: cannot be resumed from:", *lines]))


def _text(one: Inventory) -> str:
    damaged = f"{one.damaged} damaged file{'s' * (one.damaged > 1)}" if one.damaged else ""
    if not one.steps:
        return f"no intact file, {damaged}" if damaged else "no files"
    more = "..., " if len(one.steps) > _SHOWN_STEPS else ""
    steps = f"steps [{more}{', '.join(map(str, one.steps[-_SHOWN_STEPS:]))}]"
    return f"{steps}, {damaged}" if damaged else steps


def _by_value(values: Sequence[str], line: str) -> list[str]:
    """Returns one line for every value, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return [line.format(numbers, value) for value, numbers in ranks.items()]


def _gather(
    comm: ProcessGroupComm, own: Mapping[str, object], read: Callable[[Mapping[str, object]], T]
) -> list[T]:
    """Returns what `read` makes of each rank's message; raises WireError if one is malformed."""
    content = bytearray(json.dumps(own).encode())
    device = "cuda" if comm.on_device else "cpu"
    buffer = torch.frombuffer(content, dtype=torch.uint8).to(device)
    gathered = comm.run(Collective("gather", [buffer], limits=[_MAX_BYTES] * comm.size))
    return [_read(rank, row, read) for rank, row in enumerate(gathered)]


def _read(rank: int, row: Tensor, read: Callable[[Mapping[str, object]], T]) -> T:
    try:
        found = json.loads(row.cpu().numpy().tobytes())
        if not isinstance(found, dict):
            raise ValueError(f"expected an object, got a {type(found).__name__}")
        return read(found)
    except (ValueError, RecursionError) as error:
        raise WireError(f"rank {rank} sent an inventory that cannot be read: {error}") from error


def _inventory(found: Mapping[str, object]) -> Inventory:
    steps, damaged, never_saved = (found.get(key) for key in Inventory._fields[:3])
    if not isinstance(steps, list) or not all(type(step) is int for step in steps):
        raise ValueError("steps are no list of whole numbers")
    if type(damaged) is not int:
        raise ValueError("the number of damaged files is no whole number")
    if not isinstance(never_saved, bool):
        raise ValueError("never_saved is neither true nor false")
    texts = [_string(found, key) for key in ("no_common_step", "misuse", "failure")]
    return Inventory(steps, damaged, never_saved, *texts)


def _string(found: Mapping[str, object], key: str) -> str:
    value = found.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is no string")
    return value
