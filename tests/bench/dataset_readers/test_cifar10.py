import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from gradwire.bench.datasets.cifar10 import read_cifar10
from gradwire.bench.workloads._images import Epoch, _augmented, _normalized
from gradwire.errors import ConfigError

NAMES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
IMAGES = 3
ROWS = np.random.default_rng(0).integers(0, 10, (len(NAMES), IMAGES, 3073), dtype=np.uint8)


def write_binary(folder: Path) -> None:
    for name, rows in zip(NAMES, ROWS, strict=True):
        (folder / f"{name}.bin").write_bytes(rows.tobytes())


def write_pickles(folder: Path) -> None:
    """Writes pickles like Python 2 and an old numpy, where a module had another name."""
    for name, rows in zip(NAMES, ROWS, strict=True):
        batch = {b"batch_label": b"a batch", b"labels": rows[:, 0].tolist(), b"data": rows[:, 1:]}
        text = pickle.dumps(batch, protocol=2)
        (folder / name).write_bytes(text.replace(b"numpy._core", b"numpy.core"))


def test_both_official_versions_hold_the_same(tmp_path: Path) -> None:
    binary, python = tmp_path / "a", tmp_path / "b" / "cifar-10-batches-py"
    binary.mkdir()
    python.mkdir(parents=True)
    write_binary(binary)
    write_pickles(python)
    training, held_out = read_cifar10(binary, "cpu", IMAGES)
    assert training.pixels.shape == (5 * IMAGES, 3, 32, 32)
    assert training.classes.tolist() == ROWS[:5, :, 0].flatten().tolist()
    assert held_out.pixels[1, 2, 3, 4] == ROWS[5, 1, 1 + 2 * 1024 + 3 * 32 + 4]
    other = read_cifar10(python.parent, "cpu", IMAGES)
    for ours, theirs in zip((*training, *held_out), (*other[0], *other[1]), strict=True):
        assert torch.equal(ours, theirs)


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_3.bin", None, "no data_batch_3.bin or data_batch_3 in "),
        ("data_batch_3.bin", b"\0" * 9000, "has 9,000 bytes, the official file 9,219"),
        ("test_batch.bin", b"\x0b" * 3 * 3073, "has class 11, expected less than 10"),
        ("data_batch_1", pickle.dumps({b"data": Evil()}), "requests posix.mkdir, which is not"),
        ("data_batch_1", pickle.dumps({b"data": 7}), "is not a batch of the Python version: "),
        ("data_batch_1", b"", "is not a batch of the Python version: EOFError"),
        (
            "data_batch_1",
            pickle.dumps({b"data": np.zeros((3, 3072)), b"labels": [0] * 3}, protocol=2),
            "the pixels are not bytes in C order",
        ),
        (
            "data_batch_1",
            pickle.dumps({b"data": ROWS[0, :2, 1:], b"labels": [0] * 3}, protocol=2),
            "has 6,144 bytes of pixels, the official file 9,216",
        ),
    ],
)
def test_a_bad_file_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes | None,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_binary(tmp_path)
    (tmp_path / name).with_suffix(".bin").unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_cifar10(tmp_path, "cpu", IMAGES)
    error = str(caught.value)
    assert error.startswith("CIFAR-10: ")
    assert name in error
    assert message in error
    assert error.endswith("from https://www.cs.toronto.edu/~kriz/cifar.html")
    assert not (tmp_path / "evil").exists()


def test_an_image_is_shifted_within_a_black_frame_and_flipped() -> None:
    pixels = torch.arange(2 * 3072).remainder(251).to(torch.uint8).view(2, 3, 32, 32)
    epoch = Epoch(
        order=torch.tensor([0, 1]),
        flip=torch.tensor([False, True]),
        top=torch.tensor([4, 6]),
        left=torch.tensor([4, 1]),
    )
    first, second = _augmented(pixels, epoch)
    assert torch.equal(first, _normalized(pixels[0]))
    # 2 rows up, 3 columns to the right, then mirrored.
    moved = torch.zeros_like(pixels[1])
    moved[:, :30, 3:] = pixels[1, :, 2:, :29]
    assert torch.equal(second, _normalized(moved.flip(2)))
