"""What calls cost on the links that are there: short and long ones of every kind, timed."""

from time import perf_counter, process_time
from typing import NamedTuple

import torch

from laconic.comm.base import Call, Comm
from laconic.errors import ConfigError
from laconic.forecast.host import mean_of_ranks
from laconic.network.model import KINDS, Kind, LinkModel, Network, fit

SHORT_BYTES = 4 << 10
LONGEST_BYTES = 16 << 20
_LONG_S = 0.1
"""A call that takes this long shows the rate of the link and not only its latency."""


class _Cost(NamedTuple):
    """Seconds of one call, the mean of all ranks."""

    wall_s: float
    work_s: float


def probe(comm: Comm, device: torch.device) -> Network:
    """The network as all ranks see it; called on all of them at once, and alike on all."""
    if comm.size < 2:
        raise ConfigError("probe: one rank has no links; give their rate and latency instead")
    measured = {kind: _probe(comm, device, kind) for kind in KINDS}
    return Network(measured["mean"], measured=measured)


def _probe(comm: Comm, device: torch.device, kind: Kind) -> LinkModel:
    short = _cost(comm, device, kind, SHORT_BYTES, repeats=20)
    nbytes = 64 << 10
    long = _cost(comm, device, kind, nbytes, repeats=3)
    # What all ranks have agreed on decides, so that they go on to the same length.
    while long.wall_s < _LONG_S and nbytes < LONGEST_BYTES:
        nbytes *= 4
        long = _cost(comm, device, kind, nbytes, repeats=5)
    few, many = _said(kind, SHORT_BYTES, comm.size), _said(kind, nbytes, comm.size)
    wall = fit(kind, comm.size, (few, short.wall_s), (many, long.wall_s))
    work = fit(kind, comm.size, (few, short.work_s), (many, long.work_s))
    return LinkModel(wall.latency_s, wall.rate_bits, work.latency_s, 8 / work.rate_bits)


def _said(kind: Kind, nbytes: int, size: int) -> float:
    """What counts of a call's buffers: of scatter all but this rank's own piece."""
    return nbytes * (size - 1) / size if kind == "scatter" else nbytes


def _cost(comm: Comm, device: torch.device, kind: Kind, nbytes: int, repeats: int) -> _Cost:
    """Lower quartiles on each rank: what somebody else does meanwhile only adds to a call."""
    _answer(comm, device, _call(comm, device, kind, nbytes))
    wall_s: list[float] = []
    work_s: list[float] = []
    for _ in range(repeats):
        call = _call(comm, device, kind, nbytes)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start_s, worked_s = perf_counter(), process_time()
        _answer(comm, device, call)
        wall_s.append(perf_counter() - start_s)
        work_s.append(process_time() - worked_s)
    own = [_lower_quartile(wall_s), _lower_quartile(work_s)]
    return _Cost(*mean_of_ranks(comm, device, own))


def _answer(comm: Comm, device: torch.device, call: Call) -> None:
    """Makes a call to its end, which on NCCL is later than it returns."""
    comm.answer(call)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _lower_quartile(times_s: list[float]) -> float:
    return sorted(times_s)[len(times_s) // 4]


def _call(comm: Comm, device: torch.device, kind: Kind, nbytes: int) -> Call:
    if kind == "mean":
        return Call(kind, [torch.zeros(nbytes // 4, device=device)])
    pieces = comm.size if kind == "scatter" else 1
    each = nbytes // pieces
    buffers = [torch.zeros(each, dtype=torch.uint8, device=device) for _ in range(pieces)]
    return Call(kind, buffers, [each] * comm.size)
