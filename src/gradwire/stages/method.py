"""Methods for one tensor between two stages, and its encoding as bytes of a length known before."""

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.base import Compressor, OneRound
from gradwire.errors import ConfigError, WireError
from gradwire.spec import compressor_of, format_spec
from gradwire.types import EncodeContext, Layout
from gradwire.wire.layout import (
    count_variable,
    max_packed_bytes,
    pack,
    packed_bytes,
    unpack,
)

Direction: TypeAlias = Literal["activations", "gradients"]
DIRECTIONS: tuple[Direction, ...] = ("activations", "gradients")

_USUAL_NUMEL = 1 << 16
"""Number of entries of a tensor by which a method is judged before the shapes are known."""


class Form(NamedTuple):
    """Shape and type of a tensor that travels between two stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.shape} of {str(self.dtype).removeprefix('torch.')}"


def stage_method(direction: Direction, given: Compressor | str) -> OneRound:
    """Returns the method of a spec or an instance; raises ConfigError if it does not apply here.

    A message goes from one stage to the next, which knows its length beforehand, and there is no
    later message about the same tensor that could repair its error.
    """
    method = compressor_of(given)
    reason = _refusal(method)
    if reason is not None:
        raise ConfigError(f"attach_pipeline: {direction}: {format_spec(method)} {reason}")
    assert isinstance(method, OneRound)
    return method


def _refusal(method: Compressor) -> str | None:
    if not isinstance(method, OneRound):
        return "has rounds or state of its own; between stages each message must stand alone"
    traits = method.traits()
    if traits.is_vote:
        return "sends votes, whose majority needs several ranks; a stage has one sender"
    if traits.accumulates:
        return "collects a residual until it is worth sending; there is none between stages"
    longest = max_packed_bytes([method.layout(_USUAL_NUMEL)])
    if longest > 4 * _USUAL_NUMEL:
        return (
            "sends messages whose length only the sender knows; padded to the longest they take "
            f"{longest / (4 * _USUAL_NUMEL):.1f} times the bytes of the tensor"
        )
    return None


def sends_raw(method: OneRound, form: Form) -> bool:
    """Returns whether a tensor is sent as it lies in memory: the method is exact, or no float."""
    return method.traits().exact or not form.dtype.is_floating_point


def body_bytes(method: OneRound, form: Form) -> int:
    """Returns the length of a message without its header, padded if only the sender knows it."""
    return form.nbytes if sends_raw(method, form) else max_packed_bytes([method.layout(form.numel)])


def encode(method: OneRound, x: Tensor, ctx: EncodeContext) -> Tensor:
    """Returns the bytes of `x`, whose entries are encoded as float32."""
    flat = x.detach().to(torch.float32).reshape(-1).contiguous()
    return pack([method.compress(flat, ctx)], [method.layout(flat.numel())])


def decode(method: OneRound, body: Tensor, ctx: EncodeContext) -> Tensor:
    """Returns the decoded float32 tensor; raises WireError if the bytes are no such message."""
    layout = method.layout(ctx.numel)
    [parts] = unpack(_trimmed(body, layout), [layout])
    out = torch.zeros(ctx.numel, device=body.device)
    method.decode_add(out, [parts], 1.0, ctx)
    return out.view(ctx.shape)


def _trimmed(body: Tensor, layout: Layout) -> Tensor:
    """Returns the bytes without what follows a message of fixed length."""
    return body if count_variable([layout]) else body[: packed_bytes(None, [layout])]


def raw(x: Tensor) -> Tensor:
    """Returns the bytes of a tensor as it lies in memory."""
    return x.detach().reshape(-1).contiguous().view(torch.uint8)


def from_raw(body: Tensor, form: Form) -> Tensor:
    """Returns the tensor whose bytes these are; raises WireError if there are too few or many."""
    if body.numel() != form.nbytes:
        raise WireError(f"message of {body.numel()} bytes where {form} takes {form.nbytes}")
    return body.clone().view(form.dtype).view(form.shape)
