"""A CRC behind every message, so that no flipped bit goes unnoticed.

Networks have checksums of their own, but they are weak, and memory and drivers have none. Sums that
are formed on the way (a mean) cannot carry one.
"""

from dataclasses import replace
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from gradwire.comm.base import Collective
from gradwire.errors import WireError

CRC_BYTES = 4


def sealed(call: Collective) -> Collective:
    """The call with a CRC-32 behind each of its messages."""
    if call.kind == "mean":
        return call
    return replace(
        call,
        buffers=[_seal(buffer) for buffer in call.buffers],
        sizes=_longer(call.sizes),
        limits=_longer(call.limits),
    )


def opened(call: Collective, answers: list[Tensor], own: int) -> list[Tensor]:
    """The messages without their CRC; raises WireError where one does not fit.

    `own` is this rank's number: what it told all ranks has come back to it, too.
    """
    if call.kind == "mean":
        return answers
    told = {own: call.buffers[0]} if call.kind == "gather" else {}
    return [_open(answer, rank, told.get(rank)) for rank, answer in enumerate(answers)]


def _longer(sizes: list[int] | None) -> list[int] | None:
    return None if sizes is None else [size + CRC_BYTES for size in sizes]


def _seal(buffer: Tensor) -> Tensor:
    data = buffer.view(torch.uint8)
    crc = _crc(data).to_bytes(CRC_BYTES, "little")
    return torch.cat([data, torch.frombuffer(bytearray(crc), dtype=torch.uint8)])


def _open(sealed: Tensor, rank: int, told: Tensor | None) -> Tensor:
    data, crc = sealed[:-CRC_BYTES], sealed[-CRC_BYTES:]
    # A quarter of the time of a CRC.
    if told is not None and np.array_equal(sealed.numpy(), told.numpy()):
        return data
    if _crc(data) != int.from_bytes(crc.numpy().tobytes(), "little"):
        raise WireError(f"the message of rank {rank} was changed on the way: its CRC does not fit")
    return data


def _crc(data: Tensor) -> int:
    # numpy's stubs do not say that an array is a buffer.
    return crc32(data.numpy())  # type: ignore[arg-type]
