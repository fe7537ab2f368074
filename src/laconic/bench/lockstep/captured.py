"""All workers' passes as one CUDA graph: workers side by side on streams, and no Python between.

A worker's passes are hundreds of small kernels, which one after the other leave most of a large
card idle, and take Python longer to launch than the card to run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from laconic.bench.lockstep.passes import Eager, Passed, Passes, gradients_of, trained
from laconic.bench.work.workload import Workload

STREAMS = 8
"""Workers side by side; more fill no card, and each needs room for its activations."""

_WARM_UPS = 3
"""Steps in which libraries choose their algorithms, which a capture must not contain."""


class Captured(Passes):
    """Takes a few steps as they come, then records one and replays it.

    Gradients and losses are the same tensors in every step. Random numbers of dropout go on from
    step to step, since a replay advances torch's generator of the device.
    """

    def __init__(self, workload: Workload, models: Sequence[nn.Module], seed: int) -> None:
        self._workload, self._models, self._seed = workload, models, seed
        device = next(models[0].parameters()).device
        self._streams = [torch.cuda.Stream(device) for _ in models[:STREAMS]]
        self._parameters = [trained(model) for model in models]
        self._buffers = [_own_buffers(models, rank) for rank in range(len(models))]
        first = workload.batches(0, len(models), seed)
        self._inputs, self._targets = (torch.empty_like(part) for part in first)
        self._passed = Passed(
            torch.zeros(len(models), device=device),
            [{n: torch.zeros_like(p) for n, p in some.items()} for some in self._parameters],
        )
        self._taken = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, step: int) -> Passed:
        batch = self._workload.batches(step, len(self._models), self._seed)
        self._inputs.copy_(batch.inputs)
        self._targets.copy_(batch.targets)
        if self._taken == _WARM_UPS:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._pass_all()
        if self._graph is None:
            self._pass_all()
        else:
            self._graph.replay()
        self._taken += 1
        return self._passed

    def _pass_all(self) -> None:
        """Forks from the current stream, and joins it again."""
        home = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(home)
        workers = len(self._models)
        pairs = zip(self._inputs.chunk(workers), self._targets.chunk(workers), strict=True)
        for rank, (inputs, targets) in enumerate(pairs):
            with torch.cuda.stream(self._streams[rank % len(self._streams)]):
                self._pass(rank, inputs, targets)
        for stream in self._streams:
            home.wait_stream(stream)

    def _pass(self, rank: int, inputs: Tensor, targets: Tensor) -> None:
        output = functional_call(self._models[rank], self._buffers[rank], (inputs,))
        loss = self._workload.loss(output, targets)
        found = gradients_of(loss, self._parameters[rank])
        room = self._passed.gradients[rank]
        torch._foreach_copy_([room[name] for name in found], list(found.values()))
        self._passed.losses[rank].copy_(loss.detach())


def _own_buffers(models: Sequence[nn.Module], rank: int) -> dict[str, Tensor]:
    """What a worker writes in place of a shared model's buffers; worker 0 writes the model's."""
    if any(models[rank] is other for other in models[:rank]):
        return {name: buffer.clone() for name, buffer in models[rank].named_buffers()}
    return {}


def passes_of(workload: Workload, models: Sequence[nn.Module], seed: int) -> Passes:
    """Captured on a GPU; on a CPU one after the other."""
    kind = Captured if next(models[0].parameters()).is_cuda else Eager
    return kind(workload, models, seed)
