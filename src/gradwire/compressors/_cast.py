"""Messages that are the tensor itself in a number format of their own."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import FusedOneRound
from gradwire.types import EFInput, EncodeContext, Field, Layout, Parts


class Cast(FusedOneRound):
    """A number format: the author names it, the rest is the same for all."""

    dtype: ClassVar[torch.dtype]

    def layout(self, numel: int) -> Layout:
        return Layout((Field(self.dtype, numel),))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        return (kernels.at(x).cast_pack(x, self.dtype),)

    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        x, residual, residual_out, decay = ef
        assert residual is not None
        assert residual_out is not None
        return (kernels.at(x).cast_pack_sum(x, residual, decay, residual_out, self.dtype),)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        kernels.at(out).cast_add(out, [values for (values,) in messages], weight)
