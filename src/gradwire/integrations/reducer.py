"""Reducer: averages the gradients of training loops without DDP, when asked."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.auto.auto import Auto
from gradwire.auto.optimizers import find_adaptive
from gradwire.comm.base import Collective, run_program
from gradwire.comm.consistency import check_equal_tensors
from gradwire.engine.make_plan import BUCKET_BYTES, make_plan
from gradwire.errors import ConfigError
from gradwire.integrations.comm_runner import Task
from gradwire.integrations.dense_allreduce import run_one_ahead, start_mean
from gradwire.integrations.handle import Handle
from gradwire.integrations.parameters import group_of, names_of
from gradwire.integrations.settings import Options, Settings, settings_of
from gradwire.policies import MethodSpec
from gradwire.wire.layout import split

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
    error. The options are the fields of `Settings`; `optimizer` is for "auto"
    (docs/explanation/auto.md).
    """

    def __init__(
        self,
        model: Model,
        compressor: MethodSpec | Auto | Settings,
        *,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        find_unused_parameters: bool = True,
        optimizer: torch.optim.Optimizer | None = None,
        **options: "Unpack[Options]",
    ) -> None:
        settings = settings_of(compressor, options)
        settings.refuse("reducer", "least_bytes", "chunk_bytes")
        names = names_of(model)
        tensors: dict[str, Tensor] = {name: p for p, name in names.items()}
        adaptive = find_adaptive(settings.auto(), optimizer)
        group = group_of(process_group)
        Handle.__init__(self, group, tensors, names, make_plan, settings, adaptive=adaptive)
        # The model's owner must not live longer for its reducer.
        self._model = ref(model) if isinstance(model, nn.Module) else None
        self._find_unused = find_unused_parameters
        self._present_before: list[nn.Parameter] = []
        """The parameters with a gradient on any rank, in the last pass."""
        self._repeated_message: list[nn.Parameter] | None = None
        """These, if they were the same in the pass before that and fit into one message."""
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

    def _count_framework_passes(self) -> None:
        pass

    def _prepare_own_exchange(self, requester: str) -> Callable[[], None]:
        return lambda: None

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
        run_one_ahead(self._starts())
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

    def _starts(self) -> Iterator[Task]:
        """Starts one message after the other, and yields the task that completes it."""
        if not self._find_unused:
            missing = [name for p, name in self._parameters.items() if p.grad is None]
            if missing:
                raise ConfigError(
                    f"reduce: no gradient for {missing}; freeze them on all ranks, or set "
                    "find_unused_parameters=True"
                )
            yield from (self._start(message) for message in messages(self._parameters))
            return
        expected, flat = self._expected_message(), None
        if expected is None:
            flags = self._comm.run(self._presence())
            some = torch.stack(flags).any(0).tolist()
        else:
            flat = self._mean_with_flags(expected)
            some = (flat[-len(self._parameters) :] > 0).tolist()
        present = [p for p, on_any in zip(self._parameters, some, strict=True) if on_any]
        for parameter in present:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        repeated = _same(present, self._present_before)
        if not repeated:
            self._present_before, self._repeated_message = present, None
        elif self._repeated_message is None:
            found = messages(present)
            self._repeated_message = found[0] if len(found) == 1 and len(found[0]) > 1 else None
        if flat is not None and repeated:
            gradients = self._count_dense(present)
            torch._foreach_copy_(gradients, split(flat[: -len(self._parameters)], gradients))
        else:
            yield from (self._start(message) for message in messages(present))

    def _presence(self) -> Collective:
        """Sends to all ranks which parameters have a gradient on this one."""
        own = torch.tensor([p.grad is not None for p in self._parameters], device=self._device)
        return Collective("gather", [own.view(torch.uint8)], [own.numel()] * self._comm.size)

    def _expected_message(self) -> list[nn.Parameter] | None:
        """Returns the only message of the last two passes, if it was a dense mean of several.

        Whether gradients are present can then travel with it: if others are present now, the means
        are dropped, and sent again. All ranks decide alike.
        """
        return self._repeated_message if self._is_plain_mean() else None

    def _mean_with_flags(self, message: list[nn.Parameter]) -> Tensor:
        """Returns the means of gradients, flat, and the share of ranks that have each of all."""
        gradients = [torch.zeros_like(p) if p.grad is None else _gradient(p) for p in message]
        own = [p.grad is not None for p in self._parameters]
        flags = torch.tensor(own, dtype=gradients[0].dtype, device=self._device)
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), flags])
        start_mean(self._comm, [flat])()
        return flat

    def _count_dense(self, message: list[nn.Parameter]) -> list[Tensor]:
        """Counts a message whose gradients are averaged here, and returns these."""
        names, gradients = [self._parameters[p] for p in message], [_gradient(p) for p in message]
        self._engine.count_dense_bucket(names, sum(g.nbytes for g in gradients))
        return gradients

    def _start(self, message: list[nn.Parameter]) -> Task:
        if self._is_plain_mean():
            return start_mean(self._comm, self._count_dense(message))
        names, gradients = [self._parameters[p] for p in message], [_gradient(p) for p in message]
        return partial(run_program, self._engine.bucket_program(names, gradients), self._comm)

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


def _same(one: list[nn.Parameter], other: list[nn.Parameter]) -> bool:
    return [id(p) for p in one] == [id(p) for p in other]


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise ConfigError(f"reduce: a gradient is {gradient.layout}; use dense gradients")
    return gradient
