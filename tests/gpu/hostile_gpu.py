"""Hostile messages for the decoders of the card; made to be run under compute-sanitizer.

    PYTHONPATH=src compute-sanitizer --error-exitcode 9 python tests/gpu/hostile_gpu.py [messages]

A card's message is checked by the card, which then stops for good, so what the CPU refuses for what
it says is kept from it here (`--refused` sends just one such message, and must fail). All else, any
codes, scales and positions in range, is decoded on both, and lengths are refused by both. Entries
that a message tells twice count once or twice on a card, so such a message is decoded there, but
what comes out is not compared.
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
from gradwire.bench.fuzz.targets import DECODE, NUMELS, Decoder, all_specs, cases_of
from gradwire.errors import WireError
from gradwire.kernels import cpu
from gradwire.spec import parse
from gradwire.types import EncodeContext
from gradwire.wire.layout import unpack


class Positions:
    """Looks at positions when the CPU checks them."""

    def __init__(self) -> None:
        self.repeat = False
        self._fits = cpu.index_fits

    def fits(self, packed: Tensor, low: int, bits: int, count: int, numel: int) -> Tensor:
        """What the CPU's own check says."""
        fits = self._fits(packed, low, bits, count, numel)
        if fits and (cpu.unpack_index(packed, low, bits, count).diff() <= 0).any():
            self.repeat = True
        return fits


def agrees(codec: OneRound, target: Decoder, positions: Positions, dice: random.Random) -> str:
    """Sends one message to both; what became of it, or an AssertionError."""
    positions.repeat = False
    place = dice.choice(target.places)
    mutation = dice.choice(ANY_LENGTH)
    message = mutation(place.said.numpy(), dice.choice(target.places).said.numpy(), dice)
    buffer = torch.from_numpy(message.copy())
    numel = NUMELS[place.call]
    layout = codec.layout(numel)
    try:
        expected = target.hears(place, buffer)
    except WireError:
        try:
            unpack(buffer, [layout._replace(check=None)])
        except WireError:
            return refused(buffer, codec, numel)
        return "kept from the card"
    out = target._starts[place.call].cuda()
    codec.decode_add(
        out, unpack(buffer.cuda(), [layout]), 0.5, EncodeContext((numel,), 1, 2, step=1)
    )
    if positions.repeat:
        return "told twice"
    good = expected.isfinite() & (expected.abs() < 1e30)
    torch.testing.assert_close(out.cpu()[good], expected[good], rtol=1e-3, atol=1e-4)
    return "decoded"


def refused(buffer: torch.Tensor, codec: OneRound, numel: int) -> str:
    try:
        unpack(buffer.cuda(), [codec.layout(numel)])
    except WireError:
        return "refused"
    raise AssertionError("the card takes a message of a length that the CPU refuses")


def send_bad_positions() -> None:
    """What the card's own check must stop: positions that point outside the tensor."""
    codec = parse("topk:ratio=0.1")
    assert isinstance(codec, OneRound)
    place = Decoder(codec).places[0]
    unpack(torch.full_like(place.said, 255).cuda(), [codec.layout(NUMELS[0])])
    torch.cuda.synchronize()


def main(messages: int) -> None:
    specs = [spec for spec in all_specs() if cases_of(spec)[0].exchange == DECODE]
    counts: Counter[str] = Counter()
    positions = Positions()
    with patch.object(cpu, "index_fits", positions.fits):
        for spec in specs:
            codec = parse(spec)
            assert isinstance(codec, OneRound)
            send = partial(agrees, codec, Decoder(codec), positions, random.Random(0))
            counts.update(send() for _ in range(-(-messages // len(specs))))
    torch.cuda.synchronize()
    print(f"{len(specs)} methods and pipelines: {dict(counts)}")


if __name__ == "__main__":
    if "--refused" in sys.argv:
        send_bad_positions()
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
