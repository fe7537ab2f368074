"""EF-SignSGD: one bit per entry and one number per tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import FusedOneRound, Traits, memoized
from gradwire.types import EFInput, EncodeContext, Field, Layout, Parts
from gradwire.wire.bits import packed_numel
from gradwire.wire.layout import as_rows


@dataclass(frozen=True)
class EFSign(FusedOneRound):
    """Sends the signs, and the mean magnitude as their scale.

    The squared error is |x|² - |x|₁²/n: a contraction, and a good one where magnitudes are similar.
    Zero counts as positive; the residual corrects that. A tensor of zeros decodes to zeros; NaN or
    infinity anywhere makes all entries non-finite. (In a pipeline `sign` offers other scales.)
    """

    examples: ClassVar = ({},)
    family: ClassVar = "quantisation"
    paper: ClassVar = "Karimireddy et al. 2019, arXiv:1901.09847"
    message: ClassVar = "n bits (1 = negative), scale as float32"

    @memoized
    def traits(self) -> Traits:
        return Traits(contraction=True, propagates_nonfinite=True)

    @memoized
    def layout(self, numel: int) -> Layout:
        return Layout((Field(torch.uint8, packed_numel(numel, 1)), Field(torch.float32, 1)))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        return kernels.on(x.device).sign_pack(x)

    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        x, residual, residual_out, decay = ef
        assert residual is not None and residual_out is not None  # noqa: PT018
        return kernels.on(x.device).sign_pack_sum(x, residual, decay, residual_out)

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        bits, scales = (as_rows(parts) for parts in zip(*messages, strict=True))
        kernels.on(out.device).sign_add(out, bits, scales, weight)
