"""One parameter on a few simulated ranks, for tests of memories and exchanges."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.base import Compressor
from gradwire.comm.simulated import Simulated
from gradwire.engine.make_plan import open_lane
from gradwire.engine.step import Lane, lane_rounds, run_rounds
from gradwire.spec import ExchangeConfig, parse, parse_memory
from gradwire.types import EncodeContext


class Lockstep:
    """One lane per rank, opened without a plan, so that small tensors are compressed too."""

    def __init__(
        self, spec: str, memory: str, exchange_spec: ExchangeConfig | str, numel: int, size: int
    ) -> None:
        contexts = [EncodeContext((numel,), rank, size) for rank in range(size)]
        self.lanes = open_lanes(parse(spec), memory, exchange_spec, contexts)
        self.network = Simulated(size)

    def step(self, *grads: Tensor) -> Tensor:
        """Returns the mean on rank 0, which is bitwise equal on the others."""
        return mean_of(self.network, self.lanes, grads)

    def stacked_state(self, key: str) -> Tensor:
        """Returns the memory state under this key, [ranks, numel]."""
        return torch.stack([lane.memory_state[key] for lane in self.lanes])


def open_lanes(
    codec: Compressor,
    memory: str,
    exchange_spec: ExchangeConfig | str,
    contexts: Sequence[EncodeContext],
) -> list[Lane]:
    """Returns one lane per context, on the CPU."""
    device = torch.device("cpu")
    return [
        open_lane("w", codec, parse_memory(memory), exchange_spec, ctx, device) for ctx in contexts
    ]


def mean_of(network: Simulated, lanes: Sequence[Lane], grads: Sequence[Tensor]) -> Tensor:
    """Runs a step; returns the mean on rank 0, which is bitwise equal on the others."""
    outs = [grad.clone() for grad in grads]
    pairs = zip(outs, lanes, strict=True)
    network.run([run_rounds([lane_rounds(out, lane)]) for out, lane in pairs])
    for lane in lanes:
        lane.commit()
    for out in outs:
        assert torch.equal(out.view(torch.int32), outs[0].view(torch.int32))
    return outs[0]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance_after(workers: Lockstep, optima: Tensor, steps: int, rate: float) -> float:
    """Descends on the mean of |x - optimum|²/2 from zero; returns |x - best| / |best|."""
    x = torch.zeros(optima.shape[1])
    for _ in range(steps):
        x -= rate * workers.step(*(x - optima))
    best = optima.mean(dim=0)
    return float((x - best).norm() / best.norm())
