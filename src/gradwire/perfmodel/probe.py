"""Measures the links between ranks with timed collectives, and the CPU cores of each worker."""

import os
import socket
import sys
from collections.abc import Sequence
from statistics import fmean, median
from time import perf_counter, process_time
from typing import NamedTuple

import torch

from gradwire.comm.base import Collective, Comm
from gradwire.comm.cost_model import KINDS, Kind, LinkModel, Network, fit, way
from gradwire.errors import ConfigError
from gradwire.perfmodel.timers import Cold

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
    call = Collective("gather", [name.to(device)], limits=[MOST_NAME_BYTES] * comm.size)
    told = [bytes(heard.tolist()) for heard in comm.answer(call)]
    return told.count(bytes(name.tolist()))


def all_of_ranks(comm: Comm, device: torch.device, numbers: Sequence[float]) -> list[list[float]]:
    """What each rank has measured, rank by rank; called on all of them with as many numbers."""
    own = torch.tensor(numbers, dtype=torch.float64, device=device).view(torch.uint8)
    heard = comm.answer(Collective("gather", [own], [own.numel()] * comm.size))
    return [row.clone().view(torch.float64).tolist() for row in heard]


def mean_of_ranks(comm: Comm, device: torch.device, numbers: Sequence[float]) -> list[float]:
    """What all ranks have measured, as one for all; called on all of them."""
    own = torch.tensor(numbers, dtype=torch.float64, device=device)
    [mean] = comm.answer(Collective("mean", [own]))
    agreed: list[float] = mean.tolist()
    return agreed


SHORT_BYTES = 4 << 10
LONGEST_BYTES = 16 << 20
_LONG_S = 0.1
"""A call that takes this long shows the rate of the link and not only its latency."""


_TIMES_ALONE = 12


class _Cost(NamedTuple):
    """Seconds of one call."""

    wall_s: float
    work_s: float


def probe(comm: Comm, device: torch.device) -> Network:
    """The network as all ranks see it; called on all of them at once, and alike on all."""
    if comm.size < 2:
        raise ConfigError("probe: one rank has no links; give their rate and latency instead")
    caches = Cold(device)
    measured = {kind: _probe(comm, device, kind, caches) for kind in KINDS}
    return Network(measured["mean"], measured=measured)


def _probe(comm: Comm, device: torch.device, kind: Kind, caches: Cold) -> LinkModel:
    short = _cost(comm, device, kind, SHORT_BYTES, repeats=20)
    alone = _cost_alone(comm, device, kind, caches)
    nbytes = 64 << 10
    long = _cost(comm, device, kind, nbytes, repeats=3)
    # What all ranks have agreed on decides, so that they go on to the same length.
    while long.wall_s < _LONG_S and nbytes < LONGEST_BYTES:
        nbytes *= 4
        long = _cost(comm, device, kind, nbytes, repeats=5)
    few, many = _said(kind, SHORT_BYTES, comm.size), _said(kind, nbytes, comm.size)
    wall = fit(kind, comm.size, (few, short.wall_s), (many, long.wall_s))
    work = fit(kind, comm.size, (few, short.work_s), (many, long.work_s))
    hops = way(kind, 0, comm.size).hops
    more = [max(0.0, a - b) / hops for a, b in zip(alone, short, strict=True)]
    return LinkModel(
        wall.latency_s + more[0], wall.rate_bits, work.latency_s + more[1], 8 / work.rate_bits
    )


def _said(kind: Kind, nbytes: int, size: int) -> float:
    """What counts of a call's buffers: of scatter all but this rank's own piece."""
    return nbytes * (size - 1) / size if kind == "scatter" else nbytes


def _cost(comm: Comm, device: torch.device, kind: Kind, nbytes: int, repeats: int) -> _Cost:
    """Calls that follow each other.

    Lower quartiles on each rank: what somebody else does meanwhile only adds to a call.
    """
    _answer(comm, device, _call(comm, device, kind, nbytes))
    costs = [_timed(comm, device, kind, nbytes) for _ in range(repeats)]
    own = [_lower_quartile(column) for column in zip(*costs, strict=True)]
    return _Cost(*mean_of_ranks(comm, device, own))


def _cost_alone(comm: Comm, device: torch.device, kind: Kind, caches: Cold) -> _Cost:
    """Short calls with other work in between, as in a step.

    Then caches are cold and processors have gone to sleep. Ranks do not come to such a call at
    once; but the last that comes to it waits for nobody.
    """
    costs = []
    for _ in range(_TIMES_ALONE):
        caches.cool()
        costs.append(_timed(comm, device, kind, SHORT_BYTES))
    told = all_of_ranks(comm, device, [number for cost in costs for number in cost])
    walls_s = [min(of_ranks) for of_ranks in zip(*(row[0::2] for row in told), strict=True)]
    works_s = [fmean(of_ranks) for of_ranks in zip(*(row[1::2] for row in told), strict=True)]
    return _Cost(median(walls_s), median(works_s))


def _timed(comm: Comm, device: torch.device, kind: Kind, nbytes: int) -> _Cost:
    """One call as this rank sees it."""
    call = _call(comm, device, kind, nbytes)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_s, worked_s = perf_counter(), process_time()
    _answer(comm, device, call)
    return _Cost(perf_counter() - start_s, process_time() - worked_s)


def _answer(comm: Comm, device: torch.device, call: Collective) -> None:
    """Makes a call to its end, which on NCCL is later than it returns."""
    comm.answer(call)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _lower_quartile(times_s: Sequence[float]) -> float:
    return sorted(times_s)[len(times_s) // 4]


def _call(comm: Comm, device: torch.device, kind: Kind, nbytes: int) -> Collective:
    if kind == "mean":
        return Collective(kind, [torch.zeros(nbytes // 4, device=device)])
    pieces = comm.size if kind == "scatter" else 1
    each = nbytes // pieces
    buffers = [torch.zeros(each, dtype=torch.uint8, device=device) for _ in range(pieces)]
    return Collective(kind, buffers, [each] * comm.size)
