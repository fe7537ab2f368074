"""Grey pictures of 8 bits in PNG, which is what the data sets need."""

import struct
import zlib

import numpy as np

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def read_gray(content: bytes) -> np.ndarray:
    """The bytes of a grey picture, [rows, columns]; ValueError says what is wrong with another."""
    if content[:8] != _SIGNATURE:
        raise ValueError("is no PNG picture")
    chunks = _chunks(content)
    columns, rows, *form = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    if form != [8, 0, 0, 0, 0]:
        raise ValueError("is no PNG picture of grey levels of 8 bits, not interlaced")
    try:
        lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8)
    except zlib.error as error:
        raise ValueError(f"cannot be unpacked: {error}") from error
    if len(lines) != rows * (columns + 1):
        raise ValueError(f"has {len(lines)} bytes of pixels, expected {rows * (columns + 1)}")
    return _unfiltered(lines.reshape(rows, columns + 1))


def _chunks(content: bytes) -> dict[bytes, bytes]:
    """The content of each kind of chunk, joined; the last one ends the file."""
    chunks = {b"IHDR": b"", b"IDAT": b""}
    at = 8
    while b"IEND" not in chunks:
        size, kind = struct.unpack_from(">I4s", content.ljust(at + 8, b"\0"), at)
        if at + 12 + size > len(content):
            raise ValueError(f"ends after {len(content)} bytes, in the middle of the picture")
        chunks[kind] = chunks.get(kind, b"") + content[at + 8 : at + 8 + size]
        at += 12 + size
    if len(chunks[b"IHDR"]) != 13:
        raise ValueError("has no header")
    return chunks


def _unfiltered(lines: np.ndarray) -> np.ndarray:
    """The pixels; each line says by its first byte from which neighbours it was predicted."""
    picture = np.zeros((len(lines), lines.shape[1] - 1), np.uint8)
    above = np.zeros(lines.shape[1] - 1, np.uint8)
    for row, (how, line) in enumerate(zip(lines[:, 0], lines[:, 1:], strict=True)):
        if how == 0:
            above = line
        elif how == 1:
            above = np.cumsum(line, dtype=np.uint8)
        elif how == 2:
            above = above + line
        elif how == 3:
            above = _averaged(line.tolist(), above.tolist())
        elif how == 4:
            above = _paeth(line.tolist(), above.tolist())
        else:
            raise ValueError(f"has an unknown filter {how} in line {row}")
        picture[row] = above
    return picture


def _averaged(line: list[int], above: list[int]) -> np.ndarray:
    left, pixels = 0, bytearray()
    for delta, up in zip(line, above, strict=True):
        left = (delta + (left + up) // 2) & 255
        pixels.append(left)
    return np.frombuffer(pixels, np.uint8)


def _paeth(line: list[int], above: list[int]) -> np.ndarray:
    """Of left, above and above left, the guess is the nearest to left + above - above left."""
    left = corner = 0
    pixels = bytearray()
    for delta, up in zip(line, above, strict=True):
        to_left, to_up, to_corner = (
            abs(up - corner),
            abs(left - corner),
            abs(left + up - 2 * corner),
        )
        if to_left <= to_up and to_left <= to_corner:
            guess = left
        else:
            guess = up if to_up <= to_corner else corner
        left, corner = (delta + guess) & 255, up
        pixels.append(left)
    return np.frombuffer(pixels, np.uint8)
