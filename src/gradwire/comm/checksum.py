"""A CRC-32 behind every message, so that no flipped bit goes unnoticed.

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

CRC_BYTES = 8
"""Length of the CRC as sent, with zeros behind its 4 bytes.

A multiple of 8, so that messages that are received into one buffer are as aligned as without it: a
receiver may view them as words of up to 8 bytes.
"""


def with_checksum(collective: Collective) -> Collective:
    """Returns the collective with a CRC-32 appended to each of its messages."""
    if collective.kind == "mean":
        return collective
    return replace(
        collective,
        buffers=[_append_crc(buffer) for buffer in collective.buffers],
        sizes=_with_crc_bytes(collective.sizes),
        limits=_with_crc_bytes(collective.limits),
    )


def verified(collective: Collective, received: list[Tensor], rank: int) -> list[Tensor]:
    """Returns the messages without their CRC; raises WireError if one does not match.

    `rank` is this rank's number: a gather returns its own message too.
    """
    if collective.kind == "mean":
        return received
    sent = {rank: collective.buffers[0]} if collective.kind == "gather" else {}
    peers = range(len(received)) if collective.neighbors is None else collective.neighbors.sources
    return [
        _strip_crc(message, peer, sent.get(peer))
        for peer, message in zip(peers, received, strict=True)
    ]


def _with_crc_bytes(sizes: list[int] | None) -> list[int] | None:
    return None if sizes is None else [size + CRC_BYTES for size in sizes]


def _append_crc(buffer: Tensor) -> Tensor:
    data = buffer.view(torch.uint8)
    crc = _crc(data).to_bytes(CRC_BYTES, "little")
    return torch.cat([data, torch.frombuffer(bytearray(crc), dtype=torch.uint8)])


def _strip_crc(message: Tensor, rank: int, sent: Tensor | None) -> Tensor:
    data, crc = message[:-CRC_BYTES], message[-CRC_BYTES:]
    # Comparing with the sent message takes a quarter of the time of a CRC.
    if sent is not None and np.array_equal(message.numpy(), sent.numpy()):
        return data
    if _crc(data) != int.from_bytes(crc.numpy().tobytes(), "little"):
        raise WireError(f"the message of rank {rank} was corrupted: its CRC does not match")
    return data


def _crc(data: Tensor) -> int:
    # numpy's stubs do not declare that an array is a buffer.
    return crc32(data.numpy())  # type: ignore[arg-type]
