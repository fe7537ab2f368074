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
from gradwire.comm.cost_model import KINDS, Kind, LinkModel, Network, fit, transfer
from gradwire.errors import ConfigError
from gradwire.perfmodel.timers import CacheEvictor

MAX_HOST_NAME_BYTES = 4096
"""Upper bound of the length of a host name."""


def usable_cores() -> int:
    """Returns the cores this process may run on; a container may have fewer than the machine."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_warning() -> str | None:
    """Returns a line to print if other work keeps this machine busy, which spoils timings."""
    load, cores = os.getloadavg()[0], usable_cores()
    if load <= cores:
        return None
    return (
        f"Warning: the load average is {load:.1f} on {cores} cores, so these times are unreliable; "
        "repeat this on a quiet machine."
    )


def cores_per_thread(workers: int, device: torch.device) -> float:
    """Returns the cores per compute thread of a worker, if `workers` share this machine."""
    if device.type != "cpu":
        return float("inf")
    return usable_cores() / workers / torch.get_num_threads()


def local_workers(comm: Comm, device: torch.device) -> int:
    """Returns the number of ranks on this machine; call it on all ranks."""
    name = torch.frombuffer(bytearray(socket.gethostname().encode()), dtype=torch.uint8)
    call = Collective("gather", [name.to(device)], limits=[MAX_HOST_NAME_BYTES] * comm.size)
    gathered = [bytes(received.tolist()) for received in comm.run(call)]
    return gathered.count(bytes(name.tolist()))


def gather_numbers(comm: Comm, device: torch.device, numbers: Sequence[float]) -> list[list[float]]:
    """Gathers the numbers of all ranks, by rank; call it on all ranks with equally many numbers."""
    own = torch.tensor(numbers, dtype=torch.float64, device=device).view(torch.uint8)
    received = comm.run(Collective("gather", [own], [own.numel()] * comm.size))
    return [row.clone().view(torch.float64).tolist() for row in received]


def mean_over_ranks(comm: Comm, device: torch.device, numbers: Sequence[float]) -> list[float]:
    """Averages each number over all ranks; call it on all ranks."""
    own = torch.tensor(numbers, dtype=torch.float64, device=device)
    [mean] = comm.run(Collective("mean", [own]))
    agreed: list[float] = mean.tolist()
    return agreed


SHORT_BYTES = 4 << 10
LONGEST_BYTES = 16 << 20
_LONG_CALL_S = 0.1
"""A call that takes this long measures the rate of the link and not only its latency."""


_ISOLATED_REPEATS = 12


class _Cost(NamedTuple):
    """Wall-clock and CPU time of one call."""

    wall_s: float
    work_s: float


def probe(comm: Comm, device: torch.device) -> Network:
    """Measures the network; call it on all ranks at the same time. All return the same."""
    if comm.size < 2:
        raise ConfigError("probe: one rank has no links; give their rate and latency instead")
    evictor = CacheEvictor(device)
    measured = {kind: _probe(comm, device, kind, evictor) for kind in KINDS}
    return Network(measured["mean"], measured=measured)


def _probe(comm: Comm, device: torch.device, kind: Kind, evictor: CacheEvictor) -> LinkModel:
    short = _cost(comm, device, kind, SHORT_BYTES, repeats=20)
    isolated = _isolated_cost(comm, device, kind, evictor)
    nbytes = 64 << 10
    long = _cost(comm, device, kind, nbytes, repeats=3)
    # The averaged time decides, so that all ranks continue with the same length.
    while long.wall_s < _LONG_CALL_S and nbytes < LONGEST_BYTES:
        nbytes *= 4
        long = _cost(comm, device, kind, nbytes, repeats=5)
    short_bytes, long_bytes = (
        _counted_bytes(kind, SHORT_BYTES, comm.size),
        _counted_bytes(kind, nbytes, comm.size),
    )
    wall = fit(kind, comm.size, (short_bytes, short.wall_s), (long_bytes, long.wall_s))
    work = fit(kind, comm.size, (short_bytes, short.work_s), (long_bytes, long.work_s))
    hops = transfer(kind, 0, comm.size).hops
    extra_s = [max(0.0, a - b) / hops for a, b in zip(isolated, short, strict=True)]
    return LinkModel(
        wall.latency_s + extra_s[0], wall.rate_bits, work.latency_s + extra_s[1], 8 / work.rate_bits
    )


def _counted_bytes(kind: Kind, nbytes: int, size: int) -> float:
    """Returns the bytes of a call that travel: of a scatter all but this rank's own piece."""
    return nbytes * (size - 1) / size if kind == "all_to_all" else nbytes


def _cost(comm: Comm, device: torch.device, kind: Kind, nbytes: int, repeats: int) -> _Cost:
    """Measures calls that follow each other.

    Takes the lower quartile on each rank, since other load only adds to a call.
    """
    _answer(comm, device, _call(comm, device, kind, nbytes))
    costs = [_timed(comm, device, kind, nbytes) for _ in range(repeats)]
    own = [_lower_quartile(column) for column in zip(*costs, strict=True)]
    return _Cost(*mean_over_ranks(comm, device, own))


def _isolated_cost(comm: Comm, device: torch.device, kind: Kind, evictor: CacheEvictor) -> _Cost:
    """Measures short calls with other work in between, as in a step.

    Then caches are cold and processors sleep. Ranks do not reach such a call at the same time, so
    the shortest time is taken: the last rank to reach it does not wait.
    """
    costs = []
    for _ in range(_ISOLATED_REPEATS):
        evictor.evict()
        costs.append(_timed(comm, device, kind, SHORT_BYTES))
    gathered = gather_numbers(comm, device, [number for cost in costs for number in cost])
    walls_s = [min(of_ranks) for of_ranks in zip(*(row[0::2] for row in gathered), strict=True)]
    works_s = [fmean(of_ranks) for of_ranks in zip(*(row[1::2] for row in gathered), strict=True)]
    return _Cost(median(walls_s), median(works_s))


def _timed(comm: Comm, device: torch.device, kind: Kind, nbytes: int) -> _Cost:
    """Measures one call on this rank."""
    call = _call(comm, device, kind, nbytes)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_s, worked_s = perf_counter(), process_time()
    _answer(comm, device, call)
    return _Cost(perf_counter() - start_s, process_time() - worked_s)


def _answer(comm: Comm, device: torch.device, call: Collective) -> None:
    """Completes a call, which NCCL does only after it has returned."""
    comm.run(call)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _lower_quartile(times_s: Sequence[float]) -> float:
    return sorted(times_s)[len(times_s) // 4]


def _call(comm: Comm, device: torch.device, kind: Kind, nbytes: int) -> Collective:
    if kind == "mean":
        return Collective(kind, [torch.zeros(nbytes // 4, device=device)])
    pieces = comm.size if kind == "all_to_all" else 1
    each = nbytes // pieces
    buffers = [torch.zeros(each, dtype=torch.uint8, device=device) for _ in range(pieces)]
    return Collective(kind, buffers, [each] * comm.size)
