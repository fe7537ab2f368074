"""Quantizers: methods that send a code of a few bits per entry and one scale per bucket."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import FusedOneRound, memoized
from gradwire.kernels.specs import RoundingSpec
from gradwire.types import EFInput, EncodeContext, Field, Layout, Parts
from gradwire.wire.bits import bucket_count, packed_numel
from gradwire.wire.layout import as_rows


class Quantizer(FusedOneRound):
    """Base class of methods that a `RoundingSpec` describes; kernels encode in one pass."""

    @abstractmethod
    def rounding_spec(self) -> RoundingSpec: ...

    @memoized
    def layout(self, numel: int) -> Layout:
        spec = self.rounding_spec()
        codes = Field(torch.uint8, packed_numel(numel, spec.width))
        return Layout((codes, Field(_wire_type(spec), bucket_count(numel, spec.bucket))))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        spec = self.rounding_spec()
        codes, scales = kernels.on(x.device).round_pack(x, spec, ctx.own_key())
        return codes, scales.to(_wire_type(spec))

    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        x, residual, residual_out, decay = ef
        assert residual is not None and residual_out is not None  # noqa: PT018
        spec, key = self.rounding_spec(), ctx.own_key()
        codes, scales = kernels.on(x.device).round_pack_sum(
            x, residual, decay, residual_out, spec, key
        )
        return codes, scales.to(_wire_type(spec))

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        codes = as_rows([codes for codes, _ in messages])
        scales = as_rows([scales for _, scales in messages]).to(torch.float32)
        kernels.on(out.device).round_add(out, codes, scales, weight, self.rounding_spec())


def _wire_type(spec: RoundingSpec) -> torch.dtype:
    return torch.bfloat16 if spec.scale == "max16" else torch.float32
