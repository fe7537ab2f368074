"""Local steps with delayed means on a GPU: over gloo, in a background thread and stream."""

from unittest.mock import patch

import gpu_jobs as jobs
import pytest
import torch
from torch import Tensor

from drift_checks import check_drift
from gradwire.comm.base import Collective, CollectiveProgram, Comm
from gradwire.comm.meter import Meter
from gradwire.local.workers import BackgroundRunner
from processes import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")

SYNC_EVERY, STEPS, LONG = 4, 35, 1_000_000_000


def distance_moved(one: Tensor) -> float:
    start = torch.cat([p.detach().reshape(-1) for p in jobs.mlp().parameters()])
    return float((one - start).norm())


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("spec", ["local", "int4", "powersgd:rank=4", "topk:ratio=0.1", "efsign"])
def test_gpu_and_cpu_reach_the_same_weights(four_ranks: Ranks, spec: str, delay: int) -> None:
    gpu = four_ranks.run(jobs.delayed_on, spec, "cuda", SYNC_EVERY, delay, STEPS)
    cpu = four_ranks.run(jobs.delayed_on, spec, "cpu", SYNC_EVERY, delay, STEPS)
    for here, there in zip(gpu, cpu, strict=True):
        assert torch.equal(here.anchor, gpu[0].anchor)
        # Last bits decide selection and rounding, which error feedback corrects later.
        tolerance = 1e-4 if spec == "local" else 0.1
        assert (here.weights - there.weights).norm() < tolerance * distance_moved(there.weights)
    # Steps since the last synchronisation differ between workers.
    assert not torch.equal(gpu[0].weights, gpu[1].weights)


@pytest.mark.parametrize("spec", ["int4", "powersgd:rank=4"])
def test_the_background_exchange_is_captured(four_ranks: Ranks, spec: str) -> None:
    found = four_ranks.run(jobs.delayed_on, spec, "cuda", SYNC_EVERY, SYNC_EVERY - 1, STEPS)
    assert [one.recordings for one in found] == [1] * 4


class Echo(Comm):
    def __init__(self) -> None:
        self.rank, self.size, self.meter = 0, 1, Meter()

    def run(self, call: Collective) -> list[Tensor]:
        return call.buffers


@pytest.mark.parametrize("number", range(max(1, torch.cuda.device_count())))
def test_streams_wait_for_each_other_only(number: int) -> None:
    """An exchange waits for earlier computation, and overlaps with later computation."""
    device = torch.device("cuda", number)
    source, received = torch.zeros(1000, device=device), torch.zeros(1000, device=device)
    seen: list[object] = []

    def exchange(cycles: int) -> CollectiveProgram[None]:
        seen.extend([torch.cuda.current_device(), torch.cuda.current_stream(device)])
        [answer] = yield Collective("mean", [source.clone()])
        torch.cuda._sleep(cycles)
        received.copy_(answer)

    runner, before = BackgroundRunner(device), torch.cuda.current_device()

    def start_exchange(cycles: int, value: float) -> torch.cuda.Event:
        """Starts an exchange; returns an event of the computing stream after it."""
        torch.cuda._sleep(cycles)
        source.fill_(value)
        wait = runner.start(exchange(cycles), Echo())
        later = torch.cuda.Event()
        later.record()
        wait()
        return later

    with torch.cuda.device(device):
        # The first use of a kernel waits until the GPU is idle.
        start_exchange(1, 0.5)
        assert float((received * 2).min()) == 1.0
        later = start_exchange(LONG, 1.0)
        # The computing stream waits for the result, and the host for neither.
        doubled = received * 2
        assert not later.query()
        assert float(doubled.min()) == 2.0
    runner.end(wait=True)
    assert seen[0] == number
    assert seen[1] != torch.cuda.default_stream(device)
    assert torch.cuda.current_device() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rate", "ahead"), [(1.0, 0.5), (0.7, 1.0), (1.0, 0.3)])
def test_drifts(dtype: torch.dtype, rate: float, ahead: float) -> None:
    """Drifts of large and small parameters equal those of torch on the GPU."""
    from gradwire.kernels import cuda
    from gradwire.kernels.cuda import drift

    with patch.object(drift, "LARGE", 1000):
        assert check_drift(cuda, rate, ahead, dtype, "cuda") == 3
