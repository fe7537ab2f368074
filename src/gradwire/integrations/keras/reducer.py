"""Reducer: averages gradients of Keras and TensorFlow over a torch process group."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.base import Compressor, Memory
from gradwire.checks import check_whole
from gradwire.comm.base import Collective, drive
from gradwire.comm.consistency import check_same
from gradwire.control.base import Controller, find_controller
from gradwire.engine.engine import NanPolicy
from gradwire.engine.ownership import check_free, claim, release
from gradwire.engine.plan import make_plan
from gradwire.errors import ConfigError
from gradwire.integrations.handle import Handle, Options, Wanted
from gradwire.integrations.keras.variables import framework_of, name_of, names_of, stand_in
from gradwire.integrations.parameters import group_of
from gradwire.integrations.reducer import messages

UNTOLD = 0.0
"""In place of a loss scale, where nobody tells it with the gradients."""


class Reducer(Handle):
    """Averages the gradients of variables over all ranks, until `detach`.

    Made on all ranks of the group, which check that they agree, and in the first `reduce` that
    their variables are the same: nobody broadcasts them. There they also tell each other, once,
    which gradients they have: one that is missing on all ranks stays None, and one that is missing
    on some counts as zero there, then and later.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        compressor: Compressor | str,
        *,
        memory: Memory | str | None = None,
        exchange: str = "auto",
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        seed: int = 0,
        nan_policy: NanPolicy = "propagate",
        check_every: int = 0,
        checksum: bool = False,
        controller: Controller | str | None = None,
    ) -> None:
        check_whole("reducer", "check_every", check_every, 0)
        self._framework = framework = framework_of(variables)
        framework.check()
        names = names_of(variables)
        check_free(zip(variables, names, strict=True))
        stand_ins = {
            stand_in(v, framework.device(v)): name for v, name in zip(variables, names, strict=True)
        }
        tensors: dict[str, Tensor] = {name: p for p, name in stand_ins.items()}
        wanted = Wanted(compressor, memory, exchange)
        rule = find_controller(controller)
        options = Options(seed, nan_policy, check_every, checksum, rule)
        group = group_of(process_group)
        Handle.__init__(self, group, tensors, stand_ins, make_plan, wanted, options)
        self._variables = list(variables)
        self._wanted: list[bool] | None = None
        self._attached = True
        self.when_detached: Callable[[], None] = lambda: None
        claim(variables, self)

    def _close(self) -> None:
        self._attached = False
        release(self._variables, self)
        self.when_detached()

    def _is_attached(self) -> bool:
        return self._attached

    def is_for(self, variables: Sequence[Any]) -> bool:
        """Whether it was made for just these variables."""
        # Variables compare by what they hold.
        return [id(v) for v in self._variables] == [id(v) for v in variables]

    def reduce(
        self, gradients: Sequence[Any], variables: Any = None, scale: Any = UNTOLD
    ) -> list[Any]:
        """The means over ranks of these gradients; None stays None where no rank has one.

        They are those of the variables given, or else of all variables in order. `scale` is their
        loss scale, if that is not left to `loss_scale_changed`. Inside a graph this puts the
        exchange there.
        """
        return self._framework.plainly(self._reduce)(gradients, variables, scale)

    def _reduce(self, gradients: Sequence[Any], variables: Any, scale: Any) -> list[Any]:
        self._check_attached()
        self._framework.check()
        asked = self._places(gradients, variables)
        own = [gradients[asked[i]] if i in asked else None for i in range(len(self._variables))]
        if self._wanted is None:
            self._wanted = self._told(own)
            self._check_same()
        self._check_expected(own)
        some = [i for i, wanted in enumerate(self._wanted) if wanted]
        means = self._framework.through(self._exchange, [self._filled(own, i) for i in some], scale)
        found = dict(zip(some, means, strict=True))
        return [found.get(i) for i in asked]

    def _places(self, gradients: Sequence[Any], variables: Any) -> dict[int, int]:
        """Which gradient is whose: from places among all variables to those among the given."""
        variables = self._variables if variables is None else list(variables)
        if len(gradients) != len(variables):
            raise ConfigError(f"reduce: {len(gradients)} gradients of {len(variables)} variables")
        places = {id(variable): place for place, variable in enumerate(self._variables)}
        strangers = [name_of(v) for v in variables if id(v) not in places]
        if strangers:
            raise ConfigError(
                f"reduce: {strangers} came after this reducer was made; detach it and mount anew"
            )
        return {places[id(variable)]: i for i, variable in enumerate(variables)}

    def _told(self, gradients: Sequence[Any]) -> list[bool]:
        """Whether any rank has a gradient, by variable."""
        own = torch.tensor([g is not None for g in gradients], device=self._device)
        told = self._comm.answer(
            Collective("gather", [own.view(torch.uint8)], [own.numel()] * self._comm.size)
        )
        some: list[bool] = torch.stack(told).any(0).tolist()
        return some

    def _check_expected(self, gradients: Sequence[Any]) -> None:
        assert self._wanted is not None
        expected = zip(self._parameters.values(), gradients, self._wanted, strict=True)
        late = [name for name, g, wanted in expected if g is not None and not wanted]
        if late:
            raise ConfigError(
                f"reduce: {late} had no gradient on any rank in the first step; other ranks do not "
                "expect one now. Detach and mount anew, on all ranks"
            )

    def _filled(self, gradients: Sequence[Any], place: int) -> Any:
        gradient = gradients[place]
        if gradient is None:
            return self._framework.zeros_like(self._variables[place])
        return self._framework.dense(gradient)

    def _exchange(self, gradients: list[Tensor], scale: float) -> list[Tensor]:
        """One step: gradients, which stay as they are, to their means."""
        self._check_attached()
        assert self._wanted is not None
        if scale != UNTOLD:
            self._lanes.follow_loss_scale(scale)
        some = [p for p, wanted in zip(self._parameters, self._wanted, strict=True) if wanted]
        given = dict(zip(some, gradients, strict=True))
        means: dict[nn.Parameter, Tensor] = {}
        for message in messages(some):
            landed = _landed([given[p] for p in message])
            drive(self._lanes.talk([self._parameters[p] for p in message], landed), self._comm)
            means |= zip(message, landed, strict=True)
        self._lanes.finish()
        if self._is_check_due():
            self._check_same()
        self._end_step()
        return [means[p].to(given[p].dtype) for p in some]

    def _check_same(self) -> None:
        values = self._framework.values(self._variables)
        check_same(self._comm, dict(zip(self._parameters.values(), values, strict=True)))


def _landed(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Copies side by side, since a step is made in place, and what is lent must stay as it is."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    pieces = flat.split([gradient.numel() for gradient in gradients])
    return [piece.view(g.shape) for piece, g in zip(pieces, gradients, strict=True)]
