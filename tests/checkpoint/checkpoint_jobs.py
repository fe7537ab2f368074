"""Jobs of the ranks in tests of checkpoint files and gathered states."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import Checkpoints, ConfigError, WireError
from gradwire.checkpoint import gather
from gradwire.checkpoint.gather import gather_states
from gradwire.errors import GradwireError


class Outcome(NamedTuple):
    """The result of `resume` on a rank, and the steps of its files afterwards, by folder."""

    step: int | None
    error: str
    message: str
    here: list[int]
    aside: list[int]


def resume_job(folder: str, saved: Mapping[int, str], *attempts: Mapping[str, Any]) -> Outcome:
    """Saves the steps of this rank, then resumes several times; returns the last outcome.

    `saved` has "10 20 30x" for steps 10, 20 and 30, whose file is then damaged.
    """
    rank = dist.get_rank()
    files = Checkpoints(folder, rank, dist.get_world_size(), keep=5)
    for word in saved.get(rank, "").split():
        path = files.save(int(word.rstrip("x")), {"step": int(word.rstrip("x"))})
        if word.endswith("x"):
            path.write_bytes(path.read_bytes()[:-1])
    outcome = Outcome(None, "", "", [], [])
    for attempt in attempts:
        outcome = _resume(files, **attempt)
    return outcome


def _resume(
    files: Checkpoints, broken: tuple[int, str] = (-1, ""), by_rank: Any = None, **options: Any
) -> Outcome:
    """Resumes, while a method of Path fails on one rank: `broken` has both."""
    rank, step, error = files.rank, None, ""
    method = broken[1] if rank == broken[0] else ""
    original = getattr(Path, method, None)
    message = ""
    if by_rank is not None:
        options = by_rank[rank]
    if method:
        setattr(Path, method, _fail)
    try:
        found = files.resume(**options)
        step = None if found is None else found.step
        assert found is None or found.state["step"] == step
    except GradwireError as failure:
        error, message = type(failure).__name__, str(failure)
    finally:
        if method:
            setattr(Path, method, original)
    return Outcome(step, error, message, _steps(files, "*.pt"), _steps(files, "superseded/*/*.pt"))


def _fail(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


def _steps(files: Checkpoints, pattern: str) -> list[int]:
    paths = Path(files.folder).glob(pattern)
    mine = f"-rank{files.rank}of{files.size}-"
    return sorted(int(path.name[4:13]) for path in paths if mine in path.name)


def first_save_job(folder: str, saved: Mapping[int, str], lost: int | None) -> list[Outcome]:
    """Starts anew, saves the steps of this rank, loses the files of one rank, and resumes twice."""
    rank = dist.get_rank()
    first = resume_job(folder, {}, {})
    assert (first.step, first.error) == (None, "")
    resume_job(folder, saved)
    if rank == lost:
        for path in Path(folder).glob(f"*-rank{rank}of4-*.pt"):
            path.unlink()
    dist.barrier()
    return [resume_job(folder, {}, {}), resume_job(folder, {}, {})]


def wrong_rank_job(folder: str) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        Checkpoints(folder, 0 if rank == 2 else rank, size).resume()
    except ConfigError as error:
        return str(error)
    return ""


def state_of(rank: int) -> dict[str, Any]:
    """Returns a state with every kind of value; tensors are larger on later ranks."""
    return {
        f"rank{rank}": {
            "lanes": {"weight": {"residual": torch.arange(100.0 + rank), "step": rank}},
            "half": torch.full((3, 2), 0.5, dtype=torch.bfloat16),
            "flags": torch.tensor([True, False]),
            "strided": torch.arange(6).view(2, 3).t(),
            "none": torch.zeros(0, 4),
            "scalar": torch.tensor(rank),
            "pair": (1, [2.5, None, True, "text"], float("inf")),
            3: {},
        }
    }


def gather_job(piece_bytes: int) -> dict[str, Any]:
    gather.PIECE_BYTES = piece_bytes
    return gather_states(state_of(dist.get_rank()), torch.device("cpu"))


def hostile_job(length: int, content: bytes) -> tuple[str, str]:
    """Rank 1 announces a length and sends other bytes than a state; rank 0 gathers."""
    rank = dist.get_rank()
    if rank == 1:
        dist.send(torch.tensor([length]), 0)
        if content:
            dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), 0)
    if rank != 0:
        return "", ""
    try:
        gather_states(state_of(0), torch.device("cpu"))
    except WireError as error:
        return type(error).__name__, str(error)
    return "", "accepted"


def tensor_of(state: Any, *path: str) -> Tensor:
    for key in path:
        state = state[key]
    assert isinstance(state, Tensor)
    return state
