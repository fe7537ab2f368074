"""How much of a machine a worker has for itself."""

import os
import socket
import sys
from collections.abc import Sequence

import torch

from laconic.comm.base import Call, Comm

MOST_NAME_BYTES = 4096
"""No host has a longer name."""


def usable_cores() -> int:
    """Cores this process may run on, which in a container are fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_each(workers: int, device: torch.device) -> float:
    """Cores for each thread of a worker that computes, where `workers` share this machine."""
    if device.type != "cpu":
        return float("inf")
    return usable_cores() / workers / torch.get_num_threads()


def workers_here(comm: Comm, device: torch.device) -> int:
    """How many ranks run on this machine; called on all of them."""
    name = torch.frombuffer(bytearray(socket.gethostname().encode()), dtype=torch.uint8)
    call = Call("gather", [name.to(device)], limits=[MOST_NAME_BYTES] * comm.size)
    told = [bytes(heard.tolist()) for heard in comm.answer(call)]
    return told.count(bytes(name.tolist()))


def all_of_ranks(comm: Comm, device: torch.device, numbers: Sequence[float]) -> list[list[float]]:
    """What each rank has measured, rank by rank; called on all of them with as many numbers."""
    own = torch.tensor(numbers, dtype=torch.float64, device=device).view(torch.uint8)
    heard = comm.answer(Call("gather", [own], [own.numel()] * comm.size))
    return [row.clone().view(torch.float64).tolist() for row in heard]


def mean_of_ranks(comm: Comm, device: torch.device, numbers: Sequence[float]) -> list[float]:
    """What all ranks have measured, as one for all; called on all of them."""
    own = torch.tensor(numbers, dtype=torch.float64, device=device)
    [mean] = comm.answer(Call("mean", [own]))
    agreed: list[float] = mean.tolist()
    return agreed
