"""Refusal of a DistributedDataParallel that averages all workers of a local method at every step.

The method would then save nothing, though its statistics would show a ratio. A DDP over a part of
the workers, or over other ranks, such as those of one node, is legal.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from gradwire.errors import ConfigError


def check_no_ddp(method: str, model: nn.Module, ranks: Sequence[int]) -> None:
    """Raises ConfigError if the model is, or has in it, a DDP over all of these ranks."""
    for path, module in model.named_modules():
        if isinstance(module, DDP) and _spans(module, ranks):
            raise ConfigError(_refusal(method, f"{path or 'the model'} is", module))


def guard_forward(
    method: str, model: nn.Module, parameters: Iterable[nn.Parameter], ranks: Sequence[int]
) -> RemovableHandle | None:
    """Registers a hook that raises ConfigError if a DDP over all of these ranks calls the model.

    A model does not know the DDP around it before that. Returns None where there can be none, and
    for modules of TorchScript, which have no hooks.
    """
    if len(ranks) < 2 or isinstance(model, torch.jit.ScriptModule):
        return None
    return model.register_forward_pre_hook(_Guard(method, list(parameters), ranks))


class _Guard:
    """The hook of a model in the context of a method; its copies, in copied models, do nothing."""

    def __init__(
        self, method: str = "", parameters: Sequence[nn.Parameter] = (), ranks: Sequence[int] = ()
    ) -> None:
        self.method, self.parameters, self.ranks = method, parameters, ranks

    def __call__(self, module: nn.Module, args: object) -> None:
        text = self.conflict()
        if text is not None:
            raise ConfigError(text)

    def conflict(self) -> str | None:
        """Returns the error of a DDP that calls the model and averages its parameters."""
        # torch has it for its compiler; a module has no reference to the DDP around it.
        ddp = cast(DDP | None, DDP._get_active_ddp_module())
        if ddp is None or not self._is_averaged_by(ddp):
            return None
        return _refusal(self.method, "the model is called by", ddp)

    # As torch.compiler.assume_constant_result does, whose import takes seconds: a compiled model
    # evaluates it once, when it is traced, and its graph does not break.
    conflict.__dict__["_dynamo_marked_constant"] = True

    def _is_averaged_by(self, ddp: DDP) -> bool:
        """Returns whether a DDP will exchange gradients of the method's parameters."""
        if not (ddp.require_backward_grad_sync and torch.is_grad_enabled()):
            return False
        ignored: set[str] = ddp.parameters_to_ignore
        exchanged = {id(p) for n, p in ddp.module.named_parameters() if n not in ignored}
        return _spans(ddp, self.ranks) and any(id(p) in exchanged for p in self.parameters)

    def __reduce__(self) -> tuple[type["_Guard"], tuple[()]]:
        return _Guard, ()


def _spans(ddp: DDP, ranks: Sequence[int]) -> bool:
    return len(ranks) > 1 and set(ranks) <= set(dist.get_process_group_ranks(ddp.process_group))


def _refusal(method: str, what: str, ddp: DDP) -> str:
    ranks = dist.get_process_group_ranks(ddp.process_group)
    return (
        f"{method}: {what} a DistributedDataParallel over ranks {ranks}, which averages the "
        "gradients of all workers at every step, so that a local method would save nothing; train "
        "the plain module, or give DistributedDataParallel the process_group of one node"
    )
