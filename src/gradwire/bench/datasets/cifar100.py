"""CIFAR-100 (Krizhevsky 2009) from its official binary version: train.bin and test.bin."""

from functools import cache
from pathlib import Path

import numpy as np
import torch

from gradwire.bench.datasets.cifar10 import SIDE, Images, ImageSplits
from gradwire.bench.datasets.source import Source

CIFAR100 = Source(
    "CIFAR-100",
    ("cifar-100-binary", "cifar100", "cifar-100"),
    "https://www.cs.toronto.edu/~kriz/cifar.html",
)
CLASSES = 100
_LABELS = 2
"""A row begins with its coarse class, of 20, and its fine class, which is the target."""
_ROW = _LABELS + 3 * SIDE * SIDE
_TRAINING, _TEST = 50_000, 10_000


@cache
def read_cifar100(
    folder: Path | None, device: str, training: int = _TRAINING, held_out: int = _TEST
) -> ImageSplits:
    return ImageSplits(
        _read_file(folder, "train.bin", training, device),
        _read_file(folder, "test.bin", held_out, device),
    )


def _read_file(folder: Path | None, name: str, images: int, device: str) -> Images:
    path = CIFAR100.find(folder, name)
    content = CIFAR100.read(path)
    CIFAR100.check_count(path, "bytes", len(content), images * _ROW)
    rows = np.frombuffer(content, np.uint8).reshape(images, _ROW)
    if (largest := rows[:, 1].max()) >= CLASSES:
        raise CIFAR100.file_error(path, f"has class {largest}, expected less than {CLASSES}")
    pixels = torch.from_numpy(rows[:, _LABELS:].copy()).to(device)
    classes = torch.from_numpy(rows[:, 1].astype(np.int64)).to(device)
    return Images(pixels.view(-1, 3, SIDE, SIDE), classes)
