"""Some parameters, what all workers last agreed that they are, and the way of the drift from it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laconic.checks import check_number, check_share
from laconic.comm.base import Conversation
from laconic.errors import ConfigError
from laconic.lanes import Lanes
from laconic.local.records import float_copies, room_for
from laconic.types import State


@dataclass(frozen=True)
class Outer:
    """The step that the anchor takes by the mean drift d: by rate (d + momentum m).

    Here m = momentum m + d, and that is Nesterov's step; without `nesterov` it is by rate m.
    """

    rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True

    def __post_init__(self) -> None:
        check_number("outer step", "outer_lr", self.rate)
        if not 0 < self.rate < float("inf"):
            raise ConfigError(f"outer_lr must be positive, got {self.rate!r}")
        check_share("outer step", "outer_momentum", self.momentum)

    def move(self, anchor: Tensor, mean: Tensor, momentum: Tensor | None) -> None:
        """Takes the step, in place."""
        if momentum is not None:
            momentum.mul_(self.momentum).add_(mean)
            mean = mean.add(momentum, alpha=self.momentum) if self.nesterov else momentum
        anchor.sub_(mean, alpha=self.rate)


class Fragment:
    """Parameters that are told together: all of a model, or one of several parts of it."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], lanes: Lanes, outer: Outer) -> None:
        self.parameters, self.lanes, self.outer = parameters, lanes, outer
        self.anchor = float_copies(parameters)
        zeros = {name: torch.zeros_like(anchor) for name, anchor in self.anchor.items()}
        self.momentum: State = zeros if outer.momentum else {}
        self.drift: State = {}
        self._rooms: State = {}

    def begin(self) -> None:
        """Takes the parameters as they are for what all workers agree on."""
        for name, copy in float_copies(self.parameters).items():
            self.anchor[name].copy_(copy)

    def hold(self) -> State:
        """The drift, with room for it where there is none under way."""
        for name, anchor in self.anchor.items():
            if name not in self.drift:
                self.drift[name] = torch.zeros_like(anchor)
        return self.drift

    def depart(self) -> None:
        """Notes how far the parameters are from where they started."""
        for name, parameter in self.parameters.items():
            # From where the parameter was put, which in 16 bits is only near the anchor.
            drift = room_for(self._rooms, name, self.anchor[name])
            drift.copy_(self.anchor[name].to(parameter.dtype))
            self.drift[name] = drift.sub_(parameter.detach().reshape(-1))

    def talk(self) -> Conversation[None]:
        """The drift becomes the mean of all workers', as far as the method says it."""
        yield from self.lanes.talk(list(self.drift), list(self.drift.values()))
        self.lanes.finish()
        complaint = self.lanes.settle()
        if complaint is not None:
            raise complaint

    def arrive(self, alpha: float) -> None:
        """Moves the anchor, and puts the parameters there; the share `alpha` stays where it is."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self.outer.move(self.anchor[name], self.drift[name], self.momentum.get(name))
                there = self.anchor[name].view(parameter.shape).to(parameter.dtype)
                parameter.copy_(there.lerp(parameter, alpha) if alpha else there)
        self.drift.clear()

    def sync(self, alpha: float) -> Conversation[None]:
        """All of it at once."""
        self.depart()
        yield from self.talk()
        self.arrive(alpha)
