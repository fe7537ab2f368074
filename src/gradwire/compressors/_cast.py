"""Messages that are the tensor itself in a number format of their own."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import Fused
from gradwire.types import Field, Given, Layout, Parts, Turn


class Cast(Fused):
    """A number format: the author names it, the rest is the same for all."""

    dtype: ClassVar[torch.dtype]

    def layout(self, numel: int) -> Layout:
        return Layout((Field(self.dtype, numel),))

    def compress(self, x: Tensor, turn: Turn) -> Parts:
        return (kernels.at(x).cast_pack(x, self.dtype),)

    def take(self, given: Given, turn: Turn) -> Parts:
        x, residual, left, decay = given
        assert residual is not None
        assert left is not None
        return (kernels.at(x).cast_pack_sum(x, residual, decay, left, self.dtype),)

    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        kernels.at(out).cast_add(out, [values for (values,) in messages], weight)
