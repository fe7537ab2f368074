"""Casts: methods that send the tensor itself in another number format.

The functions work on a `torch.dtype`, so that other families can send their values in a number
format without knowing a method.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import FusedOneRound, memoized
from gradwire.types import EFInput, EncodeContext, Field, Layout, Parts


def cast_layout(dtype: torch.dtype, numel: int) -> Layout:
    """Returns the layout of a message of `numel` numbers."""
    return Layout((Field(dtype, numel),))


def cast_values(x: Tensor, dtype: torch.dtype) -> Parts:
    """Returns the message of `x`: each entry rounded to the nearest number of `dtype`."""
    return (kernels.on(x.device).cast_pack(x, dtype),)


class Cast(FusedOneRound):
    """Base class of casts: a subclass sets `dtype` and writes `traits`."""

    dtype: ClassVar[torch.dtype]
    message: ClassVar = "n numbers"

    @memoized
    def layout(self, numel: int) -> Layout:
        return cast_layout(self.dtype, numel)

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        return cast_values(x, self.dtype)

    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        x, residual, residual_out, decay = ef
        assert residual is not None
        assert residual_out is not None
        return (kernels.on(x.device).cast_pack_sum(x, residual, decay, residual_out, self.dtype),)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        kernels.on(out.device).cast_add(out, [values for (values,) in messages], weight)
