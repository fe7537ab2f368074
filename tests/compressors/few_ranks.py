"""A few simulated ranks with one lane each, and numbers that are exact in every format."""

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
        way: str,
        shape: Sequence[int],
        *,
        size: int = 2,
        seed: int = 0,
    ) -> None:
        codec = parse(method) if isinstance(method, str) else method
        contexts = [EncodeContext(tuple(shape), rank, size, seed) for rank in range(size)]
        self.lanes = open_lanes(codec, memory, way, contexts)
        self.network = Simulated(size)

    def step(self, *grads: Tensor) -> Tensor:
        """The mean that rank 0 receives; all ranks receive the same, or it is an error."""
        return mean_of(self.network, self.lanes, grads)

    def residual(self, rank: int = 0) -> Tensor:
        return self.lanes[rank].memory_state["residual"].view(self.lanes[rank].ctx.shape)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def eighths(numel: int) -> Tensor:
    """Multiples of 1/8 from -8 to 8 in a fixed disorder: exact in every format and every sum.

    Any 128 neighbours have 8 as their largest magnitude.
    """
    return (torch.arange(numel) * 37 % 129 - 64) / 8


def said(codec: Compressor, x: Tensor, ctx: EncodeContext | None = None) -> Tensor:
    """What comes out of one message about `x`."""
    return codec.decode(codec.encode(x, ctx))


def squared_error(x: Tensor, out: Tensor) -> float:
    """Relative to the squared norm."""
    x, out = x.double(), out.double()
    return float((x - out).square().sum() / x.square().sum())


def wire_hash(codec: OneRound, x: Tensor) -> str:
    """The first 8 hexadecimal digits of the packed message's SHA-256."""
    payload = codec.encode(x)
    packed = pack([payload.parts], [codec.layout(x.numel())])
    return sha256(packed.numpy().tobytes()).hexdigest()[:8]


def bits_an_element(codec: Compressor, x: Tensor) -> float:
    return 8 * codec.encode(x).nbytes / x.numel()


def with_entry(x: Tensor, place: int, value: float) -> Tensor:
    """The same with another value at one place."""
    changed = x.clone()
    changed.view(-1)[place] = value
    return changed
