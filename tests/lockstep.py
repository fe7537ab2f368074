"""One parameter on a few simulated ranks, for tests of memories and exchanges."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.base import Compressor
from gradwire.comm.simulated import Simulated
from gradwire.engine.plan import open_lane
from gradwire.engine.step import Lane, exchange, together
from gradwire.spec import parse, parse_memory
from gradwire.types import EncodeContext


class Lockstep:
    """A lane a rank, opened without a plan, so that any size meets the memory and the exchange."""

    def __init__(self, spec: str, memory: str, way: str, numel: int, size: int) -> None:
        contexts = [EncodeContext((numel,), rank, size) for rank in range(size)]
        self.lanes = open_lanes(parse(spec), memory, way, contexts)
        self.network = Simulated(size)

    def step(self, *grads: Tensor) -> Tensor:
        """What the gradient becomes on rank 0; on the others it is the same to the bit."""
        return mean_of(self.network, self.lanes, grads)

    def kept(self, key: str) -> Tensor:
        """What all ranks keep under this key, a row a rank."""
        return torch.stack([lane.memory_state[key] for lane in self.lanes])


def open_lanes(
    codec: Compressor, memory: str, way: str, contexts: Sequence[EncodeContext]
) -> list[Lane]:
    """A lane a turn, on the CPU."""
    device = torch.device("cpu")
    return [open_lane("w", codec, parse_memory(memory), way, ctx, device) for ctx in contexts]


def mean_of(network: Simulated, lanes: Sequence[Lane], grads: Sequence[Tensor]) -> Tensor:
    """What a step makes of the gradients on rank 0; on the others it is the same to the bit."""
    outs = [grad.clone() for grad in grads]
    pairs = zip(outs, lanes, strict=True)
    network.run([together([exchange(out, lane)]) for out, lane in pairs])
    for lane in lanes:
        lane.keep()
    for out in outs:
        assert torch.equal(out.view(torch.int32), outs[0].view(torch.int32))
    return outs[0]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance_after(workers: Lockstep, optima: Tensor, steps: int, rate: float) -> float:
    """Descends on the mean of |x - optimum|²/2 from zero; 1 is as far from its best as zero is."""
    x = torch.zeros(optima.shape[1])
    for _ in range(steps):
        x -= rate * workers.step(*(x - optima))
    best = optima.mean(dim=0)
    return float((x - best).norm() / best.norm())
