"""Methods that round each entry to a code of a few bits and send one scale a bucket of entries."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import FusedOneRound
from gradwire.kernels.specs import RoundingSpec
from gradwire.types import EFInput, EncodeContext, Field, Layout, Parts
from gradwire.wire.bits import bucket_count, packed_numel
from gradwire.wire.layout import as_rows


class Quantizer(FusedOneRound):
    """A method whose rule says it all: the kernels do the rest in one pass over memory."""

    @abstractmethod
    def rule(self) -> RoundingSpec: ...

    def layout(self, numel: int) -> Layout:
        rule = self.rule()
        codes = Field(torch.uint8, packed_numel(numel, rule.width))
        return Layout((codes, Field(_wire_type(rule), bucket_count(numel, rule.bucket))))

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        rule = self.rule()
        codes, scales = kernels.at(x).round_pack(x, rule, ctx.own_key())
        return codes, scales.to(_wire_type(rule))

    def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
        x, residual, residual_out, decay = ef
        assert residual is not None and residual_out is not None  # noqa: PT018
        rule, key = self.rule(), ctx.own_key()
        codes, scales = kernels.at(x).round_pack_sum(x, residual, decay, residual_out, rule, key)
        return codes, scales.to(_wire_type(rule))

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        codes = as_rows([codes for codes, _ in messages])
        scales = as_rows([scales for _, scales in messages]).to(torch.float32)
        kernels.at(out).round_add(out, codes, scales, weight, self.rule())


def _wire_type(rule: RoundingSpec) -> torch.dtype:
    return torch.bfloat16 if rule.scale == "max16" else torch.float32
