"""A few simulated ranks with one lane each, and numbers that are exact in every format."""

import math
from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor

from gradwire.base import Compressor, OneRound
from gradwire.comm.simulated import Simulated
from gradwire.spec import parse
from gradwire.types import EncodeContext
from gradwire.wire.layout import pack
from lockstep import mean_of, open_lanes

CPU = torch.device("cpu")


class Ranks:
    """The lanes of one parameter on `size` ranks, without a plan in between."""

    def __init__(
        self,
        method: Compressor | str,
        memory: str,
        exchange_name: str,
        shape: Sequence[int],
        *,
        size: int = 2,
        seed: int = 0,
    ) -> None:
        codec = parse(method) if isinstance(method, str) else method
        contexts = [EncodeContext(tuple(shape), rank, size, seed) for rank in range(size)]
        self.lanes = open_lanes(codec, memory, exchange_name, contexts)
        self.network = Simulated(size)

    def step(self, *grads: Tensor) -> Tensor:
        """Returns the mean on rank 0, and asserts that all ranks have the same."""
        return mean_of(self.network, self.lanes, grads)

    def residual(self, rank: int = 0) -> Tensor:
        return self.lanes[rank].memory_state["residual"].view(self.lanes[rank].ctx.shape)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def eighths(numel: int) -> Tensor:
    """Returns shuffled multiples of 1/8 from -8 to 8: exact in every format and every sum.

    Any 128 consecutive entries have 8 as their largest magnitude.
    """
    return (torch.arange(numel) * 37 % 129 - 64) / 8


def roundtrip(codec: Compressor, x: Tensor, ctx: EncodeContext | None = None) -> Tensor:
    """Encodes and decodes `x`."""
    return codec.decode(codec.encode(x, ctx))


def squared_error(x: Tensor, out: Tensor) -> float:
    """Returns the squared error relative to the squared norm."""
    x, out = x.double(), out.double()
    return float((x - out).square().sum() / x.square().sum())


def wire_hash(codec: OneRound, x: Tensor) -> str:
    """Returns the first 8 hexadecimal digits of the packed message's SHA-256."""
    payload = codec.encode(x)
    packed = pack([payload.parts], [codec.layout(x.numel())])
    return sha256(packed.numpy().tobytes()).hexdigest()[:8]


def bits_per_entry(codec: Compressor, x: Tensor) -> float:
    return 8 * codec.encode(x).nbytes / x.numel()


def selection_bits(numel: int, count: int) -> float:
    """Returns the entropy of a selection of `count` entries: log2 of the binomial coefficient."""
    log = math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)
    return log / math.log(2)


def with_entry(x: Tensor, place: int, value: float) -> Tensor:
    """Returns a copy with another value at one position."""
    changed = x.clone()
    changed.view(-1)[place] = value
    return changed
