"""Fragments: partition of the parameters, and the anchor, drift and outer step of each part.

The anchor is the value that all workers last agreed on; the drift is anchor - parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gradwire import kernels
from gradwire.checks import check_number, check_share, check_whole
from gradwire.comm.base import CollectiveProgram
from gradwire.engine.engine import Engine
from gradwire.errors import ConfigError
from gradwire.kernels.specs import Drifted
from gradwire.local.state import float_copies, room_for
from gradwire.types import State

Division: TypeAlias = int | Sequence[Sequence[str]]
"""So many parts, dealt out layer by layer; or each part as beginnings of parameters' names."""

Named: TypeAlias = dict[str, nn.Parameter]


def divide(
    method: str, parameters: Mapping[str, nn.Parameter], rounds_like: Division
) -> list[Named]:
    """The parts, each with its parameters in the model's order; every parameter is in one."""
    if isinstance(rounds_like, Sequence):
        return _by_names(method, parameters, rounds_like)
    check_whole(method, "fragments", rounds_like, 1)
    layers = list(dict.fromkeys(_layer(name) for name in parameters))
    if rounds_like > len(layers):
        raise ConfigError(f"{method}: {rounds_like} fragments of a model with {len(layers)} layers")
    # Neighbouring layers go into different parts, so that all parts are alike in depth.
    part_of = {layer: number % rounds_like for number, layer in enumerate(layers)}
    return [
        {n: p for n, p in parameters.items() if part_of[_layer(n)] == i} for i in range(rounds_like)
    ]


def _by_names(
    method: str, parameters: Mapping[str, nn.Parameter], rounds_like: Sequence[Sequence[str]]
) -> list[Named]:
    parts = [
        {name: p for name, p in parameters.items() if name.startswith(tuple(starts))}
        for starts in rounds_like
    ]
    for name in parameters:
        count = sum(name in part for part in parts)
        if count != 1:
            raise ConfigError(f"{method}: parameter {name!r} is in {count} fragments, not in one")
    if not all(parts):
        raise ConfigError(f"{method}: a fragment without parameters in {list(rounds_like)}")
    return parts


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


@dataclass(frozen=True)
class Outer:
    """The step that the anchor takes by the mean drift d: by rate (d + momentum m).

    Here m = momentum m + d, and that is Nesterov's step; without `nesterov` it is by rate m.
    """

    rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True

    def check(self, method: str) -> None:
        check_number(method, "outer_lr", self.rate)
        if not self.rate > 0:
            raise ConfigError(f"{method}: outer_lr must be positive, got {self.rate!r}")
        check_share(method, "outer_momentum", self.momentum)

    def way(self, means: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
        """What the anchor moves by, but for the rate; without momentum there are no momenta."""
        if not momenta:
            return means
        torch._foreach_mul_(momenta, self.momentum)
        torch._foreach_add_(momenta, means)
        ahead = torch._foreach_add(means, momenta, alpha=self.momentum)
        return list(ahead) if self.nesterov else momenta


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
        lanes: Engine,
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
        """The drift, or zeros if there is none under way."""
        if not self.drift:
            torch._foreach_zero_(self._room())
        return self.drift

    def depart(self) -> None:
        """Notes how far the parameters are from where they started."""
        drifts = self._room()
        if self.alpha is None:
            with self._drifted(drifts) as given:
                kernels.at(drifts[0]).depart(given, self.ahead)
        else:
            torch._foreach_copy_(drifts, self._starts())
            torch._foreach_sub_(drifts, self._flat())

    def talk(self) -> CollectiveProgram[None]:
        """The drift becomes the mean of all workers', as far as the method says it."""
        yield from self.lanes.talk(list(self.drift), list(self.drift.values()))
        self.lanes.finish()
        complaint = self.lanes.settle()
        if complaint is not None:
            raise complaint

    def arrive(self) -> None:
        """Moves the anchor, and the parameters with it."""
        means = self.outer.way(list(self.drift.values()), list(self.momentum.values()))
        if self.alpha is None:
            with self._drifted(means) as given:
                kernels.at(means[0]).arrive(given, self.outer.rate)
        else:
            torch._foreach_sub_(list(self.anchor.values()), means, alpha=self.outer.rate)
            self._go_there(self.alpha)
        self.drift.clear()

    def lose(self) -> None:
        """The mean is void: what has led away from the anchor is all to be told anew."""
        self.drift.clear()
        for name, base in self.base.items():
            base.copy_(self.anchor[name].to(self.parameters[name].dtype))

    def relay(self) -> None:
        """Arrives and departs at once, which takes fewer passes over memory."""
        if self.alpha is not None or self.momentum:
            self.arrive()
            self.depart()
            return
        drifts = list(self.drift.values())
        with self._drifted(drifts) as given:
            kernels.at(drifts[0]).relay(given, self.outer.rate, self.ahead)

    def sync(self) -> CollectiveProgram[None]:
        """All of it at once."""
        self.depart()
        yield from self.talk()
        self.arrive()

    def _go_there(self, alpha: float) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                there = self.anchor[name].view(parameter.shape).to(parameter.dtype)
                parameter.copy_(there.lerp(parameter, alpha) if alpha else there)

    def _room(self) -> list[Tensor]:
        """Memory for the drift, or where it is."""
        for name, anchor in self.anchor.items():
            if name not in self.drift:
                self.drift[name] = room_for(self._rooms, name, anchor)
        return list(self.drift.values())

    def _flat(self) -> list[Tensor]:
        return [parameter.detach().reshape(-1) for parameter in self.parameters.values()]

    @contextmanager
    def _drifted(self, drifts: list[Tensor]) -> Iterator[Drifted]:
        """All there is to write to; parameters with gaps are copied there and back."""
        here = self._flat()
        yield Drifted(here, list(self.base.values()), list(self.anchor.values()), drifts)
        for parameter, vector in zip(self.parameters.values(), here, strict=True):
            if vector.data_ptr() != parameter.data_ptr():
                parameter.detach().copy_(vector.view(parameter.shape))

    def _starts(self) -> list[Tensor]:
        """Where the parameters were put, which in 16 bits is only near the anchor."""
        return [self.anchor[name].to(p.dtype) for name, p in self.parameters.items()]
