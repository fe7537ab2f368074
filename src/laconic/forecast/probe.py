"""What calls cost on the links that are there: short and long ones of every kind, timed."""

from time import perf_counter, process_time
from typing import NamedTuple

import torch

from laconic.comm.base import Call, Comm
from laconic.errors import ConfigError
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
        long = _cost(comm, device, kind, nbytes, repeats=3)
    # What scatter says to others is all but this rank's own piece.
    said = [n * (comm.size - 1) / comm.size if kind == "scatter" else n for n in (SHORT_BYTES, nbytes)]
    wall = fit(kind, comm.size, (said[0], short.wall_s), (said[1], long.wall_s))
    work = fit(kind, comm.size, (said[0], short.work_s), (said[1], long.work_s))
    return LinkModel(wall.latency_s, wall.rate_bits, work.latency_s, 8 / work.rate_bits)


def _cost(comm: Comm, device: torch.device, kind: Kind, nbytes: int, repeats: int) -> _Cost:
    comm.answer(_call(comm, device, kind, nbytes))
    wall: list[float] = []
    work_s = process_time()
    for _ in range(repeats):
        call = _call(comm, device, kind, nbytes)
        start_s = perf_counter()
        comm.answer(call)
        wall.append(perf_counter() - start_s)
    own = torch.tensor([sum(wall) / repeats, (process_time() - work_s) / repeats], device=device)
    [mean] = comm.answer(Call("mean", [own]))
    return _Cost(*mean.tolist())


def _call(comm: Comm, device: torch.device, kind: Kind, nbytes: int) -> Call:
    if kind == "mean":
        return Call(kind, [torch.zeros(nbytes // 4, device=device)])
    if kind != "scatter":
        return Call(
            kind, [torch.zeros(nbytes, dtype=torch.uint8, device=device)], [nbytes] * comm.size
        )
    piece = nbytes // comm.size
    pieces = [torch.zeros(piece, dtype=torch.uint8, device=device) for _ in range(comm.size)]
    return Call(kind, pieces, [piece] * comm.size)
