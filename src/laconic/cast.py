"""Messages that are the tensor itself in a number format of their own."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from laconic.contract import OneRound
from laconic.types import Field, Layout, Parts, Turn


class Cast(OneRound):
    """A number format: the author says how to round into it, the rest is the same for all."""

    dtype: ClassVar[torch.dtype]

    def layout(self, numel: int) -> Layout:
        return Layout((Field(self.dtype, numel),))

    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        for (values,) in messages:
            # Adding numbers of another type directly is several times slower.
            out.add_(values.to(out.dtype), alpha=weight)
