"""PSync: averages the compressed part of each worker's vectors and returns the rest to the worker.

Xie et al. 2020, arXiv:2007.13221.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Memory
from gradwire.comm.base import CollectiveProgram
from gradwire.engine.engine import Engine
from gradwire.errors import ConfigError
from gradwire.types import EFInput, State


@dataclass(frozen=True)
class ReturnedResidual(Memory):
    """Hands the residual to the caller of `psync` instead of adding it to the next gradient.

    It is not in the catalogue, since the caller must apply the residual.
    """

    examples: ClassVar = ({},)
    needs_contraction: ClassVar = True
    loss_scaled_keys: ClassVar = ()
    separates_residual: ClassVar = False
    is_debt: ClassVar = False

    def state(self, numel: int, device: torch.device) -> State:
        return {}

    def before(self, grad: Tensor, state: State, pending: State) -> EFInput:
        return EFInput(grad, residual_out=torch.empty_like(grad))

    def after(self, ef: EFInput, mean: Tensor, state: State, pending: State) -> Tensor:
        assert ef.residual_out is not None
        pending["residual"] = ef.residual_out
        return mean

    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        return {}

    def unsent(self, state: State) -> Tensor | None:
        return None

    def rescale(self, state: State, factor: float) -> None:
        raise ConfigError("the residual is part of the model and follows no learning rate")


def psync(engine: Engine, vectors: Mapping[str, Tensor]) -> CollectiveProgram[dict[str, Tensor]]:
    """Replaces the vectors by the mean of what was sent; returns this worker's residuals.

    A vector that was sent in full has no residual. A worker's v' is the sum of both.
    """
    yield from engine.bucket_program(list(vectors), list(vectors.values()))
    engine.end_step()
    error = engine.commit_step()
    if error is not None:
        raise error
    residuals = {name: engine.lanes[name].memory_state.pop("residual", None) for name in vectors}
    return {name: tensor for name, tensor in residuals.items() if tensor is not None}
