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

    def move(self, anchors: list[Tensor], means: list[Tensor], momenta: list[Tensor]) -> None:
        """Takes the step, in place; without momentum there are no momenta."""
        if momenta:
            torch._foreach_mul_(momenta, self.momentum)
            torch._foreach_add_(momenta, means)
            ahead = torch._foreach_add(means, momenta, alpha=self.momentum)
            means = list(ahead) if self.nesterov else momenta
        torch._foreach_sub_(anchors, means, alpha=self.rate)


class Fragment:
    """Parameters that are told together: all of a model, or one of several parts of it.

    When the mean arrives, the share `alpha` of a parameter stays where steps have led meanwhile.
    With None all of these steps are kept, on top of the mean, and told with the next drift. `base`
    is then where a parameter would be without the steps that have yet to be told: at the anchor,
    but for what its type rounds off, of which nobody is told. Until the mean arrives, parameters
    are where the share `ahead` of what was told leads.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        lanes: Lanes,
        outer: Outer,
        alpha: float | None,
        ahead: float,
    ) -> None:
        self.parameters, self.lanes, self.outer = parameters, lanes, outer
        self.alpha, self.ahead = alpha, ahead
        self.anchor = float_copies(parameters)
        zeros = {name: torch.zeros_like(anchor) for name, anchor in self.anchor.items()}
        self.momentum: State = zeros if outer.momentum else {}
        self.base: State = float_copies(parameters) if alpha is None else {}
        self.drift: State = {}
        self._rooms: State = {}

    def begin(self) -> None:
        """Takes the parameters as they are for what all workers agree on."""
        for name, copy in float_copies(self.parameters).items():
            self.anchor[name].copy_(copy)
            if self.base:
                self.base[name].copy_(copy)

    def hold(self) -> State:
        """The drift, with room for it where there is none under way."""
        for name, anchor in self.anchor.items():
            if name not in self.drift:
                self.drift[name] = torch.zeros_like(anchor)
        return self.drift

    def depart(self) -> None:
        """Notes how far the parameters are from where they started."""
        for name, anchor in self.anchor.items():
            self.drift[name] = room_for(self._rooms, name, anchor)
        drifts, now = list(self.drift.values()), self._flat()
        torch._foreach_copy_(drifts, self._starts())
        torch._foreach_sub_(drifts, now)
        if self.ahead < 1:
            self._step_back(drifts)
        if self.base:
            torch._foreach_copy_(list(self.base.values()), self._flat())

    def talk(self) -> Conversation[None]:
        """The drift becomes the mean of all workers', as far as the method says it."""
        yield from self.lanes.talk(list(self.drift), list(self.drift.values()))
        self.lanes.finish()
        complaint = self.lanes.settle()
        if complaint is not None:
            raise complaint

    def arrive(self) -> None:
        """Moves the anchor, and the parameters with it."""
        states = self.anchor, self.drift, self.momentum
        self.outer.move(*(list(state.values()) for state in states))
        self.drift.clear()
        if self.alpha is None:
            self._go_on()
        else:
            self._go_there(self.alpha)

    def sync(self) -> Conversation[None]:
        """All of it at once."""
        self.depart()
        yield from self.talk()
        self.arrive()

    def _go_there(self, alpha: float) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                there = self.anchor[name].view(parameter.shape).to(parameter.dtype)
                parameter.copy_(there.lerp(parameter, alpha) if alpha else there)

    def _go_on(self) -> None:
        """Puts parameters at the anchor plus the steps since departure, which stay untold."""
        bases, parameters = list(self.base.values()), list(self.parameters.values())
        since = torch._foreach_sub(self._flat(), bases)
        sums = torch._foreach_add(list(self.anchor.values()), since)
        there = [t.to(p.dtype) for t, p in zip(sums, parameters, strict=True)]
        torch._foreach_copy_(bases, there)
        torch._foreach_sub_(bases, since)
        shaped = [t.view(p.shape) for t, p in zip(there, parameters, strict=True)]
        torch._foreach_copy_([p.detach() for p in parameters], shaped)

    def _step_back(self, drifts: list[Tensor]) -> None:
        """Undoes a share of what is told, which the mean will bring in full."""
        parameters = [parameter.detach() for parameter in self.parameters.values()]
        shaped = [drift.view(p.shape) for p, drift in zip(parameters, drifts, strict=True)]
        torch._foreach_add_(parameters, shaped, alpha=1 - self.ahead)

    def _flat(self) -> list[Tensor]:
        return [parameter.detach().reshape(-1) for parameter in self.parameters.values()]

    def _starts(self) -> list[Tensor]:
        """Where the parameters were put, which in 16 bits is only near the anchor."""
        if self.base:
            return list(self.base.values())
        return [self.anchor[name].to(p.dtype) for name, p in self.parameters.items()]
