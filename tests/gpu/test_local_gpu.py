"""Local steps on a GPU whose means come late: over gloo, with a thread and a stream beside them."""

from unittest.mock import patch

import gpu_jobs as jobs
import pytest
import torch
from torch import Tensor

from drift_checks import check_drift
from gradwire.comm.base import Collective, CollectiveProgram, Comm
from gradwire.comm.meter import Meter
from gradwire.local.workers import Beside
from processes import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")

GAP, STEPS, LONG = 4, 35, 1_000_000_000


def moved(one: Tensor) -> float:
    start = torch.cat([p.detach().reshape(-1) for p in jobs.mlp().parameters()])
    return float((one - start).norm())


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("spec", ["local", "int4", "powersgd:rank=4", "topk:ratio=0.1", "efsign"])
def test_card_and_cpu_go_the_same_way(four_ranks: Ranks, spec: str, delay: int) -> None:
    card = four_ranks.run(jobs.late_on, spec, "cuda", GAP, delay, STEPS)
    host = four_ranks.run(jobs.late_on, spec, "cpu", GAP, delay, STEPS)
    for here, there in zip(card, host, strict=True):
        assert torch.equal(here.anchor, card[0].anchor)
        # Last bits decide what is chosen and how it is rounded, which memories make good for.
        rough = 1e-4 if spec == "local" else 0.1
        assert (here.weights - there.weights).norm() < rough * moved(there.weights)
    # The steps since the last arrival are a worker's own.
    assert not torch.equal(card[0].weights, card[1].weights)


@pytest.mark.parametrize("spec", ["int4", "powersgd:rank=4"])
def test_what_goes_on_beside_is_recorded(four_ranks: Ranks, spec: str) -> None:
    found = four_ranks.run(jobs.late_on, spec, "cuda", GAP, GAP - 1, STEPS)
    assert [one.recordings for one in found] == [1] * 4


class Echo(Comm):
    def __init__(self) -> None:
        self.rank, self.size, self.meter = 0, 1, Meter()

    def answer(self, call: Collective) -> list[Tensor]:
        return call.buffers


@pytest.mark.parametrize("number", range(max(1, torch.cuda.device_count())))
def test_streams_wait_for_each_other_and_for_nobody_else(number: int) -> None:
    """Once what was there has been computed, a conversation runs beside what comes later."""
    device = torch.device("cuda", number)
    told, heard = torch.zeros(1000, device=device), torch.zeros(1000, device=device)
    seen: list[object] = []

    def copied(cycles: int) -> CollectiveProgram[None]:
        seen.extend([torch.cuda.current_device(), torch.cuda.current_stream(device)])
        [answer] = yield Collective("mean", [told.clone()])
        torch.cuda._sleep(cycles)
        heard.copy_(answer)

    beside, before = Beside(device), torch.cuda.current_device()

    def at_work(cycles: int, value: float) -> torch.cuda.Event:
        """What the computing stream has reached when a conversation had been started."""
        torch.cuda._sleep(cycles)
        told.fill_(value)
        wait = beside.start(copied(cycles), Echo())
        later = torch.cuda.Event()
        later.record()
        wait()
        return later

    with torch.cuda.device(device):
        # A kernel that is used for the first time waits until the card is idle.
        at_work(1, 0.5)
        assert float((heard * 2).min()) == 1.0
        later = at_work(LONG, 1.0)
        # The computing stream waits for what was heard, and the host for neither.
        doubled = heard * 2
        assert not later.query()
        assert float(doubled.min()) == 2.0
    beside.end(wait=True)
    assert seen[0] == number
    assert seen[1] != torch.cuda.default_stream(device)
    assert torch.cuda.current_device() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rate", "ahead"), [(1.0, 0.5), (0.7, 1.0), (1.0, 0.3)])
def test_drifts(dtype: torch.dtype, rate: float, ahead: float) -> None:
    """Of large and small parameters, as torch has them on the card."""
    from gradwire.kernels import cuda
    from gradwire.kernels.cuda import drift

    with patch.object(drift, "LARGE", 1000):
        assert check_drift(cuda, rate, ahead, dtype, "cuda") == 3
