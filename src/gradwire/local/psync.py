"""PSync: averages the compressed part of each worker's vectors and returns the rest to the worker.

Xie et al. 2020, arXiv:2007.13221.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.base import Memory
from gradwire.comm.base import Conversation
from gradwire.engine.engine import Lanes
from gradwire.errors import ConfigError
from gradwire.types import Given, State


@dataclass(frozen=True)
class Aside(Memory):
    """Hands over what was not said, and remembers nothing of it itself.

    It is no memory of the catalogue: who asks for what was not said must put it to use.
    """

    examples: ClassVar = ({},)
    needs_contraction: ClassVar = True
    units: ClassVar = ()
    keeps_apart: ClassVar = False
    owes: ClassVar = False

    def state(self, numel: int, device: torch.device) -> State:
        return {}

    def before(self, grad: Tensor, now: State, then: State) -> Given:
        return Given(grad, left=torch.empty_like(grad))

    def after(self, given: Given, mean: Tensor, now: State, then: State) -> Tensor:
        assert given.left is not None
        then["left"] = given.left
        return mean

    def combined(self, states: Sequence[State], weights: Sequence[float]) -> State:
        return {}

    def waiting(self, state: State) -> Tensor | None:
        return None

    def rescale(self, state: State, factor: float) -> None:
        raise ConfigError("what was not said is in the model, and follows no learning rate")


def psync(lanes: Lanes, vectors: Mapping[str, Tensor]) -> Conversation[dict[str, Tensor]]:
    """The vectors become the mean of what was said of them; returns what this worker did not say.

    A vector that was said in full has no entry there. A worker's v' is the sum of both.
    """
    yield from lanes.talk(list(vectors), list(vectors.values()))
    lanes.finish()
    complaint = lanes.settle()
    if complaint is not None:
        raise complaint
    left = {name: lanes.lanes[name].kept.pop("left", None) for name in vectors}
    return {name: tensor for name, tensor in left.items() if tensor is not None}
