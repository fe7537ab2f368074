"""Codes of a bucket into the stream of bits and out of it (the format: docs/wire.md)."""

import numpy as np
from numpy.typing import NDArray

from laconic.kernels.cpu.jit import called

Bytes = NDArray[np.uint8]


@called
def pack_codes(codes: Bytes, out: Bytes, first: int, width: int) -> None:
    """Codes into the stream from the bit `first` on; where they fill no bytes, it must be zero."""
    if width == 8:
        target = out[first // 8 : first // 8 + codes.size]
        for i in range(codes.size):
            target[i] = codes[i]
    elif width == 4 and first % 8 == 0:
        half = codes.size // 2
        target = out[first // 8 : first // 8 + half]
        for i in range(half):
            target[i] = codes[2 * i] | np.uint8(codes[2 * i + 1] << np.uint8(4))
        if codes.size % 2:
            out[first // 8 + half] = codes[codes.size - 1]
    else:
        for i in range(codes.size):
            place, shift = (first + i * width) // 8, (first + i * width) % 8
            out[place] |= np.uint8(codes[i] << np.uint8(shift))
            if shift + width > 8:
                out[place + 1] |= np.uint8(codes[i] >> np.uint8(8 - shift))


@called
def unpack_codes(packed: Bytes, first: int, width: int, codes: Bytes) -> None:
    """The codes that begin at the bit `first` of the stream."""
    if width == 8:
        source = packed[first // 8 : first // 8 + codes.size]
        for i in range(codes.size):
            codes[i] = source[i]
    elif width == 4 and first % 8 == 0:
        half = codes.size // 2
        source = packed[first // 8 : first // 8 + half]
        for i in range(half):
            codes[2 * i] = source[i] & np.uint8(15)
            codes[2 * i + 1] = source[i] >> np.uint8(4)
        if codes.size % 2:
            codes[codes.size - 1] = packed[first // 8 + half] & np.uint8(15)
    else:
        mask = np.uint32((1 << width) - 1)
        for i in range(codes.size):
            place, shift = (first + i * width) // 8, (first + i * width) % 8
            pair = np.uint32(packed[place])
            if shift + width > 8:
                pair |= np.uint32(packed[place + 1]) << np.uint32(8)
            codes[i] = np.uint8((pair >> np.uint32(shift)) & mask)
