"""A short probe of the link between ranks: latency and rate of an all-reduce.

It takes a few tenths of a second. `perfmodel/probe.py` measures all kinds of collectives.
"""

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import torch

from gradwire.comm.base import Collective, Comm
from gradwire.comm.cost_model import LinkModel, fit
from gradwire.errors import ConfigError

BACKENDS = ("gloo", "nccl")
"""Backends whose collectives can be timed."""

SHORT_BYTES = 4 << 10
FIRST_BYTES, LONGEST_BYTES = 64 << 10, 16 << 20
LONG_CALL_S = 0.05
"""A call that takes this long measures the rate of the link and not only its latency."""
_SHORT_REPEATS, _LONG_REPEATS = 9, 3


def check_backend(backend: str) -> None:
    """Raises ConfigError for a process group whose link cannot be measured."""
    if backend not in BACKENDS:
        raise ConfigError(
            f"auto: a process group of the backend {backend!r} cannot be probed; expected one of "
            f"{[*BACKENDS]}"
        )


def probe_link(comm: Comm, device: torch.device) -> LinkModel:
    """Measures the link; called on all ranks at the same time. All return the same."""
    short_s = _duration_s(comm, device, SHORT_BYTES, _SHORT_REPEATS)
    nbytes = FIRST_BYTES
    long_s = _duration_s(comm, device, nbytes, _LONG_REPEATS)
    # The mean over ranks decides, so that all continue with the same length.
    while long_s < LONG_CALL_S and nbytes < LONGEST_BYTES:
        nbytes *= 4
        long_s = _duration_s(comm, device, nbytes, _LONG_REPEATS)
    if not 0 < short_s < float("inf") or not 0 < long_s < float("inf"):
        raise ConfigError(
            f"auto: the process group cannot be probed: collectives took {short_s:g} s and "
            f"{long_s:g} s"
        )
    return fit("mean", comm.size, (SHORT_BYTES, short_s), (nbytes, long_s))


def _duration_s(comm: Comm, device: torch.device, nbytes: int, repeats: int) -> float:
    """Returns the median duration of an all-reduce, the mean over ranks."""
    times_s = [_timed_s(comm, device, nbytes) for _ in range(repeats + 1)]
    # The first call may open connections.
    [agreed] = mean_over_ranks(comm, device, [median(times_s[1:])])
    return agreed


def _timed_s(comm: Comm, device: torch.device, nbytes: int) -> float:
    buffer = torch.zeros(nbytes // 4, device=device)
    _synchronize(device)
    start_s = perf_counter()
    comm.run(Collective("mean", [buffer]))
    _synchronize(device)
    return perf_counter() - start_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mean_over_ranks(comm: Comm, device: torch.device, numbers: Sequence[float]) -> list[float]:
    """Averages each number over all ranks; called on all ranks."""
    own = torch.tensor(numbers, dtype=torch.float64, device=device)
    [mean] = comm.run(Collective("mean", [own]))
    agreed: list[float] = mean.tolist()
    return agreed
