"""Measures latency and rate from every rank to the next and back, one pair at a time."""

from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from gradwire.comm.cost_model import format_rate
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.perfmodel.probe import gather_numbers

_PINGS = 11
_SHORTEST_S = 0.05
"""A transfer that takes this long measures the rate and not the latency."""
_FIRST_BYTES, _LAST_BYTES = 256 << 10, 16 << 20
_MAX_PAIRS = 16
UNEQUAL = 1.5
"""Links that differ by more than this factor are worth a line."""


@dataclass(frozen=True)
class LinkRow:
    """One direction between two ranks."""

    source: int
    target: int
    latency_s: float
    rate_bits: float

    def describe(self) -> str:
        rate = format_rate(round(float(f"{self.rate_bits:.3g}")))
        return f"rank {self.source} to {self.target}: {rate}, {self.latency_s * 1e3:.3g} ms"


@dataclass(frozen=True)
class LinkTable:
    """Both directions between neighbouring ranks, as all ranks know them."""

    rows: tuple[LinkRow, ...]

    @property
    def slowest(self) -> LinkRow:
        return min(self.rows, key=lambda row: row.rate_bits)

    @property
    def fastest(self) -> LinkRow:
        return max(self.rows, key=lambda row: row.rate_bits)

    @property
    def latency_s(self) -> float:
        return median(row.latency_s for row in self.rows)

    def lines(self) -> list[str]:
        """Describes the links: as one if they are alike, or else the extremes."""
        slow, fast = self.slowest, self.fastest
        if fast.rate_bits <= UNEQUAL * slow.rate_bits:
            middle = median(row.rate_bits for row in self.rows)
            rate = format_rate(round(float(f"{middle:.3g}")))
            return [f"links: {rate}, {self.latency_s * 1e3:.3g} ms, all alike"]
        factor = fast.rate_bits / slow.rate_bits
        found = [
            f"links differ {factor:.1f}-fold; every collective waits for the slowest",
            f"  slowest: {slow.describe()}",
            f"  fastest: {fast.describe()}",
        ]
        back = next(r for r in self.rows if (r.source, r.target) == (slow.target, slow.source))
        if back.rate_bits > UNEQUAL * slow.rate_bits:
            found.append(f"  asymmetric: the way back, {back.describe()}")
        return found


def measure_links(group: dist.ProcessGroup, device: torch.device) -> LinkTable:
    """Measures the links of a group of at least two ranks; call it on all of them at once."""
    comm = ProcessGroupComm(group)
    pairs = [(rank, (rank + 1) % comm.size) for rank in range(comm.size)][:_MAX_PAIRS]
    if comm.size == 2:
        pairs = pairs[:1]
    rows: list[tuple[int, int, float, float]] = []
    for one, other in pairs:
        for source, target in ((one, other), (other, one)):
            # Neighbours of the pair must not send at the same time.
            dist.barrier(group=group)
            if comm.rank == source:
                rows.append((source, target, *_send(group, target, device)))
            elif comm.rank == target:
                _receive(group, source, device)
    own = [number for row in rows for number in row]
    length = max(int(n) for [n] in gather_numbers(comm, device, [len(own)]))
    found = gather_numbers(comm, device, [*own, *[-1.0] * (length - len(own))])
    flat = [number for row in found for number in row if row[0] >= 0]
    quads = [flat[i : i + 4] for i in range(0, len(flat), 4)]
    table = [LinkRow(int(a), int(b), t, rate) for a, b, t, rate in quads if a >= 0]
    return LinkTable(tuple(sorted(table, key=lambda row: (row.source, row.target))))


def _send(group: dist.ProcessGroup, target: int, device: torch.device) -> tuple[float, float]:
    """Returns latency and rate to the target, which calls `_receive`."""
    trips = [_transfer(group, target, device, 8) for _ in range(_PINGS)]
    # The first one may open the connection.
    latency_s = median(trips[1:]) / 2
    nbytes, spent_s = _FIRST_BYTES, 0.0
    while True:
        _number(group, target, device, nbytes)
        spent_s = min(_transfer(group, target, device, nbytes) for _ in range(2))
        if spent_s >= _SHORTEST_S or nbytes >= _LAST_BYTES:
            break
        nbytes *= 4
    _number(group, target, device, 0)
    return latency_s, 8 * nbytes / max(spent_s - 2 * latency_s, 1e-9)


def _receive(group: dist.ProcessGroup, source: int, device: torch.device) -> None:
    for _ in range(_PINGS):
        _answer(group, source, device, 8)
    announced = torch.zeros(1, dtype=torch.int64, device=device)
    while True:
        dist.recv(announced, group=group, group_src=source)
        if not (nbytes := int(announced)):
            return
        for _ in range(2):
            _answer(group, source, device, nbytes)


def _number(group: dist.ProcessGroup, target: int, device: torch.device, number: int) -> None:
    dist.send(torch.tensor([number], device=device), group=group, group_dst=target)


def _transfer(group: dist.ProcessGroup, target: int, device: torch.device, nbytes: int) -> float:
    """Returns the time of a message and a short answer."""
    message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    answer = torch.zeros(8, dtype=torch.uint8, device=device)
    _synchronize(device)
    start_s = perf_counter()
    dist.send(message, group=group, group_dst=target)
    dist.recv(answer, group=group, group_src=target)
    _synchronize(device)
    return perf_counter() - start_s


def _answer(group: dist.ProcessGroup, source: int, device: torch.device, nbytes: int) -> None:
    message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    dist.recv(message, group=group, group_src=source)
    dist.send(torch.zeros(8, dtype=torch.uint8, device=device), group=group, group_dst=source)
    _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
