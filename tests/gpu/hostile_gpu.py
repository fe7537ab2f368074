"""Hostile messages for the decoders on a GPU; meant to be run under compute-sanitizer.

    PYTHONPATH=src compute-sanitizer --error-exitcode 9 python tests/gpu/hostile_gpu.py [messages]

A failed check on the GPU is a device assertion, after which the process cannot use the GPU any
more. So messages whose content the CPU refuses are not sent to it (`--refused` sends just one such
message, and must fail). All others, with any codes, scales and positions in range, are decoded on
both, and wrong lengths are refused by both. A position that a message repeats counts once or twice
on a GPU, so such a message is decoded there, but the result is not compared.
"""

import random
import sys
from collections import Counter
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from gradwire.base import OneRound
from gradwire.bench.fuzz.mutate import ANY_LENGTH
from gradwire.bench.fuzz.targets import DECODE, NUMELS, DecoderTarget, all_specs, cases_of
from gradwire.errors import WireError
from gradwire.kernels import cpu
from gradwire.spec import parse
from gradwire.types import EncodeContext
from gradwire.wire.layout import unpack


class PositionCheck:
    """Detects repeated positions when the CPU checks them."""

    def __init__(self) -> None:
        self.repeated = False
        self._fits = cpu.index_fits

    def fits(self, packed: Tensor, low: int, bits: int, count: int, numel: int) -> Tensor:
        """Returns the result of the CPU's own check."""
        fits = self._fits(packed, low, bits, count, numel)
        if fits and (cpu.unpack_index(packed, low, bits, count).diff() <= 0).any():
            self.repeated = True
        return fits


def check_message(
    codec: OneRound, target: DecoderTarget, positions: PositionCheck, rng: random.Random
) -> str:
    """Decodes one message on both devices; returns the outcome, or raises AssertionError."""
    positions.repeated = False
    point = rng.choice(target.points)
    mutation = rng.choice(ANY_LENGTH)
    message = mutation(point.message.numpy(), rng.choice(target.points).message.numpy(), rng)
    buffer = torch.from_numpy(message.copy())
    numel = NUMELS[point.call]
    layout = codec.layout(numel)
    try:
        expected = target.receive(point, buffer)
    except WireError:
        try:
            unpack(buffer, [layout._replace(check=None)])
        except WireError:
            return check_refused(buffer, codec, numel)
        return "not sent to the GPU"
    out = target._starts[point.call].cuda()
    codec.decode_add(
        out, unpack(buffer.cuda(), [layout]), 0.5, EncodeContext((numel,), 1, 2, step=1)
    )
    if positions.repeated:
        return "repeated positions"
    comparable = expected.isfinite() & (expected.abs() < 1e30)
    torch.testing.assert_close(out.cpu()[comparable], expected[comparable], rtol=1e-3, atol=1e-4)
    return "decoded"


def check_refused(buffer: torch.Tensor, codec: OneRound, numel: int) -> str:
    try:
        unpack(buffer.cuda(), [codec.layout(numel)])
    except WireError:
        return "refused"
    raise AssertionError("the GPU accepts a message of a length that the CPU refuses")


def send_bad_positions() -> None:
    """Decodes positions outside the tensor, which the check on the GPU must stop."""
    codec = parse("topk:ratio=0.1")
    assert isinstance(codec, OneRound)
    point = DecoderTarget(codec).points[0]
    unpack(torch.full_like(point.message, 255).cuda(), [codec.layout(NUMELS[0])])
    torch.cuda.synchronize()


def main(messages: int) -> None:
    specs = [spec for spec in all_specs() if cases_of(spec)[0].exchange == DECODE]
    counts: Counter[str] = Counter()
    positions = PositionCheck()
    with patch.object(cpu, "index_fits", positions.fits):
        for spec in specs:
            codec = parse(spec)
            assert isinstance(codec, OneRound)
            check = partial(check_message, codec, DecoderTarget(codec), positions, random.Random(0))
            counts.update(check() for _ in range(-(-messages // len(specs))))
    torch.cuda.synchronize()
    print(f"{len(specs)} methods and pipelines: {dict(counts)}")


if __name__ == "__main__":
    if "--refused" in sys.argv:
        send_bad_positions()
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
