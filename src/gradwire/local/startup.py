"""Startup of a local method: whether all workers start equal.

Also broadcasts and averages the models of all workers.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.consistency import (
    compare_settings,
    describe_differences,
    digests_collective,
    settings_collective,
)
from gradwire.errors import PeerError
from gradwire.local.island import local_part
from gradwire.wire.layout import join, split


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of `model.state_dict()`: all parameters and the persistent buffers.

    Of sharded ones it returns this rank's part. Complex ones are viewed as pairs of real numbers;
    all share their memory with the model.
    """
    tensors = {n: local_part(t) for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    return {n: torch.view_as_real(t) if t.is_complex() else t for n, t in tensors.items()}


def check_settings(
    size: int, device: torch.device, settings: Mapping[str, object]
) -> CollectiveProgram[None]:
    """Raises ConfigError on all workers unless all have the same settings."""
    compare_settings((yield settings_collective(size, device, settings)))


def check_tensors(tensors: Mapping[str, Tensor], size: int) -> CollectiveProgram[None]:
    """Raises PeerError on all workers, naming parameters and ranks, unless tensors are equal."""
    if not tensors:
        return
    lines = describe_differences((yield digests_collective(tensors, size)), tensors)
    if lines:
        text = "models differ at the start (load the same one, or give broadcast=True):"
        raise PeerError("\n".join([text, *lines]))


def broadcast_tensors(tensors: Mapping[str, Tensor]) -> CollectiveProgram[None]:
    """Copies the tensors of worker 0 to all workers."""
    # A shard may be empty, on the same ranks of all islands.
    for data in (tensor.detach() for tensor in tensors.values() if tensor.numel()):
        [received] = yield Collective(
            "broadcast", [data.clone().contiguous().view(-1).view(torch.uint8)]
        )
        data.copy_(received.view(data.dtype).view(data.shape))


def average_tensors(tensors: Mapping[str, Tensor]) -> CollectiveProgram[None]:
    """Replaces the tensors by their mean over all workers."""
    own = [tensor.detach() for tensor in tensors.values() if tensor.numel()]
    if not own:
        return
    [mean] = yield Collective("mean", [join(own).clone()])
    for tensor, its_mean in zip(own, split(mean, own), strict=True):
        tensor.copy_(its_mean)
