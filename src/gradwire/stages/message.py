"""The header of a message between two stages, and the message of a stage that has failed.

| int32 | content |
|---|---|
| 0 | `MAGIC` |
| 1 | kind: encoded, raw, or failed |
| 2, 3 | index of the setting, and of that in the next step |
| 4, 5 | step and micro-batch |
| 6 | bytes that follow, padding not included |
| 7 | checksum of the samples' numbers, 0 without any |

A message is padded to `LEAST_BYTES`. A failed stage sends its error as text in place of the bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.errors import ConfigError, GradwireError, PeerError, WireError

MAGIC = 0x67775001
HEADER_BYTES = 32
LEAST_BYTES = 256
"""The least length of a message, so that the error of a failed stage fits into any."""
ENCODED, RAW, BAD_SETTING, FAILED = 1, 2, 3, 4
_FAILURES = (BAD_SETTING, FAILED)
_WORD = 1 << 31


class Header(NamedTuple):
    """The fields that both ends of a boundary compare for every message."""

    kind: int
    setting: int
    next_setting: int
    step: int
    microbatch: int
    nbytes: int
    samples: int

    def same_place(self, other: "Header") -> bool:
        """Returns whether setting, step, micro-batch and samples agree."""
        return self._replace(nbytes=0, next_setting=0) == other._replace(nbytes=0, next_setting=0)


def message(header: Header, body: Tensor, nbytes: int) -> Tensor:
    """Returns header and body as one tensor of `nbytes` bytes, padded with zeros."""
    words = [MAGIC, *(_wrapped(word) for word in header)]
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=body.device)
    buffer[:HEADER_BYTES] = torch.tensor(words, dtype=torch.int32).view(torch.uint8).to(body.device)
    buffer[HEADER_BYTES : HEADER_BYTES + body.numel()] = body
    return buffer


def _wrapped(word: int) -> int:
    """Returns the number modulo 2^32 as an int32."""
    return (word + _WORD) % (2 * _WORD) - _WORD


def wrapped(header: Header) -> Header:
    """Returns the header as it arrives."""
    return Header(*(_wrapped(word) for word in header))


def room(nbytes: int, device: torch.device) -> Tensor:
    """Returns a buffer to receive a message into, without the header of an earlier one."""
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
    buffer[:HEADER_BYTES] = 0
    return buffer


def read(buffer: Tensor) -> tuple[Header, Tensor]:
    """Returns header and body of a message; raises the error of a stage that has failed."""
    if buffer.numel() < HEADER_BYTES:
        raise WireError(f"message of {buffer.numel()} bytes is shorter than its header")
    magic, *words = buffer[:HEADER_BYTES].clone().view(torch.int32).tolist()
    if magic != MAGIC:
        raise WireError(f"message between stages begins with {magic:#x}, expected {MAGIC:#x}")
    header = Header(*words)
    end = HEADER_BYTES + header.nbytes
    if not HEADER_BYTES <= end <= buffer.numel():
        raise WireError(
            f"message between stages announces {header.nbytes} bytes where at most "
            f"{buffer.numel() - HEADER_BYTES} were agreed"
        )
    body = buffer[HEADER_BYTES:end]
    if header.kind in _FAILURES:
        text = bytes(body.tolist()).decode(errors="replace")
        raise ConfigError(text) if header.kind == BAD_SETTING else PeerError(text)
    return header, body


def failure(error: BaseException, step: int, where: str, device: torch.device) -> Tensor:
    """Returns the message that reports an error, which is no longer than any other.

    A receiver that waits for a longer message accepts it, since gloo allows short ones.
    """
    kind = BAD_SETTING if isinstance(error, ConfigError) else FAILED
    text = str(error)
    if not isinstance(error, GradwireError):
        # Torch wraps what a stage raises into an error with all of its inputs.
        cause = error.__cause__ or error
        text = f"{where} failed: {type(cause).__name__}: {cause}"
    content = text.encode()[: LEAST_BYTES - HEADER_BYTES]
    body = torch.frombuffer(bytearray(content or b"?"), dtype=torch.uint8).to(device)
    header = Header(kind, 0, 0, step, 0, body.numel(), 0)
    return message(header, body, HEADER_BYTES + body.numel())
