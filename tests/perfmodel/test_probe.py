"""What is made of timed calls."""

from collections.abc import Sequence

import pytest
import torch

from gradwire.comm.base import Comm
from gradwire.comm.cost_model import Kind, way
from gradwire.comm.mirror import Ghost
from gradwire.perfmodel import probe
from gradwire.perfmodel.timers import Cold

CPU = torch.device("cpu")
# What ranks see of each call: the one that comes first waits for the other. Now and then one is
# interrupted.
WALLS_S = [[0.9, 0.2, 0.5, 0.9] * 3, [0.1, 0.6, 0.2, 0.8] * 3]
WORKS_S = [0.04, 0.08]


def cost(wall_s: float, work_s: float) -> probe._Cost:
    return probe._Cost(wall_s, work_s)


def test_the_last_to_come_to_a_call_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shorter of both is 0.1, 0.2, 0.2 or 0.8; and each has worked as it has."""
    mine = iter(WALLS_S[0])
    monkeypatch.setattr(probe, "_timed", lambda *_: cost(next(mine), WORKS_S[0]))

    def told(comm: Comm, device: torch.device, numbers: Sequence[float]) -> list[list[float]]:
        other = [number for wall_s in WALLS_S[1] for number in cost(wall_s, WORKS_S[1])]
        return [list(numbers), other]

    monkeypatch.setattr(probe, "all_of_ranks", told)
    found = probe._cost_alone(Ghost(2), CPU, "mean", Cold(CPU))
    assert found == pytest.approx(cost(0.2, 0.06))
    with pytest.raises(StopIteration):
        next(mine)


@pytest.mark.parametrize("kind", ["mean", "gather"])
def test_a_call_takes_what_it_takes_in_a_step(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short calls in a row take 1 s, in a step 3; of a link that takes no time for its bytes."""
    monkeypatch.setattr(probe, "_cost", lambda *_, repeats: cost(1.0, 0.5))
    monkeypatch.setattr(probe, "_cost_alone", lambda *_: cost(3.0, 0.9))
    link = probe._probe(Ghost(4), CPU, kind, Cold(CPU))
    assert link.call_s(kind, 4096, 4) == pytest.approx(3.0, rel=1e-3)
    assert link.hops_work_s(kind, 4) == pytest.approx(0.9, rel=1e-3)
    assert link.latency_s == pytest.approx(3.0 / way(kind, 0, 4).hops, rel=1e-3)
