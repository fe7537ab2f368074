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
class Aside(Memory):
    """Hands over what was not said, and remembers nothing of it itself.

    It is no memory of the catalogue: who asks for what was not said must put it to use.
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
        pending["left"] = ef.residual_out
        return mean

    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        return {}

    def unsent(self, state: State) -> Tensor | None:
        return None

    def rescale(self, state: State, factor: float) -> None:
        raise ConfigError("what was not said is in the model, and follows no learning rate")


def psync(lanes: Engine, vectors: Mapping[str, Tensor]) -> CollectiveProgram[dict[str, Tensor]]:
    """The vectors become the mean of what was said of them; returns what this worker did not say.

    A vector that was said in full has no entry there. A worker's v' is the sum of both.
    """
    yield from lanes.talk(list(vectors), list(vectors.values()))
    lanes.finish()
    complaint = lanes.settle()
    if complaint is not None:
        raise complaint
    residual_out = {name: lanes.lanes[name].memory_state.pop("left", None) for name in vectors}
    return {name: tensor for name, tensor in residual_out.items() if tensor is not None}
