"""Forward and backward passes of all simulated workers in a step: their losses and gradients.

Workers share a model where all have the same parameters, or have one each. On a GPU all passes are
one CUDA graph with workers on parallel streams: hundreds of small kernels, one after the other,
would leave most of the GPU idle and take Python longer to launch than the GPU to run.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradwire.bench.workloads.base import Workload


class StepResult(NamedTuple):
    """Losses and gradients of a step, by worker; the next step may overwrite them."""

    losses: Tensor
    gradients: list[dict[str, Tensor]]


class Passes(ABC):
    """Passes of all workers on their own batches; they do not wait for the device."""

    @abstractmethod
    def run(self, step: int) -> StepResult:
        """Runs the passes of step number `step`; of the models only buffers change.

        Running means of a model that workers share are those of worker 0, as on a real cluster,
        where rank 0 evaluates.
        """


class EagerPasses(Passes):
    """Runs one worker after the other."""

    def __init__(self, workload: Workload, models: Sequence[nn.Module], seed: int) -> None:
        self._workload, self._models, self._seed = workload, models, seed
        # Worker 0 owns a shared model.
        self._shared_models = [
            m for m in {id(m): m for m in models}.values() if models.count(m) > 1
        ]

    def run(self, step: int) -> StepResult:
        first = self._pass(step, 0)
        saved = [buffer.clone() for model in self._shared_models for buffer in model.buffers()]
        found = [first, *(self._pass(step, rank) for rank in range(1, len(self._models)))]
        buffers = (buffer for model in self._shared_models for buffer in model.buffers())
        for buffer, own in zip(buffers, saved, strict=True):
            buffer.copy_(own)
        losses, gradients = zip(*found, strict=True)
        return StepResult(torch.stack(losses), list(gradients))

    def _pass(self, step: int, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, targets = self._workload.batch(step, rank, len(self._models), self._seed)
        model = self._models[rank]
        loss = self._workload.loss(model(inputs), targets)
        return loss.detach(), gradients_of(loss, trained(model))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients_of(loss: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters.items(), found, strict=True)
    # A parameter that the loss does not use gets a zero gradient.
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


STREAMS = 8
"""Workers in parallel; more do not use a GPU better, and each needs memory for activations."""

_WARM_UPS = 3
"""Steps before the capture, in which libraries choose their algorithms."""


class CapturedPasses(Passes):
    """Takes a few eager steps, then captures one as a CUDA graph and replays it.

    Gradients and losses are the same tensors in every step. Random numbers of dropout differ from
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
        self._result = StepResult(
            torch.zeros(len(models), device=device),
            [{n: torch.zeros_like(p) for n, p in some.items()} for some in self._parameters],
        )
        self._steps_run = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, step: int) -> StepResult:
        batch = self._workload.batches(step, len(self._models), self._seed)
        self._inputs.copy_(batch.inputs)
        self._targets.copy_(batch.targets)
        if self._steps_run == _WARM_UPS:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._pass_all()
        if self._graph is None:
            self._pass_all()
        else:
            self._graph.replay()
        self._steps_run += 1
        return self._result

    def _pass_all(self) -> None:
        """Runs all passes on side streams that fork from the current stream and join it again."""
        main_stream = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(main_stream)
        workers = len(self._models)
        pairs = zip(self._inputs.chunk(workers), self._targets.chunk(workers), strict=True)
        for rank, (inputs, targets) in enumerate(pairs):
            with torch.cuda.stream(self._streams[rank % len(self._streams)]):
                self._pass(rank, inputs, targets)
        for stream in self._streams:
            main_stream.wait_stream(stream)

    def _pass(self, rank: int, inputs: Tensor, targets: Tensor) -> None:
        output = functional_call(self._models[rank], self._buffers[rank], (inputs,))
        loss = self._workload.loss(output, targets)
        found = gradients_of(loss, self._parameters[rank])
        out = self._result.gradients[rank]
        torch._foreach_copy_([out[name] for name in found], list(found.values()))
        self._result.losses[rank].copy_(loss.detach())


def _own_buffers(models: Sequence[nn.Module], rank: int) -> dict[str, Tensor]:
    """Returns a worker's copies of a shared model's buffers; worker 0 writes the model's own."""
    if any(models[rank] is other for other in models[:rank]):
        return {name: buffer.clone() for name, buffer in models[rank].named_buffers()}
    return {}


def passes_of(workload: Workload, models: Sequence[nn.Module], seed: int) -> Passes:
    """Returns captured passes on a GPU and eager ones on a CPU."""
    kind = CapturedPasses if next(models[0].parameters()).is_cuda else EagerPasses
    return kind(workload, models, seed)
