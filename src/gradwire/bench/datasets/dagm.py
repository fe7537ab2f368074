"""DAGM 2007, class 1 (Wieler and Hahn): textures, some with a defect, and masks of the defects.

Reads the competition's folders, Class1/Train and Class1/Test with NNNN.PNG and their masks
Label/NNNN_label.PNG, or dagm_class1_256.npz: defect and free (bytes [images, 256, 256]) and mask
(bits, packed along the rows). All defective images are used, and as many without a defect. The
images are PNGs of 8 bit grey, which `read_gray` decodes.
"""

import struct
import zlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.bench.datasets.sampling import random_integers, uniform_noise
from gradwire.bench.datasets.source import Source

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def read_gray(content: bytes) -> np.ndarray:
    """Decodes a PNG of 8 bit grey to [rows, columns]; raises ValueError for any other file."""
    if content[:8] != _SIGNATURE:
        raise ValueError("is not a PNG image")
    chunks = _chunks(content)
    columns, rows, *form = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    if form != [8, 0, 0, 0, 0]:
        raise ValueError("is not a PNG of 8 bit grey without interlacing")
    try:
        lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8)
    except zlib.error as error:
        raise ValueError(f"cannot be unpacked: {error}") from error
    if len(lines) != rows * (columns + 1):
        raise ValueError(f"has {len(lines)} bytes of pixels, expected {rows * (columns + 1)}")
    return _undo_filters(lines.reshape(rows, columns + 1))


def _chunks(content: bytes) -> dict[bytes, bytes]:
    """Returns the content of every chunk type, joined, up to the end chunk."""
    chunks = {b"IHDR": b"", b"IDAT": b""}
    at = 8
    while b"IEND" not in chunks:
        size, kind = struct.unpack_from(">I4s", content.ljust(at + 8, b"\0"), at)
        if at + 12 + size > len(content):
            raise ValueError(f"ends after {len(content)} bytes, in the middle of a chunk")
        chunks[kind] = chunks.get(kind, b"") + content[at + 8 : at + 8 + size]
        at += 12 + size
    if len(chunks[b"IHDR"]) != 13:
        raise ValueError("has no header")
    return chunks


def _undo_filters(lines: np.ndarray) -> np.ndarray:
    """Undoes the prediction of pixels; the first byte of every line names its filter."""
    picture = np.zeros((len(lines), lines.shape[1] - 1), np.uint8)
    above = np.zeros(lines.shape[1] - 1, np.uint8)
    for row, (filter_type, line) in enumerate(zip(lines[:, 0], lines[:, 1:], strict=True)):
        if filter_type == 0:
            above = line
        elif filter_type == 1:
            above = np.cumsum(line, dtype=np.uint8)
        elif filter_type == 2:
            above = above + line
        elif filter_type == 3:
            above = _undo_average(line.tolist(), above.tolist())
        elif filter_type == 4:
            above = _undo_paeth(line.tolist(), above.tolist())
        else:
            raise ValueError(f"has an unknown filter {filter_type} in line {row}")
        picture[row] = above
    return picture


def _undo_average(line: list[int], above: list[int]) -> np.ndarray:
    left, pixels = 0, bytearray()
    for delta, up in zip(line, above, strict=True):
        left = (delta + (left + up) // 2) & 255
        pixels.append(left)
    return np.frombuffer(pixels, np.uint8)


def _undo_paeth(line: list[int], above: list[int]) -> np.ndarray:
    """Undoes Paeth: predicts left, up or corner, whichever is nearest to left + up - corner."""
    left = corner = 0
    pixels = bytearray()
    for delta, up in zip(line, above, strict=True):
        to_left, to_up, to_corner = (
            abs(up - corner),
            abs(left - corner),
            abs(left + up - 2 * corner),
        )
        if to_left <= to_up and to_left <= to_corner:
            predicted = left
        else:
            predicted = up if to_up <= to_corner else corner
        left, corner = (delta + predicted) & 255, up
        pixels.append(left)
    return np.frombuffer(pixels, np.uint8)


DAGM = Source(
    "DAGM 2007 class 1",
    ("dagm2007-class1", "DAGM", "DAGM2007"),
    "https://hci.iwr.uni-heidelberg.de/content/"
    "weakly-supervised-learning-industrial-optical-inspection",
)
SIDE = 256
_DEFECTS = 150
_HELD_OUT = 5  # one image in 5
_SYNTHETIC, _SYNTHETIC_SIDE = 40, 32


class Textures(NamedTuple):
    """Grey levels as bytes, [images, 1, side, side], and masks of the defects, as 0 and 1."""

    pixels: Tensor
    masks: Tensor


class TextureSplits(NamedTuple):
    training: Textures
    held_out: Textures


@cache
def read_dagm(folder: Path | None, device: str, defects: int = _DEFECTS) -> TextureSplits:
    path = DAGM.find(folder, "dagm_class1_256.npz", "Class1/Train")
    pixels, masks = _read_folders(path.parent) if path.is_dir() else _read_archive(path)
    DAGM.check_count(path, "defective images", len(masks), defects)
    masks = np.concatenate([masks, np.zeros_like(masks)])  # images without a defect come last
    both = (torch.from_numpy(array)[:, None].to(device) for array in (pixels, masks))
    return _split(Textures(*both))


@cache
def synthetic_dagm(device: str) -> TextureSplits:
    """Makes noise images, the first half of them with a bright square as defect."""
    shape = (_SYNTHETIC, 1, _SYNTHETIC_SIDE, _SYNTHETIC_SIDE)
    corner = random_integers(_SYNTHETIC_SIDE * 2 // 3, 2 * _SYNTHETIC, device, 8).view(2, -1, 1)
    place = torch.arange(_SYNTHETIC_SIDE, device=device)
    down, across = (place >= corner) & (place < corner + _SYNTHETIC_SIDE // 3)
    masks = (down[:, None, :, None] & across[:, None, None, :]).to(torch.uint8)
    masks[_SYNTHETIC // 2 :] = 0
    pixels = 100 + 30 * uniform_noise(shape, device, 9) + 60 * masks
    return _split(Textures(pixels.clamp(0, 255).to(torch.uint8), masks))


def _split(textures: Textures) -> TextureSplits:
    pixels, masks = textures
    held_out = torch.arange(len(pixels), device=pixels.device) % _HELD_OUT == 0
    return TextureSplits(
        Textures(pixels[~held_out], masks[~held_out]), Textures(pixels[held_out], masks[held_out])
    )


def _read_archive(path: Path) -> tuple[np.ndarray, np.ndarray]:
    arrays = DAGM.read_arrays(path, "defect", "free", "mask")
    count = len(arrays["defect"])
    shapes = {"defect": (count, SIDE, SIDE), "mask": (count, SIDE, SIDE // 8)}
    for name, shape in (shapes | {"free": (len(arrays["free"]), SIDE, SIDE)}).items():
        if arrays[name].shape != shape or arrays[name].dtype != np.uint8:
            raise DAGM.file_error(path, f"has a {name} of shape {arrays[name].shape}, not {shape}")
    if len(arrays["free"]) < count:
        raise DAGM.file_error(path, f"has {count} images with a defect, but fewer without one")
    masks = np.unpackbits(arrays["mask"], axis=-1)
    return np.concatenate([arrays["defect"], arrays["free"][:count]]), masks


def _read_folders(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads images with a mask, then as many without, evenly spaced; and the masks."""
    masks = sorted(folder.glob("T*/Label/*_label.PNG"))
    defective = [mask.parents[1] / mask.name.replace("_label", "") for mask in masks]
    free = sorted(set(folder.glob("T*/*.PNG")) - set(defective))
    if not masks or len(free) < len(masks):
        counts = f"{len(masks)} masks and {len(free)} images without a defect"
        raise DAGM.file_error(folder, f"has {counts}")
    free = [free[place * len(free) // len(masks)] for place in range(len(masks))]
    pixels = np.stack([_read_image(path) for path in [*defective, *free]])
    return pixels, np.stack([(_read_image(path) > 0).astype(np.uint8) for path in masks])


def _read_image(path: Path) -> np.ndarray:
    """Reads an image at half its size: means of four pixels."""
    content = DAGM.read(path)
    try:
        pixels = read_gray(content)
    except ValueError as error:
        raise DAGM.file_error(path, str(error)) from error
    if pixels.shape != (2 * SIDE, 2 * SIDE):
        raise DAGM.file_error(path, f"has {pixels.shape} pixels, expected {(2 * SIDE, 2 * SIDE)}")
    blocks = pixels.reshape(SIDE, 2, SIDE, 2).astype(np.uint16)
    return np.asarray((blocks.sum((1, 3)) + 2) // 4, np.uint8)
