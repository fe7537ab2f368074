"""CIFAR-10 (Krizhevsky 2009) from its official binary version or its official Python version.

The Python version consists of pickles, which could run any code. A restricted unpickler reads
them: it provides stand-ins for the few names that the official files use, and nothing else.
"""

import io
import pickle
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from gradwire.bench.datasets.sampling import random_integers, uniform_noise
from gradwire.bench.datasets.source import Source

CIFAR10 = Source(
    "CIFAR-10",
    ("cifar-10-batches-bin", "cifar-10-batches-py", "cifar10", "cifar-10"),
    "https://www.cs.toronto.edu/~kriz/cifar.html",
)
SIDE = 32
CLASSES = 10
_PIXELS = 3 * SIDE * SIDE
_IN_A_FILE = 10_000
_TRAINING = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = "test_batch"
_SYNTHETIC = 640


class Images(NamedTuple):
    """Pixels as bytes, [images, 3, 32, 32], and the class index of each image."""

    pixels: Tensor
    classes: Tensor


class ImageSplits(NamedTuple):
    training: Images
    held_out: Images


@cache
def read_cifar10(folder: Path | None, device: str, in_a_file: int = _IN_A_FILE) -> ImageSplits:
    parts = [_read_file(folder, name, in_a_file) for name in (*_TRAINING, _TEST)]
    rows = torch.from_numpy(np.stack(parts)).to(device)
    return ImageSplits(_images(rows[:-1].flatten(0, 1)), _images(rows[-1]))


@cache
def synthetic_images(device: str, class_count: int = CLASSES) -> ImageSplits:
    """Makes images of blurred random patterns, one per class, with added noise."""
    noise = uniform_noise((class_count, 3, 4, 4), device, 1)
    patterns = interpolate(noise, size=SIDE, mode="bilinear")
    classes = random_integers(class_count, _SYNTHETIC, device, 2)
    noisy = patterns[classes] + uniform_noise((_SYNTHETIC, 3, SIDE, SIDE), device, 3) / 2
    pixels = (128 + 40 * noisy).clamp(0, 255).to(torch.uint8)
    cut = _SYNTHETIC * 4 // 5
    return ImageSplits(Images(pixels[:cut], classes[:cut]), Images(pixels[cut:], classes[cut:]))


def _images(rows: Tensor) -> Images:
    return Images(rows[:, 1:].reshape(-1, 3, SIDE, SIDE), rows[:, 0].long())


def _read_file(folder: Path | None, name: str, images: int) -> np.ndarray:
    """Reads rows of a class and its pixels, in the layout of the binary version."""
    path = CIFAR10.find(folder, f"{name}.bin", name)
    content = CIFAR10.read(path)
    if path.suffix != ".bin":
        return _read_pickle(path, content, images)
    CIFAR10.check_count(path, "bytes", len(content), images * (1 + _PIXELS))
    return _checked(path, np.frombuffer(content, np.uint8).reshape(images, 1 + _PIXELS))


def _read_pickle(path: Path, content: bytes, images: int) -> np.ndarray:
    try:
        batch = _RestrictedUnpickler(io.BytesIO(content), encoding="bytes").load()
        pixels, classes = batch[b"data"].content, bytes(batch[b"labels"])
    except Exception as error:  # a broken pickle may raise anything
        why = f"is not a batch of the Python version: {type(error).__name__}: {error}"
        raise CIFAR10.file_error(path, why) from error
    CIFAR10.check_count(path, "classes", len(classes), images)
    CIFAR10.check_count(path, "bytes of pixels", len(pixels), images * _PIXELS)
    columns = np.frombuffer(classes, np.uint8), np.frombuffer(pixels, np.uint8)
    return _checked(path, np.column_stack([columns[0], columns[1].reshape(images, _PIXELS)]))


def _checked(path: Path, rows: np.ndarray) -> np.ndarray:
    if rows[:, 0].max() >= CLASSES:
        raise CIFAR10.file_error(
            path, f"has class {rows[:, 0].max()}, expected less than {CLASSES}"
        )
    return rows


class _Array:
    """Stands in for a numpy array of bytes; stores the pickled state and executes nothing."""

    content = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, _, dtype, fortran, content = state
        if dtype.code not in (b"u1", "u1") or fortran or not isinstance(content, bytes):
            raise pickle.UnpicklingError("the pixels are not bytes in C order")
        self.content = content


class _Dtype:
    """Stands in for numpy's dtype."""

    def __init__(self, code: bytes | str, *flags: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        return


def _array(*shape: object) -> _Array:
    return _Array()


def _latin1(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _latin1,
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"requests {module}.{name}, which is not allowed")
        return _STAND_INS[module, name]
