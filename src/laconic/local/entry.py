"""What workers say aside: whether they are set up alike and equal, and what their mean is."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from laconic.comm.agree import compare, settings_call
from laconic.comm.base import Call, Conversation
from laconic.comm.drift import differences, digests_call
from laconic.errors import PeerError
from laconic.wire.layout import join, split


def held(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state: parameters, frozen ones too, and buffers that are saved.

    Complex ones as pairs of real numbers; all share their memory with the model.
    """
    tensors = {n: t.detach() for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    return {n: torch.view_as_real(t) if t.is_complex() else t for n, t in tensors.items()}


def agreed(size: int, device: torch.device, settings: Mapping[str, object]) -> Conversation[None]:
    """Raises ConfigError on all workers unless all have the same settings."""
    compare((yield settings_call(size, device, settings)))


def checked_same(tensors: Mapping[str, Tensor], size: int) -> Conversation[None]:
    """Raises PeerError on all workers, naming parameters and ranks, unless all have the same."""
    if not tensors:
        return
    lines = differences((yield digests_call(tensors, size)), tensors)
    if lines:
        text = "models differ at the start (load the same one, or give broadcast=True):"
        raise PeerError("\n".join([text, *lines]))


def copied_from_first(tensors: Mapping[str, Tensor]) -> Conversation[None]:
    """Gives all workers the tensors of worker 0."""
    for tensor in tensors.values():
        data = tensor.detach()
        [told] = yield Call("broadcast", [data.clone().contiguous().view(-1).view(torch.uint8)])
        data.copy_(told.view(data.dtype).view(data.shape))


def averaged(tensors: Mapping[str, Tensor]) -> Conversation[None]:
    """Replaces the tensors by their mean over all workers."""
    own = [tensor.detach() for tensor in tensors.values()]
    [mean] = yield Call("mean", [join(own).clone()])
    for tensor, its_mean in zip(own, split(mean, own), strict=True):
        tensor.copy_(its_mean)
