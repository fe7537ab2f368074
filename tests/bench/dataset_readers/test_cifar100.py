"""CIFAR-100 is read from its official binary files."""

from pathlib import Path

import numpy as np
import pytest

from gradwire.bench.datasets.cifar100 import read_cifar100
from gradwire.bench.workloads.base import parse_workload
from gradwire.errors import ConfigError

ROWS = np.random.default_rng(0).integers(0, 20, (5, 3074), dtype=np.uint8)


def write(folder: Path, rows: np.ndarray = ROWS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.bin").write_bytes(rows[:3].tobytes())
    (folder / "test.bin").write_bytes(rows[3:].tobytes())


def test_the_fine_class_is_the_target(tmp_path: Path) -> None:
    write(tmp_path / "cifar-100-binary")
    training, held_out = read_cifar100(tmp_path, "cpu", 3, 2)
    assert training.classes.tolist() == ROWS[:3, 1].tolist()
    assert held_out.pixels[1, 2, 3, 4] == ROWS[4, 2 + 2 * 1024 + 3 * 32 + 4]


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=r"train.bin has 9,222 bytes, the official file 12,296"):
        read_cifar100(tmp_path, "cpu", 4, 2)
    rows = ROWS.copy()
    rows[4, 1] = 100
    write(tmp_path, rows)
    with pytest.raises(ConfigError, match=r"test.bin has class 100, expected less than 100"):
        read_cifar100(tmp_path, "cpu", 3, 2)


def test_image_workloads_take_either_set() -> None:
    assert parse_workload("vgg16:images=cifar100").title == "VGG-16 on CIFAR-100"
    net = parse_workload("resnet9-tiny:images=cifar100")
    batch = net.batch(0, 0, 2, 0)
    assert net.build()(batch.inputs).shape == (net.batch_size, 100)
    with pytest.raises(ConfigError, match="images must be one of"):
        parse_workload("resnet9:images=mnist")
