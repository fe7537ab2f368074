"""The link model that is fitted to timed calls."""

from collections.abc import Sequence

import pytest
import torch

from gradwire.comm.base import Comm
from gradwire.comm.cost_model import Kind, transfer
from gradwire.comm.mirror import MirrorComm
from gradwire.perfmodel import probe
from gradwire.perfmodel.timers import CacheEvictor

CPU = torch.device("cpu")
# Wall times of each call by rank: the first rank waits for the other. Sometimes one is interrupted.
WALLS_S = [[0.9, 0.2, 0.5, 0.9] * 3, [0.1, 0.6, 0.2, 0.8] * 3]
WORKS_S = [0.04, 0.08]


def cost(wall_s: float, work_s: float) -> probe._Cost:
    return probe._Cost(wall_s, work_s)


def test_the_shortest_wall_time_of_all_ranks_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shorter wall time is 0.1, 0.2, 0.2 or 0.8; CPU times are averaged."""
    mine = iter(WALLS_S[0])
    monkeypatch.setattr(probe, "_timed", lambda *_: cost(next(mine), WORKS_S[0]))

    def gathered(comm: Comm, device: torch.device, numbers: Sequence[float]) -> list[list[float]]:
        other = [number for wall_s in WALLS_S[1] for number in cost(wall_s, WORKS_S[1])]
        return [list(numbers), other]

    monkeypatch.setattr(probe, "gather_numbers", gathered)
    found = probe._isolated_cost(MirrorComm(2), CPU, "mean", CacheEvictor(CPU))
    assert found == pytest.approx(cost(0.2, 0.06))
    with pytest.raises(StopIteration):
        next(mine)


@pytest.mark.parametrize("kind", ["mean", "gather"])
def test_the_latency_is_that_of_isolated_calls(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Consecutive short calls take 1 s, isolated ones 3 s; bytes take no time on this link."""
    monkeypatch.setattr(probe, "_cost", lambda *_, repeats: cost(1.0, 0.5))
    monkeypatch.setattr(probe, "_isolated_cost", lambda *_: cost(3.0, 0.9))
    link = probe._probe(MirrorComm(4), CPU, kind, CacheEvictor(CPU))
    assert link.call_s(kind, 4096, 4) == pytest.approx(3.0, rel=1e-3)
    assert link.hops_work_s(kind, 4) == pytest.approx(0.9, rel=1e-3)
    assert link.latency_s == pytest.approx(3.0 / transfer(kind, 0, 4).hops, rel=1e-3)
