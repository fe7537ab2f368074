"""EF-SignSGD: one bit an element and one number a tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.contract import OneRound, Traits
from laconic.types import Field, Layout, Parts, Turn
from laconic.wire.bits import packed_numel


@dataclass(frozen=True)
class EFSign(OneRound):
    """Sends the signs, and the mean magnitude as their scale.

    The squared error is |x|² - |x|₁²/n: a contraction, and a good one where magnitudes are alike.
    Zero counts as positive; the residual takes that back.
    """

    examples: ClassVar = ({},)
    family: ClassVar = "quantisation"
    paper: ClassVar = "Karimireddy et al. 2019, arXiv:1901.09847"

    def traits(self) -> Traits:
        return Traits(contraction=True)

    def layout(self, numel: int) -> Layout:
        return Layout((Field(torch.uint8, packed_numel(numel, 1)), Field(torch.float32, 1)))

    def compress(self, x: Tensor, turn: Turn) -> Parts:
        return kernels.at(x).sign_pack(x)

    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        bits = torch.stack([bits for bits, _ in messages])
        scales = torch.cat([scale for _, scale in messages]) * weight
        kernels.at(out).sign_add(out, bits, scales)
