"""Methods that round each entry to a code of a few bits and send one scale a bucket of entries."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.base import Fused
from gradwire.kernels.specs import Rule
from gradwire.types import Field, Given, Layout, Parts, Turn
from gradwire.wire.bits import bucket_count, packed_numel
from gradwire.wire.layout import as_rows


class Rounded(Fused):
    """A method whose rule says it all: the kernels do the rest in one pass over memory."""

    @abstractmethod
    def rule(self) -> Rule: ...

    def layout(self, numel: int) -> Layout:
        rule = self.rule()
        codes = Field(torch.uint8, packed_numel(numel, rule.width))
        return Layout((codes, Field(_wire_type(rule), bucket_count(numel, rule.bucket))))

    def compress(self, x: Tensor, turn: Turn) -> Parts:
        rule = self.rule()
        codes, scales = kernels.at(x).round_pack(x, rule, turn.own_key())
        return codes, scales.to(_wire_type(rule))

    def take(self, given: Given, turn: Turn) -> Parts:
        x, residual, left, decay = given
        assert residual is not None and left is not None  # noqa: PT018
        rule, key = self.rule(), turn.own_key()
        codes, scales = kernels.at(x).round_pack_sum(x, residual, decay, left, rule, key)
        return codes, scales.to(_wire_type(rule))

    def add_to(self, out: Tensor, messages: Sequence[Parts], weight: float, turn: Turn) -> None:
        codes = as_rows([codes for codes, _ in messages])
        scales = as_rows([scales for _, scales in messages]).to(torch.float32)
        kernels.at(out).round_add(out, codes, scales, weight, self.rule())


def _wire_type(rule: Rule) -> torch.dtype:
    return torch.bfloat16 if rule.scale == "max16" else torch.float32
