"""torch's own way to compress DDP: a state and a hook for `model.register_comm_hook`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from gradwire.auto.auto import Auto
from gradwire.auto.optimizers import find_adaptive
from gradwire.errors import ConfigError
from gradwire.integrations.ddp import attach_planned, trained_parameters
from gradwire.integrations.hook_slot import HookSlot, ddp_hook, take_slot
from gradwire.integrations.settings import Options, Settings, settings_of
from gradwire.policies import MethodSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

CommHook: TypeAlias = Callable[[HookSlot, dist.GradBucket], Future[Tensor]]  # type: ignore[name-defined]


def comm_hook(
    compressor: MethodSpec | Auto | Settings,
    model: DDP | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: "Unpack[Options]",
) -> tuple[HookSlot, CommHook]:
    """Returns `state` and `hook` for `model.register_comm_hook(state, hook)`.

    `state.link` is the handle that `attach` returns, which registers the hook itself. The model is
    needed before the first bucket comes, since a bucket shows neither the names of parameters nor
    the process group; the hook is registered with this model, before its first forward pass.
    """
    if model is None:
        raise ConfigError(
            "comm_hook: pass the DistributedDataParallel too, comm_hook(method, model): the names "
            "of parameters, the process group and the number of buckets are unknown to a hook"
        )
    settings = settings_of(compressor, options)
    adaptive = find_adaptive(settings.auto(), optimizer)
    trained_parameters(model)
    slot = take_slot(model)
    if slot.is_registered:
        raise ConfigError(
            "comm_hook: this model has Gradwire's hook already, which cannot be registered twice; "
            "gradwire.attach uses it again"
        )
    # Registered by the caller, who has to wait for this function to return.
    slot.is_registered = True
    try:
        attach_planned(model, settings, None, adaptive, process_group, scaler)
    except Exception:
        slot.is_registered = False
        raise
    check = RegistrationCheck(slot)
    check.handle = model.register_forward_pre_hook(check)
    return slot, ddp_hook


class RegistrationCheck:
    """Raises ConfigError in the first forward pass unless the hook was registered.

    Does nothing in a copy of the model.
    """

    def __init__(self, slot: HookSlot | None = None) -> None:
        self._slot = slot
        self.handle: RemovableHandle | None = None

    def __call__(self, model: DDP, *_: object) -> None:
        if self._slot is None or self._slot.link is None:
            return
        if not any(hook is ddp_hook and state is self._slot for hook, state in model._comm_hooks):
            raise ConfigError(
                "comm_hook: the hook is not registered with this model, so its gradients would not "
                "be compressed; call model.register_comm_hook(state, hook) with what comm_hook "
                "returned, before the first forward pass"
            )
        if self.handle is not None:
            self.handle.remove()

    def __reduce__(self) -> tuple[type["RegistrationCheck"], tuple[()]]:
        return RegistrationCheck, ()
