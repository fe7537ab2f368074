"""Reducer: averages the gradients of a training loop without DDP when `reduce` is called."""

from collections.abc import Iterable
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from gradwire.base import Compressor, Memory
from gradwire.checks import check_whole
from gradwire.comm.base import Collective, drive
from gradwire.comm.consistency import check_same
from gradwire.control.base import Controller, find_controller
from gradwire.engine.engine import NanPolicy
from gradwire.engine.plan import BUCKET_BYTES, make_plan
from gradwire.errors import ConfigError
from gradwire.integrations.comm_runner import Task
from gradwire.integrations.dense_allreduce import one_ahead, start_mean
from gradwire.integrations.handle import Handle, Options, Wanted
from gradwire.integrations.parameters import group_of, names_of

Model: TypeAlias = nn.Module | Iterable[tuple[str, nn.Parameter]]
"""A module, compiled or not, or parameters with their names."""


class Reducer(Handle):
    """Averages a model's gradients over all ranks whenever `reduce` is called, until `detach`.

    Called on all ranks of the group, which check that they agree, and before the first step that
    their parameters are the same: nobody broadcasts them. With `find_unused_parameters` ranks tell
    each other which gradients they have, a byte a parameter: one that is missing everywhere stays
    None, one that is missing somewhere counts as zero there. Without it a missing one is an error.
    """

    def __init__(
        self,
        model: Model,
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
        find_unused_parameters: bool = True,
    ) -> None:
        check_whole("reducer", "check_every", check_every, 0)
        names = names_of(model)
        tensors: dict[str, Tensor] = {name: p for p, name in names.items()}
        wanted = Wanted(compressor, memory, exchange)
        rule = find_controller(controller)
        options = Options(seed, nan_policy, check_every, checksum, rule)
        Handle.__init__(self, group_of(process_group), tensors, names, make_plan, wanted, options)
        # Whom a reducer belongs to must not live longer for it.
        self._model = ref(model) if isinstance(model, nn.Module) else None
        self._find_unused = find_unused_parameters
        self._attached = True
        self._hooks: list[RemovableHandle] = []

    def _close(self) -> None:
        self._attached = False
        for hook in self._hooks:
            hook.remove()

    def _is_attached(self) -> bool:
        return self._attached

    def reduce(self) -> None:
        """Replaces all gradients by their mean over ranks, in messages of about 25 MB."""
        self._check_attached()
        if self._model is not None and (model := self._model()) is not None:
            self._check_known(model.parameters())
        if self._passes == 0:
            check_same(self._comm, self._lanes.tensors)
        one_ahead(self._errand(message) for message in messages(self._present()))
        self._lanes.finish()
        if self._is_check_due():
            check_same(self._comm, self._lanes.tensors)
        self._end_step()

    def _check_known(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raises ConfigError for what is trained since: every rank would keep its own gradient."""
        late = sum(p.requires_grad and p not in self._parameters for p in parameters)
        if late:
            raise ConfigError(
                f"reduce: {late} parameters are trained that were not at the start; detach, and "
                "make the reducer anew"
            )

    def _errand(self, message: list[nn.Parameter]) -> Task:
        names, gradients = [self._parameters[p] for p in message], [_gradient(p) for p in message]
        if not self._is_straight():
            return partial(drive, self._lanes.talk(names, gradients), self._comm)
        self._lanes.pass_by(names, sum(g.nbytes for g in gradients))
        return start_mean(self._comm, gradients)

    def _present(self) -> list[nn.Parameter]:
        """The parameters with a gradient on any rank; it is zero where there was none."""
        missing = [name for p, name in self._parameters.items() if p.grad is None]
        if not self._find_unused and missing:
            raise ConfigError(
                f"reduce: no gradient for {missing}; freeze them on all ranks, or set "
                "find_unused_parameters=True"
            )
        wanted = self._told() if self._find_unused else [True] * len(self._parameters)
        present = [p for p, some in zip(self._parameters, wanted, strict=True) if some]
        for parameter in present:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return present

    def _told(self) -> list[bool]:
        """Whether any rank has a gradient, by parameter."""
        own = torch.tensor([p.grad is not None for p in self._parameters], device=self._device)
        told = self._comm.answer(
            Collective("gather", [own.view(torch.uint8)], [own.numel()] * self._comm.size)
        )
        some: list[bool] = torch.stack(told).any(0).tolist()
        return some

    def reduce_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduces before each step of the optimiser, until `detach`."""

        def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # The optimiser itself comes first among the arguments in some versions of torch.
            if any(callable(value) for value in (*args, *kwargs.values())):
                raise ConfigError(
                    "wrap_optimizer: step has a closure, which would compute gradients after they "
                    "were averaged; call reducer.reduce() at the closure's end instead"
                )
            self._check_known(p for group in optimizer.param_groups for p in group["params"])
            self.reduce()

        self._hooks.append(optimizer.register_step_pre_hook(before))


def messages(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that share a message: of one type, in order, about 25 MB."""
    found: list[list[nn.Parameter]] = []
    for _, alike in groupby(parameters, key=lambda p: p.dtype):
        room = -1
        for parameter in alike:
            if room < parameter.nbytes:
                found.append([])
                room = max(BUCKET_BYTES, parameter.nbytes)
            found[-1].append(parameter)
            room -= parameter.nbytes
    return found


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise ConfigError(f"reduce: a gradient is {gradient.layout}; use dense gradients")
    return gradient
