"""Reducer: averages the gradients of training loops without DDP, when asked."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.base import Compressor
from gradwire.comm.base import Collective, run_program
from gradwire.comm.consistency import check_equal_tensors
from gradwire.engine.plan import BUCKET_BYTES, make_plan
from gradwire.errors import ConfigError
from gradwire.integrations.comm_runner import Task
from gradwire.integrations.dense_allreduce import run_one_ahead, start_mean
from gradwire.integrations.handle import Handle
from gradwire.integrations.parameters import group_of, names_of
from gradwire.integrations.settings import Options, Settings, settings_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

Model: TypeAlias = nn.Module | Iterable[tuple[str, nn.Parameter]]
"""A module, compiled or not, or parameters with their names."""


class Reducer(Handle):
    """Averages a model's gradients over all ranks whenever `reduce` is called, until `detach`.

    Called on all ranks of the group, which check that they agree, and before the first step that
    their parameters are equal: nothing broadcasts them. With `find_unused_parameters` ranks
    exchange which gradients they have, a byte per parameter: one that is missing on all ranks stays
    None, one that is missing on some counts as zero there. Without it a missing gradient is an
    error. The options are the fields of `Settings`.
    """

    def __init__(
        self,
        model: Model,
        compressor: Compressor | str | Settings,
        *,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        find_unused_parameters: bool = True,
        **options: "Unpack[Options]",
    ) -> None:
        settings = settings_of(compressor, options)
        settings.refuse("reducer", "least_bytes", "chunk_bytes")
        names = names_of(model)
        tensors: dict[str, Tensor] = {name: p for p, name in names.items()}
        Handle.__init__(self, group_of(process_group), tensors, names, make_plan, settings)
        # The model's owner must not live longer for its reducer.
        self._model = ref(model) if isinstance(model, nn.Module) else None
        self._find_unused = find_unused_parameters
        self._attached = True
        self._when_detached: list[Callable[[], object]] = []

    def _close(self) -> None:
        self._attached = False
        while self._when_detached:
            self._when_detached.pop()()

    def _is_attached(self) -> bool:
        return self._attached

    def _is_in_backward(self) -> bool:
        # Gradients are exchanged by `reduce` alone, which holds the lock.
        return False

    def _complete_step(self) -> None:
        pass

    def reduce(self) -> None:
        """Replaces all gradients by their mean over ranks, in messages of about 25 MB."""
        with self._lock:
            self._reduce()

    def _reduce(self) -> None:
        self._check_attached()
        if self._model is not None and (model := self._model()) is not None:
            self._check_known(model.parameters())
        if self._passes == 0:
            check_equal_tensors(self._check_comm, self._engine.tensors)
        run_one_ahead(self._start(message) for message in messages(self._present()))
        self._engine.end_step()
        if self._is_check_due():
            check_equal_tensors(self._check_comm, self._engine.tensors)
        self._end_step()

    def _check_known(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raises ConfigError for parameters unfrozen since: every rank would keep its gradient."""
        new = sum(p.requires_grad and p not in self._parameters for p in parameters)
        if new:
            raise ConfigError(
                f"reduce: {new} parameters are trained that were not at the start; detach, and "
                "make the reducer anew"
            )

    def _start(self, message: list[nn.Parameter]) -> Task:
        names, gradients = [self._parameters[p] for p in message], [_gradient(p) for p in message]
        if not self._is_plain_mean():
            return partial(run_program, self._engine.bucket_program(names, gradients), self._comm)
        self._engine.count_dense_bucket(names, sum(g.nbytes for g in gradients))
        return start_mean(self._comm, gradients)

    def _present(self) -> list[nn.Parameter]:
        """Returns the parameters with a gradient on any rank; creates zeros where it is missing."""
        missing = [name for p, name in self._parameters.items() if p.grad is None]
        if not self._find_unused and missing:
            raise ConfigError(
                f"reduce: no gradient for {missing}; freeze them on all ranks, or set "
                "find_unused_parameters=True"
            )
        wanted = self._on_any_rank() if self._find_unused else [True] * len(self._parameters)
        present = [p for p, some in zip(self._parameters, wanted, strict=True) if some]
        for parameter in present:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return present

    def _on_any_rank(self) -> list[bool]:
        """Returns whether any rank has a gradient, by parameter."""
        own = torch.tensor([p.grad is not None for p in self._parameters], device=self._device)
        flags = self._comm.run(
            Collective("gather", [own.view(torch.uint8)], [own.numel()] * self._comm.size)
        )
        some: list[bool] = torch.stack(flags).any(0).tolist()
        return some

    def reduce_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Calls `reduce` before each step of the optimiser, until `detach`.

        Meanwhile this reducer is the optimiser's attribute `gradwire`, which torch neither pickles
        nor copies with it.
        """

        def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # The optimiser itself comes first among the arguments in some versions of torch.
            if any(callable(value) for value in (*args, *kwargs.values())):
                raise ConfigError(
                    "wrap_optimizer: step has a closure, which would compute gradients after they "
                    "were averaged; make a gradwire.Reducer instead, and call its reduce() at the "
                    "closure's end"
                )
            self._check_known(p for group in optimizer.param_groups for p in group["params"])
            self.reduce()

        vars(optimizer)["gradwire"] = self
        self._when_detached += [
            optimizer.register_step_pre_hook(before).remove,
            partial(vars(optimizer).pop, "gradwire"),
        ]


def messages(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups parameters that share a message: of one dtype, in order, about 25 MB."""
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
